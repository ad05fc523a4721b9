"""Augmented space linear model from its abstract and the equations of Qin and Principe: loops over Python floats.

Slow and simple on purpose: weights are solved anew from every row seen, and a centre keeps all rows that fell to it.
"""

from __future__ import annotations

import math


def solved(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Gauss's elimination with the largest pivot of each column."""
    rows = [[*row, value] for row, value in zip(matrix, right)]
    for i in range(len(rows)):
        pivot = max(range(i, len(rows)), key=lambda j: abs(rows[j][i]))
        rows[i], rows[pivot] = rows[pivot], rows[i]
        for j in range(len(rows)):
            if j != i:
                factor = rows[j][i] / rows[i][i]
                rows[j] = [a - factor * b for a, b in zip(rows[j], rows[i])]
    return [row[-1] / row[i] for i, row in enumerate(rows)]


def ridge(inputs: list[list[float]], targets: list[float], penalty: float) -> list[float]:
    """(lambda I + X X^T)^-1 X d, the last input being 1."""
    inputs = [[*x, 1.0] for x in inputs]
    size = range(len(inputs[0]))
    matrix = [[sum(x[i] * x[j] for x in inputs) + (penalty if i == j else 0.0) for j in size] for i in size]
    return solved(matrix, [sum(x[i] * d for x, d in zip(inputs, targets)) for i in size])


class Oracle:
    """What has been seen, and the cells: a centre each, with the rows that fell to it."""

    def __init__(self, penalty: float, neighbours: int, epsilon: float = 0.0, most_centres: int | None = None) -> None:
        self.penalty, self.neighbours, self.epsilon, self.most_centres = penalty, neighbours, epsilon, most_centres
        self.inputs: list[list[float]] = []
        self.targets: list[float] = []
        self.cells: list[tuple[list[float], list[tuple[list[float], float]]]] = []
        self.weights: list[float] = []

    def learn(self, inputs: list[list[float]], targets: list[float]) -> None:
        """One batch: weights first, then each of its rows to a cell."""
        self.inputs += inputs
        self.targets += targets
        self.weights = ridge(self.inputs, self.targets, self.penalty)
        for x, d in zip(inputs, targets):
            distances = [self.distance(x, centre) for centre, _ in self.cells]
            is_full = self.most_centres is not None and len(self.cells) >= self.most_centres
            if not is_full and all(distance >= self.epsilon for distance in distances):
                self.cells.append((x, [(x, d)]))
            else:
                self.cells[distances.index(min(distances))][1].append((x, d))

    def linear(self, x: list[float]) -> float:
        return sum(w * value for w, value in zip(self.weights, [*x, 1.0]))

    def distance(self, x: list[float], centre: list[float]) -> float:
        """In the space scaled by the weights."""
        return math.sqrt(sum((a * w - c * w) ** 2 for a, c, w in zip(x, centre, self.weights)))

    def errors(self) -> list[float]:
        """Of each cell: the mean error of its rows."""
        return [sum(d - self.linear(x) for x, d in rows) / len(rows) for _, rows in self.cells]

    def predict(self, x: list[float]) -> float:
        by_distance = sorted(range(len(self.cells)), key=lambda i: self.distance(x, self.cells[i][0]))
        nearest = by_distance[: self.neighbours]
        errors = self.errors()
        return self.linear(x) + sum(errors[i] for i in nearest) / len(nearest)
