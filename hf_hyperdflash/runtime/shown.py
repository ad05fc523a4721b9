"""What a caller asked to see of a generation: scores, logits, hidden states and attention weights of every token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicLayer

from .target_family import TargetFamily


class Shown:
    """Collects, token by token, what plain decoding would have shown.

    Args:
        config: The request's generation configuration.
        family: The target's.
    """

    def __init__(self, config: Any, family: TargetFamily) -> None:
        self.config, self.family = config, family
        self.seen: dict[str, list[Any]] = {"scores": [], "logits": [], "hidden_states": [], "attentions": []}

    def add(self, outputs: Any, row: int, scores: torch.Tensor, logits: torch.Tensor, cache: Cache) -> None:
        """The token that was chosen from `scores` `[1, config.vocab_size]`.

        Args:
            outputs: The target's forward.
            row: Which of its positions the token was chosen at.
            scores: Processed.
            logits: Raw.
            cache: The target's, as the forward left it.
        """
        if not self.config.return_dict_in_generate:
            return
        if self.config.output_scores:
            self.seen["scores"].append(scores)
        if self.config.output_logits:
            self.seen["logits"].append(logits)
        is_prefill = not self.seen["hidden_states"] and not self.seen["attentions"]
        if self.config.output_hidden_states:
            states = outputs.hidden_states  # remote code may have none to show
            is_whole = is_prefill or states is None
            self.seen["hidden_states"].append(
                states if is_whole else tuple(state[:, row : row + 1] for state in states)
            )
        if self.config.output_attentions:
            weights = outputs.attentions
            is_whole = is_prefill or weights is None
            self.seen["attentions"].append(weights if is_whole else self._attention_rows(weights, row, cache))

    def all(self) -> dict[str, tuple[Any, ...] | None]:
        """By the names of `generate`'s output."""
        return {name: tuple(values) if values else None for name, values in self.seen.items()}

    def _attention_rows(self, weights: Sequence[torch.Tensor], row: int, cache: Cache) -> tuple[torch.Tensor, ...]:
        """What one token attended to, `[batch, heads, 1, keys]` of every attention layer, over the keys that there
        would have been had it been the last: none of later tokens, and in a sliding window those that had not left
        it."""
        with_keys = (layer for layer in cache.layers if isinstance(layer, DynamicLayer))
        return tuple(self._row(of_layer, row, layer) for of_layer, layer in zip(weights, with_keys, strict=True))

    def _row(self, weights: torch.Tensor, row: int, layer: Any) -> torch.Tensor:
        end, others = self.family.attention_keys(layer, weights.shape[3], weights.shape[2] - 1 - row)
        window = getattr(layer, "sliding_window", None) or weights.shape[3]
        weights = weights[:, :, row : row + 1]
        return torch.cat([weights[..., max(end - window, 0) : end], weights[..., others]], dim=-1)
