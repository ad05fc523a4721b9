"""Configuration of the drafters that continue from states of their own."""

from __future__ import annotations

from ..configuration import DrafterConfig


class UnrolledConfig(DrafterConfig):
    r"""Shape of a drafter of entries ([`~drafters.unrolled.drafter.UnrolledDrafter`]): the fields of
    [`DrafterConfig`], and those of its blocks.

    Args:
        block_size: Draft positions of one pass.
        max_blocks: Passes of one round: the first, and those that continue it.
        own_embedding: Whether it embeds tokens itself, not with the target's embedding.
        qk_norm: Whether its attention normalizes queries and keys.
        usual_layers: Whether it reads the layers 1, n / 2 - 1 and n - 4 of a target of n: other programs' checkpoints
            do not have n, and of `target_layer_ids` only the number counts.

    Raises:
        ValueError: If a field, or two together, have values that no drafter can have.
    """

    block_size: int = 1
    max_blocks: int = 1
    own_embedding: bool = False
    qk_norm: bool = False
    usual_layers: bool = False

    bounds = {**DrafterConfig.bounds, "block_size": (1, 2**8), "max_blocks": (1, 2**8)}
    # What other drafters may have.
    conv_kernel_size = head_candidates = 0
    sequential_head = "none"
    confidence_head = False

    def _check_sizes(self) -> None:
        super()._check_sizes()
        is_whole = self.own_embedding and self.draft_vocab_size
        if self.hidden_size != self.target_hidden_size and not is_whole:
            raise ValueError(
                f"`hidden_size` is {self.hidden_size} and `target_hidden_size` {self.target_hidden_size}: expected "
                "equal widths, or `own_embedding` and a `draft_vocab_size`."
            )

    @property
    def max_draft_tokens(self) -> int:
        """The most tokens one after the other that one round can draft."""
        return self.block_size * self.max_blocks
