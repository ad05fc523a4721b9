"""Several texts at once: each row drafts and accepts as if it were alone, and one forward of the target verifies all
of their drafts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers.generation.utils import GenerateDecoderOnlyOutput

from ...auto.policies import BatchPolicy
from ...targets.attention_masks import attention_mask_for
from ...targets.caches.name import CACHE
from ...targets.caches.ragged import RaggedCache
from ..inference_mode import mode_of_rounds
from ..loop import Decoding, speculative_decoding
from ..outputs import Shown
from ..rounds import RowRound
from ..stats import SpeculationStats
from .prefill import arguments_of, capture_for, prefill_together


class WrittenRow(NamedTuple):
    """A row when it has ended.

    Attributes:
        ids: The text, `[1, seq]`.
        shown: What the caller asked to see of it.
        stats: Of the row alone.
        config: The request's generation configuration.
    """

    ids: torch.Tensor
    shown: Shown
    stats: SpeculationStats
    config: Any

    @classmethod
    def of(cls, decoding: Decoding) -> WrittenRow:
        """What is left of a decoding that has ended."""
        return cls(decoding.row.ids.clone(), decoding.shown, decoding.stats, decoding.config)


@torch.no_grad()
def decode_rows(decodings: Iterable[Decoding], is_joint: bool) -> list[WrittenRow]:
    """Write the texts of several rows.

    Args:
        decodings: One per row, each made when it is asked for.
        is_joint: Whether one forward serves all rows; else they are written one after the other.
    """
    if not is_joint:
        return [_written_alone(decoding) for decoding in decodings]
    rows = list(decodings)
    decode_together(rows)
    for row in rows:
        row.end()
    return [WrittenRow.of(row) for row in rows]


def _written_alone(decoding: Decoding) -> WrittenRow:
    speculative_decoding(decoding)
    return WrittenRow.of(decoding)


def decode_together(decodings: Sequence[Decoding]) -> None:
    """Write the texts of several rows; those that end leave the batch."""
    active = list(decodings)
    cache = prefill_together(active)
    drafting_stats = active[0].drafting_stats
    schedule = None if drafting_stats is None else BatchPolicy(drafting_stats, active)
    with mode_of_rounds(all(row.leaves_nothing for row in active)):
        while active := _still_active(active, cache):
            began = active[0].now()
            if schedule is not None:
                schedule.begin(active)
            rounds = _draft(active)
            outputs = _verify(active, rounds, cache)
            accepted = [row.end_round(round_, outputs) for row, round_ in zip(active, rounds)]
            cache.accept([row.cache.accepted for row in active])
            seconds = active[0].now() - began
            if schedule is not None:
                schedule.end(active, [len(round_.tree) for round_ in rounds], accepted, seconds)
            for row in active:
                row.stats.loop_seconds += seconds / len(active)


def _still_active(rows: list[Decoding], cache: RaggedCache) -> list[Decoding]:
    left = [row for row in rows if not row.row.finished]
    if left and len(left) < len(rows):
        cache.batch_select_indices(torch.tensor([row.cache.index for row in left]))
        for place, row in enumerate(left):
            row.cache.index = place
    return left


def _draft(rows: list[Decoding]) -> list[Any]:
    wanted = [row.begin_round() for row in rows]
    asked = [each for each in wanted if each is not None]
    began = rows[0].now()
    proposed = rows[0].drafter.propose_rows(rows[0].target, asked) if asked else []
    if not isinstance(proposed, (list, tuple)) or len(proposed) != len(asked):
        given = f"{len(proposed)} of them" if isinstance(proposed, (list, tuple)) else f"a {type(proposed).__name__}"
        raise ValueError(
            f"`propose_rows` of the drafter, a {type(rows[0].drafter).__name__}, returned {given}: expected a list of "
            f"{len(asked)} `DraftTree`s, one for each text that it was asked for."
        )
    trees = iter(proposed)
    seconds = (rows[0].now() - began) / max(len(asked), 1)
    for row, each in zip(rows, wanted):
        row.stats.draft_seconds += seconds if each else 0.0
    return [row.drafted(row.nothing if each is None else next(trees)) for row, each in zip(rows, wanted)]


def _verify(rows: list[Decoding], rounds: list[RowRound], cache: RaggedCache) -> Any:
    """One forward of the target over the anchors and drafts of all rows, shorter ones filled up."""
    first, width, capture = rows[0], max(round_.count for round_ in rounds), capture_for(rows)
    ids, positions = torch.zeros(2, len(rows), width, dtype=torch.long, device=first.row.ids.device)
    for place, (row, round_) in enumerate(zip(rows, rounds)):
        ids[place, : round_.count] = row.row.with_drafts(round_.tree.tokens)[0, round_.start :]
        positions[place, : round_.count] = round_.positions(row.row)
    began = first.now()
    inputs = first.model.prepare_inputs_for_generation(
        ids, next_sequence_length=width, is_first_iteration=False, **{**arguments_of(rows), CACHE: cache}
    )
    inputs |= {"position_ids": positions, "attention_mask": _masks(rows, rounds, cache, width)}
    with first.binding.capturing_forward(capture, is_round=True):
        outputs = first.model(**{**inputs, "logits_to_keep": width, "return_dict": True})
    seconds = (first.now() - began) / len(rows)
    captured = capture.pop()
    for place, (row, round_) in enumerate(zip(rows, rounds)):
        row.row.residuals += [residual[place : place + 1, : round_.count] for residual in captured]
        row.stats.verify_seconds += seconds
    return outputs


def _masks(rows: list[Decoding], rounds: list[RowRound], cache: RaggedCache, width: int) -> Any:
    """One mask, or one for each kind of layer if they differ."""
    target = rows[0].target
    masks: dict[str, Any] = {}
    for layer in cache.layers:
        kind = "full_attention" if layer.sliding_window is None else "sliding_attention"
        if kind in masks:
            continue
        columns, device = layer.get_seq_length(), rows[0].row.ids.device
        mask = torch.zeros(len(rows), 1, width, columns + width, dtype=torch.bool, device=device)
        # What is filled up sees itself, so that it is finite.
        mask[..., columns:] = torch.eye(width, dtype=torch.bool, device=device)
        for place, (row, round_) in enumerate(zip(rows, rounds)):
            past, count = layer.lengths[place], round_.count
            of_row, real = round_.rows.mask(past, layer.sliding_window, device), row.row.mask(round_.start)
            if real is not None and past:
                of_row[:, :past] &= real[0, -past:].bool()
            mask[place, 0, :count, :past] = of_row[:, :past]
            mask[place, 0, :count, columns : columns + count] = of_row[:, past:]
        masks[kind] = attention_mask_for(target.config._attn_implementation, mask, target.dtype)
    return masks if len(masks) > 1 else next(iter(masks.values()))


def stats_of(rows: Sequence[WrittenRow]) -> SpeculationStats:
    """What the rows did together."""
    stats = SpeculationStats()
    for row in rows:
        stats += row.stats
    stats.of_batch = [row.stats for row in rows]
    return stats


def written_batch(rows: Sequence[WrittenRow]) -> GenerateDecoderOnlyOutput | torch.Tensor:
    """What `generate` returns: texts that end early padded on the right, and no cache to go on with, as each row's has
    another length."""
    config = rows[0].config
    pad = getattr(config, "_pad_token_tensor", None)
    texts = [row.ids[0] for row in rows]
    # Without a token to pad with, none is known that ends a text.
    sequences: Any = pad_sequence(texts, batch_first=True, padding_value=0 if pad is None else int(pad))
    if not config.return_dict_in_generate:
        return sequences
    return GenerateDecoderOnlyOutput(sequences, scores=_steps(rows, "scores"), logits=_steps(rows, "logits"))


def _steps(rows: Sequence[WrittenRow], name: str) -> Any:
    """What the caller asked to see, step by step, `[batch, config.vocab_size]`; zeros where a row has ended."""
    values = [row.shown.seen[name] for row in rows]
    if not values[0]:
        return None
    nothing = torch.zeros_like(values[0][0])
    steps = range(max(map(len, values)))
    return tuple(torch.cat([row[step] if step < len(row) else nothing for row in values]) for step in steps)
