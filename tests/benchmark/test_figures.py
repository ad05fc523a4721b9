"""The pictures show the figures, and no text hides another."""

from itertools import combinations

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from hf_hyperdflash.benchmark.calibration import Rounds, fitted
from hf_hyperdflash.benchmark.figures import acceptance_figure, reliability_figure, speedup_figure
from hf_hyperdflash.benchmark.results import averages, load, pool, summarize

from ..helpers.confidence import simulated
from ..helpers.results_files import METHODS, PLAIN, SUITES, line, realistic, settings, written


def check_texts(figure):
    """Every text that is drawn is inside and apart from the others. Return them."""
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw_without_rendering()
    found = [text for legend in figure.legends for text in (legend.get_title(), *legend.get_texts())]
    for axes in figure.axes:
        found += [axes.title, axes.xaxis.label, axes.yaxis.label, *axes.texts]
        for axis in (axes.xaxis, axes.yaxis):
            low, high = axis.get_view_interval()
            found += [tick.label1 for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]
    plain = type(figure.axes[0].title)  # an annotation's own extent includes its line
    drawn = [(text.get_text(), plain.get_window_extent(text, renderer)) for text in found if text.get_text()]
    for text, box in drawn:
        assert figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1, text
        assert figure.bbox.y0 <= box.y0 and box.y1 <= figure.bbox.y1, text
    slanted = {text.get_text() for axes in figure.axes for text in axes.texts}  # along lines that do not meet
    for (one, box), (other, other_box) in combinations(drawn, 2):
        assert {one, other} <= slanted or not box.overlaps(other_box), (one, other)
    return [text for text, _ in drawn]


@pytest.mark.parametrize(
    ("seed", "grid"),
    [
        (1, {"modes": ("non-think", "think-high")}),
        (3, {"temperatures": (1.0,), "methods": METHODS[:1], "suites": SUITES[:1]}),
    ],
)
def test_texts_are_inside_and_apart(tmp_path, seed, grid):
    results = load(written(tmp_path / "r", realistic(seed, **grid)))
    panels = len(grid.get("modes", [0])) * len(grid.get("temperatures", [0, 1]))
    pooled = pool(results)
    for figure in (
        acceptance_figure(pooled), acceptance_figure(pooled, conditional=True), speedup_figure(summarize(results))
    ):  # fmt: skip
        assert len(figure.axes) == panels
        names = [text for text in check_texts(figure) if text in METHODS]
        assert sorted(names) == sorted(grid.get("methods", METHODS))


def test_pictures_show_the_figures(tmp_path):
    results = load(written(tmp_path / "r", realistic(0)))
    rows, pooled = summarize(results), pool(results)
    for axes, temperature in zip(acceptance_figure(pooled).axes, (0.0, 1.0)):
        drawn = [list(curve.get_ydata()) for curve in axes.lines]
        assert drawn == [row.acceptance for row in pooled if row.temperature == temperature]
    for axes, temperature in zip(acceptance_figure(pooled, conditional=True).axes, (0.0, 1.0)):
        for curve, row in zip(axes.lines, (row for row in pooled if row.temperature == temperature), strict=True):
            share = row.acceptance
            asked = [1.0, *share[:-1]]
            assert list(curve.get_xdata()) == [k + 1 for k in range(len(share)) if asked[k]]
            assert list(curve.get_ydata()) == pytest.approx([b / a for a, b in zip(asked, share) if a])
    for axes, temperature in zip(speedup_figure(rows).axes, (0.0, 1.0)):
        points = {tuple(curve.get_xydata()[0]) for curve in axes.lines if len(curve.get_xydata()) == 1}
        means = {(tau, speedup) for key, (speedup, tau) in averages(rows).items() if key[1] == temperature}
        assert points == means | {(row.tau, row.speedup) for row in rows if row.temperature == temperature}
        (lines,) = axes.collections  # of equal speedup / tau, between and around what was measured
        known = [row.efficiency for row in rows if row.temperature == temperature]
        assert len(lines.levels) >= 3 and lines.levels[0] <= min(known) and max(known) <= lines.levels[-1]
        for level, path in zip(lines.levels, lines.get_paths()):
            assert np.allclose(path.vertices[:, 1] / path.vertices[:, 0], level, rtol=0.02)


def test_positions_that_no_round_came_to_are_not_drawn(tmp_path):
    """As shares of the rounds before; and each position has its number."""
    lines = [line(PLAIN), line(METHODS[0], accepted=[1, 0, 1], emitted=[2, 1, 2], draft_positions=4)]
    pooled = pool(load(written(tmp_path / "r", lines, settings(METHODS[:1]))))
    for conditional, drawn in (False, [1, 2, 3, 4]), (True, [1, 2]):
        (axes,) = acceptance_figure(pooled, conditional=conditional).axes
        assert [list(curve.get_xdata()) for curve in axes.lines] == [drawn]
        assert list(axes.get_xticks()) == [1, 2, 3, 4]


def test_a_method_that_never_drafted_has_no_point(tmp_path):
    never = dict(rounds=0, emitted=[], accepted=[], draft_positions=0)
    lines = [line(name, prompt) for prompt in range(2) for name in (PLAIN, *METHODS[:2])]
    lines = [{**one, **never} if one["method"] == METHODS[1] else one for one in lines]
    rows = summarize(load(written(tmp_path / "r", lines, settings(METHODS[:2]))))
    (axes,) = speedup_figure(rows).axes
    assert {tuple(curve.get_xydata()[0]) for curve in axes.lines} == {(3.0, 1.0)} and len(axes.lines) == 2
    (axes,) = speedup_figure([row for row in rows if row.method == METHODS[1]]).axes
    assert not axes.lines


def test_every_method_has_its_own_colour_and_marker(tmp_path):
    methods = [f"Method number {i} of forty (6)" for i in range(40)]
    lines = [line(method) for method in [PLAIN, *methods]]
    figure = acceptance_figure(pool(load(written(tmp_path / "r", lines, settings([PLAIN, *methods])))))
    check_texts(figure)
    for axes in figure.axes:
        assert len({(curve.get_color(), curve.get_marker()) for curve in axes.lines}) == len(methods)


@pytest.mark.parametrize("drafts", [1, 2, 7])
def test_the_picture_of_a_calibration_shows_every_bin(drafts):
    positions = fitted(*(Rounds(*simulated([2.0] * drafts, 200, seed)) for seed in (0, 1))).through
    figure = reliability_figure(positions)
    assert len(figure.axes) == drafts + 1
    for axes, pair in zip(figure.axes, positions):
        before, after = pair.before, pair.after
        assert f"error {100 * before.error:.1f} to {100 * after.error:.1f} %" in axes.get_title()
        assert [points.get_label() for points in axes.collections] == ["before", "after"]
        for points, expected in zip(axes.collections, (before, after)):
            assert np.allclose(points.get_offsets(), [(one.confidence, one.accepted) for one in expected.bins])
            assert np.argmax(points.get_sizes()) == np.argmax([one.total for one in expected.bins])
    assert {"before", "after"} <= set(check_texts(figure))
