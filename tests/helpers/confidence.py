"""Rounds of drafters that say how probable the acceptance of their drafts is, simulated."""

import numpy as np


def simulated(sharpness, rounds=3000, seed=0, mean=0.6):
    """Rounds of a head that is right but for its sharpness per position: logits, and whether all up to each were
    accepted."""
    rng, positions = np.random.default_rng(seed), len(sharpness)
    logits = mean + rng.normal(0, 0.9, (rounds, 1)) + rng.normal(0, 1.2, (rounds, positions))
    accepted = rng.random((rounds, positions)) < 1 / (1 + np.exp(-logits))
    return logits * sharpness, np.cumprod(accepted, axis=1).astype(float)
