"""The augmented space linear model against loops, however its rows are split, and what its store holds."""

import copy

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_hyperdflash.auto.aslm import PENALTY, AugmentedSpaceLinearModel

from ..helpers.oracle_aslm import Oracle


def drawn(rows, width, seed=0, repeated=False):
    """Inputs and a nonlinear target with a mean, so that bias and errors matter."""
    generator = np.random.default_rng(seed)
    X = generator.normal(size=(rows, width))
    if repeated:
        X = X[generator.integers(rows, size=rows)]
    return X, 1.5 + np.sin(2 * X).sum(1) + 0.3 * generator.normal(size=rows)


@st.composite
def cases(draw):
    """Rows, and the sizes of the batches that they come in."""
    sizes = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    repeated = draw(st.booleans())
    X, y = drawn(sum(sizes), draw(st.integers(1, 4)), draw(st.integers(0, 2**32 - 1)), repeated)
    parameters = dict(
        # Of repeated inputs with errors of their own, some would be among a few nearest and others not.
        n_neighbors=draw(st.sampled_from([1, 50] if repeated else [1, 3, 50])),
        quantization=draw(st.sampled_from([0.0, 0.05, 0.5, 5.0])),
        max_centers=draw(st.sampled_from([None, 1, 4])),
        memory=draw(st.sampled_from([None, None, 1, 3])),
        shrinkage=draw(st.sampled_from([0.0, 2.5])),
    )
    return X, y, np.cumsum(sizes)[:-1], parameters


@settings(max_examples=150, deadline=None)
@given(cases())
def test_everything_is_as_in_loops(case):
    """Whose weights are solved from all rows at once, however they are split."""
    X, y, ends, parameters = case
    oracle, model = Oracle(PENALTY, *parameters.values()), AugmentedSpaceLinearModel(**parameters)
    fresh, _ = drawn(5, X.shape[1], seed=1)
    for some, targets in zip(np.split(X, ends), np.split(y, ends)):
        assert model.partial_fit(some, targets) is model
        oracle.learn(some.tolist(), targets.tolist())
        assert model.weights == pytest.approx(oracle.weights, abs=1e-8)
        assert model.centers.tolist() == [centre for centre, _ in oracle.cells]
        assert model.errors == pytest.approx(oracle.errors(), abs=1e-8)
        for rows in (some, fresh):
            assert model.predict(rows) == pytest.approx([oracle.predict(x) for x in rows.tolist()], abs=1e-8)


def test_many_rows_are_predicted_as_one():
    """A training input gets its own target, also after rows that came one by one."""
    X, y = drawn(300, 5)
    for k in (1, 3):
        model = AugmentedSpaceLinearModel(n_neighbors=k).partial_fit(X[:200], y[:200])
        for row in range(200, 300):
            model.partial_fit(X[row : row + 1], y[row : row + 1])
        together = model.predict(X + 0.05)
        assert together.shape == (300,)
        assert together == pytest.approx([model.predict(x[None])[0] for x in X + 0.05], abs=1e-12)
        assert (np.abs(model.predict(X) - y).max() < 1e-12) == (k == 1)
    assert np.abs(X @ model.weights[:-1] + model.weights[-1] - y).max() > 1


def test_a_copy_learns_alone():
    """What other threads hold stays as it was: "auto" teaches a copy."""
    X, y = drawn(9, 2)
    model = AugmentedSpaceLinearModel(max_centers=4, memory=3).partial_fit(X, y)
    before = model.predict(X)
    taught = copy.copy(model).partial_fit(X + 1, y)
    assert (model.predict(X) == before).all() and (taught.predict(X) != before).any()
