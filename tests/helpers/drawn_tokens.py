"""Whether tokens were drawn from a distribution, by how often each came."""

import math
from collections import Counter

import torch


def assert_drawn_from(probabilities: torch.Tensor, observed: Counter) -> None:
    """Every outcome is about as frequent as it should be. A right sampler fails once in a million times at most,
    whatever its seed: by Chernoff's bound a share is as far off as `share` with a probability of exp(-draws *
    divergence) at most, to either side, and there are `2 * outcomes` of these."""
    draws = observed.total()
    for outcome, expected in enumerate(probabilities.double().tolist()):
        share = observed[outcome] / draws
        terms = [(share, expected), (1 - share, 1 - expected)]
        divergence = sum(a * math.log(a / b) if b > 0 else math.inf for a, b in terms if a > 0)
        assert draws * divergence <= math.log(2 * len(probabilities) / 1e-6), (outcome, share, expected)
