"""Rows with tools, calls, results and reasoning: what the model writes is trained on, as its template has it."""

import json
import logging

import pytest
from datasets import Dataset

from hf_hyperdflash.training.data.encoding import encode_chat
from hf_hyperdflash.training.data.messages import read_tools, to_messages
from hf_hyperdflash.training.data.rows import load_rows, prepare_dataset

from ..helpers.chats import supervised, templated

# A tool list in the system message, calls and results as blocks, and reasoning in the turns after the last question.
QWEN3 = (
    "{% if tools %}{{ '<|im_start|>system\n' }}{% if messages[0].role == 'system' %}{{ messages[0].content + '\n\n' }}"
    "{% endif %}"
    "{{ '# Tools\n<tools>' }}{% for tool in tools %}{{ '\n' + tool|tojson }}{% endfor %}{{ '\n</tools><|im_end|>\n' }}"
    "{% elif messages[0].role == 'system' %}{{ '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}"
    "{% endif %}{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}"
    "{% if m.role == 'user' %}{{ '<|im_start|>user\n' + m.content + '<|im_end|>\n' }}"
    "{% elif m.role == 'assistant' %}{{ '<|im_start|>assistant\n' }}"
    "{% if loop.index0 > ns.last and (loop.last or m.reasoning_content) %}"
    "{{ '<think>\n' + (m.reasoning_content or '') + '\n</think>\n\n' }}{% endif %}{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}{% set f = call.function or call %}"
    "{{ ('' if loop.first and not m.content else '\n') + '<tool_call>\n{\"name\": \"' + f.name }}"
    '{{ \'", "arguments": \' }}'
    "{{ (f.arguments if f.arguments is string else f.arguments|tojson) + '}\n</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% elif m.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}"
    "{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)
# The tools in the first question, one call a turn with `parameters`, results by another role, and no reasoning.
LLAMA31 = (
    "{% set ns = namespace(told=false) %}{% for m in messages %}"
    "{% if m.role == 'tool' %}{{ '<|start|>ipython<|end|>\n\n' + m.content|tojson + '<|eot|>' }}"
    "{% elif m.tool_calls %}{% if m.tool_calls|length != 1 %}{{ raise_exception('one call at once') }}{% endif %}"
    '{% set f = m.tool_calls[0].function %}{{ \'<|start|>assistant<|end|>\n\n{"name": "\' + f.name }}'
    "{{ '\", \"parameters\": ' + f.arguments|tojson + '}<|eot|>' }}{% else %}"
    "{{ '<|start|>' + m.role + '<|end|>\n\n' }}{% if m.role == 'user' and tools and not ns.told %}"
    "{% set ns.told = true %}{{ 'Call one of:\n' }}{% for tool in tools %}{{ tool|tojson(indent=4) + '\n\n' }}"
    "{% endfor %}{% endif %}{{ m.content|trim + '<|eot|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant<|end|>\n\n' }}{% endif %}"
)
# Reasoning before a mark that each answer has, in the turns after the last question; results in a turn of their own.
DEEPSEEK = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}"
    "{% for tool in tools or [] %}{{ '\n### ' + (tool.function or tool)|tojson }}{% endfor %}"
    "{% elif m.role == 'user' %}{{ '<|user|>' + m.content }}{% elif m.role == 'tool' %}"
    "{{ '<|user|><result>' + m.content + '</result>' }}{% else %}{{ '<|assistant|>' }}"
    "{{ '<think>' + m.reasoning_content if loop.index0 > ns.last and m.reasoning_content else '' }}{{ '</think>' }}"
    "{{ m.content or '' }}{% for call in m.tool_calls or [] %}{{ '<call>' + call.function.name }}"
    "{% for name, value in call.function.arguments.items() %}{{ ' ' + name + '=' + value|tojson }}{% endfor %}"
    "{{ '</call>' }}{% endfor %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' + ('<think>' if thinking else '</think>') }}{% endif %}"
)
TEMPLATES = {"qwen3": (QWEN3, "<|im_end|>"), "llama 3.1": (LLAMA31, "<|eot|>"), "deepseek": (DEEPSEEK, "</s>")}
SCHEMA = {"name": "rain", "description": "Whether it rains.", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}  # fmt: skip
TOOLS = [{"type": "function", "function": SCHEMA}]


def call(city):
    return {"type": "function", "function": {"name": "rain", "arguments": {"city": city}}}


SYSTEM, ASKED = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Does it rain?"}
CALLS = {"role": "assistant", "content": "", "reasoning_content": "I ask.", "tool_calls": [call("Bonn")]}
RESULT = {"role": "tool", "name": "rain", "content": "no"}
ANSWER = {"role": "assistant", "reasoning_content": "It says no.", "content": "It does not."}
ONE = [SYSTEM, ASKED, CALLS, RESULT, ANSWER]
TWO = [
    *ONE,
    {"role": "user", "content": "Sure?"},
    {"role": "assistant", "reasoning_content": "Yes.", "content": "Yes!"},
]
QWEN_CALL = '<tool_call>\n{"name": "rain", "arguments": {"city": "Bonn"}}\n</tool_call><|im_end|>'
LLAMA_CALL = '{"name": "rain", "parameters": {"city": "Bonn"}}<|eot|>'
WRITTEN = {
    ("qwen3", 1): [
        "<think>\nI ask.\n</think>\n\n" + QWEN_CALL,
        "<think>\nIt says no.\n</think>\n\nIt does not.<|im_end|>",
    ],
    # What comes before the last question is written without its reasoning, as the model never writes it.
    ("qwen3", 2): ["<think>\nYes.\n</think>\n\nYes!<|im_end|>"],
    ("llama 3.1", 1): [LLAMA_CALL, "It does not.<|eot|>"],
    ("llama 3.1", 2): [LLAMA_CALL, "It does not.<|eot|>", "Yes!<|eot|>"],
    ("deepseek", 1): ['I ask.</think><call>rain city="Bonn"</call></s>', "It says no.</think>It does not.</s>"],
    ("deepseek", 2): ["Yes.</think>Yes!</s>"],
}


def tokenizer_of(family):
    template, end = TEMPLATES[family]
    tokenizer = templated(template)
    marks = ["<|im_start|>", "<|im_end|>", "<|start|>", "<|end|>", "<|eot|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": [*marks, "<|user|>", "<|assistant|>"]})
    return tokenizer, [tokenizer.convert_tokens_to_ids(end)]


def stock(tokenizer, messages, thinks, **options):
    mode = dict.fromkeys(("thinking", "enable_thinking"), thinks)
    return tokenizer.apply_chat_template(messages, tools=TOOLS, tokenize=False, **mode, **options)


@pytest.mark.parametrize("turns", [1, 2])
@pytest.mark.parametrize("family", TEMPLATES)
def test_calls_and_reasoning_are_trained_on_as_the_model_writes_them(family, turns):
    """Each after the prompt that stock makes for it, with the reasoning that is asked for; no tool list, no result."""
    tokenizer, ends = tokenizer_of(family)
    messages, notes = (ONE, TWO)[turns - 1], []
    encoded = encode_chat(tokenizer, to_messages({"messages": messages}), tools=TOOLS, end_ids=ends, notes=notes)
    written = supervised(tokenizer, encoded)
    assert written == WRITTEN[family, turns]
    text = tokenizer.decode(encoded["input_ids"])
    assert text == stock(tokenizer, messages, True)
    assert "Whether it rains." in text and "Be brief." in text and not any("Whether" in part for part in written)
    answers = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    for place, part in zip(answers[-len(written) :], written, strict=True):
        assert stock(tokenizer, messages, True).startswith(
            stock(tokenizer, messages[:place], True, add_generation_prompt=True) + part
        )
    assert notes.count("untrained") == len(answers) - len(written)
    assert ("reasoning" in notes) == (family == "llama 3.1")


TOOL_COLUMNS = {
    "schemas": TOOLS, "functions": [SCHEMA], "their text": json.dumps(TOOLS), "texts": [json.dumps(TOOLS[0])],
    "text of texts": json.dumps([json.dumps(SCHEMA)]),
    "parameters as text": [{**SCHEMA, "parameters": json.dumps(SCHEMA["parameters"])}],
}  # fmt: skip


@pytest.mark.parametrize("form", TOOL_COLUMNS)
def test_the_tools_of_a_row_in_every_form(form):
    given = TOOL_COLUMNS[form]
    expected = TOOLS if "function" in str(given) else [SCHEMA]
    assert read_tools({"tools": given}) == expected
    in_arrow = Dataset.from_list([{"messages": "[]", "tools": given}, {"messages": "[]", "tools": None}])
    assert [read_tools(row) for row in in_arrow] == [expected, None]


@pytest.mark.parametrize("nothing", [None, "", " \n", [], "[]", "null"])
def test_no_tools(nothing):
    assert read_tools({"tools": nothing}) is None


def test_conversations_of_tools_in_every_form():
    calls = [{"name": "rain", "arguments": {"city": "Bonn"}}]
    known = [ASKED, {"role": "assistant", "tool_calls": calls}]
    for row in (
        {"messages": known}, {"messages": json.dumps(known)}, {"conversations": json.dumps(known)},
        {"query": ASKED["content"], "answers": json.dumps(calls), "tools": json.dumps([SCHEMA])},
        {"query": ASKED["content"], "answers": calls},
        {"messages": [ASKED, {"role": "assistant", "tool_calls": [json.dumps(call) for call in calls]}]},
    ):  # fmt: skip
        assert to_messages(row) == known
    for role in ("tool", "observation", "tool_response", "function", "ipython"):
        assert to_messages({"messages": [*known, {**RESULT, "role": role}]})[-1] == RESULT


def test_files_of_such_rows(tmp_path, caplog):
    """Each form in a line of one file; what cannot be read is left out, with the file and line of the first."""
    tokenizer, ends = tokenizer_of("qwen3")
    rows = [{"messages": ONE, "tools": tools} for tools in TOOL_COLUMNS.values()]
    wrong = [
        {"messages": ONE, "tools": "rain(city)"}, {"messages": "Does it rain?"},
        {"query": "q", "answers": "rain(Bonn)"}, {"messages": [ASKED, {**CALLS, "tool_calls": [{"id": "1"}]}]},
    ]  # fmt: skip
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in [*rows, *wrong]))
    with caplog.at_level(logging.WARNING):
        prepared = prepare_dataset(load_rows(str(path)), tokenizer, max_length=2000, end_ids=ends)
    assert len(prepared) == len(rows)
    for row in prepared:
        assert supervised(tokenizer, row) == WRITTEN["qwen3", 1]
        assert "Whether it rains." in tokenizer.decode(row["input_ids"])
    for number, words in enumerate((["`tools`", "'rain(city)'"], ["'Does it rain?'"], ["Skipped 2", "rain(Bonn)"])):
        where = f"rows.jsonl:{len(rows) + number + 1}"
        (line,) = [record.getMessage() for record in caplog.records if where in record.getMessage()]
        assert all(word in line for word in words) and "\n" not in line, line
