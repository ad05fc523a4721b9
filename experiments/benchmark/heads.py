"""What a sequential head costs: counted at DeepSeek-V4-Flash's size, timed on this machine, and what candidates lose.

Counted: operations and bytes read of every head, as a share of a round, which is one pass of the drafter, its LM head
and the target's verification. Sizes come from the models' own modules on the meta device. Timed: a drafter's pass with
random weights, and each head's steps, in turns, on the shipped target and with V4-Flash's vocabulary. With
`--drafter`, a trained one, instead: how many tokens a round has with fewer candidates.

    python experiments/benchmark heads
    python experiments/benchmark heads --hidden-size 4096 --dtype bfloat16
    python experiments/benchmark heads --drafter PATH --candidates 0 64 256 1024 --prompts held_out.jsonl --limit 24
"""

from __future__ import annotations

import argparse
import datetime
import platform
import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import (
    DeepseekV4Config,
    DeepseekV4ForCausalLM,
    LogitsProcessorList,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from hf_hyperdflash import HyperDFlashDrafter, load_drafter, load_target, measure_acceptance
from hf_hyperdflash.benchmark.doctor.examine import PROMPTS
from hf_hyperdflash.benchmark.runner import hardware
from hf_hyperdflash.drafters.blocks.configuration_hyperdflash import HyperDFlashConfig
from hf_hyperdflash.drafters.blocks.drafter import BlockPath
from hf_hyperdflash.drafters.parts.context import ContextColumns
from hf_hyperdflash.drafters.sampling import DraftRequest, DraftSampler
from hf_hyperdflash.hub.loading import check_target, load_tokenizer
from hf_hyperdflash.targets.registry import target_of
from hf_hyperdflash.training.data.encoding import encode_prompts
from hf_hyperdflash.training.data.rows import load_rows

MODELS = Path(__file__).parents[2] / "examples" / "models"
RANKS = {"markov": 256, "gated_markov": 256, "recurrent": 256, "selector": 256, "state": 512}
CANDIDATES = (0, 16, 64, 256, 1024)
DRAFTS = 6
ALLOWED = 0.03  # of a round
FP4, FP8, BF16, FP32 = 0.5 + 1 / 32, 1 + 1 / 128**2, 2, 4  # bytes of a weight, the scales of its block included


@dataclass
class Cost:
    """Operations, a multiplication and an addition each, and bytes that are read or written."""

    operations: float = 0.0
    bytes: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.operations + other.operations, self.bytes + other.bytes)

    def __rmul__(self, times: float) -> Cost:
        return Cost(times * self.operations, times * self.bytes)

    def share(self, whole: Cost) -> tuple[float, float]:
        return self.operations / whole.operations, self.bytes / whole.bytes


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default=str(MODELS / "tiny-deepseek-v4"), help="path or Hub id; timed, generates")
    parser.add_argument("--drafter", help="path of a trained drafter with a head: measure what fewer candidates lose")
    parser.add_argument("--candidates", type=int, nargs="+", default=CANDIDATES, help="0 for the whole vocabulary")
    parser.add_argument("--prompts", help="held-out conversations, a .jsonl file; default: the doctor's")
    parser.add_argument("--limit", type=int, help="only the first so many prompts")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--vocab-size", type=int, default=129280, help="of the random LM head that is timed; 0 for none"
    )
    parser.add_argument("--hidden-size", type=int, default=1024, help="of that and its drafter")
    parser.add_argument("--layers", type=int, default=5, help="of that drafter")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--context", type=int, default=256, help="tokens before the anchor")
    parser.add_argument("--repeats", type=int, default=15, help="passes of each head that are timed")
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


# Counted


def verification(target: PreTrainedModel, tokens: int) -> Cost:
    """One forward of a V4 target over an anchor and its drafts, by its weights: experts in FP4, the LM head in
    bfloat16, the rest in FP8. Attention over the context is left out: shares of a round are at most what is shown."""
    config = target.config
    active, experts = config.num_experts_per_tok, config.n_routed_experts
    sizes = {name: parameter.numel() for name, parameter in target.named_parameters()}
    routed = sum(size for name, size in sizes.items() if ".experts." in name)
    head = target.get_output_embeddings().weight.numel()
    others = sum(sizes.values()) - routed - head - target.get_input_embeddings().weight.numel()
    read = 1 - (1 - active / experts) ** tokens  # of each layer's experts, by tokens that choose independently
    used = others + head + routed * active / experts
    return Cost(2 * tokens * used, FP4 * read * routed + FP8 * others + BF16 * head)


def block(drafter: HyperDFlashDrafter) -> Cost:
    """The drafter's layers over one block, by their weights in bfloat16."""
    size = sum(module.weight.numel() for module in drafter.layers.modules() if isinstance(module, torch.nn.Linear))
    return Cost(2 * drafter.config.block_size * size, BF16 * size)


def lm_head(drafter: HyperDFlashDrafter, positions: int) -> Cost:
    """Of every draft position at once: the block's own logits, where anything asks for them."""
    config, head = drafter.config, drafter.head
    if head is not None and head.table is None and not config.head_candidates:
        return Cost()
    size = config.vocab_size * config.target_hidden_size
    return Cost(2 * positions * size, BF16 * (size + positions * config.vocab_size))


def step(drafter: HyperDFlashDrafter) -> Cost:
    """A head's part of one draft: its own layers, its table or again the LM head, of all tokens or of the candidates,
    and rows of the vocabulary's width that are made along the way."""
    config, head = drafter.config, drafter.head
    if head is None:
        return Cost()
    own = [module.weight for module in head.modules() if isinstance(module, torch.nn.Linear)]
    own = sum(weight.numel() for weight in own if weight is not head.table)
    width = config.target_hidden_size if head.table is None else head.table.shape[1]
    chosen = config.head_candidates or 0
    scored = (chosen or config.vocab_size) * width
    if chosen:  # read for the best; made float32, lowered, and overwritten at the best
        row = BF16 + (BF16 + FP32) + 2 * FP32 + 2 * FP32
    else:  # read, the table's part written and read, the sum written; of the LM head written
        row = 4 * BF16 if head.table is not None else BF16
    return Cost(2 * (own + scored), BF16 * (own + scored + width) + row * config.vocab_size)


def variants() -> Iterator[tuple[str, dict[str, Any]]]:
    """Heads and candidates: their name and the drafter's fields."""
    yield "none", {"sequential_head": "none"}
    for kind, rank in RANKS.items():
        for candidates in CANDIDATES:
            yield kind, {"sequential_head": kind, "head_rank": rank, "head_candidates": candidates}


def count() -> None:
    """A table of every head at V4-Flash's size."""
    with torch.device("meta"):
        target = DeepseekV4ForCausalLM(DeepseekV4Config())
    verified, rows = verification(target, DRAFTS + 1), []
    for kind, fields in variants():
        with torch.device("meta"):
            drafter = HyperDFlashDrafter(HyperDFlashConfig(**fields))
        of_block, of_lm_head = block(drafter), lm_head(drafter, DRAFTS)
        one = step(drafter)
        every = DRAFTS * one
        shares = every.share(verified + of_block + of_lm_head + every)
        verdict = "–" if drafter.head is None else "yes" if max(shares) <= ALLOWED else "no"
        candidates = "–" if drafter.head is None else fields["head_candidates"] or "all"
        numbers = [one.operations / 1e6, one.bytes / 1e6, every.operations / 1e9, every.bytes / 1e9]
        rows.append([kind, candidates, *(f"{x:.3g}" for x in numbers), *(f"{x:.2%}" for x in shares), verdict])
    print(f"## Counted at V4-Flash's size, {DRAFTS} drafts a round\n")
    parts = {"verification": verified, "drafter's layers": of_block, "LM head": of_lm_head}
    told = [f"{name} {part.operations / 1e9:.1f} G, {part.bytes / 1e9:.2f} GB" for name, part in parts.items()]
    print(f"Without a head: {'; '.join(told)}.\n")
    header = ["head", "candidates", "MFLOP a draft", "MB a draft", "GFLOP a round", "GB a round"]
    table([*header, "of a round's FLOP", "of its bytes", f"within {ALLOWED:.0%}"], rows)


# Timed


def timed(target: PreTrainedModel, arguments: argparse.Namespace, **shape: Any) -> dict[Any, float]:
    """Milliseconds of each head's steps with each number of candidates, of a pass without a head and its parts, and of
    the target's forward over a block; random weights, all in turns."""
    heads: dict[str, HyperDFlashDrafter] = {}
    for kind in ("none", *RANKS):
        torch.manual_seed(0)
        fields = {"sequential_head": kind, "head_rank": RANKS.get(kind, 1), "mask_token_id": 3, **shape}
        heads[kind] = HyperDFlashDrafter.from_target(target, **fields).eval()
        heads[kind].layers = heads["none"].layers  # one copy of what they have in common
    plain, length = heads["none"], arguments.context
    config, drafts = plain.config, plain.max_draft_tokens
    residual = torch.randn(1, length, config.num_streams, config.target_hidden_size, dtype=target.dtype)
    ids, positions = torch.randint(4, config.vocab_size, (1, length + 1)), torch.arange(length + 1)[None]
    context, sampler = plain.new_context(), DraftSampler(LogitsProcessorList(), do_sample=False)
    request = DraftRequest(context, ids, positions, drafts, sampler)
    plain.extend(target_of(target), context, residual, positions[:, :-1], ids[:, 1:])
    plain.flush_pending(context)
    embeds = torch.randn(1, config.block_size, config.target_hidden_size, dtype=target.dtype)
    at = positions[:, -1:] + torch.arange(config.block_size)

    blind = plain.logits(target_of(target), embeds[:, :drafts]).detach()

    def steps(kind: str, candidates: int) -> Callable[[], None]:
        """A head's part of a pass, without what it has in common with a drafter that has none."""
        heads[kind].config.head_candidates = candidates
        path = BlockPath(heads[kind], target_of(target), embeds[:, :drafts])

        first = ids.new_zeros(1)

        def run() -> None:
            if candidates:
                blind.topk(candidates, dim=-1)
            for k in range(drafts):
                path(k, ids[:, k], first)

        return run

    # What has to be there before, and what is timed then.
    stages: dict[Any, Callable[[], Callable[[], Any]]] = {
        "verification": lambda: lambda: target(ids[:, : drafts + 1]),
        "block": lambda: lambda: plain(embeds, at, ContextColumns.of(plain, [context], config.block_size)),
        "LM head": lambda: lambda: plain.logits(target_of(target), embeds[:, :drafts]),
        "pass": lambda: partial(plain.draft, target_of(target), [request]),
    }
    for kind, fields in variants():
        candidates = fields.get("head_candidates", -1)
        if 0 <= candidates < config.vocab_size:
            stages[kind, candidates] = partial(steps, kind, candidates)
    seconds: dict[Any, list[float]] = {name: [] for name in stages}
    order = random.Random(0)
    with torch.no_grad():
        for number in range(arguments.repeats + 2):
            for name in order.sample([*stages], len(stages)):
                stage = stages[name]()
                began = time.process_time()  # not the clock, which would count other programs
                stage()
                if number >= 2:  # the first ones load libraries and fill caches
                    seconds[name].append(time.process_time() - began)
    return {name: 1e3 * statistics.median(of_stage) for name, of_stage in seconds.items()}


def report_timed(title: str, took: dict[Any, float], has_layers: bool) -> None:
    print(f"\n## Timed: {title}\n")
    names = ["block", "LM head", "pass", *(["verification"] if has_layers else [])]
    print(f"CPU milliseconds without a head: {', '.join(f'{name} {took[name]:.2f}' for name in names)}.\n")
    rows = []
    for kind, candidates in (key for key in took if isinstance(key, tuple)):
        head = took[kind, candidates]
        shares = [head / (head + took["pass"])]
        shares += [head / (head + took["pass"] + took["verification"])] if has_layers else []
        rows.append([kind, candidates or "all", f"{head:.2f}", f"{head / DRAFTS:.3f}", *(f"{x:.1%}" for x in shares)])
    header = ["head", "candidates", "ms a round", "a draft", "of the pass"]
    table([*header, *(["of a round"] if has_layers else [])], rows)


def random_lm_head(vocab_size: int, hidden_size: int, dtype: str) -> PreTrainedModel:
    """A target that is little more than an embedding and an LM head, which are one."""
    config = Qwen3Config(
        vocab_size=vocab_size, hidden_size=hidden_size, num_hidden_layers=1, intermediate_size=64,
        num_attention_heads=1, num_key_value_heads=1, head_dim=128, tie_word_embeddings=True, bos_token_id=None,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return Qwen3ForCausalLM(config).to(getattr(torch, dtype)).eval()


# Candidates


def prompts_of(arguments: argparse.Namespace) -> list[torch.Tensor]:
    rows: Any = [{"turns": [text]} for text in PROMPTS]
    if arguments.prompts:
        rows = load_rows(arguments.prompts)
    chosen = islice(rows, arguments.limit)
    return encode_prompts(load_tokenizer(arguments.target, trust_remote_code=False), chosen)


def candidates_lose(arguments: argparse.Namespace) -> None:
    """A table of tau with one trained drafter, whose head chooses among ever so many of the block's best tokens."""
    drafter: Any = load_drafter(arguments.drafter, dtype=arguments.dtype)
    if getattr(drafter, "head", None) is None:
        raise ValueError(f"{arguments.drafter} has no sequential head: expected a drafter that was trained with one.")
    own, rows = drafter.config.head_candidates or 0, []
    numbers = dict.fromkeys([own, *arguments.candidates])
    for candidates in numbers:
        drafter.config.head_candidates = candidates
        drafter.config.check()
    prompts, target = prompts_of(arguments), load_target(arguments.target, dtype=arguments.dtype)
    for candidates in numbers:
        drafter.config.head_candidates = candidates
        cells = []
        for sampling in ({}, {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}):
            torch.manual_seed(arguments.seed)
            measured = measure_acceptance(
                target, drafter, prompts, max_new_tokens=arguments.max_new_tokens, **sampling
            )
            rates = " ".join(f"{100 * rate:.0f}" for rate in measured["conditional_acceptance"])
            cells += [f"{measured['tau']:.3f}", rates]
        rows.append([f"{candidates or 'all'}{' (its own)' * (candidates == own)}", *cells])
    print(f"## {drafter.config.sequential_head}, {len(prompts)} prompts, {arguments.max_new_tokens} new tokens each\n")
    accepted = "accepted once those before are, %"
    table(["candidates", "tau, T = 0", accepted, "tau, T = 1", accepted], rows)


def table(header: list[str], rows: list[list[Any]]) -> None:
    cells = [header, ["---"] * len(header), *rows]
    print("\n".join(f"| {' | '.join(map(str, row))} |" for row in cells))


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    transformers.logging.set_verbosity_error()
    print(
        f"{datetime.date.today()}, {platform.platform()}, {hardware('cpu')}, {arguments.threads} threads, torch "
        f"{torch.__version__}, transformers {transformers.__version__}, {arguments.dtype}\n"
    )
    if arguments.drafter:
        candidates_lose(arguments)
        return
    check_target(arguments.target)
    count()
    target = load_target(arguments.target, dtype=arguments.dtype)
    name = f"{Path(arguments.target).name}, drafter of 2 layers"
    report_timed(name, timed(target, arguments, num_hidden_layers=2), has_layers=True)
    if arguments.vocab_size:
        target = random_lm_head(arguments.vocab_size, arguments.hidden_size, arguments.dtype)
        name = (
            f"vocabulary {arguments.vocab_size:,}, width {arguments.hidden_size}, drafter of {arguments.layers} layers"
        )
        shape = {"num_hidden_layers": arguments.layers, "reducer": "fc"}
        report_timed(name, timed(target, arguments, **shape), has_layers=False)
