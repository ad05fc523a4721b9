"""Keys and values of the entries of accepted tokens, in one buffer for all sequences that draft together."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedConfig

from ...trees.padding import Padding
from .layers import ContextLayer, KeysValues


class EntryContext:
    """What is known of one sequence: its entries' keys and values, and the state from which the next round drafts.

    Attributes:
        end: The number of tokens of the sequence that were added.
        length: Keys of a layer.
        states: Of the last entry, `[1, config.block_size, config.hidden_size]`; `None` before the first.
        position: Its true position, `[1, 1]`.
        pending: Residual, positions and following tokens of accepted tokens, whose entries the next round adds.
        buffer: Keys and values of every layer, `[batch, kv_heads, capacity, head_dim]` each, of which the sequence has
            one row.
        row: Its number.
    """

    def __init__(self) -> None:
        self.end = self.length = self.row = 0
        self.states: torch.Tensor | None = None
        self.position: torch.Tensor | None = None
        self.pending: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
        self.buffer: list[KeysValues] = []

    def __len__(self) -> int:
        """Return the number of keys of a layer that the next block sees."""
        return self.length

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to draft from."""
        return self.states is None and self.pending is None

    @property
    def new_count(self) -> int:
        """The number of pending tokens."""
        return 0 if self.pending is None else self.pending[1].shape[1]

    @property
    def layers(self) -> list[KeysValues]:
        """Keys and values of every layer, views of `[1, kv_heads, length, head_dim]`."""
        own = slice(self.row, self.row + 1), slice(None), slice(self.length)
        return [(keys[own], values[own]) for keys, values in self.buffer]


class EntryBatch:
    """The contexts of sequences that draft together, in one buffer. They stay in it until others draft together, so
    that a round copies nothing.

    Args:
        contexts: One for each sequence.

    Attributes:
        lengths: Of each.
        longest: The length of the longest.
        is_even: Whether all are as long.
    """

    def __init__(self, contexts: Sequence[EntryContext]) -> None:
        self.contexts, self.lengths = contexts, [context.length for context in contexts]
        self.longest, self.is_even = max(self.lengths), min(self.lengths) == max(self.lengths)

    def make_room(self, columns: int, like: torch.Tensor, config: PreTrainedConfig) -> None:
        """Make room for keys in so many columns; `like` gives dtype and device."""
        buffer, first = self.contexts[0].buffer, self.contexts[0].row
        are_in_place = bool(buffer) and self._are_rows_of(buffer, first)
        if not are_in_place or buffer[0][0].shape[2] < columns:
            buffer, first = self._new_buffer(columns, like, config), 0
            for row, context in enumerate(self.contexts):
                for parts, old in zip(buffer, context.buffer):
                    for part, states in zip(parts, old):
                        stop = states.shape[2] if are_in_place else context.length  # of this round, too, or not
                        part[row, :, :stop] = states[context.row, :, :stop]
                context.buffer, context.row = buffer, row
        rows = slice(first, first + len(self.contexts))
        self._buffer = [(keys[rows], values[rows]) for keys, values in buffer]

    def _are_rows_of(self, buffer: list[KeysValues], first: int) -> bool:
        """Return whether the sequences have neighbouring rows of a buffer, in their order."""
        return all(context.buffer is buffer and context.row == first + i for i, context in enumerate(self.contexts))

    def _new_buffer(self, columns: int, like: torch.Tensor, config: PreTrainedConfig) -> list[KeysValues]:
        shape = len(self.contexts), config.num_key_value_heads, 2 * columns + 64, config.head_dim
        # Of zeros, as attention multiplies what it does not see by 0.
        return [(like.new_zeros(shape), like.new_zeros(shape)) for _ in range(config.num_hidden_layers)]

    def causal_mask(self, padding: Padding) -> torch.Tensor | None:
        """Return the mask by which new keys' slots see their own sequence up to themselves, boolean `[batch, 1,
        padding.width, keys]`; `None` for one slot that sees everything."""
        device = self._device
        if self.is_even and padding.width == min(padding.counts) == 1:
            return None
        # The column of a sequence's last slot; before a sequence's first slot there is nothing to be seen.
        last = torch.tensor([length + count - 1 for length, count in zip(self.lengths, padding.counts)], device=device)
        of_slots = (last[:, None] - torch.arange(padding.width - 1, -1, -1, device=device)).clamp(min=0)
        columns = torch.arange(self._stop(padding), device=device)
        return (columns <= of_slots[..., None])[:, None]

    @property
    def _device(self) -> torch.device:
        return self._buffer[0][0].device

    def _stop(self, padding: Padding) -> int:
        return max(length + count for length, count in zip(self.lengths, padding.counts))

    def at_ends(self, padding: Padding) -> list[ContextLayer]:
        """Return, for each layer, a function that writes new keys and values `[batch, kv_heads, padding.width,
        head_dim]` behind each sequence's own, and returns all."""
        stop = self._stop(padding)
        if self.is_even and min(padding.counts) == padding.width:
            return self.at(self.longest, padding.width)
        rows = [row for row, count in enumerate(padding.counts) for _ in range(count)]
        new = [length + i for length, count in zip(self.lengths, padding.counts) for i in range(count)]
        index = torch.tensor([rows, new, padding.columns], device=self._device)
        rows_at, columns, sources = index.unbind()

        def layer(own: KeysValues) -> ContextLayer:
            def update(keys: torch.Tensor, values: torch.Tensor) -> KeysValues:
                for part, states in zip(own, (keys, values)):
                    part[rows_at, :, columns] = states[rows_at, :, sources]
                return own[0][:, :, :stop], own[1][:, :, :stop]

            return update

        return [layer(own) for own in self._buffer]

    def at(self, column: int, count: int) -> list[ContextLayer]:
        """Return, for each layer, a function that writes `count` new keys and values of each sequence from a column
        on, and returns all up to there."""
        stop = column + count

        def layer(own: KeysValues) -> ContextLayer:
            def update(keys: torch.Tensor, values: torch.Tensor) -> KeysValues:
                own[0][:, :, column:stop], own[1][:, :, column:stop] = keys, values
                return own[0][:, :, :stop], own[1][:, :, :stop]

            return update

        return [layer(own) for own in self._buffer]
