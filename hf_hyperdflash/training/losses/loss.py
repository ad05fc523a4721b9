"""The drafter's loss, in chunks of states: cross-entropy, distillation (Eq. 2, 3) and acceptance itself. Torch alone.

At temperature 1 the probability that a draft is accepted is 1 - TV, the total variation between the distribution that
the draft is drawn from and the target's. TV is a loss of its own, and 1 - TV is what a confidence head predicts.

With a vocabulary of 129,280 the logits of a few hundred positions are among the largest tensors of a training step. So
they exist for a chunk of draft positions at a time, and results overwrite them in place: two tensors of that size and
a part of a third, where autograd would keep several. The gradients of a chunk are written out while its logits exist,
autograd computes only the heads' part, from logits to states, and backward only multiplies. So backward recomputes
nothing, unlike with checkpointing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.nn.functional import binary_cross_entropy_with_logits, linear

from ...drafters.parts.heads import HeadOutput

IGNORE_INDEX = -100
Total: TypeAlias = Callable[[torch.Tensor], torch.Tensor]  # sums over processes


@dataclass(frozen=True)
class LossTerms:
    """The terms of the loss: their weights, and which draft positions they count."""

    ce_weight: float = 1.0
    kl_weight: float = 0.15  # alpha of Eq. 3: 0.1 to 0.2 in the paper
    tv_weight: float = 0.0  # of half of the L1 distance: DSpark's 0.9 of the distance is 1.8 here
    confidence_weight: float = 0.0  # of the confidence head's binary cross-entropy against 1 - TV
    blind_weight: float = 0.0  # of the cross-entropy of the block's own logits
    position_weights: torch.Tensor | None = None  # `[drafts]`, of all terms but the KL; `None` for equal ones
    kl_positions: int | None = None  # P of Eq. 2, the first draft positions; `None` for all that have a teacher
    kl_position_weights: torch.Tensor | None = None  # `[drafts]`, those of the KL
    kl_by_token: bool = False  # whether the KL is weighted and divided as the other terms are
    kl_temperature: float = 1.0  # T of Eq. 2, of both distributions
    chunk_size: int = 256  # the most draft positions whose logits exist at once


class DraftHead(NamedTuple):
    """What turns a drafter's states into logits. The LM head is called as often as labels need, so that processes
    differ; its own parameters get no gradient. Without one, states are logits."""

    lm_head: Callable[[torch.Tensor], torch.Tensor] = torch.nn.Identity()  # the target's
    table: torch.Tensor | None = None  # `[config.vocab_size, config.head_rank]`, of a head's vectors; else our LM head
    draft_ids: torch.Tensor | None = None  # `[config.draft_vocab_size]`, the tokens that `table` scores, if not all
    candidates: int = 0  # the best tokens of the block's own logits that a draft is chosen among; 0 for all


_LOGITS = DraftHead()


class DrafterLoss(NamedTuple):
    """A loss and its parts: scalars per draft position, all but the first detached, and 0 where there is nothing to
    compute them from."""

    loss: torch.Tensor  # with a gradient, the weighted sum of the next five
    cross_entropy: torch.Tensor
    kl: torch.Tensor  # Eq. 2
    tv: torch.Tensor  # how often speculative sampling at temperature 1 rejects a draft
    confidence: torch.Tensor
    blind: torch.Tensor  # the cross-entropy of the block's own logits
    rank: torch.Tensor  # of a rank head; 0 here
    predictions: torch.Tensor  # `[blocks, drafts]`, the most probable token of labelled positions, -1 at the others
    acceptance: torch.Tensor  # `[blocks, drafts]`, 1 - TV of labelled positions: of a draft after accepted ones


def position_weights(drafts: int, decay: float | None) -> torch.Tensor | None:
    """Return DFlash's position weights exp(-(k-1) / decay), k = 1 .. `drafts`; `None`, meaning uniform, if `decay` is
    `None`."""
    return None if decay is None else torch.exp(-torch.arange(drafts) / decay)


def loss_counts(labels: torch.Tensor, kl_positions: int, weights: torch.Tensor | None = None) -> torch.Tensor:
    """Count what the sums of Eq. 2 and 3 over `labels`, `[blocks, drafts]`, are divided by, `[1 + kl_positions]`: the
    summed weights of the labelled positions, then for each of the first draft positions the blocks with a label there.
    With the sum of all counts of an optimizer step, losses of micro-batches and processes sum to the big batch's."""
    blocks = (labels != IGNORE_INDEX).sum(0)
    weighted = blocks.float() if weights is None else blocks * weights.to(blocks.device)
    return torch.cat([weighted.sum(0, keepdim=True), blocks[:kl_positions].to(weighted)])


def rank_loss(
    class_logits: torch.Tensor, classes: torch.Tensor, budget: float = 10.0, total: Total = lambda value: value
) -> torch.Tensor:
    """Compute SpecBlock's cross-entropy of a rank head's `[blocks, slots, 4]`; -100 are classes without a label.

    Labels are smoothed towards nearby classes, more so towards classes with more children. Each term is weighted by
    the distance between prediction and label, twice if the prediction has too few children. In each slot, a class
    counts as at most `budget` samples. A block counts up to the first slot whose class is predicted wrongly.

    `total` sums over the processes that have parts of the blocks; the losses of all then sum to that of all blocks."""
    logits, labelled = class_logits.float(), classes != IGNORE_INDEX
    true, predicted = classes.clamp(min=0), class_logits.argmax(-1)
    right = (predicted == true) & labelled
    counts = (torch.cat([labelled[:, :1], right[:, :-1] & labelled[:, 1:]], dim=1).long().cumprod(1)).bool()
    number = torch.arange(logits.shape[-1], device=logits.device)
    off = true.unsqueeze(-1) - number
    kernel = (1.0 + off.abs() + off.clamp(min=0)).pow(-2)
    entropy = -(kernel / kernel.sum(-1, keepdim=True) * logits.log_softmax(-1)).sum(-1)
    shortfall = true - predicted
    distance = 1.0 + shortfall.abs() + shortfall.clamp(min=0)
    class_members = torch.nn.functional.one_hot(true, logits.shape[-1]) * counts.unsqueeze(-1)
    weights = (budget / total(class_members.sum(0)).clamp(min=1)).clamp(max=1.0).expand(len(true), -1, -1)
    weights = weights.gather(-1, true.unsqueeze(-1)).squeeze(-1) * counts
    return (entropy * distance * weights).sum() / total(weights.sum()).clamp(min=torch.finfo(torch.float32).tiny)


def drafter_loss(
    drafted: HeadOutput,
    labels: torch.Tensor,
    teacher: torch.Tensor | None = None,
    terms: LossTerms = LossTerms(),
    head: DraftHead = _LOGITS,
    counts: torch.Tensor | None = None,
) -> DrafterLoss:
    """Compute Eq. 3, cross-entropy plus alpha times T^2 / P sum_k E[KL(teacher_k || student_k)], and DSpark's terms:
    the total variation TV = 1/2 sum_i |p_i - t_i| between the distribution p that a draft is drawn from and the
    target's t, and the binary cross-entropy of a confidence head against 1 - TV.

    A head that chooses among the best tokens of the block's own logits does not train those logits. They have a
    cross-entropy of their own (`blind`), which without a choice counts only if it has a weight. `predictions` and
    `acceptance` are then those of the choice, as drafts are drawn; the losses are those of the whole vocabulary.

    A drafter with a vocabulary of its own learns nothing of tokens that it cannot draft: such a label has a
    cross-entropy of 0, and KL is multiplied by the probability that the teacher gives to the tokens that can be
    drafted. Acceptance is that of the target's whole distribution, whose other tokens are never accepted.

    Positions without a label never reach the head. The loss is computed on the device of the logits, in float32 or
    better.

    The drafter's output is `[blocks, drafts, ...]`, `labels` are the tokens at a+1, a+2, .., `[blocks, drafts]`, -100
    where there is none, and `teacher` is what the head turns into the teacher's logits, the target's collapsed and
    normed states at a, a+1, .. of the first P draft positions or of all, `[blocks, P, config.target_hidden_size]`;
    `None` for cross-entropy alone. TV, acceptance and confidence need all. `counts`, `[1 + P]`, are those of
    [`loss_counts`] over the whole optimizer step, by default of these labels.
    """
    taught = 0 if teacher is None else teacher.shape[1]
    positions = taught if terms.kl_positions is None else min(taught, terms.kl_positions)
    covers_all = taught == labels.shape[1]
    counts = loss_counts(labels, positions, terms.position_weights) if counts is None else counts
    counts = counts.to(labels.device, precise(drafted.states))
    # The weight of one block at each draft position, and that of its KL; 0 where a count is 0.
    per_count = counts.reciprocal().masked_fill(counts == 0, 0.0)
    ones = torch.ones(labels.shape[1]).to(per_count)
    scale = per_count[0] * (ones if terms.position_weights is None else terms.position_weights.to(ones))
    kl_scale = scale[:positions] if terms.kl_by_token else per_count[1:] / max(positions, 1)
    kl_scale = kl_scale * terms.kl_temperature**2
    if terms.kl_position_weights is not None and not terms.kl_by_token:
        kl_scale = kl_scale * terms.kl_position_weights[:positions].to(kl_scale)
    # Divided by counts, gradients are so small that they would vanish in a float16 head. So they are computed in this
    # unit. Backward multiplies by it, together with a gradient scaler's factor.
    most = max(terms.ce_weight, terms.tv_weight, terms.blind_weight)
    unit = torch.cat([most * scale, terms.kl_weight * kl_scale]).max()
    unit = unit.clamp(min=torch.finfo(torch.float32).tiny)
    blind = drafted.blind if head.candidates or terms.blind_weight else None
    given = {"states": drafted.states, "vectors": drafted.vectors, "table": head.table}
    given |= {"blind": blind} if terms.blind_weight else {}
    sources = {name: source for name, source in given.items() if source is not None}
    needs_gradient = torch.is_grad_enabled() and any(source.requires_grad for source in sources.values())
    gradients = {
        name: torch.zeros_like(source, dtype=precise(source) if name == "table" else None)  # a sum over chunks
        for name, source in sources.items()
        if needs_gradient
    }
    predictions, acceptance = torch.full_like(labels, -1), torch.zeros_like(labels, dtype=unit.dtype)
    cross_entropy = kl = tv = blind_cross_entropy = torch.zeros_like(unit)
    # Of the labelled positions of a chunk the distilled ones come first. The indices are on the CPU, so that no chunk
    # waits for a GPU.
    for chunk in (labels != IGNORE_INDEX).cpu().nonzero().split(terms.chunk_size):
        if not len(chunk):
            break
        is_distilled = chunk[:, 1] < positions
        block, draft = torch.cat([chunk[is_distilled], chunk[~is_distilled]]).unbind(1)
        distilled = int(is_distilled.sum())
        rows = slice(None if covers_all else distilled)
        chunk_scale, chunk_kl_scale = scale[draft], kl_scale[draft[:distilled]]
        targets = Targets(
            indices_among(labels[block, draft], head.draft_ids),
            None if teacher is None else teacher.detach()[block[rows], draft[rows]],
            terms.ce_weight * chunk_scale / unit,
            terms.kl_weight * chunk_kl_scale / unit,
            terms.tv_weight * chunk_scale / unit if covers_all else None,
            draft_ids=head.draft_ids,
        )
        if blind is not None:
            weights = terms.blind_weight * chunk_scale / unit
            of_states = {"states": blind.detach()[block, draft]}
            if drafted.vectors is None and head.table is not None:  # the drafter's own LM head
                of_states["table"] = head.table.detach()
            for each in of_states.values():
                each.requires_grad_("blind" in gradients)
            block_targets = Targets(targets.labels, None, weights, chunk_kl_scale[:0], None)
            best = head.candidates or 1
            of_block = chunk_loss(of_states, block_targets, head.lm_head, 1.0, best=best)
            blind_cross_entropy = blind_cross_entropy + (of_block.cross_entropy.to(unit) * chunk_scale).sum()
            if head.candidates:
                targets = targets._replace(candidates=of_block.predictions)
            if "blind" in gradients:
                gradients["blind"][block, draft] = of_block.gradients[0]
                if "table" in of_states:
                    gradients["table"] += of_block.gradients[1]
            del of_block, of_states
        inputs = {
            name: source.detach() if name == "table" else source.detach()[block, draft]
            for name, source in sources.items()
            if name != "blind"
        }
        for each in inputs.values():
            each.requires_grad_(needs_gradient)
        found = chunk_loss(inputs, targets, head.lm_head, terms.kl_temperature)
        cross_entropy = cross_entropy + (found.cross_entropy.to(unit) * chunk_scale).sum()
        kl = kl + (found.kl.to(unit) * chunk_kl_scale).sum()
        if covers_all:
            tv = tv + (found.tv.to(unit) * chunk_scale).sum()
            acceptance[block, draft] = found.acceptance.to(acceptance)
        predicted = found.predictions[:, 0].to(predictions)
        predictions[block, draft] = predicted if head.draft_ids is None else head.draft_ids.to(predicted)[predicted]
        for i, name in enumerate(inputs if needs_gradient else ()):
            if name == "table":
                gradients[name] += found.gradients[i]
            else:
                gradients[name][block, draft] = found.gradients[i]
        del inputs, found  # no name may hold a table's gradient, which is as large as logits
    loss = terms.ce_weight * cross_entropy + terms.kl_weight * kl
    loss = loss + terms.tv_weight * tv + terms.blind_weight * blind_cross_entropy
    if needs_gradient:
        loss = _PrecomputedGradients.apply(loss, unit, list(gradients.values()), *sources.values())
    confidence_loss = torch.zeros_like(unit)
    if drafted.confidence is not None:
        each = binary_cross_entropy_with_logits(drafted.confidence.to(acceptance), acceptance, reduction="none")
        confidence_loss = (each.masked_fill(labels == IGNORE_INDEX, 0.0) * scale).sum()
        loss = loss + terms.confidence_weight * confidence_loss
    parts = cross_entropy, kl, tv, confidence_loss.detach(), blind_cross_entropy, torch.zeros_like(unit)
    return DrafterLoss(loss, *parts, predictions, acceptance)


def indices_among(tokens: torch.Tensor, draft_ids: torch.Tensor | None) -> torch.Tensor:
    """Return the index of each token, of any shape, in `draft_ids`, if not all are drafted; -1 for a token that cannot
    be."""
    if draft_ids is None:
        return tokens
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


class Targets(NamedTuple):
    """Labels, teacher and weights of n positions, of which the first m are distilled."""

    labels: torch.Tensor  # `[n]`; with a draft vocabulary the indices in it, -1 for a token that it does not have
    teacher: torch.Tensor | None  # what the LM head turns into its logits, `[m or n, config.target_hidden_size]`
    ce_weights: torch.Tensor  # `[n]`
    kl_weights: torch.Tensor  # `[m]`
    tv_weights: torch.Tensor | None  # `[n]`, or `None` to compute no total variation
    candidates: torch.Tensor | None = None  # `[n, candidates]`, the tokens that drafts are chosen among, if not all
    draft_ids: torch.Tensor | None = None  # `[config.draft_vocab_size]`, if it is not the target's vocabulary


class ChunkLoss(NamedTuple):
    """The losses of a chunk, unweighted, and the gradients of their weighted sum."""

    cross_entropy: torch.Tensor  # `[n]`
    kl: torch.Tensor  # `[m]`
    tv: torch.Tensor  # `[n]`; `[0]` without `tv_weights`
    acceptance: torch.Tensor  # `[n]`, the probability that a draft is accepted; `[0]` without `tv_weights`
    predictions: torch.Tensor  # `[n, best]`, the most probable tokens
    gradients: tuple[torch.Tensor, ...]  # one for each input; empty if the inputs require none


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
    scores = logits.detach() if candidates is None else logits.detach().gather(1, candidates)
    # Of equal ones `argmax` takes the first, as drafting does, and `topk` any.
    predictions = scores.argmax(-1, keepdim=True) if best == 1 else scores.topk(best, dim=-1).indices
    predictions = predictions if candidates is None else candidates.gather(1, predictions)
    log_probs = _log_probs(logits.detach())
    del logits, scores
    teacher_log_probs = None if targets.teacher is None else _log_probs(head(targets.teacher))
    if teacher_log_probs is not None and targets.draft_ids is not None:
        teacher_log_probs = teacher_log_probs[:, targets.draft_ids.to(teacher_log_probs.device)].to(log_probs.device)
    choice_acceptance = None
    if candidates is not None and teacher_log_probs is not None and targets.tv_weights is not None:
        # 1 - TV = sum_i min(q_i, t_i), where q is the student's distribution over the candidates alone.
        drawn = log_probs.gather(1, candidates).softmax(-1)
        choice_acceptance = torch.minimum(drawn, teacher_log_probs.gather(1, candidates).exp()).sum(-1)
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
    """Return a drafter's logits in training, `[n, config.draft_vocab_size or config.vocab_size]`: of the target's LM
    head from states `[n, config.target_hidden_size]`, plus those of a sequential head's vectors `[n,
    config.head_rank]` by its table. A table without vectors is the drafter's own LM head."""
    if table is not None and vectors is None:
        return linear(states, table.to(states))
    logits = head(states)
    if table is None or vectors is None:
        return logits
    return torch.addmm(logits, vectors.to(logits), table.to(logits).T)


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
    is_drafted = labels >= 0
    labels, ce_weights = labels.clamp(min=0), targets.ce_weights.to(log_probs).unsqueeze(1) * is_drafted
    kl_weights = targets.kl_weights.to(log_probs).unsqueeze(1)
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
        # Half of sum_i |p_i - t_i| is sum_i max(p_i - t_i, 0). Its gradient is p_j (s_j - sum_i s_i p_i), where s is 1
        # where p > t, else 0; it overwrites t.
        teacher_probs = teacher_log_probs.exp_()
        excess = torch.sub(probs, teacher_probs, out=teacher_probs).clamp_(min=0)
        tv = excess.sum(-1)
        above = excess.sign_().mul_(probs)
        tv_gradient = above.addcmul_(probs, above.sum(-1, keepdim=True), value=-1)
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


def precise(tensor: torch.Tensor) -> torch.dtype:
    """Return the dtype that a loss is computed in: float32, or the tensor's own if that is more precise."""
    return torch.promote_types(tensor.dtype, torch.float32)
