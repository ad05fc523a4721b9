"""The teacher: the input of the target's LM head, computed from a residual that is known already."""

from __future__ import annotations

from typing import Any, cast

import torch

from ...targets.target import Target, computable


def teacher_states(target: Target, residual: torch.Tensor, kl_teacher: str = "hc_head") -> torch.Tensor:
    """Return the input of the target's LM head at each position, `[batch, seq, config.hidden_size]`, from the
    pre-collapse residual, `[batch, seq, config.hc_mult, config.hidden_size]`, without a forward.

    `"hc_head"` is the target's own collapse, whose logits are its next-token logits; `"mean_pool"` the mean of the
    streams, the paper's teacher (section 2.3), which a target without a final norm does not have."""
    check_teacher(target, kl_teacher)
    head = cast(Any, target.model.get_output_embeddings()).weight
    residual = computable(residual, head).to(target.dtype)
    states = cast(Any, target.norm)(residual.mean(dim=2)) if kl_teacher == "mean_pool" else target.collapse(residual)
    return computable(states, head)


def check_teacher(target: Target, kl_teacher: str) -> None:
    """Raise a `ValueError` if `target` cannot be such a teacher (see [`teacher_states`])."""
    if kl_teacher == "mean_pool" and target.norm is None:
        model_type = target.config.model_type
        raise ValueError(
            f"`kl_teacher` is 'mean_pool', but a {model_type} target has no norm after its collapse. Use 'hc_head'."
        )
