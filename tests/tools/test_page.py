"""The snippets of docs/tools.md that need lm-eval or TRL, as they are there."""

from __future__ import annotations

import functools

import pytest
from datasets import Dataset
from transformers import AutoTokenizer

from hf_hyperdflash import load_drafter, load_target

from ..conftest import MODELS


def snippet(begins: str) -> str:
    page = (MODELS.parent.parent / "docs" / "tools.md").read_text()
    (found,) = [code.partition("```")[0] for code in page.split("```python\n")[1:] if code.startswith(begins)]
    return found


@pytest.fixture
def given() -> dict:
    name = str(MODELS / "tiny-qwen3")
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
        trl, "GRPOConfig", functools.partial(trl.GRPOConfig, use_cpu=True, bf16=False, report_to="none")
    )
    monkeypatch.chdir(tmp_path)
    prompts = Dataset.from_dict({"prompt": [[{"role": "user", "content": "What is 2 + 3?"}]]})
    reward = lambda completions, **_: [-float(len(each[0]["content"])) for each in completions]  # noqa: E731
    exec(snippet("from trl"), {**given, "prompts": prompts, "reward": reward})
    stats = given["drafter"].last_stats
    assert len(stats.rows) == 4 and stats.draft_positions == 3
