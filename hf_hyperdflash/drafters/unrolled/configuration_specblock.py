"""Configuration of a SpecBlock drafter."""

from __future__ import annotations

from ..parts.rank_head import RANK_CLASSES, RANK_CONTEXT
from .configuration import UnrolledConfig


class SpecBlockConfig(UnrolledConfig):
    r"""Shape of a [`SpecBlockDrafter`] and of the target it reads: beside the fields of [`UnrolledConfig`] the paper's
    mechanisms, each of which can be left out.

    Args:
        num_hidden_layers: Two in the paper.
        block_size: K, dependent draft positions of one pass; four in the paper.
        max_blocks: Two in the paper.
        shift: Whether each slot also reads the slot before it, ahead of every layer but the first.
        broadcast: Whether all slots of a block read its condition and token; otherwise only the first.
        rank_head: Whether a head predicts the rank of the target's token among the drafter's.
        rank_width: Of the rank head's hidden layer.
        branching: How many tokens a draft tree tries at a slot: of each of the rank head's classes, or one number
            without a rank head. With the paper's 2, 4, 10 and 0, where 0 ends the path, a part of the budget stays
            unused; the default is what its authors found fastest.

    Raises:
        ValueError: If a field, or two together, have values that no drafter can have.
    """

    model_type = "specblock"

    num_hidden_layers: int = 2
    block_size: int = 4
    max_blocks: int = 2
    reducer: str = "fc"
    shift: bool = True
    broadcast: bool = True
    rank_head: bool = True
    rank_width: int = 256
    branching: list[int] | None = None

    bounds = {**UnrolledConfig.bounds, "rank_width": (1, 2**16)}

    def _complete(self) -> None:
        if self.branching is None:
            self.branching = [2, 4, 6, 4] if self.rank_head else [4]

    def check(self) -> None:
        super().check()
        classes = RANK_CLASSES if self.rank_head else 1
        given = self.branching
        if not (
            isinstance(given, list) and len(given) == classes and all(type(n) is int and 0 <= n <= 64 for n in given)
        ):
            raise ValueError(
                f"`branching` is {given!r}, expected {classes} whole numbers from 0 to 64, one per class of the rank "
                "head (without one, just one number)."
            )
        if max(given) == 0:
            raise ValueError(f"`branching` is {given}, which drafts nothing: expected a number above 0.")
        tokens = self.draft_vocab_size or self.vocab_size
        if self.rank_head and tokens < RANK_CONTEXT:
            raise ValueError(
                f"The drafter drafts {tokens} tokens, expected at least {RANK_CONTEXT} for its rank head: leave that "
                "out with `rank_head=False`."
            )
