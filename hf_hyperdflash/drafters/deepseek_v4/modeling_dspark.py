"""DeepSeek-V4's DSpark drafter: V4 blocks and a Markov head, which its checkpoints from July on carry as `mtp.*`.

Read in descriptions of DeepSeek's `inference/model.py` (DeepSeek-V4-Flash-DSpark, lines 744 to 932), and the same in
vLLM's `models/deepseek_v4/nvidia/dspark.py` (`dspark_target_layer_ids` are layers after which, not before which, is
read) and in the list of the 4,705 tensors of DeepSeek-V4-Flash-0731:

- The feature of a token is `main_norm(main_proj(...))` of the means over the streams after each of the layers read. In
  every block its keys are `kv_norm(wkv(feature))`, which no other norm precedes, at its own position.
- The anchor and `block_size - 1` mask tokens stand at the positions from the anchor's on. Their embeddings, repeated
  `hc_mult` times, are the streams of the first block; every slot sees the features of the last `sliding_window` tokens
  before the anchor and all slots of the block. V4's blocks otherwise: RoPE without YaRN, sinks, learned routing.
- `hc_head` collapses what leaves the last block. The LM head reads the norm of that and the bias of the token before
  is added to its logits, before temperature; the confidence reads it without the norm, and has no bias of its own.

DeepSeek rounds keys to FP8 where RoPE does not reach; here, as in the target of transformers, they are not rounded.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn
from transformers.models.deepseek_v4.modeling_deepseek_v4 import (
    DeepseekV4DecoderLayer,
    DeepseekV4HyperHead,
    DeepseekV4RMSNorm,
    DeepseekV4RotaryEmbedding,
    apply_rotary_pos_emb,
)

from ...targets.caches.name import CACHE
from ..blocks.drafter import BlockDrafter
from ..parts.heads import ConfidenceHead, MarkovHead
from ..parts.layers import ContextLayer, KeysValues, Rotary
from .configuration import DeepseekV4DSparkConfig
from .drafter import DeepseekV4Drafter


class KeysBefore:
    """Takes the place of a cache of transformers in a block's attention: it puts the context's keys before the
    block's.

    Args:
        keys: Of the tokens that are new to the context, `[batch, 1, new, config.head_dim]`.
        context: For the keys that the context has already, see [`ContextColumns.layer`].
    """

    def __init__(self, keys: torch.Tensor | None, context: ContextLayer | None) -> None:
        self.keys, self.context = keys, context

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return all keys, the context's first; V4's values are its keys."""
        keys = key_states if self.keys is None else torch.cat([self.keys, key_states], dim=2)
        return (keys, keys) if self.context is None else self.context(keys, keys)


class DSparkLayer(DeepseekV4DecoderLayer):
    """A V4 block over a context whose keys it computes from the conditioning feature."""

    def keys_values(self, feature: torch.Tensor, rotary: Rotary) -> KeysValues:
        """Return keys and values of the context, `[batch, 1, seq, config.head_dim]`; V4's values are its keys."""
        keys = self.self_attn.kv_norm(self.self_attn.kv_proj(feature)).unsqueeze(1)
        keys = apply_rotary_pos_emb(keys, *rotary)
        return keys, keys

    def forward(  # type: ignore[override]
        self,
        streams: torch.Tensor,
        feature: torch.Tensor | None,
        rotary: Rotary,
        context: ContextLayer | None,
        attention_mask: torch.Tensor | None,
    ) -> torch.Tensor:
        """Run the block over `[batch, queries, config.hc_mult, config.hidden_size]`; `rotary` is for the feature's
        tokens, then the block's."""
        new = 0 if feature is None else feature.shape[1]
        cos, sin = rotary
        keys = None if feature is None else self.keys_values(feature, (cos[:, :new], sin[:, :new]))[0]
        before: dict[str, Any] = {CACHE: KeysBefore(keys, context)}
        return super().forward(
            streams,
            position_embeddings={"main": (cos[:, new:], sin[:, new:])},
            position_ids=None,
            attention_mask=attention_mask,
            **before,
        )


class DSparkNetwork(nn.Module):
    """The layers of V4's DSpark drafter, before a base of drafters: the package's, or that of `portable/`."""

    config: Any
    confidence_head: ConfidenceHead | None

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        width, layers = config.hidden_size, len(config.target_layer_ids or ())
        self.main_proj = nn.Linear(layers * width, width, bias=False)
        self.main_norm, self.norm = (DeepseekV4RMSNorm(width, config.rms_norm_eps) for _ in range(2))
        self.layers = nn.ModuleList(DSparkLayer(config, index) for index in range(config.num_hidden_layers))
        self.hc_head = DeepseekV4HyperHead(config)
        self.markov_head = MarkovHead(config)
        self.confidence_head = ConfidenceHead(config, config.head_rank, bias=False)
        self.rotary_emb = DeepseekV4RotaryEmbedding(config)
        cast(Any, self).post_init()

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the layers, except of those that V4 keeps in float32."""
        return self.main_proj.weight.dtype

    def reduce(self, residual: torch.Tensor) -> torch.Tensor:
        means = residual.to(self.dtype).unflatten(2, (-1, self.config.hc_mult)).mean(3)
        return self.main_norm(self.main_proj(means.flatten(2)))

    def _begin(self, embeds: torch.Tensor) -> torch.Tensor:
        return embeds.unsqueeze(2).repeat(1, 1, self.config.hc_mult, 1)

    def _end(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.hc_head(hidden)

    def lm_head_input(self, states: torch.Tensor) -> torch.Tensor:
        return self.norm(states)


class DeepseekV4DSparkDrafter(DSparkNetwork, DeepseekV4Drafter, BlockDrafter):
    """Drafts a block in one pass over V4 blocks, conditioned on means over the streams of a few of the target's
    layers. By a Markov head each draft depends on the one before it.

    Use [`from_target`], `drafter.bind(target)` once, then `target.generate(**inputs, assistant_model=drafter)`.
    """

    config: DeepseekV4DSparkConfig
    config_class = DeepseekV4DSparkConfig
    base_model_prefix = "drafter"
    _no_split_modules = ["DSparkLayer"]
    _keep_in_fp32_modules_strict = [*DeepseekV4Drafter._keep_in_fp32_modules_strict, "main_norm"]

    def _place(self, name: str) -> tuple[str, str]:
        if name.startswith("layers."):
            _, index, part = name.split(".", 2)
            return f"mtp.{index}.", part
        is_first = name.startswith(("main_proj", "main_norm"))
        return f"mtp.{0 if is_first else len(self.layers) - 1}.", name
