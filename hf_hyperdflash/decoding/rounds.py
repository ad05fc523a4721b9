"""The tokens of a text, one forward of the target over drafts behind them, and what stays of it in the cache.

Where attention masks say all, one forward serves chains and trees of one or several sequences (`BatchRound`). Of other
targets there is one sequence: a chain in a forward as it is, a tree in a forward that the family's own cache layers
know of (`MaskedRound`), or a copy of the sequence for each path (`ForkedRound`).

A round's verification positions are, for each sequence, the anchor and the tree's nodes in their order, whatever the
forward looks like.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from itertools import islice
from typing import Any, NamedTuple, cast

import torch
from torch.nn.attention.flex_attention import BlockMask
from transformers.cache_utils import DynamicLayer

from ..targets.caches.name import CACHE
from ..targets.caches.round_cache import RoundForward, RoundLayer
from ..targets.shared_heads import attention_of_rounds
from ..targets.target import (
    VERIFICATION,
    RewindableCache,
    Target,
    TargetOutput,
    TreeVerification,
    attention_mask_for,
)
from ..trees.tree import DraftTree, TreeLayout


class TokenBuffer:
    """What is written of one sequence.

    Tokens, positions and mask lie in buffers that grow by doubling, drafts under verification after the text: a round
    copies no text and counts no positions. New tokens go there together, when somebody reads them: one by one, each
    would be a launch.

    Args:
        ids: `[1, seq]`, the prompt, tokens that are already in the cache included.
        padding: Columns on the left that the target is not to see; the caller's ids keep them.
        mask: `[1, seq]` without those columns, if some of it is padding.
        position_ids: The caller's, of the last tokens of the prompt, `[1, tokens]` or `[axes, 1, tokens]`.

    Attributes:
        prompt_length: Tokens of the prompt, padding left out.
    """

    def __init__(
        self, ids: torch.Tensor, padding: int, mask: torch.Tensor | None, position_ids: torch.Tensor | None
    ) -> None:
        self.padding, self.prompt_length = padding, ids.shape[1] - padding
        self._written = ids.shape[1]
        self._new: list[int] = []  # that are not in the buffer yet
        self._buffer, self._mask = ids, mask
        if position_ids is not None:
            before = torch.arange(position_ids.shape[-1] - self.prompt_length, 0, device=position_ids.device)
            self._positions = torch.cat([position_ids[..., :1] + before, position_ids], dim=-1)
        elif mask is not None:
            self._positions = (mask.cumsum(-1) - 1).clamp(min=0)
        else:
            self._positions = torch.arange(self.prompt_length, device=ids.device)[None]
        # How far positions are ahead of places; read once, each time would be to wait for the device.
        is_plain = position_ids is None and mask is None
        self._ahead = 0 if is_plain else int(self._positions[..., -1].max()) + 1 - self.prompt_length

    def _grow(self, more: int) -> None:
        needed = self.length + more
        if needed > self._buffer.shape[1]:
            self._buffer = torch.nn.functional.pad(self._buffer, (0, needed))
            self._mask = None if self._mask is None else torch.nn.functional.pad(self._mask, (0, needed), value=1)
            after = torch.arange(1, needed + 1, device=self._positions.device)
            self._positions = torch.cat([self._positions, self._positions[..., -1:] + after], dim=-1)

    def with_drafts(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return `unpadded` with drafts `[drafts]` behind it, `[1, seq + drafts]`."""
        end = self.ids.shape[1] + len(tokens)
        self._grow(len(tokens) + 1)
        self._buffer[0, self.length : end] = tokens
        return self._buffer[:, self.padding : end]

    def append(self, token: int) -> None:
        """Add a token."""
        self._grow(1)
        self._new.append(token)

    @property
    def length(self) -> int:
        """Tokens of the text, padding included."""
        return self._written + len(self._new)

    @property
    def ids(self) -> torch.Tensor:
        """The text, `[1, seq]`."""
        if self._new:
            self._buffer[0, self._written : self.length] = torch.tensor(self._new)
            self._written, self._new = self.length, []
        return self._buffer[:, : self._written]

    @property
    def unpadded(self) -> torch.Tensor:
        """The text as the target sees it, without padding, `[1, seq]`."""
        return self.ids[:, self.padding :]

    @property
    def end(self) -> int:
        """Tokens of `unpadded`."""
        return self.length - self.padding

    @property
    def last_position(self) -> int:
        """The true position of the last token, on the host; of several axes the furthest."""
        return self.end - 1 + self._ahead

    def mask(self, end: int) -> torch.Tensor | None:
        """Return which of the first `end` tokens of `unpadded` are no padding, `[1, end]`; `None` if all are."""
        return None if self._mask is None else self._mask[:, :end]

    def inputs(self, start: int, end: int) -> dict[str, torch.Tensor]:
        """Return what a target needs of the tokens from `start` to `end` beside their ids."""
        inputs = {"position_ids": self.positions(start, end)}
        return inputs if self._mask is None else {**inputs, "attention_mask": self._mask[:, :end]}

    def positions(self, start: int, end: int) -> torch.Tensor:
        """Return true positions of the tokens of `unpadded` and of drafts behind it, `[1, end - start]`. Multimodal
        targets have them for several axes, `[axes, 1, end - start]`."""
        return self._positions[..., start:end]

    def text_positions(self, start: int, end: int) -> torch.Tensor:
        """Return [`positions`] as `[1, end - start]`: text has the same on every axis."""
        positions = self.positions(start, end)
        return positions[0] if positions.ndim == 3 else positions


def padded(prompts: Sequence[TokenBuffer]) -> TokenBuffer:
    """Return the prompts of several sequences as one, `[batch, seq]`, padded on the left as transformers pads them."""
    if len(prompts) == 1:
        return prompts[0]
    lengths = [prompt.prompt_length for prompt in prompts]
    ids, mask, positions = prompts[0].ids.new_zeros(3, len(lengths), max(lengths))
    for index, (prompt, length) in enumerate(zip(prompts, lengths)):
        real = prompt.mask(length)
        ids[index, -length:] = prompt.unpadded[0]
        mask[index, -length:] = 1 if real is None else real[0]
        positions[index, -length:] = prompt.text_positions(0, length)[0]
    return TokenBuffer(ids, 0, mask, positions)


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

    def __init__(self, target: Target, texts: Sequence[TokenBuffer], trees: Sequence[DraftTree]) -> None:
        self.target, self.texts, self.trees = target, texts, trees
        self.starts = [text.end - 1 for text in texts]  # tokens before the anchor
        self.counts = [len(tree) + 1 for tree in trees]  # verification positions
        self.width = max(self.counts)

    def forward(self, kwargs: dict[str, object]) -> TargetOutput:
        """Run the target over the anchors and the drafts.

        Args:
            kwargs: The arguments that are the same in every round, with the cache.
        """
        is_known = self.target.config.model_type in VERIFICATION  # others may read the name of their attention
        with attention_of_rounds(self.target.config) if is_known else nullcontext():
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

    def choices(self, logits: Sequence[torch.Tensor]) -> list[Choices]:
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

    def keep(self, cache: RewindableCache, kept: list[list[int]]) -> None:
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

    def layers_with_keys(self, cache: RewindableCache) -> Sequence[DynamicLayer | RoundLayer]:
        """Return the cache layers that attention reads, as the forward left them."""
        return [layer for layer in cache.layers if isinstance(layer, DynamicLayer)]


class MaskedRound(ChainRound):
    """A tree in one forward: true positions, and a mask by which each node sees its ancestors (SpecInfer)."""

    def __init__(self, target: Target, texts: Sequence[TokenBuffer], trees: Sequence[DraftTree]) -> None:
        super().__init__(target, texts, trees)
        self.layout = TreeLayout(trees[0])

    def inputs(self, kwargs: dict[str, object]) -> dict[str, object]:
        text, start, cache = self.texts[0], self.starts[0], cast(RewindableCache, kwargs[CACHE])
        inputs = self._prepare(text.with_drafts(self.trees[0].tokens)[:, start:], self.width, kwargs)
        inputs["position_ids"] = text.positions(start, start + 1) + self.layout.depths.to(text.ids.device)
        inputs["attention_mask"] = self._masks(cache)
        self.target.begin_tree(cache, self.layout)
        return inputs

    def _masks(self, cache: RewindableCache) -> torch.Tensor | BlockMask | dict[str, torch.Tensor | BlockMask]:
        """Return one mask, or one for each kind of layer if they differ: first what is in the cache."""
        text, masks = self.texts[0], cast("dict[str, torch.Tensor | BlockMask]", {})
        real = text.mask(self.starts[0])
        for layer in cache.layers:
            window = getattr(layer, "sliding_window", None)
            kind = "full_attention" if window is None else "sliding_attention"
            if kind not in masks:
                past = layer.get_mask_sizes(self.width)[0] - self.width
                mask = self.layout.mask(past, window, text.ids.device)
                if real is not None and past:
                    mask[:, :past] &= real[0, -past:].bool()
                implementation = self.target.config._attn_implementation
                masks[kind] = attention_mask_for(implementation, mask[None, None], self.target.dtype)
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def residual(self, captured: torch.Tensor, index: int, kept: list[int]) -> torch.Tensor:
        return captured.index_select(1, self.layout.index(kept, captured.device))

    def keep(self, cache: RewindableCache, kept: list[list[int]]) -> None:
        self.target.keep(cache, self.layout, kept[0])
        self._check_length(cache, kept)

    def visible(self, position: int) -> list[int]:
        return self.layout.paths[position]


class BatchRound(ChainRound):
    """Chains or trees of one or several sequences in one forward. Compiled rounds of one width have the same shapes:
    what is beyond a tree's nodes is not looked at.

    Args:
        target: The target.
        texts: The tokens of each sequence.
        trees: The drafts of each.
        round_forward: Runs the target over the sequences' cache.
    """

    def __init__(
        self, target: Target, texts: Sequence[TokenBuffer], trees: Sequence[DraftTree], round_forward: RoundForward
    ) -> None:
        super().__init__(target, texts, trees)
        self.round_forward, self.width = round_forward, round_forward.width_for(self.width, max(self.starts))
        self.layouts = [None if tree.is_chain else TreeLayout(tree) for tree in trees]
        self._chosen: torch.Tensor | None = None

    def forward(self, kwargs: dict[str, object]) -> TargetOutput:
        rows, size, device = self.round_forward.rows, self.round_forward.size, self.texts[0].ids.device
        tokens = [torch.cat([text.ids[0, -1:], tree.tokens.to(device)]) for text, tree in zip(self.texts, self.trees)]
        if [self.width] * size == self.counts:
            ids = tokens[0][None] if size == 1 else torch.stack(tokens)
        else:
            ids = tokens[0].new_zeros(size, self.width)
            for row, own in zip(rows, tokens):
                ids[row, : len(own)] = own
        depths, visible = self.round_forward.chains(self.width)
        is_chain = not any(self.layouts)
        if not is_chain:
            depths, visible = depths.cpu().clone(), visible.cpu().clone()
            for row, layout, count in zip(rows, self.layouts, self.counts):
                if layout is not None:
                    depths[row, :count], visible[row, :count, :count] = layout.depths, layout.ancestors
                    visible[row, :count, count:] = False
            depths, visible = depths.to(device), visible.to(device)
        of_each = [text.positions(start, start + 1) for text, start in zip(self.texts, self.starts)]
        anchors = torch.cat(of_each, dim=-2)
        if size > len(rows):
            anchors = anchors.new_zeros(*anchors.shape[:-2], size, 1).index_copy(-2, self.round_forward.index, anchors)
        outputs, self._chosen = self.round_forward(ids, anchors, depths, visible, max(self.starts), is_chain, kwargs)
        return outputs

    def choices(self, logits: Sequence[torch.Tensor]) -> list[Choices]:
        if self._chosen is None:
            return super().choices(logits)
        chosen = self._chosen.cpu().tolist()
        of_each = zip((chosen[row] for row in self.round_forward.rows), self.counts)
        return [Choices(row[1:count], row[self.width : self.width + count]) for row, count in of_each]

    def logits(self, outputs: TargetOutput, index: int) -> torch.Tensor:
        row = self.round_forward.rows[index]
        return outputs.logits[row : row + 1, : self.counts[index]]

    def residual(self, captured: torch.Tensor, index: int, kept: list[int]) -> torch.Tensor:
        own = captured[self.round_forward.rows[index], None]
        is_prefix = kept == list(range(len(kept)))
        return own[:, : len(kept)] if is_prefix else own[:, torch.tensor(kept, device=own.device)]

    def keep(self, cache: RewindableCache, kept: list[list[int]]) -> None:
        self.round_forward.keep(kept, self.width, any(self.layouts))

    def abort(self, cache: RewindableCache) -> None:
        """Do nothing: a round counts no token before it is accepted."""

    def visible(self, position: int) -> list[int]:
        layout = self.layouts[0]
        return list(range(position + 1)) if layout is None else layout.paths[position]

    def layers_with_keys(self, cache: RewindableCache) -> Sequence[RoundLayer]:
        return self.round_forward.cache.layers


class ForkedRound(ChainRound):
    """A tree as a batch: a copy of the sequence for each path, each with the whole of what comes before. Right
    wherever a batch is, and slower than a mask, as what paths share is computed for each."""

    def __init__(self, target: Target, texts: Sequence[TokenBuffer], trees: Sequence[DraftTree]) -> None:
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
        others = {
            name: value.repeat_interleave(copies, dim=0)
            if isinstance(value, torch.Tensor) and value.ndim > 0 and value.shape[0] == 1
            else value
            for name, value in kwargs.items()
        }
        # Remote code may read the ids of the whole text, from which transformers takes those of the forward.
        is_stock = type(self.target.model).__module__.startswith("transformers.")
        before = text.unpadded[:, -1:] if is_stock else text.unpadded
        ids = torch.cat([before.expand(copies, -1), drafts], dim=1)
        return self._prepare(ids, self.length, {**others, **own})

    def logits(self, outputs: TargetOutput, index: int) -> torch.Tensor:
        paths, places = zip(*(self.coordinates(position) for position in range(self.width)))
        return outputs.logits[:, -self.length :][list(paths), list(places)][None]

    def residual(self, captured: torch.Tensor, index: int, kept: list[int]) -> torch.Tensor:
        path = self._path_through(kept)
        return captured[path : path + 1, : len(kept)]

    def keep(self, cache: RewindableCache, kept: list[list[int]]) -> None:
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


def round_over(
    target: Target,
    verification: TreeVerification,
    texts: Sequence[TokenBuffer],
    trees: Sequence[DraftTree],
    round_forward: RoundForward | None,
) -> ChainRound:
    """Return the round that verifies the trees of a batch.

    Args:
        target: The target.
        verification: How it verifies a tree of the only sequence.
        texts: The tokens of each sequence.
        trees: The drafts of each.
        round_forward: Runs the target over the sequences' cache of rounds; `None` where they have none.

    Raises:
        ValueError: If one has several paths, and the target verifies none but chains.
    """
    if round_forward is not None:
        return BatchRound(target, texts, trees, round_forward)
    if trees[0].is_chain:
        return ChainRound(target, texts, trees)
    if verification == "chain":
        raise ValueError(
            f"The drafter made a tree with the parents {trees[0].parents} for a {target.config.model_type} target, "
            "whose trees are not verified: expected a chain of drafts."
        )
    return (MaskedRound if verification == "mask" else ForkedRound)(target, texts, trees)
