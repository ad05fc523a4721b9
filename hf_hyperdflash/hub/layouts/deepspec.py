"""The layout of deepseek-ai/DeepSpec: DSpark, a flat Qwen3 configuration and copies of the target's embedding and LM
head. Every input of a block drafts, the anchor too. It counts layers as we do, and -1 is the embedding's output."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...drafters.blocks.configuration_hyperdflash import HyperDFlashConfig
from . import flat
from .common import (
    has_mark,
    layer_fields,
    num_target_layers_field,
    obstacles_to_dspark,
    served_by_both,
    soft_cap_field,
    to_outputs,
    write_dspark,
)

_ARCHITECTURE = "Qwen3DSparkModel"
_MARKS = (_ARCHITECTURE, "Gemma4DSparkModel")


def fits(fields: dict[str, Any]) -> bool:
    """Return whether a config.json is in this layout."""
    return has_mark(fields, _MARKS)


def read(fields: dict[str, Any], name: str) -> HyperDFlashConfig:
    """Return the configuration of a drafter, from its config.json.

    Raises:
        ValueError: If it cannot be reproduced here.
    """
    if _ARCHITECTURE not in fields["architectures"]:
        raise ValueError(
            f"{name} is a {', '.join(fields['architectures'])}, whose layers are not Qwen3's, which is not "
            f"supported: expected {_ARCHITECTURE}."
        )
    return flat.read(fields, name)


def write(config: HyperDFlashConfig) -> dict[str, Any]:
    """Return the config.json of a drafter."""
    return {
        "architectures": [_ARCHITECTURE],
        **layer_fields(config),
        "rope_parameters": dict(config.rope_parameters or {}),
        **num_target_layers_field(config),
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": to_outputs(config),
        **soft_cap_field(config),
        "num_anchors": 512,  # of its training, without which it does not load
        **write_dspark(config),
    }


def obstacles(config: HyperDFlashConfig) -> dict[str, bool]:
    """Return reasons why the layout cannot express a drafter, each with whether it applies."""
    return {
        "DeepSpec's layout has no truncated vocabulary": bool(config.draft_vocab_size),
        "in DeepSpec's layout the anchor's slot drafts as well (`sample_from_anchor`)": not config.sample_from_anchor,
        "DeepSpec's layout has no window (`sliding_window`): load it with `from_pretrained(..., "
        "sliding_window=None)`, whose drafts are the same up to that many tokens": config.sliding_window is not None,
        "DeepSpec's layers are not causal (`causal_layers`)": config.causal_layers != "none",
        **obstacles_to_dspark(config),
    }


def served(config: HyperDFlashConfig, folder: Path) -> str:
    """Return the options with which engines serve it."""
    if config.sequential_head != "markov":
        return "vLLM and SGLang serve DSpark's 'markov' head alone."
    speculative = {"method": "dspark", "model": str(folder), "num_speculative_tokens": config.max_draft_tokens}
    sglang = f"--speculative-algorithm DSPARK --speculative-draft-model-path {folder}"
    return served_by_both(config, speculative, f"{sglang} --speculative-dspark-block-size {config.block_size}")
