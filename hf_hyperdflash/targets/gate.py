"""The gate that collapses residual streams (HyperDFlash, Eq. 1). Torch alone: serving engines run it, too."""

from __future__ import annotations

import torch
from torch import nn


def path_gates(
    paths: torch.Tensor,
    hc_fn: torch.Tensor,
    hc_base: torch.Tensor,
    hc_scale: torch.Tensor,
    norm_eps: float,
    hc_eps: float,
) -> torch.Tensor:
    """The weight of each residual path, float32 (the paper's Eq. 1).

    Args:
        paths: `[batch, seq, paths, config.hidden_size]`.
        hc_fn: `[paths, paths * config.hidden_size]`.
        hc_base: `[paths]`.
        hc_scale: `[1]`.

    Returns:
        `[batch, seq, paths]`.
    """
    mixes = nn.functional.linear(unit_rms(paths.flatten(2).float(), norm_eps), hc_fn.float()) * hc_scale.float()
    return torch.sigmoid(mixes + hc_base.float()) + hc_eps


def unit_rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    """`x` with a root mean square of 1 over its last dimension."""
    return x * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps).to(x.dtype)
