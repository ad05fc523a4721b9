"""Predictors of acceptance are compared on rounds that they have not learned from."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_hyperdflash import HyperDFlashDrafter, load_drafter
from hf_hyperdflash.decoding.stats import keep_trees
from hf_hyperdflash.training.data.encoding import encode_prompts

from ..helpers.scripts import DRAFTER, EXAMPLES, run


def test_survival_is_predicted_on_rounds_held_out(tmp_path):
    suites = tmp_path / "suites"
    suites.mkdir()
    asked = [
        "What is 3 plus 4?",
        "Write a Python function that adds two numbers.",
        "List three fruits.",
        "What is 5 + 6?",
    ]
    (suites / "gsm8k.jsonl").write_text("".join(json.dumps({"turns": [text]}) + "\n" for text in asked))
    names = [
        "--target",
        EXAMPLES / "models" / "tiny-deepseek-v4",
        "--drafter",
        DRAFTER,
        "--suites",
        suites,
        "--output",
        tmp_path / "out",
    ]
    printed = run("experiments/compare_survival.py", *names, "--limit", 4, "--max-new-tokens", 40)
    assert printed.strip() == (tmp_path / "out" / "report.md").read_text().strip()
    figures = json.loads((tmp_path / "out" / "figures.json").read_text())
    assert all(learned > 5 and judged > 5 for learned, judged in figures["rounds"].values())
    target = AutoModelForCausalLM.from_pretrained(names[1], dtype=torch.float32).eval()
    tokenizer, drafter = AutoTokenizer.from_pretrained(names[1]), load_drafter(DRAFTER, target=target)
    drafter.bind(target)
    for temperature, options in (("0", {"do_sample": False}), ("1", {"do_sample": True, "top_k": 0, "top_p": 1.0})):
        learned, judged = ([], [])
        for number, text in enumerate(asked):
            ids = encode_prompts(tokenizer, [{"messages": [{"role": "user", "content": text}]}])[0]
            torch.manual_seed(0)
            with keep_trees():
                target.generate(ids, assistant_model=drafter, num_assistant_tokens=8, max_new_tokens=40, **options)
            (learned, judged)[number % 2].extend(
                (len(tree.drafts), len(tree.accepted)) for tree in drafter.last_stats.trees if len(tree.drafts)
            )
        assert figures["rounds"][temperature] == [len(learned), len(judged)]
        assert len(figures["figures"][temperature]) == 9
        check_constant(figures["figures"][temperature]["constant"], learned, judged)


def test_a_drafter_may_know_fewer_tokens_than_its_target(tmp_path):
    target = AutoModelForCausalLM.from_pretrained(EXAMPLES / "models" / "tiny-deepseek-v4")
    torch.manual_seed(0)
    drafter = HyperDFlashDrafter.from_target(target, num_draft_tokens=3, draft_vocab_size=50, sequential_head="state")
    drafter.draft_ids.copy_(torch.arange(100, 150))
    drafter.save_pretrained(tmp_path / "drafter")
    (tmp_path / "gsm8k.jsonl").write_text('{"turns": ["What is 3 plus 4?"]}\n' * 2)
    names = ["--target", EXAMPLES / "models" / "tiny-deepseek-v4", "--drafter", tmp_path / "drafter"]
    options = ["--suites", tmp_path, "--output", tmp_path / "out", "--limit", 2, "--max-new-tokens", 12]
    assert "| constant |" in run("experiments/compare_survival.py", *names, *options)


def check_constant(told: dict[str, float], learned: list[tuple[int, int]], judged: list[tuple[int, int]]) -> None:
    """The predictor that says the same of every draft, from rounds of so many drafts and accepted ones."""
    p = sum(accepted for _, accepted in learned) / sum(min(accepted + 1, drafts) for drafts, accepted in learned)
    outcomes = [k < accepted for drafts, accepted in judged for k in range(min(accepted + 1, drafts))]
    off = [sum(p**k for k in range(1, drafts + 1)) - accepted for drafts, accepted in judged]
    expected = {
        "calibration error": abs(p - sum(outcomes) / len(outcomes)),
        "Brier score": sum((p - outcome) ** 2 for outcome in outcomes) / len(outcomes),
        "AUC": 0.5,
        "error of the expected length": sum(map(abs, off)) / len(off),
        "bias of the expected length": sum(off) / len(off),
    }
    assert {name: told[name] for name in expected} == pytest.approx(expected)
