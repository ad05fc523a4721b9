"""The training objective of a drafter: anchors in rows of text, the drafter's output at them, and its loss.

The trainer and learning while serving share it. It has no process group, no optimizer and no random state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import nn

from ...drafters.parts.heads import HEADS, HeadOutput
from ...drafters.parts.layers import block_inputs
from ...targets.target import Target, computable
from ..arguments import LOSS_WEIGHTS
from ..data.blocks import anchor_candidates, anchor_seeds, block_labels, block_masks, previous_tokens, sample_anchors
from ..flags import TrainingFlags
from .loss import (
    IGNORE_INDEX,
    DrafterLoss,
    DraftHead,
    LossTerms,
    drafter_loss,
    loss_counts,
    position_weights,
)

Batch = dict[str, torch.Tensor]


def collate(rows: Sequence[dict[str, Any]]) -> Batch:
    """Pad rows of `input_ids`, `loss_mask`, `position_ids` and, from a feature cache, `residual` on the right.
    Position ids go on counting in the padding, which so belongs to the last document."""
    names = [name for name in ("input_ids", "loss_mask", "position_ids", "residual") if name in rows[0]]
    columns = {name: [torch.as_tensor(row[name]) for row in rows] for name in names}
    batch: Batch = {name: nn.utils.rnn.pad_sequence(values, batch_first=True) for name, values in columns.items()}
    for row, positions in zip(batch["position_ids"], columns["position_ids"]):
        row[len(positions) :] = positions[-1] + torch.arange(1, len(row) - len(positions) + 1)
    batch["loss_mask"] = batch["loss_mask"].bool()
    return batch


class Walk(NamedTuple):
    """Drafts at many anchors of rows of text, each after the text's own tokens: the rounds of generation are among
    them, if the target wrote the text."""

    loss: torch.Tensor
    anchors: torch.Tensor  # `[batch, anchors]`, -1 for missing ones
    available: torch.Tensor  # `[batch, anchors]`, tokens of the same stretch that follow, at most one more than drafts
    matches: torch.Tensor  # `[batch, anchors, drafts]`, whether a draft is the text's token
    acceptance: torch.Tensor  # `[batch, anchors, drafts]`, its probability at temperature 1; 0 without a teacher


class BlockObjective:
    """The objective of drafters whose blocks do not depend on each other.

    Training calls [`add_anchors`] and [`step`], and judges by [`walk`]. A batch is one of [`collate`] with the
    residual, `[batch, seq, streams, config.target_hidden_size]` of `layer_ids`. The drafter may be wrapped by PEFT:
    its configuration and vocabulary are read. A weight of `terms` is 0 where the drafter does not have the part that
    the term trains.
    """

    weights_kl: ClassVar[bool] = False  # whether the weights of draft positions are the KL's, too

    def __init__(self, drafter: Any, target: Target, args: TrainingFlags, seed: int = 42) -> None:
        if args.kl_teacher == "mean_pool" and target.norm is None:
            raise ValueError(
                f"`kl_teacher` is 'mean_pool', but a {target.config.model_type} target has no norm after its "
                "collapse. Use 'hc_head'."
            )
        config = drafter.config
        self.drafter, self.config, self.target, self.args, self.seed = drafter, config, target, args, seed
        read = list(drafter.layers_read(target))
        self.layer_ids = read if read[-1] == -1 else [*read, -1]  # the teacher reads the last one
        self.selects_candidates = config.sequential_head in HEADS and bool(config.head_candidates)
        self.kl_positions = (args.kl_positions or config.max_draft_tokens) if args.kl_weight else 0
        if self.kl_positions > config.max_draft_tokens:
            raise ValueError(
                f"`kl_positions` is {self.kl_positions}, but the drafter has {config.max_draft_tokens} draft "
                "positions: lower it."
            )
        self.trains_acceptance = bool(args.tv_weight) or config.confidence_head
        trained: dict[str, float] = {name: getattr(args, name) for name in LOSS_WEIGHTS}
        trained["confidence_weight"] *= bool(config.confidence_head)
        trained["blind_weight"] *= self.selects_candidates
        weights = self._position_weights(args.loss_decay)
        self.terms = LossTerms(
            **trained,
            position_weights=weights,
            kl_positions=self.kl_positions,
            kl_position_weights=weights if self.weights_kl else None,
            kl_temperature=args.kl_temperature,
            chunk_size=args.loss_chunk_size,
        )

    def _position_weights(self, decay: float | None) -> torch.Tensor | None:
        return position_weights(self.config.max_draft_tokens, decay)

    # A batch

    def add_anchors(self, batch: Batch, step: int) -> None:
        """Add `anchors`, `steps` and `labels` to a batch of [`collate`], as they are drawn for an optimizer step."""
        seeds = anchor_seeds(batch["input_ids"], batch["loss_mask"], self.seed, step)
        anchors, steps = sample_anchors(self.candidates(batch), self.args.num_anchors, seeds), self.steps(step)
        following = self._following(batch, anchors, int(steps.max()) + 1)
        labels = following[:, :, steps.to(following.device)].contiguous()
        batch |= {"anchors": anchors, "steps": steps, "labels": labels}

    def candidates(self, batch: Batch) -> torch.Tensor:
        """Return the positions where a block can start, boolean `[batch, seq]`."""
        return anchor_candidates(batch["loss_mask"], batch["position_ids"])

    def steps(self, step: int | None = None) -> torch.Tensor:
        """Return the distance from the anchor to the token before each draft position, `[drafts]`, at an optimizer
        step; `None` for the distances that generation has."""
        return torch.arange(self.config.max_draft_tokens)

    def _following(self, batch: Batch, anchors: torch.Tensor, count: int) -> torch.Tensor:
        """Return the `count` tokens after each anchor, `[batch, anchors, count]`, see [`block_labels`]."""
        return block_labels(batch["input_ids"], batch["loss_mask"], batch["position_ids"], anchors, count)

    def counts(self, batches: Sequence[Batch]) -> torch.Tensor:
        """Return what the losses of the batches are divided by, summed over all of them, see [`loss_counts`]."""
        weights = self.terms.position_weights
        counts = (loss_counts(batch["labels"].flatten(0, 1), self.kl_positions, weights) for batch in batches)
        return torch.as_tensor(sum(counts))

    # Training and judging

    def step(
        self,
        drafter: nn.Module,
        batch: Batch,
        table: torch.Tensor | None = None,
        counts: torch.Tensor | None = None,
    ) -> DrafterLoss:
        """Return the loss of a batch with anchors, divided by the `counts` of a whole optimizer step or by its own.
        The table is the drafter's `vocabulary_table`, whole."""
        return self.loss(self.run_drafter(drafter, batch), batch, table, counts)

    @torch.no_grad()
    def walk(
        self,
        drafter: nn.Module,
        batch: Batch,
        anchors: torch.Tensor,
        table: torch.Tensor | None = None,
        teacher_positions: int | None = None,
        at_once: int | None = None,
    ) -> Walk:
        """Draft at each of some anchors, as generation does, `at_once` in one pass of the drafter. `teacher_positions`
        are those of [`loss`]; acceptance needs all draft positions."""
        following = self._following(batch, anchors, self.config.max_draft_tokens + 1)
        labels = following[:, :, :-1].contiguous()
        batch = batch | {"anchors": anchors, "steps": self.steps(), "labels": labels}
        parts = [
            self.run_drafter(drafter, batch | {"anchors": part})
            for part in anchors.split(at_once or anchors.shape[1], dim=1)
        ]
        whole = [None if part[0] is None else torch.cat(part, dim=1) for part in zip(*parts)]
        drafted = HeadOutput(cast(torch.Tensor, whole[0]), *whole[1:])
        terms = self.loss(drafted, batch, table, teacher_positions=teacher_positions)
        matches = terms.predictions.view_as(labels) == labels
        return Walk(
            terms.loss, anchors, (following != IGNORE_INDEX).sum(-1), matches, terms.acceptance.view(labels.shape)
        )

    def run_drafter(self, drafter: nn.Module, batch: Batch) -> HeadOutput:
        """Run the drafter over the blocks of a batch's anchors, as generation does; each draft follows the text's own
        token. Return the states for the target's LM head, `[batch, anchors, drafts, config.target_hidden_size]`, and
        the outputs of the drafter's heads.

        In generation the token before a draft is itself a draft. It equals the text's token while all drafts before
        it were right, and drafts after a wrong one never count. So predictions are those of greedy drafting wherever
        they matter."""
        config, anchors = self.config, batch["anchors"]
        first = anchors.clamp(min=0)
        at = batch["input_ids"].gather(1, first), batch["position_ids"].gather(1, first)
        tokens, positions = block_inputs(*at, config.block_size, config.mask_token_id)
        previous = previous_tokens(batch["input_ids"], anchors, config.max_draft_tokens)
        head = HEADS.get(config.sequential_head)
        with torch.no_grad():
            embeds = self.target.embed(tokens)
            previous_embeds = None if head is None or not head.reads_embeds else self.target.embed(previous)
        return drafter(
            embeds,
            positions,
            attention_mask=block_masks(config, anchors, batch["position_ids"]),
            residual=self._residual_read(batch),
            residual_position_ids=batch["position_ids"],
            previous_ids=previous,
            previous_embeds=previous_embeds,
        )

    def _residual_read(self, batch: Batch) -> torch.Tensor:
        """Return of the residual what the drafter reads."""
        return batch["residual"][:, :, : len(self.config.target_layer_ids or ()) * self.target.streams]

    def loss(
        self,
        drafted: HeadOutput,
        batch: Batch,
        table: torch.Tensor | None = None,
        counts: torch.Tensor | None = None,
        teacher_positions: int | None = None,
    ) -> DrafterLoss:
        """Compute the loss of drafts of [`run_drafter`]. `teacher_positions` is how many draft positions have a
        teacher: `None` for what the terms of the loss need, 0 where only predictions are wanted."""
        if teacher_positions is None:
            teacher_positions = self.config.max_draft_tokens if self.trains_acceptance else self.kl_positions
        states, vectors, confidence, blind, _ = (None if part is None else part.flatten(0, 1) for part in drafted)
        head = self.draft_head(table)
        if head.draft_ids is not None and vectors is not None:  # its own LM head and its head's table are one table
            states, vectors = torch.cat([cast(torch.Tensor, states), vectors.to(states)], dim=-1), None
        teacher = None
        if teacher_positions:
            teacher = self.teacher(batch["anchors"], batch["residual"], batch["steps"][:teacher_positions])
        flat = HeadOutput(cast(torch.Tensor, states), vectors, confidence, blind)
        return drafter_loss(flat, batch["labels"].flatten(0, 1), teacher, self.terms, head, counts)

    def draft_head(self, table: torch.Tensor | None = None) -> DraftHead:
        """Return what turns the drafter's states into logits, by its `vocabulary_table`."""
        draft_ids = self.drafter.draft_ids if self.config.draft_vocab_size else None
        return DraftHead(self.lm_head, table, draft_ids, self.config.head_candidates or 0)

    def lm_head(self, states: torch.Tensor) -> torch.Tensor:
        """Apply the target's LM head."""
        return self.target.logits(states).to(states.device)

    @torch.no_grad()
    def teacher(self, anchors: torch.Tensor, residual: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
        """Return the teacher's states, `[blocks, positions, hidden_size]`: a draft position learns from the target's
        state at the token before it (section 2.3), `steps` after the anchor. Overlapping blocks share the states."""
        batch, length = residual.shape[:2]
        at = (anchors.clamp(min=0).unsqueeze(-1) + steps.to(anchors.device)).clamp(max=length - 1)
        rows = length * torch.arange(batch, device=at.device)
        index, inverse = (at + rows[:, None, None]).unique(return_inverse=True)
        final = residual.flatten(0, 1)[index, -self.target.streams :]
        states = teacher_states(self.target, final.unsqueeze(0), self.args.kl_teacher).to(residual.device)
        return states[0, inverse].flatten(0, 1)


def teacher_states(target: Target, residual: torch.Tensor, kl_teacher: str = "hc_head") -> torch.Tensor:
    """Return the input of the target's LM head at each position, `[batch, seq, config.hidden_size]`, from the
    pre-collapse residual, `[batch, seq, config.hc_mult, config.hidden_size]`, without a forward.

    `"hc_head"` is the target's own collapse, whose logits are its next-token logits; `"mean_pool"` the mean of the
    streams, the paper's teacher (section 2.3), which a target without a final norm does not have."""
    head = cast(Any, target.model.get_output_embeddings()).weight
    residual = computable(residual, head).to(target.dtype)
    states = cast(Any, target.norm)(residual.mean(dim=2)) if kl_teacher == "mean_pool" else target.collapse(residual)
    return computable(states, head)
