"""What a round costs after long texts: chains and trees, over caches that grow and static ones, eager and compiled.

The target is a random Qwen3, and its cache is filled with random keys and values, as what they are changes no time.
The drafter drafts the same tokens in every round, of which nearly none is accepted. All ways take turns in random
order. A round begins where the drafter is asked. Seconds are the processor's on a CPU.

    python experiments/benchmark longtext --output experiments/results/compiled/longtext
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import DynamicCache, PreTrainedModel, StaticCache
from transformers.cache_utils import Cache

from hf_hyperdflash.benchmark.results import save_report
from hf_hyperdflash.drafters.base import Drafter
from hf_hyperdflash.drafters.sampling import DraftRequest
from hf_hyperdflash.targets.caches.name import CACHE
from hf_hyperdflash.trees.tree import DraftTree

from .compiled import compile_config, hardware
from .loop import clock, random_target

WAYS = ["growing", "static", "static, compiled"]
DRAFTS = 7


class SameDrafts(Drafter):
    """Drafts the same tree in every round: a chain, or paths that part below the anchor.

    Attributes:
        times: When it was asked for one.
    """

    def __init__(self, target: PreTrainedModel, nodes: int, paths: int) -> None:
        self.config, self.max_draft_tokens, self.paths = target.config, nodes, paths
        parents = tuple(node - paths if node >= paths else -1 for node in range(nodes))
        self.tree, self.times = DraftTree(torch.arange(2, 2 + nodes, device=target.device), parents), list[float]()

    def draft(self, target: Any, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        self.times.append(clock(requests[0].ids))
        return [self.tree.first(min(each.num_drafts * self.paths, len(self.tree))) for each in requests]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 8192, 32768], help="tokens before the rounds")
    parser.add_argument("--room", type=int, default=32768 + 256, help="slots of a static cache")
    parser.add_argument("--ways", nargs="+", default=WAYS, choices=WAYS)
    parser.add_argument("--nodes", type=int, default=16, help="of a tree")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--vocab-size", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=24, help="a call")
    parser.add_argument("--runs", type=int, default=5, help="after one that is not counted")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, help="a folder for report.md and results.json")
    arguments = parser.parse_args()
    if max(arguments.lengths) + arguments.rounds * (DRAFTS + 1) + arguments.nodes >= arguments.room:
        parser.error(f"--room is {arguments.room}, too few for a text of {max(arguments.lengths)} tokens and rounds.")
    return arguments


def filled(cache: Cache, length: int, like: PreTrainedModel) -> Cache:
    """Return a cache with keys and values of so many tokens in it."""
    config = like.config
    shape = 1, config.num_key_value_heads, length, config.head_dim
    generator = torch.Generator(like.device).manual_seed(0)
    for layer in range(config.num_hidden_layers):
        states = torch.randn(shape, generator=generator, device=like.device, dtype=like.dtype)
        cache.update(states, states, layer)
    return cache


def way_of(
    target: PreTrainedModel, name: str, drafter: SameDrafts, length: int, arguments: argparse.Namespace
) -> Callable[[], float]:
    """Return what runs rounds in one way, and returns the seconds of the median one."""
    ids = torch.full((1, length + 1), 2, device=target.device)
    # The last rounds draft no more than there is room for, and are not counted.
    options: dict[str, Any] = dict(max_new_tokens=arguments.rounds + DRAFTS + 2, do_sample=False, pad_token_id=0)
    if name.endswith("compiled"):
        options["compile_config"] = compile_config()

    def seconds() -> float:
        config = target.config
        grows = name == "growing"
        cache = DynamicCache() if grows else StaticCache(config=config, max_cache_len=arguments.room)
        drafter.times.clear()
        target.generate(ids, assistant_model=drafter, **options, **{CACHE: filled(cache, length, target)})
        return statistics.median(end - start for start, end in pairwise(drafter.times[: -DRAFTS - 1]))

    return seconds


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    transformers.logging.set_verbosity_error()
    target = random_target(arguments).to(arguments.device, getattr(torch, arguments.dtype))
    target.config.max_position_embeddings = arguments.room
    drafters = {"chain": SameDrafts(target, DRAFTS, 1), "tree": SameDrafts(target, arguments.nodes, 4)}
    for drafter in drafters.values():
        drafter.bind(target)
    order, results = random.Random(0), []
    for length in arguments.lengths:
        ways = {
            (name, kind): way_of(target, name, drafter, length, arguments)
            for name in arguments.ways
            for kind, drafter in drafters.items()
        }
        times: dict[tuple[str, str], list[float]] = {key: [] for key in ways}
        for run in range(-1, arguments.runs):
            for key in order.sample(list(ways), len(ways)):
                seconds = ways[key]()
                times[key] += [seconds] if run >= 0 else []
        results += [
            {"length": length, "way": name, "kind": kind, "round_seconds": seconds}
            for (name, kind), seconds in times.items()
        ]
        print(f"{length} tokens: done", flush=True)
    head = (
        f"{hardware(arguments)} A random Qwen3 ({arguments.layers} layers, width {arguments.hidden_size}), "
        f"{arguments.dtype}, the median of {arguments.runs} runs by turns; static caches of {arguments.room:,} slots."
    )
    report = f"{head}\n\n{table(results, arguments)}"
    print(report)
    save_report(f"# Rounds after long texts\n\n{report}\n", arguments, results=results)


def table(results: list[dict[str, Any]], arguments: Any) -> str:
    """Return the median milliseconds of each kind of round, a tree's beside a chain's, and a chain's beside that of
    the first way."""
    tree, first = f"{arguments.nodes} nodes", arguments.ways[0]
    lines = [f"| cache | tokens before | chain of {DRAFTS}, ms | {tree}, ms | {tree} / chain | beside {first}'s |"]
    lines.append("|---|---:|---:|---:|---:|---:|")
    found = {(r["way"], r["length"], r["kind"]): statistics.median(r["round_seconds"]) for r in results}
    for name in arguments.ways:
        for length in arguments.lengths:
            chain, wide = (found[name, length, kind] for kind in ("chain", "tree"))
            beside = chain / found[first, length, "chain"]
            cells = f"{1e3 * chain:.1f} | {1e3 * wide:.1f} | {wide / chain:.2f} | {beside:.2f}"
            lines.append(f"| {name} | {length:,} | {cells} |")
    return "\n".join(lines)
