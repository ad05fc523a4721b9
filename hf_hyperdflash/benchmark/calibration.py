"""Calibrates a drafter's confidence: fits temperatures on rounds of real generation, and writes its configuration."""

from __future__ import annotations

import copy
import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from transformers import PreTrainedConfig, PreTrainedModel

from ..decoding.bind import bound
from ..decoding.stats import SpeculationStats
from ..drafters.base import Observer
from ..drafters.blocks.drafter import BlockDrafter
from ..drafters.sampling import Context
from ..training.trials import Local, run
from ..trees.tree import DraftTree

LEAST_ROUNDS = 100  # to fit on, and as many to measure on
_LOGIT_EPS = 2**-24  # float32 has no closer probabilities below 1
BINS = 15
_TEMPERATURES = 2.0 ** np.linspace(-3, 3, 97)
_LEAST = 1e-12  # probability in a logarithm


class Rounds(NamedTuple):
    """A drafter's confidence in its drafts, and whether they were accepted."""

    logits: np.ndarray  # `[rounds, drafts]`: that a draft is accepted if those before it are; `nan` without a draft
    accepted: np.ndarray  # all drafts up to each, 1 or 0; `nan` where the text ended before that was known


@dataclass(frozen=True)
class Bin:
    """A bin of similar probabilities: their number, their mean, and the share of drafts that were accepted."""

    total: int
    confidence: float
    accepted: float


@dataclass(frozen=True)
class Reliability:
    """Probabilities compared with outcomes."""

    total: int
    confidence: float  # mean
    accepted: float  # share of the drafts
    error: float  # expected calibration error (Naeini et al., 2015), over `BINS` bins of equal width
    # The probability that an accepted draft has a larger value than a rejected one, equal values counted half (Hanley
    # and McNeil, 1982); `None` if there are not both.
    auc: float | None
    bins: list[Bin]  # those that are not empty, by size


@dataclass(frozen=True)
class BeforeAfter:
    """Reliability without the fitted temperatures, and with them."""

    before: Reliability
    after: Reliability


@dataclass(frozen=True)
class Calibration:
    """Temperatures, and their effect on rounds that they were not fitted on."""

    temperatures: list[float]  # one per draft position
    rounds: tuple[int, int]  # to fit on, and to measure on
    through: list[BeforeAfter]  # of each position that all drafts up to it are accepted; last over all positions
    given: list[BeforeAfter]  # the same, that it is accepted if those before it are


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
    """Fit confidence temperatures on every other prompt, from the first on, and measure them on the rest."""
    check_confidence(drafter.config)
    check_amount(len(prompts), max_new_tokens)
    halves = []
    with bound(target):
        for purpose, half in (("fit", prompts[::2]), ("measure", prompts[1::2])):
            shown: dict[str, Any] = {"desc": f"rounds to {purpose} on", "disable_tqdm": disable_tqdm}
            halves.append(record_rounds(target, drafter, half, max_new_tokens, temperature, **shown))
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
    prompts: Sequence[torch.Tensor],
    max_new_tokens: int,
    temperature: float,
    **shown: Any,
) -> Rounds:
    """Generate from every prompt and record confidence and outcome of every round."""
    observed: Any = copy.copy(drafter)  # others may be using the drafter itself
    observed.config, stats = copy.copy(drafter.config), SpeculationStats()
    observed.config.confidence_temperatures = None

    observed.observer = recorder = _ConfidenceRecorder()
    for _, _, record in run([Local(target, observed)], prompts, max_new_tokens, temperature=temperature, **shown):
        stats += cast(SpeculationStats, record.stats)
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
    temperatures, accepted = np.round(fit_temperatures(*to_fit), 4), to_measure.accepted
    reached = np.ones_like(accepted)
    reached[:, 1:] = accepted[:, :-1]
    given = np.where(reached == 1, accepted, math.nan)  # a draft after a rejected one has no outcome
    return Calibration(
        temperatures.tolist(),
        (len(to_fit.logits), len(to_measure.logits)),
        _before_and_after(to_measure.logits, accepted, temperatures, through),
        _before_and_after(to_measure.logits, given, temperatures, given_those_before),
    )


def _before_and_after(
    logits: np.ndarray,
    accepted: np.ndarray,
    temperatures: np.ndarray,
    probability: Callable[[np.ndarray, np.ndarray], np.ndarray],
) -> list[BeforeAfter]:
    before, after = probability(logits, np.ones_like(temperatures)), probability(logits, temperatures)
    columns = [*range(logits.shape[1]), slice(None)]
    return [
        BeforeAfter(*(reliability(each[:, column], accepted[:, column]) for each in (before, after)))
        for column in columns
    ]


# Probabilities of acceptance compared with outcomes. The data are rounds of drafts, left to right. Each draft has the
# logit of its acceptance given that those before it were accepted. A draft that was not made, or whose outcome is not
# known, is `nan`.


def reliability(probabilities: np.ndarray, accepted: np.ndarray) -> Reliability:
    """Compare `probabilities` of any shape with `accepted`, 1 or 0 each; entries with a `nan` do not count."""
    known = ~np.isnan(accepted) & ~np.isnan(probabilities)
    p, came_true = probabilities[known], accepted[known]
    bin_index = np.minimum((p * BINS).astype(int), BINS - 1)
    sizes, sums, hits = (np.bincount(bin_index, weights, BINS) for weights in (None, p, came_true))
    full = sizes > 0
    bins = [Bin(int(n), s / n, h / n) for n, s, h in zip(sizes[full], sums[full].tolist(), hits[full].tolist())]
    some = max(1, p.size)
    error = float(np.abs(sums - hits).sum()) / some
    return Reliability(p.size, float(p.sum()) / some, float(came_true.sum()) / some, error, _auc(p, came_true), bins)


def _auc(scores: np.ndarray, came_true: np.ndarray) -> float | None:
    positive = int(came_true.sum())
    negative = came_true.size - positive
    if not positive or not negative:
        return None
    _, bin_index, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[bin_index]  # from 1, equal ones share their mean
    return float((ranks[came_true == 1].sum() - positive * (positive + 1) / 2) / (positive * negative))


def given_those_before(logits: np.ndarray, temperatures: np.ndarray) -> np.ndarray:
    """Return each draft's probability of acceptance if those before it are accepted, `[rounds, positions]`."""
    return 1 / (1 + np.exp(-logits / temperatures))


def through(logits: np.ndarray, temperatures: np.ndarray) -> np.ndarray:
    """Return the probability that all drafts up to each one are accepted, `[rounds, positions]`."""
    return np.cumprod(given_those_before(logits, temperatures), axis=1)


def fit_temperatures(logits: np.ndarray, accepted: np.ndarray) -> np.ndarray:
    """Fit one temperature per draft position, so that the probabilities of [`through`] are reliable.

    As DSpark's sequential temperature scaling (section 3.2.1), it goes position by position from the left, with the
    earlier ones fixed, by a search over a grid. DSpark minimizes the calibration error. Here it is the log loss, with
    a weak prior that the head is right (a factor e costs half a nat). The calibration error cannot distinguish an
    informative head from one that always gives the mean: from few rounds it chooses temperatures that erase the head's
    information, and its own error on fresh rounds is larger. A position that no round has gets 1.
    """
    fitted = np.ones(logits.shape[1])
    before = np.ones(len(logits))
    for k in range(logits.shape[1]):
        known = ~np.isnan(accepted[:, k]) & ~np.isnan(logits[:, k])
        came_true = accepted[known, k]
        tried = before[known] * given_those_before(logits[known, k], _TEMPERATURES[:, None])
        probabilities = np.where(came_true == 1, tried, 1 - tried)
        losses = -np.log(np.maximum(probabilities, _LEAST)).sum(1) + np.log(_TEMPERATURES) ** 2 / 2
        fitted[k] = _TEMPERATURES[losses.argmin()]
        before = before * given_those_before(logits[:, k], fitted[k])
    return fitted


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
