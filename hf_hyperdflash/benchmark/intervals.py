"""Whether other prompts could have turned a difference round: the bootstrap over prompts."""

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
    """How often each prompt counts, `[1 + DRAWS, prompts]`; the first row is every prompt once.

    They are drawn with replacement, one fewer than there are, which makes the variance of a mean over few prompts
    right (Rao and Wu, 1988).
    """
    drawn = rng.multinomial(prompts - 1, np.full(prompts, 1 / prompts), size=DRAWS)
    return np.vstack([np.ones((1, prompts)), drawn])


def interval(values: np.ndarray, outside: float = 0.05) -> Interval:
    """The first of `values` `[1 + DRAWS]`, and the limits that the share `outside` of the others is beyond."""
    limits = [50 * outside, 100 - 50 * outside]
    low, high = np.nanpercentile(values[1:], limits).tolist()  # a draw of prompts without any round has no tau
    return Interval(values[0].item(), low, high)
