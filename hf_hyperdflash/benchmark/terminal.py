"""A benchmark's figures as tables that fit the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .results import MODES, Row, averages, load, suites_of, summarize, temperatures
from .suites import title_of

_WIDE = 120  # columns that seven suites and their average take side by side
Cells: TypeAlias = dict[tuple[str, str], tuple["float | None", "float | None"]]  # method, suite: speedup, tau


def print_results(results: Path) -> None:
    """Print a table of speedups and tau per mode and temperature, the best of each suite in bold.

    Raises:
        ValueError: If the file is no benchmark's or nothing in it can be compared.
    """
    rows, console = summarize(load(results)), Console(highlight=False, markup=False)
    for mode in dict.fromkeys(row.mode for row in rows):
        for heat in temperatures([row for row in rows if row.mode == mode]):
            here = [row for row in rows if (row.mode, row.temperature) == (mode, heat)]
            what = MODES.get(mode, mode).partition(" (")[0]
            console.print(f"{what}, temperature {heat:g}: speedup over the target alone, tau")
            console.print(_main_table(here, "\n" if console.width < _WIDE else " "))
    checked, differing = sum(row.checked for row in rows), sum(row.differing for row in rows)
    if checked:
        console.print(f"{differing} of {checked} greedy texts differ from the target's own.")


def print_fastest(results: Path) -> None:
    """Print which method was the fastest on each suite: what a sweep over the number of drafted tokens is for.

    Raises:
        ValueError: If the file is no benchmark's or nothing in it can be compared.
    """
    rows = summarize(load(results))
    table = _table("Suite", "Mode", "Temperature", "Fastest", "Speedup", "tau")
    for mode in dict.fromkeys(row.mode for row in rows):
        for heat in temperatures(rows):
            for suite in suites_of(rows):
                here = [row for row in rows if (row.mode, row.temperature, row.suite) == (mode, heat, suite)]
                if here:
                    best = max(here, key=lambda row: row.speedup)
                    figures = (f"{best.speedup:.2f}×", _tau(best.tau))
                    table.add_row(title_of(suite), mode, f"{heat:g}", best.method, *figures)
    console = Console(highlight=False, markup=False)
    console.print("The fastest on each suite")
    console.print(table)


def _table(*columns: str) -> Table:
    return Table(*columns, box=SIMPLE_HEAD, show_edge=False, padding=0)


def _main_table(rows: Sequence[Row], between: str) -> Table:
    """With speedup and tau of a cell side by side, or one below the other."""
    suites, means = suites_of(rows), averages(rows)
    table = _table()
    table.add_column("Method", overflow="fold")
    for suite in [*map(title_of, suites), "Average"]:
        table.add_column(suite, justify="right", overflow="fold")
    cells: Cells = {(row.method, row.suite): (row.speedup, row.tau) for row in rows}
    cells |= {(method, ""): pair for (_, _, method), pair in means.items()}  # the last column
    for method in dict.fromkeys(row.method for row in rows):
        table.add_row(method, *(_cell(cells, method, suite, between) for suite in [*suites, ""]))
    return table


def _cell(cells: Cells, method: str, suite: str, between: str) -> Text:
    speedup, tau = cells.get((method, suite), (None, None))
    best = max((pair[0] for (_, other), pair in cells.items() if other == suite and pair[0] is not None), default=None)
    shown = "–" if speedup is None else f"{speedup:.2f}×"
    return Text(f"{shown}{between}{_tau(tau)}", "bold" if speedup is not None and speedup == best else "")


def _tau(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"
