"""Granite, with Mamba layers or without, dense or with experts: its embeddings and its logits are scaled."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from .target_family import TargetFamily


class Granite(TargetFamily):
    """A target that scales its embeddings and its logits."""

    title = "Granite"
    forked_types = frozenset({"granitemoehybrid"})

    @classmethod
    def fits(cls, target: PreTrainedModel, trunk: Any) -> bool:
        # Not the text part of a multimodal class, whose head is of its own and scales nothing.
        return target.config.model_type.startswith("granite") and hasattr(target.config, "logits_scaling")

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        return super().embed(ids) * self.config.embedding_multiplier

    def after_head(self, logits: torch.Tensor) -> torch.Tensor:
        return super().after_head(logits) / self.config.logits_scaling
