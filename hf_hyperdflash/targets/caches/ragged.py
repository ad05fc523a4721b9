"""One cache for several texts of different length, so that one forward of the target serves all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicLayer


class RaggedLayer(DynamicLayer):
    """Keys and values of several rows, each of which begins in the first column.

    A forward writes behind the longest row, and what stays of it is moved to the end of its own row: so nothing of
    rejected drafts is left between the tokens of a text, and columns behind a row's end are hidden by the mask. In
    buffers that grow by doubling. A sliding window's keys are kept from the end of the prompt on; the mask hides those
    that have left the window.

    Args:
        layer: Of all rows, as their prompts left it, padded on the left.
        lengths: Tokens of each row's prompt.

    Attributes:
        sliding_window: As of the layer, `None` for full attention.
        held: Tokens of each row, the last ones of its text.
    """

    _layer_type = None  # else it would be registered for all of transformers

    def __init__(self, layer: Any, lengths: Sequence[int]) -> None:
        super().__init__()
        self.sliding_window: int | None = getattr(layer, "sliding_window", None)
        self.held = [min(length, layer.keys.shape[2]) for length in lengths]
        self._buffers = [_without_padding(states, self.held) for states in (layer.keys, layer.values)]
        self.dtype, self.device = self._buffers[0].dtype, self._buffers[0].device
        self.is_initialized = True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Write the keys and values of a forward, `[batch, heads, rows, head_dim]`, and return all there are."""
        start, stop = self.get_seq_length(), self.get_seq_length() + key_states.shape[2]
        for index, (buffer, states) in enumerate(zip(self._buffers, (key_states, value_states))):
            if stop > buffer.shape[2]:
                buffer = self._buffers[index] = torch.nn.functional.pad(buffer, (0, 0, 0, stop))
            buffer[:, :, start:stop] = states
        return tuple(buffer[:, :, :stop] for buffer in self._buffers)

    def get_seq_length(self) -> int:
        """Columns: tokens of the longest row."""
        return max(self.held)

    def keep(self, kept: Sequence[Sequence[int]]) -> None:
        """Leave of the last forward the positions `kept` of each row."""
        start = self.get_seq_length()
        moves = [
            (row, start + position, held + place)
            for row, (held, positions) in enumerate(zip(self.held, kept))
            for place, position in enumerate(positions)
            if start + position != held + place
        ]
        if moves:
            rows, old, new = torch.tensor(moves, device=self._buffers[0].device).unbind(1)
            for buffer in self._buffers:
                buffer[rows, :, new] = buffer[rows, :, old]
        self.held = [held + len(positions) for held, positions in zip(self.held, kept)]

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Go on with the rows `indices` alone."""
        self.held = [self.held[row] for row in indices.tolist()]
        self._buffers = [buffer[indices.to(buffer.device)] for buffer in self._buffers]


def _without_padding(states: torch.Tensor, held: Sequence[int]) -> torch.Tensor:
    """Each row's last columns, so many as it holds, moved to its beginning."""
    moved = states.clone()
    for row, count in enumerate(held):
        moved[row, :, :count] = states[row, :, states.shape[2] - count :]
    return moved


class RaggedCache(Cache):
    """The cache of several rows, each as long as its own text.

    Args:
        cache: Of plain attention layers, as the rows' prompts left it, padded on the left; not to be used afterwards.
        lengths: Tokens of each row's prompt.
    """

    layers: list[RaggedLayer]  # type: ignore[assignment]

    def __init__(self, cache: Cache, lengths: Sequence[int]) -> None:
        super().__init__(layers=[RaggedLayer(layer, lengths) for layer in cache.layers])

    def keep(self, kept: Sequence[Sequence[int]]) -> None:
        """Leave of the last forward the positions `kept` of each row, in all layers."""
        for layer in self.layers:
            layer.keep(kept)


class CachedRow:
    """What of a [`RaggedCache`] belongs to one row, as the loop over a single text knows its cache.

    Args:
        place: Of the row in the batch.
        length: Tokens in the cache.

    Attributes:
        kept: Positions of the last forward that stay.
    """

    def __init__(self, place: int, length: int) -> None:
        self.place, self.length = place, length
        self.kept: list[int] = []

    def get_seq_length(self) -> int:
        """Tokens in the cache."""
        return self.length

    def keep(self, kept: list[int]) -> None:
        """Leave of the last forward the positions `kept`."""
        self.kept, self.length = kept, self.length + len(kept)
