"""vLLM's plugin: `vllm serve TARGET --speculative-config '{"method": "dflash", "model": "my-drafter"}'`.

vLLM calls [`register`] in each of its processes, as an entry point of the group `vllm.general_plugins`. It adds names
that are this package's own and changes nothing else, if not asked to (see [`PATHS`]).
"""

from __future__ import annotations

import os

from ..served_config import OTHERS, refusing
from .config import VLLMConfig

# As in a drafter's config.json, and with what vLLM's method "dflash" puts before it.
ARCHITECTURES = ("HyperDFlashDrafter", "DFlashHyperDFlashDrafter")
# By their names: vLLM imports models only in the processes that run them.
SERVED_DRAFTER = "hf_hyperdflash.serving.vllm.drafter:ServedDrafter"
DEEPSEEK_V4 = {"DeepseekV4ForCausalLM": "hf_hyperdflash.serving.vllm.deepseek_v4:DeepseekV4WithPaths"}
# Set to 1 it lets DeepSeek-V4 hand out its residual paths: what vLLM knows of that target hangs on its name, so that a
# class beside vLLM's own has to take its place, and that is the user's to ask for.
PATHS = "HYPERDFLASH_DEEPSEEK_V4_PATHS"


def register() -> None:
    """Let vLLM read and run this package's drafters."""
    from transformers import AutoConfig
    from vllm import ModelRegistry

    AutoConfig.register(VLLMConfig.model_type, VLLMConfig, exist_ok=True)
    for model_type in OTHERS:
        AutoConfig.register(model_type, refusing(model_type, VLLMConfig.engine), exist_ok=True)
    models = dict.fromkeys(ARCHITECTURES, SERVED_DRAFTER) | (DEEPSEEK_V4 if os.environ.get(PATHS) == "1" else {})
    for architecture, model in models.items():
        ModelRegistry.register_model(architecture, model)
