"""Tiny pairs for serving engines, and what their drafters draft in `generate`, which an engine is held to."""

from __future__ import annotations

from typing import Any

import torch

from hf_hyperdflash import HyperDFlashDrafter
from hf_hyperdflash.drafters.parts.heads import HEADS

from ..conftest import tiny_drafter
from .families import made
from .headed_drafters import learned

COMMON = dict(
    vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=2,
    num_key_value_heads=1, head_dim=32, max_position_embeddings=512, initializer_range=0.2, bos_token_id=None,
    eos_token_id=None, pad_token_id=0, tie_word_embeddings=False,
)  # fmt: skip


def gate_over_layers(target: Any, **fields: Any) -> HyperDFlashDrafter:
    """With gates of its own: the target has none to inherit."""
    config = tiny_drafter(target, **{**fields, "reducer": "fc", "target_layer_ids": [0, 2, -1]}).config
    config.reducer = fields["reducer"]
    return HyperDFlashDrafter(config).eval()


@torch.no_grad()
def stirred(drafter: HyperDFlashDrafter) -> HyperDFlashDrafter:
    """With weights that say something: fresh ones of some parts are zeros and ones."""
    for name, parameter in drafter.named_parameters():
        if "norm" in name:
            parameter.uniform_(0.5, 1.5)
        else:
            parameter.normal_(std=0.3)
    return learned(drafter)


def qwen3(**fields: Any) -> Any:
    return made("qwen3", **{**COMMON, **fields}).eval()


def llama() -> Any:
    return made("llama", **COMMON).eval()


def our_drafts(target: Any, drafter: Any, ids: torch.Tensor, count: int) -> tuple[list[int], list[list[int]]]:
    """The text of `generate`, and what was drafted round by round."""
    rows: list[list[int]] = []
    own = drafter.draft

    def draft(*args: Any) -> Any:
        (tree,) = own(*args)
        rows.append(tree.tokens.tolist())
        return [tree]

    drafter.draft = draft
    drafter.bind(target)
    given = {"attention_mask": torch.ones_like(ids), "assistant_model": drafter, "do_sample": False}
    text = target.generate(ids, max_new_tokens=count, **given)[0, ids.shape[1] :].tolist()
    drafter.unbind(target)
    del drafter.draft
    return text, rows


def with_fields(**fields: Any) -> Any:
    return lambda target: stirred(tiny_drafter(target, **{"head_dim": 32, "reducer": "fc", **fields}))


def with_gates(reducer: str) -> Any:
    return lambda target: stirred(gate_over_layers(target, head_dim=32, reducer=reducer))


HEAD = {"sequential_head": "state", "head_rank": 5}
SLOT = {"sliding_window": 20, "window_from": "slot"}
ROPES = [
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 64},
]  # fmt: skip
# By name, what every engine serves: makes a target, and a drafter of it.
PAIRS = {
    **{name: (qwen3, with_fields(**fields)) for name, fields in {
        "fc": {"target_layer_ids": [1, -1]},
        "stream mean": {"reducer": "stream_mean", "target_layer_ids": [0, 2]},
        "last layer alone": {"target_layer_ids": [-1]},
        "draft vocabulary": {"draft_vocab_size": 40},
        "biases": {"attention_bias": True},
        "causal": {"causal_layers": "all"},
        "window from each slot": SLOT,
        "causal window from each slot": {**SLOT, "causal_layers": "all"},
        "window of the longest text": {"sliding_window": 256},
        **{f"RoPE {rope['rope_type']}": {"rope_parameters": {"rope_theta": 500.0, **rope}} for rope in ROPES},
        "confidence": {**HEAD, "confidence_head": True},
        **{f"{kind} head": {"sequential_head": kind, "head_rank": 5} for kind in HEADS},
        "few candidates": {**HEAD, "head_candidates": 7},
        "head of a draft vocabulary": {
            "sequential_head": "markov", "head_rank": 5, "draft_vocab_size": 40, "head_candidates": 0
        },
    }.items()},
    **{f"{reducer} over several layers": (qwen3, with_gates(reducer)) for reducer in ("hc_gate", "hybrid")},
    "llama": (llama, with_fields(**HEAD, target_layer_ids=[0, -1])),
}  # fmt: skip
