"""EAGLE-3's layouts: SafeAILab's, which SpecForge writes too, and speculators'.

SafeAILab's is a Llama configuration with a `draft_vocab_size` and one layer called `midlayer`; which of the target's
layers it reads it mostly does not say. speculators' layer id i is what enters layer i, one more than ours.
"""

from __future__ import annotations

from typing import Any

import torch

from ..runtime.configuration_eagle3 import Eagle3Config
from ..runtime.modeling_eagle3 import Eagle3Drafter
from .layout import read_shape, refuse, section

drafter_class = Eagle3Drafter
pickles = ("pytorch_model.bin",)  # which SafeAILab's drafters are released as
_OPTIONS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


def read(fields: dict[str, Any], name: str) -> Eagle3Config:
    """The configuration of a drafter, from its config.json.

    Raises:
        ValueError: If it cannot be reproduced here.
    """
    is_speculators = "speculators_model_type" in fields
    layer = section(fields, "transformer_layer_config", name) if is_speculators else fields
    ids = fields.get("eagle_aux_hidden_state_layer_ids")
    options: tuple[str, ...] = _OPTIONS
    if not is_speculators:
        ids = (fields.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
        # SpecForge's own `norm_output` is whether the LM head reads normed states, as it always does here.
        refuse(fields.get, name, {"norm_output": (True,)})
        options = ("norm_before_residual", "fc_norm")
    elif ids:
        ids = [i - 1 if type(i) is int else i for i in ids]
    kinds = layer.get("layer_types") or []
    if "sliding_attention" in kinds and layer.get("use_sliding_window"):
        raise ValueError(f"{name} has sliding attention layers, which is not supported in an EAGLE-3 drafter.")
    heads = layer.get("num_attention_heads") or 1
    shape: dict[str, Any] = read_shape({"head_dim": (layer.get("hidden_size") or 0) // heads, **_known(layer)}, name)
    shape |= {option: bool(fields.get(option)) for option in options}
    try:
        return Eagle3Config(
            **shape,
            qk_norm=layer.get("model_type") == "qwen3" and is_speculators,
            draft_vocab_size=fields.get("draft_vocab_size") or layer["vocab_size"],
            target_layer_ids=ids or [1, 2, 3],
            usual_layers=not ids,
            target_hidden_size=fields.get("target_hidden_size") or 0,
            target_hc_mult=1,
            target_name_or_path=_verifier(fields, name) if is_speculators else "",
        )
    except ValueError as error:
        raise ValueError(f"config.json of {name}: {error}") from error


def rename(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors by our names."""
    named = {}
    for key, tensor in tensors.items():
        key = key.removeprefix("model.").replace("midlayer.", "layers.0.")
        if key.startswith("fc_norm."):
            key = f"fc_norms.{key.removeprefix('fc_norm.')}"
        if not key.startswith("verifier_") and "rotary_emb" not in key:
            named[key] = tensor
    return named


def _known(layer: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in layer.items() if value is not None}


def _verifier(fields: dict[str, Any], name: str) -> str:
    method = section(fields, "speculators_config", name)
    return (method.get("verifier") or {}).get("name_or_path") or ""
