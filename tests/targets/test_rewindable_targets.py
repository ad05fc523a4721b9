"""`bind` accepts a target only if a round can be taken back from the cache that `generate` makes for it."""

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from hf_hyperdflash import PromptLookupDrafter, bind
from hf_hyperdflash.targets.registry import is_bound, target_of
from hf_hyperdflash.targets.target import Target

from ..conftest import prompt, tiny_drafter
from ..helpers.families import COMMON, DELTA_NET, FULL, LINEAR, SLIDING, llama
from ..helpers.tree_drafters import RandomChains

INKLING = dict(
    intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=3, num_key_value_heads=2, head_dim=16,
    n_routed_experts=4, num_experts_per_tok=2, sliding_window_size=8, sliding_window=8, unpadded_vocab_size=64,
    layer_types=["hybrid_sliding", "hybrid", "hybrid_sliding"],
)  # fmt: skip
MINIMAX = dict(
    intermediate_size=48, num_hidden_layers=3, num_key_value_heads=2, head_dim=16, num_local_experts=4, block_size=8,
    layer_types=[LINEAR, FULL, LINEAR],
)  # fmt: skip
# Families that have no test of their own, one of each kind of cache.
OTHERS = {
    "olmo_hybrid": dict(intermediate_size=48, num_hidden_layers=3, layer_types=[LINEAR, FULL, LINEAR], **DELTA_NET),
    "lara_mini": dict(intermediate_size=48, num_hidden_layers=3, layer_types=[LINEAR, SLIDING, FULL],
                      sliding_window=8, **DELTA_NET),
    "afmoe": dict(intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=3, num_key_value_heads=2,
                  head_dim=16, num_experts=4, num_experts_per_tok=2, sliding_window=8,
                  layer_types=[SLIDING, FULL, SLIDING]),
    "deepseek_v32": dict(intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=3, num_key_value_heads=4,
                         q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16,
                         head_dim=8, index_topk=16, index_head_dim=16, index_n_heads=32, n_routed_experts=4,
                         num_experts_per_tok=2, n_group=1, topk_group=1),
    "minimax_m3_vl_text": dict(intermediate_size=48, num_hidden_layers=3, num_key_value_heads=2, head_dim=16,
                               layer_types=["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
                               mlp_layer_types=["dense"] * 3, index_n_heads=2, index_head_dim=16, index_block_size=4,
                               index_topk_blocks=2, index_local_blocks=1, rotary_dim=8, dense_intermediate_size=48),
}  # fmt: skip


def made(model_type, fields):
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {model_type}")
    config = CONFIG_MAPPING[model_type](**{**COMMON, **fields})
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


@pytest.mark.parametrize(
    ("model_type", "fields", "words"),
    [
        (
            "inkling_text",
            INKLING,
            r"has layers \(hybrid, hybrid_sliding\) with a running state that cannot be rewound",
        ),
        (
            "inkling2_text",
            INKLING,
            r"has layers \(hybrid, hybrid_sliding\) with a running state that cannot be rewound",
        ),
        ("minimax", MINIMAX, "makes a cache of its own, which cannot be rewound"),
    ],
)
def test_a_target_is_refused_whose_cache_cannot_be_rewound(model_type, fields, words):
    target = made(model_type, fields)
    with pytest.raises(ValueError, match=words + ".*, so drafts that the target rejects could not be taken back"):
        bind(target)
    with pytest.raises(ValueError, match=words):
        PromptLookupDrafter(target).bind(target)
    assert not is_bound(target)


@pytest.mark.parametrize("kind", sorted(DYNAMIC_LAYER_TYPE_MAPPING))
def test_each_kind_of_layer_is_rewindable_or_refused(kind, monkeypatch):
    """Also those that another model's module registers."""
    target = llama().eval()
    monkeypatch.setattr(Target, "layer_kinds", {kind})
    try:
        bind(target)
    except ValueError as error:
        assert kind in str(error)
    else:
        cache = DynamicCache()
        cache.layers.append(DYNAMIC_LAYER_TYPE_MAPPING[kind](sliding_window=8))
        target_of(target).make_rewindable(cache, 4)
        assert cache.is_croppable


@pytest.mark.parametrize("model_type", OTHERS)
def test_a_target_that_is_accepted_writes_its_own_text(model_type):
    target = made(model_type, OTHERS[model_type])
    ids = prompt(13)
    options = dict(do_sample=False, max_new_tokens=24)
    text = target.generate(ids, **options)
    for drafter in (PromptLookupDrafter(target), RandomChains(target, [text[0]]), tiny_drafter(target)):
        drafter.bind(target)
        assert torch.equal(target.generate(ids, assistant_model=drafter, **options), text)
    assert torch.equal(target.generate(ids, prompt_lookup_num_tokens=3, **options), text)
