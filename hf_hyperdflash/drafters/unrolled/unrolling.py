"""The blocks of one round, of several texts: their last entries, and the blocks that continue these. Eagerly, from
compiled passes, and as one graph, which makes the entries of pending tokens and chooses the most probable drafts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import nn

from ...targets.compiled import view_for
from ...targets.target import Target
from ...trees.growth import AskedDrafts, DraftStep, GrownChains, GrownNodes, best_chances, grow_in_graph
from ...trees.padding import Padding
from ..parts.entry_context import EntryBatch, EntryContext
from ..parts.fixed_context import FixedEntries, layers_from
from ..parts.layers import KeysValues


class Unrolling:
    """The blocks of one round of several sequences: the last entry of each, and those that continue it.

    Blocks are numbered in the order in which they are run, and in one pass by their sequences. Their keys lie behind
    those of the longest context, until the next entries take their place. Trees grow by [`branch`], chains by
    [`extend_chain`].

    Args:
        drafter: The drafter.
        target: For its embedding.
        contexts: One for each sequence, none of them empty.

    Attributes:
        states: Of all blocks, `[blocks, config.block_size, config.hidden_size]`; in chains, of the last ones.
    """

    def __init__(self, drafter: Any, target: Target, contexts: Sequence[EntryContext]) -> None:
        self.drafter, self.target, self.batch = drafter, target, EntryBatch(contexts)
        self.size, self._column = drafter.config.block_size, self.batch.longest  # where the next keys are written
        self.states = torch.cat([cast(torch.Tensor, context.states) for context in contexts])
        self._positions = torch.cat([cast(torch.Tensor, context.position)[0] for context in contexts])
        self._sequences = list(range(len(contexts)))  # of each block
        # Of each block the column of its first key, and which of the earlier columns it sees.
        self._columns = torch.tensor(self.batch.lengths, device=drafter.device) - self.size
        self._sees = torch.arange(self._column, device=drafter.device) < self._columns[:, None]

    def branch(self, blocks: torch.Tensor, slots: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Run blocks that continue earlier ones, those of a sequence together, sequences in their order.

        Args:
            blocks: Numbers of the earlier blocks, `[new]`.
            slots: The slot of each from which the new block continues, `[new]`.
            tokens: The token that was chosen there, `[new]`.

        Returns:
            Their states, `[new, config.block_size, config.hidden_size]`. They have the next numbers.
        """
        size, device = self.size, self.drafter.device
        sequences = [self._sequences[block] for block in blocks.tolist()]
        padding = Padding([sequences.count(row) for row in range(len(self.batch.contexts))], device)
        new_columns = self._column + size * torch.tensor(padding.columns, device=device)
        columns = torch.arange(self._column + size * padding.width, device=device)
        first = self._columns[blocks, None]
        sees = nn.functional.pad(self._sees[blocks], (0, size * padding.width))
        sees |= (columns >= first) & (columns <= first + slots[:, None])
        of_slots = new_columns[:, None, None] + torch.arange(size, device=device)[:, None]
        own = (columns >= new_columns[:, None, None]) & (columns <= of_slots)
        mask = padding.add(sees[:, None] | own, True).flatten(1, 2)[:, None]  # what fills up is finite if it sees
        positions = self._positions[blocks] + (slots + 1 if self.drafter.moves_positions else 0)
        carried = self.drafter.next_condition(self.states[blocks, slots])
        states = padding.remove(self._run(padding.add(carried), padding.add(positions), padding.add(tokens), mask))
        self.states = torch.cat([self.states, states])
        self._positions = torch.cat([self._positions, positions])
        self._columns = torch.cat([self._columns, new_columns])
        self._sees = torch.cat([nn.functional.pad(self._sees, (0, size * padding.width)), sees])
        self._sequences += sequences
        return states

    def extend_chain(self, tokens: torch.Tensor) -> torch.Tensor:
        """Run the block of each sequence that continues the last slot of its last block. It sees everything before it,
        so no mask among blocks is needed.

        Args:
            tokens: The token that was chosen at that slot, `[batch]`.

        Returns:
            Its states, `[batch, config.block_size, config.hidden_size]`; those of the block before are forgotten.
        """
        device, mask = self.drafter.device, None
        if self.size > 1 or not self.batch.is_even:
            columns = torch.arange(self._column + self.size, device=device)
            of_slots = torch.arange(self._column, self._column + self.size, device=device)[:, None]
            lengths = torch.tensor(self.batch.lengths, device=device)[:, None, None]
            is_there = (columns < lengths) | (columns >= self.batch.longest)
            mask = (is_there & (columns <= of_slots))[:, None]
        if self.drafter.moves_positions:
            self._positions = self._positions + self.size
        carried = self.drafter.next_condition(self.states[:, -1:])
        self.states = self._run(carried, self._positions[:, None], tokens[:, None], mask)[:, 0]
        return self.states

    def _run(
        self, carried: torch.Tensor, positions: torch.Tensor, tokens: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        drafter, new = self.drafter, self.size * tokens.shape[1]
        self.batch.make_room(self._column + new, carried, drafter.config)
        layers = self.batch.at(self._column, new)
        self._column += new
        return drafter.run(carried, drafter.embed(self.target, tokens), positions, layers, mask)


class CompiledUnrolling(Unrolling):
    """The same with compiled passes. They are of all texts of the batch, and all as wide: how many blocks a pass needs
    depends on the text, and each width is a graph of its own.

    Args:
        drafter: The drafter.
        target: For its embedding.
        contexts: One for each sequence, none of them empty.
        most_blocks: Of a sequence in a pass.
    """

    def __init__(self, drafter: Any, target: Target, contexts: Sequence[FixedEntries], most_blocks: int) -> None:
        super().__init__(drafter, target, contexts)
        self._width = width_of_pass(most_blocks)

    def _run(
        self, carried: torch.Tensor, positions: torch.Tensor, tokens: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        contexts = cast("Sequence[FixedEntries]", self.batch.contexts)
        shared, blocks, device = contexts[0].shared, tokens.shape[1], tokens.device
        # A text that is not asked keeps its keys: what fills up lies behind them.
        starts = [[max(self._column, context.filled)] for context in shared.contexts]
        width = self._width
        stop = max(starts)[0] + self.size * width
        if stop > shared.capacity or contexts[0].buffer is not shared.all:
            return super()._run(carried, positions, tokens, mask)
        new, view = self.size * blocks, min(view_for(stop), shared.capacity)
        rows = torch.tensor([context.row for context in contexts], device=device)
        # What only fills up sees everything, so that it stays finite.
        visible = torch.ones(len(starts), 1, self.size * width, view, dtype=torch.bool, device=device)
        known = self._column + new
        visible[rows, :, :new, known:] = False
        if mask is not None:
            visible[rows, :, :new, :known] = mask

        def of_all(part: torch.Tensor) -> torch.Tensor:
            filled = part.new_zeros(len(starts), width, *part.shape[2:])
            filled[rows, :blocks] = part
            return filled

        inputs = of_all(carried), of_all(tokens), of_all(positions), torch.tensor(starts, device=device), visible
        self._column += new
        return shared.compiled(run_blocks, self.drafter, self.target, shared.all, *inputs)[rows, :blocks]


def width_of_pass(blocks: int) -> int:
    """Return the width of compiled passes of at most so many blocks: one of a few numbers."""
    width = 1
    while width < blocks:
        width *= 4
    return width


class FixedUnrolling:
    """The blocks of one round of several texts, as in [`Unrolling`], inside a graph: numbers of keys are tensors, and
    every pass looks at as many columns.

    Args:
        drafter: The drafter.
        target: For its embedding and LM head.
        buffers: Keys and values of every layer, `[texts, kv_heads, capacity, head_dim]`.
        position_ids: Of the anchors, `[texts, 1]`.
        residual: Of the pending tokens, the first ones of each text, `[texts, most, ...]`.
        next_ids: The tokens that follow them, `[texts, most]`.
        counts: How many keys there are of each text, and how many tokens are pending, `[texts, 2]`.
        view: How many columns there are to look at.

    Attributes:
        states: Of the last blocks, `[blocks, config.block_size, config.hidden_size]`; at first of the last entries.
    """

    def __init__(
        self,
        drafter: Any,
        target: Target,
        buffers: Sequence[KeysValues],
        position_ids: torch.Tensor,
        residual: torch.Tensor,
        next_ids: torch.Tensor,
        counts: torch.Tensor,
        view: int,
    ) -> None:
        self.drafter, self.target, self.buffers, self.size = drafter, target, buffers, drafter.config.block_size
        self._positions, self._columns = position_ids, torch.arange(view, device=counts.device)
        texts, most = next_ids.shape
        old, new = counts.unbind(1)
        # What only fills up lies behind the entries, where later blocks take its place before it is seen.
        positions = position_ids - new[:, None] + 1 + torch.arange(most, device=counts.device)
        states = self._run(drafter.condition(residual), next_ids, positions, old[:, None])
        self.states = states[torch.arange(texts, device=counts.device), (new - 1).clamp(min=0)]
        self._first = (old + self.size * new)[:, None]  # of each text, the column of its next key
        self._sees = torch.ones(texts, 0, dtype=torch.bool, device=counts.device)  # of each path, which nodes

    def logits(self, slots: int) -> torch.Tensor:
        """Return logits after the last blocks' first slots, `[blocks, slots, drafted tokens]`."""
        return self.drafter.drafted_logits(self.target, self.drafter.norm(self.states[:, :slots]))

    def extend_chains(self, tokens: torch.Tensor) -> None:
        """Run the block of each text that continues the last slot of its last one, from `tokens` `[texts]`."""
        if self.drafter.moves_positions:
            self._positions = self._positions + self.size
        carried = self.drafter.next_condition(self.states[:, -1:])
        self.states = self._run(carried, tokens[:, None], self._positions, self._first)[:, 0]
        self._first = self._first + self.size

    def branch(self, k: int, tokens: torch.Tensor, rows: torch.Tensor) -> DraftStep:
        """Continue paths of one slot a block, as many of each text; see [`~trees.growth.Steps`]."""
        if k:
            texts = len(self._first)
            paths, made = len(rows) // texts, self._sees.shape[1]
            own = torch.eye(paths, dtype=torch.bool, device=rows.device).repeat(texts, 1)
            self._sees = torch.cat([self._sees[rows], own], dim=1)
            ahead = self._columns - self._first  # [texts, view]
            nodes = ahead.clamp(0, made + paths - 1)[:, None].expand(-1, paths, -1)
            of_path = self._sees.unflatten(0, (texts, paths)).gather(2, nodes) & (ahead < made + paths)[:, None]
            carried = self.drafter.next_condition(self.states[rows, 0]).unflatten(0, (texts, paths))
            positions = (self._positions + k * self.drafter.moves_positions).expand(-1, paths)
            ids, mask = tokens.unflatten(0, (texts, paths)), of_path | (ahead < 0)[:, None]
            self.states = self._run(carried, ids, positions, self._first + made, mask).flatten(0, 1)
        return DraftStep(self.logits(1)[:, 0], vocabulary=self.drafter.draft_vocabulary(self.target))

    def _run(
        self,
        condition: torch.Tensor,
        ids: torch.Tensor,
        position_ids: torch.Tensor,
        first: torch.Tensor,
        mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run blocks; without a mask each slot sees all that is before it."""
        if mask is None:
            own = first + torch.arange(self.size * ids.shape[1], device=first.device)
            mask = self._columns <= own[..., None]
        return run_blocks(self.drafter, self.target, self.buffers, condition, ids, position_ids, first, mask[:, None])


def run_blocks(
    drafter: Any,
    target: Target,
    buffers: Sequence[KeysValues],
    condition: torch.Tensor,
    ids: torch.Tensor,
    position_ids: torch.Tensor,
    first: torch.Tensor,
    mask: torch.Tensor,
) -> torch.Tensor:
    """Run blocks whose keys lie in the columns from `first` on, `[texts, 1]`; the mask says how many columns there are
    to look at. See [`~drafters.unrolled.drafter.UnrolledDrafter.run`]."""
    layers = layers_from(buffers, first, mask.shape[-1])
    return drafter.run(condition, drafter.embed(target, ids), position_ids, layers, mask)


def draft_best(
    drafter: Any,
    target: Target,
    buffers: Sequence[KeysValues],
    position_ids: torch.Tensor,
    residual: torch.Tensor,
    next_ids: torch.Tensor,
    counts: torch.Tensor,
    view: int,
    depth: int,
    asked: AskedDrafts | None,
) -> tuple[GrownChains | GrownNodes | None, torch.Tensor]:
    """Draft the most probable chain of each text, or the tree of its most probable nodes.

    Args:
        counts: As for [`FixedUnrolling`], and how many drafts each text asks for, one after the other, `[texts, 3]`.
        depth: The most of any text, as many as chains have.
        asked: Which of them; `None` for the entries alone.

    Returns:
        The drafts, and the last entries' states.
    """
    unrolling = FixedUnrolling(drafter, target, buffers, position_ids, residual, next_ids, counts[:, :2], view)
    entries, size = unrolling.states, unrolling.size
    if asked is None:
        return None, entries
    if asked.tree_budget is not None:
        width = drafter.tree_width
        return grow_in_graph(asked, next_ids[:, 0], counts[:, 2], depth, unrolling.branch, width), entries
    blocks: list[torch.Tensor] = []
    signals: list[torch.Tensor] = []
    for start in range(0, depth, size):
        if start:
            unrolling.extend_chains(blocks[-1][:, -1])
        logits = unrolling.logits(min(size, depth - start))
        best = logits.argmax(-1)
        blocks.append(drafter.draft_ids[best] if drafter.config.draft_vocab_size else best)
        signals += [best_chances(logits)] if asked.has_signals else []
    return GrownChains(torch.cat(blocks, dim=1), None, torch.cat(signals, dim=1) if signals else None), entries
