"""gpt-oss, whose vocabulary has a token to mask with that nothing but its name tells."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from .target_family import TargetFamily

# `<|reserved_200000|>`, which the chat format leaves unused and other DFlash drafters for it mask with.
_VOCAB_SIZE, _MASK_TOKEN = 201088, 200000


class GptOss(TargetFamily):
    """A target whose padding token ends texts, too, and is no mask token."""

    title = "gpt-oss"
    masked_types = frozenset({"gpt_oss"})

    @classmethod
    def fits(cls, target: PreTrainedModel, trunk: Any) -> bool:
        # Also the text part of a multimodal class: here nothing lies in the head.
        return target.config.get_text_config(decoder=True).model_type in cls.masked_types

    @property
    def mask_token_id(self) -> int | None:
        return _MASK_TOKEN if self.config.vocab_size == _VOCAB_SIZE else None
