"""Reads the flat layouts of z-lab, SpecForge, NVIDIA and DeepSpec for DFlash, DFlash 2 and DSpark.

A flat config.json describes Qwen3 layers at its top level. All of these programs count layers as we do. SpecForge's
DSpark drafts as DeepSpec's does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...drafters.blocks.configuration_hyperdflash import HyperDFlashConfig
from .common import (
    EAGLE_IDS,
    SELECTOR_FIELDS,
    SHAPE_FIELDS,
    WINDOW_FIELDS,
    Value,
    check_known,
    drafter_config,
    read_dflash2,
    read_dspark,
    read_windows,
    section,
)

DFLASH2 = "DFlash2DraftModel"
CAUSAL = {None: "sliding", False: "none", True: "all"}  # what `is_causal` means
# With these values of `projector_type` the other fields describe the drafter completely.
_PROJECTORS = (None, "dflash", "dflash2", "dspark")
_PREFIX = "dspark_"
_SECTIONS = ("dflash_config", "dspark_config")
_READS = (
    "architectures", "projector_type", "block_size", "mask_token_id", "noise_token_id", "mask_token",
    "num_target_layers", "target_layer_ids", EAGLE_IDS, "is_causal", "causal", "sample_from_anchor", "bonus_anchor",
    "use_swa", "swa_window_size", "markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_alpha",
    "confidence_head_with_markov", "draft_vocab_size", "hc_mult", "target_hidden_size", "has_embed_tokens",
    "has_lm_head", "final_logit_softcapping", "partial_rotary_factor", *SELECTOR_FIELDS,
)  # fmt: skip
_TOP = (*SHAPE_FIELDS, *WINDOW_FIELDS, *_READS, *_SECTIONS, *(f"{_PREFIX}{field}" for field in _READS))
# Fields that change what is drafted, with the values that do not.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "input_embedding_scale": (1,), "output_multiplier": (1,), "logit_scale": (1,),
    "shift_label": (False,), "attention_sink_bias": (False,), "add_swa_attention_sink_bias": (False,),
    "attention_value_scale": (1,), "is_neox_style": (True,), "rope_is_neox_style": (True,),
    "use_aux_hidden_state": (True,), "attention_mode": ("gqa", "mha"),
}  # fmt: skip


def read(fields: dict[str, Any], name: str) -> HyperDFlashConfig:
    """Return the configuration of a drafter from its config.json.

    Raises:
        ValueError: If the drafter would draft something else here.
    """
    inner: dict[str, Any] = {}
    for part in _SECTIONS:
        if fields.get(part) is not None:
            inner |= section(fields, part, name)
    value = _value(fields, inner)
    is_dspark = _is_dspark(fields, value, name)
    check_known(fields, name, _TOP, _NEUTRAL)
    check_known(inner, name, (*_READS, "sliding_window"), _NEUTRAL)
    windows = read_windows(fields, name, inner)
    is_causal = value("causal") if value("is_causal") is None else value("is_causal")
    if is_causal not in (None, False, True):
        raise ValueError(f"`is_causal` of {name} is {is_causal!r}, expected true, false or none.")
    slides_of_kind = "sliding_attention" in (
        fields.get("layer_types") or ()
    )  # with `use_swa` alone no layer is causal
    size = value("draft_vocab_size")
    return drafter_config(
        {**fields, "partial_rotary_factor": value("partial_rotary_factor")}, name,
        layer_ids=_layer_ids(value, name),
        block_size=value("block_size"),
        mask_token_id=value("noise_token_id") if value("mask_token_id") is None else value("mask_token_id"),
        num_target_layers=value("num_target_layers"),
        target_hidden_size=value("target_hidden_size"),
        window_from="slot" if windows else "anchor",
        causal_layers=CAUSAL[is_causal] if is_causal or (windows and slides_of_kind) else "none",
        sample_from_anchor=_from_anchor(value, is_dspark, name),
        draft_vocab_size=0 if size in (None, fields.get("vocab_size")) else size,
        final_logit_softcapping=value("final_logit_softcapping") or None,
        **windows,
        **_heads(fields, value, is_dspark, name),
    )  # fmt: skip


def _value(fields: Mapping[str, Any], inner: Mapping[str, Any]) -> Value:
    """Return a function that looks a field up: with DSpark's prefix, then in a section, then at the top level."""
    prefixed = {field.removeprefix(_PREFIX): values for field, values in fields.items() if field.startswith(_PREFIX)}
    sources = [{k: v for k, v in source.items() if v is not None} for source in (fields, inner, prefixed)]
    return {**sources[0], **sources[1], **sources[2]}.get


def _is_dspark(fields: Mapping[str, Any], value: Value, name: str) -> bool:
    """Return whether a drafter is DSpark's. Its heads do not tell, because it may have none."""
    architectures = " ".join(map(str, fields.get("architectures") or ()))
    projector = "domino" if "Domino" in architectures else value("projector_type")
    if projector not in _PROJECTORS:
        raise ValueError(
            f"`projector_type` of {name} is {projector!r}, which is not supported: expected dflash or dspark."
        )
    return projector == "dspark" or "DSpark" in architectures or "dspark_config" in fields


def _layer_ids(value: Value, name: str) -> Any:
    """Return the layers that the drafter reads, counted from 0, -1 for the embeddings.

    NVIDIA and vLLM may name the layer that an output enters instead, which is one more.
    """
    ids, entering = value("target_layer_ids"), value(EAGLE_IDS)
    if isinstance(entering, list):
        before = [i - 1 if type(i) is int else i for i in entering]
        if ids not in (None, before):
            raise ValueError(
                f"`{EAGLE_IDS}` of {name} is {entering} and `target_layer_ids` {ids}, expected the same layers, each "
                "one more."
            )
        return before
    return ids


def _from_anchor(value: Value, is_dspark: bool, name: str) -> bool:
    """Return whether the anchor's slot drafts a token."""
    values, is_bonus = value("sample_from_anchor"), value("bonus_anchor")
    for field, flag in (("sample_from_anchor", values), ("dspark_bonus_anchor", is_bonus)):
        if flag not in (None, False, True):
            raise ValueError(f"`{field}` of {name} is {flag!r}, expected true, false or none.")
    if values is not None and values == is_bonus:
        raise ValueError(
            f"`sample_from_anchor` and `dspark_bonus_anchor` of {name} are both {values}, expected one of them: the "
            "anchor's slot drafts, or it does not."
        )
    if values is None and is_bonus is not None:
        return not is_bonus
    return is_dspark if values is None else bool(values)


def _heads(fields: Mapping[str, Any], value: Value, is_dspark: bool, name: str) -> dict[str, Any]:
    """Return our fields for the heads of DFlash 2 or DSpark; none for DFlash."""
    if any(value(field) for field in SELECTOR_FIELDS) or DFLASH2 in (fields.get("architectures") or ()):
        return read_dflash2(value, name)
    if not is_dspark and not value("markov_rank"):
        return {}
    confidence = value("enable_confidence_head")
    values = {"enable_confidence_head": bool(value("confidence_head_alpha")) if confidence is None else confidence}
    return read_dspark(lambda field: values.get(field, value(field)), name)
