"""vLLM's plugin: `vllm serve TARGET --speculative-config '{"method": "dflash", "model": "my-drafter"}'`.

vLLM calls [`register`] in each of its processes, as an entry point of the group `vllm.general_plugins`. It only adds
names of this package, unless a user sets [`STREAMS_VARIABLE`].
"""

from __future__ import annotations

import os
from contextlib import suppress

from ...training.features.engine_protocol import CONNECTOR, STREAMS_VARIABLE
from ..served_config import OTHERS, refusing
from .config import VLLMConfig

# As in a drafter's config.json, and with what vLLM's method "dflash" puts before it.
ARCHITECTURES = ("HyperDFlashDrafter", "DFlashHyperDFlashDrafter")
# Names, because vLLM imports models only in the processes that run them.
SERVED_DRAFTER = "hf_hyperdflash.serving.vllm.drafter:ServedDrafter"
FEATURES = "hf_hyperdflash.serving.vllm.features:FeatureConnector"
# vLLM recognizes that target by its name, so our class has to replace vLLM's own, and only if the user asks for it
# ([`STREAMS_VARIABLE`]).
DEEPSEEK_V4 = {"DeepseekV4ForCausalLM": "hf_hyperdflash.serving.vllm.deepseek_v4:DeepseekV4WithStreams"}


def register() -> None:
    """Let vLLM read and run this package's drafters."""
    from transformers import AutoConfig
    from vllm import ModelRegistry
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    with suppress(ValueError):  # it is registered already
        KVConnectorFactory.register_connector(CONNECTOR, *FEATURES.split(":"))
    AutoConfig.register(VLLMConfig.model_type, VLLMConfig, exist_ok=True)
    for model_type in OTHERS:
        AutoConfig.register(model_type, refusing(model_type, VLLMConfig.engine), exist_ok=True)
    models = dict.fromkeys(ARCHITECTURES, SERVED_DRAFTER) | (
        DEEPSEEK_V4 if os.environ.get(STREAMS_VARIABLE) == "1" else {}
    )
    for architecture, model in models.items():
        ModelRegistry.register_model(architecture, model)
