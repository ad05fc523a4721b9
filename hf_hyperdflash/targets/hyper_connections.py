"""Targets with several residual streams besides DeepSeek-V4: Hunyuan V4, GLM-5 Next and Qwen4-Exp."""

from __future__ import annotations

from typing import Any

import torch
from accelerate.utils import align_module_device
from torch import nn
from transformers import PreTrainedModel

from .fused import Kernel, sinkhorn_connections
from .target import Target, Trunk


class HyperConnected(Target):
    """A target whose `hc_head` has one gate per residual stream."""

    trunk: Any  # has `hc_head`, which collapses the streams, and `norm`

    title = "Hunyuan V4 (Hy4)"
    forked_types = frozenset({"hy_v4", "hy_v4_vl_text"})

    @classmethod
    def fits(cls, target: PreTrainedModel, trunk: Trunk) -> bool:
        return isinstance(getattr(trunk, "hc_head", None), nn.Module)

    @property
    def streams(self) -> int:
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

    def kernels(self) -> dict[nn.Module, Kernel]:
        return sinkhorn_connections(self.model)


def read_gate(owner: nn.Module, prefix: str) -> dict[str, torch.Tensor]:
    """Return a copy of a gate's parameters; the values of an offloaded one are loaded here."""
    with align_module_device(owner):
        return {f"hc_{part}": getattr(owner, prefix + part).detach().clone() for part in ("fn", "base", "scale")}


class Glm5Next(HyperConnected):
    """A target whose `hc_head` has no parameters."""

    title = "GLM-5 Next (GLM-5.3-Flash)"
    forked_types = frozenset({"glm5_next_text"})

    @classmethod
    def fits(cls, target: PreTrainedModel, trunk: Trunk) -> bool:
        return super().fits(target, trunk) and not hasattr(getattr(trunk, "hc_head", None), "hc_fn")

    def gate(self) -> dict[str, torch.Tensor]:
        """Return the gate whose collapse is the mean of the streams, whatever they hold."""
        return {
            "hc_fn": torch.zeros(self.streams, self.streams * self.config.hidden_size),
            "hc_base": torch.tensor(1 / self.streams - self.config.hc_eps).logit().repeat(self.streams),
            "hc_scale": torch.ones(1),
        }


class Qwen4Exp(Target):
    """A target whose mixer weighs every channel of a stream by itself, and norms."""

    trunk: Any  # has `hyper_connection_mixer`, which collapses the streams

    title = "Qwen4-Exp (Qwen3.8-Flash-Next)"
    forked_types = frozenset({"qwen4_exp_text"})

    def __init__(self, model: PreTrainedModel, trunk: Trunk) -> None:
        super().__init__(model, trunk)
        self.norm = None

    @classmethod
    def fits(cls, target: PreTrainedModel, trunk: Trunk) -> bool:
        return hasattr(trunk, "hyper_connection_mixer")

    @property
    def streams(self) -> int:
        return self.config.hc_count

    @property
    def why_ungated(self) -> str:
        return "its collapse weighs every channel of a stream by itself, which one gate per stream cannot express"

    def collapse(self, residual: torch.Tensor) -> torch.Tensor:
        return self.trunk.hyper_connection_mixer(residual.flatten(2))

    @property
    def collapse_modules(self) -> tuple[nn.Module, ...]:
        return (self.trunk.hyper_connection_mixer,)


FAMILIES: tuple[type[Target], ...] = (Glm5Next, HyperConnected, Qwen4Exp)
