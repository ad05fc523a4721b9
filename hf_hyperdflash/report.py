"""A benchmark's lines as a report: the paper's Tables 2 and 3, details, a CSV and two pictures.

The file has one JSON object a line: `{"run": settings}` first and again wherever a run was resumed, every other line a
generation. A method is compared with target-only decoding over the same prompts, and with the other methods over the
prompts that all of them have: a run may have been killed anywhere.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .generation import SpeculationStats

TARGET_ONLY = "Target only"
ALL_SUITES = "all"
# As in the paper's tables: name in the file -> name in the report, group.
SUITES = {
    "gsm8k": ("GSM8K", "MATH"),
    "math500": ("MATH-500", "MATH"),
    "aime25": ("AIME25", "MATH"),
    "humaneval": ("HumanEval", "CODE"),
    "mbpp": ("MBPP", "CODE"),
    "livecodebench": ("LCB", "CODE"),
    "mt-bench": ("MT-Bench", "CHAT"),
}
MODES = {"non-think": "Non-think (the paper's Table 2)", "think-high": "Think-high (the paper's Table 3)"}

# Okabe and Ito's colours, to be told apart by colour-blind readers; seven and eight, so that pairs repeat only after 56.
_COLOURS = ("#0072B2", "#E69F00", "#CC79A7", "#56B4E9", "#D55E00", "#009E73", "#000000")
_MARKERS = ("o", "s", "^", "v", "D", "P", "X", "*")

_OF_ALL = ("suite", "mode", "temperature", "prompt", "turn", "method", "new_tokens", "seconds", "decode_seconds")
_OF_METHODS = ("rounds", "draft_positions", "emitted", "accepted", "draft_seconds", "verify_seconds", "loop_seconds")
_DETAILS = """\
All suites together, {count} generations; target-only: {rate:.1f} tokens/s, {step} ms a step{memory}.
Speedup: of the sums, so not the Average above; median and quartiles: over the generations' own. Draft and verify ms: per
verification round. Overhead: share of the loop's time that is neither. Bound: the speedup without overhead and prefill.
Efficiency: speedup / τ. Outputs differing: greedy ones that are not target-only's."""
_DETAIL_HEADER = (
    "Method, Speedup, Median (quartiles), τ, Accepted drafts, Draft ms, Verify ms, Overhead, Bound, Efficiency, "
    "Peak memory GB, Outputs differing"
).split(", ")

Generation = dict[str, Any]
Pair = tuple[Generation, Generation]  # a method's and target-only's, of one prompt
Key = tuple[str, float, str]  # mode, temperature, suite


@dataclass
class Results:
    """What a results file holds: the settings of each start of the run and the generations."""

    runs: list[dict[str, Any]]
    generations: list[Generation]

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
        acceptance, conditional_acceptance: Per draft position, as in [`~generation.SpeculationStats`].
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
            latest[tuple(line[name] for name in _OF_ALL[:6])] = line
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
    pairs = _pairs(results)
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
    pairs = _pairs(results)
    for key in _complete(pairs):
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
    for key in _complete(cells):
        for method, row in cells[key].items():
            found.setdefault((*key[:2], method), []).append(row)
    return {key: (_mean([row.speedup for row in of]), _mean([row.tau for row in of])) for key, of in found.items()}


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known and len(known) == len(values) else None


def _complete(cells: dict[Key, dict[str, Any]]) -> list[Key]:
    """The suites that have every method that is anywhere in their mode and temperature."""
    return [
        key for key in cells if all(set(cells[other]) <= set(cells[key]) for other in cells if other[:2] == key[:2])
    ]


def _pairs(results: Results) -> dict[Key, dict[str, list[Pair]]]:
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


def write_report(results: Path, output: Path) -> None:
    """Write `report.md`, `summary.csv`, `acceptance.png` and `speedup_tau.png` into the folder `output`, made if needed.

    Raises:
        ValueError: If the file is no benchmark's (see [`load`]) or nothing in it can be compared.
        ImportError: If matplotlib is not installed. Nothing is written then.
    """
    loaded = load(results)
    rows, pooled = summarize(loaded), pool(loaded)
    pictures = {"acceptance.png": acceptance_figure(pooled), "speedup_tau.png": speedup_figure(rows)}
    output.mkdir(parents=True, exist_ok=True)
    (output / "report.md").write_text(markdown(loaded, rows, pooled), encoding="utf-8")
    write_csv(rows, output / "summary.csv")
    for name, figure in pictures.items():
        figure.savefig(output / name)


def write_csv(rows: Sequence[Row], path: Path) -> None:
    """Write one line per row; per-position figures in columns `acceptance_1`.. and `conditional_1`.., none as empty."""
    table = [_flat(row) for row in rows]
    longest = max(table, key=len)  # the one with most positions has all columns
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(longest))
        writer.writeheader()
        writer.writerows(table)


def _flat(row: Row) -> dict[str, Any]:
    values = asdict(row)
    for name in ("acceptance", "conditional_acceptance"):
        column = name.removesuffix("_acceptance")
        values |= {f"{column}_{k}": value for k, value in enumerate(values.pop(name), start=1)}
    return values


def markdown(results: Results, rows: Sequence[Row], pooled: Sequence[Row]) -> str:
    """The report's text from what [`load`], [`summarize`] and [`pool`] returned."""
    parts = ["# Benchmark", _settings(results), _left_out(results, rows)]
    for mode in dict.fromkeys(row.mode for row in rows):
        of_mode = [row for row in rows if row.mode == mode]
        parts += [f"## {MODES.get(mode, mode)}", _legend(of_mode), _main_table(of_mode)]
        for heat in _heats([row for row in pooled if row.mode == mode]):
            parts.append(_details([row for row in pooled if (row.mode, row.temperature) == (mode, heat)]))
    parts += ["## Pictures", "![Acceptance per draft position](acceptance.png)", "![Speedup and τ](speedup_tau.png)"]
    return "\n\n".join(part for part in parts if part) + "\n"


def _settings(results: Results) -> str:
    """Every setting as a list; several values where starts of the run differ."""
    lines = []
    for name in dict.fromkeys(name for run in results.runs for name in run):
        values = list(dict.fromkeys(_plain(run[name]) for run in results.runs if name in run))
        code = "`" if name == "command" else ""
        lines.append(f"- {name.replace('_', ' ')}: " + "; ".join(f"{code}{value}{code}" for value in values))
    return "\n".join(lines)


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_plain(item)}" for name, item in value.items())
    if isinstance(value, list):
        return ", ".join(map(_plain, value))
    return "none" if value is None else str(value)


def _left_out(results: Results, rows: Sequence[Row]) -> str:
    target_only = {(row.mode, row.temperature, row.suite): row.generations for row in rows}
    count = len(results.generations) - sum(row.generations for row in rows) - sum(target_only.values())
    return f"Left out, because not every method got to their prompts: {count} generations." if count else ""


def _legend(rows: list[Row]) -> str:
    groups: dict[str, list[str]] = {}
    for suite in _suites(rows):
        counts = dict.fromkeys(str(row.generations) for row in rows if row.suite == suite)
        groups.setdefault(SUITES.get(suite, ("", "Other"))[1], []).append(f"{_name(suite)} ({' and '.join(counts)})")
    listed = "; ".join(f"{group}: {', '.join(names)}" for group, names in groups.items())
    return (
        "Speedup over target-only / τ (tokens per verification round), best in bold. Average: unweighted, over the suites "
        f"that every method has. Generations per method: {listed}."
    )


def _main_table(rows: list[Row]) -> str:
    suites, body, means = _suites(rows), [], averages(rows)
    for heat in _heats(rows):
        cells = {(row.method, row.suite): (row.speedup, row.tau) for row in rows if row.temperature == heat}
        methods = list(dict.fromkeys(method for method, _ in cells))
        columns: list[list[tuple[float | None, float | None]]]
        columns = [[cells.get((method, suite), (None, None)) for method in methods] for suite in suites]
        columns.append([means.get((rows[0].mode, heat, method), (None, None)) for method in methods])
        texts = [zip(_bold([s for s, _ in column], "×"), _bold([tau for _, tau in column])) for column in columns]
        body.append([f"*Temperature = {heat:g}*", *[""] * len(columns)])
        body += [[method, *map(" / ".join, line)] for method, line in zip(methods, zip(*texts))]
    return _table(["Method", *map(_name, suites), "Average"], body)


def _bold(values: Sequence[float | None], unit: str = "") -> list[str]:
    best = max((value for value in values if value is not None), default=None)
    texts = [_number(value, unit=unit) for value in values]
    return [f"**{text}**" if best is not None and text == _number(best, unit=unit) else text for text in texts]


def _details(rows: list[Row]) -> str:
    first, positions = rows[0], max(len(row.acceptance) for row in rows)
    memory = "" if first.target_peak_memory is None else f", peak memory {first.target_peak_memory / 1e9:.2f} GB"
    legend = _DETAILS.format(
        count=first.generations, rate=first.target_tokens_per_second, step=_number(first.target_step_ms), memory=memory
    )
    accepted = [
        [row.method, *(f"{100 * a:.1f} / {100 * b:.1f}" for a, b in zip(row.acceptance, row.conditional_acceptance))]
        for row in rows
    ]
    return "\n\n".join(
        [
            f"### Temperature = {first.temperature:g}",
            legend,
            _table(_DETAIL_HEADER, [_detail(row) for row in rows]),
            "Acceptance per draft position, %: of all rounds / of the rounds that accepted the position before.",
            _table(["Method", *map(str, range(1, positions + 1))], accepted),
        ]
    )


def _detail(row: Row) -> list[str]:
    quartiles = f"{row.speedup_median:.2f} ({row.speedup_25:.2f} to {row.speedup_75:.2f})"
    figures = [_number(value) for value in (row.tau, row.accepted_drafts, row.draft_ms, row.verify_ms)]
    overhead = _number(None if row.overhead is None else 100 * row.overhead, ".1f", " %")
    memory = _number(None if row.peak_memory is None else row.peak_memory / 1e9)
    differing = f"{row.differing} of {row.checked}" if row.checked else "–"
    bound, efficiency = _number(row.bound, unit="×"), _number(row.efficiency)
    return [row.method, f"{row.speedup:.2f}×", quartiles, *figures, overhead, bound, efficiency, memory, differing]


def _number(value: float | None, form: str = ".2f", unit: str = "") -> str:
    return "–" if value is None else f"{value:{form}}{unit}"


def _table(header: list[str], body: list[list[str]]) -> str:
    lines = [header, ["---", *["---:"] * (len(header) - 1)]]
    lines += [[cell.replace("|", r"\|") for cell in line + [""] * (len(header) - len(line))] for line in body]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _suites(rows: Sequence[Row]) -> list[str]:
    suites = list(dict.fromkeys(row.suite for row in rows))
    known = list(SUITES)  # one temperature may lack a suite that another has, so the rows' order is not enough
    return sorted(suites, key=lambda suite: known.index(suite) if suite in known else len(known))


def _name(suite: str) -> str:
    return SUITES.get(suite, (suite, ""))[0]


def _heats(rows: Sequence[Row]) -> list[float]:
    return sorted({row.temperature for row in rows})


def acceptance_figure(pooled: Sequence[Row]) -> Any:
    """The paper's Figure 1 from the rows of [`pool`]: acceptance per draft position, a panel per mode and temperature.

    Returns:
        A `matplotlib.figure.Figure`.

    Raises:
        ImportError: If matplotlib is not installed.
    """
    figure, panels = _panels(pooled, "Draft position", "Acceptance, share of rounds", (4.8, 3.6))
    styles = _styles(pooled)
    for axes, rows in panels:
        for row in rows:
            positions = range(1, len(row.acceptance) + 1)
            axes.plot(positions, row.acceptance, label=row.method, linewidth=1.6, **styles[row.method])
        axes.set(ylim=(-0.03, 1.03), xticks=range(1, max(len(row.acceptance) for row in pooled) + 1))
        axes.grid(alpha=0.25)
    handles = {row.method: axes.lines[i] for axes, rows in panels for i, row in enumerate(rows)}
    columns = int(figure.get_figwidth() / (0.6 + 0.08 * max(map(len, handles))))  # inches that the longest name needs
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=min(3, max(1, columns)), frameon=False)
    return figure


def speedup_figure(rows: Sequence[Row]) -> Any:
    """Speedup against tau from the rows of [`summarize`]: suites faint, averages strong, lines of equal efficiency.

    Returns:
        A `matplotlib.figure.Figure`.

    Raises:
        ImportError: If matplotlib is not installed.
    """
    figure, panels = _panels(rows, "τ, tokens per verification round", "Speedup over target-only", (5.6, 4.6), pad=18)
    styles, means, labels = _styles(rows), averages(rows), []
    for axes, of_panel in panels:
        for row in of_panel:
            if row.tau is not None:
                axes.plot(row.tau, row.speedup, alpha=0.4, markersize=5, markeredgewidth=0, **styles[row.method])
        for method in dict.fromkeys(row.method for row in of_panel):
            speedup, tau = means.get((of_panel[0].mode, of_panel[0].temperature, method), (None, None))
            if speedup is not None and tau is not None:
                axes.plot(tau, speedup, markersize=10, markeredgecolor="white", zorder=4, **styles[method])
                labels.append((axes, method, (tau, speedup)))
        axes.margins(0.1)
    for axes, _ in panels:  # after all of them: they share their limits
        _draw_efficiencies(axes, rows)
    figure.supxlabel("small: a suite; large: average over suites; dashed: equal speedup / τ", fontsize=9)
    _place(figure, labels)
    return figure


def _styles(rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """One colour and marker per method, the same in both pictures."""
    methods = dict.fromkeys(row.method for row in rows)
    return {
        method: {"color": _COLOURS[i % len(_COLOURS)], "marker": _MARKERS[i % len(_MARKERS)]}
        for i, method in enumerate(methods)
    }


def _panels(
    rows: Sequence[Row], xlabel: str, ylabel: str, size: tuple[float, float], pad: float = 6
) -> tuple[Any, list[Any]]:
    """A figure and its panels, each with its rows: modes downwards, temperatures across."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError('The pictures need matplotlib: pip install "hf-hyperdflash[benchmark]".') from error
    modes, heats = list(dict.fromkeys(row.mode for row in rows)), _heats(rows)
    figure = Figure((size[0] * len(heats), size[1] * len(modes) + 0.6), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(modes), len(heats), sharex=True, sharey=True, squeeze=False)
    panels = []
    for mode, line in zip(modes, grid):
        for heat, axes in zip(heats, line):
            of_panel = [row for row in rows if (row.mode, row.temperature) == (mode, heat)]
            if not of_panel:
                axes.remove()
                continue
            axes.set_title(f"{MODES.get(mode, mode).split(' (')[0]}, temperature {heat:g}", pad=pad)
            axes.set(xlabel=xlabel, ylabel=ylabel)
            axes.tick_params(labelbottom=True, labelleft=True)
            panels.append((axes, of_panel))
    return figure, panels


def _draw_efficiencies(axes: Any, rows: Sequence[Row]) -> None:
    """Lines of equal speedup / tau around the rows', labelled outside the frame, where no point can be."""
    right, high = axes.get_xlim()[1], axes.get_ylim()[1]
    axes.set(xlim=axes.get_xlim(), ylim=axes.get_ylim())  # the lines come from far outside
    known = [row.efficiency for row in rows if row.efficiency is not None] or [1.0]
    step = next((step for step in (0.05, 0.1, 0.2, 0.5, 1.0, 2.0) if max(known) - min(known) <= 5 * step), 5.0)
    for count in range(max(1, int(min(known) / step)), int(max(known) / step) + 2):
        slope = count * step
        axes.plot([0, right], [0, slope * right], color="0.7", linewidth=0.8, linestyle="--", zorder=0)
        if slope * right <= high:
            place: dict[str, Any] = {"xy": (right, slope * right), "xytext": (3, 0), "ha": "left", "va": "center"}
        else:
            place = {"xy": (high / slope, high), "xytext": (0, 2), "ha": "center", "va": "bottom"}
        if axes.get_xlim()[0] < place["xy"][0] and axes.get_ylim()[0] < place["xy"][1]:
            axes.annotate(f"{slope:g}", **place, textcoords="offset points", fontsize=8, color="0.4")


def _place(figure: Any, labels: list[tuple[Any, str, tuple[float, float]]]) -> None:
    """Write each label (axes, text, point) where it and its line hide no other label and as few points as can be."""
    from matplotlib.patheffects import withStroke

    figure.draw_without_rendering()
    figure.set_layout_engine("none")  # labels inside the frames must not move the frames
    halo = withStroke(linewidth=2.5, foreground="white")
    renderer, pixels = figure.canvas.get_renderer(), figure.dpi / 72
    style = {"textcoords": "offset points", "ha": "center", "va": "center", "fontsize": 9, "path_effects": [halo]}
    arrow = {"arrowstyle": "-", "color": "0.5", "linewidth": 0.7, "shrinkA": 0, "shrinkB": 5}
    taken: dict[Any, list[Any]] = {axes: [] for axes, _, _ in labels}  # labels and lines so far
    for axes, text, point in labels:
        note = axes.annotate(text, point, (0, 0), arrowprops=arrow, **style)
        box, centre = note.get_window_extent(renderer).padded(2 * pixels), axes.transData.transform(point)
        averages_here = [_square(axes, at, 14 * pixels) for other, _, at in labels if other is axes]
        suites = [_square(axes, at, 6 * pixels) for line in axes.lines for at in line.get_xydata() if line.get_alpha()]
        best: tuple[float, Any, list[Any]] = (np.inf, None, [])
        for offset in _offsets(box.width / pixels, box.height / pixels):
            x, y = pixels * offset
            moved = box.translated(x, y)
            steps = np.linspace(0.1, 0.9, 9)[:, None] * [x, y] + centre
            covered = [moved, *(box.from_bounds(*step, 1, 1) for step in steps)]  # by the label and its line
            outside = not (axes.bbox.contains(*moved.min) and axes.bbox.contains(*moved.max))
            hidden = moved.count_overlaps(averages_here) + sum(part.count_overlaps(taken[axes]) for part in covered)
            cost = 1000 * outside + 100 * hidden + moved.count_overlaps(suites) + np.hypot(*offset) / 30
            best = min(best, (cost, offset, covered), key=lambda option: option[0])
        note.set_position(best[1])
        taken[axes] += best[2]


def _square(axes: Any, point: Any, size: float) -> Any:
    """The box of a marker at a point of the axes, `size` in pixels."""
    x, y = axes.transData.transform(point)
    return axes.bbox.frozen().from_bounds(x - size / 2, y - size / 2, size, size)


def _offsets(width: float, height: float) -> list[Any]:
    """Where a label's centre may be, in points from its point: sixteen directions, each nearer and farther."""
    turns, gaps = np.arange(16) * np.pi / 8, (9, 20, 35, 55, 80)
    return [np.array([np.cos(a) * (gap + width / 2), np.sin(a) * (gap + height / 2)]) for gap in gaps for a in turns]
