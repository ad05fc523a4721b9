"""One forward of the target over drafts, and what stays of it in the cache: a chain, a masked tree, a tree with a copy
of the sequence for each path, the trees of several sequences, or any of them in a static cache.

A round's verification positions are, for each sequence, the anchor and the tree's nodes in their order, whatever the
forward looks like.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from itertools import islice
from typing import Any, Literal, NamedTuple, cast

import torch
from torch.nn.attention.flex_attention import BlockMask
from transformers.generation.utils import GenerationMixin

from ..targets.attention_masks import CausalMasks, attention_mask_for
from ..targets.caches.name import CACHE
from ..targets.caches.protocols import RewindableCache, RewindableLayer
from ..targets.caches.ragged import RaggedCache, RaggedLayer
from ..targets.caches.slot_forward import SlotForward
from ..targets.target import Target, TargetOutput, TreeVerification
from ..trees.layout import TreeLayout
from ..trees.tree import DraftTree
from .tokens import TokenBuffer

Verification = TreeVerification | Literal["ragged", "slots"]
"""How the target verifies a batch's drafts. `"ragged"` is a mask over sequences of different length, and `"slots"` is
the same over a static cache."""


class Choices(NamedTuple):
    """What decides a greedy round of a sequence, on the host.

    Attributes:
        drafts: The tree's tokens.
        after: The target's most probable tokens after the anchor and after each node.
    """

    drafts: list[int]
    after: list[int]


class ChainRound:
    """A chain of drafts of one sequence: the target's forward as it is.

    Args:
        target: The target.
        texts: The tokens of each sequence, the anchor last.
        trees: The drafts of each.
    """

    def __init__(self, target: Target, texts: Many[TokenBuffer], trees: Many[DraftTree]) -> None:
        self.target, self.texts, self.trees = target, texts, trees
        self.starts = [text.end - 1 for text in texts]  # tokens before the anchor
        self.counts = [len(tree) + 1 for tree in trees]  # verification positions
        self.width = max(self.counts)

    def forward(self, kwargs: dict[str, object]) -> TargetOutput:
        """Run the target over the anchors and the drafts.

        Args:
            kwargs: The arguments that are the same in every round, with the cache.
        """
        return cast(Any, self.target.model)(**self.inputs(kwargs), return_dict=True)

    def inputs(self, kwargs: dict[str, object]) -> dict[str, object]:
        """Return the arguments of the target's forward.

        Args:
            kwargs: Those that are the same in every round, with the cache.
        """
        text, start = self.texts[0], self.starts[0]
        ids = text.with_drafts(self.trees[0].tokens)
        return self._prepare(ids, self.width, kwargs | text.inputs(start, start + self.width))

    def _prepare(self, ids: torch.Tensor, count: int, kwargs: dict[str, object]) -> dict[str, object]:
        inputs = cast(Any, self.target.model).prepare_inputs_for_generation(
            ids, next_sequence_length=count, is_first_iteration=False, **kwargs
        )
        return {**inputs, "logits_to_keep": count}

    def logits(self, outputs: TargetOutput, index: int) -> torch.Tensor:
        """Return those of a sequence, `[1, positions, config.vocab_size]`."""
        return outputs.logits[index : index + 1, -self.counts[index] :]

    def choices(self, logits: Many[torch.Tensor]) -> list[Choices]:
        """Return what decides a greedy round of each sequence, with one wait for the device.

        Args:
            logits: Of each, `[1, positions, config.vocab_size]`.
        """
        best = [scores[0].argmax(-1) for scores in logits]
        tokens = [tree.tokens.to(own.device) for tree, own in zip(self.trees, best)]
        both = iter(torch.cat([*tokens, *best]).cpu().tolist())
        drafts, after = ([list(islice(both, len(part))) for part in parts] for parts in (tokens, best))
        return [Choices(*own) for own in zip(drafts, after)]

    def residual(self, captured: torch.Tensor, index: int, kept: list[int]) -> torch.Tensor:
        """Return the residual streams of a sequence's positions `kept`, `[1, kept, ...]`.

        Args:
            captured: The forward's, `[batch, seq, ...]`.
            index: Of the sequence in the batch.
            kept: A path from the anchor on.
        """
        return captured[:, : len(kept)]

    def accept(self, cache: RewindableCache, kept: list[list[int]]) -> None:
        """Leave the positions `kept` of each sequence, a path from the anchor on, in the cache, and no others."""
        cache.crop(len(kept[0]) - self.width)  # also of none: it trims stock layers to their window
        self._check_length(cache, kept)

    def _check_length(self, cache: RewindableCache, kept: list[list[int]]) -> None:
        expected = self.starts[0] + len(kept[0])
        if cache.get_seq_length() != expected:
            raise RuntimeError(
                f"The cache, a {type(cache).__name__}, holds {cache.get_seq_length()} tokens after it was cropped, "
                f"expected {expected}: its `crop(-n)` must take back the last n tokens."
            )

    def abort(self, cache: RewindableCache) -> None:
        """Leave nothing of the round in the cache, whose forward was interrupted."""
        self.target.abort_forward(cache, self.starts[0])

    # What hidden states and attention weights are read by, of the only sequence

    def coordinates(self, position: int) -> tuple[int, int]:
        """Return where a verification position is in the forward: its batch index, and its place there."""
        return 0, position

    def visible(self, position: int) -> list[int]:
        """Return the places of the forward that a verification position sees, its own last."""
        return list(range(position + 1))


class CausalRound(ChainRound):
    """A chain whose forward gets a view of one mask, where transformers would make one anew in each round.

    Args:
        target: The target.
        texts: The tokens of the only sequence.
        trees: Its drafts.
        masks: Of the sequence's positions.
    """

    def __init__(self, target: Target, texts: Many[TokenBuffer], trees: Many[DraftTree], masks: CausalMasks) -> None:
        super().__init__(target, texts, trees)
        self.masks = masks

    @staticmethod
    def fits(target: Target, text: TokenBuffer, kwargs: dict[str, object]) -> bool:
        """Return whether the target's forward needs no more than this: its layers see all that is before, nothing of
        the text is padding, and nobody prepares other arguments.

        Args:
            target: The target.
            text: The only sequence.
            kwargs: The arguments that are the same in every round, with the cache.
        """
        model = cast(Any, target.model)
        prepares = getattr(model.prepare_inputs_for_generation, "__func__", None)
        return (
            prepares is GenerationMixin.prepare_inputs_for_generation
            and kwargs.keys() <= {CACHE, "use_cache", "logits_to_keep"}
            and target.config._attn_implementation == "sdpa"
            and target.takes_static_caches
            and not any(target.windows)
            and text.mask(text.end) is None
            and text.ids.device == model.device
        )

    def inputs(self, kwargs: dict[str, object]) -> dict[str, object]:
        text, start = self.texts[0], self.starts[0]
        ids = text.with_drafts(self.trees[0].tokens)[:, start:]
        own = {"input_ids": ids.clone(), "position_ids": text.positions(start, start + self.width)}
        if self.width > 1:  # else none is needed, and attention without one is faster
            own["attention_mask"] = self.masks(start, self.width)
        return {**kwargs, **own, "logits_to_keep": self.width}


class PromptRound(ChainRound):
    """The prompts of a batch, which the target has just run: nothing was drafted, and all of them stays."""

    def accept(self, cache: RewindableCache, kept: list[list[int]]) -> None:
        pass


class MaskedRound(ChainRound):
    """Trees in one forward: true positions, and a mask by which each node sees its ancestors (SpecInfer)."""

    def __init__(self, target: Target, texts: Many[TokenBuffer], trees: Many[DraftTree]) -> None:
        super().__init__(target, texts, trees)
        self.layouts = [TreeLayout(tree) for tree in trees]

    def inputs(self, kwargs: dict[str, object]) -> dict[str, object]:
        cache, device = cast(RewindableCache, kwargs[CACHE]), self.texts[0].ids.device
        positions = [
            text.positions(start, start + 1) + layout.depths.to(device)
            for text, start, layout in zip(self.texts, self.starts, self.layouts)
        ]
        ids = [
            text.with_drafts(tree.tokens)[:, start:] for text, tree, start in zip(self.texts, self.trees, self.starts)
        ]
        inputs = self._prepare(self._filled_up(ids), self.width, kwargs)
        inputs["position_ids"] = self._filled_up(positions)
        inputs["attention_mask"] = self._masks(cache, device)
        self._begin(cache)
        return inputs

    def _filled_up(self, parts: list[torch.Tensor]) -> torch.Tensor:
        """Join what all sequences have, `[..., batch, width]`, with zeros behind shorter ones."""
        if len(parts) == 1:
            return parts[0]
        pad = torch.nn.functional.pad
        return torch.cat([pad(part, (0, self.width - part.shape[-1])) for part in parts], dim=-2)

    def _begin(self, cache: RewindableCache) -> None:
        self.target.begin_tree(cache, self.layouts[0])

    def _past(self, layer: RewindableLayer) -> list[int]:
        """Return how many keys of each sequence a layer's forward reads beside its own."""
        return [layer.get_mask_sizes(self.width)[0] - self.width]

    def _masks(
        self, cache: RewindableCache, device: torch.device
    ) -> torch.Tensor | BlockMask | dict[str, torch.Tensor | BlockMask]:
        """Return one mask, or one for each kind of layer if they differ."""
        masks: dict[str, torch.Tensor | BlockMask] = {}
        for layer in cache.layers:
            window = getattr(layer, "sliding_window", None)
            kind = "full_attention" if window is None else "sliding_attention"
            if kind not in masks:
                mask = self._mask(self._past(layer), window, device)
                masks[kind] = attention_mask_for(self.target.config._attn_implementation, mask, self.target.dtype)
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def _mask(self, past: list[int], window: int | None, device: torch.device) -> torch.Tensor:
        """Return who sees whom, `[batch, 1, width, max(past) + width]`: first what is in the cache."""
        masks = []
        for text, start, layout, seen in zip(self.texts, self.starts, self.layouts, past):
            mask, real = layout.mask(seen, window, device), text.mask(start)
            if real is not None and seen:
                mask[:, :seen] &= real[0, -seen:].bool()
            masks.append(mask)
        if len(masks) == 1:
            return masks[0][None, None]
        columns = max(past)
        # What is filled up sees itself, so that it is finite.
        whole = torch.zeros(len(masks), 1, self.width, columns + self.width, dtype=torch.bool, device=device)
        whole[..., columns:] = torch.eye(self.width, dtype=torch.bool, device=device)
        for index, (mask, seen, count) in enumerate(zip(masks, past, self.counts)):
            whole[index, 0, :count, :seen] = mask[:, :seen]
            whole[index, 0, :count, columns : columns + count] = mask[:, seen:]
        return whole

    def residual(self, captured: torch.Tensor, index: int, kept: list[int]) -> torch.Tensor:
        return captured.index_select(1, self.layouts[index].index(kept, captured.device))

    def accept(self, cache: RewindableCache, kept: list[list[int]]) -> None:
        self.target.accept(cache, self.layouts[0], kept[0])
        self._check_length(cache, kept)

    def visible(self, position: int) -> list[int]:
        return self.layouts[0].paths[position]


class RaggedRound(MaskedRound):
    """The trees of several sequences in one forward, over a [`~targets.caches.ragged.RaggedCache`]."""

    def _begin(self, cache: RewindableCache) -> None:
        pass

    def _past(self, layer: RewindableLayer) -> list[int]:
        return cast(RaggedLayer, layer).lengths

    def logits(self, outputs: TargetOutput, index: int) -> torch.Tensor:
        return outputs.logits[index : index + 1, : self.counts[index]]

    def residual(self, captured: torch.Tensor, index: int, kept: list[int]) -> torch.Tensor:
        return super().residual(captured[index : index + 1], index, kept)

    def accept(self, cache: RewindableCache, kept: list[list[int]]) -> None:
        cast(RaggedCache, cache).accept(kept)

    def abort(self, cache: RewindableCache) -> None:
        """Do nothing: nobody goes on with this cache."""


class SlotRound(ChainRound):
    """Chains or trees of one or several sequences in one forward over a static cache. Rounds of one width have the
    same shapes, so that they can be compiled: what is beyond a tree's nodes is not looked at.

    Args:
        target: The target.
        texts: The tokens of each sequence.
        trees: The drafts of each.
        slots: The sequences' cache, and what runs the target over it.
    """

    def __init__(self, target: Target, texts: Many[TokenBuffer], trees: Many[DraftTree], slots: SlotForward) -> None:
        super().__init__(target, texts, trees)
        self.slots, self.width = slots, slots.width_for(self.width, max(self.starts))
        self.paths = [None if tree.is_chain else TreeLayout(tree).paths for tree in trees]
        self._chosen: torch.Tensor | None = None

    def forward(self, kwargs: dict[str, object]) -> TargetOutput:
        rows, size, device = self.slots.rows, self.slots.size, self.texts[0].ids.device
        tokens = [torch.cat([text.ids[0, -1:], tree.tokens.to(device)]) for text, tree in zip(self.texts, self.trees)]
        if [self.width] * size == self.counts:
            ids = tokens[0][None] if size == 1 else torch.stack(tokens)
        else:
            ids = tokens[0].new_zeros(size, self.width)
            for row, own in zip(rows, tokens):
                ids[row, : len(own)] = own
        depths, visible = self.slots.chains(self.width)
        if any(self.paths):
            depths, visible = depths.cpu().clone(), visible.cpu().clone()
            for row, paths in zip(rows, self.paths):
                for position, path in enumerate(paths or ()):
                    depths[row, position] = len(path) - 1
                    visible[row, position] = False
                    visible[row, position, path] = True
            depths, visible = depths.to(device), visible.to(device)
        of_each = [text.positions(start, start + 1) for text, start in zip(self.texts, self.starts)]
        anchors = torch.cat(of_each, dim=-2)
        if size > len(rows):
            anchors = anchors.new_zeros(*anchors.shape[:-2], size, 1).index_copy(-2, self.slots.index, anchors)
        outputs, self._chosen = self.slots(ids, anchors, depths, visible, max(self.starts), kwargs)
        return outputs

    def choices(self, logits: Many[torch.Tensor]) -> list[Choices]:
        if self._chosen is None:
            return super().choices(logits)
        chosen = self._chosen.cpu().tolist()
        of_each = zip((chosen[row] for row in self.slots.rows), self.counts)
        return [Choices(row[1:count], row[self.width : self.width + count]) for row, count in of_each]

    def logits(self, outputs: TargetOutput, index: int) -> torch.Tensor:
        row = self.slots.rows[index]
        return outputs.logits[row : row + 1, : self.counts[index]]

    def residual(self, captured: torch.Tensor, index: int, kept: list[int]) -> torch.Tensor:
        own = captured[self.slots.rows[index], None]
        is_prefix = kept == list(range(len(kept)))
        return own[:, : len(kept)] if is_prefix else own[:, torch.tensor(kept, device=own.device)]

    def accept(self, cache: RewindableCache, kept: list[list[int]]) -> None:
        self.slots.accept(kept, self.width, any(self.paths))

    def abort(self, cache: RewindableCache) -> None:
        """Do nothing: a round counts no token before it is accepted."""

    def visible(self, position: int) -> list[int]:
        paths = self.paths[0]
        return list(range(position + 1)) if paths is None else paths[position]


class ForkedRound(ChainRound):
    """A tree as a batch: a copy of the sequence for each path, each with the whole of what comes before. Right
    wherever a batch is, and slower than a mask, as what paths share is computed for each."""

    def __init__(self, target: Target, texts: Many[TokenBuffer], trees: Many[DraftTree]) -> None:
        super().__init__(target, texts, trees)
        self.paths = [[0, *(node + 1 for node in path)] for path in trees[0].paths]
        self.length = max(map(len, self.paths))
        self._coordinates = {
            position: (i, k) for i, path in reversed(list(enumerate(self.paths))) for k, position in enumerate(path)
        }

    def inputs(self, kwargs: dict[str, object]) -> dict[str, object]:
        text, tokens, copies = self.texts[0], self.trees[0].tokens, len(self.paths)
        text.with_drafts(tokens)  # which makes room for positions and mask
        cast(RewindableCache, kwargs[CACHE]).batch_repeat_interleave(copies)
        nodes = torch.tensor([(path + path[-1:] * self.length)[1 : self.length] for path in self.paths]) - 1
        drafts = tokens[nodes.to(tokens.device)].to(text.ids.device)
        own = {
            name: value.expand(*value.shape[:-2], copies, -1)
            for name, value in text.inputs(self.starts[0], self.starts[0] + self.length).items()
        }
        others = {name: _repeated(value, copies) for name, value in kwargs.items()}
        ids = torch.cat([text.unpadded.expand(copies, -1), drafts], dim=1)
        return self._prepare(ids, self.length, {**others, **own})

    def logits(self, outputs: TargetOutput, index: int) -> torch.Tensor:
        paths, places = zip(*(self.coordinates(position) for position in range(self.width)))
        return outputs.logits[:, -self.length :][list(paths), list(places)][None]

    def residual(self, captured: torch.Tensor, index: int, kept: list[int]) -> torch.Tensor:
        path = self._path_through(kept)
        return captured[path : path + 1, : len(kept)]

    def accept(self, cache: RewindableCache, kept: list[list[int]]) -> None:
        cache.crop(len(kept[0]) - self.length)
        cache.batch_select_indices(torch.tensor([self._path_through(kept[0])]))
        self._check_length(cache, kept)

    def abort(self, cache: RewindableCache) -> None:
        super().abort(cache)  # first: what undoes a running state is of as many copies
        cache.batch_select_indices(torch.tensor([0]))

    def coordinates(self, position: int) -> tuple[int, int]:
        return self._coordinates[position]

    def visible(self, position: int) -> list[int]:
        return list(range(self.coordinates(position)[1] + 1))

    def _path_through(self, kept: list[int]) -> int:
        return self.coordinates(kept[-1])[0] if kept else 0


def _repeated(value: object, times: int) -> object:
    if isinstance(value, torch.Tensor) and value.ndim > 0 and value.shape[0] == 1:
        return value.repeat_interleave(times, dim=0)
    return value


_ROUNDS: dict[Verification, type[ChainRound]] = {"mask": MaskedRound, "fork": ForkedRound, "ragged": RaggedRound}


def verification_of(target: Target, cache: RewindableCache) -> TreeVerification:
    """Return how the target verifies a draft tree of one sequence on top of a cache."""
    how = target.tree_verification
    if how == "cache":
        how = "mask" if all(getattr(layer, "can_verify_trees", False) for layer in cache.layers) else "fork"
    can_fork = hasattr(cache, "batch_repeat_interleave")  # remote code's own may not
    return "chain" if how == "fork" and not can_fork else how


def round_over(
    target: Target,
    verification: Verification,
    texts: Many[TokenBuffer],
    trees: Many[DraftTree],
    masks: CausalMasks | None = None,
) -> ChainRound:
    """Return the round that verifies the trees of a batch.

    Args:
        target: The target.
        verification: How it verifies trees.
        texts: The tokens of each sequence.
        trees: The drafts of each.
        masks: Where the only sequence's chains get their masks from; `None` if transformers makes them.

    Raises:
        ValueError: If one has several paths, and the target verifies none but chains.
    """
    if verification != "ragged" and trees[0].is_chain:
        return ChainRound(target, texts, trees) if masks is None else CausalRound(target, texts, trees, masks)
    if verification == "chain":
        raise ValueError(
            f"The drafter made a tree with the parents {trees[0].parents} for a {target.config.model_type} target, "
            "whose trees are not verified: expected a chain of drafts."
        )
    return _ROUNDS[verification](target, texts, trees)
