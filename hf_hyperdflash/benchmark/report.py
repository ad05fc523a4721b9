"""Writes tables: a benchmark's report with CSV and pictures, a card's, the terminal's, and a calibration's."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from ..drafters.weights import weight_files
from ..hub.cards import Measured
from ..hub.loading import load_drafter
from ..training.features.fingerprint import module_fingerprint
from .calibration import BINS, BeforeAfter, Calibration
from .figures import acceptance_figure, reliability_figure, speedup_figure
from .intervals import Interval
from .results import MODES, Results, Row, averages, grouped, leads, load, mode_title, pool, suites_in_order, summarize
from .suites import SUITES, suite_title

_MAIN = (
    "Speedup over target-only / τ (tokens per verification round), best in bold. Average: unweighted, over the suites "
    "that every method has. Generations per method: {}."
)
_LEADS = (
    "Lead of the fastest, by average speedup, over each other method. In parentheses 95 % intervals: the prompts "
    "drawn again, with\ntheir timings. What another seed of a drafter's training would change is not in them."
)
_DETAILS = (
    "All suites together, {count} generations; target-only: {rate:.1f} tokens/s, {step} ms a step{memory}.\nSpeedup: "
    "of the sums, so not the Average above; median and quartiles: over the generations' own. Draft and verify ms: "
    "per\nverification round. Overhead: share of the loop's time that is neither. Bound: the speedup without overhead "
    "and prefill.\nEfficiency: speedup / τ. Outputs differing: greedy ones that are not target-only's."
)
_ACCEPTANCE = "Acceptance per draft position, %: of all rounds / of the rounds that accepted the position before."
_PICTURES = """\
## Pictures

![Acceptance per draft position](acceptance.png)

![Acceptance per draft position, of the rounds that accepted the one before](conditional_acceptance.png)

![Speedup and τ](speedup_tau.png)
"""
_CALIBRATION = (
    "Confidence, error and AUC before calibration and after it. Error: expected calibration error over {bins} bins of "
    "equal width; AUC: how probably an accepted draft has the higher confidence of two. Fitted on {fitted} rounds, "
    "measured on {measured} others."
)
_WIDE = 120  # columns that seven suites and their average take side by side
_GIGABYTE = 1e-9

Figures = tuple["float | None", "float | None"]  # speedup and tau


def _number(value: float | None, form: str = ".2f", unit: str = "", factor: float = 1) -> str:
    return "–" if value is None else f"{factor * value:{form}}{unit}"


_DETAIL_COLUMNS: dict[str, Callable[[Row], str]] = {
    "Method": lambda row: row.method,
    "Speedup": lambda row: _number(row.speedup, unit="×"),
    "Median (quartiles)": lambda row: f"{row.speedup_median:.2f} ({row.speedup_25:.2f} to {row.speedup_75:.2f})",
    "τ": lambda row: _number(row.tau),
    "Accepted drafts": lambda row: _number(row.accepted_drafts),
    "Draft ms": lambda row: _number(row.draft_ms),
    "Verify ms": lambda row: _number(row.verify_ms),
    "Overhead": lambda row: _number(row.overhead, ".1f", " %", 100),
    "Bound": lambda row: _number(row.bound, unit="×"),
    "Efficiency": lambda row: _number(row.efficiency),
    "Peak memory GB": lambda row: _number(row.peak_memory, factor=_GIGABYTE),
    "Outputs differing": lambda row: f"{row.differing} of {row.checked}" if row.checked else "–",
}


def write_report(results: Path, output: Path) -> None:
    """Write `report.md`, `summary.csv` and the pictures of [`figures`] into the folder `output`, new or not."""
    loaded = load(results)
    rows, pooled = summarize(loaded), pool(loaded)
    pictures = {
        "acceptance.png": acceptance_figure(pooled),
        "conditional_acceptance.png": acceptance_figure(pooled, conditional=True),
        "speedup_tau.png": speedup_figure(rows),
    }
    output.mkdir(parents=True, exist_ok=True)
    (output / "report.md").write_text(markdown(loaded, rows, pooled), encoding="utf-8")
    write_csv(rows, output / "summary.csv")
    for name, figure in pictures.items():
        figure.savefig(output / name)


def write_csv(rows: Sequence[Row], path: Path) -> None:
    """Write a line per row, with columns `acceptance_1`.. and `conditional_1`.. per position; `None` is empty."""
    table: list[dict[str, Any]] = []
    for row in rows:
        table.append(dict(vars(row)))
        for name in ("acceptance", "conditional_acceptance"):
            values = enumerate(table[-1].pop(name), start=1)
            table[-1] |= {f"{name.removesuffix('_acceptance')}_{k}": value for k, value in values}
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(
            file, max(table, key=lambda line: len(line))
        )  # the one with most positions has all columns
        writer.writeheader()
        writer.writerows(table)


def markdown(results: Results, rows: Sequence[Row], pooled: Sequence[Row]) -> str:
    """Return the report's text from the results of [`load`], [`summarize`] and [`pool`]."""
    parts, ahead = ["# Benchmark", _settings(results.runs), _left_out(results)], leads(results)
    for mode, mode_rows in grouped(rows, "mode").items():
        groups: dict[str, list[str]] = {}
        for suite in suites_in_order(mode_rows):
            counts = dict.fromkeys(str(row.generations) for row in mode_rows if row.suite == suite)
            group = SUITES[suite].group if suite in SUITES else "Other"
            groups.setdefault(group, []).append(f"{suite_title(suite)} ({' and '.join(counts)})")
        told = "; ".join(f"{group}: {', '.join(names)}" for group, names in groups.items())
        parts += [f"## {MODES.get(mode, mode)}", _MAIN.format(told), _main_table(mode_rows)]
        body = [
            [
                f"{lead.fastest} over {lead.method}",
                f"{lead.temperature:g}",
                _signed(lead.speedup, "×"),
                _signed(lead.tau),
            ]
            for lead in ahead
            if lead.mode == mode
        ]
        parts += [_LEADS, _markdown(["Lead", "Temperature", "Speedup", "τ"], body)] if body else []
        for temperature_rows in grouped((row for row in pooled if row.mode == mode), "temperature").values():
            parts += _details(temperature_rows)
    return "\n\n".join(part for part in [*parts, _PICTURES] if part)


def _settings(runs: Sequence[dict[str, object]]) -> str:
    """Return a list of all settings, with several values where starts of the run differ."""
    lines = []
    for name in dict.fromkeys(name for run in runs for name in run):
        code = "`" if name == "command" else ""
        values = dict.fromkeys(f"{code}{_plain(run[name])}{code}" for run in runs if name in run)
        lines.append(f"- {name.replace('_', ' ')}: {'; '.join(values)}")
    return "\n".join(lines)


def _plain(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_plain(item)}" for name, item in value.items())
    if isinstance(value, list):
        return ", ".join(map(_plain, value))
    return "none" if value is None else str(value)


def _left_out(results: Results) -> str:
    counts = [[len(pairs) for pairs in methods.values()] for methods in results.cells.values()]
    compared = sum(sum(cell_counts) + cell_counts[0] for cell_counts in counts)  # target-only's, too
    count = len(results.generations) - compared
    sentences = [f"Left out, because not every method got to their prompts: {count} generations."] if count else []
    if results.replaced:
        sentences.append(
            f"Lines that a later one of the same prompt and method replaces: {results.replaced}. Were two runs "
            "writing at once?"
        )
    return " ".join(sentences)


def _speedups(rows: Sequence[Row], suites: Sequence[str]) -> dict[str, list[Figures]]:
    """Return each method's figures on the suites and their average, from rows of one mode and temperature."""
    means, found = averages(rows), {}
    for method, method_rows in grouped(rows, "method").items():
        cells = {row.suite: (row.speedup, row.tau) for row in method_rows}
        average = means.get((rows[0].mode, rows[0].temperature, method), (None, None))
        found[method] = [*(cells.get(suite, (None, None)) for suite in suites), average]
    return found


def _pair(figures: Figures, between: str = " / ") -> str:
    return f"{_number(figures[0], unit='×')}{between}{_number(figures[1])}"


def _main_table(rows: Sequence[Row]) -> str:
    suites, body = suites_in_order(rows), []
    for temperature, temperature_rows in grouped(rows, "temperature").items():
        figures = _speedups(temperature_rows, suites)
        speedups, taus = zip(*(zip(*column) for column in zip(*figures.values())))
        texts = [zip(_bold(of, "×"), _bold(tau)) for of, tau in zip(speedups, taus)]
        body += [[f"*Temperature = {temperature:g}*"]]
        body += [[method, *map(" / ".join, line)] for method, line in zip(figures, zip(*texts))]
    return _markdown(["Method", *map(suite_title, suites), "Average"], body)


def _bold(values: Sequence[float | None], unit: str = "") -> list[str]:
    best = max((value for value in values if value is not None), default=None) if len(values) > 1 else None
    texts = [_number(value, unit=unit) for value in values]
    return [f"**{text}**" if best is not None and text == _number(best, unit=unit) else text for text in texts]


def _signed(interval: Interval | None, unit: str = "") -> str:
    if interval is None:
        return "–"
    return f"{interval.value:+.2f}{unit} ({interval.low:+.2f} to {interval.high:+.2f})"


def _details(rows: Sequence[Row]) -> list[str]:
    first, memory = rows[0], _number(rows[0].target_peak_memory, unit=" GB", factor=_GIGABYTE)
    legend = _DETAILS.format(
        count=first.generations,
        rate=first.target_tokens_per_second,
        step=_number(first.target_step_ms),
        memory="" if first.target_peak_memory is None else f", peak memory {memory}",
    )
    details = [[text(row) for text in _DETAIL_COLUMNS.values()] for row in rows]
    accepted = [
        [row.method, *(f"{100 * a:.1f} / {100 * b:.1f}" for a, b in zip(row.acceptance, row.conditional_acceptance))]
        for row in rows
    ]
    return [
        f"### Temperature = {first.temperature:g}",
        legend,
        _markdown([*_DETAIL_COLUMNS], details),
        _ACCEPTANCE,
        _markdown(_positions("Method", rows), accepted),
    ]


def _positions(first: str, rows: Sequence[Row]) -> list[str]:
    """Return the header of a table with a column for each draft position."""
    return [first, *map(str, range(1, max(len(row.acceptance) for row in rows) + 1))]


def _markdown(header: list[str], body: list[list[str]]) -> str:
    lines = [header, ["---", *["---:"] * (len(header) - 1)]]
    lines += [[cell.replace("|", r"\|") for cell in line + [""] * (len(header) - len(line))] for line in body]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def measured(results: Path, method: str | None = None, folder: Path | None = None) -> Measured:
    """Return the figures of a method for a model card, if the drafter in `folder` is the one that was measured."""
    loaded = load(results)
    methods = grouped(summarize(loaded), "method")
    if method not in methods and (method is not None or len(methods) > 1):
        raise ValueError(
            f"The method is {method!r}, but {results} compares {list(methods)}. Pass one of them as `method` "
            "(`--method`)."
        )
    name, rows = next((name, rows) for name, rows in methods.items() if method in (None, name))
    run = loaded.runs[-1]
    recorded = run.get("weights_digest", {}).get(name)  # which earlier releases do not say
    if folder is not None and recorded and weight_files(folder):
        drafter = load_drafter(folder, dtype=run["dtype"])
        if not module_fingerprint(drafter).startswith(recorded):
            raise ValueError(
                f"The benchmark's {name} was run with other weights or another configuration than the drafter in "
                f"{folder} has. Benchmark this drafter, or name the method that it is (`--method`)."
            )
    tables, speedups = [], []
    for mode, mode_rows in grouped(rows, "mode").items():
        suites, body = suites_in_order(mode_rows), []
        for temperature, temperature_rows in grouped(mode_rows, "temperature").items():
            figures = _speedups(temperature_rows, suites)[name]
            body.append([f"{temperature:g}", *map(_pair, figures)])
            speedups.append(figures[-1][0])
        tables.append(f"{mode_title(mode)}, speedup / tau:")
        tables.append(_markdown(["Temperature", *map(suite_title, suites), "Average"], body))
    accepted = [
        [f"{row.mode}, {row.temperature:g}", *(f"{100 * rate:.0f}" for rate in row.acceptance)]
        for row in pool(loaded)
        if row.method == name
    ]
    tables.append("Drafts accepted at each position, % of the rounds, all suites together:")
    tables.append(_markdown(_positions("Mode, temperature", rows), accepted))
    return Measured(
        _card_settings(loaded, rows),
        "\n\n".join(tables),
        [result for row in rows for result in _eval_results(row)],
        [speedup for speedup in speedups if speedup is not None],
    )


def _card_settings(results: Results, rows: Sequence[Row]) -> str:
    run, texts = results.runs[-1], sum(row.checked for row in rows)
    dates = " and ".join(dict.fromkeys(run["date"] for run in results.runs))
    prompts = f"The first {run['limit']} prompts" if run["limit"] else "All prompts"
    differing = f" Of {texts} greedy texts {sum(row.differing for row in rows)} differ from the target's own."
    return (
        f"{prompts} of each suite, at most {run['max_new_tokens']} new tokens, "
        f"{max(len(row.acceptance) for row in rows)} drafts a round, each generation side by side with plain decoding "
        f"(`hf-hyperdflash benchmark`). {dates}, {run['hardware']}, {run['threads']} CPU thread"
        f"{'s' if run['threads'] > 1 else ''}, {run['dtype']}, torch {run['versions']['torch']}, transformers "
        f"{run['versions']['transformers']}. Tau is the mean number of tokens per verification round: accepted drafts "
        f"plus the target's own.{differing if texts else ''}"
    )


def _eval_results(row: Row) -> list[EvalResult]:
    suite = SUITES.get(row.suite)
    return [
        EvalResult(
            task_type="text-generation",
            task_name="Speculative decoding",
            dataset_type=suite.source.partition(":")[0] if suite and "//" not in suite.source else row.suite,
            dataset_name=suite_title(row.suite),
            dataset_split=suite.split if suite else None,
            metric_type=kind,
            metric_name=f"{kind}, {row.mode}, temperature {row.temperature:g}",
            metric_value=round(value, 3),
        )
        for kind, value in (("tau", row.tau), ("speedup", row.speedup))
        if value is not None
    ]


def print_results(results: Path) -> None:
    """Print a table of speedups and tau per mode and temperature, the best of each suite in bold."""
    rows, console = summarize(load(results)), Console(highlight=False, markup=False)
    between = "\n" if console.width < _WIDE else " "  # tau below the speedup, or beside it
    for mode, mode_rows in grouped(rows, "mode").items():
        for temperature, temperature_rows in grouped(mode_rows, "temperature").items():
            suites = suites_in_order(temperature_rows)
            figures = _speedups(temperature_rows, suites)
            best = [max((s for s, _ in column if s is not None), default=None) for column in zip(*figures.values())]
            titles = [Column(title, justify="right") for title in [*map(suite_title, suites), "Average"]]
            table = _terminal(Column("Method"), *titles)
            for method, method_rows in figures.items():
                bold = ["bold" if pair[0] == top is not None else "" for pair, top in zip(method_rows, best)]
                table.add_row(method, *(Text(_pair(pair, between), style) for pair, style in zip(method_rows, bold)))
            console.print(f"{mode_title(mode)}, temperature {temperature:g}: speedup over the target alone, tau")
            console.print(table)
    if checked := sum(row.checked for row in rows):
        console.print(f"{sum(row.differing for row in rows)} of {checked} greedy texts differ from the target's own.")


def print_fastest(results: Path) -> None:
    """Print which method was the fastest on each suite: what a sweep over the number of drafted tokens is for."""
    table = _terminal(*map(Column, ("Suite", "Mode", "Temperature", "Fastest", "Speedup", "tau")))
    for temperature_rows in grouped(summarize(load(results)), "mode", "temperature", "suite").values():
        best = max(temperature_rows, key=lambda row: row.speedup)
        figures = _number(best.speedup, unit="×"), _number(best.tau)
        table.add_row(suite_title(best.suite), best.mode, f"{best.temperature:g}", best.method, *figures)
    console = Console(highlight=False, markup=False)
    console.print("The fastest on each suite")
    console.print(table)


def _terminal(*columns: Column) -> Table:
    for column in columns:
        column.overflow = "fold"  # rich's mark of what is cut off is no ASCII
    return Table(*columns, box=SIMPLE_HEAD, show_edge=False, padding=0)


def write_calibration(calibration: Calibration, settings: dict[str, object], output: Path) -> None:
    """Write `calibration.md`, `calibration.json` and `reliability.png` into the folder `output`, new or not."""
    picture, (fitted, measured) = reliability_figure(calibration.through), calibration.rounds
    text = [
        "# Calibration of a drafter's confidence",
        _settings([settings]),
        _CALIBRATION.format(bins=BINS, fitted=fitted, measured=measured),
        "Confidence that all drafts up to a position are accepted:",
        _markdown(*_calibration_table(calibration, calibration.through)),
        "Confidence that a draft is accepted once those before it are:",
        _markdown(*_calibration_table(calibration, calibration.given)),
        "![Reliability](reliability.png)\n",
    ]
    facts = {"settings": settings, **asdict(calibration)}
    output.mkdir(parents=True, exist_ok=True)
    (output / "calibration.md").write_text("\n\n".join(text), encoding="utf-8")
    (output / "calibration.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    picture.savefig(output / "reliability.png")


def _calibration_table(
    calibration: Calibration, positions: Sequence[BeforeAfter]
) -> tuple[list[str], list[list[str]]]:
    """Return header and rows of a table: each draft position, and all of them together."""
    header = ["Draft", "Temperature", "Rounds", "Accepted", "Confidence", "after", "Error", "after", "AUC", "after"]
    names = [(str(k), f"{value:.2f}") for k, value in enumerate(calibration.temperatures, start=1)]
    body = []
    for name, pair in zip([*names, ("all", "")], positions):
        both = pair.before, pair.after
        figures = [_number(getattr(each, of), ".1f", " %", 100) for of in ("confidence", "error") for each in both]
        ranks = [_number(each.auc, ".3f") for each in both]
        body.append([*name, str(both[0].total), _number(both[0].accepted, ".1f", " %", 100), *figures, *ranks])
    return header, body


def print_calibration(calibration: Calibration) -> None:
    """Print the reliability of the probability that all drafts up to a position are accepted, before and after."""
    header, body = _calibration_table(calibration, calibration.through)
    table = _terminal(*(Column(name, justify="right") for name in header))
    for row in body:
        table.add_row(*row)
    console = Console(highlight=False, markup=False)
    fitted, measured = calibration.rounds
    console.print(_CALIBRATION.format(bins=BINS, fitted=fitted, measured=measured))
    console.print(table)
