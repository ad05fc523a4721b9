"""Recommends settings of `generate`, by timing some on a few prompts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from transformers import PreTrainedModel

from ...decoding.request import AUTO
from ...drafters.base import Drafter
from ...targets.registry import target_of
from ...training.trials import Local, run
from ..intervals import Interval, drawn_ratios, interval

TEMPERATURES = (0.0, 1.0)
_MOST_PROMPTS, _FEWEST_PROMPTS = 8, 2
_WARM = 3  # tokens of each setting that warm up
_NOISE = 1.05  # a ratio of speeds that differs from run to run


class Timed(NamedTuple):
    """Settings of a call with their speed."""

    settings: dict[str, int | str]  # arguments of `generate`
    speedup: Interval
    fastest: Interval  # speed of the fastest settings as a multiple of this one's

    @property
    def call(self) -> str:
        """The settings as they are written in a call."""
        return ", ".join(f"{name}={value!r}" for name, value in self.settings.items())

    def __str__(self) -> str:
        return f"`{self.call}` {self.speedup.value:.2f}x ({self.speedup.low:.2f} to {self.speedup.high:.2f})"

    @property
    def near(self) -> bool:
        """Whether its speed cannot be distinguished from the fastest."""
        return self.fastest.low <= 1 or self.fastest.value <= _NOISE


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


def recommendation(timed: Sequence[Timed]) -> str:
    """Describe the settings to begin with: of those that are as fast as the fastest, `"auto"`, or the shortest."""
    fastest = timed[0]
    faster = [each for each in timed if each.speedup.low > 1 and each.speedup.value >= _NOISE]
    if not faster:
        is_slow = fastest.speedup.low > 1 or all(each.speedup.high < 1 for each in timed)
        reason = (
            "no drafter: nothing that was tried is clearly" if is_slow else "cannot be told: nothing is certain to be"
        )
        return f"{reason} faster than the target alone; at best {fastest}"
    near = [each for each in faster if each.near] or faster
    by_itself = [each for each in near if each.settings == {"num_assistant_tokens": AUTO}]
    best = min(by_itself or near, key=lambda each: len(each.settings))
    merit = "finds its number by itself" if by_itself else "is shorter to write"
    return f"{best} the target alone" + ("" if best is fastest else f", within noise of the fastest, and {merit}")
