"""z-lab's layout: DFlash and DFlash 2, a Qwen3 configuration with a `dflash_config`. It counts layers as we do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ...drafters.blocks.configuration_hyperdflash import HyperDFlashConfig
from ...drafters.parts.block_attention import SLIDING
from .common import (
    has_mark,
    is_dflash2,
    layer_fields,
    num_target_layers_field,
    obstacles_to_dflash2,
    served_by_both,
    soft_cap_field,
    to_outputs,
    write_dflash2,
)
from .flat import CAUSAL, DFLASH2, read

__all__ = ["fits", "obstacles", "read", "served", "write"]
_MARKS = (
    "dflash_config", "dspark_config", "markov_rank", "DSparkDraftModel", "DominoDraftModel", DFLASH2,
    "DFlashDraftModel",
)  # fmt: skip


def fits(fields: dict[str, Any]) -> bool:
    """Return whether a config.json is in this layout."""
    return has_mark(fields, _MARKS)


def write(config: HyperDFlashConfig) -> dict[str, Any]:
    """Return the config.json of a drafter."""
    rope = dict(config.rope_parameters or {})
    scaling = {name: value for name, value in rope.items() if name != "rope_theta"}
    fields = {
        **layer_fields(config),
        **num_target_layers_field(config),
        "dflash_config": {
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": to_outputs(config),
            **soft_cap_field(config),
        },
    }
    is_causal = next(value for value, layers in CAUSAL.items() if layers == config.causal_layers)
    if is_causal or (is_causal is False and (is_dflash2(config) or SLIDING in config.kinds)):
        fields["is_causal"] = is_causal
    if is_dflash2(config):  # whose files are of the newer form
        fields["dflash_config"] |= {"block_size": config.block_size, **write_dflash2(config)}
        return {"architectures": [DFLASH2], **fields, "rope_parameters": rope}
    return {
        "architectures": ["DFlashDraftModel"],
        **fields,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": None if scaling.get("rope_type", "default") == "default" else scaling,
        **{name: rope[name] for name in ("partial_rotary_factor",) if name in rope},
        "block_size": config.block_size,
    }


def obstacles(config: HyperDFlashConfig) -> dict[str, bool]:
    """Return reasons why the layout cannot express a drafter, each with whether it applies."""
    return {
        "z-lab's layout has no truncated vocabulary": bool(config.draft_vocab_size),
        "in z-lab's layout every slot drafts but the anchor's": config.sample_from_anchor,
        "a window that all slots share (`sliding_window`) cannot be said in z-lab's layout: load it with "
        "`from_pretrained(..., sliding_window=None)`, whose drafts are the same up to that many tokens": (
            SLIDING in config.kinds and config.window_from == "anchor"
        ),
        "z-lab's layout has no confidence head": config.confidence_head,
        f"z-lab's layout has no {config.sequential_head!r} head": config.sequential_head not in ("none", "selector"),
        **(obstacles_to_dflash2(config) if is_dflash2(config) else {}),
    }


def served(config: HyperDFlashConfig, folder: Path) -> str:
    """Return the options with which engines serve it."""
    speculative = {"method": "dflash", "model": str(folder), "num_speculative_tokens": config.max_draft_tokens}
    if is_dflash2(config):
        return f"vLLM: --speculative-config '{json.dumps(speculative)}'"
    sglang = f"--speculative-algorithm DFLASH --speculative-draft-model-path {folder}"
    return served_by_both(config, speculative, f"{sglang} --speculative-num-draft-tokens {config.block_size}")
