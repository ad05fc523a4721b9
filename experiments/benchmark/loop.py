"""What a verification round costs: our loop beside PyPI's `dflash` 0.1.0 and transformers' own DFlash path.

All read one drafter in z-lab's layout, each has a copy of one target, another one in each run, and they take turns in
random order, so that the machine's drift hits them alike. Target and drafter are random and small, so that much of a
round is the loop; the drafter has learnt from the measured texts, so that some drafts are accepted. A round lasts from
one forward of the target to the next.

    pip install --no-deps dflash==0.1.0
    python experiments/benchmark loop
    python experiments/benchmark loop --device cuda --dtype bfloat16 --hidden-size 1024 --layers 12
"""

from __future__ import annotations

import argparse
import copy
import datetime
import functools
import importlib.util
import os
import platform
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy
from transformers import DynamicCache, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from hf_hyperdflash import HyperDFlashDrafter, load_drafter
from hf_hyperdflash.hub.formats import export_dflash
from hf_hyperdflash.targets.caches.name import CACHE

Loop = Callable[[torch.Tensor, int], torch.Tensor]  # a prompt `[1, seq]` and how many new tokens, to the text


@dataclass
class Rival:
    """One loop under measurement.

    Attributes:
        texts: Of every call.
        rounds: Per call: what each round fed the target, the anchor and its drafts.
        seconds: Per call: of each round.
        whole: Per call: of all of it.
    """

    name: str
    target: PreTrainedModel
    loop: Loop
    texts: list[list[int]] = field(default_factory=list)
    rounds: list[list[list[int]]] = field(default_factory=list)
    seconds: list[list[float]] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=6, help="of the target, at least 5")
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--vocab-size", type=int, default=4096)
    parser.add_argument("--block-size", type=int, default=8)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--prompts", type=int, default=4, help="of 16, 32, 48, .. tokens")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--steps", type=int, default=170, help="of the drafter's training")
    parser.add_argument("--runs", type=int, default=8, help="over all prompts, after one that is not counted")
    return parser.parse_args()


def random_target(arguments: argparse.Namespace) -> PreTrainedModel:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=arguments.vocab_size, hidden_size=arguments.hidden_size, num_hidden_layers=arguments.layers,
        intermediate_size=3 * arguments.hidden_size, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
        tie_word_embeddings=False, initializer_range=0.1, bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return Qwen3ForCausalLM(config).eval()


def trained_drafter(
    target: PreTrainedModel, prompts: list[torch.Tensor], arguments: argparse.Namespace
) -> HyperDFlashDrafter:
    """A drafter that z-lab's layout has words for, trained for a moment on what the target writes after `prompts`."""
    target = copy.deepcopy(target)  # to ask for hidden states leaves hooks, which would slow every loop down
    block_size, mask, layers = arguments.block_size, 1, [1, arguments.layers // 2, arguments.layers - 2]
    drafter = HyperDFlashDrafter.from_target(
        target, num_hidden_layers=2, num_draft_tokens=block_size - 1, mask_token_id=mask, target_layer_ids=layers
    )
    texts = [target.generate(ids, max_new_tokens=arguments.max_new_tokens, do_sample=False) for ids in prompts]
    with torch.no_grad():
        states = [target(text, output_hidden_states=True).hidden_states for text in texts]
    residuals = [torch.stack([of_text[i + 1] for i in layers], dim=2) for of_text in states]
    optimizer, draw = torch.optim.AdamW(drafter.parameters(), lr=1e-3), random.Random(0)
    for _ in range(arguments.steps):
        loss = torch.zeros(())
        for prompt, text, residual in zip(prompts, texts, residuals):
            anchor = draw.randrange(prompt.shape[1], text.shape[1] - block_size + 1)
            block, at = text[:, anchor : anchor + block_size].clone(), torch.arange(anchor + block_size)[None]
            block[:, 1:] = mask
            hidden = drafter(
                target.get_input_embeddings()(block).detach(), at[:, anchor:], residual=residual[:, :anchor],
                residual_position_ids=at[:, :anchor],
            )  # fmt: skip
            logits = target.get_output_embeddings()(hidden[0, 1:])
            loss = loss + cross_entropy(logits, text[0, anchor + 1 : anchor + block_size])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return drafter


def our_loop(target: PreTrainedModel, folder: Path) -> Loop:
    drafter = load_drafter(folder).to(target.device, target.dtype)
    drafter.bind(target)
    return lambda ids, count: target.generate(ids, assistant_model=drafter, max_new_tokens=count, do_sample=False)


def our_loop_into_a_cache(target: PreTrainedModel, folder: Path) -> Loop:
    """Where the caller keeps what the rounds compute: without inference mode, in which dflash's always runs."""
    drafter = load_drafter(folder).to(target.device, target.dtype)
    drafter.bind(target)
    return lambda ids, count: target.generate(
        ids, assistant_model=drafter, max_new_tokens=count, do_sample=False, **{CACHE: DynamicCache()}
    )


def loop_of_dflash(target: PreTrainedModel, folder: Path) -> Loop:
    from dflash.model import DFlashDraftModel, dflash_generate

    config = Qwen3Config.from_pretrained(folder)
    config.num_target_layers = target.config.num_hidden_layers  # asked for, although its layers are named
    drafter = DFlashDraftModel.from_pretrained(folder, config=config, dtype=target.dtype).to(target.device).eval()
    return lambda ids, count: dflash_generate(drafter, target, ids, count, stop_token_ids=None)


def loop_of_transformers(target: PreTrainedModel, folder: Path) -> Loop:
    from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel

    # The one drafter that it has is z-lab's, two of whose tensors it calls otherwise.
    fields = Qwen3Config.from_pretrained(folder).to_dict()
    fields |= {**fields["dflash_config"], "layer_types": ["full_attention"] * fields["num_hidden_layers"]}
    config = MuseGlimmerAssistantConfig()
    for name in config.to_dict().keys() & fields.keys() - {"architectures", "dtype", "model_type", "sliding_window"}:
        setattr(config, name, fields[name])
    drafter, weights = MuseGlimmerAssistantModel(config), load_file(folder / "model.safetensors")
    names = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
    drafter.load_state_dict({names.get(name, name): weight for name, weight in weights.items()})
    drafter = drafter.to(target.device, target.dtype).eval()
    return lambda ids, count: target.generate(
        ids, assistant_model=drafter, speculation_type="dflash", max_new_tokens=count, do_sample=False
    )


def line_up(target: PreTrainedModel, folder: Path) -> tuple[list[Rival], list[str]]:
    """The loops that can run here, ours first, and why others cannot."""
    loops, absent = {"ours": our_loop, "ours, into its caller's cache": our_loop_into_a_cache}, []
    if importlib.util.find_spec("dflash"):
        loops["dflash 0.1.0"] = loop_of_dflash
    else:
        absent.append("dflash is not installed: `pip install --no-deps dflash==0.1.0`")
    if hasattr(transformers, "MuseGlimmerAssistantModel"):
        loops["transformers' DFlash"] = loop_of_transformers
    else:
        absent.append(f"transformers {transformers.__version__} has no DFlash path")
    targets = [copy.deepcopy(target) for _ in loops]
    return [Rival(name, own, loop(own, folder)) for own, (name, loop) in zip(targets, loops.items())], absent


def take_turn(rival: Rival, prompt: torch.Tensor, count: int) -> None:
    began, fed, forward = [], [], rival.target.forward

    def timed(*args: Any, **kwargs: Any) -> Any:
        began.append(clock(prompt))
        fed.append((args[0] if args else kwargs["input_ids"])[0])
        return forward(*args, **kwargs)

    rival.target.forward = functools.update_wrapper(timed, forward)  # not a hook, which might keep what it sees
    started = clock(prompt)
    text = rival.loop(prompt, count)
    ended = clock(prompt)
    del rival.target.forward
    rival.texts.append(text[0].tolist())
    rival.rounds.append([ids.tolist() for ids in fed[1:]])
    rival.seconds.append([end - begin for begin, end in zip(began[1:], [*began[2:], ended])])
    rival.whole.append(ended - started)


def clock(ids: torch.Tensor) -> float:
    """Seconds: the processor's on a CPU, where the clock would count other programs too."""
    if ids.device.type == "cpu":
        return time.process_time()
    torch.accelerator.synchronize()
    return time.perf_counter()


def report(rivals: list[Rival], absent: list[str], expected: list[list[int]], arguments: argparse.Namespace) -> None:
    device = (
        torch.cuda.get_device_name() if arguments.device.startswith("cuda") else f"{platform.machine()} CPU seconds"
    )
    cores = f"{os.cpu_count()} cores, {torch.get_num_threads()} threads"
    print(f"{datetime.date.today()}, {platform.platform()}, {device}, {cores}")
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {arguments.dtype}")
    print(f"{arguments.layers} layers, width {arguments.hidden_size}, drafter 2 layers, block {arguments.block_size}")
    print(f"{arguments.prompts} prompts, {arguments.max_new_tokens} new tokens each, {arguments.runs} runs\n")
    print("| loop | text | rounds | tau | same drafts | round ms | ours / its round | ours / its whole call |")
    print("|---|---|---|---|---|---|---|---|")
    runs = [slice(i, i + arguments.prompts) for i in range(0, arguments.runs * arguments.prompts, arguments.prompts)]
    own = rivals[0]
    for rival in rivals:
        pairs = [pair for ours, its in zip(own.rounds, rival.rounds) for pair in zip(ours, its)]
        same = sum(ours[: len(its)] == its[: len(ours)] for ours, its in pairs) / len(pairs)
        rounds = sum(map(len, rival.rounds[: arguments.prompts]))
        tau = arguments.prompts * (arguments.max_new_tokens - 1) / rounds  # the prompt's forward has a token too
        own_rounds, its_rounds = (
            [statistics.median(chain(*one.seconds[run])) for run in runs] for one in (own, rival)
        )
        own_whole, its_whole = ([sum(one.whole[run]) for run in runs] for one in (own, rival))
        cells = [
            rival.name,
            "the target's" if rival.texts == expected * arguments.runs else "ANOTHER",
            f"{rounds} | {tau:.2f} | {same:.1%} | {statistics.median(its_rounds) * 1e3:.2f}",
            spread(own_rounds, its_rounds),
            spread(own_whole, its_whole),
        ]
        print(f"| {' | '.join(cells)} |")
    for why in absent:
        print(f"\n{why}.")


def spread(own: list[float], its: list[float]) -> str:
    ratios = [a / b for a, b in zip(own, its)]
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    transformers.logging.set_verbosity_error()
    target, order = random_target(arguments), random.Random(0)
    prompts = [torch.randint(2, arguments.vocab_size, (1, 16 * (i + 1))) for i in range(arguments.prompts)]
    drafter = trained_drafter(target, prompts, arguments)
    drafter, target = (model.to(arguments.device, getattr(torch, arguments.dtype)) for model in (drafter, target))
    prompts = [prompt.to(arguments.device) for prompt in prompts]
    options = dict(max_new_tokens=arguments.max_new_tokens, do_sample=False)
    expected = [target.generate(prompt, **options)[0].tolist() for prompt in prompts]
    with TemporaryDirectory() as folder:
        export_dflash(drafter, folder)
        rivals, absent = line_up(target, Path(folder))
        for _ in range(arguments.runs):
            # Copies of its own for each run: where in memory weights lie changes a round by some per cent.
            for rival, anew in zip(rivals, line_up(target, Path(folder))[0]):
                rival.target, rival.loop = anew.target, anew.loop
                rival.loop(prompts[0], arguments.max_new_tokens)
            for prompt in prompts:
                for rival in order.sample(rivals, len(rivals)):
                    take_turn(rival, prompt, arguments.max_new_tokens)
    report(rivals, absent, expected, arguments)
