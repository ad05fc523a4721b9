"""One forward of the target over a draft tree, and what stays of it in the cache: a chain, a masked tree, a row per
path, or one row of a batch.

A round's rows are the anchor and the tree's nodes in their order, whatever the forward looks like.
"""

from __future__ import annotations

from typing import Any

import torch

from ..targets.attention_masks import attention_mask_for
from ..targets.caches.name import CACHE
from ..targets.caches.ragged import CachedSequence
from ..targets.target import Target, TreeVerification
from ..trees.layout import TreeLayout
from ..trees.tree import DraftTree
from .sequence import Row


class ChainRound:
    """A chain of drafts: the target's forward as it is.

    Args:
        target: The target.
        tree: The drafts.
        start: Tokens of the text before the anchor.
    """

    def __init__(self, target: Target, tree: DraftTree, start: int) -> None:
        self.target, self.tree, self.start = target, tree, start
        self.count = len(tree) + 1  # rows

    def inputs(self, row: Row, kwargs: dict[str, Any]) -> dict[str, Any]:
        """What the target's forward is called with."""
        ids = row.with_drafts(self.tree.tokens)
        return self._prepared(ids, self.count, kwargs | row.inputs(self.start, self.start + self.count))

    def _prepared(self, ids: torch.Tensor, count: int, kwargs: dict[str, Any]) -> dict[str, Any]:
        model: Any = self.target.model
        inputs = model.prepare_inputs_for_generation(
            ids, next_sequence_length=count, is_first_iteration=False, **kwargs
        )
        return {**inputs, "logits_to_keep": count}

    def logits(self, outputs: Any) -> torch.Tensor:
        """`[1, rows, config.vocab_size]`."""
        return outputs.logits[:, -self.count :]

    def place(self, row: int) -> tuple[int, int]:
        """Where a row is in the forward: in which sequence of the batch, and at which position."""
        return 0, row

    def seen(self, row: int) -> list[int]:
        """The positions of the forward that a row sees, in its sequence."""
        return list(range(row + 1))

    def kept_residual(self, residual: torch.Tensor, kept: list[int]) -> torch.Tensor:
        """Of the forward's residual streams `[batch, positions, ...]` those of the rows `kept`, `[1, kept, ...]`."""
        return residual[:, : residual.shape[1] - (self.count - len(kept))]

    def keep(self, cache: Any, kept: list[int]) -> None:
        """Leave the rows `kept`, a path from the anchor on, in the cache, and no others."""
        cache.crop(len(kept) - self.count)  # also of none: it trims stock layers to their window

    def take_back(self, cache: Any) -> None:
        """Leave nothing of the round in the cache, whose forward was interrupted."""
        self.target.abort_forward(cache, self.start)


class MaskedRound(ChainRound):
    """A tree in one forward: true positions, and a mask by which each node sees its ancestors (SpecInfer)."""

    def __init__(self, target: Target, tree: DraftTree, start: int) -> None:
        super().__init__(target, tree, start)
        self.rows = TreeLayout(tree)

    def inputs(self, row: Row, kwargs: dict[str, Any]) -> dict[str, Any]:
        ids, anchor = row.with_drafts(self.tree.tokens), row.positions(self.start, self.start + 1)
        cache = kwargs[CACHE]
        inputs = self._prepared(ids, self.count, kwargs)
        inputs["position_ids"] = anchor + self.rows.depths.to(anchor.device)
        inputs["attention_mask"] = self._masks(cache, row.mask(self.start), ids.device)
        self.target.begin_tree(cache, self.rows)
        return inputs

    def _masks(self, cache: Any, real: torch.Tensor | None, device: torch.device) -> Any:
        """One mask, or one for each kind of layer if they differ."""
        masks: dict[str, Any] = {}
        for layer in cache.layers:
            window = getattr(layer, "sliding_window", None)
            kind = "full_attention" if window is None else "sliding_attention"
            if kind not in masks:
                past = layer.get_mask_sizes(self.count)[0] - self.count
                mask = self.rows.mask(past, window, device)
                if real is not None and past:
                    mask[:, :past] &= real[:, -past:].bool()
                implementation = self.target.config._attn_implementation
                masks[kind] = attention_mask_for(implementation, mask[None, None], self.target.dtype)
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def seen(self, row: int) -> list[int]:
        return self.rows.paths[row]

    def kept_residual(self, residual: torch.Tensor, kept: list[int]) -> torch.Tensor:
        before = residual.shape[1] - self.count  # of a prompt
        places = [*range(before), *(before + row for row in kept)]
        return residual.index_select(1, self.rows.index(places, residual.device))

    def keep(self, cache: Any, kept: list[int]) -> None:
        self.target.accept(cache, self.rows, kept)


class RowRound(MaskedRound):
    """A row's tree in a forward over several rows ([`~decoding.batch.decoding`]).

    Args:
        target: The target.
        tree: The drafts.
        start: Tokens of the row's text before the anchor.
        batch_place: Of the row in the batch.
    """

    def __init__(self, target: Target, tree: DraftTree, start: int, batch_place: int) -> None:
        super().__init__(target, tree, start)
        self.batch_place = batch_place

    def positions(self, row: Row) -> torch.Tensor:
        """True positions of the rows, `[rows]`."""
        anchor = row.text_positions(self.start, self.start + 1)[0]
        return anchor + self.rows.depths.to(anchor.device)

    def logits(self, outputs: Any) -> torch.Tensor:
        return outputs.logits[self.batch_place : self.batch_place + 1, : self.count]

    def keep(self, cache: Any, kept: list[int]) -> None:
        cache.accept(kept)


class ForkedRound(ChainRound):
    """A tree as a batch: a sequence per path, each with the whole of what comes before. Right wherever a batch is, and
    slower than a mask, as what paths share is computed for each."""

    def __init__(self, target: Target, tree: DraftTree, start: int) -> None:
        super().__init__(target, tree, start)
        self.paths = [[0, *(node + 1 for node in path)] for path in tree.paths]
        self.length = max(map(len, self.paths))
        self._places = {row: (i, k) for i, path in reversed(list(enumerate(self.paths))) for k, row in enumerate(path)}

    def inputs(self, row: Row, kwargs: dict[str, Any]) -> dict[str, Any]:
        sequences, end = len(self.paths), self.start + self.length
        row.with_drafts(self.tree.tokens)  # which makes room for positions and mask
        kwargs[CACHE].batch_repeat_interleave(sequences)
        nodes = torch.tensor([(path + path[-1:] * self.length)[1 : self.length] for path in self.paths]) - 1
        drafts = self.tree.tokens[nodes.to(self.tree.tokens.device)].to(row.text.device)
        of_row = {
            name: value.expand(*value.shape[:-2], sequences, -1) for name, value in row.inputs(self.start, end).items()
        }
        others = {name: _repeated(value, sequences) for name, value in kwargs.items()}
        ids = torch.cat([row.text.expand(sequences, -1), drafts], dim=1)
        return self._prepared(ids, self.length, {**others, **of_row})

    def logits(self, outputs: Any) -> torch.Tensor:
        sequences, positions = zip(*(self.place(row) for row in range(self.count)))
        return outputs.logits[:, -self.length :][list(sequences), list(positions)][None]

    def place(self, row: int) -> tuple[int, int]:
        return self._places[row]

    def seen(self, row: int) -> list[int]:
        return list(range(self.place(row)[1] + 1))

    def kept_residual(self, residual: torch.Tensor, kept: list[int]) -> torch.Tensor:
        sequence = self._sequence(kept)
        return residual[sequence : sequence + 1, : len(kept)]

    def keep(self, cache: Any, kept: list[int]) -> None:
        cache.crop(len(kept) - self.length)
        cache.batch_select_indices(torch.tensor([self._sequence(kept)]))

    def take_back(self, cache: Any) -> None:
        super().take_back(cache)  # first: what undoes a running state is of as many sequences
        cache.batch_select_indices(torch.tensor([0]))

    def _sequence(self, kept: list[int]) -> int:
        return self.place(kept[-1])[0] if kept else 0


def _repeated(value: Any, times: int) -> Any:
    is_of_one = isinstance(value, torch.Tensor) and value.ndim > 0 and value.shape[0] == 1
    return value.repeat_interleave(times, dim=0) if is_of_one else value


_ROUNDS: dict[TreeVerification, type[ChainRound]] = {"mask": MaskedRound, "fork": ForkedRound}


def verification_of(target: Target, cache: Any) -> TreeVerification:
    """How a draft tree is verified on top of a cache."""
    how = target.tree_verification
    if how == "mask" and not target.can_mask(cache):
        how = "fork"
    can_fork = hasattr(cache, "batch_repeat_interleave")  # remote code's own may not
    return "chain" if how == "fork" and not can_fork else how


def round_over(target: Target, cache: Any, tree: DraftTree, start: int) -> ChainRound:
    """The round that verifies a tree on top of a cache.

    Raises:
        ValueError: If it has several paths, and the target verifies none but chains.
    """
    if isinstance(cache, CachedSequence):
        return RowRound(target, tree, start, cache.index)
    if tree.is_chain:
        return ChainRound(target, tree, start)
    how = verification_of(target, cache)
    if how == "chain":
        raise ValueError(
            f"The drafter made a tree with the parents {tree.parents} for a {target.config.model_type} target, whose "
            "trees are not verified: expected a chain of drafts."
        )
    return _ROUNDS[how](target, tree, start)
