"""The loop of every measurement: methods generate from the same prompts, in turns."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import torch
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from ..decoding.request import check_tree_budget
from ..decoding.stats import SpeculationStats, clock
from .runs.progress import progress_bar


@dataclass(frozen=True)
class Record:
    """What one generation wrote and took."""

    output: Any  # the new tokens; of a server the text without reasoning
    new_tokens: int
    prompt_tokens: int | None  # `None` if a server does not say
    seconds: float  # until the end
    first_seconds: float  # until the first token, or a server's first piece of text
    stats: SpeculationStats | None = None  # of a drafter here
    counted: Any = None  # a server's own counts of its drafts, if it gives them with an answer


class Method(Protocol):
    """A way to generate: [`Local`], or a server (`benchmark.server.Server`)."""

    def generate(self, prompt: Any, temperature: float, max_new_tokens: int) -> Record: ...


@dataclass(frozen=True)
class Local:
    """Generation in this process, by a target alone or with a drafter, for which the target is bound."""

    target: PreTrainedModel
    drafter: Any = None
    options: Mapping[str, Any] = field(default_factory=dict)  # further arguments of `generate`
    name: str = ""  # in a report: "HyperDFlash (6)"
    is_adaptive: bool = False  # whether the drafter learns while it serves; no other method may use it then

    def __post_init__(self) -> None:
        if self.options.get("num_assistant_tokens") is not None:
            self.drafter.check_num_draft_tokens(self.options["num_assistant_tokens"])
        check_tree_budget(self.options.get("tree_budget"))

    def generate(self, prompt: torch.Tensor, temperature: float, max_new_tokens: int) -> Record:
        """Generate from a prompt, `[1, seq]`, greedily at temperature 0, else from the whole distribution."""
        ids, streamer = prompt.to(self.target.device), _Times()
        options: dict[str, Any] = {"do_sample": temperature > 0, "streamer": streamer}
        if temperature > 0:
            options |= {"temperature": temperature, "top_k": 0, "top_p": 1.0}
        if self.drafter is not None:
            options["assistant_model"] = self.drafter
        options |= {**self.options, "max_new_tokens": max_new_tokens}
        now = clock(ids.device)
        began = now()
        output = cast(Any, self.target).generate(ids, attention_mask=torch.ones_like(ids), **options)
        new = getattr(output, "sequences", output)[0, ids.shape[1] :].tolist()  # which waits for the last token
        ended = now()
        # The streamer gets the prompt first. A caller's own options may have another one.
        first = streamer.times[1] if len(streamer.times) > 1 else ended
        stats = None if self.drafter is None else self.drafter.last_stats
        return Record(new, len(new), ids.shape[1], ended - began, first - began, stats)


class _Times(BaseStreamer):
    """Takes the times of the prompt and of each new token."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def run(
    methods: Sequence[Method], prompts: Iterable[Any], max_new_tokens: int, *, temperature: float = 0.0,
    seed: int | None = None, first: int = 0, fewest: int = 1, seconds: float = math.inf, desc: str = "",
    disable_tqdm: bool | None = True, announce: Callable[[Any], object] | None = None,
) -> Iterator[tuple[int, int, Record]]:  # fmt: skip
    """Generate from every prompt with every method, and yield number of the prompt, number of the method, and record.

    Methods take turns prompt by prompt, so that drift of the machine affects all alike, and at being the first, which
    begins with the method `first`. Every method starts a prompt from the same seed, and the next prompt has the next
    one; without a `seed` nothing is set. After the `fewest` prompts none begins that would end after the `seconds`.
    `announce` is called with each method before it generates.
    """
    began = time.monotonic()
    progress = progress_bar(prompts, desc=desc, unit="prompt", leave=False, disable=disable_tqdm)
    for number, prompt in enumerate(progress):
        spent = time.monotonic() - began
        if number >= fewest and spent * (1 + 1 / number) > seconds:
            break
        turn = (first + number) % len(methods)
        for index in [*range(turn, len(methods)), *range(turn)]:
            if announce is not None:
                announce(methods[index])
            if seed is not None:
                torch.manual_seed(seed + number)
            yield number, index, methods[index].generate(prompt, temperature, max_new_tokens)
