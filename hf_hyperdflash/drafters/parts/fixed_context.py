"""A drafter's context of fixed shape, so that its passes can be compiled once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from transformers import PreTrainedConfig

from ...targets.caches.slot_forward import CompiledForwards
from ...targets.caches.static import keep_addresses, write_columns
from .block_attention import AttentionSpan
from .entry_context import EntryContext
from .layers import ContextCache, ContextLayer, KeysValues


class FixedBuffers:
    """Keys and values of the texts of a batch, of fixed shape, and what one compiled pass over all of them reads.

    Args:
        layers: Of the drafter.
        shape: Of a layer's keys, `[texts, kv_heads, capacity, head_dim]`.
        like: Gives dtype and device.
        most_new: The most tokens that a round adds.
        compiled: Runs functions compiled.

    Attributes:
        all: Keys and values of every layer.
        stops: How many tokens of each text there are.
    """

    def __init__(
        self, layers: int, shape: tuple[int, ...], like: torch.Tensor, most_new: int, compiled: CompiledForwards
    ) -> None:
        self.all = [like.new_zeros(shape) for _ in range(2 * layers)]
        self.stops, self.most_new, self.compiled = [0] * shape[0], most_new, compiled
        self._residual: torch.Tensor | None = None  # of the pending tokens, in each round
        keep_addresses(*self.all)

    def take_pending(
        self, contexts: Sequence[FixedContext], residual_shape: tuple[int, ...]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the residual of the texts' pending tokens `[texts, most_new, ...]`, the first ones of each, and the
        numbers of tokens before them and of them, `[texts, 2]`. They are no longer pending, but there.

        Args:
            contexts: Of those texts that are drafted for.
            residual_shape: Of a token.
        """
        buffer, counts = self.all[0], [[stop, 0] for stop in self.stops]
        if self._residual is None:
            self._residual = buffer.new_zeros(len(counts), self.most_new, *residual_shape)
            keep_addresses(self._residual)
        for context in contexts:
            if context.pending is not None:
                new = counts[context.row][1] = context.pending[1].shape[1]
                self._residual[context.row, :new] = context.pending[0][0]
                context.pending = None
                context.advance(new)
        return self._residual, torch.tensor(counts, device=buffer.device)


class FixedContext(ContextCache):
    """A [`ContextCache`] with room for a whole text, which is a row of a batch's buffers.

    Args:
        spans: What each layer's slots see.
        context: The one that it continues, which must not be used afterwards.
        shared: The buffers.
        row: Its own of them.

    Attributes:
        compiled: Runs functions compiled ([`~targets.caches.slot_forward.CompiledForwards`]) while rounds do; else
            `None`.
    """

    def __init__(self, spans: Sequence[AttentionSpan], context: ContextCache, shared: FixedBuffers, row: int) -> None:
        super().__init__(spans)
        self.shared, self.row = shared, row
        self.compiled: CompiledForwards | None = shared.compiled
        self.end, self.pending, held = context.end, context.pending, context.layers
        own = [buffer[row : row + 1] for buffer in shared.all]
        self._layer_views = list(zip(own[::2], own[1::2]))
        for views, old in zip(self._layer_views, held):
            for view, states in zip(views, old):
                view[:, :, : states.shape[2]] = states
        self.advance(held[0][0].shape[2] if held else 0)

    def make_room(self, count: int, like: torch.Tensor, config: PreTrainedConfig) -> None:
        if self._stop + count > self._layer_views[0][0].shape[2]:  # in a later turn
            pad = torch.nn.functional.pad
            more = (0, 0, 0, self._stop + count)
            self._layer_views = [(pad(keys, more), pad(values, more)) for keys, values in self._layer_views]

    def advance(self, new: int) -> None:
        super().advance(new)
        self.shared.stops[self.row] = self._stop

    @property
    def layers(self) -> list[KeysValues]:
        own = slice(self._start, self._stop)
        return [(keys[:, :, own], values[:, :, own]) for keys, values in self._layer_views]


class FixedEntries(EntryContext):
    """An [`EntryContext`] with room for a whole text, from which chains are drafted by one compiled function.

    Args:
        context: The one that it continues, which must not be used afterwards.
        layers: The drafter's.
        shape: Of a layer's keys, `[1, kv_heads, capacity, head_dim]`.
        like: Gives dtype and device.
        most_new: The most tokens that a round adds.

    Attributes:
        compiled: As of [`FixedContext`].
    """

    def __init__(
        self,
        context: EntryContext,
        layers: int,
        shape: tuple[int, ...],
        like: torch.Tensor,
        most_new: int,
        compiled: CompiledForwards | None,
    ) -> None:
        super().__init__()
        self.end, self.length, self.pending = context.end, context.length, context.pending
        self.states, self.position = context.states, context.position
        self.most_new, self.compiled = most_new, compiled
        self.buffer = [(like.new_zeros(shape), like.new_zeros(shape)) for _ in range(layers)]
        for own, old in zip(self.buffer, context.layers):
            for part, states in zip(own, old):
                part[:, :, : self.length] = states
        self._fixed = self.buffer  # which gives way to a larger one where a text grows beyond it
        self._inputs: tuple[torch.Tensor, torch.Tensor] | None = None  # residual and next tokens, in each round
        keep_addresses(*(part for own in self.buffer for part in own))

    @property
    def runs_compiled(self) -> bool:
        """Whether the next round can be drafted compiled: not after a prompt, whose entries there are, and not where
        there are more tokens than there is room for, or were."""
        new, capacity = self.new_count, self.buffer[0][0].shape[2]
        size = 1 if self.states is None else self.states.shape[1]
        has_room = self.buffer is self._fixed and self.length + 2 * self.most_new * size <= capacity
        return self.compiled is not None and 0 < new <= self.most_new and has_room

    def pending_inputs(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the residual of `most_new` tokens and the tokens that follow them, of which the first ones are the
        pending ones, the first one's position, and the numbers of keys before them and of them, `[2]`."""
        residual, position_ids, next_ids = cast(tuple[torch.Tensor, ...], self.pending)
        new, device = next_ids.shape[1], self.buffer[0][0].device
        if self._inputs is None:
            shape = 1, self.most_new
            self._inputs = residual.new_zeros(*shape, *residual.shape[2:], device=device), next_ids.new_zeros(shape)
            keep_addresses(*self._inputs)
        for own, given in zip(self._inputs, (residual, next_ids)):
            own[:, :new] = given
        counts = torch.tensor([self.length, new], device=device)
        return *self._inputs, position_ids[:, :1].to(device).view(1, 1), counts


def layers_from(buffer: Sequence[KeysValues], first: torch.Tensor) -> list[ContextLayer]:
    """Return, for each layer, a function that writes new keys and values from a column on, which is a tensor, and
    returns all that there is room for."""

    def layer(own: KeysValues) -> ContextLayer:
        def update(keys: torch.Tensor, values: torch.Tensor) -> KeysValues:
            columns = first + torch.arange(keys.shape[2], device=keys.device)
            for part, states in zip(own, (keys, values)):
                part.index_copy_(2, columns, states)
            return own

        return update

    return [layer(own) for own in buffer]


class FixedLayers:
    """A batch's [`FixedBuffers`] inside one compiled pass over a block of each text, whose numbers of tokens are
    tensors.

    Args:
        buffers: Keys and values of every layer, `[texts, kv_heads, capacity, head_dim]`.
        counts: How many tokens there are of each text, and how many the pass adds, `[texts, 2]`.
        most_new: The most that it may add; what is beyond the count is not looked at.
        view: How many columns the pass looks at, from the first on, or all that there are.
    """

    def __init__(self, buffers: Sequence[torch.Tensor], counts: torch.Tensor, most_new: int, view: int) -> None:
        self.buffers, self.most_new, self.view = buffers, most_new, min(view, buffers[0].shape[2])
        self.starts, self.stops = counts[:, :1], counts.sum(1, keepdim=True)

    def make_room(self, count: int, like: torch.Tensor, config: PreTrainedConfig) -> None:
        """Do nothing: there is room for the whole text."""

    def advance(self, new: int) -> None:
        """Do nothing: the contexts count their tokens."""

    def layer(self, index: int, new: int) -> ContextLayer:
        """Do the same as [`ContextCache.layer`]; `view` columns are returned."""

        def update(keys: torch.Tensor, values: torch.Tensor) -> KeysValues:
            places = torch.arange(keys.shape[2], device=keys.device)
            own_keys, own_values = self.buffers[2 * index], self.buffers[2 * index + 1]
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
