import json
import logging
import re

import pytest

from hf_hyperdflash import HyperDFlashConfig


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"reducer": "mean"}, "mean"),
        ({"block_size": 1}, "block_size"),
        ({"mask_token_id": 129280}, "outside the vocabulary"),
        ({"mask_token_id": -1}, "outside the vocabulary"),
        ({"num_attention_heads": 6, "num_key_value_heads": 4}, "multiple"),
        ({"head_dim": 7}, "even"),
        ({"hidden_size": 0}, "at least 1"),
        ({"sliding_window": 0}, "sliding_window"),
        ({"hidden_size": 64, "target_hidden_size": 128}, "equal widths"),
        ({"hidden_size": 64, "target_hidden_size": 128, "reducer": "hybrid"}, "equal widths"),
        ({"target_layer_ids": []}, "target_layer_ids"),
        ({"target_layer_ids": [2, 1]}, "ascending"),
        ({"target_layer_ids": [-1, 2]}, "ascending"),
        ({"target_layer_ids": [1, 1]}, "each once"),
        ({"target_layer_ids": [-2, -1]}, "layer numbers from 0"),
        ({"target_layer_ids": "1"}, "`target_layer_ids` is '1', expected a list"),
        ({"target_layer_ids": [1.0]}, "expected a list of layer numbers"),
        ({"target_layer_ids": [True]}, "expected a list of layer numbers"),
        ({"hidden_size": "64"}, "`hidden_size` is '64', expected an integer"),
        ({"hidden_size": 64.0}, "`hidden_size` is 64.0, expected an integer"),
        ({"hidden_size": True}, "`hidden_size` is True, expected an integer"),
        ({"block_size": None}, "`block_size` is None, expected an integer"),
        ({"sliding_window": "8"}, "`sliding_window` is '8', expected an integer or None"),
        ({"path_norm": "no"}, "`path_norm` is 'no', expected True or False"),
        ({"hc_eps": "1e-6"}, "`hc_eps` is '1e-6', expected a number"),
        ({"rms_norm_eps": float("nan")}, "finite"),
        ({"hc_eps": -1e-6}, "at least 0"),
        ({"reducer": 3}, "`reducer` is 3, expected a string"),
        ({"hidden_act": "silo"}, "`hidden_act` is 'silo', expected one of .*silu"),
        ({"rope_parameters": "default"}, "`rope_parameters` is 'default', expected a dictionary"),
        ({"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}}, "`rope_type` 'spiral'"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": "10000"}}, "`rope_theta` '10000'"),
        ({"block_size": 10**9}, "at most 4096"),
        ({"num_hidden_layers": 10**9}, "at most 1024"),
        ({"draft_vocab_size": 129281}, "at most the `vocab_size`"),
    ],
)
def test_bad_fields_name_the_value_and_the_fix(fields, message):
    with pytest.raises(ValueError, match=message) as caught:
        HyperDFlashConfig(**fields)
    assert "\n" not in str(caught.value)


def test_round_trip(tmp_path):
    config = HyperDFlashConfig(hidden_size=64, target_hidden_size=128, reducer="fc", sliding_window=32, block_size=5)
    config.save_pretrained(tmp_path)
    again = HyperDFlashConfig.from_pretrained(tmp_path)
    assert again.to_dict() == config.to_dict()
    assert again.max_draft_tokens == 4
    assert again.target_layer_ids == [-1] and again.num_paths == 4  # the paper's source


def test_vllms_key_is_not_used():
    # vLLM multiplies its draft buffer by a *draft* config's top-level `hc_mult` when the target is V4.
    assert "hc_mult" not in HyperDFlashConfig().to_dict()


def test_a_change_on_loading_is_checked_too(tmp_path):
    HyperDFlashConfig().save_pretrained(tmp_path)
    assert HyperDFlashConfig.from_pretrained(tmp_path, sliding_window=9).sliding_window == 9
    with pytest.raises(ValueError, match="sliding_window"):
        HyperDFlashConfig.from_pretrained(tmp_path, sliding_window=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, None),
        ({"hyperdflash_version": "0.0.9"}, None),
        ({"hyperdflash_version": ""}, None),  # saved before versions were
        ({"hyperdflash_version": "0.1.7"}, None),
        ({"hyperdflash_version": "0.2.0"}, r"saved by hf_hyperdflash 0\.2\.0, and this is 0\.1\.0\. Install"),
        ({"hyperdflash_version": "10.0"}, r"saved by hf_hyperdflash 10\.0, and this is 0\.1\.0\. Install"),
        ({"markov_rank": 4, "hyperdflash_version": "0.2.0"}, "0.1.0, which ignores its markov_rank"),
        ({"markov_rank": 4}, "which ignores its markov_rank"),
    ],
)
def test_a_file_of_a_later_version_is_said_to_be_one(tmp_path, monkeypatch, caplog, change, message):
    monkeypatch.setattr("hf_hyperdflash.runtime.configuration_hyperdflash.__version__", "0.1.0")
    HyperDFlashConfig(auto_map={"AutoModel": "x.y"}, dtype="bfloat16").save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**fields, **change}))
    with caplog.at_level(logging.WARNING):
        HyperDFlashConfig.from_pretrained(tmp_path)
    if message is None:
        assert not caplog.text
    else:
        assert re.search(message, caplog.text)


def test_unknown_fields_are_refused_and_those_of_a_file_told(caplog):
    with pytest.raises(
        ValueError, match=r"`blok_size` is no field of `HyperDFlashConfig`: did you mean `block_size`\?"
    ):
        HyperDFlashConfig(blok_size=7)
    known = HyperDFlashConfig().to_dict()
    HyperDFlashConfig(**known)
    with caplog.at_level("WARNING"):
        HyperDFlashConfig.from_dict({**known, "use_cache": False})  # transformers' Trainer writes it
        assert not caplog.text
        assert not hasattr(HyperDFlashConfig.from_dict({**known, "of_tomorrow": 1}), "of_tomorrow")
    assert "ignores its of_tomorrow" in caplog.text
