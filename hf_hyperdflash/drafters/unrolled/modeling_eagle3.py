"""EAGLE-3 drafts a token at a time: the first from three of the target's layers, each later one from its own state.

Read in SafeAILab's `cnets.py` and speculators 0.9, whose checkpoints `load_drafter` reads. The first layer attends
over the normed embedding of the next token beside the normed state, and adds to the state; other layers, where there
are any, are as usual.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn

from ...targets.target import AttentionMask
from ...trees.growth import level_sizes
from ..parts.layers import ContextLayer, DrafterRMSNorm, HyperDFlashAttention, HyperDFlashLayer, Rotary
from .configuration import Eagle3Config
from .drafter import UnrolledDrafter


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
    """The layers of EAGLE-3, before a base of drafters: the package's, or that of `portable/`."""

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
        # FSDP2 wraps these, and refuses a name of which there is no layer.
        cast(Any, self)._no_split_modules = {type(layer).__name__ for layer in layers}

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


class Eagle3Drafter(Eagle3Network, UnrolledDrafter):
    """Drafts one token at a time, or a tree of them, from three of the target's layers and then from its own states.

    Use [`from_target`] or `load_drafter`, `drafter.bind(target)` once, then
    `target.generate(**inputs, assistant_model=drafter, tree_budget=60)`.
    """

    config: Eagle3Config
    config_class = Eagle3Config
    _no_split_modules = ["Eagle3Layer", "HyperDFlashLayer"]

    @property
    def tree_width(self) -> int:
        return self.config.tree_width

    def max_blocks(self, budget: int, do_sample: bool) -> int:
        if not do_sample:
            return min(budget, self.tree_width)
        of_all = (level_sizes(count, budget)[:-1] for count in range(1, self.max_draft_tokens + 1))
        return max(max(sizes, default=1) for sizes in of_all)
