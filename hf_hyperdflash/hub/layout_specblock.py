"""The layout of SpecBlock's authors: a Llama configuration with `diffspec_draft_token_num`. Which of the target's
layers it reads it does not say: 1, n / 2 - 1 and n - 4, as EAGLE-3."""

from __future__ import annotations

from typing import Any

import torch

from ..runtime.configuration_specblock import SpecBlockConfig
from ..runtime.modeling_specblock import SpecBlockDrafter
from .layout import read_shape, refuse

drafter_class = SpecBlockDrafter
# Theirs, and ours.
_NAMES = {
    "input_layer.condition_proj": "fc", "input_layer.condition_norm": "condition_norm",
    "input_layer.token_norm": "token_norm", "input_layer.query_norm": "slot_norm",
    "input_layer.position_queries": "slot_embeddings", "input_layer.fuse": "fuse",
    "input_layer.embed_tokens": "embed_tokens", "rank_head.0": "rank_head.up_proj",
    "rank_head.2": "rank_head.down_proj",
}  # fmt: skip


def read(fields: dict[str, Any], name: str) -> SpecBlockConfig:
    """The configuration of a drafter, from its config.json.

    Raises:
        ValueError: If it cannot be reproduced here.
    """
    refuse(fields.get, name, {"rank_classes": (4,)})
    width, heads = fields.get("hidden_size") or 0, fields.get("num_attention_heads") or 1
    shape = read_shape({**fields, "head_dim": width // heads}, name)  # theirs reads no other
    try:
        return SpecBlockConfig(
            **shape,
            block_size=fields.get("diffspec_draft_token_num") or 7,
            draft_vocab_size=fields.get("draft_vocab_size") or 32000,
            target_layer_ids=[1, 2, 3],
            usual_layers=True,
            target_hidden_size=fields.get("target_hidden_size") or 0,
            target_hc_mult=1,
        )
    except ValueError as error:
        raise ValueError(f"config.json of {name}: {error}") from error


def rename(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors by our names."""
    named = {}
    for key, tensor in tensors.items():
        stem, _, last = key.rpartition(".")
        named[f"{_NAMES.get(stem, stem)}.{last}".removeprefix(".")] = tensor
    return named
