"""A sequential head over the blocks of a batch, left to right, as an engine asks for it. Torch alone."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from ..drafters.parts.heads import SequentialHead

TensorMap = Callable[[torch.Tensor], torch.Tensor]


def ordered_logits(
    head: SequentialHead,
    states: torch.Tensor,
    anchors: torch.Tensor,
    logits: TensorMap,
    embed: TensorMap,
    token_of: TensorMap,
    candidates: int,
) -> torch.Tensor:
    """Logits of every draft position where each is told the best token of the one before it.

    An engine that draws at random draws each draft from its own row. Which rows there are depends on the anchor alone,
    not on what was drawn, so what verification assumes of drafts' distributions holds.

    Args:
        head: The drafter's.
        states: The blocks' own, `[batch, drafts, config.target_hidden_size]`.
        anchors: Their first tokens, `[batch]`.
        logits: Of states `[..., config.target_hidden_size]`, over the tokens that can be drafted.
        embed: The target's embeddings of tokens `[batch]`, as its first layer reads them.
        token_of: The target's tokens for indices `[batch]` among those that can be drafted.
        candidates: Among how many of the block's own best tokens a draft is chosen; 0 for all.

    Returns:
        `[batch, drafts, tokens that can be drafted]`, minus infinity where no candidate is.
    """
    blind = logits(states) if head.table is not None or candidates else None
    ids, carried, rows = anchors, None, []
    for k in range(states.shape[1]):
        step = head(states[:, k], ids, embed(ids) if head.reads_embeds else None, carried)
        if step.vectors is None or blind is None:
            row = logits(step.states)
        else:
            row = blind[:, k] + nn.functional.linear(step.vectors, head.table).to(blind)  # type: ignore[arg-type]
        if blind is not None and candidates:
            best = blind[:, k].topk(candidates, dim=-1).indices
            row = torch.full_like(row, -torch.inf).scatter(-1, best, row.gather(-1, best))
        rows.append(row)
        ids, carried = token_of(row.argmax(-1)), step.carried
    return torch.stack(rows, dim=1)
