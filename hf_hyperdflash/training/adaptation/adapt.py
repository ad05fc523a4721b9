"""Learning while serving: every verification tells what the target would have written, and a drafter can learn it.

A copy of the drafter in float32 learns between requests, in the thread whose request has just ended; what it learned
is then written into the drafter that serves. Drafts are verified against what they were drawn from, so the text stays
the target's whatever happens to the weights meanwhile.
"""

from __future__ import annotations

import copy
import logging
import math
import threading
import time
from dataclasses import dataclass, fields
from types import TracebackType
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from ...decoding.stats import SpeculationStats
from ...drafters.blocks.drafter import BlockDrafter
from ...drafters.parts.heads import HEADS, HeadOutput
from ...drafters.unrolled.drafter import UnrolledDrafter
from ...targets.registry import target_of
from ..arguments import RECIPES
from ..losses.loss import IGNORE_INDEX, DrafterLoss
from ..losses.objective import Batch, collate, read_layers
from ..losses.unrolled import objective_of
from .bandit import Bandit
from .lessons import Lesson, Memory

logger = logging.getLogger(__name__)

POLICIES = ("bandit", "always", "never")
_HEADS = (*(head.key for head in HEADS.values()), "confidence_head", "rank_head", "lm_head")
_WARMUP = 4  # steps until the learning rate is reached
_JUDGED = 2  # anchors of a row to judge by, for each one to learn from
_SURE = 0.25  # temperature at which a distribution is nearly its most probable token


@dataclass
class AdaptationConfig:
    """How a drafter learns while it serves.

    Args:
        policy: `"bandit"` updates where that is expected to save more time than it takes, `"always"` whenever there is
            something new, `"never"` only keeps the log.
        arms: What an update may change: the drafter's sequential, confidence and rank heads, or all of it.
        recipe: What the loss is made of, one of training's.
        learning_rate: Of AdamW, reached in 4 steps.
        every: Requests from one decision to the next.
        steps: Optimizer steps of an update.
        rows: Requests that a step learns from, half of them new ones.
        num_anchors: Most blocks per row to learn from, and half of those to judge by.
        horizon: Requests that are expected to profit from an update.
        most_bytes: Most memory for text to learn from, residual included.
        seed: Of what is drawn: rows and anchors.

    Raises:
        ValueError: If a field is out of range.
    """

    policy: str = "bandit"
    arms: tuple[str, ...] = ("heads", "all")
    recipe: str = "ours"
    learning_rate: float = 5e-4
    every: int = 8
    steps: int = 8
    rows: int = 4
    num_anchors: int = 12
    horizon: int = 256
    most_bytes: int = 256 * 2**20
    seed: int = 0

    def __post_init__(self) -> None:
        self.arms = (self.arms,) if isinstance(self.arms, str) else tuple(self.arms)
        for name, allowed in (("policy", POLICIES), ("recipe", tuple(RECIPES))):
            if getattr(self, name) not in allowed:
                raise ValueError(f"`{name}` is {getattr(self, name)!r}, expected one of {', '.join(allowed)}.")
        if not self.arms or not set(self.arms) <= {"heads", "all"}:
            raise ValueError(f"`arms` is {self.arms!r}, expected 'heads', 'all' or both.")
        for name in ("every", "steps", "rows", "num_anchors", "horizon", "most_bytes"):
            if type(getattr(self, name)) is not int or getattr(self, name) < 1:
                raise ValueError(f"`{name}` is {getattr(self, name)!r}, expected a whole number of at least 1.")
        if type(self.seed) is not int:
            raise ValueError(f"`seed` is {self.seed!r}, expected a whole number.")
        rate = self.learning_rate
        if not isinstance(rate, (int, float)) or not 0 < rate < math.inf:
            raise ValueError(f"`learning_rate` is {rate!r}, expected a number of more than 0.")
        for name, value in RECIPES[self.recipe].items():
            setattr(self, name, value)  # as the objective reads them
        self.kl_temperature, self.kl_teacher, self.loss_chunk_size = 1.0, "hc_head", 256


@dataclass
class Decision:
    """What was decided after a request.

    Attributes:
        request: Its number, from 1.
        seconds: Since the adaptation began.
        new_tokens: That the request wrote.
        tau: Its tokens per verification round.
        serving_seconds: That it took after the prompt.
        arm: What was updated; `None` where nothing was.
        cost: Seconds of the update, 0.0 without one.
        gain: By how much it raised tokens per round on text it did not see, relatively, as far as that was measured.
    """

    request: int
    seconds: float
    new_tokens: int
    tau: float
    serving_seconds: float
    arm: str | None = None
    cost: float = 0.0
    gain: float | None = None


class Adaptation:
    """A drafter learns while it serves one target; as a context manager, inside the `with`.

    Args:
        drafter: Changed; [`reset`] undoes that.
        target: Its target, only read.
        config: How.

    Raises:
        ValueError: If the drafter cannot be trained for the target, or learns already.

    Attributes:
        log: A [`Decision`] for every request.
        bandit: What is known of the arms.
    """

    def __init__(self, drafter: Any, target: PreTrainedModel, config: AdaptationConfig) -> None:
        if not isinstance(drafter, (BlockDrafter, UnrolledDrafter)):
            raise ValueError(
                f"A {type(drafter).__name__} cannot learn while it serves, expected a drafter that the trainer takes: "
                "load one with `load_drafter`, not as remote code."
            )
        seen = target_of(target)
        drafter.check_trainable(seen)
        if drafter.learner is not None:
            raise ValueError("The drafter learns already: `stop()` its adaptation first.")
        self.drafter, self.target, self.config, self.log = drafter, target, config, list[Decision]()
        self.objective = objective_of(drafter, seen, config)
        self.layer_ids = read_layers(drafter.config)
        self.memory = Memory(config.most_bytes, config.seed)
        self._original = {name: value.detach().clone() for name, value in drafter.state_dict().items()}
        self._pupil: nn.Module = copy.deepcopy(drafter).float().requires_grad_(False)
        heads = [name for name, _ in self._pupil.named_parameters() if name.startswith(_HEADS)]
        everything = [name for name, _ in self._pupil.named_parameters()]
        self._names = {"heads": heads, "all": everything}
        arms = [arm for arm in config.arms if self._names[arm]]
        if not arms:
            raise ValueError("`arms` is ('heads',), but the drafter has no heads: let it be ('all',).")
        self.bandit = Bandit(arms, config.horizon)
        self._optimizer = torch.optim.AdamW(self._pupil.parameters(), config.learning_rate, weight_decay=0.0)
        self._began, self._new, self._steps = time.perf_counter(), 0, 0
        self._hearing, self._updating = threading.Lock(), threading.Lock()
        drafter.learner = self

    def __repr__(self) -> str:
        updates = [decision for decision in self.log if decision.arm is not None]
        kept = sum((decision.gain or 0.0) > 0 for decision in updates)
        ended = "" if self.drafter.learner is self else ", stopped"
        return (
            f"<Adaptation of a {type(self.drafter).__name__}: {len(self.log)} requests, {len(updates)} updates, "
            f"{kept} of them kept{ended}>"
        )

    def __enter__(self) -> Adaptation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Learn no more; the drafter keeps what it has learned."""
        if self.drafter.learner is self:
            self.drafter.learner = None

    def reset(self) -> None:
        """Give the drafter the weights that it came with, and forget what was learned."""
        with self._updating, self._hearing:
            self.drafter.load_state_dict(self._original)
            self._pupil.load_state_dict({name: value.float() for name, value in self._original.items()})
            self._optimizer.state.clear()
            self.memory = Memory(self.config.most_bytes, self.config.seed)
            self.bandit, self._new, self._steps = Bandit(self.bandit.names, self.config.horizon), 0, 0

    # What the loop calls

    def begin(self, target: PreTrainedModel, is_drawn: bool) -> Lesson | None:
        """A lesson of the generation that begins, drawn at random or greedy; `None` if it is another target's."""
        if target is not self.target:
            return None
        return Lesson(self.layer_ids, max(1, self.config.most_bytes // 4), is_drawn)

    def end(self, lesson: Lesson, stats: SpeculationStats) -> None:
        """The generation is over: learn from it, or not. What fails here ends the adaptation, not the request."""
        try:
            # The caller may have gradients, or inference mode, switched on or off.
            with torch.inference_mode(False):
                self._end(lesson, stats)
        except (RuntimeError, ValueError) as error:
            logger.warning("Learning while serving stops: %s", error)
            self.stop()

    def _end(self, lesson: Lesson, stats: SpeculationStats) -> None:
        row = lesson.row() if stats.rounds else None
        with self._hearing:
            decision = Decision(
                len(self.log) + 1, time.perf_counter() - self._began, stats.tokens, stats.tau, stats.loop_seconds
            )
            self.log.append(decision)
            if row is None:
                return
            if self.bandit.serve(stats.tau, stats.loop_seconds):  # what was served before is another kind of text
                self.memory, self._new = Memory(self.config.most_bytes, self.config.seed), 0
            self.memory.add(row)
            self._new += 1
            is_due = self._new >= self.config.every and len(self.memory) > 2
        if is_due and self.config.policy != "never" and self._updating.acquire(blocking=False):
            try:
                self._decide(decision)
            finally:
                self._updating.release()

    def _decide(self, decision: Decision) -> None:
        with self._hearing:
            new, self._new = self._new, 0
            arm = self.bandit.names[-1] if self.config.policy == "always" else self.bandit.choose()
            if arm is None:
                return
            held_out = max(1, min(4, new // 2))
            batches = [self.memory.earlier(self.config.rows, new, held_out) for _ in range(self.config.steps)]
            judged = self.memory.newest(held_out)
        began = time.perf_counter()
        gain = self._update(self._names[arm], batches, judged)
        decision.arm, decision.cost, decision.gain = arm, time.perf_counter() - began, gain
        with self._hearing:
            self.bandit.update(arm, decision.cost, gain)

    # An update

    def _update(self, names: list[str], batches: list[Batch], judged: list[Batch]) -> float:
        """Some steps, and by how much they raise the tokens that a round of `judged` is expected to bring; what lowers
        them is taken back."""
        parameters = dict(self._pupil.named_parameters())
        before = {name: parameters[name].detach().clone() for name in names}
        expected = self._expected(judged)
        for name in names:
            parameters[name].requires_grad_(True)
        try:
            for batch in batches:
                self._step(batch)
        finally:
            self._pupil.requires_grad_(False)
        gain = self._expected(judged) / expected - 1
        is_sound = math.isfinite(gain)
        own = dict(self.drafter.named_parameters())
        with torch.no_grad():
            for name in names:
                if not is_sound or gain <= 0:
                    parameters[name].copy_(before[name])
                else:
                    own[name].copy_(parameters[name])
        return gain if is_sound else -1.0

    def _step(self, batch: Batch) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = self.config.learning_rate * min(1.0, (self._steps + 1) / _WARMUP)
        self.objective.lay(batch, self._steps)
        with torch.enable_grad():
            self._loss(self._drafted(batch), batch).loss.backward()
        learning = [each for each in self._pupil.parameters() if each.grad is not None]
        nn.utils.clip_grad_norm_(learning, 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._steps += 1

    def _drafted(self, batch: Batch) -> HeadOutput:
        anchors, steps, residual = batch["anchors"], batch["steps"], batch["residual"]
        with torch.autocast(residual.device.type, enabled=False):
            return self.objective.drafted(self._pupil, batch, anchors, residual, steps)

    def _loss(self, drafted: HeadOutput, batch: Batch, needs_acceptance: bool = False) -> DrafterLoss:
        rest, table = (batch["anchors"], batch["labels"], batch["residual"], batch["steps"]), self._table()
        with torch.autocast(batch["residual"].device.type, enabled=False):
            return self.objective.loss(drafted, *rest, table, needs_acceptance=needs_acceptance)

    def _table(self) -> torch.Tensor | None:
        return cast(Any, self._pupil).vocabulary_table

    @torch.no_grad()
    def _expected(self, rows: list[Batch]) -> float:
        """Tokens that a round at some anchors of rows is expected to bring by speculative sampling; of greedy text the
        mean of that and of what greedy drafts bring, of which few anchors tell little."""
        tokens = []
        for is_drawn in sorted({bool(row["is_drawn"]) for row in rows}):
            batch = collate([row for row in rows if bool(row["is_drawn"]) is is_drawn])
            self.objective.lay(batch, 0, _JUDGED * self.config.num_anchors)
            drafted = self._drafted(batch)
            rates = [self._loss(drafted, batch, needs_acceptance=True).acceptance.float()]
            if not is_drawn:
                rates.append(self._greedy_rates(drafted, batch["labels"].flatten(0, 1)))
            tokens.append(1.0 + torch.stack(rates).cumprod(-1).sum(-1).mean(0))
        return float(torch.cat(tokens).mean())

    def _greedy_rates(self, drafted: HeadOutput, labels: torch.Tensor) -> torch.Tensor:
        """How surely each draft is the text's token: nearly 0 or 1, but without a step, so that a small update shows.
        `[blocks, drafts]`."""
        states, vectors = (None if part is None else part.flatten(0, 1) for part in drafted[:2])
        rates = torch.zeros_like(labels, dtype=torch.float32)
        for at in (labels != IGNORE_INDEX).nonzero().split(self.config.loss_chunk_size):
            place = at.unbind(1)
            of_head = None if vectors is None else vectors[place]
            logits = self.objective.scores(cast(torch.Tensor, states)[place], of_head, self._table())
            tokens = self.objective.places(labels[place]).unsqueeze(1).to(logits.device)
            likely = (logits.float() / _SURE).log_softmax(-1).gather(1, tokens.clamp(min=0)).exp() * (tokens >= 0)
            rates[place] = likely.squeeze(1).to(rates)
        return rates


def adapt(drafter: Any, target: PreTrainedModel, **options: Any) -> Adaptation:
    """See [`~drafters.base.Drafter.adapt`]."""
    known = [each.name for each in fields(AdaptationConfig)]
    if unknown := sorted(options.keys() - set(known)):
        raise ValueError(f"`{unknown[0]}` is no option of `adapt`: expected some of {', '.join(known)}.")
    with torch.inference_mode(False):  # what is made in it cannot learn
        return Adaptation(drafter, target, AdaptationConfig(**options))
