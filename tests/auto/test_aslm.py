"""The augmented space linear model against loops, however its rows are split, and what its store holds."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_hyperdflash.auto.aslm import AugmentedSpaceLinearModel

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
        alpha=draw(st.sampled_from([0.1, 3.0])),
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
    oracle, model = Oracle(*parameters.values()), AugmentedSpaceLinearModel(**parameters)
    fresh, _ = drawn(5, X.shape[1], seed=1)
    for some, targets in zip(np.split(X, ends), np.split(y, ends)):
        assert model.partial_fit(some, targets) is model
        oracle.learn(some.tolist(), targets.tolist())
        assert [*model.coef_, model.intercept_] == pytest.approx(oracle.weights, abs=1e-8)
        assert model.centers_.tolist() == [centre for centre, _ in oracle.cells]
        assert model.errors_ == pytest.approx(oracle.errors(), abs=1e-8)
        for rows in (some, fresh):
            assert model.predict(rows) == pytest.approx([oracle.predict(x) for x in rows.tolist()], abs=1e-8)


def test_many_rows_are_predicted_as_one():
    """They are taken in blocks, the last of which is not full. A training input gets its own target, also after rows
    that came one by one."""
    X, y = drawn(700, 5)
    for k in (1, 3):
        model = AugmentedSpaceLinearModel(n_neighbors=k).fit(X[:500], y[:500])
        for row in range(500, 700):
            model.partial_fit(X[row : row + 1], y[row : row + 1])
        together = model.predict(X + 0.05)
        assert together.shape == (700,)
        assert together == pytest.approx([model.predict(x[None])[0] for x in X + 0.05], abs=1e-12)
        assert (np.abs(model.predict(X) - y).max() < 1e-12) == (k == 1)
    assert np.abs(X @ model.coef_ + model.intercept_ - y).max() > 1


def test_fit_forgets():
    others, targets = drawn(30, 2, seed=1)
    model, fresh = (AugmentedSpaceLinearModel() for _ in range(2))
    model.fit(*drawn(20, 3)).fit(others, targets)
    assert model.predict(others + 0.1) == pytest.approx(fresh.fit(others, targets).predict(others + 0.1))
    assert (model.n_features_in_, len(model.centers_), len(model.errors_)) == (2, 30, 30)


def test_parameters_go_out_and_in_unchanged():
    """As scikit-learn's do. Whole numbers and lists are inputs too."""
    given_ones = dict(
        alpha=np.float32(2), n_neighbors=np.int64(3), quantization=1, max_centers=9, memory=7, shrinkage=2
    )
    model = AugmentedSpaceLinearModel(**given_ones)
    twin = AugmentedSpaceLinearModel(**model.get_params(deep=False))
    assert all(twin.get_params()[name] is value for name, value in given_ones.items())
    assert twin.set_params(n_neighbors=1, max_centers=None) is twin
    assert twin.get_params() == given_ones | {"n_neighbors": 1, "max_centers": None}
    assert model.fit([[0, 1], [2, 3]], [1, 0]).get_params() == given_ones
    with pytest.raises(ValueError):
        twin.set_params(alpha=7, neighbors=3)
    assert twin.alpha == 2  # not half of it


def test_parameters_changed_after_fit_count():
    X, y = drawn(9, 2)
    model, three = (AugmentedSpaceLinearModel(n_neighbors=k).fit(X, y) for k in (1, 3))
    assert model.set_params(n_neighbors=3).predict(X) == pytest.approx(three.predict(X))
    model.set_params(n_neighbors=1, alpha=2.0, max_centers=4).partial_fit(X + 1, y)
    both = AugmentedSpaceLinearModel(alpha=2.0).fit(np.concatenate([X, X + 1]), np.concatenate([y, y]))
    assert model.coef_ == pytest.approx(both.coef_, abs=1e-8) and len(model.centers_) == 9  # no more, but none lost


@pytest.mark.parametrize(("X", "y"), [([[1.0, np.nan]], [1.0]), ([[1.0, 2.0]], [np.inf]), ([[1.0]], [1.0])])
def test_wrong_rows_leave_the_model_as_it_was(X, y):
    """What is said of them is in tests/refusals."""
    model = AugmentedSpaceLinearModel().fit(*drawn(9, 2))
    before = model.predict([[0.3, 0.4]])
    with pytest.raises(ValueError):
        model.partial_fit(X, y)
    assert len(model.centers_) == 9 and model.predict([[0.3, 0.4]]) == before
