"""A copy of a drafter that takes training steps on some texts, and tells how it would draft for others."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ...drafters.blocks.drafter import BlockDrafter
from ...drafters.parts.heads import HEADS
from ...drafters.unrolled.drafter import UnrolledDrafter
from ...targets.registry import target_of
from ..data.blocks import expected_rounds, sample_anchors
from ..losses.objective import Batch, collate
from ..losses.unrolled import make_objective
from .configuration import AdaptationConfig

_HEADS = (*(head.key for head in HEADS.values()), "confidence_head", "rank_head", "lm_head")
_WARMUP = 4  # steps until the learning rate is reached
_JUDGED = 48  # tokens of a row that weights are judged by


class Learner:
    """Takes training steps in float32 on a copy, whose parameters it names by arm: those of the drafter's `"heads"`
    and `"all"`. The drafter itself and its target are only read. Rows have the residual streams of `layer_ids`."""

    def __init__(self, drafter: Any, target: PreTrainedModel, config: AdaptationConfig) -> None:
        if not isinstance(drafter, (BlockDrafter, UnrolledDrafter)):
            raise ValueError(
                f"A {type(drafter).__name__} cannot learn while it serves, expected a drafter that the trainer takes: "
                "load one with `load_drafter`, not as remote code."
            )
        seen = target_of(target)
        drafter.check_trainable(seen)
        self.config, self.objective = config, make_objective(drafter, seen, config.loss, config.seed)
        self.layer_ids, self.steps_taken = self.objective.layer_ids, 0
        self.copy = copy.deepcopy(drafter).float().requires_grad_(False)
        everything = [name for name, _ in self.copy.named_parameters()]
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
        self.copy.load_state_dict({name: value.float() for name, value in weights.items()})
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
