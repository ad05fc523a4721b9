"""Checkpoints with the drafters that DeepSeek-V4 carries under `mtp.*`, random, in DeepSeek's names and formats."""

from __future__ import annotations

import json
import math

import torch
from safetensors.torch import save_file

from .quantization import quantize_fp4, quantize_fp8

NOT_QUANTIZED = ("hc_", "gate", "markov", "confidence")


def block_shapes(c):
    """Of one block with sliding-window attention and learned routing."""
    m, d, inner = c.hc_mult, c.hidden_size, c.moe_intermediate_size
    mixes, heads = (2 + m) * m, c.num_attention_heads * c.head_dim
    found = {
        **{f"{name}.weight": (d,) for name in ("attn_norm", "ffn_norm")},
        **{f"hc_{name}_fn": (mixes, m * d) for name in ("attn", "ffn")},
        **{f"hc_{name}_base": (mixes,) for name in ("attn", "ffn")},
        **{f"hc_{name}_scale": (3,) for name in ("attn", "ffn")},
        "attn.attn_sink": (c.num_attention_heads,),
        "attn.wq_a.weight": (c.q_lora_rank, d),
        "attn.q_norm.weight": (c.q_lora_rank,),
        "attn.wq_b.weight": (heads, c.q_lora_rank),
        "attn.wkv.weight": (c.head_dim, d),
        "attn.kv_norm.weight": (c.head_dim,),
        "attn.wo_a.weight": (c.o_groups * c.o_lora_rank, heads // c.o_groups),
        "attn.wo_b.weight": (d, c.o_groups * c.o_lora_rank),
        "ffn.gate.weight": (c.n_routed_experts, d),
        "ffn.gate.bias": (c.n_routed_experts,),
    }
    for name in ["shared_experts", *(f"experts.{i}" for i in range(c.n_routed_experts))]:
        for part, shape in (("w1", (inner, d)), ("w2", (d, inner)), ("w3", (inner, d))):
            found[f"ffn.{name}.{part}.weight"] = shape
    return found


def head_shapes(c):
    """Of the collapse and the norm before the LM head."""
    m, d = c.hc_mult, c.hidden_size
    return {"norm.weight": (d,), "hc_head_fn": (m, m * d), "hc_head_base": (m,), "hc_head_scale": (1,)}


def mtp_shapes(c):
    """April's layout."""
    d = c.hidden_size
    own = {**{f"{name}.weight": (d,) for name in ("enorm", "hnorm")}, "e_proj.weight": (d, d), "h_proj.weight": (d, d)}
    return {f"mtp.0.{name}": shape for name, shape in {**block_shapes(c), **head_shapes(c), **own}.items()}


def dspark_shapes(c, blocks=3):
    """July's layout, for a configuration with its `dspark_*` fields."""
    d, rank = c.hidden_size, c.dspark_markov_rank
    found = {f"mtp.{i}.{name}": shape for i in range(blocks) for name, shape in block_shapes(c).items()}
    first = {"main_proj.weight": (d, len(c.dspark_target_layer_ids) * d), "main_norm.weight": (d,)}
    last = {f"markov_head.markov_w{i}.weight": (c.vocab_size, rank) for i in (1, 2)}
    last |= {"confidence_head.proj.weight": (1, d + rank), **head_shapes(c)}
    found |= {f"mtp.0.{name}": shape for name, shape in first.items()}
    return found | {f"mtp.{blocks - 1}.{name}": shape for name, shape in last.items()}


def random_tensors(shapes, seed=0):
    """Values large enough that a term left out is seen."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in shapes.items():
        values = torch.randn(shape, generator=generator)
        if name.endswith("norm.weight"):
            values = 1 + 0.3 * values
        elif name.endswith("gate.bias"):
            values = 0.2 * values
        elif len(shape) == 2 and "hc_" not in name:
            values = values * 1.5 / math.sqrt(shape[1])
        elif name.endswith("_fn"):
            values = values / math.sqrt(shape[1])
        tensors[name] = values
    return tensors


def write(folder, config, tensors):
    config.save_pretrained(folder)
    save_file({"embed.weight": torch.zeros(2, 2), **tensors}, folder / "model.safetensors")
    return folder


def write_shards(folder, config, tensors):
    """Every third tensor to one of three shards, so that weights and scales part; the shard of the rest is absent."""
    config.save_pretrained(folder)
    names = sorted(tensors)
    index = {name: f"model-0000{1 + i % 3}-of-00004.safetensors" for i, name in enumerate(names)}
    for shard in set(index.values()):
        save_file({name: tensors[name] for name in names if index[name] == shard}, folder / shard)
    index["embed.weight"] = "model-00004-of-00004.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return folder


def quantized(tensors, block, scale_name, scale_dtype, fp4_experts):
    """The checkpoint's tensors, quantized where V4-Flash's are, and what they stand for."""
    generator = torch.Generator().manual_seed(1)
    stored, values = {}, {}
    for name, tensor in tensors.items():
        if tensor.ndim == 1 or any(part in name for part in NOT_QUANTIZED):
            values[name] = stored[name] = tensor
            continue
        if fp4_experts and ".experts." in name:
            stored[name], scale, values[name] = quantize_fp4(tensor.shape, generator)
        else:
            stored[name], scale, values[name] = quantize_fp8(tensor.shape, block, generator)
        stored[name.removesuffix("weight") + scale_name] = (
            _as_bytes(scale) if scale_dtype is torch.uint8 else scale.to(scale_dtype)
        )
    return stored, values


def _as_bytes(scale):
    return (scale.log2() + 127).to(torch.uint8)


def dspark_fields(**fields):
    """Of a tiny target's configuration whose checkpoint carries a DSpark drafter."""
    names = {"block_size": 5, "noise_token_id": 1, "markov_rank": 6, "target_layer_ids": [0, 1, 2]}
    return {f"dspark_{name}": value for name, value in {**names, **fields}.items()}
