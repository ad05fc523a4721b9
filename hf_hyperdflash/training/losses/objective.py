"""The training objective of a drafter, of the trainer and of learning while serving: anchors in rows of text, what the
target computes of them, the drafter's output and its loss. It has no process group, optimizer or random state."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from ...drafters.parts.heads import HEADS, RANK_CLASSES, HeadOutput, rank_classes
from ...drafters.parts.layers import block_inputs
from ...targets.registry import capture_residual
from ...targets.target import Target, computable
from ..arguments import LOSS_WEIGHTS
from ..data.blocks import anchor_candidates, anchor_seeds, block_labels, block_masks, previous_tokens, sample_anchors
from ..flags import TrainingFlags
from .loss import (
    IGNORE_INDEX,
    DrafterLoss,
    DraftHead,
    LossTerms,
    Total,
    drafter_loss,
    indices_among,
    loss_counts,
    position_weights,
    rank_loss,
    student_logits,
)

Batch = dict[str, torch.Tensor]


def collate(rows: Sequence[Mapping[str, object]]) -> Batch:
    """Pad rows of `input_ids`, `loss_mask`, `position_ids` and, from a feature cache, `residual` on the right.
    Position ids go on counting in the padding, which so belongs to the last document."""
    names = [name for name in ("input_ids", "loss_mask", "position_ids", "residual") if name in rows[0]]
    columns = {name: [torch.as_tensor(row[name]) for row in rows] for name in names}
    batch: Batch = {name: pad_sequence(values, batch_first=True) for name, values in columns.items()}
    for row, positions in zip(batch["position_ids"], columns["position_ids"]):
        row[len(positions) :] = positions[-1] + torch.arange(1, len(row) - len(positions) + 1)
    batch["loss_mask"] = batch["loss_mask"].bool()
    return batch


def compute_residual(
    target: PreTrainedModel,
    input_ids: torch.Tensor,
    position_ids: torch.Tensor,
    target_layer_ids: Sequence[int] = (-1,),
) -> torch.Tensor:
    """Compute the residual streams of right-padded or packed rows, by default the pre-collapse ones, `[batch, seq,
    len(target_layer_ids) * config.hc_mult, config.hidden_size]` on the device of `input_ids`."""
    # The target runs over each document alone, whose positions count from 0, so that none sees another: V4's
    # compressors have no mask for that. Padding on the right changes nothing, because every part of V4 is causal.
    if not (position_ids != torch.arange(input_ids.shape[1], device=position_ids.device)).any():  # not packed
        return _forward(target, input_ids, target_layer_ids).to(input_ids.device)
    documents = split_documents(input_ids.flatten(), position_ids.flatten())
    residual = compute_document_residuals(target, documents, target_layer_ids)
    return torch.cat(residual).to(input_ids.device).unflatten(0, input_ids.shape)


def split_documents(input_ids: torch.Tensor, position_ids: torch.Tensor) -> Sequence[torch.Tensor]:
    """Split rows that are laid end to end into the ids of each document."""
    return input_ids.tensor_split((position_ids == 0).nonzero().flatten().tolist()[1:])


def compute_document_residuals(
    target: PreTrainedModel, documents: Sequence[torch.Tensor], target_layer_ids: Sequence[int]
) -> list[torch.Tensor]:
    """Compute each document's residual streams, `[seq, streams, config.hidden_size]`, in one forward over all."""
    residual = _forward(target, pad_sequence(list(documents), batch_first=True), target_layer_ids)
    return [states[: len(ids)] for states, ids in zip(residual, documents)]


@torch.no_grad()
def _forward(target: PreTrainedModel, input_ids: torch.Tensor, target_layer_ids: Sequence[int]) -> torch.Tensor:
    if target.device.type != "meta":  # an offloaded target's ids are moved by accelerate's hooks
        input_ids = input_ids.to(target.device)
    with capture_residual(target, target_layer_ids) as captured:
        target.base_model(input_ids=input_ids, use_cache=False)
    return captured[0]


class Walk(NamedTuple):
    """Drafts at many anchors of rows of text, each after the text's own tokens: the rounds of generation are among
    them, if the target wrote the text."""

    loss: torch.Tensor
    available: torch.Tensor  # `[batch, anchors]`, tokens of the same stretch that follow, at most one more than drafts
    matches: torch.Tensor  # `[batch, anchors, drafts]`, whether a draft is the text's token
    acceptance: torch.Tensor  # `[batch, anchors, drafts]`, its probability at temperature 1; 0 without a teacher


def layers_needed(drafter: Any, target: Target) -> list[int]:
    """Return the layers that training a drafter reads: the drafter's, and the last one for the teacher."""
    read = list(drafter.layers_read(target))
    return read if read[-1] == -1 else [*read, -1]


class BlockObjective:
    """The objective of drafters whose blocks do not depend on each other.

    Training calls [`add_anchors`] and [`step`], and judges by [`walk`]. A batch is one of [`collate`] with the
    residual of `layer_ids`, `[batch, seq, streams, config.target_hidden_size]`.

    Attributes:
        total: Sums a tensor over the processes that each have a part of a batch.
        progress: The part of training that is done, 0 to 1.
    """

    total: Total = staticmethod(lambda value: value)
    progress: float = 1.0

    # Whether blocks continue from others: the weights of draft positions begin anew with each, and are the KL's, too.
    continues: ClassVar[bool] = False

    def __init__(self, drafter: Any, target: Target, args: TrainingFlags, seed: int = 42) -> None:
        if args.kl_teacher == "mean_pool" and target.norm is None:
            raise ValueError(
                f"`kl_teacher` is 'mean_pool', but a {target.config.model_type} target has no norm after its "
                "collapse. Use 'hc_head'."
            )
        config = drafter.config
        self.drafter, self.config, self.target, self.args, self.seed = drafter, config, target, args, seed
        self.layer_ids = layers_needed(drafter, target)
        self.streams_read = slice(len(config.target_layer_ids or ()) * target.streams)  # of them by the drafter
        self.selects_candidates = config.sequential_head in HEADS and bool(config.head_candidates)
        self.block_first = (args.block_first or 0.0) if config.sequential_head in HEADS else 0.0
        self.kl_positions = (args.kl_positions or config.max_draft_tokens) if args.kl_weight else 0
        if self.kl_positions > config.max_draft_tokens:
            raise ValueError(
                f"`kl_positions` is {self.kl_positions}, but the drafter has {config.max_draft_tokens} draft "
                "positions: lower it."
            )
        self.trains_acceptance = bool(args.tv_weight) or config.confidence_head
        # The weight of a part that the drafter does not have is 0.
        trained: dict[str, float] = {name: getattr(args, name) for name in LOSS_WEIGHTS}
        trained["confidence_weight"] *= bool(config.confidence_head)
        trained["blind_weight"] *= self.selects_candidates
        # With one token a block, each block is a position.
        size = config.block_size if self.continues and config.block_size > 1 else config.max_draft_tokens
        weights = position_weights(size, args.loss_decay)
        weights = weights if weights is None else weights.repeat(config.max_draft_tokens // size)
        self.terms = LossTerms(
            **trained,
            position_weights=weights,
            kl_positions=self.kl_positions,
            kl_position_weights=weights if self.continues else None,
            kl_by_token=bool(args.kl_by_token),
            kl_temperature=args.kl_temperature,
            chunk_size=args.loss_chunk_size,
        )

    # A batch

    def add_anchors(self, batch: Batch, step: int) -> None:
        """Add `anchors`, `steps` and `labels` to a batch of [`collate`], as they are drawn for an optimizer step."""
        seeds = anchor_seeds(batch["input_ids"], batch["loss_mask"], self.seed, step)
        anchors, steps = sample_anchors(self.candidates(batch), self.args.num_anchors, seeds), self.steps(step)
        row = batch["input_ids"], batch["loss_mask"], batch["position_ids"]
        labels = block_labels(*row, anchors, int(steps.max()) + 1)[:, :, steps.to(anchors.device)].contiguous()
        batch |= {"anchors": anchors, "steps": steps, "labels": labels}

    def candidates(self, batch: Batch) -> torch.Tensor:
        """Return the positions where a block can start, boolean `[batch, seq]`."""
        return anchor_candidates(batch["loss_mask"], batch["position_ids"])

    def steps(self, step: int | None = None) -> torch.Tensor:
        """Return the distance from the anchor to the token before each draft position, `[drafts]`, at an optimizer
        step; `None` for the distances that generation has."""
        return torch.arange(self.config.max_draft_tokens)

    def counts(self, batches: Sequence[Batch]) -> torch.Tensor:
        """Return what the losses of the batches are divided by, summed over all of them, see [`loss_counts`]."""
        weights = self.terms.position_weights
        counts = (loss_counts(batch["labels"].flatten(0, 1), self.kl_positions, weights) for batch in batches)
        return torch.as_tensor(sum(counts))

    # Training and judging

    def step(
        self, drafter: nn.Module, batch: Batch, table: torch.Tensor | None = None, counts: torch.Tensor | None = None
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
        row = batch["input_ids"], batch["loss_mask"], batch["position_ids"]
        following = block_labels(*row, anchors, self.config.max_draft_tokens + 1)
        labels = following[:, :, :-1].contiguous()
        batch = batch | {"anchors": anchors, "steps": self.steps(), "labels": labels}
        split = anchors.split(at_once or anchors.shape[1], dim=1)
        parts = [self.run_drafter(drafter, batch | {"anchors": part}) for part in split]
        whole = [None if part[0] is None else torch.cat(part, dim=1) for part in zip(*parts)]
        drafted = HeadOutput(cast(torch.Tensor, whole[0]), *whole[1:])
        terms = self.loss(drafted, batch, table, teacher_positions=teacher_positions)
        matches = terms.predictions.view_as(labels) == labels
        available = (following != IGNORE_INDEX).sum(-1)
        return Walk(terms.loss, available, matches, terms.acceptance.view(labels.shape))

    def run_drafter(self, drafter: nn.Module, batch: Batch) -> HeadOutput:
        """Return the drafter's output, `[batch, anchors, drafts, ...]`, over the blocks of a batch's anchors.

        Each draft follows the text's own token. In generation that is itself a draft, which equals the text's while
        all drafts before it were right, and drafts after a wrong one never count."""
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
            residual=batch["residual"][:, :, self.streams_read],
            residual_position_ids=batch["position_ids"],
            previous_ids=previous,
            previous_embeds=previous_embeds,
        )

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
            blind = None if blind is None else torch.cat([blind, torch.zeros_like(vectors, dtype=blind.dtype)], dim=-1)
            states, vectors = torch.cat([cast(torch.Tensor, states), vectors.to(states)], dim=-1), None
        teacher = None
        if teacher_positions:
            teacher = self.teacher(batch["anchors"], batch["residual"], batch["steps"][:teacher_positions])
        flat = HeadOutput(cast(torch.Tensor, states), vectors, confidence, blind)
        return drafter_loss(flat, batch["labels"].flatten(0, 1), teacher, self.terms_now(), head, counts)

    def terms_now(self) -> LossTerms:
        """Return the terms of the loss. Those of training go from the block's own cross-entropy to that of its head
        (Domino's `lambda_base`), in the first part of training, `block_first`."""
        own = max(0.0, 1 - self.progress / self.block_first) if self.block_first and torch.is_grad_enabled() else 0.0
        if not own:
            return self.terms
        weight = own * self.terms.ce_weight
        return replace(
            self.terms, ce_weight=self.terms.ce_weight - weight, blind_weight=self.terms.blind_weight + weight
        )

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


class UnrolledObjective(BlockObjective):
    """The objective of an [`Eagle3Drafter`], a [`PEagleDrafter`] or a [`SpecBlockDrafter`].

    Every position of the text starts a first block. At anchors later blocks continue from a slot of the one before,
    drawn anew for every step of training, `config.max_blocks` in all, each with the text's own token.
    """

    continues = True

    def candidates(self, batch: Batch) -> torch.Tensor:
        return super().candidates(batch) & (batch["position_ids"] > 0)  # one position precedes the anchor

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
        later = self.drafter.later_ids(ids.gather(1, at.flatten(1)).view_as(at))
        if not self.config.own_embedding:
            with torch.no_grad():
                following, later = (self.target.embed(each) for each in (following, later))
        with torch.no_grad():
            read = self.drafter.read(self.target, batch["residual"][:, :, self.streams_read])
        return drafter(
            read,
            position_ids=batch["position_ids"],
            next_embeds=following,
            entries=(anchors - 1).clamp(min=0),
            later_embeds=later,
            slots=(first.diff() - 1).tolist(),
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
            if counts is not None:  # the share that is left of this batch: that of the whole step is not known yet
                both = [self.counts([{"labels": each}]).to(counts) for each in (counted, labels)]
                left, all_ = self.total(torch.stack(both))
                counts = counts * torch.where(all_ > 0, left / all_.clamp(min=1e-9), 0.0)
        terms = super().loss(drafted, batch | {"labels": counted}, table, counts, teacher_positions)
        if ranks is None:
            return terms
        flat = ranks.flatten(0, 1).view(-1, size, ranks.shape[-1]), classes.view(-1, size)
        if counts is None:
            rank_terms = rank_loss(*flat)
        else:  # a part of a step
            own = self.total(loss_counts(counted.flatten(0, 1), 0, self.terms.position_weights).to(counts)[0])
            rank_terms = rank_loss(*flat, total=self.total) * own / counts[0]
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
            logits, tokens = (
                student_logits(head.lm_head, states[index], None, table),
                indices_among(labels[index], head.draft_ids),
            )
            right[index] = logits.argmax(-1) == tokens
            rank_terms = rank_classes(logits, tokens.clamp(min=0))
            classes[index] = rank_terms.masked_fill(tokens < 0, RANK_CLASSES - 1)
        return right, classes


def make_objective(drafter: Any, target: Target, args: TrainingFlags, seed: int = 42) -> BlockObjective:
    """Return the objective for a drafter's kind, see [`BlockObjective`]."""
    kind = UnrolledObjective if hasattr(drafter.config, "max_blocks") else BlockObjective
    return kind(drafter, target, args, seed)
