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
        ({"layer_types": ["full_attention"]}, r"`layer_types` is \['full_attention'\], expected None or 5 of"),
        ({"layer_types": ["wide_attention"] * 5}, "one per layer"),
        ({"layer_types": ["sliding_attention"] * 5}, "`sliding_window` is None, but `layer_types` has sliding"),
        ({"causal_layers": "full"}, r"`causal_layers` is 'full', expected one of \('none', 'sliding', 'all'\)"),
        ({"window_from": "block"}, r"`window_from` is 'block', expected one of \('anchor', 'slot'\)"),
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
        (
            {"sequential_head": "makrov"},
            r"`sequential_head` is 'makrov', expected one of \('none', 'markov', .*'state'",
        ),
        ({"sequential_head": None}, "`sequential_head` is None, expected a string"),
        ({"head_rank": 0}, "`head_rank` is 0, expected at least 1 and at most 16384"),
        ({"head_rank": 2.0}, r"`head_rank` is 2\.0, expected an integer"),
        ({"head_candidates": -1}, "`head_candidates` is -1, expected at least 0 .* 0 for the whole vocabulary"),
        ({"head_candidates": 129281}, "`head_candidates` is 129281, expected at most the 129280 tokens"),
        (
            {"head_candidates": 31, "sequential_head": "state", "draft_vocab_size": 30},
            "`head_candidates` is 31, expected at most the 30 tokens that can be drafted",
        ),
        ({"conv_kernel_size": 1}, "`conv_kernel_size` is 1, expected 0, or 2 to the `block_size` of 7"),
        ({"conv_kernel_size": 8}, "`conv_kernel_size` is 8, expected 0, or 2 to the `block_size` of 7"),
        ({"conv_kernel_size": -2}, "`conv_kernel_size` is -2, expected at least 0 .* 0 for no convolution"),
        ({"conv_kernel_size": 2, "conv_group_size": 7}, "`conv_group_size` is 7, expected a divisor .* of 4096"),
        ({"conv_group_size": 0}, "`conv_group_size` is 0, expected at least 1"),
        ({"confidence_head": "yes"}, "`confidence_head` is 'yes', expected True or False"),
        ({"confidence_reads_token": 1}, "`confidence_reads_token` is 1, expected True or False"),
        ({"confidence_temperatures": 1.5}, "`confidence_temperatures` is 1.5, expected None or 6 positive numbers"),
        ({"confidence_temperatures": [1.0] * 5}, "expected None or 6 positive numbers, one per draft position"),
        ({"confidence_temperatures": [1.0] * 6, "sample_from_anchor": True}, "expected None or 7 positive numbers"),
        ({"confidence_temperatures": [1.0] * 5 + [0.0]}, "expected None or 6 positive numbers"),
        ({"confidence_temperatures": [1.0] * 5 + [float("nan")]}, "expected None or 6 positive numbers"),
        ({"confidence_temperatures": [1.0] * 5 + [float("inf")]}, "expected None or 6 positive numbers"),
        ({"confidence_temperatures": [1.0] * 5 + ["2"]}, "expected None or 6 positive numbers"),
        ({"confidence_temperatures": [True] * 6}, "expected None or 6 positive numbers"),
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
    assert again.target_layer_ids == [-1] and again.num_streams == 4  # the paper's source


@pytest.mark.parametrize(
    ("head", "drafted", "candidates"),
    [("none", 0, None), ("markov", 0, 0), ("gated_markov", 0, 0), ("recurrent", 0, 0), ("selector", 0, 16),
     ("state", 0, 1024), ("selector", 9, 9), ("state", 30, 0), ("state", 8193, 0)],
)  # fmt: skip
def test_heads_survive_a_round_trip_and_choose_among_as_many_as_they_should(tmp_path, head, drafted, candidates):
    config = HyperDFlashConfig(
        sequential_head=head, head_rank=8, draft_vocab_size=drafted, conv_kernel_size=3, conv_group_size=64,
        confidence_head=True, confidence_reads_token=False, confidence_temperatures=[0.5, 1, 1, 1, 1, 2.5],
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    again = HyperDFlashConfig.from_pretrained(tmp_path)
    assert again.to_dict() == config.to_dict() and again.head_candidates == candidates
    assert again.confidence_temperatures == [0.5, 1, 1, 1, 1, 2.5] and again.head_rank == 8
    assert HyperDFlashConfig(sequential_head=head, head_candidates=5).head_candidates == 5


def test_a_drafter_saved_before_there_were_heads_has_none(tmp_path, caplog):
    HyperDFlashConfig().save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    old = {
        name: value for name, value in fields.items() if not name.startswith(("sequential", "head_", "conv", "conf"))
    }
    assert "head_dim" in fields and len(fields) - len(old) >= 7
    (tmp_path / "config.json").write_text(json.dumps({**old, "head_dim": 128}))
    config = HyperDFlashConfig.from_pretrained(tmp_path)
    assert (config.sequential_head, config.confidence_head, config.conv_kernel_size) == ("none", False, 0)
    assert config.head_candidates is config.confidence_temperatures is None and not caplog.text


def test_the_anchors_slot_may_draft():
    assert HyperDFlashConfig(sample_from_anchor=True).max_draft_tokens == 7  # 7 inputs, 7 drafts
    assert HyperDFlashConfig().max_draft_tokens == 6


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
    monkeypatch.setattr("hf_hyperdflash.drafters.configuration.__version__", "0.1.0")
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
