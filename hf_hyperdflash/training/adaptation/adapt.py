"""Learning while serving: every verification shows what the target writes, and a drafter can learn from it.

A float32 copy of the drafter learns between requests, in the thread whose request has just ended. A few requests are
quickly learned by heart. So the weights that serve go only a share of the way to the learned ones, and only if they
would have drafted better for the requests that came afterwards. Verification uses the distributions that drafts were
drawn from, so the text stays the target's even if the weights change meanwhile.

A bandit decides when (SpecBlock, cost-aware adaptation). An update pays if it saves the requests to come more seconds
than it takes. Both are measured: the cost with each update, the gain on requests after it. An update of an arm that is
not known to pay is a trial. Trials may take a small share of the serving time, that of requests to come included.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from transformers import PreTrainedModel

from ...decoding.stats import SpeculationStats
from ...drafters.adapters import chosen_adapter
from ...drafters.base import Observer
from ..losses.objective import Batch
from .learner import AdaptationConfig, Learner, ReplayBuffer, Sample

logger = logging.getLogger(__name__)

_TRIAL_SHARE = 1 / 200  # of the serving time, for trials
_DROP = 0.85  # tau below this share of its long mean is a sign of a new kind of text
_FAST_RATE, _SLOW_RATE = 1 / 8, 1 / 64  # weight of a request in the two running means of tau
_GAIN_RATE = 2 / 3  # weight of a new measurement in the running means of an arm: what is learned once, is learned
_STALE = 8  # updates of others after which an arm is tried again
_SHARE_GROWTH, _SHARE_FALL, _LEAST_SHARE = 1.25, 0.5, 0.1  # after an update that helps, and one that does not
_WORST = -0.99  # gain of weights that draft nothing: at -1 a round would never end


@dataclass
class Decision:
    """What was decided after a request."""

    request: int  # its number, from 1
    seconds: float  # since the adaptation began
    new_tokens: int
    tau: float  # its tokens per verification round
    serving_seconds: float  # after the prompt
    # The relative increase of tokens per round by the update before, as far as this and the other requests since then
    # prove it; `None` without one. Where it is more than 0, the update serves from now on.
    gain: float | None = None
    arm: str | None = None  # that was updated; `None` without an update
    cost: float = 0.0  # seconds of judging and updating


@dataclass
class Arm:
    """A way to update, with its measured cost and gain, which are running means."""

    cost: float = 0.0  # seconds of an update
    gain: float | None = None  # the relative increase of tokens per round by an update; `None` at first
    updates_since: int = 0  # updates of other arms since the last one of this arm


@dataclass
class Bandit:
    """Chooses among arms, the cheapest one first, which is tried first. `horizon` requests profit from an update."""

    names: Sequence[str]
    horizon: int
    arms: dict[str, Arm] = field(init=False)

    def __post_init__(self) -> None:
        self.arms = {name: Arm() for name in self.names}
        self._serving_seconds = self._trial_seconds = self._seconds_per_request = 0.0
        self._requests, self._fast_tau, self._slow_tau, self._kinds = 0, 0.0, 0.0, 1

    def record_request(self, tau: float, seconds: float) -> None:
        """Record the tokens per round and the seconds of a request, with which a new kind of text may have begun."""
        self._requests += 1
        self._serving_seconds += seconds
        self._seconds_per_request += (seconds - self._seconds_per_request) * max(_SLOW_RATE, 1 / self._requests)
        self._fast_tau += (tau - self._fast_tau) * max(_FAST_RATE, 1 / self._requests)
        self._slow_tau += (tau - self._slow_tau) * max(_SLOW_RATE, 1 / self._requests)
        if self._fast_tau < _DROP * self._slow_tau:
            self._slow_tau = self._fast_tau
            self._kinds += 1
            for arm in self.arms.values():
                arm.gain = None  # it was measured on another kind of text

    def expected_saving(self, name: str) -> float:
        """Return the seconds that an update is expected to save, minus its own. Where they are not more than 0, an
        update is a trial."""
        arm = self.arms[name]
        gain = arm.gain or 0.0
        return self.horizon * self._seconds_per_request * gain / (1 + gain) - arm.cost

    def trial_seconds_left(self) -> float:
        """Return what trials may still take. Each kind of text has the horizon's share anew."""
        to_come = self._kinds * self.horizon * self._seconds_per_request
        return _TRIAL_SHARE * (self._serving_seconds + to_come) - self._trial_seconds

    def choose(self) -> str | None:
        """Return the arm to update, or `None` for no update."""
        best = max(self.arms, key=self.expected_saving)
        if self.expected_saving(best) > 0:
            return next((name for name, arm in self.arms.items() if arm.updates_since >= _STALE), best)
        unknown = [name for name, arm in self.arms.items() if arm.gain is None]
        trial = (unknown or sorted(self.arms, key=lambda name: -self.arms[name].updates_since))[0]
        left = self.trial_seconds_left()
        return trial if left > 0 and left >= self.arms[trial].cost else None

    def record_cost(self, name: str | None, seconds: float) -> None:
        """Record the seconds of an update and of judging the one before; `None` where there was no update."""
        if name is None or self.expected_saving(name) <= 0:
            self._trial_seconds += seconds
        if name is None:
            return
        arm = self.arms[name]
        arm.cost = seconds if not arm.cost else arm.cost + (seconds - arm.cost) * _GAIN_RATE
        for other in self.arms.values():
            other.updates_since = 0 if other is arm else other.updates_since + 1

    def record_gain(self, name: str, gain: float) -> None:
        """Record the relative increase of tokens per round that an update brought."""
        arm = self.arms[name]
        arm.gain = gain if arm.gain is None else arm.gain + (gain - arm.gain) * _GAIN_RATE


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
        if getattr(drafter, "observer", None) is not None:
            raise ValueError("The drafter learns already: `stop()` its adaptation first.")
        learner = Learner(drafter, target, config)
        self.drafter, self.target, self.config, self.learner = drafter, target, config, learner
        self.log, self._start = list[Decision](), time.perf_counter()
        self._original = {name: value.detach().clone() for name, value in self._learned(drafter).items()}
        arms = [arm for arm in config.arms if learner.arms[arm]]
        if not arms:
            raise ValueError("`arms` is ('heads',), but what learns has no heads: let it be ('all',).")
        self._begin_anew(arms)
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

    def __exit__(self, *error: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End the learning. The drafter keeps its present weights."""
        if self.drafter.observer is self:
            self.drafter.observer = None

    def reset(self) -> None:
        """Restore the drafter's first weights, and forget everything that was learned."""
        with self._update_lock, self._state_lock:
            self.drafter.load_state_dict(self._original, strict=False)
            self.learner.reset(self._original)
            self._begin_anew(self.bandit.names)

    def _learned(self, drafter: Any) -> dict[str, torch.Tensor]:
        """Return the parameters of a drafter that learn here."""
        parameters = dict(drafter.named_parameters())
        return {name: parameters[name] for name in self.learner.arms["all"]}

    def _begin_anew(self, arms: Sequence[str]) -> None:
        config = self.config
        self.replay, self.bandit = ReplayBuffer(config.max_bytes, config.seed), Bandit(arms, config.horizon)
        self._share, self._new_rows = config.share, 0
        self._pending: str | None = None  # the arm of an update that was not judged yet

    # Called by the generation loop

    def begin(self, target: PreTrainedModel, do_sample: bool) -> Sample | None:
        """Return who records the sequence that begins, sampled or greedy; `None` for another target or adapter."""
        if target is not self.target or self.config.adapter not in (None, chosen_adapter()):
            return None
        return Sample(self.learner.layer_ids, max(1, self.config.max_bytes // 4), do_sample, self.learn_from)

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
            rows = self.replay.rows[-new:] + self.replay.held_out
        if self._pending is not None:
            decision.gain = self._judge(rows)
        with self._state_lock:
            if decision.gain is not None and self._pending is not None:
                self.bandit.record_gain(self._pending, decision.gain)
            arm = self.bandit.names[-1] if self.config.policy == "always" else self.bandit.choose()
            self._pending, seconds = arm, math.inf
            if arm is not None:
                if self.config.policy == "bandit" and self.bandit.expected_saving(arm) <= 0:
                    seconds = self.bandit.trial_seconds_left()
                new = self.replay.hold_one_out(new)
                batches = [self.replay.draw_batch(self.config.rows, new) for _ in range(self.config.steps)]
        if arm is not None:
            self.learner.learn(arm, batches, seconds)
        decision.arm, decision.cost = arm, time.perf_counter() - began
        with self._state_lock:
            self.bandit.record_cost(arm, decision.cost)

    @torch.no_grad()
    def _judge(self, rows: list[Batch]) -> float:
        """Compare the weights that serve with others, a share nearer to the learned ones, on text that neither has
        seen. The better ones serve. Where the others are worse, what was learned is forgotten; where nothing is
        proven, learning goes on. Return the relative increase of tau, less what may be chance."""
        copied, served = self._learned(self.learner.copy), self._learned(self.drafter)
        learned = {name: value.clone() for name, value in copied.items()}
        candidate = {
            name: served[name].float().lerp(value, self._share).to(served[name]) for name, value in learned.items()
        }
        taus = []
        for weights in (served, candidate):
            for name, value in weights.items():
                copied[name].copy_(value)
            taus.append(self.learner.expected_tau(rows))
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
        return gain if math.isfinite(gain) else _WORST  # of NaN


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
