"""What other programs draft from a checkpoint and what ours does: PyPI's `dflash`, `speculators` and DeepSpec.

Both ways: ours loads what theirs saved, theirs loads what ours wrote. In every round both draft after the same text,
greedily and, at temperature 1, drawn with the same numbers from what each says the probabilities are. dflash's and
DeepSpec's rounds are those of their own loops; speculators, which trains, has none: its rounds are the positions of a
text, and what it drafts there is its training forward along our drafts. Target and drafters are random and small.

    pip install --no-deps dflash==0.1.0
    pip install speculators==0.9.0
    git clone https://github.com/deepseek-ai/DeepSpec && export PYTHONPATH=$PWD/DeepSpec
    python experiments/compare_layouts.py
"""

from __future__ import annotations

import argparse
import importlib.util
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import transformers
from measured import circumstances
from torch import Tensor
from transformers import DynamicCache, LogitsProcessorList, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from hf_hyperdflash import HyperDFlashDrafter, load_drafter
from hf_hyperdflash.decoding.bind import capture_residual
from hf_hyperdflash.drafters.sampling import DraftSampler
from hf_hyperdflash.hub.formats import export_dflash
from hf_hyperdflash.targets.registry import target_of
from hf_hyperdflash.trees.acceptance import one_of

WIDTH, LAYERS, BLOCK, MASK, RANK, VOCABULARY, DRAFTED = 64, 6, 5, 1, 8, 96, 40
READ = [1, 2, 4]  # the target's layers whose output the drafters read
SHAPE = dict(
    vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=512, tie_word_embeddings=False, pad_token_id=0,
    bos_token_id=None, eos_token_id=None,
)  # fmt: skip
HEADS = {"vanilla": "markov", "gated": "gated_markov", "rnn": "recurrent"}
# Layers of two kinds, in Qwen3's words and, where a window counts from the anchor, in ours.
MIXED = dict(layer_types=["sliding_attention", "full_attention"], sliding_window=6, use_sliding_window=True)
OURS = {name: MIXED[name] for name in ("layer_types", "sliding_window")}


@dataclass
class Round:
    """What a program drafted after a text.

    Attributes:
        ids: The text, `[1, seq]`.
        tokens: The drafts.
        numbers: That they were drawn with; none greedily.
        q: `[drafts, vocab]`, what they were drawn from, where that is told.
        confidence: `[drafts]`, of each draft's acceptance, where that is told.
    """

    ids: Tensor
    tokens: list[int]
    numbers: list[float]
    q: Tensor | None = None
    confidence: Tensor | None = None


class Draws:
    """`torch.multinomial` or our `one_of` with numbers that are remembered: the first token at which the probabilities
    add up to more."""

    def __init__(self, numbers: list[float] | None = None) -> None:
        self.given, self.used, self.source = iter(numbers or ()), [], random.Random(0)

    def __call__(self, probabilities: Tensor, num_samples: int = 1, **_: Any) -> Tensor:
        rows = probabilities.double().reshape(-1, probabilities.shape[-1])
        numbers = [next(self.given, self.source.random()) for _ in rows]
        self.used += numbers
        tokens = (rows.cumsum(-1) <= torch.tensor(numbers)[:, None].double()).sum(-1).clamp(max=rows.shape[1] - 1)
        return tokens.reshape(*probabilities.shape[:-1], 1)


def randomized(model: Any, seed: int) -> Any:
    """With weights of its own, none of them as a fresh model has it; what it shares with the target stays."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "embed_tokens" not in name and "lm_head" not in name and "verifier" not in name:
            noise = torch.randn(parameter.shape, generator=generator)
            is_norm = parameter.ndim == 1 and "bias" not in name
            parameter.data.copy_(1 + 0.3 * noise if is_norm else noise / parameter.shape[-1] ** 0.5)
    return model.eval()


def random_target() -> PreTrainedModel:
    torch.manual_seed(0)
    config = Qwen3Config(**{**SHAPE, "num_hidden_layers": LAYERS}, initializer_range=0.2)
    return Qwen3ForCausalLM(config).eval()


@torch.no_grad()
def our_round(drafter: Any, target: PreTrainedModel, ids: Tensor, count: int, draws: Draws | None) -> Round:
    """Ours after a text, from the start."""
    with capture_residual(target, drafter.target_layer_ids) as captured:
        target(ids[:, :-1])
    context, positions = drafter.new_context(), torch.arange(ids.shape[1])[None]
    drafter.extend(target_of(target), context, captured[0], positions[:, :-1], ids[:, 1:])
    sampler = DraftSampler(LogitsProcessorList(), draws is not None)
    with patch("hf_hyperdflash.drafters.sampling.one_of", draws or one_of):
        tree = drafter.propose(target_of(target), context, ids, positions, count, sampler)
    q = None if draws is None else torch.stack(tree.q)
    return Round(ids, tree.tokens.tolist(), draws.used if draws else [], q, tree.confidence)


# PyPI's dflash


def dflash_config(windows: dict[str, Any]) -> Qwen3Config:
    own = {"mask_token_id": MASK, "target_layer_ids": READ, "block_size": BLOCK, "conv_kernel_size": 2}
    own |= {"conv_group_size": 16, "selector_rank": RANK, "selector_top_k": 16}
    return Qwen3Config(**SHAPE, num_target_layers=LAYERS, dflash_config=own, **windows)


def save_with_dflash(windows: dict[str, Any], folder: Path, _: Path, target: PreTrainedModel) -> None:
    from dflash.model import DFlash2DraftModel

    randomized(DFlash2DraftModel(dflash_config(windows)), 1).save_pretrained(folder)


def rounds_of_dflash(folder: Path, target: PreTrainedModel, prompt: Tensor, tokens: int, T: float) -> list[Round]:
    from dflash.model import DFlash2DraftModel, dflash_generate

    model, draws, seen = DFlash2DraftModel.from_pretrained(folder, dtype=torch.float32).eval(), Draws(), []
    propose, topk = model.propose, torch.topk

    def in_order(values: Tensor, count: int, **_: Any) -> tuple[Tensor, Tensor]:
        """Candidates by their ids, an order that `sorted=False` leaves open: draws then mean the same tokens."""
        ids = topk(values, count, dim=-1).indices.sort(dim=-1).values
        return values.gather(-1, ids), ids

    def telling(*args: Any) -> Any:
        before = len(draws.used)
        with patch("torch.topk", in_order):
            drafted, candidates, said = propose(*args)
        q = None if said is None else torch.zeros(*said.shape[1:2], VOCABULARY).scatter(-1, candidates[0], said[0])
        seen.append(Round(torch.empty(0), drafted[0].tolist(), draws.used[before:], q))
        return drafted, candidates, said

    starts = []

    def verifying(module: object, args: tuple, kwargs: dict) -> None:
        starts.append(int(kwargs["position_ids"][0, 0]))

    handle = target.register_forward_pre_hook(verifying, with_kwargs=True)
    model.propose = telling
    with patch("torch.multinomial", draws):
        text = dflash_generate(model, target, prompt, tokens, stop_token_ids=None, temperature=T)
    handle.remove()
    for start, one in zip(starts[1:], seen):
        one.ids = text[:, : start + 1]
    return [one for one in seen if len(one.tokens) == BLOCK - 1]  # at a text's end it cuts the block


# speculators


def speculators_model(algorithm: str, target_folder: Path, windows: dict[str, Any], **fields: Any) -> Any:
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.models.dflash2 import DFlash2DraftModel, DFlash2SpeculatorConfig
    from speculators.models.dspark import DSparkDraftModel, DSparkSpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    classes = {
        "dspark": (DSparkDraftModel, DSparkSpeculatorConfig),
        "dflash2": (DFlash2DraftModel, DFlash2SpeculatorConfig),
    }
    model_class, config_class = classes[algorithm]
    layers = Qwen3Config(**SHAPE, **windows)
    layers._attn_implementation = "eager"
    config = config_class(
        transformer_layer_config=layers, block_size=BLOCK, mask_token_id=MASK,
        aux_hidden_state_layer_ids=[i + 1 for i in READ],
        **{"draft_vocab_size": VOCABULARY, **fields},
        speculators_config=SpeculatorsConfig(
            algorithm=algorithm, proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=BLOCK - 1)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=str(target_folder), architectures=["Qwen3ForCausalLM"]),
        ),
    )  # fmt: skip
    return model_class(config)


def save_with_speculators(
    algorithm: str,
    windows: dict[str, Any],
    fields: dict[str, Any],
    folder: Path,
    target_folder: Path,
    target: PreTrainedModel,
) -> None:
    model = speculators_model(algorithm, target_folder, windows, **fields)
    if model.use_draft_vocab:
        kept = torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(0))[:DRAFTED].sort().values
        mask = torch.zeros(VOCABULARY, dtype=torch.bool).index_fill_(0, kept, True)
        model.load_vocab_mappings(mask, kept - torch.arange(DRAFTED))
    model.load_verifier_weights()
    randomized(model, 2).save_pretrained(folder)


def rounds_of_speculators(folder: Path, target: PreTrainedModel, prompt: Tensor, tokens: int, T: float) -> list[Round]:
    from speculators import SpeculatorModel, SpeculatorModelConfig

    config = SpeculatorModelConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"
    model = SpeculatorModel.from_pretrained(folder, config=config, dtype=torch.float32).eval()
    drafter = load_drafter(folder, target=target)
    text = target.generate(prompt, max_new_tokens=tokens, do_sample=False)
    seen = []
    for end in range(prompt.shape[1], text.shape[1]):
        ours = our_round(drafter, target, text[:, :end], drafter.max_draft_tokens, Draws() if T else None)
        seen.append(along_our_drafts(model, target, ours))
    return seen


@torch.no_grad()
def along_our_drafts(model: Any, target: PreTrainedModel, ours: Round) -> Round:
    """Its training forward with our drafts as the text after the anchor: what it says of each, given those before."""
    ids, anchor = torch.cat([ours.ids, torch.tensor([[*ours.tokens, 0]])], dim=1), ours.ids.shape[1] - 1
    states = target(ids, output_hidden_states=True).hidden_states
    features = torch.cat([states[i] for i in model.target_layer_ids], dim=-1)
    whole = torch.ones_like(ids)
    chosen = (torch.tensor([anchor]), torch.tensor([True]))
    with patch("speculators.models.dflash.core.select_anchors", lambda *_: chosen):
        hidden, logits, *_, at = model._backbone_forward(
            features, ids, whole, states[-1], torch.zeros_like(ids), max_anchors=1
        )
    block, hidden, logits = ids[:, at], hidden.view(1, BLOCK, -1), logits.view(1, BLOCK, -1)
    first = 0 if model.config.sample_from_anchor else 1
    before = block if first == 0 else torch.cat([block[:, :1], block[:, :-1]], dim=1)
    confidence = None
    if hasattr(model, "candidate_selector"):
        candidates, scores = model.candidate_selector.select(logits, hidden, before)
        logits = torch.full_like(logits, -torch.inf).scatter(-1, candidates, scores)
    elif model.markov_head is not None:
        logits = logits + model.markov_head.block_bias(prev_token_ids=before, hidden_states=hidden)
    if getattr(model, "confidence_head", None) is not None:
        read = [hidden]
        if model.config.confidence_head_with_markov:
            read.append(model.markov_head.prev_embeddings(before))
        confidence = torch.sigmoid(model.confidence_head(torch.cat(read, dim=-1)))[0, first:]
    logits = logits[0, first:]
    if model.use_draft_vocab:
        kept = model.d2t + torch.arange(len(model.d2t))
        logits = torch.full((len(logits), VOCABULARY), -torch.inf).index_copy(-1, kept, logits)
    q, draws = logits.softmax(-1), Draws(ours.numbers)
    tokens = [int(draws(one)) for one in q] if ours.numbers else logits.argmax(-1).tolist()
    return Round(ours.ids, tokens, ours.numbers, q if ours.numbers else None, confidence)


# DeepSpec


def save_with_deepspec(head: str | None, reads: bool, folder: Path, _: Path, target: PreTrainedModel) -> None:
    from deepspec.modeling.dspark import Qwen3DSparkModel

    fields = dict(num_target_layers=LAYERS, block_size=BLOCK, mask_token_id=MASK, target_layer_ids=READ)
    fields |= dict(num_anchors=4, enable_confidence_head=True, confidence_head_with_markov=reads)
    fields |= dict(markov_rank=RANK if head else 0, markov_head_type=head or "vanilla")
    config = Qwen3Config(**SHAPE, **fields, layer_types=["full_attention"] * SHAPE["num_hidden_layers"])
    model = Qwen3DSparkModel(config)
    model.initialize_embeddings_and_head(
        embed_tokens=target.get_input_embeddings(), lm_head=target.get_output_embeddings()
    )
    randomized(model, 3).save_pretrained(folder)


def rounds_of_deepspec(folder: Path, target: PreTrainedModel, prompt: Tensor, tokens: int, T: float) -> list[Round]:
    from deepspec.eval.dspark.evaluator import Qwen3DSparkEvaluator
    from deepspec.modeling.dspark import Qwen3DSparkModel

    evaluator, draws, seen = object.__new__(Qwen3DSparkEvaluator), Draws(), []
    evaluator.target_model, evaluator.confidence_head_recorder = target, None
    model = Qwen3DSparkModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()
    evaluator.draft_model = model
    evaluator.args = SimpleNamespace(max_new_tokens=tokens, temperature=T, confidence_threshold=0.0)
    propose = evaluator._propose

    def telling(*, context: Any, output_ids: Tensor, position_ids: Tensor, start: int, **rest: Any) -> Any:
        before = len(draws.used)
        said = propose(context=context, output_ids=output_ids, position_ids=position_ids, start=start, **rest)
        one = Round(output_ids[:, : start + 1].clone(), said.verify_input_ids[0, 1:].tolist(), draws.used[before:])
        one.q = said.draft_probs[0] if T else None
        one.confidence = None if said.confidence_logits is None else torch.sigmoid(said.confidence_logits[0])
        seen.append(one)
        return said

    crop = DynamicCache.crop

    def to_length(cache: DynamicCache, length: int) -> None:
        """As transformers 5.10, which DeepSpec is written for: from 5.18 on a number of tokens to remove is meant."""
        crop(cache, length if length <= 0 else min(length - cache.get_seq_length(), 0))

    evaluator._propose = telling
    with patch("torch.multinomial", draws), patch.object(DynamicCache, "crop", to_length):
        evaluator.generate_one_sample(input_ids=prompt, stop_token_ids=None)
    return seen


# The comparison


@dataclass
class Case:
    """One program, one kind of drafter: how it is saved there, what it is among ours, and how the program drafts."""

    program: str
    kind: str
    format: str
    save: Callable[[Path, Path, PreTrainedModel], None]
    fields: dict[str, Any]
    rounds: Callable[..., list[Round]]


def cases() -> Iterator[Case]:
    selector = dict(sequential_head="selector", head_rank=RANK, conv_kernel_size=2)
    for name, windows, ours in (
        ("", {"is_causal": False}, {}),
        (", sliding", {**MIXED, "is_causal": False}, {**OURS, "window_from": "slot"}),
        (", sliding and causal", MIXED, {**OURS, "window_from": "slot", "causal_layers": "sliding"}),
        (", causal", {"is_causal": True}, {"causal_layers": "all"}),
    ):
        save = partial(save_with_dflash, windows)
        yield Case("dflash", f"DFlash 2{name}", "z-lab", save, {**selector, **ours}, rounds_of_dflash)
    for name, windows, fields, ours in (
        ("", {}, {}, {}),
        (", sliding", MIXED, {}, OURS),
        (", sliding and causal", MIXED, {"sliding_window_non_causal": False}, {**OURS, "causal_layers": "sliding"}),
    ):
        save = partial(save_with_speculators, "dflash2", windows, {"selector_rank": RANK, **fields})
        yield Case("speculators", f"DFlash 2{name}", "speculators", save, {**selector, **ours}, rounds_of_speculators)
    kinds = ("vanilla", True, DRAFTED), ("gated", False, VOCABULARY), ("rnn", True, DRAFTED)
    for kind, from_anchor, drafted in kinds:
        theirs = {"markov_head_type": kind, "markov_rank": RANK, "sample_from_anchor": from_anchor}
        save = partial(save_with_speculators, "dspark", {}, {**theirs, "draft_vocab_size": drafted})
        ours = dict(sequential_head=HEADS[kind], head_rank=RANK, sample_from_anchor=from_anchor, confidence_head=True)
        name = f"DSpark {kind}{'' if drafted == VOCABULARY else ', truncated'}{'' if from_anchor else ', a + k'}"
        ours["draft_vocab_size"] = 0 if drafted == VOCABULARY else drafted
        yield Case("speculators", name, "speculators", save, ours, rounds_of_speculators)
    for kind, reads in (("vanilla", True), ("gated", False), ("rnn", True), (None, False)):
        ours = dict(sequential_head=HEADS.get(kind, "none"), head_rank=RANK, sample_from_anchor=True)
        ours |= dict(confidence_head=True, confidence_reads_token=reads)
        save = partial(save_with_deepspec, kind, reads)
        yield Case("deepspec", f"DSpark {kind or 'headless'}", "deepspec", save, ours, rounds_of_deepspec)


def our_checkpoint(case: Case, folder: Path, target: PreTrainedModel) -> None:
    drafter = HyperDFlashDrafter.from_target(
        target, reducer="fc", target_layer_ids=READ, mask_token_id=MASK, num_hidden_layers=2, head_dim=16,
        num_draft_tokens=BLOCK - (0 if case.fields.get("sample_from_anchor") else 1), **case.fields,
    )  # fmt: skip
    if case.fields.get("draft_vocab_size"):
        drafter.draft_ids.copy_(torch.randperm(VOCABULARY)[: len(drafter.draft_ids)].sort().values)
        drafter.lm_head.weight.data.copy_(target.get_output_embeddings().weight[drafter.draft_ids])
    export_dflash(randomized(drafter, 4), folder, case.format, target)


def compare(case: Case, folder: Path, target: PreTrainedModel, prompts: list[Tensor], tokens: int) -> str:
    drafter, cells = load_drafter(folder, target=target), []
    far: dict[str, list[float]] = {"q": [], "confidence": []}
    for T in (0.0, 1.0):
        same = total = 0
        theirs = [one for prompt in prompts for one in case.rounds(folder, target, prompt, tokens, T)]
        for their in theirs:
            ours = our_round(drafter, target, their.ids, len(their.tokens), Draws(their.numbers) if T else None)
            same += ours.tokens == their.tokens
            total += 1
            for name in far:
                a, b = getattr(ours, name), getattr(their, name)
                assert (a is None) == (b is None), f"only one of the two tells its {name}"
                far[name] += [] if a is None else [float((a - b).abs().max())]
        cells.append(f"{same} of {total}")
    return " | ".join([*cells, *(f"{max(distances):.0e}" if distances else "–" for distances in far.values())])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=4, help="of 8, 16, 24, .. tokens")
    parser.add_argument("--max-new-tokens", type=int, default=48)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    deepspec = importlib.util.find_spec("deepspec")
    packages = ("torch", "transformers", "dflash", "speculators")
    print(circumstances(packages, {"DeepSpec": next(iter(deepspec.submodule_search_locations)) if deepspec else None}))
    print()
    print("| program | drafter | written by | same rounds, T = 0 | T = 1 | furthest q | furthest confidence |")
    print("|---|---|---|---|---|---|---|")
    target = random_target()
    prompts = [torch.randint(2, VOCABULARY, (1, 8 * (i + 1))) for i in range(arguments.prompts)]
    absent = {}
    with TemporaryDirectory() as scratch:
        target.save_pretrained(Path(scratch, "target"))
        target.config._name_or_path = str(Path(scratch, "target"))
        for number, case in enumerate(cases()):
            if importlib.util.find_spec(case.program) is None:
                absent[case.program] = f"{case.program} is not installed: see the top of this file"
                continue
            for by in ("theirs", "ours"):
                folder = Path(scratch, f"{number}-{by}")
                if by == "theirs":
                    case.save(folder, Path(scratch, "target"), target)
                else:
                    our_checkpoint(case, folder, target)
                found = compare(case, folder, target, prompts, arguments.max_new_tokens)
                print(f"| {case.program} | {case.kind} | {by} | {found} |", flush=True)
    for why in absent.values():
        print(f"\n{why}.")


if __name__ == "__main__":
    main()
