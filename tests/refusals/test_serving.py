"""What engines refuse of a drafter, as far as it can be known without them."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from transformers import AutoConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from hf_hyperdflash.serving.served_config import OTHERS, check_served_pair, refusing
from hf_hyperdflash.serving.vllm.config import VLLMConfig, check_one_number_of_drafts

from ..helpers.refusals import Refusal
from ..helpers.served_configs import ENGINES, TARGET, served

DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
MIXED = ["full_attention", "sliding_attention"]

# What no target makes good, by the engines that refuse it as they read it: fields, and words.
READ = [
    ("vllm sglang", {"sample_from_anchor": True}, ("`sample_from_anchor`", "True", "False")),
    ("vllm", {"conv_kernel_size": 2}, ("`conv_kernel_size`", "2", "0")),
    ("vllm sglang", {"rope_parameters": DYNAMIC}, ("`rope_parameters`", "'dynamic'", "yarn")),
    ("vllm sglang", {"mask_token_id": None}, ("`mask_token_id`", "None", "a token")),
    ("vllm sglang", {"hidden_act": "gelu"}, ("`hidden_act`", "'gelu'", "'silu'")),
    ("vllm sglang", {"reducer": "fc", "target_hidden_size": 32}, ("`hidden_size`", "64", "32")),
    ("vllm sglang", {"target_num_layers": 0}, ("`target_num_layers`", "0", "say which")),
    ("vllm", {"target_hc_mult": 4}, ("`target_layer_ids`", "[1, 3, -1]", "residual streams of the last")),
    ("sglang", {"target_hc_mult": 4, "reducer": "stream_mean"}, ("`target_hc_mult`", "4", "one")),
    ("vllm sglang", {"causal_layers": "sliding"}, ("`causal_layers`", "'sliding'", "'none' or 'all'")),
    ("vllm sglang", {"sliding_window": 9, "layer_types": MIXED}, ("`layer_types`", "one kind")),
    ("sglang", {"sliding_window": 4, "window_from": "slot"}, ("`sliding_window`", "4", "5")),
]
# Of a pair as it is started: the drafter's fields, the target's, the drafts, and words.
STARTED = [
    ({}, {"vocab_size": 65}, 4, ("`vocab_size`", "64", "65")),
    ({}, {"hidden_size": 65}, 4, ("`hidden_size`", "64", "65")),
    ({}, {"num_hidden_layers": 7}, 4, ("`num_hidden_layers`", "6", "7")),
    ({"target_num_layers": 0, "target_layer_ids": [6]}, {}, 4, ("[6]", "0 to 5")),
    ({"target_hc_mult": 4, "target_layer_ids": [-1]}, {}, 4, ("4 residual streams", "has 1")),
    ({}, {"hc_mult": 4}, 4, ("1 residual streams", "has 4")),
    ({}, {}, 3, ("3", "has 4", "give 4")),
    ({}, {}, 5, ("5", "give 4")),
    ({"causal_layers": "all"}, {}, 5, ("5", "give 4")),
    ({"sliding_window": 99}, {}, 4, ("99", "100", "at most 99", '"sliding_window": 100', "4 of 99")),
]


@pytest.mark.parametrize(("engines", "fields", "words"), READ)
def test_what_no_target_makes_good_is_refused_as_it_is_read(engines, fields, words):
    for kind in (ENGINES[name] for name in engines.split()):
        Refusal(lambda: served(kind, **fields), (*words, kind.engine)).check()  # noqa: B023


@pytest.mark.parametrize(("fields", "target", "drafts", "words"), STARTED)
@pytest.mark.parametrize("engine", ENGINES)
def test_what_does_not_fit_is_refused(engine, fields, target, drafts, words):
    kind = ENGINES[engine]
    if engine == "sglang" and "target_hc_mult" in fields:
        pytest.skip("refused as it is read")
    if drafts != 4:
        option = "`num_speculative_tokens`"
        if engine == "sglang":  # whose option counts the anchor
            option, words = "`--speculative-num-draft-tokens`", (str(drafts + 1), "give 5")
        words = (*words, option)
    pair = served(kind, **fields), SimpleNamespace(**{**TARGET, **target})
    Refusal(lambda: check_served_pair(kind, *pair, drafts=drafts, longest=100), words).check()


def test_fewer_drafts_in_larger_batches_are_refused_where_slots_see_each_other():
    words = ("_per_batch_size`", "[[1, 4], [8, 2]]", "leave it out")
    Refusal(lambda: check_one_number_of_drafts(served(VLLMConfig), [[1, 4], [8, 2]]), words).check()


@pytest.mark.parametrize("engine", ["vLLM", "SGLang"])
@pytest.mark.parametrize("model_type", OTHERS)
def test_other_drafters_say_why_not(tmp_path, model_type, engine):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    assert model_type not in CONFIG_MAPPING  # of transformers: nobody else's model is refused
    AutoConfig.register(model_type, refusing(model_type, engine))
    try:
        words = (f"'{model_type}'", engine, "'hyperdflash'")
        Refusal(lambda: AutoConfig.from_pretrained(tmp_path), words).check()
    finally:
        CONFIG_MAPPING._extra_content.pop(model_type)
