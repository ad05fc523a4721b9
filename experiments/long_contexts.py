"""What a round costs after long texts: seconds and memory of plain decoding, of chains and of draft trees.

    python experiments/long_contexts.py --output experiments/results/long-contexts

Two random targets of small widths, a dense one (Qwen3) and a DeepSeek-V4, after texts of real lengths. Their caches
and the drafter's context are filled with random keys and compressed entries, where a forward over the text would take
hours: what they are changes no time. A HyperDFlash drafter of random weights drafts, so that nearly no draft is
accepted, and a round writes a token, as a plain step does. "Window" is that drafter with a window over its context.

Of each round the drafter's part is drafting, the target's forward verifying, and everything else bookkeeping. All ways
take turns. Memory is what is held before the rounds, by target and drafter, and the most that a round holds beside it,
counted by what operations return. A row that is in `results.json` is not measured again.

Prompts are run for real, in one piece and in chunks: the cache and the drafter's context after them, the most that is
held at once, and the most residual that waits for the drafter. Those of 32,768 tokens take minutes each.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import json
import random
import statistics
import time
import weakref
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import transformers
from benchmark.cache import held_bytes
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    DeepseekV4Config,
    DeepseekV4ForCausalLM,
    DynamicCache,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from hf_hyperdflash import Eagle3Drafter, HyperDFlashDrafter
from hf_hyperdflash.benchmark.results import save_report
from hf_hyperdflash.benchmark.runner import hardware
from hf_hyperdflash.decoding.request import Pair
from hf_hyperdflash.decoding.sequence import store_context
from hf_hyperdflash.decoding.stats import exact_timing
from hf_hyperdflash.drafters.parts.context import DraftContext, rows_of
from hf_hyperdflash.targets.caches.deepseek_v4 import make_rewindable
from hf_hyperdflash.targets.caches.name import CACHE
from hf_hyperdflash.targets.hooks import ResidualCapture
from hf_hyperdflash.targets.registry import target_of

PLAIN, CHAIN, TREE, WINDOW = "plain", "chain", "tree", "chain, window"
STEP = 128  # tokens that the windows of every compressor end with
PARTS = "drafting", "verifying", "bookkeeping"
NONE, BLOCK, WINDOWED, EAGLE = "none", "block", "block, window", "EAGLE-3"  # drafters of prompts
LONGEST = {"DeepSeek-V4": 8192}  # of a prompt in one piece: its attention has scores of as many elements as its square


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="*", default=[1024, 8192, 32768, 131072], help="tokens before")
    parser.add_argument("--targets", nargs="+", default=list(TARGETS), choices=list(TARGETS))
    parser.add_argument("--prompts", type=int, nargs="*", default=[8192, 32768], help="tokens of prompts")
    parser.add_argument("--chunk", type=int, default=1024, help="tokens of a chunk of a prompt")
    parser.add_argument("--drafts", type=int, default=7, help="of a chain, and the depth of a tree")
    parser.add_argument("--nodes", type=int, default=16, help="of a tree")
    parser.add_argument("--window", type=int, default=512, help="of the drafter that has one")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=12, help="a call")
    parser.add_argument("--runs", type=int, default=5, help="after one that is not counted")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", help="a folder for report.md and results.json")
    arguments = parser.parse_args()
    if wrong := [length for length in arguments.lengths if length < STEP or length % STEP]:
        parser.error(f"--lengths has {wrong[0]}, expected multiples of {STEP}: 1024, 8192 for example.")
    for name in ("chunk", "drafts", "nodes", "window", "rounds", "runs", "layers"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name} is {getattr(arguments, name)}, expected at least 1.")
    return arguments


def dense(arguments: argparse.Namespace) -> PreTrainedModel:
    width = arguments.hidden_size
    return Qwen3ForCausalLM(Qwen3Config(
        vocab_size=4096, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=arguments.layers,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64, max_position_embeddings=1 << 18,
        tie_word_embeddings=False, bos_token_id=None, eos_token_id=None, pad_token_id=0,
    ))  # fmt: skip


def deepseek_v4(arguments: argparse.Namespace) -> PreTrainedModel:
    """With V4-Flash's layer pattern, window and compression rates."""
    width, compressed = arguments.hidden_size, ["compressed_sparse_attention", "heavily_compressed_attention"]
    kinds = ["sliding_attention", *(compressed * arguments.layers)][: arguments.layers]
    return DeepseekV4ForCausalLM(DeepseekV4Config(
        vocab_size=4096, hidden_size=width, moe_intermediate_size=width // 2, num_hidden_layers=arguments.layers,
        num_attention_heads=4, head_dim=64, q_lora_rank=64, num_experts_per_tok=2, n_routed_experts=8,
        layer_types=kinds, o_groups=2, o_lora_rank=64, index_n_heads=8, index_head_dim=64, sliding_window=128,
        max_position_embeddings=1 << 18, bos_token_id=None, eos_token_id=None, pad_token_id=0,
    ))  # fmt: skip


def filled_dense(target: PreTrainedModel, length: int) -> DynamicCache:
    """A cache with random keys."""
    config, cache = target.config, DynamicCache(config=target.config)
    shape = 1, config.num_key_value_heads, length, config.head_dim
    for layer in range(config.num_hidden_layers):
        keys, values = (torch.randn(shape, device=target.device, dtype=target.dtype) for _ in range(2))
        cache.update(keys, values, layer)
    return cache


def filled_deepseek_v4(target: PreTrainedModel, length: int) -> DynamicCache:
    """The target's own after a few tokens, with random entries of compressors for as many tokens as there are to be.
    A tree is verified by what our layers keep of the last window that closed, so they are there from the start."""
    cache, ids = DynamicCache(config=target.config), torch.full((1, 2 * STEP), 2, device=target.device)
    make_rewindable(cache)
    with torch.no_grad():
        target.model(ids, **{CACHE: cache})
    for layer in cache.layers:
        layer.cumulative_length = length
        for name, known in getattr(layer, "compressed_kv", {}).items():
            layer.entry_count[name] = length // layer.compress_rate
            layer.compressed_kv[name] = torch.randn(1, layer.entry_count[name], known.shape[2]).to(known)
        layer._forget_past()
    return cache


TARGETS: dict[str, tuple[Callable[..., PreTrainedModel], Callable[..., DynamicCache]]] = {
    "dense": (dense, filled_dense),
    "DeepSeek-V4": (deepseek_v4, filled_deepseek_v4),
}


def filled_context(drafter: HyperDFlashDrafter, length: int) -> DraftContext:
    context = drafter.new_context()
    kept = length if context.window is None else min(length, context.window)
    for part in (part for layer in rows_of(drafter, [context], kept) for part in layer):
        part.normal_()
    context.end, context.length = length, kept
    return context


class LiveMemory(TorchDispatchMode):
    """While it is active, `peak` is the most bytes that storages made in it held at once since [`begin`]."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = self.before = 0
        self.sizes: dict[int, int] = {}
        self.peaks: list[int] = []

    def begin(self, *_: object) -> None:
        """Begin a round, and note what the one before held at most beside what was there before it."""
        self.peaks.append(self.peak - self.before)
        self.peak = self.before = self.live

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {leaf.untyped_storage().data_ptr() for leaf in tree_leaves((args, kwargs)) if torch.is_tensor(leaf)}
        result = func(*args, **(kwargs or {}))
        for storage in (leaf.untyped_storage() for leaf in tree_leaves(result) if torch.is_tensor(leaf)):
            place = storage.data_ptr()
            if place and place not in given and place not in self.sizes:
                self.sizes[place] = storage.nbytes()
                self.live += storage.nbytes()
                self.peak = max(self.peak, self.live)
                weakref.finalize(storage, self._forget, place)
        return result

    def _forget(self, place: int) -> None:
        self.live -= self.sizes.pop(place)


class Way:
    """One way to write tokens after a text.

    Attributes:
        seconds: Of a mean round of each run, by its parts.
    """

    def __init__(
        self, name: str, target: PreTrainedModel, drafter: HyperDFlashDrafter | None, filled: DynamicCache,
        length: int, arguments: argparse.Namespace,
    ) -> None:  # fmt: skip
        self.name, self.target, self.drafter, self.filled, self.length = name, target, drafter, filled, length
        self.count, self.seconds = arguments.rounds, list[dict[str, float]]()
        self.options: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "assistant_model": drafter}
        if name == TREE:
            self.options["tree_budget"] = arguments.nodes

    def run(self, hook: Callable[..., None]) -> DynamicCache:
        """Write tokens; `hook` is called before each forward of the target."""
        cache, ids = copy.deepcopy(self.filled), torch.full((1, self.length + 1), 2, device=self.target.device)
        if self.drafter is not None:
            pair = Pair.checked(target_of(self.target), self.drafter)
            store_context(cache, pair, filled_context(self.drafter, self.length))
        room = self.count + 1 + (0 if self.drafter is None else self.drafter.max_draft_tokens)
        handle = self.target.model.register_forward_pre_hook(lambda *_: hook())
        try:
            self.target.generate(ids, max_new_tokens=room, **self.options, **{CACHE: cache})
        finally:
            handle.remove()
        return cache

    def measure(self) -> None:
        """Add the seconds of a run. The caller's cache is passed, so none is in inference mode."""
        times: list[float] = []

        def note() -> None:
            if self.target.device.type != "cpu":
                torch.accelerator.synchronize()
            times.append(time.perf_counter())

        with exact_timing():
            self.run(note)
        # From the second round on: the first one makes buffers.
        between = [end - begin for begin, end in pairwise(times[2 : self.count + 2])]
        whole, parts = statistics.median(between), dict.fromkeys(PARTS, 0.0)
        if self.drafter is None:
            parts["verifying"] = whole
        else:
            stats = self.drafter.last_stats
            assert stats is not None
            shares = stats.draft_seconds, stats.verify_seconds
            parts |= {part: whole * each / stats.loop_seconds for part, each in zip(PARTS, shares)}
            parts["bookkeeping"] = whole - sum(parts.values())
        self.seconds.append({"round": whole, **parts})

    def memory(self) -> dict[str, int]:
        """Return the bytes that are held, and those that a round holds at most beside these."""
        live = LiveMemory()
        with live:
            self.run(live.begin)
        of_drafter = 0 if self.drafter is None else held_bytes(filled_context(self.drafter, self.length).buffer)
        # The first ones are the prompt's and the first round's, which makes buffers.
        return {"cache": held_bytes(self.filled), "context": of_drafter, "round": max(live.peaks[3:])}


def measured(kind: str, length: int, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row for each way."""
    torch.manual_seed(0)
    make, fill = TARGETS[kind]
    target = make(arguments).to(arguments.device, getattr(torch, arguments.dtype)).eval()
    shape = {"num_draft_tokens": arguments.drafts, "num_hidden_layers": 2, "mask_token_id": 1}
    drafters: dict[str, HyperDFlashDrafter | None] = {PLAIN: None}
    drafters[CHAIN] = drafters[TREE] = whole = HyperDFlashDrafter.from_target(target, **shape)
    drafters[WINDOW] = windowed = HyperDFlashDrafter.from_target(target, **shape, sliding_window=arguments.window)
    for drafter in (whole, windowed):
        drafter.bind(target)
    filled = fill(target, length)
    ways = [Way(name, target, drafter, filled, length, arguments) for name, drafter in drafters.items()]
    order = random.Random(0)
    for run in range(arguments.runs + 1):
        for way in order.sample(ways, len(ways)):
            way.measure()
            if not run:
                way.seconds.clear()
    return [
        {"target": kind, "length": length, "way": way.name, "seconds": way.seconds, "bytes": way.memory()}
        for way in ways
    ]


def prompt_measured(
    kind: str, length: int, drafter_kind: str, is_cut: bool, arguments: argparse.Namespace
) -> dict[str, Any]:
    """Return the row of a prompt, which is run once."""
    torch.manual_seed(0)
    target = TARGETS[kind][0](arguments).to(arguments.device, getattr(torch, arguments.dtype)).eval()
    drafter: Any = None
    if drafter_kind in (BLOCK, WINDOWED):
        own: dict[str, Any] = {"sliding_window": arguments.window} if drafter_kind == WINDOWED else {}
        drafter = HyperDFlashDrafter.from_target(target, num_hidden_layers=2, mask_token_id=1, **own)
    elif drafter_kind == EAGLE:
        drafter = Eagle3Drafter.from_target(target)
    if drafter is not None:
        drafter.bind(target)
    chunk, ids = arguments.chunk if is_cut else None, torch.full((1, length), 2, device=target.device)
    options: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "prefill_chunk_size": chunk}
    live, began, pop, held = LiveMemory(), time.perf_counter(), ResidualCapture.pop, [0]

    def popped(capture: ResidualCapture) -> list[torch.Tensor]:
        captured = pop(capture)
        held.append(sum(each.untyped_storage().nbytes() for each in captured))
        return captured

    with patch.object(ResidualCapture, "pop", popped), live:
        out = target.generate(
            ids, assistant_model=drafter, max_new_tokens=2, return_dict_in_generate=True, **options
        )  # fmt: skip
    seconds, cache = time.perf_counter() - began, held_bytes(out[CACHE])
    sizes = {"cache": cache, "most": live.peak, "residual": max(held)}
    return {
        "target": kind, "length": length, "drafter": drafter_kind, "chunk": chunk, "seconds": seconds, "bytes": sizes,
    }  # fmt: skip


def prompt_cases(arguments: argparse.Namespace) -> list[tuple[str, int, str, bool]]:
    return [
        (kind, length, drafter, is_cut)
        for kind in arguments.targets
        for length in arguments.prompts
        for drafter in (NONE, BLOCK, WINDOWED, EAGLE)
        for is_cut in (False, True)
        if is_cut or length <= LONGEST.get(kind, length)
    ]


def prompt_table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| target | tokens of the prompt | drafter | in | cache and context, MB | at most, MB | residual, MB |",
        "|---|---:|---|---|---:|---:|---:|",
    ]
    for row in rows:
        pieces = f"chunks of {row['chunk']:,}" if row["chunk"] else "one piece"
        sizes = " | ".join(f"{row['bytes'][name] / 1e6:.1f}" for name in ("cache", "most", "residual"))
        lines.append(f"| {row['target']} | {row['length']:,} | {row['drafter']} | {pieces} | {sizes} |")
    return "\n".join(lines)


def about_longest(rows: list[dict[str, Any]]) -> str:
    """Say what prompts in one piece would take that are longer than those which are run."""
    told = ""
    for kind, length in LONGEST.items():
        whole = {
            row["length"]: row["bytes"]["most"]
            for row in rows
            if (row["target"], row["drafter"], row["chunk"]) == (kind, NONE, None)
        }
        longest = max((row["length"] for row in rows if row["target"] == kind), default=0)
        if length in whole and longest > length:
            size = whole[length] * (longest / length) ** 2 / 1e9
            told += (
                f"\n\nOf a {kind} no longer prompt than {length:,} tokens is run in one piece: its attention in "
                "transformers makes scores and masks of as many elements as the square of a piece for each head, so "
                f"{longest:,} tokens would take some {size:.0f} GB."
            )
    return told


def table(rows: list[dict[str, Any]]) -> str:
    """Return the median milliseconds of each part, and the memory."""
    lines = [
        "| target | tokens before | way | round, ms | beside plain | drafting | verifying | bookkeeping | cache, MB | "
        "drafter's, MB | a round's, MB |",
        "|---|---:|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    found = {
        (row["target"], row["length"], row["way"]): {
            part: 1e3 * statistics.median(run[part] for run in row["seconds"]) for part in ("round", *PARTS)
        }
        for row in rows
    }
    for row in rows:
        kind, length, way = row["target"], row["length"], row["way"]
        own, plain = found[kind, length, way], found[kind, length, PLAIN]
        parts = " | ".join("" if way == PLAIN else f"{own[part]:.2f}" for part in PARTS)
        sizes = " | ".join(f"{row['bytes'][name] / 1e6:.1f}" for name in ("cache", "context", "round"))
        beside = own["round"] / plain["round"]
        lines.append(f"| {kind} | {length:,} | {way} | {own['round']:.1f} | {beside:.2f} | {parts} | {sizes} |")
    return "\n".join(lines)


def earlier_rows(arguments: argparse.Namespace) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the rows of rounds and of prompts that `--output` holds, of a run with the same settings."""
    path = Path(arguments.output or "", "results.json")
    if not arguments.output or not path.exists():
        return [], []
    earlier, chosen = json.loads(path.read_text(encoding="utf-8")), ("output", "lengths", "targets", "prompts")
    own = {name: value for name, value in vars(arguments).items() if name not in chosen}
    if {name: earlier["settings"].get(name) for name in own} != own:
        raise SystemExit(f"Error: {path} has other settings than this run, expected the same: pass another --output.")
    return earlier["rows"], earlier["prompts"]


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    transformers.logging.set_verbosity_error()
    rows, prompts = earlier_rows(arguments)
    for kind, length in [(kind, length) for kind in arguments.targets for length in arguments.lengths]:
        if (kind, length) in {(row["target"], row["length"]) for row in rows}:
            continue
        began = time.perf_counter()
        rows += measured(kind, length, arguments)
        save(rows, prompts, arguments)
        print(f"{kind} after {length:,} tokens: {time.perf_counter() - began:.0f} s", flush=True)
    for case in prompt_cases(arguments):
        kind, length, drafter, is_cut = case
        if case not in {(row["target"], row["length"], row["drafter"], bool(row["chunk"])) for row in prompts}:
            prompts.append(row := prompt_measured(kind, length, drafter, is_cut, arguments))
            save(rows, prompts, arguments)
            print(f"{kind}, a prompt of {length:,}: {row['seconds']:.0f} s", flush=True)
    save(rows, prompts, arguments)
    print(table(rows), prompt_table(prompts), sep="\n\n")


def save(rows: list[dict[str, Any]], prompts: list[dict[str, Any]], arguments: argparse.Namespace) -> None:
    for each in (rows, prompts):
        each.sort(key=lambda row: (list(TARGETS).index(row["target"]), row["length"]))
    head = (
        f"{datetime.date.today()}, {hardware(arguments.device)}, {arguments.threads} thread(s), {arguments.dtype}, "
        f"torch {torch.__version__}, transformers {transformers.__version__}. Random targets of {arguments.layers} "
        f"layers and width {arguments.hidden_size}, a drafter of 2 layers; chains of {arguments.drafts} drafts, trees "
        f"of {arguments.nodes} nodes, a window of {arguments.window} tokens. Caches and contexts are filled with "
        f"random keys and entries. The median of {arguments.runs} runs, by turns; nearly no draft is accepted."
    )
    below = f"\n\n## Prompts\n\n{prompt_table(prompts)}{about_longest(prompts)}" if prompts else ""
    report = f"# Long contexts\n\n{head}\n\n{table(rows)}{below}\n"
    save_report(report, arguments, rows=rows, prompts=prompts)


if __name__ == "__main__":
    main()
