"""The pictures of a benchmark: acceptance per draft position, and speedup against tau."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .results import MODES, Row, averages, temperatures

# Okabe and Ito's colours, to be told apart by colour-blind readers, and two more. Nine beside eight markers: pairs repeat
# only after 72.
_COLOURS = (
    "#0072B2", "#E69F00", "#CC79A7", "#56B4E9", "#D55E00", "#009E73", "#000000", "#8C6D31", "#6A3D9A",
)  # fmt: skip
_MARKERS = ("o", "s", "^", "v", "D", "P", "X", "*")


def acceptance_figure(pooled: Sequence[Row]) -> Any:
    """The paper's Figure 1 from the rows of [`pool`]: acceptance per draft position, a panel per mode and temperature.

    Returns:
        A `matplotlib.figure.Figure`.

    Raises:
        ImportError: If matplotlib is not installed.
    """
    figure, panels = _panels(pooled, "Draft position", "Acceptance, share of rounds", (4.8, 3.6), shared=True)
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
                rim = {"markeredgecolor": "white", "markeredgewidth": 0.5}
                axes.plot(tau, speedup, markersize=9, zorder=4, **rim, **styles[method])
                labels.append((axes, method, (tau, speedup)))
        axes.margins(0.1)
        _draw_efficiencies(axes, of_panel)
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
    rows: Sequence[Row], xlabel: str, ylabel: str, size: tuple[float, float], pad: float = 6, shared: bool = False
) -> tuple[Any, list[Any]]:
    """A figure and its panels, each with its rows: modes downwards, temperatures across; `shared` limits or each its own."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError('The pictures need matplotlib: pip install "hf-hyperdflash[benchmark]".') from error
    modes, heats = list(dict.fromkeys(row.mode for row in rows)), temperatures(rows)
    figure = Figure((size[0] * len(heats), size[1] * len(modes) + 0.6), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(modes), len(heats), sharex=shared, sharey=shared, squeeze=False)
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
        averages_here = [_square(axes, at, 12 * pixels) for other, _, at in labels if other is axes]
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
