"""A benchmark's lines as figures per suite and method.

The file has one JSON object a line: `{"run": settings}` first and again wherever a run was resumed, every other line a
generation. A method is compared with target-only decoding over the same prompts, and with the other methods over the
prompts that all of them have: a run may have been killed anywhere.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..runtime.stats import SpeculationStats
from .runner import TARGET_ONLY
from .suites import SUITES

ALL_SUITES = "all"
MODES = {"non-think": "Non-think (the paper's Table 2)", "think-high": "Think-high (the paper's Table 3)"}

_OF_ALL = ("suite", "mode", "temperature", "prompt", "turn", "method", "new_tokens", "seconds", "decode_seconds")
_OF_METHODS = ("rounds", "draft_positions", "emitted", "accepted", "draft_seconds", "verify_seconds", "loop_seconds")

Generation = dict[str, Any]
Pair = tuple[Generation, Generation]  # a method's and target-only's, of one prompt
Key = tuple[str, float, str]  # mode, temperature, suite


@dataclass
class Results:
    """What a results file holds: the settings of each start of the run, the generations, and lines that a later one of the
    same prompt by the same method takes the place of."""

    runs: list[dict[str, Any]]
    generations: list[Generation]
    replaced: int = 0

    @property
    def methods(self) -> list[str]:
        """Names of the methods, without target-only, in the settings' order."""
        named = [name for run in self.runs for name in run.get("methods", ())]
        return [name for name in dict.fromkeys([*named, *self._appearing("method")]) if name != TARGET_ONLY]

    def rank(self, key: Key) -> tuple[int, float, int]:
        """To sort by: modes and suites as in the paper, unknown ones after them in order of appearance."""
        modes = list(dict.fromkeys([*MODES, *self._appearing("mode")]))
        suites = list(dict.fromkeys([*SUITES, *self._appearing("suite")]))
        return modes.index(key[0]), key[1], suites.index(key[2])

    def _appearing(self, name: str) -> list[str]:
        return [line[name] for line in self.generations]


@dataclass(frozen=True)
class Row:
    """One method on one suite (or all), `None` where there is nothing to divide by. Sums over the compared prompts.

    Attributes:
        speedup: Tokens per second over target-only's; `speedup_25` to `speedup_75` are quartiles over generations.
        tau: Tokens per verification round (the paper's accepted length).
        draft_ms, verify_ms: Per verification round.
        overhead: Share of the loop's time that is neither drafting nor verifying.
        target_step_ms: A decoding step of target-only.
        bound: Speedup if drafting and verifying were all that took time.
        efficiency: `speedup / tau`.
        checked, differing: Outputs compared with target-only's, and how many of them were not the same.
        acceptance, conditional_acceptance: Per draft position, as in [`~runtime.decoding.SpeculationStats`].
    """

    mode: str
    temperature: float
    suite: str
    method: str
    generations: int
    new_tokens: int
    tokens_per_second: float
    target_tokens_per_second: float
    speedup: float
    speedup_25: float
    speedup_median: float
    speedup_75: float
    rounds: int
    tau: float | None
    accepted_drafts: float | None
    draft_ms: float | None
    verify_ms: float | None
    overhead: float | None
    target_step_ms: float | None
    bound: float | None
    efficiency: float | None
    peak_memory: int | None
    target_peak_memory: int | None
    checked: int
    differing: int
    acceptance: list[float]
    conditional_acceptance: list[float]


def load(path: Path) -> Results:
    """Read a results file.

    Returns:
        Its settings and generations. A last line that was only half written is left out; of two generations from the
        same prompt by the same method the later counts.

    Raises:
        ValueError: If another line is no JSON object or lacks a figure, or the file does not begin with the settings.
    """
    results, lines = (
        Results([], []),
        [line for line in enumerate(path.read_bytes().split(b"\n"), 1) if line[1].strip()],
    )
    latest: dict[tuple[Any, ...], Generation] = {}
    for number, text in lines:
        try:
            line = json.loads(text)
        except ValueError as error:  # half a character is one too
            if number == lines[-1][0]:
                break
            raise ValueError(
                f"{path}, line {number}: not JSON ({error}). Remove the line and resume the run."
            ) from error
        if isinstance(line, dict) and "run" in line:
            results.runs.append(line["run"])
        else:
            _check(path, number, line, bool(results.runs))
            key = tuple(line[name] for name in _OF_ALL[:6])
            results.replaced += key in latest
            latest[key] = line
    if not results.runs:
        raise ValueError(
            f'{path}: no settings, expected {{"run": ...}} in its first line. Pass a benchmark\'s results.'
        )
    results.generations = list(latest.values())
    return results


def _check(path: Path, number: int, line: Any, begun: bool) -> None:
    if not begun or not isinstance(line, dict):
        expected = "a generation's JSON object" if begun else 'the settings, {"run": ...}'
        raise ValueError(f"{path}, line {number}: expected {expected}. Pass the file that the benchmark wrote.")
    needed = _OF_ALL if line.get("method") == TARGET_ONLY else _OF_ALL + _OF_METHODS
    missing = [name for name in needed if line.get(name) is None]
    if missing:
        raise ValueError(f"{path}, line {number}: no {', '.join(missing)}. Remove the line and resume the run.")
    if line["new_tokens"] < 1 or line["seconds"] <= 0:
        raise ValueError(
            f"{path}, line {number}: {line['new_tokens']} new tokens in {line['seconds']} seconds, expected at least one "
            "and more than 0. Remove the line and resume the run."
        )


def summarize(results: Results) -> list[Row]:
    """One row per mode, temperature, suite and method, in the paper's order.

    Raises:
        ValueError: If there is no prompt that target-only and a method have both answered.
    """
    pairs = paired(results)
    if not pairs:
        raise ValueError(
            f"None of the {len(results.generations)} generations can be compared: expected a prompt with a line of "
            f"{TARGET_ONLY!r} and of every method that has begun. Resume the run."
        )
    return [_row(key, method, of) for key, cell in pairs.items() for method, of in cell.items()]


def pool(results: Results) -> list[Row]:
    """One row per mode, temperature and method: all generations of the suites that every method has (suite `"all"`).

    Raises:
        ValueError: If there is no such suite.
    """
    pooled: dict[tuple[Key, str], list[Pair]] = {}
    pairs = paired(results)
    for key in complete(pairs):
        for method, of in pairs[key].items():
            pooled.setdefault(((*key[:2], ALL_SUITES), method), []).extend(of)
    if not pooled:
        raise ValueError(f"No suite has every method of {results.methods}: run them on the same suites.")
    return [_row(key, method, of) for (key, method), of in pooled.items()]


def averages(rows: Iterable[Row]) -> dict[tuple[str, float, str], tuple[float | None, float | None]]:
    """Speedup and tau of each mode, temperature and method: unweighted means over the suites that every method has."""
    cells: dict[Key, dict[str, Row]] = {}
    for row in rows:
        cells.setdefault((row.mode, row.temperature, row.suite), {})[row.method] = row
    found: dict[tuple[str, float, str], list[Row]] = {}
    for key in complete(cells):
        for method, row in cells[key].items():
            found.setdefault((*key[:2], method), []).append(row)
    return {key: (_mean([row.speedup for row in of]), _mean([row.tau for row in of])) for key, of in found.items()}


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known and len(known) == len(values) else None


def complete(cells: Mapping[Key, Mapping[str, Any]]) -> list[Key]:
    """The suites that have every method that is anywhere in their mode and temperature."""
    return [
        key for key in cells if all(set(cells[other]) <= set(cells[key]) for other in cells if other[:2] == key[:2])
    ]


def paired(results: Results) -> dict[Key, dict[str, list[Pair]]]:
    """Each method's generations beside target-only's, over the prompts that all of them have, in the paper's order."""
    cells: dict[Key, dict[str, dict[tuple[Any, Any], Generation]]] = {}
    for line in results.generations:
        cell = cells.setdefault((line["mode"], line["temperature"], line["suite"]), {})
        cell.setdefault(line["method"], {})[line["prompt"], line["turn"]] = line
    pairs = {}
    for key in sorted(cells, key=results.rank):
        plain = cells[key].pop(TARGET_ONLY, {})
        begun = {method: cells[key][method] for method in results.methods if method in cells[key]}
        common = [prompt for prompt in plain if all(prompt in of for of in begun.values())]
        if common and begun:
            pairs[key] = {method: [(of[prompt], plain[prompt]) for prompt in common] for method, of in begun.items()}
    return pairs


def _row(key: Key, method: str, pairs: list[Pair]) -> Row:
    lines, plain = [line for line, _ in pairs], [line for _, line in pairs]
    stats, speedup = _stats(lines), _rate(lines) / _rate(plain)
    tau = stats.tau if stats.rounds else None
    step = _ratio(_sum(plain, "decode_seconds"), _sum(plain, "new_tokens") - len(plain))
    round_seconds = _ratio(stats.draft_seconds + stats.verify_seconds, stats.rounds)
    loop = _ratio(stats.draft_seconds + stats.verify_seconds, stats.loop_seconds)
    low, median, high = np.percentile([_rate([line]) / _rate([other]) for line, other in pairs], [25, 50, 75]).tolist()
    checked = [line["identical"] for line in lines if line.get("identical") is not None]
    return Row(
        *key,
        method,
        generations=len(lines),
        new_tokens=stats.tokens,
        tokens_per_second=_rate(lines),
        target_tokens_per_second=_rate(plain),
        speedup=speedup,
        speedup_25=low,
        speedup_median=median,
        speedup_75=high,
        rounds=stats.rounds,
        tau=tau,
        accepted_drafts=stats.mean_accepted_drafts if stats.rounds else None,
        draft_ms=_ratio(1000 * stats.draft_seconds, stats.rounds),
        verify_ms=_ratio(1000 * stats.verify_seconds, stats.rounds),
        overhead=None if loop is None else 1 - loop,
        target_step_ms=None if step is None else 1000 * step,
        bound=None if step is None or tau is None or not round_seconds else step * tau / round_seconds,
        efficiency=_ratio(speedup, tau or 0),
        peak_memory=_peak(lines),
        target_peak_memory=_peak(plain),
        checked=len(checked),
        differing=checked.count(False),
        acceptance=stats.acceptance,
        conditional_acceptance=stats.conditional_acceptance,
    )


def _stats(lines: list[Generation]) -> SpeculationStats:
    rounds = _sum(lines, "rounds")
    return SpeculationStats(
        rounds=rounds,
        tokens=_sum(lines, "new_tokens"),
        draft_positions=max(line["draft_positions"] for line in lines) if rounds else 0,
        emitted=[count for line in lines for count in line["emitted"]],
        accepted=[count for line in lines for count in line["accepted"]],
        draft_seconds=_sum(lines, "draft_seconds"),
        verify_seconds=_sum(lines, "verify_seconds"),
        loop_seconds=_sum(lines, "loop_seconds"),
    )


def _sum(lines: list[Generation], name: str) -> Any:
    return sum(line[name] for line in lines)


def _rate(lines: list[Generation]) -> float:
    return _sum(lines, "new_tokens") / _sum(lines, "seconds")


def _ratio(value: float, by: float) -> float | None:
    return value / by if by else None


def _peak(lines: list[Generation]) -> int | None:
    return max((line["peak_memory"] for line in lines if line.get("peak_memory") is not None), default=None)


def temperatures(rows: Sequence[Row]) -> list[float]:
    """The temperatures of rows, ascending."""
    return sorted({row.temperature for row in rows})


def suites_of(rows: Sequence[Row]) -> list[str]:
    """The suites of rows, in the paper's order, others after them in order of appearance."""
    suites = list(dict.fromkeys(row.suite for row in rows))
    known = list(SUITES)  # one temperature may lack a suite that another has, so the rows' order is not enough
    return sorted(suites, key=lambda suite: known.index(suite) if suite in known else len(known))
