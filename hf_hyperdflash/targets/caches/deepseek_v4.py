"""Cache layers for DeepSeek-V4's attention that can be cropped after the target has verified a draft.

The stock compressed layers keep a running compressor state (open window, compressed entries, overlap between windows)
that their `crop` does not touch, so a rejected draft stays in it; the stock sliding layer loses keys when it is
cropped twice in a row. The layers here also keep, while recording is on, what has left that state recently: keys
behind the sliding window, and the projections and overlaps of closed windows. `crop` cuts the end off each of them.

Beside `crop` there are `begin_tree` and `accept`, by which a layer stays as it was until a tree's path is chosen.
Neither can do the other's work: a crop takes back any number of forwards that nobody announced, those of a DeepSeek-V4
that drafts as stock transformers' assistant for example, and no crop can leave one of several paths.

How far back a crop can go depends on the tokens alone, not on the kind of layer or its windows: `max_rewind` tokens
from the longest sequence seen, and never past what came before recording. So all layers of a cache refuse the same
crops, the first one included, and a refused `Cache.crop` leaves all of them as they were.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.nn.functional import pad
from transformers.cache_utils import Cache, DynamicSlidingWindowLayer
from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4CSACache, DeepseekV4HCACache

from ...trees.tree import TreeLayout
from .growing import Buffers
from .tree_state import Parts, TreeState

DEFAULT_MAX_REWIND = 128
Kind = TypeVar("Kind", bound="RewindableSlidingCacheLayer")
States = dict[str, Any]  # a compressor's tensor by its name; `None` until there is one


def _compact(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a small view of a large storage, so that the view does not keep all of it alive."""
    if torch.compiler.is_compiling():  # which knows no storages
        return tensor.clone()
    is_compact = tensor.untyped_storage().nbytes() <= 2 * tensor.nbytes
    return tensor if is_compact else tensor.clone()


def _last(keys: torch.Tensor, count: int) -> torch.Tensor:
    """Return the last `count` positions of `keys`, `[batch, 1, positions, head_dim]`, or all if there are fewer."""
    return keys[:, :, max(keys.shape[-2] - count, 0) :]


def _checked_max_rewind(max_rewind: int) -> int:
    if isinstance(max_rewind, bool) or not isinstance(max_rewind, int) or max_rewind < 1:
        raise ValueError(
            f"`max_rewind` is {max_rewind!r}, expected an integer of at least 1: the number of tokens that a crop can "
            "undo. Pass at least the drafter's block size."
        )
    return max_rewind


class RewindableSlidingCacheLayer(DynamicSlidingWindowLayer):
    """Cache layer of a V4 sliding-window block that can be cropped any number of times, in step with the others.

    After `crop(-n)` the layer equals, bit for bit, one that never saw the last `n` tokens. While recording is on, it
    keeps at most twice `sliding_window + max_rewind` keys, however many forwards pass without a crop; with recording
    off, half of what the stock layer keeps, since keys and values are one tensor
    `[batch, 1, positions, config.head_dim]`.

    Args:
        sliding_window: `config.sliding_window`.
        max_rewind: How many tokens a crop can undo while recording is on. At least 1.
    """

    # A subclass that names a layer type replaces the stock class in every cache of the process.
    _layer_type: Any = None

    # None until the first forward; the methods below use them only after it.
    keys: torch.Tensor
    values: torch.Tensor
    tree_state: TreeState | None = None  # while a draft tree is verified

    def __init__(self, sliding_window: int, max_rewind: int = DEFAULT_MAX_REWIND, **kwargs: Any) -> None:
        super().__init__(sliding_window, **kwargs)
        self._start_recording(max_rewind)

    @classmethod
    def from_stock(cls: type[Kind], layer: DynamicSlidingWindowLayer, max_rewind: int = DEFAULT_MAX_REWIND) -> Kind:
        """Build a rewindable layer that continues from the state of a stock one, which must not be used afterwards;
        what led to that state is not recorded. Raise a `ValueError` if the stock `crop` lost keys, or left the removed
        tokens in a compressor."""
        rewindable = cls.__new__(cls)
        vars(rewindable).update(vars(layer))
        rewindable._take_over_keys()
        rewindable._start_recording(max_rewind)
        return rewindable

    def _take_over_keys(self) -> None:
        """Keep the stock layer's keys of the window. Its values are equal to them but another tensor."""
        if not self.is_initialized:
            return
        needed = min(self.cumulative_length, self.sliding_window - 1)
        if needed > 0 and self.keys.shape[-2] < needed:
            raise ValueError(
                f"The cache layer has seen {self.cumulative_length} tokens, but holds keys of the last "
                f"{self.keys.shape[-2]} only, expected {needed}: the stock `crop` lost the others. Start from a new "
                "cache, or call `make_rewindable` before the first crop."
            )
        if self.keys.dim() == 4:  # not yet so in a layer that was initialized early
            self.keys = _last(self.keys, needed)
        self.values = self.keys

    def _start_recording(self, max_rewind: int) -> None:
        self.max_rewind = _checked_max_rewind(max_rewind)
        # The keys, and while recording older ones, too; `keys` are its last `sliding_window - 1` positions.
        self._recorded_keys: Any = self.keys
        self._forget_past()

    def _forget_past(self) -> None:
        # The shortest length that a crop can go back to. The same in all layers of a cache: see the module's
        # docstring.
        self._shortest_length = self.cumulative_length

    def activate_past_recording(self) -> None:
        """Start recording. The keys that stay of a long prompt are copied, so that the rest of it is freed."""
        super().activate_past_recording()
        if self.cumulative_length:
            self._rewind(self.cumulative_length)

    # Growing

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append the new keys `[batch, 1, seq, config.head_dim]`, which are also the values, and return twice those
        that the new queries can see, `[batch, 1, min(length, sliding_window - 1) + seq, config.head_dim]`, with
        `length` the tokens before, as `get_mask_sizes` announces."""
        if value_states is not key_states:
            raise ValueError(
                f"`update` got values of shape {tuple(value_states.shape)} that are not the keys, expected the same "
                "tensor twice: V4 has one projection for both. Use a rewindable layer with DeepSeek-V4 only."
            )
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self._recorded_keys is None:
            self._recorded_keys = self.keys
        full = torch.cat([self._recorded_keys if self.record_past else self.keys, key_states], dim=-2)
        visible = _last(full, self.sliding_window - 1 + key_states.shape[-2])
        if self.tree_state is not None:
            self.tree_state.keys = key_states
            return visible, visible
        self.cumulative_length += key_states.shape[-2]
        if self.record_past:
            self._shortest_length = max(self._shortest_length, self.cumulative_length - self.max_rewind)
        else:
            self._forget_past()
        self._set_recorded_keys(_last(full, self.sliding_window - 1 + (self.max_rewind if self.record_past else 0)))
        return visible, visible

    def _set_recorded_keys(self, keys: torch.Tensor) -> None:
        self._recorded_keys = _compact(keys)
        self.keys = self.values = _last(self._recorded_keys, self.sliding_window - 1)

    # Draft trees

    @property
    def can_verify_trees(self) -> bool:
        """Whether the layer still has everything that the windows of a draft tree consist of."""
        return True

    def begin_tree(self, layout: TreeLayout) -> None:
        """Make the next forward one over a draft tree. It changes the layer only when [`accept`] is called."""
        self.tree_state = TreeState(layout)

    def keep(self, accepted: list[int]) -> None:
        """End a draft tree: append the verification positions `accepted`, a path from the anchor on, as if they had
        come alone. An empty list appends nothing."""
        state, self.tree_state = self.tree_state, None
        if state is not None and accepted:
            self._append(state, accepted)

    def _append(self, state: TreeState, accepted: list[int]) -> None:
        keys = state.select(state.keys, accepted, dim=2)
        self.update(keys, keys)

    # Rewinding

    @property
    def undoable_tokens(self) -> int:
        """The number of the last tokens that `crop` can undo now: the same in every layer of a cache."""
        return self.cumulative_length - self._shortest_length

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` tokens: the state becomes that of a layer that never saw them. A refused
        crop leaves the layer as it was."""
        count, length, undoable = -int(tokens_to_remove), self.cumulative_length, self.undoable_tokens
        if count < 0:
            raise ValueError(
                f"`crop` was called with a positive value ({-count}), expected 0 or a negative one. Pass minus the "
                "number of tokens to remove."
            )
        if count > length:
            raise ValueError(
                f"`crop` was asked to remove {count} tokens, but the layer holds {length}. Remove at most {length}, "
                "or call `reset`."
            )
        if count > undoable:
            reason = (
                f"it records {self.max_rewind} tokens (`max_rewind`), starting when recording was switched on. Pass a "
                "larger `max_rewind` to `make_rewindable`, or switch recording on earlier."
                if self.record_past
                else "past recording is off. Call `activate_past_recording` before the tokens arrive."
            )
            raise RuntimeError(
                f"`crop` was asked to remove {count} tokens, but only the last {undoable} of the {length} in the "
                f"layer can be undone: {reason}"
            )
        if 0 < count < length:
            self._rewind(length - count)
        elif count:
            self.reset()

    def _rewind(self, length: int) -> None:
        kept = self._recorded_keys.shape[-2] - (self.cumulative_length - length)
        self.cumulative_length = length
        self._set_recorded_keys(self._recorded_keys[:, :, :kept])

    # The rest of the cache interface

    def reset(self) -> None:
        """Forget all tokens and records; recording stays on if it was."""
        # Not by way of `super()`: in transformers 5.17 that zeroes the keys and keeps them.
        self.keys = self.values = self._recorded_keys = None  # type: ignore[assignment]
        self.is_initialized = False
        self.cumulative_length = 0
        self._forget_past()

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Reorder the batch, records included, for beam search."""
        self._map_state(lambda state: state.index_select(0, beam_idx.to(state.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sequence of the batch, records included, `repeats` times."""
        self._map_state(lambda state: state.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep only the sequences `indices` of the batch, records included."""
        self._map_state(lambda state: state[indices, ...])

    def _map_state(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Apply `change` to every tensor of the layer, all of which have the batch as their first dimension."""
        if self.cumulative_length > 0:
            # Once for keys and values: the stock methods would split them into two tensors.
            self._set_recorded_keys(change(self._recorded_keys))

    def offload(self) -> None:
        """Move the keys to the CPU. The compressor works right after, in the same forward, so its state stays."""
        if self.is_initialized:
            self._set_recorded_keys(self._recorded_keys.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        """Move offloaded keys back to the layer's device ahead of time."""
        if self.is_initialized and self.keys.device != self.device:
            self._set_recorded_keys(self._recorded_keys.to(self.device, non_blocking=True))


class RewindableHCACacheLayer(RewindableSlidingCacheLayer, DeepseekV4HCACache):
    """Cache layer of a heavily-compressed attention block with a `crop` that also rewinds the compressor.

    After `crop(-n)` every tensor and counter equals, bit for bit, that of a layer that never saw the last `n` tokens.
    While recording is on (`activate_past_recording`), any number of forwards can be undone in any number of crops, up
    to `max_rewind` tokens back from the longest sequence seen; what came before recording was switched on stays
    (`undoable_tokens` says how far back a crop can go). With recording off, results and memory are those of the stock
    layer.

    Recording costs, however long the prompt, at most twice `sliding_window + max_rewind` keys and the raw projections
    of four times `max_rewind + compress_rate` tokens; about half of that in steady decoding.

    Keys and values are one tensor `[batch, 1, positions, config.head_dim]`, as in the stock layer; compressed entries
    are `[batch, entries, config.head_dim]` (`config.index_head_dim` for the indexer).

    Args:
        config: Config of the model, for the sliding window and the compression rate.
        max_rewind: How many tokens a crop can undo while recording is on. At least 1.
    """

    buffer_kv: States
    buffer_gate: States
    compressed_kv: States

    def __init__(self, config: DeepseekV4Config, max_rewind: int = DEFAULT_MAX_REWIND, **kwargs: Any) -> None:
        super(RewindableSlidingCacheLayer, self).__init__(config, **kwargs)  # the stock layer's
        self._start_recording(max_rewind)

    def _take_over_keys(self) -> None:
        super()._take_over_keys()
        for name, buffer in self.buffer_kv.items():
            compressed_tokens = self.entry_count[name] * self.compress_rate
            seen = compressed_tokens if buffer is None else compressed_tokens + buffer.shape[1]
            if buffer is not None and seen != self.cumulative_length:
                raise ValueError(
                    f"The cache layer holds keys of {self.cumulative_length} tokens, but its {name} has seen {seen}: "
                    "the stock `crop` removed tokens from the keys only, and the compressor still holds them. Start "
                    "from a new cache, or call `make_rewindable` before the first crop."
                )

    def _start_recording(self, max_rewind: int) -> None:
        # By compressor, the projections of the last closed windows, `[batch, windows * compress_rate, features]`, the
        # gate without the position bias.
        self._closed_kv: States = dict.fromkeys(self.entry_count)
        self._closed_gate: States = dict.fromkeys(self.entry_count)
        self._entry_buffers = Buffers()  # of `compressed_kv`
        super()._start_recording(max_rewind)

    def _forget_past(self) -> None:
        super()._forget_past()
        for states, size in self._past_windows():
            for name, known in states.items():
                if known is not None and known.shape[1] > self._windows_read * size:
                    states[name] = _compact(known[:, known.shape[1] - self._windows_read * size :])
        # By compressor, its state before the tokens whose entries are not there yet.
        self._unfinished: dict[str, tuple[list[torch.Tensor | None], int]] = {}

    def _past_windows(self) -> list[tuple[States, int]]:
        """Return what is kept of closed windows, each with how long it is of one window."""
        return [(self._closed_kv, self.compress_rate), (self._closed_gate, self.compress_rate)]

    def store_compression_weights(
        self, name: str, kv: torch.Tensor, gate: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, Any]:
        """Buffer the new projections, `[batch, seq, features]`, and return as the stock layer raw `kv` and `gate` of
        the windows that they close, `[batch, windows * compress_rate, features]`, and the position of the first
        one."""
        if self.tree_state is not None:
            open_window = self.buffer_kv[name], self.buffer_gate[name]
            before, entries = self._window_before(name, kv, gate), self.entry_count[name]
            return self.tree_state.close_windows(name, self.compress_rate, entries, before, open_window, (kv, gate))
        self._unfinished[name] = [state[name] for state in self._compressor_states()], self.entry_count[name]
        closed_kv, closed_gate, first_position = super().store_compression_weights(name, kv, gate)
        if closed_kv.shape[1]:
            for states, closed in ((self._closed_kv, closed_kv), (self._closed_gate, closed_gate)):
                states[name] = self._with_last_windows(states[name], closed, self.compress_rate)
            if self.record_past:
                self.buffer_kv[name] = _compact(self.buffer_kv[name])
                self.buffer_gate[name] = _compact(self.buffer_gate[name])
        return closed_kv, closed_gate, first_position

    _windows_read = 0  # how many earlier windows a window's entry also depends on

    def _with_last_windows(self, known: torch.Tensor | None, closed: torch.Tensor, size: int) -> torch.Tensor | None:
        """Return what is kept of closed windows with those that close now, in a storage of its own; each has `size`
        positions of the second dimension."""
        windows = self._windows_read + (-(-self.max_rewind // self.compress_rate) if self.record_past else 0)
        if windows == 0:
            return None
        closed = closed[:, max(closed.shape[1] - windows * size, 0) :]
        if known is None or closed.shape[1] == windows * size:
            return closed.clone()
        return _compact(torch.cat([known, closed], dim=1)[:, -windows * size :])

    def _window_before(
        self, name: str, kv: torch.Tensor, gate: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return the projections of the last closed window, where the next window's entry depends on them, too."""
        return None

    def update_compressor_states(self, name: str, compressed: torch.Tensor) -> torch.Tensor:
        """Append entries `[batch, windows, features]`, unless they are a draft tree's, and return all there are with
        them, `[batch, entries, features]`."""
        if self.tree_state is not None:
            return self._with_entries(name, self.tree_state.store_entries(name, compressed))
        if self.record_past and not torch.compiler.is_compiling():
            self.compressed_kv[name] = known = self._with_entries(name, compressed)
            self.entry_count[name] += compressed.shape[1]
        else:
            known = super().update_compressor_states(name, compressed)
            self._entry_buffers.pop(name, None)
        self._unfinished.pop(name, None)
        return known

    def _with_entries(self, name: str, new: torch.Tensor) -> torch.Tensor:
        """Return a compressor's entries with new ones behind them, in a buffer: the stock layer copies all that a text
        has for every new one."""
        known = self.compressed_kv[name]
        if known is None or not new.shape[1]:
            return new if known is None else known
        entries = self._entry_buffers.append(name, known, new)
        self.compressed_kv[name] = entries[:, : known.shape[1]]
        return entries

    def _append(self, state: TreeState, accepted: list[int]) -> None:
        super()._append(state, accepted)
        for name, (kv, gate) in state.projections.items():
            self.store_compression_weights(name, state.select(kv, accepted), state.select(gate, accepted))
            self._append_windows(state, name, state.windows_closed_by(name, accepted))

    def _append_windows(self, state: TreeState, name: str, windows: list[int]) -> None:
        self.update_compressor_states(name, state.select(state.entries[name], windows))

    def entries_in_round(self, name: str) -> int:
        """Return the number of entries that the last forward saw, those of a draft tree included."""
        return self.entry_count[name] + (0 if self.tree_state is None else self.tree_state.entries[name].shape[1])

    def entries_seen(self, name: str, position: int, count: int) -> torch.Tensor:
        """Return the indices of the entries that one verification position sees, of the `count` of the last
        forward."""
        if self.tree_state is not None:
            before = self.entry_count[name]
            own = self.tree_state.visible_entries(name)[position].nonzero()[:, 0]
            return torch.cat([torch.arange(before), before + own])
        return torch.arange((self.cumulative_length - (count - 1 - position)) // self.compress_rate)

    def abort_forward(self, start: int) -> None:
        """Undo a forward that was interrupted after `start` tokens, even between a window and its entry."""
        for name, (states, entries) in self._unfinished.items():
            for kind, state in zip(self._compressor_states(), states):
                kind[name] = state
            self.entry_count[name] = entries
        self._unfinished.clear()
        self.crop(min(0, start - self.cumulative_length))

    def _rewind(self, length: int) -> None:
        entries, open_tokens = divmod(length, self.compress_rate)
        for name, buffer in self.buffer_kv.items():
            if buffer is None:
                continue
            if reopened := self.entry_count[name] - entries:
                self._reopen_windows(name, reopened)
            self.buffer_kv[name] = _compact(self.buffer_kv[name][:, :open_tokens])
            self.buffer_gate[name] = _compact(self.buffer_gate[name][:, :open_tokens])
        super()._rewind(length)

    def _reopen_windows(self, name: str, count: int) -> None:
        """Take back the last closed windows; the first of them becomes the open one."""
        first = self._closed_kv[name].shape[1] - count * self.compress_rate
        for buffer, closed in ((self.buffer_kv, self._closed_kv), (self.buffer_gate, self._closed_gate)):
            buffer[name] = closed[name][:, first : first + self.compress_rate]
        for states, size in self._past_windows():
            states[name] = states[name][:, : states[name].shape[1] - count * size]
        self.entry_count[name] -= count
        self.compressed_kv[name] = self.compressed_kv[name][:, : self.entry_count[name]]

    def reset(self) -> None:
        """Forget all tokens and records; recording stays on if it was."""
        super().reset()
        self._entry_buffers.clear()
        for name in self.entry_count:
            self.entry_count[name] = 0
            for states in self._compressor_states():
                states[name] = None

    def _map_state(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super()._map_state(change)
        self._entry_buffers.clear()
        for states in self._compressor_states():
            for name, state in states.items():
                states[name] = None if state is None else change(state)

    def _compressor_states(self) -> list[States]:
        return [self.buffer_kv, self.buffer_gate, self.compressed_kv, self._closed_kv, self._closed_gate]


class RewindableCSACacheLayer(RewindableHCACacheLayer, DeepseekV4CSACache):
    """Cache layer of a compressed-sparse attention block with a `crop` that also rewinds compressor and indexer.

    As [`RewindableHCACacheLayer`], for two compressors (`"compressor"` and `"indexer"`) whose windows overlap. The
    projections of the last closed window are kept also where recording is off.
    """

    _windows_read = 1

    def _start_recording(self, max_rewind: int) -> None:
        # By compressor, the overlap that each of the last closed windows leaves to the next one, `[batch, windows,
        # compress_rate, features / 2]`, the gate with the position bias: the stock overlap is the last of them.
        self._overlaps_kv: States
        self._overlaps_gate: States
        self._overlaps_kv, self._overlaps_gate = (
            {name: None if last is None else last.unsqueeze(1) for name, last in states.items()}
            for states in (self.overlap_kv, self.overlap_gate)
        )
        super()._start_recording(max_rewind)

    def _past_windows(self) -> list[tuple[States, int]]:
        return [*super()._past_windows(), (self._overlaps_kv, 1), (self._overlaps_gate, 1)]

    @property
    def can_verify_trees(self) -> bool:
        closed = (self._closed_kv[name] for name, entries in self.entry_count.items() if entries)
        return all(known is not None and known.shape[1] for known in closed)

    def read_overlap(self, name: str, position_bias: torch.Tensor) -> None:
        """Have what draft trees read of a compressor's last window where the stock layer closed it: it keeps the half
        of its projections that the next entry depends on, the gate with the position bias.

        Args:
            name: The compressor's.
            position_bias: `[compress_rate, features]`.
        """
        kv, gate = self.overlap_kv[name], self.overlap_gate[name]
        if kv is not None and gate is not None and self._closed_kv[name] is None:
            half = kv.shape[-1]
            gate = (gate - position_bias[:, :half].detach()).to(kv.dtype)
            # No crop opens the window again, which would need the other half: it closed before recording.
            self._closed_kv[name], self._closed_gate[name] = pad(kv, (0, half)), pad(gate, (0, half))

    def _window_before(self, name: str, kv: torch.Tensor, gate: torch.Tensor) -> Parts:
        if self.entry_count[name]:
            last = slice(-self.compress_rate, None)
            return self._closed_kv[name][:, last], self._closed_gate[name][:, last]
        shape = kv.shape[0], self.compress_rate, kv.shape[2]
        return kv.new_zeros(shape), gate.new_full(shape, torch.finfo(gate.dtype).min)  # a weight of 0

    def _append_windows(self, state: TreeState, name: str, windows: list[int]) -> None:
        if windows:
            kv, gate = (state.select(part, windows) for part in state.overlaps[name])
            self.update_overlap_state(name, kv, gate, kv.shape[-1] // 2)
        super()._append_windows(state, name, windows)

    def update_overlap_state(
        self, name: str, chunk_kv: torch.Tensor, chunk_gate: torch.Tensor, head_dim: int
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Store the overlaps of the windows that just closed, `[batch, windows, compress_rate, 2 * head_dim]`, the
        gates with the position bias, and return that of the window before them, `[batch, compress_rate, head_dim]`,
        or `None` twice; `head_dim` is `config.index_head_dim` for the indexer."""
        if self.tree_state is not None:  # each window comes after the one that it overlaps with
            self.tree_state.store_overlaps(name, chunk_kv, chunk_gate)
            return None, None
        before = self.overlap_kv[name], self.overlap_gate[name]
        for states, chunk in ((self._overlaps_kv, chunk_kv), (self._overlaps_gate, chunk_gate)):
            states[name] = self._with_last_windows(states[name], chunk[..., :head_dim], 1)
        self._set_overlap(name)
        return before

    def _set_overlap(self, name: str) -> None:
        for last, states in ((self.overlap_kv, self._overlaps_kv), (self.overlap_gate, self._overlaps_gate)):
            last[name] = states[name][:, -1] if states[name].shape[1] else None

    def _reopen_windows(self, name: str, count: int) -> None:
        super()._reopen_windows(name, count)
        self._set_overlap(name)

    def _compressor_states(self) -> list[States]:
        overlaps = [self.overlap_kv, self.overlap_gate, self._overlaps_kv, self._overlaps_gate]
        return [*super()._compressor_states(), *overlaps]


_REWINDABLE_CLASSES: dict[type, type[RewindableSlidingCacheLayer]] = {
    DynamicSlidingWindowLayer: RewindableSlidingCacheLayer,
    DeepseekV4HCACache: RewindableHCACacheLayer,
    DeepseekV4CSACache: RewindableCSACacheLayer,
}


def make_rewindable(cache: Cache, max_rewind: int = DEFAULT_MAX_REWIND) -> Cache:
    """Swap, in place, every stock layer of a V4 target's cache for a rewindable one.

    State is carried over, so a filled cache continues as before; only what arrives while recording is on afterwards
    can be undone. Rewindable layers stay as they are, except that the largest `max_rewind` applies from now on: at
    least the longest draft. Layers of foreign subclasses, whose `crop` nobody can vouch for, are refused, and then all
    stay as they were.
    """
    if not isinstance(cache, Cache):
        raise TypeError(
            f"`make_rewindable` got a {type(cache).__name__}, expected a transformers `Cache`. Pass "
            "`DynamicCache(config=model.config)`."
        )
    _checked_max_rewind(max_rewind)
    cache.layers[:] = [_rewindable(layer, max_rewind) for layer in cache.layers]
    rewindable = [layer for layer in cache.layers if isinstance(layer, RewindableSlidingCacheLayer)]
    largest = max([max_rewind, *(layer.max_rewind for layer in rewindable)])
    for layer in rewindable:
        layer.max_rewind = largest
    return cache


def _rewindable(layer: Any, max_rewind: int) -> Any:
    if isinstance(layer, RewindableSlidingCacheLayer):
        return layer
    if type(layer) in _REWINDABLE_CLASSES:
        return _REWINDABLE_CLASSES[type(layer)].from_stock(layer, max_rewind)
    if isinstance(layer, DynamicSlidingWindowLayer):
        raise TypeError(
            f"The cache holds a {type(layer).__name__}, a subclass of a stock cache layer that `make_rewindable` does "
            "not know. Build the cache with `DynamicCache(config=model.config)`, or subclass a rewindable layer "
            "instead."
        )
    return layer
