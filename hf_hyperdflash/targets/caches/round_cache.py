"""The cache of rounds: keys and values of one or several sequences, from which drafts can be taken back, and the
target's forward over it.

It is made of transformers' dynamic or static cache after the prompts, and gives the text's keys back at the end. Of a
static one all shapes stay from the first round to the last, so that compiled rounds need to be compiled once.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, cast

import torch
from transformers import cache_utils
from transformers.cache_utils import (
    Cache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)
from transformers.generation.utils import GenerationMixin

from ..compiled import CompiledForwards, attended_for, keep_addresses
from ..hooks import ResidualCapture
from ..shared_heads import attention_of_rounds
from ..target import AttentionMask, Target, TargetOutput, attention_mask_for
from .name import CACHE

# Arguments that are another in each round.
_OWN = (CACHE, "input_ids", "inputs_embeds", "attention_mask", "position_ids", "logits_to_keep")
# Columns that a dynamic layer gets at once, or a share of those that it has: fewer would be copied too often, more
# would be memory for nothing.
_GROWTH, _GROWTH_SHARE = 64, 1 / 16


def layers_with_keys(cache: object) -> list[Any]:
    """Return the layers of a cache but for the last ones without keys, where a target's last layers have those of
    earlier ones."""
    layers, without = list(getattr(cache, "layers", ())), getattr(cache_utils, "DummyLayer", ())  # of later versions
    while layers and isinstance(layers[-1], without):
        layers.pop()
    return layers


def is_of_plain_layers(cache: object) -> bool:
    """Return whether all layers of a cache are transformers' own attention layers, so that a [`RoundCache`] can be
    made of it. A cache that is offloaded layer by layer stays as it is."""
    known = DynamicLayer, DynamicSlidingWindowLayer, StaticLayer, StaticSlidingWindowLayer
    layers = layers_with_keys(cache)
    is_plain = bool(layers) and all(type(layer) in known and layer.is_initialized for layer in layers)
    return is_plain and not getattr(cache, "offloading", False)


def write_columns(buffer: torch.Tensor, columns: torch.Tensor, states: torch.Tensor) -> None:
    """Write keys or values `[batch, heads, count, head_dim]` to the columns `[batch, count]` of each row of a buffer
    `[batch, heads, capacity, head_dim]`."""
    if buffer.shape[0] == 1:
        buffer.index_copy_(2, columns[0], states)
    else:
        buffer.scatter_(2, columns[:, None, :, None].expand_as(states), states)


class RoundLayer(StaticLayer):
    """A layer during the rounds of one or several sequences.

    Token `t` of a sequence lies in column `t % capacity`. Full attention has a column for each token. The columns of
    a sliding window are a ring: the window and a round fit into it together, so that rejected drafts overwrite nothing
    that is still seen. To take drafts back is to count fewer tokens.

    Args:
        layer: The stock layer after the prompts, several padded on the left. A static one of full attention gives its
            buffers; instead of a dynamic one's there are buffers that grow.
        window: How many tokens a position sees, itself included; `None` for all.
        lengths: Tokens of each sequence's prompt.
        starts: How many tokens of each sequence are in the cache, all before its anchor, `[batch]` on the device, one
            tensor for all layers. A round's forward writes behind them.
        width: The most verification positions of a round.
        max_columns: How many columns are enough for the whole text and a round behind it.

    Attributes:
        capacity: The number of columns.
        attended: How many of them a round's attention reads, from the first on ([`RoundCache.begin`]).
        columns: Where an eager round writes, the same in all sequences or `[batch, positions]`; `None` where the
            forward finds out itself.
    """

    _layer_type = None  # else it would be registered for all of transformers

    def __init__(
        self,
        layer: StaticLayer | DynamicLayer,
        window: int | None,
        lengths: Sequence[int],
        starts: torch.Tensor,
        width: int,
        max_columns: int = sys.maxsize,
    ) -> None:
        is_sliding = isinstance(layer, (StaticSlidingWindowLayer, DynamicSlidingWindowLayer))
        self.kind = "sliding_attention" if is_sliding or window is not None else "full_attention"
        self.window, self.is_static = window, isinstance(layer, StaticLayer)
        # A caller's dynamic layer that keeps all tokens has to hold them at the end, whatever the window is.
        self.is_ring, self._max_columns = window is not None and is_sliding, max_columns
        if self.is_ring:
            self.capacity = cast(int, window) - 1 + width
        else:
            self.capacity = layer.max_cache_len if isinstance(layer, StaticLayer) else self._roomy(max(lengths))
        super().__init__(self.capacity)
        self.attended, self.columns = self.capacity, cast("slice | torch.Tensor | None", None)
        self.starts, self.is_initialized = starts, True
        self.device = layer.device
        # Tensors of their own over the same memory: transformers has marked its own, which a graph of packed weights
        # would keep for good, whatever cache comes next.
        self.keys = self._in_columns(cast(torch.Tensor, layer.keys), lengths, layer).detach()
        self.values = self._in_columns(cast(torch.Tensor, layer.values), lengths, layer).detach()
        if self.is_static:
            keep_addresses(self.keys, self.values)
        # So that no text is held twice: the stock layer's keys are a part of these until the end, and none of several
        # texts, whose cache nobody goes on with.
        self._sharing = layer if len(lengths) == 1 and not (self.is_static or self.is_ring) else None
        if self._sharing is not None:
            self.give_back(self._sharing, lengths[0])
        elif len(lengths) > 1 and isinstance(layer, DynamicLayer):
            layer.keys, layer.values = (
                states[:, :, :0].clone()
                for states in (cast(torch.Tensor, layer.keys), cast(torch.Tensor, layer.values))
            )

    def _in_columns(
        self, states: torch.Tensor, lengths: Sequence[int], layer: StaticLayer | DynamicLayer
    ) -> torch.Tensor:
        """Return a layer's keys or values with each sequence's tokens in their columns."""
        seen, columns = int(layer.get_seq_length()), states
        if self.is_static and not self.is_ring and min(lengths) == seen:
            return states
        held = min(seen, states.shape[2])  # columns, the last ones of the padded prompts
        if self.is_ring or not self.is_static:
            shape = *states.shape[:2], self.capacity, states.shape[3]
            columns = torch.zeros(shape, dtype=states.dtype, device=self.device)  # an offloaded layer's states are not
        for index, length in enumerate(lengths):
            kept = min(length, held, self.capacity)
            own = torch.arange(length - kept, length, device=columns.device) % self.capacity
            columns[index, :, own] = states[index, :, held - kept : held].to(columns.device, copy=columns is states)
        return columns

    def _roomy(self, columns: int) -> int:
        """Return how many columns to have where so many are needed, so that it is seldom that all are copied."""
        return max(columns, min(columns + max(_GROWTH, int(columns * _GROWTH_SHARE)), self._max_columns))

    def make_room(self, longest: int, width: int) -> None:
        """Let a dynamic layer have columns for a round.

        Args:
            longest: Tokens of the longest sequence before its anchor.
            width: Verification positions.
        """
        window = self.window or 0
        needed = (window - 1 if self.is_ring else longest) + width
        if self.is_static or needed <= self.capacity:
            return
        more = (needed if self.is_ring else self._roomy(needed)) - self.capacity
        for name in ("keys", "values"):  # one after the other: no more than one of them is in memory twice
            old = cast(torch.Tensor, getattr(self, name))
            new = torch.nn.functional.pad(old, (0, 0, 0, more))
            # A tree is wider than was to be expected, and where a token lies depends on the capacity.
            for row, length in enumerate(self.starts.tolist() if self.is_ring else ()):
                tokens = torch.arange(max(0, length - window + 1), length, device=self.device)
                new[row, :, tokens % (self.capacity + more)] = old[row, :, tokens % self.capacity]
            setattr(self, name, new)
            if self._sharing is not None:
                setattr(self._sharing, name, new[:, :, : cast(torch.Tensor, getattr(self._sharing, name)).shape[2]])
            del old
        self.capacity += more

    def _columns_at(self, places: torch.Tensor) -> torch.Tensor:
        """Return the columns of places of the round, 0 for the anchor's, `[batch, places]`."""
        return ((self.starts[:, None] + places) % self.capacity).to(self.device)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the keys and values of a round, `[batch, heads, positions, head_dim]`, and return those attended."""
        assert self.keys is not None and self.values is not None
        columns = self.columns
        if columns is None:
            columns = self._columns_at(torch.arange(key_states.shape[2], device=self.starts.device))
        for buffer, states in ((self.keys, key_states), (self.values, value_states)):
            if isinstance(columns, slice):
                buffer[:, :, columns] = states
            else:
                write_columns(buffer, columns, states)
        return self.keys[:, :, : self.attended], self.values[:, :, : self.attended]

    def move(self, sources: torch.Tensor, columns: torch.Tensor) -> None:
        """Move tokens to other columns, all at once: from `sources` `[batch, tokens]` to `columns`."""
        for buffer in (cast(torch.Tensor, self.keys), cast(torch.Tensor, self.values)):
            if len(buffer) == 1:
                buffer.index_copy_(2, columns[0], buffer.index_select(2, sources[0]))
            else:
                shape = *buffer.shape[:2], sources.shape[1], buffer.shape[3]
                moved = buffer.gather(2, sources[:, None, :, None].expand(shape))
                buffer.scatter_(2, columns[:, None, :, None].expand(shape), moved)

    def mask(self, visible: torch.Tensor, depths: torch.Tensor, real: torch.Tensor | None) -> torch.Tensor:
        """Return which columns each verification position sees.

        Args:
            visible: Which positions it sees, boolean `[batch, positions, positions]`.
            depths: The distance of each position from the anchor in tokens, `[batch, positions]`.
            real: Which tokens are no padding, boolean `[batch, tokens]`; `None` if all are.

        Returns:
            Boolean `[batch, 1, positions, attended]`.
        """
        starts, count = self.starts[:, None], depths.shape[1]
        # Of each column: its place in the round, or which earlier token it holds.
        place = (torch.arange(self.attended, device=starts.device) - starts) % self.capacity
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

    def columns_of(self, visible: Sequence[int]) -> torch.Tensor:
        """Return the columns of all tokens of the only sequence that a position sees, in the order of the text.

        Args:
            visible: The positions of the round that it sees, its own last.
        """
        start = int(self.starts)
        tokens = [*range(start), *(start + place for place in visible)]
        return torch.tensor(tokens[-cast(int, self.window) :] if self.is_ring else tokens) % self.capacity

    def give_back(self, layer: StaticLayer | DynamicLayer, length: int) -> None:
        """Make the stock layer, which this one was made of, hold the `length` tokens of the only sequence."""
        keys, values = cast(torch.Tensor, self.keys), cast(torch.Tensor, self.values)
        held = length
        if self.is_ring:
            held = layer.max_cache_len if isinstance(layer, StaticLayer) else cast(int, self.window) - 1
            last = torch.arange(length - min(length, held), length, device=self.device) % self.capacity
            keys, values = keys[:, :, last], values[:, :, last]
        if not isinstance(layer, StaticLayer):
            layer.keys, layer.values = keys[:, :, :length], values[:, :, :length]
            if isinstance(layer, DynamicSlidingWindowLayer):
                layer.cumulative_length = length
            return
        if self.is_ring:
            assert layer.keys is not None and layer.values is not None
            layer.keys[:, :, : keys.shape[2]], layer.values[:, :, : keys.shape[2]] = keys, values
        layer.cumulative_length.fill_(length)
        if isinstance(layer, StaticSlidingWindowLayer):
            layer.cumulative_length_int = length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.attended, 0

    def get_seq_length(self) -> int:  # type: ignore[override]
        """Return the number of tokens of the longest sequence."""
        return int(self.starts.max())


class RoundCache(Cache):
    """A cache during the rounds of one or several sequences.

    Args:
        cache: One that [`is_of_plain_layers`], after the prompts, several padded on the left.
        windows: Of each layer, `None` for full attention.
        lengths: Tokens of each sequence's prompt.
        width: The most verification positions of a round.
        final_length: The most tokens of a sequence that will be in it.

    Attributes:
        starts: How many tokens of each sequence are in the cache: all before its anchor. `[batch]`.
        capacity: The most tokens of a sequence; `None` if no layer sets a limit.
        capture: Of the residual streams of a compiled forward.
    """

    layers: list[RoundLayer]  # type: ignore[assignment]

    def __init__(
        self,
        cache: Cache,
        windows: Sequence[int | None],
        lengths: Sequence[int],
        width: int,
        final_length: int = sys.maxsize,
    ) -> None:
        self.stock, self.is_of_one = cache, len(lengths) == 1
        self.starts = torch.tensor(lengths, device=cast(StaticLayer, cache.layers[0]).device)
        layers = [
            RoundLayer(cast(StaticLayer, layer), window, lengths, self.starts, width, final_length + width)
            for layer, window in zip(layers_with_keys(cache), windows)
        ]
        super().__init__(layers=[*layers])
        if layers[0].is_static:
            keep_addresses(self.starts)
        limits = (layer.capacity for layer in layers if layer.is_static and layer.window is None)
        self.capacity = min(limits, default=None)
        self.capture: ResidualCapture | None = None

    @property
    def shape(self) -> tuple[object, ...]:
        """What a compiled forward depends on: sequences, columns of each kind of layer, captured layers."""
        captured = self.capture and tuple(self.capture.layer_ids)
        sizes = {each.window: (each.capacity, each.attended) for each in self.layers}
        return len(self.starts), captured, *sizes.items()

    def begin(self, longest: int, width: int, attended: int | None = None) -> None:
        """Make room for a round. Attention and masks take as little time as the longest text needs.

        Args:
            longest: Tokens of the longest sequence before its anchor.
            width: Verification positions.
            attended: Columns that a compiled round reads, no fewer than it needs; `None` for an eager round, which
                also gets the columns once for all layers.
        """
        places = torch.arange(width, device=self.starts.device)
        columns: dict[int, torch.Tensor] = {}
        for layer in self.layers:
            layer.make_room(longest, width)
            layer.attended = min(attended or longest + width, layer.capacity)
            if attended is not None:
                layer.columns = None
                continue
            first = longest % layer.capacity
            if len(self.starts) == 1 and first + width <= layer.capacity:
                layer.columns = slice(first, first + width)
            else:
                if layer.capacity not in columns:
                    columns[layer.capacity] = layer._columns_at(places)
                layer.columns = columns[layer.capacity].to(layer.device)

    def masks(
        self, visible: torch.Tensor, depths: torch.Tensor, real: torch.Tensor | None
    ) -> dict[int | None, torch.Tensor]:
        """Return by the layers' window which columns each verification position sees; see [`RoundLayer.mask`]."""
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
        """Make the stock cache hold what the only sequence's tokens are now. Of several it stays as it is."""
        if self.is_of_one:
            length = int(self.starts)
            for own, layer in zip(self.layers, self.stock.layers):
                own.give_back(cast(StaticLayer, layer), length)


class RoundForward:
    """Runs a target over the anchors and drafts of sequences in a dynamic or static cache.

    Args:
        target: The target.
        cache: transformers' cache after the prompts, several padded on the left.
        lengths: Tokens of each sequence's prompt.
        final_length: The most tokens of a sequence that will be in the cache.
        masks: Which of them are no padding, `[1, tokens]` each; `None` if all are.
        max_positions: The most verification positions of a round.
        is_fixed: Whether nearly every round has `max_positions`, as without "auto".
        compiled: Runs compiled forwards; `None` for eager ones.
        capture: Of the residual streams.

    Attributes:
        max_tokens: Of a sequence, for which the cache has columns.
        rows: Of each sequence, its place in the cache. Compiled, those that have ended keep theirs: the shapes stay.
    """

    def __init__(
        self,
        target: Target,
        cache: Cache,
        lengths: Sequence[int],
        final_length: int,
        masks: Sequence[torch.Tensor | None],
        max_positions: int,
        is_fixed: bool,
        compiled: CompiledForwards | None,
        capture: ResidualCapture,
    ) -> None:
        self.target, self.compiled, self.capture = target, compiled, capture
        self.max_positions, self.is_fixed = max_positions, is_fixed
        # A text that fits in fewer static columns than the window never leaves it. A longer text slides through
        # these columns, as in plain decoding.
        columns = [getattr(layer, "max_cache_len", sys.maxsize) for layer in layers_with_keys(cache)]
        windows = [
            None if window is None or final_length <= count < window else min(window, count)
            for window, count in zip(target.windows, columns)
        ]
        self.cache = RoundCache(cache, windows, lengths, max_positions, final_length)
        self.max_tokens = sys.maxsize if self.cache.capacity is None else self.cache.capacity
        self._is_static = self.cache.layers[0].is_static
        self.size = len(lengths)
        self.rows = list(range(self.size))
        self._chains: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        # A mask of the last positions of a text, each of which sees all that is before: how many and how much, whether
        # they see each other in order, and the mask.
        self._seen = 0, 0, True, torch.empty(0)
        self._moving_widths: set[int] = set()  # of rounds whose tokens were moved
        self.real: torch.Tensor | None = None
        if any(mask is not None for mask in masks):
            shape = len(lengths), self.cache.capacity or max(lengths)
            self.real = torch.ones(shape, dtype=torch.bool, device=self.cache.starts.device)
            for row, mask in zip(self.real, masks):
                if mask is not None:
                    row[: mask.shape[1]] = mask[0].bool()

    def free(self, end: int) -> int:
        """Return how many drafts fit behind a longest sequence that ends at `end`, its anchor included."""
        return min(self.max_tokens - end, self.max_positions - 1) if self._is_static else sys.maxsize

    @property
    def index(self) -> torch.Tensor:
        """`rows` as a tensor."""
        return torch.tensor(self.rows, device=self.cache.starts.device)

    def width_for(self, positions: int, longest: int) -> int:
        """Return the verification positions of a round that needs `positions` of them: compiled, one of a few widths.

        Args:
            positions: Those that are needed.
            longest: Tokens of the longest sequence before its anchor.
        """
        if self.compiled is None:
            return positions
        width = self.max_positions if self.is_fixed else min(1 << (positions - 1).bit_length(), self.max_positions)
        return width if longest + width <= self.max_tokens else positions

    def chains(self, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the distance of each position from the anchor, `[batch, width]`, and which positions it sees, boolean
        `[batch, width, width]`, of chains: the same in all rounds."""
        key = self.size, width
        if key not in self._chains:
            device = self.cache.starts.device
            visible = torch.ones(width, width, dtype=torch.bool, device=device).tril()
            self._chains[key] = (
                torch.arange(width, device=device).repeat(self.size, 1),
                visible.repeat(self.size, 1, 1),
            )
        return self._chains[key]

    def __call__(
        self,
        ids: torch.Tensor,
        anchors: torch.Tensor,
        depths: torch.Tensor,
        visible: torch.Tensor,
        longest: int,
        is_chain: bool,
        kwargs: dict[str, object],
    ) -> tuple[TargetOutput, torch.Tensor | None]:
        """Run the target.

        Args:
            ids: Anchors and drafts, `[batch, positions]`.
            anchors: The anchors' true positions, `[..., batch, 1]`.
            depths: Their distance from the anchor in tokens, `[batch, positions]`.
            visible: Which of them each sees, boolean `[batch, positions, positions]`.
            longest: Tokens of the longest sequence before its anchor.
            is_chain: Whether each position sees all that are before it.
            kwargs: The arguments that are the same in every round.

        Returns:
            The target's outputs. Compiled, also `ids` and behind them its most probable token after each,
            `[batch, 2 * positions]`.
        """
        count, position_ids, model = ids.shape[1], anchors + depths, cast(Any, self.target.model)
        cache_name = CACHE
        prepare = model.prepare_inputs_for_generation
        is_stock = getattr(prepare, "__func__", None) is GenerationMixin.prepare_inputs_for_generation
        if not (is_stock and kwargs.keys() <= {CACHE, "use_cache", "logits_to_keep"}):
            # Models of others, and multimodal ones, change positions or leave out pictures that were in the prompt.
            given = {**kwargs, CACHE: self.cache, "position_ids": position_ids}
            kwargs = prepare(ids, next_sequence_length=count, is_first_iteration=False, **given)
            position_ids = cast(torch.Tensor, kwargs.get("position_ids", position_ids))
            cache_name = next((name for name, value in kwargs.items() if value is self.cache), CACHE)  # may be its own
        kwargs = {name: value for name, value in kwargs.items() if name not in (*_OWN, cache_name)}
        if self.compiled is not None:
            self.cache.begin(longest, count, attended_for(longest + count))
            self.cache.capture = self.capture
            inputs = self.cache, cache_name, self.target, ids, position_ids, depths, visible, self.real, kwargs
            return self.compiled(run_and_choose, *inputs)
        self.cache.begin(longest, count)
        masks = self._masks(depths, visible, longest, is_chain)
        with attention_of_rounds(self.target.config):
            return run_target(self.cache, cache_name, self.target, ids, position_ids, masks, kwargs), None

    def _masks(
        self, depths: torch.Tensor, visible: torch.Tensor, longest: int, is_chain: bool
    ) -> dict[int | None, torch.Tensor]:
        """Return which columns each position of an eager round sees, by the window of the layers."""
        end = longest + depths.shape[1]
        by_window = {layer.window: layer for layer in self.cache.layers}
        # A text without padding that has left no window yet sees all that is before.
        is_plain = self.size == 1 and self.real is None
        masks: dict[int | None, torch.Tensor] = {}
        for window, layer in by_window.items():
            if is_plain and (window is None or end <= window):
                masks[window] = self._mask_behind(longest, visible, is_chain)
            else:
                masks[window] = layer.mask(visible, depths, self.real)
        return masks

    def _mask_behind(self, past: int, visible: torch.Tensor, is_chain: bool) -> torch.Tensor:
        """Return the mask of a round whose positions see all of the `past` tokens before: a view of one that is made
        once, and again when the text has outgrown it."""
        count, (queries, longest, is_causal, mask) = visible.shape[1], self._seen
        if count > queries or past > longest:
            queries, longest = max(count, queries, self.max_positions), past + max(_GROWTH, past // 4)
            mask = torch.ones(1, 1, queries, longest + queries, dtype=torch.bool, device=visible.device).tril(longest)
            is_causal = True
        self._seen = queries, longest, is_causal and is_chain, mask
        mask = mask[:, :, :count, longest - past : longest + count]
        if not (is_causal and is_chain):
            mask[:, :, :, past:] = visible
        return mask

    def keep(self, kept: list[list[int]], width: int, has_trees: bool) -> None:
        """Keep the positions `kept` of each sequence, a path from the anchor on. The others stay in their columns,
        uncounted, until they are overwritten.

        Args:
            kept: Of each sequence.
            width: Verification positions of the round.
            has_trees: Whether there are several paths.
        """
        starts, counts = self.cache.starts, [0] * self.size
        for row, path in zip(self.rows, kept):
            counts[row] = len(path)
        is_first = has_trees and self.compiled is not None and width not in self._moving_widths
        # The first trees of a width in any case: what moves tokens is compiled then, and not some texts later.
        if is_first or any(path != list(range(len(path))) for path in kept):
            self._moving_widths.add(width)
            if self.compiled is None:  # what is behind a path need not be moved
                width = max(map(len, kept))
            old = [list(range(width)) for _ in range(self.size)]
            for row, path in zip(self.rows, kept):
                old[row][: len(path)] = path
            moves = self.cache, torch.tensor(old, device=starts.device), self.chains(width)[0]
            if self.compiled is None:
                move_columns(*moves)
            else:
                self.compiled(move_columns, *moves)
        starts += counts[0] if self.size == 1 else torch.tensor(counts, device=starts.device)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Go on with the sequences `indices` alone."""
        self.rows = [self.rows[index] for index in indices.tolist()]
        if self.compiled is None:
            self.cache.batch_select_indices(self.index)
            self.real = None if self.real is None else self.real[self.index]
            self.size = len(self.rows)
            self.rows = list(range(self.size))


def run_target(
    cache: RoundCache,
    cache_name: str,
    target: Target,
    ids: torch.Tensor,
    position_ids: torch.Tensor,
    visible: dict[int | None, torch.Tensor],
    kwargs: dict[str, object],
) -> TargetOutput:
    """Run the target's forward.

    Args:
        cache: The sequences'.
        cache_name: What the target's forward calls it.
        target: The target.
        ids: Anchors and drafts, `[batch, positions]`.
        position_ids: True positions, `[..., batch, positions]`.
        visible: Which columns each position sees, by the window of the layers.
        kwargs: Other arguments of the target.
    """
    implementation = target.config._attn_implementation
    masks = {window: attention_mask_for(implementation, mask, target.dtype) for window, mask in visible.items()}
    by_kind: dict[str, AttentionMask] = {layer.kind: masks[layer.window] for layer in cache.layers}
    attention_mask = by_kind if len(by_kind) > 1 else next(iter(by_kind.values()))
    inputs = {**kwargs, cache_name: cache, "attention_mask": attention_mask, "position_ids": position_ids}
    return target.model(input_ids=ids, return_dict=True, **inputs)


def run_and_choose(
    cache: RoundCache,
    cache_name: str,
    target: Target,
    ids: torch.Tensor,
    position_ids: torch.Tensor,
    depths: torch.Tensor,
    visible: torch.Tensor,
    real: torch.Tensor | None,
    kwargs: dict[str, object],
) -> tuple[TargetOutput, torch.Tensor]:
    """Run the target, with the masks and the choices of greedy rounds in one graph; see [`RoundForward.__call__`]."""
    masks = cache.masks(visible, depths, real)
    outputs = run_target(cache, cache_name, target, ids, position_ids, masks, kwargs)
    choices = outputs.logits.to(ids.device, torch.float32).argmax(-1)
    return outputs, torch.cat([ids, choices], dim=-1)


def move_columns(cache: RoundCache, old: torch.Tensor, new: torch.Tensor) -> None:
    """Move tokens to other places of the round, all at once: from `old` `[batch, places]` to `new`, in all layers."""
    known: dict[object, tuple[torch.Tensor, torch.Tensor]] = {}
    for layer in cache.layers:
        key = layer.capacity, layer.device
        if key not in known:
            known[key] = layer._columns_at(old), layer._columns_at(new)
        layer.move(*known[key])
