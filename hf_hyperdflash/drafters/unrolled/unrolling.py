"""The blocks of one round, of several texts: their last entries, and the blocks that continue these. Eagerly, from
compiled passes, or inside a graph that also makes the entries of pending tokens and chooses the drafts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ...targets.target import Target
from ...trees.growth import DraftStep, GraphPlan, GrownChains, GrownNodes, grow_in_graph
from ...trees.padding import Padding
from ..parts.context import ContextColumns
from ..parts.layers import KeysValues


class Unrolling:
    """The blocks of one round of several texts: the last entry of each, and those that continue it.

    Blocks are numbered in the order in which they are run, and in one pass by their texts. Their keys lie behind the
    entries, until the next entries take their place. Trees grow by [`branch`], chains by [`chain_step`].

    Args:
        drafter: The drafter.
        target: For its embedding.
        keys_values: Of every layer, `[texts, kv_heads, capacity, head_dim]`.
        states: Of the last entries of the texts that are drafted for, `[drafted, config.block_size,
            config.hidden_size]`.
        position_ids: Of these texts' anchors, `[drafted]`.
        lengths: How many keys there are of each text, `[texts, 1]`, or of all.
        attended: How many columns there are to look at: before the first pass, or with `is_fixed` in all of them.
        is_fixed: Whether it is a graph's round, or of compiled passes.
        rows: Which of the texts are drafted for; `None` for all.
        width: How many blocks of a text a pass has, some of which only fill up; `None` for no more than are needed.
        run: Runs a function compiled; `None` for eager passes, and inside a graph.

    Attributes:
        states: Of all blocks, `[blocks, config.block_size, config.hidden_size]`; in chains, of the last ones.
    """

    def __init__(
        self,
        drafter: Any,
        target: Target,
        keys_values: Sequence[KeysValues],
        states: torch.Tensor,
        position_ids: torch.Tensor,
        lengths: torch.Tensor | int,
        attended: int,
        is_fixed: bool = False,
        rows: Sequence[int] | None = None,
        width: int | None = None,
        run: Callable[..., torch.Tensor] | None = None,
    ) -> None:
        self.drafter, self.target, self.keys_values, self.size = (
            drafter,
            target,
            keys_values,
            drafter.config.block_size,
        )
        self.states, self._positions, self._lengths = states, position_ids, lengths
        self._attended, self._is_fixed, self._width, self._run_compiled = attended, is_fixed, width, run
        self._texts = len(keys_values[0][0])
        self._rows = list(range(self._texts) if rows is None else rows)  # of each block its text
        self._made = self._first = 0  # columns of each text behind its entries; the first block of the last pass
        # Of each block the column of its first key, counted from its text's last entry on, and which it sees of these.
        self._columns = torch.zeros(len(states), dtype=torch.long, device=states.device)
        self._sees = torch.zeros(len(states), self.size, dtype=torch.bool, device=states.device)

    def branch(
        self, blocks: torch.Tensor, slots: torch.Tensor, tokens: torch.Tensor, rows: Sequence[int] | None = None
    ) -> torch.Tensor:
        """Run blocks that continue earlier ones, those of a text together, texts in their order.

        Args:
            blocks: Numbers of the earlier blocks, `[new]`.
            slots: The slot of each from which the new block continues, `[new]`.
            tokens: The token that was chosen there, `[new]`.
            rows: The text of each, where that is known: inside a graph nothing can be looked up.

        Returns:
            Their states, `[new, config.block_size, config.hidden_size]`. They have the next numbers.
        """
        size, device = self.size, self.states.device
        rows = [self._rows[block] for block in blocks.tolist()] if rows is None else rows
        padding = self._padding(rows)
        before, made = self.size + self._made, self.size + self._made + size * padding.width
        columns, first = torch.arange(made, device=device), self._columns[blocks, None]
        own_first = before + size * padding.columns
        sees = nn.functional.pad(self._sees[blocks], (0, size * padding.width))
        sees |= (columns >= first) & (columns <= first + slots[:, None])
        of_slots = own_first[:, None, None] + torch.arange(size, device=device)[:, None]
        own = (columns >= own_first[:, None, None]) & (columns <= of_slots)
        mask = padding.add(sees[:, None] | own, True).flatten(1, 2)  # what fills up is finite if it sees
        if isinstance(self._lengths, int):
            mask = nn.functional.pad(mask, (self._lengths - size, 0), value=True)
        else:
            attended = self._attended if self._is_fixed else self._attended + made - size
            ahead = torch.arange(attended, device=device) - (self._lengths - size)  # [texts, attended]
            places = ahead.clamp(0, made - 1)[:, None].expand(-1, mask.shape[1], -1)
            mask = mask.gather(2, places) & (ahead < made)[:, None] | (ahead < 0)[:, None]
        positions = self._positions[blocks] + (slots + 1 if self.drafter.moves_positions else 0)
        carried = self.drafter.next_condition(self.states[blocks, slots])
        states = self._run(carried, tokens, positions, padding, mask[:, None])
        self.states = torch.cat([self.states, states])
        self._positions = torch.cat([self._positions, positions])
        self._columns = torch.cat([self._columns, own_first])
        self._sees = torch.cat([nn.functional.pad(self._sees, (0, size * padding.width)), sees])
        self._rows += rows
        return states

    def tree_step(self, k: int, tokens: torch.Tensor, rows: torch.Tensor) -> DraftStep:
        """Continue paths of blocks of one slot; see [`~trees.growth.Steps`]."""
        states = self.states
        if k:
            blocks, self._first = self._first + rows.to(states.device), len(states)
            paths = len(blocks) // self._texts  # of each text, inside a graph
            texts = (
                [text for text in range(self._texts) for _ in range(paths)]
                if self._is_fixed and self._run_compiled is None
                else None
            )
            states = self.branch(blocks, torch.zeros_like(blocks), tokens.to(states.device), texts)
        return DraftStep(self._logits_after(states[:, 0], k), vocabulary=self.drafter.draft_vocabulary(self.target))

    def chain_step(self, k: int, tokens: torch.Tensor, rows: torch.Tensor) -> DraftStep:
        """Do the same with one path of each text, slot by slot: the slots of a block do not depend on its tokens. A
        block sees everything before it, so that no mask among blocks is needed; states of earlier ones are
        forgotten."""
        block, slot = divmod(k, self.size)
        if block and not slot:
            if self.drafter.moves_positions:
                self._positions = self._positions + self.size
            carried, device = self.drafter.next_condition(self.states[:, -1]), self.states.device
            self.states = self._run(carried, tokens.to(device), self._positions, self._padding(self._rows), None)
        if not slot:
            self._logits = self._logits_after(self.states, block)
        return DraftStep(self._logits[:, slot], vocabulary=self.drafter.draft_vocabulary(self.target))

    def _logits_after(self, states: torch.Tensor, level: int) -> torch.Tensor:
        return self.drafter.drafted_logits(self.target, self.drafter.normed(states, level))

    def _padding(self, rows: Sequence[int]) -> Padding:
        counts = [sum(row == text for row in rows) for text in range(self._texts)]  # torch 2.8 compiles no `count`
        return Padding(counts, self.states.device, self._width)

    def _run(
        self,
        carried: torch.Tensor,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        padding: Padding,
        mask: torch.Tensor | None,
    ) -> torch.Tensor:
        new = self.size * padding.width
        first, self._made = self._lengths + self._made, self._made + new
        attended = self._attended if self._is_fixed else self._attended + self._made
        blocks = padding.add(carried), padding.add(tokens), padding.add(positions)
        inputs = self.drafter, self.target, self.keys_values, *blocks, first, attended, mask
        run = self._run_compiled
        return padding.remove(run_blocks(*inputs) if run is None else run(run_blocks, *inputs))


def run_blocks(
    drafter: Any,
    target: Target,
    keys_values: Sequence[KeysValues],
    condition: torch.Tensor,
    ids: torch.Tensor,
    position_ids: torch.Tensor,
    first: torch.Tensor | int,
    attended: int,
    mask: torch.Tensor | None,
) -> torch.Tensor:
    """Run blocks whose keys lie in the columns from `first` on, `[texts, 1]` or of all texts the same. Without a mask
    each slot sees all that is before it. See [`~drafters.unrolled.drafter.UnrolledDrafter.run`]."""
    known = (first, 0) if isinstance(first, int) else first
    columns = ContextColumns(keys_values, known, 0, drafter.config.block_size * ids.shape[1], attended)
    mask = columns.causal_mask(condition.device) if mask is None else mask
    layers = [columns.layer(index) for index in range(len(keys_values))]
    return drafter.run(condition, drafter.embed(target, ids), position_ids, layers, mask)


def run_entries(
    drafter: Any,
    target: Target,
    columns: ContextColumns,
    pending: tuple[torch.Tensor, ...],
    before: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Make the entries of pending tokens; return the states of each text's last one, `[texts, config.block_size,
    config.hidden_size]`. `before` is what entries need of those before them, of drafters of which they need it."""
    residual, position_ids, next_ids = pending
    layers = [columns.layer(index) for index in range(len(columns.keys_values))]
    mask, embeds = columns.causal_mask(residual.device), drafter.embed(target, next_ids)
    condition, more = drafter.condition(drafter.read(target, residual)), {} if before is None else {"before": before}
    return drafter.run(condition, embeds, position_ids + 1, layers, mask, last_only=True, **more)[:, 0]


def width_of_pass(blocks: int) -> int:
    """Return the width of compiled passes of at most so many blocks: one of a few numbers."""
    width = 1
    while width < blocks:
        width *= 4
    return width


def draft_best(
    drafter: Any,
    target: Target,
    keys_values: Sequence[KeysValues],
    ids: torch.Tensor,
    position_ids: torch.Tensor,
    pending: tuple[torch.Tensor, ...],
    counts: torch.Tensor,
    attended: int,
    plan: GraphPlan | None,
) -> tuple[GrownChains | GrownNodes | None, torch.Tensor]:
    """Make entries and draft the most probable chain of each text, or the tree of its most probable nodes, inside a
    graph.

    Args:
        keys_values, ..., attended: See [`~drafters.parts.context.CompiledRounds.inputs`].
        plan: Which drafts; `None` for the entries alone.

    Returns:
        The drafts, and the last entries' states.
    """
    size, max_new = drafter.config.block_size, pending[1].shape[1]
    columns, depth = ContextColumns(keys_values, counts, size * max_new, 0, attended), max_new - 1
    entries = run_entries(drafter, target, columns, pending)
    if plan is None:
        return None, entries
    unrolling = Unrolling(
        drafter, target, keys_values, entries, position_ids[:, 0], columns.stop, attended, is_fixed=True
    )
    step = unrolling.chain_step if plan.tree_budget is None else unrolling.tree_step
    return grow_in_graph(plan, ids[:, 0], counts[:, 2], depth, step, drafter.tree_width), entries
