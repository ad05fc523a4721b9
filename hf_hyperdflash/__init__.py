"""HyperDFlash block speculative decoding for DeepSeek-V4 in Hugging Face transformers.

The public names are imported on first use (PEP 562): importing the package loads nothing and changes nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from .version import __version__

_MODULE_OF = {
    "load_target": "hub.loading",
    "load_drafter": "hub.loading",
    "bind": "decoding.bind",
    "unbind": "decoding.bind",
    "capture_residual": "decoding.bind",
    "HyperDFlashConfig": "drafters.blocks.configuration_hyperdflash",
    "Drafter": "drafters.base",
    "HyperDFlashDrafter": "drafters.blocks.modeling_hyperdflash",
    "DeepseekV4DSparkDrafter": "drafters.deepseek_v4.modeling_dspark",
    "Eagle3Config": "drafters.unrolled.configuration_eagle3",
    "Eagle3Drafter": "drafters.unrolled.modeling_eagle3",
    "SpecBlockConfig": "drafters.unrolled.configuration_specblock",
    "SpecBlockDrafter": "drafters.unrolled.modeling_specblock",
    "DeepseekV4MTPDrafter": "drafters.deepseek_v4.modeling_mtp",
    "PromptLookupDrafter": "drafters.prompt_lookup",
    "AcceptanceCallback": "training.acceptance",
    "measure_acceptance": "training.acceptance",
    "HyperDFlashTrainingArguments": "training.arguments",
    "HyperDFlashTrainer": "training.trainer",
}

__all__ = ["__version__", *_MODULE_OF]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULE_OF[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
