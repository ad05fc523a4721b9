"""A `generate` call for several texts: one row's calls are made of it, and of their results its own."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers.generation.configuration_utils import GenerationConfig

from ...targets.caches.name import CACHE
from ...targets.registry import is_drafter, target_of
from ..loop import Decoding
from ..request import by_name, ids_asked, setting, way_asked
from .decoding import decode_rows, stats_of, written_batch

STARTS_ONLY = "_hyperdflash_starts_only"
"""An argument of a bound target's `generate` that lets it return the [`~decoding.loop.Decoding`] of one row, with its
prompt."""

_SHOWN = ("output_hidden_states", "output_attentions")  # of which each row would have another length


@dataclass
class BatchRequest:
    """What was asked for, row by row.

    Attributes:
        target: A bound target.
        drafter: Its drafter.
        rows: The arguments of `generate` for each.
    """

    target: Any
    drafter: Any
    rows: list[dict[str, Any]]

    def written(self, decodings: Iterator[Decoding]) -> Any:
        """The batch's result.

        Args:
            decodings: One per row, each made when it is asked for.
        """
        rows = decode_rows(decodings, target_of(self.target).can_join_sequences)
        self.drafter.remember(stats_of(rows))
        return written_batch(rows)


def batch_asked(target: Any, asked: dict[str, Any]) -> BatchRequest | None:
    """The batch that `generate` is asked for with a drafter; `None` if it is no batch, or there is no drafter.

    Args:
        target: A bound target.
        asked: The arguments, by name.

    Raises:
        ValueError: If it cannot be done for several rows.
    """
    asked = by_name(asked)
    drafter, ids = asked.get("assistant_model"), ids_asked(asked)
    if not is_drafter(drafter) or ids is None:
        return None
    count = setting(target, asked, "num_return_sequences")
    count = 1 if count is None else count
    if type(count) is not int or count < 1:
        raise ValueError(f"`num_return_sequences` is {count!r}, expected a whole number of texts, at least 1.")
    if ids.shape[0] * count == 1 or way_asked(target, asked) in ("num_beams", "custom_generate"):
        return None
    _check(target, asked, ids.shape[0], count)
    rows = [_row(asked, ids.shape[0], row) for row in range(ids.shape[0]) for _ in range(count)]
    return BatchRequest(target, drafter, rows)


def _check(target: Any, asked: dict[str, Any], size: int, count: int) -> None:
    rows = f"{size * count} texts"
    if count > 1 and not setting(target, asked, "do_sample"):
        raise ValueError(
            f"`num_return_sequences` is {count} and `do_sample` False: greedy texts of one prompt are all the same. "
            "Set `do_sample=True`, or leave `num_return_sequences` out."
        )
    if asked.get(CACHE) is not None:
        raise ValueError(
            f"`{CACHE}` was passed for {rows}, which differ in length after drafts: pass the whole texts "
            "without it, or continue one text at a time."
        )
    if asked.get("streamer") is not None:
        raise ValueError(f"`streamer` was passed for {rows}, and it streams one: leave it out, or pass one prompt.")
    if shown := [name for name in _SHOWN if setting(target, asked, name)]:
        raise ValueError(f"`{shown[0]}` was asked for of {rows}, each in rounds of its own: pass one prompt for it.")
    mask = asked.get("attention_mask")
    if mask is not None and not bool(mask[:, -1].all()):
        row = int(mask[:, -1].long().argmin())
        raise ValueError(
            f"`attention_mask` ends in padding in row {row}, expected it on the left: set `tokenizer.padding_side` to "
            "'left'."
        )


def _row(asked: dict[str, Any], size: int, row: int) -> dict[str, Any]:
    """Of the arguments what belongs to one row of the prompts; settings stay as they are."""
    own: dict[str, Any] = {
        name: value[row : row + 1]
        if isinstance(value, torch.Tensor) and value.ndim and value.shape[0] == size and not _is_setting(name)
        else value
        for name, value in asked.items()
    }
    if asked.get("generation_config") is None:
        own["num_return_sequences"] = 1
    else:  # transformers does not want both
        own.pop("num_return_sequences", None)
        own["generation_config"] = copy.copy(asked["generation_config"])
        own["generation_config"].num_return_sequences = 1
    if asked.get("prefix_allowed_tokens_fn") is not None:
        own["prefix_allowed_tokens_fn"] = _of_row(asked["prefix_allowed_tokens_fn"], row)
    return own


def _is_setting(name: str) -> bool:
    return hasattr(GenerationConfig, name) or name in vars(GenerationConfig())


def _of_row(allowed: Callable[[int, torch.Tensor], list[int]], row: int) -> Callable[[int, torch.Tensor], list[int]]:
    return lambda _, ids: allowed(row, ids)
