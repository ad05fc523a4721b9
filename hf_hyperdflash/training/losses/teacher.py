"""The teacher: the input of the target's LM head, computed from a residual that is known already."""

from __future__ import annotations

from typing import Any, cast

import torch

from ...targets.target import Target, computable


def teacher_states(target: Target, residual: torch.Tensor, kl_teacher: str = "hc_head") -> torch.Tensor:
    """Return the input of the target's LM head at each position, from the pre-collapse residual, without a forward.

    Args:
        target: The target.
        residual: `[batch, seq, config.hc_mult, config.hidden_size]`.
        kl_teacher: `"hc_head"` for the target's own collapse, whose logits are the target's next-token logits;
            `"mean_pool"` for the mean of the streams, the paper's teacher (section 2.3).

    Returns:
        `[batch, seq, config.hidden_size]`.

    Raises:
        ValueError: If the mean is asked for and the target has no final norm to put after it.
    """
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
