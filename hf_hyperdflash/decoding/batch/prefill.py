"""The prompts of several texts in one forward, padded on the left as transformers pads them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch

from ...targets.caches.name import CACHE
from ...targets.caches.ragged import CachedSequence, RaggedCache
from ...targets.hooks import ResidualCapture
from ..loop import Decoding


def prefill_together(rows: Sequence[Decoding]) -> RaggedCache:
    """Run the prompts of several rows and write the first token of each. In chunks, where the caller asks for them, of
    which each reaches the drafter before the next is run.

    Args:
        rows: With their prompts, of a target that takes masks.

    Returns:
        The cache of all rows.
    """
    first, cache, capture = rows[0], rows[0].cache, capture_for(rows)
    prompts = _padded(rows)
    width = prompts["input_ids"].shape[1]
    config = copy.copy(first.config)
    chunk, config.prefill_chunk_size = config.prefill_chunk_size or width, None
    for end in [*range(chunk, width, chunk), width]:
        start, config._mask_length = cache.get_seq_length(), end
        inputs = {**arguments_of(rows), CACHE: cache, "logits_to_keep": 1}
        inputs["attention_mask"] = prompts["attention_mask"][:, :end]
        inputs["position_ids"] = prompts["position_ids"][:, start:end]
        with first.binding.capturing_forward(capture):
            outputs = first.model._prefill(prompts["input_ids"][:, :end], config, inputs)
        captured = capture.pop()
        for place, row in enumerate(rows):
            padding = width - row.row.prompt_length
            row.row.residuals += [residual[place : place + 1, max(padding - start, 0) :] for residual in captured]
            if padding < end < width and row.row.residuals:
                row.extend(end - padding)
    for place, row in enumerate(rows):
        row.cache = CachedSequence(place, row.row.prompt_length - 1)
        row.begin(outputs)
    return RaggedCache(cache, [row.row.prompt_length for row in rows])


def _padded(rows: Sequence[Decoding]) -> dict[str, torch.Tensor]:
    """Ids, mask and positions of the prompts, `[batch, seq]`."""
    lengths = [row.row.prompt_length for row in rows]
    ids = rows[0].row.ids
    padded = {name: ids.new_zeros(len(rows), max(lengths)) for name in ("input_ids", "attention_mask", "position_ids")}
    for place, (row, length) in enumerate(zip(rows, lengths)):
        real = row.row.mask(length)
        padded["input_ids"][place, -length:] = row.row.text[0]
        padded["attention_mask"][place, -length:] = 1 if real is None else real[0]
        padded["position_ids"][place, -length:] = row.row.text_positions(0, length)[0]
    return padded


def arguments_of(rows: Sequence[Decoding]) -> dict[str, Any]:
    """The rows' other arguments of the target as one's: tensors of one row each are put together."""
    shared = dict(rows[0].kwargs)
    for name, value in shared.items():
        if isinstance(value, torch.Tensor) and value.ndim and value.shape[0] == 1:
            shared[name] = torch.cat([row.kwargs[name] for row in rows])
    return shared


def capture_for(rows: Sequence[Decoding]) -> ResidualCapture:
    """Of the target's residual streams what one of the rows needs, and so all."""
    return next((row.capture for row in rows if row.lesson is not None), rows[0].capture)
