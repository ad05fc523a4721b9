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
    """What has been seen, and the cells: a centre each, with the rows that fell to it and what each counts."""

    def __init__(
        self,
        penalty: float,
        neighbours: int,
        epsilon: float = 0.0,
        most_centres: int | None = None,
        memory: int | None = None,
        shrinkage: float = 0.0,
    ) -> None:
        self.penalty, self.neighbours, self.epsilon, self.most_centres = penalty, neighbours, epsilon, most_centres
        self.memory, self.shrinkage = memory, shrinkage
        self.inputs: list[list[float]] = []
        self.targets: list[float] = []
        self.cells: list[tuple[list[float], list[list]]] = []  # of [input, target, what the row counts]
        self.weights: list[float] = []

    def learn(self, inputs: list[list[float]], targets: list[float]) -> None:
        """One batch: weights first, then each of its rows to a cell."""
        if self.memory is None:
            self.inputs += inputs
            self.targets += targets
            self.weights = ridge(self.inputs, self.targets, self.penalty)
        else:
            self.weights = self.through_cells(inputs, targets)
        for x, d in zip(inputs, targets):
            distances = [self.distance(x, centre) for centre, _ in self.cells]
            is_full = self.most_centres is not None and len(self.cells) >= self.most_centres
            if not is_full and all(distance >= self.epsilon for distance in distances):
                self.cells.append((x, [[x, d, 1.0]]))
            else:
                self.cells[distances.index(min(distances))][1].append([x, d, 1.0])
        for _, rows in self.cells:
            count = sum(row[2] for row in rows)
            for row in rows:
                row[2] *= min(1.0, (self.memory or math.inf) / count)

    def through_cells(self, inputs: list[list[float]], targets: list[float]) -> list[float]:
        """Weights of the line through new rows, and through each cell's mean as often as its rows count."""
        rows, values, counts = [*inputs], [*targets], [1.0] * len(inputs)
        for _, of_cell in self.cells:
            count = sum(c for *_, c in of_cell)
            rows.append([sum(x[i] * c for x, _, c in of_cell) / count for i in range(len(of_cell[0][0]))])
            values.append(sum(d * c for _, d, c in of_cell) / count)
            counts.append(count)
        rows = [[*x, 1.0] for x in rows]
        size = range(len(rows[0]))
        matrix = [
            [sum(c * x[i] * x[j] for x, c in zip(rows, counts)) + (self.penalty if i == j else 0.0) for j in size]
            for i in size
        ]
        return solved(matrix, [sum(c * x[i] * d for x, d, c in zip(rows, values, counts)) for i in size])

    def linear(self, x: list[float]) -> float:
        return sum(w * value for w, value in zip(self.weights, [*x, 1.0]))

    def distance(self, x: list[float], centre: list[float]) -> float:
        """In the space scaled by the weights."""
        return math.sqrt(sum((a * w - c * w) ** 2 for a, c, w in zip(x, centre, self.weights)))

    def errors(self) -> list[float]:
        """Of each cell: the mean error of its rows, and of some without error."""
        return [
            sum(c * (d - self.linear(x)) for x, d, c in rows) / (sum(c for *_, c in rows) + self.shrinkage)
            for _, rows in self.cells
        ]

    def predict(self, x: list[float]) -> float:
        by_distance = sorted(range(len(self.cells)), key=lambda i: self.distance(x, self.cells[i][0]))
        nearest = by_distance[: self.neighbours]
        errors = self.errors()
        return self.linear(x) + sum(errors[i] for i in nearest) / len(nearest)
