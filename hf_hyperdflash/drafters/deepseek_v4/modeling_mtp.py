"""DeepSeek-V4's native drafter: the multi-token-prediction block that its checkpoints carry as `mtp.0.*`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config
from transformers.models.deepseek_v4.modeling_deepseek_v4 import (
    DeepseekV4DecoderLayer,
    DeepseekV4HyperHead,
    DeepseekV4RMSNorm,
    DeepseekV4RotaryEmbedding,
)

from ...targets.caches.name import CACHE
from ...targets.target import Target, attention_mask_for
from ...trees.growth import DraftStep
from ...trees.tree import DraftTree
from ..parts.heads import HeadOutput
from ..parts.layers import ContextLayer
from ..reading import HiddenStateDrafter
from ..sampling import DraftRequest, draft_batch, draft_known
from ..unrolled.drafter import entry_mask, run_levels
from ..unrolled.layer_cache import LayerCache
from .configuration import DeepseekV4MTPConfig
from .drafter import DeepseekV4Drafter, Rotary


class MTPContext:
    """The block's context of one sequence: the keys of its last accepted entries, and its streams after the last one.

    It takes the place of a cache of transformers in the block's attention. Tensors are replaced, never written to: a
    shallow copy can run ahead, and the original stays as it is.

    Args:
        window: `config.sliding_window`; a query sees itself and `window - 1` keys before it.
    """

    def __init__(self, window: int) -> None:
        self.window = window
        self.end = 0  # the number of tokens of the sequence that were added
        self.keys: torch.Tensor | None = None  # [sequences, 1, at most window - 1, config.head_dim]
        self.padding: torch.Tensor | None = None  # columns of keys before each sequence's own, [sequences]
        self.streams: torch.Tensor | None = None  # [1, 1, config.hc_mult, config.hidden_size]

    @classmethod
    def joined(cls, contexts: Sequence[MTPContext]) -> MTPContext:
        """Return one with a sequence for each of several contexts, to run ahead of them."""
        joined = cls(contexts[0].window)
        counts = [len(context) for context in contexts]
        parts = [cast(torch.Tensor, context.keys) for context in contexts]
        if min(counts) < max(counts):
            parts = [nn.functional.pad(keys, (0, 0, max(counts) - keys.shape[2], 0)) for keys in parts]
            joined.padding = torch.tensor([max(counts) - count for count in counts], device=parts[0].device)
        joined.keys = torch.cat(parts)
        return joined

    def __len__(self) -> int:
        """Return the number of past keys that the next entry can see."""
        return 0 if self.keys is None else self.keys.shape[2]

    keeps_all = False

    def crop(self, end: int) -> bool:
        """Go back to the first `end` tokens. Return whether it could: not where the window has moved on."""
        if self.end == end:
            return True
        if not 0 <= end < self.end == len(self):
            return False
        self.keys, self.streams, self.end = cast(torch.Tensor, self.keys)[:, :, :end], None, end
        return True

    def select(self, indices: torch.Tensor) -> None:
        """Become one sequence for each of `indices`, which continues the sequence of that index."""
        if self.keys is not None:
            self.keys = self.keys[indices]
        if self.padding is not None:
            self.padding = self.padding[indices]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append keys `[sequences, 1, new, config.head_dim]`, which are the values, too, and return all keys."""
        full = key_states if self.keys is None else torch.cat([self.keys, key_states], dim=2)
        left = max(full.shape[2] - (self.window - 1), 0)
        self.keys = full[:, :, left:]
        if self.padding is not None:
            self.padding = (self.padding - left).clamp(min=0)
        return full, full

    def mask(self, like: torch.Tensor) -> torch.Tensor | None:
        """Return the mask of one more entry of each sequence, added to the attention's logits, `[sequences, 1, 1,
        keys]`; `None` where it sees all keys."""
        if self.padding is None:
            return None
        hidden = torch.arange(len(self) + 1, device=like.device) < self.padding[:, None]
        mask = torch.zeros(hidden.shape, dtype=like.dtype, device=like.device)
        return mask.masked_fill_(hidden, torch.finfo(like.dtype).min)[:, None, None]


class DeepseekV4MTPDrafter(DeepseekV4Drafter):
    """Drafts one token at a time from the target's pre-collapse residual with the block that V4 was trained with.

    The block's entry `t` consists of the residual after token `t` and the embedding of token `t + 1`; from its output
    the LM head predicts token `t + 2`. For later drafts the block's own streams replace the residual.

    Use [`from_target`], `drafter.bind(target)` once, then `target.generate(**inputs, assistant_model=drafter)`.

    Args:
        config: A DeepSeek-V4's configuration, of which this model makes one block: sliding-window attention and a
            mixture of experts with learned routing. It is copied, not changed.
    """

    config: DeepseekV4MTPConfig
    config_class = DeepseekV4MTPConfig
    _usual_drafts = 3
    base_model_prefix = "mtp"
    target_layer_ids = [-1]  # reads the residual after the last layer, before it is collapsed
    _keep_in_fp32_modules_strict = [*DeepseekV4Drafter._keep_in_fp32_modules_strict, "enorm", "hnorm"]

    def __init__(self, config: DeepseekV4Config) -> None:
        is_block = isinstance(config, DeepseekV4MTPConfig)
        super().__init__(config if is_block else DeepseekV4MTPConfig.from_target_config(config))
        hidden, eps = self.config.hidden_size, self.config.rms_norm_eps
        self.e_proj, self.h_proj = nn.Linear(hidden, hidden, bias=False), nn.Linear(hidden, hidden, bias=False)
        self.enorm, self.hnorm, self.norm = (DeepseekV4RMSNorm(hidden, eps) for _ in range(3))
        self.block = DeepseekV4DecoderLayer(self.config, layer_idx=0)
        self.hc_head = DeepseekV4HyperHead(self.config)
        self.rotary_emb = DeepseekV4RotaryEmbedding(self.config)
        self.post_init()

    def _place(self, name: str) -> tuple[str, str]:
        return "mtp.0.", name.removeprefix("block.")

    # The block

    def forward(
        self,
        residual: torch.Tensor,
        next_embeds: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        context: MTPContext | None = None,
        attention_mask: torch.Tensor | None = None,
        rotary: Rotary | None = None,
        head: object = None,
        **levels: Any,
    ) -> Any:
        """Run the block, for training and for generation.

        Args:
            residual: `[batch, seq, config.hc_mult, config.hidden_size]`, the target's pre-collapse residual, or the
                block's streams of the entry before.
            next_embeds: `[batch, seq, config.hidden_size]`, the target's embeddings of the tokens after.
            position_ids: `[batch, seq]`, true positions of `residual`'s tokens; counted from 0 if left out.
            context: The sequence so far. The new entries' keys are appended to it.
            attention_mask: Added to the attention's logits, `[batch, 1, seq, past + seq]`; a causal sliding window if
                left out.
            rotary: Cosines and sines of `position_ids`; computed if left out.
            head: What trainers of drafters of entries pass; no part of this one reads logits.
            **levels: In training for several drafts ahead, the `entries`, `later_embeds` and `slots` of
                [`~drafters.unrolled.drafter.run_levels`].

        Returns:
            The block's streams, `[batch, seq, config.hc_mult, config.hidden_size]`, for [`collapse`] and for the next
            step; with `levels` the states for the LM head.
        """
        if levels:
            return HeadOutput(run_levels(self, residual, cast(torch.Tensor, position_ids), next_embeds, **levels))
        return self._streams(residual, next_embeds, position_ids, context, attention_mask, rotary)

    def _streams(
        self,
        residual: torch.Tensor,
        next_embeds: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        context: Any = None,
        attention_mask: torch.Tensor | None = None,
        rotary: Rotary | None = None,
    ) -> torch.Tensor:
        dtype = self.e_proj.weight.dtype
        residual, next_embeds = residual.to(dtype), next_embeds.to(dtype)
        if rotary is None:
            if position_ids is None:
                position_ids = torch.arange(residual.shape[1], device=residual.device)[None]
            rotary = self._rotary(next_embeds, position_ids)
        if attention_mask is None:
            past = 0 if context is None else len(context)
            attention_mask = sliding_mask(residual.shape[1], past, self.config.sliding_window, next_embeds)
        # The norms may return float32, their weights' dtype.
        token = self.e_proj(self.enorm(next_embeds).to(dtype))
        streams = token.unsqueeze(2) + self.h_proj(self.hnorm(residual).to(dtype))
        return self.block(
            streams,
            position_embeddings={"main": rotary},
            position_ids=position_ids,
            attention_mask=attention_mask,
            **{CACHE: context},
        )

    def collapse(self, streams: torch.Tensor) -> torch.Tensor:
        """Collapse streams `[batch, seq, config.hc_mult, config.hidden_size]` to the states that the target's LM head
        reads, `[batch, seq, config.hidden_size]`."""
        return self.norm(self.hc_head(streams))

    # Training, as drafters of entries are trained (`training/losses/objective.py`)

    moves_positions, vocabulary_table = True, None
    check_trainable = HiddenStateDrafter.check_trainable

    def read(self, target: Target, residual: torch.Tensor) -> torch.Tensor:
        return residual

    def condition(self, residual: torch.Tensor) -> torch.Tensor:
        return residual.to(self.e_proj.weight.dtype)

    def next_condition(self, states: torch.Tensor) -> torch.Tensor:
        return states

    def later_ids(self, ids: torch.Tensor) -> torch.Tensor:
        return ids

    def normed(self, states: torch.Tensor, level: int) -> torch.Tensor:
        """Return what the LM head reads of streams `[batch, entries, 1, config.hc_mult, config.hidden_size]`."""
        return self.collapse(states.flatten(0, 1)).unflatten(0, states.shape[:2])

    def entry_mask(self, position_ids: torch.Tensor) -> torch.Tensor:
        return entry_mask(position_ids, 1)

    def run(
        self,
        condition: torch.Tensor,
        embeds: torch.Tensor,
        positions: torch.Tensor,
        keys_values: Sequence[ContextLayer],
        mask: torch.Tensor,
    ) -> torch.Tensor:
        """Run the block over entries that see some of all keys, as of [`~drafters.unrolled.drafter.UnrolledDrafter.
        run`]; return streams `[batch, entries, 1, config.hc_mult, config.hidden_size]`."""
        known = LayerCache(keys_values[0], 0, self.config.sliding_window)
        visible = attention_mask_for("eager", known.visible(mask), condition.dtype)
        # Not by a call of the module, which a trainer has wrapped: autocast would stay on after a call within a call.
        return self._streams(condition, embeds, positions, known, cast(torch.Tensor, visible)).unsqueeze(2)

    # Drafting

    def new_context(self) -> MTPContext:
        """Return an empty context for one sequence."""
        return MTPContext(self.config.sliding_window)

    @torch.no_grad()
    def extend(
        self,
        target: Target,
        context: MTPContext,
        residual: torch.Tensor,
        position_ids: torch.Tensor,
        next_ids: torch.Tensor,
    ) -> None:
        """Add accepted tokens to the context.

        Args:
            target: The target, for its embedding.
            context: The sequence's, which is changed.
            residual: `[1, seq, config.hc_mult, config.hidden_size]`, the target's pre-collapse residual. `seq` may be
                0.
            position_ids: `[1, seq]`, true positions.
            next_ids: `[1, seq]`, the tokens that follow each.
        """
        if residual.shape[1] == 0:
            return
        # With one layer, later drafts depend on nothing before the last entry's window.
        window = self.config.sliding_window
        residual, position_ids, next_ids = residual[:, -window:], position_ids[:, -window:], next_ids[:, -window:]
        streams = self(residual.to(self.device), self._embed(target, next_ids), position_ids.to(self.device), context)
        context.streams = streams[:, -1:].clone()  # a view would keep the others in memory

    @torch.no_grad()
    def draft(self, target: Target, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        """Draft the next tokens of all texts pass by pass; an empty context gives no drafts."""
        are_known = [each.context.streams is not None for each in requests]
        return draft_known(requests, are_known, partial(self._draft_known, target))

    def _draft_known(self, target: Target, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        ahead = MTPContext.joined([each.context for each in requests])
        streams = torch.cat([each.context.streams for each in requests])
        offsets = torch.arange(max(each.num_drafts for each in requests) - 1, device=self.device)
        anchors = torch.cat([each.position_ids[:, -1:] for each in requests]).to(self.device)
        cos, sin = self._rotary(streams, anchors + offsets)
        texts = torch.arange(len(requests), device=self.device)  # of each path

        def steps(k: int, tokens: torch.Tensor, rows: torch.Tensor) -> DraftStep:
            nonlocal streams, texts
            if k:
                rows = rows.to(self.device)
                texts = texts[rows]
                ahead.select(rows)
                rotary = cos[texts, k - 1 : k], sin[texts, k - 1 : k]
                embeds, mask = self._embed(target, tokens[:, None]), ahead.mask(self.e_proj.weight)
                streams = self(streams[rows], embeds, context=ahead, attention_mask=mask, rotary=rotary)
            return DraftStep(self._logits(target, streams)[:, 0])

        return [replace(tree, passes=tree.depths) for tree in draft_batch(requests, steps)]

    def _embed(self, target: Target, ids: torch.Tensor) -> torch.Tensor:
        return target.embed(ids).to(self.device)

    def _logits(self, target: Target, streams: torch.Tensor) -> torch.Tensor:
        logits = target.logits(self.collapse(streams)).float()
        logits[..., self.config.vocab_size :] = -torch.inf  # tokens that the target got later
        return logits

    def target_sizes(self) -> dict[str, int]:
        return {"hidden_size": self.config.hidden_size, "hc_mult": self.config.hc_mult}


def sliding_mask(queries: int, past: int, window: int, like: torch.Tensor) -> torch.Tensor | None:
    """Return the mask that V4's own model builds: causal, `window` keys wide, added to the attention's logits.

    Args:
        queries: New entries.
        past: Keys before them, at most `window - 1`.
        window: `config.sliding_window`.
        like: Gives dtype and device.

    Returns:
        `[1, 1, queries, past + queries]`, or `None` for a single query, which sees all keys.
    """
    if queries == 1:
        return None
    keys = torch.arange(past + queries, device=like.device)
    distance = keys[past:, None] - keys
    mask = torch.zeros(distance.shape, dtype=like.dtype, device=like.device)
    return mask.masked_fill_((distance < 0) | (distance >= window), torch.finfo(like.dtype).min)[None, None]
