"""What `num_assistant_tokens="auto"` gains, and could gain: simulated on greedy texts, free of a machine's moods.

    python experiments/simulate_auto.py --target examples/models/tiny-deepseek-v4 \
        --drafter examples/models/tiny-deepseek-v4-hyperdflash --suites FOLDER --plain-ms 11.9 --round-ms 17.7 \
        --draft-ms 0.64 --output simulated

The target writes each prompt's text, and the drafter drafts all it can from every position of it: so what any rule
would have had accepted is known. What a round takes is given, with a little noise. Suites come in a random order, as
often as `--orders` says, each order with prompts of its own, and what is learned is forgotten in between.

Other worlds: `--width 3` for kernels that take as long for three tokens as for one, `--accept 0.55` for a drafter of
whose right drafts the target rejects the others, `--accept 1 0.1` for one that is good at every other suite.
`--set policies.MEMORY=32` changes a constant of `hf_hyperdflash.auto` (`acceptance`, `costs`, `policies`);
`--each-constant` halves and doubles each: what it is worth.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
from transformers import LogitsProcessorList

from hf_hyperdflash import capture_residual, load_drafter, load_target, load_tokenizer
from hf_hyperdflash.auto import acceptance, costs, policies
from hf_hyperdflash.auto.policies import ChainPolicy, DraftingStats, FixedPolicy, Outcome
from hf_hyperdflash.benchmark.results import save_report
from hf_hyperdflash.benchmark.runner import hardware
from hf_hyperdflash.benchmark.suites import load_suite, suites_in
from hf_hyperdflash.drafters.sampling import DraftRequest, DraftSampler
from hf_hyperdflash.targets.registry import target_of
from hf_hyperdflash.training.data.encoding import encode_prompts
from hf_hyperdflash.trees.tree import DraftTree

LEARNED = "auto, once it has learned"
CONSTANTS = {  # that chains depend on
    acceptance: ("MEMORY", "PRECISION", "EDGE"),
    costs: ("ROUNDS", "HICCUP", "CENTERS", "MEMORY"),
    policies: ("MEMORY", "FEW", "RARE", "ERROR"),
}
NOISE, HICCUPS, HICCUP = 0.04, 0.02, 2.0  # of a round's time: its spread, how many take longer, and how much longer


@dataclass
class Drafted:
    """From one position of a text: what the drafter held of each draft, and how many of them are the text."""

    signals: list[float]
    accepted: int


Text = list[Drafted]  # every position that a round may begin at


class Everything(FixedPolicy):
    """Admits all drafts, and keeps what is said of them."""

    def __init__(self) -> None:
        self.signals: list[float] = []

    def is_open(self) -> bool:
        return True

    def admits(self, signal: float) -> bool:
        self.signals.append(signal)
        return True


def drafted_everywhere(target: Any, drafter: Any, text: torch.Tensor, prompt_length: int) -> Text:
    """Of a text `[1, seq]`, whose first token after the prompt is that of the prompt's forward."""
    with torch.no_grad(), capture_residual(target, drafter.layers_read(target_of(target))) as captured:
        target(text)
    residual, positions = captured[0], torch.arange(text.shape[1])[None]
    context, known, drafted = drafter.new_context(), 0, []
    for anchor in range(prompt_length, text.shape[1] - 1):
        new = slice(known, anchor)
        drafter.extend(
            target_of(target), context, residual[:, new], positions[:, new], text[:, known + 1 : anchor + 1]
        )
        known, told = anchor, Everything()
        count = min(drafter.max_draft_tokens, text.shape[1] - anchor - 2)
        sampler = DraftSampler(LogitsProcessorList(), do_sample=False, chain_admission=told)
        request = DraftRequest(context, text[:, : anchor + 1], positions[:, : anchor + 1], count, sampler)
        trees = drafter.draft(target_of(target), [request]) if count else []
        right = [bool(a == b) for tree in trees for a, b in zip(tree.tokens, text[0, anchor + 1 :])]
        drafted.append(Drafted(told.signals, [*right, False].index(False)))
    return drafted


# Rules: each begins a text and is asked in every round for a number of drafts, `None` for a round without the drafter


@dataclass
class Rounds:
    """What rounds take, in milliseconds."""

    plain: float
    start: float
    each: float
    width: int = 1  # verified tokens that take as long as one

    def take(self, drafts: int | None, draw: random.Random) -> float:
        drafts = drafts if drafts is None else self.width * math.ceil((drafts + 1) / self.width) - 1
        exact = self.plain if drafts is None else self.start + self.each * drafts
        hiccup = draw.uniform(1.0, HICCUP) if draw.random() < HICCUPS else 1.0
        return exact * math.exp(draw.gauss(0.0, NOISE)) * hiccup


Rule = Callable[[Text, Rounds, random.Random], float]
"""Milliseconds that a text takes."""


def by_choice(choice: Callable[[Drafted], int | None]) -> Rule:
    def rule(text: Text, rounds: Rounds, draw: random.Random) -> float:
        place, spent = 0, 0.0
        while place < len(text):
            drafts = choice(text[place])
            spent += rounds.take(drafts, draw)
            place += 1 + min(text[place].accepted, drafts or 0)
        return spent

    return rule


def fixed(count: int) -> Rule:
    return by_choice(lambda drafted: min(count, len(drafted.signals)) or None)  # no room, no drafter


def foreseen(drafted: Drafted) -> int | None:
    """As many as will be accepted."""
    return drafted.accepted or None


def auto(stats: DraftingStats) -> Rule:
    def rule(text: Text, rounds: Rounds, draw: random.Random) -> float:
        policy, place, spent = ChainPolicy(stats), 0, 0.0
        while place < len(text):
            signals = text[place].signals
            room, drafts = policy.begin(place, [len(signals)]), 0
            while drafts < room and policy.is_open() and policy.admits(signals[drafts]):
                drafts += 1
            accepted = min(text[place].accepted, drafts)
            took = rounds.take(drafts if policy.asks_drafter else None, draw)
            place, spent = place + 1 + accepted, spent + took
            tree = DraftTree.chain(torch.zeros(drafts))
            policy.end([Outcome(tree, list(range(accepted)), place >= len(text))], took)
        return spent

    return rule


def thinned(text: Text, share: float, draw: random.Random) -> Text:
    """The same, where each right draft is accepted with a probability of `share`."""
    wrong = [(draw.random() >= share for _ in range(each.accepted)) for each in text]
    return [
        Drafted(each.signals, next((k for k, is_wrong in enumerate(wrongs) if is_wrong), each.accepted))
        for each, wrongs in zip(text, wrong)
    ]


Speeds = list[dict[str, float]]
"""Of each order, on every suite: tokens a millisecond, beside no drafts at all."""


def simulate(
    suites: dict[str, list[Text]], rounds: Rounds, rules: Callable[[], dict[str, Rule]], orders: int, prompts: int
) -> dict[str, Speeds]:
    """Of each rule that `rules` makes for an order. Each text has noise of its own, the same for all rules."""
    found: dict[str, Speeds] = {}
    for number in range(orders):
        draw = random.Random(number)
        chosen = {suite: draw.sample(suites[suite], prompts) for suite in draw.sample(list(suites), len(suites))}
        for name, rule in rules().items():
            speeds = {
                suite: rounds.plain * sum(map(len, texts))
                / sum(rule(text, rounds, random.Random(f"{number} {suite} {i}")) for i, text in enumerate(texts))
                for suite, texts in chosen.items()
            }  # fmt: skip
            found.setdefault(name, []).append(speeds)
    return found


def all_rules(suites: dict[str, list[Text]], rounds: Rounds, most: int) -> Callable[[], dict[str, Rule]]:
    learned = DraftingStats()
    for text in (text for texts in suites.values() for text in texts):
        auto(learned)(text, rounds, random.Random(0))
    numbers = {f"{count} drafts": fixed(count) for count in range(1, most + 1)}
    return lambda: {
        **numbers, "auto": auto(DraftingStats()), LEARNED: auto(learned), "foresight": by_choice(foreseen)
    }  # fmt: skip


def simulate_each_constant(simulated: Callable[[], Speeds]) -> list[str]:
    """A table: how much faster or slower `auto` is with each constant halved or doubled, in percent."""
    lines = ["", "| constant | value | halved, % | doubled, % |", "|---|---:|---:|---:|"]
    before = simulated()
    for file, names in CONSTANTS.items():
        for name in names:
            value, cells = getattr(file, name), []
            for changed in (value / 2, value * 2):
                setattr(file, name, type(value)(changed))
                ahead = [
                    100 * (statistics.mean(after[suite] / then[suite] for suite in then) - 1)
                    for then, after in zip(before, simulated())
                ]
                cells.append(f"{statistics.mean(ahead):+.1f} ({standard_error(ahead):.1f})")
            setattr(file, name, value)
            lines.append(f"| {file.__name__.rpartition('.')[2]}.{name} | {value:g} | {' | '.join(cells)} |")
    return lines


def report(found: dict[str, list[dict[str, float]]], facts: dict[str, Any]) -> str:
    means = {name: [statistics.mean(of.values()) for of in orders] for name, orders in found.items()}
    numbers = [name for name in found if name.endswith("drafts")]
    best = max(numbers, key=lambda name: statistics.mean(means[name]))
    lines = ["# What `auto` gains", "", "; ".join(f"{name}: {value}" for name, value in facts.items()), ""]
    lines += [
        "Speedup: on average over suites. Over the best number: that which is best of all suites together, in each",
        "order; first suite, other suites: over the number that is best of each. Once it has learned: from the same",
        "texts. Foresight drafts what will be accepted, no more. Standard errors over the orders in parentheses.", "",
        "| rule | speedup | over the best number, % | first suite, % | other suites, % |", "|---|---:|---:|---:|---:|",
    ]  # fmt: skip
    for name in [best, "auto", LEARNED, "foresight"]:
        ahead, first, others = [], [], []
        for number, speeds in enumerate(found[name]):
            ahead.append(100 * (means[name][number] / max(means[each][number] for each in numbers) - 1))
            of_suite = [
                100 * (speed / max(found[each][number][suite] for each in numbers) - 1)
                for suite, speed in speeds.items()
            ]
            first.append(of_suite[0])
            others.append(statistics.mean(of_suite[1:] or of_suite))
        cells = " | ".join(f"{statistics.mean(of):+.1f} ({standard_error(of):.1f})" for of in (ahead, first, others))
        lines.append(f"| {name} | {statistics.mean(means[name]):.2f}× | {cells} |")
    return "\n".join(lines)


def standard_error(values: Sequence[float]) -> float:
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--drafter", required=True)
    parser.add_argument("--suites", required=True, help="a folder of prompt suites")
    parser.add_argument("--skip", type=int, default=0, help="the first prompts of each suite")
    parser.add_argument("--limit", type=int, default=8, help="prompts of each suite after those")
    parser.add_argument("--prompts", type=int, default=4, help="of these, for each order of the suites")
    parser.add_argument("--orders", type=int, default=100)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--plain-ms", type=float, required=True, help="that a round without its drafter takes")
    parser.add_argument("--round-ms", type=float, required=True, help="that one with it takes, without its drafts")
    parser.add_argument("--draft-ms", type=float, required=True, help="that each draft takes, verification included")
    parser.add_argument("--width", type=int, default=1, help="verified tokens that take as long as one")
    often = "how often right drafts are accepted, by suites in turn"
    parser.add_argument("--accept", type=float, nargs="+", default=[1.0], help=often)
    parser.add_argument("--set", action="append", default=[], metavar="FILE.NAME=VALUE", help="a constant of `auto`")
    parser.add_argument("--each-constant", action="store_true", help="halve and double each constant of `auto`")
    parser.add_argument("--output", type=Path, required=True)
    return parser.parse_args()


def change_constants(settings: Sequence[str]) -> None:
    """Of the files of `hf_hyperdflash.auto`, as in `policies.MEMORY=32`."""
    files = {"acceptance": acceptance, "costs": costs, "policies": policies}
    for setting in settings:
        name, _, value = setting.partition("=")
        file, _, constant = name.partition(".")
        if not value or not constant.isupper() or not hasattr(files.get(file), constant):
            raise ValueError(f"`--set` is {setting}, expected FILE.NAME=VALUE, as policies.MEMORY=32.")
        setattr(files[file], constant, ast.literal_eval(value))


def prompts_of(args: argparse.Namespace) -> dict[str, list[list[str]]]:
    """Of each suite, after a look at all that is asked for."""
    for name in ("plain_ms", "round_ms", "draft_ms", "prompts", "orders", "width"):
        if getattr(args, name) <= 0:
            raise ValueError(f"`--{name.replace('_', '-')}` is {getattr(args, name)}, expected more than 0.")
    if min(args.accept) <= 0:
        raise ValueError(f"`--accept` is {min(args.accept)}, expected more than 0.")
    if args.skip < 0 or args.max_new_tokens < 3:
        raise ValueError(
            f"`--skip` is {args.skip} and `--max-new-tokens` {args.max_new_tokens}, expected at least 0 and 3."
        )
    last = args.skip + args.limit
    prompts = {name: load_suite(name, args.suites, last)[args.skip :] for name in suites_in(args.suites)}
    for name, of_suite in prompts.items():
        if len(of_suite) < args.prompts:
            raise ValueError(
                f"The suite {name} has {len(of_suite)} prompts from {args.skip + 1} to {last}, expected at least "
                f"{args.prompts} (`--prompts`)."
            )
    return prompts


def main() -> None:
    args = parse_args()
    prompts = prompts_of(args)
    change_constants(args.set)
    args.output.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    target, tokenizer = load_target(args.target, dtype=torch.float32), load_tokenizer(args.target)
    drafter = load_drafter(args.drafter, target=target)
    suites: dict[str, list[Text]] = {}
    for (suite, asked), accept in zip(prompts.items(), itertools.cycle(args.accept)):
        for turns in asked:
            ids = encode_prompts(tokenizer, [{"messages": [{"role": "user", "content": turns[0]}]}])[0]
            text = target.generate(ids, max_new_tokens=args.max_new_tokens, do_sample=False)
            drafted = drafted_everywhere(target, drafter, text, ids.shape[1])
            suites.setdefault(suite, []).append(thinned(drafted, accept, random.Random(str(turns))))
    rounds = Rounds(args.plain_ms, args.round_ms, args.draft_ms, args.width)
    rules = all_rules(suites, rounds, drafter.max_draft_tokens)
    found = simulate(suites, rounds, rules, args.orders, args.prompts)
    accepted = ", ".join(f"{accept:g}" for accept in args.accept)
    facts = {
        "target": Path(args.target).name, "drafter": Path(args.drafter).name,
        "prompts of each suite": f"{args.skip + 1} to {args.skip + args.limit}, {args.prompts} an order",
        "orders": args.orders, "new tokens": args.max_new_tokens,
        "milliseconds": f"{args.plain_ms:g} without drafter, {args.round_ms:g} and {args.draft_ms:g} a draft with it",
        "world": f"{args.width} verified tokens take as long as one, right drafts are accepted at {accepted}",
        "changed constants": ", ".join(args.set) or "none",
        "date": date.today().isoformat(), "hardware": hardware("cpu"), "torch": torch.__version__,
    }  # fmt: skip
    told = report(found, facts)
    if args.each_constant:
        alone = lambda: {"auto": auto(DraftingStats())}  # noqa: E731
        simulated = lambda: simulate(suites, rounds, alone, args.orders, args.prompts)["auto"]  # noqa: E731
        told = "\n".join([told, *simulate_each_constant(simulated)])
    save_report(told + "\n", args)
    print(told)


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as error:  # what the user can mend
        raise SystemExit(f"Error: {' '.join(str(error).split())}") from None
