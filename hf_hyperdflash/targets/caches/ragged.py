"""One cache for several texts of different length, so that one forward of the target serves all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from transformers.cache_utils import Cache, DynamicLayer


class RaggedLayer(DynamicLayer):
    """Keys and values of several sequences, each of which begins in the first column.

    A forward writes behind the longest sequence. [`accept`] then moves what stays of it to the end of each own
    sequence, so that rejected drafts leave no gap between the tokens of a text. The mask hides the columns behind a
    sequence's end. Keys and values lie in buffers that grow by doubling. A sliding window's keys stay from the end of
    the prompt on; the mask hides those that have left the window.

    Args:
        layer: The layer of all sequences after their prompts, which are padded on the left.
        lengths: Tokens of each sequence's prompt.

    Attributes:
        sliding_window: That of the layer, `None` for full attention.
        lengths: How many tokens there are of each sequence, the last ones of its text.
    """

    _layer_type = None  # else it would be registered for all of transformers

    def __init__(self, layer: DynamicLayer, lengths: Sequence[int]) -> None:
        super().__init__()
        keys, values = cast(torch.Tensor, layer.keys), cast(torch.Tensor, layer.values)
        self.sliding_window: int | None = getattr(layer, "sliding_window", None)
        self.lengths = [min(length, keys.shape[2]) for length in lengths]
        self._buffers = [_without_padding(states, self.lengths) for states in (keys, values)]
        self.dtype, self.device = self._buffers[0].dtype, self._buffers[0].device
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the keys and values of a forward, `[batch, heads, positions, head_dim]`, and return all there are."""
        start, stop = self.get_seq_length(), self.get_seq_length() + key_states.shape[2]
        for index, (buffer, states) in enumerate(zip(self._buffers, (key_states, value_states))):
            if stop > buffer.shape[2]:
                buffer = self._buffers[index] = torch.nn.functional.pad(buffer, (0, 0, 0, stop))
            buffer[:, :, start:stop] = states
        keys, values = self._buffers
        return keys[:, :, :stop], values[:, :, :stop]

    def get_seq_length(self) -> int:
        """Return the number of columns: tokens of the longest sequence."""
        return max(self.lengths)

    def accept(self, accepted: Sequence[Sequence[int]]) -> None:
        """Keep the positions `accepted` of the last forward, for each sequence its own, and no others."""
        start = self.get_seq_length()
        moves = [
            (index, start + position, length + offset)
            for index, (length, positions) in enumerate(zip(self.lengths, accepted))
            for offset, position in enumerate(positions)
            if start + position != length + offset
        ]
        if moves:
            sequences, old, new = torch.tensor(moves, device=self._buffers[0].device).unbind(1)
            for buffer in self._buffers:
                buffer[sequences, :, new] = buffer[sequences, :, old]
        self.lengths = [length + len(positions) for length, positions in zip(self.lengths, accepted)]

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep only the sequences `indices`."""
        self.lengths = [self.lengths[index] for index in indices.tolist()]
        self._buffers = [buffer[indices.to(buffer.device)] for buffer in self._buffers]


def _without_padding(states: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """Move the last columns of each sequence, as many as it has tokens, to its beginning."""
    moved = states.clone()
    for index, length in enumerate(lengths):
        moved[index, :, :length] = states[index, :, states.shape[2] - length :]
    return moved


class RaggedCache(Cache):
    """The cache of several sequences, each as long as its own text.

    Args:
        cache: A cache of plain attention layers after the sequences' prompts, which are padded on the left. It must
            not be used afterwards.
        lengths: Tokens of each sequence's prompt.
    """

    layers: list[RaggedLayer]  # type: ignore[assignment]

    def __init__(self, cache: Cache, lengths: Sequence[int]) -> None:
        super().__init__(layers=[RaggedLayer(cast(DynamicLayer, layer), lengths) for layer in cache.layers])

    def accept(self, accepted: Sequence[Sequence[int]]) -> None:
        """Keep the positions `accepted` of the last forward, for each sequence its own, in all layers."""
        for layer in self.layers:
            layer.accept(accepted)
