"""Static caches from which drafts can be taken back: preallocated, of one shape from the first round to the last, so
that compiled rounds need to be compiled once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from transformers.cache_utils import Cache, StaticLayer, StaticSlidingWindowLayer

from ..hooks import ResidualCapture


def keep_addresses(*states: torch.Tensor) -> None:
    """Let compiled forwards count on tensors that stay where they are, whatever is written into them: not guarded, as
    caches come and go. Not where weights are packed: torch would take what a graph only reads for a weight."""
    for each in states:
        if not torch._inductor.config.freezing:
            torch._dynamo.mark_static_address(each, guard=False)


def write_columns(buffer: torch.Tensor, columns: torch.Tensor, states: torch.Tensor) -> None:
    """Write keys or values `[batch, heads, count, head_dim]` to the columns `[batch, count]` of each row of a buffer
    `[batch, heads, capacity, head_dim]`."""
    if buffer.shape[0] == 1:
        buffer.index_copy_(2, columns[0], states)
    else:
        buffer.scatter_(2, columns[:, None, :, None].expand_as(states), states)


class SlotLayer(StaticLayer):
    """A static layer during the rounds of one or several sequences.

    Token `t` of a sequence lies in slot `t % capacity`. Full attention has a slot for each token. A sliding window's
    slots go round: there are as many as the window and a round need together, so that rejected drafts overwrite
    nothing that is still seen. To take drafts back is to count fewer tokens.

    Args:
        layer: The stock layer after the prompts, several padded on the left. One of full attention gives its buffers.
        window: How many tokens a position sees, itself included; `None` for all.
        lengths: Tokens of each sequence's prompt.
        starts: How many tokens of each sequence there are, `[batch]` on the device, one tensor for all layers. A
            round's forward writes behind them.
        width: The most verification positions of a round.

    Attributes:
        capacity: The number of slots.
        view: How many of them a round looks at, from the first on ([`SlotCache.look_at`]).
    """

    _layer_type = None  # else it would be registered for all of transformers

    def __init__(
        self, layer: StaticLayer, window: int | None, lengths: Sequence[int], starts: torch.Tensor, width: int
    ) -> None:
        self.kind = "sliding_attention" if isinstance(layer, StaticSlidingWindowLayer) else "full_attention"
        self.window = window
        self.capacity = layer.max_cache_len if window is None else window - 1 + width
        super().__init__(self.capacity)
        self.view = self.capacity
        self.starts, self.is_initialized = starts, True
        self.device = layer.device
        # Tensors of their own over the same memory: transformers has marked its own, which a graph of packed weights
        # would keep for good, whatever cache comes next.
        self.keys = self._in_slots(cast(torch.Tensor, layer.keys), lengths, layer).detach()
        self.values = self._in_slots(cast(torch.Tensor, layer.values), lengths, layer).detach()
        keep_addresses(self.keys, self.values)

    def _in_slots(self, states: torch.Tensor, lengths: Sequence[int], layer: StaticLayer) -> torch.Tensor:
        """Return a layer's keys or values with each sequence's tokens in their slots."""
        seen = int(layer.get_seq_length())
        if self.window is None and min(lengths) == seen:
            return states
        held = min(seen, states.shape[2])  # columns, the last ones of the padded prompts
        slots = states
        if self.window is not None:
            slots = states.new_zeros(*states.shape[:2], self.capacity, states.shape[3])
        for index, length in enumerate(lengths):
            kept = min(length, held, self.capacity)
            own = torch.arange(length - kept, length, device=states.device) % self.capacity
            slots[index, :, own] = states[index, :, held - kept : held].clone()
        return slots

    def _slots(self, places: torch.Tensor) -> torch.Tensor:
        """Return the slots of places of the round, 0 for the anchor's, `[batch, places]`."""
        return (self.starts[:, None] + places) % self.capacity

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the keys and values of a round, `[batch, heads, positions, head_dim]`, and return those of `view`."""
        assert self.keys is not None and self.values is not None
        slots = self._slots(torch.arange(key_states.shape[2], device=self.starts.device))
        write_columns(self.keys, slots, key_states)
        write_columns(self.values, slots, value_states)
        return self.keys[:, :, : self.view], self.values[:, :, : self.view]

    def move(self, old: torch.Tensor, new: torch.Tensor) -> None:
        """Move tokens to other places of the round, all at once: from `old` `[batch, places]` to `new`."""
        assert self.keys is not None and self.values is not None
        sources, slots = self._slots(old), self._slots(new)
        for buffer in (self.keys, self.values):
            shape = *buffer.shape[:2], old.shape[1], buffer.shape[3]
            moved = buffer.gather(2, sources[:, None, :, None].expand(shape))
            buffer.scatter_(2, slots[:, None, :, None].expand(shape), moved)

    def mask(self, visible: torch.Tensor, depths: torch.Tensor, real: torch.Tensor | None) -> torch.Tensor:
        """Return which slots each verification position sees.

        Args:
            visible: Which positions it sees, boolean `[batch, positions, positions]`.
            depths: The distance of each position from the anchor in tokens, `[batch, positions]`.
            real: Which tokens are no padding, boolean `[batch, tokens]`; `None` if all are.

        Returns:
            Boolean `[batch, 1, positions, view]`.
        """
        starts, count = self.starts[:, None], depths.shape[1]
        # Of each slot: its place in the round, or the token of before the round that it holds.
        place = (torch.arange(self.view, device=starts.device) - starts) % self.capacity
        token = starts - self.capacity + place
        is_before, is_of_round = (place >= count) & (token >= 0), place < count
        if real is not None:
            is_real = real.gather(1, token.clamp(min=0, max=real.shape[1] - 1))
            is_before = is_before & (is_real | (token >= real.shape[1]))
        place = place.clamp(max=count - 1)
        of_round = visible.gather(2, place[:, None].expand(-1, count, -1))
        mask = torch.where(is_of_round[:, None], of_round, is_before[:, None])
        if self.window is not None:
            depth = torch.where(is_of_round, depths.gather(1, place), token - starts)
            mask = mask & (depths[:, :, None] - depth[:, None] < self.window)
        return mask[:, None]

    def give_back(self, layer: StaticLayer) -> None:
        """Make the stock layer, which this one was made of, hold what the only sequence's tokens are now."""
        length = int(self.starts)
        if self.window is not None:
            assert layer.keys is not None and layer.values is not None
            kept = min(length, layer.max_cache_len)
            slots = torch.arange(length - kept, length, device=self.device) % self.capacity
            for own, states in ((layer.keys, self.keys), (layer.values, self.values)):
                own[:, :, :kept] = cast(torch.Tensor, states)[:, :, slots]
        layer.cumulative_length.fill_(length)
        if isinstance(layer, StaticSlidingWindowLayer):
            layer.cumulative_length_int = length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.view, 0

    def get_seq_length(self) -> int:  # type: ignore[override]
        """Return the number of tokens of the longest sequence."""
        return int(self.starts.max())


class SlotCache(Cache):
    """A static cache during the rounds of one or several sequences.

    Args:
        cache: One that [`~decoding.request.can_hold_rounds`], after the prompts, several padded on the left.
        windows: Of each layer, `None` for full attention.
        lengths: Tokens of each sequence's prompt.
        width: The most verification positions of a round.

    Attributes:
        starts: How many tokens of each sequence there are, `[batch]`.
        capacity: The most tokens of a sequence; `None` if all layers have windows.
        capture: Of the residual streams of a compiled forward.
    """

    layers: list[SlotLayer]  # type: ignore[assignment]

    def __init__(self, cache: Cache, windows: Sequence[int | None], lengths: Sequence[int], width: int) -> None:
        self.stock = cache
        self.starts = torch.tensor(lengths, device=cast(StaticLayer, cache.layers[0]).device)
        keep_addresses(self.starts)
        layers = [
            SlotLayer(cast(StaticLayer, layer), window, lengths, self.starts, width)
            for layer, window in zip(cache.layers, windows)
        ]
        super().__init__(layers=[*layers])
        self.capacity = min((layer.capacity for layer in layers if layer.window is None), default=None)
        self.capture: ResidualCapture | None = None

    @property
    def shape(self) -> tuple[object, ...]:
        """What a compiled forward depends on: the sequences, the slots of each kind of layer, and what it captures."""
        captured = self.capture and tuple(self.capture.layer_ids)
        return len(self.starts), captured, *{each.window: (each.capacity, each.view) for each in self.layers}.items()

    def look_at(self, count: int) -> None:
        """Let rounds look at the first `count` slots alone, where layers have one for each token: no longer than the
        text is, attention and masks take as little time after it as they need."""
        for layer in self.layers:
            layer.view = layer.capacity if layer.window is not None else min(count, layer.capacity)

    def masks(
        self, visible: torch.Tensor, depths: torch.Tensor, real: torch.Tensor | None
    ) -> dict[int | None, torch.Tensor]:
        """Return which slots each verification position sees, by the window of the layers; see [`SlotLayer.mask`]."""
        by_window = {layer.window: layer for layer in self.layers}
        return {window: layer.mask(visible, depths, real) for window, layer in by_window.items()}

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep only the sequences `indices`."""
        self.starts = self.starts[indices]
        for layer in self.layers:
            layer.starts = self.starts
            layer.keys, layer.values = (
                cast(torch.Tensor, states)[indices.to(layer.device)] for states in (layer.keys, layer.values)
            )

    def give_back(self) -> None:
        """Make the stock cache hold what the only sequence's tokens are now."""
        for own, layer in zip(self.layers, self.stock.layers):
            own.give_back(cast(StaticLayer, layer))
