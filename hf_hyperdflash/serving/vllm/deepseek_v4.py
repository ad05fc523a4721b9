"""DeepSeek-V4 as a target of vLLM that returns its residual streams, for drafters whose gate reads them.

vLLM's own class gives drafters the mean over the streams. It stores the last layer's streams, before their collapse,
in a buffer for the MTP block. This class returns that buffer instead of the means. It is written against vLLM 0.32's
interfaces and tested on tensors. No GPU has run it, and vLLM's CPU build cannot run DeepSeek-V4 with a DFlash drafter
(their cache layouts differ).
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed import get_pp_group
from vllm.models.deepseek_v4 import DeepseekV4ForCausalLM

from .config import reads_streams


class DeepseekV4WithStreams(DeepseekV4ForCausalLM):
    """vLLM's DeepSeek-V4; it differs only with a drafter that [`reads_streams`], and where features are made."""

    hands_out_streams = False  # whether its auxiliary states are the pre-collapse residual
    stream_by_stream = False  # as a state for each stream, which is how features are kept; else as one

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        speculative = vllm_config.speculative_config
        drafter = getattr(speculative, "draft_model_config", None)
        self.stream_by_stream = getattr(speculative, "method", None) == "extract_hidden_states"
        reads = drafter is not None and reads_streams(drafter.hf_config)
        self.hands_out_streams = self.stream_by_stream or reads
        if self.stream_by_stream and get_pp_group().is_last_rank and self.get_mtp_target_hidden_states() is None:
            # vLLM makes the buffer for drafters alone.
            rows = vllm_config.scheduler_config.max_num_batched_tokens
            self.model._mtp_hidden_buffer = torch.empty(
                rows, self.config.hc_mult * self.config.hidden_size, dtype=vllm_config.model_config.dtype
            )

    def forward(self, *args: object, **kwargs: object) -> Any:
        """Run vLLM's forward; the auxiliary state is `[tokens, config.hc_mult * config.hidden_size]`, by stream, or
        `[tokens, config.hidden_size]` for each stream."""
        output = super().forward(*args, **kwargs)
        if not self.hands_out_streams or not isinstance(output, tuple):
            return output
        hidden, _ = output
        streams = self.get_mtp_target_hidden_states()[: len(hidden)]
        if self.stream_by_stream:
            return hidden, list(streams.unflatten(-1, (-1, hidden.shape[-1])).unbind(1))
        return hidden, [streams]
