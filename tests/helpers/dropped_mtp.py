"""The tensors of the MTP heads that transformers drops, by the names and in the shapes that publishers release, and
what computes them entry by entry."""

from __future__ import annotations

from .oracle_dropped_mtp import NaiveErnie, NaiveLongcat, NaiveNemotronH, NaiveQwen, NaiveQwenMoe


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


# By the `model_type` of the target's text configuration.
PUBLISHED = {
    "ernie4_5_moe": (ernie_shapes, NaiveErnie),
    "longcat_flash": (longcat_shapes, NaiveLongcat),
    "nemotron_h": (nemotron_shapes, NaiveNemotronH),
    "qwen3_5_moe_text": (qwen_shapes, NaiveQwenMoe),
    "qwen3_5_text": (qwen_shapes, NaiveQwen),
    "qwen3_next": (qwen_shapes, NaiveQwenMoe),
}
