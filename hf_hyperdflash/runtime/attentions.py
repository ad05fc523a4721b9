"""Attention weights of a verification round as plain decoding would have shown them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicLayer


def attention_rows(weights: Sequence[torch.Tensor], row: int, cache: Cache) -> tuple[torch.Tensor, ...]:
    """What one token attended to, over the keys that there would have been had it been the last.

    Args:
        weights: `[batch, heads, seq, keys]` of every attention layer, of the forward that the cache has just seen.
        row: Which of its tokens.
        cache: The target's.

    Returns:
        `[batch, heads, 1, keys]` of every attention layer, as many keys as then: none of later tokens, and in a sliding
        window those that had not left it.
    """
    with_keys = (layer for layer in cache.layers if isinstance(layer, DynamicLayer))
    return tuple(_row(of_layer, row, layer) for of_layer, layer in zip(weights, with_keys, strict=True))


def _row(weights: torch.Tensor, row: int, layer: Any) -> torch.Tensor:
    later = weights.shape[2] - 1 - row
    entries = entries_then = 0
    if hasattr(layer, "entry_count"):  # DeepSeek-V4's compressed entries, one per closed window, come after the keys
        entries = layer.entry_count["compressor"]
        entries_then = (layer.get_seq_length() - later) // layer.compress_rate
    keys = weights.shape[3] - entries
    end, window = keys - later, getattr(layer, "sliding_window", None) or keys
    weights = weights[:, :, row : row + 1]
    return torch.cat([weights[..., max(end - window, 0) : end], weights[..., keys : keys + entries_then]], dim=-1)
