"""The tensors of the MTP heads that transformers drops, by the names and in the shapes that publishers release, and
what computes them entry by entry."""

from __future__ import annotations

from .oracle_dropped_mtp import (
    NaiveErnie,
    NaiveExaone4,
    NaiveExaoneMoe,
    NaiveGlmLite,
    NaiveGlmOcr,
    NaiveHunyuan,
    NaiveKimi,
    NaiveLing,
    NaiveLongcat,
    NaiveNemotronH,
    NaiveQwen,
    NaiveQwenMoe,
)


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


def latent_shapes(c) -> dict[str, tuple[int, ...]]:
    """Of multi-head latent attention."""
    d, heads = c.hidden_size, c.num_attention_heads
    return {
        "q_a_proj.weight": (c.q_lora_rank, d), "q_a_layernorm.weight": (c.q_lora_rank,),
        "q_b_proj.weight": (heads * (c.qk_nope_head_dim + c.qk_rope_head_dim), c.q_lora_rank),
        "kv_a_proj_with_mqa.weight": (c.kv_lora_rank + c.qk_rope_head_dim, d),
        "kv_a_layernorm.weight": (c.kv_lora_rank,),
        "kv_b_proj.weight": (heads * (c.qk_nope_head_dim + c.v_head_dim), c.kv_lora_rank),
        "o_proj.weight": (d, heads * c.v_head_dim),
    }  # fmt: skip


def longcat_shapes(c):
    d, layer = c.hidden_size, "model.mtp.layers.0."
    return {
        f"{layer}eh_proj.weight": (d, 2 * d),
        **norms(d, "model.mtp.norm.weight", f"{layer}enorm.m.weight", f"{layer}hnorm.m.weight"),
        **norms(d, f"{layer}input_layernorm.weight", f"{layer}post_attention_layernorm.weight"),
        **under(f"{layer}self_attn.", latent_shapes(c)),
        **under(f"{layer}transformer_layer.mlp.", mlp_shapes(d, c.ffn_hidden_size)),
    }


def behind_the_last(c, last: str, attention: dict, mlp: dict, *more: str, prefix="model.", attn="self_attn."):
    """Of a head with DeepSeek-V3's names; `more` are norms of its layer besides the usual two."""
    d = c.hidden_size
    usual = ("enorm", "hnorm", "input_layernorm", "post_attention_layernorm", last, *more)
    own = {"eh_proj.weight": (d, 2 * d), **norms(d, *(f"{name}.weight" for name in usual))}
    return under(f"{prefix}layers.{c.num_hidden_layers}.", own | under(attn, attention) | under("mlp.", mlp))


def expert_shapes(c, count: int, gate="gate.weight", bias="gate.e_score_correction_bias", shared="shared_experts."):
    d, inner = c.hidden_size, c.moe_intermediate_size
    found = {gate: (count, d), bias: (count,), **under(shared, mlp_shapes(d, inner))}
    for i in range(count):
        found |= under(f"experts.{i}.", mlp_shapes(d, inner))
    return found


def glm_lite_shapes(c):
    return behind_the_last(c, "shared_head.norm", latent_shapes(c), expert_shapes(c, c.n_routed_experts))


def kimi_shapes(c):
    experts = expert_shapes(c, c.n_routed_experts)
    return behind_the_last(c, "shared_head.norm", latent_shapes(c), experts, prefix="language_model.model.")


def ling_shapes(c):
    attention = latent_shapes(c) | {"g_proj.weight": (c.num_attention_heads, c.hidden_size)}
    attention["dense.weight"] = attention.pop("o_proj.weight")
    experts = expert_shapes(c, c.num_local_experts, bias="gate.expert_bias")
    return behind_the_last(c, "final_layernorm", attention, experts, attn="attention.")


def normed_heads(c) -> dict[str, tuple[int, ...]]:
    return grouped_shapes(c, gated=False) | norms(c.head_dim, "q_norm.weight", "k_norm.weight")


def hunyuan_shapes(c):
    experts = expert_shapes(c, c.num_experts, "router.gate.weight", "expert_bias", "shared_mlp.")
    return behind_the_last(c, "final_layernorm", normed_heads(c), experts)


def glm_ocr_shapes(c):
    d, inner = c.hidden_size, c.intermediate_size
    mlp = {"gate_up_proj.weight": (2 * inner, d), "down_proj.weight": (d, inner)}
    around = ("post_self_attn_layernorm", "post_mlp_layernorm")
    attention = grouped_shapes(c, gated=False)
    return behind_the_last(c, "shared_head.norm", attention, mlp, *around, prefix="model.language_model.")


def exaone_shapes(c):
    d, layer = c.hidden_size, "mtp.layers.0."
    is_moe = c.model_type == "exaone_moe"
    around = ("input_layernorm", "post_attention_layernorm") if is_moe else (
        "post_attention_layernorm", "post_feedforward_layernorm")  # fmt: skip
    return {
        "mtp.fc.weight": (d, 2 * d),
        **norms(d, "mtp.norm.weight", "mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight"),
        **norms(d, *(f"{layer}{name}.weight" for name in around)),
        **under(f"{layer}self_attn.", normed_heads(c)),
        **under(f"{layer}mlp.", mlp_shapes(d, c.intermediate_size)),
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


KIMI = "kimi_k25"  # a DeepSeek-V3 whose checkpoint has another prefix before its names
# By the `model_type` of the target's text configuration, and of the one that transformers does not find the heads of.
PUBLISHED = {
    KIMI: (kimi_shapes, NaiveKimi),
    "bailing_hybrid": (ling_shapes, NaiveLing),
    "ernie4_5_moe": (ernie_shapes, NaiveErnie),
    "exaone4": (exaone_shapes, NaiveExaone4),
    "exaone_moe": (exaone_shapes, NaiveExaoneMoe),
    "glm4_moe_lite": (glm_lite_shapes, NaiveGlmLite),
    "glm_ocr_text": (glm_ocr_shapes, NaiveGlmOcr),
    "hy_v3": (hunyuan_shapes, NaiveHunyuan),
    "longcat_flash": (longcat_shapes, NaiveLongcat),
    "nemotron_h": (nemotron_shapes, NaiveNemotronH),
    "qwen3_5_moe_text": (qwen_shapes, NaiveQwenMoe),
    "qwen3_5_text": (qwen_shapes, NaiveQwen),
    "qwen3_next": (qwen_shapes, NaiveQwenMoe),
}
