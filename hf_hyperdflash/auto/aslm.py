"""Augmented space linear model: a linear regressor that knows its own errors. NumPy alone.

Zhengda Qin and Jose C. Principe, Augmented Space Linear Model; after the abstract and the equations.
"""

from __future__ import annotations

import inspect
import math
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:  # it takes modules that nothing else needs
    from numpy.typing import ArrayLike

_BLOCK = 2**15  # differences held at once by a prediction of many rows: a quarter of a MiB


class AugmentedSpaceLinearModel:
    """Ridge least squares, corrected by the errors that it made on the nearest training inputs.

    A prediction is `w.x + b` and the mean error `d - w.x - b` of the nearest stored inputs, by the distance between
    `x * w` and `x_i * w`: an input counts as much as the output depends on it. The bias cancels there.

    Weights are `(lambda I + X X^T)^-1 X d` with 1 as the last input: the bias is penalized like the others, as Qin and
    Principe do. They are solved from sums over all rows seen, recursive least squares in its information form: exact,
    however the rows are split, at about `n_features ** 3` operations a call. Nothing is forgotten unless `memory` says
    so. Inputs should be of about unit size, because squares are summed and `alpha` is weighed against them.

    The store has a centre for each row, or fewer with `quantization` or `max_centers`. A centre stays at the input
    that began it and keeps the sums of its rows. Their mean error is the mean target minus `w` times the mean input
    minus `b`, so it is exact after the weights have moved. Which rows a centre has is not decided anew: with fewer
    centres than rows, predictions depend on how the rows were split.

    Written like an estimator of scikit-learn, without needing it. Its pipelines and searches want a class of theirs:
    `class Model(RegressorMixin, AugmentedSpaceLinearModel, BaseEstimator): pass`.

    Args:
        alpha: The penalty lambda, above 0.
        n_neighbors: How many centres' errors are averaged, of fewer stored ones all. Of equally near ones any counts.
        quantization: A row begins a centre if none is nearer than this epsilon, in the scaled space, and so in units
            of the target; else it falls to the nearest one. At 0 all begin one, repeated inputs too.
        max_centers: Most centres, or `None`. Once there are as many, each row falls to its nearest.
        memory: How many rows a centre counts as at most: its new rows then replace its old ones, and those alone. The
            line goes through the means of centres, as often as they count. `None` for as many as there were.
        shrinkage: How many rows without error are added to a centre's rows when their mean error is taken, so that
            the errors of few rows count less.

    Attributes:
        coef_: Weights of the inputs, `[n_features]`.
        intercept_: The bias.
        centers_: `[centres, n_features]`.
        errors_: Mean error of each centre's rows under the present weights, `[centres]`.
        n_features_in_: Numbers of a row.
    """

    coef_: np.ndarray
    intercept_: float
    centers_: np.ndarray
    errors_: np.ndarray
    n_features_in_: int
    _products: np.ndarray  # of the joint space, inputs, 1 and target, summed over all rows
    _sums: np.ndarray  # of the joint space, over each centre's rows
    _scaled: np.ndarray  # centres times weights, [n_features, centres]

    def __init__(
        self,
        alpha: float = 0.1,
        n_neighbors: int = 1,
        quantization: float = 0.0,
        max_centers: int | None = None,
        memory: int | None = None,
        shrinkage: float = 0.0,
    ) -> None:
        self.alpha = alpha
        self.n_neighbors = n_neighbors
        self.quantization = quantization
        self.max_centers = max_centers
        self.memory = memory
        self.shrinkage = shrinkage

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """Return the constructor's arguments; `deep` is scikit-learn's, there are no estimators inside."""
        return {name: getattr(self, name) for name in inspect.signature(type(self)).parameters}

    def set_params(self, **params: Any) -> AugmentedSpaceLinearModel:
        """Change arguments of the constructor. A bound below the centres stored holds from the next `fit`.

        Raises:
            ValueError: If a name is not one of theirs.
        """
        known = self.get_params()
        for name in params:
            if name not in known:
                raise ValueError(f"`{name}` is no parameter, expected some of {', '.join(known)}: correct the name.")
        for name, value in params.items():
            setattr(self, name, value)
        return self

    def fit(self, X: ArrayLike, y: ArrayLike) -> AugmentedSpaceLinearModel:
        """Learn from these rows alone.

        Args:
            X: Inputs, `[rows, n_features]`.
            y: Targets, `[rows]`.

        Raises:
            ValueError: If shapes or lengths do not fit, a number is not finite, or a constructor argument is wrong.
        """
        return self._learn(X, y, is_new=True)

    def partial_fit(self, X: ArrayLike, y: ArrayLike) -> AugmentedSpaceLinearModel:
        """Learn from these rows too: as [`fit`], but what was learned before stays."""
        return self._learn(X, y, is_new=not hasattr(self, "coef_"))

    def predict(self, X: ArrayLike) -> np.ndarray:
        """Return the targets of inputs `[rows, n_features]`, `[rows]`.

        Raises:
            ValueError: Before [`fit`], if the shape does not fit, or a number is not finite.
        """
        if not hasattr(self, "coef_"):
            raise ValueError("The model has seen 0 rows, expected at least one: call `fit` before `predict`.")
        self._check_parameters()
        X = self._inputs(X, self.n_features_in_)
        predicted = X @ self.coef_ + self.intercept_
        scaled = X * self.coef_
        rows = _BLOCK // self._scaled.size or 1
        for i in range(0, len(X), rows):
            predicted[i : i + rows] += self._errors_near(scaled[i : i + rows])
        return predicted

    def _errors_near(self, scaled: np.ndarray) -> np.ndarray:
        """Return the mean error of the centres nearest to each of a few rows."""
        distances = _squared_distances(scaled, self._scaled)
        k = min(self.n_neighbors, len(self.errors_))
        if k == 1:
            return self.errors_[distances.argmin(1)]
        return self.errors_[distances.argpartition(k - 1)[:, :k]].sum(1) / k

    def _learn(self, X: ArrayLike, y: ArrayLike, is_new: bool) -> AugmentedSpaceLinearModel:
        self._check_parameters()
        X = self._inputs(X, None if is_new else self.n_features_in_)
        y = _targets(y, len(X))
        width = X.shape[1]
        joint = np.column_stack([X, np.ones(len(X)), y])  # the augmented space: inputs, 1 and target
        products = joint.T @ joint
        sums, centers = np.empty((0, width + 2)), np.empty((0, width))
        if not is_new:
            products, sums, centers = products + self._products, self._sums, self.centers_
        weights = _solved(products, self.alpha)
        begin, places = self._placed(X * weights[:-1], centers * weights[:-1])
        centers = np.concatenate([centers, X[begin]])
        sums = np.concatenate([sums, np.zeros((len(centers) - len(sums), width + 2))])
        np.add.at(sums, places, joint)
        if self.memory is not None:
            sums *= np.minimum(1, self.memory / sums[:, -2])[:, None]
            products = (sums.T / sums[:, -2]) @ sums
        self._products, self._sums, self.centers_, self.n_features_in_ = products, sums, centers, width
        self.coef_, self.intercept_ = weights[:-1], float(weights[-1])
        self._scaled = np.ascontiguousarray((centers * self.coef_).T)
        self.errors_ = (sums[:, -1] - sums[:, :-1] @ weights) / (sums[:, -2] + self.shrinkage)
        return self

    def _placed(self, rows: np.ndarray, centers: np.ndarray) -> tuple[list[int], np.ndarray]:
        """Return which of the scaled rows begin a centre, and the number of the centre to which each belongs."""
        total, places, begin = len(centers), np.empty(len(rows), int), []
        bound = total + len(rows) if self.max_centers is None else self.max_centers
        scaled = np.concatenate([centers, rows]).T.copy()  # room for as many as there can be
        for i, row in enumerate(rows):
            is_new = total < bound
            if total and not (is_new and self.quantization == 0):
                distances = _squared_distances(row[None], scaled[:, :total])[0]
                places[i] = distances.argmin()
                is_new = is_new and math.sqrt(distances[places[i]]) >= self.quantization
            if is_new:
                scaled[:, total], places[i] = row, total
                begin.append(i)
                total += 1
        return begin, places

    def _inputs(self, X: ArrayLike, width: int | None) -> np.ndarray:
        X = np.asarray(X, float)
        if X.ndim != 2 or 0 in X.shape:
            raise ValueError(
                f"`X` is of shape {X.shape}, expected [rows, features], some of each: `reshape(1, -1)` a single row."
            )
        if width is not None and X.shape[1] != width:
            raise ValueError(
                f"`X` has {X.shape[1]} features, expected the {width} of `fit`: pass those, or call `fit` for others."
            )
        _check_finite("X", X)
        return X

    def _check_parameters(self) -> None:
        for name, value, kind, least, expected in (
            ("alpha", self.alpha, Real, math.ulp(0.0), "a finite number above 0"),
            ("quantization", self.quantization, Real, 0, "a finite number of at least 0"),
            ("n_neighbors", self.n_neighbors, Integral, 1, "a whole number of at least 1"),
            ("shrinkage", self.shrinkage, Real, 0, "a finite number of at least 0"),
            ("max_centers", self.max_centers, Integral, 1, "a whole number of at least 1, or None"),
            ("memory", self.memory, Integral, 1, "a whole number of at least 1, or None"),
        ):
            if expected.endswith("None") and value is None:
                continue
            if not isinstance(value, kind) or isinstance(value, bool) or not least <= value < math.inf:
                raise ValueError(f"`{name}` is {value!r}, expected {expected}: set it with `set_params`.")


def _squared_distances(rows: np.ndarray, centers: np.ndarray) -> np.ndarray:
    """Return squared distances `[rows, centres]` of `[rows, features]` and `[features, centres]`, the quicker way
    round. They come from differences, as squares minus products lose what lies close together."""
    differences = rows[:, :, None] - centers
    differences *= differences
    return differences.sum(1)


def _solved(products: np.ndarray, alpha: float) -> np.ndarray:
    """Return weights and bias, from the sums over rows of the joint space's products."""
    try:
        return np.linalg.solve(products[:-1, :-1] + alpha * np.eye(len(products) - 1), products[:-1, -1])
    except np.linalg.LinAlgError:
        largest = math.sqrt(products.diagonal()[:-1].max())
        raise ValueError(
            f"`alpha` is {alpha!r}, expected more beside inputs of norm {largest:.3g}: scale them to about unit size."
        ) from None


def _targets(y: ArrayLike, rows: int) -> np.ndarray:
    y = np.asarray(y, float)
    if y.ndim != 1:
        raise ValueError(f"`y` is of shape {y.shape}, expected one target per row, [rows]: flatten it with `ravel`.")
    if len(y) != rows:
        raise ValueError(
            f"`y` has {len(y)} targets, expected one for each of the {rows} rows of `X`: pass both alike."
        )
    _check_finite("y", y)
    return y


def _check_finite(name: str, values: np.ndarray) -> None:
    """Raise a `ValueError` if a value is not finite. One product is quick on one row, and fails where the sums would
    overflow."""
    if not math.isfinite(np.vdot(values, values)):
        wrong = values[~np.isfinite(values)]
        held = wrong[0] if wrong.size else np.abs(values).max()
        raise ValueError(f"`{name}` holds {held}, expected finite numbers below 1e150: clean or scale them.")
