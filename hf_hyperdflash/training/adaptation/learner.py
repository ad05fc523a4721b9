"""What a drafter learns from while it serves, and the copy of it that learns."""

from __future__ import annotations

import copy
import math
import random
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ...decoding.stats import SpeculationStats
from ...drafters.adapters import check_adapter
from ...drafters.base import Observer
from ...drafters.parts.heads import HEADS
from ...targets.registry import target_of
from ..data.blocks import expected_rounds, sample_anchors
from ..flags import RECIPES, TrainingFlags
from ..losses.objective import Batch, collate, make_objective

POLICIES = ("bandit", "always", "never")
_HEADS = (*(head.key for head in HEADS.values()), "confidence_head", "rank_head", "lm_head")
_WARMUP = 4  # steps until the learning rate is reached
_JUDGED = 48  # tokens of a row that weights are judged by
_MOST_HELD_OUT = 4


@dataclass
class AdaptationConfig:
    """How a drafter learns while it serves.

    Args:
        policy: `"bandit"` updates where that is expected to save more time than it takes, `"always"` whenever there is
            something new, `"never"` only writes the log.
        arms: What an update may change: `"heads"`, the drafter's sequential, confidence and rank heads, or `"all"`.
        adapter: The one of the drafter's adapters that learns, from the texts that it drafts for; the drafter itself
            and other adapters stay. `None` for a drafter without adapters.
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
        max_bytes: Most memory for text to learn from, residual included.
        seed: Seed of the sampled rows and anchors.

    Raises:
        ValueError: If a field is out of range.
    """

    policy: str = "bandit"
    arms: tuple[str, ...] = ("heads", "all")
    adapter: str | None = None
    recipe: str = "ours"
    learning_rate: float = 3e-4
    share: float = 0.3
    every: int = 8
    steps: int = 8
    rows: int = 4
    num_anchors: int = 12
    horizon: int = 256
    max_bytes: int = 256 * 2**20
    seed: int = 0

    def __post_init__(self) -> None:
        self.arms = (self.arms,) if isinstance(self.arms, str) else tuple(self.arms)
        number = (int, float)
        rate, share = self.learning_rate, self.share
        fits = {
            "policy": (self.policy in POLICIES, f"one of {', '.join(POLICIES)}"),
            "recipe": (self.recipe in tuple(RECIPES), f"one of {', '.join(RECIPES)}"),
            "arms": (bool(self.arms) and set(self.arms) <= {"heads", "all"}, "'heads', 'all' or both"),
            "seed": (type(self.seed) is int, "a whole number"),
            "learning_rate": (isinstance(rate, number) and 0 < rate < math.inf, "a number of more than 0"),
            "share": (isinstance(share, number) and 0 < share <= 1, "a number of more than 0 and at most 1"),
        }
        for name in ("every", "steps", "rows", "num_anchors", "horizon", "max_bytes"):
            value = getattr(self, name)
            fits[name] = type(value) is int and value >= 1, "a whole number of at least 1"
        for name, (is_right, expected) in fits.items():
            if not is_right:
                raise ValueError(f"`{name}` is {getattr(self, name)!r}, expected {expected}.")
        self.loss = TrainingFlags(num_anchors=self.num_anchors, **RECIPES[self.recipe])


class Sample(Observer):
    """Records the tokens of one generation, sampled or greedy, with their residual of some layers, and calls `ended`
    with itself and the statistics. Of too many tokens for `max_bytes` the last ones are kept."""

    def __init__(
        self,
        layer_ids: Sequence[int],
        max_bytes: int,
        is_sampled: bool = False,
        ended: Callable[[Sample, SpeculationStats], None] | None = None,
    ) -> None:
        self.target_layer_ids, self.max_bytes, self.is_sampled = list(layer_ids), max_bytes, is_sampled
        self._parts: deque[tuple[torch.Tensor, torch.Tensor, torch.Tensor, bool]] = deque()
        self._ended = ended

    def add_tokens(
        self, residual: torch.Tensor, position_ids: torch.Tensor, next_ids: torch.Tensor, is_written: bool
    ) -> None:
        room = max(1, self.max_bytes // max(1, residual[0, 0].nbytes))  # of a long prompt
        self._parts.append((residual[0, -room:], position_ids[0, -room:], next_ids[0, -room:], is_written))
        left = sum(len(positions) for _, positions, *_ in self._parts)
        while left - len(self._parts[0][1]) >= room:
            left -= len(self._parts.popleft()[1])

    def end(self, stats: SpeculationStats) -> None:
        if self._ended is not None:
            self._ended(self, stats)

    def row(self) -> Batch | None:
        """Return the columns that [`~objective.collate`] reads, and `is_sampled`; `None` if the target wrote too
        little to learn from."""
        if sum(len(positions) for _, positions, _, is_written in self._parts if is_written) < 2:
            return None
        # Copies: tensors that were computed in inference mode cannot be trained on.
        residual, positions, following = (torch.cat(parts) for parts in list(zip(*self._parts))[:3])
        written = [torch.full_like(part[1], part[3], dtype=torch.bool) for part in self._parts]
        row = {"residual": residual, "position_ids": positions.to(residual.device)}
        # The first token is not known here. Another one stands for it, which is never an anchor or a label.
        row["input_ids"] = torch.cat([following[:1], following[:-1]]).to(residual.device)
        row["loss_mask"] = torch.cat(written).to(residual.device)
        row["loss_mask"][0] = False
        row["is_sampled"] = torch.tensor(self.is_sampled)
        return row


class ReplayBuffer:
    """The rows of the last generations, within a limit of memory, to learn from again; a few from all the time are
    held out and never learned from."""

    def __init__(self, max_bytes: int, seed: int = 0) -> None:
        self.max_bytes, self._random, self._times_held_out = max_bytes, random.Random(seed), 0
        self.rows, self.held_out = list[Batch](), list[Batch]()

    def add(self, row: Batch) -> None:
        """Append a row, and drop the oldest rows if there are too many bytes."""
        self.rows.append(row)
        sizes = [sum(values.nbytes for values in each.values()) for each in self.rows]
        while sum(sizes) > self.max_bytes and len(sizes) > 1:
            del sizes[0], self.rows[0]

    def hold_one_out(self, new: int) -> int:
        """Set one of the `new` last rows aside, and return how many are left of them. The few that are kept are a fair
        draw from all that ever were. Of few rows none can be spared."""
        if new < _MOST_HELD_OUT or new > len(self.rows):
            return new
        self._times_held_out += 1
        place = len(self.held_out)
        if place == _MOST_HELD_OUT:
            place = self._random.randrange(self._times_held_out)
        if place >= _MOST_HELD_OUT:
            return new
        self.held_out[place : place + 1] = [self.rows.pop(len(self.rows) - 1 - self._random.randrange(new))]
        return new - 1

    def draw_batch(self, count: int, new: int) -> Batch:
        """Draw a batch: about half from the `new` last rows, which were not learned from yet, the rest from earlier
        ones."""
        first_new = max(0, len(self.rows) - new)
        new_rows, old_rows = self.rows[first_new:], self.rows[:first_new]
        new_count = max(count - len(old_rows), (count + 1) // 2)
        drawn = self._random.sample(new_rows, min(new_count, len(new_rows)))
        return collate(drawn + self._random.sample(old_rows, min(count - len(drawn), len(old_rows))))


class Learner:
    """Takes training steps in float32 on a copy, whose parameters it names by arm: those of the drafter's `"heads"`
    and `"all"` that may change, of the adapter that learns or of the drafter. The drafter itself and its target are
    only read. Rows have the residual streams of `layer_ids`."""

    def __init__(self, drafter: Any, target: PreTrainedModel, config: AdaptationConfig) -> None:
        if not hasattr(drafter, "check_trainable"):
            raise ValueError(
                f"A {type(drafter).__name__} cannot learn while it serves, expected a drafter that the trainer takes: "
                "load one with `load_drafter`, not as remote code."
            )
        seen = target_of(target)
        drafter.check_trainable(seen)
        self.config, self.objective = config, make_objective(drafter, seen, config.loss, config.seed)
        self.layer_ids, self.steps_taken = self.objective.layer_ids, 0
        adapter = config.adapter
        if adapter is not None:
            check_adapter(drafter, adapter)
        elif drafter.adapters:
            raise ValueError(
                f"`adapter` is None and the drafter has adapters ({', '.join(drafter.adapters)}), expected one of "
                "them: name the one that is to learn, or `drafter.delete_adapter` them."
            )
        self.copy = copy.deepcopy(drafter).float()
        if adapter is not None:
            self.copy.set_adapter(adapter)
        self.copy.requires_grad_(False)
        everything = [name for name, _ in self.copy.named_parameters() if adapter is None or f".{adapter}." in name]
        self.arms = {"heads": [name for name in everything if name.startswith(_HEADS)], "all": everything}
        self._optimizer = torch.optim.AdamW(self.copy.parameters(), config.learning_rate, weight_decay=0.0)

    def learn(self, arm: str, batches: Sequence[Batch], seconds: float = math.inf) -> None:
        """Take a step on each batch, the last one after `seconds`."""
        parameters, began = dict(self.copy.named_parameters()), time.perf_counter()
        for name in self.arms[arm]:
            parameters[name].requires_grad_(True)
        try:
            for batch in batches:
                for group in self._optimizer.param_groups:
                    group["lr"] = self.config.learning_rate * min(1.0, (self.steps_taken + 1) / _WARMUP)
                self.objective.add_anchors(batch, self.steps_taken)
                with torch.enable_grad(), torch.autocast(batch["residual"].device.type, enabled=False):
                    self.objective.step(self.copy, batch, self.copy.vocabulary_table).loss.backward()
                nn.utils.clip_grad_norm_([each for each in self.copy.parameters() if each.grad is not None], 1.0)
                self._optimizer.step()
                self._optimizer.zero_grad()
                self.steps_taken += 1
                if time.perf_counter() - began > seconds:
                    break
        finally:
            self.copy.requires_grad_(False)

    def reset(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Go back to some weights, and forget every step."""
        self.copy.load_state_dict({name: value.float() for name, value in weights.items()}, strict=False)
        self._optimizer.state.clear()
        self.steps_taken = 0

    def expected_tau(self, rows: list[Batch]) -> torch.Tensor:
        """Return the accepted length that rounds over the first part of each row have, `[rows]`: by speculative
        sampling for sampled text, by greedy drafts for greedy text, as many as were asked for. A mean over anchors
        would favour easy stretches, where rounds are long and few. A drafter that is only surer of its drafts would
        look better by their probabilities, and write greedy text no faster."""
        tau, drafts = torch.ones(len(rows)), self.objective.config.max_draft_tokens
        for is_sampled in (False, True):
            at = [i for i, row in enumerate(rows) if bool(row["is_sampled"]) is is_sampled]
            for chunk in (at[i : i + self.config.rows] for i in range(0, len(at), self.config.rows)):
                batch = collate([rows[i] for i in chunk])
                anchors = sample_anchors(self.objective.candidates(batch))[:, :_JUDGED]
                with torch.autocast(batch["residual"].device.type, enabled=False):
                    walk = self.objective.walk(
                        self.copy, batch, anchors, self.copy.vocabulary_table, drafts if is_sampled else 0
                    )
                rates = walk.acceptance if is_sampled else walk.matches
                for i, own, chances, left in zip(chunk, anchors, rates.float(), walk.available):
                    rounds = expected_rounds(own, chances[:, : int(rows[i]["drafts"])], left)
                    tau[i] = float((own >= 0).sum()) / max(rounds, 1.0)
        return tau
