"""Bootstrap intervals over prompts: whether other prompts could have reversed a difference."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

DRAWS = 2000


class Interval(NamedTuple):
    """A value and the limits between which its redrawn values lie."""

    value: float
    low: float
    high: float


def draw(prompts: int, rng: np.random.Generator) -> np.ndarray:
    """Return how often each prompt counts in each draw, `[1 + DRAWS, prompts]`; in the first, every prompt once.

    A draw has one prompt fewer than there are, with replacement, so that the variance of a mean over few prompts is
    right (Rao and Wu, 1988).
    """
    if prompts == 1:  # which cannot be redrawn
        return np.ones((2, 1))
    drawn = rng.multinomial(prompts - 1, np.full(prompts, 1 / prompts), size=DRAWS)
    return np.vstack([np.ones((1, prompts)), drawn])


def drawn_ratios(over: np.ndarray, under: np.ndarray) -> np.ndarray:
    """Return the sum of `over` divided by that of `under`, `[prompts, ...]` each, of each draw of the prompts."""
    drawn = draw(len(over), np.random.default_rng(0))  # so that all that is compared has the same draws
    with np.errstate(invalid="ignore", divide="ignore"):  # a draw of prompts without any round has no tau
        return (drawn @ over) / (drawn @ under)


def interval(values: np.ndarray, outside: float = 0.05) -> Interval:
    """Return the first of `values` `[1 + DRAWS]`, and limits with the share `outside` of the others beyond them."""
    limits = [50 * outside, 100 - 50 * outside]
    low, high = np.nanpercentile(values[1:], limits).tolist()
    return Interval(values[0].item(), low, high)
