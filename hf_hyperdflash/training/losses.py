"""The drafter's loss, cross-entropy plus LM-head distillation (Eq. 2 and 3), in chunks of states. Torch alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

IGNORE_INDEX = -100
_OF_LOGITS = torch.nn.Identity()


class DrafterLoss(NamedTuple):
    """Eq. 3 and its parts.

    Args:
        loss: Scalar with a gradient, cross-entropy plus `kl_weight` times KL.
        cross_entropy: Scalar, detached.
        kl: Scalar, detached: Eq. 2; 0 without a teacher.
        predictions: `[blocks, drafts]`, the most probable token of every labelled position, -1 at the others.
    """

    loss: torch.Tensor
    cross_entropy: torch.Tensor
    kl: torch.Tensor
    predictions: torch.Tensor


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


def drafter_loss(
    states: torch.Tensor,
    labels: torch.Tensor,
    teacher: torch.Tensor | None = None,
    kl_weight: float = 0.15,
    kl_temperature: float = 1.0,
    weights: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
    *,
    head: Callable[[torch.Tensor], torch.Tensor] = _OF_LOGITS,
    chunk_size: int = 256,
) -> DrafterLoss:
    """Eq. 3: cross-entropy plus `kl_weight` times T^2 / P sum_k E[KL(teacher_k || student_k)].

    Logits exist for `chunk_size` draft positions at a time. Each chunk's gradient with respect to `states` is taken
    at once, while its logits exist, and only multiplied in backward. So backward recomputes nothing, unlike with
    checkpointing. Positions without a label never meet the head.

    Args:
        states: `[blocks, drafts, config.target_hidden_size]`, the drafter's: all that gets a gradient. Without `head`
            they are logits.
        labels: `[blocks, drafts]`, the tokens at a+1, a+2, ..; -100 where there is none, which then counts nowhere.
        teacher: `[blocks, P, config.target_hidden_size]`, what the head turns into the teacher's logits: the target's
            collapsed and normed states at a, a+1, ..; `None` for cross-entropy alone.
        kl_weight: Alpha, 0.1 to 0.2 in the paper.
        kl_temperature: T of Eq. 2, of both distributions.
        weights: `[drafts]`, of [`position_weights`]: makes the cross-entropy a weighted mean. KL is not weighted.
        counts: `[1 + P]`, of [`loss_counts`], over the whole optimizer step; default: of these labels.
        head: The target's LM head, `[n, config.target_hidden_size]` to `[n, config.vocab_size]`. It may move and cast
            what it is given; the loss is computed where its logits are, in float32 or better. Called with no gradient
            for its own parameters, and as often as this batch's labels need: not the same on every process.
        chunk_size: The most draft positions whose logits exist at once.

    Raises:
        ValueError: If the shapes do not match or `chunk_size` is not positive.
    """
    positions = _checked_positions(states, labels, teacher, weights, counts)
    if chunk_size < 1:
        raise ValueError(f"`chunk_size` is {chunk_size}: expected at least 1 (256 is a good default).")
    counts = loss_counts(labels, positions, weights) if counts is None else counts
    counts = counts.to(labels.device, _precise(states))
    # What one block's cross-entropy at each draft position, and its KL, count for in Eq. 3 and 2; 0 where a count is.
    per_count = counts.reciprocal().masked_fill(counts == 0, 0.0)
    ones = torch.ones(labels.shape[1]).to(per_count)
    ce_scale = per_count[0] * (ones if weights is None else weights.to(ones))
    kl_scale = per_count[1:] * (kl_temperature**2 / max(positions, 1))
    # Divided by counts, gradients are so small that they would vanish in a float16 head. They are taken in this unit
    # and multiplied by it in backward, where a gradient scaler's factor has arrived.
    unit = torch.cat([ce_scale, kl_weight * kl_scale]).max().clamp(min=torch.finfo(torch.float32).tiny)
    needs_gradient = torch.is_grad_enabled() and states.requires_grad
    gradient, predictions = torch.zeros_like(states), torch.full_like(labels, -1)
    cross_entropy = kl = torch.zeros_like(unit)
    for block, draft, taught in _labelled_chunks(labels, positions, chunk_size):
        student = states.detach()[block, draft].requires_grad_(needs_gradient)
        taught_by = None if teacher is None else teacher.detach()[block[:taught], draft[:taught]]
        ce_row, kl_row = ce_scale[draft], kl_scale[draft[:taught]]
        of_chunk = labels[block, draft], ce_row / unit, kl_weight * kl_row / unit
        ce_chunk, kl_chunk, predicted, chunk_gradient = _chunk_loss(
            student, taught_by, *of_chunk, head, kl_temperature
        )
        cross_entropy = cross_entropy + (ce_chunk.to(unit) * ce_row).sum()
        kl = kl + (kl_chunk.to(unit) * kl_row).sum()
        predictions[block, draft] = predicted.to(predictions)
        if chunk_gradient is not None:
            gradient[block, draft] = chunk_gradient
    loss = cross_entropy + kl_weight * kl
    if needs_gradient:
        loss = _PrecomputedGradient.apply(states, loss, gradient, unit)
    return DrafterLoss(loss, cross_entropy, kl, predictions)


class _PrecomputedGradient(torch.autograd.Function):
    """A value whose gradient with respect to `states`, in units of `unit`, is known."""

    @staticmethod
    def forward(
        ctx: Any, states: torch.Tensor, value: torch.Tensor, gradient: torch.Tensor, unit: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(gradient, unit)
        return value.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        gradient, unit = ctx.saved_tensors
        return gradient * (upstream * unit), None, None, None


def _labelled_chunks(
    labels: torch.Tensor, positions: int, chunk_size: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor, int]]:
    """Block and draft index of the labelled positions, up to `chunk_size` at a time, and how many of these, put first,
    lie among the first `positions` draft positions. The indices are on the CPU, so that no chunk waits for a GPU."""
    for chunk in (labels != IGNORE_INDEX).cpu().nonzero().split(chunk_size):
        has_teacher = chunk[:, 1] < positions
        block, draft = torch.cat([chunk[has_teacher], chunk[~has_teacher]]).unbind(1)
        if len(chunk):
            yield block, draft, int(has_teacher.sum())


@torch.no_grad()
def _chunk_loss(
    states: torch.Tensor,
    teacher: torch.Tensor | None,
    labels: torch.Tensor,
    ce_weights: torch.Tensor,
    kl_weights: torch.Tensor,
    head: Callable[[torch.Tensor], torch.Tensor],
    temperature: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Cross-entropy `[n]` of n positions, KL `[m]` of the first m, which have a teacher, predictions `[n]`, and if
    `states` wants it, the weighted sum's gradient, `[n, config.target_hidden_size]`.

    The logits' gradient is written out, in place, because autograd would keep several tensors of their size: it is
    softmax - onehot for the cross-entropy and (student - teacher) / T for the KL. The head's part is autograd's.
    """
    with torch.set_grad_enabled(states.requires_grad):
        logits = head(states)
    log_probs = logits.detach().log_softmax(-1, dtype=_precise(logits))
    label = labels.to(logits.device).unsqueeze(1)
    ce_weight, kl_weight = ce_weights.to(log_probs).unsqueeze(1), kl_weights.to(log_probs).unsqueeze(1)
    cross_entropy = -log_probs.gather(1, label).squeeze(1)
    kl, kl_gradient, taught = cross_entropy[:0], None, len(kl_weights)
    if teacher is not None and taught:
        kl, kl_gradient = _kl_and_gradient(log_probs[:taught], head(teacher), temperature)
    gradient = None
    if states.requires_grad:
        logits_gradient = log_probs.exp_().mul_(ce_weight).scatter_add_(1, label, -ce_weight)
        if kl_gradient is not None:
            logits_gradient[:taught].addcmul_(kl_gradient, kl_weight)
        (gradient,) = torch.autograd.grad(logits, states, logits_gradient.to(logits.dtype))
    return cross_entropy, kl, logits.argmax(-1), gradient


def _kl_and_gradient(
    log_probs: torch.Tensor, teacher_logits: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """KL(teacher || student) at a temperature, `[m]`, and its gradient with respect to the student's logits, from the
    student's log-probabilities at temperature 1 and the teacher's logits, both `[m, config.vocab_size]`."""
    if temperature != 1:
        log_probs = (log_probs / temperature).log_softmax(-1)
        teacher_logits = teacher_logits.to(log_probs.dtype) / temperature
    teacher_log_probs = teacher_logits.log_softmax(-1, dtype=log_probs.dtype)
    teacher_probs = teacher_log_probs.exp()
    kl = teacher_log_probs.sub_(log_probs).mul_(teacher_probs).sum(-1)
    gradient = torch.exp(log_probs, out=teacher_log_probs).sub_(teacher_probs).div_(temperature)
    return kl, gradient


def _checked_positions(
    states: torch.Tensor,
    labels: torch.Tensor,
    teacher: torch.Tensor | None,
    weights: torch.Tensor | None,
    counts: torch.Tensor | None,
) -> int:
    """P of Eq. 2, after a check that all shapes agree."""
    if states.shape[:2] != labels.shape:
        raise ValueError(
            f"`states` are {tuple(states.shape)} and `labels` {tuple(labels.shape)}: expected equal blocks and drafts."
        )
    blocks, drafts = labels.shape
    positions = 0 if teacher is None else teacher.shape[1]
    expected = (blocks, min(positions, drafts), states.shape[2])
    if teacher is not None and teacher.shape != expected:
        raise ValueError(f"`teacher` are {tuple(teacher.shape)}: expected {expected}, as `states` and `labels`.")
    for what, vector, length in (("weights", weights, drafts), ("counts", counts, 1 + positions)):
        if vector is not None and vector.shape != (length,):
            raise ValueError(
                f"`{what}` are of shape {tuple(vector.shape)}: expected ({length},) for {drafts} draft positions and "
                f"a teacher of {positions}. Use `position_weights` and `loss_counts`."
            )
    return positions


def _precise(tensor: torch.Tensor) -> torch.dtype:
    """The dtype a loss is computed in: float32, or the tensor's own if that is better."""
    return torch.promote_types(tensor.dtype, torch.float32)
