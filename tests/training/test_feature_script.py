"""`hf-hyperdflash features`: what it writes is what `train` with the same flags reads."""

import json
import re
from dataclasses import fields

import pytest
import torch

from hf_hyperdflash import HyperDFlashTrainer
from hf_hyperdflash.training.feature_script import main
from hf_hyperdflash.training.features.parts import read_lists
from hf_hyperdflash.training.features.store import FeatureCache
from hf_hyperdflash.training.features.streaming import StreamedFeatures
from hf_hyperdflash.training.flags import FeatureFlags, features_help
from hf_hyperdflash.training.script import main as train

from ..conftest import MODELS
from ..helpers.refusals import Refusal
from .test_script import shown_help

TARGET = str(MODELS / "tiny-deepseek-v4")
ROWS = {"eval_rows": 3, "layers": 1}


@pytest.fixture
def data(tmp_path):
    said = [("user", "what is it?"), ("assistant", "it is this, my friend.")]
    chats = [{"messages": [{"role": role, "content": f"{i}: {text}"} for role, text in said]} for i in range(20)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, chats)))
    return tmp_path / "rows.jsonl"


def flags(data, **others):
    given = {"target": TARGET, "dataset": data, **others}
    return [part for name, value in given.items() for part in (f"--{name}", str(value))]


def test_the_help_has_its_flags_and_loads_nothing_heavy():
    shown = shown_help("features")
    for flag in fields(FeatureFlags):
        (at,) = (
            i for i, line in enumerate(shown) if line.startswith(f"  --{flag.name} ") or line == f"  --{flag.name}"
        )
        assert shown[at + 1].strip() and flag.metadata["help"].startswith(shown[at + 1].strip()[:20])
    assert "--feature_gigabytes" in features_help("features")


def test_features_are_written_in_shares_and_trained_on(data, tmp_path, capsys, monkeypatch):
    folder = tmp_path / "features"
    main(flags(data, output=folder, part="1/2", **ROWS))
    said = capsys.readouterr()
    assert re.search(r"20 rows, [\d,]+ tokens, [\d.]+ kB as bfloat16", said.out) and "tokens a second" in said.out
    (listed,) = read_lists(folder)
    share = len(list(folder.glob("*.safetensors")))
    assert len(listed.parts) == 4 and share == 2 and "2 of 4 parts are in" in said.out and "2 are not" in said.out
    assert listed.parts[1].name in said.out
    main(flags(data, output=folder, part="2/2", check=4, **ROWS))
    said = capsys.readouterr().out
    assert "4 of 4 parts" in said and "4 rows computed again" in said
    main(flags(data, output=folder, **ROWS))
    assert "tokens a second" not in capsys.readouterr().out  # nothing was left
    opened = []
    prepare = HyperDFlashTrainer._write_features

    def kept(self, rows, name):
        opened.append(prepare(self, rows, name))
        return opened[-1]

    monkeypatch.setattr(HyperDFlashTrainer, "_write_features", kept)
    of_training = {
        **ROWS, "output_dir": tmp_path / "out", "feature_source": "cached", "feature_cache_dir": folder,
        "max_steps": 2, "eval_prompts": 0, "num_anchors": 4, "report_to": "none", "use_cpu": True,
    }  # fmt: skip
    train(flags(data, **of_training))
    rows, held_out = opened
    assert all(isinstance(each, StreamedFeatures) for each in opened) and (len(rows), len(held_out)) == (17, 3)
    assert [place[1] for place in held_out.places] == [0, 1, 2]  # which an evaluation needs first
    cache = FeatureCache(folder, rows.identity["target"])
    for i, (_, row, _) in enumerate(rows.places):
        assert all(torch.equal(rows[i][name], cache[row][name]) for name in cache[row])


REFUSED = {
    "no share": ({"part": "9/8"}, ("--part", "'9/8'", "3/8")),
    "no number of a share": ({"part": "half"}, ("--part", "'half'", "3/8")),
    "a stream": ({"streaming": True, "max_steps": 3, "eval_dataset": "x.jsonl"}, ("--streaming", "features")),
    "another flag": ({"outptu": "x"}, ("`features` knows no '--outptu'", "--output")),
    "another format": ({"feature_dtype": "int8"}, ("feature_dtype", "int8", "float8")),
    "no limit": ({"feature_gigabytes": 0}, ("feature_gigabytes", "0", "more than 0")),
}


@pytest.mark.parametrize(("given", "words"), REFUSED.values(), ids=REFUSED.keys())
def test_what_is_wrong_is_told_before_anything_is_read(data, tmp_path, given, words):
    Refusal(lambda: main(flags(data, output=tmp_path / "out", **ROWS, **given)), words).check()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("left_out", ["--target", "--output"])
def test_what_is_missing_is_told_with_this_commands_help(data, tmp_path, left_out):
    given = flags(data, output=tmp_path / "out", **ROWS)
    at = given.index(left_out)
    Refusal(lambda: main(given[:at] + given[at + 2 :]), (left_out, "features")).check()
