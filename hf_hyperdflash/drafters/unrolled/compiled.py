"""A round of drafters of entries as one graph: the entries of pending tokens, then the most probable drafts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...targets.target import Target
from ...trees.growth import DraftStep, GrownNodes, grow_best
from ..parts.fixed_context import layers_from
from ..parts.layers import KeysValues


class FixedUnrolling:
    """The blocks of one round of several texts, as in [`~drafters.unrolled.drafter.Unrolling`], inside a graph:
    numbers of keys are tensors, and every pass looks at as many columns.

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
        return DraftStep(self.logits(1)[:, 0], vocabulary=self.drafter.draft_vocabulary)

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
    tree_size: tuple[int, int] | None,
) -> tuple[torch.Tensor | GrownNodes, torch.Tensor]:
    """Draft the most probable chain of each text, or the tree of its most probable nodes.

    Args:
        counts: As for [`FixedUnrolling`], and how many drafts each text asks for, one after the other, `[texts, 3]`.
        depth: The most of any text, as many as chains have; 0 for the entries alone.
        tree_size: The most nodes, and how many of a level go on; `None` for chains.

    Returns:
        Chains `[texts, depth]` or trees, and the last entries' states.
    """
    unrolling = FixedUnrolling(drafter, target, buffers, position_ids, residual, next_ids, counts[:, :2], view)
    entries, size = unrolling.states, unrolling.size
    if tree_size is not None:
        budget, width = tree_size
        grown = grow_best(next_ids[:, 0], counts[:, 2], depth, budget, unrolling.branch, None, width, width)
        return grown, entries
    blocks = [next_ids[:, :0]]
    for start in range(0, depth, size):
        if start:
            unrolling.extend_chains(blocks[-1][:, -1])
        best = unrolling.logits(min(size, depth - start)).argmax(-1)
        blocks.append(drafter.draft_ids[best] if drafter.config.draft_vocab_size else best)
    return torch.cat(blocks, dim=1), entries
