"""How probable it is that a draft is accepted once those before it are, learned from what becomes of drafts."""

from __future__ import annotations

import math

_LINE = 16.0  # drafts that the line counts as much as, beside those of a signal
_PATH = 16.0  # drafts that all of a signal count as much as, beside those of a path
_SEEN = 0.99  # what is left of a count with each further draft of the same signal
_KEPT = 0.998  # what is left of how sure the line is with each draft
_DOUBT = 0.25, 1.0  # variances of the line's slope and start at first, and at most four times as much
_LEAST = 0.01  # of the variance of an outcome, which tells little where it is certain
_MEMORY = 1 / 32  # what a draft counts in how they usually fare
_BLIND = 0.7  # and what is held of that at first
_EDGE = 1e-4  # signals nearer to 0 or 1 are as good as these


class Survival:
    """How probable it is that a draft is accepted, by how probable the drafter's best token is, which is known before
    the draft is drawn.

    Three estimates, each held at first for what the one before says: a [`Line`] through all drafts, counts of drafts
    with about the same signal, in steps of half a unit of its logit, and counts of those whose path is held to be
    about as good by itself. So few drafts tell of all signals, and many tell of each: it is calibrated to the target,
    the text and the request while they are served. Settled from its end, a path that is hardly held to be accepted so
    far loses less by a further draft than a good one.

    Attributes:
        usual: How probable it was of late, whatever the signal.
    """

    def __init__(self) -> None:
        self.usual = _BLIND
        self._line = Line()
        self._drafts: dict[tuple[int, int | None], float] = {}  # by signal and path, `None` for all
        self._accepted: dict[tuple[int, int | None], float] = {}

    def __call__(self, signal: float, reached: float = 1.0) -> float:
        """The probability for a signal in [0, 1], where all drafts before are accepted with the probability
        `reached`."""
        odds = log_odds(signal)
        step, chance = round(2 * odds), self._line(odds)
        for key, trust in (((step, None), _LINE), ((step, _halvings(reached)), _PATH)):
            chance = (self._accepted.get(key, 0.0) + trust * chance) / (self._drafts.get(key, 0.0) + trust)
        return chance

    def observe(self, signal: float, accepted: bool, reached: float = 1.0) -> None:
        """Hear what became of a draft whose predecessors were accepted."""
        odds = log_odds(signal)
        step = round(2 * odds)
        self._line.observe(odds, accepted)
        for key in ((step, None), (step, _halvings(reached))):
            self._drafts[key] = _SEEN * self._drafts.get(key, 0.0) + 1
            self._accepted[key] = _SEEN * self._accepted.get(key, 0.0) + accepted
        self.usual += (accepted - self.usual) * _MEMORY


class Line:
    """Logistic regression on one number: slope and start of the outcome's log-odds, as a normal distribution that each
    outcome narrows (an extended Kalman filter) and time widens. At first the number is taken at its word."""

    def __init__(self) -> None:
        # Slope, start, their variances and, between these, their covariance: one value for other threads to see.
        self._known = 1.0, 0.0, _DOUBT[0], 0.0, _DOUBT[1]

    def __call__(self, x: float) -> float:
        """The probability of the outcome."""
        slope, start = self.known
        return 1 / (1 + math.exp(-slope * x - start))

    @property
    def known(self) -> tuple[float, float]:
        """Slope and start."""
        return self._known[:2]

    def observe(self, x: float, outcome: bool) -> None:
        """Learn of one."""
        slope, start, of_slope, between, of_start = self._known
        chance = self(x)
        spread = max(chance * (1 - chance), _LEAST)
        toward = of_slope * x + between, between * x + of_start
        doubt = toward[0] * x + toward[1] + 1 / spread
        error = (outcome - chance) / (spread * doubt)
        # All together, or none: what is known stays a distribution.
        kept = _KEPT if max(of_slope / _DOUBT[0], of_start / _DOUBT[1]) < 4 else 1.0
        self._known = (
            slope + toward[0] * error,
            start + toward[1] * error,
            (of_slope - toward[0] ** 2 / doubt) / kept,
            (between - toward[0] * toward[1] / doubt) / kept,
            (of_start - toward[1] ** 2 / doubt) / kept,
        )


def log_odds(signal: float) -> float:
    """Of a probability, neither 0 nor 1."""
    signal = min(max(signal, _EDGE), 1 - _EDGE)
    return math.log(signal / (1 - signal))


def _halvings(reached: float) -> int:
    return min(round(-math.log2(max(reached, _EDGE))), 4)
