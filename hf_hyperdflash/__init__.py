"""HyperDFlash block speculative decoding for DeepSeek-V4 in Hugging Face transformers.

The public names are imported on first use (PEP 562): importing the package loads nothing and changes nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from .runtime.version import __version__

_MODULE_OF = {
    "load_target": "loading",
    "load_drafter": "loading",
    "bind": "runtime.binding",
    "unbind": "runtime.binding",
    "capture_residual": "runtime.binding",
    "HyperDFlashConfig": "runtime.configuration_hyperdflash",
    "Drafter": "runtime.drafter",
    "HyperDFlashDrafter": "runtime.modeling_hyperdflash",
    "DeepseekV4DSparkDrafter": "runtime.modeling_dspark",
    "Eagle3Config": "runtime.configuration_eagle3",
    "Eagle3Drafter": "runtime.modeling_eagle3",
    "SpecBlockConfig": "runtime.configuration_specblock",
    "SpecBlockDrafter": "runtime.modeling_specblock",
    "DeepseekV4MTPDrafter": "runtime.modeling_mtp",
    "PromptLookupDrafter": "runtime.prompt_lookup",
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
