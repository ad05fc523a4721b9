"""The drafter's loss, cross-entropy plus LM-head distillation (Eq. 2 and 3): of logits, and in chunks of states."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

IGNORE_INDEX = -100


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
        `[1 + P]`: the summed weights of the labelled positions, then for each of the first P draft positions the number
        of blocks that have a label there.

    Raises:
        ValueError: If there are fewer than P draft positions.
    """
    if not 0 <= kl_positions <= labels.shape[1]:
        raise ValueError(
            f"`kl_positions` is {kl_positions}, but blocks have {labels.shape[1]} draft positions: lower `kl_positions`."
        )
    blocks = (labels != IGNORE_INDEX).sum(0)
    if weights is None:
        return torch.cat([blocks.sum(0, keepdim=True), blocks[:kl_positions]]).float()
    weighted = (blocks * weights.to(blocks.device)).sum(0, keepdim=True)
    return torch.cat([weighted, blocks[:kl_positions].to(weighted)])


def drafter_loss(
    logits: torch.Tensor,
    labels: torch.Tensor,
    teacher_logits: torch.Tensor | None = None,
    kl_weight: float = 0.15,
    kl_temperature: float = 1.0,
    weights: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
) -> torch.Tensor:
    """Eq. 3 as it is written: cross-entropy plus `kl_weight` times T^2 / P sum_k E[KL(teacher_k || student_k)].

    Args:
        logits: `[blocks, drafts, config.vocab_size]`.
        labels: `[blocks, drafts]`, the tokens at a+1, a+2, ..; -100 where there is none, which then counts nowhere.
        teacher_logits: `[blocks, P, config.vocab_size]`, position k's are the target's at a+k-1; `None` for
            cross-entropy alone.
        kl_weight: Alpha, 0.1 to 0.2 in the paper.
        kl_temperature: T of Eq. 2, of both distributions.
        weights: `[drafts]`, of [`position_weights`]: makes the cross-entropy a weighted mean. KL is not weighted.
        counts: `[1 + P]`, of [`loss_counts`], over the whole optimizer step; default: of these labels.

    Raises:
        ValueError: If the shapes do not match.
    """
    positions = _kl_positions("logits", logits, labels, teacher_logits, weights, counts)
    logits = logits.to(_precise(logits))
    labelled = labels != IGNORE_INDEX
    ce_scale, kl_scale = _position_scales(labels, positions, weights, counts, kl_temperature, logits.dtype)
    cross_entropy = F.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX, reduction="none"
    )
    loss = (cross_entropy.view_as(labels) * ce_scale).sum()
    if teacher_logits is None:
        return loss
    student = (logits[:, :positions] / kl_temperature).log_softmax(-1)
    teacher = (teacher_logits.to(logits.dtype) / kl_temperature).log_softmax(-1)
    divergence = (teacher.exp() * (teacher - student)).sum(-1)
    return loss + kl_weight * (divergence.masked_fill(~labelled[:, :positions], 0.0) * kl_scale).sum()


def chunked_drafter_loss(
    hidden: torch.Tensor,
    labels: torch.Tensor,
    head: Callable[[torch.Tensor], torch.Tensor],
    teacher_hidden: torch.Tensor | None = None,
    *,
    kl_weight: float,
    kl_temperature: float,
    weights: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
    chunk_size: int,
) -> DrafterLoss:
    """[`drafter_loss`] of states instead of logits, which exist for `chunk_size` draft positions at a time.

    Each chunk's gradient with respect to `hidden` is taken at once, while its logits exist, and only multiplied in
    backward. So backward recomputes nothing, unlike with checkpointing. Positions without a label never meet the head.

    Args:
        hidden: `[blocks, drafts, config.target_hidden_size]`, the drafter's states: all that gets a gradient.
        labels: `[blocks, drafts]`, -100 where there is none.
        head: The target's LM head, `[n, config.target_hidden_size]` to `[n, config.vocab_size]`. It may move and cast
            what it is given; the loss is computed where its logits are, in float32 or better. Called with no gradient
            for its own parameters, and as often as this batch's labels need: not the same on every process.
        teacher_hidden: `[blocks, P, config.target_hidden_size]`, what the head turns into the teacher's logits: the
            target's collapsed and normed states at a, a+1, ..; `None` for cross-entropy alone.
        kl_weight: Alpha, 0.1 to 0.2 in the paper.
        kl_temperature: T of Eq. 2, of both distributions.
        weights: `[drafts]`, of [`position_weights`]: makes the cross-entropy a weighted mean. KL is not weighted.
        counts: `[1 + P]`, of [`loss_counts`], over the whole optimizer step; default: of these labels.
        chunk_size: The most draft positions whose logits exist at once.

    Raises:
        ValueError: If the shapes do not match or `chunk_size` is not positive.
    """
    positions = _kl_positions("hidden", hidden, labels, teacher_hidden, weights, counts)
    if chunk_size < 1:
        raise ValueError(f"`chunk_size` is {chunk_size}: expected at least 1 (256 is a good default).")
    ce_scale, kl_scale = _position_scales(labels, positions, weights, counts, kl_temperature, _precise(hidden))
    # Divided by counts, gradients are so small that they would vanish in a float16 head. They are taken in this unit
    # and multiplied by it in backward, where a gradient scaler's factor has arrived.
    unit = torch.cat([ce_scale, kl_weight * kl_scale]).max().clamp(min=torch.finfo(torch.float32).tiny)
    needs_gradient = torch.is_grad_enabled() and hidden.requires_grad
    gradient, predictions = torch.zeros_like(hidden), torch.full_like(labels, -1)
    cross_entropy = kl = torch.zeros_like(unit)
    for block, draft, taught in _labelled_chunks(labels, positions, chunk_size):
        states = hidden.detach()[block, draft].requires_grad_(needs_gradient)
        teacher = None if teacher_hidden is None else teacher_hidden.detach()[block[:taught], draft[:taught]]
        ce_row, kl_row = ce_scale[draft], kl_scale[draft[:taught]]
        chunk = _chunk_loss(
            states, labels[block, draft], head, teacher, ce_row / unit, kl_weight * kl_row / unit, kl_temperature
        )
        cross_entropy = cross_entropy + (chunk.cross_entropy.to(unit) * ce_row).sum()
        kl = kl + (chunk.kl.to(unit) * kl_row).sum()
        predictions[block, draft] = chunk.predictions.to(predictions)
        if chunk.gradient is not None:
            gradient[block, draft] = chunk.gradient
    loss = cross_entropy + kl_weight * kl
    if needs_gradient:
        loss = _PrecomputedGradient.apply(hidden, loss, gradient, unit)
    return DrafterLoss(loss, cross_entropy, kl, predictions)


class _PrecomputedGradient(torch.autograd.Function):
    """A value whose gradient with respect to `hidden`, in units of `unit`, is known."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, value: torch.Tensor, gradient: torch.Tensor, unit: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(gradient, unit)
        return value.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        gradient, unit = ctx.saved_tensors
        return gradient * (upstream * unit), None, None, None


class _Chunk(NamedTuple):
    cross_entropy: torch.Tensor  # [n]
    kl: torch.Tensor  # [m], of the first m positions
    predictions: torch.Tensor  # [n]
    gradient: torch.Tensor | None  # [n, config.target_hidden_size], of the weighted sum


@torch.no_grad()
def _chunk_loss(
    states: torch.Tensor,
    labels: torch.Tensor,
    head: Callable[[torch.Tensor], torch.Tensor],
    teacher_states: torch.Tensor | None,
    ce_weights: torch.Tensor,
    kl_weights: torch.Tensor,
    temperature: float,
) -> _Chunk:
    """Losses of n positions, the first m of which have a teacher, and the weighted sum's gradient if `states` wants it.

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
    if teacher_states is not None and taught:
        kl, kl_gradient = _kl_and_gradient(log_probs[:taught], head(teacher_states), temperature)
    gradient = None
    if states.requires_grad:
        logits_gradient = log_probs.exp_().mul_(ce_weight).scatter_add_(1, label, -ce_weight)
        if kl_gradient is not None:
            logits_gradient[:taught].addcmul_(kl_gradient, kl_weight)
        (gradient,) = torch.autograd.grad(logits, states, logits_gradient.to(logits.dtype))
    return _Chunk(cross_entropy, kl, logits.argmax(-1), gradient)


def _kl_and_gradient(
    log_probs: torch.Tensor, teacher_logits: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """KL(teacher || student) at a temperature, `[m]`, and its gradient with respect to the student's logits.

    Args:
        log_probs: `[m, config.vocab_size]`, the student's at temperature 1.
        teacher_logits: `[m, config.vocab_size]`.
        temperature: T.
    """
    if temperature != 1:
        log_probs = (log_probs / temperature).log_softmax(-1)
        teacher_logits = teacher_logits.to(log_probs.dtype) / temperature
    teacher_log_probs = teacher_logits.log_softmax(-1, dtype=log_probs.dtype)
    teacher_probs = teacher_log_probs.exp()
    kl = teacher_log_probs.sub_(log_probs).mul_(teacher_probs).sum(-1)
    gradient = torch.exp(log_probs, out=teacher_log_probs).sub_(teacher_probs).div_(temperature)
    return kl, gradient


def _labelled_chunks(
    labels: torch.Tensor, positions: int, chunk_size: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor, int]]:
    """Block and draft index of the labelled positions, up to `chunk_size` at a time, and how many of these, put first,
    lie among the first `positions` draft positions. The indices are on the CPU, so that no chunk waits for a GPU."""
    labelled = (labels != IGNORE_INDEX).cpu().nonzero()
    for start in range(0, len(labelled), chunk_size):
        chunk = labelled[start : start + chunk_size]
        has_teacher = chunk[:, 1] < positions
        block, draft = torch.cat([chunk[has_teacher], chunk[~has_teacher]]).unbind(1)
        yield block, draft, int(has_teacher.sum())


def _position_scales(
    labels: torch.Tensor,
    positions: int,
    weights: torch.Tensor | None,
    counts: torch.Tensor | None,
    temperature: float,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What one block's cross-entropy, `[drafts]`, and KL, `[P]`, count for in Eq. 3 and 2; 0 where a count is 0."""
    if counts is None:
        counts = loss_counts(labels, positions, weights)
    counts = counts.to(labels.device, dtype)
    per_count = counts.reciprocal().masked_fill(counts == 0, 0.0)
    ones = torch.ones(labels.shape[1], dtype=dtype, device=labels.device)
    ce_scale = per_count[0] * (ones if weights is None else weights.to(ones))
    return ce_scale, per_count[1:] * (temperature**2 / max(positions, 1))


def _kl_positions(
    name: str,
    student: torch.Tensor,
    labels: torch.Tensor,
    teacher: torch.Tensor | None,
    weights: torch.Tensor | None,
    counts: torch.Tensor | None,
) -> int:
    """P of Eq. 2, after a check that all shapes agree."""
    if student.shape[:2] != labels.shape:
        raise ValueError(
            f"`{name}` are {tuple(student.shape)} and `labels` {tuple(labels.shape)}: expected equal blocks and drafts."
        )
    blocks, drafts = labels.shape
    positions = 0 if teacher is None else teacher.shape[1]
    expected = (blocks, min(positions, drafts), student.shape[2])
    if teacher is not None and teacher.shape != expected:
        raise ValueError(
            f"`teacher_{name}` are {tuple(teacher.shape)}: expected {expected}, as `{name}` and `labels`."
        )
    for what, vector, length in (("weights", weights, drafts), ("counts", counts, 1 + positions)):
        if vector is not None and vector.shape != (length,):
            raise ValueError(
                f"`{what}` are of shape {tuple(vector.shape)}: expected ({length},) for {drafts} draft positions and a "
                f"teacher of {positions}. Use `position_weights` and `loss_counts`."
            )
    return positions


def _precise(tensor: torch.Tensor) -> torch.dtype:
    """The dtype a loss is computed in: float32, or the tensor's own if that is better."""
    return torch.promote_types(tensor.dtype, torch.float32)
