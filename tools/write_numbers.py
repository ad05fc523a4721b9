"""Write the measured figures of the README, the docs and the model cards, from the committed results.

    python tools/write_numbers.py            # fills every block
    python tools/write_numbers.py --check    # changes nothing; names each stale block; exit status 1 if there is one

A block stands between `<!-- result: KIND ARGUMENTS -->` and `<!-- end -->`. Arguments with spaces are in quotes. Paths
are below `experiments/results`; `{T}` in a path stands for 0 and 1, where each temperature has a folder of its own.

    average FOLDER METHOD T FIELD    one figure of a benchmark's `summary.csv`: FIELD (tau, speedup) at temperature T,
                                     averaged over the suites as in the report
    averages FOLDER [METHOD ...]     a table of speedup (tau) at each temperature; every method if none is named
    cell REPORT ROW COLUMN FORMAT    one cell of a report: the first line that begins with ROW, COLUMN from 0
    rows REPORT HEADER [TEXT ...]    a table of a report: the first line that begins with HEADER, and the rows below it
                                     that contain one of the TEXTs

Below a table stand its date, its number of prompts, and links to reports, which have machine, versions and settings.
"""

from __future__ import annotations

import argparse
import csv
import os
import re
import shlex
import sys
from collections import defaultdict
from itertools import dropwhile, takewhile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "experiments" / "results"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "model_cards").rglob("*.md"))]
BLOCK = re.compile(r"(<!-- result: (.*?) -->)(.*?)(<!-- end -->)", re.DOTALL)


def folders(path: str) -> list[Path]:
    return [RESULTS / path.replace("{T}", at) for at in ("01" if "{T}" in path else "0")]


def measured(path: str) -> dict[str, dict[int, dict[str, float]]]:
    """Of each method and temperature, tau and speedup, averaged over the suites."""
    found: dict[str, dict[int, list[dict[str, str]]]] = defaultdict(lambda: defaultdict(list))
    for folder in folders(path):
        with (folder / "summary.csv").open(encoding="utf-8") as file:
            for row in csv.DictReader(file):
                found[row["method"]][int(float(row["temperature"]))].append(row)
    return {
        method: {
            at: {name: sum(float(row[name]) for row in rows) / len(rows) for name in ("tau", "speedup")}
            for at, rows in of.items()
        }
        for method, of in found.items()
    }


def average(page: Path, path: str, method: str, temperature: str, field: str) -> str:
    value = measured(path)[method][int(temperature)][field]
    return f"{value:.2f}×" if field == "speedup" else f"{value:.2f}"


def averages(page: Path, path: str, *methods: str) -> str:
    found = measured(path)
    chosen = methods or tuple(name for name in found if name != "Target only")
    temperatures = sorted({at for name in chosen for at in found[name]})
    fastest = {at: max(found[name][at]["speedup"] for name in chosen if at in found[name]) for at in temperatures}
    lines = ["| | " + " | ".join(f"T = {at}" for at in temperatures) + " |", "|---|" + "---:|" * len(temperatures)]
    for name in chosen:
        cells = [shown(found[name][at], fastest[at]) if at in found[name] else "" for at in temperatures]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", settings(page, folders(path))])


def shown(of: dict[str, float], fastest: float) -> str:
    """Speedup (tau), the fastest in bold."""
    speed = f"{of['speedup']:.2f}×"
    return f"{f'**{speed}**' if of['speedup'] == fastest else speed} ({of['tau']:.2f})"


def settings(page: Path, of: list[Path]) -> str:
    """When and with how much text a benchmark ran, by its report's head."""
    said = dict(re.findall(r"^- ([\w ]+): (.*)$", (of[0] / "report.md").read_text(encoding="utf-8"), re.MULTILINE))
    prompts = f"{said['limit']} prompts a suite, {said['max new tokens']} tokens"
    reports = [link(page, folder / "report.md", text) for folder, text in zip(of, ("report", "T = 1"))]
    return f"{said['date']}, {prompts}: {', '.join(reports)}."


def link(page: Path, path: Path, text: str) -> str:
    return f"[{text}]({os.path.relpath(path, page.parent)})"


def rows(page: Path, report: str, header: str, *texts: str) -> str:
    lines = (RESULTS / report).read_text(encoding="utf-8").splitlines()
    below = dropwhile(lambda line: not line.startswith(header), lines)
    head, rule, *body = takewhile(lambda line: line.startswith("|"), below)
    date = re.search(r"\b20\d\d-\d\d-\d\d\b", "\n".join(lines))
    source = f"{date[0] + ': ' if date else ''}{link(page, RESULTS / report, 'report')}."
    return "\n".join(
        [head, rule, *(row for row in body if not texts or any(text in row for text in texts)), "", source]
    )


def cell(page: Path, report: str, row: str, column: str, form: str) -> str:
    lines = (RESULTS / report).read_text(encoding="utf-8").splitlines()
    found = next(line for line in lines if line.startswith(row))
    value = re.search(r"[\d,]+(?:\.\d+)?", found.strip("|").split("|")[int(column)])
    return format(float(value[0].replace(",", "")), form)


KINDS = {"average": average, "averages": averages, "cell": cell, "rows": rows}


def written(page: Path, text: str, stale: list[str]) -> str:
    def filled(block: re.Match[str]) -> str:
        begin, told, before, end = block.groups()
        kind, *arguments = shlex.split(told)
        try:
            made = KINDS[kind](page, *arguments)
        except (KeyError, OSError, StopIteration, TypeError, ValueError) as error:
            raise SystemExit(f"{page}: {told}: {type(error).__name__} {error}") from None
        made = f"\n\n{made}\n\n" if kind in ("averages", "rows") else made
        stale.extend([f"{page}: {told}"] * (made != before))
        return f"{begin}{made}{end}"

    return BLOCK.sub(filled, text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="*", type=Path, help="all by default")
    parser.add_argument("--check", action="store_true")
    args, stale = parser.parse_args(), list[str]()
    for page in args.pages or PAGES:
        if not page.is_file():
            parser.error(f"there is no page {page}: expected a Markdown file.")
        text = page.read_text(encoding="utf-8")
        new = written(page.resolve(), text, stale)
        if not args.check:
            page.write_text(new, encoding="utf-8")
    if args.check and stale:
        print("stale, run tools/write_numbers.py:", *stale, sep="\n", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
