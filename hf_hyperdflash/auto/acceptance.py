"""How probable it is that a draft is accepted once those before it are, learned from earlier drafts.

What is known of a draft before it is drawn is its signal: the probability that the drafter gives its best token.
"""

from __future__ import annotations

import math
from collections import defaultdict

import torch
from torch import nn

from ..trees.growth import ACCEPTED

UNKNOWN = ACCEPTED[0]
"""Probability of acceptance before any draft was seen, and the signal of a drafter that gives none."""

KEPT = 0.995  # of what is known, with each draft more: about 200 drafts are remembered
PRECISION = 4.0, 1.0  # of the line's slope and intercept before any draft was seen
EDGE = 1e-4  # a probability nearer to 0 or 1 counts as this


class AcceptanceLine:
    """Logistic regression on a probability, online: the log-odds of acceptance are `slope * log_odds(p) + intercept`.

    Both are a normal distribution that each outcome narrows (an extended Kalman filter in its information form) and
    that time widens, towards the precision at first. A slope of 1 and an intercept of 0, at first, take the
    probability at its word.
    """

    def __init__(self) -> None:
        # Slope, intercept, and their precision matrix of three numbers: one value for other threads to see.
        self._state = 1.0, 0.0, PRECISION[0], 0.0, PRECISION[1]

    def __call__(self, p: float) -> float:
        """The probability of acceptance."""
        slope, intercept, *_ = self._state
        return 1 / (1 + math.exp(-slope * log_odds(p) - intercept))

    def of_logarithms(self, log_p: torch.Tensor) -> torch.Tensor:
        """The logarithms of probabilities of acceptance, from those of probabilities."""
        slope, intercept, *_ = self._state
        log_p = log_p.clamp(math.log(EDGE), math.log1p(-EDGE))
        return nn.functional.logsigmoid(slope * (log_p - torch.log1p(-log_p.exp())) + intercept)

    def observe(self, p: float, accepted: bool) -> None:
        """Learn from one draft."""
        slope, intercept, *precision = self._state
        chance, x = self(p), log_odds(p)
        tells = max(chance * (1 - chance), 0.01)  # also what was held to be certain tells a little
        first, told = (PRECISION[0], 0.0, PRECISION[1]), (x * x, x, 1.0)
        a, b, c = (KEPT * now + (1 - KEPT) * then + tells * new for now, then, new in zip(precision, first, told))
        step = (accepted - chance) / (a * c - b * b)
        self._state = slope + (c * x - b) * step, intercept + (a - b * x) * step, a, b, c


class PositionAcceptance:
    """Acceptance by position, 0 for the first draft, for the texts of a batch: a line for each position, on the
    probability for the one before it."""

    def __init__(self) -> None:
        self._lines: dict[int, AcceptanceLine] = defaultdict(AcceptanceLine)

    def __call__(self, position: int) -> float:
        """The probability of acceptance at a position."""
        chance = UNKNOWN
        for earlier in range(position + 1):
            chance = self._lines[earlier](chance)
        return chance

    def observe(self, position: int, accepted: bool) -> None:
        """Learn from one draft."""
        self._lines[position].observe(self(position - 1), accepted)


class NodeAcceptance:
    """Acceptance of a node of a draft tree, once its parent is accepted and its earlier siblings are not.

    Where nodes are the most probable ones, by the drafter's probability of each. Where they are drawn, by the signal
    for the first child, and by rank for its siblings.
    """

    def __init__(self) -> None:
        self.line, self._later = AcceptanceLine(), (AcceptanceLine(), AcceptanceLine())

    @property
    def later(self) -> tuple[float, ...]:
        """The probability for the second child, and for those that follow, which is never higher."""
        second, others = (line(p) for line, p in zip(self._later, ACCEPTED[1:]))
        return second, min(second, others)

    def log_chances(self, likely: torch.Tensor) -> torch.Tensor:
        """The logarithms of probabilities of acceptance, from those of the drafter's probabilities."""
        return self.line.of_logarithms(likely)

    def chance(self, signal: float) -> float:
        """The probability of acceptance of one node, by the drafter's."""
        return self.line(signal)

    def observe(self, signals: list[float], accepted: int | None, are_drawn: bool) -> None:
        """Learn which child of an accepted node was accepted, by its rank; `None` for none."""
        for rank, signal in enumerate(signals):
            if not are_drawn or not rank:
                self.line.observe(signal, rank == accepted)
            else:
                place = min(rank, 2) - 1
                self._later[place].observe(ACCEPTED[1 + place], rank == accepted)
            if are_drawn and rank == accepted:
                break


def log_odds(p: float) -> float:
    """The log-odds of a probability, finite also for 0 and 1."""
    p = min(max(p, EDGE), 1 - EDGE)
    return math.log(p / (1 - p))
