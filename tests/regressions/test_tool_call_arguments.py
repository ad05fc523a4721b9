"""The arguments of a tool call are the same text whether a row has them as a dictionary or, as OpenAI's wire format,
as JSON text; a template that writes them as they are gets the text."""

import json

import pytest

from hf_hyperdflash.training.data.encoding import encode_chat, encode_prompts
from hf_hyperdflash.training.data.messages import read_tools, to_messages
from hf_hyperdflash.training.data.rows import prepare_dataset

from ..helpers.tokenizers import trained


def template(call, before="", result="m.content"):
    """A template of turns, with `call` where the assistant calls a tool."""
    return (
        "{%- for m in messages %}{%- if m.role == 'assistant' %}{{- '<|assistant|>' }}"
        "{%- if m.tool_calls %}" + before + "{%- for tool_call in m.tool_calls %}"
        "{%- if tool_call.function is defined %}{%- set tool_call = tool_call.function %}{%- endif %}"
        + call + "{%- endfor %}{%- else %}{{- m.content }}{%- endif %}{{- '</s>' }}"
        "{%- elif m.role == 'tool' %}{{- '<|user|>' + " + result + " }}"
        "{%- else %}{{- '<|user|>' + m.content }}{%- endif %}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"
    )  # fmt: skip


NAMED = """{{- '{"name": "' + tool_call.name + '", "arguments": ' }}"""
AS_JSON = {
    "Qwen2.5": template(NAMED + "{{- tool_call.arguments | tojson }}{{- '}' }}"),
    "Llama 3.1": template(NAMED.replace("arguments", "parameters") + '{{- tool_call.arguments | tojson }}{{- "}" }}'),
    "Hermes": template(
        "{%- if tool_call.arguments is defined %}" + NAMED + '{{- tool_call.arguments|tojson }}{{- "}" }}{%- endif %}'
    ),
    "whole call": template("{{- tool_call | tojson }}"),
    "Qwen3": template(
        "{{- tool_call.name }}{%- if tool_call.arguments is string %}{{- tool_call.arguments }}{%- else %}"
        "{{- tool_call.arguments | tojson }}{%- endif %}"
    ),
}  # fmt: skip
WALKING = {
    "Qwen3.5": template(
        "{{- '<function=' + tool_call.name + '>' }}{%- for name, value in tool_call.arguments|items %}"
        "{{- '<parameter=' + name + '>' }}{%- set value = value | tojson if value is mapping or (value is sequence "
        "and value is not string) else value | string %}{{- value + '</parameter>' }}{%- endfor %}"
    ),
    "GLM-4.5": template(
        "{{- tool_call.name }}{%- set _args = tool_call.arguments %}{%- for k, v in _args.items() %}"
        "{{- '<arg_key>' + k + '</arg_key>' }}{{- v | tojson if v is not string else v }}{%- endfor %}"
    ),
}
WRITING = {
    "DeepSeek-V3.1": template("{{- tool_call['name'] + ' ' + tool_call['arguments'] }}"),
    # Refuses a call without `content`, and writes one with an empty one.
    "DeepSeek-V3": template(
        "{{- tool_call['name'] + '\n```json\n' + tool_call['arguments'] + '\n```' }}", before="{{- '' + m.content }}"
    ),
    "bare": template("{{- tool_call.name }} {{ tool_call.arguments }}"),
}
ARGUMENTS = {"a": 1, "of": {"unit": "é"}, "list": [1, "two"]}
TEXT = json.dumps(ARGUMENTS, ensure_ascii=False)


def row(arguments, content=None):
    call = {"type": "function", "id": "call00000", "function": {"name": "add", "arguments": arguments}}
    asked = {"role": "user", "content": "What is it?"}
    return {"messages": [asked, {"role": "assistant", "content": content, "tool_calls": [call]}]}


def written(tokenizer, row):
    encoded = encode_chat(tokenizer, to_messages(row))
    answer = [token for token, marked in zip(encoded["input_ids"], encoded["loss_mask"]) if marked]
    return tokenizer.decode(encoded["input_ids"]), tokenizer.decode(answer)


@pytest.mark.parametrize("name", [*AS_JSON, *WALKING])
def test_json_text_is_written_as_the_dictionary_is(name):
    tokenizer = trained("bytes")
    tokenizer.chat_template = {**AS_JSON, **WALKING}[name]
    stock = tokenizer.apply_chat_template(row(ARGUMENTS, "")["messages"], tokenize=False)
    for content in (None, ""):
        text, answer = written(tokenizer, row(TEXT, content))
        assert text == stock == written(tokenizer, row(ARGUMENTS, content))[0]
        assert answer.endswith("</s>") and answer in stock
        assert TEXT in answer or name in WALKING


@pytest.mark.parametrize("name", WRITING)
@pytest.mark.parametrize("content", [None, ""])
def test_a_template_that_writes_arguments_gets_their_text(name, content):
    tokenizer = trained("bytes")
    tokenizer.chat_template = WRITING[name]
    stock = tokenizer.apply_chat_template(row(TEXT, "")["messages"], tokenize=False)
    assert TEXT in stock
    for arguments in (TEXT, ARGUMENTS):
        text, answer = written(tokenizer, row(arguments, content))
        assert text == stock and TEXT in answer
    spaceless = json.dumps(ARGUMENTS, separators=(",", ":"))
    assert spaceless in written(tokenizer, row(spaceless, content))[1]  # the row's own


def test_rows_of_both_are_trained_on_alike_and_prompts_have_earlier_calls():
    tokenizer = trained("bytes")
    for name, chat_template in {**AS_JSON, **WALKING, **WRITING}.items():
        tokenizer.chat_template = chat_template
        rows = [row(TEXT, ""), row(ARGUMENTS, "")]
        answered = [{"role": "tool", "content": "three"}, {"role": "assistant", "content": "It is three."}]
        prompts = encode_prompts(tokenizer, [{"messages": [*row["messages"], *answered]} for row in rows])
        assert prompts[0].tolist() == prompts[1].tolist() and "add" in tokenizer.decode(prompts[0][0]), name
    first, second = prepare_dataset(rows, tokenizer, max_length=500).to_list()
    assert first == second and sum(first["loss_mask"]) > 5


def test_no_arguments_and_arguments_that_are_none():
    tokenizer = trained("bytes")
    tokenizer.chat_template = AS_JSON["Qwen2.5"]
    assert written(tokenizer, row("{}")) == written(tokenizer, row("")) == written(tokenizer, row({}))
    for wrong in ("{", "add", "[1]", '"{}"', "3"):
        with pytest.raises(ValueError, match="arguments of a call"):
            written(tokenizer, row(wrong))


def test_parameters_of_a_tool_that_are_json_text():
    schema = {"type": "object", "properties": {"a": {"type": "number"}}}
    for wrap in (lambda tool: tool, lambda tool: {"type": "function", "function": tool}):
        as_text, as_object = (
            wrap({"name": "add", "parameters": parameters}) for parameters in (json.dumps(schema), schema)
        )
        assert read_tools({"tools": [as_text]}) == read_tools({"tools": json.dumps([as_text])}) == [as_object]
