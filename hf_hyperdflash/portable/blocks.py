"""The HyperDFlash drafter: a block of tokens in one pass from the target's residual streams."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedConfig

from ..drafters.blocks.modeling_hyperdflash import HyperDFlashNetwork
from ..drafters.parts.block_attention import FULL, SLIDING, AttentionSpan
from ..drafters.parts.heads import HEADS, SequentialHead
from ..drafters.parts.layers import (
    ContextLayer,
    KeysValues,
    block_inputs,
)
from .drafter import PortableDrafter
from .loop import Drafts
from .target import Target

NO_CANDIDATE = 1e4  # below the others: such tokens are chosen only where processors leave no candidate


class HyperDFlashConfig(PreTrainedConfig):
    """The drafter's config.json, which has every field; the package's class of this name says what they mean."""

    model_type = "hyperdflash"
    qk_norm = True

    @property
    def spans(self) -> list[AttentionSpan]:
        """What slots see in every layer."""
        kinds = self.layer_types or [FULL if self.sliding_window is None else SLIDING] * self.num_hidden_layers
        causal = {"all": kinds, "sliding": [SLIDING]}.get(self.causal_layers, [])
        windows = {SLIDING: self.sliding_window}
        return [AttentionSpan(windows.get(kind), self.window_from == "slot", kind in causal) for kind in kinds]


class BlockContext:
    """Keys and values of a text's tokens, of every layer; a block's own are not kept.

    Args:
        spans: What slots see in every layer.

    Attributes:
        window: How many of the last tokens any layer sees; `None` for all.
        pending: Residual and positions of the last tokens, which the next block adds.
    """

    def __init__(self, spans: Sequence[AttentionSpan]) -> None:
        self.spans, windows = spans, [span.context_window for span in spans]
        self.window = None if None in windows else max(cast("list[int]", windows))
        self.pending: tuple[torch.Tensor, torch.Tensor] | None = None
        self._known: list[KeysValues | None] = [None] * len(spans)

    def layer(self, index: int, new: int) -> ContextLayer:
        """Return a function for one layer's attention. It takes keys and values `[1, kv_heads, new + queries,
        head_dim]`, keeps the `new` ones, and returns all that the queries see."""

        def update(*states: torch.Tensor) -> KeysValues:
            known, window = self._known[index], self.spans[index].context_window
            queries = states[0].shape[2] - new
            both = states if known is None else tuple(torch.cat(pair, dim=2) for pair in zip(known, states))
            stop = both[0].shape[2] - queries
            first = 0 if window is None else max(0, stop - window)
            self._known[index] = (both[0][:, :, first:stop], both[1][:, :, first:stop])
            return both[0][:, :, first:], both[1][:, :, first:]

        return update

    def mask(self, index: int, new: int, queries: int, device: torch.device) -> torch.Tensor | None:
        """Return what a layer's queries see of the context, `new` tokens with it, and of each other."""
        known, window = self._known[index], self.spans[index].context_window
        count = new + (0 if known is None else known[0].shape[2])
        return self.spans[index].mask(queries, count if window is None else min(count, window), device)


class BlockDrafter(PortableDrafter):
    """The base of drafters of blocks.

    Attributes:
        layers: Called with a block's states, the feature of what is new to the context, the rotary embedding of both,
            the context and the mask; `keys_values` are of the feature alone.
        reduce: Returns the feature of tokens, `[1, seq, config.hidden_size]`, from their residual streams.
        _begin: Returns the input of the first layer from a block's embeddings.
        _end: Returns the heads' input from the output of the last layer.
    """

    layers: nn.ModuleList
    max_draft_tokens: int
    reduce: Callable[[torch.Tensor], torch.Tensor]
    _begin: Callable[[torch.Tensor], torch.Tensor]
    _end: Callable[[torch.Tensor], torch.Tensor]

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.target_layer_ids = config.target_layer_ids
        self.first_slot = 0 if config.sample_from_anchor else 1  # that drafts the token after the anchor
        self.max_draft_tokens = config.block_size - self.first_slot

    @property
    def head(self) -> SequentialHead | None:
        """The head by which each draft depends on the one before it."""
        kind = HEADS.get(self.config.sequential_head)
        return None if kind is None else getattr(self, kind.key)

    def new_context(self) -> BlockContext:
        return BlockContext(self.config.spans)

    def extend(
        self, target: Target, context: BlockContext, residual: Any, position_ids: torch.Tensor, next_ids: torch.Tensor
    ) -> None:
        self._flush(context)
        last = slice(-context.window if context.window else None, None)
        context.pending = residual[:, last].to(self.device), position_ids[:, last].to(self.device)
        if (
            residual.shape[1] > self.max_draft_tokens + 1
        ):  # a prompt's, whose residual is large; others go with a block
            self._flush(context)

    def _flush(self, context: BlockContext) -> None:
        """Compute the keys and values of the pending tokens, without a block."""
        if context.pending is not None:
            residual, position_ids = context.pending
            feature = self.reduce(residual)
            rotary = self.rotary(feature, position_ids)
            for index, layer in enumerate(self.layers):
                context.layer(index, feature.shape[1])(*cast(Any, layer).keys_values(feature, rotary))
            context.pending = None

    def run_block(
        self, target: Target, context: BlockContext, anchor: torch.Tensor, position: torch.Tensor
    ) -> torch.Tensor:
        """Run a block after the context, and add what is pending. Return its states, `[1, block_size, ...]`."""
        block, positions = block_inputs(anchor, position, self.config.block_size, self.config.mask_token_id)
        hidden, positions = self._begin(target.embed(block).to(self.device, self.dtype)), positions.to(self.device)
        feature, new = None, 0
        if context.pending is not None:
            residual, before = context.pending
            feature, new, positions = self.reduce(residual), before.shape[1], torch.cat([before, positions], dim=1)
        rotary, masks = self.rotary(hidden, positions), dict[AttentionSpan, Any]()
        for index, (layer, span) in enumerate(zip(self.layers, context.spans)):
            if span not in masks:
                mask = context.mask(index, new, hidden.shape[1], hidden.device)
                masks[span] = self.attention_mask(mask, hidden.dtype)
            hidden = layer(hidden, feature, rotary, context.layer(index, new), masks[span])
        context.pending = None
        return self._end(hidden)

    def draft(
        self, target: Target, context: Any, anchor: torch.Tensor, position: torch.Tensor, count: int, drafts: Drafts
    ) -> None:
        states = self.run_block(target, context, anchor, position)[:, self.first_slot : self.first_slot + count]
        head, carried, token = self.head, None, anchor
        if head is None:
            for logits in self.full_logits(target, self.logits(target, states), self.drafted_ids).unbind(1):
                drafts.choose(logits)
            return
        candidates = self.config.head_candidates or 0
        blind = self.logits(target, states) if candidates or head.table is not None else None  # without the head
        for k in range(count):
            before = token[:, 0].to(self.device)
            embeds = target.embed(token)[:, 0].to(self.device) if head.reads_embeds else None
            if k == 0:  # the anchor may be a token that the target got later, and of which tables know nothing
                before = before.clamp(max=self.config.vocab_size - 1)
            corrected, vectors, _, carried = head(states[:, k], before, embeds, carried)
            if blind is None:
                logits = self.logits(target, corrected)
            elif not candidates:
                logits = blind[:, k] + nn.functional.linear(vectors, cast(Any, head.table)).to(blind)
            else:  # the head chooses among the block's best tokens
                alone = blind[:, k].float()
                ids = alone.topk(candidates, dim=-1).indices
                if vectors is None:
                    scores = self.logits(target, corrected, ids)
                else:
                    rows = cast(torch.Tensor, head.table)[ids.to(vectors.device)]
                    scores = alone.gather(-1, ids) + torch.einsum("br,bcr->bc", vectors, rows).to(alone)
                scores = scores.to(alone).masked_fill(alone.gather(-1, ids) == -torch.inf, -torch.inf)
                logits = (alone - NO_CANDIDATE).scatter(-1, ids, scores)
            token = drafts.choose(self.full_logits(target, logits, self.drafted_ids))

    @property
    def drafted_ids(self) -> torch.Tensor | None:
        """The tokens that can be drafted; `None` for the first `config.vocab_size`."""
        return getattr(self, "draft_ids", None)

    def logits(self, target: Target, states: torch.Tensor, ids: torch.Tensor | None = None) -> torch.Tensor:
        """Return logits of the tokens that can be drafted, or of some of them, from a block's states. The mask token,
        which no text has, gets minus infinity."""
        states, mask = self.lm_head_input(states), self.config.mask_token_id
        if ids is not None and self.drafted_ids is None:
            return target.logits(states, ids)
        if self.drafted_ids is None:
            logits = target.logits(states)[..., : self.config.vocab_size]
            if mask is not None:
                logits[..., mask] = -torch.inf
            return logits
        logits, cap = self.lm_head(states), self.config.final_logit_softcapping
        logits = logits if cap is None else cap * torch.tanh(logits / cap)
        logits = logits.masked_fill(self.drafted_ids == (-1 if mask is None else mask), -torch.inf)
        return logits if ids is None else logits.gather(-1, ids)

    def rotary(self, like: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines of positions."""
        return cast(Any, self).rotary_emb(like, position_ids)

    def lm_head_input(self, states: torch.Tensor) -> torch.Tensor:
        """Return the LM head's input from states after the heads."""
        return states


class HyperDFlashDrafter(HyperDFlashNetwork, BlockDrafter):
    """A block of tokens in one pass from the target's pre-collapse residual."""

    config_class = HyperDFlashConfig
    base_model_prefix = "drafter"
    _no_split_modules = ["HyperDFlashLayer"]
    _supports_sdpa = _supports_attention_backend = True
    _keep_in_fp32_modules_strict = ["hc_gate"]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the layers; a gate is always float32."""
        return cast(Any, self).norm.weight.dtype
