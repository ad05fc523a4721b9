"""Copies: plain decoding, a drafter, lookup, and the drafter with lookup joined, in turns on the same prompts.

    python experiments/agents/measure_copies.py --target downloads/SmolLM2-135M-Instruct.Q4_1.gguf \\
        --drafter examples/models/smollm2-135m-hyperdflash --output copies
    python experiments/agents/measure_copies.py --target ... --drafter ... --output suites --data SUITES --kinds suites

`copies.jsonl` has files to edit, passages to quote and records to fill, written for this. Lookup alone is run with
each of `--lookup`, and the best of them over all prompts of a kind counts. The ratio is of the joined way's tokens a
second to those of the better of drafter and lookup alone, its interval from drawing the prompts again.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from shared import HERE, Rows, arguments_of, facts_of, head, load_pair, rates, run, timed

from hf_hyperdflash import PromptLookupDrafter
from hf_hyperdflash.benchmark.intervals import Interval, interval
from hf_hyperdflash.benchmark.results import save_report
from hf_hyperdflash.benchmark.suites import load_suite, suite_title, suites_in
from hf_hyperdflash.training.data.encoding import encode_prompts

PLAIN, DRAFTER, JOINED = "plain", "drafter", "joined"
TITLES = {"edit": "a file to edit", "quote": "a passage to quote", "record": "a record to fill"}
CLOCKS = {"decoding_cpu": "CPU-seconds after the first token", "cpu": "CPU-seconds of the whole call"}


def parse_arguments() -> argparse.Namespace:
    parser = arguments_of(__doc__)
    parser.add_argument("--data", help="a folder of prompt suites")
    parser.add_argument("--kinds", nargs="+", default=list(TITLES), help="of copies, or names of suites, or `suites`")
    parser.add_argument("--prompts", type=int, default=30, help="of each kind, at most")
    parser.add_argument("--nodes", type=number_or_auto, help="of the drafter's trees, alone and joined; else chains")
    parser.add_argument(
        "--lookup", nargs="+", type=number_or_auto, default=["auto", 10, 20], help="drafts of lookup alone"
    )
    arguments = parser.parse_args()
    if arguments.data is None and not set(arguments.kinds) <= set(TITLES):
        parser.error(f"--kinds {' '.join(arguments.kinds)} has suites: pass the folder that they are in with --data")
    return arguments


def prompts_of(kind: str, arguments: argparse.Namespace) -> list[list[dict[str, str]]]:
    if kind in TITLES:
        rows = map(json.loads, (HERE / "copies.jsonl").read_text(encoding="utf-8").splitlines())
        return [row["messages"] for row in rows if row["kind"] == kind][: arguments.prompts]
    return [[{"role": "user", "content": turns[0]}] for turns in load_suite(kind, arguments.data, arguments.prompts)]


def number_or_auto(text: str) -> int | str:
    return text if text == "auto" else int(text)


def methods_of(target: Any, drafters: list[Any], arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """The arguments of `generate` by method. No two share a drafter: each learns for itself what pays."""
    methods: dict[str, dict[str, Any]] = {PLAIN: {}}
    for name, drafter in zip((DRAFTER, JOINED), drafters):
        methods[name] = {"assistant_model": drafter, "num_assistant_tokens": "auto", "lookup": name == JOINED}
        methods[name] |= {"tree_budget": arguments.nodes} if arguments.nodes else {}
    for count in arguments.lookup:
        alone = PromptLookupDrafter(target)
        alone.bind(target)
        methods[f"lookup {count}"] = {"assistant_model": alone, "num_assistant_tokens": count, "lookup": False}
    return methods


def compared(rows: list[dict[str, Any]], clock: str) -> tuple[str, str, Interval, dict[str, float]]:
    """Return the best lookup, the better one alone, the joined way's ratio to it, and each method's to plain."""
    found = {name: rates(rows, name, clock) for name in rows[0]["methods"]}
    lookup = max((name for name in found if name.startswith("lookup")), key=lambda name: found[name][0])
    better = max((DRAFTER, lookup), key=lambda name: found[name][0])
    return (
        lookup,
        better,
        interval(found[JOINED] / found[better]),
        {n: of[0] / found[PLAIN][0] for n, of in found.items()},
    )


def main() -> None:
    arguments = parse_arguments()
    kinds = [name for kind in arguments.kinds for name in (suites_in(arguments.data) if kind == "suites" else [kind])]
    prompts = {kind: prompts_of(kind, arguments) for kind in kinds}
    target, tokenizer, drafters = load_pair(arguments, 2)
    methods = methods_of(target, drafters, arguments)
    facts = facts_of(target)
    rows = Rows(arguments, "lookup", "nodes")
    (warm,) = encode_prompts(tokenizer, [{"messages": prompts[kinds[0]][0]}])
    for options in methods.values():
        timed(target.generate, warm, 16, **options)
    names = list(methods)
    for kind in kinds:
        for number, messages in enumerate(prompts[kind]):
            if rows.has(kind=kind, prompt=number):
                continue
            (ids,) = encode_prompts(tokenizer, [{"messages": messages}])
            figures, texts = {}, {}
            for name in [*names[number % len(names) :], *names[: number % len(names)]]:
                figures[name], texts[name] = timed(target.generate, ids, arguments.tokens, **methods[name])
            same = {name: texts[name] == texts[PLAIN] for name in names}
            text = tokenizer.decode(texts[PLAIN], skip_special_tokens=True)
            rows.add(kind=kind, prompt=number, prompt_tokens=ids.shape[1], methods=figures, same=same, text=text)
            print(
                kind, number + 1, {name: f"{each['decoding_cpu']:.2f}" for name, each in figures.items()}, flush=True
            )
    write(rows.rows, kinds, facts, arguments)


def write(rows: list[dict[str, Any]], kinds: list[str], facts: dict[str, Any], arguments: argparse.Namespace) -> None:
    drafts = "chains" if arguments.nodes is None else f"trees of nodes: {arguments.nodes}"
    parts = [head("Copies", facts), f"Greedy, at most {arguments.tokens} new tokens; the drafter writes {drafts}."]
    figures: dict[str, Any] = {}
    for clock, title in CLOCKS.items():
        lines = [
            f"Speed by {title}, times plain:\n",
            "| | prompts | drafter | best lookup | joined | joined to the better (95 %) | tau of joined | as plain |",
            "|---|---:|---:|---:|---:|---:|---:|---:|",
        ]
        for kind in kinds:
            of_kind = [row for row in rows if row["kind"] == kind]
            lookup, better, ratio, times = compared(of_kind, clock)
            joined = [row["methods"][JOINED] for row in of_kind]
            tau = sum(each["tokens"] - 1 for each in joined) / max(sum(each["rounds"] for each in joined), 1)
            same = sum(row["same"][JOINED] for row in of_kind)
            lines.append(
                f"| {TITLES.get(kind) or suite_title(kind)} | {len(of_kind)} | {times[DRAFTER]:.2f} | "
                f"{times[lookup]:.2f} ({lookup.removeprefix('lookup ')}) | {times[JOINED]:.2f} | {ratio.value:.2f} "
                f"({ratio.low:.2f} to {ratio.high:.2f}) | {tau:.2f} | {same} of {len(of_kind)} |"
            )
            figures.setdefault(kind, {})[clock] = {"times_plain": times, "better": better, "ratio": ratio._asdict()}
        parts.append("\n".join(lines))
    report = "\n\n".join(parts) + "\n"
    print(report)
    save_report(report, arguments, facts=facts, kinds=figures)


if __name__ == "__main__":
    run(main)
