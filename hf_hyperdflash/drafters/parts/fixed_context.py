"""A drafter's context of fixed shape, so that its passes can be compiled once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from transformers import PreTrainedConfig

from ...targets.caches.slots import write_columns
from ...targets.compiled import CompiledForwards, keep_addresses, view_for
from ..sampling import Context, DraftRequest
from .block_attention import AttentionSpan
from .entry_context import EntryContext
from .layers import ContextCache, ContextLayer, KeysValues


class CompiledContext(Context, Protocol):
    """The context of a text whose rounds are compiled.

    Attributes:
        compiled: Runs functions compiled ([`~targets.compiled.CompiledForwards`]) while rounds do; else
            `None`.
    """

    compiled: CompiledForwards | None


class FixedBuffers:
    """Keys and values of the texts of a batch, of fixed shape, and what one compiled pass over all of them reads.

    Args:
        layers: Of the drafter.
        shape: Of a layer's keys, `[texts, kv_heads, capacity, head_dim]`.
        spare: How many columns a round needs behind a text.
        like: Gives dtype and device.
        pending: What a round reads of its pending tokens, zeros: their residual `[texts, most_new, ...]` and, for
            entries, the tokens that follow, `[texts, most_new]`.
        compiled: Runs functions compiled.

    Attributes:
        all: Keys and values of every layer.
        capacity: The number of columns.
        most_new: The most tokens that a round adds.
        contexts: Of each text.
    """

    def __init__(
        self,
        layers: int,
        shape: tuple[int, ...],
        spare: int,
        like: torch.Tensor,
        pending: Sequence[torch.Tensor],
        compiled: CompiledForwards,
    ) -> None:
        self.all = [(like.new_zeros(shape), like.new_zeros(shape)) for _ in range(layers)]
        self._pending, self.most_new, self.compiled = pending, pending[0].shape[1], compiled
        self.capacity, self.spare = shape[2], spare
        self.contexts: list[FixedContext | FixedEntries] = []
        keep_addresses(*pending, *(part for layer in self.all for part in layer))

    @property
    def view(self) -> int:
        """How many columns the next pass is to look at: one of a few numbers."""
        longest = max(context.filled for context in self.contexts)
        return min(view_for(longest + self.spare), self.capacity)

    def last_of(self, requests: Sequence[DraftRequest], part: str) -> torch.Tensor:
        """Return the last of all texts' `ids` or `position_ids`, `[texts, 1]`, which is 0 where no text is asked."""
        # Not as they are: a view of a longer text has strides of its own, for which torch would compile anew.
        last = torch.cat([getattr(each, part)[:, -1] for each in requests])[:, None]
        if len(requests) < len(self.contexts):
            rows = torch.tensor([each.context.row for each in requests], device=last.device)
            last = last.new_zeros(len(self.contexts), 1).index_copy_(0, rows, last)
        return last.to(self.all[0][0].device)

    def inputs(self, requests: Sequence[DraftRequest]) -> tuple[torch.Tensor, ...]:
        """Return what a pass reads of all texts: what there is of pending tokens, the first ones of each text; and the
        numbers of keys that there are, of pending tokens, and of drafts that are asked for, `[texts, 3]`. What is
        pending stays so.

        Args:
            requests: Of those texts that are drafted for.
        """
        counts = [[context.filled, 0, 0] for context in self.contexts]
        for each in requests:
            row, pending = each.context.row, each.context.pending
            counts[row][2] = each.num_drafts
            if pending is not None:
                residual, position_ids, *next_ids = pending
                new = counts[row][1] = position_ids.shape[1]
                for own, given in zip(self._pending, (residual, *next_ids)):
                    own[row, :new] = given[0]
        return *self._pending, torch.tensor(counts, device=self.all[0][0].device)


class FixedContext(ContextCache):
    """A [`ContextCache`] with room for a whole text, which is a row of a batch's buffers.

    Args:
        spans: What each layer's slots see.
        context: The one that it continues, which must not be used afterwards.
        shared: The buffers.

    Attributes:
        row: Its own of them.
        compiled: As of [`CompiledContext`].
    """

    def __init__(self, spans: Sequence[AttentionSpan], context: ContextCache, shared: FixedBuffers) -> None:
        super().__init__(spans)
        self.shared, self.row = shared, len(shared.contexts)
        shared.contexts.append(self)
        self.compiled: CompiledForwards | None = shared.compiled
        self.end, self.pending, held = context.end, context.pending, context.layers
        own = slice(self.row, self.row + 1)
        self._layer_views = [(keys[own], values[own]) for keys, values in shared.all]
        for views, old in zip(self._layer_views, held):
            for view, states in zip(views, old):
                view[:, :, : states.shape[2]] = states
        self.advance(held[0][0].shape[2] if held else 0)

    @property
    def filled(self) -> int:
        """The number of columns that there are keys in."""
        return self._stop

    def make_room(self, count: int, like: torch.Tensor, config: PreTrainedConfig) -> None:
        if self._stop + count > self._layer_views[0][0].shape[2]:  # in a later turn
            pad = torch.nn.functional.pad
            more = (0, 0, 0, self._stop + count)
            self._layer_views = [(pad(keys, more), pad(values, more)) for keys, values in self._layer_views]

    @property
    def layers(self) -> list[KeysValues]:
        own = slice(self._start, self._stop)
        return [(keys[:, :, own], values[:, :, own]) for keys, values in self._layer_views]


class FixedEntries(EntryContext):
    """An [`EntryContext`] with room for a whole text, which is a row of a batch's buffers.

    Args:
        context: The one that it continues, which must not be used afterwards.
        shared: The buffers.

    Attributes:
        compiled: As of [`CompiledContext`].
    """

    def __init__(self, context: EntryContext, shared: FixedBuffers) -> None:
        super().__init__()
        self.shared, self.row, self.buffer = shared, len(shared.contexts), shared.all
        shared.contexts.append(self)
        self.compiled: CompiledForwards | None = shared.compiled
        self.end, self.length, self.pending = context.end, context.length, context.pending
        self.states, self.position = context.states, context.position
        for own, old in zip(self.layers, context.layers):
            for part, states in zip(own, old):
                part.copy_(states)

    @property
    def filled(self) -> int:
        """The number of columns that there are keys in."""
        return self.length

    @property
    def runs_compiled(self) -> bool:
        """Whether the next round can be drafted compiled: not after a prompt, whose entries there are, and not where
        there are more tokens than there is room for, or were."""
        shared = self.shared
        has_room = self.buffer is shared.all and self.length + shared.spare <= shared.capacity
        return self.compiled is not None and has_room and 0 < self.new_count <= shared.most_new


def layers_from(buffers: Sequence[KeysValues], first: torch.Tensor, view: int) -> list[ContextLayer]:
    """Return, for each layer, a function that writes new keys and values from the columns `first` on, `[texts, 1]`,
    and returns those of the first `view` columns."""

    def layer(own: KeysValues) -> ContextLayer:
        def update(keys: torch.Tensor, values: torch.Tensor) -> KeysValues:
            columns = first + torch.arange(keys.shape[2], device=keys.device)
            for part, states in zip(own, (keys, values)):
                write_columns(part, columns, states)
            return own[0][:, :, :view], own[1][:, :, :view]

        return update

    return [layer(own) for own in buffers]


class FixedLayers:
    """A batch's [`FixedBuffers`] inside one compiled pass over a block of each text, whose numbers of tokens are
    tensors.

    Args:
        buffers: Keys and values of every layer, `[texts, kv_heads, capacity, head_dim]`.
        counts: How many tokens there are of each text, and how many the pass adds, `[texts, 2 or more]`.
        most_new: The most that it may add; what is beyond the count is not looked at.
        view: How many columns the pass looks at, from the first on.
    """

    def __init__(self, buffers: Sequence[KeysValues], counts: torch.Tensor, most_new: int, view: int) -> None:
        self.buffers, self.most_new, self.view = buffers, most_new, view
        self.starts, self.stops = counts[:, :1], counts[:, :2].sum(1, keepdim=True)

    def make_room(self, count: int, like: torch.Tensor, config: PreTrainedConfig) -> None:
        """Do nothing: there is room for the whole text."""

    def advance(self, new: int) -> None:
        """Do nothing: the contexts count their tokens."""

    def layer(self, index: int, new: int) -> ContextLayer:
        """Do the same as [`ContextCache.layer`]; `view` columns are returned."""

        def update(keys: torch.Tensor, values: torch.Tensor) -> KeysValues:
            places = torch.arange(keys.shape[2], device=keys.device)
            own_keys, own_values = self.buffers[index]
            for buffer, states in ((own_keys, keys), (own_values, values)):
                write_columns(buffer, self.starts + places[:new], states[:, :, :new])
                # After the new tokens, over those that only fill up.
                write_columns(buffer, self.stops + places[:-new], states[:, :, new:])
            return own_keys[:, :, : self.view], own_values[:, :, : self.view]

        return update

    def masks(self, kinds: Sequence[str], spans: Sequence[AttentionSpan], block_size: int) -> dict[str, torch.Tensor]:
        """Return the mask for each kind of layer, boolean `[texts, 1, block_size, view]`."""
        device = self.stops.device
        slots = torch.arange(block_size, device=device)[:, None]
        ahead = torch.arange(self.view, device=device) - self.stops[:, None]  # [texts, 1, view]
        masks = {}
        for kind, span in zip(kinds, spans):
            of_context = (ahead < 0) & span.sees_context(slots, -ahead)
            of_block = span.sees_slots(block_size, device)[:, ahead[:, 0].clamp(0, block_size - 1)].transpose(0, 1)
            masks[kind] = torch.where((ahead >= 0) & (ahead < block_size), of_block, of_context)[:, None]
        return masks
