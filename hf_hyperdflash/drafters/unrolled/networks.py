"""What EAGLE-3 and SpecBlock compute, in training, in generation and in the code that a saved drafter carries."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn

from ...targets.attention_masks import AttentionMask
from ..parts.layers import ContextLayer, DrafterRMSNorm, HyperDFlashAttention, HyperDFlashLayer, Rotary
from ..parts.rank_head import RankHead


class Eagle3Layer(HyperDFlashLayer):
    """The first layer, over embedding and state side by side."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.self_attn = HyperDFlashAttention(config, input_width=2 * config.hidden_size)
        self.hidden_norm = DrafterRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.norm_before_residual = config.norm_before_residual

    def attention_input(self, hidden: torch.Tensor) -> torch.Tensor:
        embeds, state = hidden.chunk(2, dim=-1)
        return torch.cat([self.input_layernorm(embeds), self.hidden_norm(state)], dim=-1)

    def forward(
        self,
        hidden: torch.Tensor,
        feature: torch.Tensor | None,
        rotary: Rotary,
        context: ContextLayer | None,
        attention_mask: AttentionMask | None,
    ) -> torch.Tensor:
        """Run the layer from `[batch, queries, 2 * config.hidden_size]` to `[batch, queries, config.hidden_size]`."""
        state = hidden.chunk(2, dim=-1)[1]
        residual = self.hidden_norm(state) if self.norm_before_residual else state
        hidden = residual + self.self_attn(self.attention_input(hidden), feature, rotary, context, attention_mask)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Eagle3Network(nn.Module):
    """The layers of EAGLE-3, before a base of drafters in the order of classes."""

    config: Any

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        layers = [Eagle3Layer(config), *(HyperDFlashLayer(config) for _ in range(config.num_hidden_layers - 1))]
        self.layers = nn.ModuleList(layers)
        read, eps = len(config.target_layer_ids or ()), config.rms_norm_eps
        width = config.target_hidden_size * (1 if config.reducer == "stream_mean" else config.target_hc_mult)
        if config.norm_before_fc:
            self.input_norm = DrafterRMSNorm(read * width, eps=eps)
        if config.fc_norm:
            self.fc_norms = nn.ModuleList(DrafterRMSNorm(width, eps=eps) for _ in range(read))
        cast(Any, self).post_init()

    def condition(self, residual: torch.Tensor) -> torch.Tensor:
        config = self.config
        if not config.norm_before_fc and not config.fc_norm:
            return cast(Any, super()).condition(residual)
        layers = residual.to(cast(Any, self).dtype).unflatten(2, (len(config.target_layer_ids or ()), -1))
        layers = layers.mean(3) if config.reducer == "stream_mean" else layers.flatten(3)
        if config.norm_before_fc:
            normed = self.input_norm(layers.flatten(2))
        else:
            normed = torch.cat([norm(layer) for norm, layer in zip(self.fc_norms, layers.unbind(2))], dim=-1)
        return cast(nn.Linear, self.fc)(normed)

    def _begin(self, condition: torch.Tensor, embeds: torch.Tensor) -> torch.Tensor:
        return torch.cat([embeds, condition], dim=-1)

    def next_condition(self, states: torch.Tensor) -> torch.Tensor:
        return cast(Any, self).norm(states) if self.config.norm_output else states


class SpecBlockNetwork(nn.Module):
    """The layers of SpecBlock, before a base of drafters in the order of classes."""

    config: Any

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        width, eps = config.hidden_size, config.rms_norm_eps
        self.condition_norm, self.token_norm, self.slot_norm = (DrafterRMSNorm(width, eps=eps) for _ in range(3))
        self.slot_embeddings = nn.Embedding(config.block_size, width)
        self.fuse = nn.Linear(3 * width, width, bias=False)
        self.layers = nn.ModuleList(HyperDFlashLayer(config) for _ in range(config.num_hidden_layers))
        shifts = config.num_hidden_layers - 1 if config.shift else 0
        self.shift_proj = nn.ModuleList(nn.Linear(2 * width, width, bias=False) for _ in range(shifts))
        self.rank_head = RankHead(config) if config.rank_head else None
        cast(Any, self).post_init()

    def _begin(self, condition: torch.Tensor, embeds: torch.Tensor) -> torch.Tensor:
        size = self.config.block_size
        inputs = torch.cat([self.condition_norm(condition), self.token_norm(embeds)], dim=-1).unsqueeze(2)
        if self.config.broadcast:
            inputs = inputs.expand(-1, -1, size, -1)
        else:
            inputs = nn.functional.pad(inputs, (0, 0, 0, size - 1))
        slots = self.slot_norm(self.slot_embeddings.weight).expand(*inputs.shape[:3], -1)
        return self.fuse(torch.cat([inputs, slots], dim=-1)).flatten(1, 2)

    def _between(self, index: int, hidden: torch.Tensor) -> torch.Tensor:
        if not index or not self.config.shift:
            return hidden
        slots = hidden.unflatten(1, (-1, self.config.block_size))
        before = torch.cat([slots[:, :, :1], slots[:, :, :-1]], dim=2)
        return self.shift_proj[index - 1](torch.cat([slots, before], dim=-1)).flatten(1, 2)
