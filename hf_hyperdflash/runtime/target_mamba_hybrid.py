"""Hybrids of Mamba-2 and attention that end in a norm by another name: Bamba, Falcon-H1 and Nemotron-H.

Stock Nemotron-H keeps to its least time step (`config.time_step_min`) in forwards of several tokens only: its logits
depend a little on how a text is cut into forwards, and drafted text may differ where two tokens are almost equal.

Jamba is none of them: its Mamba-1 layers start from nothing in every forward of several tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from .target_family import TargetFamily


class MambaHybrid(TargetFamily):
    """A target with Mamba layers beside attention, or both in a layer. Falcon-H1 scales embeddings and logits."""

    title = "Bamba, Falcon-H1, Nemotron-H"
    rewindable_kinds = TargetFamily.rewindable_kinds | {"hybrid", "mlp", "moe"}
    forked_types = frozenset({"bamba", "falcon_h1", "nemotron_h"})

    def __init__(self, target: PreTrainedModel, trunk: Any) -> None:
        super().__init__(target, trunk)
        self.norm = trunk.norm_f if hasattr(trunk, "norm_f") else trunk.final_layernorm

    @classmethod
    def fits(cls, target: PreTrainedModel, trunk: Any) -> bool:
        return target.config.model_type in cls.forked_types

    @property
    def norm_eps(self) -> float:
        return getattr(self.config, "layer_norm_epsilon", super().norm_eps)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        return super().embed(ids) * getattr(self.config, "embedding_multiplier", 1.0)

    def after_head(self, logits: torch.Tensor) -> torch.Tensor:
        return super().after_head(logits) * getattr(self.config, "lm_head_multiplier", 1.0)
