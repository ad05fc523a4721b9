"""TRL's GRPO on a target with a default drafter. `.ci/tools` makes an environment with TRL."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from datasets import Dataset
from transformers import AutoTokenizer

from hf_hyperdflash import load_drafter, load_target
from hf_hyperdflash.targets.registry import is_bound

from ..conftest import MODELS

trl = pytest.importorskip("trl", reason="TRL is not installed: .ci/tools makes an environment that has it")

PROMPTS = [[{"role": "user", "content": f"What is {i} plus {i + 2}?"}] for i in range(3)]


def shorter(completions, **_):
    return [-float(len(completion[0]["content"])) for completion in completions]


def config(folder, **fields):
    given = dict(
        max_steps=2, per_device_train_batch_size=3, num_generations=3, max_completion_length=12, bf16=False,
        use_cpu=True, report_to="none", save_strategy="no", disable_tqdm=True, learning_rate=1e-3,
        router_aux_loss_coef=0.0,
    )  # fmt: skip
    return trl.GRPOConfig(str(folder), **{**given, **fields})


@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize("is_dense", [True, False])
def test_rollouts_are_drafted_while_the_target_changes(tmp_path, dense_pair, is_dense, learns):
    name = str(dense_pair[0] if is_dense else MODELS / "tiny-deepseek-v4")
    target, tokenizer = load_target(name, dtype="float32"), AutoTokenizer.from_pretrained(name)
    drafter = load_drafter(f"{name}-hyperdflash", target=target)
    drafter.bind(target, as_default=True)
    remembered, remember = [], drafter.remember
    drafter.remember = lambda stats: (remembered.append(stats), remember(stats))
    before = {key: value.clone() for key, value in target.state_dict().items()}
    own = {key: value.clone() for key, value in drafter.state_dict().items()}
    learning = drafter.adapt(target) if learns else None
    trainer = trl.GRPOTrainer(
        target, shorter, config(tmp_path), Dataset.from_dict({"prompt": PROMPTS}), processing_class=tokenizer
    )
    trainer.train()
    batches = [stats for stats in remembered if stats is not None and len(stats.rows) > 1]
    assert [len(stats.rows) for stats in batches] == [3, 3]
    assert all(stats.rounds and stats.nodes for stats in batches)
    assert any(not torch.equal(value, before[key]) for key, value in target.state_dict().items())
    if learning is None:
        assert all(
            torch.equal(value, own[key]) for key, value in drafter.state_dict().items()
        )  # TRL trains the target
    else:
        assert len(learning.log) >= 2
        learning.stop()
    assert is_bound(trainer.model) and trainer.model is target
    target.eval()
    for chat in PROMPTS:
        inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        texts = [
            target.generate(**inputs, assistant_model=one, do_sample=False, max_new_tokens=16)
            for one in (None, drafter)
        ]
        assert torch.equal(*texts)
    assert drafter.last_stats.rounds


def test_what_it_asks_for_reaches_the_drafter(tmp_path, dense_pair):
    name = str(dense_pair[0])
    target, tokenizer = load_target(name, dtype="float32"), AutoTokenizer.from_pretrained(name)
    drafter = load_drafter(f"{name}-hyperdflash", target=target)
    drafter.bind(target, as_default=True)
    asked = config(tmp_path, generation_kwargs={"num_assistant_tokens": 2}, max_steps=1)
    trl.GRPOTrainer(target, shorter, asked, Dataset.from_dict({"prompt": PROMPTS}), processing_class=tokenizer).train()
    assert drafter.last_stats.draft_positions == 2


def test_lora_rollouts_are_drafted(tmp_path, dense_pair):
    """PEFT's wrapper hands `generate` on to the target that is bound."""
    from peft import LoraConfig

    name = str(dense_pair[0])
    target, tokenizer = load_target(name, dtype="float32"), AutoTokenizer.from_pretrained(name)
    drafter = load_drafter(f"{name}-hyperdflash", target=target)
    drafter.bind(target, as_default=True)
    trainer = trl.GRPOTrainer(
        target, shorter, config(tmp_path), Dataset.from_dict({"prompt": PROMPTS}), processing_class=tokenizer,
        peft_config=LoraConfig(target_modules=["q_proj", "v_proj"]),
    )  # fmt: skip
    trainer.train()
    assert trainer.model is not target and len(drafter.last_stats.rows) == 3 and drafter.last_stats.rounds


def test_the_example(tmp_path, dense_pair):
    name = dense_pair[0]
    data = tmp_path / "questions.jsonl"
    data.write_text("".join(f'{{"question": "What is {i} plus {i}?"}}\n' for i in range(3)))
    arguments = [
        "--target", name, "--drafter", f"{name}-hyperdflash", "--data", data, "--rollouts", 2, 3, "--steps", 3,
        "--max-new-tokens", 10, "--drafts", 3, "--adapt", "--output", tmp_path / "out",
    ]  # fmt: skip
    command = [sys.executable, MODELS.parent / "grpo_with_drafter.py", *map(str, arguments)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    runs = json.loads((tmp_path / "out" / "results.json").read_text())["runs"]
    ways = ["alone", "drafted", "adapted"]
    assert [(run["rollouts"], run["way"]) for run in runs] == [(size, way) for size in (2, 3) for way in ways]
    for run in runs:
        assert len(run["steps"]) == 3 and all(run["same"]) and run["same"]
        for step in run["steps"]:
            assert 0 < step["rollouts"] < step["seconds"] and 0 < step["tokens"] <= 10 * run["rollouts"]
            assert (step["tau"] is None) == (run["way"] == "alone")
    report = (tmp_path / "out" / "report.md").read_text()
    assert report.count("| with the drafter, learning |") == 2
