"""A drafter of blocks: one pass over the anchor and mask tokens, conditioned on the target's residual."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn

from ...targets.attention_masks import attention_mask_for
from ...targets.target import Target
from ...trees.tree import DraftTree, are_trees_kept
from ..parts.heads import HEADS, ConfidenceHead, HeadOutput, SelectorHead, SequentialHead, SilentLinear, along_text
from ..parts.layers import ContextCache, Rotary, block_inputs
from ..reading import ReadingDrafter
from ..sampling import DraftRequest, DraftSampler, chains_in_step
from .joint_context import JointContext
from .path import BlockPath


class BlockDrafter(ReadingDrafter):
    """A drafter whose block sees the context, all of itself, and nothing else: what drafting and training need of one.

    A subclass has `layers`, each called with the block's hidden states, the feature of what is new to the context, the
    rotary embedding of both, the context's and the mask, and with a `keys_values` for the feature alone; `rotary_emb`;
    and [`reduce`], [`_begin`] and [`_end`]. Its configuration has `vocab_size`, `draft_vocab_size`, `block_size`,
    `first_slot`, `max_draft_tokens`, `mask_token_id`, `kinds`, `reach`, `target_layer_ids`, `num_paths`,
    `target_hc_mult`, `target_hidden_size`, `target_name_or_path`, what [`ContextCache`] and its heads read.
    """

    layers: nn.ModuleList
    confidence_head: ConfidenceHead | None

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, SilentLinear):
            module.reset_parameters()
        elif isinstance(module, SelectorHead):
            module.reset(self.config.initializer_range)

    # The block

    def reduce(self, residual: torch.Tensor) -> torch.Tensor:
        """Collapse `[batch, seq, config.num_paths, config.target_hidden_size]` to the normed conditioning feature
        `[batch, seq, config.hidden_size]` in the drafter's dtype."""
        raise NotImplementedError(f"A {type(self).__name__} has no `reduce`.")

    def _begin(self, embeds: torch.Tensor) -> torch.Tensor:
        """What the first layer reads of embeddings `[batch, queries, config.target_hidden_size]`."""
        raise NotImplementedError(f"A {type(self).__name__} has no `_begin`.")

    def _end(self, hidden: torch.Tensor) -> torch.Tensor:
        """What heads read of the last layer's, `[batch, queries, config.target_hidden_size]`."""
        raise NotImplementedError(f"A {type(self).__name__} has no `_end`.")

    def readable(self, states: torch.Tensor) -> torch.Tensor:
        """What the LM head reads of what heads make of a block's states."""
        return states

    def _rotary(self, like: torch.Tensor, position_ids: torch.Tensor) -> Rotary:
        return cast(Any, self).rotary_emb(like, position_ids)

    def forward(
        self,
        block_embeds: torch.Tensor,
        position_ids: torch.Tensor,
        context: ContextCache | JointContext | None = None,
        attention_mask: torch.Tensor | Mapping[str, torch.Tensor] | None = None,
        residual: torch.Tensor | None = None,
        residual_position_ids: torch.Tensor | None = None,
        previous_ids: torch.Tensor | None = None,
        previous_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor | HeadOutput:
        """Run blocks over their context: the one path that training and generation share.

        Args:
            block_embeds: `[batch, queries, config.target_hidden_size]`, the target's embeddings of anchors and mask
                tokens.
            position_ids: `[batch, queries]`, true positions.
            context: What is known of the tokens before; the residual's are added to it. `None` in training.
            attention_mask: Boolean `[batch, 1, queries, context + seq + queries]`, `True` where a query may look, or
                one for each kind of layer that `config.kinds` has; `None` for one block, which sees what
                `config.reach` says.
            residual: The target's residual paths of `config.target_layer_ids` of tokens before the anchors,
                `[batch, seq, config.num_paths, config.target_hidden_size]`.
            residual_position_ids: `[batch, seq]`, true positions of `residual`.
            previous_ids: `[batch, blocks, config.max_draft_tokens]`, in training: the token before each draft.
            previous_embeds: The target's embeddings of them, `[..., config.target_hidden_size]`.

        Returns:
            States `[batch, queries, config.target_hidden_size]`, which heads and [`logits`] read; with `previous_ids`
            what the heads make of those of the draft positions, `[batch, blocks, config.max_draft_tokens, ...]`, for
            the LM head.

        Raises:
            ValueError: If neither `context` nor `residual` is given.
        """
        if context is None and residual is None:
            raise ValueError("Expected `context`, or `residual` with `residual_position_ids`, not neither.")
        config, kinds = self.config, self.config.kinds
        hidden, feature, new = self._begin(block_embeds.to(self.dtype)), None, 0
        if residual is not None:
            feature, new = self.reduce(residual), residual.shape[1]
            position_ids = torch.cat([cast(torch.Tensor, residual_position_ids), position_ids], dim=1)
        rotary = self._rotary(hidden, position_ids)
        if context is not None:
            context.make_room(position_ids.shape[1], hidden, config)
        masks = self._masks(kinds, attention_mask, hidden, context, new)
        for index, (layer, kind) in enumerate(zip(self.layers, kinds)):
            known = None if context is None else context.layer(index, new)
            hidden = layer(hidden, feature, rotary, known, masks[kind])
        if context is not None:
            context.advance(new)
        hidden = self._end(hidden)
        if previous_ids is None:
            return hidden
        drafts = hidden.unflatten(1, (-1, config.block_size))[:, :, config.first_slot :]
        output = along_text(drafts, previous_ids, previous_embeds, self.head, self.confidence_head)
        chooses = self.head is not None and config.head_candidates
        blind = self.readable(drafts) if chooses else None
        # Made anew: before torch 2.12 or so a compiled forward knows no `_replace`.
        return HeadOutput(self.readable(output.states), output.vectors, output.confidence, blind)

    def _masks(
        self,
        kinds: Sequence[str],
        given: torch.Tensor | Mapping[str, torch.Tensor] | None,
        hidden: torch.Tensor,
        context: Any,
        new: int,
    ) -> dict[str, Any]:
        """For each kind of layer what its attention takes as a mask."""
        masks = {}
        for kind in dict.fromkeys(kinds):
            if given is None:
                seen = new if context is None else context.visible(kinds.index(kind), new)
                mask = self.config.reach(kind).mask(hidden.shape[1], seen, hidden.device)
            else:
                mask = given if isinstance(given, torch.Tensor) else given[kind]
            implementation = self.config._attn_implementation
            masks[kind] = None if mask is None else attention_mask_for(implementation, mask, hidden.dtype)
        return masks

    # One sequence

    @property
    def _about_drafts(self) -> str:  # type: ignore[override]
        return (
            f" Its block of {self.config.block_size} has no more draft positions: train one with a larger "
            "`num_draft_tokens`."
        )

    def check_trainable(self, target: Target) -> None:
        """Raise a `ValueError` if the drafter cannot be trained for `target`: what trains a model looks for this."""
        self.check_target(target)
        if self.config.draft_vocab_size and self.config.head_candidates:
            raise ValueError(
                f"The drafter's `draft_vocab_size` is {self.config.draft_vocab_size} and its `head_candidates` "
                f"{self.config.head_candidates}, expected one of them to be 0: training has no loss for a choice "
                "among candidates of a vocabulary of its own."
            )

    def with_heads(self, **fields: Any) -> BlockDrafter:
        """This drafter with heads that it lacks, where it can be given some.

        Raises:
            ValueError: If not.
        """
        raise ValueError(f"A {type(self).__name__} comes with its heads, expected none of {', '.join(fields)}.")

    def new_context(self) -> ContextCache:
        """An empty context for one sequence."""
        return ContextCache([self.config.reach(kind) for kind in self.config.kinds])

    @torch.no_grad()
    def extend(
        self,
        target: Target,
        context: ContextCache,
        residual: torch.Tensor,
        position_ids: torch.Tensor,
        next_ids: torch.Tensor,
    ) -> None:
        """Add accepted tokens to the context: of many, those that its window keeps. Few of them go in with the next
        block, in one pass; the residual of many, a prompt's, is not kept for so long."""
        if context.pending is not None:
            self.take_in(context)
        kept, device = slice(-context.window if context.window else None, None), self.device
        context.pending = residual[:, kept].to(device), position_ids[:, kept].to(device)
        if residual.shape[1] > self.config.block_size:
            self.take_in(context)

    @torch.no_grad()
    def take_in(self, context: ContextCache) -> None:
        """Compute keys and values of what is pending, without a block."""
        if context.pending is None:
            return
        residual, position_ids = context.pending
        feature, new = self.reduce(residual), residual.shape[1]
        rotary = self._rotary(feature, position_ids)
        context.make_room(new, feature, self.config)
        for index, layer in enumerate(self.layers):
            context.layer(index, new)(*cast(Any, layer).keys_values(feature, rotary))
        context.advance(new)
        context.pending = None

    @torch.no_grad()
    def propose(
        self,
        target: Target,
        context: ContextCache,
        ids: torch.Tensor,
        position_ids: torch.Tensor,
        count: int,
        sampler: DraftSampler,
    ) -> DraftTree:
        """Draft `count` tokens after the last of `ids` in one pass. The block always has its trained width."""
        config = self.config
        block, positions = block_inputs(ids[:, -1:], position_ids[:, -1:], config.block_size, config.mask_token_id)
        device = self.device
        embeds = target.embed(block).to(device)
        hidden = self(embeds, positions.to(device), context, None, *(context.pending or ()))
        context.pending = None
        states = hidden[:, config.first_slot : config.first_slot + count]
        if self.head is None and self.confidence_head is None:
            return sampler.blind(ids, self.of_vocabulary(self.logits(target, states)))
        path = BlockPath(self, target, states)
        tree = sampler.grow(ids, count, path)
        return path.told(tree) if self.head is not None and are_trees_kept() else tree

    @torch.no_grad()
    def propose_batch(self, target: Target, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        """Draft for several texts in one pass."""
        config, device = self.config, self.device
        context = JointContext([each.context for each in requests])
        anchors, last = (torch.cat([part[:, -1:] for part in parts]) for parts in list(zip(*requests))[1:3])
        block, positions = block_inputs(anchors, last, config.block_size, config.mask_token_id)
        reaches = {kind: config.reach(kind) for kind in dict.fromkeys(config.kinds)}
        masks = context.masks(config.kinds, reaches, config.block_size, device)
        embeds = target.embed(block).to(device)
        hidden = self(embeds, positions.to(device), context, masks, *context.pending())
        states = hidden[:, config.first_slot : config.first_slot + max(each.num_drafts for each in requests)]
        has_heads = self.head is not None or self.confidence_head is not None
        if has_heads and all(each.sampler.tree_budget is None for each in requests):
            return chains_in_step(requests, BlockPath(self, target, states))
        rows = [states[row : row + 1, : each.num_drafts] for row, each in enumerate(requests)]
        if has_heads:
            return [
                each.sampler.grow(each.ids, each.num_drafts, BlockPath(self, target, own))
                for each, own in zip(requests, rows)
            ]
        logits = self.of_vocabulary(self.logits(target, states))
        of_each = zip(requests, logits.split(1))
        return [each.sampler.blind(each.ids, own[:, : each.num_drafts]) for each, own in of_each]

    def logits(self, target: Target, hidden: torch.Tensor, vectors: torch.Tensor | None = None) -> torch.Tensor:
        """Logits of the tokens that can be drafted, `[..., config.draft_vocab_size or config.vocab_size]`, by the
        target's LM head, or an own one over fewer tokens, and by the head's table; minus infinity for the mask token,
        which no text has. Of a block's states, as [`forward`] returns them without `previous_ids`: with them they are
        for the LM head already."""
        hidden = self.readable(hidden)
        mask = self.config.mask_token_id
        if self.config.draft_vocab_size:
            logits = self.lm_head(hidden).masked_fill(self.draft_ids == (-1 if mask is None else mask), -torch.inf)
        else:
            logits = target.logits(hidden)
            if mask is not None:
                logits[..., mask] = -torch.inf
        if vectors is None or self.head_table is None:
            return logits
        return logits + nn.functional.linear(vectors, self.head_table).to(logits)

    def logits_of(self, target: Target, hidden: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """The same of some of them, `[batch, tokens]`, from `[batch, config.target_hidden_size]`."""
        hidden = self.readable(hidden)
        if not self.config.draft_vocab_size:
            return target.logits_of(hidden, ids)
        return torch.einsum("bd,bcd->bc", hidden, self.lm_head.weight[ids])

    @property
    def head(self) -> SequentialHead | None:
        """What lets each draft know the one before it, if there is one."""
        kind = HEADS.get(self.config.sequential_head)
        return None if kind is None else getattr(self, kind.key)

    @property
    def head_table(self) -> torch.Tensor | None:
        return None if self.head is None else self.head.table
