"""Every family of targets, small and random: a new family is one more function here."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers import LlamaConfig as LlamaConfig  # tests make small ones
from transformers import LlamaForCausalLM as LlamaForCausalLM
from transformers import Qwen3Config as Qwen3Config
from transformers import Qwen3ForCausalLM as Qwen3ForCausalLM
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ..conftest import tiny_target

LINEAR, FULL, SLIDING = "linear_attention", "full_attention", "sliding_attention"
# Many index heads: with few, several tokens score exactly zero, and which of them stock indexers choose depends on how
# a text is cut into forwards. An LM head of full row rank (hidden = vocabulary): its drafters can be told what to
# draft.
COMMON = dict(
    vocab_size=64, hidden_size=64, num_attention_heads=4, max_position_embeddings=1024, initializer_range=0.2,
    bos_token_id=None, eos_token_id=None, pad_token_id=0, tie_word_embeddings=False,
)  # fmt: skip
DENSE = dict(intermediate_size=48, num_hidden_layers=4, num_key_value_heads=2)
MOE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=16)
DELTA_NET = dict(
    linear_conv_kernel_dim=4, linear_key_head_dim=8, linear_value_head_dim=8, linear_num_key_heads=2,
    linear_num_value_heads=4, head_dim=16, num_key_value_heads=2,
)  # fmt: skip
MAMBA = dict(
    num_hidden_layers=4, num_key_value_heads=2, mamba_n_heads=8, mamba_n_groups=2, mamba_d_state=8, mamba_d_conv=4,
    mamba_chunk_size=8,
)  # fmt: skip
MLA = dict(
    intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=3, n_routed_experts=4, num_experts_per_tok=2,
    q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16, index_head_dim=16,
    index_n_heads=32, hc_mult=4,
)  # fmt: skip
VISION = dict(depth=1, hidden_size=16, num_heads=2, intermediate_size=16, out_hidden_size=64)
GLM_TEXT = dict(
    **COMMON, intermediate_size=48, moe_intermediate_size=16, num_key_value_heads=4, num_hidden_layers=4,
    n_routed_experts=4, num_experts_per_tok=2, kv_lora_rank=16, q_lora_rank=16, v_head_dim=16, qk_nope_head_dim=16,
    index_topk=16, index_head_dim=8, index_n_heads=32, index_kpool=4, linear_head_dim=8, linear_num_heads=4,
    layer_types=[LINEAR, FULL, FULL, LINEAR], indexer_types=["full", "full", "shared", "full"],
    mlp_layer_types=["dense", "sparse", "sparse", "sparse"], hc_mult=4, hc_sinkhorn_iters=4,
)  # fmt: skip
QWEN4_TEXT = dict(
    **{**COMMON, "eos_token_id": 1}, **MOE, **DELTA_NET, num_hidden_layers=4, hc_count=4, hc_lowrank=8,
    layer_types=[LINEAR, FULL, LINEAR, FULL], ple_layer_ids=[1], ple_embed_dim=32, heads_per_ngram=2,
    ngram_vocab_size_base=50, make_ngram_vocab_size_divisible_by=8, split_ngram_parts=1, indexer_n_heads=16,
    indexer_kv_heads=1, indexer_head_dim=16, indexer_budget=16, indexer_compress_ratio=4,
    rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [2, 1,
    1]},
)  # fmt: skip


def made(model_type: str, **fields: Any) -> PreTrainedModel:
    """One of a type's class for causal language models; `fields` are of its configuration."""
    return AutoModelForCausalLM.from_config(CONFIG_MAPPING[model_type](**{**COMMON, **fields}))


def deepseek_v4() -> PreTrainedModel:
    return tiny_target(hidden_size=64)


def deepseek_v4_remote_code() -> PreTrainedModel:
    """Loaded from a folder with its code, as from the Hub."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(__file__).parent / "remote_v4" / "modeling_remote_v4.py"
        shutil.copy(source, folder)
        auto_map = {
            "AutoConfig": "modeling_remote_v4.RemoteV4Config",
            "AutoModelForCausalLM": "modeling_remote_v4.RemoteV4ForCausalLM",
        }
        (Path(folder) / "config.json").write_text(json.dumps({"model_type": "remote_v4", "auto_map": auto_map}))
        config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
        return AutoModelForCausalLM.from_config(config, trust_remote_code=True)


def hunyuan_v4() -> PreTrainedModel:
    target = made("hy_v4", **MLA, index_topk=16, head_dim=8)
    with torch.no_grad():
        target.model.hc_head.hc_base.normal_()
        target.model.hc_head.hc_scale.fill_(1.3)
    return target


def hunyuan_v4_multimodal() -> PreTrainedModel:
    """As Hunyuan V4, with rotary positions of three axes, which are one and the same for text, and an indexer that
    chooses all: with ties its text depends on padding, which the other's hides by chance."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
    vision = dict(
        num_hidden_layers=1, hidden_size=16, intermediate_size=16, num_attention_heads=2, out_hidden_size=64,
        max_image_size=64,
    )  # fmt: skip
    text = dict(**COMMON, **MLA, index_topk=512, rope_parameters=rope)
    target = transformers.HYV4VLForConditionalGeneration(
        transformers.HYV4VLConfig(text_config=text, vision_config=vision)
    )
    with torch.no_grad():
        target.model.language_model.hc_head.hc_base.normal_()
        target.model.language_model.hc_head.hc_scale.fill_(1.3)
    return target


def glm5_next() -> PreTrainedModel:
    config = transformers.Glm5NextConfig(text_config=GLM_TEXT, vision_config=VISION)
    return transformers.Glm5NextForConditionalGeneration(config)


def qwen4_exp() -> PreTrainedModel:
    return made("qwen4_exp_text", **QWEN4_TEXT)


def qwen4_exp_multimodal() -> PreTrainedModel:
    config = transformers.Qwen4ExpConfig(text_config=QWEN4_TEXT, vision_config=VISION)
    return transformers.Qwen4ExpForConditionalGeneration(config)


def qwen3(layers: int = 4) -> PreTrainedModel:
    return made("qwen3", intermediate_size=48, num_hidden_layers=layers, num_key_value_heads=2, head_dim=16)


def qwen2() -> PreTrainedModel:
    return made("qwen2", intermediate_size=48, num_hidden_layers=3, num_key_value_heads=2)


def qwen3_moe() -> PreTrainedModel:
    return made(
        "qwen3_moe", intermediate_size=48, num_hidden_layers=3, num_key_value_heads=2, head_dim=16, num_experts=4,
        num_experts_per_tok=2, moe_intermediate_size=16,
    )  # fmt: skip


def llama() -> PreTrainedModel:
    return made("llama", **DENSE)


def gemma3() -> PreTrainedModel:
    kinds = [SLIDING, SLIDING, FULL, SLIDING]
    return made("gemma3_text", **DENSE, head_dim=16, sliding_window=8, layer_types=kinds)


GEMMA4 = dict(
    **COMMON, **DENSE, head_dim=16, global_head_dim=32, sliding_window=8, final_logit_softcapping=30.0,
    layer_types=[SLIDING, SLIDING, SLIDING, FULL], vocab_size_per_layer_input=64,
)  # fmt: skip


def gemma4() -> PreTrainedModel:
    """With what its models have apart: experts beside the MLP, keys that are values, an input of its own to each
    layer."""
    return made(
        "gemma4_text", **GEMMA4, hidden_size_per_layer_input=8, enable_moe_block=True, num_experts=4, top_k_experts=2,
        moe_intermediate_size=16, attention_k_eq_v=True, num_global_key_value_heads=1,
    )  # fmt: skip


def gemma4_e(**changed: Any) -> PreTrainedModel:
    """Whose last layers have keys of earlier ones."""
    fields = GEMMA4 | {"layer_types": [SLIDING, FULL, SLIDING, FULL], "hidden_size_per_layer_input": 8} | changed
    return made("gemma4_text", **fields, num_kv_shared_layers=2)


def gemma4_unified(**fields: Any) -> PreTrainedModel:
    """Without an input of its own to each layer."""
    known = {name: value for name, value in GEMMA4.items() if name != "vocab_size_per_layer_input"}
    return made("gemma4_unified_text", **known | fields)


def gemma3n() -> PreTrainedModel:
    return made(
        "gemma3n_text", **DENSE, head_dim=16, sliding_window=8, layer_types=[SLIDING, FULL, SLIDING, FULL],
        num_kv_shared_layers=2, hidden_size_per_layer_input=8, vocab_size_per_layer_input=64, laurel_rank=8,
        activation_sparsity_pattern=[0.0] * 4,
    )  # fmt: skip


def qwen3_next() -> PreTrainedModel:
    kinds = [LINEAR, FULL, LINEAR, FULL]
    return made("qwen3_next", **MOE, **DELTA_NET, intermediate_size=48, num_hidden_layers=4, layer_types=kinds)


def qwen3_5() -> PreTrainedModel:
    kinds = [LINEAR, LINEAR, LINEAR, FULL]
    return made("qwen3_5_text", **DELTA_NET, intermediate_size=48, num_hidden_layers=4, layer_types=kinds)


def mistral() -> PreTrainedModel:
    return made("mistral", **DENSE, sliding_window=8)


def gemma2() -> PreTrainedModel:
    return made("gemma2", **DENSE, head_dim=16, sliding_window=8)


def gpt_oss() -> PreTrainedModel:
    """With sinks that take attention away, and a rope that YaRN stretches."""
    target = made(
        "gpt_oss", intermediate_size=16, num_hidden_layers=4, num_key_value_heads=2, head_dim=16, sliding_window=8,
        num_local_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    with torch.no_grad():
        for layer in target.model.layers:
            layer.self_attn.sinks.normal_()
    return target


def muse_glimmer(**fields: Any) -> PreTrainedModel:
    """A multimodal class, whose every fourth layer has no positions."""
    text = dict(
        **{**COMMON, **fields}, **DENSE, head_dim=16, sliding_window=8, final_logit_softcapping=20.0,
        output_multiplier=0.4, qk_scale_factor=1.7,
    )  # fmt: skip
    vision = dict(num_hidden_layers=1, hidden_size=16, num_attention_heads=2, intermediate_size=16)
    config = transformers.MuseGlimmerConfig(
        text_config=text, vision_config=vision, out_hidden_size=64, projector_hidden_size=16, image_token_id=64,
        video_token_id=65,
    )  # fmt: skip
    return transformers.MuseGlimmerForConditionalGeneration(config)


def granite_hybrid() -> PreTrainedModel:
    """Mamba-2 layers beside attention without positions."""
    return made(
        "granitemoehybrid", **MAMBA, intermediate_size=16, shared_intermediate_size=32, num_local_experts=4,
        num_experts_per_tok=2, layer_types=[LINEAR, FULL, LINEAR, LINEAR], embedding_multiplier=12.0,
        residual_multiplier=0.22, attention_multiplier=0.125, logits_scaling=3.0,
    )  # fmt: skip


def bamba() -> PreTrainedModel:
    return made("bamba", **MAMBA, intermediate_size=48, attn_layer_indices=[1])


def falcon_h1() -> PreTrainedModel:
    """Mamba-2 and attention side by side in every layer."""
    return made(
        "falcon_h1", **MAMBA, intermediate_size=48, mamba_d_ssm=64, embedding_multiplier=5.0, lm_head_multiplier=0.25,
        key_multiplier=0.5, ssm_out_multiplier=0.5,
    )  # fmt: skip


def nemotron_h() -> PreTrainedModel:
    """Layers of one kind each, MLPs and experts too. With hardly a least time step: stock keeps to it where it runs
    several tokens and not where it runs one, so that its text would depend on how it is cut into forwards."""
    return made(
        "nemotron_h", layers_block_type=[LINEAR, "moe", FULL, LINEAR, "mlp"], intermediate_size=48,
        num_key_value_heads=2, head_dim=16, mamba_num_heads=8, mamba_head_dim=16, ssm_state_size=8, n_groups=2,
        chunk_size=8, time_step_min=1e-9, n_routed_experts=4, moe_intermediate_size=16,
        moe_shared_expert_intermediate_size=16,
    )  # fmt: skip


def deepseek_v3() -> PreTrainedModel:
    """Whose attention keeps one narrow latent; the first layer has no experts."""
    return made(
        "deepseek_v3", intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=3, num_key_value_heads=4,
        n_routed_experts=4, num_experts_per_tok=2, n_group=2, topk_group=1, first_k_dense_replace=1, q_lora_rank=16,
        kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16,
    )  # fmt: skip


def kimi_k25() -> PreTrainedModel:
    """DeepSeek-V3 behind an encoder of images."""
    text = deepseek_v3().config
    vision = dict(num_hidden_layers=1, hidden_size=16, intermediate_size=16, num_attention_heads=2)
    config = transformers.Kimi_K25Config(text_config=text, vision_config=vision, tie_word_embeddings=False)
    return transformers.Kimi_K25ForConditionalGeneration(config)


def glm4_moe() -> PreTrainedModel:
    return made(
        "glm4_moe", intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=3, num_key_value_heads=2,
        head_dim=16, n_routed_experts=4, num_experts_per_tok=2, first_k_dense_replace=1, use_qk_norm=True,
    )  # fmt: skip


def minimax_m2() -> PreTrainedModel:
    return made(
        "minimax_m2", intermediate_size=16, num_hidden_layers=3, num_key_value_heads=2, head_dim=16,
        num_local_experts=4, num_experts_per_tok=2,
    )  # fmt: skip


def qwen3_5_moe() -> PreTrainedModel:
    return made(
        "qwen3_5_moe_text", **MOE, **DELTA_NET, num_hidden_layers=4, layer_types=[LINEAR, LINEAR, LINEAR, FULL]
    )


def ernie4_5_moe() -> PreTrainedModel:
    """With a layer without experts, and rotary positions of consecutive channels."""
    return made(
        "ernie4_5_moe", intermediate_size=48, num_hidden_layers=3, num_key_value_heads=2, moe_num_experts=4, moe_k=2,
        moe_intermediate_size=16, moe_num_shared_experts=1, moe_layer_start_index=1, num_nextn_predict_layers=1,
    )  # fmt: skip


def longcat_flash() -> PreTrainedModel:
    """Of whose layers each has two attentions, so that the cache has more layers than the model."""
    return made(
        "longcat_flash", num_layers=2, ffn_hidden_size=48, q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=16,
        qk_rope_head_dim=8, head_dim=8, v_head_dim=16, moe_topk=2, n_routed_experts=4, zero_expert_num=2,
        expert_ffn_hidden_size=16,
    )  # fmt: skip


# Of others with MTP heads.

EXPERTS = dict(intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=3, num_experts_per_tok=2)
LATENT = dict(kv_lora_rank=16, q_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16)


def bailing_hybrid() -> PreTrainedModel:
    """Linear attention beside latents, whose heads have gates."""
    return made(
        "bailing_hybrid", **EXPERTS, **LATENT, num_key_value_heads=4, num_local_experts=4, n_group=2, topk_group=1,
        first_k_dense_replace=1, head_dim=16, layer_types=[LINEAR, FULL, LINEAR], num_nextn_predict_layers=1,
    )  # fmt: skip


EXAONE4 = dict(**DENSE, head_dim=16, sliding_window=8, layer_types=[SLIDING, SLIDING, FULL, SLIDING])


def exaone4() -> PreTrainedModel:
    """Whose layers have norms behind attention and MLP alone."""
    return made("exaone4", **EXAONE4)


def exaone4_5() -> PreTrainedModel:
    """With an encoder of images, and positions that it counts itself."""
    text = dict(**COMMON, **EXAONE4, model_type="exaone4")
    vision = dict(**VISION, num_key_value_heads=2, fullatt_block_indexes=[0])
    config = transformers.Exaone4_5_Config(
        text_config=text, vision_config=vision, num_nextn_predict_layers=1, image_token_id=64, video_token_id=65
    )
    return transformers.Exaone4_5_ForConditionalGeneration(config)


def exaone_moe() -> PreTrainedModel:
    """Whose layers without a window have no positions."""
    return made(
        "exaone_moe", **EXPERTS, num_key_value_heads=2, head_dim=16, num_experts=4, sliding_window=8,
        layer_types=[SLIDING, FULL, SLIDING], num_nextn_predict_layers=1,
    )  # fmt: skip


def glm4_moe_lite() -> PreTrainedModel:
    return made(
        "glm4_moe_lite", **EXPERTS, **LATENT, num_key_value_heads=4, n_routed_experts=4, num_nextn_predict_layers=1
    )


def glm_ocr() -> PreTrainedModel:
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0, "mrope_section": [2, 3, 3]}
    text = dict(**COMMON, **DENSE, rope_parameters=rope, num_nextn_predict_layers=1)
    config = transformers.GlmOcrConfig(text_config=text, vision_config=VISION, image_token_id=64, video_token_id=65)
    return transformers.GlmOcrForConditionalGeneration(config)


def hy_v3() -> PreTrainedModel:
    return made(
        "hy_v3", **EXPERTS, num_key_value_heads=2, head_dim=16, num_experts=4, num_shared_experts=1,
        num_nextn_predict_layers=1,
    )  # fmt: skip


def mellum() -> PreTrainedModel:
    return made(
        "mellum", **EXPERTS, num_key_value_heads=2, head_dim=16, num_experts=4, sliding_window=8,
        layer_types=[SLIDING, FULL, SLIDING], num_mtp_layers=1,
    )  # fmt: skip


def sarvam_mla() -> PreTrainedModel:
    return made("sarvam_mla", **EXPERTS, **LATENT, n_routed_experts=4, num_mtp_layers=1)


def sarvam_moe() -> PreTrainedModel:
    return made("sarvam_moe", **EXPERTS, n_routed_experts=4, num_key_value_heads=2, head_dim=16, num_mtp_layers=1)


def step3p7() -> PreTrainedModel:
    """With three heads, the last of which has a window."""
    text = dict(
        **COMMON, **EXPERTS, num_key_value_heads=2, head_dim=16, n_routed_experts=4, share_expert_dim=16,
        sliding_window=8, num_nextn_predict_layers=3, num_sliding_attention_heads=8,
        layer_types=[SLIDING, SLIDING, FULL] + [FULL] * 2 + [SLIDING],
        mlp_layer_types=["dense", "sparse", "dense", "dense", "dense", "dense"],
    )  # fmt: skip
    vision = dict(num_hidden_layers=1, hidden_size=16, intermediate_size=16, num_attention_heads=2, image_size=28)
    config = transformers.Step3p7Config(text_config=text, vision_config=vision)
    return transformers.Step3p7ForConditionalGeneration(config)


FAMILIES = [
    deepseek_v3, deepseek_v4, deepseek_v4_remote_code, hunyuan_v4, glm4_moe, glm5_next, kimi_k25, minimax_m2, qwen3,
    qwen3_next, qwen3_5, qwen3_5_moe, llama, mistral, gemma2, gemma3, gemma4, gpt_oss, muse_glimmer, granite_hybrid,
    bamba, falcon_h1, nemotron_h, exaone4_5,
]  # fmt: skip
# As Qwen3 to everything but the mask of a draft tree.
ALSO_MASKED = [
    qwen2, qwen3_moe, gemma4_unified, ernie4_5_moe, longcat_flash, exaone4, exaone_moe, glm4_moe_lite, glm_ocr,
    hy_v3, mellum, step3p7,
]  # fmt: skip
if "sarvam_mla" in CONFIG_MAPPING:  # from 5.24 on
    ALSO_MASKED += [sarvam_mla, sarvam_moe]
# Whose draft trees are verified under a mask, DeepSeek-V4's apart; those of the others row by row, if at all.
MASKED = [
    deepseek_v3, kimi_k25, glm4_moe, minimax_m2, gemma2, gemma3, gemma4, gpt_oss, llama, mistral, muse_glimmer, qwen3,
    *ALSO_MASKED,
]  # fmt: skip
# Earlier transformers keep the positions of Qwen4-Exp's indexer beside the cache's layers, where nothing rewinds them.
_indexed = DYNAMIC_LAYER_TYPE_MAPPING.get("indexed_attention")
REWINDABLE_QWEN4 = hasattr(_indexed and _indexed(), "indexer_position_ids")
if REWINDABLE_QWEN4:
    FAMILIES += [qwen4_exp, qwen4_exp_multimodal]
if hasattr(transformers, "HYV4VLConfig"):  # from 5.24 on
    FAMILIES.append(hunyuan_v4_multimodal)
if "bailing_hybrid" in CONFIG_MAPPING:  # from 5.20 on
    FAMILIES.append(bailing_hybrid)
# The `model_type`s, of text parts, of what is not always in the list.
LATER = {"qwen4_exp_text", "hy_v4_vl_text", "bailing_hybrid", "sarvam_mla", "sarvam_moe"}
