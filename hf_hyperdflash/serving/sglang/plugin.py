"""SGLang's plugin: `--speculative-algorithm DFLASH --speculative-draft-model-path my-drafter`.

SGLang calls [`register`] in each of its processes, as an entry point of the group `sglang.srt.plugins`. It only adds
names of this package. A drafter's class is imported when one is loaded.
"""

from __future__ import annotations

from typing import Any

from ..served_config import OTHERS, refusing
from .config import SGLangConfig

ARCHITECTURE = "HyperDFlashDrafter"  # as in a drafter's config.json
# SGLang calls this for a model's class, in the processes that run models. To import its registry imports all models.
GET_ARCHITECTURE = "sglang.srt.model_loader.utils.get_model_architecture"


def register() -> None:
    """Let SGLang read and run this package's drafters."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from transformers import AutoConfig

    AutoConfig.register(SGLangConfig.model_type, SGLangConfig, exist_ok=True)
    for model_type in OTHERS:
        AutoConfig.register(model_type, refusing(model_type, SGLangConfig.engine), exist_ok=True)
    HookRegistry.register(GET_ARCHITECTURE, know_drafter, HookType.BEFORE)


def know_drafter(model_config: Any) -> None:
    """Put a drafter's class into SGLang's registry when a model's configuration names it."""
    if ARCHITECTURE in (model_config.hf_config.architectures or ()):
        from sglang.srt.models.registry import ModelRegistry

        from .drafter import ServedDrafter

        ModelRegistry.models[ARCHITECTURE] = ServedDrafter
