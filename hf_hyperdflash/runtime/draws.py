"""A random draw that does not make the host wait for the device, as `torch.multinomial` does twice on a GPU."""

import torch


def one_of(weights: torch.Tensor) -> torch.Tensor:
    """An index, drawn with a probability in proportion to its weight: of clocks that run so fast, the first to ring.

    Args:
        weights: `[..., values]`, at least 0, and not all of them 0.

    Returns:
        `[..., 1]`.
    """
    return (weights / torch.empty_like(weights).exponential_()).argmax(-1, keepdim=True)
