"""Configuration of a HyperDFlash drafter."""

from __future__ import annotations

import math

from ..configuration import DrafterConfig, within
from ..parts.block_attention import CAUSAL_LAYERS, FULL, LAYER_KINDS, SLIDING, WINDOW_FROM, AttentionSpan
from ..parts.heads import HEADS


def check_temperatures(temperatures: list[float] | None, drafts: int) -> None:
    """Raise a `ValueError` if `temperatures` are neither `None` nor one positive number per draft position."""
    if temperatures is not None and not (
        isinstance(temperatures, list)
        and len(temperatures) == drafts
        and all(type(t) in (int, float) and 0 < t < math.inf for t in temperatures)
    ):
        raise ValueError(
            f"`confidence_temperatures` is {temperatures!r}, expected None or {drafts} positive numbers, one per "
            "draft position, as `hf-hyperdflash calibrate` writes them."
        )


class HyperDFlashConfig(DrafterConfig):
    r"""Shape of a drafter of blocks and of the target it reads: the fields of [`DrafterConfig`], and those of blocks
    and heads.

    Args:
        sliding_window: How many context positions before the anchor a block sees; `None` for all.
        layer_types: `"full_attention"` or `"sliding_attention"` for each layer, where only the latter have the window;
            `None` if all are alike. Mixed ones, and the next two, are DFlash drafters' of other formats.
        causal_layers: In which layers a slot sees only those before it of its block: `"none"`, `"sliding"` or `"all"`
            (JetSpec).
        window_from: Where the window begins: at the `"anchor"`, or at each `"slot"`, which it then includes (see
            [`AttentionSpan`]).
        block_size: Anchor plus draft positions: 7 is the paper's six drafted steps (section 3.3).
        sample_from_anchor: Whether the anchor's slot drafts as well, so that slot k drafts the token k + 1 after the
            anchor and 7 inputs give 7 drafts (DSpark). The paper's does not: slot k drafts the token k after it.
        mask_token_id: The token that stands at every draft position of a block's input, and is never drafted; `None`
            for a vector of the drafter's own there.
        sequential_head: The head by which each draft depends on the one before it, `"none"` or one of
            [`~drafters.parts.heads.HEADS`]: `"markov"`, `"gated_markov"`, `"recurrent"` (DSpark's), `"gru"`
            (Domino's), `"selector"` (DFlash 2's), `"state"` (ours).
        head_rank: Width of the head: rank of its tables, or of the state head's correction.
        head_state_size: Width of a `"gru"` head's state.
        head_start: How many of a block's first drafts a `"gru"` head leaves as the block alone has them.
        head_candidates: Among how many of the block's own best tokens a draft is chosen where there is a head; 0 for
            all. By default 16 for `"selector"` (or the vocabulary), 1,024 for `"state"` with more than 8,192 tokens
            and no draft vocabulary, and all for the others.
        conv_kernel_size: Taps of the causal convolutions around attention and MLP of every layer (DFlash 2: 2); 0 for
            none.
        conv_group_size: Channels that share a convolution's dynamic kernel, a divisor of `hidden_size`.
        confidence_head: Whether the drafter predicts the probability that each draft is accepted (DSpark).
        confidence_reads_token: Whether that depends on the token before, too, where there is a sequential head.
        confidence_temperatures: One per draft position, which the confidence's logits are divided by, as
            `hf-hyperdflash calibrate` fits them; `None` for 1.

    Raises:
        ValueError: If a field, or two together, have values that no drafter can have.
    """

    model_type = "hyperdflash"

    sliding_window: int | None = within(None, 1, 2**40, ", or None for no window")
    layer_types: list[str] | None = None
    causal_layers: str = "none"
    window_from: str = "anchor"
    block_size: int = within(7, 2, 2**12, ": the anchor and at least one draft position")
    sample_from_anchor: bool = False
    mask_token_id: int | None = 128799
    sequential_head: str = "none"
    head_rank: int = within(256, 1, 2**14)
    head_state_size: int = within(1024, 1, 2**14)
    head_start: int = within(1, 0, 2**8)
    head_candidates: int | None = within(None, 0, 2**24, ", 0 for the whole vocabulary")
    conv_kernel_size: int = within(0, 0, 2**6, ", 0 for no convolution")
    conv_group_size: int = within(16, 1, 2**17)
    confidence_head: bool = False
    confidence_reads_token: bool = True
    confidence_temperatures: list[float] | None = None

    qk_norm = True

    def _complete(self) -> None:
        if self.head_candidates is None and self.sequential_head in HEADS:
            head = HEADS[self.sequential_head]
            self.head_candidates = head.candidates_of(self.vocab_size, self.draft_vocab_size)

    def check(self) -> None:
        super().check()
        if not 0 <= (self.mask_token_id or 0) < self.vocab_size:
            raise ValueError(
                f"`mask_token_id` is {self.mask_token_id}, outside the vocabulary of {self.vocab_size} tokens. "
                "Pass the id of a token that never occurs in text, or None for a vector of the drafter's own."
            )
        kinds = self.layer_types
        if kinds is not None and not (
            isinstance(kinds, list) and len(kinds) == self.num_hidden_layers and set(kinds) <= set(LAYER_KINDS)
        ):
            raise ValueError(
                f"`layer_types` is {kinds!r}, expected None or {self.num_hidden_layers} of {LAYER_KINDS}, one per "
                "layer."
            )
        for name, allowed in (("causal_layers", CAUSAL_LAYERS), ("window_from", WINDOW_FROM)):
            if (value := getattr(self, name)) not in allowed:
                raise ValueError(f"`{name}` is {value!r}, expected one of {allowed}.")
        if SLIDING in (kinds or ()) and self.sliding_window is None:
            raise ValueError(
                "`sliding_window` is None, but `layer_types` has sliding attention: expected its window, in tokens."
            )
        if self.sequential_head not in ("none", *HEADS):
            raise ValueError(f"`sequential_head` is {self.sequential_head!r}, expected one of {('none', *HEADS)}.")
        vocabulary = self.draft_vocab_size or self.vocab_size
        if (self.head_candidates or 0) > vocabulary:
            raise ValueError(
                f"`head_candidates` is {self.head_candidates}, expected at most the {vocabulary} tokens that can be "
                "drafted."
            )
        if self.sequential_head == "gru" and self.head_start >= self.max_draft_tokens:
            raise ValueError(
                f"`head_start` is {self.head_start}, expected less than the {self.max_draft_tokens} drafts of a "
                "block: the head would correct none."
            )
        if self.conv_kernel_size and not 2 <= self.conv_kernel_size <= self.block_size:
            raise ValueError(
                f"`conv_kernel_size` is {self.conv_kernel_size}, expected 0, or 2 to the `block_size` of "
                f"{self.block_size}."
            )
        if self.conv_kernel_size and self.hidden_size % self.conv_group_size:
            raise ValueError(
                f"`conv_group_size` is {self.conv_group_size}, expected a divisor of the `hidden_size` of "
                f"{self.hidden_size}."
            )
        check_temperatures(self.confidence_temperatures, self.max_draft_tokens)

    @property
    def kinds(self) -> list[str]:
        """The kind of every layer."""
        alike = FULL if self.sliding_window is None else SLIDING
        return self.layer_types or [alike] * self.num_hidden_layers

    def attention_span(self, kind: str) -> AttentionSpan:
        """Return what slots see in layers of a kind."""
        is_causal = self.causal_layers == "all" or (self.causal_layers == "sliding" and kind == SLIDING)
        return AttentionSpan(self.sliding_window if kind == SLIDING else None, self.window_from == "slot", is_causal)

    @property
    def max_draft_tokens(self) -> int:
        """The most tokens one round can draft: every slot of the block, but the anchor's only where that drafts."""
        return self.block_size - self.first_slot

    @property
    def first_slot(self) -> int:
        """The slot of a block that drafts the token after the anchor."""
        return 0 if self.sample_from_anchor else 1
