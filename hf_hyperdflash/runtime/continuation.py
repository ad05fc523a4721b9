"""What a `generate` call leaves with the target's cache for the next turn: the drafter's context, and unseen
padding."""

from __future__ import annotations

import copy
import weakref
from typing import Any

from transformers.cache_utils import Cache

_CONTEXT, _PADDING = "_hyperdflash_context", "_hyperdflash_padding"
TORN = "_hyperdflash_torn"  # set on a cache of which some layers may hold what others do not


class LeftContext:
    """A drafter's context that stays with the target's cache between turns. Copies of the cache get a copy of it.

    Args:
        drafter: Whose context it is. Another's would be read as if it were one's own, so it is told apart by the
            object itself: an `id` comes back once its owner is gone.
        context: The context.
    """

    def __init__(self, drafter: Any, context: Any) -> None:
        self._drafter, self.context = weakref.ref(drafter), context

    def is_of(self, drafter: Any) -> bool:
        """Whether `drafter` made the context."""
        return self._drafter() is drafter

    def __deepcopy__(self, memo: dict[int, Any]) -> LeftContext:
        again = object.__new__(LeftContext)
        again._drafter, again.context = self._drafter, copy.deepcopy(self.context, memo)
        return again

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # pickled with a cache it is no context: elsewhere there is no such drafter


def context_of(cache: Cache, drafter: Any) -> Any:
    """The context that an earlier turn left with this cache, if it still belongs to it; else an empty one."""
    left: LeftContext | None = getattr(cache, _CONTEXT, None)
    if left is None or not left.is_of(drafter) or left.context.end != cache.get_seq_length():
        return drafter.new_context()
    return left.context


def leave_context(cache: Any, drafter: Any, context: Any) -> None:
    """Let the next turn go on with `context`."""
    setattr(cache, _CONTEXT, LeftContext(drafter, context))


def padding_of(cache: Any, mask: Any) -> int:
    """Columns on the left of a prompt that a target which is to see no padding never saw, or will not.

    Args:
        cache: Its cache; an empty one remembers them.
        mask: `[1, seq]`, the caller's; `None` if there is no padding.
    """
    if mask is not None and mask.ndim == 2 and cache.get_seq_length() == 0:
        setattr(cache, _PADDING, int(mask[0].long().argmax()))
    return getattr(cache, _PADDING, 0)
