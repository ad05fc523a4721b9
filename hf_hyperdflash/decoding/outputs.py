"""What a caller asked to see of a generation: scores, logits, hidden states and attention weights of every token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicLayer

from ..targets.target import Target
from .rounds import ChainRound


class Shown:
    """Collects, token by token, what plain decoding would have shown.

    Args:
        config: The request's generation configuration.
        target: The target's.
    """

    def __init__(self, config: Any, target: Target) -> None:
        self.config, self.target = config, target
        self.seen: dict[str, list[Any]] = {"scores": [], "logits": [], "hidden_states": [], "attentions": []}

    def add(
        self, outputs: Any, round_: ChainRound, row: int, scores: torch.Tensor, logits: torch.Tensor, cache: Cache
    ) -> None:
        """The token that was chosen from `scores` `[1, config.vocab_size]`.

        Args:
            outputs: The target's forward.
            round_: What it was over.
            row: Which of the round's rows the token was chosen at.
            scores: Processed.
            logits: Raw.
            cache: The target's, as the forward left it.
        """
        if not self.config.return_dict_in_generate:
            return
        if self.config.output_scores:
            self.seen["scores"].append(scores.clone())  # else it keeps those of all drafts
        if self.config.output_logits:
            self.seen["logits"].append(logits.clone())
        is_prefill = not self.seen["hidden_states"] and not self.seen["attentions"]
        if self.config.output_hidden_states:
            states = outputs.hidden_states  # remote code may have none to show
            is_whole = is_prefill or states is None
            i, k = round_.place(row)
            self.seen["hidden_states"].append(
                states if is_whole else tuple(state[i : i + 1, k : k + 1].clone() for state in states)
            )
        if self.config.output_attentions:
            weights = outputs.attentions  # none of an implementation that computes none, as sdpa
            is_whole = is_prefill or not weights
            self.seen["attentions"].append(weights if is_whole else self._attention_rows(weights, round_, row, cache))

    def all(self) -> dict[str, tuple[Any, ...] | None]:
        """By the names of `generate`'s output."""
        return {name: tuple(values) if values else None for name, values in self.seen.items()}

    def _attention_rows(
        self, weights: Sequence[torch.Tensor], round_: ChainRound, row: int, cache: Cache
    ) -> tuple[torch.Tensor, ...]:
        """What one token attended to, `[batch, heads, 1, keys]` of every attention layer, over the keys that there
        would have been had it been the last of its path: in a sliding window those that had not left it."""
        with_keys = (layer for layer in cache.layers if isinstance(layer, DynamicLayer))
        (i, k), seen = round_.place(row), round_.seen(row)
        return tuple(
            self._row(of_layer[i : i + 1], k, seen, layer) for of_layer, layer in zip(weights, with_keys, strict=True)
        )

    def _row(self, weights: torch.Tensor, k: int, seen: list[int], layer: Any) -> torch.Tensor:
        of_tokens, others = self.target.attention_keys(layer, weights.shape[3], weights.shape[2], seen)
        window = getattr(layer, "sliding_window", None) or weights.shape[3]
        return weights[:, :, k : k + 1, torch.cat([of_tokens[-window:], others]).to(weights.device)]
