"""Puts what several texts have, some more and some less of it, into one tensor."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch


class Padding:
    """Fills up on the left what texts have less of than the one with most, of which each has `counts`."""

    def __init__(self, counts: Sequence[int], device: torch.device) -> None:
        self.counts, self.device, self.width = counts, device, max(counts)  # width: the most of a text
        self._is_even = min(counts) == self.width

    def add(self, flat: torch.Tensor, fill: float = 0) -> torch.Tensor:
        """Return `[batch, width, ...]`, filled up, from `[total, ...]`, those of the texts in their order."""
        if not self._is_even:
            flat = flat.new_full((len(self.counts) * self.width, *flat.shape[1:]), fill).index_copy(
                0, self._index, flat
            )
        return flat.unflatten(0, (len(self.counts), self.width))

    def remove(self, padded: torch.Tensor) -> torch.Tensor:
        """Return `[total, ...]` from `[batch, width, ...]`."""
        flat = padded.flatten(0, 1)
        return flat if self._is_even else flat[self._index]

    @property
    def numbers(self) -> torch.Tensor:
        """The place of each in the order of `flat`, `[batch, width]`."""
        return self.add(torch.arange(sum(self.counts), device=self.device))

    @property
    def columns(self) -> list[int]:
        """The column of each in its text's row, in the order of `flat`."""
        return [column for count in self.counts for column in range(self.width - count, self.width)]

    @cached_property
    def _index(self) -> torch.Tensor:
        rows = (row for row, count in enumerate(self.counts) for _ in range(count))
        places = [row * self.width + column for row, column in zip(rows, self.columns)]
        return torch.tensor(places, dtype=torch.long, device=self.device)
