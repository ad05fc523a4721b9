"""A drafter's configuration as SGLang reads it, and what of drafters SGLang cannot run."""

from __future__ import annotations

from typing import Any

from ...drafters.parts.block_attention import FULL
from ..served_config import TRAIN, ServedConfig, Started, check_same_target, check_started, layers_read


class SGLangConfig(ServedConfig):
    """With `dflash_config`, `is_causal` where all layers are alike in that, and the `layer_types` whose windows SGLang
    has, too, which count from each slot."""

    engine = "SGLang"

    def _say_in_engines_words(self) -> None:
        self.dflash_config = {
            "block_size": self.block_size,
            "mask_token_id": self.mask_token_id,
            "target_layer_ids": layers_read(self),
        }
        if self.conv_kernel_size:
            self.dflash_config |= {
                "conv_kernel_size": self.conv_kernel_size, "conv_group_size": self.conv_group_size
            }  # fmt: skip
        if self.causal_layers != "sliding":  # SGLang's own, where it is not told: sliding ones are, others are not
            self.is_causal = self.causal_layers == "all"
        kinds = self.kinds  # without which SGLang does not read `is_causal`
        if self.window_from == "anchor" and FULL not in kinds and self.causal_layers != "sliding":
            kinds = [FULL] * len(kinds)  # a window from the anchor is served where it takes in the longest text
        self.layer_types = kinds

    def _beyond_engine(self) -> list[tuple[bool, str, str, str]]:
        window, block = self.sliding_window, self.block_size
        return [
            (self.target_hc_mult > 1, "target_hc_mult", "targets with one residual path",
             "serve with vLLM, or draft in transformers' `generate`"),
            (window is not None and window < block and self.window_from == "slot", "sliding_window",
             f"windows of the block's {block} slots at least", f"{TRAIN} `sliding_window={block}` or more"),
        ]  # fmt: skip


def check_served_pair(config: Any, target: Any, drafts: int, longest: int) -> None:
    """Check that SGLang can run a drafter with a target as it was started.

    Args:
        config: The drafter's [`SGLangConfig`], or one with its fields.
        target: The configuration of the target's text model.
        drafts: Draft positions, one less than `--speculative-num-draft-tokens`.
        longest: `--context-length`.

    Raises:
        ValueError: If not: what it is, what was expected, and what to do.
    """
    check_same_target(config, target)
    options = "--speculative-num-draft-tokens", "--context-length"
    check_started(config, Started(SGLangConfig.engine, drafts, longest, *options, counts_anchor=True))
