"""What a verified token costs: rounds of each width and drafting, timed at one context length and batch size."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
from transformers import (
    CompileConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
)

from ...decoding.stats import SpeculationStats, clock, exact_timing
from ...drafters.base import Drafter
from ...drafters.sampling import DraftSampler
from ...targets.registry import target_of
from ...targets.target import Target
from ...trees.tree import DraftTree

WIDTHS = (1, 2, 4, 8, 16, 32, 64)  # verification positions of a round
_ROUNDS, _TURNS = 4, 3  # of each width in one generation, and generations
_USUAL = 16  # verification positions that are timed also where time is short


@dataclass
class MeasuredCosts:
    """Seconds of rounds, medians.

    Attributes:
        context: Tokens of the text before them.
        texts: Of the batch.
        plain: Of a token of each text without a drafter.
        rounds: Of a round by its width, without drafting.
        drafting: Of drafting, by the number of drafts.
        compiled: The same over a static cache, compiled; `None` if that was not measured.
    """

    context: int
    texts: int
    plain: float
    rounds: dict[int, float]
    drafting: dict[int, float] = field(default_factory=dict)
    compiled: MeasuredCosts | None = None

    def verifying(self, drafts: int) -> float:
        """Return what verifying so many drafts and the anchor takes, in plain tokens."""
        return float(np.interp(1 + drafts, list(self.rounds), list(self.rounds.values()))) / self.plain

    def asking(self, drafts: int) -> float:
        """Return what drafting so many takes, in plain tokens."""
        least, most = min(self.drafting, default=0), max(self.drafting, default=0)
        if most <= least:
            return self.drafting.get(most, 0.0) / self.plain
        slope = (self.drafting[most] - self.drafting[least]) / (most - least)
        return max(self.drafting[least] + slope * (drafts - least), 0.0) / self.plain

    def break_even(self, drafts: int) -> float:
        """Return how many tokens a round has to bring to take no longer than without drafts."""
        return self.verifying(drafts) + self.asking(drafts)

    def speedup(self, drafts: int, acceptance: Sequence[float]) -> float:
        """Return the speed with so many drafts a round, as a multiple of the target's alone, prompts left out.

        Args:
            drafts: At most as many as `acceptance` has.
            acceptance: Of each draft position, the share of rounds that accepted it.
        """
        return (1 + sum(acceptance[:drafts])) / self.break_even(drafts)


class _Widths(Drafter):
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
        self.is_done = False

    def propose(
        self, target: Target, context: Any, ids: torch.Tensor, position_ids: torch.Tensor, count: int,
        sampler: DraftSampler,
    ) -> DraftTree:  # fmt: skip
        return self._draft([count])[0]

    def propose_batch(self, target: Target, requests: Sequence[Any]) -> list[DraftTree]:
        return self._draft([request.num_drafts for request in requests])

    def _draft(self, counts: list[int]) -> list[DraftTree]:
        now = self._now()
        if self._begun:
            self.seconds[self._begun[0]].append(now - self._begun[1])
        if time.monotonic() > self._end:
            self._planned = [width for width in self._planned if width <= self._usual]
        self._begun, is_planned = None, bool(self._planned)
        self.is_done = not is_planned
        width = self._planned.pop(0) if is_planned else 1
        shift = len(self._planned)
        trees = [DraftTree.chain(self._tokens[shift + i : shift + i + width - 1]) for i in range(len(counts))]
        if is_planned and width - 1 <= min(counts):
            self._begun = width, self._now()
        return [tree.first(min(count, len(tree))) for tree, count in zip(trees, counts)]


class _Done(StoppingCriteria):
    """Ends a generation when all widths were timed: what was left would be rounds of one token."""

    def __init__(self, drafter: _Widths) -> None:
        self._drafter = drafter

    def __deepcopy__(self, memo: dict[int, object]) -> _Done:
        return self  # each text of a batch has a copy of its criteria, and all have one drafter

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
        return torch.full(input_ids.shape[:1], self._drafter.is_done, device=input_ids.device)


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

    Args:
        target: The target, bound.
        drafter: Its drafter.
        text: Some of its text, `[1, seq]`, which is repeated up to `context` tokens.
        context: Tokens before the rounds.
        texts: Of the batch.
        compiled: Whether static caches and compiled rounds are timed instead, with the drafter's own number of drafts
            alone, as each width is compiled.
        seconds: After which no further turn is begun; there is one at least.
        report: Called with a line for each step.

    Raises:
        ValueError: If the target has no room for such a text.
    """
    most = getattr(target_of(target).config, "max_position_embeddings", None)
    if context < 1 or texts < 1 or (most and context > most):
        raise ValueError(
            f"A context of {context} tokens in {texts} texts was asked for: expected at least 1 of each, and at most "
            f"the {most} positions of the target."
        )
    room = (most or context + max(WIDTHS)) - context
    widths = [width for width in WIDTHS if 2 * width <= max(room, 2)]
    ids = text.to(target.device).tile(1, -(-context // text.shape[1]))[:, :context].repeat(texts, 1)
    drafts = drafter.num_draft_tokens
    count = drafts if isinstance(drafts, int) else drafter.max_draft_tokens or 6
    measure = _Measurement(target, ids, seconds, report or (lambda line: None))
    if compiled:
        config = CompileConfig()
        config._compile_all_devices = True  # type: ignore[assignment]
        room = context + 16 + 2 * (count + 1) * _ROUNDS
        measure.options |= {"cache_implementation": "static", "compile_config": config, "max_cache_len": room}
    found = measure.turns([1 + count] if compiled else widths, max(_USUAL, 2 * count))
    for asked in [count] if compiled else dict.fromkeys([1, count]):
        found.drafting[asked] = measure.drafting(drafter, asked)
    return found


class _Measurement:
    """Generations from one context, whose rounds are timed."""

    def __init__(
        self, target: PreTrainedModel, ids: torch.Tensor, seconds: float, report: Callable[[str], object]
    ) -> None:
        self._target, self._ids, self._report = target, ids, report
        self._end = time.monotonic() + seconds
        self.options: dict[str, Any] = {}

    def turns(self, widths: Sequence[int], usual: int) -> MeasuredCosts:
        """Time plain decoding and rounds of the widths by turns; where time is short, of those up to `usual`."""
        plain: list[float] = []
        rounds: dict[int, list[float]] = {width: [] for width in widths}
        kind, turns = ("compiled", 1 + _TURNS) if self.options else ("eager", _TURNS)
        for turn in range(turns):
            if plain and time.monotonic() > self._end:
                break
            self._report(f"timing rounds of up to {max(widths)} tokens, {kind}, {turn + 1} of {turns} ...")
            steps = _Steps(self._target.device)
            self._generate(2 + _ROUNDS, logits_processor=LogitsProcessorList([steps]))
            is_counted = turns == _TURNS or turn > 0  # the first of compiled rounds compiles
            count = _ROUNDS if is_counted else 1
            filler = _Widths(self._target, self._ids, [*widths] * count, usual, self._end)
            ends = StoppingCriteriaList([_Done(filler)])
            self._generate(1 + count * len(widths) + max(widths), assistant_model=filler, stopping_criteria=ends)
            if is_counted:
                plain += np.diff(steps.times).tolist()
                for width, seconds in filler.seconds.items():
                    rounds[width] += seconds[1:]
        medians = {width: statistics.median(seconds) for width, seconds in rounds.items() if seconds}
        return MeasuredCosts(self._ids.shape[1], len(self._ids), statistics.median(plain), medians)

    def drafting(self, drafter: Drafter, drafts: int) -> float:
        """Return the seconds of one round's drafting."""
        for _ in range(2 if self.options else 1):  # the first one compiles; eager, the drafter has run before
            self._generate(2 + 2 * _ROUNDS + drafts, assistant_model=drafter, num_assistant_tokens=drafts)
        total = cast(SpeculationStats, drafter.last_stats)
        if total.of_batch:
            return sum(each.draft_seconds for each in total.of_batch) / max(
                (each.rounds for each in total.of_batch), default=1
            )
        return total.draft_seconds / max(total.rounds, 1)

    def _generate(self, new: int, **options: Any) -> None:
        ids = self._ids
        most = getattr(target_of(self._target).config, "max_position_embeddings", None)
        new = min(new, max(most - ids.shape[1], 3)) if most else new
        with exact_timing():
            cast(Any, self._target).generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=new, min_new_tokens=new,
                **self.options, **options,
            )  # fmt: skip
