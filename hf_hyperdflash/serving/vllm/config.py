"""A drafter's configuration as vLLM reads it, and the limits of vLLM."""

from __future__ import annotations

from transformers import PreTrainedConfig

from ...drafters.parts.block_attention import FULL, SLIDING
from ..served_config import TRAIN, ServedConfig, layers_read


class VLLMConfig(ServedConfig):
    """A [`ServedConfig`] with `dflash_config` and `n_predict`, vLLM's default for the number of drafts."""

    engine, drafts_option, longest_option = "vLLM", "num_speculative_tokens", "--max-model-len"

    def _add_engine_fields(self) -> None:
        fields: dict[str, object] = {"mask_token_id": self.mask_token_id, "target_layer_ids": layers_read(self)}
        if self.causal_layers != "sliding":
            fields["causal"] = self.causal_layers == "all"
        if self.window_from == "slot" and SLIDING in self.kinds:
            fields["swa_window_size"] = self.sliding_window
            fields["use_swa"] = FULL not in self.kinds
        self.dflash_config = fields
        self.n_predict = self.block_size - 1

    def _unsupported_by_engine(self) -> list[tuple[bool, str, str, str]]:
        return [
            (self.conv_kernel_size > 0, "conv_kernel_size", "0", f"{TRAIN} `conv_kernel_size=0`"),
            (reads_streams(self) and layers_read(self) != [self.target_num_layers - 1], "target_layer_ids",
             "the residual streams of the last layer alone, [-1]",
             f"{TRAIN} `target_layer_ids=[-1]`, or with `reducer='stream_mean'`"),
        ]  # fmt: skip


def reads_streams(config: PreTrainedConfig) -> bool:
    """Return whether a drafter's configuration reads several residual streams of a layer separately."""
    return getattr(config, "target_hc_mult", 1) > 1 and config.reducer != "stream_mean"


def check_one_number_of_drafts(config: PreTrainedConfig, by_batch_size: list[list[int]] | None) -> None:
    """Raise a `ValueError` if vLLM would run another block than a drafter was trained with where there are many
    requests."""
    if by_batch_size and config.causal_layers != "all":
        raise ValueError(
            f"`num_speculative_tokens_per_batch_size` is {by_batch_size}, but the draft positions of the drafter's "
            "block see each other, and vLLM would run another block than was trained: leave it out."
        )
