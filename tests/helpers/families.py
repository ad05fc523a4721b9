"""Every family of targets, small and random: a new family is one more function here."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

import torch
import transformers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BambaConfig,
    BambaForCausalLM,
    FalconH1Config,
    FalconH1ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3nForCausalLM,
    Gemma3nTextConfig,
    Gemma3TextConfig,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    Glm5NextConfig,
    Glm5NextForConditionalGeneration,
    GptOssConfig,
    GptOssForCausalLM,
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    HYV4Config,
    HYV4ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    NemotronHConfig,
    NemotronHForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    Qwen4ExpConfig,
    Qwen4ExpForCausalLM,
    Qwen4ExpForConditionalGeneration,
    Qwen4ExpTextConfig,
)
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING

from ..conftest import tiny_target

LINEAR, FULL, SLIDING = "linear_attention", "full_attention", "sliding_attention"
# Many index heads: with few, several tokens score exactly zero, and which of them stock indexers choose depends on how
# a text is cut into forwards. An LM head of full row rank (hidden = vocabulary): its drafters can be told what to
# draft.
COMMON = dict(
    vocab_size=64, hidden_size=64, num_attention_heads=4, max_position_embeddings=1024, initializer_range=0.2,
    bos_token_id=None, eos_token_id=None, pad_token_id=0, tie_word_embeddings=False,
)  # fmt: skip
MOE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=16)
DELTA_NET = dict(
    linear_conv_kernel_dim=4, linear_key_head_dim=8, linear_value_head_dim=8, linear_num_key_heads=2,
    linear_num_value_heads=4, head_dim=16, num_key_value_heads=2,
)  # fmt: skip
MAMBA = dict(
    num_hidden_layers=4, num_key_value_heads=2, mamba_n_heads=8, mamba_n_groups=2, mamba_d_state=8, mamba_d_conv=4,
    mamba_chunk_size=8,
)  # fmt: skip
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
    config = HYV4Config(
        **COMMON, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=3, head_dim=8, n_routed_experts=4,
        num_experts_per_tok=2, q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16,
        index_topk=16, index_head_dim=16, index_n_heads=32, hc_mult=4,
    )  # fmt: skip
    target = HYV4ForCausalLM(config)
    with torch.no_grad():
        target.model.hc_head.hc_base.normal_()
        target.model.hc_head.hc_scale.fill_(1.3)
    return target


def hunyuan_v4_multimodal() -> PreTrainedModel:
    """As Hunyuan V4, with rotary positions of three axes, which are one and the same for text, and an indexer that
    chooses all: with ties its text depends on padding, which the other's hides by chance."""
    text = dict(
        **COMMON, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=3, n_routed_experts=4,
        num_experts_per_tok=2, q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16,
        index_topk=512, index_head_dim=16, index_n_heads=32, hc_mult=4,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]},
    )  # fmt: skip
    vision = dict(
        num_hidden_layers=1, hidden_size=16, intermediate_size=16, num_attention_heads=2, out_hidden_size=64,
        max_image_size=64,
    )  # fmt: skip
    config = transformers.HYV4VLConfig(text_config=text, vision_config=vision)
    target = transformers.HYV4VLForConditionalGeneration(config)
    with torch.no_grad():
        target.model.language_model.hc_head.hc_base.normal_()
        target.model.language_model.hc_head.hc_scale.fill_(1.3)
    return target


def glm5_next() -> PreTrainedModel:
    vision = dict(depth=1, hidden_size=16, num_heads=2, intermediate_size=16, out_hidden_size=64)
    return Glm5NextForConditionalGeneration(Glm5NextConfig(text_config=GLM_TEXT, vision_config=vision))


def qwen4_exp() -> PreTrainedModel:
    return Qwen4ExpForCausalLM(Qwen4ExpTextConfig(**QWEN4_TEXT))


def qwen4_exp_multimodal() -> PreTrainedModel:
    vision = dict(depth=1, hidden_size=16, num_heads=2, intermediate_size=16, out_hidden_size=64)
    return Qwen4ExpForConditionalGeneration(Qwen4ExpConfig(text_config=QWEN4_TEXT, vision_config=vision))


def qwen3(layers: int = 4) -> PreTrainedModel:
    return Qwen3ForCausalLM(
        Qwen3Config(**COMMON, intermediate_size=48, num_hidden_layers=layers, num_key_value_heads=2, head_dim=16)
    )


def qwen2() -> PreTrainedModel:
    return Qwen2ForCausalLM(Qwen2Config(**COMMON, intermediate_size=48, num_hidden_layers=3, num_key_value_heads=2))


def qwen3_moe() -> PreTrainedModel:
    config = Qwen3MoeConfig(
        **COMMON, intermediate_size=48, num_hidden_layers=3, num_key_value_heads=2, head_dim=16, num_experts=4,
        num_experts_per_tok=2, moe_intermediate_size=16,
    )  # fmt: skip
    return Qwen3MoeForCausalLM(config)


def llama() -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**COMMON, intermediate_size=48, num_hidden_layers=4, num_key_value_heads=2))


def gemma3() -> PreTrainedModel:
    kinds = [SLIDING, SLIDING, FULL, SLIDING]
    config = Gemma3TextConfig(
        **COMMON, intermediate_size=48, num_hidden_layers=4, num_key_value_heads=2, head_dim=16, sliding_window=8,
        layer_types=kinds,
    )  # fmt: skip
    return Gemma3ForCausalLM(config)


GEMMA4 = dict(
    **COMMON, intermediate_size=48, num_hidden_layers=4, num_key_value_heads=2, head_dim=16, global_head_dim=32,
    sliding_window=8, layer_types=[SLIDING, SLIDING, SLIDING, FULL], final_logit_softcapping=30.0,
    vocab_size_per_layer_input=64,
)  # fmt: skip


def gemma4() -> PreTrainedModel:
    """With what its models have apart: experts beside the MLP, keys that are values, an input of its own to each
    layer."""
    config = Gemma4TextConfig(
        **GEMMA4, hidden_size_per_layer_input=8, enable_moe_block=True, num_experts=4, top_k_experts=2,
        moe_intermediate_size=16, attention_k_eq_v=True, num_global_key_value_heads=1,
    )  # fmt: skip
    return Gemma4ForCausalLM(config)


def gemma4_e() -> PreTrainedModel:
    """Whose last layers have keys of earlier ones."""
    kinds = [SLIDING, FULL, SLIDING, FULL]
    config = Gemma4TextConfig(
        **{**GEMMA4, "layer_types": kinds}, hidden_size_per_layer_input=8, num_kv_shared_layers=2
    )
    return Gemma4ForCausalLM(config)


def gemma3n() -> PreTrainedModel:
    config = Gemma3nTextConfig(
        **COMMON, intermediate_size=48, num_hidden_layers=4, num_key_value_heads=2, head_dim=16, sliding_window=8,
        layer_types=[SLIDING, FULL, SLIDING, FULL], num_kv_shared_layers=2, hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=64, laurel_rank=8, activation_sparsity_pattern=[0.0] * 4,
    )  # fmt: skip
    return Gemma3nForCausalLM(config)


def qwen3_next() -> PreTrainedModel:
    config = Qwen3NextConfig(**COMMON, **MOE, **DELTA_NET, intermediate_size=48, num_hidden_layers=4,
                             layer_types=[LINEAR, FULL, LINEAR, FULL])  # fmt: skip
    return Qwen3NextForCausalLM(config)


def qwen3_5() -> PreTrainedModel:
    config = Qwen3_5TextConfig(**COMMON, **DELTA_NET, intermediate_size=48, num_hidden_layers=4,
                               layer_types=[LINEAR, LINEAR, LINEAR, FULL])  # fmt: skip
    return Qwen3_5ForCausalLM(config)


def mistral() -> PreTrainedModel:
    config = MistralConfig(
        **COMMON, intermediate_size=48, num_hidden_layers=4, num_key_value_heads=2, sliding_window=8
    )
    return MistralForCausalLM(config)


def gemma2() -> PreTrainedModel:
    config = Gemma2Config(**COMMON, intermediate_size=48, num_hidden_layers=4, num_key_value_heads=2, head_dim=16,
                          sliding_window=8)  # fmt: skip
    return Gemma2ForCausalLM(config)


def gpt_oss() -> PreTrainedModel:
    """With sinks that take attention away, and a rope that YaRN stretches."""
    config = GptOssConfig(
        **COMMON, intermediate_size=16, num_hidden_layers=4, num_key_value_heads=2, head_dim=16, sliding_window=8,
        num_local_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    target = GptOssForCausalLM(config)
    with torch.no_grad():
        for layer in target.model.layers:
            layer.self_attn.sinks.normal_()
    return target


def granite_hybrid() -> PreTrainedModel:
    """Mamba-2 layers beside attention without positions."""
    config = GraniteMoeHybridConfig(
        **COMMON, **MAMBA, intermediate_size=16, shared_intermediate_size=32, num_local_experts=4,
        num_experts_per_tok=2, layer_types=[LINEAR, FULL, LINEAR, LINEAR], embedding_multiplier=12.0,
        residual_multiplier=0.22, attention_multiplier=0.125, logits_scaling=3.0,
    )  # fmt: skip
    return GraniteMoeHybridForCausalLM(config)


def bamba() -> PreTrainedModel:
    return BambaForCausalLM(BambaConfig(**COMMON, **MAMBA, intermediate_size=48, attn_layer_indices=[1]))


def falcon_h1() -> PreTrainedModel:
    """Mamba-2 and attention side by side in every layer."""
    config = FalconH1Config(
        **COMMON, **MAMBA, intermediate_size=48, mamba_d_ssm=64, embedding_multiplier=5.0, lm_head_multiplier=0.25,
        key_multiplier=0.5, ssm_out_multiplier=0.5,
    )  # fmt: skip
    return FalconH1ForCausalLM(config)


def nemotron_h() -> PreTrainedModel:
    """Layers of one kind each, MLPs and experts too. With hardly a least time step: stock keeps to it where it runs
    several tokens and not where it runs one, so that its text would depend on how it is cut into forwards."""
    config = NemotronHConfig(
        **COMMON, layers_block_type=[LINEAR, "moe", FULL, LINEAR, "mlp"], intermediate_size=48, num_key_value_heads=2,
        head_dim=16, mamba_num_heads=8, mamba_head_dim=16, ssm_state_size=8, n_groups=2, chunk_size=8,
        time_step_min=1e-9, n_routed_experts=4, moe_intermediate_size=16, moe_shared_expert_intermediate_size=16,
    )  # fmt: skip
    return NemotronHForCausalLM(config)


FAMILIES = [
    deepseek_v4, deepseek_v4_remote_code, hunyuan_v4, glm5_next, qwen3, qwen3_next, qwen3_5, llama, mistral, gemma2,
    gemma3, gemma4, gpt_oss, granite_hybrid, bamba, falcon_h1, nemotron_h,
]  # fmt: skip
# As Qwen3 to everything but the mask of a draft tree.
ALSO_MASKED = [qwen2, qwen3_moe]
# Whose draft trees are verified under a mask, DeepSeek-V4's apart; those of the others row by row, if at all.
MASKED = [gemma2, gemma3, gemma4, gpt_oss, llama, mistral, qwen3, *ALSO_MASKED]
# Earlier transformers keep the positions of Qwen4-Exp's indexer beside the cache's layers, where nothing rewinds them.
REWINDABLE_QWEN4 = "indexed_attention" in DYNAMIC_LAYER_TYPE_MAPPING
if REWINDABLE_QWEN4:
    FAMILIES += [qwen4_exp, qwen4_exp_multimodal]
if hasattr(transformers, "HYV4VLConfig"):  # from 5.24 on
    FAMILIES.append(hunyuan_v4_multimodal)
LATER = {"qwen4_exp_text", "hy_v4_vl_text"}  # the `model_type`s, of text parts, of what is not always in the list
