"""DeepSeek-V4's own drafters: the MTP block of its checkpoints, and the DSpark drafter of those from July on."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config
from transformers.models.deepseek_v4.modeling_deepseek_v4 import (
    DeepseekV4DecoderLayer,
    DeepseekV4HyperHead,
    DeepseekV4PreTrainedModel,
    DeepseekV4RMSNorm,
    DeepseekV4RotaryEmbedding,
)

from ..drafters.deepseek_v4.modeling_dspark import DSparkNetwork
from ..drafters.deepseek_v4.modeling_mtp import sliding_mask
from ..drafters.parts.block_attention import AttentionSpan
from .blocks import BlockDrafter
from .drafter import PortableDrafter
from .loop import Drafts
from .target import CACHE_NAME, Target


class DeepseekV4DSparkConfig(DeepseekV4Config):
    """The drafter's config.json, which has every field; the package's class of this name says what they mean."""

    model_type = "deepseek_v4_dspark"
    target_model_type = "deepseek_v4"
    sample_from_anchor = True
    head_candidates = draft_vocab_size = 0
    sequential_head = "markov"

    @property
    def target_hidden_size(self) -> int:
        return self.hidden_size

    @property
    def target_hc_mult(self) -> int:
        return self.hc_mult

    @property
    def spans(self) -> list[AttentionSpan]:
        """What slots see in every layer."""
        return [AttentionSpan(self.sliding_window)] * self.num_hidden_layers


class DeepseekV4MTPConfig(DeepseekV4Config):
    """A DeepSeek-V4's configuration, for its MTP block alone."""

    model_type = "deepseek_v4_mtp"
    target_model_type = "deepseek_v4"


class DeepseekV4DSparkDrafter(DSparkNetwork, BlockDrafter, DeepseekV4PreTrainedModel):
    """A block in one pass over V4 blocks, conditioned on means over the streams of a few of the target's layers."""

    config_class = DeepseekV4DSparkConfig
    base_model_prefix = "drafter"
    _no_split_modules = ["DSparkLayer"]
    _keep_in_fp32_modules_strict = [*(DeepseekV4PreTrainedModel._keep_in_fp32_modules_strict or ()), "main_norm"]
    _keys_to_ignore_on_load_unexpected: list[str] = []

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        return True  # transformers looks for the experts' decorator in the source of this file

    def rotary(self, like: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.rotary_emb(like, position_ids=position_ids, layer_type="main")


class MTPContext:
    """The keys of a text's last entries, which are the values, too, and the streams after the last one. It takes the
    place of a cache in the block's attention.

    Args:
        window: A query sees itself and `window - 1` keys before it.
    """

    def __init__(self, window: int) -> None:
        self.window = window
        self.keys: torch.Tensor | None = (
            None  # [1, 1, at most window - 1, config.head_dim], replaced, never written to
        )
        self.streams: torch.Tensor | None = None  # [1, 1, config.hc_mult, config.hidden_size]

    def update(self, keys: torch.Tensor, *_: object, **__: object) -> tuple[torch.Tensor, torch.Tensor]:
        full = keys if self.keys is None else torch.cat([self.keys, keys], dim=2)
        self.keys = full[:, :, max(full.shape[2] - (self.window - 1), 0) :]
        return full, full


class DeepseekV4MTPDrafter(PortableDrafter, DeepseekV4PreTrainedModel):
    """One token at a time from the target's pre-collapse residual, with the block that V4 was trained with.

    Entry t consists of the residual after token t and the embedding of token t + 1; from its output the LM head
    predicts token t + 2. For later drafts the block's own streams replace the residual.
    """

    config_class = DeepseekV4MTPConfig
    base_model_prefix = "mtp"
    target_layer_ids = [-1]
    _keep_in_fp32_modules_strict = [*(DeepseekV4PreTrainedModel._keep_in_fp32_modules_strict or ()), "enorm", "hnorm"]
    _keys_to_ignore_on_load_unexpected: list[str] = []

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        width, eps = config.hidden_size, config.rms_norm_eps
        self.e_proj, self.h_proj = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.enorm, self.hnorm, self.norm = (DeepseekV4RMSNorm(width, eps) for _ in range(3))
        self.block = DeepseekV4DecoderLayer(config, layer_idx=0)
        self.hc_head = DeepseekV4HyperHead(config)
        self.rotary_emb = DeepseekV4RotaryEmbedding(config)
        self.post_init()

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        return True  # transformers looks for the experts' decorator in the source of this file

    def run(
        self,
        target: Target,
        context: MTPContext,
        residual: torch.Tensor,
        ids: torch.Tensor,
        position_ids: torch.Tensor,
    ) -> torch.Tensor:
        """Run the block over entries, and add them to a context. Return its streams, `[1, seq, hc_mult, width]`."""
        dtype, past = self.e_proj.weight.dtype, 0 if context.keys is None else context.keys.shape[2]
        embeds = target.embed(ids).to(self.device, dtype)
        # The norms may return float32, their weights' dtype.
        token = self.e_proj(self.enorm(embeds).to(dtype))
        streams = token.unsqueeze(2) + self.h_proj(self.hnorm(residual.to(self.device, dtype)).to(dtype))
        rotary = self.rotary_emb(embeds, position_ids=position_ids.to(self.device), layer_type="main")
        mask = sliding_mask(ids.shape[1], past, self.config.sliding_window, embeds)
        cache: dict[str, Any] = {CACHE_NAME: context}
        return self.block(
            streams, position_embeddings={"main": rotary}, position_ids=None, attention_mask=mask, **cache
        )

    def new_context(self) -> MTPContext:
        return MTPContext(self.config.sliding_window)

    def extend(
        self, target: Target, context: MTPContext, residual: Any, position_ids: torch.Tensor, next_ids: torch.Tensor
    ) -> None:
        # With one layer, later drafts depend on nothing before the last entry's window.
        last = slice(-self.config.sliding_window, None)
        streams = self.run(target, context, residual[:, last], next_ids[:, last], position_ids[:, last])
        context.streams = streams[:, -1:].clone()  # a view would keep the others in memory

    def draft(
        self, target: Target, context: Any, anchor: torch.Tensor, position: torch.Tensor, count: int, drafts: Drafts
    ) -> None:
        ahead, streams, token = copy.copy(context), context.streams, anchor
        for k in range(count):
            if k:
                streams = self.run(target, ahead, streams, token, position + k - 1)
            logits = target.logits(self.norm(self.hc_head(streams)))[:, 0, : self.config.vocab_size]
            token = drafts.choose(self.full_logits(target, logits))
