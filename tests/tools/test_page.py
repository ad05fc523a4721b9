"""The snippets and commands of docs/serving.md that need lm-eval or TRL, as they are there; `test_serve.py` has the
server's."""

from __future__ import annotations

import functools
import subprocess

import pytest
from datasets import Dataset
from transformers import AutoTokenizer

from hf_hyperdflash import load_drafter, load_target

from ..conftest import MODELS
from .page import command


def snippet(begins: str) -> str:
    page = (MODELS.parent.parent / "docs" / "serving.md").read_text()
    (found,) = [code.partition("```")[0] for code in page.split("```python\n")[1:] if code.startswith(begins)]
    return found


@pytest.fixture
def given() -> dict:
    name = str(MODELS / "tiny-deepseek-v4")
    target, tokenizer = load_target(name, dtype="float32"), AutoTokenizer.from_pretrained(name)
    return {"target": target, "tokenizer": tokenizer, "drafter": load_drafter(f"{name}-hyperdflash", target=target)}


def test_lm_eval(given, tmp_path):
    pytest.importorskip("lm_eval", reason="lm-eval is not installed: .ci/tools makes an environment that has it")
    data = tmp_path / "data.jsonl"
    data.write_text('{"asked": "What is 2 + 3?", "told": "5"}\n{"asked": "What is 4 + 3?", "told": "7"}\n')
    task = {
        "task": "sums",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "{{asked}}",
        "doc_to_target": "{{told}}",
        "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 12},
        "metric_list": [{"metric": "exact_match"}],
    }
    exec(snippet("from lm_eval"), names := {**given, "tasks": [task]})
    assert names["scores"]["results"]["sums"]["exact_match,none"] in (0.0, 0.5, 1.0)
    assert given["drafter"].last_stats.tau > 1


def test_trl(given, tmp_path, monkeypatch):
    trl = pytest.importorskip("trl", reason="TRL is not installed: .ci/tools makes an environment that has it")
    monkeypatch.setattr(
        trl,
        "GRPOConfig",  # TRL's loss of a mixture's router reads a field that DeepSeek-V4 does not have
        functools.partial(trl.GRPOConfig, use_cpu=True, bf16=False, report_to="none", router_aux_loss_coef=0.0),
    )
    monkeypatch.chdir(tmp_path)
    prompts = Dataset.from_dict({"prompt": [[{"role": "user", "content": "What is 2 + 3?"}]]})
    reward = lambda completions, **_: [-float(len(each[0]["content"])) for each in completions]  # noqa: E731
    exec(snippet("from trl"), {**given, "prompts": prompts, "reward": reward})
    stats = given["drafter"].last_stats
    assert len(stats.rows) == 4 and stats.draft_positions == 3


# What makes them small: of the page's options none is among it.
SMALL = [
    ("lm_eval", "python examples/evaluate_with_lm_eval.py", "--limit 2 --runs 1 --max-new-tokens 8", "evaluated"),
    ("trl", "python examples/grpo_with_drafter.py", "--steps 2 --rollouts 2 --max-new-tokens 8", "grpo"),
]


@pytest.mark.parametrize(("package", "begins", "small", "output"), SMALL)
def test_commands(tmp_path, package, begins, small, output):
    pytest.importorskip(package, reason=".ci/tools makes an environment that has it")
    (tmp_path / "gsm8k.jsonl").write_text(
        "".join(f'{{"question": "What is {i} plus {i}?", "answer": "{2 * i}\\n#### {2 * i}"}}\n' for i in range(3))
    )
    ran = subprocess.run([*command(begins), *small.split()], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert "with the drafter" in (tmp_path / output / "report.md").read_text()
