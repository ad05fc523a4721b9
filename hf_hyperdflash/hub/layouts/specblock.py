"""The layout of SpecBlock's authors: a Llama configuration with `diffspec_draft_token_num`. Which of the target's
layers it reads it mostly does not say: 1, n / 2 - 1 and n - 4, as EAGLE-3; else as EAGLE-3's `eagle_config` does."""

from __future__ import annotations

from typing import Any

import torch

from ...drafters.unrolled.configuration_specblock import SpecBlockConfig
from .common import EAGLE_IDS, SHAPE_FIELDS, check_known, eagle_config_ids, has_mark, read_shape, section

_MARKS = ("diffspec_draft_token_num", "LlamaForCausalLMSpecBlock", "LlamaForCausalLMSpecBlockShift")
_READS = (
    *SHAPE_FIELDS, "diffspec_draft_token_num", "draft_vocab_size", "eagle_config", "target_hidden_size",
    "target_model_type", "final_logit_softcapping",
)  # fmt: skip
# Their names, and ours.
_NAMES = {
    "input_layer.condition_proj": "fc", "input_layer.condition_norm": "condition_norm",
    "input_layer.token_norm": "token_norm", "input_layer.query_norm": "slot_norm",
    "input_layer.position_queries": "slot_embeddings", "input_layer.fuse": "fuse",
    "input_layer.embed_tokens": "embed_tokens", "rank_head.0": "rank_head.up_proj",
    "rank_head.2": "rank_head.down_proj",
}  # fmt: skip


def fits(fields: dict[str, Any]) -> bool:
    """Return whether a config.json is in this layout."""
    return has_mark(fields, _MARKS)


def read(fields: dict[str, Any], name: str) -> SpecBlockConfig:
    """Return the configuration of a drafter, from its config.json.

    Raises:
        ValueError: If it cannot be reproduced here.
    """
    check_known(fields, name, _READS, {"rank_classes": (4,), "is_causal": (True,)})
    eagle = section(fields, "eagle_config", name) if fields.get("eagle_config") is not None else {}
    check_known(eagle, name, (EAGLE_IDS,), {"use_aux_hidden_state": (True,)})
    ids = eagle_config_ids(eagle, name)
    width, heads = fields.get("hidden_size") or 0, fields.get("num_attention_heads") or 1
    shape = read_shape({**fields, "head_dim": width // heads}, name)  # theirs reads no other
    try:
        return SpecBlockConfig(
            **shape,
            block_size=fields.get("diffspec_draft_token_num") or 7,
            draft_vocab_size=fields.get("draft_vocab_size") or 32000,
            final_logit_softcapping=fields.get("final_logit_softcapping") or None,
            reducer="stream_mean",
            any_streams=True,
            own_embedding=fields.get("target_hidden_size") not in (None, 0, width),
            target_layer_ids=ids or [1, 2, 3],
            usual_layers=not ids,
            target_hidden_size=fields.get("target_hidden_size") or 0,
            target_hc_mult=1,
            target_model_type=fields.get("target_model_type") or "",
        )
    except ValueError as error:
        raise ValueError(f"config.json of {name}: {error}") from error


def rename(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Rename tensors to our names."""
    named = {}
    for key, tensor in tensors.items():
        stem, _, last = key.rpartition(".")
        named[f"{_NAMES.get(stem, stem)}.{last}".removeprefix(".")] = tensor
    return named
