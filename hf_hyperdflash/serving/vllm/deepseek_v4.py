"""DeepSeek-V4 as a target of vLLM that hands out its residual paths, where a drafter's gate reads them.

vLLM's own hands drafters the mean over the paths, and keeps the last layer's, before their collapse, in a buffer for
the MTP block. This class returns that buffer instead of the means. It is written against vLLM 0.32's interfaces and
tested on tensors; no GPU has run it, and vLLM's CPU build cannot run DeepSeek-V4 with a DFlash drafter (their cache
layouts differ).
"""

from __future__ import annotations

from typing import Any

from vllm.models.deepseek_v4 import DeepseekV4ForCausalLM

from .config import reads_paths


class DeepseekV4WithPaths(DeepseekV4ForCausalLM):
    """Exactly vLLM's DeepSeek-V4 but with a drafter that [`reads_paths`].

    Attributes:
        hands_out_paths: Whether its auxiliary state is the pre-collapse residual.
    """

    hands_out_paths = False

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        speculative = vllm_config.speculative_config
        drafter = getattr(speculative, "draft_model_config", None)
        self.hands_out_paths = drafter is not None and reads_paths(drafter.hf_config)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As vLLM's; the auxiliary state is `[tokens, config.hc_mult * config.hidden_size]`, path after path."""
        output = super().forward(*args, **kwargs)
        if not self.hands_out_paths or not isinstance(output, tuple):
            return output
        hidden, _ = output
        return hidden, [self.get_mtp_target_hidden_states()[: len(hidden)]]
