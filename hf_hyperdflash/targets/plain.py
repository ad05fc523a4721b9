"""Targets with one residual stream that differ from the usual causal LM: gpt-oss, Granite, hybrids of Mamba-2."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from .target import Target, Trunk

# `<|reserved_200000|>`, which the chat format leaves unused and other DFlash drafters for it mask with.
_VOCAB_SIZE, _MASK_TOKEN = 201088, 200000


class GptOss(Target):
    """A target whose padding token ends texts, too, and is no mask token."""

    title = "gpt-oss"
    masked_types = frozenset({"gpt_oss"})

    @classmethod
    def fits(cls, target: PreTrainedModel, trunk: Trunk) -> bool:
        # Also the text part of a multimodal class: the class of the head does not matter here.
        return target.config.get_text_config(decoder=True).model_type in cls.masked_types

    @property
    def mask_token_id(self) -> int | None:
        return _MASK_TOKEN if self.config.vocab_size == _VOCAB_SIZE else None


class Granite(Target):
    """A target that scales its embeddings and its logits."""

    title = "Granite"
    forked_types = frozenset({"granitemoehybrid"})

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
    forked_types = frozenset({"bamba", "falcon_h1", "nemotron_h"})

    def __init__(self, model: PreTrainedModel, trunk: Trunk) -> None:
        super().__init__(model, trunk)
        self.norm = getattr(trunk, "norm_f" if hasattr(trunk, "norm_f") else "final_layernorm")

    @classmethod
    def fits(cls, target: PreTrainedModel, trunk: Trunk) -> bool:
        return target.config.model_type in cls.forked_types

    @property
    def norm_eps(self) -> float:
        return getattr(self.config, "layer_norm_epsilon", super().norm_eps)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        return super().embed(ids) * getattr(self.config, "embedding_multiplier", 1.0)

    def after_head(self, logits: torch.Tensor) -> torch.Tensor:
        return super().after_head(logits) * getattr(self.config, "lm_head_multiplier", 1.0)


FAMILIES: tuple[type[Target], ...] = (GptOss, Granite, MambaHybrid)
