"""Augmented space linear model: a linear regressor that knows its own errors. NumPy alone.

Zhengda Qin and Jose C. Principe, Augmented Space Linear Model; after the abstract and the equations.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:  # it takes modules that nothing else needs
    from numpy.typing import ArrayLike

PENALTY = 0.1  # lambda


@dataclass(eq=False)
class AugmentedSpaceLinearModel:
    """Ridge least squares, corrected by the errors that it made on the nearest training inputs.

    A prediction is `w.x + b` and the mean error `d - w.x - b` of the nearest stored inputs, by the distance between
    `x * w` and `x_i * w`: an input counts as much as the output depends on it. The bias cancels there.

    Weights are `(lambda I + X X^T)^-1 X d` with 1 as the last input: the bias is penalized like the others, as Qin and
    Principe do. They are solved from sums over all rows seen, recursive least squares in its information form: exact,
    however the rows are split, at about `n_features ** 3` operations a call. Nothing is forgotten unless `memory` says
    so. Inputs should be of about unit size, because squares are summed and lambda is weighed against them.

    The store has a centre for each row, or fewer with `quantization` or `max_centers`. A centre stays at the input
    that began it and keeps the sums of its rows. Their mean error is the mean target minus `w` times the mean input
    minus `b`, so it is exact after the weights have moved. Which rows a centre has is not decided anew: with fewer
    centres than rows, predictions depend on how the rows were split.

    Attributes:
        n_neighbors: How many centres' errors are averaged, of fewer stored ones all. Of equally near ones any counts.
        quantization: A row begins a centre if none is nearer than this epsilon, in the scaled space, and so in units
            of the target; else it falls to the nearest one. At 0 all begin one, repeated inputs too.
        max_centers: Most centres, or `None`. Once there are as many, each row falls to its nearest.
        memory: How many rows a centre counts as at most: its new rows then replace its old ones, and those alone. The
            line goes through the means of centres, as often as they count. `None` for as many as there were.
        shrinkage: How many rows without error are added to a centre's rows when their mean error is taken, so that
            the errors of few rows count less.
        weights: Those of the inputs, and the bias, `[n_features + 1]`; none before the first rows.
        centers: `[centres, n_features]`.
        errors: Mean error of each centre's rows under the present weights, `[centres]`.
    """

    n_neighbors: int = 1
    quantization: float = 0.0
    max_centers: int | None = None
    memory: int | None = None
    shrinkage: float = 0.0
    weights: np.ndarray | None = field(default=None, init=False)
    centers: np.ndarray = field(init=False)
    errors: np.ndarray = field(init=False)
    _products: np.ndarray = field(init=False)  # of the joint space, inputs, 1 and target, summed over all rows
    _sums: np.ndarray = field(init=False)  # of the joint space, over each centre's rows
    _scaled: np.ndarray = field(init=False)  # centres times weights, [n_features, centres]

    def partial_fit(self, X: ArrayLike, y: ArrayLike) -> AugmentedSpaceLinearModel:
        """Learn from inputs `[rows, n_features]` and targets `[rows]`, too: what was learned before stays."""
        X = np.asarray(X, float)
        width = X.shape[1]
        joint = np.column_stack([X, np.ones(len(X)), y])  # the augmented space: inputs, 1 and target
        products = joint.T @ joint
        sums, centers = np.empty((0, width + 2)), np.empty((0, width))
        if self.weights is not None:
            products, sums, centers = products + self._products, self._sums, self.centers
        weights = np.linalg.solve(products[:-1, :-1] + PENALTY * np.eye(width + 1), products[:-1, -1])
        begin, places = self._placed(X * weights[:-1], centers * weights[:-1])
        centers = np.concatenate([centers, X[begin]])
        sums = np.concatenate([sums, np.zeros((len(centers) - len(sums), width + 2))])
        np.add.at(sums, places, joint)
        if self.memory is not None:
            sums *= np.minimum(1, self.memory / sums[:, -2])[:, None]
            products = (sums.T / sums[:, -2]) @ sums
        self._products, self._sums, self.centers, self.weights = products, sums, centers, weights
        self._scaled = np.ascontiguousarray((centers * weights[:-1]).T)
        self.errors = (sums[:, -1] - sums[:, :-1] @ weights) / (sums[:, -2] + self.shrinkage)
        return self

    def predict(self, X: ArrayLike) -> np.ndarray:
        """Return the targets `[rows]` of inputs `[rows, n_features]`."""
        if self.weights is None:
            raise ValueError("The model has seen 0 rows, expected at least one: call `partial_fit` before `predict`.")
        X = np.asarray(X, float)
        distances = _squared_distances(X * self.weights[:-1], self._scaled)
        k = min(self.n_neighbors, len(self.errors))
        nearest = distances.argmin(1)[:, None] if k == 1 else distances.argpartition(k - 1)[:, :k]
        return X @ self.weights[:-1] + self.weights[-1] + self.errors[nearest].mean(1)

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


def _squared_distances(rows: np.ndarray, centers: np.ndarray) -> np.ndarray:
    """Return squared distances `[rows, centres]` of `[rows, features]` and `[features, centres]`, the quicker way
    round. They come from differences, as squares minus products lose what lies close together."""
    differences = rows[:, :, None] - centers
    differences *= differences
    return differences.sum(1)
