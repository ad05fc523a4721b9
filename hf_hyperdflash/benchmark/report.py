"""A benchmark's report: the paper's Tables 2 and 3, details, a CSV and two pictures."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult

from ..hub.cards import Measured
from ..runtime.modeling_hyperdflash import HyperDFlashDrafter
from ..runtime.weights import weight_files
from ..training.fingerprint import module_fingerprint
from .figures import acceptance_figure, speedup_figure
from .intervals import Interval
from .leads import Lead, leads
from .results import MODES, Results, Row, averages, load, pool, suites_of, summarize, temperatures
from .suites import SUITES, title_of

_DETAILS = """\
All suites together, {count} generations; target-only: {rate:.1f} tokens/s, {step} ms a step{memory}.
Speedup: of the sums, so not the Average above; median and quartiles: over the generations' own. Draft and verify ms: per
verification round. Overhead: share of the loop's time that is neither. Bound: the speedup without overhead and prefill.
Efficiency: speedup / τ. Outputs differing: greedy ones that are not target-only's."""
_LEADS = """\
Lead of the fastest, by average speedup, over each other method. In parentheses 95 % intervals: the prompts drawn again, with
their timings. What another seed of a drafter's training would change is not in them."""
_DETAIL_HEADER = (
    "Method, Speedup, Median (quartiles), τ, Accepted drafts, Draft ms, Verify ms, Overhead, Bound, Efficiency, "
    "Peak memory GB, Outputs differing"
).split(", ")


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
    parts, ahead = ["# Benchmark", _settings(results), _left_out(results, rows)], leads(results)
    for mode in dict.fromkeys(row.mode for row in rows):
        of_mode = [row for row in rows if row.mode == mode]
        parts += [f"## {MODES.get(mode, mode)}", _legend(of_mode), _main_table(of_mode)]
        parts.append(_leads_table([lead for lead in ahead if lead.mode == mode]))
        for heat in temperatures([row for row in pooled if row.mode == mode]):
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
    said = [f"Left out, because not every method got to their prompts: {count} generations."] if count else []
    if results.replaced:
        said.append(
            f"Lines that a later one of the same prompt and method takes the place of: {results.replaced}. Were two runs "
            "writing at once?"
        )
    return " ".join(said)


def _legend(rows: list[Row]) -> str:
    groups: dict[str, list[str]] = {}
    for suite in suites_of(rows):
        counts = dict.fromkeys(str(row.generations) for row in rows if row.suite == suite)
        groups.setdefault(SUITES[suite].group if suite in SUITES else "Other", []).append(
            f"{title_of(suite)} ({' and '.join(counts)})"
        )
    listed = "; ".join(f"{group}: {', '.join(names)}" for group, names in groups.items())
    return (
        "Speedup over target-only / τ (tokens per verification round), best in bold. Average: unweighted, over the suites "
        f"that every method has. Generations per method: {listed}."
    )


def _main_table(rows: list[Row]) -> str:
    suites, body, means = suites_of(rows), [], averages(rows)
    for heat in temperatures(rows):
        cells = {(row.method, row.suite): (row.speedup, row.tau) for row in rows if row.temperature == heat}
        methods = list(dict.fromkeys(method for method, _ in cells))
        columns: list[list[tuple[float | None, float | None]]]
        columns = [[cells.get((method, suite), (None, None)) for method in methods] for suite in suites]
        columns.append([means.get((rows[0].mode, heat, method), (None, None)) for method in methods])
        texts = [zip(_bold([s for s, _ in column], "×"), _bold([tau for _, tau in column])) for column in columns]
        body.append([f"*Temperature = {heat:g}*", *[""] * len(columns)])
        body += [[method, *map(" / ".join, line)] for method, line in zip(methods, zip(*texts))]
    return _table(["Method", *map(title_of, suites), "Average"], body)


def _bold(values: Sequence[float | None], unit: str = "") -> list[str]:
    best = max((value for value in values if value is not None), default=None)
    texts = [_number(value, unit=unit) for value in values]
    return [f"**{text}**" if best is not None and text == _number(best, unit=unit) else text for text in texts]


def _leads_table(ahead: list[Lead]) -> str:
    body = [
        [f"{lead.fastest} over {lead.method}", f"{lead.temperature:g}", _signed(lead.speedup, "×"), _signed(lead.tau)]
        for lead in ahead
    ]
    return f"{_LEADS}\n\n{_table(['Lead', 'Temperature', 'Speedup', 'τ'], body)}" if body else ""


def _signed(interval: Interval | None, unit: str = "") -> str:
    if interval is None:
        return "–"
    return f"{interval.value:+.2f}{unit} ({interval.low:+.2f} to {interval.high:+.2f})"


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


def measured(results: Path, method: str | None = None, folder: Path | None = None) -> Measured:
    """What a model card shows of one method of a benchmark.

    Args:
        results: The benchmark's `results.jsonl`.
        method: Which, as the tables name it; may be left out where there is only one.
        folder: Of the drafter that the card is for; not looked at if left out.

    Raises:
        ValueError: If the file has no such method, or several and none is named, or another drafter was measured than the
            one in `folder` (benchmarks of earlier releases do not say which).
    """
    loaded = load(results)
    rows = summarize(loaded)
    methods = list(dict.fromkeys(row.method for row in rows))
    if method not in methods and (method is not None or len(methods) > 1):
        raise ValueError(
            f"The method is {method!r}, but {results} compares {methods}. Pass one of them as `method` (`--method`)."
        )
    rows = [row for row in rows if row.method == (method or methods[0])]
    if folder is not None:
        _check_weights(loaded.runs[-1], rows[0].method, folder)
    tables = []
    for mode in dict.fromkeys(row.mode for row in rows):
        of_mode = [row for row in rows if row.mode == mode]
        tables += [f"{MODES.get(mode, mode).partition(' (')[0]}, speedup / tau:", _card_table(of_mode)]
    positions = max(len(row.acceptance) for row in rows)
    tables += [
        "Drafts accepted at each position, % of the rounds, all suites together:",
        _table(
            ["Mode, temperature", *map(str, range(1, positions + 1))],
            [
                [f"{row.mode}, {row.temperature:g}", *(f"{100 * rate:.0f}" for rate in row.acceptance)]
                for row in pool(loaded)
                if row.method == rows[0].method
            ],
        ),
    ]
    return Measured(_card_settings(loaded, rows), "\n\n".join(tables), [r for row in rows for r in _results(row)])


def _check_weights(run: dict[str, Any], method: str, folder: Path) -> None:
    recorded = run.get("weights_digest", {}).get(method)
    if recorded and weight_files(folder):
        drafter = HyperDFlashDrafter.from_pretrained(folder, dtype=run["dtype"])
        if not module_fingerprint(drafter).startswith(recorded):
            raise ValueError(
                f"The benchmark's {method} was run with other weights or another configuration than the drafter in {folder} "
                "has. Benchmark this drafter, or name the method that it is (`--method`)."
            )


def _card_table(rows: list[Row]) -> str:
    suites, means, body = suites_of(rows), averages(rows), []
    for heat in temperatures(rows):
        cells = {row.suite: (row.speedup, row.tau) for row in rows if row.temperature == heat}
        pairs: list[tuple[float | None, float | None]] = [cells.get(suite, (None, None)) for suite in suites]
        pairs.append(means.get((rows[0].mode, heat, rows[0].method), (None, None)))
        body.append([f"{heat:g}", *(f"{_number(speedup, unit='×')} / {_number(tau)}" for speedup, tau in pairs)])
    return _table(["Temperature", *map(title_of, suites), "Average"], body)


def _card_settings(results: Results, rows: list[Row]) -> str:
    run, texts = results.runs[-1], sum(row.checked for row in rows)
    dates = " and ".join(dict.fromkeys(run["date"] for run in results.runs))
    drafts, limit = max(len(row.acceptance) for row in rows), run["limit"]
    prompts = f"The first {limit} prompts of each suite" if limit else "All prompts of each suite"
    same = (
        f" Of {texts} greedy texts {sum(row.differing for row in rows)} differ from the target's own." if texts else ""
    )
    return (
        f"{prompts}, at most {run['max_new_tokens']} new tokens, {drafts} drafts a round, each generation side by side with "
        f"plain decoding (`hf-hyperdflash benchmark`). {dates}, {run['hardware']}, {run['threads']} CPU thread"
        f"{'s' if run['threads'] > 1 else ''}, {run['dtype']}, torch {run['versions']['torch']}, transformers "
        f"{run['versions']['transformers']}. Tau is the mean number of tokens per verification round: accepted drafts plus "
        f"the target's own.{same}"
    )


def _results(row: Row) -> list[EvalResult]:
    suite, where = SUITES.get(row.suite), f"{row.mode}, temperature {row.temperature:g}"
    return [
        EvalResult(
            task_type="text-generation",
            task_name="Speculative decoding",
            dataset_type=suite.source.partition(":")[0] if suite and "//" not in suite.source else row.suite,
            dataset_name=title_of(row.suite),
            dataset_split=suite.split if suite else None,
            metric_type=kind,
            metric_name=f"{name}, {where}",
            metric_value=round(value, 3),
        )
        for kind, name, value in (
            ("tau", "tau", row.tau), ("speedup", "speedup", row.speedup),
        )
        if value is not None
    ]  # fmt: skip
