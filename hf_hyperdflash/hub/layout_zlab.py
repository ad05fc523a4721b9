"""z-lab's layout: DFlash and DFlash 2, a Qwen3 configuration with a `dflash_config`. It counts layers as we do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..runtime.configuration_hyperdflash import HyperDFlashConfig
from ..runtime.reach import SLIDING
from .layout import (
    drafter_config,
    is_dflash2,
    layer_fields,
    num_target_layers_field,
    obstacles_to_dflash2,
    read_dflash2,
    read_windows,
    refuse,
    section,
    write_dflash2,
)

_DFLASH2 = "DFlash2DraftModel"
_CAUSAL = {None: "sliding", False: "none", True: "all"}  # what `is_causal` means
# Fields that change what is drafted, with the values that do not.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "input_embedding_scale": (1,), "output_multiplier": (1,), "final_logit_softcapping": (0,),
    "sample_from_anchor": (False,), "shift_label": (False,), "attention_sink_bias": (False,), "use_swa": (False,),
}  # fmt: skip


def read(fields: dict[str, Any], name: str) -> HyperDFlashConfig:
    """The configuration of a drafter, from its config.json.

    Raises:
        ValueError: If it cannot be reproduced here.
    """
    inner = section(fields, "dflash_config", name) if "dflash_config" in fields else {}
    value = {**fields, **inner}.get
    refuse(value, name, _UNSUPPORTED)
    windows = read_windows(fields, name)
    is_causal = value("causal") if value("is_causal") is None else value("is_causal")
    if is_causal not in (None, False, True):
        raise ValueError(f"`is_causal` of {name} is {is_causal!r}, expected true, false or none.")
    return drafter_config(
        fields, name,
        layer_ids=value("target_layer_ids"),
        block_size=value("block_size"),
        mask_token_id=value("mask_token_id"),
        num_target_layers=fields.get("num_target_layers"),
        window_from="slot" if windows else "anchor",
        causal_layers=_CAUSAL[is_causal] if windows or is_causal else "none",
        **windows,
        **(read_dflash2(value, name) if _DFLASH2 in (fields.get("architectures") or ()) else {}),
    )  # fmt: skip


def write(config: HyperDFlashConfig) -> dict[str, Any]:
    """The config.json of a drafter."""
    rope = dict(config.rope_parameters or {})
    scaling = {name: value for name, value in rope.items() if name != "rope_theta"}
    fields = {
        **layer_fields(config),
        **num_target_layers_field(config),
        "dflash_config": {"mask_token_id": config.mask_token_id, "target_layer_ids": config.target_layer_ids},
    }
    is_causal = next(said for said, layers in _CAUSAL.items() if layers == config.causal_layers)
    if is_causal or (is_causal is False and (is_dflash2(config) or SLIDING in config.kinds)):
        fields["is_causal"] = is_causal
    if is_dflash2(config):  # whose files are of the newer form
        fields["dflash_config"] |= {"block_size": config.block_size, **write_dflash2(config)}
        return {"architectures": [_DFLASH2], **fields, "rope_parameters": rope}
    return {
        "architectures": ["DFlashDraftModel"],
        **fields,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": None if scaling.get("rope_type", "default") == "default" else scaling,
        "block_size": config.block_size,
    }


def obstacles(config: HyperDFlashConfig) -> dict[str, bool]:
    """Reasons why the layout cannot say a drafter, and whether they hold."""
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
    """How engines are told to serve it."""
    speculative = {"method": "dflash", "model": str(folder), "num_speculative_tokens": config.max_draft_tokens}
    told = f"vLLM: --speculative-config '{json.dumps(speculative)}'"
    if is_dflash2(config):
        return told
    return (
        f"{told}\nSGLang: --speculative-algorithm DFLASH --speculative-draft-model-path {folder} "
        f"--speculative-num-draft-tokens {config.block_size}"
    )
