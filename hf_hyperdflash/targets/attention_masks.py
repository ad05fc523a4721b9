"""Masks, as the implementations of transformers' attention interface take them."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.attention.flex_attention import create_block_mask

MASKED_IMPLEMENTATIONS = frozenset({"eager", "sdpa", "flex_attention"})


def attention_mask_for(implementation: str | None, mask: torch.Tensor, dtype: torch.dtype) -> Any:
    """A mask as an implementation of transformers' attention interface takes it.

    Args:
        implementation: `config._attn_implementation`.
        mask: Boolean `[batch, 1, queries, keys]`, `True` where a query may look.
        dtype: Of the attention's logits.

    Raises:
        ValueError: If the implementation knows no masks of this kind.
    """
    if implementation == "sdpa":
        return mask
    if implementation == "flex_attention":
        batch, _, queries, keys = mask.shape
        seen = mask[:, 0]
        return create_block_mask(
            lambda b, h, q, k: seen[b, q, k],
            batch,
            None,
            queries,
            keys,
            device=str(mask.device),  # type: ignore[arg-type]
        )
    if implementation == "eager":
        return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, torch.finfo(dtype).min)
    raise ValueError(
        f"`attn_implementation` is {implementation!r}, which cannot mask blocks of several anchors: train with "
        "'sdpa' or 'flex_attention', and draft so where layers are causal or windows count from each slot."
    )
