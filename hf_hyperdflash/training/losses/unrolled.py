"""The objective of drafters that continue from their own states: EAGLE-3's training-time test, SpecBlock's blocks."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import nn

from ...drafters.parts.heads import HeadOutput
from ...drafters.parts.rank_head import RANK_CLASSES, rank_classes
from ...drafters.unrolled.configuration import UnrolledConfig
from ...targets.target import Target
from ..flags import TrainingFlags
from .loss import IGNORE_INDEX, DrafterLoss, loss_counts, position_weights, rank_loss, student_logits
from .objective import Batch, BlockObjective


class UnrolledObjective(BlockObjective):
    """The objective of an [`Eagle3Drafter`] or a [`SpecBlockDrafter`].

    Every position of the text starts a first block. At anchors later blocks continue from it, `config.max_blocks` in
    all, each with the text's own token. In training a block continues from a slot of the block before it, drawn anew
    for every step; otherwise from the last slot, as a chain does.
    """

    weights_kl = True

    def candidates(self, batch: Batch) -> torch.Tensor:
        return super().candidates(batch) & (batch["position_ids"] > 0)  # one position precedes the anchor

    def _position_weights(self, decay: float | None) -> torch.Tensor | None:
        block_weights = position_weights(self.config.block_size, decay)
        if block_weights is None or self.config.block_size == 1:
            return super()._position_weights(decay)  # with one token a block, each block is a position
        return block_weights.repeat(self.config.max_blocks)

    def steps(self, step: int | None = None) -> torch.Tensor:
        size, later = self.config.block_size, self.config.max_blocks - 1
        chance = random.Random(f"{self.seed},{step}")
        slots = [size - 1 if step is None else chance.randrange(size) for _ in range(later)]
        first = torch.tensor([0, *(slot + 1 for slot in slots)]).cumsum(0)
        return (first[:, None] + torch.arange(size)).flatten()

    def run_drafter(self, drafter: nn.Module, batch: Batch) -> HeadOutput:
        ids, anchors = batch["input_ids"], batch["anchors"]
        following = torch.cat([ids[:, 1:], ids[:, -1:]], dim=1)
        first = batch["steps"][:: self.config.block_size].to(ids.device)  # of each block, after the anchor
        at = (anchors.clamp(min=0).unsqueeze(-1) + first[1:]).clamp(max=ids.shape[1] - 1)
        later = ids.gather(1, at.flatten(1)).view_as(at)
        if not self.config.own_embedding:
            with torch.no_grad():
                following, later = (self.target.embed(each) for each in (following, later))
        return drafter(
            self._residual_read(batch),
            batch["position_ids"],
            following,
            (anchors - 1).clamp(min=0),
            later,
            (first.diff() - 1).tolist(),
            head=self.lm_head,
        )

    def loss(
        self,
        drafted: HeadOutput,
        batch: Batch,
        table: torch.Tensor | None = None,
        counts: torch.Tensor | None = None,
        teacher_positions: int | None = None,
    ) -> DrafterLoss:
        size, ranks, labels = self.config.block_size, drafted.ranks, batch["labels"]
        is_masked = self.args.valid_prefix and torch.is_grad_enabled()
        if not is_masked and (ranks is None or teacher_positions == 0):
            return super().loss(drafted, batch, table, counts, teacher_positions)
        right, classes = self._rank_predictions(drafted.states, labels, table)
        counted = labels
        if is_masked:
            before = right.unflatten(-1, (-1, size)).long().cumprod(-1)[..., :-1]
            valid = nn.functional.pad(before, (1, 0), value=1).bool().flatten(-2)
            counted = labels.masked_fill(~valid, IGNORE_INDEX)
            if counts is not None:  # the share that is left on this process: that of the whole step is not known yet
                left, all_ = (self.counts([{"labels": each}]).to(counts) for each in (counted, labels))
                counts = counts * torch.where(all_ > 0, left / all_.clamp(min=1e-9), 0.0)
        terms = super().loss(drafted, batch | {"labels": counted}, table, counts, teacher_positions)
        if ranks is None:
            return terms
        rank_terms = rank_loss(ranks.flatten(0, 1).view(-1, size, ranks.shape[-1]), classes.view(-1, size))
        if counts is not None:  # a part of a step
            own = loss_counts(counted.flatten(0, 1), 0, self.terms.position_weights).to(counts)[0]
            rank_terms = rank_terms * own / counts[0]
        rank_terms = rank_terms.to(terms.loss)
        return terms._replace(loss=terms.loss + (self.args.rank_weight or 0) * rank_terms, rank=rank_terms.detach())

    @torch.no_grad()
    def _rank_predictions(
        self, states: torch.Tensor, labels: torch.Tensor, table: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return whether each draft equals its label, and the class of the label's rank, -100 without a label. A token
        that cannot be drafted has the last class."""
        right, classes = torch.zeros_like(labels, dtype=torch.bool), torch.full_like(labels, IGNORE_INDEX)
        head = self.draft_head(table)
        for at in (labels != IGNORE_INDEX).nonzero().split(self.args.loss_chunk_size):
            index = at.unbind(1)
            logits, tokens = student_logits(head.lm_head, states[index], None, table), head.indices(labels[index])
            right[index] = logits.argmax(-1) == tokens
            rank_terms = rank_classes(logits, tokens.clamp(min=0))
            classes[index] = rank_terms.masked_fill(tokens < 0, RANK_CLASSES - 1)
        return right, classes


def make_objective(drafter: Any, target: Target, args: TrainingFlags, seed: int = 42) -> BlockObjective:
    """Return the objective for a drafter's kind, see [`BlockObjective`]."""
    kind = UnrolledObjective if isinstance(drafter.config, UnrolledConfig) else BlockObjective
    return kind(drafter, target, args, seed)
