import json

import datasets
import pytest

from hf_hyperdflash.suites import SUITES, load_suite

BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."
# One row of each dataset on the Hub, with the columns that it has there, and the prompt that the paper's harness asks.
ROWS = {
    "gsm8k": ({"question": "1+1?", "answer": "#### 2"}, ["1+1?" + BOXED]),
    "math500": ({"problem": "Find $x$.", "solution": "..", "answer": "1", "level": 1}, ["Find $x$." + BOXED]),
    "aime25": ({"problem_idx": 1, "problem": "Find $n$.", "answer": 70}, ["Find $n$." + BOXED]),
    "humaneval": (
        {"task_id": "HumanEval/0", "prompt": "def f():\n", "test": "", "entry_point": "f"},
        [
            "Write a solution to the following problem and make sure that it passes the tests:\n"
            "```python\ndef f():\n\n```"
        ],
    ),
    "mbpp": ({"task_id": 2, "prompt": "Write a function.", "code": "", "test_list": []}, ["Write a function."]),
    "mt-bench": ({"prompt": ["First?", "Then?"], "category": "writing"}, ["First?", "Then?"]),
}


def test_seven_suites_in_the_papers_order():
    assert [suite.title for suite in SUITES.values()] == [
        "GSM8K", "MATH-500", "AIME25", "HumanEval", "MBPP", "LCB", "MT-Bench",
    ]  # fmt: skip


def test_local_files(tmp_path):
    lines = [{"turns": ["a", "b"]}, {"turns": ["c"]}, {"turns": ["d"]}]
    (tmp_path / "mt-bench.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "mine.jsonl").write_text('{"turns": ["e"]}\n')
    assert load_suite("mt-bench", tmp_path) == [["a", "b"], ["c"], ["d"]]
    assert load_suite("mt-bench", tmp_path, limit=2) == [["a", "b"], ["c"]]
    assert load_suite("mine", tmp_path) == [["e"]]
    with pytest.raises(ValueError, match=r"No suite 'gsm8k'.*there are \['mine', 'mt-bench'\]"):
        load_suite("gsm8k", tmp_path)
    with pytest.raises(ValueError, match="at least 1"):
        load_suite("mine", tmp_path, limit=0)
    for bad in ('{"prompt": "x"}', '{"turns": []}', '{"turns": [1]}', "[1]"):
        (tmp_path / "mine.jsonl").write_text('{"turns": ["e"]}\n' + bad)
        with pytest.raises(ValueError, match=r"Line 2 of .* has no list of `turns`"):
            load_suite("mine", tmp_path)


@pytest.mark.parametrize("name", ROWS)
def test_rows_of_the_hub_become_the_same_prompts(monkeypatch, name):
    row, turns = ROWS[name]
    asked = []

    def load_dataset(*args, **kwargs):  # the Hub is out of reach of tests
        asked.append((*args, kwargs["split"]))
        return datasets.Dataset.from_list([row] * 3)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert load_suite(name, limit=2) == [turns] * 2 and len(load_suite(name)) == 3
    hub, _, config = SUITES[name].source.partition(":")
    assert asked[0] == (hub, config or None, SUITES[name].split)


def test_livecodebench_with_and_without_starter_code():
    turns = SUITES["livecodebench"].turns
    plain = turns({"question_content": "Add.", "starter_code": ""})[0]
    assert (
        plain.startswith("You are an expert Python programmer.")
        and "### Question:\nAdd.\n\n### Format: Write" in plain
    )
    assert plain.endswith("```python\n# YOUR CODE HERE\n```\n\n### Answer: (use the provided format with backticks)")
    assert "```python\nclass Solution:\n```" in turns({"question_content": "", "starter_code": "class Solution:"})[0]


def test_an_unreachable_hub_says_what_to_do(monkeypatch):
    def load_dataset(*args, **kwargs):
        raise ConnectionError("offline")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(ValueError, match=r"gsm8k.*offline.*folder with gsm8k.jsonl"):
        load_suite("gsm8k")
    with pytest.raises(ValueError, match="No suite 'nope'"):
        load_suite("nope")
