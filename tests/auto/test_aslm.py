"""The augmented space linear model against loops, however its rows are split, and what its store holds."""

import json
import runpy
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_hyperdflash.auto.aslm import AugmentedSpaceLinearModel

from ..helpers.oracle_aslm import Oracle

EXAMPLE = Path(__file__).parents[2] / "experiments" / "compare_aslm.py"
FEW = settings(max_examples=150, deadline=None)


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


def batches(X, y, ends):
    return zip(np.split(X, ends), np.split(y, ends))


def learned(X, y, ends, **parameters):
    model = AugmentedSpaceLinearModel(**parameters)
    for some, targets in batches(X, y, ends):
        assert model.partial_fit(some, targets) is model
    return model


@FEW
@given(cases())
def test_everything_is_as_in_loops(case):
    X, y, ends, parameters = case
    oracle, model = Oracle(*parameters.values()), AugmentedSpaceLinearModel(**parameters)
    fresh, _ = drawn(5, X.shape[1], seed=1)
    for some, targets in batches(X, y, ends):
        model.partial_fit(some, targets)
        oracle.learn(some.tolist(), targets.tolist())
        assert [*model.coef_, model.intercept_] == pytest.approx(oracle.weights, abs=1e-8)
        assert model.centers_.tolist() == [centre for centre, _ in oracle.cells]
        assert model.errors_ == pytest.approx(oracle.errors(), abs=1e-8)
        for rows in (some, fresh):
            assert model.predict(rows) == pytest.approx([oracle.predict(x) for x in rows.tolist()], abs=1e-8)


@FEW
@given(cases())
def test_any_split_has_the_weights_of_one_fit(case):
    X, y, ends, parameters = case
    parameters["memory"] = None
    whole, split = AugmentedSpaceLinearModel(**parameters).fit(X, y), learned(X, y, ends, **parameters)
    assert split.coef_ == pytest.approx(whole.coef_, abs=1e-8)
    assert split.intercept_ == pytest.approx(whole.intercept_, abs=1e-8)
    if parameters["quantization"] == 0 and parameters["max_centers"] is None:  # each row is its own centre
        assert split.errors_ == pytest.approx(whole.errors_, abs=1e-8)
        fresh, _ = drawn(9, X.shape[1], seed=2)
        assert split.predict(fresh) == pytest.approx(whole.predict(fresh), abs=1e-8)


def test_row_by_row_has_the_weights_of_one_fit():
    X, y = drawn(500, 6)
    whole, split = AugmentedSpaceLinearModel().fit(X, y), learned(X, y, range(1, 500))
    assert np.abs(split.coef_ - whole.coef_).max() < 1e-8 and abs(split.intercept_ - whole.intercept_) < 1e-8
    assert split.predict(X[:50] + 0.1) == pytest.approx(whole.predict(X[:50] + 0.1), abs=1e-8)


def test_fit_forgets():
    (X, y), (others, targets) = drawn(20, 3), drawn(30, 2, seed=1)
    model = AugmentedSpaceLinearModel().fit(X, y).fit(others, targets)
    assert model.predict(others + 0.1) == pytest.approx(
        AugmentedSpaceLinearModel().fit(others, targets).predict(others + 0.1)
    )
    assert (model.n_features_in_, len(model.centers_), len(model.errors_)) == (2, 30, 30)


def test_the_bias_is_penalized_as_the_other_weights():
    """Of a single input 0 with target 1, b = 1 / (1 + lambda)."""
    model = AugmentedSpaceLinearModel(alpha=0.25).fit([[0.0]], [1.0])
    assert (model.coef_[0], model.intercept_) == pytest.approx((0.0, 0.8))


def test_a_training_input_gets_its_own_target():
    X, y = drawn(200, 4)
    model = AugmentedSpaceLinearModel().fit(X, y)
    assert np.abs(X @ model.coef_ + model.intercept_ - y).max() > 1
    assert np.abs(model.predict(X) - y).max() < 1e-13
    model.partial_fit(*drawn(100, 4, seed=1))
    assert np.abs(model.predict(X) - y).max() < 1e-13


def test_near_is_what_the_output_depends_on():
    """The second input moves the target a hundredth as much: the neighbour is the one beside it in the first."""
    X = np.array([[0.0, 0.0], [1.0, 5.0], [2.0, -5.0], [3.0, 0.0]])
    y = X @ [1.0, 0.01] + [0.3, -0.3, -0.3, 0.3]
    model = AugmentedSpaceLinearModel(alpha=1e-9).fit(X, y)
    new = np.array([[1.1, 0.0]])
    assert np.argmin(np.linalg.norm(X - new, axis=1)) == 0
    assert model.predict(new) - (new @ model.coef_ + model.intercept_) == pytest.approx(model.errors_[1])


def test_more_neighbours_than_centres_average_them_all():
    X, y = drawn(7, 2)
    model = AugmentedSpaceLinearModel(n_neighbors=20).fit(X, y)
    expected = X @ model.coef_ + model.intercept_ + model.errors_.mean()
    assert model.predict(X) == pytest.approx(expected) and abs(model.errors_.mean()) > 1e-3


def test_quantization_averages_the_errors_of_near_rows():
    """Two clouds, much narrower than epsilon, far from each other."""
    X = np.array([[0.0], [1e-3], [2e-3], [5.0], [5.001]])
    y = np.array([1.0, 2.0, 6.0, 3.0, 4.0])
    model = AugmentedSpaceLinearModel(quantization=0.05).fit(X, y)
    errors = y - X[:, 0] * model.coef_ - model.intercept_
    assert model.centers_.tolist() == [[0.0], [5.0]]
    assert model.errors_ == pytest.approx([errors[:3].mean(), errors[3:].mean()])
    assert len(AugmentedSpaceLinearModel().fit(X, y).centers_) == 5


def test_at_quantization_0_repeated_inputs_keep_centres_of_their_own():
    model = AugmentedSpaceLinearModel(n_neighbors=2).fit([[1.0], [1.0], [3.0]], [0.0, 2.0, 5.0])
    assert len(model.centers_) == 3
    assert model.predict([[1.0]]) == pytest.approx(1.0)
    assert len(AugmentedSpaceLinearModel(quantization=1e-9).fit([[1.0], [1.0], [3.0]], [0.0, 2.0, 5.0]).centers_) == 2


@pytest.mark.parametrize("quantization", [0.0, 0.02])
def test_max_centers_bounds_the_store_and_no_row_is_lost(quantization):
    X, y = drawn(300, 3)
    model = AugmentedSpaceLinearModel(quantization=quantization, max_centers=16)
    for some, targets in batches(X, y, range(7, 300, 7)):
        model.partial_fit(some, targets)
        assert len(model.centers_) <= 16
    assert len(model.centers_) == len(model.errors_) == 16
    counts = model._sums[:, -2]
    errors = y - X @ model.coef_ - model.intercept_
    assert counts.sum() == 300 and counts @ model.errors_ == pytest.approx(errors.sum())


def test_what_a_centre_remembers_gives_way_to_its_new_rows():
    """Two inputs, of which one gets another target: the line and its prediction follow, the other's stays."""
    model = AugmentedSpaceLinearModel(alpha=1e-6, quantization=0.01, memory=10)
    model.fit([[1.0], [2.0]] * 100, [1.0, 2.0] * 100)
    for _ in range(60):
        model.partial_fit([[2.0]], [5.0])
    assert model.predict([[1.0], [2.0]]) == pytest.approx([1.0, 5.0], abs=0.02)
    assert model.coef_ == pytest.approx([4.0], abs=0.02) and model._sums[:, -2].max() <= 10
    forgetful, all_ = model.predict([[2.0]])[0], AugmentedSpaceLinearModel(alpha=1e-6, quantization=0.01)
    all_.fit([[1.0], [2.0]] * 100 + [[2.0]] * 60, [1.0, 2.0] * 100 + [5.0] * 60)
    assert all_.predict([[2.0]])[0] < 3.2 < forgetful


def test_errors_of_few_rows_count_less():
    X, y = [[0.0], [1.0], [2.0], [2.0], [2.0]], [0.0, 3.0, 2.0, 2.0, 2.0]
    plain, shrunk = (AugmentedSpaceLinearModel(quantization=0.01, shrinkage=k).fit(X, y) for k in (0.0, 3.0))
    assert shrunk.errors_ == pytest.approx(plain.errors_ * np.array([1 / 4, 1 / 4, 3 / 6]))
    assert shrunk.coef_ == pytest.approx(plain.coef_)


def test_many_rows_are_predicted_as_one():
    """They are taken in blocks, the last of which is not full."""
    X, y = drawn(700, 5)
    for k in (1, 3):
        model = AugmentedSpaceLinearModel(n_neighbors=k).fit(X, y)
        together = model.predict(X + 0.05)
        assert together.shape == (700,)
        assert together == pytest.approx([model.predict(x[None])[0] for x in X + 0.05], abs=1e-12)


def test_lists_and_whole_numbers_are_inputs_too():
    model = AugmentedSpaceLinearModel().fit([[0, 1], [2, 3]], [1, 0])
    assert model.predict([[0, 1]]) == pytest.approx([1.0])


def test_parameters_go_out_and_in_unchanged():
    given_ones = dict(
        alpha=np.float32(2), n_neighbors=np.int64(3), quantization=1, max_centers=9, memory=7, shrinkage=2
    )
    model = AugmentedSpaceLinearModel(**given_ones)
    assert all(getattr(model, name) is value for name, value in given_ones.items())
    twin = AugmentedSpaceLinearModel(**model.get_params(deep=False))
    assert all(twin.get_params()[name] is value for name, value in given_ones.items())
    assert twin.set_params(
        n_neighbors=1, max_centers=None
    ) is twin and twin.set_params().get_params() == given_ones | {
        "n_neighbors": 1,
        "max_centers": None,
    }
    X, y = drawn(20, 2)
    assert model.fit(X, y).get_params() == given_ones
    with pytest.raises(ValueError, match="`neighbors` is no parameter, expected some of alpha, n_neighbors") as wrong:
        twin.set_params(alpha=7, neighbors=3)
    assert "\n" not in str(wrong.value) and twin.alpha == 2  # not half of it


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"alpha": 0}, "`alpha` is 0, expected a finite number above 0"),
        ({"alpha": NAN}, "`alpha` is nan, expected a finite"),
        ({"alpha": INF}, "`alpha` is inf, expected a finite"),
        ({"alpha": "1"}, "`alpha` is '1', expected a finite"),
        ({"n_neighbors": 0}, "`n_neighbors` is 0, expected a whole number of at least 1"),
        ({"n_neighbors": 2.0}, "`n_neighbors` is 2.0, expected a whole"),
        ({"n_neighbors": True}, "`n_neighbors` is True, expected a whole"),
        ({"quantization": -0.5}, "`quantization` is -0.5, expected a finite number of at least 0"),
        ({"quantization": NAN}, "`quantization` is nan, expected"),
        ({"shrinkage": -1}, "`shrinkage` is -1, expected a finite number of at least 0"),
        ({"memory": 0}, "`memory` is 0, expected a whole number of at least 1, or None"),
        ({"max_centers": 0}, "`max_centers` is 0, expected a whole number of at least 1, or None"),
    ],
)
def test_wrong_parameters_are_named_in_fit(parameters, message):
    for method in ("fit", "partial_fit"):
        with pytest.raises(ValueError) as wrong:
            getattr(AugmentedSpaceLinearModel(**parameters), method)([[1.0]], [1.0])
        assert str(wrong.value).startswith(message) and "set_params" in str(wrong.value)
        assert "\n" not in str(wrong.value)


@pytest.mark.parametrize(
    ("X", "y", "message", "fix"),
    [
        ([[1.0, NAN]], [1.0], "`X` holds nan, expected finite numbers", "clean"),
        ([[1.0, -INF]], [1.0], "`X` holds -inf, expected finite numbers", "clean"),
        ([[1.0, 1e200]], [1.0], "`X` holds 1e+200, expected finite numbers below 1e150", "scale"),
        ([[1.0, 2.0]], [INF], "`y` holds inf, expected finite numbers", "clean"),
        ([1.0, 2.0], [1.0, 2.0], "`X` is of shape (2,), expected [rows, features]", "`reshape(1, -1)`"),
        ([[]], [1.0], "`X` is of shape (1, 0), expected [rows, features]", "reshape"),
        ([[1.0, 2.0]], [[1.0]], "`y` is of shape (1, 1), expected one target per row", "`ravel`"),
        ([[1.0, 2.0]], [1.0, 2.0], "`y` has 2 targets, expected one for each of the 1 rows", "both alike"),
        ([[1.0]], [1.0], "`X` has 1 features, expected the 2 of `fit`", "call `fit`"),
    ],
)
def test_wrong_rows_are_named_and_leave_the_model_as_it_was(X, y, message, fix):
    model = AugmentedSpaceLinearModel().fit(*drawn(9, 2))
    before = model.predict([[0.3, 0.4]])
    with pytest.raises(ValueError) as wrong:
        model.partial_fit(X, y)
    assert str(wrong.value).startswith(message) and fix in str(wrong.value) and "\n" not in str(wrong.value)
    if message.startswith("`X`"):
        with pytest.raises(ValueError) as again:
            model.predict(X)
        assert str(again.value) == str(wrong.value)
    assert len(model.centers_) == 9 and model.predict([[0.3, 0.4]]) == before


def test_parameters_changed_after_fit_are_checked_and_count():
    X, y = drawn(9, 2)
    model = AugmentedSpaceLinearModel().fit(X, y)
    three = AugmentedSpaceLinearModel(n_neighbors=3).fit(X, y)
    assert model.set_params(n_neighbors=3).predict(X) == pytest.approx(three.predict(X))
    with pytest.raises(ValueError, match="`n_neighbors` is 0, expected a whole number"):
        model.set_params(n_neighbors=0).predict(X)
    model.set_params(n_neighbors=1, alpha=2.0, max_centers=4).partial_fit(X + 1, y)
    both = AugmentedSpaceLinearModel(alpha=2.0).fit(np.concatenate([X, X + 1]), np.concatenate([y, y]))
    assert model.coef_ == pytest.approx(both.coef_, abs=1e-8) and len(model.centers_) == 9  # no more, but none lost


def test_a_prediction_before_fit_says_so():
    with pytest.raises(ValueError, match="The model has seen 0 rows, expected at least one: call `fit` before"):
        AugmentedSpaceLinearModel().predict([[1.0]])
    model = AugmentedSpaceLinearModel()
    with pytest.raises(ValueError, match=r"`alpha` is 0\.1, expected more beside inputs of norm 2"):
        model.fit([[1e9, 1e9], [2e9, 2e9]], [1.0, 2.0])
    with pytest.raises(ValueError, match="has seen 0 rows"):
        model.predict([[1e9, 1e9]])


def test_the_comparison_writes_what_it_measured(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", [EXAMPLE.name, "--output", str(tmp_path), "--seeds", "1", "--train", "40"])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    results = json.loads((tmp_path / "results.json").read_text())["results"]
    assert len(results) == 6 * 4 * 6 and all(0 < row["error"] < 100 for row in results)
    said = (tmp_path / "report.md").read_text()
    assert said.count("\n| Mackey-Glass, 6 ahead | ") == 4 and "in 24 conditions" not in said
    assert (tmp_path / "errors.png").stat().st_size > 5000
