"""What a drafter keeps of texts: keys and values of their accepted tokens, in buffers that are indexed by column."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ...targets.caches.slot_forward import CompiledForwards, view_for
from ...targets.caches.static import keep_addresses, write_columns
from ..sampling import DraftRequest
from .block_attention import AttentionSpan
from .layers import ContextLayer, KeysValues


class DraftContext:
    """What is kept of one text. Its keys and values are a row of a buffer, which texts that draft together share.

    A round writes behind a text's keys, and the next one overwrites what was not accepted.

    Args:
        window: How many of the last tokens any layer sees; `None` for all.

    Attributes:
        end: The number of tokens of the text that were added.
        length: The number of its keys in each layer.
        pending: Of accepted tokens whose keys the next round computes, the residual, positions and, for entries, the
            tokens that follow, `[1, new, ...]` each.
        buffer: Keys and values of every layer, `[texts, kv_heads, capacity, head_dim]` each.
        row: Its own of them.
        compiled: What the rounds of its batch have in common while they run compiled; else `None`.
    """

    def __init__(self, window: int | None = None) -> None:
        self.window, self.end, self.length, self.row = window, 0, 0, 0
        self.pending: tuple[torch.Tensor, ...] | None = None
        self.buffer: list[KeysValues] = []
        self.compiled: CompiledRounds | None = None

    @property
    def new_count(self) -> int:
        """The number of pending tokens."""
        return 0 if self.pending is None else self.pending[1].shape[1]


@dataclass(frozen=True)
class CompiledRounds:
    """What the rounds of a batch have in common that run compiled: the shapes are always the same.

    Attributes:
        run: Runs functions compiled.
        contexts: Of all texts. Those that have ended are run along.
        pending: What a pass reads of pending tokens, as in [`DraftContext`] `[texts, most_new, ...]`.
        spare: How many columns a round needs behind a text.
    """

    run: CompiledForwards
    contexts: Sequence[DraftContext]
    pending: tuple[torch.Tensor, ...]
    spare: int


def compile_contexts(
    drafter: Any,
    contexts: Sequence[DraftContext],
    columns: int,
    spare: int,
    pending: tuple[torch.Tensor, ...],
    run: CompiledForwards,
) -> None:
    """Let the rounds of a batch run compiled: its contexts get a buffer that never grows.

    Args:
        drafter: The drafter.
        contexts: Of all texts.
        columns: The most keys of a text.
        spare: As in [`CompiledRounds`].
        pending: Of zeros, as there.
        run: Runs functions compiled.
    """
    _move(drafter, contexts, columns + spare)
    keep_addresses(*pending, *(part for layer in contexts[0].buffer for part in layer))
    for context in contexts:
        context.compiled = CompiledRounds(run, contexts, pending, spare)


def rows_of(drafter: Any, contexts: Sequence[DraftContext], count: int) -> list[KeysValues]:
    """Return keys and values of every layer, `[texts, kv_heads, capacity, head_dim]`, of texts that draft together,
    with room for `count` columns behind each. The texts share that buffer until they draft with others, so that a
    round copies nothing; it grows by doubling."""
    buffer, first = contexts[0].buffer, contexts[0].row
    are_neighbours = all(each.buffer is buffer and each.row == first + i for i, each in enumerate(contexts))
    if not buffer or not are_neighbours or max(each.length for each in contexts) + count > buffer[0][0].shape[2]:
        kept = max(each.length if each.window is None else min(each.length, each.window) for each in contexts)
        _move(drafter, contexts, 2 * (kept + count) + 64)
        buffer, first = contexts[0].buffer, 0
    rows = slice(first, first + len(contexts))
    return [(keys[rows], values[rows]) for keys, values in buffer]


def _move(drafter: Any, contexts: Sequence[DraftContext], columns: int) -> None:
    """Give the contexts a new buffer of so many columns."""
    config, dtype, device = drafter.config, drafter.dtype, drafter.device
    shape = len(contexts), config.num_key_value_heads, columns, config.head_dim

    def zeros() -> torch.Tensor:  # as attention multiplies what it does not see by 0
        return torch.zeros(shape, dtype=dtype, device=device)

    buffer = [(zeros(), zeros()) for _ in range(config.num_hidden_layers)]
    for row, context in enumerate(contexts):
        left = 0 if context.window is None else max(0, context.length - context.window)  # columns that nobody sees
        for parts, old in zip(buffer, context.buffer):
            for part, states in zip(parts, old):
                kept = states[context.row, :, left : left + columns]  # also what a round has written behind the text
                part[row, :, : kept.shape[1]] = kept
        context.buffer, context.row, context.length = buffer, row, context.length - left


class RoundInputs(NamedTuple):
    """What the first pass of a round reads of the texts that draft together. Compiled, these are all texts of a batch;
    of those that draft nothing all numbers are 0 but that of the keys.

    Attributes:
        keys_values: Of every layer, `[texts, kv_heads, capacity, head_dim]`.
        ids, position_ids: Of the anchors, `[texts, 1]`.
        pending: As in [`DraftContext`], the first ones of each text, `[texts, new, ...]`; empty if there are none.
        counts: The numbers of keys, of pending tokens, and of drafts to make, `[texts, 3]`; those of keys and of
            pending tokens alone where they are the same of all texts and nothing is compiled.
        view: How many columns there are to look at.
        rows: Which of these texts the requests are of.
    """

    keys_values: list[KeysValues]
    ids: torch.Tensor
    position_ids: torch.Tensor
    pending: tuple[torch.Tensor, ...]
    counts: torch.Tensor | tuple[int, int]
    view: int
    rows: Sequence[int]


def round_inputs(drafter: Any, requests: Sequence[DraftRequest], queries: int) -> RoundInputs:
    """Return what the first pass of a round reads; what is pending stays so.

    Args:
        drafter: The drafter.
        requests: Of texts with a [`DraftContext`].
        queries: How many more columns an eager pass writes behind the pending tokens.
    """
    contexts: list[DraftContext] = [each.context for each in requests]
    # Not as they are: a view of a longer text has strides of its own, for which torch would compile anew.
    ids, position_ids = (
        torch.cat([getattr(each, part)[:, -1:] for each in requests]).to(drafter.device)
        for part in ("ids", "position_ids")
    )
    new, compiled = [context.new_count for context in contexts], contexts[0].compiled
    if compiled is None:
        keys_values = rows_of(drafter, contexts, max(new) + queries)
        lengths, pending = [context.length for context in contexts], padded_pending(contexts, drafter.device)
        view = max(map(sum, zip(lengths, new))) + queries
        if min(new) == max(new) and min(lengths) == max(lengths):
            return RoundInputs(keys_values, ids, position_ids, pending, (lengths[0], new[0]), view, range(len(new)))
        counts = [[*each, request.num_drafts] for *each, request in zip(lengths, new, requests)]
        counts = torch.tensor(counts, device=drafter.device)
        return RoundInputs(keys_values, ids, position_ids, pending, counts, view, range(len(new)))
    rows, numbers = [context.row for context in contexts], [[each.length, 0, 0] for each in compiled.contexts]
    for row, each in zip(rows, requests):
        numbers[row][1:] = each.context.new_count, each.num_drafts
        for own, given in zip(compiled.pending, each.context.pending or ()):
            own[row, : given.shape[1]] = given[0]
    if len(rows) < len(numbers):
        index = torch.tensor(rows, device=drafter.device)
        ids, position_ids = (
            part.new_zeros(len(numbers), 1).index_copy_(0, index, part) for part in (ids, position_ids)
        )
    keys_values = contexts[0].buffer
    view = min(view_for(max(numbers)[0] + compiled.spare), keys_values[0][0].shape[2])
    counts = torch.tensor(numbers, device=drafter.device)
    return RoundInputs(keys_values, ids, position_ids, compiled.pending, counts, view, rows)


def padded_pending(contexts: Sequence[DraftContext], device: torch.device) -> tuple[torch.Tensor, ...]:
    """Return what is pending of texts, `[texts, most, ...]` each, with zeros on the right; empty if nothing is."""
    given, most = [context.pending for context in contexts], max(context.new_count for context in contexts)
    if len(given) == 1:
        return tuple(part.to(device) for part in given[0] or ())
    padded = []
    for parts in zip(*(pending for pending in given if pending is not None)):
        whole = parts[0].new_zeros(len(given), most, *parts[0].shape[2:], device=device)
        own = iter(parts)
        for row, pending in enumerate(given):
            if pending is not None:
                part = next(own)
                whole[row, : part.shape[1]] = part[0]
        padded.append(whole)
    return tuple(padded)


class ContextColumns:
    """Where a pass over a block of each text writes keys and values, and what the blocks see: first the keys of the
    pending tokens, behind the text's own, then those of the block.

    Args:
        keys_values: As in [`RoundInputs`].
        counts: As there.
        view: As there.
        new: The most pending tokens of a text. What is beyond a text's own is overwritten by its block.
    """

    def __init__(
        self, keys_values: Sequence[KeysValues], counts: torch.Tensor | tuple[int, int], view: int, new: int
    ) -> None:
        self.keys_values, self.counts, self.view, self.new = keys_values, counts, view, new

    def layer(self, index: int, span: AttentionSpan) -> ContextLayer:
        """Return a function for one layer's attention. It takes keys and values `[texts, kv_heads, new + block_size,
        head_dim]`, and returns those that the blocks see."""
        counts = self.counts

        def update(keys: torch.Tensor, values: torch.Tensor) -> KeysValues:
            own_keys, own_values = self.keys_values[index]
            if isinstance(counts, tuple):  # all texts have the same columns: a slice, of which all is seen
                first, stop = self._first_seen(span), counts[0] + keys.shape[2]
                own_keys[:, :, counts[0] : stop] = keys
                own_values[:, :, counts[0] : stop] = values
                return own_keys[:, :, first:stop], own_values[:, :, first:stop]
            places, starts, stops = torch.arange(keys.shape[2], device=keys.device), counts[:, :1], self._stops
            for buffer, states in ((own_keys, keys), (own_values, values)):
                write_columns(buffer, starts + places[: self.new], states[:, :, : self.new])
                write_columns(buffer, stops + places[: keys.shape[2] - self.new], states[:, :, self.new :])
            return own_keys[:, :, : self.view], own_values[:, :, : self.view]

        return update

    def mask(self, span: AttentionSpan, block_size: int, device: torch.device) -> torch.Tensor | None:
        """Return what the slots of the blocks see, boolean `[texts or 1, 1, block_size, keys]`; `None` where they see
        all that a layer returns."""
        if isinstance(self.counts, tuple):
            return span.mask(block_size, sum(self.counts) - self._first_seen(span), device)
        slots = torch.arange(block_size, device=device)[:, None]
        ahead = torch.arange(self.view, device=device) - self._stops[:, None]  # [texts, 1, view]
        of_context = (ahead < 0) & span.sees_context(slots, -ahead)
        of_block = span.sees_slots(block_size, device)[:, ahead[:, 0].clamp(0, block_size - 1)].transpose(0, 1)
        return torch.where((ahead >= 0) & (ahead < block_size), of_block, of_context)[:, None]

    def _first_seen(self, span: AttentionSpan) -> int:
        window = span.context_window
        return 0 if window is None else max(0, sum(self.counts) - window)

    @property
    def _stops(self) -> torch.Tensor:
        return self.counts[:, :2].sum(1, keepdim=True)  # of each text, the column of its anchor
