"""Hooks on a target's modules: residual paths as they leave its decoder layers, for the threads that ask for them.

Hooks belong to a module, and every thread that runs the module runs them; torch does not expect them to come and go
meanwhile. So ours are put on once, when a target is bound, and look up what the thread that they run in wants.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from threading import get_ident
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

T = TypeVar("T")


class PerThread(dict[int, tuple[T, ...]]):
    """A stack of values for each thread that has any, the innermost last.

    As `threading.local`, but it can be copied and pickled with a target, and hooks read it as the dictionary it is.
    """

    def add(self, value: T) -> Callable[[], None]:
        """Let this thread have one more value, until what is returned is called."""
        thread = get_ident()
        self[thread] = (*self.get(thread, ()), value)

        def remove() -> None:
            rest = tuple(other for other in self.get(thread, ()) if other is not value)
            if rest:
                self[thread] = rest
            else:
                self.pop(thread, None)

        return remove


class Reading:
    """What one thread reads: a tensor per forward, from the layers that it wants.

    Args:
        wanted: Those layers, in the order of what is captured.
        most: How many forwards are kept until somebody takes them; the first ones.

    Attributes:
        captured: `[batch, seq, paths, config.hidden_size]` of every forward.
    """

    def __init__(self, wanted: list[int], most: float = math.inf) -> None:
        self.wanted, self.most = wanted, most
        self.captured: list[torch.Tensor] = []
        self._passed: dict[int, torch.Tensor] = {}

    def take(self, layer: int, residual: torch.Tensor) -> None:
        """The output of a layer that is wanted."""
        if len(self.captured) >= self.most:
            return
        self._passed[layer] = residual
        if layer == max(self.wanted):
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
        """What a thread adds to `readings` while it runs forwards, see [`~decoding.bind.capture_residual`]."""
        if wrong := [i for i in target_layer_ids if not -1 <= i <= self._last]:
            raise ValueError(
                f"`target_layer_ids` has {wrong[0]}, but the target's layers are 0 to {self._last}, or -1 for the "
                "last."
            )
        return Reading([self._last if i == -1 else i for i in target_layer_ids], most)


def _leaving(readings: PerThread[Reading], layer: int, paths: int, module: nn.Module, args: Any, output: Any) -> None:
    if readings:  # apart from what follows, so that a compiled layer that nobody reads stays one graph
        hand_out = _hand_out_of_graph if torch.compiler.is_compiling() else _hand_out
        hand_out(readings, layer, paths, output)


def _hand_out(readings: PerThread[Reading], layer: int, paths: int, output: Any) -> None:
    for reading in readings.get(get_ident(), ()):
        if layer in reading.wanted:
            residual = output[0] if isinstance(output, tuple) else output
            reading.take(layer, residual.unflatten(2, (paths, -1)) if residual.ndim == 3 else residual)


# A compiled layer leaves its graph here.
_hand_out_of_graph = torch.compiler.disable(
    _hand_out,
    reason="a drafter reads this layer of its bound target: compile the target with `fullgraph=False`",
)
