"""Configurations of the drafters that continue from states of their own: EAGLE-3, P-EAGLE and SpecBlock."""

from __future__ import annotations

from ..configuration import DrafterConfig, within
from ..parts.heads import RANK_CLASSES, RANK_CONTEXT


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

    block_size: int = within(1, 1, 2**8)
    max_blocks: int = within(1, 1, 2**8)
    own_embedding: bool = False
    qk_norm: bool = False
    usual_layers: bool = False

    # What other drafters may have.
    conv_kernel_size = head_candidates = 0
    sequential_head = "none"
    confidence_head = False

    def check(self) -> None:
        super().check()
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

    num_hidden_layers: int = within(1, 1, 2**10)
    block_size: int = within(1, 1, 1)
    max_blocks: int = within(7, 1, 2**8)
    reducer: str = "fc"
    tree_width: int = within(10, 1, 2**12)
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False

    def check(self) -> None:
        super().check()
        if self.norm_before_fc and self.fc_norm:
            raise ValueError("`norm_before_fc` and `fc_norm` are both True, expected one of them.")
        if (self.norm_before_fc or self.fc_norm) and self.reducer not in ("fc", "stream_mean"):
            raise ValueError(
                f"`reducer` is {self.reducer!r}, expected 'fc' or 'stream_mean' with `norm_before_fc` or `fc_norm`, "
                "which norm what it projects."
            )


class PEagleConfig(Eagle3Config):
    r"""Shape of a [`PEagleDrafter`] and of the target it reads: the fields of [`Eagle3Config`], of which a
    `tree_width` has no effect, and a token.

    Args:
        num_hidden_layers: Four in published checkpoints.
        max_blocks: How many tokens one round drafts.
        mask_token_id: The token that stands for each draft that is not known yet.

    Raises:
        ValueError: If a field, or two together, have values that no drafter can have.
    """

    model_type = "peagle"

    num_hidden_layers: int = within(4, 1, 2**10)
    mask_token_id: int = within(0, 0, 2**24)

    def check(self) -> None:
        super().check()
        if self.mask_token_id >= self.vocab_size:
            raise ValueError(
                f"`mask_token_id` is {self.mask_token_id}, outside the vocabulary of {self.vocab_size} tokens. Pass "
                "the id of a token that never occurs in text."
            )


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

    num_hidden_layers: int = within(2, 1, 2**10)
    block_size: int = within(4, 1, 2**8)
    max_blocks: int = within(2, 1, 2**8)
    reducer: str = "fc"
    shift: bool = True
    broadcast: bool = True
    rank_head: bool = True
    rank_width: int = within(256, 1, 2**16)
    branching: list[int] | None = None

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
