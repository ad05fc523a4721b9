"""The training objective of a drafter: anchors in rows of text, the drafter's output at them, and its loss.

The trainer and learning while serving share it. It has no process group, no optimizer and no random state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, cast

import torch
from torch import nn

from ...drafters.parts.heads import HEADS, HeadOutput
from ...drafters.parts.layers import block_inputs
from ...targets.target import Target
from ..arguments import LOSS_WEIGHTS
from ..data.blocks import anchor_candidates, anchor_seeds, block_labels, block_masks, previous_tokens, sample_anchors
from .chunk import student_logits
from .loss import DrafterLoss, drafter_loss, indices_among, loss_counts, position_weights
from .teacher import check_teacher, teacher_states

Batch = dict[str, torch.Tensor]


def collate(rows: Sequence[dict[str, Any]]) -> Batch:
    """Pad rows on the right. Position ids go on counting in the padding, which so belongs to the last document.

    Args:
        rows: `input_ids`, `loss_mask`, `position_ids` of `[seq]` each and, from a feature cache, `residual`
            `[seq, config.hc_mult, config.hidden_size]`.

    Returns:
        The same names, `[batch, seq]` and `[batch, seq, config.hc_mult, config.hidden_size]`.
    """
    names = [name for name in ("input_ids", "loss_mask", "position_ids", "residual") if name in rows[0]]
    columns = {name: [torch.as_tensor(row[name]) for row in rows] for name in names}
    batch: Batch = {name: nn.utils.rnn.pad_sequence(values, batch_first=True) for name, values in columns.items()}
    for row, positions in zip(batch["position_ids"], columns["position_ids"]):
        row[len(positions) :] = positions[-1] + torch.arange(1, len(row) - len(positions) + 1)
    batch["loss_mask"] = batch["loss_mask"].bool()
    return batch


def training_layer_ids(drafter: Any, target: Target) -> list[int]:
    """Return the layers that training reads: the drafter's and, for the teacher, the last one."""
    ids = list(drafter.layers_read(target))
    return ids if ids[-1] == -1 else [*ids, -1]


class LossSettings(Protocol):
    """What an objective reads of the arguments of a training, or of learning while serving."""

    ce_weight: float | None
    kl_weight: float | None
    kl_positions: int | None
    kl_temperature: float
    kl_teacher: str
    tv_weight: float | None
    confidence_weight: float | None
    blind_weight: float | None
    rank_weight: float | None
    loss_decay: float | None
    valid_prefix: bool | None
    num_anchors: int
    loss_chunk_size: int
    seed: int


class BlockObjective:
    """The objective of drafters whose blocks do not depend on each other.

    Args:
        drafter: The drafter, wrapped by PEFT or not; its configuration and vocabulary are read.
        target: Its target.
        args: With `num_anchors`, `seed`, `kl_temperature`, `kl_teacher`, `loss_chunk_size` and what a recipe sets, as
            [`HyperDFlashTrainingArguments`] have.

    Raises:
        ValueError: If the target cannot be such a teacher.

    Attributes:
        loss_weights: Weights of the loss's terms; 0 where the drafter does not have the part that a term trains.
        kl_positions: How many draft positions are distilled.
        trains_acceptance: Whether the loss needs the probability that each draft is accepted.
        layer_ids: The layers that training reads, the drafter's first.
        selects_candidates: Whether a head chooses among the best tokens of the block's own logits.
    """

    def __init__(self, drafter: Any, target: Target, args: LossSettings) -> None:
        check_teacher(target, args.kl_teacher)
        config = drafter.config
        self.drafter, self.config, self.target, self.args = drafter, config, target, args
        self.layer_ids = training_layer_ids(drafter, target)
        self.weights = self._position_weights(args.loss_decay)
        self.kl_weights: torch.Tensor | None = None
        self.loss_weights: dict[str, float] = {name: getattr(args, name) for name in LOSS_WEIGHTS}
        if not config.confidence_head:
            self.loss_weights["confidence_weight"] = 0.0
        self.selects_candidates = config.sequential_head in HEADS and bool(config.head_candidates)
        if not self.selects_candidates:
            self.loss_weights["blind_weight"] = 0.0
        self.kl_positions = (args.kl_positions or config.max_draft_tokens) if args.kl_weight else 0
        self.trains_acceptance = bool(args.tv_weight) or config.confidence_head

    def _position_weights(self, decay: float | None) -> torch.Tensor | None:
        return position_weights(self.config.max_draft_tokens, decay)

    def add_anchors(self, batch: Batch, step: int, num_anchors: int | None = None) -> None:
        """Add `anchors`, `steps` and `labels` to a batch of [`collate`], as they are drawn for an optimizer step.

        A row gets at most `num_anchors` anchors; `None` for the number in the arguments.
        """
        seeds = anchor_seeds(batch["input_ids"], batch["loss_mask"], self.args.seed, step)
        batch["anchors"] = sample_anchors(self.candidates(batch), num_anchors or self.args.num_anchors, seeds)
        batch["steps"] = self.steps(step)
        labels = self.following_tokens(batch, batch["anchors"], int(batch["steps"].max()) + 1)
        batch["labels"] = labels[:, :, batch["steps"].to(labels.device)].contiguous()

    def candidates(self, batch: Batch) -> torch.Tensor:
        """Return the positions where a block can start, boolean `[batch, seq]`."""
        return anchor_candidates(batch["loss_mask"], batch["position_ids"])

    def steps(self, step: int | None = None) -> torch.Tensor:
        """Return the distance from the anchor to the token before each draft position, `[drafts]`.

        Args:
            step: The optimizer step; `None` for the distances that generation has.
        """
        return torch.arange(self.config.max_draft_tokens)

    def following_tokens(self, batch: Batch, anchors: torch.Tensor, count: int) -> torch.Tensor:
        """Return the `count` tokens after each anchor, `[batch, anchors, count]`, see [`block_labels`]."""
        return block_labels(batch["input_ids"], batch["loss_mask"], batch["position_ids"], anchors, count)

    def counts(self, batches: Sequence[Batch]) -> torch.Tensor:
        """Return what the losses of the batches are divided by, summed over all of them, see [`loss_counts`]."""
        labels = [batch["labels"].flatten(0, 1) for batch in batches]
        return torch.as_tensor(sum(loss_counts(each, self.kl_positions, self.weights) for each in labels))

    def run_drafter(
        self, drafter: nn.Module, batch: Batch, anchors: torch.Tensor, residual: torch.Tensor, steps: torch.Tensor
    ) -> HeadOutput:
        """Run the drafter over the blocks of `anchors`, as generation does; each draft follows the text's own token.

        In generation the token before a draft is itself a draft. It equals the text's token while all drafts before
        it were right, and drafts after a wrong one never count. So predictions are those of greedy drafting wherever
        they matter.

        Args:
            drafter: The drafter, wrapped for distributed training or not.
            batch: `input_ids` and `position_ids`, `[batch, seq]`.
            anchors: Indices into the rows, `[batch, anchors]`, -1 for missing ones.
            residual: `[batch, seq, streams, config.target_hidden_size]` of the same rows, of `layer_ids`.
            steps: Of [`steps`].

        Returns:
            The states for the target's LM head, `[batch, anchors, config.max_draft_tokens,
            config.target_hidden_size]`, and the outputs of the drafter's heads.
        """
        config = self.config
        first, size = anchors.clamp(min=0), config.block_size
        anchor_ids, anchor_positions = (batch[name].gather(1, first) for name in ("input_ids", "position_ids"))
        tokens, positions = block_inputs(anchor_ids, anchor_positions, size, config.mask_token_id)
        previous = previous_tokens(batch["input_ids"], anchors, config.max_draft_tokens)
        head = HEADS.get(config.sequential_head)
        with torch.no_grad():
            embeds = self.target.embed(tokens)
            previous_embeds = None if head is None or not head.reads_embeds else self.target.embed(previous)
        return drafter(
            embeds,
            positions,
            attention_mask=block_masks(config, anchors, batch["position_ids"]),
            residual=self.residual_read(residual),
            residual_position_ids=batch["position_ids"],
            previous_ids=previous,
            previous_embeds=previous_embeds,
        )

    def residual_read(self, residual: torch.Tensor) -> torch.Tensor:
        """Return of the residual what the drafter reads."""
        return residual[:, :, : len(self.config.target_layer_ids or ()) * self.target.streams]

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
        """Compute the loss of drafts.

        Args:
            drafted: Of [`run_drafter`].
            anchors: `[batch, anchors]`.
            labels: `[batch, anchors, config.max_draft_tokens]`.
            residual: `[batch, seq, streams, config.target_hidden_size]`.
            steps: Of [`steps`].
            table: The drafter's `vocabulary_table`, whole.
            counts: Of the whole optimizer step; default: of these labels.
            needs_acceptance: Whether to compute acceptance even if no term of the loss needs it.
        """
        covers_all = self.trains_acceptance or needs_acceptance
        teacher_positions = self.config.max_draft_tokens if covers_all else self.kl_positions
        states, vectors, confidence, blind, _ = (None if part is None else part.flatten(0, 1) for part in drafted)
        states, vectors = self._read(cast(torch.Tensor, states), vectors)
        return drafter_loss(
            states,
            labels.flatten(0, 1),
            self.teacher(anchors, residual, steps[:teacher_positions]) if teacher_positions else None,
            kl_temperature=self.args.kl_temperature,
            kl_positions=self.kl_positions,
            kl_weights=self.kl_weights,
            weights=self.weights,
            counts=counts,
            vectors=vectors,
            table=table,
            confidence=confidence,
            blind=blind,
            candidates=self.config.head_candidates or 0,
            draft_ids=self.draft_ids,
            head=self.head,
            chunk_size=self.args.loss_chunk_size,
            **self.loss_weights,
        )

    @property
    def draft_ids(self) -> torch.Tensor | None:
        """The tokens that can be drafted, `[config.draft_vocab_size]`; `None` for all."""
        return self.drafter.draft_ids if self.config.draft_vocab_size else None

    def draft_logits(
        self, states: torch.Tensor, vectors: torch.Tensor | None, table: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the drafter's logits of n drafts, `[n, config.draft_vocab_size or config.vocab_size]`, from its
        states, its head's vectors and its `vocabulary_table`."""
        return student_logits(self.head, *self._read(states, vectors), table)

    def draft_indices(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the index of each token in [`draft_logits`], -1 for a token that cannot be drafted."""
        return tokens if self.draft_ids is None else indices_among(tokens, self.draft_ids)

    def _read(self, states: torch.Tensor, vectors: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Join states and vectors where the drafter's own LM head and its head's table are joined."""
        if self.draft_ids is None or vectors is None:
            return states, vectors
        return torch.cat([states, vectors.to(states)], dim=-1), None

    def head(self, states: torch.Tensor) -> torch.Tensor:
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
