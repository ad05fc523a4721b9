"""A drafter whose configuration says what it reads of its target and what it drafts."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from .drafter import SavedDrafter
from .pair import check_pair


class ReadingDrafter(SavedDrafter):
    """What block drafters and drafters of entries share: `config.target_layer_ids`, `config.max_draft_tokens` and a
    vocabulary that may be truncated (`config.draft_vocab_size`, `draft_ids`)."""

    norm: Any
    draft_ids: torch.Tensor

    @property
    def target_layer_ids(self) -> list[int]:  # type: ignore[override]
        """Whose residual paths the drafter reads."""
        return self.config.target_layer_ids or []

    @property
    def max_draft_tokens(self) -> int:  # type: ignore[override]
        """The most tokens one after the other that one round can draft."""
        return self.config.max_draft_tokens

    def check_target(self, target: PreTrainedModel) -> None:
        """Raise a `ValueError` that names both values if the drafter does not fit `target`."""
        check_pair(self.config, target, type(self).__name__)

    def of_vocabulary(self, logits: torch.Tensor) -> torch.Tensor:
        """`[..., config.vocab_size]` from those of the tokens that can be drafted."""
        if not self.config.draft_vocab_size:
            return logits
        full = logits.new_full((*logits.shape[:-1], self.config.vocab_size), -torch.inf)
        return full.index_copy_(-1, self.draft_ids, logits)

    @property
    def dtype(self) -> torch.dtype:
        """Number format of the layers; a gate is always float32."""
        return self.norm.weight.dtype

    @property
    def device(self) -> torch.device:
        """Where the layers are."""
        return self.norm.weight.device

    @staticmethod
    def device_for(target: PreTrainedModel) -> torch.device:
        """Where a new drafter belongs: with the target's LM head, or on the CPU where that is offloaded."""
        head: Any = target.get_output_embeddings()
        is_offloaded = head.weight.is_meta and hasattr(head, "_hf_hook")
        return torch.device("cpu") if is_offloaded else head.weight.device
