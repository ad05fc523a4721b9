"""HyperDFlash block speculative decoding for DeepSeek-V4 in Hugging Face transformers.

The public names are imported on first use (PEP 562): importing the package loads nothing and changes nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from .hub.kinds import KINDS
from .version import __version__

_MODULE_OF = {
    "load_target": "hub.loading",
    "load_drafter": "hub.loading",
    "load_tokenizer": "hub.loading",
    "bind": "decoding.bind",
    "unbind": "decoding.bind",
    "Conversation": "decoding.conversation",
    "capture_residual": "targets.registry",
    "Drafter": "drafters.base",
    "Observer": "drafters.base",
    "GrammarProcessor": "grammars.processor",
    "AfterReasoning": "grammars.reasoning",
    "PromptLookupDrafter": "drafters.without_weights.prompt_lookup",
    "Lookup": "drafters.without_weights.lookup",
    "AcceptanceCallback": "training.acceptance",
    "measure_acceptance": "training.acceptance",
    "HyperDFlashTrainingArguments": "training.arguments",
    "HyperDFlashTrainer": "training.trainer",
    **{
        path.rpartition(".")[2]: path.rpartition(".")[0]
        for kind in KINDS
        for path in (kind.drafter_path, kind.config_path)
        if path
    },
}

# What drafters call of the rooms above theirs, by [`~upper.upper`].
_UPPER = {
    "bind_with": "decoding.bind",
    "unbind_from": "decoding.bind",
    "adapt": "training.adaptation.adapt",
    "push_drafter": "hub.publish",
}

__all__ = ["__version__", *_MODULE_OF]


def __getattr__(name: str) -> Any:
    module = _MODULE_OF.get(name) or _UPPER.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{module}", __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
