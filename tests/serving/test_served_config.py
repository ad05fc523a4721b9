"""What engines are told of a drafter: as far as it can be known without them. Refusals are in tests/refusals."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import AutoConfig

from hf_hyperdflash import HyperDFlashConfig, HyperDFlashDrafter
from hf_hyperdflash.serving.served_config import check_served_pair
from hf_hyperdflash.serving.sglang.config import SGLangConfig
from hf_hyperdflash.serving.vllm import config as vllm_config
from hf_hyperdflash.serving.vllm.config import VLLMConfig

from ..helpers import families
from ..helpers.processes import python
from ..helpers.served_configs import ENGINES, SMALL, TARGET, served


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
    kind = ENGINES[engine]
    if engine == "sglang" and "target_hc_mult" in drafter:
        pytest.skip("refused as it is read")
    given = {"drafts": 4, "longest": 100} | {name: value for name, value in other.items() if name != "hc_mult"}
    target = {**TARGET, "hc_mult": other.get("hc_mult", 1)}
    check_served_pair(kind, served(kind, **drafter), SimpleNamespace(**target), **given)


def test_fewer_drafts_in_larger_batches_are_served_where_slots_see_none_behind_them():
    vllm_config.check_one_number_of_drafts(served(VLLMConfig, causal_layers="all"), [[1, 4], [8, 2]])
    vllm_config.check_one_number_of_drafts(served(VLLMConfig), None)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_pair_is_served(dense_pair, engine):
    kind = ENGINES[engine]
    config = kind.from_pretrained(dense_pair[1])
    check_served_pair(kind, config, AutoConfig.from_pretrained(dense_pair[0]), 6, 2048)


@pytest.mark.parametrize(("group", "engine"), [("vllm.general_plugins", "vllm"), ("sglang.srt.plugins", "sglang")])
def test_an_engine_finds_its_plugin_and_pays_nothing_for_it(group, engine):
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    (entry,) = re.findall(rf'^\[project\.entry-points\."{re.escape(group)}"\]\nhyperdflash = "(.*)"$', text, re.M)
    module, _, name = entry.partition(":")
    code = f"import sys, {module} as plugin; assert callable(plugin.{name}) and '{engine}' not in sys.modules"
    done = python("-c", code)
    assert done.returncode == 0, done.stderr
