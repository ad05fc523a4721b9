import json

import datasets
import pytest

from hf_hyperdflash.benchmark.suites import SUITES, load_suite, suites_in

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
    with pytest.raises(ValueError, match=r"no folder .*nowhere with suites"):
        load_suite("mine", tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ('{"prompt": "x"}', "no `turns`"), ('{"turns": []}', r"`turns` is \[\]"), ('{"turns": [1]}',
        r"`turns` is \[1\]"),
        ("[1]", "no `turns`"), ('{"turns": "What is 1 plus 1?"}', "`turns` is 'What is 1 plus 1.'"),
        ('{"turns": [" "]}', "`turns` is "), ('{"turns": ["x"', "not JSON"), ("turns", "not JSON"),
        (b"\xff\xfe".decode("latin1"), "not JSON"),
    ],
)  # fmt: skip
def test_a_malformed_line_names_its_file_and_number(tmp_path, line, found):
    path = tmp_path / "mine.jsonl"
    path.write_bytes(b'{"turns": ["e"]}\n\n' + line.encode("latin1") + b'\n{"turns": ["f"]}\n')
    with pytest.raises(ValueError, match=rf"mine\.jsonl, line 3: {found}.*turns") as raised:
        load_suite("mine", tmp_path, limit=2)  # an empty line is none
    assert "\n" not in str(raised.value)
    assert load_suite("mine", tmp_path, limit=1) == [["e"]]


def test_a_file_without_prompts_is_named(tmp_path):
    (tmp_path / "mine.jsonl").write_text("\n")
    with pytest.raises(ValueError, match=r"'mine' has no prompts in .*mine\.jsonl: expected .*Add some, or leave"):
        load_suite("mine", tmp_path)


def test_text_may_hold_any_character(tmp_path):
    turns = ["line\u2028separated", "näh … 好"]
    (tmp_path / "mine.jsonl").write_text(json.dumps({"turns": turns}, ensure_ascii=False) + "\r\n\n", encoding="utf-8")
    assert load_suite("mine", tmp_path) == [turns]


def test_the_suites_of_a_folder_are_found(tmp_path):
    for name in ("mt-bench", "gsm8k", "zebra", "mine"):
        (tmp_path / f"{name}.jsonl").write_text('{"turns": ["e"]}\n')
    (tmp_path / "README.md").touch()
    assert suites_in(tmp_path) == ["gsm8k", "mt-bench", "mine", "zebra"]
    (tmp_path / "empty").mkdir()
    for folder, message in (("empty", "No suites in .*empty"), ("nowhere", "no folder .*nowhere with suites")):
        with pytest.raises(ValueError, match=message):
            suites_in(tmp_path / folder)


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
