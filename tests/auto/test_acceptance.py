"""What is predicted of drafts that were not drawn yet, against what becomes of them."""

import math
import random

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hf_hyperdflash.auto.acceptance import AcceptanceLine
from hf_hyperdflash.trees.growth import Admission, log_chances


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def test_a_drafter_is_taken_at_its_word_at_first():
    line = AcceptanceLine()
    assert [line(p) for p in (0.02, 0.5, 0.8)] == pytest.approx([0.02, 0.5, 0.8])
    assert 0 < line(0.0) < 0.01 and 0.99 < line(1.0) < 1


def test_the_line_is_the_maximum_of_the_posterior():
    """But for what is forgotten, and for taking each outcome's curvature where it is heard: over 300 sequences of up
    to 60 outcomes off by 0.02 on average, and by 0.1 at most in 19 of 20."""
    off = []
    for seed in range(300):
        generator, line = torch.Generator().manual_seed(seed), AcceptanceLine()
        x = 2 * torch.randn(1 + seed % 60, generator=generator, dtype=torch.float64)
        y = torch.rand(len(x), generator=generator) < torch.sigmoid(0.7 * x + 0.5)
        for each, outcome in zip(x.sigmoid().tolist(), y.tolist()):
            line.observe(each, outcome)
        best = most_probable(x, y.double())
        at = torch.tensor([-3.0, -1.0, 0.0, 1.0, 3.0], dtype=torch.float64)
        found = torch.tensor([line(each) for each in at.sigmoid().tolist()])
        off.append((found - torch.sigmoid(best[0] * at + best[1])).abs().max())
    off = torch.stack(off)
    assert off.mean() < 0.03 and off.quantile(0.95) < 0.1, (off.mean(), off.quantile(0.95))


def most_probable(x, y):
    """Slope and intercept, by Newton steps over all outcomes at once."""
    start, precision = torch.tensor([1.0, 0.0]).double(), 2 * torch.eye(2).double()
    rows, known = torch.stack([x, torch.ones_like(x)], dim=1), start
    for _ in range(60):
        chance = torch.sigmoid(rows @ known)
        slope = rows.T @ (y - chance) - precision @ (known - start)
        known = known + 0.5 * torch.linalg.solve(precision + rows.T @ torch.diag(chance * (1 - chance)) @ rows, slope)
    return known


def test_it_follows_a_text_that_gets_harder():
    """From 0.9 to 0.3 accepted of a signal of 0.8, after a long time: within 400 drafts."""
    line, draw = AcceptanceLine(), random.Random(0)
    for chance, count in ((0.9, 5000), (0.3, 400)):
        for _ in range(count):
            line.observe(0.8, draw.random() < chance)
        assert line(0.8) == pytest.approx(chance, abs=0.1)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(st.floats(0, 1), st.booleans()), max_size=12), st.integers(1, 400))
@example([(0.5, True)], 3000)
@example([(0.88, False)], 3000)
@example([(1.0, False), (0.0, True)], 1500)
def test_the_line_stays_a_distribution_however_long_it_learns(outcomes, times):
    """Also from one signal alone, as a drafter's that gives none, and from outcomes that it holds to be impossible."""
    line = AcceptanceLine()
    for _ in range(times):
        for p, outcome in outcomes:
            line.observe(p, outcome)
    slope, intercept, *precision = line._state
    assert all(map(math.isfinite, line._state)) and abs(slope) < 40 and abs(intercept) < 40  # no exponent is too large
    # It never knows less than at first.
    a, b, c = precision[0] - 2, precision[1], precision[2] - 2
    assert a >= -1e-9 and c >= -1e-9 and a * c - b * b >= -1e-6 * max(1, a * c)


def test_one_surprise_among_many_certain_outcomes_changes_little():
    line, sure, likely = AcceptanceLine(), sigmoid(9.3), sigmoid(4.0)
    for _ in range(2000):
        line.observe(sure, True), line.observe(likely, True), line.observe(1 - sure, False)
    before = [line(p) for p in (1 - likely, likely)]
    line.observe(1 - sure, True)
    assert [line(p) for p in (1 - likely, likely)] == pytest.approx(before, abs=0.1) and before[1] > 0.9


def test_of_a_trees_nodes_logarithms_are_those_of_each():
    line, said = AcceptanceLine(), torch.tensor([0.9, 0.5, 0.01])

    def of_logarithms(log_p):
        return log_chances(log_p, Admission(line, 0.0).numbers("cpu"))

    torch.testing.assert_close(of_logarithms(said.log()).exp(), said)
    for p in (0.9, 0.9, 0.2, 0.3):
        line.observe(p, p < 0.5)
    torch.testing.assert_close(of_logarithms(said.log()).exp(), torch.tensor([line(p) for p in said.tolist()]))
    assert of_logarithms(torch.tensor([-math.inf, 0.0])).isfinite().all()
