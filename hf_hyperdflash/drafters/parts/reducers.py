"""Reducers turn the target's residual streams into the feature that a drafter's blocks are conditioned on.

Torch alone, so that a serving engine can import them. A reducer has no parameters of its own: its modules are the
drafter's, under the names that checkpoints have, so that adapters and sharding find them where they look.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import nn

from ...targets.gate import stream_gates, unit_rms


class ReducerConfig(Protocol):
    """The fields of a drafter's configuration that reducers read."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def target_hidden_size(self) -> int: ...
    @property
    def target_hc_mult(self) -> int: ...
    @property
    def target_layer_ids(self) -> Sequence[int] | None: ...
    @property
    def path_norm(self) -> bool: ...
    @property
    def hc_eps(self) -> float: ...
    @property
    def rms_norm_eps(self) -> float: ...


class Reducer(Protocol):
    """A way to reduce residual streams to a feature: the modules that it needs, and how it uses them."""

    has_gate: bool

    @staticmethod
    def modules(config: ReducerConfig) -> dict[str, nn.Module]:
        """Return its modules by their names in checkpoints."""

    @staticmethod
    def reduce(drafter: Any, residual: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Reduce the residual `[batch, seq, streams read, config.target_hidden_size]` to `[batch, seq,
        config.hidden_size]` in `dtype`, with the modules of `drafter`."""


class RMSNorm(nn.Module):
    """RMSNorm in float32 with a weight that is zero at first: what it normalizes adds nothing yet."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.zeros(width)), eps

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.weight * unit_rms(hidden.float(), self.eps).to(hidden.dtype)


class HCGateReducer(nn.Module):
    """Collapse the target's residual streams with an input-dependent sigmoid gate per stream (Eq. 1).

    The gate has the form and, after `HyperDFlashDrafter.from_target`, the values of the target's `hc_head`; its
    parameters are float32 as the target's are. With `config.path_norm` each stream is normalized, without a weight,
    before the sum; without it an untrained reducer computes exactly what the target's `hc_head` does.

    Args:
        config: The drafter's.
        layers: How many of the target's layers are read. Each has gates of its own, and the streams of all of them are
            summed.
    """

    def __init__(self, config: ReducerConfig, layers: int = 1) -> None:
        super().__init__()
        streams, width = config.target_hc_mult, config.hidden_size
        self.layers, self.path_norm = layers, config.path_norm
        self.eps, self.norm_eps = config.hc_eps, config.rms_norm_eps
        self.hc_fn = nn.Parameter(torch.empty(layers * streams, streams * width, dtype=torch.float32))
        self.hc_base = nn.Parameter(torch.empty(layers * streams, dtype=torch.float32))
        self.hc_scale = nn.Parameter(torch.empty(layers, dtype=torch.float32))

    @torch.no_grad()
    def inherit(self, gate: dict[str, torch.Tensor]) -> None:
        """Copy the target's `hc_fn`, `hc_base` and `hc_scale`, for every layer read."""
        for name, value in gate.items():
            getattr(self, name).copy_(value.repeat(self.layers, *[1] * (value.ndim - 1)))

    def forward(self, residual: torch.Tensor) -> torch.Tensor:
        """Reduce a residual `[batch, seq, layers * config.target_hc_mult, config.hidden_size]` to
        `[batch, seq, config.hidden_size]`."""
        weights = (weight.chunk(self.layers) for weight in (self.hc_fn, self.hc_base, self.hc_scale))
        # Mixed-precision training keeps the gate float32 too.
        with torch.autocast(residual.device.type, enabled=False):
            parts = zip(residual.chunk(self.layers, dim=2), *weights)
            gates = [stream_gates(read, fn, base, scale, self.norm_eps, self.eps) for read, fn, base, scale in parts]
            streams = unit_rms(residual.float(), self.norm_eps) if self.path_norm else residual
            return (torch.cat(gates, dim=-1).unsqueeze(-1) * streams).sum(dim=2).to(residual.dtype)


def _projection(config: ReducerConfig, read: int) -> nn.Linear:
    return nn.Linear(read * config.target_hidden_size, config.hidden_size, bias=False)


class Gate:
    """The paper's: gates inherited from the target's `hc_head` (Eq. 1), per layer read."""

    has_gate = True

    @staticmethod
    def modules(config: ReducerConfig) -> dict[str, nn.Module]:
        return {"hc_gate": HCGateReducer(config, len(config.target_layer_ids or ()))}

    @staticmethod
    def reduce(drafter: Any, residual: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return drafter.hc_gate(residual).to(dtype)


class Dense:
    """Vanilla DFlash's dense projection of all streams read (section 2.2; z-lab's checkpoints call it `fc` too)."""

    has_gate = False

    @staticmethod
    def modules(config: ReducerConfig) -> dict[str, nn.Module]:
        return {"fc": _projection(config, len(config.target_layer_ids or ()) * config.target_hc_mult)}

    @staticmethod
    def reduce(drafter: Any, residual: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return drafter.fc(residual.flatten(2).to(dtype))


class Hybrid:
    """Ours: the gate of the last layer read plus a normed dense projection of the others, or of the same where only
    one is read. Without a norm the projection, whose every output has thousands of inputs, outgrows the gate in a few
    steps."""

    has_gate = True

    @staticmethod
    def modules(config: ReducerConfig) -> dict[str, nn.Module]:
        read = max(len(config.target_layer_ids or ()) - 1, 1) * config.target_hc_mult
        norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        return {"hc_gate": HCGateReducer(config), "fc": _projection(config, read), "fc_norm": norm}

    @staticmethod
    def reduce(drafter: Any, residual: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        streams = drafter.config.target_hc_mult
        gated, others = residual[:, :, -streams:], residual[:, :, :-streams]
        dense = drafter.fc((others if others.shape[2] else gated).flatten(2).to(dtype))
        return drafter.hc_gate(gated).to(dtype) + drafter.fc_norm(dense)


class StreamMean:
    """The mean over the streams of each layer read, then a projection."""

    has_gate = False

    @staticmethod
    def modules(config: ReducerConfig) -> dict[str, nn.Module]:
        return {"fc": _projection(config, len(config.target_layer_ids or ()))}

    @staticmethod
    def reduce(drafter: Any, residual: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        read, residual = len(drafter.config.target_layer_ids), residual.to(dtype)
        mean = residual if residual.shape[2] == read else residual.unflatten(2, (read, -1)).mean(3)
        return drafter.fc(mean.flatten(2))


REDUCERS: dict[str, type[Reducer]] = {"hc_gate": Gate, "fc": Dense, "hybrid": Hybrid, "stream_mean": StreamMean}
