"""Masked attention over keys that several query heads share, without a copy of the keys for each of these heads.

transformers' "sdpa" repeats keys and values for every query head where there is a mask and more than one token. Plain
decoding, of one token, does not: after a long text a round would copy its whole cache, several times. Here the queries
of heads that share keys stand one after the other, as if they were of one head. What is computed is the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import AttentionInterface

STOCK, SHARED_HEADS = "sdpa", "hyperdflash_sdpa"
_NOT_MASKS = "position_bias", "softcap"  # other arguments of scores


def attend(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    attention_mask: torch.Tensor | None, dropout: float = 0.0, scaling: float | None = None, **options: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Attend as an implementation of transformers' attention interface does; as "sdpa" where no key would be copied.

    Args:
        module: The attention's.
        query: `[batch, heads, positions, head_dim]`.
        key: `[batch, kv_heads, keys, head_dim]`.
        value: Likewise.
        attention_mask: `[batch or 1, 1, positions, keys]`.
        dropout: As in "sdpa".
        scaling: Likewise.
        **options: Likewise.

    Returns:
        `[batch, positions, heads, head_dim]`, and no weights.
    """
    batch, heads, count, _ = query.shape
    shared, mask = heads // key.shape[1], attention_mask
    sees_all = mask is None and options.get("is_causal") is False and count > 1
    is_masked = mask is not None and mask.shape[1] == 1
    if shared == 1 or not (sees_all or is_masked) or any(options.get(name) is not None for name in _NOT_MASKS):
        return sdpa_attention_forward(module, query, key, value, mask, dropout=dropout, scaling=scaling, **options)
    queries = query.reshape(batch, key.shape[1], shared * count, -1)
    mask = None if mask is None else mask.repeat(1, 1, shared, 1)
    out = scaled_dot_product_attention(queries, key, value, attn_mask=mask, dropout_p=dropout, scale=scaling)
    return out.reshape(batch, heads, count, -1).transpose(1, 2).contiguous(), None


class SharedHeads(NamedTuple):
    """A mask with which a drafter's layers attend so, `[batch or 1, 1, queries, keys]`; `None` where each query sees
    all keys."""

    mask: torch.Tensor | None

    def attend(
        self, module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _: object,
        **options: Any,
    ) -> tuple[torch.Tensor, None]:  # fmt: skip
        """Attend as an implementation of transformers' attention interface does."""
        return attend(module, query, key, value, self.mask, **options)


@contextmanager
def attention_of_rounds(config: PreTrainedConfig) -> Iterator[None]:
    """Let a target whose attention is "sdpa" attend so inside the `with`. Other threads that run it meanwhile do so,
    too, which changes nothing but what they copy.

    Args:
        config: The target's, of its text.
    """
    is_known = config._attn_implementation in (STOCK, SHARED_HEADS)
    if is_known:
        AttentionInterface.register(SHARED_HEADS, attend)  # here, as importing changes nothing in transformers
        AttentionMaskInterface.register(SHARED_HEADS, sdpa_mask)
        config._attn_implementation = SHARED_HEADS
    try:
        yield
    finally:
        if is_known:
            config._attn_implementation = STOCK
