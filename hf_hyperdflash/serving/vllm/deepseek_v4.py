"""DeepSeek-V4 as a target of vLLM that returns its residual streams, for drafters whose gate reads them.

vLLM's own class gives drafters the mean over the streams. It stores the last layer's streams, before their collapse,
in a buffer for the MTP block. This class returns that buffer instead of the means. It is written against vLLM 0.32's
interfaces and tested on tensors. No GPU has run it, and vLLM's CPU build cannot run DeepSeek-V4 with a DFlash drafter
(their cache layouts differ).
"""

from __future__ import annotations

from typing import Any

from vllm.models.deepseek_v4 import DeepseekV4ForCausalLM

from .config import reads_streams


class DeepseekV4WithStreams(DeepseekV4ForCausalLM):
    """vLLM's DeepSeek-V4; it differs only with a drafter that [`reads_streams`]."""

    hands_out_streams = False  # whether its auxiliary state is the pre-collapse residual

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        speculative = vllm_config.speculative_config
        drafter = getattr(speculative, "draft_model_config", None)
        self.hands_out_streams = drafter is not None and reads_streams(drafter.hf_config)

    def forward(self, *args: object, **kwargs: object) -> Any:
        """Run vLLM's forward; the auxiliary state is `[tokens, config.hc_mult * config.hidden_size]`, by stream."""
        output = super().forward(*args, **kwargs)
        if not self.hands_out_streams or not isinstance(output, tuple):
            return output
        hidden, _ = output
        return hidden, [self.get_mtp_target_hidden_states()[: len(hidden)]]
