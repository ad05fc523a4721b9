"""Residual paths as they leave a target's decoder layers, for the threads that ask for them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from threading import get_ident
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from .per_thread import PerThread


class Reading:
    """What one thread reads: a tensor per forward, from the layers that it wants.

    Args:
        wanted: Those layers, ascending.
        most: How many forwards are kept until somebody takes them; the first ones.

    Attributes:
        captured: `[batch, seq, paths, config.hidden_size]` of every forward.
    """

    def __init__(self, wanted: list[int], most: float = math.inf) -> None:
        self.wanted, self.most = wanted, most
        self.captured: list[torch.Tensor] = []
        self._passed: dict[int, torch.Tensor] = {}

    def take(self, layer: int, residual: torch.Tensor) -> None:
        """A layer's output, if it is wanted."""
        if layer not in self.wanted or len(self.captured) >= self.most:
            return
        self._passed[layer] = residual
        if layer == self.wanted[-1]:
            parts = [self._passed[i].to(residual.device) for i in self.wanted]
            self.captured.append(torch.cat(parts, dim=2) if len(parts) > 1 else parts[0])
            self._passed.clear()

    def taken(self) -> list[torch.Tensor]:
        """What was captured since this was last asked."""
        captured, self.captured = self.captured, []
        return captured


class ResidualTap:
    """Hooks on every decoder layer that hand out its residual paths. They do nothing in threads that do not ask.

    Args:
        layers: The target's decoder layers.
        paths: How many residual paths there are: 1, or `config.hc_mult`.
    """

    def __init__(self, layers: nn.ModuleList, paths: int) -> None:
        self.readings: PerThread[Reading] = PerThread()
        self._last = len(layers) - 1
        self.handles: list[RemovableHandle] = [
            layer.register_forward_hook(partial(_leaving, self.readings, i, paths)) for i, layer in enumerate(layers)
        ]

    def reader(self, target_layer_ids: Sequence[int], most: float = math.inf) -> Reading:
        """What a thread adds to `readings` while it runs forwards, see [`~binding.capture_residual`]."""
        return Reading([self._last if i == -1 else i for i in target_layer_ids], most)


def _leaving(readings: PerThread[Reading], layer: int, paths: int, module: nn.Module, args: Any, output: Any) -> None:
    if readings:  # apart from what follows, so that a compiled layer that nobody reads stays one graph
        _hand_out(readings, layer, paths, output)


@torch.compiler.disable  # a compiled layer leaves its graph here
def _hand_out(readings: PerThread[Reading], layer: int, paths: int, output: Any) -> None:
    for reading in readings.get(get_ident(), ()):
        residual = output[0] if isinstance(output, tuple) else output
        reading.take(layer, residual.unflatten(2, (paths, -1)) if residual.ndim == 3 else residual)
