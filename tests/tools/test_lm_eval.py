"""lm-eval's `hf` model on a target with a default drafter. `.ci/tools` makes an environment with lm-eval."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from hf_hyperdflash import load_drafter, load_target

from ..conftest import MODELS

pytest.importorskip("lm_eval", reason="lm-eval is not installed: .ci/tools makes an environment that has it")

EXAMPLE = MODELS.parent / "evaluate_with_lm_eval.py"
NAME = str(MODELS / "tiny-deepseek-v4")


@pytest.fixture
def questions(tmp_path) -> Path:
    path = tmp_path / "questions.jsonl"
    lines = [
        {
            "question": f"Tom has {i} marbles and gets {i + 3} more. How many?",
            "answer": f"{i} + {i + 3}\n#### {2 * i + 3}",
        }
        for i in range(5)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def run(*arguments: object) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, EXAMPLE, *map(str, arguments)], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("sizes", [(1,), (3,)])
def test_scores_and_answers_are_the_same(questions, tmp_path, sizes):
    ran = run(
        "--target", NAME, "--drafter", f"{NAME}-hyperdflash", "--data", questions, "--limit", 4, "--runs", 2,
        "--max-new-tokens", 24, "--batch-sizes", *sizes, "--output", tmp_path / "out",
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-3000:]
    results = json.loads((tmp_path / "out" / "results.json").read_text())["results"]
    assert [of["batch"] for of in results] == list(sizes)
    for of in results:
        assert of["identical"] == of["questions"] == 4 and of["alone"]["scores"] == of["drafted"]["scores"]
        assert of["drafted"]["tau"] > 1.5 and of["alone"]["tau"] is None
        assert of["alone"]["scores"]["chrf"][0] > 1
        assert len(of["alone"]["seconds"]) == len(of["drafted"]["seconds"]) == 2
    report = (tmp_path / "out" / "report.md").read_text()
    assert report in ran.stdout and f"| {sizes[0]} | with the drafter |" in report and "4 of 4" in report


def test_data_that_cannot_be_scored_is_refused_by_line(tmp_path):
    path = tmp_path / "wrong.jsonl"
    path.write_text('{"question": "1 + 1?", "answer": "#### 2"}\n{"question": "1 + 2?", "answer": "3"}\n')
    ran = run("--target", NAME, "--drafter", f"{NAME}-hyperdflash", "--data", path)
    assert ran.returncode == 1 and ran.stderr.splitlines()[-1].startswith(f"{path}, line 2: ['answer', 'question'], ")


def test_an_answer_counts_by_its_last_box():
    scores = runpy.run_path(str(EXAMPLE))["scores_of_one"]
    question = {"worked": "so it is", "boxed": "1,200"}
    for answer, is_right in (
        ("\\boxed{3} no, \\boxed{1200}", 1),
        ("\\boxed{1,200} no, \\boxed{3}", 0),
        ("1200", 0),
        ("\\boxed{1,200}", 1),
    ):
        assert scores(question, [answer]) == {"exact_match": is_right, "chrf": ("so it is", answer)}


def test_lm_evals_own_model_takes_one_prompt_and_several():
    """As it is; its criterion for stop strings looks up each row of the batch by number."""
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    target, tokenizer = load_target(NAME, dtype="float32"), AutoTokenizer.from_pretrained(NAME)
    drafter = load_drafter(f"{NAME}-hyperdflash", target=target)
    asked = ["What is 2 + 3?", "Name a prime number.", "Write a function that adds."]
    chats = [[{"role": "user", "content": text}] for text in asked]
    texts = [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]
    options = {"until": ["."], "max_gen_toks": 24}
    requests = [Instance("generate_until", {}, (text, options), i) for i, text in enumerate(texts)]
    expected = HFLM(pretrained=target, tokenizer=tokenizer, batch_size=1).generate_until(requests)
    drafter.bind(target, as_default=True)
    for size in (1, 3):
        assert HFLM(pretrained=target, tokenizer=tokenizer, batch_size=size).generate_until(requests) == expected
        assert drafter.last_stats.rounds and all(expected)
