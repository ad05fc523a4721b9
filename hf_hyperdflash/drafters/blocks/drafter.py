"""A drafter of blocks: one pass over the anchor and mask tokens, conditioned on the target's residual."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn

from ...targets.compiled import CompiledForwards
from ...targets.target import AttentionMask, Target, attention_mask_for, soft_capped
from ...trees.growth import DraftStep, GraphPlan, GrownChains, GrownNodes, grow_in_graph
from ...trees.tree import DraftTree, are_trees_kept
from ..parts.context import ContextColumns, DraftContext, anchors_of, compile_contexts, padded_pending
from ..parts.heads import HEADS, ConfidenceHead, HeadOutput, SelectorHead, SequentialHead, ZeroInitLinear, run_heads
from ..parts.layers import KeysValues, Rotary, block_inputs
from ..parts.mask_pieces import MaskPieces
from ..reading import HiddenStateDrafter
from ..sampling import DraftRequest, draft_batch, drafts_of, graph_plan

# What is subtracted from other tokens' logits: they are chosen only where processors leave no candidate.
_NO_CANDIDATE = 1e4


class BlockDrafter(HiddenStateDrafter):
    """A drafter whose block sees the context and itself: the base of drafters of blocks, for drafting and training.

    A subclass has `layers`, `rotary_emb`, [`reduce`], [`_begin`] and [`_end`]. A layer is called with the block's
    hidden states, the feature of what is new to the context, the rotary embedding of both, the context and the mask;
    its `keys_values` are of the feature alone. Its configuration has `vocab_size`, `draft_vocab_size`, `block_size`,
    `first_slot`, `max_draft_tokens`, `mask_token_id`, `kinds`, `attention_span`, `target_layer_ids`, `target_hc_mult`,
    `target_hidden_size`, `target_name_or_path`, what [`DraftContext`] and its heads read.
    """

    layers: nn.ModuleList
    confidence_head: ConfidenceHead | None
    rows_are_texts = True

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, ZeroInitLinear):
            module.reset_parameters()
        elif isinstance(module, SelectorHead):
            module.reset(self.config.initializer_range)

    # The block

    def reduce(self, residual: torch.Tensor) -> torch.Tensor:
        """Collapse `[batch, seq, streams read, config.target_hidden_size]` to the normed conditioning feature
        `[batch, seq, config.hidden_size]` in the drafter's dtype."""
        raise NotImplementedError(f"A {type(self).__name__} has no `reduce`.")

    def _begin(self, embeds: torch.Tensor) -> torch.Tensor:
        """Return the input of the first layer from embeddings `[batch, queries, config.target_hidden_size]`."""
        raise NotImplementedError(f"A {type(self).__name__} has no `_begin`.")

    def _end(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the heads' input from the last layer's output, `[batch, queries, config.target_hidden_size]`."""
        raise NotImplementedError(f"A {type(self).__name__} has no `_end`.")

    def lm_head_input(self, states: torch.Tensor) -> torch.Tensor:
        """Return the LM head's input from a block's states after the heads."""
        return states

    def _rotary(self, like: torch.Tensor, position_ids: torch.Tensor) -> Rotary:
        return cast(Any, self).rotary_emb(like, position_ids)

    def forward(
        self,
        block_embeds: torch.Tensor,
        position_ids: torch.Tensor,
        context: ContextColumns | None = None,
        attention_mask: torch.Tensor | Mapping[str, torch.Tensor | MaskPieces] | None = None,
        residual: torch.Tensor | None = None,
        residual_position_ids: torch.Tensor | None = None,
        previous_ids: torch.Tensor | None = None,
        previous_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor | HeadOutput:
        """Run blocks over their context, for training and for generation.

        Args:
            block_embeds: `[batch, queries, config.target_hidden_size]`, the target's embeddings of anchors and mask
                tokens.
            position_ids: `[batch, queries]`, true positions.
            context: The tokens before, behind which the keys of the residual's are written. `None` in training.
            attention_mask: Boolean `[batch, 1, queries, seq + queries]`, `True` where a query sees a key, or one for
                each kind of layer in `config.kinds`; `None` for one block, whose slots see what
                `config.attention_span` says.
            residual: The target's residual streams of `config.target_layer_ids` of tokens before the anchors,
                `[batch, seq, streams read, config.target_hidden_size]`.
            residual_position_ids: `[batch, seq]`, true positions of `residual`.
            previous_ids: `[batch, blocks, config.max_draft_tokens]`, in training: the token before each draft.
            previous_embeds: The target's embeddings of them, `[..., config.target_hidden_size]`.

        Returns:
            States `[batch, queries, config.target_hidden_size]`, which heads and [`logits`] read. With `previous_ids`,
            the heads' output for the draft positions, `[batch, blocks, config.max_draft_tokens, ...]`, for the LM
            head.

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
        spans = {kind: config.attention_span(kind) for kind in kinds}
        masks: dict[str, AttentionMask | MaskPieces | None] = {}
        for kind, span in spans.items():
            mask: torch.Tensor | MaskPieces | None
            if attention_mask is not None:
                mask = attention_mask if isinstance(attention_mask, torch.Tensor) else attention_mask[kind]
            elif context is None:
                mask = span.mask(hidden.shape[1], new, hidden.device)
            else:
                mask = context.block_mask(span, hidden.shape[1], hidden.device)
            masks[kind] = mask
            if isinstance(mask, torch.Tensor):
                masks[kind] = attention_mask_for(config._attn_implementation, mask, hidden.dtype)
        for index, (layer, kind) in enumerate(zip(self.layers, kinds)):
            known = None if context is None else context.layer(index, spans[kind])
            hidden = layer(hidden, feature, rotary, known, masks[kind])
        hidden = self._end(hidden)
        if previous_ids is None:
            return hidden
        drafts = hidden.unflatten(1, (-1, config.block_size))[:, :, config.first_slot :]
        output = run_heads(drafts, previous_ids, previous_embeds, self.head, self.confidence_head)
        blind = None if self.head is None else self.lm_head_input(drafts)
        # Made anew: before torch 2.12 or so a compiled forward knows no `_replace`.
        return HeadOutput(self.lm_head_input(output.states), output.vectors, output.confidence, blind)

    # One sequence

    @property
    def _about_drafts(self) -> str:  # type: ignore[override]
        return (
            f" Its block of {self.config.block_size} has no more draft positions: train one with a larger "
            "`num_draft_tokens`."
        )

    def check_trainable(self, target: Target) -> None:
        super().check_trainable(target)
        if self.config.draft_vocab_size and self.config.head_candidates:
            raise ValueError(
                f"The drafter's `draft_vocab_size` is {self.config.draft_vocab_size} and its `head_candidates` "
                f"{self.config.head_candidates}, expected one of them to be 0: training has no loss for a choice "
                "among candidates of a vocabulary of its own."
            )

    def with_heads(self, **fields: Any) -> BlockDrafter:
        """Return this drafter with heads that it lacks.

        Raises:
            ValueError: If it can have none.
        """
        raise ValueError(f"A {type(self).__name__} comes with its heads, expected none of {', '.join(fields)}.")

    def new_context(self) -> DraftContext:
        """Return an empty context for one text."""
        windows = [self.config.attention_span(kind).context_window for kind in self.config.kinds]
        return DraftContext(None if None in windows else max(cast(list[int], windows)))

    @torch.no_grad()
    def extend(
        self,
        target: Target,
        context: DraftContext,
        residual: torch.Tensor,
        position_ids: torch.Tensor,
        next_ids: torch.Tensor,
    ) -> None:
        """Add accepted tokens to the context, or the last ones that its window keeps. A few tokens wait for the next
        block and go through its pass. Many, those of a prompt, do not wait: their residual is large."""
        if context.pending is not None:
            self.flush_pending(context)
        last, device = slice(-context.window if context.window else None, None), self.device
        context.pending = residual[:, last].to(device), position_ids[:, last].to(device)
        if residual.shape[1] > self.max_draft_tokens + 1:
            self.flush_pending(context)

    @torch.no_grad()
    def flush_pending(self, context: DraftContext) -> None:
        """Compute keys and values of the pending tokens, without a block."""
        if context.pending is None:
            return
        residual, position_ids = context.pending
        feature, columns = self.reduce(residual), ContextColumns.of(self, [context])
        rotary = self._rotary(feature, position_ids)
        for index, layer in enumerate(self.layers):
            columns.layer(index)(*cast(Any, layer).keys_values(feature, rotary))
        context.length, context.pending = context.length + context.new_count, None

    @torch.no_grad()
    def draft(self, target: Target, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        """Draft for all texts in one pass. A block always has its trained width. Compiled, what follows is in the same
        graph if drafts are the most probable ones."""
        config, contexts, drafted = self.config, [each.context for each in requests], None
        compiled = contexts[0].compiled
        rows = list(range(len(requests))) if compiled is None else [context.row for context in contexts]
        if compiled is None:
            columns = ContextColumns.of(self, contexts, config.block_size)
            anchors = anchors_of(requests, self.device)
            hidden = _run_block(self, target, columns, *anchors, padded_pending(contexts, self.device))
        else:
            plan = graph_plan(requests, self.device, self._on_accelerator)
            hidden, drafted = compiled.run(_draft_best, self, target, *compiled.inputs(requests, 1), plan)
        for context in contexts:
            context.length, context.pending = context.length + context.new_count, None
        if drafted is not None:
            return drafts_of(drafted, requests, rows)
        if len(rows) < len(hidden):
            hidden = hidden[rows]
        count = max(each.num_drafts for each in requests)
        states = hidden[:, config.first_slot : config.first_slot + count]
        # With either head, what is said of a draft depends on those before it.
        has_heads = self.head is not None or self.confidence_head is not None
        if not has_heads and requests[0].sampler.tree_budget is None:
            logits = self.to_full_vocabulary(target, self.logits(target, states))
            return [
                each.sampler.draft_independent(each.ids, own[None, : each.num_drafts])
                for each, own in zip(requests, logits)
            ]
        path = BlockPath(self, target, states)
        trees = draft_batch(requests, path)
        if len(requests) == 1 and self.head is not None and are_trees_kept():
            return [path.with_head_choices(tree) for tree in trees]
        return trees

    def compiled_contexts(
        self,
        target: Target,
        contexts: Sequence[DraftContext],
        max_tokens: int,
        max_new: int,
        max_drafts: int,
        compiled: CompiledForwards,
    ) -> Sequence[DraftContext]:
        if self.device.type == "meta" or isinstance(self.head, SelectorHead):
            return []
        for context in contexts:
            self.flush_pending(context)
        compile_contexts(self, target, contexts, max_tokens, max_new + self.config.block_size, max_new, compiled)
        return contexts

    def logits(self, target: Target, hidden: torch.Tensor, vectors: torch.Tensor | None = None) -> torch.Tensor:
        """Return logits of the tokens that can be drafted, `[..., config.draft_vocab_size or config.vocab_size]`.

        They come from the target's LM head, or the drafter's own one over fewer tokens, and from the head's table. The
        mask token, which no text has, gets minus infinity.

        Args:
            target: The target.
            hidden: A block's states, as [`forward`] returns them without `previous_ids`.
            vectors: For the head's table, if there is one.
        """
        hidden = self.lm_head_input(hidden)
        mask = self.config.mask_token_id
        if self.config.draft_vocab_size:
            logits = self.own_head(hidden).masked_fill(self.draft_ids == (-1 if mask is None else mask), -torch.inf)
        else:
            logits = target.logits(hidden)[..., : self.config.vocab_size]
            if mask is not None:
                logits[..., mask] = -torch.inf
        if vectors is None or self.head_table is None:
            return logits
        return logits + nn.functional.linear(vectors, self.head_table).to(logits)

    def logits_of(self, target: Target, hidden: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Return logits of some tokens, `[batch, tokens]`, from states `[batch, config.target_hidden_size]`."""
        hidden = self.lm_head_input(hidden)
        if not self.config.draft_vocab_size:
            return target.logits_of(hidden, ids)
        logits = torch.einsum("bd,bcd->bc", hidden, self.lm_head.weight[ids])
        return soft_capped(logits, self.config.final_logit_softcapping)

    @property
    def head(self) -> SequentialHead | None:
        """The sequential head, by which each draft depends on the one before it; `None` without one."""
        kind = HEADS.get(self.config.sequential_head)
        return None if kind is None else getattr(self, kind.key)

    @property
    def head_table(self) -> torch.Tensor | None:
        return None if self.head is None else self.head.table


def _run_block(
    drafter: BlockDrafter,
    target: Target,
    columns: ContextColumns,
    ids: torch.Tensor,
    position_ids: torch.Tensor,
    pending: tuple[torch.Tensor, ...],
) -> torch.Tensor:
    """Run the blocks of anchors `[texts, 1]` and add what is pending; return the blocks' states, `[texts,
    config.block_size, config.target_hidden_size]`."""
    config = drafter.config
    block, positions = block_inputs(ids, position_ids, config.block_size, config.mask_token_id)
    return drafter(target.embed(block).to(ids.device), positions, columns, None, *pending)


def _draft_best(
    drafter: BlockDrafter,
    target: Target,
    keys_values: Sequence[KeysValues],
    ids: torch.Tensor,
    position_ids: torch.Tensor,
    pending: tuple[torch.Tensor, ...],
    counts: torch.Tensor,
    attended: int,
    plan: GraphPlan | None,
) -> tuple[torch.Tensor, GrownChains | GrownNodes | None]:
    """Run a block of each text inside a graph; return their states and the most probable drafts.

    Args:
        keys_values, ..., attended: See [`~drafters.parts.context.CompiledRounds.inputs`].
        plan: Which drafts; `None` for none.
    """
    config, max_new = drafter.config, pending[1].shape[1]
    columns = ContextColumns(keys_values, counts, max_new, config.block_size, attended)
    hidden = _run_block(drafter, target, columns, ids, position_ids, pending)
    if plan is None:
        return hidden, None
    depth = min(max_new - 1, config.max_draft_tokens)
    path = BlockPath(drafter, target, hidden[:, config.first_slot : config.first_slot + depth])
    return hidden, grow_in_graph(plan, ids[:, 0], counts[:, 2], depth, path)


class BlockPath:
    """Computes the logits of the draft positions of one block of each text, each from the token chosen before it (a
    sequential head).

    Args:
        drafter: A block drafter.
        target: For its embedding and LM head.
        hidden: The blocks' states, `[batch, drafts, config.target_hidden_size]`.
    """

    def __init__(self, drafter: BlockDrafter, target: Target, hidden: torch.Tensor) -> None:
        self.drafter, self.target, self.hidden, self.config = drafter, target, hidden, drafter.config
        self.head: SequentialHead | None = drafter.head
        self.confidence_head: ConfidenceHead | None = drafter.confidence_head
        self._carried: torch.Tensor | None = None
        self._texts: torch.Tensor | None = None  # the text of each path of the last call; `None` of the only one
        count = 0 if self.head is None else self.config.head_candidates or 0
        # [batch, drafts, drafted vocabulary], without the head; not needed where the head scores every token anew.
        self._vocabulary = drafter.draft_vocabulary(target)
        is_needed = self.head is None or self.head.table is not None or count
        self._blind = drafter.logits(target, hidden) if is_needed else None
        self._candidates = None if self._blind is None or not count else self._blind.topk(count, dim=-1).indices

    def __call__(self, k: int, tokens: torch.Tensor, rows: torch.Tensor) -> DraftStep:
        """Run draft position `k` for several paths. It is called once for each k, in order.

        Args:
            k: The draft position.
            tokens: The last token of each path, `[paths]`.
            rows: For each path, the index of the path of the call before that it continues, `[paths]`.
        """
        if len(self.hidden) > 1:
            self._texts = (
                rows.to(self.hidden.device) if self._texts is None else self._texts[rows.to(self._texts.device)]
            )
        hidden, memory = self._of_paths(self.hidden, k, len(tokens)), None
        blind = None if self._blind is None else self._of_paths(self._blind, k, len(tokens))
        if self.head is None:
            logits = cast(torch.Tensor, blind)
        else:
            tokens, rows = tokens.to(hidden.device), rows.to(hidden.device)
            embeds = self.target.embed(tokens[:, None])[:, 0] if self.head.reads_embeds else None
            carried = None if self._carried is None else self._carried[rows]
            if not k:  # the anchor may be a token that the target got later, and of which tables know nothing
                tokens = tokens.clamp(max=self.config.vocab_size - 1)
            states, vectors, memory, self._carried = self.head(hidden, tokens, embeds, carried)
            if blind is None:
                logits = self.drafter.logits(self.target, states)
            elif self._candidates is None:
                logits = blind + nn.functional.linear(vectors, cast(torch.Tensor, self.head.table)).to(blind)
            else:
                ids = self._of_paths(self._candidates, k, len(tokens))
                logits = self._best(blind.float(), ids, states, vectors)
        return DraftStep(logits, self._confidence(k, hidden, memory), self._vocabulary)

    def _of_paths(self, parts: torch.Tensor, k: int, paths: int) -> torch.Tensor:
        """Return what each path reads at draft position `k`, `[paths, ...]`, of its text's row of
        `[batch, drafts, ...]`."""
        return parts[:, k].expand(paths, -1) if self._texts is None else parts[self._texts, k]

    def with_head_choices(self, tree: DraftTree) -> DraftTree:
        """Return a tree of this block with `by_head`: whether the head chose each node, although the block alone finds
        another token more probable, before the request's processors."""
        blind = self.drafter.logits(self.target, self.hidden) if self._blind is None else self._blind
        alone = self.drafter.to_full_vocabulary(self.target, blind)[0].argmax(-1).tolist()
        drafts = zip(tree.tokens.tolist(), tree.depths)
        return replace(tree, by_head=tuple(token != alone[depth - 1] for token, depth in drafts))

    def _confidence(self, k: int, hidden: torch.Tensor, memory: torch.Tensor | None) -> torch.Tensor | None:
        if self.confidence_head is None:
            return None
        temperature = (self.config.confidence_temperatures or [1.0] * (k + 1))[k]
        return torch.sigmoid(self.confidence_head(hidden, memory).float() / temperature)

    def _best(
        self, blind: torch.Tensor, ids: torch.Tensor, states: torch.Tensor, vectors: torch.Tensor | None
    ) -> torch.Tensor:
        """Return logits in which the block's best tokens have the head's scores, and all others are far below."""
        if vectors is None:
            scores = self.drafter.logits_of(self.target, states, ids)
        else:
            rows = cast(torch.Tensor, self.drafter.head_table)[ids.to(vectors.device)]
            scores = blind.gather(-1, ids) + torch.einsum("br,bcr->bc", vectors, rows).to(blind)
        scores = scores.to(blind).masked_fill(blind.gather(-1, ids) == -torch.inf, -torch.inf)  # the mask token
        return (blind - _NO_CANDIDATE).scatter(-1, ids, scores)
