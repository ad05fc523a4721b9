"""Drafters that continue from states of their own: EAGLE-3, token by token, and SpecBlock, block by block.

Entry t consists of the target's residual after token t and the embedding of token t + 1. Its block has K slots, and
slot k drafts token t + 2 + k. A later block continues from a slot of an earlier one: that slot's state replaces the
target's residual, and the token that was chosen there is embedded. In every layer a slot sees all slots of earlier
entries; of the blocks that its own continues, the slots up to the one it continues from; and of its own block itself
and the slots before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from ...targets.compiled import CompiledForwards
from ...targets.registry import target_of
from ...targets.target import Target, attention_mask_for
from ...trees.tree import DraftTree
from ..parts.context import (
    ContextColumns,
    DraftContext,
    anchors_of,
    compile_contexts,
    padded_pending,
    rows_of,
)
from ..parts.heads import HeadOutput
from ..parts.layers import (
    ContextLayer,
    DrafterRMSNorm,
    HyperDFlashLayer,
    HyperDFlashRotaryEmbedding,
    KeysValues,
    reset_reducer,
)
from ..parts.mask_pieces import MaskPiece, MaskPieces
from ..parts.reducers import REDUCERS
from ..reading import HiddenStateDrafter
from ..sampling import DraftRequest, draft_batch, draft_known, drafts_of, graph_plan
from .configuration import UnrolledConfig
from .unrolling import Unrolling, draft_best, run_entries, width_of_pass

_ENTRIES_AT_ONCE = 256  # of a prompt: their mask is as large as the square of their slots
_FRESH_STATES = 8  # random ones, for which a new drafter's logits are to be flat


class UnrolledNetwork(nn.Module):
    """What is around the layers, before a base of drafters: the package's, or that of `portable/`."""

    config: Any

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.reducer = REDUCERS[config.reducer]
        for name, module in self.reducer.modules(config).items():
            self.add_module(name, module)
        self.norm = DrafterRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        if config.own_embedding:
            self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        if config.draft_vocab_size:
            self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
            self.register_buffer("draft_ids", torch.arange(config.draft_vocab_size))  # of the target's vocabulary
        self.rotary_emb = HyperDFlashRotaryEmbedding(config)

    def condition(self, residual: torch.Tensor) -> torch.Tensor:
        """Return what first blocks are conditioned on, `[batch, seq, config.hidden_size]`, from the target's residual
        streams `[batch, seq, streams read, config.target_hidden_size]`."""
        return self.reducer.reduce(self, residual, cast(Any, self).dtype)

    def _between(self, index: int, hidden: torch.Tensor) -> torch.Tensor:
        """Return the input of layer `index` from the output of the layer before it."""
        return hidden

    def next_condition(self, states: torch.Tensor) -> torch.Tensor:
        """Return the condition of a later block from the states `[..., config.hidden_size]` that it continues."""
        return states

    def later_ids(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the tokens that later blocks embed from those with which they continue."""
        return ids


class UnrolledDrafter(UnrolledNetwork, HiddenStateDrafter):
    """The base of drafters of entries. A subclass has [`_begin`] and, where they differ, [`condition`], [`_between`],
    [`next_condition`] and [`_draft`].
    """

    config: UnrolledConfig
    layers: nn.ModuleList
    base_model_prefix = "drafter"
    _supports_sdpa = _supports_flex_attn = _supports_attention_backend = True
    _keep_in_fp32_modules_strict = ["hc_gate"]
    rows_are_texts = True
    moves_positions = True  # whether a later block has later positions than the block that it continues, for RoPE

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        reset_reducer(module, self.config.initializer_range)

    @classmethod
    def from_target(
        cls, target: PreTrainedModel, *, dtype: torch.dtype | str | None = None, **config_fields: Any
    ) -> UnrolledDrafter:
        """Build an untrained drafter that fits a target. By default it reads the three layers of its paper.

        Args:
            target: The model to draft for. It is read, not changed.
            dtype: Of the drafter's weights, or its name; the target's residual stream's by default.
            **config_fields: Any field of the drafter's configuration. With a `reducer` that has a gate, the gate is
                inherited from the target's `hc_head`; with a `draft_vocab_size` the drafter has so many of the rows of
                the target's LM head, the first ones ([`draft_only`] takes others); with `own_embedding` the target's.

        Raises:
            ValueError: If it is no target, there is no such field, or an embedding of its own is to be of another
                width than the target's.
        """
        cast(type[UnrolledConfig], cls.config_class).check_fields(config_fields)
        seen = target_of(target)
        width, layers = seen.config.hidden_size, seen.config.num_hidden_layers
        if config_fields.get("own_embedding") and config_fields.get("hidden_size", width) != width:
            raise ValueError(
                f"`hidden_size` is {config_fields['hidden_size']} and `own_embedding` True, expected {width}, the "
                "target's width: a new drafter's own embedding is the target's."
            )
        reducer = REDUCERS.get(config_fields.get("reducer", ""))
        if reducer is not None and reducer.has_gate:
            read = [-1]
        else:
            read = usual_layers(layers) if layers > 7 else sorted({0, (layers - 1) // 2})
        drafter = super().from_target(target, dtype=dtype, **{"target_layer_ids": read, **config_fields})
        if drafter.config.own_embedding:
            with torch.no_grad():
                drafter.embed_tokens.weight.copy_(seen.embed(torch.arange(drafter.config.vocab_size)[None])[0])
        return drafter

    def _flatten_first_logits(self, target: Target) -> None:
        states = torch.randn(_FRESH_STATES, self.config.hidden_size, generator=torch.Generator().manual_seed(0))
        states = states.to(self.device, self.dtype)
        self._flatten_logits(lambda: self.drafted_logits(target, self.norm(states)))

    # What a subclass says

    def read(self, target: Target, residual: torch.Tensor) -> torch.Tensor:
        """Return what [`condition`] reads, `[batch, seq, streams, ...]`, from a target's residual streams."""
        return residual

    def normed(self, states: torch.Tensor, level: int) -> torch.Tensor:
        """Return what the LM head reads of the blocks of one level, `[..., config.hidden_size]`; the first ones have
        level 0."""
        return self.norm(states)

    def carried(self, contexts: Sequence[DraftContext]) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return what the entries of pending tokens need of those before them, for [`run`]; `None` for nothing."""
        return None

    def entry_mask(self, position_ids: torch.Tensor) -> Any:
        """Return which slots see each other among the first blocks of all entries, in training."""
        size, is_cut = self.config.block_size, self.config._attn_implementation == "sdpa"
        return entry_pieces(position_ids, size) if is_cut else entry_mask(position_ids, size)

    def _begin(self, condition: torch.Tensor, embeds: torch.Tensor) -> torch.Tensor:
        """Return the input of the first layer, `[batch, blocks * config.block_size, ...]`, from conditions and
        embeddings `[batch, blocks, config.hidden_size]`."""
        raise NotImplementedError(f"A {type(self).__name__} has no `_begin`.")

    # Blocks

    def run(
        self,
        condition: torch.Tensor,
        embeds: torch.Tensor,
        positions: torch.Tensor,
        keys_values: Sequence[ContextLayer],
        mask: Any,
        last_only: bool = False,
    ) -> torch.Tensor:
        """Run blocks in one pass.

        Args:
            condition: `[batch, blocks, config.hidden_size]`.
            embeds: `[batch, blocks, config.target_hidden_size]`, of the tokens that follow.
            positions: `[batch, blocks]`, of their first slots.
            keys_values: For each layer, the function that adds the blocks' keys and values to those that they see.
            mask: Boolean `[batch, 1, blocks * config.block_size, keys]`, `True` where a slot sees a key; `None` for
                all.
            last_only: Whether to return the last block's states only. The last layer then computes only keys and
                values of the others.

        Returns:
            `[batch, blocks, config.block_size, config.hidden_size]`, or of one block.
        """
        hidden = self._begin(condition, embeds.to(condition.dtype))
        slots = torch.arange(self.config.block_size, device=positions.device)
        rotary = self.rotary_emb(hidden, (positions.unsqueeze(-1) + slots).flatten(1))
        kind, size = self.config._attn_implementation, self.config.block_size
        visible, before = mask, None
        if isinstance(mask, torch.Tensor):
            visible = attention_mask_for(kind, mask, hidden.dtype)
        for index, (layer, known) in enumerate(zip(self.layers, keys_values)):
            hidden = self._between(index, hidden)
            if last_only and index == len(self.layers) - 1:
                before, hidden = cast(HyperDFlashLayer, layer).attention_input(hidden[:, :-size]), hidden[:, -size:]
                visible = None if mask is None else attention_mask_for(kind, mask[:, :, -size:], hidden.dtype)
            hidden = layer(hidden, before, rotary, known, visible)
        return hidden.unflatten(1, (-1, self.config.block_size))

    def embed(self, target: Target, ids: torch.Tensor) -> torch.Tensor:
        """Return embeddings of tokens, the drafter's own or the target's. Of tokens that the target got later an own
        embedding has no row: its last one stands for them."""
        if self.config.own_embedding:
            return self.embed_tokens(ids.to(self.device).clamp(max=self.config.vocab_size - 1))
        return target.embed(ids).to(self.device)

    # Training

    def forward(
        self,
        residual: torch.Tensor,
        position_ids: torch.Tensor,
        next_embeds: torch.Tensor,
        entries: torch.Tensor,
        later_embeds: torch.Tensor,
        slots: Sequence[int],
        head: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> HeadOutput:
        """Run the first blocks of all entries and, from some of them, blocks that continue each other.

        Args:
            residual: `[batch, seq, streams read, config.target_hidden_size]`.
            position_ids: `[batch, seq]`, counting from 0 in every packed document.
            next_embeds: `[batch, seq, config.target_hidden_size]`, of the token after each; with `own_embedding` these
                tokens, `[batch, seq]`.
            entries: The entries that later blocks continue, `[batch, entries]`.
            later_embeds: Of the token with which each later block continues,
                `[batch, entries, len(slots), config.target_hidden_size]`; with `own_embedding` these tokens.
            slots: The slot of the block before it from which each later block continues.
            head: The LM head, for a rank head, which reads logits.

        Returns:
            States for the LM head, `[batch, entries, (1 + len(slots)) * config.block_size, config.hidden_size]`.
        """
        next_embeds, later_embeds = (self._embedded(each) for each in (next_embeds, later_embeds))
        normed = run_levels(self, residual, position_ids, next_embeds, entries, later_embeds, slots)
        head = self.lm_head if head is not None and self.config.draft_vocab_size else head
        return HeadOutput(normed, ranks=None if head is None else self._ranks(normed, head))

    def _embedded(self, given: torch.Tensor) -> torch.Tensor:
        return self.embed_tokens(given) if self.config.own_embedding else given

    def _ranks(self, normed: torch.Tensor, head: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor | None:
        """Return a rank head's logits `[..., 4]` from normed states; `None` without one."""
        return None

    # One sequence

    @property
    def _about_drafts(self) -> str:  # type: ignore[override]
        return (
            f" Its {self.config.max_blocks} blocks of {self.config.block_size} have no more: load it with a larger "
            "`max_blocks`."
        )

    def layers_read(self, target: Target) -> list[int]:
        return usual_layers(target.config.num_hidden_layers) if self.config.usual_layers else self.target_layer_ids

    def new_context(self) -> DraftContext:
        """Return an empty context for one sequence."""
        return DraftContext(size=self.config.block_size)

    @torch.no_grad()
    def extend(
        self,
        target: Target,
        context: DraftContext,
        residual: torch.Tensor,
        position_ids: torch.Tensor,
        next_ids: torch.Tensor,
    ) -> None:
        """Add accepted tokens to the context. Those of a round wait for the next one, whose first pass makes the
        entries of all its sequences. Many, those of a prompt, do not wait: their residual is large."""
        for start in range(0, residual.shape[1], _ENTRIES_AT_ONCE):
            self.flush_pending(target, [context])
            part = slice(start, start + _ENTRIES_AT_ONCE)
            new = residual[:, part], position_ids[:, part], next_ids[:, part]
            kept = context.pending  # of a drafter whose last token stays pending
            context.pending = new if kept is None else tuple(torch.cat(pair, dim=1) for pair in zip(kept, new))
        if residual.shape[1] > self.max_draft_tokens + 1:
            self.flush_pending(target, [context])

    def flush_pending(self, target: Target, contexts: Sequence[DraftContext]) -> None:
        """Make the entries of all pending tokens in one pass."""
        pending = padded_pending(contexts, self.device)
        if not pending:
            return
        columns = ContextColumns.of(self, contexts, size=self.config.block_size)
        states = run_entries(self, target, columns, pending, self.carried(contexts))
        self._keep_entries(contexts, states, range(len(contexts)))

    def _keep_entries(self, contexts: Sequence[DraftContext], states: torch.Tensor, rows: Sequence[int]) -> None:
        """Let contexts keep the entries of what is pending; the states of the last ones are in `rows` of `states`."""
        for row, context in zip(rows, contexts):
            if context.pending is not None:
                context.length += self.config.block_size * context.new_count
                context.states, context.pending = states[row : row + 1], None

    @torch.no_grad()
    def draft(self, target: Target, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        """Draft with one pass for all blocks that continue others; an empty context gives no drafts."""
        are_known = [each.context.states is not None or each.context.new_count > 0 for each in requests]
        return draft_known(requests, are_known, partial(self._draft_known, target))

    def _draft_known(self, target: Target, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        contexts, sampler, size = [each.context for each in requests], requests[0].sampler, self.config.block_size
        positions, rows = anchors_of(requests, self.device)[1][:, 0], [context.row for context in contexts]
        compiled, budget = contexts[0].compiled, sampler.tree_budget
        max_blocks = 1 if budget is None else self.max_blocks(budget, sampler.do_sample)
        if compiled is not None and all(compiled.fits(context) for context in contexts):
            plan = graph_plan(requests, self.device, self._on_accelerator)
            if budget is not None and not (self.tree_width and self._on_accelerator):
                plan = None
            if plan is not None or self._on_accelerator:
                drafted, states = compiled.run(draft_best, self, target, *compiled.inputs(requests, size), plan)
                # Of their own, as a graph's outputs last until it runs again.
                self._keep_entries(contexts, states.clone(), rows)
                if plan is not None:
                    return self._with_passes(drafts_of(drafted, requests, rows))
                lengths = torch.tensor([[context.length] for context in compiled.contexts], device=self.device)
                states = torch.cat([context.states for context in contexts])
                known = compiled.buffer, states, positions, lengths, compiled.attended
                width, run = width_of_pass(max_blocks), compiled.run
                return self._draft(target, Unrolling(self, target, *known, True, rows, width, run), requests)
        self.flush_pending(target, contexts)
        keys_values = rows_of(self, contexts, self.config.max_blocks * max_blocks * size)
        states, counts = torch.cat([context.states for context in contexts]), [context.length for context in contexts]
        lengths = counts[0] if len(set(counts)) == 1 else torch.tensor(counts, device=self.device)[:, None]
        return self._draft(
            target, Unrolling(self, target, keys_values, states, positions, lengths, max(counts)), requests
        )

    # Compiled

    def compiled_contexts(
        self,
        target: Target,
        contexts: Sequence[DraftContext],
        max_tokens: int,
        max_new: int,
        max_drafts: int,
        compiled: CompiledForwards,
    ) -> Sequence[DraftContext]:
        config = self.config
        if self.device.type == "meta":
            return []
        # Behind a text there are a round's entries, some of which only fill up, and its later blocks, pass by pass.
        max_blocks = width_of_pass(max(self.max_blocks(max_drafts, draws) for draws in (False, True)))
        spare = (max_new + config.max_blocks * max_blocks) * config.block_size
        columns = max_tokens * config.block_size
        compile_contexts(self, target, contexts, columns, spare, max_new, compiled, has_ids=True)
        return contexts

    def max_blocks(self, budget: int, do_sample: bool) -> int:
        """Return how many blocks of a text a pass has at most.

        Args:
            budget: The most nodes of a draft tree.
            do_sample: Whether these are drawn.
        """
        return budget

    @property
    def tree_width(self) -> int | None:
        """How many nodes of a level go on in a draft tree; `None` where it does not grow level by level."""
        return None

    def _draft(self, target: Target, unrolling: Unrolling, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        """Draft chains, or trees level by level."""
        is_chain = requests[0].sampler.tree_budget is None
        step = unrolling.chain_step if is_chain else unrolling.tree_step
        return self._with_passes(draft_batch(requests, step, self.tree_width))

    def _with_passes(self, trees: Sequence[DraftTree]) -> list[DraftTree]:
        size = self.config.block_size
        return [replace(tree, passes=tuple(1 + (k - 1) // size for k in tree.depths)) for tree in trees]

    def logits(self, target: Target, states: torch.Tensor) -> torch.Tensor:
        """Return logits `[..., target.config.vocab_size]` from states `[..., config.hidden_size]`, which are normed
        here. Tokens that cannot be drafted have minus infinity."""
        return self.to_full_vocabulary(target, self.drafted_logits(target, self.norm(states)))

    def drafted_logits(self, target: Target, normed: torch.Tensor) -> torch.Tensor:
        """Return logits `[..., config.draft_vocab_size or config.vocab_size]` from normed states."""
        if self.config.draft_vocab_size:
            return self.own_head(normed)
        return target.logits(normed)[..., : self.config.vocab_size]


def run_levels(
    drafter: Any,
    residual: torch.Tensor,
    position_ids: torch.Tensor,
    next_embeds: torch.Tensor,
    entries: torch.Tensor,
    later_embeds: torch.Tensor,
    slots: Sequence[int],
) -> torch.Tensor:
    """Run the first blocks of all entries and, from some of them, blocks that continue each other.

    Args:
        drafter: The drafter, which has [`UnrolledDrafter`]'s `condition`, `run`, `next_condition`, `normed` and
            `entry_mask`.
        residual, ..., slots: As of [`UnrolledDrafter.forward`], with embeddings.

    Returns:
        States for the LM head, as there.
    """
    size, caches = drafter.config.block_size, [_LevelCache() for _ in range(drafter.config.num_hidden_layers)]
    mask = drafter.entry_mask(position_ids)
    first = drafter.run(drafter.condition(residual), next_embeds, position_ids + 1, caches, mask)
    rows = torch.arange(len(entries), device=entries.device).unsqueeze(-1)
    blocks, positions = [first[rows, entries]], position_ids.gather(1, entries) + 1
    for level, slot in enumerate(slots):
        positions = positions + (slot + 1 if drafter.moves_positions else 0)
        mask = later_mask(entries, position_ids, size, slots[: level + 1])
        carried = drafter.next_condition(blocks[-1][:, :, slot])
        blocks.append(drafter.run(carried, later_embeds[:, :, level], positions, caches, mask))
    return torch.cat([drafter.normed(block, level) for level, block in enumerate(blocks)], dim=2)


class _LevelCache:
    """Keys and values of all levels of blocks so far, in training."""

    def __init__(self) -> None:
        self.parts: list[KeysValues] = []

    def __call__(self, keys: torch.Tensor, values: torch.Tensor) -> KeysValues:
        self.parts.append((keys, values))
        if len(self.parts) == 1:
            return keys, values
        return torch.cat([part[0] for part in self.parts], dim=2), torch.cat([part[1] for part in self.parts], dim=2)


def entry_pieces(position_ids: torch.Tensor, size: int) -> MaskPieces:
    """Return [`entry_mask`] in pieces, one for each document: entries and their slots in order, each slot sees those
    before it. No piece has a tensor, whose elements would be as many as the square of a row."""
    pieces = []
    for row, positions in enumerate(position_ids):
        starts = [*(positions == 0).nonzero().flatten().tolist(), len(positions)]
        spans = (slice(size * start, size * stop) for start, stop in pairwise(starts))
        pieces += [MaskPiece(row, span, (span,)) for span in spans]
    return MaskPieces(pieces)


def entry_mask(position_ids: torch.Tensor, size: int) -> torch.Tensor:
    """Return which slots see each other among the first blocks of all entries, boolean `[batch, 1, seq * size,
    seq * size]`.

    Args:
        position_ids: `[batch, seq]`, counting from 0 in every packed document.
        size: Slots of a block.
    """
    length, device = position_ids.shape[1], position_ids.device
    at = torch.arange(length, device=device).expand_as(position_ids)
    before = _entries_before(at, position_ids)
    slots = torch.arange(size, device=device)
    own = torch.eye(length, dtype=torch.bool, device=device)[:, None, :, None] & (slots[:, None, None] >= slots)
    return (before[:, :, None, :, None] | own).flatten(3).flatten(1, 2).unsqueeze(1)


def later_mask(entries: torch.Tensor, position_ids: torch.Tensor, size: int, slots: Sequence[int]) -> torch.Tensor:
    """Return which slots later blocks see, boolean `[batch, 1, entries * size, seq * size + len(slots) * entries *
    size]`: those of all first blocks, then those of later blocks level by level, their own last.

    Args:
        entries: The entries that later blocks continue, `[batch, entries]`.
        position_ids: `[batch, seq]`, counting from 0 in every packed document.
        size: Slots of a block.
        slots: The slot of the block before it from which each level continues, up to their own level.
    """
    batch, count, device = *entries.shape, entries.device
    until = [torch.arange(size, device=device) <= slot for slot in slots]
    at_entry = entries.unsqueeze(-1) == torch.arange(position_ids.shape[1], device=device)
    of_first = _entries_before(entries, position_ids).unsqueeze(-1) | (at_entry.unsqueeze(-1) & until[0])
    parts = [of_first.flatten(2).repeat_interleave(size, dim=1)]
    same = torch.eye(count, dtype=torch.bool, device=device)
    for seen in until[1:]:
        of_path = (same.unsqueeze(-1) & seen).flatten(1)
        parts.append(of_path.repeat_interleave(size, dim=0).expand(batch, -1, -1))
    within = torch.ones(size, size, dtype=torch.bool, device=device).tril()
    of_itself = (same[:, None, :, None] & within[None, :, None, :]).flatten(2).flatten(0, 1)
    return torch.cat([*parts, of_itself.expand(batch, -1, -1)], dim=-1).unsqueeze(1)


def _entries_before(entries: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
    """Return which entries lie before others in their document, boolean `[batch, entries, seq]`."""
    back = entries.unsqueeze(-1) - torch.arange(position_ids.shape[1], device=entries.device)
    return (back > 0) & (back <= position_ids.gather(1, entries).unsqueeze(-1))


def usual_layers(layers: int) -> list[int]:
    """Return the three layers of a target that EAGLE-3 and SpecBlock read.

    Raises:
        ValueError: If the target has too few layers for three different ones.
    """
    ids = [1, layers // 2 - 1, layers - 4]
    if ids != sorted(set(ids)):
        raise ValueError(
            f"The drafter reads the layers 1, n / 2 - 1 and n - 4, {ids} of this target's {layers}: expected a target "
            "of at least 8 layers, the drafter's own."
        )
    return ids
