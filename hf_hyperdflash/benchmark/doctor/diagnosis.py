"""What an examination found, and its verdict: how many times as fast, what limits it, what to set."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ...decoding.request import AUTO
from ..intervals import Interval
from .recommended import Timed, recommendation
from .round_costs import MeasuredCosts

LEAST_TAU = 1.2  # below it no hardware has a speedup
_USUAL = 8  # drafts a round; more may be too many for any machine
_DEAR = 2.2  # plain tokens that verifying them takes where the machine, or a mixture of experts, is to blame
_SLOW = 1.1  # a speedup that is none
_FEWER = 1.15  # a ratio of speeds at which another number of drafts is worth a word
_MOST_PROBLEMS = 4  # in a verdict
_OF_COSTS = {"verification", "draft count", "drafting"}  # causes that depend on the machine


class Change(NamedTuple):
    """One thing was changed, and acceptance measured again on the same questions.

    Attributes:
        cause: What it would be if that made the difference.
        name: The change, in words.
        before: Tokens a round without it.
        after: Tokens a round with it.
        ratio: Of the two, with its interval over prompts.
    """

    cause: str
    name: str
    before: float
    after: float
    ratio: Interval

    def matters(self, least: float) -> bool:
        """Return whether it certainly brings tokens, and at least so many times as many."""
        return self.ratio.low > 1 and self.ratio.value >= least


@dataclass
class Diagnosis:
    """The result of [`examine`].

    Attributes:
        problems: Each problem's cause in a word or two, and what it is and its fix in a sentence or two.
        remarks: Other observations that may matter.
        facts: Everything that was examined, as name and value.
        tau: Tokens per verification round over the prompts; `None` if nothing could be generated.
        differing: Greedy texts that are not the target's own.
        acceptance: Of each draft position, the share of rounds that accepted it.
        drafts: The number of drafts a round; `None` for "auto".
        speedup: Measured with the drafter's own settings at temperature 0, prompts included.
        costs: What rounds take; `None` if that was not measured.
        expected: What "auto" expects of rounds with 0, 1, .. drafts, in rounds without the drafter; empty where it was
            not timed.
        changes: What was changed to find where acceptance is lost.
        kinds: Tokens a round of each kind of prompt.
        timed: Settings that were timed, fastest first, by temperature.
        is_mixture: Whether the target is a mixture of experts.
    """

    problems: dict[str, str] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)
    facts: dict[str, str] = field(default_factory=dict)
    tau: float | None = None
    differing: int | None = None
    acceptance: list[float] = field(default_factory=list)
    drafts: int | None = None
    speedup: Interval | None = None
    costs: MeasuredCosts | None = None
    expected: list[float] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    kinds: dict[str, float] = field(default_factory=dict)
    timed: dict[float, list[Timed]] = field(default_factory=dict)
    is_mixture: bool = False

    def __str__(self) -> str:
        lines = [f"{name}: {value}" for name, value in self.facts.items()]
        return "\n".join([*lines, *(f"Remark: {text}" for text in self.remarks), "", *self.verdict()])

    def verdict(self) -> list[str]:
        """Return at most ten lines: how many times as fast, what limits it, what to set."""
        lines = [*self._speed(), *self._balance()]
        told = list(self.problems.items())[:_MOST_PROBLEMS]
        lines += [f"PROBLEM ({cause}): {text}" for cause, text in told]
        if more := len(self.problems) - len(told):
            lines[-1] += f" And {more} more: {', '.join(list(self.problems)[_MOST_PROBLEMS:])}."
        lines += self._advice()
        ends = "Problems found." if self.is_wrong else "The pair fits; its rounds cost too much here."
        return [*lines, ends if self.problems else "No problem found."]

    @property
    def is_wrong(self) -> bool:
        """Whether something is wrong with the pair itself, on whatever machine."""
        return not self.problems.keys() <= _OF_COSTS

    def _speed(self) -> Iterator[str]:
        if self.speedup is None:
            return
        x, low, high = self.speedup
        count = "as many drafts a round as pay" if self.drafts is None else f"{_counted(self.drafts, 'draft')} a round"
        yield (
            f"{x:.2f} times as fast as the target alone ({low:.2f} to {high:.2f}), at temperature 0 with {count}: "
            f"{self.tau:.2f} tokens a round."
        )

    def _balance(self) -> Iterator[str]:
        costs, count = self.costs, self.fixed_drafts
        if costs is None or self.tau is None:
            return
        needed = costs.break_even(count)
        yield (
            f"Verifying {_counted(count + 1, 'token')} costs {costs.verifying(count):.1f} forwards on this machine, "
            f"drafting {costs.asking(count):.1f}: you need {needed:.1f} tokens a round, and have {self.tau:.1f}."
        )
        if not self.is_wrong:
            yield f"What limits it: {_LIMITS[self.limit]}."

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

    def blame_costs(self) -> None:
        """Name what makes rounds too dear, if something does."""
        if self.costs is None or self.tau is None or self.speedup is None:
            return
        count, best = self.fixed_drafts, self.best_count()
        verifying, asking = self.costs.verifying(count), self.costs.asking(count)
        experts = " Each token of a mixture wakes more experts." if self.is_mixture else ""
        fewer = f"set `num_assistant_tokens={best[0]}`" if best[0] < count else 'set `num_assistant_tokens="auto"`'
        if self.timed:
            fewer = "set what was timed below"
        fastest = max([self.speedup.value, *(each.speedup.value for each in self.timed.get(0.0, [])[:1])])
        is_dear = self.costs.verifying(min(count, _USUAL)) >= _DEAR
        if is_dear or (fastest < _SLOW and count <= _USUAL and self.limit == "verification" and not self.problems):
            self.problems["verification"] = (
                f"Verifying {_counted(count + 1, 'token')} costs {verifying:.1f} forwards.{experts} Verify fewer: "
                f"{fewer}, and draft no trees."
            )
        elif self.drafts and not self.problems and best[1] >= _FEWER and self._is_confirmed(best[0], count):
            self.problems["draft count"] = (
                f"{count} drafts a round are too many here: {best[0]} would be {best[1]:.2f} times as fast by these "
                f"costs. The later ones are hardly accepted (the last in {100 * self.acceptance[-1]:.0f} % of rounds) "
                f"and each is paid for: {fewer}."
            )
        if fastest < _SLOW and self.limit == "drafting" and not self.problems:
            self.problems["drafting"] = (
                f"Drafting costs {asking:.1f} forwards of the target, which is small beside its drafter: take a "
                "drafter of fewer layers or passes, prompt lookup, or none."
            )

    def _is_confirmed(self, fewer: int, count: int) -> bool:
        """Return whether what was timed does not contradict the costs."""
        timed = {
            each.settings["num_assistant_tokens"]: each for each in self.timed.get(0.0, []) if len(each.settings) == 1
        }
        near = [k for k in timed if isinstance(k, int) and k < count]
        if count not in timed or not near:
            return True
        nearest = min(near, key=lambda k: abs(k - fewer))
        return timed[nearest].speedup.value > 1.05 * timed[count].speedup.value

    def _advice(self) -> Iterator[str]:
        if self.is_wrong:
            yield "First mend what is wrong. What to set comes out of a second examination."
            return
        for temperature, timed in self.timed.items():
            yield f"Set, at temperature {temperature:g}: {recommendation(timed)}."
        if self.timed or self.costs is None or self.tau is None:
            return
        count, gain = self.best_count()
        speed = self.costs.speedup(count, self.acceptance) if self.acceptance else 0.0
        if speed < 1:
            yield "Set: no drafter, as it is."
        elif self.drafts and gain >= 1.05 and count != self.drafts:
            yield f"Set: `num_assistant_tokens={count}`, {gain:.2f} times as fast as {self.drafts} by these costs."
        else:
            yield f"Set: nothing, or `num_assistant_tokens={AUTO!r}`."


_LIMITS = {
    "acceptance": "acceptance, as rounds are cheap: more of the drafts would have to be right",
    "verification": "verification, as each further token of a forward costs",
    "drafting": "drafting, which takes long beside the target",
}


def _counted(count: int, name: str) -> str:
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
                [", ".join(f"{name}={value!r}" for name, value in each.settings.items()),
                 f"{each.speedup.value:.2f}", f"{each.speedup.low:.2f} to {each.speedup.high:.2f}"]
                for each in timed
            ],
        )  # fmt: skip
    return result
