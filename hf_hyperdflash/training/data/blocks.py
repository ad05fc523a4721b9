"""Anchors, labels and masks of blocks over rows of text, as generation has them."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedConfig

from ...drafters.parts.block_attention import AttentionSpan
from ...drafters.parts.mask_pieces import MaskPiece, MaskPieces
from ..losses.loss import IGNORE_INDEX

_EVERYTHING = AttentionSpan()
_LARGE = 2**26  # elements of a row's mask, which are 4 bytes each where it is added to scores
_BLOCKS_OF_A_PIECE = 32


def anchor_candidates(loss_mask: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
    """Return where a block can start, `[batch, seq]`: at supervised tokens followed by one of the same document."""
    follows = (position_ids[:, 1:] == position_ids[:, :-1] + 1) & loss_mask[:, 1:]
    return loss_mask & torch.nn.functional.pad(follows, (0, 1))


def sample_anchors(
    candidates: torch.Tensor, num_anchors: int | None = None, seeds: Sequence[int] = ()
) -> torch.Tensor:
    """Draw at most `num_anchors` anchors from the candidates of each row, without replacement, by its seed of
    [`anchor_seeds`], whatever the rest of the batch and the padding; without `seeds`, return all of them. The result
    is `[batch, anchors]`, ascending; -1 where a row has fewer than another, and at least one."""
    drawn = [row.nonzero().flatten() for row in candidates]
    for i, seed in enumerate(seeds):
        order = torch.randperm(len(drawn[i]), generator=torch.Generator().manual_seed(seed))
        drawn[i] = drawn[i][order[:num_anchors].sort().values.to(drawn[i].device)]
    padded = torch.nn.utils.rnn.pad_sequence(drawn, batch_first=True, padding_value=-1)
    return padded if padded.shape[1] else padded.new_full((len(drawn), 1), -1)


def anchor_seeds(input_ids: torch.Tensor, loss_mask: torch.Tensor, seed: int, step: int) -> list[int]:
    """Return one seed per row, from the run's seed, the optimizer step and the supervised text. No random state is
    involved: a resumed run, another batch layout and another number of processes draw the same anchors."""
    start = zlib.crc32(f"{seed},{step}".encode())
    return [zlib.crc32(ids[mask].cpu().numpy().tobytes(), start) for ids, mask in zip(input_ids, loss_mask)]


def block_labels(
    input_ids: torch.Tensor, loss_mask: torch.Tensor, position_ids: torch.Tensor, anchors: torch.Tensor, drafts: int
) -> torch.Tensor:
    """Return the labels, `[batch, anchors, drafts]`: draft position k of anchor a has the token at a+k. Labels are
    -100 from the first token on that is not supervised or belongs to another document, and for missing anchors."""
    steps = torch.arange(1, drafts + 1, device=input_ids.device)
    first = anchors.clamp(min=0)
    at = first.unsqueeze(-1) + steps
    inside = (at < input_ids.shape[1]) & (anchors >= 0).unsqueeze(-1)
    flat = at.clamp(max=input_ids.shape[1] - 1).flatten(1)
    same_document = position_ids.gather(1, flat).view_as(at) == position_ids.gather(1, first).unsqueeze(-1) + steps
    supervised = loss_mask.gather(1, flat).view_as(at) & same_document & inside
    labels = input_ids.gather(1, flat).view_as(at)
    return labels.masked_fill(supervised.long().cumprod(-1) == 0, IGNORE_INDEX)


def previous_tokens(input_ids: torch.Tensor, anchors: torch.Tensor, drafts: int) -> torch.Tensor:
    """Return the token before each draft position, `[batch, anchors, drafts]`: the anchor, then the text's tokens.
    Wherever a draft counts, drafting has chosen the same token before it. Positions after the row's end have no label.
    """
    at = anchors.clamp(min=0).unsqueeze(-1) + torch.arange(drafts, device=anchors.device)
    return input_ids.gather(1, at.clamp(max=input_ids.shape[1] - 1).flatten(1)).view_as(at)


def block_mask(
    anchors: torch.Tensor, position_ids: torch.Tensor, block_size: int, span: AttentionSpan = _EVERYTHING
) -> torch.Tensor:
    """Return the attention mask, boolean `[batch, 1, anchors * block_size, context + anchors * block_size]`: a block
    sees its document strictly before its anchor, and itself, within `span`. A missing anchor, -1, sees only its own
    block. `position_ids`, `[batch, context]`, count from 0 in every packed document."""
    device, count = anchors.device, anchors.shape[1]
    documents = position_ids.gather(1, anchors.clamp(min=0)).unsqueeze(-1)  # tokens of each before its anchor
    back = anchors.unsqueeze(-1) - torch.arange(position_ids.shape[1], device=device)
    slots = torch.arange(block_size, device=device).view(-1, 1)
    before = (back > 0) & (back <= documents)
    sees_context = before.unsqueeze(2) & span.sees_context(slots, back.unsqueeze(2))
    sees_context = sees_context.expand(-1, -1, block_size, -1).flatten(1, 2)
    block = torch.arange(count, device=device).repeat_interleave(block_size)
    sees_block = (block.unsqueeze(-1) == block) & span.sees_slots(block_size, device).repeat(count, count)
    sees_block = sees_block.expand(len(anchors), -1, -1)
    return torch.cat([sees_context, sees_block], dim=-1).unsqueeze(1)


def block_pieces(
    anchors: torch.Tensor, position_ids: torch.Tensor, block_size: int, span: AttentionSpan = _EVERYTHING
) -> MaskPieces:
    """Return [`block_mask`] in pieces: a few neighbouring blocks, with the part of the context that any of them sees.
    Of layers with a window their size depends on anchors and window, and hardly on the row."""
    context, pieces = position_ids.shape[1], []
    before = position_ids.gather(1, anchors.clamp(min=0))  # tokens of each document before the anchor
    if span.context_window is not None:
        before = before.clamp(max=span.context_window)
    for row, (own, first) in enumerate(zip(anchors, (anchors - before).tolist())):
        known = own.tolist()
        for start in range(0, len(known), _BLOCKS_OF_A_PIECE):
            group = slice(start, min(start + _BLOCKS_OF_A_PIECE, len(known)))
            there = [(a, b) for a, b in zip(known[group], first[group]) if a >= 0]
            begin, end = min((b for _, b in there), default=0), max((a for a, _ in there), default=0) + 1
            shifted = torch.where(own[group] >= 0, own[group] - begin, -1)
            mask = block_mask(shifted[None], position_ids[row : row + 1, begin:end], block_size, span)
            queries = slice(group.start * block_size, group.stop * block_size)
            blocks = slice(context + queries.start, context + queries.stop)
            pieces.append(MaskPiece(row, queries, (slice(begin, end), blocks), mask))
    return MaskPieces(pieces)


def block_masks(
    config: PreTrainedConfig, anchors: torch.Tensor, position_ids: torch.Tensor
) -> dict[str, torch.Tensor | MaskPieces]:
    """Return the [`block_mask`] of each kind of layer that a drafter has, in pieces where it would be large."""
    queries = anchors.shape[1] * config.block_size
    is_large = queries * (position_ids.shape[1] + queries) > _LARGE and config._attn_implementation == "sdpa"
    make: Any = block_pieces if is_large else block_mask
    kinds = dict.fromkeys(config.kinds)
    return {kind: make(anchors, position_ids, config.block_size, config.attention_span(kind)) for kind in kinds}


def walk_rounds(anchors: torch.Tensor, matched: torch.Tensor, available: torch.Tensor) -> list[tuple[int, int]]:
    """Return the verification rounds that generation would need for a text that the target wrote: of each, emitted
    tokens and accepted drafts.

    Starts at the first anchor of each supervised stretch; a round that accepts n drafts goes on from the token after
    them, as generation does. Unlike an average over random anchors this does not favour easy stretches, where rounds
    are long and few. The anchors are every candidate of one row, ascending, -1 ignored; `matched` drafts in a row
    equal the text; `available` tokens of the same stretch follow, at least up to one more than can be drafted."""
    at = {a: (m, n) for a, m, n in zip(anchors.tolist(), matched.tolist(), available.tolist()) if a >= 0}
    rounds, position = [], -1
    for anchor, (accepted, left) in at.items():
        if anchor < position:  # emitted by an earlier round
            continue
        emitted = min(accepted + 1, left)
        rounds.append((emitted, accepted))
        position = anchor + emitted
    return rounds


def expected_rounds(anchors: torch.Tensor, acceptance: torch.Tensor, available: torch.Tensor) -> float:
    """Return the expected number of verification rounds for a text by sampling, the sum over anchors of the
    probability that a round starts there. `acceptance`, `[anchors, drafts]`, is how probable each draft's acceptance
    is once those before it are accepted; the others are those of [`walk_rounds`]."""
    starts = {anchor: 0.0 for anchor in anchors.tolist() if anchor >= 0}
    for anchor, rates, left in zip(anchors.tolist(), acceptance.tolist(), available.tolist()):
        if anchor < 0:
            continue
        probability = starts[anchor] = starts[anchor] if anchor - 1 in starts else 1.0  # a stretch starts with a round
        for emitted, rate in enumerate([*rates[:left], 0.0][:left], start=1):
            if anchor + emitted in starts:
                starts[anchor + emitted] += probability * (1 - rate)
            probability *= rate
    return sum(starts.values())
