"""Prompts of everyday chat: which there are, and which are left out."""

import json

from ..helpers.scripts import run


def written(tmp_path, *flags):
    output = tmp_path / "chat.jsonl"
    run("experiments/chat_prompts.py", "--output", output, *flags)
    return [json.loads(line)["turns"] for line in output.read_text(encoding="utf-8").splitlines()]


def test_prompts_are_put_together_without_any_file(tmp_path):
    found = written(tmp_path, "--made", 200)
    assert found == written(tmp_path, "--made", 200)  # the same each time
    questions = [turns[0] for turns in found]
    assert 180 < len(questions) == len(set(questions)) <= 200
    assert not any("{}" in question for question in questions)
    assert 0.15 < sum(len(turns) == 2 for turns in found) / len(found) < 0.35


def test_tools_and_prompts_of_suites_are_left_out(tmp_path):
    tools = [
        ("wikipedia", "Tell me about the Louvre Museum.", ""), ("search", "Search for the author of", "Emma"),
        ("shell", "List all files.", ""), ("search", "tell me about the louvre museum", ""),
        ("search", "Write a short poem about the sea at night, please.", ""),
    ]  # fmt: skip
    rows = [
        {"instruction": f"toolformer: enabled\ntoolformer access: {tool}\nWhat it does.\n{question}", "input": given}
        for tool, question, given in tools
    ]
    (tmp_path / "tools.json").write_text(json.dumps(rows))
    by_people = [{"instruction": "Name the relation.", "instances": [{"input": "night : day", "output": ""}]}]
    (tmp_path / "people.jsonl").write_text("\n".join(map(json.dumps, by_people)))
    (tmp_path / "suites").mkdir()
    suite = {"turns": ["Now write a short poem about the sea at night and more"]}
    (tmp_path / "suites" / "mt-bench.jsonl").write_text(json.dumps(suite))
    found = written(
        tmp_path, "--made", 0, "--toolformer", tmp_path / "tools.json",
        "--self-instruct", tmp_path / "people.jsonl", "--not-of", tmp_path / "suites",
    )  # fmt: skip
    assert {turns[0] for turns in found} == {
        "Tell me about the Louvre Museum.", "Search for the author of\nEmma", "Name the relation.\nnight : day",
    }  # fmt: skip
