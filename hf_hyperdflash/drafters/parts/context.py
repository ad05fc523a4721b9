"""What a drafter keeps of texts: keys and values of their accepted tokens, in buffers that are indexed by column."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ...targets.caches.round_cache import write_columns
from ...targets.compiled import CompiledForwards, attended_for, keep_addresses
from ...targets.target import Target
from ...trees.padding import Padding
from ..sampling import DraftRequest
from .block_attention import AttentionSpan
from .layers import ContextLayer, KeysValues

_ALL = AttentionSpan()
_LONG = 2048  # tokens from which twice as many columns would be memory for nothing


class HasLayers(Protocol):
    """A drafter whose layers keep keys and values."""

    config: Any

    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def device(self) -> torch.device: ...
    def layers_read(self, target: Target) -> Sequence[int]: ...


class DraftContext:
    """What is kept of one text. Its keys and values are a row of a buffer, which texts that draft together share.

    A round writes behind a text's keys, and the next one overwrites what was not accepted.

    Args:
        window: How many of the last tokens any layer sees; `None` for all.
        size: Keys of a token.

    Attributes:
        end: The number of tokens of the text that were added.
        first: The token since which none was left out, as of a prompt that is longer than the window.
        length: The number of its keys in each layer.
        pending: Of accepted tokens whose keys the next round computes, the residual, positions and, for entries, the
            tokens that follow, `[1, new, ...]` each.
        states: Of the last entry, from which the next round drafts, `[1, config.block_size, config.hidden_size]`;
            `None` before the first, and where blocks do not continue each other.
        buffer: Keys and values of every layer, `[texts, kv_heads, capacity, head_dim]` each.
        row: Its own of them.
        compiled: What the rounds of its batch have in common while they run compiled; else `None`.
    """

    def __init__(self, window: int | None = None, size: int = 1) -> None:
        self.window, self.size, self.end, self.length, self.row = window, size, 0, 0, 0
        self.first = 0
        self.pending: tuple[torch.Tensor, ...] | None = None
        self.states: torch.Tensor | None = None
        self.buffer: list[KeysValues] = []
        self.compiled: CompiledRounds | None = None

    @property
    def new_count(self) -> int:
        """The number of pending tokens."""
        return 0 if self.pending is None else self.pending[1].shape[1]

    @property
    def keeps_all(self) -> bool:
        """Whether [`crop`] reaches any length."""
        return self.window is None

    def crop(self, end: int) -> bool:
        """Go back to the first `end` tokens of the text. Return whether it could: not where a window has moved on, or
        to tokens before some that were left out. Then it stays as it was."""
        count, new = self.end - end, self.new_count
        known = min(self.end - self.first, self.length + new)
        is_seen = self.window is None or known - count >= min(end, self.window)
        if count and (count < 0 or not is_seen or (self.size and 0 < self.first >= end)):
            return False
        if count < new:
            self.pending = tuple(part[:, : new - count] for part in self.pending or ())
        elif count:
            self.length, self.pending = self.length - self.size * (count - new), None
            self.states = self.states if count == new else None
        self.end = end
        return True


@dataclass(frozen=True)
class CompiledRounds:
    """What the rounds of a batch have in common that run compiled: the shapes are always the same.

    Attributes:
        run: Runs functions compiled.
        contexts: Of all texts. Those that have ended are run along.
        buffer: Theirs, which never grows.
        pending: What a pass reads of pending tokens, as in [`DraftContext`] `[texts, max_new, ...]`.
        spare: How many columns a round needs behind a text.
    """

    run: CompiledForwards
    contexts: Sequence[DraftContext]
    buffer: list[KeysValues]
    pending: tuple[torch.Tensor, ...]
    spare: int

    @property
    def attended(self) -> int:
        """How many columns the next pass is to look at: one of a few numbers."""
        return min(attended_for(max(each.length for each in self.contexts) + self.spare), self.buffer[0][0].shape[2])

    def fits(self, context: DraftContext) -> bool:
        """Return whether a text's next round can run compiled: it has pending tokens, no more than there is room for,
        and is still in the buffer."""
        has_room = context.length + self.spare <= self.buffer[0][0].shape[2]
        return context.buffer is self.buffer and has_room and 0 < context.new_count <= self.pending[1].shape[1]

    def inputs(self, requests: Sequence[DraftRequest], size: int) -> tuple[Any, ...]:
        """Return what a round reads of all texts, of which only some may be drafted for; what is pending stays so.

        Args:
            requests: Of those that are.
            size: Keys of a token.

        Returns:
            Their buffer; ids and positions of the anchors, `[texts, 1]`; pending tokens, as in [`padded_pending`]; the
            numbers of keys, of keys that pending tokens get, and of drafts to make, `[texts, 3]`, of which texts that
            are not drafted for have keys alone; and [`attended`].
        """
        device, texts = self.pending[0].device, len(self.contexts)
        counts = [[context.length, 0, 0] for context in self.contexts]
        for each in requests:
            counts[each.context.row][1:] = size * each.context.new_count, each.num_drafts
            for whole, part in zip(self.pending, each.context.pending or ()):
                whole[each.context.row, whole.shape[1] - part.shape[1] :] = part[0]
        ids, position_ids = anchors_of(requests, device)
        if len(requests) < texts:
            rows = torch.tensor([each.context.row for each in requests], device=device)
            ids, position_ids = (part.new_zeros(texts, 1).index_copy_(0, rows, part) for part in (ids, position_ids))
        return self.buffer, ids, position_ids, self.pending, torch.tensor(counts, device=device), self.attended


def anchors_of(requests: Sequence[DraftRequest], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and positions of the anchors, `[texts, 1]`."""
    # Not as they are: a view of a longer text has strides of its own, for which torch would compile anew.
    ids = torch.cat([each.ids[:, -1:] for each in requests])
    return ids.to(device), torch.cat([each.position_ids[:, -1:] for each in requests]).to(device)


def compile_contexts(
    drafter: HasLayers,
    target: Target,
    contexts: Sequence[DraftContext],
    columns: int,
    spare: int,
    max_new: int,
    run: CompiledForwards,
    has_ids: bool = False,
) -> None:
    """Let the rounds of a batch run compiled: its contexts get a buffer that never grows.

    Args:
        drafter: The drafter.
        target: The target that it reads.
        contexts: Of all texts.
        columns: The most keys of a text.
        spare: As in [`CompiledRounds`].
        max_new: The most pending tokens of a text.
        run: Runs functions compiled.
        has_ids: Whether the tokens that follow are pending, too.
    """
    buffer, shape, device = _move(drafter, contexts, columns + spare), (len(contexts), max_new), drafter.device
    width = len(drafter.layers_read(target)) * target.streams, drafter.config.target_hidden_size
    residual = torch.zeros(*shape, *width, dtype=target.dtype, device=device)
    pending = residual, *torch.zeros(1 + has_ids, *shape, dtype=torch.long, device=device)
    keep_addresses(*pending, *(part for layer in buffer for part in layer))
    rounds = CompiledRounds(run, contexts, buffer, pending, spare)
    for context in contexts:
        context.compiled = rounds


def rows_of(drafter: HasLayers, contexts: Sequence[DraftContext], count: int) -> list[KeysValues]:
    """Return keys and values of every layer, `[texts, kv_heads, capacity, head_dim]`, of texts that draft together,
    with room for `count` columns behind each. The texts share that buffer until they draft with others, so that a
    round copies nothing; it grows by a share of its columns."""
    buffer, first = contexts[0].buffer, contexts[0].row
    are_neighbours = all(each.buffer is buffer and each.row == first + i for i, each in enumerate(contexts))
    if not buffer or not are_neighbours or max(each.length for each in contexts) + count > buffer[0][0].shape[2]:
        kept = max(each.length if each.window is None else min(each.length, each.window) for each in contexts)
        columns = kept + count
        spare = columns + 64 if columns < _LONG or all(each.window for each in contexts) else columns // 8
        buffer, first = _move(drafter, contexts, columns + spare), 0
    rows = slice(first, first + len(contexts))
    return [(keys[rows], values[rows]) for keys, values in buffer]


def _move(drafter: HasLayers, contexts: Sequence[DraftContext], columns: int) -> list[KeysValues]:
    """Give the contexts a new buffer of so many columns, and return it."""
    config, dtype, device = drafter.config, drafter.dtype, drafter.device

    def zeros(heads: int, channels: int) -> torch.Tensor:  # as attention multiplies what it does not see by 0
        return torch.zeros(len(contexts), heads, columns, channels, dtype=dtype, device=device)

    shapes = getattr(drafter, "kept_shapes", None)
    if shapes is None:
        shapes = [((config.num_key_value_heads, config.head_dim),) * 2] * config.num_hidden_layers
    buffer = [(zeros(*keys), zeros(*values)) for keys, values in shapes]
    for row, context in enumerate(contexts):
        left = 0 if context.window is None else max(0, context.length - context.window)  # columns that nobody sees
        for parts, old in zip(buffer, context.buffer):
            for part, states in zip(parts, old):
                part[row, :, : context.length - left] = states[context.row, :, left : context.length]
        context.buffer, context.row, context.length = buffer, row, context.length - left
    return buffer


def padded_pending(contexts: Sequence[DraftContext], device: torch.device) -> tuple[torch.Tensor, ...]:
    """Return what is pending of texts, `[texts, most, ...]` each, filled up with zeros on the left; nothing if nothing
    is pending."""
    given = [context.pending for context in contexts if context.pending is not None]
    if len(contexts) == 1:
        return tuple(part.to(device) for pending in given for part in pending)
    padding = Padding([context.new_count for context in contexts], device)
    return tuple(padding.add(torch.cat(parts, dim=1)[0].to(device)) for parts in zip(*given))


class ContextColumns:
    """Where a pass writes keys and values, and what is seen: behind a text's own first the keys of its pending tokens,
    then those of the pass's blocks. What fills up pending tokens on the left is written behind all that.

    Args:
        keys_values: Of every layer, `[texts, kv_heads, capacity, head_dim]`.
        counts: Keys of each text, and new ones of its pending tokens, `[texts, 1 or more]`; or as numbers, if they
            are the same of all texts. Then a pass needs neither an index nor, mostly, a mask.
        new: The most keys of a text's pending tokens.
        queries: The number of keys behind these.
        attended: How many columns there are to look at, from the first on.
        shortest: Keys of the shortest text, those of its pending tokens included: a window leaves out what no text
            sees.
    """

    def __init__(
        self,
        keys_values: Sequence[KeysValues],
        counts: torch.Tensor | tuple[int, int],
        new: int,
        queries: int,
        attended: int,
        shortest: int = 0,
    ) -> None:
        self.keys_values, self.attended, width = keys_values, attended, new + queries
        self.stop: int | torch.Tensor  # the column behind the pending tokens
        self.columns: slice | torch.Tensor
        self._shortest = sum(counts) if isinstance(counts, tuple) else shortest
        if isinstance(counts, tuple):
            self.stop, self.columns = sum(counts), slice(counts[0], counts[0] + width)
        else:
            starts, places = counts[:, :1], torch.arange(width, device=counts.device)
            self.stop = counts[:, :2].sum(1, keepdim=True) if new else starts
            self.columns = starts + ((places - new + counts[:, 1:2]) % width if new else places)

    @classmethod
    def of(
        cls, drafter: HasLayers, contexts: Sequence[DraftContext], queries: int = 0, size: int = 1
    ) -> ContextColumns:
        """Return those of an eager pass over the pending tokens of texts, and `queries` behind these.

        Args:
            drafter: The drafter.
            contexts: Of the texts.
            queries: As above.
            size: Keys of a token.
        """
        new = size * max(context.new_count for context in contexts)
        keys_values = rows_of(drafter, contexts, new + queries)
        counts = [(context.length, size * context.new_count) for context in contexts]
        own = counts[0] if len(set(counts)) == 1 else torch.tensor(counts, device=drafter.device)
        ends = [sum(each) for each in counts]
        return cls(keys_values, own, new, queries, max(ends) + queries, min(ends))

    def layer(self, index: int, span: AttentionSpan = _ALL) -> ContextLayer:
        """Return a function for one layer's attention. It takes keys and values `[texts, kv_heads, new + queries,
        head_dim]`, and returns those that can be seen."""

        def update(keys: torch.Tensor, values: torch.Tensor) -> KeysValues:
            own, first = self.keys_values[index], self._first_seen(span)
            for buffer, states in zip(own, (keys, values)):
                if isinstance(self.columns, slice):
                    buffer[:, :, self.columns] = states
                else:
                    write_columns(buffer, self.columns, states)
            return own[0][:, :, first : self.attended], own[1][:, :, first : self.attended]

        return update

    def block_mask(self, span: AttentionSpan, block_size: int, device: torch.device) -> torch.Tensor | None:
        """Return what the slots of a block of each text see, boolean `[texts or 1, 1, block_size, keys]`; `None` where
        they see all that a layer returns."""
        if isinstance(self.stop, int):
            return span.mask(block_size, self.stop - self._first_seen(span), device)
        slots = torch.arange(block_size, device=device)[:, None]
        seen = torch.arange(self._first_seen(span), self.attended, device=device)
        ahead = seen - self.stop[:, None]  # [texts, 1, keys]
        of_context = (ahead < 0) & span.sees_context(slots, -ahead)
        of_block = span.sees_slots(block_size, device)[:, ahead[:, 0].clamp(0, block_size - 1)].transpose(0, 1)
        return torch.where((ahead >= 0) & (ahead < block_size), of_block, of_context)[:, None]

    def causal_mask(self, device: torch.device) -> torch.Tensor | None:
        """Return the mask by which each new key's slot sees its own text up to itself, boolean `[texts or 1, 1, new +
        queries, keys]`; `None` for one slot that sees all that a layer returns."""
        if isinstance(self.columns, slice):
            if self.columns.start + 1 == self.attended:
                return None
            own = torch.arange(self.columns.start, self.columns.stop, device=device)[None]
        else:
            own = self.columns
        return (torch.arange(self.attended, device=device) <= own[..., None])[:, None]

    def _first_seen(self, span: AttentionSpan) -> int:
        window = span.context_window
        return 0 if window is None else max(0, self._shortest - window)
