"""Reads and writes the layout of vllm-project/speculators for DFlash, DFlash 2 and DSpark.

Its layer id i means the input of layer i, so each id is one more than ours.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ...drafters.blocks.configuration_hyperdflash import HyperDFlashConfig
from ...drafters.parts.block_attention import SLIDING
from .common import (
    SHAPE_FIELDS,
    WINDOW_FIELDS,
    check_known,
    drafter_config,
    is_dflash2,
    layer_fields,
    obstacles_to_dflash2,
    obstacles_to_dspark,
    read_dflash2,
    read_dspark,
    read_windows,
    section,
    soft_cap_field,
    to_outputs,
    write_dflash2,
    write_dspark,
)

# What a missing field means, by algorithm.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "dflash": {"sample_from_anchor": False, "sliding_window_non_causal": False},
    "dflash2": {
        "sample_from_anchor": False, "sliding_window_non_causal": True, "conv_kernel_size": 2, "conv_group_size": 16,
        "selector_rank": 256, "selector_top_k": 16,
    },
    "dspark": {
        "sample_from_anchor": True, "sliding_window_non_causal": False, "markov_rank": 256,
        "markov_head_type": "vanilla", "enable_confidence_head": True, "confidence_head_with_markov": True,
    },
}  # fmt: skip
_HEADS = {"dflash2": read_dflash2, "dspark": read_dspark}
_READS = (
    "speculators_model_type", "speculators_config", "transformer_layer_config", "draft_vocab_size", "block_size",
    "aux_hidden_state_layer_ids", "mask_token_id", "target_hidden_size", "final_logit_softcapping",
    *(field for fields in _DEFAULTS.values() for field in fields),
)  # fmt: skip
_LAYER_FIELDS = (*SHAPE_FIELDS, *WINDOW_FIELDS, "hc_mult", "final_logit_softcapping")


def fits(fields: dict[str, Any]) -> bool:
    """Return whether a config.json is in this layout. [`~hub.layouts.eagle3`] reads its EAGLE-3 drafters."""
    return fields.get("speculators_model_type", "eagle3") != "eagle3"


def read(fields: dict[str, Any], name: str) -> HyperDFlashConfig:
    """Return the configuration of a drafter from its config.json.

    Raises:
        ValueError: If the drafter would draft something else here.
    """
    algorithm = fields["speculators_model_type"]
    if algorithm not in _DEFAULTS:
        raise ValueError(f"{name} is a {algorithm!r} speculator, expected one of {', '.join(_DEFAULTS)}.")
    layer, method = (section(fields, key, name) for key in ("transformer_layer_config", "speculators_config"))
    check_known(fields, name, _READS)
    check_known(layer, name, _LAYER_FIELDS)
    value = {**_DEFAULTS[algorithm], **fields}.get
    windows = read_windows(layer, name)
    size = fields.get("draft_vocab_size") or layer.get("vocab_size")
    heads = _HEADS[algorithm](value, name) if algorithm in _HEADS else {}
    if heads.get("sequential_head") == "recurrent" and not value("sample_from_anchor"):
        raise ValueError(
            f"{name} has an 'rnn' head and `sample_from_anchor` is false: its state begins at the anchor's slot, "
            "which drafts nothing, and that is not supported."
        )
    return drafter_config(
        layer, name,
        layer_ids=[i - 1 if isinstance(i, int) else i for i in fields.get("aux_hidden_state_layer_ids") or ()],
        block_size=fields.get("block_size"),
        mask_token_id=fields.get("mask_token_id"),
        target_hidden_size=fields.get("target_hidden_size"),
        causal_layers="sliding" if windows and not value("sliding_window_non_causal") else "none",
        **windows,
        sample_from_anchor=bool(value("sample_from_anchor")),
        target_name_or_path=(method.get("verifier") or {}).get("name_or_path") or "",
        draft_vocab_size=0 if size == layer.get("vocab_size") else size,
        final_logit_softcapping=value("final_logit_softcapping") or layer.get("final_logit_softcapping") or None,
        **heads,
    )  # fmt: skip


def write(config: HyperDFlashConfig) -> dict[str, Any]:
    """Return the config.json of a drafter."""
    algorithm, architecture, heads = _algorithm(config), "DFlashDraftModel", {}
    if algorithm == "dflash2":
        architecture, heads = "DFlash2DraftModel", write_dflash2(config)
    elif algorithm == "dspark":
        architecture, heads = "DSparkDraftModel", write_dspark(config)
    method = {
        "proposal_type": "greedy", "speculative_tokens": config.max_draft_tokens, "accept_tolerance": 0.0,
        "verifier_accept_k": 1,
    }  # fmt: skip
    return {
        "architectures": [architecture],
        "speculators_model_type": algorithm,
        "speculators_config": {
            "algorithm": algorithm,
            "default_proposal_method": "greedy",
            "proposal_methods": [method],
            "verifier": {"name_or_path": config.target_name_or_path or None, "architectures": []},
        },
        "transformer_layer_config": {**layer_fields(config), "rope_parameters": dict(config.rope_parameters or {})},
        "draft_vocab_size": config.draft_vocab_size or config.vocab_size,
        "aux_hidden_state_layer_ids": [layer + 1 for layer in to_outputs(config)],
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "sample_from_anchor": config.sample_from_anchor,
        # vLLM makes every layer causal where this is false.
        "sliding_window_non_causal": config.causal_layers != "sliding",
        **soft_cap_field(config),
        **heads,
    }


def _algorithm(config: HyperDFlashConfig) -> str:
    """Return what speculators calls a drafter's kind."""
    if is_dflash2(config):
        return "dflash2"
    return "dspark" if config.sequential_head != "none" or config.confidence_head else "dflash"


def obstacles(config: HyperDFlashConfig) -> dict[str, bool]:
    """Return reasons why the layout cannot express a drafter, each with whether it applies."""
    algorithm = _algorithm(config)
    windows = {
        "in speculators' layout a window counts from the anchor (`window_from`)": SLIDING in config.kinds
        and config.window_from == "slot",
        "in speculators' layout full attention is never causal (`causal_layers`)": config.causal_layers == "all",
    }
    if algorithm == "dflash2":
        return {**windows, **obstacles_to_dflash2(config)}
    begins_at_anchor = config.sequential_head == "recurrent" and not config.sample_from_anchor
    return {
        "in speculators' layout the state of an 'rnn' head begins at the anchor's slot, which drafts nothing here": (
            begins_at_anchor
        ),
        **windows,
        **(obstacles_to_dspark(config) if algorithm == "dspark" else {}),
    }


def served(config: HyperDFlashConfig, folder: Path) -> str:
    """Return the option with which vLLM serves the drafter, or why no engine does."""
    algorithm = _algorithm(config)
    if algorithm == "dflash2":
        return "vLLM reads DFlash 2 in z-lab's layout."
    if config.sequential_head in ("gated_markov", "recurrent"):
        return f"No engine is known to serve a {config.sequential_head!r} head: vLLM knows 'markov' alone."
    speculative = {"method": algorithm, "model": str(folder), "num_speculative_tokens": config.max_draft_tokens}
    command = f"vLLM: --speculative-config '{json.dumps(speculative)}'"
    if config.sliding_window is None:
        return command
    window = f"vLLM counts the window of {config.sliding_window} from each slot, not the anchor: drafts may differ."
    return f"{command}\n{window}"
