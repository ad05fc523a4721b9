"""How far probabilities can be believed: calibration error, area under the ROC curve, temperatures that mend them.

NumPy alone. What is judged are rounds of drafts, left to right, each with the logit of its acceptance given that those
before it were accepted. A draft that was not made, or of which nothing is known, is `nan`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

BINS = 15
_TEMPERATURES = 2.0 ** np.linspace(-3, 3, 97)
_LEAST = 1e-12  # probability that a logarithm is taken of


class Bin(NamedTuple):
    """Probabilities of about the same size: how many, their mean, and the share of them that came true."""

    total: int
    confidence: float
    accepted: float


class Reliability(NamedTuple):
    """How probabilities turned out.

    Attributes:
        total: How many there are.
        confidence: Their mean.
        accepted: The share of them that came true.
        error: Expected calibration error (Naeini et al., 2015), over `BINS` bins of equal width.
        auc: How probably one that came true is larger than one that did not, equal ones counted half (Hanley and
            McNeil, 1982); `None` where there are not both.
        bins: Those that are not empty, by size.
    """

    total: int
    confidence: float
    accepted: float
    error: float
    auc: float | None
    bins: list[Bin]


def reliability(probabilities: np.ndarray, accepted: np.ndarray) -> Reliability:
    """How `probabilities` of any shape turned out, by `accepted`, 1 or 0 each; those with a `nan` do not count."""
    known = ~np.isnan(accepted) & ~np.isnan(probabilities)
    p, came_true = probabilities[known], accepted[known]
    place = np.minimum((p * BINS).astype(int), BINS - 1)
    sizes, sums, hits = (np.bincount(place, weights, BINS) for weights in (None, p, came_true))
    full = sizes > 0
    bins = [Bin(int(n), s / n, h / n) for n, s, h in zip(sizes[full], sums[full].tolist(), hits[full].tolist())]
    some = max(1, p.size)
    error = float(np.abs(sums - hits).sum()) / some
    return Reliability(p.size, float(p.sum()) / some, float(came_true.sum()) / some, error, _auc(p, came_true), bins)


def _auc(scores: np.ndarray, came_true: np.ndarray) -> float | None:
    positive = int(came_true.sum())
    negative = came_true.size - positive
    if not positive or not negative:
        return None
    _, place, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[place]  # from 1, equal ones share their mean
    return float((ranks[came_true == 1].sum() - positive * (positive + 1) / 2) / (positive * negative))


def given_those_before(logits: np.ndarray, temperatures: np.ndarray) -> np.ndarray:
    """Each draft's probability of acceptance once those before it are, `[rounds, positions]` as `logits`."""
    return 1 / (1 + np.exp(-logits / temperatures))


def through(logits: np.ndarray, temperatures: np.ndarray) -> np.ndarray:
    """The probability that all drafts up to each are accepted, `[rounds, positions]` as `logits`."""
    return np.cumprod(given_those_before(logits, temperatures), axis=1)


def fit_temperatures(logits: np.ndarray, accepted: np.ndarray) -> np.ndarray:
    """One temperature per draft position that make the probability of acceptance [`through`] each a believable one.

    As DSpark's sequential temperature scaling (section 3.2.1), position by position from the left, those before being
    fixed, by a search over a grid. What is least there is the calibration error; here it is the log loss, with a weak
    prior that the head is right (a factor e costs half a nat). A calibration error cannot tell a head that knows
    something from one that always says the mean: from few rounds it chooses temperatures that erase what the head
    knows, and on fresh rounds its own error is larger.

    Args:
        logits: `[rounds, positions]`.
        accepted: Whether all drafts up to each were accepted, `[rounds, positions]`.

    Returns:
        `[positions]`, from 1/8 to 8; 1 for a position that no round has.
    """
    fitted = np.ones(logits.shape[1])
    before = np.ones(len(logits))
    for k in range(logits.shape[1]):
        known = ~np.isnan(accepted[:, k]) & ~np.isnan(logits[:, k])
        came_true = accepted[known, k]
        tried = before[known] * given_those_before(logits[known, k], _TEMPERATURES[:, None])
        told = np.where(came_true == 1, tried, 1 - tried)
        losses = -np.log(np.maximum(told, _LEAST)).sum(1) + np.log(_TEMPERATURES) ** 2 / 2
        fitted[k] = _TEMPERATURES[losses.argmin()]
        before = before * given_those_before(logits[:, k], fitted[k])
    return fitted
