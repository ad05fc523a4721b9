"""What an examination found, and its verdict: how many times as fast, what limits it, what to set."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...decoding.request import AUTO
from ...drafters.base import Drafter
from ..intervals import Interval

LEAST_TAU = 1.2  # below it no hardware has a speedup
LEAST_PROMPTS = 8  # below it nothing is changed: all of 8 prompts prefer a setting by chance once in 256 times
_USUAL = 8  # drafts a round; more may be too many for any machine
_DEAR = 2.2  # plain tokens that verifying them takes where the machine, or a mixture of experts, is to blame
_SLOW = 1.1  # a speedup that is none
_NOISE = 1.05  # a ratio of speeds that differs from run to run
_FEWER = 1.15  # a ratio of speeds at which another number of drafts is worth a word
_MOST_PROBLEMS = 4  # in a verdict
_OF_COSTS = {"verification", "draft count", "drafting"}  # causes that depend on the machine
_LIMITS = {
    "acceptance": "acceptance, as rounds are cheap: more of the drafts would have to be right",
    "verification": "verification, as each further token of a forward costs",
    "drafting": "drafting, which takes long beside the target",
}


# What a check finds: the cause of a problem in a word or two, and what it is with its fix; or an observation that may
# matter, with `REMARK` in the place of a cause.
Finding = tuple[str, str]
REMARK = ""


class Change(NamedTuple):
    """One thing was changed, and acceptance measured again on the same questions."""

    cause: str  # what it would be if that made the difference
    name: str
    before: float  # tokens a round
    after: float
    ratio: Interval

    def matters(self, least: float) -> bool:
        """Return whether it certainly brings tokens, and at least so many times as many."""
        return self.ratio.low > 1 and self.ratio.value >= least


@dataclass
class MeasuredCosts:
    """Seconds of rounds, medians."""

    context: int  # tokens of each text before them
    texts: int  # of the batch
    plain: float  # a token of each text without a drafter
    rounds: dict[int, float]  # by width, without drafting
    drafting: dict[int, float] = field(default_factory=dict)  # by the number of drafts
    compiled: MeasuredCosts | None = None  # the same over a static cache, compiled

    def verifying(self, drafts: int) -> float:
        """Return what verifying so many drafts and the anchor takes, in plain tokens."""
        return float(np.interp(1 + drafts, list(self.rounds), list(self.rounds.values()))) / self.plain

    def asking(self, drafts: int) -> float:
        """Return what drafting so many takes, in plain tokens."""
        least, most = min(self.drafting, default=0), max(self.drafting, default=0)
        if most <= least:
            return self.drafting.get(most, 0.0) / self.plain
        slope = (self.drafting[most] - self.drafting[least]) / (most - least)
        return max(self.drafting[least] + slope * (drafts - least), 0.0) / self.plain

    def break_even(self, drafts: int) -> float:
        """Return how many tokens a round has to bring to take no longer than without drafts."""
        return self.verifying(drafts) + self.asking(drafts)

    def speedup(self, drafts: int, acceptance: Sequence[float]) -> float:
        """Return the speed with so many drafts a round, as a multiple of the target's alone, prompts left out. Of each
        draft position `acceptance` has the share of rounds that accepted it."""
        return (1 + sum(acceptance[:drafts])) / self.break_even(drafts)


class Timed(NamedTuple):
    """Settings of a call with their speed."""

    settings: dict[str, int | str]  # arguments of `generate`
    speedup: Interval
    fastest: Interval  # speed of the fastest settings as a multiple of this one's

    @property
    def call(self) -> str:
        """The settings as they are written in a call."""
        return ", ".join(f"{name}={value!r}" for name, value in self.settings.items())

    def __str__(self) -> str:
        return f"`{self.call}` {self.speedup.value:.2f}x ({self.speedup.low:.2f} to {self.speedup.high:.2f})"

    @property
    def near(self) -> bool:
        """Whether its speed cannot be distinguished from the fastest."""
        return self.fastest.low <= 1 or self.fastest.value <= _NOISE


def recommendation(timed: Sequence[Timed]) -> str:
    """Describe the settings to begin with: of those that are as fast as the fastest, `"auto"`, or the shortest."""
    fastest = timed[0]
    faster = [each for each in timed if each.speedup.low > 1 and each.speedup.value >= _NOISE]
    if not faster:
        is_slow = fastest.speedup.low > 1 or all(each.speedup.high < 1 for each in timed)
        reason = (
            "no drafter: nothing that was tried is clearly" if is_slow else "cannot be told: nothing is certain to be"
        )
        return f"{reason} faster than the target alone; at best {fastest}"
    near = [each for each in faster if each.near] or faster
    by_itself = [each for each in near if each.settings == {"num_assistant_tokens": AUTO}]
    best = min(by_itself or near, key=lambda each: len(each.settings))
    merit = "finds its number by itself" if by_itself else "is shorter to write"
    return f"{best} the target alone" + ("" if best is fastest else f", within noise of the fastest, and {merit}")


@dataclass
class Diagnosis:
    """The result of [`examine`]."""

    problems: dict[str, str] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)
    facts: dict[str, str] = field(default_factory=dict)
    tau: float | None = None
    differing: int | None = None  # greedy texts that are not the target's own
    acceptance: list[float] = field(default_factory=list)
    drafts: int | None = None  # a round; `None` for "auto"
    speedup: Interval | None = None  # at temperature 0 with the drafter's own settings, prompts included
    costs: MeasuredCosts | None = None
    expected: list[float] = field(default_factory=list)  # of rounds with 0, 1, .. drafts by "auto", in plain rounds
    changes: list[Change] = field(default_factory=list)
    kinds: dict[str, float] = field(default_factory=dict)  # tokens a round of each kind of prompt
    timed: dict[float, list[Timed]] = field(default_factory=dict)  # by temperature, fastest first
    is_mixture: bool = False

    def add(self, cause: str, text: str) -> None:
        """Add a [`Finding`]."""
        if cause == REMARK:
            self.remarks.append(text)
        else:
            self.problems[cause] = text

    def __str__(self) -> str:
        lines = [f"{name}: {value}" for name, value in self.facts.items()]
        return "\n".join([*lines, *(f"Remark: {text}" for text in self.remarks), "", *self.verdict()])

    def verdict(self) -> list[str]:
        """Return at most ten lines: how many times as fast, what limits it, what to set."""
        lines, costs, count = [], self.costs, self.fixed_drafts
        if self.speedup is not None:
            x, low, high = self.speedup
            drafts = "as many drafts" if self.drafts is None else counted(self.drafts, "draft")
            lines.append(
                f"{x:.2f} times as fast as the target alone ({low:.2f} to {high:.2f}), at temperature 0 with "
                f"{drafts} a round{' as pay' * (self.drafts is None)}: {self.tau:.2f} tokens a round."
            )
        if costs is not None and self.tau is not None:
            lines.append(
                f"Verifying {counted(count + 1, 'token')} costs {costs.verifying(count):.1f} forwards on this "
                f"machine, drafting {costs.asking(count):.1f}: you need {costs.break_even(count):.1f} tokens a round, "
                f"and have {self.tau:.1f}."
            )
            if not self.is_wrong:
                lines.append(f"What limits it: {_LIMITS[self.limit]}.")
        told = list(self.problems.items())[:_MOST_PROBLEMS]
        lines += [f"PROBLEM ({cause}): {text}" for cause, text in told]
        if more := len(self.problems) - len(told):
            lines[-1] += f" And {more} more: {', '.join(list(self.problems)[_MOST_PROBLEMS:])}."
        lines += self._advice()
        ends = "Problems found." if self.is_wrong else "The pair fits; its rounds cost too much here."
        return [*lines, ends if self.problems else "No problem found."]

    def _advice(self) -> list[str]:
        if self.is_wrong:
            return ["First mend what is wrong. What to set comes out of a second examination."]
        if self.timed:
            return [f"Set, at temperature {t:g}: {recommendation(timed)}." for t, timed in self.timed.items()]
        if self.costs is None or self.tau is None:
            return []
        count, gain = self.best_count()
        speed = self.costs.speedup(count, self.acceptance) if self.acceptance else 0.0
        if speed < 1:
            return ["Set: no drafter, as it is."]
        if self.drafts and gain >= 1.05 and count != self.drafts:
            return [f"Set: `num_assistant_tokens={count}`, {gain:.2f} times as fast as {self.drafts} by these costs."]
        return [f"Set: nothing, or `num_assistant_tokens={AUTO!r}`."]

    @property
    def is_wrong(self) -> bool:
        """Whether something is wrong with the pair itself, on whatever machine."""
        return not self.problems.keys() <= _OF_COSTS

    @property
    def fixed_drafts(self) -> int:
        """The number of drafts a round; the most that were verified where "auto" decides."""
        return self.drafts or max(len(self.acceptance), 1)

    @property
    def limit(self) -> str:
        """What costs most of the speed that the drafts could bring."""
        if self.costs is None:
            return "acceptance"
        verifying, asking = self.costs.verifying(self.fixed_drafts) - 1, self.costs.asking(self.fixed_drafts)
        if max(verifying, asking) < 0.6:
            return "acceptance"
        return "verification" if verifying >= asking else "drafting"

    def best_count(self) -> tuple[int, float]:
        """Return the number of drafts that is fastest by the costs, and its speed as a multiple of today's."""
        if self.costs is None or not self.acceptance:
            return self.fixed_drafts, 1.0
        speeds = [self.costs.speedup(k, self.acceptance) for k in range(1, len(self.acceptance) + 1)]
        now = self.costs.speedup(min(self.fixed_drafts, len(speeds)), self.acceptance)
        return 1 + speeds.index(max(speeds)), max(speeds) / now


@dataclass
class Examination:
    """A pair in examination: what is examined, and what earlier checks have found and generated."""

    target: PreTrainedModel
    drafter: Drafter
    tokenizer: PreTrainedTokenizerBase
    questions: Sequence[str] = ()
    prompts: Sequence[torch.Tensor] = ()  # token ids of the questions, `[1, seq]` each
    new_tokens: int = 64
    fewest_new_tokens: int = 32  # where the time is short
    context: int = 512
    texts_at_once: int = 1
    thinking: bool = False
    compiled: bool = False
    seconds: float = 300.0
    began: float = field(default_factory=time.monotonic)
    report: Callable[[str], object] | None = None
    disable_tqdm: bool | None = True
    found: Diagnosis = field(default_factory=Diagnosis)
    texts: list[torch.Tensor] = field(default_factory=list)  # prompts with what the target wrote, `[1, seq]` each
    # Tokens and rounds of each text with the drafter, `[prompts, 2]`.
    rounds: np.ndarray = field(default_factory=lambda: np.zeros((0, 2)))

    def say(self, line: str) -> None:
        """Report a step, with the seconds so far."""
        if self.report:
            self.report(f"[{time.monotonic() - self.began:.0f} s of about {self.seconds:.0f}] {line}")

    def left(self) -> float:
        """Return the seconds that are left, some at least."""
        return max(self.seconds - (time.monotonic() - self.began), 0.05 * self.seconds)

    @property
    def has_weights(self) -> bool:
        """Whether the drafter has weights, which prompt lookup has not."""
        return hasattr(self.drafter, "get_memory_footprint")

    @property
    def is_thorough(self) -> bool:
        """Whether there are enough prompts to change things and to time settings."""
        return len(self.prompts) >= LEAST_PROMPTS


def blame_costs(examined: Examination) -> Iterator[Finding]:
    """Name what makes rounds too dear, if something does."""
    found, costs = examined.found, examined.found.costs
    if costs is None or found.tau is None or found.speedup is None:
        return
    count, (best, gain) = found.fixed_drafts, found.best_count()
    is_alone = not found.problems
    experts = " Each token of a mixture wakes more experts." if found.is_mixture else ""
    fewer = f"set `num_assistant_tokens={best}`" if best < count else 'set `num_assistant_tokens="auto"`'
    if found.timed:
        fewer = "set what was timed below"
    fastest = max([found.speedup.value, *(each.speedup.value for each in found.timed.get(0.0, [])[:1])])
    # What was timed must not contradict the costs: the number that is nearest to the best was faster, too.
    timed = {
        each.settings["num_assistant_tokens"]: each.speedup.value
        for each in found.timed.get(0.0, [])
        if len(each.settings) == 1
    }
    near = [k for k in timed if isinstance(k, int) and k < count]
    is_confirmed = (
        count not in timed or not near or (timed[min(near, key=lambda k: abs(k - best))] > 1.05 * timed[count])
    )
    is_dear = costs.verifying(min(count, _USUAL)) >= _DEAR
    if is_dear or (fastest < _SLOW and count <= _USUAL and found.limit == "verification" and is_alone):
        yield "verification", (
            f"Verifying {counted(count + 1, 'token')} costs {costs.verifying(count):.1f} forwards.{experts} Verify "
            f"fewer: {fewer}, and draft no trees."
        )  # fmt: skip
    elif found.drafts and is_alone and gain >= _FEWER and is_confirmed:
        yield "draft count", (
            f"{count} drafts a round are too many here: {best} would be {gain:.2f} times as fast by these costs. The "
            f"later ones are hardly accepted (the last in {100 * found.acceptance[-1]:.0f} % of rounds) and each is "
            f"paid for: {fewer}."
        )  # fmt: skip
    elif fastest < _SLOW and found.limit == "drafting" and is_alone:
        yield "drafting", (
            f"Drafting costs {costs.asking(count):.1f} forwards of the target, which is small beside its drafter: "
            "take a drafter of fewer layers or passes, prompt lookup, or none."
        )  # fmt: skip


def first_line(error: Exception) -> str:
    """Return what an error says, without a trace that may follow."""
    return f"{(str(error) or type(error).__name__).splitlines()[0]:.200}"


def counted(count: int, name: str) -> str:
    """Return a number of things in words."""
    return f"{count} {name}{'s' * (count != 1)}"


def tables(found: Diagnosis) -> dict[str, tuple[Sequence[str], list[Sequence[str]]]]:
    """Return heads and rows of what was measured, by title; of what was not, nothing."""
    result: dict[str, tuple[Sequence[str], list[Sequence[str]]]] = {}
    costs = found.costs
    if costs is not None:
        head = ["tokens of a round", "eager, ms", "eager, forwards", "compiled, ms", "compiled, forwards"]
        of_compiled = costs.compiled.rounds if costs.compiled else {}
        rows: list[Sequence[str]] = []
        for width in sorted({*costs.rounds, *of_compiled}):
            cells = [str(width)]
            for each in (costs, costs.compiled):
                seconds = each.rounds.get(width) if each else None
                cells += ["", ""] if seconds is None else [f"{1e3 * seconds:.2f}", f"{seconds / each.plain:.2f}"]  # type: ignore[union-attr]
            rows.append(cells)
        result["What a round costs, without drafting"] = head, rows
        result["What drafting costs"] = (
            ["drafts", "ms", "forwards"],
            [[str(k), f"{1e3 * s:.2f}", f"{s / costs.plain:.2f}"] for k, s in costs.drafting.items()],
        )
        if found.acceptance:
            result["Speed by the number of drafts, from costs and acceptance"] = (
                ["drafts", "accepted, %", "tokens a round", "needed", 'needed, as "auto" learned', "times as fast"],
                [
                    [
                        str(k), f"{100 * found.acceptance[k - 1]:.0f}", f"{1 + sum(found.acceptance[:k]):.2f}",
                        f"{costs.break_even(k):.2f}", f"{found.expected[k]:.2f}" if k < len(found.expected) else "",
                        f"{costs.speedup(k, found.acceptance):.2f}",
                    ]
                    for k in range(1, len(found.acceptance) + 1)
                ],
            )  # fmt: skip
    if found.changes:
        result["Where acceptance is lost: one thing changed at a time"] = (
            ["changed", "tokens a round before", "after", "ratio"],
            [
                [each.name, f"{each.before:.2f}", f"{each.after:.2f}",
                 f"{each.ratio.value:.2f} ({each.ratio.low:.2f} to {each.ratio.high:.2f})"]
                for each in found.changes
            ],
        )  # fmt: skip
    if found.kinds:
        result["By kind of prompt"] = ["prompts", "tokens a round"], [[k, f"{v:.2f}"] for k, v in found.kinds.items()]
    for temperature, timed in found.timed.items():
        result[f"Settings of generate, temperature {temperature:g}"] = (
            ["settings", "times as fast", "interval"],
            [
                [each.call, f"{each.speedup.value:.2f}", f"{each.speedup.low:.2f} to {each.speedup.high:.2f}"]
                for each in timed
            ],
        )
    return result
