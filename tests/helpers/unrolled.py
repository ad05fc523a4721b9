"""Tiny SpecBlock, EAGLE-3 and P-EAGLE drafters of a target, and their weights by the names that the oracles know."""

from __future__ import annotations

from typing import Any

import torch

from hf_hyperdflash import Eagle3Drafter, PEagleDrafter, SpecBlockDrafter

from . import oracle_eagle3, oracle_specblock

SHAPE = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 48}
_THEIRS = {
    "condition_norm": "input_layer.condition_norm", "token_norm": "input_layer.token_norm",
    "slot_norm": "input_layer.query_norm", "slot_embeddings": "input_layer.position_queries",
    "fuse": "input_layer.fuse", "rank_head.up_proj": "rank_head.0", "rank_head.down_proj": "rank_head.2",
}  # fmt: skip


def unrolled(kind: str, target: Any, **fields: Any) -> Any:
    """One with weights that count, the same every time."""
    kinds: dict[str, Any] = {"specblock": SpecBlockDrafter, "eagle3": Eagle3Drafter, "peagle": PEagleDrafter}
    made = kinds[kind]
    torch.manual_seed(0)
    drafter = made.from_target(target, dtype=torch.float32, **{**SHAPE, **fields})
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(torch.randn_like(parameter) / (8 if parameter.ndim > 1 else 20))
        if drafter.config.draft_vocab_size:
            drafter.draft_ids.copy_(torch.randperm(drafter.config.vocab_size)[: drafter.config.draft_vocab_size])
    return drafter


def specblock_oracle(drafter: Any, target: Any) -> tuple[dict[str, torch.Tensor], Any]:
    """Tensors and shape for [`oracle_specblock`]. The feature of a token is what the drafter's reducer makes of it."""
    config, tensors = drafter.config, {"lm_head.weight": target.get_output_embeddings().weight.detach()}
    for name, tensor in drafter.state_dict().items():
        stem, _, last = name.rpartition(".")
        tensors[f"{_THEIRS.get(stem, stem)}.{last}"] = tensor
    width = config.hidden_size
    tensors["input_layer.condition_proj.weight"] = torch.eye(width)
    shape = oracle_specblock.Shape(4, 2, 16, config.num_hidden_layers, config.block_size, config.rms_norm_eps,
                                   config.rope_parameters["rope_theta"])  # fmt: skip
    return tensors, shape


def eagle3_oracle(drafter: Any, target: Any) -> tuple[dict[str, torch.Tensor], Any]:
    """Tensors and shape for [`oracle_eagle3`]. The feature of a token is what the drafter's reducer makes of it."""
    config, tensors = drafter.config, {"lm_head.weight": target.get_output_embeddings().weight.detach()}
    tensors |= {name.replace("layers.0.", "midlayer."): tensor for name, tensor in drafter.state_dict().items()}
    tensors["fc.weight"] = torch.eye(config.hidden_size)
    kept = drafter.draft_ids if config.draft_vocab_size else torch.arange(config.vocab_size)
    tensors["d2t"] = kept - torch.arange(len(kept))
    shape = oracle_eagle3.Shape(4, 2, 16, config.rms_norm_eps, config.rope_parameters["rope_theta"])
    return tensors, shape
