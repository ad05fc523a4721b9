"""Which settings of `generate` to begin with, by timing some on a few prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from tqdm.auto import tqdm
from transformers import DynamicCache, PreTrainedModel

from ..runtime.request import AUTO
from ..runtime.rounds import verification_of
from ..runtime.stats import clock, exact_timing
from ..runtime.targets import family_of

_MOST_PROMPTS = 8
_SAME = 1.05  # times as fast: what a few prompts cannot tell apart


class Timed(NamedTuple):
    """Some settings, as a call says them, and the speed with them as a multiple of the target's alone."""

    settings: dict[str, Any]
    speedup: float

    def __str__(self) -> str:
        told = ", ".join(f"{name}={value!r}" for name, value in self.settings.items())
        return f"`{told}` {self.speedup:.2f}x"


def time_settings(
    target: PreTrainedModel,
    drafter: Any,
    prompts: Sequence[torch.Tensor],
    *,
    temperature: float = 0.0,
    max_new_tokens: int = 64,
    disable_tqdm: bool | None = True,
) -> list[Timed]:
    """Time plain generation and some settings, in turns on the same prompts, the fastest first.

    Args:
        target: The target, bound.
        drafter: Its drafter.
        prompts: Token ids `[1, seq]`, of which 8 are used.
        temperature: 0 is greedy; others sample from the whole distribution.
        max_new_tokens: Most new tokens per prompt.
        disable_tqdm: `False` for a progress bar on stderr, `None` for one where that is a terminal.
    """
    tried: list[dict[str, Any]] = [{}, *_settings(target, drafter)]
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": temperature > 0}
    if temperature:
        options |= {"temperature": temperature, "top_k": 0, "top_p": 1.0}
    seconds, tokens, now = [0.0] * len(tried), [0] * len(tried), clock(target.device)
    some = [prompts[0], *prompts[:_MOST_PROMPTS]]  # the first one twice: once to warm up
    for number, prompt in enumerate(tqdm(some, desc="settings", unit="prompt", leave=False, disable=disable_tqdm)):
        ids = prompt.to(target.device)
        for place, settings in enumerate(tried):
            assistant = {"assistant_model": drafter, **settings} if settings else {}
            torch.manual_seed(number)
            with exact_timing():
                began = now()
                text: Any = target.generate(ids, attention_mask=torch.ones_like(ids), **options, **assistant)  # type: ignore[operator]
                spent = now() - began
            if number:
                seconds[place] += spent
                tokens[place] += text.shape[1] - ids.shape[1]
    rates = [count / spent for count, spent in zip(tokens, seconds)]
    timed = [Timed(settings, rate / rates[0]) for settings, rate in zip(tried[1:], rates[1:])]
    return sorted(timed, key=lambda each: -each.speedup)


def _settings(target: PreTrainedModel, drafter: Any) -> list[dict[str, Any]]:
    most = drafter.max_draft_tokens or 6
    counts = sorted({max(1, most // 4), max(1, most // 2), most})
    found: list[dict[str, Any]] = [{"num_assistant_tokens": count} for count in [*counts, AUTO]]
    if verification_of(family_of(target), DynamicCache(config=target.config)) != "chain":
        found.append({"num_assistant_tokens": most, "tree_budget": AUTO})
    return found


def recommendation(timed: Sequence[Timed]) -> str:
    """What to begin with, and how the rest did: of those that are about as fast as the fastest, that which goes by
    itself, or else the shortest to write."""
    fastest = timed[0]
    if fastest.speedup < _SAME:
        return f"no drafter: of what was tried the fastest was {fastest} the target alone"
    near = [each for each in timed if each.speedup * _SAME >= fastest.speedup]
    by_itself = [each for each in near if each.settings == {"num_assistant_tokens": AUTO}]
    best = min(by_itself or near, key=lambda each: len(each.settings))
    others = "; ".join(str(each) for each in timed if each is not best)
    return f"{best} the target alone ({others})"
