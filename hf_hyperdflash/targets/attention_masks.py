"""Masks, as the implementations of transformers' attention interface take them."""

from __future__ import annotations

import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

MASKED_IMPLEMENTATIONS = frozenset({"eager", "sdpa", "flex_attention"})
AttentionMask = torch.Tensor | BlockMask


def attention_mask_for(implementation: str | None, mask: torch.Tensor, dtype: torch.dtype) -> AttentionMask:
    """Return a mask as an implementation of transformers' attention interface takes it.

    Args:
        implementation: `config._attn_implementation`.
        mask: Boolean `[batch, 1, queries, keys]`, `True` where a query sees a key.
        dtype: That of the attention's logits.

    Raises:
        ValueError: If the implementation takes no masks of this kind.
    """
    if implementation == "sdpa":
        return mask
    if implementation == "flex_attention":
        batch, _, queries, keys = mask.shape
        visible = mask[:, 0]
        return create_block_mask(
            lambda b, h, q, k: visible[b, q, k],
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
