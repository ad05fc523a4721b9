"""Drafters that continue from states of their own: EAGLE-3, token by token, and SpecBlock, block by block.

Entry t consists of the target's residual after token t and the embedding of token t + 1. Its block has K slots, and
slot k drafts token t + 2 + k. A later block continues from the last slot of the block before, whose state replaces the
residual. In every layer a slot sees everything before it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedConfig

from ..drafters.parts.layers import (
    ContextLayer,
    KeysValues,
)
from ..drafters.unrolled.drafter import UnrolledNetwork
from ..drafters.unrolled.modeling_eagle3 import Eagle3Network
from ..drafters.unrolled.modeling_peagle import PEagleNetwork
from ..drafters.unrolled.modeling_specblock import SpecBlockNetwork
from .drafter import PortableDrafter
from .loop import Drafts
from .target import Target

ENTRIES_AT_ONCE = 256  # of a prompt: their mask is as large as the square of their slots


class Eagle3Config(PreTrainedConfig):
    """The drafter's config.json, which has every field; the package's class of this name says what they mean."""

    model_type = "eagle3"
    conv_kernel_size = 0


class PEagleConfig(PreTrainedConfig):
    """The drafter's config.json, which has every field; the package's class of this name says what they mean."""

    model_type = "peagle"
    conv_kernel_size = 0


class SpecBlockConfig(PreTrainedConfig):
    """The drafter's config.json, which has every field; the package's class of this name says what they mean."""

    model_type = "specblock"
    conv_kernel_size = 0


class EntryContext:
    """Keys and values of a text's entries, of every layer, and the state from which the next round drafts.

    Attributes:
        states: Of the last entry's slots, `[1, block_size, config.hidden_size]`; `None` before the first.
        position: Of its first slot, `[1, 1]`.
        pending: Residual, positions and following tokens of the last tokens, whose entries the next round adds.
    """

    def __init__(self, layers: int) -> None:
        self.states: torch.Tensor | None = None
        self.position: torch.Tensor | None = None
        self.pending: tuple[torch.Tensor, ...] | None = None
        self.known: list[KeysValues | None] = [None] * layers

    def layer(self, index: int) -> ContextLayer:
        """Return a function for one layer's attention: it adds keys and values, and returns all."""

        def update(*new: torch.Tensor) -> KeysValues:
            known = self.known[index]
            keys, values = new if known is None else (torch.cat(pair, dim=2) for pair in zip(known, new))
            self.known[index] = keys, values
            return keys, values

        return update

    def ahead(self) -> EntryContext:
        """Return a copy that can run ahead. Tensors are replaced, never written to."""
        ahead = copy.copy(self)
        ahead.known = list(self.known)
        return ahead


class UnrolledDrafter(UnrolledNetwork, PortableDrafter):
    """The base of drafters of entries.

    Attributes:
        moves_positions: Whether a later block has later positions than the block that it continues.
        _begin: Returns the input of the first layer from conditions and embeddings of blocks,
            `[1, blocks, config.hidden_size]`.
    """

    base_model_prefix = "drafter"
    _supports_sdpa = _supports_attention_backend = True
    _keep_in_fp32_modules_strict = ["hc_gate"]
    moves_positions = True
    layers: nn.ModuleList
    draft_ids: torch.Tensor
    _begin: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the layers; a gate is always float32."""
        return cast(Any, self).norm.weight.dtype

    @property
    def max_draft_tokens(self) -> int:  # type: ignore[override]
        return self.config.block_size * self.config.max_blocks

    def layers_read(self, target: Target) -> Sequence[int]:
        count = len(target.layers)
        return [1, count // 2 - 1, count - 4] if self.config.usual_layers else self.config.target_layer_ids

    def run(
        self, target: Target, context: EntryContext, condition: torch.Tensor, ids: torch.Tensor, first: torch.Tensor
    ) -> torch.Tensor:
        """Run blocks, and add their keys and values to a context. Return their states,
        `[1, blocks * block_size, config.hidden_size]`.

        Args:
            condition: `[1, blocks, config.hidden_size]`.
            ids: The tokens that follow, `[1, blocks]`.
            first: The positions of their first slots, `[1, blocks]`.
        """
        size = self.config.block_size
        if self.config.own_embedding:  # which has no row for tokens that the target got later
            embeds = self.embed_tokens(ids.to(self.device).clamp(max=self.config.vocab_size - 1))
        else:
            embeds = target.embed(ids).to(self.device)
        hidden = self._begin(condition, embeds.to(condition.dtype))
        slots, new, known = torch.arange(size, device=first.device), hidden.shape[1], context.known[0]
        rotary = self.rotary_emb(hidden, (first.unsqueeze(-1) + slots).flatten(1))
        past = 0 if known is None else known[0].shape[2]
        visible = torch.ones(1, 1, new, past + new, dtype=torch.bool, device=hidden.device).tril(past)
        mask = None if new == 1 else self.attention_mask(visible, hidden.dtype)
        for index, layer in enumerate(self.layers):
            hidden = layer(self._between(index, hidden), None, rotary, context.layer(index), mask)
        return hidden

    def new_context(self) -> EntryContext:
        return EntryContext(len(self.layers))

    def extend(
        self, target: Target, context: EntryContext, residual: Any, position_ids: torch.Tensor, next_ids: torch.Tensor
    ) -> None:
        for start in range(0, next_ids.shape[1], ENTRIES_AT_ONCE):
            self._flush(target, context)
            part = slice(start, start + ENTRIES_AT_ONCE)
            context.pending = residual[:, part], position_ids[:, part], next_ids[:, part]
        if next_ids.shape[1] > self.max_draft_tokens + 1:  # a prompt's, whose residual is large
            self._flush(target, context)

    def _flush(self, target: Target, context: EntryContext) -> None:
        """Make the entries of the pending tokens."""
        if context.pending is not None:
            residual, position_ids, next_ids = (part.to(self.device) for part in context.pending)
            first = position_ids + 1
            states = self.run(target, context, self.condition(residual), next_ids, first)
            context.states = states[:, -self.config.block_size :]
            context.position, context.pending = first[:, -1:], None

    def draft(
        self, target: Target, context: Any, anchor: torch.Tensor, position: torch.Tensor, count: int, drafts: Drafts
    ) -> None:
        self._flush(target, context)
        states, first, ahead, size, token = (
            context.states,
            context.position,
            context.ahead(),
            self.config.block_size,
            anchor,
        )
        if states is None:
            return
        for k in range(count):
            if k and k % size == 0:
                first = first + size * self.moves_positions
                states = self.run(target, ahead, self.next_condition(states[:, -1:]), token, first)
            token = drafts.choose(self.logits(target, states[:, k % size]))

    def logits(self, target: Target, states: torch.Tensor) -> torch.Tensor:
        """Return logits of all of the target's tokens from states, which are normed here."""
        normed, cap = self.norm(states), self.config.final_logit_softcapping
        if not self.config.draft_vocab_size:
            return self.full_logits(target, target.logits(normed)[..., : self.config.vocab_size])
        logits = self.lm_head(normed)
        logits = logits if cap is None else cap * torch.tanh(logits / cap)
        return self.full_logits(target, logits, self.draft_ids)


class Eagle3Drafter(Eagle3Network, UnrolledDrafter):
    """One token at a time from three of the target's layers, and then from its own states."""

    config_class = Eagle3Config
    _no_split_modules = ["Eagle3Layer", "HyperDFlashLayer"]


class PEagleDrafter(PEagleNetwork, UnrolledDrafter):
    """All tokens of a round in one pass: EAGLE-3's layers, and a mask for what is not known yet."""

    config_class = PEagleConfig
    _no_split_modules = ["Eagle3Layer", "HyperDFlashLayer"]

    def draft(
        self, target: Target, context: Any, anchor: torch.Tensor, position: torch.Tensor, count: int, drafts: Drafts
    ) -> None:
        self._flush(target, context)
        states, masks = context.states, count - 1
        if states is None:
            return
        if masks:
            ids, first = self.later_ids(anchor.expand(-1, masks)), context.position + torch.arange(1, count)
            condition = self.next_condition(states.expand(-1, masks, -1))
            states = torch.cat([states, self.run(target, context.ahead(), condition, ids, first)], dim=1)
        for logits in self.logits(target, states).unbind(1):
            drafts.choose(logits)


class SpecBlockDrafter(SpecBlockNetwork, UnrolledDrafter):
    """Blocks whose slots depend on each other, and later blocks from the last slot of an earlier one."""

    config_class = SpecBlockConfig
    _no_split_modules = ["HyperDFlashLayer"]
    moves_positions = False  # the authors' checkpoints are trained and used so
