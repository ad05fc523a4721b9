"""What we rely on in transformers: a failing test names what to look at, as upstream has moved."""

import ast
import importlib
import inspect
import json
from argparse import ArgumentParser
from pathlib import Path

import accelerate.hooks
import torch
import transformers
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    CompileConfig,
    DeepseekV4ForCausalLM,
    DynamicCache,
    FineGrainedFP8Config,
    GenerationConfig,
    GenerationMixin,
    PreTrainedConfig,
    PreTrainedModel,
    Trainer,
)
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicSlidingWindowLayer, LinearAttentionLayer
from transformers.integrations.finegrained_fp8 import replace_with_fp8_linear
from transformers.integrations.peft import PeftAdapterMixin
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4CSACache, DeepseekV4HCACache

import hf_hyperdflash
from hf_hyperdflash import bind

from ..conftest import penalty_counts_padding, prompt, tiny_config, tiny_target
from ..helpers import families

PACKAGE = Path(hf_hyperdflash.__file__).parent
MOVED = "transformers has changed what hf_hyperdflash relies on: "


def names(function):
    return list(inspect.signature(function).parameters)


def test_stock_v4_still_needs_binding():
    assert DeepseekV4ForCausalLM._is_stateful, (
        MOVED + "DeepSeek-V4 is no longer stateful. Can its caches be cropped now? Then `bind` may only need the loop."
    )
    cache = DynamicCache(config=tiny_target().config)
    kinds = {type(layer) for layer in cache.layers}
    assert kinds == {DynamicSlidingWindowLayer, DeepseekV4HCACache, DeepseekV4CSACache}, MOVED + "V4's cache layers."
    assert "crop" not in vars(DeepseekV4HCACache) and "crop" not in vars(DeepseekV4CSACache), (
        MOVED + "V4's compressed layers have a `crop`: compare it with ours, which could go."
    )
    assert not hasattr(GenerationMixin, "get_candidate_generator"), MOVED + "assistants may bring a generator along."


def test_what_bind_overrides_is_called_as_we_expect():
    expected = {
        "_prepare_cache_for_generation": ["generation_config", "model_kwargs", "generation_mode"],
        "_assisted_decoding": [
            "input_ids", "logits_processor", "stopping_criteria", "generation_config", "synced_gpus", "streamer",
            "inputs_tensor", "assistant_model", "assistant_tokenizer", "tokenizer",
        ],
        "_prefill": ["input_ids", "generation_config", "model_kwargs"],
        "_validate_generation_mode": ["generation_mode", "generation_config", "generation_mode_kwargs"],
        "_get_logits_processor": [
            "generation_config", "input_ids_seq_length", "encoder_input_ids", "prefix_allowed_tokens_fn",
            "logits_processor", "device", "model_kwargs", "negative_prompt_ids", "negative_prompt_attention_mask",
        ],
        "_get_stopping_criteria": ["generation_config", "stopping_criteria", "tokenizer"],
    }  # fmt: skip
    for method, parameters in expected.items():
        assert names(getattr(GenerationMixin, method))[1 : len(parameters) + 1] == parameters, MOVED + method
    defaults = transformers.GenerationConfig._get_default_generation_params()
    assert "num_assistant_tokens" in defaults, MOVED + "how an unset `num_assistant_tokens` is told from a set one."


def test_what_the_rewindable_layers_extend_is_as_we_expect():
    layer = DeepseekV4CSACache(tiny_target().config)
    state = {"buffer_kv", "buffer_gate", "compressed_kv", "entry_count", "overlap_kv", "overlap_gate", "compress_rate",
             "keys", "values", "cumulative_length", "sliding_window", "record_past", "is_initialized"}  # fmt: skip
    assert state <= set(vars(layer)), MOVED + f"V4's cache state, without {state - set(vars(layer))}"
    known = state | {"dtype", "device", "_sliding_window_tensor"}
    assert set(vars(layer)) <= known, MOVED + f"new state of V4's cache: {set(vars(layer)) - known}. Must it rewind?"
    assert names(DeepseekV4HCACache.store_compression_weights) == ["self", "name", "kv", "gate"], MOVED
    assert names(DeepseekV4CSACache.update_overlap_state) == ["self", "name", "chunk_kv", "chunk_gate", "head_dim"]
    linear = vars(LinearAttentionLayer())
    states = {name for name in linear if "state" in name or "kernel" in name}
    assert states == {
        "number_of_states", "conv_states", "recurrent_states", "is_conv_states_initialized",
        "is_recurrent_states_initialized", "has_previous_state", "conv_kernel_size",
    }, MOVED + f"linear attention's state: {states}"  # fmt: skip
    assert not LinearAttentionLayer().is_croppable, MOVED + "linear attention can be cropped: our layer could go."
    assert hasattr(Cache, "activate_past_recording") and hasattr(Cache, "is_croppable")


def test_which_penalty_counts_padding():
    """In plain decoding, without us. What is drafted is as plain decoding has it, so that before 5.23 a padded text
    depends on its padding where a repetition penalty was asked for."""
    model, ids = families.qwen3().eval(), prompt(9)  # without 0
    padded, mask = nn.functional.pad(ids, (4, 0)), nn.functional.pad(torch.ones_like(ids), (4, 0))
    asked = {"do_sample": False, "max_new_tokens": 1, "repetition_penalty": 2.0}
    asked |= {"output_scores": True, "return_dict_in_generate": True}
    alone, behind = (
        model.generate(each, attention_mask=own, **asked).scores[0][0]
        for each, own in ((ids, torch.ones_like(ids)), (padded, mask))
    )
    changed = (~torch.isclose(alone, behind, atol=1e-4)).nonzero().flatten().tolist()
    assert changed == [0] * penalty_counts_padding()


def test_v4s_experts_are_fp4_by_its_config_json_alone(tmp_path):
    """The README loads V4-Flash, whose config.json says so beside `quantization_config`, by its name."""
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    fields = tiny_config().to_dict() | {"expert_dtype": "fp4", "quantization_config": quantization}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    config = AutoConfig.from_pretrained(tmp_path)
    with torch.device("meta"):
        model = DeepseekV4ForCausalLM(config)
    replace_with_fp8_linear(
        model, quantization_config=FineGrainedFP8Config(**config.quantization_config), pre_quantized=True
    )
    kinds = {module.gate_up_proj.dtype for name, module in model.named_modules() if name.endswith(".experts")}
    assert kinds == {torch.int8}, MOVED + "where V4's `expert_dtype` is looked for."


# Private names of other packages, by who has them, and what we lean on each for.
PRIVATE = [
    (GenerationMixin, {
        "_prepare_cache_for_generation": "to make the cache's layers rewindable",
        "_assisted_decoding": "to run our loop",
        "_get_candidate_generator": "to hand our drafts to transformers' loop",
        "_prefill": "to run the prompt",
        "_get_logits_processor": "to ask processors about each row of a batch alone",
        "_get_stopping_criteria": "to ask criteria about each row of a batch alone",
        "_validate_generation_mode": "to let drafters of targets with fewer tokens through `generate`'s check",
        "_valid_auto_compile_criteria": "to compile rounds where transformers' own loop would be compiled",
        "_supports_default_dynamic_cache": "to refuse targets that make a cache of their own",
        "_supports_logits_to_keep": "to say that a drafter is bound, where a target would run it as an assistant",
    }),
    (PeftAdapterMixin, {"_hf_peft_config_loaded": "to save an adapter of a drafter, and not both"}),
    (CompileConfig(), {"_compile_all_devices": "to time compiled rounds on a CPU for the doctor"}),
    (GenerationConfig, {"_get_default_generation_params": "to tell 20 drafts that were asked for from the default"}),
    (PreTrainedModel, {
        "_is_stateful": "to let a bound V4 through `generate`'s check",
        "_default_compile_config": "to compile rounds as transformers' own loop would be",
        "_init_weights": "to start drafters",
        "_keep_in_fp32_modules_strict": "to keep gates and norms in float32",
        "_keep_in_fp32_modules": "to load the ends of a target as the whole of it is loaded",
        "_keys_to_ignore_on_load_unexpected": "to load a drafter out of a whole V4 checkpoint",
        "_no_split_modules": "to place a drafter on several devices",
        "_supports_attention_backend": "to choose a drafter's attention",
        "_supports_flash_attn": "to choose a drafter's attention",
        "_supports_flex_attn": "to choose a drafter's attention",
        "_supports_sdpa": "to choose a drafter's attention",
        "_can_set_experts_implementation": "to keep a V4 drafter's experts as they are",
    }),
    (PreTrainedConfig(), {
        "_attn_implementation": "to make the masks that a target's attention takes",
        "_experts_implementation": "to run a V4 drafter's experts",
        "_name_or_path": "to remember which target a drafter is for",
        "_auto_class": "to save a drafter's code with it",
    }),
    (CacheLayerMixin, {"_layer_type": "to keep our layers out of the table of layer types"}),
    (Trainer, {
        "_determine_best_metric": "to judge a checkpoint by its acceptance",
        "_save": "to save a drafter with its code",
        "_save_checkpoint": "to save a checkpoint's record",
        "_save_rng_state": "to resume anchors as they were drawn",
        "_push_from_checkpoint": "to push a drafter with its card",
        "_finish_current_push": "to end a push before the next",
        "_get_output_dir": "to find a checkpoint's folder",
        "_get_train_sampler": "to train on rows in the order in which they are made",
        "_prepare_inputs": "to move a batch to the device",
    }),
    (nn.Module(), {
        "_buffers": "to make the buffers of a target's ends that no checkpoint has",
        "_forward_hooks": "to see whether somebody else reads a target's forward",
        "_forward_pre_hooks": "to see whether somebody else reads a target's forward",
        "_apply": "to keep RoPE's frequencies in float32",
    }),
    (AutoModelForCausalLM, {"_model_mapping": "to tell a model of images and text from a causal LM"}),
    (ArgumentParser(), {
        "_option_string_actions": "to demand `--output_dir`",
        "_negative_number_matcher": "to read `-1` as a layer",
    }),
    # What is set on objects, by the source that sets it.
    (transformers.generation.utils, {
        "_pad_token_tensor": "to fill up a batch",
    }),
    (transformers.dynamic_module_utils, {
        "_dot_": "to know a drafter's repository by the name of its module",
        "_hyphen_": "to know a drafter's repository by the name of its module",
    }),
    (transformers.configuration_utils, {"_commit_hash": "to remember a target's revision"}),
    (accelerate.hooks, {
        "_hf_hook": "to tell an offloaded LM head",
        "_old_forward": "to replace the forward of a module that its hooks wrap",
    }),
    (transformers.tokenization_utils_tokenizers, {"_tokenizer": "to take back a token that a GGUF file has not"}),
    (torch.cpu, {
        "_is_amx_tile_supported": "to answer in bfloat16 on a CPU that is fast in it",
        "_is_avx512_bf16_supported": "to answer in bfloat16 on a CPU that is fast in it",
    }),
    (torch, {"_dynamo": "to compile a module once for any number of tokens"}),
    (transformers.integrations.deepspeed, {
        "_hf_deepspeed_config_weak_ref": "to load targets whole beside a drafter that ZeRO-3 trains",
    }),
    (torch, {"_inductor": "to see whether it packs weights"}),
    (torch._dynamo.eval_frame, {
        "_orig_mod": "to see the model in a compiled one",
        "_debug_get_cache_entry_list": "to run what was compiled without its guards",
    }),
]  # fmt: skip


# Strings and attributes that look like these and are our own, or the standard library's.
OURS = {
    "_hyperdflash_context", "_hyperdflash_padding", "_hyperdflash_torn", "_asdict",
    "_kept_shapes", "_num_draft_tokens", "_replace", "_acceptance", "_codebook",
    "_features", "_normalize_context_k", "_runtime", "_VERBOSITY", "_DISABLE_PROGRESS_BARS", "_abc_impl",
    "_backward_cls", "_token_id", "_token", "_packed",
    "_can_set_experts_implementation_cached_value",  # which transformers 5.17 puts on each class that it has looked at
}  # fmt: skip
# vLLM's, which `tests/serving/` runs.
OF_ENGINES = {
    "_block_size", "_executor", "_get_connector_metadata", "_is_tp_rank_zero", "_kv_cache", "_mtp_hidden_buffer",
    "_storage_path",
}  # fmt: skip


def test_each_private_thing_that_we_lean_on_is_there():
    for owner, purposes in PRIVATE:
        for name, purpose in purposes.items():
            is_there = name in inspect.getsource(owner) if inspect.ismodule(owner) else hasattr(owner, name)
            assert is_there, (
                f"{MOVED}{name} of {getattr(owner, '__name__', type(owner).__name__)}, which we need {purpose}."
            )


def test_no_other_private_thing_is_leaned_on():
    known = (OURS | OF_ENGINES).union(*(purposes for _, purposes in PRIVATE))
    others = sorted((reached_into() | overridden()) - known)
    assert not others, f"Give {others} lines in PRIVATE: who has it, and what for."


def reached_into() -> set[str]:
    """Private names that the package reads or writes of what is not its own."""
    defined, used = set(), set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                defined.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                defined.add(node.id)
            elif isinstance(node, ast.Attribute):
                is_own = isinstance(node.ctx, ast.Store) and getattr(node.value, "id", None) == "self"
                (defined if is_own else used).add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
                used.add(node.value)
            elif isinstance(node, ast.ImportFrom) and not node.level:
                used |= {alias.name for alias in node.names}
    return {name for name in used - defined if name.startswith("_") and not name.startswith("__")}


def overridden() -> set[str]:
    """Private names of transformers' classes that classes of the package, a bound target's among them, define anew."""
    bind(target := tiny_target())
    classes = {type(target)}
    for path in PACKAGE.rglob("*.py"):
        name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        if "serving" not in path.parts and path.parent.name != "metrics":  # which need an engine, or `evaluate`
            classes |= {kind for kind in vars(importlib.import_module(name)).values() if inspect.isclass(kind)}
    found = set()
    for kind in classes:
        ours = [base for base in kind.__mro__ if base.__module__.startswith("hf_hyperdflash")]
        others = [base for base in kind.__mro__ if base.__module__.startswith(("transformers", "torch"))]
        found |= {name for base in ours for name in vars(base) if any(name in vars(other) for other in others)}
    return {name for name in found if name.startswith("_") and not name.startswith("__")}
