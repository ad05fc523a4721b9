"""Rows of chat datasets, in every spelling that is in use, as messages."""

import json

import pytest
from datasets import Dataset

from hf_hyperdflash.training.data.messages import read_tools, to_messages

Q, A = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
SYSTEM = {"role": "system", "content": "s"}
THOUGHT = {**A, "reasoning_content": "r"}
BEFORE = [{"role": "user", "content": "q0"}, {"role": "assistant", "content": "a0"}]
HUMAN, GPT = {"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}
EXCHANGES = {
    "alpaca": {"instruction": "q", "input": "", "output": "a"},
    "alpaca response": {"instruction": "q", "response": "a"},
    "trl texts": {"prompt": "q", "completion": "a"},
    "trl messages": {"prompt": [Q], "completion": [A]},
    "trl mixed": {"prompt": [Q], "completion": "a", "messages": None},
    "prompt and response": {"prompt": "q", "response": "a"},
    "swift": {"query": "q", "response": "a"},
    "qa": {"question": "q", "answer": "a"},
    "orca": {"question": "q", "response": "a"},
}
CONVERSATIONS = {
    "messages": {"messages": [{**Q, "name": None}, A]},
    "sharegpt": {"conversations": [HUMAN, GPT]},
    "conversations of roles": {"conversations": [Q, A], "messages": None},
}
FORMS = {**EXCHANGES, **CONVERSATIONS}
HARMLESS = dict.fromkeys(("id", "source", "text", "category", "score"), "x") | {"images": [], "functions": {}}


@pytest.mark.parametrize("form", FORMS)
def test_one_question_and_its_answer_in_every_form_and_what_stands_beside_them(form):
    row = FORMS[form]
    assert to_messages(row) == [Q, A]
    for name in ("system", "system_prompt"):
        assert to_messages({**row, name: "s"}) == [SYSTEM, Q, A]
        assert to_messages({**row, name: ""}) == to_messages({**row, name: None}) == [Q, A]
    for name, value in HARMLESS.items():
        assert to_messages({**row, name: value}) == [Q, A]
    for name in ("reasoning_content", "reasoning", "thinking"):
        for mode in ("on", "off", True, False):  # says that there is some, and where it is all the same
            assert to_messages({**row, name: mode}) == [Q, A]
        if form in EXCHANGES:
            assert to_messages({**row, name: "r"}) == [Q, THOUGHT]
    if form in EXCHANGES:
        for history in ([["q0", "a0"]], BEFORE):
            assert to_messages({**row, "history": history, "system": "s"}) == [SYSTEM, *BEFORE, Q, A]


def said(role, text, **more):
    return {"role": role, "content": text, **more}


CALL = {"name": "add", "arguments": {"a": 1}}
CALLED = said("assistant", "", tool_calls=[{"type": "function", "function": CALL}])
PARTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b", "image": None}, "c"]
OFF = {**A, "train": False}
READ = {
    "ShareGPT's fields in messages, and beside their names": (
        {"messages": [HUMAN, {**A, "from": "human"}]}, [Q, {**A, "from": "human"}],
    ),
    "nothing in lists": ({"prompt": [], "completion": []}, []),
    "turns that only ask": ({"turns": ["q", "q2"]}, [Q, said("user", "q2")]),
    "GSM8K's marks": (
        {"question": "q", "answer": "1+1=<<1+1=2>>2, 2+1=<<2+1=3>>3\n#### 3"},
        [Q, said("assistant", "1+1=2, 2+1=3\nThe answer is \\boxed{3}.")],
    ),
    "an instruction's input": ({"instruction": "q", "input": "c", "output": "a"}, [said("user", "q\nc"), A]),
    "an instruction's context": ({"instruction": "q", "context": "c", "response": "a"}, [said("user", "q\nc"), A]),
    "a system message that is there already": ({"messages": [SYSTEM, Q, A], "system": "s "}, [SYSTEM, Q, A]),
    "an empty answer": ({"question": "q", "answer": ""}, [Q, said("assistant", "")]),
    "reasoning in a turn": ({"conversations": [HUMAN, {**GPT, "thinking": "r"}]}, [Q, THOUGHT]),
    "reasoning of an answer of several": (
        {"prompt": "q", "completion": [A, Q, A], "reasoning": "r"}, [Q, THOUGHT, Q, A],
    ),
    "text in parts": ({"messages": [Q, {**A, "content": PARTS}]}, [Q, said("assistant", "abc")]),
    "the final channel": ({"messages": [Q, {**A, "channel": "final"}]}, [Q, A]),
    "answers that are not to be trained on": (
        {"messages": [Q, {**A, "train": False}, {**A, "weight": 0}, {**A, "weight": 1, "loss": 0}]},
            [Q, OFF, OFF, OFF],
    ),
    "answers that are": ({"messages": [{**Q, "weight": 0}, {**A, "weight": 1.0, "train": True}]}, [Q, A]),
    "a call as ShareGPT has it": (
        {"conversations": [HUMAN, {"from": "function_call", "value": json.dumps(CALL)},
                           {"from": "observation", "value": "1"}]}, [Q, CALLED, said("tool", "1")],
    ),
    "a list of calls": (
        {"messages": [Q, said("tool_call", json.dumps([CALL])), said("tool_response", "1")]},
        [Q, CALLED, said("tool", "1")],
    ),
    "calls as JSON text": (
        {"messages": [Q, {"role": "assistant", "tool_calls": json.dumps(CALLED["tool_calls"])}]},
        [Q, {"role": "assistant", "tool_calls": CALLED["tool_calls"]}],
    ),
    "a result that says of what": (
        {"messages": [Q, said("tool", "1", tool_call_id="7", name="add")]},
        [Q, said("tool", "1", tool_call_id="7", name="add")],
    ),
    "all speakers": (
        {"messages": [said(role, "x") for role in ("developer", "human", "model", "tool", "gpt", "chatgpt")]},
        [said(role, "x") for role in ("developer", "user", "assistant", "tool", "assistant", "assistant")],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", READ)
def test_what_a_row_says_is_read(name):
    row, messages = READ[name]
    assert to_messages(row) == messages


def test_what_datasets_fills_gaps_with_is_left_out():
    """A column of Arrow has one type: each row has the fields of all."""
    rows = [[Q, A], [Q, THOUGHT, Q], [Q, {"role": "assistant", "tool_calls": [CALL]}],
            [Q, {"role": "assistant", "tool_calls": [{"name": "now", "arguments": {"zone": "UTC"}}]}]]  # fmt: skip
    assert list(map(to_messages, Dataset.from_list([{"messages": messages} for messages in rows]))) == rows


def test_tools_are_a_list_or_its_text_with_parameters_that_may_be_text():
    schema = {"type": "object", "properties": {"a": {"type": "number", "enum": None}}}
    for wrap in (lambda tool: tool, lambda tool: {"type": "function", "function": tool}):
        wanted = [wrap({"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "number"}}}})]
        as_text = wrap({"name": "add", "parameters": json.dumps(wanted[0].get("function", wanted[0])["parameters"])})
        for given in ([wrap({"name": "add", "parameters": schema})], [as_text], json.dumps([as_text])):
            assert read_tools({"tools": given}) == wanted
    assert read_tools({}) is read_tools({"tools": None}) is read_tools({"tools": "[]"}) is None
