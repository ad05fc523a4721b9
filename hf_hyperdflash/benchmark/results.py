"""Reads a benchmark's results file, and summarizes its generations per suite and method.

The file has one JSON object a line: `{"run": settings}` first and again wherever a run was resumed; every other line
is a generation. A method is compared with target-only decoding over the same prompts, and with other methods over the
prompts that all of them have, because a run may have been killed anywhere.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar

import numpy as np

from ..decoding.stats import SpeculationStats
from .intervals import Interval, draw, interval
from .suites import SUITES, in_order

TARGET_ONLY = "Target only"
MODES = {"non-think": "Non-think (the paper's Table 2)", "think-high": "Think-high (the paper's Table 3)"}

KEY = ("suite", "mode", "temperature", "prompt", "turn", "method")  # identifies a generation
# Statistics of rounds, which target-only generations do not have.
ROUND_FIELDS = ("rounds", "draft_positions", "emitted", "accepted", "draft_seconds", "verify_seconds", "loop_seconds")

Generation = dict[str, Any]
Key = tuple[str | float, ...]  # the values of [`KEY`]
Pair = tuple[Generation, Generation]  # a method's and target-only's, of one prompt
Cell = tuple[str, float, str]  # mode, temperature, suite
Row = SimpleNamespace  # figures by name, see `_summary_row`
Value = TypeVar("Value")


def mode_title(mode: str) -> str:
    """Return the name of a mode in tables."""
    return MODES.get(mode, mode).partition(" (")[0]


def generation_key(line: Mapping[str, Any]) -> Key:
    """Return the key that identifies a generation in a file."""
    return tuple(line[name] for name in KEY)


def read_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the settings and generations of a results file, each with its line number; half a last line is none."""
    lines, begun = path.read_bytes().split(b"\n"), False
    for number, text in enumerate(lines, start=1):
        if not text.strip():
            continue
        try:
            line = json.loads(text)
        except ValueError as error:  # half a character is one too
            if number == len(lines):
                return
            raise ValueError(
                f"{path}, line {number}: not JSON ({error}). Remove the line and resume the run."
            ) from error
        if problem := _problem(line, begun):
            raise ValueError(f"{path}, line {number}: {problem}")
        begun = True
        yield number, line


def _problem(line: Any, begun: bool) -> str | None:
    if isinstance(line, dict) and isinstance(line.get("run"), dict):
        return None
    if not begun or not isinstance(line, dict) or "run" in line:
        expected = "a generation's JSON object" if begun else 'the settings, {"run": ...}'
        return f"expected {expected}. Pass the file that the benchmark wrote, or choose another output folder."
    needed = [*KEY, "new_tokens", "seconds", "decode_seconds", *ROUND_FIELDS]
    if line.get("method") == TARGET_ONLY:
        needed = needed[: -len(ROUND_FIELDS)]
    if missing := [name for name in needed if line.get(name) is None]:
        return f"no {', '.join(missing)}. Remove the line and resume the run."
    if line["new_tokens"] < 1 or line["seconds"] <= 0:
        return (
            f"{line['new_tokens']} new tokens in {line['seconds']} seconds, expected at least one and more than 0. "
            "Remove the line and resume the run."
        )
    return None


@dataclass
class Results:
    """The content of a results file."""

    runs: list[dict[str, Any]]  # the settings of each start of the run
    generations: list[Generation]  # of several with one key, the last
    replaced: int  # number of generations that a later one replaces

    @property
    def methods(self) -> list[str]:
        """Names of the methods, without target-only, in the settings' order."""
        named = [name for run in self.runs for name in run.get("methods", ())]
        return [name for name in dict.fromkeys([*named, *self._appearing("method")]) if name != TARGET_ONLY]

    @cached_property
    def cells(self) -> dict[Cell, dict[str, list[Pair]]]:
        """Each method's generations paired with target-only's, over the prompts that all methods have. Modes and
        suites are in the paper's order, temperatures ascend."""
        lines: dict[Cell, dict[str, dict[tuple[int, int], Generation]]] = {}
        for line in self.generations:
            cell_lines = lines.setdefault((line["mode"], line["temperature"], line["suite"]), {})
            cell_lines.setdefault(line["method"], {})[line["prompt"], line["turn"]] = line
        modes, suites = in_order(self._appearing("mode"), MODES), in_order(self._appearing("suite"), SUITES)
        cells = {}
        for cell in sorted(lines, key=lambda cell: (modes.index(cell[0]), cell[1], suites.index(cell[2]))):
            plain = lines[cell].get(TARGET_ONLY, {})
            begun = {method: lines[cell][method] for method in self.methods if method in lines[cell]}
            common = [prompt for prompt in plain if all(prompt in of for of in begun.values())]
            if common and begun:
                cells[cell] = {name: [(of[prompt], plain[prompt]) for prompt in common] for name, of in begun.items()}
        return cells

    def _appearing(self, name: str) -> list[str]:
        return [line[name] for line in self.generations]


def load(path: Path) -> Results:
    """Read a results file."""
    runs, latest, count = [], {}, 0
    for _, line in read_lines(path):
        if "run" in line:
            runs.append(line["run"])
        else:
            latest[generation_key(line)], count = line, count + 1
    if not runs:
        raise ValueError(
            f'{path}: no settings, expected {{"run": ...}} in its first line. Pass a benchmark\'s results.'
        )
    return Results(runs, list(latest.values()), replaced=count - len(latest))


def summarize(results: Results) -> list[Row]:
    """Return one row per mode, temperature, suite and method, in the paper's order."""
    if not results.cells:
        raise ValueError(
            f"None of the {len(results.generations)} generations can be compared: expected a prompt with a line of "
            f"{TARGET_ONLY!r} and of every method that has begun. Resume the run."
        )
    return [
        _summary_row(*cell, method, pairs)
        for cell, methods in results.cells.items()
        for method, pairs in methods.items()
    ]


def pool(results: Results) -> list[Row]:
    """Return one row per mode, temperature and method, over all suites that every method has (suite `"all"`)."""
    complete = _complete(results.cells)
    if not complete:
        raise ValueError(f"No suite has every method of {results.methods}: run them on the same suites.")
    return [
        _summary_row(*where, "all", method, [pair for suite in suites for pair in suite[method]])
        for where, suites in complete.items()
        for method in suites[0]
    ]


def averages(rows: Iterable[Row]) -> dict[tuple[str, float, str], tuple[float | None, float | None]]:
    """Return speedup and tau of each mode, temperature and method: means over the suites that every method has."""
    by_cell = grouped(rows, "mode", "temperature", "suite")
    cells = {cell: {row.method: row for row in cell_lines} for cell, cell_lines in by_cell.items()}
    return {
        (*where, method): (_mean([of[method].speedup for of in suites]), _mean([of[method].tau for of in suites]))
        for where, suites in _complete(cells).items()
        for method in suites[0]
    }


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if len(known) == len(values) else None


def _complete(cells: Mapping[Cell, dict[str, Value]]) -> dict[tuple[str, float], list[dict[str, Value]]]:
    """Return, per mode and temperature, the suites that have all of its methods."""
    complete: dict[tuple[str, float], list[dict[str, Value]]] = {}
    for (mode, temperature, _), methods in cells.items():
        if all(set(other) <= set(methods) for cell, other in cells.items() if cell[:2] == (mode, temperature)):
            complete.setdefault((mode, temperature), []).append(methods)
    return complete


def _summary_row(mode: str, temperature: float, suite: str, method: str, pairs: list[Pair]) -> Row:
    """Compute a row from the compared prompts; a figure is `None` if its divisor is 0."""
    lines, plain = [line for line, _ in pairs], [line for _, line in pairs]
    stats = SpeculationStats()
    for line in lines:
        stats += SpeculationStats(tokens=line["new_tokens"], **{name: line[name] for name in ROUND_FIELDS})
    speedup, busy = _rate(lines) / _rate(plain), stats.draft_seconds + stats.verify_seconds
    tau = stats.tau if stats.rounds else None
    step = _ratio(_sum(plain, "decode_seconds"), _sum(plain, "new_tokens") - len(plain))
    quartiles = np.percentile([_rate([line]) / _rate([other]) for line, other in pairs], [25, 50, 75]).tolist()
    checked = [line["identical"] for line in lines if line.get("identical") is not None]
    return Row(
        mode=mode,
        temperature=temperature,
        suite=suite,
        method=method,
        generations=len(lines),
        new_tokens=stats.tokens,
        tokens_per_second=_rate(lines),
        target_tokens_per_second=_rate(plain),
        speedup=speedup,
        speedup_25=quartiles[0],  # over the generations' own speedups
        speedup_median=quartiles[1],
        speedup_75=quartiles[2],
        rounds=stats.rounds,
        tau=tau,
        accepted_drafts=stats.mean_accepted_drafts if stats.rounds else None,
        draft_ms=_ratio(1000 * stats.draft_seconds, stats.rounds),
        verify_ms=_ratio(1000 * stats.verify_seconds, stats.rounds),
        overhead=1 - busy / stats.loop_seconds if stats.loop_seconds else None,  # neither drafting nor verifying
        target_step_ms=None if step is None else 1000 * step,
        bound=_ratio(step * tau, busy / stats.rounds)
        if step is not None and tau
        else None,  # if nothing else took time
        efficiency=speedup / tau if tau else None,
        peak_memory=_peak(lines),
        target_peak_memory=_peak(plain),
        checked=len(checked),  # number of texts that were compared with target-only's
        differing=checked.count(False),
        acceptance=stats.acceptance,
        conditional_acceptance=stats.conditional_acceptance,
    )


def _sum(lines: list[Generation], name: str) -> float:
    return sum(line[name] for line in lines)


def _rate(lines: list[Generation]) -> float:
    return _sum(lines, "new_tokens") / _sum(lines, "seconds")


def _ratio(value: float, by: float) -> float | None:
    return value / by if by else None


def _peak(lines: list[Generation]) -> int | None:
    return max((line["peak_memory"] for line in lines if line.get("peak_memory") is not None), default=None)


def grouped(rows: Iterable[Row], *names: str) -> dict[Any, list[Row]]:
    """Group rows by one or several of their figures, in order of appearance."""
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        groups.setdefault(attrgetter(*names)(row), []).append(row)
    return groups


def suites_in_order(rows: Iterable[Row]) -> list[str]:
    """Return all suites of the rows, in the paper's order. A temperature may lack some of them."""
    return in_order((row.suite for row in rows), SUITES)


class Lead(NamedTuple):
    """The lead of the method with the highest average speedup over another one, averaged over suites."""

    mode: str
    temperature: float
    fastest: str
    method: str
    speedup: Interval
    tau: Interval | None  # of two that had verification rounds


def leads(results: Results) -> list[Lead]:
    """Return the lead of the fastest over each other method, per mode and temperature, over the suites that all have.

    Methods answer the same prompts, so differences between prompts mostly cancel. The interval shows whether other
    prompts could have reversed the order. Prompts of each suite are redrawn (see [`~benchmark.intervals.draw`]), both
    turns of one together, the same for all methods. The seed of a training and the machine are not redrawn, so the
    intervals do not contain their effect.
    """
    found = []
    for (mode, temperature), suites in _complete(results.cells).items():
        sums = [np.stack([_sums(pairs) for pairs in suite.values()]) for suite in suites]
        if min(suite_sums.shape[1] for suite_sums in sums) < 2:
            continue
        (speedup, tau), methods = _redrawn(sums), list(suites[0])
        best = int(speedup[:, 0].argmax())
        for other, method in enumerate(methods):
            if other != best:
                gap = tau[best] - tau[other]
                has_tau = not np.isnan(gap[0]) and not np.isnan(gap[1:]).all()
                ahead = interval(speedup[best] - speedup[other]), interval(gap) if has_tau else None
                found.append(Lead(mode, temperature, methods[best], method, *ahead))
    return found


def _redrawn(sums: list[np.ndarray]) -> np.ndarray:
    """Return average speedups and tau, `[2, methods, 1 + DRAWS]`, from [`_sums`] `[methods, prompts, 6]` per suite."""
    rng, drawn = np.random.default_rng(0), []
    for suite_sums in sums:
        redrawn = draw(suite_sums.shape[1], rng) @ suite_sums  # the same for all methods
        tokens, seconds, plain_tokens, plain_seconds, emitted, rounds = np.moveaxis(redrawn, 2, 0)
        with np.errstate(invalid="ignore"):  # no round, no tau
            drawn.append([tokens / seconds * plain_seconds / plain_tokens, emitted / rounds])
    return np.mean(drawn, axis=0)


def _sums(pairs: list[Pair]) -> np.ndarray:
    """Return the sums that speedup and tau are computed from, per prompt with all its turns, `[prompts, 6]`."""
    sums: dict[int, np.ndarray] = {}
    for line, plain in pairs:
        figures = [line["new_tokens"], line["seconds"], plain["new_tokens"], plain["seconds"]]
        figures += [sum(line["emitted"]), line["rounds"]]
        sums[line["prompt"]] = sums.get(line["prompt"], np.zeros(len(figures))) + figures
    return np.stack(list(sums.values()))


def save_report(report: str, arguments: argparse.Namespace, **figures: object) -> None:
    """Write a script's report.md and results.json, if its `--output` asks for them. Files and folders of this machine
    go in by name."""
    if not arguments.output:
        return
    folder = Path(arguments.output)
    folder.mkdir(parents=True, exist_ok=True)
    settings = {
        name: Path(value).name if isinstance(value, (str, Path)) and Path(value).exists() else value
        for name, value in vars(arguments).items()
        if name != "output"
    }
    (folder / "report.md").write_text(report, encoding="utf-8")
    (folder / "results.json").write_text(json.dumps({"settings": settings, **figures}, indent=1), encoding="utf-8")
