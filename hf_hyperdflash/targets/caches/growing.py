"""States in buffers with room for more tokens, where stock cache layers copy all of a text for each forward: keys of
full attention in rounds over transformers' own cache, and DeepSeek-V4's compressed entries."""

from __future__ import annotations

from typing import cast

import torch
from transformers.cache_utils import DynamicIndexedLayer, DynamicLayer

_SPARE, _SPARE_SHARE = 64, 16  # tokens that a buffer has more than it needs, or a part of those that it has
_KEYS = "keys", "values"


class Buffers(dict[str, torch.Tensor]):
    """Buffers of states `[rows, ..., tokens, features]` by name. The states of a text are the beginning of its buffer,
    and new ones are written behind them, over those that were taken back.

    Where the paths of a draft tree are copies of a sequence, each is a row. What all rows have in common stays in them
    from round to round.
    """

    def __init__(self) -> None:
        super().__init__()
        self._common: dict[str, int] = {}  # how many tokens all rows of a buffer have in common

    def append(self, name: str, states: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """Return states with new ones behind them. Its first tokens are those states, in the buffer."""
        rows, count, total = len(states), states.shape[-2], states.shape[-2] + new.shape[-2]
        if not self._has(name, states) or total > self[name].shape[-2]:
            self._make(name, states, total)
        self._common[name] = min(self._common.get(name, count), count)
        self[name][:rows, ..., count:total, :] = new
        return self[name][:rows, ..., :total, :]

    def repeat(self, name: str, states: torch.Tensor, repeats: int) -> torch.Tensor:
        """Return the states of each row several times."""
        if len(states) > 1:
            return states.repeat_interleave(repeats, dim=0)
        count = states.shape[-2]
        if not self._has(name, states) or repeats > len(self[name]):
            self._make(name, states.expand(repeats, *states.shape[1:]), count)
        else:
            new = slice(min(self._common[name], count), count)
            self[name][1:, ..., new, :] = states[..., new, :]
        self._common[name] = count
        return self[name][:repeats, ..., :count, :]

    def select(self, name: str, states: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        """Return the states of some rows; a single one is the first row from now on."""
        if len(indices) > 1 or not self._has(name, states):
            return states[indices, ...]
        new, row = slice(self._common[name], None), int(indices)
        if row:
            states[0, ..., new, :] = states[row, ..., new, :]
        return states[:1]

    def _has(self, name: str, states: torch.Tensor) -> bool:
        """Return whether states are the beginning of their buffer."""
        buffer = self.get(name)
        return buffer is not None and states.data_ptr() == buffer.data_ptr() and len(states) <= len(buffer)

    def _make(self, name: str, states: torch.Tensor, count: int) -> None:
        if len(states) == 1 and name in self:  # paths will come again
            states = states.expand(len(self[name]), *states.shape[1:])
            self._common[name] = states.shape[-2]
        more = count - states.shape[-2] + max(_SPARE, count // _SPARE_SHARE)
        self[name] = torch.nn.functional.pad(states, (0, 0, 0, more))


class GrowingLayer(DynamicLayer):
    """A layer of full attention whose keys lie in buffers during rounds, from [`let_keys_grow`] to `stop_recording`.
    Else it is as the stock layer."""

    _layer_type = None  # else it would be registered for all of transformers

    buffers: Buffers | None = None

    def stop_recording(self) -> None:
        """Be a stock layer again, without what was of draft trees alone."""
        for name, buffer in (self.buffers or {}).items():
            if len(buffer) > len(states := getattr(self, name)):
                setattr(self, name, states.clone())
        vars(self).pop("buffers", None)
        self.__class__ = _STOCK.get(type(self), type(self))  # type: ignore[assignment]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append keys and values as the stock layer does."""
        if self.buffers is None or torch.compiler.is_compiling() or not self.get_seq_length():
            return super().update(key_states, value_states, *args, **kwargs)
        # One after the other: no more than one of them is in memory twice.
        self.keys = self.buffers.append("keys", cast(torch.Tensor, self.keys), key_states)
        self.values = self.buffers.append("values", cast(torch.Tensor, self.values), value_states)
        return self.keys, self.values

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sequence of the batch."""
        if self.buffers is None or not self.get_seq_length():
            return super().batch_repeat_interleave(repeats)
        for name in _KEYS:
            setattr(self, name, self.buffers.repeat(name, getattr(self, name), repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep only the sequences `indices` of the batch."""
        if self.buffers is None or not self.get_seq_length():
            return super().batch_select_indices(indices)
        for name in _KEYS:
            setattr(self, name, self.buffers.select(name, getattr(self, name), indices))


class GrowingIndexedLayer(DynamicIndexedLayer, GrowingLayer):
    """As [`GrowingLayer`], for a layer with an indexer, whose keys are `[batch, seq, index_head_dim]`."""

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        """Append an indexer's keys as the stock layer does."""
        known = self.indexer_keys
        if self.buffers is None or torch.compiler.is_compiling() or known is None or not known.numel():
            return super().update_indexer(indexer_key_states)
        self.indexer_keys = self.buffers.append("indexer_keys", known, indexer_key_states)
        return self.indexer_keys

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sequence of the batch."""
        buffers, known = self.buffers, self.indexer_keys
        if buffers is None or known is None:
            return super().batch_repeat_interleave(repeats)
        self.indexer_keys = known[:, :0]  # so that they are not copied
        super().batch_repeat_interleave(repeats)
        self.indexer_keys = buffers.repeat("indexer_keys", known, repeats)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep only the sequences `indices` of the batch."""
        buffers, known = self.buffers, self.indexer_keys
        if buffers is None or known is None:
            return super().batch_select_indices(indices)
        self.indexer_keys = known[:, :0]
        super().batch_select_indices(indices)
        self.indexer_keys = buffers.select("indexer_keys", known, indices)


_GROWING: dict[type, type] = {DynamicLayer: GrowingLayer, DynamicIndexedLayer: GrowingIndexedLayer}
_STOCK = {growing: stock for stock, growing in _GROWING.items()}


def let_keys_grow(cache: object) -> None:
    """Let the layers of full attention of a cache, in place, have buffers until recording stops. A cache that is
    offloaded layer by layer stays as it is."""
    for layer in () if getattr(cache, "offloading", False) else getattr(cache, "layers", ()):
        layer.__class__ = _GROWING.get(type(layer), type(layer))
        if isinstance(layer, GrowingLayer):
            layer.buffers = Buffers()
