"""Drafters that are trained in turns have equal time, see the same rows, and go on where they were stopped."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from hf_hyperdflash import load_drafter

from ..helpers.scripts import run
from ..helpers.tokenizers import characters
from ..helpers.training import rows


@pytest.fixture
def folder(tmp_path):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path / "target")
    characters().save_pretrained(tmp_path / "target")
    rows(24).to_json(tmp_path / "answers.jsonl")
    cells = {
        "state head": "--layers 1 --sequential_head state --head_rank 8 --num_draft_tokens 3",
        "EAGLE-3": "--drafter_type eagle3 --recipe eagle3 --max_blocks 2 --draft_vocab_size 32",
    }
    methods = {"state head": ["3", "3, 4 nodes"]}
    (tmp_path / "grid.py").write_text(f"CELLS, METHODS = {cells}, {methods}")
    (tmp_path / "suites").mkdir()
    (tmp_path / "suites" / "talk.jsonl").write_text(json.dumps({"turns": ["How are you?"]}))
    return tmp_path


def train(folder, *arguments):
    shared = ["--target", folder / "target", "--answers", folder / "answers.jsonl", "--work-dir", folder / "work"]
    shared += ["--dtype", "float32", "--turn", 0.001, "--curve-rows", 2]
    flags = "--eval_rows 6 --per_device_train_batch_size 4 --num_anchors 4 --max_length 64".split()
    run("experiments/train_in_turns.py", folder / "grid.py", *shared, *arguments, "--", *flags)
    return {path.parent.name: int(path.stem[5:]) for path in (folder / "work").glob("*/mean-*.safetensors")}


def test_turns_end_go_on_and_are_measured(folder):
    first = train(folder, "--seconds", 0.001)  # a turn of one step each
    assert first == {"state-head": 1, "EAGLE-3": 1}
    work = folder / "work"
    assert not list((work / "features").glob("[0-9]*"))  # both have had what the target computed
    checkpoint = work / "state-head" / "checkpoint-1"
    mean, weights = load_file(work / "state-head" / "mean-1.safetensors"), load_file(checkpoint / "model.safetensors")
    assert all(torch.equal(mean[name], weights[name]) for name in weights)

    second = train(folder, "--turn", 0.5, "--seconds", 0.5)
    assert all(second[name] > 1 for name in second)
    after = load_file(work / "state-head" / f"mean-{second['state-head']}.safetensors")
    assert any(not torch.equal(after[name], mean[name]) for name in weights)

    train(folder, "--measure", "--suites", folder / "suites", "--max-new-tokens", 8)
    lines = (work / "benchmark" / "summary.csv").read_text().splitlines()
    assert len(lines) == 1 + 2 * 3 and sum("state head (3, 4 nodes)" in line for line in lines) == 2
    results = [line for line in json.loads((work / "results.json").read_text())["curves"] if line["rows"] == 6]
    assert [(line["drafter"], line["steps"], line["rows"]) for line in results] == [
        ("state head", second["state-head"], 6), ("EAGLE-3", second["EAGLE-3"], 6)
    ]  # fmt: skip
    assert all(line["teacher_forced_tau"] >= 1 for line in results)
    report = (work / "report.md").read_text()
    assert all(f"| {line['drafter']} | {line['parameters']:,} | {line['steps']} |" in report for line in results)
    kept = load_drafter(str(work / "state-head" / "drafter"), dtype=torch.float32).state_dict()
    assert all(torch.equal(kept[name], after[name]) for name in weights)
