"""Calibration error and AUC against loops, temperatures on heads whose faults are known."""

import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hf_hyperdflash.benchmark.calibration import BINS, fit_temperatures, given_those_before, reliability, through

from ..helpers.confidence import simulated

# With ties, and on the edges of bins.
PROBABILITIES = st.one_of(st.sampled_from([0.0, 1 / 15, 0.2, 0.5, 2 / 3, 1.0]), st.floats(0, 1))
JUDGED = st.lists(st.tuples(PROBABILITIES, st.sampled_from([0.0, 1.0])), max_size=40)


def naive_error(judged):
    """The definition: bin by bin, each weighted by its size."""
    error = 0.0
    for place in range(BINS):
        inside = [(p, y) for p, y in judged if min(int(p * BINS), BINS - 1) == place]
        if inside:
            confidence, accepted = (sum(part) / len(inside) for part in zip(*inside))
            error += len(inside) / len(judged) * abs(confidence - accepted)
    return error


def naive_auc(judged):
    """The definition: all pairs of one that came true and one that did not."""
    pairs = [(p, q) for p, y in judged for q, z in judged if y and not z]
    return sum(1.0 if p > q else 0.5 if p == q else 0.0 for p, q in pairs) / len(pairs) if pairs else None


@given(JUDGED)
@example([(0.95, 1.0), (1.0, 0.0)])  # of one bin
def test_error_and_auc_are_their_definitions(judged):
    p, y = np.array(judged).reshape(-1, 2).T
    found = reliability(p, y)
    assert found.total == len(judged)
    assert found.error == pytest.approx(naive_error(judged), abs=1e-12)
    expected = naive_auc(judged)
    assert (found.auc is None) == (expected is None)
    assert expected is None or found.auc == pytest.approx(expected, abs=1e-12)
    if judged:
        assert (found.confidence, found.accepted) == pytest.approx((p.mean(), y.mean()))
        assert sum(one.total for one in found.bins) == len(judged)
        assert sum(one.total * one.confidence for one in found.bins) == pytest.approx(p.sum())
        assert sum(one.total * one.accepted for one in found.bins) == pytest.approx(y.sum())


def test_what_is_not_known_does_not_count():
    p, y = np.array([[0.9, np.nan], [0.3, 0.6]]), np.array([[1.0, 0.0], [0.0, np.nan]])
    assert reliability(p, y) == reliability(np.array([0.9, 0.3]), np.array([1.0, 0.0]))
    nothing = reliability(np.full(3, np.nan), np.ones(3))
    assert (nothing.total, nothing.error, nothing.auc, nothing.bins) == (0, 0.0, None, [])


@given(st.lists(st.lists(st.floats(-9, 9), min_size=3, max_size=3), min_size=1, max_size=4))
def test_through_is_the_product_of_those_before(rows):
    logits, temperatures = np.array(rows), np.array([0.5, 1.0, 3.0])
    given_before, all_of_them = given_those_before(logits, temperatures), through(logits, temperatures)
    for row, of_row, product in zip(rows, given_before, all_of_them):
        told = 1.0
        for k, logit in enumerate(row):
            assert of_row[k] == pytest.approx(1 / (1 + math.exp(-logit / temperatures[k])))
            told *= of_row[k]
            assert product[k] == pytest.approx(told)


def test_temperatures_are_the_likeliest_of_their_grid():
    """By a loop, position by position: the log loss of the product, and what the prior adds."""
    logits, accepted = simulated([2.0, 0.5, 1.0, 2.0], rounds=60)
    accepted[::3, 1:], logits[1::3, 2] = np.nan, np.nan  # texts that ended, rounds of two drafts
    logits[:, 3] = np.nan  # no round of four: 1
    fitted, told = fit_temperatures(logits, accepted), []
    for k in range(3):
        losses = {}
        for temperature in (2.0 ** (i / 16) for i in range(-48, 49)):
            losses[temperature] = math.log(temperature) ** 2 / 2
            for i in range(60):
                if not math.isnan(accepted[i, k]) and not math.isnan(logits[i, k]):
                    p = math.prod(1 / (1 + math.exp(-logits[i, j] / t)) for j, t in enumerate([*told, temperature]))
                    losses[temperature] -= math.log(max(p if accepted[i, k] else 1 - p, 1e-12))
        told.append(min(losses, key=losses.get))
    assert fitted == pytest.approx([*told, 1])
