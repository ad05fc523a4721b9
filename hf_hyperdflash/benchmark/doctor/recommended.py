"""Recommends settings of `generate`, by timing some on a few prompts."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from transformers import PreTrainedModel

from ...decoding.request import AUTO
from ...drafters.base import Drafter
from ...targets.registry import target_of
from ...training.trials import Local, run
from ..intervals import drawn_ratios, interval
from .diagnosis import Timed

TEMPERATURES = (0.0, 1.0)
_MOST_PROMPTS, _FEWEST_PROMPTS = 8, 2
_WARM = 3  # tokens of each setting that warm up


def time_settings(
    target: PreTrainedModel,
    drafter: Drafter,
    prompts: Sequence[torch.Tensor],
    *,
    temperature: float = 0.0,
    max_new_tokens: int = 64,
    seconds: float = math.inf,
    disable_tqdm: bool | None = True,
) -> list[Timed]:
    """Time plain generation and some settings in turns, on at most 8 prompts; return the settings, fastest first."""
    tried = _settings(target, drafter)
    methods = [Local(target), *(Local(target, drafter, each) for each in tried)]
    list(run(methods, prompts[:1], min(_WARM, max_new_tokens), temperature=temperature, seed=0))
    trials = run(
        methods, prompts[:_MOST_PROMPTS], max_new_tokens, temperature=temperature, seed=1, fewest=_FEWEST_PROMPTS,
        seconds=seconds, desc=f"timing settings, temperature {temperature:g}", disable_tqdm=disable_tqdm,
    )  # fmt: skip
    timed = {(number, index): (record.new_tokens, record.seconds) for number, index, record in trials}
    rows = [[timed[number, index] for index in range(len(methods))] for number in range(len(timed) // len(methods))]
    return ranked(tried, np.array(rows, dtype=float))


def ranked(tried: list[dict[str, int | str]], timed: np.ndarray) -> list[Timed]:
    """Rank settings by speedup. `timed` are tokens and seconds, `[prompts, 1 + settings, 2]`, the target alone
    first."""
    rates = drawn_ratios(timed[..., 0], timed[..., 1])
    speedups = rates[:, 1:] / rates[:, :1]
    ahead = speedups[:, [speedups[0].argmax()]] / speedups
    found = [Timed(*parts) for parts in zip(tried, map(interval, speedups.T), map(interval, ahead.T))]
    return sorted(found, key=lambda each: -each.speedup.value)


def _settings(target: PreTrainedModel, drafter: Drafter) -> list[dict[str, int | str]]:
    most = drafter.max_draft_tokens or 6
    counts: list[int | str] = [*sorted({max(1, most // 4), max(1, most // 2), most}), AUTO]
    found: list[dict[str, int | str]] = [{"num_assistant_tokens": count} for count in counts]
    if target_of(target).tree_verification != "chain":
        found.append({"num_assistant_tokens": most, "tree_budget": AUTO})
    return found
