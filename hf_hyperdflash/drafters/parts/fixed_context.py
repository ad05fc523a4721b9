"""A drafter's context of fixed shape, so that its passes can be compiled once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from transformers import PreTrainedConfig

from ...targets.caches.slot_forward import CompiledForwards
from ...targets.caches.static import keep_addresses
from .block_attention import AttentionSpan
from .entry_context import EntryContext
from .layers import ContextCache, ContextLayer, KeysValues


class FixedContext(ContextCache):
    """A [`ContextCache`] with room for a whole text, and buffers of each layer's own.

    Args:
        spans: What each layer's slots see.
        context: The one that it continues, which must not be used afterwards.
        shape: Of a layer's keys, `[batch, kv_heads, capacity, head_dim]`.
        like: Gives dtype and device.
        most_new: The most tokens that a round adds.

    Attributes:
        compiled: Runs functions compiled ([`~targets.caches.slot_forward.CompiledForwards`]) while rounds do; else
            `None`.
    """

    def __init__(
        self,
        spans: Sequence[AttentionSpan],
        context: ContextCache,
        shape: tuple[int, ...],
        like: torch.Tensor,
        most_new: int,
        compiled: CompiledForwards | None,
    ) -> None:
        super().__init__(spans)
        self.end, self.pending, self.most_new, self.compiled = context.end, context.pending, most_new, compiled
        held = context.layers
        self._stop = held[0][0].shape[2] if held else 0
        self._residual: torch.Tensor | None = None  # of the pending tokens, in each round
        self._layer_views = [(like.new_zeros(shape), like.new_zeros(shape)) for _ in spans]
        for own, old in zip(self._layer_views, held):
            for buffer, states in zip(own, old):
                buffer[:, :, : self._stop] = states
        keep_addresses(*self.buffers)

    @property
    def buffers(self) -> list[torch.Tensor]:
        """Keys and values of every layer."""
        return [buffer for layer in self._layer_views for buffer in layer]

    def make_room(self, count: int, like: torch.Tensor, config: PreTrainedConfig) -> None:
        if self._stop + count > self._layer_views[0][0].shape[2]:  # in a later turn
            pad = torch.nn.functional.pad
            more = (0, 0, 0, self._stop + count)
            self._layer_views = [(pad(keys, more), pad(values, more)) for keys, values in self._layer_views]

    @property
    def layers(self) -> list[KeysValues]:
        own = slice(self._start, self._stop)
        return [(keys[:, :, own], values[:, :, own]) for keys, values in self._layer_views]

    def take_pending(self, residual_shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the pending tokens' residual `[1, most_new, ...]`, the first ones of it, and the numbers of tokens
        before them and of them, `[2]`. They are no longer pending, but there."""
        buffer, new = self._layer_views[0][0], 0
        if self._residual is None:
            self._residual = buffer.new_zeros(1, self.most_new, *residual_shape)
            keep_addresses(self._residual)
        if self.pending is not None:
            new = self.pending[1].shape[1]
            self._residual[:, :new] = self.pending[0]
        counts = torch.tensor([self._stop, new], device=buffer.device)
        self.pending = None
        self.advance(new)
        return self._residual, counts


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
    """A [`FixedContext`] inside one compiled pass of a block, whose numbers of tokens are tensors.

    Args:
        buffers: Keys and values of every layer, `[1, kv_heads, capacity, head_dim]`.
        counts: How many tokens there are in them, and how many the pass adds, `[2]`.
        most_new: The most that it may add; what is beyond the count is not looked at.
    """

    def __init__(self, buffers: Sequence[torch.Tensor], counts: torch.Tensor, most_new: int) -> None:
        self.buffers, self.most_new = buffers, most_new
        self.start, self.stop = counts[0], counts[0] + counts[1]

    def make_room(self, count: int, like: torch.Tensor, config: PreTrainedConfig) -> None:
        """Do nothing: there is room for the whole text."""

    def advance(self, new: int) -> None:
        """Do nothing: the context counts its tokens."""

    def layer(self, index: int, new: int) -> ContextLayer:
        """Do the same as [`ContextCache.layer`]; all that there is room for is returned."""

        def update(keys: torch.Tensor, values: torch.Tensor) -> KeysValues:
            places = torch.arange(keys.shape[2], device=keys.device)
            own = self.buffers[2 * index], self.buffers[2 * index + 1]
            for buffer, states in zip(own, (keys, values)):
                buffer.index_copy_(2, self.start + places[:new], states[:, :, :new])
                # After the new tokens, over those that only fill up.
                buffer.index_copy_(2, self.stop + places[:-new], states[:, :, new:])
            return own

        return update

    def masks(self, kinds: Sequence[str], spans: Sequence[AttentionSpan], block_size: int) -> dict[str, torch.Tensor]:
        """Return the mask for each kind of layer, boolean `[1, 1, block_size, capacity]`."""
        device = self.stop.device
        slots = torch.arange(block_size, device=device)[:, None]
        ahead = torch.arange(self.buffers[0].shape[2], device=device) - self.stop
        masks = {}
        for kind, span in zip(kinds, spans):
            of_context = (ahead < 0) & span.sees_context(slots, -ahead)
            of_block = span.sees_slots(block_size, device)[:, ahead.clamp(0, block_size - 1)]
            masks[kind] = torch.where((ahead >= 0) & (ahead < block_size), of_block, of_context)[None, None]
        return masks
