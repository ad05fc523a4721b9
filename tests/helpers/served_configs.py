"""A drafter's configuration as each engine reads it, and a target's."""

from __future__ import annotations

from typing import Any

from hf_hyperdflash import HyperDFlashConfig
from hf_hyperdflash.serving.sglang.config import SGLangConfig
from hf_hyperdflash.serving.vllm.config import VLLMConfig

SMALL = dict(
    vocab_size=64, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    intermediate_size=32, target_hc_mult=1, target_num_layers=6, target_layer_ids=[1, 3, -1], mask_token_id=7,
    block_size=5, max_position_embeddings=256,
)  # fmt: skip
TARGET = dict(vocab_size=64, hidden_size=64, num_hidden_layers=6, model_type="qwen3")
ENGINES = {"vllm": VLLMConfig, "sglang": SGLangConfig}


def served(kind: Any = VLLMConfig, **fields: Any) -> Any:
    return kind.from_dict(HyperDFlashConfig(**{**SMALL, **fields}).to_dict())
