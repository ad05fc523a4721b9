"""Puts what several texts have, some more and some less of it, into one tensor."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch


class Padding:
    """Fills up on the left what texts have less of than the one with most, or than `width`; each has `counts`."""

    def __init__(self, counts: Sequence[int], device: torch.device, width: int | None = None) -> None:
        self.counts, self.device, self.width = counts, device, width or max(counts)
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
    def columns(self) -> torch.Tensor:
        """The column of each in its text's row, in the order of `flat`, `[total]`."""
        return self.remove(torch.arange(self.width, device=self.device).expand(len(self.counts), -1))

    @cached_property
    def _index(self) -> torch.Tensor:
        ends = ((row + 1) * self.width for row in range(len(self.counts)))
        places = [place for end, count in zip(ends, self.counts) for place in range(end - count, end)]
        return torch.tensor(places, dtype=torch.long, device=self.device)
