"""What engines are told of a drafter, and what is refused: as far as it can be known without them."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import AutoConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from hf_hyperdflash import HyperDFlashConfig, HyperDFlashDrafter
from hf_hyperdflash.serving.served_config import OTHERS, refusing
from hf_hyperdflash.serving.sglang import config as sglang_config
from hf_hyperdflash.serving.sglang.config import SGLangConfig
from hf_hyperdflash.serving.vllm import config as vllm_config
from hf_hyperdflash.serving.vllm.config import VLLMConfig

from ..helpers import families
from ..helpers.processes import python

SMALL = dict(
    vocab_size=64, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    intermediate_size=32, target_hc_mult=1, target_num_layers=6, target_layer_ids=[1, 3, -1], mask_token_id=7,
    block_size=5, max_position_embeddings=256,
)  # fmt: skip
TARGET = dict(vocab_size=64, hidden_size=64, num_hidden_layers=6, model_type="qwen3")


ENGINES = {
    "vllm": (VLLMConfig, vllm_config.check_served_pair),
    "sglang": (SGLangConfig, sglang_config.check_served_pair),
}


def served(kind=VLLMConfig, **fields):
    return kind.from_dict(HyperDFlashConfig(**{**SMALL, **fields}).to_dict())


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, {"causal": False}),
        ({"causal_layers": "all"}, {"causal": True}),
        ({"sliding_window": 30}, {"causal": False}),  # from the anchor: served where it takes in the longest text
        ({"sliding_window": 30, "window_from": "slot"}, {"causal": False, "swa_window_size": 30, "use_swa": True}),
        (
            {"sliding_window": 30, "window_from": "slot", "causal_layers": "sliding",
             "layer_types": ["full_attention", "sliding_attention"]},
            {"swa_window_size": 30, "use_swa": False},
        ),
    ],
)  # fmt: skip
def test_a_drafter_in_vllms_words(fields, words):
    config = served(**fields)
    assert config.dflash_config == {"mask_token_id": 7, "target_layer_ids": [1, 3, 5], **words}
    assert config.n_predict == 4
    # vLLM reads it from `to_dict`, and makes one without arguments on its way.
    assert config.to_dict()["dflash_config"] == config.dflash_config and type(config)().model_type == "hyperdflash"
    for name, value in HyperDFlashConfig(**{**SMALL, **fields}).to_dict().items():
        assert getattr(config, name) == value, name


@pytest.mark.parametrize(
    ("fields", "words", "is_causal", "kinds"),
    [
        ({}, {}, False, ["full_attention"] * 2),
        ({"causal_layers": "all"}, {}, True, ["full_attention"] * 2),
        ({"sliding_window": 30}, {}, False, ["full_attention"] * 2),  # from the anchor
        ({"sliding_window": 30, "causal_layers": "all"}, {}, True, ["full_attention"] * 2),
        ({"sliding_window": 30, "causal_layers": "sliding"}, {}, None, ["sliding_attention"] * 2),
        ({"sliding_window": 30, "window_from": "slot"}, {}, False, ["sliding_attention"] * 2),
        (
            {"sliding_window": 30, "window_from": "slot", "causal_layers": "sliding",
             "layer_types": ["full_attention", "sliding_attention"]},
            {}, None, ["full_attention", "sliding_attention"],
        ),
        ({"conv_kernel_size": 2}, {"conv_kernel_size": 2, "conv_group_size": 16}, False, ["full_attention"] * 2),
    ],
)  # fmt: skip
def test_a_drafter_in_sglangs_words(fields, words, is_causal, kinds):
    config = served(SGLangConfig, **fields)
    assert config.dflash_config == {"block_size": 5, "mask_token_id": 7, "target_layer_ids": [1, 3, 5], **words}
    assert getattr(config, "is_causal", None) is is_causal and config.layer_types == kinds
    assert type(config)().model_type == "hyperdflash" and config.to_dict()["dflash_config"] == config.dflash_config
    again = SGLangConfig.from_dict(config.to_dict())
    assert again.to_dict() == config.to_dict()
    for name, value in HyperDFlashConfig(**{**SMALL, **fields}).to_dict().items():
        assert name == "layer_types" or getattr(config, name) == value, name


def test_a_saved_drafter_is_read_as_it_was_saved(tmp_path):
    target = families.qwen3()
    HyperDFlashDrafter.from_target(target, mask_token_id=1, target_layer_ids=[0, -1]).save_pretrained(tmp_path)
    config = VLLMConfig.from_pretrained(tmp_path)
    assert config.dflash_config["target_layer_ids"] == [0, target.config.num_hidden_layers - 1]
    assert config.architectures == ["HyperDFlashDrafter"]


# Which engines refuse it: both, or one.
@pytest.mark.parametrize(
    ("engines", "fields", "told"),
    [
        ("vllm sglang", {"sample_from_anchor": True}, "`sample_from_anchor` is True, but {} serves False: train a"),
        ("vllm", {"conv_kernel_size": 2}, "`conv_kernel_size` is 2, but {} serves 0"),
        (
            "vllm sglang",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "`rope_parameters` is .*'dynamic'.*, but {} serves a `rope_type` of default, linear, yarn, llama3",
        ),
        ("vllm sglang", {"mask_token_id": None}, "`mask_token_id` is None, but {} serves drafters that read a token"),
        ("vllm sglang", {"hidden_act": "gelu"}, "`hidden_act` is 'gelu', but {} serves 'silu'"),
        (
            "vllm sglang",
            {"reducer": "fc", "target_hidden_size": 32},
            "`hidden_size` is 64, but {} serves the target's, 32",
        ),
        (
            "vllm sglang",
            {"target_num_layers": 0},
            "`target_num_layers` is 0, but {} serves drafters that .* say which that is",
        ),
        (
            "vllm",
            {"target_hc_mult": 4},
            r"`target_layer_ids` is \[1, 3, -1\], but {} serves the residual streams of the last",
        ),
        (
            "sglang",
            {"target_hc_mult": 4, "reducer": "stream_mean"},
            "`target_hc_mult` is 4, but {} serves targets with one",
        ),
        ("vllm sglang", {"causal_layers": "sliding"}, "`causal_layers` is 'sliding', but {} serves 'none' or 'all'"),
        (
            "vllm sglang",
            {"sliding_window": 9, "layer_types": ["full_attention", "sliding_attention"]},
            "`layer_types` is .*, but {} serves layers of one kind where a window counts from the anchor",
        ),
        (
            "sglang",
            {"sliding_window": 4, "window_from": "slot"},
            "`sliding_window` is 4, but {} serves windows of the block's 5",
        ),
    ],
)
def test_what_no_target_makes_good_is_refused_as_it_is_read(engines, fields, told):
    for kind, _ in (ENGINES[name] for name in engines.split()):
        with pytest.raises(ValueError, match=told.format(kind.engine)) as caught:
            served(kind, **fields)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("drafter", "target", "started", "told"),
    [
        ({}, {"vocab_size": 65}, {}, "target with `vocab_size` 64, but this target's is 65: serve the drafter's own"),
        ({}, {"hidden_size": 65}, {}, "`hidden_size` 64, but this target's is 65"),
        ({}, {"num_hidden_layers": 7}, {}, "`num_hidden_layers` 6, but this target's is 7"),
        ({"target_num_layers": 0, "target_layer_ids": [6]}, {}, {}, r"layers \[6\], but this target's are 0 to 5"),
        (
            {"target_hc_mult": 4, "target_layer_ids": [-1]},
            {},
            {},
            "reads 4 residual streams of each layer, but this target has 1",
        ),
        ({}, {"hc_mult": 4}, {}, "reads 1 residual streams of each layer, but this target has 4"),
        ({}, {}, {"drafts": 3}, "`num_speculative_tokens` is 3, but the drafter's block has 4 .*: give 4, or"),
        ({}, {}, {"drafts": 5}, "`num_speculative_tokens` is 5"),
        ({"causal_layers": "all"}, {}, {"drafts": 5}, "`num_speculative_tokens` is 5"),
        (
            {"sliding_window": 99},
            {},
            {},
            "window` of 99 counts from the anchor, .*-len(gth)?` is 100: serve at most 99, .* farthest 4 of 99",
        ),
    ],
)
@pytest.mark.parametrize("engine", ENGINES)
def test_what_does_not_fit_is_refused(engine, drafter, target, started, told):
    kind, check_served_pair = ENGINES[engine]
    if engine == "sglang":
        if "target_hc_mult" in drafter:
            pytest.skip("refused as it is read")
        # Its option counts the anchor.
        told = re.sub(
            "`num_speculative_tokens` is ([0-9])",
            lambda m: f"`--speculative-num-draft-tokens` is {int(m[1]) + 1}",
            told,
        )
        told = told.replace("give 4", "give 5")
    given = {"drafts": 4, "longest": 100, **started}
    with pytest.raises(ValueError, match=told) as caught:
        check_served_pair(served(kind, **drafter), SimpleNamespace(**{**TARGET, **target}), **given)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("drafter", "other"),
    [
        ({}, {}),
        ({"causal_layers": "all"}, {"drafts": 3}),  # slots after the last draft change nothing
        ({"sliding_window": 100}, {}),  # takes in the longest text
        ({"sliding_window": 9, "window_from": "slot"}, {}),
        ({"target_num_layers": 0, "target_layer_ids": [5]}, {}),
        ({"target_hc_mult": 4, "target_layer_ids": [-1]}, {"hc_mult": 4}),
        ({"target_hc_mult": 4, "target_layer_ids": [5]}, {"hc_mult": 4}),
        ({"target_hc_mult": 4, "reducer": "stream_mean"}, {"hc_mult": 4}),
    ],
)
@pytest.mark.parametrize("engine", ENGINES)
def test_what_fits_is_served(engine, drafter, other):
    kind, check_served_pair = ENGINES[engine]
    if engine == "sglang" and "target_hc_mult" in drafter:
        pytest.skip("refused as it is read")
    given = {"drafts": 4, "longest": 100} | {name: value for name, value in other.items() if name != "hc_mult"}
    target = {**TARGET, "hc_mult": other.get("hc_mult", 1)}
    check_served_pair(served(kind, **drafter), SimpleNamespace(**target), **given)


def test_fewer_drafts_in_larger_batches_are_refused_where_slots_see_each_other():
    by_size = [[1, 4], [8, 2]]
    with pytest.raises(ValueError, match=r"_per_batch_size` is \[\[1, 4\], \[8, 2\]\], but .*: leave it out"):
        vllm_config.check_one_number_of_drafts(served(VLLMConfig), by_size)
    vllm_config.check_one_number_of_drafts(served(VLLMConfig, causal_layers="all"), by_size)
    vllm_config.check_one_number_of_drafts(served(VLLMConfig), None)


@pytest.mark.parametrize("engine", ["vLLM", "SGLang"])
@pytest.mark.parametrize("model_type", OTHERS)
def test_other_drafters_say_why_not(tmp_path, model_type, engine):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    assert model_type not in CONFIG_MAPPING  # of transformers: nobody else's model is refused
    AutoConfig.register(model_type, refusing(model_type, engine))
    try:
        with pytest.raises(ValueError, match=f"is a '{model_type}', which .*{engine}.*: expected a 'hyperdflash'"):
            AutoConfig.from_pretrained(tmp_path)
    finally:
        CONFIG_MAPPING._extra_content.pop(model_type)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_pair_is_served(dense_pair, engine):
    kind, check_served_pair = ENGINES[engine]
    config = kind.from_pretrained(dense_pair[1])
    check_served_pair(config, AutoConfig.from_pretrained(dense_pair[0]), 6, 2048)


@pytest.mark.parametrize(("group", "engine"), [("vllm.general_plugins", "vllm"), ("sglang.srt.plugins", "sglang")])
def test_an_engine_finds_its_plugin_and_pays_nothing_for_it(group, engine):
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    (entry,) = re.findall(rf'^\[project\.entry-points\."{re.escape(group)}"\]\nhyperdflash = "(.*)"$', text, re.M)
    module, _, name = entry.partition(":")
    code = f"import sys, {module} as plugin; assert callable(plugin.{name}) and '{engine}' not in sys.modules"
    done = python("-c", code)
    assert done.returncode == 0, done.stderr
