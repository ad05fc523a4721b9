"""Masks, as the implementations of transformers' attention interface take them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from transformers.integrations.sdpa_attention import sdpa_attention_forward

MASKED_IMPLEMENTATIONS = frozenset({"eager", "sdpa", "flex_attention"})


class MaskPiece(NamedTuple):
    """Which keys some queries of a row see.

    Attributes:
        row: Of the batch.
        queries: Of the row.
        keys: All that they may see.
        mask: Which of these each query sees, boolean `[1, 1, queries, keys]`; `None` where they are as many, and each
            sees those up to its own.
    """

    row: int
    queries: slice
    keys: tuple[slice, ...]
    mask: torch.Tensor | None = None


class MaskPieces:
    """A mask for "sdpa" in pieces, for rows so long that one mask of all queries and keys would be the largest tensor
    by far. The pieces of a row have all its queries, in their order, and the rows are in theirs."""

    def __init__(self, pieces: Sequence[MaskPiece]) -> None:
        self.pieces = pieces

    def attend(
        self, module: torch.nn.Module, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, _: object,
        scaling: float, **options: Any,
    ) -> tuple[torch.Tensor, None]:  # fmt: skip
        """Attend as an implementation of transformers' attention interface does."""
        rows: dict[int, list[torch.Tensor]] = {}
        for piece in self.pieces:
            row = slice(piece.row, piece.row + 1)
            seen_keys, seen_values = (
                torch.cat([of_all[row, :, span] for span in piece.keys], dim=2) for of_all in (keys, values)
            )
            part, is_causal = queries[row, :, piece.queries], piece.mask is None
            how: dict[str, Any] = {**options, "scaling": scaling, "is_causal": is_causal}
            out, _ = sdpa_attention_forward(module, part, seen_keys, seen_values, piece.mask, **how)
            rows.setdefault(piece.row, []).append(out)
        return torch.cat([torch.cat(parts, dim=1) for parts in rows.values()]), None


AttentionMask = torch.Tensor | BlockMask | MaskPieces


def attention_mask_for(implementation: str | None, mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | BlockMask:
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
