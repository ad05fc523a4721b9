"""Runs a sequential head over the blocks of a batch, left to right, for a serving engine. Torch alone."""

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
    to_token_ids: TensorMap,
    candidates: int,
) -> torch.Tensor:
    """Return the logits of every draft position, each given the best token of the position before it.

    An engine that samples draws each draft from its own logits. They depend on the anchor alone, not on the tokens
    that were drawn, so verification's assumption about the drafts' distributions holds.

    Args:
        states: The states of the blocks, `[batch, drafts, config.target_hidden_size]`.
        anchors: Their first tokens, `[batch]`.
        logits: From states `[..., config.target_hidden_size]` to logits over the tokens that can be drafted.
        embed: The target's embeddings of tokens `[batch]`, as its first layer reads them.
        to_token_ids: The target's tokens for indices `[batch]` among those that can be drafted.
        candidates: Number of the block's own best tokens that a draft is chosen among; 0 for all.

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
        ids, carried = to_token_ids(row.argmax(-1)), step.carried
    return torch.stack(rows, dim=1)
