"""Configuration of an EAGLE-3 drafter."""

from __future__ import annotations

from .configuration import UnrolledConfig


class Eagle3Config(UnrolledConfig):
    r"""Shape of an [`Eagle3Drafter`] and of the target it reads: beside the fields of [`UnrolledConfig`] what its
    released checkpoints differ in.

    Args:
        num_hidden_layers: One in the paper.
        max_blocks: How many tokens one round drafts one after the other: the depth of its tree.
        tree_width: How many nodes of a level of its draft tree get children, and how many each of them gets.
        norm_before_residual: Whether the first layer adds to the normed state, not to the state itself.
        norm_before_fc: Whether the target's states are normed together before the projection.
        fc_norm: Whether they are normed layer by layer instead.
        norm_output: Whether a later step continues from the normed state (EAGLE-3.1).

    Raises:
        ValueError: If a field, or two together, have values that no drafter can have.
    """

    model_type = "eagle3"

    num_hidden_layers: int = 1
    max_blocks: int = 7
    reducer: str = "fc"
    tree_width: int = 10
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False

    bounds = {**UnrolledConfig.bounds, "block_size": (1, 1), "tree_width": (1, 2**12)}

    def check(self) -> None:
        super().check()
        if self.norm_before_fc and self.fc_norm:
            raise ValueError("`norm_before_fc` and `fc_norm` are both True, expected one of them.")
        if (self.norm_before_fc or self.fc_norm) and self.reducer not in ("fc", "stream_mean"):
            raise ValueError(
                f"`reducer` is {self.reducer!r}, expected 'fc' or 'stream_mean' with `norm_before_fc` or `fc_norm`, "
                "which norm what it projects."
            )
