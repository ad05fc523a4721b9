"""Training drafters that go on from their own states: EAGLE-3's training-time test, SpecBlock's blocks in a row."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import nn

from ...drafters.parts.heads import HeadOutput
from ...drafters.unrolled.configuration import UnrolledConfig
from ...drafters.unrolled.rank_head import RANK_CLASSES, rank_classes
from ...targets.target import Target
from .loss import IGNORE_INDEX, DrafterLoss, loss_counts, position_weights, rank_loss
from .objective import Batch, BlockObjective


class UnrolledObjective(BlockObjective):
    """Of an [`Eagle3Drafter`] or a [`SpecBlockDrafter`]: every entry of the text makes its first block, and at anchors
    later blocks go on from it, `config.max_blocks` in all, each with the text's own token. In training each goes on
    from a slot of the block before that is drawn anew for every step, else from the last, as a chain does.
    """

    def __init__(self, drafter: Any, target: Target, args: Any) -> None:
        super().__init__(drafter, target, args)
        self.kl_weights = self.weights

    def candidates(self, batch: Batch) -> torch.Tensor:
        return super().candidates(batch) & (batch["position_ids"] > 0)  # an entry comes before the anchor

    def _position_weights(self, decay: float | None) -> torch.Tensor | None:
        of_block = position_weights(self.config.block_size, decay)
        if of_block is None or self.config.block_size == 1:
            return super()._position_weights(decay)  # of a token at a time, each is a step further
        return of_block.repeat(self.config.max_blocks)

    def steps(self, step: int | None = None) -> torch.Tensor:
        size, later = self.config.block_size, self.config.max_blocks - 1
        chance = random.Random(f"{self.args.seed},{step}")
        slots = [size - 1 if step is None else chance.randrange(size) for _ in range(later)]
        first = torch.tensor([0, *(slot + 1 for slot in slots)]).cumsum(0)
        return (first[:, None] + torch.arange(size)).flatten()

    def drafted(
        self, drafter: nn.Module, batch: Batch, anchors: torch.Tensor, residual: torch.Tensor, steps: torch.Tensor
    ) -> HeadOutput:
        ids = batch["input_ids"]
        following = torch.cat([ids[:, 1:], ids[:, -1:]], dim=1)
        first = steps[:: self.config.block_size].to(ids.device)  # of each block, after the anchor
        at = (anchors.clamp(min=0).unsqueeze(-1) + first[1:]).clamp(max=ids.shape[1] - 1)
        later = ids.gather(1, at.flatten(1)).view_as(at)
        if not self.config.own_embedding:
            with torch.no_grad():
                following, later = (self.target.embed(each) for each in (following, later))
        return drafter(
            residual[:, :, : self.config.num_paths],
            batch["position_ids"],
            following,
            (anchors - 1).clamp(min=0),
            later,
            (first.diff() - 1).tolist(),
            head=self.head,
        )

    def loss(
        self,
        drafted: HeadOutput,
        anchors: torch.Tensor,
        labels: torch.Tensor,
        residual: torch.Tensor,
        steps: torch.Tensor,
        table: torch.Tensor | None = None,
        counts: torch.Tensor | None = None,
        needs_acceptance: bool = False,
    ) -> DrafterLoss:
        size, ranks, kept = self.config.block_size, drafted.ranks, labels
        is_masked = self.args.valid_prefix and torch.is_grad_enabled()
        if ranks is None and not is_masked:
            return super().loss(drafted, anchors, labels, residual, steps, table, counts, needs_acceptance)
        right, classes = self._judged(drafted.states, labels, table)
        if is_masked:
            before = right.unflatten(-1, (-1, size)).long().cumprod(-1)[..., :-1]
            valid = nn.functional.pad(before, (1, 0), value=1).bool().flatten(-2)
            kept = labels.masked_fill(~valid, IGNORE_INDEX)
            counts = None if counts is None else counts * self._share(kept, labels)
        terms = super().loss(drafted, anchors, kept, residual, steps, table, counts, needs_acceptance)
        if ranks is None:
            return terms
        of_ranks = rank_loss(ranks.flatten(0, 1).view(-1, size, ranks.shape[-1]), classes.view(-1, size))
        if counts is not None:  # a part of a step
            of_ranks = of_ranks * loss_counts(kept.flatten(0, 1), 0, self.weights).to(counts)[0] / counts[0]
        of_ranks = of_ranks.to(terms.loss)
        return terms._replace(loss=terms.loss + (self.args.rank_weight or 0) * of_ranks, rank=of_ranks.detach())

    @torch.no_grad()
    def _judged(
        self, states: torch.Tensor, labels: torch.Tensor, table: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Whether each draft is its label's token, and the class of that token's rank, -100 without a label. One that
        cannot be drafted is beyond all ranks."""
        right, classes = torch.zeros_like(labels, dtype=torch.bool), torch.full_like(labels, IGNORE_INDEX)
        for at in (labels != IGNORE_INDEX).nonzero().split(self.args.loss_chunk_size):
            place = at.unbind(1)
            logits, tokens = self.scores(states[place], None, table), self.places(labels[place])
            right[place] = logits.argmax(-1) == tokens
            of_ranks = rank_classes(logits, tokens.clamp(min=0))
            classes[place] = of_ranks.masked_fill(tokens < 0, RANK_CLASSES - 1)
        return right, classes

    def _share(self, kept: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """What part of each count is kept here: of the whole step it is known only afterwards."""
        left, all_ = (
            loss_counts(each.flatten(0, 1), self.kl_positions, self.weights).to(labels.device)
            for each in (kept, labels)
        )
        return torch.where(all_ > 0, left / all_.clamp(min=1e-9), 0.0)


def objective_of(drafter: Any, target: Target, args: Any) -> BlockObjective:
    """What a drafter learns, see [`BlockObjective`]."""
    kind = UnrolledObjective if isinstance(drafter.config, UnrolledConfig) else BlockObjective
    return kind(drafter, target, args)
