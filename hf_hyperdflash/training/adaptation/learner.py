"""A copy of a drafter that takes training steps on some texts, and tells how it would draft for others."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from ...drafters.blocks.drafter import BlockDrafter
from ...drafters.parts.heads import HEADS, HeadOutput
from ...drafters.unrolled.drafter import UnrolledDrafter
from ...targets.registry import target_of
from ..data.blocks import expected_rounds, sample_anchors
from ..losses.loss import IGNORE_INDEX, DrafterLoss
from ..losses.objective import Batch, LossSettings, collate
from ..losses.unrolled import make_objective
from .configuration import AdaptationConfig

_HEADS = (*(head.key for head in HEADS.values()), "confidence_head", "rank_head", "lm_head")
_WARMUP = 4  # steps until the learning rate is reached
_JUDGED = 48  # tokens of a row that weights are judged by


class Learner:
    """Takes training steps in float32 on a copy; the drafter itself stays as it is.

    Args:
        drafter: The drafter.
        target: Its target, only read.
        config: The settings, of which those of a step are read.

    Raises:
        ValueError: If the drafter cannot be trained for the target.

    Attributes:
        copy: What learns.
        arms: Names of parameters: of the drafter's `"heads"` and of `"all"`.
        layer_ids: Layers whose residual streams rows have.
        steps_taken: How many steps it has taken.
    """

    def __init__(self, drafter: Any, target: PreTrainedModel, config: AdaptationConfig) -> None:
        if not isinstance(drafter, (BlockDrafter, UnrolledDrafter)):
            raise ValueError(
                f"A {type(drafter).__name__} cannot learn while it serves, expected a drafter that the trainer takes: "
                "load one with `load_drafter`, not as remote code."
            )
        seen = target_of(target)
        drafter.check_trainable(seen)
        self.config, self.objective = config, make_objective(drafter, seen, cast(LossSettings, config))
        self.layer_ids, self.steps_taken = self.objective.layer_ids, 0
        self.copy: nn.Module = copy.deepcopy(drafter).float().requires_grad_(False)
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
                self._step(batch)
                if time.perf_counter() - began > seconds:
                    break
        finally:
            self.copy.requires_grad_(False)

    def reset(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Go back to some weights, and forget every step."""
        self.copy.load_state_dict({name: value.float() for name, value in weights.items()})
        self._optimizer.state.clear()
        self.steps_taken = 0

    @torch.no_grad()
    def expected_tau(self, rows: list[Batch]) -> torch.Tensor:
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

    def _step(self, batch: Batch) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = self.config.learning_rate * min(1.0, (self.steps_taken + 1) / _WARMUP)
        self.objective.add_anchors(batch, self.steps_taken)
        with torch.enable_grad():
            self._loss(self._drafted(batch), batch).loss.backward()
        trained = [each for each in self.copy.parameters() if each.grad is not None]
        nn.utils.clip_grad_norm_(trained, 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.steps_taken += 1

    def _drafted(self, batch: Batch) -> HeadOutput:
        anchors, steps, residual = batch["anchors"], batch["steps"], batch["residual"]
        with torch.autocast(residual.device.type, enabled=False):
            return self.objective.run_drafter(self.copy, batch, anchors, residual, steps)

    def _loss(self, drafted: HeadOutput, batch: Batch, needs_acceptance: bool = False) -> DrafterLoss:
        arguments, table = (batch["anchors"], batch["labels"], batch["residual"], batch["steps"]), self._table()
        with torch.autocast(batch["residual"].device.type, enabled=False):
            return self.objective.loss(drafted, *arguments, table, needs_acceptance=needs_acceptance)

    def _table(self) -> torch.Tensor | None:
        return cast(Any, self.copy).vocabulary_table

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
