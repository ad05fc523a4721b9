"""What is held of drafts that were not drawn yet, against what becomes of them."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_hyperdflash.runtime.survival import Line, Survival


def test_signals_are_calibrated_by_what_becomes_of_drafts():
    survival = Survival()
    assert survival(0.8) == pytest.approx(0.8) and survival(0.0) < 0.01 and survival(1.0) > 0.99
    generator = torch.Generator().manual_seed(0)
    for accepted in (torch.rand(400, generator=generator) < 0.3).tolist():
        survival.observe(0.8, accepted)
    # 33 drafts count, so it is within 0.3 of the truth but for once in thousands
    assert survival(0.8) == pytest.approx(0.3, abs=0.27)
    before = survival(0.8)
    survival.observe(0.8, True)
    assert survival(0.8) > before


def test_what_becomes_of_some_drafts_tells_of_others():
    """A drafter that is surer than it says where it is sure, and less where it is not. Drafts of which it is not sure
    are seldom made: those that are made tell of them."""
    odds = lambda signal: math.log(signal / (1 - signal))  # noqa: E731
    truth = lambda signal: 1 / (1 + math.exp(-(1.6 * odds(signal) + 1.0)))  # noqa: E731
    generator, off = torch.Generator().manual_seed(0), []
    for _ in range(50):
        survival = Survival()
        for signal in (0.4 + 0.55 * torch.rand(60, generator=generator)).tolist():
            survival.observe(signal, float(torch.rand((), generator=generator)) < truth(signal))
        off.append([abs(survival(signal) - truth(signal)) for signal in (0.2, 0.3)])
    # By its own word 0.02 and 0.11 off; without the line that is all that there is.
    means = torch.tensor(off).mean(0)
    assert abs(0.3 - truth(0.3)) > 0.1 and means[1] < 0.09 and means[0] < 0.11, means


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 10**6), st.integers(1, 60))
def test_the_line_is_the_maximum_of_the_posterior(seed, count):
    """But for what is forgotten, and for taking each outcome's curvature where it is heard: within a tenth."""
    generator, line = torch.Generator().manual_seed(seed), Line()
    x = 2 * torch.randn(count, generator=generator, dtype=torch.float64)
    y = torch.rand(count, generator=generator) < torch.sigmoid(0.7 * x + 0.5)
    for each, outcome in zip(x.tolist(), y.tolist()):
        line.observe(each, outcome)
    known, precision = torch.tensor([1.0, 0.0], dtype=torch.float64), torch.diag(torch.tensor([4.0, 1.0])).double()
    rows, start = torch.stack([x, torch.ones_like(x)], dim=1), torch.tensor([1.0, 0.0], dtype=torch.float64)
    for _ in range(50):
        chance = torch.sigmoid(rows @ known)
        slope = rows.T @ (y.double() - chance) - precision @ (known - start)
        known = known + 0.5 * torch.linalg.solve(precision + rows.T @ torch.diag(chance * (1 - chance)) @ rows, slope)
    for at in (-3.0, -1.0, 0.0, 1.0, 3.0):
        assert line(at) == pytest.approx(float(torch.sigmoid(known[0] * at + known[1])), abs=0.1)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(st.floats(-9.3, 9.3), st.booleans()), max_size=12), st.integers(1, 400))
def test_the_line_stays_a_distribution_however_long_it_learns(outcomes, times):
    """Also of one signal alone, as a drafter's that gives none, and of outcomes that it holds to be impossible."""
    line = Line()
    for _ in range(times):
        for x, outcome in outcomes:
            line.observe(x, outcome)
    _, _, of_slope, between, of_start = line._known
    assert all(map(math.isfinite, line._known)) and 0 < line(9.3) < 1 and 0 < line(-9.3) < 1
    assert 0 < of_slope <= 1.01 and 0 < of_start <= 4.01 and between**2 <= of_slope * of_start
