"""Draws the pictures of a benchmark (acceptance per draft position, speedup against tau) and of a calibration."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np

from .calibration import BeforeAfter
from .results import Row, averages, mode_title

# Okabe and Ito's colours, which colour-blind readers can distinguish, and two more. Nine colours and eight markers:
# pairs repeat only after 72.
_COLOURS = (
    "#0072B2", "#E69F00", "#CC79A7", "#56B4E9", "#D55E00", "#009E73", "#000000", "#8C6D31", "#6A3D9A",
)  # fmt: skip
_MARKERS = ("o", "s", "^", "v", "D", "P", "X", "*")
_RIM: dict[str, Any] = {"markeredgecolor": "white", "markeredgewidth": 0.5}


def acceptance_figure(pooled: Sequence[Row], conditional: bool = False) -> Figure:
    """Draw the paper's Figure 1 from rows of [`pool`]: acceptance per draft position, a panel per mode and
    temperature; `conditional` of the rounds that accepted the position before, instead of all rounds."""
    label = "Conditional acceptance" if conditional else "Acceptance, share of rounds"
    figure, styles, panels = _panels(pooled, "Draft position", label, (4.8, 3.6))
    for axes, rows in panels:
        for row in rows:
            shares = row.acceptance
            if conditional:  # as far as any round came
                shares = row.conditional_acceptance[: 1 + sum(share > 0 for share in shares)]
            axes.plot(range(1, len(shares) + 1), shares, linewidth=1.6, **styles[row.method])
        axes.set(ylim=(-0.03, 1.03), xticks=range(1, max(len(row.acceptance) for row in pooled) + 1))
        axes.grid(alpha=0.25)
    return figure


def speedup_figure(rows: Sequence[Row]) -> Figure:
    """Draw speedup against tau from rows of [`summarize`]: suites faint, averages strong, efficiency as lines."""
    key = "small: a suite; large: average over suites; dashed: equal speedup / τ"
    figure, styles, panels = _panels(
        rows, "τ, tokens per verification round", "Speedup over target-only", (5.6, 4.6), key
    )
    from matplotlib.ticker import MaxNLocator

    means = averages(rows)
    for axes, panel_rows in panels:
        for row in panel_rows:
            if row.tau is not None:
                axes.plot(row.tau, row.speedup, alpha=0.4, markersize=5, markeredgewidth=0, **styles[row.method])
        for (mode, temperature, method), (speedup, tau) in means.items():
            if (
                (mode, temperature) == (panel_rows[0].mode, panel_rows[0].temperature)
                and speedup is not None
                and tau is not None
            ):
                axes.plot(tau, speedup, markersize=9, zorder=4, **_RIM, **styles[method])
        axes.margins(0.1)
        axes.set_xlim(left=max(axes.get_xlim()[0], 0.5))  # a round has a token at least
        x, y = np.meshgrid(np.linspace(*axes.get_xlim()), np.linspace(*axes.get_ylim()))
        known = [row.efficiency for row in panel_rows if row.efficiency is not None] or [1.0]
        levels: Any = MaxNLocator(4).tick_values(0.9 * min(known), 1.1 * max(known))
        lines = axes.contour(x, y, y / x, levels[levels > 0], colors="0.7", linewidths=0.8, linestyles="--", zorder=0)
        axes.clabel(lines, colors="0.4", fontsize=8)
    return figure


def reliability_figure(positions: Sequence[BeforeAfter]) -> Figure:
    """Draw the share of accepted drafts against the drafter's confidence, before and after calibration."""
    figure_kind, _ = import_matplotlib()
    columns = min(4, len(positions))
    rows = -(-len(positions) // columns)
    figure = figure_kind((2.7 * columns, 3.1 * rows + 0.8), dpi=150, layout="constrained")
    names = [*(f"Up to draft {k}" for k in range(1, len(positions))), "All positions"]
    for index, (name, before_after) in enumerate(zip(names, positions)):
        axes = figure.add_subplot(rows, columns, index + 1)
        before, after = before_after.before, before_after.after
        axes.set_title(f"{name}\nerror {100 * before.error:.1f} to {100 * after.error:.1f} %", fontsize=10)
        axes.set(xlim=(-0.03, 1.03), ylim=(-0.03, 1.03), aspect="equal", xticks=(0, 0.5, 1), yticks=(0, 0.5, 1))
        axes.plot([0, 1], [0, 1], color="0.7", linewidth=0.8, linestyle="--", zorder=0)
        for label, colour, turned_out in (("before", _COLOURS[4], before), ("after", _COLOURS[0], after)):
            x, y = [item.confidence for item in turned_out.bins], [item.accepted for item in turned_out.bins]
            areas = [2 + 150 * item.total / turned_out.total for item in turned_out.bins]
            axes.plot(x, y, color=colour, linewidth=0.8, alpha=0.6)
            axes.scatter(x, y, areas, color=colour, alpha=0.8, linewidths=0, label=label)
        axes.grid(alpha=0.25)
        axes.set_xlabel("Confidence")
        if index % columns == 0:
            axes.set_ylabel("Accepted")
    key = "confidence that all drafts up to one are accepted;\narea: share of rounds"
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False, title=key, title_fontsize=9)
    return figure


def import_matplotlib() -> tuple[type[Figure], type[Line2D]]:
    """Import matplotlib, and return its `Figure` and `Line2D`."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.lines import Line2D
    except ImportError as error:
        raise ImportError('The pictures need matplotlib: pip install "hf-hyperdflash[benchmark]".') from error
    return Figure, Line2D


def _panels(
    rows: Sequence[Row], xlabel: str, ylabel: str, size: tuple[float, float], key: str = ""
) -> tuple[Figure, dict[str, dict[str, Any]], list[tuple[Axes, list[Row]]]]:
    """Return a figure with a legend under `key`, each method's style, and panels with their rows: a line of panels
    per mode, a column per temperature."""
    figure_kind, line_kind = import_matplotlib()
    modes, temperatures = list(dict.fromkeys(row.mode for row in rows)), sorted({row.temperature for row in rows})
    methods, width = dict.fromkeys(row.method for row in rows), size[0] * len(temperatures)
    columns = int(width / (0.6 + 0.08 * max(map(len, methods))))  # inches that the longest name needs
    columns = min(3, max(1, columns))
    legend = max(0.9, 0.4 + 0.2 * -(-len(methods) // columns))
    figure = figure_kind((width, size[1] * len(modes) + legend), dpi=150, layout="constrained")
    panels = []
    for index, (mode, temperature) in enumerate(product(modes, temperatures), start=1):
        if panel_rows := [row for row in rows if (row.mode, row.temperature) == (mode, temperature)]:
            axes = figure.add_subplot(len(modes), len(temperatures), index)
            axes.set(title=f"{mode_title(mode)}, temperature {temperature:g}", xlabel=xlabel, ylabel=ylabel)
            panels.append((axes, panel_rows))
    styles: dict[str, dict[str, Any]] = {
        method: {"color": _COLOURS[i % len(_COLOURS)], "marker": _MARKERS[i % len(_MARKERS)]}
        for i, method in enumerate(methods)
    }
    handles = [line_kind([], [], label=method, **style) for method, style in styles.items()]
    figure.legend(
        handles=handles, loc="outside lower center", ncols=columns, frameon=False, title=key or None, title_fontsize=9
    )
    return figure, styles, panels
