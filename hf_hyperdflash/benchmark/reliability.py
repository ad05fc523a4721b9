"""Reliability of probabilities: calibration error, area under the ROC curve, and temperatures that improve them.

NumPy alone. The data are rounds of drafts, left to right. Each draft has the logit of its acceptance given that those
before it were accepted. A draft that was not made, or whose outcome is not known, is `nan`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

BINS = 15
_TEMPERATURES = 2.0 ** np.linspace(-3, 3, 97)
_LEAST = 1e-12  # probability in a logarithm


@dataclass(frozen=True)
class Bin:
    """A bin of similar probabilities: their number, their mean, and the share of drafts that were accepted."""

    total: int
    confidence: float
    accepted: float


@dataclass(frozen=True)
class Reliability:
    """Probabilities compared with outcomes."""

    total: int
    confidence: float  # mean
    accepted: float  # share of the drafts
    error: float  # expected calibration error (Naeini et al., 2015), over `BINS` bins of equal width
    # The probability that an accepted draft has a larger value than a rejected one, equal values counted half (Hanley
    # and McNeil, 1982); `None` if there are not both.
    auc: float | None
    bins: list[Bin]  # those that are not empty, by size


def reliability(probabilities: np.ndarray, accepted: np.ndarray) -> Reliability:
    """Compare `probabilities` of any shape with `accepted`, 1 or 0 each; entries with a `nan` do not count."""
    known = ~np.isnan(accepted) & ~np.isnan(probabilities)
    p, came_true = probabilities[known], accepted[known]
    bin_index = np.minimum((p * BINS).astype(int), BINS - 1)
    sizes, sums, hits = (np.bincount(bin_index, weights, BINS) for weights in (None, p, came_true))
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
    _, bin_index, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[bin_index]  # from 1, equal ones share their mean
    return float((ranks[came_true == 1].sum() - positive * (positive + 1) / 2) / (positive * negative))


def given_those_before(logits: np.ndarray, temperatures: np.ndarray) -> np.ndarray:
    """Return each draft's probability of acceptance if those before it are accepted, `[rounds, positions]`."""
    return 1 / (1 + np.exp(-logits / temperatures))


def through(logits: np.ndarray, temperatures: np.ndarray) -> np.ndarray:
    """Return the probability that all drafts up to each one are accepted, `[rounds, positions]`."""
    return np.cumprod(given_those_before(logits, temperatures), axis=1)


def fit_temperatures(logits: np.ndarray, accepted: np.ndarray) -> np.ndarray:
    """Fit one temperature per draft position, so that the probabilities of [`through`] are reliable.

    As DSpark's sequential temperature scaling (section 3.2.1), it goes position by position from the left, with the
    earlier ones fixed, by a search over a grid. DSpark minimizes the calibration error. Here it is the log loss, with
    a weak prior that the head is right (a factor e costs half a nat). The calibration error cannot distinguish an
    informative head from one that always gives the mean: from few rounds it chooses temperatures that erase the head's
    information, and its own error on fresh rounds is larger. A position that no round has gets 1.
    """
    fitted = np.ones(logits.shape[1])
    before = np.ones(len(logits))
    for k in range(logits.shape[1]):
        known = ~np.isnan(accepted[:, k]) & ~np.isnan(logits[:, k])
        came_true = accepted[known, k]
        tried = before[known] * given_those_before(logits[known, k], _TEMPERATURES[:, None])
        probabilities = np.where(came_true == 1, tried, 1 - tried)
        losses = -np.log(np.maximum(probabilities, _LEAST)).sum(1) + np.log(_TEMPERATURES) ** 2 / 2
        fitted[k] = _TEMPERATURES[losses.argmin()]
        before = before * given_those_before(logits[:, k], fitted[k])
    return fitted
