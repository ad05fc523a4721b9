"""Targets that differ from the usual causal LM, but for DeepSeek-V4: with several residual streams, or with one."""

from __future__ import annotations

from typing import Any

import torch
from accelerate.utils import align_module_device
from torch import nn
from transformers import PreTrainedModel

from .fused import Kernel, hyper_connection
from .target import Target, Trunk


class HyperConnected(Target):
    """A target whose `hc_head` has one gate per residual stream."""

    trunk: Any  # has `hc_head`, which collapses the streams, and `norm`

    title = "Hunyuan V4 (Hy4)"

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
        connections = (module for module in self.model.modules() if hasattr(module, "hc_sinkhorn_iters"))
        return dict.fromkeys(connections, hyper_connection)


def read_gate(owner: nn.Module, prefix: str) -> dict[str, torch.Tensor]:
    """Return a copy of a gate's parameters; the values of an offloaded one are loaded here."""
    with align_module_device(owner):
        return {f"hc_{part}": getattr(owner, prefix + part).detach().clone() for part in ("fn", "base", "scale")}


class Glm5Next(HyperConnected):
    """A target whose `hc_head` has no parameters."""

    title = "GLM-5 Next (GLM-5.3-Flash)"

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


# One residual stream


class Granite(Target):
    """A target that scales its embeddings and its logits."""

    title = "Granite"

    @classmethod
    def fits(cls, target: PreTrainedModel, trunk: Trunk) -> bool:
        # Not the text part of a multimodal class, whose head is of its own and scales nothing.
        return target.config.model_type.startswith("granite") and hasattr(target.config, "logits_scaling")

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        return super().embed(ids) * self.config.embedding_multiplier

    def after_head(self, logits: torch.Tensor) -> torch.Tensor:
        return super().after_head(logits) / self.config.logits_scaling


class MambaHybrid(Target):
    """A target with Mamba-2 layers beside attention, or both in a layer. Its last norm has another name. Falcon-H1
    scales embeddings and logits.

    Stock Nemotron-H applies its least time step (`config.time_step_min`) in forwards of several tokens only. So its
    logits depend a little on how a text is divided into forwards, and drafted text may differ where two tokens are
    almost equally probable. Jamba does not belong here: its Mamba-1 layers start from an empty state in every forward
    of several tokens.
    """

    title = "Bamba, Falcon-H1, Nemotron-H"
    rewindable_kinds = Target.rewindable_kinds | {"hybrid", "mlp", "moe"}

    def __init__(self, model: PreTrainedModel, trunk: Trunk) -> None:
        super().__init__(model, trunk)
        self.norm = getattr(trunk, "norm_f" if hasattr(trunk, "norm_f") else "final_layernorm")

    @classmethod
    def fits(cls, target: PreTrainedModel, trunk: Trunk) -> bool:
        return target.config.model_type in ("bamba", "falcon_h1", "nemotron_h")

    @property
    def norm_eps(self) -> float:
        return getattr(self.config, "layer_norm_epsilon", super().norm_eps)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        return super().embed(ids) * getattr(self.config, "embedding_multiplier", 1.0)

    def after_head(self, logits: torch.Tensor) -> torch.Tensor:
        return super().after_head(logits) * getattr(self.config, "lm_head_multiplier", 1.0)
