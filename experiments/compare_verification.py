"""What drafts bring at temperature 1 by two rules of verification: down from the anchor, and from a path's end.

    python experiments/compare_verification.py --target examples/models/tiny-deepseek-v4 \
        --drafter examples/models/tiny-deepseek-v4-hyperdflash --data suites --output verification

Draft by draft from the anchor on is what speculative sampling does (Leviathan et al.; SpecInfer for trees), and ours
where a logits processor is not known to be stateless. Else a path is settled from its end (`traversal_walk` in
`hf_hyperdflash/trees/acceptance.py`). Both are run on the same prompts in turns, beside the target alone; and for
every round of the second, both rules judge its very drafts again, `--judged` times each, so that their accepted
lengths differ by the rule alone.
"""

from __future__ import annotations

import argparse
import datetime
import statistics
import time
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from transformers import LogitsProcessor, LogitsProcessorList

from hf_hyperdflash import load_drafter, load_target, load_tokenizer
from hf_hyperdflash.benchmark.results import save_report
from hf_hyperdflash.benchmark.runner import hardware
from hf_hyperdflash.benchmark.suites import load_suite, suites_in
from hf_hyperdflash.drafters.base import Observer
from hf_hyperdflash.trees.acceptance import sampled_walk, traversal_walk

ALONE, DOWN, UP = "target alone", "from the anchor", "from the end"


class Unknown(LogitsProcessor):
    """Changes nothing, but might have a state for all that our loop knows."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores


@dataclass
class Found:
    """Of one setting: tokens, rounds and seconds by way, and the lengths of the same rounds by rule."""

    tokens: dict[str, int] = field(default_factory=lambda: dict.fromkeys((ALONE, DOWN, UP), 0))
    rounds: dict[str, int] = field(default_factory=lambda: dict.fromkeys((DOWN, UP), 0))
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys((ALONE, DOWN, UP), 0.0))
    judged: dict[str, list[float]] = field(default_factory=lambda: {DOWN: [], UP: []})

    def rate(self, way: str) -> float:
        return self.tokens[way] / self.seconds[way]

    def figures(self) -> dict[str, Any]:
        judged = {rule: statistics.fmean(lengths) for rule, lengths in self.judged.items()}
        return {**vars(self), "judged": judged, "judged_rounds": len(self.judged[UP])}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="path or Hub id")
    parser.add_argument("--drafter", required=True, help="path or Hub id")
    parser.add_argument("--data", required=True, help="a folder of prompt suites")
    parser.add_argument("--limit", type=int, default=4, help="prompts of each suite")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--drafts", type=int, nargs="*", default=[4, 6, 8])
    parser.add_argument("--nodes", type=int, nargs="*", default=[16, 32])
    parser.add_argument("--judged", type=int, default=16, help="times that each rule judges a round's drafts")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", help="a folder for results.json and report.md")
    return parser.parse_args()


def judge(found: Found, tree: Any, logits: torch.Tensor, times: int) -> None:
    """How many tokens a round's drafts bring by each rule, on average."""
    p, drafts = logits.softmax(-1), tree.tokens.tolist()
    walks = {
        DOWN: lambda: sampled_walk(tree, drafts, lambda node: p[node + 1]),
        UP: lambda: traversal_walk(tree, p),
    }
    for rule, walk in walks.items():
        found.judged[rule].append(statistics.fmean(sum(1 for _ in walk()) for _ in range(times)))


@dataclass
class TreeRecorder(Observer):
    seen: list[Any]

    def add_round(self, context: Any, tree: Any, logits: torch.Tensor, accepted: list[int]) -> None:
        self.seen += [(tree, logits)] if len(tree) else []


def measure(target: Any, drafter: Any, prompts: list[Any], setting: dict[str, int], times: int, count: int) -> Found:
    found, seen = Found(), []
    drafter.observer = TreeRecorder(seen)
    unknown = LogitsProcessorList([Unknown()])
    ways = {ALONE: {}, DOWN: {"assistant_model": drafter, "logits_processor": unknown, **setting}}
    ways[UP] = {"assistant_model": drafter, **setting}
    for number, inputs in enumerate(prompts):
        for way, options in ways.items():
            torch.manual_seed(number)
            began = time.perf_counter()
            text = target.generate(**inputs, do_sample=True, top_k=0, max_new_tokens=count, **options)
            found.seconds[way] += time.perf_counter() - began
            found.tokens[way] += text.shape[1] - inputs["input_ids"].shape[1]
            if way != ALONE:
                found.rounds[way] += drafter.last_stats.rounds
            for tree, logits in seen if way == UP else ():
                judge(found, tree, logits, times)
            seen.clear()
    drafter.observer = None
    return found


def table(results: dict[str, Found]) -> str:
    lines = [
        "| drafts | tokens a round, from the anchor | from the end | ratio | speed over the target alone, from the "
        "anchor | from the end | ratio |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name, found in results.items():
        down, up = (found.figures()["judged"][rule] for rule in (DOWN, UP))
        slow, fast = (found.rate(way) / found.rate(ALONE) for way in (DOWN, UP))
        lines.append(
            f"| {name} | {down:.2f} | {up:.2f} | {up / down:.2f} | {slow:.2f}× | {fast:.2f}× | {fast / slow:.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    target = load_target(arguments.target, dtype=torch.float32)
    drafter = load_drafter(arguments.drafter, target=target)
    drafter.bind(target)
    tokenizer = load_tokenizer(arguments.target)
    suites = suites_in(arguments.data)
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": turns[0]}], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        for suite in suites
        for turns in load_suite(suite, arguments.data, arguments.limit)
    ]
    settings = {f"chain of {count}": {"num_assistant_tokens": count} for count in arguments.drafts}
    settings |= {f"{count} nodes": {"tree_budget": count} for count in arguments.nodes}
    measure(target, drafter, prompts[:1], {}, 1, 8)  # warm
    results = {}
    for name, setting in settings.items():
        results[name] = measure(target, drafter, prompts, setting, arguments.judged, arguments.max_new_tokens)
        print(name, flush=True)
    rounds = min(len(found.judged[UP]) for found in results.values())
    head = (
        f"{datetime.date.today()}, {hardware(target.device)}, {arguments.threads} thread(s), torch "
        f"{torch.__version__}, transformers {transformers.__version__}, float32, temperature 1; {len(prompts)} "
        f"prompts of {', '.join(suites)}, at most {arguments.max_new_tokens} new tokens; tokens a round are of the "
        f"same drafts by both rules, {rounds} rounds or more, speeds of whole texts in turns"
    )
    report = f"# Two rules of verification\n\n{head}\n\n{table(results)}\n"
    print(report)
    save_report(report, arguments, results={name: found.figures() for name, found in results.items()})


if __name__ == "__main__":
    main()
