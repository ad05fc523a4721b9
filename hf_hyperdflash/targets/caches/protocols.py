"""What targets and the loop ask of a cache, of transformers' own and of remote code's; and whether it is whole."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from typing import Protocol

import torch

# The attribute of a cache that counts the forwards which began to fill it and did not end. Unless it is 0, the parts
# of the cache may hold different tokens. Most parts count their tokens, but a running state does not.
OPEN_FORWARDS = "_hyperdflash_torn"


class RewindableLayer(Protocol):
    """A cache layer from which the last tokens can be removed."""

    keys: torch.Tensor | None
    values: torch.Tensor | None

    def get_seq_length(self) -> int: ...
    def get_mask_sizes(self, query_length: int) -> tuple[int, int]: ...
    def crop(self, tokens_to_remove: int) -> None: ...


class RewindableCache(Protocol):
    """A cache from which the last tokens can be removed: `crop(-n)` removes n."""

    @property
    def layers(self) -> Sequence[RewindableLayer]: ...
    def get_seq_length(self) -> int: ...
    def activate_past_recording(self) -> None: ...
    def crop(self, tokens_to_remove: int) -> None: ...
    def batch_repeat_interleave(self, repeats: int) -> None: ...
    def batch_select_indices(self, indices: torch.Tensor) -> None: ...


def is_between_writes(cache: object, error: BaseException) -> bool:
    """Return whether an exception was raised outside the methods of a cache's layers, so that each layer holds either
    nothing or all of the forward that was interrupted."""
    layers = {id(layer) for layer in getattr(cache, "layers", ())}
    inside = (id(frame.f_locals.get("self")) for frame, _ in traceback.walk_tb(error.__traceback__))
    return bool(layers) and layers.isdisjoint(inside)
