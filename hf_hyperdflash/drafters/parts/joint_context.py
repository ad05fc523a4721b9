"""The contexts of several sequences, for one pass of a drafter over a block of each."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedConfig

from .block_attention import AttentionSpan
from .layers import ContextCache, ContextLayer, KeysValues


class JointContext:
    """Several [`~drafters.parts.layers.ContextCache`]s as one with a batch: each sequence keeps its own, which
    outlives the pass.

    Sequences differ in how many tokens they have pending and in how many they see. Pending tokens are padded on the
    right, and visible keys on the left, so that the blocks are the last columns.

    Args:
        contexts: One per sequence.
    """

    def __init__(self, contexts: Sequence[ContextCache]) -> None:
        self.contexts = contexts
        self.new_counts = [0 if context.pending is None else context.pending[1].shape[1] for context in contexts]

    def pending(self) -> tuple[torch.Tensor, torch.Tensor] | tuple[()]:
        """Return residual `[batch, new, ...]` and positions `[batch, new]` of all pending tokens; an empty tuple if
        there are none."""
        there = [context.pending for context in self.contexts if context.pending is not None]
        if not there:
            return ()
        residual, position_ids = (
            part.new_zeros(len(self.contexts), max(self.new_counts), *part.shape[2:]) for part in there[0]
        )
        for row, context in enumerate(self.contexts):
            if context.pending is not None:
                residual[row, : self.new_counts[row]], position_ids[row, : self.new_counts[row]] = (
                    part[0] for part in context.pending
                )
                context.pending = None
        return residual, position_ids

    def make_room(self, count: int, like: torch.Tensor, config: PreTrainedConfig) -> None:
        """Make room for `count` more tokens in every context."""
        for context in self.contexts:
            context.make_room(count, like[:1], config)

    def layer(self, index: int, new: int) -> ContextLayer:
        """Return a function for one layer's attention, as [`ContextCache.layer`] does, with padding on the left."""
        updates = [context.layer(index, own) for context, own in zip(self.contexts, self.new_counts)]

        def update(keys: torch.Tensor, values: torch.Tensor) -> KeysValues:
            rows = []
            for row, (own, write) in enumerate(zip(self.new_counts, updates)):
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
        """Return the mask for each kind of layer, boolean `[batch, 1, block_size, longest + block_size]`."""
        masks = {}
        for kind, span in spans.items():
            visible = [context.visible(kinds.index(kind), own) for context, own in zip(self.contexts, self.new_counts)]
            mask = torch.zeros(len(visible), 1, block_size, max(visible) + block_size, dtype=torch.bool, device=device)
            for row, own in enumerate(visible):
                row_mask = span.mask(block_size, own, device)
                mask[row, ..., max(visible) - own :] = True if row_mask is None else row_mask[0]
            masks[kind] = mask
        return masks

    def advance(self, new: int) -> None:
        """Keep the tokens that were new to each sequence."""
        for context, own in zip(self.contexts, self.new_counts):
            context.advance(own)


def _stacked(rows: Sequence[torch.Tensor], longest: int) -> torch.Tensor:
    first = rows[0]
    out = first.new_zeros(len(rows), first.shape[1], longest, first.shape[3])
    for place, row in enumerate(rows):
        out[place, :, longest - row.shape[2] :] = row[0]
    return out
