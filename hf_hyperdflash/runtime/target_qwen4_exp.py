"""Qwen4-Exp, whose residual is flat, `[batch, seq, config.hc_count * config.hidden_size]`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from .target_family import TargetFamily


class Qwen4Exp(TargetFamily):
    """A target whose mixer weighs every channel of a path by itself, and norms."""

    title = "Qwen4-Exp (Qwen3.8-Flash-Next)"
    forked_types = frozenset({"qwen4_exp_text"})

    def __init__(self, target: PreTrainedModel, trunk: Any) -> None:
        super().__init__(target, trunk)
        self.norm = None

    @classmethod
    def fits(cls, target: PreTrainedModel, trunk: Any) -> bool:
        return hasattr(trunk, "hyper_connection_mixer")

    @property
    def paths(self) -> int:
        return self.config.hc_count

    @property
    def why_ungated(self) -> str:
        return "its collapse weighs every channel of a path by itself, which one gate per path cannot express"

    def collapse(self, residual: torch.Tensor) -> torch.Tensor:
        return self.trunk.hyper_connection_mixer(residual.flatten(2))

    @property
    def collapse_modules(self) -> tuple[nn.Module, ...]:
        return (self.trunk.hyper_connection_mixer,)
