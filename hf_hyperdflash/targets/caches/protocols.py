"""What targets and the loop ask of a cache: of transformers' own and of remote code's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch


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
