"""Tiny checkpoints of the families whose MTP head transformers drops: the target as transformers saves it, and the
head under the names that its publisher releases."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file

from . import families
from .oracle_dropped_mtp import (
    NaiveErnie,
    NaiveHead,
    NaiveLongcat,
    NaiveNemotronH,
    NaiveQwen,
    NaiveQwenMoe,
)


def nemotron_h(**fields: Any):
    target = families.nemotron_h()
    config = type(target.config).from_dict({**target.config.to_dict(), "num_nextn_predict_layers": 1, **fields})
    return type(target)(config)


def grouped_shapes(c, gated: bool) -> dict[str, tuple[int, ...]]:
    """Of attention with grouped keys."""
    d, dim = c.hidden_size, getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    queries, keys = c.num_attention_heads * dim, c.num_key_value_heads * dim
    return {
        "q_proj.weight": ((1 + gated) * queries, d), "k_proj.weight": (keys, d), "v_proj.weight": (keys, d),
        "o_proj.weight": (d, queries),
    }  # fmt: skip


def mlp_shapes(d: int, inner: int, names=("gate_proj", "up_proj", "down_proj")) -> dict[str, tuple[int, ...]]:
    gate, up, down = names
    return {f"{gate}.weight": (inner, d), f"{up}.weight": (inner, d), f"{down}.weight": (d, inner)}


def under(place: str, shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    return {place + name: shape for name, shape in shapes.items()}


def norms(d: int, *names: str) -> dict[str, tuple[int, ...]]:
    return {name: (d,) for name in names}


def qwen_shapes(c):
    d, layer = c.hidden_size, "mtp.layers.0."
    found = {
        "mtp.fc.weight": (d, 2 * d),
        **norms(d, "mtp.norm.weight", "mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight"),
        **norms(d, f"{layer}input_layernorm.weight", f"{layer}post_attention_layernorm.weight"),
        **under(f"{layer}self_attn.", grouped_shapes(c, gated=True)),
        **norms(c.head_dim, f"{layer}self_attn.q_norm.weight", f"{layer}self_attn.k_norm.weight"),
    }
    if not getattr(c, "num_experts", 0):
        return found | under(f"{layer}mlp.", mlp_shapes(d, c.intermediate_size))
    experts = {f"experts.{i}.": c.moe_intermediate_size for i in range(c.num_experts)}
    for place, inner in {**experts, "shared_expert.": c.shared_expert_intermediate_size}.items():
        found |= under(f"{layer}mlp.{place}", mlp_shapes(d, inner))
    return found | under(f"{layer}mlp.", {"gate.weight": (c.num_experts, d), "shared_expert_gate.weight": (1, d)})


def ernie_shapes(c):
    d, layer = c.hidden_size, "model.mtp_block.0."
    return {
        "model.mtp_linear_proj.0.weight": (d, 2 * d),
        **norms(d, "model.mtp_emb_norm.0.weight", "model.mtp_hidden_norm.0.weight"),
        **norms(d, f"{layer}input_layernorm.weight", f"{layer}post_attention_layernorm.weight"),
        **under(f"{layer}self_attn.", grouped_shapes(c, gated=False)),
        **under(f"{layer}mlp.", mlp_shapes(d, c.intermediate_size)),
    }


def longcat_shapes(c):
    d, heads, layer = c.hidden_size, c.num_attention_heads, "model.mtp.layers.0."
    attention = {
        "q_a_proj.weight": (c.q_lora_rank, d), "q_a_layernorm.weight": (c.q_lora_rank,),
        "q_b_proj.weight": (heads * (c.qk_nope_head_dim + c.qk_rope_head_dim), c.q_lora_rank),
        "kv_a_proj_with_mqa.weight": (c.kv_lora_rank + c.qk_rope_head_dim, d),
        "kv_a_layernorm.weight": (c.kv_lora_rank,),
        "kv_b_proj.weight": (heads * (c.qk_nope_head_dim + c.v_head_dim), c.kv_lora_rank),
        "o_proj.weight": (d, heads * c.v_head_dim),
    }  # fmt: skip
    return {
        f"{layer}eh_proj.weight": (d, 2 * d),
        **norms(d, "model.mtp.norm.weight", f"{layer}enorm.m.weight", f"{layer}hnorm.m.weight"),
        **norms(d, f"{layer}input_layernorm.weight", f"{layer}post_attention_layernorm.weight"),
        **under(f"{layer}self_attn.", attention),
        **under(f"{layer}transformer_layer.mlp.", mlp_shapes(d, c.ffn_hidden_size)),
    }


def nemotron_shapes(c):
    d, first, second = c.hidden_size, "mtp.layers.0.", "mtp.layers.1."
    inner = c.moe_latent_size or d
    found = {
        f"{first}eh_proj.weight": (d, 2 * d),
        **norms(d, f"{first}enorm.weight", f"{first}hnorm.weight", f"{first}norm.weight"),
        **norms(d, f"{second}norm.weight", f"{second}final_layernorm.weight"),
        **under(f"{first}mixer.", grouped_shapes(c, gated=False)),
        f"{second}mixer.gate.weight": (c.n_routed_experts, d),
        f"{second}mixer.gate.e_score_correction_bias": (c.n_routed_experts,),
    }
    if c.moe_latent_size:
        found |= {f"{second}mixer.fc1_latent_proj.weight": (inner, d)}
        found |= {f"{second}mixer.fc2_latent_proj.weight": (d, inner)}
    for place, width, middle in [
        *((f"experts.{i}.", inner, c.moe_intermediate_size) for i in range(c.n_routed_experts)),
        ("shared_experts.", d, c.moe_shared_expert_intermediate_size),
    ]:
        found[f"{second}mixer.{place}up_proj.weight"] = (middle, width)
        found[f"{second}mixer.{place}down_proj.weight"] = (width, middle)
    return found


class Family(NamedTuple):
    target: Callable[[], Any]
    shapes: Callable[[Any], dict[str, tuple[int, ...]]]  # of its head, by its publisher's names
    oracle: type[NaiveHead]

    def tensors(self, config: Any, seed: int = 0) -> dict[str, torch.Tensor]:
        """Values large enough that a term left out is seen."""
        generator, tensors = torch.Generator().manual_seed(seed), {}
        for name, shape in self.shapes(config).items():
            values = torch.randn(shape, generator=generator)
            if name.endswith("bias"):
                values = 0.2 * values
            elif len(shape) == 1:
                values = 1 - self.oracle.centre + 0.3 * values
            else:
                values = values * 1.5 / math.sqrt(shape[1])
            tensors[name] = values
        return tensors

    def checkpoint(self, folder: Path, **saving: Any) -> Path:
        """Write target and head to a folder, in one file or, with a `max_shard_size`, in several."""
        torch.manual_seed(0)
        target = self.target().eval()
        trunk = target.get_decoder()
        with torch.no_grad():  # a norm of ones before another would change nothing
            (trunk.norm_f if hasattr(trunk, "norm_f") else trunk.norm).weight.add_(0.3 * torch.randn(64))
        target.save_pretrained(folder, **saving)
        return add(folder, self.tensors(target.config.get_text_config(decoder=True)))


def add(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """Add tensors to a checkpoint, in a file of their own where it has several."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        one = folder / "model.safetensors"
        save_file({**load_file(one), **tensors}, one, metadata={"format": "pt"})
        return folder
    fields = json.loads(index.read_text())
    fields["weight_map"] |= dict.fromkeys(tensors, "mtp.safetensors")
    save_file(tensors, folder / "mtp.safetensors", metadata={"format": "pt"})
    index.write_text(json.dumps(fields))
    return folder


FAMILIES = {
    "qwen3_next": Family(families.qwen3_next, qwen_shapes, NaiveQwenMoe),
    "qwen3_5_text": Family(families.qwen3_5, qwen_shapes, NaiveQwen),
    "qwen3_5_moe_text": Family(families.qwen3_5_moe, qwen_shapes, NaiveQwenMoe),
    "ernie4_5_moe": Family(families.ernie4_5_moe, ernie_shapes, NaiveErnie),
    "longcat_flash": Family(families.longcat_flash, longcat_shapes, NaiveLongcat),
    "nemotron_h": Family(nemotron_h, nemotron_shapes, NaiveNemotronH),
}
