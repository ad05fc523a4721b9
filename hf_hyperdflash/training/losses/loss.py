"""The drafter's loss, in chunks of states: cross-entropy, distillation (Eq. 2, 3) and acceptance itself. Torch alone.

Acceptance at temperature 1 is 1 less the total variation of what a draft is drawn from and what the target would draw
from: a loss of its own, and what a confidence head is to foretell.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from .chunk import Targets, chunk_loss, precise

IGNORE_INDEX = -100
_OF_LOGITS = torch.nn.Identity()


class DrafterLoss(NamedTuple):
    """A loss and its parts: all but the first detached, and 0 where there is nothing to compute them from.

    Args:
        loss: Scalar with a gradient, the weighted sum of the next five.
        cross_entropy: Scalar, per draft position.
        kl: Scalar, Eq. 2.
        tv: Scalar, per draft position: how often speculative sampling at temperature 1 rejects a draft.
        confidence: Scalar, per draft position.
        blind: Scalar, the cross-entropy of the block's own logits, per draft position.
        rank: Scalar, of a rank head; 0 here.
        predictions: `[blocks, drafts]`, the most probable token of every labelled position, -1 at the others.
        acceptance: `[blocks, drafts]`, 1 - TV of every labelled position: the probability that speculative sampling at
            temperature 1 accepts it where all before it were.
    """

    loss: torch.Tensor
    cross_entropy: torch.Tensor
    kl: torch.Tensor
    tv: torch.Tensor
    confidence: torch.Tensor
    blind: torch.Tensor
    rank: torch.Tensor
    predictions: torch.Tensor
    acceptance: torch.Tensor


def position_weights(drafts: int, decay: float | None) -> torch.Tensor | None:
    """DFlash's position weights exp(-(k-1) / decay), k = 1 .. `drafts`; `None`, meaning uniform, if `decay` is `None`.

    Raises:
        ValueError: If `decay` is not positive.
    """
    if decay is None:
        return None
    if decay <= 0:
        raise ValueError(f"`decay` is {decay}: expected a positive number (DFlash: 4 for blocks of 8), or None.")
    return torch.exp(-torch.arange(drafts) / decay)


def loss_counts(labels: torch.Tensor, kl_positions: int, weights: torch.Tensor | None = None) -> torch.Tensor:
    """What the sums of Eq. 2 and 3 are divided by. Add them up over the micro-batches and processes of one optimizer
    step, and pass the total to every one of them: their losses then sum to the loss of the one big batch.

    Args:
        labels: `[blocks, drafts]`, -100 where there is none.
        kl_positions: P of Eq. 2; 0 without a teacher.
        weights: `[drafts]`, of [`position_weights`].

    Returns:
        `[1 + P]`: the summed weights of the labelled positions, then for each of the first P draft positions the
        number of blocks that have a label there.

    Raises:
        ValueError: If there are fewer than P draft positions.
    """
    drafts = labels.shape[1]
    if not 0 <= kl_positions <= drafts:
        raise ValueError(
            f"`kl_positions` is {kl_positions}, but blocks have {drafts} draft positions: lower `kl_positions`."
        )
    blocks = (labels != IGNORE_INDEX).sum(0)
    weighted = blocks.float() if weights is None else blocks * weights.to(blocks.device)
    return torch.cat([weighted.sum(0, keepdim=True), blocks[:kl_positions].to(weighted)])


def rank_loss(class_logits: torch.Tensor, classes: torch.Tensor, budget: float = 10.0) -> torch.Tensor:
    """SpecBlock's loss of a rank head: cross-entropy with labels smoothed towards the classes nearby, more so towards
    more children, weighted by how far off the prediction is, twice if it tries too few. Of each slot's samples a class
    counts as `budget` at most. A block counts up to the first slot whose class is predicted wrongly.

    Args:
        class_logits: `[blocks, slots, 4]`.
        classes: `[blocks, slots]`, -100 where there is no label.
        budget: How many samples of a class and slot count fully.
    """
    logits, labelled = class_logits.float(), classes != IGNORE_INDEX
    true, predicted = classes.clamp(min=0), class_logits.argmax(-1)
    right = (predicted == true) & labelled
    counts = (torch.cat([labelled[:, :1], right[:, :-1] & labelled[:, 1:]], dim=1).long().cumprod(1)).bool()
    number = torch.arange(logits.shape[-1], device=logits.device)
    off = true.unsqueeze(-1) - number
    kernel = (1.0 + off.abs() + off.clamp(min=0)).pow(-2)
    entropy = -(kernel / kernel.sum(-1, keepdim=True) * logits.log_softmax(-1)).sum(-1)
    behind = true - predicted
    distance = 1.0 + behind.abs() + behind.clamp(min=0)
    of_class = torch.nn.functional.one_hot(true, logits.shape[-1]) * counts.unsqueeze(-1)
    weights = (budget / of_class.sum(0).clamp(min=1)).clamp(max=1.0).expand(len(true), -1, -1)
    weights = weights.gather(-1, true.unsqueeze(-1)).squeeze(-1) * counts
    return (entropy * distance * weights).sum() / weights.sum().clamp(min=torch.finfo(torch.float32).tiny)


def drafter_loss(
    states: torch.Tensor,
    labels: torch.Tensor,
    teacher: torch.Tensor | None = None,
    kl_weight: float = 0.15,
    kl_temperature: float = 1.0,
    weights: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
    *,
    kl_positions: int | None = None,
    kl_weights: torch.Tensor | None = None,
    ce_weight: float = 1.0,
    tv_weight: float = 0.0,
    confidence_weight: float = 0.0,
    blind_weight: float = 0.0,
    vectors: torch.Tensor | None = None,
    table: torch.Tensor | None = None,
    confidence: torch.Tensor | None = None,
    blind: torch.Tensor | None = None,
    candidates: int = 0,
    draft_ids: torch.Tensor | None = None,
    head: Callable[[torch.Tensor], torch.Tensor] = _OF_LOGITS,
    chunk_size: int = 256,
) -> DrafterLoss:
    """Eq. 3, cross-entropy plus `kl_weight` times T^2 / P sum_k E[KL(teacher_k || student_k)], and DSpark's terms.

    These are total variation, TV = 1/2 sum_i |p_i - t_i| between what a draft is drawn from and what the target would
    draw from, and the binary cross-entropy of a confidence head against 1 - TV. Half the L1 distance is what
    `tv_weight` multiplies, the rejection probability itself: DSpark's 0.9 ||p - t||_1 is a `tv_weight` of 1.8. A
    position counts for cross-entropy, TV and confidence by its weight; KL has weights of its own.

    A head that chooses among the best tokens of the block's own logits trains the states that it corrects, not what
    those logits say of them: they have a cross-entropy of their own. `predictions` and `acceptance` are then of the
    choice, as drafts are drawn; the losses are of the whole vocabulary.

    A drafter with a vocabulary of its own has an LM head of its own, its `table`, and no `vectors`. What it cannot
    draft it learns nothing of: such a label has a cross-entropy of 0, and KL counts by how probable the teacher finds
    what can be drafted. Acceptance is of the target's whole distribution, whose other tokens are never accepted.

    Logits, see [`~chunk_loss.student_logits`], exist for `chunk_size` draft positions at a time. Each chunk's
    gradients are taken at once, while its logits exist, and only multiplied in backward. So backward recomputes
    nothing, unlike with checkpointing. Positions without a label never meet the head.

    Args:
        states: `[blocks, drafts, config.target_hidden_size]`, the drafter's. Without `head` they are logits.
        labels: `[blocks, drafts]`, the tokens at a+1, a+2, ..; -100 where there is none, which then counts nowhere.
        teacher: `[blocks, T, config.target_hidden_size]`, what the head turns into the teacher's logits: the target's
            collapsed and normed states at a, a+1, .., of the first P draft positions or of all; `None` for
            cross-entropy alone. TV is computed with all.
        kl_weight: Alpha, 0.1 to 0.2 in the paper.
        kl_temperature: T of Eq. 2, of both distributions.
        weights: `[drafts]`, of [`position_weights`]: makes cross-entropy, TV and confidence weighted means.
        counts: `[1 + P]`, of [`loss_counts`], over the whole optimizer step; default: of these labels.
        kl_positions: P of Eq. 2; default: all that have a teacher.
        kl_weights: `[drafts]`, of each draft position's KL beside `kl_weight`; all alike if left out.
        ce_weight: Of the cross-entropy.
        tv_weight: Of the total variation.
        confidence_weight: Of the confidence head.
        blind_weight: Of the cross-entropy of the block's own logits.
        vectors: `[blocks, drafts, config.head_rank]`, a sequential head's, and
        table: `[config.vocab_size, config.head_rank]`, what it scores tokens with; `None` without such a head.
        confidence: `[blocks, drafts]`, the confidence head's logits.
        blind: `[blocks, drafts, config.target_hidden_size]`, the block's own states, and
        candidates: among how many of their best tokens a draft is chosen; `None` and 0 for all tokens.
        draft_ids: `[config.draft_vocab_size]`, the tokens that `table` scores, where these are not all.
        head: The target's LM head, `[n, config.target_hidden_size]` to `[n, config.vocab_size]`. It may move and cast
            what it is given; the loss is computed where its logits are, in float32 or better. Called with no gradient
            for its own parameters, and as often as this batch's labels need: not the same on every process.
        chunk_size: The most draft positions whose logits exist at once.

    Raises:
        ValueError: If the shapes do not match or `chunk_size` is not positive.
    """
    if chunk_size < 1:
        raise ValueError(f"`chunk_size` is {chunk_size}: expected at least 1 (256 is a good default).")
    _check_shapes(states, labels, teacher, vectors, table, confidence, blind)
    taught = 0 if teacher is None else teacher.shape[1]
    positions = taught if kl_positions is None else kl_positions
    _check_positions(labels.shape[1], taught, positions, weights, counts)
    everywhere = taught == labels.shape[1]
    if not everywhere and (tv_weight or confidence is not None):
        raise ValueError(
            f"`teacher` has {taught} draft positions: expected all {labels.shape[1]}, for total variation and "
            "confidence."
        )
    counts = loss_counts(labels, positions, weights) if counts is None else counts
    counts = counts.to(labels.device, precise(states))
    # What one block counts for at each draft position, and its KL; 0 where a count is.
    per_count = counts.reciprocal().masked_fill(counts == 0, 0.0)
    ones = torch.ones(labels.shape[1]).to(per_count)
    scale = per_count[0] * (ones if weights is None else weights.to(ones))
    kl_scale = per_count[1:] * (kl_temperature**2 / max(positions, 1))
    if kl_weights is not None:
        kl_scale = kl_scale * kl_weights[:positions].to(kl_scale)
    # Divided by counts, gradients are so small that they would vanish in a float16 head. They are taken in this unit
    # and multiplied by it in backward, where a gradient scaler's factor has arrived.
    unit = torch.cat([max(ce_weight, tv_weight, blind_weight) * scale, kl_weight * kl_scale]).max()
    unit = unit.clamp(min=torch.finfo(torch.float32).tiny)
    given = {"states": states, "vectors": vectors, "table": table}
    sources = {name: source for name, source in given.items() if source is not None}
    needs_gradient = torch.is_grad_enabled() and any(source.requires_grad for source in sources.values())
    gradients = {
        name: torch.zeros_like(source, dtype=precise(source) if name == "table" else None)  # that is a sum over chunks
        for name, source in sources.items()
        if needs_gradient
    }
    trains_blind = needs_gradient and bool(blind_weight)
    blind_gradient = None if blind is None or not trains_blind else torch.zeros_like(blind)
    predictions, acceptance = torch.full_like(labels, -1), torch.zeros_like(labels, dtype=unit.dtype)
    cross_entropy = kl = tv = blind_cross_entropy = torch.zeros_like(unit)
    for block, draft, distilled in _labelled_chunks(labels, positions, chunk_size):
        rows = slice(None if everywhere else distilled)
        row, kl_row = scale[draft], kl_scale[draft[:distilled]]
        targets = Targets(
            labels[block, draft] if draft_ids is None else places_of(labels[block, draft], draft_ids),
            None if teacher is None else teacher.detach()[block[rows], draft[rows]],
            ce_weight * row / unit,
            kl_weight * kl_row / unit,
            tv_weight * row / unit if everywhere else None,
            draft_ids=draft_ids,
        )
        if blind is not None:
            blind_targets = Targets(targets.labels, None, blind_weight * row / unit, kl_row[:0], None)
            own = blind.detach()[block, draft].requires_grad_(blind_gradient is not None)
            of_block = chunk_loss({"states": own}, blind_targets, head, 1.0, best=candidates)
            blind_cross_entropy = blind_cross_entropy + (of_block.cross_entropy.to(unit) * row).sum()
            targets = targets._replace(candidates=of_block.predictions)
            if blind_gradient is not None:
                blind_gradient[block, draft] = of_block.gradients[0]
            del of_block
        inputs = {name: source.detach() for name, source in sources.items()}
        inputs |= {name: source[block, draft] for name, source in inputs.items() if name != "table"}
        inputs = {name: source.requires_grad_(needs_gradient) for name, source in inputs.items()}
        of_chunk = chunk_loss(inputs, targets, head, kl_temperature)
        cross_entropy = cross_entropy + (of_chunk.cross_entropy.to(unit) * row).sum()
        kl = kl + (of_chunk.kl.to(unit) * kl_row).sum()
        if everywhere:
            tv = tv + (of_chunk.tv.to(unit) * row).sum()
            acceptance[block, draft] = of_chunk.acceptance.to(acceptance)
        predicted = of_chunk.predictions[:, 0].to(predictions)
        predictions[block, draft] = predicted if draft_ids is None else draft_ids.to(predicted)[predicted]
        _keep(gradients, of_chunk.gradients, block, draft)
        del of_chunk  # a table's gradient is as large as logits
    loss = ce_weight * cross_entropy + kl_weight * kl + tv_weight * tv + blind_weight * blind_cross_entropy
    if blind is not None and blind_gradient is not None:
        sources, gradients = sources | {"blind": blind}, gradients | {"blind": blind_gradient}
    if needs_gradient:
        loss = _PrecomputedGradients.apply(loss, unit, list(gradients.values()), *sources.values())
    surprise = torch.zeros_like(unit)
    if confidence is not None:
        each = binary_cross_entropy_with_logits(confidence.to(acceptance), acceptance, reduction="none")
        surprise = (each.masked_fill(labels == IGNORE_INDEX, 0.0) * scale).sum()
        loss = loss + confidence_weight * surprise
    told = cross_entropy, kl, tv, surprise.detach(), blind_cross_entropy, torch.zeros_like(unit)
    return DrafterLoss(loss, *told, predictions, acceptance)


def _keep(
    gradients: Mapping[str, torch.Tensor], of_chunk: Sequence[torch.Tensor], block: torch.Tensor, draft: torch.Tensor
) -> None:
    """Write what is of positions where they are, and add what is of the table."""
    for (name, gradient), part in zip(gradients.items(), of_chunk):
        if name == "table":
            gradient += part
        else:
            gradient[block, draft] = part


def places_of(tokens: torch.Tensor, draft_ids: torch.Tensor) -> torch.Tensor:
    """Where tokens of any shape stand among those that can be drafted, -1 for what cannot."""
    ordered, order = draft_ids.to(tokens.device).sort()
    at = torch.searchsorted(ordered, tokens).clamp(max=len(ordered) - 1)
    return torch.where(ordered[at] == tokens, order[at], -1)


class _PrecomputedGradients(torch.autograd.Function):
    """A value whose gradients with respect to its sources, in units of `unit`, are known."""

    @staticmethod
    def forward(
        ctx: Any, value: torch.Tensor, unit: torch.Tensor, gradients: Sequence[torch.Tensor], *sources: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(unit, *gradients)
        return value.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        unit, *gradients = ctx.saved_tensors
        return None, None, None, *(gradient * (upstream * unit) for gradient in gradients)


def _labelled_chunks(
    labels: torch.Tensor, positions: int, chunk_size: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor, int]]:
    """Block and draft index of the labelled positions, up to `chunk_size` at a time, and how many of these, put first,
    lie among the first `positions` draft positions. The indices are on the CPU, so that no chunk waits for a GPU."""
    for chunk in (labels != IGNORE_INDEX).cpu().nonzero().split(chunk_size):
        is_distilled = chunk[:, 1] < positions
        block, draft = torch.cat([chunk[is_distilled], chunk[~is_distilled]]).unbind(1)
        if len(chunk):
            yield block, draft, int(is_distilled.sum())


def _check_shapes(
    states: torch.Tensor,
    labels: torch.Tensor,
    teacher: torch.Tensor | None,
    vectors: torch.Tensor | None,
    table: torch.Tensor | None,
    confidence: torch.Tensor | None,
    blind: torch.Tensor | None,
) -> None:
    if states.shape[:2] != labels.shape:
        raise ValueError(
            f"`states` are {tuple(states.shape)} and `labels` {tuple(labels.shape)}: expected equal blocks and drafts."
        )
    blocks, drafts = labels.shape
    rank = 0 if table is None else table.shape[1]
    read = teacher.shape[2] if teacher is not None and table is not None and vectors is None else states.shape[2]
    for what, given, expected in (
        ("teacher", teacher, (blocks, min(drafts, teacher.shape[1] if teacher is not None else 0), read)),
        ("vectors", vectors, (blocks, drafts, rank)),
        ("confidence", confidence, (blocks, drafts)),
        ("blind", blind, tuple(states.shape)),
    ):
        if given is not None and given.shape != expected:
            raise ValueError(f"`{what}` are {tuple(given.shape)}: expected {expected}, as `states` and `labels`.")


def _check_positions(
    drafts: int, taught: int, positions: int, weights: torch.Tensor | None, counts: torch.Tensor | None
) -> None:
    if taught not in (positions, drafts):
        raise ValueError(
            f"`teacher` has {taught} draft positions: expected {positions}, `kl_positions`, or all {drafts}."
        )
    for what, vector, length in (("weights", weights, drafts), ("counts", counts, 1 + positions)):
        if vector is not None and vector.shape != (length,):
            raise ValueError(
                f"`{what}` are of shape {tuple(vector.shape)}: expected ({length},) for {drafts} draft positions and "
                f"a teacher of {positions}. Use `position_weights` and `loss_counts`."
            )
