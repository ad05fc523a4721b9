"""Every write to a cache's layers while a target's forward runs, found by what changes, and an interruption of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import pytest
import torch
from transformers.cache_utils import Cache

from hf_hyperdflash.targets.caches.growing import GrowingIndexedLayer, GrowingLayer
from hf_hyperdflash.targets.caches.round_cache import RoundLayer

KINDS = RoundLayer, GrowingLayer, GrowingIndexedLayer  # of rounds


class CacheWrites:
    """Counts writes in one of the forwards of a target, and interrupts it after one of them.

    A write is a call of a layer's method after which the layer is another, or an attribute that is set from outside.

    Args:
        target: The target.
        forward: In which of its forwards, from 1.
        after: Which write is followed by Ctrl-C, from 1; `None` for none.
        inside: Whether writes are counted where a method sets an attribute, and the method so is interrupted itself.

    Attributes:
        seen: `Class.name` of each write.
    """

    def __init__(self, target: Any, forward: int, after: int | None = None, inside: bool = False) -> None:
        self.target, self.forward, self.after, self.inside = target, forward, after, inside
        self.seen: list[str] = []
        self._forwards = self._depth = 0
        self._running = False

    @contextmanager
    def of(self, cache: Any) -> Iterator[CacheWrites]:
        """Watch the layers of rounds, and those that a cache has or is given, if it has one of their class."""
        handles = [self.target.register_forward_pre_hook(self._begin), self.target.register_forward_hook(self._end)]
        with pytest.MonkeyPatch.context() as patched:
            for kind in {*KINDS, *(type(layer) for layer in getattr(cache, "layers", ()))}:
                for name, method in _methods(kind).items():
                    patched.setattr(kind, name, self._watched(method, f"{kind.__name__}.{name}"))
                patched.setattr(kind, "__setattr__", self._set)
            try:
                yield self
            finally:
                for handle in handles:
                    handle.remove()

    def _begin(self, *_: Any) -> None:
        self._forwards += 1
        self._running, self._depth = self._forwards == self.forward, 0

    def _end(self, *_: Any) -> None:
        self._running = False

    def _written(self, name: str) -> None:
        self.seen.append(name)
        if len(self.seen) == self.after:
            self._running = False
            raise KeyboardInterrupt

    def _watched(self, method: FunctionType, name: str) -> Any:
        def watched(layer: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._running or self._depth:
                return method(layer, *args, **kwargs)
            before, self._depth = _state(layer), 1
            try:
                result = method(layer, *args, **kwargs)
            finally:
                self._depth = 0
            if not self.inside and _state(layer) != before:
                self._written(name)
            return result

        return watched

    @property
    def _set(self) -> Any:
        def set_attribute(layer: Any, name: str, value: Any) -> None:
            object.__setattr__(layer, name, value)
            if self._running and self.inside == bool(self._depth):
                self._written(f"{type(layer).__name__}.{name} =")

        return set_attribute


def _methods(kind: type) -> dict[str, FunctionType]:
    found: dict[str, FunctionType] = {}
    for base in reversed(kind.__mro__[:-1]):
        found |= {name: value for name, value in vars(base).items() if isinstance(value, FunctionType)}
    return {name: value for name, value in found.items() if not name.startswith("__")}


def _state(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.dtype, tuple(value.shape), value.detach().flatten().tolist()
    if isinstance(value, dict):
        return [(name if isinstance(name, (str, int)) else id(name), _state(part)) for name, part in value.items()]
    if isinstance(value, (list, tuple)):
        return [_state(part) for part in value]
    if hasattr(value, "__dict__") and not isinstance(value, (type, torch.nn.Module, Cache)):
        return _state(vars(value))
    return value if isinstance(value, (str, int, float, bool, type(None))) else id(value)
