"""Fields of other people's rows: each is read, or refused by its name."""

import json
import re

import pytest

from hf_hyperdflash.training.data.messages import to_messages

Q, A = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
SYSTEM = {"role": "system", "content": "s"}
BEFORE = [{"role": "user", "content": "q0"}, {"role": "assistant", "content": "a0"}]
FORMS = {
    "messages": {"messages": [Q, A]},
    "sharegpt": {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
    "turns": {"turns": ["q"]},
    "alpaca": {"instruction": "q", "input": "", "output": "a"},
    "trl": {"prompt": [Q], "completion": [A]},
    "swift": {"query": "q", "response": "a"},
    "qa": {"question": "q", "answer": "a"},
    "orca": {"question": "q", "response": "a"},
}
EXCHANGES = [name for name in FORMS if name not in ("messages", "sharegpt", "turns")]


@pytest.mark.parametrize("name", ["system", "system_prompt"])
@pytest.mark.parametrize("form", FORMS)
def test_a_system_message_beside_a_conversation_is_its_first(form, name):
    row = FORMS[form]
    plain = to_messages(row)
    assert to_messages({**row, name: "s"}) == [SYSTEM, *plain]
    assert to_messages({**row, name: ""}) == to_messages({**row, name: None}) == plain
    with pytest.raises(ValueError, match=r"has 's' and 's2' as its system message, expected one text"):
        to_messages({**row, "system": "s", "system_prompt": "s2"})


def test_a_system_message_that_is_there_already_is_not_said_twice():
    assert to_messages({"messages": [SYSTEM, Q, A], "system": "s "}) == [SYSTEM, Q, A]
    for spoken in ("system", "developer"):
        with pytest.raises(ValueError, match=r"has 'other' and 's' as its system message"):
            to_messages({"messages": [{**SYSTEM, "role": spoken}, Q, A], "system": "other"})
    with pytest.raises(ValueError, match=r"has 'True' as its system message, expected one text"):
        to_messages({"messages": [Q, A], "system": True})


@pytest.mark.parametrize("form", FORMS)
def test_history_is_read_before_one_exchange_and_refused_beside_a_conversation(form):
    for history in ([["q0", "a0"]], BEFORE):
        row = {**FORMS[form], "history": history, "system": "s"}
        if form in EXCHANGES:
            assert to_messages(row) == [SYSTEM, *BEFORE, Q, A]
        else:
            with pytest.raises(ValueError, match=r"^`history` of a row is .*, which is not read there"):
                to_messages(row)
    assert to_messages({**FORMS[form], "history": []}) == to_messages(FORMS[form])
    if form in EXCHANGES:
        for wrong in ("q0", [["q0"]], ["q0", "a0"], [["q0", 3]]):
            with pytest.raises(ValueError, match=r"`history` is|A conversation is '3'"):
                to_messages({**FORMS[form], "history": wrong})


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_is_read_under_each_of_its_names(name):
    thought = {**A, "reasoning_content": "r"}
    assert to_messages({"messages": [Q, {**A, name: "r"}]}) == [Q, thought]
    turns = FORMS["sharegpt"]["conversations"]
    assert to_messages({"conversations": [turns[0], {**turns[1], name: "r"}]}) == [Q, thought]
    for form in FORMS:
        row = {**FORMS[form], name: "r"}
        if form in EXCHANGES:
            assert to_messages(row) == [Q, thought]
        else:
            with pytest.raises(ValueError, match=f"^`{name}` of a row is 'r', which is not read there"):
                to_messages(row)
        for mode in ("on", "off", True, False):  # says that there is some, and where it is all the same
            assert to_messages({**FORMS[form], name: mode}) == to_messages(FORMS[form])
    with pytest.raises(ValueError, match="several reasonings"):
        to_messages({"messages": [Q, {**A, "reasoning": "r", "thinking": "s"}]})
    with pytest.raises(ValueError, match="several reasonings"):
        to_messages({"prompt": "q", "completion": [{**A, "reasoning": "s"}], "reasoning_content": "r"})


@pytest.mark.parametrize("form", FORMS)
def test_what_is_no_text_and_what_only_a_template_would_know_is_refused_by_name(form):
    for name, value in {
        "images": ["a.png"], "image": "a.png", "videos": ["a.mp4"], "audios": ["a.wav"], "documents": [{"text": "x"}],
        "functions": [{"name": "f"}], "chat_template_kwargs": {"enable_thinking": False},
    }.items():  # fmt: skip
        with pytest.raises(ValueError, match=f"^`{name}` of a row is .*, which is not read there"):
            to_messages({**FORMS[form], name: value})
        assert to_messages({**FORMS[form], name: type(value)()}) == to_messages(FORMS[form])
    for name in ("input", "context"):
        row = {**FORMS[form], name: "c"}
        if form == "alpaca":
            assert to_messages(row) == [{**Q, "content": "q\nc"}, A]
        elif form in EXCHANGES:
            with pytest.raises(ValueError, match=f"^`{name}` of a row"):
                to_messages(row)
    for harmless in ("id", "source", "text", "category", "score"):
        assert to_messages({**FORMS[form], harmless: "x"}) == to_messages(FORMS[form])


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"images": ["a.png"]}, r"`images` of a message by 'gpt'"),
        ({"function_call": {"name": "f"}}, r"`function_call` of a message by 'gpt'"),
        ({"train_detail": [{"begin_offset": 0}]}, r"`train_detail` of a message by 'gpt'"),
        ({"loss_scale": 0.5}, r"`loss_scale` of a message by 'gpt'"),
        ({"weight": 0.5}, r"`weight` of a message is 0.5, expected 0 or 1"),
        ({"train": "yes"}, r"`train` of a message is 'yes', expected 0 or 1"),
        ({"channel": "analysis"}, r"is of the channel 'analysis', expected \"final\""),
        ({"recipient": "functions.add"}, r"`recipient` of a message"),
        ({"tool_calls": "add"}, r"A call is 'add', expected its name and arguments"),
        ({"tool_calls": [{"id": "1"}]}, r"A call is .*, expected its name and arguments"),
    ],
)
def test_fields_of_a_turn_are_refused_by_name(fields, words):
    turn = {"role": "gpt", "content": "a", **fields}
    with pytest.raises(ValueError, match=words):
        to_messages({"messages": [Q, turn]})
    with pytest.raises(ValueError, match=words):
        to_messages({"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a", **fields}]})


def test_fields_of_a_turn_that_are_read():
    call = {"name": "add", "arguments": {"a": 1}}
    wrapped = {"type": "function", "function": call}
    told = {"role": "assistant", "content": "", "tool_calls": [wrapped]}
    turns = [{"from": "human", "value": "q"}, {"from": "function_call", "value": json.dumps(call)}]
    read = to_messages({"conversations": [*turns, {"from": "observation", "value": "1"}]})
    assert read == [Q, told, {"role": "tool", "content": "1"}]
    spoken = [Q, {"role": "tool_call", "content": json.dumps([call])}, {"role": "tool_response", "content": "1"}]
    assert to_messages({"messages": spoken}) == read
    with pytest.raises(ValueError, match=r"A call is 'add\(1\)', expected"):
        to_messages({"conversations": [*turns[:1], {"from": "function_call", "value": "add(1)"}]})
    assert to_messages({"messages": [Q, {"role": "assistant", "tool_calls": json.dumps([wrapped])}]})[1] == {
        "role": "assistant", "tool_calls": [wrapped],
    }  # fmt: skip
    kept = {"role": "tool", "content": "1", "tool_call_id": "7", "name": "add"}
    assert to_messages({"messages": [Q, kept]})[1] == kept
    assert to_messages({"messages": [Q, {**A, "channel": "final"}]}) == [Q, A]
    for off in ({"train": False}, {"weight": 0}, {"loss": False}, {"weight": 1, "loss": 0}):
        assert to_messages({"messages": [{**Q, **off}, {**A, **off}]}) == [Q, {**A, "train": False}]
    assert to_messages({"messages": [{**Q, "weight": 1}, {**A, "weight": 1.0, "train": True}]}) == [Q, A]


def test_text_in_parts_is_text_and_other_parts_are_refused():
    """A template for texts alone would write the list itself, as what the assistant says."""
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b", "image": None}, "c"]
    assert to_messages({"messages": [Q, {**A, "content": parts}]}) == [Q, {**A, "content": "abc"}]
    for wrong in ([{"type": "image", "url": "a.png"}], [{"type": "thinking", "thinking": "r"}], 3, {"text": "a"}):
        with pytest.raises(
            ValueError, match=rf"^A message by 'assistant' says {re.escape(str(wrong))}, expected text"
        ):
            to_messages({"messages": [Q, {**A, "content": wrong}]})
    for silent in ({"messages": [{**Q, "content": None}]}, {"conversations": [{"from": "human", "value": None}]}):
        with pytest.raises(ValueError, match="says None, expected text"):
            to_messages(silent)
