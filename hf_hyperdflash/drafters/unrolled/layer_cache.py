"""Lets a decoder layer of transformers attend over what a drafter of entries keeps."""

from __future__ import annotations

import torch

from ..parts.layers import ContextLayer


class LayerCache:
    """Takes the place of a cache of transformers in a layer's attention.

    Args:
        known: Adds keys and values to those before.
        first: How many of a text's first entries do not count, of which each token sees its own.
        window: How many tokens a token sees, itself included; `None` for all.
    """

    def __init__(self, known: ContextLayer, first: int, window: int | None) -> None:
        self._known, self._first, self._window, self._sees_all = known, first, window, True

    def visible(self, mask: torch.Tensor) -> torch.Tensor:
        """Return which keys are seen of those that a mask has. Those of one path are in the order of the text."""
        self._sees_all = False
        if not self._first and self._window is None:
            return mask
        rank = mask.long().cumsum(-1)
        total = rank[..., -1:]
        seen = rank > (total - 1).clamp(max=self._first)
        return mask & (seen if self._window is None else seen & (total - rank < self._window))

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append keys and values, and return those that are seen."""
        keys, values = self._known(key_states, value_states)
        if not self._sees_all:
            return keys, values
        count = keys.shape[2]
        first = max(min(self._first, count - 1), 0 if self._window is None else count - self._window)
        return keys[:, :, first:], values[:, :, first:]
