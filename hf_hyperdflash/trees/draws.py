"""Samples indices by weights: one, or several without replacement. Every draw of tokens is made here."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch


def sample_index(weights: torch.Tensor) -> torch.Tensor:
    """Sample an index `[..., 1]` with probability proportional to `weights` `[..., values]`, by one uniform number and
    the running sum. Weights are at least 0, and not all of them 0.

    A race of random numbers, one for each value, as in `torch.multinomial`, takes 20 times as long for a vocabulary of
    49,152 tokens on a CPU. Sums are in float64: in float32 the rarest tokens would never be drawn. Running sums of all
    values would be megabytes, which a CPU gets from the system and gives back every time: there they are of stretches
    of values, and then of the values of one. An accelerator waits for launches instead.
    """
    dtype = torch.float32 if weights.device.type == "mps" else torch.float64  # which MPS does not have
    share = torch.rand(*weights.shape[:-1], 1, dtype=dtype, device=weights.device)
    width = math.gcd(weights.shape[-1], 256) if weights.is_cpu else 1
    if width < 64:
        sums = weights.cumsum(-1, dtype=dtype)
        return _first_beyond(share * sums[..., -1:], sums)
    stretches = weights.unflatten(-1, (-1, width))
    sums = stretches.sum(-1, dtype=dtype).cumsum(-1)
    wanted = share * sums[..., -1:]
    stretch = _first_beyond(wanted, sums)
    to_its_end = sums.gather(-1, stretch) - wanted
    sums = stretches.take_along_dim(stretch[..., None], -2).squeeze(-2).cumsum(-1, dtype=dtype)
    return stretch * width + _first_beyond((sums[..., -1:] - to_its_end).clamp(min=0), sums)


def _first_beyond(number: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
    """Return the first index whose running sum is beyond a number, `[..., 1]`: its weight is not 0. What is no number
    becomes the last index."""
    return torch.searchsorted(sums, number, right=True).clamp(max=sums.shape[-1] - 1)


class Siblings(NamedTuple):
    """Indices that were sampled one after the other, without replacement."""

    indices: torch.Tensor  # [..., count]
    are_there: torch.Tensor  # [..., count], whether a weight was left for each
    weights: list[torch.Tensor]  # what each was sampled by, [..., values]


def sample_siblings(weights: torch.Tensor, count: int) -> Siblings:
    """Sample `count` indices one after the other, as [`sample_index`], each by the weights that are left."""
    indices, before = [], [weights]
    for _ in range(count):
        indices.append(sample_index(before[-1]))
        before.append(before[-1].scatter(-1, indices[-1], 0.0))
    are_there = [left.gather(-1, index) > 0 for left, index in zip(before, indices)]
    return Siblings(torch.cat(indices, dim=-1), torch.cat(are_there, dim=-1), before[:-1])
