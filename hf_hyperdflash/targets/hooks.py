"""Hooks on a target's decoder layers that capture their residual streams, for the threads that ask for them; and on
the whole of it, to know which of its forwards were interrupted.

A hook belongs to a module, so every thread that runs the module runs its hooks, and torch does not expect hooks to
come and go meanwhile. So ours are registered once, when a target is bound. Each call looks up what its thread asks
for.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from threading import get_ident
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers.cache_utils import Cache

# Among layer ids: what enters the first layer. A number that nobody means: to many -2 is the layer before the last.
EMBEDDINGS = -1_000_000
# The attribute of a cache that counts the forwards which began to fill it and did not end. Unless it is 0, the parts
# of the cache may hold different tokens. Most parts count their tokens, but a running state does not.
OPEN_FORWARDS = "_hyperdflash_torn"
T = TypeVar("T")
LayerOutput = torch.Tensor | tuple[torch.Tensor, ...]  # of a decoder layer


class PerThread(dict[int, tuple[T, ...]]):
    """A stack of values for each thread that has any, the innermost last.

    Like `threading.local`, but it can be copied and pickled with a target, and hooks read it as the dictionary it is.
    """

    def add(self, value: T) -> Callable[[], None]:
        """Add a value for this thread, and return a function that removes it again."""
        thread = get_ident()
        self[thread] = (*self.get(thread, ()), value)

        def remove() -> None:
            rest = tuple(other for other in self.get(thread, ()) if other is not value)
            if rest:
                self[thread] = rest
            else:
                self.pop(thread, None)

        return remove


class Round(dict[nn.Module, tuple[torch.Tensor, ...]]):
    """A forward that verifies drafts, with what modules have computed for each other in it.

    Attributes:
        position: Of its first token, the first sequence's anchor, on the host: to read it would be to wait for the
            device. Not always the number of tokens in the cache, which may have seen padding.
        shows_attention: Whether the caller gets its attention weights, so that it must read all keys.
    """

    def __init__(self, position: int, shows_attention: bool) -> None:
        super().__init__()
        self.position, self.shows_attention = position, shows_attention


class ResidualCapture:
    """The residual streams that one thread captures: one tensor per forward, of the layers that it asks for, in their
    order. The first `max_forwards` are kept until somebody pops them; of each the `last` tokens, `None` for all."""

    def __init__(self, layer_ids: list[int], max_forwards: float = math.inf) -> None:
        self.layer_ids, self.max_forwards = layer_ids, max_forwards
        self.last: int | None = None
        self.captured: list[torch.Tensor] = []  # [batch, seq, streams, config.hidden_size] of every forward
        self._outputs: dict[int, torch.Tensor] = {}  # of the forward that is running

    def add(self, layer: int, streams: int, output: LayerOutput) -> None:
        """Add the output of a layer, if it is one of them; the last one of them ends the forward."""
        if layer not in self.layer_ids or len(self.captured) >= self.max_forwards:
            return
        residual = output[0] if isinstance(output, tuple) else output
        if self.last is not None and self.last < residual.shape[1]:
            residual = residual[:, -self.last :].clone()  # a view would keep all
        self._outputs[layer] = residual.unflatten(2, (streams, -1)) if residual.ndim == 3 else residual
        if layer == max(self.layer_ids):
            parts = [self._outputs[i].to(residual.device) for i in self.layer_ids]
            self.captured.append(torch.cat(parts, dim=2) if len(parts) > 1 else parts[0])
            self._outputs.clear()

    def pop(self) -> list[torch.Tensor]:
        """Return what was captured since the last call, and forget it."""
        captured, self.captured = self.captured, []
        return captured


class ResidualTap:
    """Hooks on every decoder layer that add its residual streams to a thread's captures, and on the first one for what
    enters it. They do nothing in threads that have none."""

    def __init__(self, layers: nn.ModuleList, streams: int) -> None:
        self.captures: PerThread[ResidualCapture] = PerThread()  # that a thread's forwards fill
        self._last = len(layers) - 1
        self.handles: list[RemovableHandle] = [
            layer.register_forward_hook(partial(_on_output, self.captures, i, streams), with_kwargs=True)
            for i, layer in enumerate(layers)
        ]
        for layer in layers[:1]:
            entering = partial(_on_input, self.captures, streams)
            self.handles.append(layer.register_forward_pre_hook(entering, with_kwargs=True))

    def new_capture(self, target_layer_ids: Sequence[int], max_forwards: float = math.inf) -> ResidualCapture:
        """Return a capture of these layers, -1 for the last and [`EMBEDDINGS`] for what enters the first. Forwards
        fill it while it is in `captures`. Raise a `ValueError` if the target has no such layer."""
        if wrong := [i for i in target_layer_ids if i != EMBEDDINGS and not -1 <= i <= self._last]:
            raise ValueError(
                f"`target_layer_ids` has {wrong[0]}, but the target's layers are 0 to {self._last}, or -1 for the "
                f"last, {EMBEDDINGS} for the embeddings."
            )
        return ResidualCapture([self._last if i == -1 else i for i in target_layer_ids], max_forwards)


def _on_output(
    captures: PerThread[ResidualCapture],
    layer: int,
    streams: int,
    module: nn.Module,
    args: tuple[object, ...],
    *kwargs_and_output: Any,  # of a hook that a thread calls while it is registered the output alone
) -> None:
    output = kwargs_and_output[-1]
    if torch.compiler.is_compiling():
        # A compiled round's capture comes with its cache, so that it stays one graph, the same in all threads.
        for value in kwargs_and_output[0].values():
            capture = getattr(value, "capture", None) if isinstance(value, Cache) else None
            if capture is not None:
                capture.add(layer, streams, output)
                return
    if captures:  # apart from what follows, so that a compiled layer that nobody captures stays one graph
        add = _add_out_of_graph if torch.compiler.is_compiling() else _add_to_captures
        add(captures, layer, streams, output)


def _on_input(
    captures: PerThread[ResidualCapture],
    streams: int,
    module: nn.Module,
    args: tuple[torch.Tensor, ...],
    *kwargs: dict[str, torch.Tensor],
) -> None:
    entering = args[0] if args else kwargs[0]["hidden_states"]
    _on_output(captures, EMBEDDINGS, streams, module, args, *kwargs, entering)


def _add_to_captures(captures: PerThread[ResidualCapture], layer: int, streams: int, output: LayerOutput) -> None:
    for capture in captures.get(get_ident(), ()):
        capture.add(layer, streams, output)


# A compiled layer leaves its graph here.
_add_out_of_graph = torch.compiler.disable(
    _add_to_captures,
    reason="a drafter reads this layer of its bound target: compile the target with `fullgraph=False`",
)


def count_forwards(target: nn.Module) -> list[RemovableHandle]:
    """Register hooks that count, in [`OPEN_FORWARDS`], the forwards of a target that fill a cache and are not over."""
    return [
        target.register_forward_pre_hook(partial(_count, 1), with_kwargs=True),
        target.register_forward_hook(partial(_count, -1), with_kwargs=True),
    ]


def _count(
    change: int, module: nn.Module, args: tuple[object, ...], kwargs: object = None, output: object = None
) -> None:
    if torch.compiler.is_compiling():  # a graph runs to its end
        return
    # torch marks a hook as one with keyword arguments after it is there: a thread between the two passes none.
    named = kwargs.values() if isinstance(kwargs, dict) else ()
    for value in (*args, *named):
        if isinstance(value, Cache):
            setattr(value, OPEN_FORWARDS, max(0, getattr(value, OPEN_FORWARDS, 0) + change))


def is_between_writes(cache: object, error: BaseException) -> bool:
    """Return whether an exception was raised outside the methods of a cache's layers, so that each layer holds either
    nothing or all of the forward that was interrupted."""
    layers = {id(layer) for layer in getattr(cache, "layers", ())}
    inside = (id(frame.f_locals.get("self")) for frame, _ in traceback.walk_tb(error.__traceback__))
    return bool(layers) and layers.isdisjoint(inside)
