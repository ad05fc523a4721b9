"""Hunyuan V4, and what it has in common with others: residual paths that an `hc_head` with a gate collapses."""

from __future__ import annotations

from typing import Any

import torch
from accelerate.utils import align_module_device
from torch import nn
from transformers import PreTrainedModel

from .target_family import TargetFamily


class HyperConnected(TargetFamily):
    """A target whose `hc_head` has one gate per residual path."""

    title = "Hunyuan V4 (Hy4)"
    forked_types = frozenset({"hy_v4", "hy_v4_vl_text"})

    @classmethod
    def fits(cls, target: PreTrainedModel, trunk: Any) -> bool:
        return isinstance(getattr(trunk, "hc_head", None), nn.Module)

    @property
    def paths(self) -> int:
        return self.config.hc_mult

    @property
    def why_ungated(self) -> str:
        return ""

    def gate(self) -> dict[str, torch.Tensor]:
        return read_gate(self.trunk.hc_head, "hc_")

    def collapse(self, residual: torch.Tensor) -> torch.Tensor:
        return self.trunk.norm(self.trunk.hc_head(residual))

    @property
    def collapse_modules(self) -> tuple[nn.Module, ...]:
        return self.trunk.hc_head, self.trunk.norm


def read_gate(owner: nn.Module, prefix: str) -> dict[str, torch.Tensor]:
    """A gate's parameters, copied; an offloaded one's values come to memory here."""
    with align_module_device(owner):
        return {f"hc_{part}": getattr(owner, prefix + part).detach().clone() for part in ("fn", "base", "scale")}
