"""A drafter's configuration as SGLang reads it, and the limits of SGLang."""

from __future__ import annotations

from ...drafters.parts.block_attention import FULL
from ..served_config import TRAIN, ServedConfig, layers_read


class SGLangConfig(ServedConfig):
    """A [`ServedConfig`] with `dflash_config`, with `is_causal` if it is the same for all layers, and with the
    `layer_types` whose windows SGLang has, which count from each slot."""

    engine, drafts_option, longest_option = "SGLang", "--speculative-num-draft-tokens", "--context-length"
    counts_anchor = True

    def _add_engine_fields(self) -> None:
        self.dflash_config = {
            "block_size": self.block_size,
            "mask_token_id": self.mask_token_id,
            "target_layer_ids": layers_read(self),
        }
        if self.conv_kernel_size:
            self.dflash_config |= {
                "conv_kernel_size": self.conv_kernel_size, "conv_group_size": self.conv_group_size
            }  # fmt: skip
        if self.causal_layers != "sliding":  # SGLang's default: sliding layers are causal, others are not
            self.is_causal = self.causal_layers == "all"
        kinds = self.kinds  # SGLang reads `is_causal` only together with them
        if self.window_from == "anchor" and FULL not in kinds and self.causal_layers != "sliding":
            kinds = [FULL] * len(kinds)  # served only if the window contains the longest text
        self.layer_types = kinds

    def _unsupported_by_engine(self) -> list[tuple[bool, str, str, str]]:
        window, block = self.sliding_window, self.block_size
        is_capped = bool(self.draft_vocab_size) and self.final_logit_softcapping is not None
        return [
            # Its DFlash layers rotate all of a head, whatever the factor, and its plugin's selector caps nothing.
            ("partial_rotary_factor" in (self.rope_parameters or {}), "rope_parameters",
             "heads that are rotated as a whole", f"serve with vLLM, or {TRAIN} no `partial_rotary_factor`"),
            (is_capped, "final_logit_softcapping", "an LM head of the drafter's own without a cap", "serve with vLLM"),
            (min(self.target_layer_ids or [0]) < -1, "target_layer_ids", "layers from 0 on",
             f"serve with vLLM, or {TRAIN} others"),
            (self.target_hc_mult > 1, "target_hc_mult", "targets with one residual stream",
             "serve with vLLM, or draft in transformers' `generate`"),
            (window is not None and window < block and self.window_from == "slot", "sliding_window",
             f"windows of the block's {block} slots at least", f"{TRAIN} `sliding_window={block}` or more"),
        ]  # fmt: skip
