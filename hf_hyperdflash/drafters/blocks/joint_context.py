"""The contexts of several texts, for one pass of a block drafter over a block of each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..parts.block_attention import AttentionSpan
from ..parts.layers import ContextCache, ContextLayer, KeysValues


class JointContext:
    """As one [`~drafters.parts.layers.ContextCache`], whose rows are those of several: each keeps its own, which
    outlives the pass.

    What rows have pending, and what they see, is of different length: what is new is padded on the right, what is seen
    on the left, so that the blocks are the last columns.

    Args:
        contexts: One per row.
    """

    def __init__(self, contexts: Sequence[ContextCache]) -> None:
        self.contexts = contexts
        self.news = [0 if context.pending is None else context.pending[1].shape[1] for context in contexts]

    def pending(self) -> tuple[torch.Tensor, torch.Tensor] | tuple[()]:
        """Residual `[batch, new, ...]` and positions `[batch, new]` of what is new to the rows; nothing if nothing
        is."""
        there = [context.pending for context in self.contexts if context.pending is not None]
        if not there:
            return ()
        residual, position_ids = (
            part.new_zeros(len(self.contexts), max(self.news), *part.shape[2:]) for part in there[0]
        )
        for row, context in enumerate(self.contexts):
            if context.pending is not None:
                residual[row, : self.news[row]], position_ids[row, : self.news[row]] = (
                    part[0] for part in context.pending
                )
                context.pending = None
        return residual, position_ids

    def make_room(self, count: int, like: torch.Tensor, config: Any) -> None:
        """As of one context, in all."""
        for context in self.contexts:
            context.make_room(count, like[:1], config)

    def layer(self, index: int, new: int) -> ContextLayer:
        """As of one context, with padding on the left."""
        updates = [context.layer(index, own) for context, own in zip(self.contexts, self.news)]

        def update(keys: torch.Tensor, values: torch.Tensor) -> KeysValues:
            rows = []
            for row, (own, write) in enumerate(zip(self.news, updates)):
                place = slice(row, row + 1)
                rows.append(
                    write(*(torch.cat([part[place, :, :own], part[place, :, new:]], dim=2) for part in (keys, values)))
                )
            longest = max(own_keys.shape[2] for own_keys, _ in rows)
            return _stacked([own for own, _ in rows], longest), _stacked([own for _, own in rows], longest)

        return update

    def masks(
        self, kinds: Sequence[str], spans: dict[str, AttentionSpan], block_size: int, device: torch.device
    ) -> dict[str, torch.Tensor]:
        """Of each kind of layer, what its slots see, boolean `[batch, 1, block_size, longest + block_size]`."""
        masks = {}
        for kind, span in spans.items():
            seen = [context.visible(kinds.index(kind), own) for context, own in zip(self.contexts, self.news)]
            mask = torch.zeros(len(seen), 1, block_size, max(seen) + block_size, dtype=torch.bool, device=device)
            for row, own in enumerate(seen):
                of_row = span.mask(block_size, own, device)
                mask[row, ..., max(seen) - own :] = True if of_row is None else of_row[0]
            masks[kind] = mask
        return masks

    def advance(self, new: int) -> None:
        """Keep what was new to each row."""
        for context, own in zip(self.contexts, self.news):
            context.advance(own)


def _stacked(rows: Sequence[torch.Tensor], longest: int) -> torch.Tensor:
    first = rows[0]
    out = first.new_zeros(len(rows), first.shape[1], longest, first.shape[3])
    for place, row in enumerate(rows):
        out[place, :, longest - row.shape[2] :] = row[0]
    return out
