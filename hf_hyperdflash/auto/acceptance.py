"""How probable it is that a draft is accepted once those before it are, learned from earlier drafts.

What is known of a draft before it is drawn is its signal: the probability that the drafter gives its best token.
"""

from __future__ import annotations

import math

from ..trees.growth import ACCEPTED, EDGE

UNKNOWN = ACCEPTED[0]
"""Probability of acceptance before any draft was seen, and the signal of a drafter that gives none."""

MEMORY = 200  # drafts
PRECISION = 2.0  # of the line's slope and of its intercept before any draft was seen


class AcceptanceLine:
    """Logistic regression on a probability, online: the log-odds of acceptance are `slope * log_odds(p) + intercept`.

    Both are a normal distribution that each outcome narrows (an extended Kalman filter in its information form) and
    that time widens, towards the precision at first. A slope of 1 and an intercept of 0, at first, take the
    probability at its word.
    """

    def __init__(self) -> None:
        # Slope, intercept, and their precision matrix of three numbers: one value for other threads to see.
        self._state = 1.0, 0.0, PRECISION, 0.0, PRECISION

    def __call__(self, p: float) -> float:
        """Return the probability of acceptance."""
        slope, intercept, *_ = self._state
        return 1 / (1 + math.exp(-slope * log_odds(p) - intercept))

    @property
    def line(self) -> tuple[float, float]:
        """Its slope and intercept."""
        return self._state[:2]

    def observe(self, p: float, accepted: bool) -> None:
        """Learn from one draft."""
        slope, intercept, *precision = self._state
        chance, x = self(p), log_odds(p)
        tells = max(chance * (1 - chance), EDGE)  # also what was held to be certain tells a little
        first, told, new = (PRECISION, 0.0, PRECISION), (x * x, x, 1.0), 1 / MEMORY
        a, b, c = (now + (then - now) * new + tells * each for now, then, each in zip(precision, first, told))
        step = (accepted - chance) / (a * c - b * b)
        self._state = slope + (c * x - b) * step, intercept + (a - b * x) * step, a, b, c


def log_odds(p: float) -> float:
    """Return the log-odds of a probability, finite also for 0 and 1; a NaN counts as 0."""
    p = min(max(EDGE, p), 1 - EDGE)
    return math.log(p / (1 - p))
