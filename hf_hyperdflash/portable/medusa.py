"""Medusa: heads on the target's last state, one for each token ahead, which do not depend on each other's drafts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from transformers import PreTrainedConfig

from ..drafters.blocks.modeling_medusa import medusa_heads
from .drafter import PortableDrafter
from .loop import Drafts
from .target import Target


class MedusaConfig(PreTrainedConfig):
    """The drafter's config.json, which has every field; the package's class of this name says what they mean."""

    model_type = "medusa_heads"


class MedusaDrafter(PortableDrafter):
    """Drafts with Medusa heads."""

    config_class = MedusaConfig
    target_layer_ids = [-1]

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.max_draft_tokens = config.medusa_num_heads
        for name, head in medusa_heads(config).items():
            self.add_module(name, head)
        self.post_init()

    def new_context(self) -> Any:
        return SimpleNamespace(residual=None)  # of the last accepted token

    def extend(self, target: Target, context: Any, residual: torch.Tensor, *_: torch.Tensor) -> None:
        context.residual = residual[:, -1:] if residual.shape[1] else context.residual

    def draft(
        self, target: Target, context: Any, anchor: torch.Tensor, position: torch.Tensor, count: int, drafts: Drafts
    ) -> None:
        states = collapse(target, context.residual)[:, 0].to(self.device, self.dtype)
        for head in list(self.children())[:count]:
            drafts.choose(self.full_logits(target, head(states)))


def collapse(target: Target, residual: torch.Tensor) -> torch.Tensor:
    """Return what the target's LM head reads, `[1, seq, config.hidden_size]`, from its last layer's streams."""
    trunk = target.trunk
    if hasattr(trunk, "hyper_connection_mixer"):  # which norms, too
        return trunk.hyper_connection_mixer(residual.flatten(2))
    norm = next(getattr(trunk, name) for name in ("norm", "norm_f", "final_layernorm") if hasattr(trunk, name))
    return norm(trunk.hc_head(residual) if hasattr(trunk, "hc_head") else residual.squeeze(2))
