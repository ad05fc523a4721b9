"""What a verified token costs: rounds of each width and drafting, timed at one context length and batch size."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from transformers import CompileConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel

from ...decoding.stats import clock, exact_timing
from ...drafters.base import Drafter
from ...drafters.sampling import DraftRequest
from ...targets.registry import target_of
from ...targets.target import Target
from ...training.trials import Local
from ...trees.tree import DraftTree
from .diagnosis import MeasuredCosts

WIDTHS = (1, 2, 4, 8, 16, 32, 64)  # verification positions of a round
_ROUNDS, _TURNS = 4, 3  # of each width in one generation, and generations
_USUAL = 16  # verification positions that are timed also where time is short


class _AllTimed(Exception):
    """Ends a generation when all widths were timed: what was left would be rounds of one token."""


class _Filler(Drafter):
    """Drafts chains of given widths, from the prompt's tokens and at no cost, and times the rounds between. After
    `end`, by `time.monotonic()`, widths of more than `usual` are left out."""

    def __init__(
        self, target: PreTrainedModel, ids: torch.Tensor, widths: Sequence[int], usual: int, end: float
    ) -> None:
        self.config, self._usual_drafts = target.config, max(max(widths) - 1, 1)
        self._planned, self._now = list(widths), clock(target.device)
        self._usual, self._end = usual, end
        needed = max(widths) + len(widths) + len(ids)
        self._tokens = ids.flatten().tile(-(-needed // ids.numel()))
        self.seconds: dict[int, list[float]] = {width: [] for width in widths}
        self._begun: tuple[int, float] | None = None

    def draft(self, target: Target, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        now, counts = self._now(), [each.num_drafts for each in requests]
        if self._begun:
            self.seconds[self._begun[0]].append(now - self._begun[1])
        if time.monotonic() > self._end:
            self._planned = [width for width in self._planned if width <= self._usual]
        if not self._planned:
            raise _AllTimed
        width, shift = self._planned.pop(0), len(self._planned)
        trees = [DraftTree.chain(self._tokens[shift + i : shift + i + width - 1]) for i in range(len(counts))]
        # Near the end of the target's positions a round has no room for the width.
        self._begun = (width, self._now()) if width - 1 <= min(counts) else None
        return [tree.first(min(count, len(tree))) for tree, count in zip(trees, counts)]


class _Steps(LogitsProcessor):
    """Takes the time at each step of plain decoding, and changes nothing."""

    def __init__(self, device: torch.device) -> None:
        self._now, self.times = clock(device), list[float]()

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.times.append(self._now())
        return scores


def measure_round_costs(
    target: PreTrainedModel,
    drafter: Drafter,
    text: torch.Tensor,
    *,
    context: int = 512,
    texts: int = 1,
    compiled: bool = False,
    seconds: float = math.inf,
    report: Callable[[str], object] | None = None,
) -> MeasuredCosts:
    """Time plain decoding, rounds of several widths and drafting, in turns.

    A drafter that costs nothing and is hardly ever right fills rounds of the widths, so that what is timed is what a
    generation runs: the target's forward over its own cache, and our loop.
    """
    end = time.monotonic() + seconds
    most = getattr(target_of(target).config, "max_position_embeddings", None)
    room = most - context if most else max(WIDTHS)
    widths = [width for width in WIDTHS if 2 * width <= max(room, 2)]
    ids = text.to(target.device).tile(1, -(-context // text.shape[1]))[:, :context].repeat(texts, 1)
    drafts = drafter.num_draft_tokens
    count = drafts if isinstance(drafts, int) else drafter.max_draft_tokens or 6
    usual, turns, kind, options = max(_USUAL, 2 * count), _TURNS, "eager", dict[str, Any]()
    if compiled:
        config = CompileConfig()
        config._compile_all_devices = True  # type: ignore[assignment]
        length = context + 16 + 2 * (count + 1) * _ROUNDS
        options = {"cache_implementation": "static", "compile_config": config, "max_cache_len": length}
        widths, turns, kind = [1 + count], 1 + _TURNS, "compiled"

    def generate(new: int, assistant: Drafter | None = None, **more: Any) -> Any:
        new = min(new, max(most - context, 3)) if most else new
        method = Local(target, assistant, {"streamer": None, "min_new_tokens": new, **options, **more})
        return method.generate(ids, 0.0, new).stats

    plain: list[float] = []
    rounds: dict[int, list[float]] = {width: [] for width in widths}
    with exact_timing():
        for turn in range(turns):
            if plain and time.monotonic() > end:
                break
            if report:
                report(f"timing rounds of up to {max(widths)} tokens, {kind}, {turn + 1} of {turns} ...")
            is_counted = not compiled or turn > 0  # the first of compiled rounds compiles
            steps, repeats = _Steps(target.device), _ROUNDS if is_counted else 1
            generate(2 + _ROUNDS, logits_processor=LogitsProcessorList([steps]))
            filler = _Filler(target, ids, [*widths] * repeats, usual, end)
            with suppress(_AllTimed):
                generate(1 + repeats * len(widths) + max(widths), filler)
            if is_counted:
                plain += np.diff(steps.times).tolist()
                for width, each in filler.seconds.items():
                    rounds[width] += each[1:]
        medians = {width: statistics.median(each) for width, each in rounds.items() if each}
        found = MeasuredCosts(context, texts, statistics.median(plain), medians)
        for asked in [count] if compiled else dict.fromkeys([1, count]):
            for _ in range(2 if compiled else 1):  # the first one compiles; eager, the drafter has run before
                total = generate(2 + 2 * _ROUNDS + asked, drafter, num_assistant_tokens=asked)
            drafting = sum(row.draft_seconds for row in total.rows)
            found.drafting[asked] = drafting / max(1, *(row.rounds for row in total.rows))
    return found
