"""HyperDFlash block speculative decoding for DeepSeek-V4 in Hugging Face transformers.

The public names are imported on first use (PEP 562): importing the package loads nothing and changes nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .version import __version__

if TYPE_CHECKING:
    from .cache import RewindableCSACacheLayer, RewindableHCACacheLayer, RewindableSlidingCacheLayer, make_rewindable
    from .configuration_hyperdflash import HyperDFlashConfig
    from .doctor import examine
    from .evaluation import AcceptanceCallback, measure_acceptance
    from .features import FeatureCache
    from .formats import export_dflash, load_dflash
    from .generation import SpeculationStats
    from .losses import drafter_loss
    from .metrics.acceptance_length import AcceptanceLength
    from .metrics.per_position_acceptance import PerPositionAcceptance
    from .model_card import drafter_card
    from .modeling_hyperdflash import HCGateReducer, HyperDFlashDrafter, register_auto_classes
    from .modeling_mtp import DeepseekV4MTPDrafter
    from .prompt_lookup import PromptLookupDrafter
    from .target import bind, capture_residual, load_target, unbind
    from .trainer import HyperDFlashTrainer
    from .training_args import HyperDFlashTrainingArguments

_MODULE_OF = {
    "RewindableCSACacheLayer": "cache",
    "RewindableHCACacheLayer": "cache",
    "RewindableSlidingCacheLayer": "cache",
    "make_rewindable": "cache",
    "HyperDFlashConfig": "configuration_hyperdflash",
    "AcceptanceCallback": "evaluation",
    "AcceptanceLength": "metrics.acceptance_length",
    "PerPositionAcceptance": "metrics.per_position_acceptance",
    "measure_acceptance": "evaluation",
    "FeatureCache": "features",
    "drafter_card": "model_card",
    "examine": "doctor",
    "export_dflash": "formats",
    "load_dflash": "formats",
    "SpeculationStats": "generation",
    "drafter_loss": "losses",
    "HCGateReducer": "modeling_hyperdflash",
    "HyperDFlashDrafter": "modeling_hyperdflash",
    "register_auto_classes": "modeling_hyperdflash",
    "DeepseekV4MTPDrafter": "modeling_mtp",
    "PromptLookupDrafter": "prompt_lookup",
    "bind": "target",
    "capture_residual": "target",
    "load_target": "target",
    "unbind": "target",
    "HyperDFlashTrainer": "trainer",
    "HyperDFlashTrainingArguments": "training_args",
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
