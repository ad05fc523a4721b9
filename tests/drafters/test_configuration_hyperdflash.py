"""Configurations in files: what is written, read, completed, and said of other versions. What they refuse is in
tests/refusals."""

import json
import re

import pytest

from hf_hyperdflash import HyperDFlashConfig
from hf_hyperdflash.drafters.configuration import rope_of_text


@pytest.mark.parametrize(
    ("head", "drafted", "candidates"),
    [("none", 0, None), ("markov", 0, 0), ("gated_markov", 0, 0), ("recurrent", 0, 0), ("selector", 0, 16),
     ("state", 0, 1024), ("selector", 9, 9), ("state", 30, 0), ("state", 8193, 0)],
)  # fmt: skip
def test_a_round_trip_completes_what_is_left_out(tmp_path, head, drafted, candidates):
    config = HyperDFlashConfig(
        sequential_head=head, head_rank=8, draft_vocab_size=drafted, conv_kernel_size=3, conv_group_size=64,
        confidence_head=True, confidence_reads_token=False, confidence_temperatures=[0.5, 1, 1, 1, 1, 2.5],
        hidden_size=64, target_hidden_size=128, reducer="fc", sliding_window=32,
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    again = HyperDFlashConfig.from_pretrained(tmp_path)
    assert again.to_dict() == config.to_dict() and again.head_candidates == candidates
    assert again.confidence_temperatures == [0.5, 1, 1, 1, 1, 2.5] and again.head_rank == 8
    assert again.target_layer_ids == [-1] and again.num_streams == 4  # the paper's source
    assert HyperDFlashConfig.from_pretrained(tmp_path, sliding_window=9).sliding_window == 9
    # vLLM multiplies its draft buffer by a *draft* config's top-level `hc_mult` when the target is V4.
    assert "hc_mult" not in config.to_dict()


def test_how_much_is_drafted_and_chosen_among():
    assert HyperDFlashConfig(sequential_head="state", head_candidates=5).head_candidates == 5
    assert HyperDFlashConfig().max_draft_tokens == 6
    assert HyperDFlashConfig(sample_from_anchor=True).max_draft_tokens == 7  # 7 inputs, 7 drafts


def test_m_rope_is_plain_rope_for_text():
    given = {"rope_type": "mrope", "rope_theta": 1e4, "mrope_section": [2, 1, 1], "partial_rotary_factor": 1}
    before = dict(given)
    assert HyperDFlashConfig(rope_parameters=given).rope_parameters == {"rope_type": "default", "rope_theta": 1e4}
    assert given == before and rope_of_text(None) is None


VERSIONS = [
    ({}, None),
    ({"hyperdflash_version": ""}, None),  # saved before versions were
    ({"hyperdflash_version": "0.1.7"}, None),
    ({"use_cache": False}, None),  # transformers' Trainer writes it
    ({"hyperdflash_version": "0.2.0"}, r"0\.2\.0.*0\.1\.0"),
    ({"hyperdflash_version": "10.0"}, r"10\.0.*0\.1\.0"),
    ({"of_tomorrow": 4, "hyperdflash_version": "0.2.0"}, "of_tomorrow"),
    ({"of_tomorrow": 4}, "of_tomorrow"),
]


@pytest.mark.parametrize(("change", "told"), VERSIONS, ids=str)
def test_a_file_of_a_later_version_is_said_to_be_one(tmp_path, monkeypatch, caplog, change, told):
    monkeypatch.setattr("hf_hyperdflash.drafters.configuration.__version__", "0.1.0")
    HyperDFlashConfig(auto_map={"AutoModel": "x.y"}, dtype="bfloat16").save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**fields, **change}))
    with caplog.at_level("WARNING"):
        config = HyperDFlashConfig.from_pretrained(tmp_path)
    assert re.search(told, caplog.text) if told else not caplog.text
    assert not hasattr(config, "of_tomorrow")


def test_a_drafter_saved_before_there_were_heads_has_none(tmp_path, caplog):
    HyperDFlashConfig().save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    later = "sequential", "head_rank", "head_candidates", "conv", "conf"
    old = {name: value for name, value in fields.items() if not name.startswith(later)}
    assert len(fields) - len(old) >= 7
    (tmp_path / "config.json").write_text(json.dumps(old))
    config = HyperDFlashConfig.from_pretrained(tmp_path)
    assert (config.sequential_head, config.confidence_head, config.conv_kernel_size) == ("none", False, 0)
    assert config.head_candidates is config.confidence_temperatures is None and not caplog.text
