"""A mask in pieces for training: one mask of all queries and keys of a long row would be the largest tensor by far."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward


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
