import json

import datasets
import pytest

from hf_hyperdflash.benchmark.suites import SUITES, load_suite, suites_in

BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."
LCB = (
    "You are an expert Python programmer. You will be given a question (problem specification) and will generate a "
    "correct Python program that matches the specification and passes all tests. You will NOT return anything except "
    "for the program\n\n### Question:\nAdd.\n\n### Format: {}\n```python\n{}\n```\n\n### Answer: (use the provided "
    "format with backticks)"
)
STARTED = (
    "You will use the following starter code to write the solution to the problem and enclose your code within "
    "delimiters."
)
NOT_STARTED = "Write your code in the following format:"
HUMANEVAL = "Write a solution to the following problem and make sure that it passes the tests:\n```python\n{}\n```"
HUB_FILE = "hf://datasets/livecodebench/code_generation_lite/test.jsonl"
# Of each suite in the paper's order: its title, what is asked of the Hub, a row as it has it there, and the prompt
# that the paper's harness asks.
HUB = {
    "gsm8k": ("GSM8K", ("openai/gsm8k", "main"), {"question": "1+1?", "answer": "#### 2"}, ["1+1?" + BOXED]),
    "math500": ("MATH-500", ("HuggingFaceH4/MATH-500", None), {"problem": "Find $x$."}, ["Find $x$." + BOXED]),
    "aime25": ("AIME25", ("MathArena/aime_2025", None), {"problem": "Find $n$."}, ["Find $n$." + BOXED]),
    "humaneval": (
        "HumanEval", ("openai/openai_humaneval", None), {"prompt": "def f():\n"}, [HUMANEVAL.format("def f():\n")]
    ),
    "mbpp": ("MBPP", ("google-research-datasets/mbpp", "sanitized"), {"prompt": "Write a function."},
             ["Write a function."]),
    "livecodebench": (
        "LCB", ("json", HUB_FILE), {"question_content": "Add.", "starter_code": ""},
        [LCB.format(NOT_STARTED, "# YOUR CODE HERE")],
    ),
    "mt-bench": ("MT-Bench", ("HuggingFaceH4/mt_bench_prompts", None), {"prompt": ["First?", "Then?"]},
                 ["First?", "Then?"]),
}  # fmt: skip


def test_suites_of_a_folder(tmp_path):
    lines = [{"turns": ["a", "b"]}, {"turns": ["c"]}, {"turns": ["line\u2028separated", "näh … 好"]}]
    text = "\r\n\n".join(json.dumps(line, ensure_ascii=False) for line in lines)  # an empty line is none
    for name in ("mt-bench", "gsm8k", "zebra", "mine"):
        (tmp_path / f"{name}.jsonl").write_text(text + "\n", encoding="utf-8", newline="")
    (tmp_path / "README.md").touch()
    assert suites_in(tmp_path) == ["gsm8k", "mt-bench", "mine", "zebra"]
    for name in ("mt-bench", "mine"):
        assert load_suite(name, tmp_path) == [line["turns"] for line in lines]
    assert load_suite("mine", str(tmp_path), limit=2) == [["a", "b"], ["c"]]
    (tmp_path / "mine.jsonl").write_text('{"turns": ["e"]}\nwhat follows is not looked at')
    assert load_suite("mine", tmp_path, limit=1) == [["e"]]


@pytest.mark.parametrize("name", SUITES)
def test_rows_of_the_hub_become_the_papers_prompts(monkeypatch, name):
    title, source, row, turns = HUB[name]
    asked = []

    def load_dataset(path, config=None, *, split, data_files=None):  # the Hub is out of reach of tests
        asked.append(((path, config or data_files), split))
        return datasets.Dataset.from_list([row] * 3)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert load_suite(name, limit=2) == [turns] * 2 and len(load_suite(name)) == 3
    of_tests = name in ("gsm8k", "math500", "humaneval", "mbpp")
    assert asked[0] == (source, "test" if of_tests else "train") and SUITES[name].title == title
    assert list(SUITES) == list(HUB)


def test_livecodebench_with_starter_code():
    row = {"question_content": "Add.", "starter_code": "class Solution:"}
    assert SUITES["livecodebench"].turns(row) == [LCB.format(STARTED, "class Solution:")]
