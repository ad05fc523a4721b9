"""What a `generate` call leaves with the target's cache for the next turn: the drafter's context, and unseen padding;
and whether the cache is whole."""

from __future__ import annotations

import copy
import traceback
import weakref
from functools import partial

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers.cache_utils import Cache

from ..drafters.base import Drafter
from ..drafters.sampling import Context
from ..targets.caches.protocols import OPEN_FORWARDS, RewindableCache

_CONTEXT, _PADDING = "_hyperdflash_context", "_hyperdflash_padding"


class StoredContext:
    """A drafter's context, which stays with the target's cache between turns. Copies of the cache get a copy of it.

    Args:
        drafter: Whose context it is. Another's would be read as if it were one's own, so it is told apart by the
            object itself: an `id` comes back once its owner is gone.
        context: The context.
    """

    def __init__(self, drafter: Drafter, context: Context) -> None:
        self.drafter, self.context = weakref.ref(drafter), context

    def __deepcopy__(self, memo: dict[int, object]) -> StoredContext:
        again = object.__new__(StoredContext)
        again.drafter, again.context = self.drafter, copy.deepcopy(self.context, memo)
        return again

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()  # pickled with a cache it is no context: elsewhere there is no such drafter


def load_context(cache: RewindableCache, drafter: Drafter) -> Context:
    """Return the context that an earlier turn stored with this cache, if the cache is still as it was; else an empty
    one."""
    stored: StoredContext | None = getattr(cache, _CONTEXT, None)
    if stored is None or stored.drafter() is not drafter or stored.context.end != cache.get_seq_length():
        return drafter.new_context()
    return stored.context


def store_context(cache: RewindableCache, drafter: Drafter, context: Context) -> None:
    """Store a context with the target's cache, for the next turn."""
    setattr(cache, _CONTEXT, StoredContext(drafter, context))


def padding_of(cache: RewindableCache, mask: torch.Tensor | None) -> int:
    """Return how many columns on the left of a prompt a target which is to see no padding never saw, or will not.

    Args:
        cache: Its cache; an empty one remembers them.
        mask: `[1, seq]`, the caller's; `None` if there is no padding.
    """
    if int(cache.get_seq_length()) == 0:  # rows of a batch ask about the same one, one after the other
        setattr(cache, _PADDING, 0 if mask is None else int(mask[0].long().argmax()))
    return getattr(cache, _PADDING, 0)


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
    """Return whether `error` left each part of a cache either as it was or with all of a forward: it did not come
    inside a method of one of the layers, and layers are what the cache is made of."""
    layers = {id(layer) for layer in getattr(cache, "layers", ())}
    inside = (id(frame.f_locals.get("self")) for frame, _ in traceback.walk_tb(error.__traceback__))
    return bool(layers) and layers.isdisjoint(inside)


def stop_recording(cache: object) -> None:
    """Let a cache be as one that no draft was taken back from: of a window it holds the keys that a forward reads, and
    nothing that would undo one. What is recorded between calls would grow with every forward."""
    for layer in getattr(cache, "layers", ()):
        if hasattr(layer, "stop_recording"):  # ours, by this code or a drafter's own copy of it
            layer.stop_recording()
        elif getattr(layer, "record_past", False):
            if layer.keys is not None if hasattr(layer, "keys") else any(layer.has_previous_state.values()):
                layer.crop(0)  # which trims it to what the next forward reads
            layer.record_past = False
