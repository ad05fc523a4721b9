"""HyperDFlash block speculative decoding for DeepSeek-V4 in Hugging Face transformers.

The public names are imported on first use (PEP 562): importing the package loads nothing and changes nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .runtime.version import __version__

if TYPE_CHECKING:
    from .benchmark.doctor import examine
    from .hub.cards import drafter_card
    from .hub.formats import export_dflash, load_dflash
    from .loading import load_target
    from .metrics.acceptance_length import AcceptanceLength
    from .metrics.per_position_acceptance import PerPositionAcceptance
    from .runtime.binding import bind, capture_residual, unbind
    from .runtime.cache_deepseek_v4 import (
        RewindableCSACacheLayer,
        RewindableHCACacheLayer,
        RewindableSlidingCacheLayer,
        make_rewindable,
    )
    from .runtime.configuration_hyperdflash import HyperDFlashConfig
    from .runtime.modeling_hyperdflash import HyperDFlashDrafter, register_auto_classes
    from .runtime.modeling_mtp import DeepseekV4MTPDrafter
    from .runtime.prompt_lookup import PromptLookupDrafter
    from .runtime.reducers import HCGateReducer
    from .runtime.stats import SpeculationStats
    from .training.acceptance import AcceptanceCallback, measure_acceptance
    from .training.arguments import HyperDFlashTrainingArguments
    from .training.features import FeatureCache
    from .training.losses import drafter_loss
    from .training.trainer import HyperDFlashTrainer

_MODULE_OF = {
    "RewindableCSACacheLayer": "runtime.cache_deepseek_v4",
    "RewindableHCACacheLayer": "runtime.cache_deepseek_v4",
    "RewindableSlidingCacheLayer": "runtime.cache_deepseek_v4",
    "make_rewindable": "runtime.cache_deepseek_v4",
    "HyperDFlashConfig": "runtime.configuration_hyperdflash",
    "AcceptanceCallback": "training.acceptance",
    "AcceptanceLength": "metrics.acceptance_length",
    "PerPositionAcceptance": "metrics.per_position_acceptance",
    "measure_acceptance": "training.acceptance",
    "FeatureCache": "training.features",
    "drafter_card": "hub.cards",
    "examine": "benchmark.doctor",
    "export_dflash": "hub.formats",
    "load_dflash": "hub.formats",
    "SpeculationStats": "runtime.stats",
    "drafter_loss": "training.losses",
    "HCGateReducer": "runtime.reducers",
    "HyperDFlashDrafter": "runtime.modeling_hyperdflash",
    "register_auto_classes": "runtime.modeling_hyperdflash",
    "DeepseekV4MTPDrafter": "runtime.modeling_mtp",
    "PromptLookupDrafter": "runtime.prompt_lookup",
    "bind": "runtime.binding",
    "capture_residual": "runtime.binding",
    "load_target": "loading",
    "unbind": "runtime.binding",
    "HyperDFlashTrainer": "training.trainer",
    "HyperDFlashTrainingArguments": "training.arguments",
}

__all__ = [
    "AcceptanceCallback",
    "AcceptanceLength",
    "DeepseekV4MTPDrafter",
    "FeatureCache",
    "HCGateReducer",
    "HyperDFlashConfig",
    "HyperDFlashDrafter",
    "HyperDFlashTrainer",
    "HyperDFlashTrainingArguments",
    "PerPositionAcceptance",
    "PromptLookupDrafter",
    "RewindableCSACacheLayer",
    "RewindableHCACacheLayer",
    "RewindableSlidingCacheLayer",
    "SpeculationStats",
    "__version__",
    "bind",
    "capture_residual",
    "drafter_card",
    "drafter_loss",
    "examine",
    "export_dflash",
    "load_dflash",
    "load_target",
    "make_rewindable",
    "measure_acceptance",
    "register_auto_classes",
    "unbind",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULE_OF[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
