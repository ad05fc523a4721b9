"""SpecBlock's rank head predicts the rank of the target's token among the drafter's, and so how many tokens to try.

Torch alone, so that a serving engine can import it.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn

RANK_CLASSES = 4
"""Rank 1, 2 to 4, 5 to 10, and beyond."""

RANK_CONTEXT = 20
"""The number of best tokens that the features describe."""

_LAST_RANKS = (1, 4, 10)  # of each class but the last
_LISTED = 10
_GAPS = (1, 2, 4)


def rank_features(logits: torch.Tensor) -> torch.Tensor:
    """Return the rank head's features of logits `[..., vocabulary]`, `[..., 15]` in float32: the log-probabilities of
    the ten best tokens, normalized over the best twenty, the gaps from the first to ranks 2, 3 and 5, the first's
    probability, and the entropy over the twenty."""
    best = logits.detach().float().topk(RANK_CONTEXT, dim=-1).values
    likely = best.log_softmax(-1)
    gaps = best[..., :1] - best[..., list(_GAPS)]
    entropy = -(likely.exp() * likely).nan_to_num(0.0).sum(-1, keepdim=True)
    return torch.cat([likely[..., :_LISTED], gaps, likely[..., :1].exp(), entropy], dim=-1)


def rank_classes(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return the class of each token's rank, `[...]`, in logits `[..., vocabulary]`."""
    own = logits.gather(-1, tokens.unsqueeze(-1))
    rank = (logits > own).sum(-1) + 1
    return sum((rank > last).long() for last in _LAST_RANKS)  # type: ignore[return-value]


class RankConfig(Protocol):
    """The fields of a drafter's configuration that a rank head reads."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def rank_width(self) -> int: ...


class RankHead(nn.Module):
    """Computes logits of the four classes from a slot's normed state and the features of its logits.

    Args:
        config: The drafter's.
    """

    def __init__(self, config: RankConfig) -> None:
        super().__init__()
        features = _LISTED + len(_GAPS) + 2
        self.up_proj = nn.Linear(config.hidden_size + features, config.rank_width, bias=False)
        self.down_proj = nn.Linear(config.rank_width, RANK_CLASSES, bias=False)

    def forward(self, states: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """Return logits `[..., 4]` from states `[..., config.hidden_size]` and [`rank_features`], which get no
        gradient."""
        read = torch.cat([states.detach(), features.to(states.dtype)], dim=-1)
        return self.down_proj(nn.functional.silu(self.up_proj(read)))
