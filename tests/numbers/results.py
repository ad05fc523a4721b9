"""What the committed results say."""

import csv
import json
import re
from collections import defaultdict
from functools import cache

from .pages import ROOT

RESULTS = ROOT / "experiments" / "results"
V4 = "tiny-deepseek-v4"


@cache
def averages(folder: str) -> dict:
    """Of a benchmark, by method and temperature: tau and speedup as the report's Average has them, unweighted over
    suites, milliseconds over all rounds."""
    found = defaultdict(lambda: defaultdict(list))
    with (RESULTS / folder / "summary.csv").open() as file:
        for row in csv.DictReader(file):
            of, rounds = found[row["method"], float(row["temperature"])], int(row["rounds"])
            for name in ("tau", "speedup", "draft_ms", "verify_ms"):
                of[name].append((float(row[name]), rounds if name.endswith("ms") else 1))
    return {
        key: {name: sum(v * w for v, w in all_) / sum(w for _, w in all_) for name, all_ in of.items()}
        for key, of in found.items()
    }


def figures(folder: str, method: str, temperature: float, *names: str) -> list[float]:
    return [averages(f"{V4}/{folder}")[method, temperature][name] for name in names]


def ratio(folder: str, method: str, other: str, temperature: float, name: str) -> float:
    return figures(folder, method, temperature, name)[0] / figures(folder, other, temperature, name)[0]


def lead(folder: str, method: str, other: str, temperature: int) -> list[str]:
    """By how much the fastest is ahead of another method, of the report: speedup and tau, each with its interval."""
    report = (RESULTS / V4 / folder / "report.md").read_text()
    (line,) = re.findall(
        rf"^\| {re.escape(f'{method} over {other} | {temperature} |')} (.*) \|$", report, re.MULTILINE
    )
    return re.findall(r"[+-]\d\.\d\d", line)


@cache
def served(temperature: int) -> dict:
    """Of a stream, by policy and part: tau, tokens per second, tau of the last 50 requests."""
    path = RESULTS / V4 / "adaptation" / f"temperature-{temperature}" / "results.json"
    found = {}
    for policy, requests in json.loads(path.read_text())["served"].items():
        for part in {request["part"] for request in requests}:
            of = [request for request in requests if request["part"] == part]
            tau, late = (sum(r["emitted"] for r in some) / sum(r["rounds"] for r in some) for some in (of, of[-50:]))
            found[policy, part] = tau, sum(r["tokens"] for r in of) / sum(r["seconds"] for r in of), late
    return found


def told(path, pattern):
    """What a report says in words."""
    found = re.findall(pattern, (RESULTS / path).read_text())
    assert len(found) == 1, (path, pattern, found)
    return [float(value.replace(",", "")) for value in ([found[0]] if isinstance(found[0], str) else found[0])]


@cache
def rows_and_taus():
    """Of the curve over training rows: rows, tau at temperature 0 and at temperature 1."""
    report = (RESULTS / V4 / "rows" / "report.md").read_text()
    found = re.findall(r"^\| ([\d,]+) \| (\d\.\d\d) \| (\d\.\d\d) \|$", report, re.MULTILINE)
    return {rows: (float(greedy), float(drawn)) for rows, greedy, drawn in found}


def rules(label: str) -> list[float]:
    """Of drafts settled in both ways: tokens a round, their ratio, speedups, their ratio."""
    found = json.loads((RESULTS / V4 / "verification" / "results.json").read_text())["results"][label]
    down, up = found["judged"].values()
    alone, *drafted = (found["tokens"][way] / found["seconds"][way] for way in found["tokens"])
    slow, fast = (rate / alone for rate in drafted)
    return [down, up, up / down, slow, fast, fast / slow]
