"""How probable it is that a node of a draft tree is accepted, and which nodes are worth it."""

from __future__ import annotations

import math

import torch
from torch import nn

from ..trees.growth import ACCEPTED
from .survival import Line, log_odds

_MEMORY = 1 / 64  # what a node counts in how those of its rank usually fare
_EDGE = 1e-4  # probabilities nearer to 0 or 1 are as good as these


class NodeSurvival:
    """How probable it is that a node is accepted once its parent is and its earlier siblings are not, learned from
    what becomes of nodes.

    Where nodes are the most probable ones, by the drafter's probability of each; where they are drawn, by that of the
    best token for the first child, which is known before it is drawn, and for others by their rank alone.
    """

    def __init__(self) -> None:
        self.line = Line()
        self.later = ACCEPTED[1:]  # of the second child, and of those that follow

    def of_likely(self, likely: torch.Tensor) -> torch.Tensor:
        """Logarithms of it, from those of the drafter's probabilities."""
        slope, start = self.line.known
        likely = likely.clamp(math.log(_EDGE), math.log1p(-_EDGE))
        return nn.functional.logsigmoid(slope * (likely - torch.log1p(-likely.exp())) + start)

    def of_one(self, signal: float) -> float:
        """Of one node, by its probability."""
        return self.line(log_odds(signal))

    def observe(self, signals: list[float], accepted: int | None, are_drawn: bool) -> None:
        """Hear which child of an accepted node was accepted, by its rank, `None` for none."""
        for rank, signal in enumerate(signals):
            if not are_drawn or not rank:
                self.line.observe(log_odds(signal), rank == accepted)
            else:
                later = list(self.later)
                later[rank > 1] += ((rank == accepted) - later[rank > 1]) * _MEMORY
                self.later = later[0], min(later)
            if are_drawn and rank == accepted:
                break
