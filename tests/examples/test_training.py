"""The training scripts, end to end at toy size: target, its own answers, drafter, sweeps, and the pair at work."""

import csv
import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_hyperdflash import DeepseekV4MTPDrafter, HyperDFlashDrafter, measure_acceptance
from hf_hyperdflash.cli.app import app
from hf_hyperdflash.training.data.encoding import encode_prompts

from ..helpers.scripts import run
from ..helpers.served_drafters import qwen3


def test_from_text_to_a_working_pair(tmp_path):
    data, target_dir, answers = tmp_path / "data.jsonl", tmp_path / "target", tmp_path / "answers.jsonl"
    rows = [{"question": f"What is {i} plus {i}?", "answer": f"{i}+{i}={2 * i}\n#### {2 * i}"} for i in range(60)]
    data.write_text("\n".join(map(json.dumps, rows)))
    toy = ["--vocab-size", 300, "--hidden-size", 64, "--layers", 3, "--batch-size", 2, "--seq-length", 48]
    toy += ["--no-compile", "--save-every", 1]
    run("tools/train_tiny_target.py", "--data", data, "--output", target_dir, "--steps", 8, *toy)
    before = load_file(target_dir / "model.safetensors")
    assert "Going on from step 8" in run(
        "tools/train_tiny_target.py", "--data", data, "--output", target_dir, "--steps", 8, *toy
    )
    after = load_file(target_dir / "model.safetensors")
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)

    arguments = ["--target", target_dir, "--data", data, "--output", answers, "--max-new-tokens", 12]
    for limit in (20, 24):  # the second goes on: the first 20 are there
        app(["answers", *map(str, arguments), "--limit", str(limit)], standalone_mode=False)
    rewritten = [json.loads(line)["messages"] for line in answers.read_text().splitlines()]
    assert len(rewritten) == len({messages[0]["content"] for messages in rewritten}) == 24

    first, drafter_dir, held_out = tmp_path / "stage-1", tmp_path / "drafter", tmp_path / "held_out.jsonl"
    held_out.write_text("\n".join(answers.read_text().splitlines()[:3]))
    training = ["--target", target_dir, "--dataset", answers, "--eval_dataset", held_out, "--eval_prompts", 2]
    training += ["--report_to", "none", "--save_dtype", "float32"]
    training += ["--eval_max_new_tokens", 8, "--per_device_train_batch_size", 8, "--max_length", 64, "--use_cpu"]
    run("examples/train_drafter.py", *training, "--output_dir", first, "--layers", 1, "--num_train_epochs", 2)
    second = ["--stage", 2, "--drafter", first, "--num_train_epochs", 1, "--eval_strategy", "epoch"]
    run("examples/train_drafter.py", *training, "--output_dir", drafter_dir, *second)
    facts, before = (json.loads((folder / "training.json").read_text()) for folder in (drafter_dir, first))
    assert (before["settings"]["learning_rate"], facts["settings"]["learning_rate"]) == (8e-4, 1e-4)
    assert facts["metrics"]["eval_loss"] < before["metrics"]["eval_loss"] + 0.05
    for name in (
        "eval_tau",
        "eval_teacher_forced_tau",
    ):  # at the end of the only epoch and of the run: the same weights
        assert [line[name] for line in facts["history"]] == [facts["metrics"][name]] * 2
    assert str(tmp_path) not in (drafter_dir / "config.json").read_text() + json.dumps(facts)

    def swept(grid: str, target: Path, work_dir: str, *arguments: object, flags: str = "") -> list[list[str]]:
        """The cells of the table that a sweep prints."""
        told = ["--target", target, "--answers", answers, "--eval-answers", held_out, "--max-length", 64]
        shared = f"--max_steps 2 --num_anchors 4 --use_cpu {flags}".split()
        printed = run(
            "experiments/sweep.py", grid, *told, "--work-dir", tmp_path / work_dir, *arguments, "--", *shared
        )
        lines = printed[printed.index("| drafter |") :].splitlines()[2:]
        return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("| ")]

    blind = "--layers 1 --reducer hc_gate --target_layer_ids -1 --recipe ours"
    cells = {
        "blind": blind, "headed": f"{blind} --sequential_head state --head_rank 8",
        "fc": "--layers 1 --reducer fc --target_layer_ids 1 -1 --feature_dtype float8 --eval_prompts 1",
    }  # fmt: skip
    (tmp_path / "heads.py").write_text(f"CELLS, LIKE = {cells}, 'blind'")
    rows = swept(tmp_path / "heads.py", target_dir, "heads", "--eval-sampled", held_out)
    sizes = [int(row[1].replace(",", "")) for row in rows]
    assert [row[0] for row in rows] == list(cells) and len(set(sizes)) == 3
    assert max(sizes) < 1.05 * min(sizes)  # the head is taken from the MLPs
    assert [row[2] for row in rows] == [""] * 3 and float(rows[2][5]) >= 1 and rows[1][5] == ""
    trained = json.loads((tmp_path / "heads" / "headed-seed0" / "training.json").read_text())["metrics"]
    assert rows[1][3] == f"{trained['eval_teacher_forced_tau']:.2f}"

    cells = {"weight 9": "--drafter {drafter} --recipe ours --blind_weight 9"}
    configs = {"all": {"head_candidates": 0}, "1": {"head_candidates": 1}}
    (tmp_path / "choosing.py").write_text(
        f"CELLS, CONFIGS, RATES, START = {cells}, {configs}, [0.1, 0.2], {{'head_candidates': 9}}"
    )
    rows = swept(tmp_path / "choosing.py", target_dir, "choosing", "--drafter", tmp_path / "heads" / "headed-seed0")
    assert [row[0] for row in rows] == ["weight 9, all", "weight 9, 1"] and rows[0][2:] != rows[1][2:]
    with (tmp_path / "choosing" / "cells.csv").open() as file:
        measured = [row for row in csv.DictReader(file) if row["configuration"] == "all"]
    best = max(measured, key=lambda row: float(row["tau"]))
    told = [f"{float(best['learning_rate']):g}", f"{float(best['tau']):.2f}", f"{float(best['expected_tau']):.2f}"]
    assert len(measured) == 2 and rows[0][2:5] == told
    folders = [tmp_path / "choosing" / f"weight-9-{rate}-seed0" for rate in (0.1, 0.2)]
    assert json.loads((folders[0] / "config.json").read_text())["head_candidates"] == 9
    one, other = (load_file(folder / "model.safetensors") for folder in folders)
    assert any(not torch.equal(one[name], other[name]) for name in one)

    dense = tmp_path / "dense"
    qwen3(vocab_size=300, num_hidden_layers=8).save_pretrained(dense)
    AutoTokenizer.from_pretrained(target_dir).save_pretrained(dense)
    suites = tmp_path / "suites"
    suites.mkdir()
    (suites / "sums.jsonl").write_text(json.dumps({"turns": ["What is 3 plus 4?"]}) + "\n")
    names = ["SpecBlock", "EAGLE-3", "without shift"]
    rows = swept(
        "specblock", dense, "specblock", "--cells", *names, "--parameters", 200_000, "--suites", suites,
        "--max-new-tokens", 8, flags="--target_layer_ids 1 3 4",
    )  # fmt: skip
    sizes = [int(row[1].replace(",", "")) for row in rows]
    assert [row[0] for row in rows] == names and max(sizes) < 1.05 * min(sizes)
    report = (tmp_path / "specblock" / "results" / "report.md").read_text()
    assert all(f"{name} ({drafts}, 16 nodes)" in report for name, drafts in zip(names, (8, 7, 8)))

    tuned = ["--steps", 2, "--save-steps", 1, "--steps-ahead", 2, "--max-length", 64, "--output", tmp_path / "mtp"]
    run("experiments/train_mtp.py", "--target", target_dir, "--dataset", answers, *tuned)
    assert not (tmp_path / "mtp" / "checkpoint.pt").exists()  # only a killed run leaves one
    mtp = DeepseekV4MTPDrafter.from_pretrained(tmp_path / "mtp", dtype=torch.float32)
    native = DeepseekV4MTPDrafter.from_target(target_dir, dtype=torch.float32)
    assert mtp.e_proj.weight.shape == native.e_proj.weight.shape and not torch.equal(
        mtp.e_proj.weight, native.e_proj.weight
    )

    target = AutoModelForCausalLM.from_pretrained(target_dir, dtype=torch.float32).eval()
    drafter = HyperDFlashDrafter.from_pretrained(drafter_dir, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(target_dir)
    prompts = encode_prompts(tokenizer, [{"messages": messages} for messages in rewritten[:2]])
    assert measure_acceptance(target, drafter, prompts, max_new_tokens=8)["tau"] == facts["metrics"]["eval_tau"]
    ids = tokenizer("What is 3 plus 4?", return_tensors="pt").input_ids
    expected = target.generate(ids, do_sample=False, max_new_tokens=20)
    drafter.bind(target)
    assert torch.equal(target.generate(ids, do_sample=False, max_new_tokens=20, assistant_model=drafter), expected)
