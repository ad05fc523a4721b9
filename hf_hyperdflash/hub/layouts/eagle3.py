"""Reads EAGLE-3's layouts: the flat ones of SafeAILab, SpecForge, AngelSlim, NVIDIA and DeepSpec, and speculators'.

A flat config.json describes layers of Llama's kind; DeepSpec's describes Qwen3's. It has a `draft_vocab_size`, an
architecture with EAGLE-3's name, or both. Most do not say which layers of the target the drafter reads. SafeAILab's
drafter has one layer, called `midlayer`. Its `num_hidden_layers` may be a copy of the target's, so the tensors decide.

NVIDIA and SpecForge (`eagle_config`) and DeepSpec (`target_layer_ids`) count layers as we do. speculators and vLLM
write `eagle_aux_hidden_state_layer_ids` at the top level. There id i means the input of layer i, 0 the embeddings:
each id is one more than ours.
"""

from __future__ import annotations

from typing import Any

import torch

from ...drafters.unrolled.configuration_eagle3 import Eagle3Config
from .common import (
    EAGLE_IDS,
    SHAPE_FIELDS,
    WINDOW_FIELDS,
    check_known,
    eagle_config_ids,
    from_outputs,
    read_shape,
    section,
)

SPECULATORS = "eagle3"  # the `speculators_model_type`
_OPTIONS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
# Only an EAGLE-3 drafter has these fields.
_MARKS = ("eagle_config", EAGLE_IDS, "draft_vocab_size", "ttt_length")
# Words in names of architectures whose layers are Llama's or Qwen3's.
_LLAMAS = ("llama", "qwen", "phi", "eagle3draftmodel", "eagle3speculator")
_READS = (
    *SHAPE_FIELDS, *WINDOW_FIELDS, *_MARKS, "num_aux_hidden_states", "target_hidden_size", "target_model_type",
    "target_layer_ids", "target_model_name_or_path", "num_target_layers", "draft_num_hidden_layers",
    "norm_before_residual", "fc_norm", "final_logit_softcapping",
)  # fmt: skip
# Fields that change what is drafted, with the values that do not. SpecForge's `norm_output` says whether the LM head
# reads normed states; here it always does.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "norm_output": (True,), "norm_before_fc": (False,), "is_causal": (True,), "causal": (True,), "logit_scale": (1,),
    "norm_type": ("rms",), "use_rotary_pos_emb": (True,),
    "use_aux_hidden_state": (True,), "use_last_layernorm": (True,), "use_mtp_layernorm": (False,),
    "use_input_layernorm_in_first_layer": (True,), "next_layer_regular": (True,), "parallel_draft_step": (0, 1),
}  # fmt: skip
# AngelSlim copies these fields from Hunyuan and reads none of them.
_HUNYUAN_FIELDS = (
    "attention_head_dim", "cla_share_factor", "dense_list", "eod_token_id", "im_end_id", "im_newline_id",
    "im_start_id", "mask_init_id", "org_vocab_size", "pad_id", "pool_type", "text_end_id", "text_start_id",
    "use_qk_norm",
)  # fmt: skip
_LAYER_FIELDS = (*SHAPE_FIELDS, *WINDOW_FIELDS, "final_logit_softcapping")
_SPECULATORS_FIELDS = (
    *_OPTIONS, EAGLE_IDS, "speculators_model_type", "speculators_config", "transformer_layer_config",
    "draft_vocab_size", "target_hidden_size", "final_logit_softcapping",
)  # fmt: skip


def fits(fields: dict[str, Any]) -> bool:
    """Return whether a config.json belongs to an EAGLE-3 drafter."""
    if "speculators_model_type" in fields:
        return fields["speculators_model_type"] == SPECULATORS
    return "eagle3" in _architecture(fields) or any(fields.get(mark) for mark in _MARKS)


def read(fields: dict[str, Any], name: str) -> Eagle3Config:
    """Return the configuration of a drafter from its config.json. Missing fields have defaults until [`settle`].

    Raises:
        ValueError: If the drafter would draft something else here.
    """
    if "speculators_model_type" in fields:
        layer = section(fields, "transformer_layer_config", name)
        check_known(fields, name, _SPECULATORS_FIELDS, {"causal": (True,)})
        check_known(layer, name, _LAYER_FIELDS, {"is_causal": (True,)})
        ids = [i - 1 if type(i) is int else i for i in fields.get(EAGLE_IDS) or ()]
        more = {
            **{option: bool(fields.get(option)) for option in _OPTIONS},
            "qk_norm": layer.get("model_type") == "qwen3",
            "target_name_or_path": (section(fields, "speculators_config", name).get("verifier") or {}).get(
                "name_or_path"
            )
            or "",
        }
        return _config(fields, layer, ids, name, more)
    layer, is_deepspec = fields, _is_deepspec(fields)
    if not is_deepspec:  # Llama's default
        layer = {**fields, "num_hidden_layers": 1}
        layer["num_key_value_heads"] = fields.get("num_key_value_heads") or fields.get("num_attention_heads")
    architecture = _architecture(fields)
    if "eagle3" in architecture and ("llama4" in architecture or not any(one in architecture for one in _LLAMAS)):
        raise ValueError(
            f"{name} is a {', '.join(fields['architectures'])}, whose layers are neither Llama's nor Qwen3's, which "
            "is not supported."
        )
    eagle = section(fields, "eagle_config", name) if fields.get("eagle_config") is not None else {}
    check_known(fields, name, (*_READS, *_HUNYUAN_FIELDS), _NEUTRAL)
    check_known(eagle, name, (EAGLE_IDS, "parallel_draft_heads_num_layers"), _NEUTRAL)
    more = {
        "norm_before_residual": bool(fields.get("norm_before_residual")),
        "fc_norm": bool(fields.get("fc_norm")),
        # With vLLM's field beside it this is EAGLE-3.1, whose later steps read the normed state.
        "norm_output": bool(fields.get("norm_output")) and fields.get("num_aux_hidden_states") is not None,
        "qk_norm": is_deepspec,
        "target_name_or_path": fields.get("target_model_name_or_path") or "",
        "target_model_type": fields.get("target_model_type") or "",
        "target_num_layers": fields.get("num_target_layers") or 0,
    }
    return _config(fields, layer, _flat_ids(fields, eagle, name), name, more)


def _config(
    fields: dict[str, Any], layer: dict[str, Any], ids: list[Any], name: str, more: dict[str, Any]
) -> Eagle3Config:
    slides = layer.get("use_sliding_window") and layer.get("sliding_window") and not layer.get("layer_types")
    if slides or "sliding_attention" in (layer.get("layer_types") or ()):
        raise ValueError(f"{name} has sliding attention layers, which is not supported in an EAGLE-3 drafter.")
    count = fields.get("num_aux_hidden_states")
    if count not in (None, len(ids) or 3):
        raise ValueError(f"`num_aux_hidden_states` of {name} is {count!r}, but it reads {len(ids) or 3} layers.")
    known = {key: value for key, value in layer.items() if value is not None}
    shape = read_shape(
        {"head_dim": (layer.get("hidden_size") or 0) // (layer.get("num_attention_heads") or 1), **known}, name
    )
    width = fields.get("target_hidden_size") or 0
    try:
        return Eagle3Config(
            **{"target_model_type": "", **shape, **more},
            final_logit_softcapping=fields.get("final_logit_softcapping")
            or layer.get("final_logit_softcapping")
            or None,
            reducer="stream_mean",
            any_streams=True,
            own_embedding=width not in (0, shape["hidden_size"]),
            draft_vocab_size=fields.get("draft_vocab_size") or shape["vocab_size"],
            target_layer_ids=from_outputs(ids, name) or [1, 2, 3],
            usual_layers=not ids,
            target_hidden_size=width,
            target_hc_mult=1,
        )
    except ValueError as error:
        raise ValueError(f"config.json of {name}: {error}") from error


def _flat_ids(fields: dict[str, Any], eagle: dict[str, Any], name: str) -> list[Any]:
    """Return the layers that a flat config.json names, counted from 0, -1 for the embeddings; none if it names
    none."""
    entering = [i - 1 if type(i) is int else i for i in fields.get(EAGLE_IDS) or ()]
    stated = [ids for ids in (eagle_config_ids(eagle, name), fields.get("target_layer_ids"), entering) if ids]
    if any(ids != stated[0] for ids in stated):
        raise ValueError(
            f"{name} says twice which layers it reads, and not the same: `eagle_config` {eagle.get(EAGLE_IDS)}, "
            f"`target_layer_ids` {fields.get('target_layer_ids')}, and `{EAGLE_IDS}` {fields.get(EAGLE_IDS)}, which "
            "is one more."
        )
    return stated[0] if stated else []


def settle(config: Eagle3Config, tensors: dict[str, torch.Tensor], fields: dict[str, Any]) -> None:
    """Set the fields that a flat config.json lacks, from the tensors under our names."""
    if fields.get("tie_word_embeddings") and "lm_head.weight" not in tensors and "embed_tokens.weight" in tensors:
        tensors["lm_head.weight"] = tensors["embed_tokens.weight"].clone()
    if "speculators_model_type" in fields or _is_deepspec(fields):
        return
    layers = {int(key.split(".")[1]) for key in tensors if key.startswith("layers.")}
    config.num_hidden_layers = max(layers, default=0) + 1
    config.qk_norm = "layers.0.self_attn.q_norm.weight" in tensors
    config.attention_bias = "layers.0.self_attn.q_proj.bias" in tensors


def rename(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors under our names, without the target's and without RoPE's tables."""
    named = {}
    for key, tensor in tensors.items():
        key = key.removeprefix("model.").replace("midlayer.", "layers.0.")
        if key.startswith("fc_norm."):
            key = f"fc_norms.{key.removeprefix('fc_norm.')}"
        if not key.startswith("verifier_") and "rotary_emb" not in key:
            named[key] = tensor
    return named


def _architecture(fields: dict[str, Any]) -> str:
    return " ".join(map(str, fields.get("architectures") or ())).lower()


def _is_deepspec(fields: dict[str, Any]) -> bool:
    return "ttt_length" in fields or "Qwen3Eagle3Model" in (fields.get("architectures") or ())
