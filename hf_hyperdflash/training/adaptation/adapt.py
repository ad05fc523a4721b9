"""Learning while serving: every verification shows what the target writes, and a drafter can learn from it.

A float32 copy of the drafter learns between requests, in the thread whose request has just ended. A few requests are
quickly learned by heart. So the weights that serve go only a share of the way to the learned ones, and only if they
would have drafted better for the requests that came afterwards. Verification uses the distributions that drafts were
drawn from, so the text stays the target's even if the weights change meanwhile.
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
from ...drafters.base import Observer
from ...drafters.blocks.drafter import BlockDrafter
from ...drafters.parts.heads import HEADS, HeadOutput
from ...drafters.unrolled.drafter import UnrolledDrafter
from ...targets.registry import target_of
from ..arguments import RECIPES
from ..data.blocks import expected_rounds, sample_anchors
from ..losses.loss import IGNORE_INDEX, DrafterLoss
from ..losses.objective import Batch, LossSettings, collate, training_layer_ids
from ..losses.unrolled import make_objective
from .bandit import Bandit
from .samples import ReplayBuffer, Sample

logger = logging.getLogger(__name__)

POLICIES = ("bandit", "always", "never")
_SHARE_GROWTH, _SHARE_FALL, _LEAST_SHARE = 1.25, 0.5, 0.1  # after an update that helps, and one that does not
_HEADS = (*(head.key for head in HEADS.values()), "confidence_head", "rank_head", "lm_head")
_WARMUP = 4  # steps until the learning rate is reached
_JUDGED = 48  # tokens of a row that an update is judged by


@dataclass
class AdaptationConfig:
    """How a drafter learns while it serves.

    Args:
        policy: `"bandit"` updates where that is expected to save more time than it takes, `"always"` whenever there is
            something new, `"never"` only writes the log.
        arms: What an update may change: `"heads"`, the drafter's sequential, confidence and rank heads, or `"all"`.
        recipe: The loss, one of training's recipes.
        learning_rate: AdamW's, reached in 4 steps.
        share: How far the weights that serve go to the learned ones, at first. It grows by a quarter with an update
            that helps and halves with one that does not.
        every: Requests between two decisions.
        steps: Optimizer steps of an update; fewer if a trial may not take that long.
        rows: Requests that a step learns from, half of them new ones.
        num_anchors: Most blocks per row to learn from.
        horizon: Requests that are expected to profit from an update. Updates that are not known to pay take at most
            half a percent of the serving time, that of so many requests to come included.
        most_bytes: Most memory for text to learn from, residual included.
        seed: Seed of the sampled rows and anchors.

    Raises:
        ValueError: If a field is out of range.
    """

    policy: str = "bandit"
    arms: tuple[str, ...] = ("heads", "all")
    recipe: str = "ours"
    learning_rate: float = 3e-4
    share: float = 0.3
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
        if not isinstance(self.share, (int, float)) or not 0 < self.share <= 1:
            raise ValueError(f"`share` is {self.share!r}, expected a number of more than 0 and at most 1.")
        for name, value in RECIPES[self.recipe].items():
            setattr(self, name, value)  # as the objective reads them
        self.kl_temperature, self.kl_teacher, self.loss_chunk_size = 1.0, "hc_head", 256


@dataclass
class Decision:
    """What was decided after a request.

    Attributes:
        request: Its number, from 1.
        seconds: Since the adaptation began.
        new_tokens: Tokens that the request wrote.
        tau: Its tokens per verification round.
        serving_seconds: Its seconds after the prompt.
        gain: The relative increase of tokens per round by the update before, as far as this and the other requests
            since then prove it; `None` without one. Where it is more than 0, the update serves from now on.
        arm: The arm that was updated; `None` without an update.
        cost: Seconds of judging and updating.
    """

    request: int
    seconds: float
    new_tokens: int
    tau: float
    serving_seconds: float
    gain: float | None = None
    arm: str | None = None
    cost: float = 0.0


class _Recording(Observer):
    """Records one sequence for an adaptation, which learns from it once it has ended."""

    def __init__(self, adaptation: Adaptation, sample: Sample) -> None:
        self.adaptation, self.sample, self.target_layer_ids = adaptation, sample, sample.layer_ids

    def add_tokens(
        self, residual: torch.Tensor, position_ids: torch.Tensor, next_ids: torch.Tensor, is_written: bool
    ) -> None:
        self.sample.add(residual, position_ids, next_ids, is_written)

    def end(self, stats: SpeculationStats) -> None:
        self.adaptation.learn_from(self.sample, stats)


class Adaptation(Observer):
    """Lets a drafter learn while it serves one target; as a context manager, inside the `with`.

    Args:
        drafter: The drafter, whose weights change; [`reset`] restores them.
        target: Its target, only read.
        config: The settings.

    Raises:
        ValueError: If the drafter cannot be trained for the target, or learns already.

    Attributes:
        log: A [`Decision`] for every request.
        bandit: The measured cost and gain of each arm.
    """

    def __init__(self, drafter: Any, target: PreTrainedModel, config: AdaptationConfig) -> None:
        if not isinstance(drafter, (BlockDrafter, UnrolledDrafter)):
            raise ValueError(
                f"A {type(drafter).__name__} cannot learn while it serves, expected a drafter that the trainer takes: "
                "load one with `load_drafter`, not as remote code."
            )
        seen = target_of(target)
        drafter.check_trainable(seen)
        if drafter.observer is not None:
            raise ValueError("The drafter learns already: `stop()` its adaptation first.")
        self.drafter, self.target, self.config, self.log = drafter, target, config, list[Decision]()
        self.objective = make_objective(drafter, seen, cast(LossSettings, config))
        self.layer_ids = training_layer_ids(drafter.config)
        self.replay = ReplayBuffer(config.most_bytes, config.seed)
        self._original = {name: value.detach().clone() for name, value in drafter.state_dict().items()}
        self._pending: str | None
        self._training_copy: nn.Module = copy.deepcopy(drafter).float().requires_grad_(False)
        heads = [name for name, _ in self._training_copy.named_parameters() if name.startswith(_HEADS)]
        everything = [name for name, _ in self._training_copy.named_parameters()]
        self._names = {"heads": heads, "all": everything}
        arms = [arm for arm in config.arms if self._names[arm]]
        if not arms:
            raise ValueError("`arms` is ('heads',), but the drafter has no heads: let it be ('all',).")
        self.bandit = Bandit(arms, config.horizon)
        self._optimizer = torch.optim.AdamW(self._training_copy.parameters(), config.learning_rate, weight_decay=0.0)
        self._start, self._new_rows, self._steps = time.perf_counter(), 0, 0
        self._share, self._pending = config.share, None  # the arm of an update that was not judged yet
        self._state_lock, self._update_lock = threading.Lock(), threading.Lock()
        drafter.observer = self

    def __repr__(self) -> str:
        updates = [decision for decision in self.log if decision.arm is not None]
        kept = sum((decision.gain or 0.0) > 0 for decision in self.log)
        ended = "" if self.drafter.observer is self else ", stopped"
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
        """End the learning. The drafter keeps its present weights."""
        if self.drafter.observer is self:
            self.drafter.observer = None

    def reset(self) -> None:
        """Restore the drafter's first weights, and forget everything that was learned."""
        with self._update_lock, self._state_lock:
            self.drafter.load_state_dict(self._original)
            self._training_copy.load_state_dict({name: value.float() for name, value in self._original.items()})
            self._optimizer.state.clear()
            self.replay = ReplayBuffer(self.config.most_bytes, self.config.seed)
            self.bandit, self._new_rows, self._steps = Bandit(self.bandit.names, self.config.horizon), 0, 0
            self._share, self._pending = self.config.share, None

    # Called by the generation loop

    def begin(self, target: PreTrainedModel, do_sample: bool) -> _Recording | None:
        """Return a recording of the sequence that begins, sampled or greedy; `None` for another target."""
        if target is not self.target:
            return None
        return _Recording(self, Sample(self.layer_ids, max(1, self.config.most_bytes // 4), do_sample))

    def learn_from(self, sample: Sample, stats: SpeculationStats) -> None:
        """Learn from a generation that has ended, if it is time to. An error here ends the adaptation, not the
        request."""
        try:
            # The caller may have gradients, or inference mode, switched on or off.
            with torch.inference_mode(False):
                self._add(sample, stats)
        except (RuntimeError, ValueError) as error:
            logger.warning("Learning while serving stops: %s", error)
            self.stop()

    def _add(self, sample: Sample, stats: SpeculationStats) -> None:
        row = sample.row() if stats.rounds else None
        with self._state_lock:
            decision = Decision(
                len(self.log) + 1, time.perf_counter() - self._start, stats.tokens, stats.tau, stats.loop_seconds
            )
            self.log.append(decision)
            if row is None:
                return
            self.bandit.record_request(stats.tau, stats.loop_seconds)
            self.replay.add({**row, "drafts": torch.tensor(stats.draft_positions)})
            self._new_rows += 1
            is_due = self._new_rows >= self.config.every
        if is_due and self.config.policy != "never" and self._update_lock.acquire(blocking=False):
            try:
                self._decide(decision)
            finally:
                self._update_lock.release()

    def _decide(self, decision: Decision) -> None:
        """Judge the update before, then make the next one if that is expected to pay."""
        began = time.perf_counter()
        with self._state_lock:
            new, self._new_rows = self._new_rows, 0
            rows = self.replay.newest(new) + self.replay.held_out
        if self._pending is not None:
            decision.gain = self._judge(rows)
        with self._state_lock:
            if decision.gain is not None and self._pending is not None:
                self.bandit.record_gain(self._pending, decision.gain)
            arm = self.bandit.names[-1] if self.config.policy == "always" else self.bandit.choose()
            self._pending, seconds = arm, math.inf
            if arm is not None:
                if self.config.policy == "bandit" and not self.bandit.pays(arm):
                    seconds = self.bandit.trial_seconds_left()
                new = self.replay.hold_one_out(new)
                batches = [self.replay.draw_batch(self.config.rows, new) for _ in range(self.config.steps)]
        if arm is not None:
            self._update(self._names[arm], batches, seconds)
        decision.arm, decision.cost = arm, time.perf_counter() - began
        with self._state_lock:
            self.bandit.record_cost(arm, decision.cost)

    # An update

    def _update(self, names: list[str], batches: list[Batch], seconds: float) -> None:
        """Take some steps, the last one after `seconds`."""
        parameters, began = dict(self._training_copy.named_parameters()), time.perf_counter()
        for name in names:
            parameters[name].requires_grad_(True)
        try:
            for batch in batches:
                self._step(batch)
                if time.perf_counter() - began > seconds:
                    break
        finally:
            self._training_copy.requires_grad_(False)

    @torch.no_grad()
    def _judge(self, rows: list[Batch]) -> float:
        """Compare the weights that serve with others, a share nearer to the learned ones, on text that neither has
        seen. The better ones serve. Where the others are worse, what was learned is forgotten; where nothing is
        proven, learning goes on. Return the relative increase of tau, less what may be chance."""
        copied, served = dict(self._training_copy.named_parameters()), dict(self.drafter.named_parameters())
        learned = {name: value.clone() for name, value in copied.items()}
        candidate = {
            name: served[name].float().lerp(value, self._share).to(served[name]) for name, value in learned.items()
        }
        taus = []
        for weights in (served, candidate):
            for name, value in weights.items():
                copied[name].copy_(value)
            taus.append(self._expected_tau(rows))
        gain = _proven_increase(*taus)
        is_harm = not gain >= 0  # also of NaN
        if gain > 0:
            for name, value in candidate.items():
                served[name].copy_(value)
            self._share = min(1.0, self._share * _SHARE_GROWTH)
        elif is_harm:
            self._share = max(_LEAST_SHARE, self._share * _SHARE_FALL)
        for name, value in (served if is_harm else learned).items():  # where nothing is proven, it learns on
            copied[name].copy_(value)
        return gain if math.isfinite(gain) else -1.0

    def _step(self, batch: Batch) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = self.config.learning_rate * min(1.0, (self._steps + 1) / _WARMUP)
        self.objective.add_anchors(batch, self._steps)
        with torch.enable_grad():
            self._loss(self._drafted(batch), batch).loss.backward()
        trained = [each for each in self._training_copy.parameters() if each.grad is not None]
        nn.utils.clip_grad_norm_(trained, 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._steps += 1

    def _drafted(self, batch: Batch) -> HeadOutput:
        anchors, steps, residual = batch["anchors"], batch["steps"], batch["residual"]
        with torch.autocast(residual.device.type, enabled=False):
            return self.objective.run_drafter(self._training_copy, batch, anchors, residual, steps)

    def _loss(self, drafted: HeadOutput, batch: Batch, needs_acceptance: bool = False) -> DrafterLoss:
        arguments, table = (batch["anchors"], batch["labels"], batch["residual"], batch["steps"]), self._table()
        with torch.autocast(batch["residual"].device.type, enabled=False):
            return self.objective.loss(drafted, *arguments, table, needs_acceptance=needs_acceptance)

    def _table(self) -> torch.Tensor | None:
        return cast(Any, self._training_copy).vocabulary_table

    @torch.no_grad()
    def _expected_tau(self, rows: list[Batch]) -> torch.Tensor:
        """Return the accepted length that rounds over the first part of each row have, `[rows]`: by speculative
        sampling for sampled text, by greedy drafts for greedy text, as many as were asked for. A mean over anchors
        would favour easy stretches, where rounds are long and few."""
        tau, steps = torch.ones(len(rows)), self.objective.steps()
        for is_sampled in (False, True):
            at = [i for i, row in enumerate(rows) if bool(row["is_sampled"]) is is_sampled]
            for chunk in (at[i : i + self.config.rows] for i in range(0, len(at), self.config.rows)):
                batch = collate([rows[i] for i in chunk])
                anchors = sample_anchors(self.objective.candidates(batch))[:, :_JUDGED]
                following = self.objective.following_tokens(batch, anchors, len(steps) + 1)
                labels, available = following[:, :, :-1].contiguous(), (following != IGNORE_INDEX).sum(-1)
                batch |= {"anchors": anchors, "steps": steps, "labels": labels}
                drafted = self._drafted(batch)
                if is_sampled:
                    rates = self._loss(drafted, batch, needs_acceptance=True).acceptance.float()
                else:
                    rates = self._greedy_rates(drafted, labels.flatten(0, 1))
                for i, own, chances, left in zip(chunk, anchors, rates.view_as(labels), available):
                    rounds = expected_rounds(own, chances[:, : int(rows[i]["drafts"])], left)
                    tau[i] = float((own >= 0).sum()) / max(rounds, 1.0)
        return tau

    def _greedy_rates(self, drafted: HeadOutput, labels: torch.Tensor) -> torch.Tensor:
        """Return whether each draft is the text's token, `[blocks, drafts]`, 0 or 1. A drafter that is only surer of
        its drafts would look better by their probabilities, and serve no better."""
        states, vectors = (None if part is None else part.flatten(0, 1) for part in drafted[:2])
        rates = torch.zeros_like(labels, dtype=torch.float32)
        for at in (labels != IGNORE_INDEX).nonzero().split(self.config.loss_chunk_size):
            index = at.unbind(1)
            head_vectors = None if vectors is None else vectors[index]
            logits = self.objective.draft_logits(cast(torch.Tensor, states)[index], head_vectors, self._table())
            rates[index] = (logits.argmax(-1) == self.objective.draft_indices(labels[index]).to(logits.device)).to(
                rates
            )
        return rates


def _proven_increase(before: torch.Tensor, after: torch.Tensor) -> float:
    """Return by which part the mean of `after` is larger than that of `before`, both `[rows]`, shrunk by the square of
    its standard error, as chance lets some updates look better than they are."""
    differences = after - before
    mean = float(differences.mean())
    error = float(differences.std()) / math.sqrt(len(differences)) if len(differences) > 1 else 0.0
    share = max(0.0, 1 - (error / mean) ** 2) if mean else 0.0
    return share * mean / float(before.mean())


def adapt(drafter: Any, target: PreTrainedModel, **options: Any) -> Adaptation:
    """See [`~drafters.base.Drafter.adapt`]."""
    known = [each.name for each in fields(AdaptationConfig)]
    if unknown := sorted(options.keys() - set(known)):
        raise ValueError(f"`{unknown[0]}` is no option of `adapt`: expected some of {', '.join(known)}.")
    with torch.inference_mode(False):  # tensors that are made in it cannot be trained
        return Adaptation(drafter, target, AdaptationConfig(**options))
