"""vLLM's plugin: `vllm serve TARGET --speculative-config '{"method": "dflash", "model": "my-drafter"}'`.

vLLM calls [`register`] in each of its processes, as an entry point of the group `vllm.general_plugins`. It adds names
that are this package's own and changes nothing else.
"""

from __future__ import annotations

from .served_config import OTHERS, ServedConfig, refusing

# As in a drafter's config.json, and with what vLLM's method "dflash" puts before it.
ARCHITECTURES = ("HyperDFlashDrafter", "DFlashHyperDFlashDrafter")
# By its name: vLLM imports models only in the processes that run them.
SERVED_DRAFTER = "hf_hyperdflash.serving.vllm_drafter:ServedDrafter"


def register() -> None:
    """Let vLLM read and run this package's drafters."""
    from transformers import AutoConfig
    from vllm import ModelRegistry

    AutoConfig.register(ServedConfig.model_type, ServedConfig, exist_ok=True)
    for model_type in OTHERS:
        AutoConfig.register(model_type, refusing(model_type), exist_ok=True)
    for architecture in ARCHITECTURES:
        ModelRegistry.register_model(architecture, SERVED_DRAFTER)
