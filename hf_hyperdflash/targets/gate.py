"""The gate that collapses residual streams (HyperDFlash, Eq. 1). Torch alone: serving engines run it, too."""

from __future__ import annotations

import torch
from torch import nn


def stream_gates(
    streams: torch.Tensor,
    hc_fn: torch.Tensor,
    hc_base: torch.Tensor,
    hc_scale: torch.Tensor,
    norm_eps: float,
    hc_eps: float,
) -> torch.Tensor:
    """Return the weight of each residual stream, float32 (the paper's Eq. 1).

    Args:
        streams: `[batch, seq, streams, config.hidden_size]`.
        hc_fn: `[streams, streams * config.hidden_size]`.
        hc_base: `[streams]`.
        hc_scale: `[1]`.

    Returns:
        `[batch, seq, streams]`.
    """
    mixes = nn.functional.linear(unit_rms(streams.flatten(2).float(), norm_eps), hc_fn.float()) * hc_scale.float()
    return torch.sigmoid(mixes + hc_base.float()) + hc_eps


def unit_rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    """Scale `x` to a root mean square of 1 over its last dimension."""
    return x * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps).to(x.dtype)
