"""The loss of one chunk of draft positions, whose logits exist here and nowhere else, and its gradients written out.

At vocabulary 129,280 a few hundred positions' logits are among the largest tensors of a training step. So what is
computed from them takes their place: there are two tensors of their size at a time and a part of a third, where
autograd would keep several. Only the heads' part of the gradient, from logits to states, is autograd's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch.nn.functional import linear


class Targets(NamedTuple):
    """What n positions learn, and how much each counts. The first m of them are distilled.

    Args:
        labels: `[n]`, token ids; of a vocabulary of the drafter's own the places there, -1 for what it has not.
        teacher: What the LM head turns into the teacher's logits, of the first m positions or of all,
            `[m or n, config.target_hidden_size]`; `None` without a teacher.
        ce_weights: `[n]`.
        kl_weights: `[m]`.
        tv_weights: `[n]`, or `None` where total variation is not wanted.
        candidates: `[n, candidates]`, the tokens that drafts are chosen among; `None` for all. Predictions and
            acceptance are of that choice; the losses are of the whole vocabulary, which no token is to leave.
        draft_ids: `[config.draft_vocab_size]`, that vocabulary; `None` for the target's.
    """

    labels: torch.Tensor
    teacher: torch.Tensor | None
    ce_weights: torch.Tensor
    kl_weights: torch.Tensor
    tv_weights: torch.Tensor | None
    candidates: torch.Tensor | None = None
    draft_ids: torch.Tensor | None = None


class ChunkLoss(NamedTuple):
    """Cross-entropy `[n]`, KL `[m]` and total variation `[n]` (`[0]` where it is not wanted), unweighted; the
    probability that a draft is accepted, `[n]`, where total variation is wanted; the most probable tokens,
    `[n, best]`; and the gradients of the weighted sum, one for each of the inputs that were to have one."""

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
    """The losses of n positions, with gradients if the inputs want them.

    Args:
        inputs: What [`student_logits`] takes.
        targets: What they learn.
        head: The target's LM head.
        temperature: Of the KL alone.
        best: How many of the most probable tokens are told.
    """
    wants_gradient = inputs["states"].requires_grad
    with torch.set_grad_enabled(wants_gradient):
        logits = student_logits(head, **inputs)
    edge = torch.autograd.graph.get_gradient_edge(logits) if wants_gradient else None  # which does not keep the logits
    dtype, among = logits.dtype, None if targets.candidates is None else targets.candidates.to(logits.device)
    predictions = _best_tokens(logits.detach(), among, best)
    log_probs = _log_probs(logits.detach())
    del logits
    taught = None if targets.teacher is None else _log_probs(head(targets.teacher))
    if taught is not None and targets.draft_ids is not None:
        taught = taught[:, targets.draft_ids.to(taught.device)].to(log_probs.device)
    of_choice = None
    if among is not None and taught is not None and targets.tv_weights is not None:
        of_choice = _acceptance_of_a_choice(log_probs, taught, among)
    (cross_entropy, kl, tv), gradient = _terms_and_gradient(log_probs, taught, targets, temperature, wants_gradient)
    del log_probs, taught  # of which the gradient is one
    gradients = torch.autograd.grad(edge, tuple(inputs.values()), gradient.to(dtype)) if edge is not None else ()
    return ChunkLoss(cross_entropy, kl, tv, 1 - tv if of_choice is None else of_choice, predictions, gradients)


def student_logits(
    head: Callable[[torch.Tensor], torch.Tensor],
    states: torch.Tensor,
    vectors: torch.Tensor | None = None,
    table: torch.Tensor | None = None,
) -> torch.Tensor:
    """A drafter's logits in training, `[n, config.draft_vocab_size or config.vocab_size]`.

    Args:
        head: The target's LM head. Where it is and in what it computes, the logits are, too.
        states: What it reads, `[n, config.target_hidden_size]`.
        vectors: A sequential head's, `[n, config.head_rank]`, and
        table: what it scores tokens with, `[config.vocab_size, config.head_rank]`. A table without vectors is all that
            there is to score states with: an LM head of the drafter's own.
    """
    if table is not None and vectors is None:
        return linear(states, table.to(states))
    logits = head(states)
    if table is None or vectors is None:
        return logits
    return torch.addmm(logits, vectors.to(logits), table.to(logits).T)


def _best_tokens(logits: torch.Tensor, among: torch.Tensor | None, best: int) -> torch.Tensor:
    scores = logits if among is None else logits.gather(1, among)
    # Of equal ones `argmax` takes the first, as drafting does, and `topk` any.
    at = scores.argmax(-1, keepdim=True) if best == 1 else scores.topk(best, dim=-1).indices
    return at if among is None else among.gather(1, at)


def _acceptance_of_a_choice(log_probs: torch.Tensor, taught: torch.Tensor, among: torch.Tensor) -> torch.Tensor:
    """1 - TV, sum_i min(q_i, t_i), `[n]`, where q is the student's distribution over these tokens alone."""
    drawn = log_probs.gather(1, among).softmax(-1)
    return torch.minimum(drawn, taught.gather(1, among).exp()).sum(-1)


def _log_probs(logits: torch.Tensor) -> torch.Tensor:
    """`log_softmax` in float32 or better, a few rows at a time: on a CPU it casts all that it is given first."""
    log_probs = torch.empty_like(logits, dtype=precise(logits))
    for given, rows in zip(logits.split(32), log_probs.split(32)):
        torch.log_softmax(given, -1, dtype=rows.dtype, out=rows)
    return log_probs


def _terms_and_gradient(
    log_probs: torch.Tensor, taught: torch.Tensor | None, targets: Targets, temperature: float, wants_gradient: bool
) -> tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
    """Cross-entropy, KL and total variation, and their weighted sum's gradient with respect to the student's logits,
    from log-probabilities of student and teacher, `[n or m, config.vocab_size]`, whose memory is used up.

    The cross-entropy's gradient is softmax - onehot. A label that cannot be drafted has none. Of a teacher's
    probabilities that do not add up to 1, because some of its tokens cannot be drafted, KL is that of the distribution
    they make when scaled, times what they add up to: the teacher's cross-entropy, less what no student can change.
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
    if taught is not None and distilled:
        of_student, of_teacher = log_probs[:distilled], taught[:distilled]
        if targets.draft_ids is None:
            kl, kl_gradient = _kl_and_gradient(of_student, of_teacher, temperature)
        else:
            share = of_teacher.logsumexp(-1, keepdim=True)
            kl, kl_gradient = _kl_and_gradient(of_student, of_teacher - share, temperature)
            kl, kl_weights = kl * share.squeeze(1).exp(), kl_weights * share.exp()
    probs = log_probs.exp_()
    if taught is not None and targets.tv_weights is not None:
        tv, tv_gradient = _total_variation_and_gradient(probs, taught.exp_())
    if not wants_gradient:
        return (cross_entropy, kl, tv), probs
    gradient = probs.mul_(ce_weights).scatter_add_(1, labels, -ce_weights)
    if kl_gradient is not None:
        gradient[:distilled].addcmul_(kl_gradient, kl_weights)
    if tv_gradient is not None and targets.tv_weights is not None:
        gradient.addcmul_(tv_gradient, targets.tv_weights.to(probs).unsqueeze(1))
    return (cross_entropy, kl, tv), gradient


def _kl_and_gradient(
    log_probs: torch.Tensor, taught: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """KL(teacher || student) at a temperature, `[m]`, and its gradient with respect to the student's logits,
    (student - teacher) / T, from log-probabilities at temperature 1, which are left as they are."""
    if temperature != 1:
        log_probs, taught = ((each / temperature).log_softmax(-1) for each in (log_probs, taught))
    taught_probs, difference = taught.exp(), taught - log_probs
    kl = difference.mul_(taught_probs).sum(-1)
    gradient = torch.exp(log_probs, out=difference).sub_(taught_probs).div_(temperature)
    return kl, gradient


def _total_variation_and_gradient(
    probs: torch.Tensor, taught_probs: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Half of sum_i |p_i - t_i|, which is sum_i max(p_i - t_i, 0), `[n]`, and, in the memory of the teacher's t, its
    gradient with respect to the student's logits: p_j (s_j - sum_i s_i p_i), where s is 1 where p > t and else 0."""
    excess = torch.sub(probs, taught_probs, out=taught_probs).clamp_(min=0)
    tv = excess.sum(-1)
    above = excess.sign_().mul_(probs)
    return tv, above.addcmul_(probs, above.sum(-1, keepdim=True), value=-1)


def precise(tensor: torch.Tensor) -> torch.dtype:
    """The dtype a loss is computed in: float32, or the tensor's own if that is better."""
    return torch.promote_types(tensor.dtype, torch.float32)
