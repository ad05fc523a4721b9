"""How a drafter learns while it serves."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..flags import RECIPES, TrainingFlags

POLICIES = ("bandit", "always", "never")


@dataclass
class AdaptationConfig:
    """How a drafter learns while it serves.

    Args:
        policy: `"bandit"` updates where that is expected to save more time than it takes, `"always"` whenever there is
            something new, `"never"` only writes the log.
        arms: What an update may change: `"heads"`, the drafter's sequential, confidence and rank heads, or `"all"`.
        recipe: The loss, one of training's recipes.
        learning_rate: AdamW's, reached in 4 steps.
        share: How far the weights that serve go to the learned ones, at first. It grows by a quarter with an update
            that helps and halves with one that does not.
        every: Requests between two decisions.
        steps: Optimizer steps of an update; fewer if a trial may not take that long.
        rows: Requests that a step learns from, half of them new ones.
        num_anchors: Most blocks per row to learn from.
        horizon: Requests that are expected to profit from an update. Updates that are not known to pay take at most
            half a percent of the serving time, that of so many requests to come included.
        most_bytes: Most memory for text to learn from, residual included.
        seed: Seed of the sampled rows and anchors.

    Raises:
        ValueError: If a field is out of range.
    """

    policy: str = "bandit"
    arms: tuple[str, ...] = ("heads", "all")
    recipe: str = "ours"
    learning_rate: float = 3e-4
    share: float = 0.3
    every: int = 8
    steps: int = 8
    rows: int = 4
    num_anchors: int = 12
    horizon: int = 256
    most_bytes: int = 256 * 2**20
    seed: int = 0

    def __post_init__(self) -> None:
        self.arms = (self.arms,) if isinstance(self.arms, str) else tuple(self.arms)
        for name, allowed in (("policy", POLICIES), ("recipe", tuple(RECIPES))):
            if getattr(self, name) not in allowed:
                raise ValueError(f"`{name}` is {getattr(self, name)!r}, expected one of {', '.join(allowed)}.")
        if not self.arms or not set(self.arms) <= {"heads", "all"}:
            raise ValueError(f"`arms` is {self.arms!r}, expected 'heads', 'all' or both.")
        for name in ("every", "steps", "rows", "num_anchors", "horizon", "most_bytes"):
            if type(getattr(self, name)) is not int or getattr(self, name) < 1:
                raise ValueError(f"`{name}` is {getattr(self, name)!r}, expected a whole number of at least 1.")
        if type(self.seed) is not int:
            raise ValueError(f"`seed` is {self.seed!r}, expected a whole number.")
        rate = self.learning_rate
        if not isinstance(rate, (int, float)) or not 0 < rate < math.inf:
            raise ValueError(f"`learning_rate` is {rate!r}, expected a number of more than 0.")
        if not isinstance(self.share, (int, float)) or not 0 < self.share <= 1:
            raise ValueError(f"`share` is {self.share!r}, expected a number of more than 0 and at most 1.")
        self.loss = TrainingFlags(num_anchors=self.num_anchors, **RECIPES[self.recipe])
