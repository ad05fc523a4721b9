"""The layout of SpecBlock's authors: a Llama configuration with `diffspec_draft_token_num`. Which of the target's
layers it reads it mostly does not say: 1, n / 2 - 1 and n - 4, as EAGLE-3; else as EAGLE-3's `eagle_config` does."""

from __future__ import annotations

from ...drafters.unrolled.configuration import SpecBlockConfig
from .eagle3 import target_layers
from .lines import EAGLE_IDS, ROPE, SOFT_CAP, eagle_config_ids, layer_ids, shape
from .table import Layout, marked, same

# Their names, and ours.
_NAMES = {
    "input_layer.condition_proj": "fc", "input_layer.condition_norm": "condition_norm",
    "input_layer.token_norm": "token_norm", "input_layer.query_norm": "slot_norm",
    "input_layer.position_queries": "slot_embeddings", "input_layer.fuse": "fuse",
    "input_layer.embed_tokens": "embed_tokens", "rank_head.0": "rank_head.up_proj",
    "rank_head.2": "rank_head.down_proj",
}  # fmt: skip


def _rename(name: str) -> str:
    stem, _, last = name.rpartition(".")
    return f"{_NAMES.get(stem, stem)}.{last}".removeprefix(".")


LAYOUT = Layout(
    fits=marked("diffspec_draft_token_num", "LlamaForCausalLMSpecBlock", "LlamaForCausalLMSpecBlockShift"),
    config=SpecBlockConfig,
    table=(
        # The program reads no other width of heads.
        shape(lambda given: {"head_dim": (given("hidden_size") or 0) // (given("num_attention_heads") or 1)}),
        ROPE,
        SOFT_CAP,
        target_layers(lambda given: layer_ids(given, eagle_config_ids(given))),
        same("draft_vocab_size", "draft_vocab_size", missing=32000),
        same("block_size", "diffspec_draft_token_num", missing=7),
        same("target_model_type", "target_model_type", missing=""),
    ),
    sections={"eagle_config": (EAGLE_IDS,)},
    changes_drafts={"rank_classes": (4,), "is_causal": (True,), "use_aux_hidden_state": (True,)},
    rename=_rename,
)
