"""Calibrates a drafter's confidence: fits temperatures on rounds of real generation, and writes its configuration."""

from __future__ import annotations

import copy
import json
import math
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from transformers import PreTrainedConfig, PreTrainedModel

from ..decoding.stats import SpeculationStats
from ..drafters.base import Observer
from ..drafters.blocks.drafter import BlockDrafter
from ..drafters.sampling import Context
from ..training.acceptance import bound
from ..training.runs.progress import progress_bar
from ..trees.tree import DraftTree
from .reliability import Reliability, fit_temperatures, given_those_before, reliability, through

LEAST_ROUNDS = 100  # to fit on, and as many to measure on
_LOGIT_EPS = 2**-24  # float32 has no closer probabilities below 1

BeforeAfter = tuple[Reliability, Reliability]


class Rounds(NamedTuple):
    """A drafter's confidence in its drafts, and whether they were accepted.

    Attributes:
        logits: `[rounds, config.max_draft_tokens]`, the head's logit that a draft is accepted if those before it are;
            `nan` where there was no draft.
        accepted: The same shape: whether all drafts up to each were accepted, 1 or 0; `nan` where the text ended
            before that was known.
    """

    logits: np.ndarray
    accepted: np.ndarray


@dataclass(frozen=True)
class Calibration:
    """Temperatures, and their effect on rounds that they were not fitted on.

    Attributes:
        temperatures: One per draft position.
        rounds: The number of rounds to fit on, and to measure on.
        through: Per draft position the reliability of the probability that all drafts up to it are accepted, before
            and after; the last entry is over all positions.
        given: The same for the probability that it is accepted if those before it are.
    """

    temperatures: list[float]
    rounds: tuple[int, int]
    through: list[BeforeAfter]
    given: list[BeforeAfter]


# Of acceptance, from logits `[rounds, drafts]` and temperatures `[drafts]`.
Probability = Callable[[np.ndarray, np.ndarray], np.ndarray]


def check_confidence(config: PreTrainedConfig) -> None:
    """Raise a `ValueError` if a drafter has no confidence to calibrate."""
    if not config.confidence_head:
        raise ValueError(
            "`confidence_head` of the drafter is False: expected one that was trained to say how probable the "
            "acceptance of its drafts is (`hf-hyperdflash train --confidence_head`)."
        )


def check_amount(prompts: int, max_new_tokens: int) -> None:
    """Raise a `ValueError` if that many prompts cannot lead to [`LEAST_ROUNDS`] in each half of them."""
    most = prompts // 2 * (max_new_tokens - 1)
    if most < LEAST_ROUNDS:
        raise ValueError(
            f"{prompts} prompts of {max_new_tokens} new tokens each give at most {most} rounds to fit on and to "
            f"measure on, expected at least {LEAST_ROUNDS}: more prompts, or a larger `max_new_tokens`."
        )


def calibrate(
    target: PreTrainedModel,
    drafter: BlockDrafter,
    prompts: Sequence[torch.Tensor],
    *,
    max_new_tokens: int = 128,
    temperature: float = 1.0,
    disable_tqdm: bool | None = True,
) -> Calibration:
    """Fit confidence temperatures on every other prompt, from the first on, and measure them on the rest.

    Args:
        target: The target. One that is not bound is bound meanwhile.
        drafter: Its drafter, in eval mode. It is not changed; [`save_temperatures`] writes the temperatures.
        prompts: Held-out ones, token ids `[1, seq]` each.
        max_new_tokens: Most new tokens per prompt.
        temperature: Of the texts, 0 for greedy. Drafts are accepted more often or less with another one.
        disable_tqdm: `False` for a progress bar on stderr, `None` for one on a terminal and lines elsewhere.

    Raises:
        ValueError: If the drafter has no confidence head, or there are too few rounds.
    """
    check_confidence(drafter.config)
    check_amount(len(prompts), max_new_tokens)
    halves = []
    with bound(target):
        for purpose, half in (("fit", prompts[::2]), ("measure", prompts[1::2])):
            bar = progress_bar(half, desc=f"rounds to {purpose} on", unit="prompt", leave=False, disable=disable_tqdm)
            halves.append(record_rounds(target, drafter, bar, max_new_tokens, temperature))
            if len(halves[-1].logits) < LEAST_ROUNDS:
                raise ValueError(
                    f"{len(half)} prompts led to {len(halves[-1].logits)} rounds to {purpose} on, expected at least "
                    f"{LEAST_ROUNDS}: more prompts, or a larger `max_new_tokens`."
                )
    return fitted(*halves)


class _ConfidenceRecorder(Observer):
    """Records the confidence of each round that had drafts."""

    def __init__(self) -> None:
        self.confidences: list[torch.Tensor] = []

    def add_round(self, context: Context, tree: DraftTree, logits: torch.Tensor, accepted: list[int]) -> None:
        if tree.confidence is not None:
            self.confidences.append(tree.confidence.double().cpu())


def record_rounds(
    target: PreTrainedModel,
    drafter: BlockDrafter,
    prompts: Iterable[torch.Tensor],
    max_new_tokens: int,
    temperature: float,
) -> Rounds:
    """Generate from every prompt and record confidence and outcome of every round."""
    options: dict[str, float] = {"max_new_tokens": max_new_tokens, "do_sample": temperature > 0}
    if temperature > 0:
        options |= {"temperature": temperature, "top_k": 0, "top_p": 1.0}
    observed: Any = copy.copy(drafter)  # others may be using the drafter itself
    observed.config, stats = copy.copy(drafter.config), SpeculationStats()
    observed.config.confidence_temperatures = None

    observed.observer = recorder = _ConfidenceRecorder()
    for prompt in prompts:
        ids = prompt.to(target.device)
        target.generate(ids, attention_mask=torch.ones_like(ids), assistant_model=observed, **options)  # type: ignore[operator]
        stats += cast(SpeculationStats, observed.last_stats)
    logits, accepted = np.full((2, stats.rounds, observed.config.max_draft_tokens), math.nan)
    for number, confidence in enumerate(recorder.confidences):
        drafts, accepted_count = len(confidence), stats.accepted[number]
        logits[number, :drafts] = torch.logit(confidence, eps=_LOGIT_EPS)
        accepted[number, :accepted_count] = 1
        if stats.emitted[number] > accepted_count:  # else the text ended with a draft; later ones were not verified
            accepted[number, accepted_count:drafts] = 0
    return Rounds(logits, accepted)


def fitted(to_fit: Rounds, to_measure: Rounds) -> Calibration:
    """Fit temperatures on some rounds, and measure them on others."""
    temperatures = np.round(fit_temperatures(*to_fit), 4)
    return Calibration(
        temperatures.tolist(),
        (len(to_fit.logits), len(to_measure.logits)),
        _before_and_after(to_measure.logits, to_measure.accepted, temperatures, through),
        _before_and_after(to_measure.logits, _given_earlier(to_measure.accepted), temperatures, given_those_before),
    )


def _given_earlier(accepted: np.ndarray) -> np.ndarray:
    """Replace the outcome of drafts after a rejected one by `nan`."""
    reached = np.ones_like(accepted)
    reached[:, 1:] = accepted[:, :-1]
    return np.where(reached == 1, accepted, math.nan)


def _before_and_after(
    logits: np.ndarray,
    accepted: np.ndarray,
    temperatures: np.ndarray,
    probability: Probability,
) -> list[BeforeAfter]:
    before, after = probability(logits, np.ones_like(temperatures)), probability(logits, temperatures)
    columns = [*range(logits.shape[1]), slice(None)]
    return [
        (reliability(before[:, column], accepted[:, column]), reliability(after[:, column], accepted[:, column]))
        for column in columns
    ]


def save_temperatures(folder: Path, temperatures: Sequence[float]) -> None:
    """Write `confidence_temperatures` into the `config.json` of a saved drafter: that field alone, or nothing."""
    path, unfinished = folder / "config.json", folder / "config.json.unfinished"
    fields = json.loads(path.read_text(encoding="utf-8")) | {"confidence_temperatures": list(temperatures)}
    try:
        unfinished.write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        unfinished.chmod(path.stat().st_mode)
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
