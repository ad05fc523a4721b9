"""The layout of transformers' own DFlash assistants, which Muse-Glimmer's is: DFlash's fields at the top level.

A slot sees what is up to `sliding_window` positions away, itself not counted: ours counts it. Layers are numbered as
ours. There is no vocabulary: embedding and LM head are the target's, with its tokens.
"""

from __future__ import annotations

from ...drafters.blocks.configuration_hyperdflash import HyperDFlashConfig
from ...drafters.parts.block_attention import SLIDING
from .lines import ROPE, layers_read, shape
from .table import Entry, Fields, Given, Layout, same
from .zlab import BLOCK_SIZE

# What a missing field means; the vocabulary is that of the only target that is published.
_DEFAULTS: Fields = {
    "vocab_size": 202048, "hidden_size": 6656, "intermediate_size": 19968, "num_hidden_layers": 5,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    "max_position_embeddings": 131072, "rope_theta": 500000.0, "sliding_window": 2048, "block_size": 16,
    "mask_token_id": 201818, "target_layer_ids": [1, 13, 25, 37, 49],
}  # fmt: skip


def _read_windows(given: Given) -> Fields:
    kinds, window = given.layers.get("layer_types"), given.layers["sliding_window"]
    slides = kinds is None or (isinstance(kinds, list) and SLIDING in kinds)
    return {
        "layer_types": kinds,
        "sliding_window": (window + 1 if type(window) is int else window) if slides else None,
        "window_from": "slot",
        "causal_layers": "none",
        "reducer": "fc",
        "target_hc_mult": 1,
    }


_NAMES = {"encoder.fc.weight": "fc.weight", "encoder.output_norm_enc.weight": "hidden_norm.weight"}
LAYOUT = Layout(
    fits=lambda fields: fields.get("model_type") == "muse_glimmer_assistant",
    config=HyperDFlashConfig,
    table=(
        shape(),
        ROPE,
        BLOCK_SIZE,
        same("mask_token_id", "mask_token_id", is_needed=True),
        layers_read("target_layer_ids", 0),
        Entry(("layer_types", "sliding_window"), _read_windows, is_of_layers=True),
    ),
    defaults=lambda fields: _DEFAULTS,
    of_target=("vocab_size",),
    rename=lambda name: _NAMES.get(name, name),
)
