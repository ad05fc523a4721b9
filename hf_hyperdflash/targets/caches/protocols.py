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
    def crop(self, tokens_to_remove: int) -> None: ...


class RewindableCache(Protocol):
    """A cache from which the last tokens can be removed: `crop(-n)` removes n."""

    @property
    def layers(self) -> Sequence[RewindableLayer]: ...
    def crop(self, tokens_to_remove: int) -> None: ...
