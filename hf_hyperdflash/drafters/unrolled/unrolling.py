"""The blocks of one round: the last entries of several texts, and those that continue them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import nn

from ...targets.caches.slot_forward import view_for
from ...targets.target import Target
from ...trees.padding import Padding
from ..parts.entry_context import EntryBatch, EntryContext
from ..parts.fixed_context import FixedEntries
from .compiled import run_blocks


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
    """The same with compiled passes. They are of all texts of the batch, and of one of a few numbers of blocks."""

    def _run(
        self, carried: torch.Tensor, positions: torch.Tensor, tokens: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        contexts = cast("Sequence[FixedEntries]", self.batch.contexts)
        shared, blocks, device = contexts[0].shared, tokens.shape[1], tokens.device
        # A text that is not asked keeps its keys: what fills up lies behind them.
        starts = [[max(self._column, context.filled)] for context in shared.contexts]
        width = width_of_pass(blocks)
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
    """Return the number of blocks of a compiled pass that needs so many: one of a few numbers."""
    width = 1
    while width < blocks:
        width *= 4
    return width
