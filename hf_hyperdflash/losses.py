"""The drafter's loss as pure functions of logits: cross-entropy plus LM-head distillation (Eq. 2 and 3)."""

from __future__ import annotations

import torch
import torch.nn.functional as F

IGNORE_INDEX = -100


def draft_cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of the draft positions that have a label.

    Args:
        logits: `[blocks, drafts, config.vocab_size]`.
        labels: `[blocks, drafts]`, the tokens at a+1, a+2, ..; -100 where there is none.
    """
    total = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")
    return total / (labels != IGNORE_INDEX).sum().clamp(min=1)


def draft_kl(
    logits: torch.Tensor, teacher_logits: torch.Tensor, labels: torch.Tensor, temperature: float = 1.0
) -> torch.Tensor:
    """Eq. 2: T^2 / P times the sum over the first P draft positions of the mean KL(teacher || student).

    Args:
        logits: `[blocks, drafts, config.vocab_size]`, all draft positions or only the first P.
        teacher_logits: `[blocks, P, config.vocab_size]`; position k's teacher is the target's logits at a+k-1.
        labels: `[blocks, drafts]`; positions without a label (-100) do not count.
        temperature: T, of both distributions.
    """
    positions = teacher_logits.shape[1]
    student = (logits[:, :positions].float() / temperature).log_softmax(-1)
    teacher = (teacher_logits.float() / temperature).log_softmax(-1)
    divergence = (teacher.exp() * (teacher - student)).sum(-1)
    counted = labels[:, :positions] != IGNORE_INDEX
    per_position = (divergence * counted).sum(0) / counted.sum(0).clamp(min=1)
    return temperature**2 * per_position.mean()


def drafter_loss(
    logits: torch.Tensor,
    labels: torch.Tensor,
    teacher_logits: torch.Tensor | None = None,
    kl_weight: float = 0.15,
    kl_temperature: float = 1.0,
) -> torch.Tensor:
    """Eq. 3: cross-entropy plus `kl_weight` times the distillation term of the positions `teacher_logits` has.

    Args:
        logits: `[blocks, drafts, config.vocab_size]`.
        labels: `[blocks, drafts]`, -100 where there is none.
        teacher_logits: `[blocks, P, config.vocab_size]`, or `None` for cross-entropy alone.
        kl_weight: Alpha, 0.1 to 0.2 in the paper.
        kl_temperature: T of Eq. 2.

    Raises:
        ValueError: If the shapes do not match.
    """
    if logits.shape[:2] != labels.shape:
        raise ValueError(
            f"`logits` are {tuple(logits.shape)} and `labels` {tuple(labels.shape)}: expected equal blocks and drafts."
        )
    loss = draft_cross_entropy(logits, labels)
    if teacher_logits is None or kl_weight == 0:
        return loss
    return loss + kl_weight * draft_kl(logits, teacher_logits, labels, kl_temperature)
