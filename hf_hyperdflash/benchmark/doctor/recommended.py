"""Recommends settings of `generate`, by timing some on a few prompts."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple, cast

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel

from ...decoding.request import AUTO
from ...decoding.rounds import verification_of
from ...decoding.stats import clock, exact_timing
from ...drafters.base import Drafter
from ...targets.caches.protocols import RewindableCache
from ...targets.registry import target_of
from ...training.runs.progress import progress_bar
from ..intervals import Interval, draw, interval

TEMPERATURES = (0.0, 1.0)
_MOST_PROMPTS = 8
_NOISE = 1.05  # a ratio of speeds that differs from run to run


class Timed(NamedTuple):
    """Settings of a call with their speed.

    Args:
        settings: Arguments of `generate`.
        speedup: Speed as a multiple of the target's alone, with its interval over prompts.
        fastest: Speed of the fastest settings as a multiple of this one's.
    """

    settings: dict[str, int | str]
    speedup: Interval
    fastest: Interval

    def __str__(self) -> str:
        text = ", ".join(f"{name}={value!r}" for name, value in self.settings.items())
        return f"`{text}` {self.speedup.value:.2f}x ({self.speedup.low:.2f} to {self.speedup.high:.2f})"

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
    disable_tqdm: bool | None = True,
) -> list[Timed]:
    """Time plain generation and some settings, in turns on the same prompts, and return the settings, fastest first.

    Args:
        target: The target, bound.
        drafter: Its drafter.
        prompts: Token ids `[1, seq]`, of which 8 are used.
        temperature: 0 is greedy; others sample from the whole distribution.
        max_new_tokens: Most new tokens per prompt.
        disable_tqdm: `False` for a progress bar on stderr, `None` for one on a terminal and lines elsewhere.
    """
    tried: list[dict[str, int | str]] = [{}, *_settings(target, drafter)]
    options: dict[str, float] = {"max_new_tokens": max_new_tokens, "do_sample": temperature > 0}
    if temperature:
        options |= {"temperature": temperature, "top_k": 0, "top_p": 1.0}
    some, now = prompts[:_MOST_PROMPTS], clock(target.device)
    shape = len(some) + 1, len(tried)
    seconds, tokens = np.zeros(shape), np.zeros(shape)
    label = f"timing settings, temperature {temperature:g}"
    progress = progress_bar(some, desc=label, unit="prompt", leave=False, disable=disable_tqdm)
    for number, prompt in enumerate(itertools.chain(some[:1], progress)):  # the first one twice: once to warm up
        ids = prompt.to(target.device)
        for index, settings in enumerate(tried):
            assistant = {"assistant_model": drafter, **settings} if settings else {}
            torch.manual_seed(number)
            with exact_timing():
                began = now()
                text: torch.Tensor = target.generate(ids, attention_mask=torch.ones_like(ids), **options, **assistant)  # type: ignore[operator]
                seconds[number, index] = now() - began
            tokens[number, index] = text.shape[1] - ids.shape[1]
    return _ranked(tried[1:], tokens[1:], seconds[1:])


def count_generations(target: PreTrainedModel, drafter: Drafter, prompts: int) -> int:
    """Return how many texts [`time_settings`] generates from that many prompts at one temperature."""
    return (1 + min(prompts, _MOST_PROMPTS)) * (1 + len(_settings(target, drafter)))


def _ranked(tried: list[dict[str, int | str]], tokens: np.ndarray, seconds: np.ndarray) -> list[Timed]:
    """Rank settings by speedup. `tokens` and `seconds` are `[prompts, 1 + settings]`, the target alone first."""
    if len(tokens) > 1:
        drawn = draw(len(tokens), np.random.default_rng(0))
    else:
        drawn = np.ones((2, 1))  # one prompt cannot be redrawn
    rates = (drawn @ tokens) / (drawn @ seconds)
    speedups = rates[:, 1:] / rates[:, :1]
    ahead = speedups[:, [speedups[0].argmax()]] / speedups
    timed = [Timed(*parts) for parts in zip(tried, map(interval, speedups.T), map(interval, ahead.T))]
    return sorted(timed, key=lambda each: -each.speedup.value)


def _settings(target: PreTrainedModel, drafter: Drafter) -> list[dict[str, int | str]]:
    most = drafter.max_draft_tokens or 6
    counts: list[int | str] = [*sorted({max(1, most // 4), max(1, most // 2), most}), AUTO]
    found: list[dict[str, int | str]] = [{"num_assistant_tokens": count} for count in counts]
    cache = cast(RewindableCache, DynamicCache(config=target.config))
    if verification_of(target_of(target), cache) != "chain":
        found.append({"num_assistant_tokens": most, "tree_budget": AUTO})
    return found


def recommendation(timed: Sequence[Timed]) -> str:
    """Describe the settings to begin with, the reason, and the results of the others.

    Among settings that are faster than the target alone and not distinguishable from the fastest, `"auto"` is
    recommended, or else the shortest to write.
    """
    fastest = timed[0]
    faster = [each for each in timed if each.speedup.low > 1 and each.speedup.value >= _NOISE]
    tried = ", ".join(map(str, timed))
    if not faster and (fastest.speedup.low > 1 or all(each.speedup.high < 1 for each in timed)):
        return f"no drafter: nothing that was tried is clearly faster than the target alone; {tried}"
    if not faster:
        return f"cannot be told: nothing that was tried is certain to be faster than the target alone; {tried}"
    near = [each for each in faster if each.near] or faster
    by_itself = [each for each in near if each.settings == {"num_assistant_tokens": AUTO}]
    best = min(by_itself or near, key=lambda each: len(each.settings))
    merit = "finds its number by itself" if by_itself else "is shorter to write"
    reason = "" if best is fastest else f", within noise of the fastest, and {merit}"
    others = "; ".join(str(each) for each in timed if each is not best)
    return f"{best} the target alone{reason}" + f" (others: {others})" * bool(others)
