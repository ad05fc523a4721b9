"""A `generate` call for several sequences: the arguments of one call each are made of it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from transformers.generation.configuration_utils import GenerationConfig

from ..drafters.base import Drafter
from ..targets.caches.name import CACHE
from .request import ids_asked, setting, way_asked
from .sequence import Sequence

_SHOWN = ("output_hidden_states", "output_attentions")  # of which each sequence would have another length


def arguments_of_each(target: Any, asked: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the arguments of `generate` for each sequence of a call with a drafter; none if it is a call for one, or
    for another way to write.

    Args:
        target: A bound target.
        asked: The arguments, by name.

    Raises:
        ValueError: If it cannot be done for several sequences.
    """
    ids, count = ids_asked(asked), setting(target, asked, "num_return_sequences")
    if ids is None:
        return []
    count = 1 if count is None else count
    if type(count) is not int or count < 1:
        raise ValueError(f"`num_return_sequences` is {count!r}, expected a whole number of texts, at least 1.")
    size = ids.shape[0]
    if size * count == 1 or way_asked(target, asked) in ("num_beams", "penalty_alpha", "custom_generate"):
        return []
    _check(target, asked, size, count)
    return [_arguments_of(asked, size, index) for index in range(size) for _ in range(count)]


class SequenceStarter:
    """Stands for a drafter in a call that starts one sequence of several, instead of writing it.

    Attributes:
        sequence: What the call has started.
    """

    sequence: Sequence

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter

    def __getattr__(self, name: str) -> Any:
        """The drafter's: transformers compares vocabularies, for example."""
        return getattr(vars(self)["drafter"], name)


def started_by(generate: Callable[..., Any], drafter: Drafter, arguments: dict[str, Any]) -> Sequence:
    """Return the sequence that a call of transformers' own `generate` prepares for a drafter."""
    starter = SequenceStarter(drafter)
    generate(**{**arguments, "assistant_model": starter})
    return starter.sequence


def _check(target: Any, asked: dict[str, Any], size: int, count: int) -> None:
    texts = f"{size * count} texts"
    if count > 1 and not setting(target, asked, "do_sample"):
        raise ValueError(
            f"`num_return_sequences` is {count} and `do_sample` False: greedy texts of one prompt are all the same. "
            "Set `do_sample=True`, or leave `num_return_sequences` out."
        )
    if asked.get(CACHE) is not None:
        raise ValueError(
            f"`{CACHE}` was passed for {texts}, which differ in length after drafts: pass the whole texts "
            "without it, or continue one text at a time."
        )
    if asked.get("streamer") is not None:
        raise ValueError(f"`streamer` was passed for {texts}, and it streams one: leave it out, or pass one prompt.")
    if shown := [name for name in _SHOWN if setting(target, asked, name)]:
        raise ValueError(f"`{shown[0]}` was asked for of {texts}, each in rounds of its own: pass one prompt for it.")
    mask = asked.get("attention_mask")
    if mask is not None and not bool(mask[:, -1].all()):
        row = int(mask[:, -1].long().argmin())
        raise ValueError(
            f"`attention_mask` ends in padding in row {row}, expected it on the left: set `tokenizer.padding_side` to "
            "'left'."
        )


def _arguments_of(asked: dict[str, Any], size: int, index: int) -> dict[str, Any]:
    """Return what of the arguments belongs to one of the prompts; settings stay as they are."""
    own: dict[str, Any] = {
        name: value[index : index + 1]
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
        own["prefix_allowed_tokens_fn"] = _for_prompt(asked["prefix_allowed_tokens_fn"], index)
    return own


def _is_setting(name: str) -> bool:
    return hasattr(GenerationConfig, name) or name in vars(GenerationConfig())


def _for_prompt(
    allowed: Callable[[int, torch.Tensor], list[int]], index: int
) -> Callable[[int, torch.Tensor], list[int]]:
    return lambda _, ids: allowed(index, ids)
