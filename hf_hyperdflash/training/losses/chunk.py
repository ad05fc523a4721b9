"""The loss of one chunk of draft positions, whose logits exist here and nowhere else, and its gradients written out.

With a vocabulary of 129,280 the logits of a few hundred positions are among the largest tensors of a training step. So
results overwrite them in place: two tensors of that size exist at a time and a part of a third, where autograd would
keep several. Autograd computes only the heads' part of the gradient, from logits to states.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch.nn.functional import linear


class Targets(NamedTuple):
    """Labels, teacher and weights of n positions. The first m of them are distilled.

    Args:
        labels: `[n]`, token ids; with a draft vocabulary the indices in it, -1 for a token that it does not have.
        teacher: The states that the LM head turns into the teacher's logits, of the first m positions or of all,
            `[m or n, config.target_hidden_size]`; `None` without a teacher.
        ce_weights: `[n]`.
        kl_weights: `[m]`.
        tv_weights: `[n]`, or `None` to compute no total variation.
        candidates: `[n, candidates]`, the tokens that drafts are chosen among; `None` for all. Predictions and
            acceptance are those of the choice; the losses are those of the whole vocabulary.
        draft_ids: `[config.draft_vocab_size]`, the draft vocabulary; `None` for the target's whole vocabulary.
    """

    labels: torch.Tensor
    teacher: torch.Tensor | None
    ce_weights: torch.Tensor
    kl_weights: torch.Tensor
    tv_weights: torch.Tensor | None
    candidates: torch.Tensor | None = None
    draft_ids: torch.Tensor | None = None


class ChunkLoss(NamedTuple):
    """The losses of a chunk and their gradients.

    Args:
        cross_entropy: `[n]`, unweighted.
        kl: `[m]`, unweighted.
        tv: Total variation `[n]`, unweighted; `[0]` without `tv_weights`.
        acceptance: `[n]`, the probability that a draft is accepted; `[0]` without `tv_weights`.
        predictions: `[n, best]`, the most probable tokens.
        gradients: Of the weighted sum, one for each input; empty if the inputs require none.
    """

    cross_entropy: torch.Tensor
    kl: torch.Tensor
    tv: torch.Tensor
    acceptance: torch.Tensor
    predictions: torch.Tensor
    gradients: tuple[torch.Tensor, ...]


@torch.no_grad()
def chunk_loss(
    inputs: Mapping[str, torch.Tensor],
    targets: Targets,
    head: Callable[[torch.Tensor], torch.Tensor],
    temperature: float,
    best: int = 1,
) -> ChunkLoss:
    """Compute the losses of n positions, with gradients if the inputs, which are those of [`student_logits`], require
    them. The temperature is the KL's alone; `best` is how many of the most probable tokens to return."""
    wants_gradient = inputs["states"].requires_grad
    with torch.set_grad_enabled(wants_gradient):
        logits = student_logits(head, **inputs)
    edge = torch.autograd.graph.get_gradient_edge(logits) if wants_gradient else None  # which does not keep the logits
    dtype, candidates = logits.dtype, None if targets.candidates is None else targets.candidates.to(logits.device)
    predictions = _best_tokens(logits.detach(), candidates, best)
    log_probs = _log_probs(logits.detach())
    del logits
    teacher_log_probs = None if targets.teacher is None else _log_probs(head(targets.teacher))
    if teacher_log_probs is not None and targets.draft_ids is not None:
        teacher_log_probs = teacher_log_probs[:, targets.draft_ids.to(teacher_log_probs.device)].to(log_probs.device)
    choice_acceptance = None
    if candidates is not None and teacher_log_probs is not None and targets.tv_weights is not None:
        choice_acceptance = _choice_acceptance(log_probs, teacher_log_probs, candidates)
    (cross_entropy, kl, tv), gradient = _terms_and_gradient(
        log_probs, teacher_log_probs, targets, temperature, wants_gradient
    )
    del log_probs, teacher_log_probs  # of which the gradient is one
    gradients = torch.autograd.grad(edge, tuple(inputs.values()), gradient.to(dtype)) if edge is not None else ()
    return ChunkLoss(
        cross_entropy, kl, tv, 1 - tv if choice_acceptance is None else choice_acceptance, predictions, gradients
    )


def student_logits(
    head: Callable[[torch.Tensor], torch.Tensor],
    states: torch.Tensor,
    vectors: torch.Tensor | None = None,
    table: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return a drafter's logits in training, `[n, config.draft_vocab_size or config.vocab_size]`.

    Args:
        head: The target's LM head. The logits have its device and dtype.
        states: Its input, `[n, config.target_hidden_size]`.
        vectors: A sequential head's, `[n, config.head_rank]`.
        table: Its scores of tokens, `[config.vocab_size, config.head_rank]`. A table without vectors is the drafter's
            own LM head.
    """
    if table is not None and vectors is None:
        return linear(states, table.to(states))
    logits = head(states)
    if table is None or vectors is None:
        return logits
    return torch.addmm(logits, vectors.to(logits), table.to(logits).T)


def _best_tokens(logits: torch.Tensor, candidates: torch.Tensor | None, best: int) -> torch.Tensor:
    scores = logits if candidates is None else logits.gather(1, candidates)
    # Of equal ones `argmax` takes the first, as drafting does, and `topk` any.
    at = scores.argmax(-1, keepdim=True) if best == 1 else scores.topk(best, dim=-1).indices
    return at if candidates is None else candidates.gather(1, at)


def _choice_acceptance(
    log_probs: torch.Tensor, teacher_log_probs: torch.Tensor, candidates: torch.Tensor
) -> torch.Tensor:
    """Return 1 - TV = sum_i min(q_i, t_i), `[n]`, where q is the student's distribution over the candidates alone."""
    drawn = log_probs.gather(1, candidates).softmax(-1)
    return torch.minimum(drawn, teacher_log_probs.gather(1, candidates).exp()).sum(-1)


def _log_probs(logits: torch.Tensor) -> torch.Tensor:
    """Compute `log_softmax` in float32 or better, a few rows at a time: on a CPU it first casts its whole input."""
    log_probs = torch.empty_like(logits, dtype=precise(logits))
    for given, rows in zip(logits.split(32), log_probs.split(32)):
        torch.log_softmax(given, -1, dtype=rows.dtype, out=rows)
    return log_probs


def _terms_and_gradient(
    log_probs: torch.Tensor,
    teacher_log_probs: torch.Tensor | None,
    targets: Targets,
    temperature: float,
    wants_gradient: bool,
) -> tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return cross-entropy, KL and total variation, and the gradient of their weighted sum with respect to the
    student's logits.

    The log-probabilities of student and teacher, `[n or m, config.vocab_size]`, are overwritten. The cross-entropy's
    gradient is softmax - onehot; a label that cannot be drafted has none. Where some tokens cannot be drafted, the
    teacher's probabilities do not add up to 1. KL is then computed with the scaled probabilities and multiplied by
    their sum: that is the teacher's cross-entropy without the part that no student can change.
    """
    labels = targets.labels.to(log_probs.device).unsqueeze(1)
    ce_weights, kl_weights = (
        weights.to(log_probs).unsqueeze(1) for weights in (targets.ce_weights, targets.kl_weights)
    )
    is_drafted = labels >= 0
    labels, ce_weights = labels.clamp(min=0), ce_weights * is_drafted
    cross_entropy = -log_probs.gather(1, labels).masked_fill(~is_drafted, 0.0).squeeze(1)
    kl = tv = cross_entropy[:0]
    kl_gradient = tv_gradient = None
    distilled = len(kl_weights)
    if teacher_log_probs is not None and distilled:
        student, teacher = log_probs[:distilled], teacher_log_probs[:distilled]
        if targets.draft_ids is None:
            kl, kl_gradient = _kl_and_gradient(student, teacher, temperature)
        else:
            share = teacher.logsumexp(-1, keepdim=True)
            kl, kl_gradient = _kl_and_gradient(student, teacher - share, temperature)
            kl, kl_weights = kl * share.squeeze(1).exp(), kl_weights * share.exp()
    probs = log_probs.exp_()
    if teacher_log_probs is not None and targets.tv_weights is not None:
        tv, tv_gradient = _total_variation_and_gradient(probs, teacher_log_probs.exp_())
    if not wants_gradient:
        return (cross_entropy, kl, tv), probs
    gradient = probs.mul_(ce_weights).scatter_add_(1, labels, -ce_weights)
    if kl_gradient is not None:
        gradient[:distilled].addcmul_(kl_gradient, kl_weights)
    if tv_gradient is not None and targets.tv_weights is not None:
        gradient.addcmul_(tv_gradient, targets.tv_weights.to(probs).unsqueeze(1))
    return (cross_entropy, kl, tv), gradient


def _kl_and_gradient(
    log_probs: torch.Tensor, teacher_log_probs: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return KL(teacher || student) at a temperature, `[m]`, and its gradient with respect to the student's logits,
    (student - teacher) / T. The log-probabilities are those at temperature 1 and are not changed."""
    if temperature != 1:
        log_probs, teacher_log_probs = (
            (each / temperature).log_softmax(-1) for each in (log_probs, teacher_log_probs)
        )
    teacher_probs, difference = teacher_log_probs.exp(), teacher_log_probs - log_probs
    kl = difference.mul_(teacher_probs).sum(-1)
    gradient = torch.exp(log_probs, out=difference).sub_(teacher_probs).div_(temperature)
    return kl, gradient


def _total_variation_and_gradient(
    probs: torch.Tensor, teacher_probs: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return half of sum_i |p_i - t_i|, which is sum_i max(p_i - t_i, 0), `[n]`, and its gradient with respect to the
    student's logits, p_j (s_j - sum_i s_i p_i), where s is 1 where p > t, else 0. The gradient overwrites t."""
    excess = torch.sub(probs, teacher_probs, out=teacher_probs).clamp_(min=0)
    tv = excess.sum(-1)
    above = excess.sign_().mul_(probs)
    return tv, above.addcmul_(probs, above.sum(-1, keepdim=True), value=-1)


def precise(tensor: torch.Tensor) -> torch.dtype:
    """Return the dtype that a loss is computed in: float32, or the tensor's own if that is more precise."""
    return torch.promote_types(tensor.dtype, torch.float32)
