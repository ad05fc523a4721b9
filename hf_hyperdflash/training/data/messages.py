"""Turns rows of chat datasets into messages, and refuses fields that it does not read and that would matter."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, TypeAlias, cast

from .file_positions import POSITION_COLUMN

Message = dict[str, Any]
Json: TypeAlias = bool | int | float | str | list["Json"] | dict[str, "Json"] | None
Tool = dict[str, Json]  # a JSON schema

_ROLES = {
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "model"), "assistant"),
    **dict.fromkeys(("function_call", "tool_call"), "assistant"),  # the message's text is the call
    **dict.fromkeys(("tool", "observation", "tool_response", "function", "ipython"), "tool"),
    **{role: role for role in ("system", "developer")},
}
_CALLERS = ("function_call", "tool_call")
_EXCHANGES = (
    ("instruction", "output"), ("prompt", "completion"), ("question", "answer"),
    ("query", "response"), ("question", "response"), ("prompt", "response"), ("instruction", "response"),
    ("query", "answers"),  # which are calls
)  # fmt: skip
_SYSTEM = ("system", "system_prompt")
REASONING = ("reasoning_content", "reasoning", "thinking")
_TRAINING_FLAGS = ("train", "weight", "loss")  # of an answer: whether to train on it
_EXCHANGE_FIELDS = ("history", *REASONING)
_MEDIA_FIELDS = ("image", "images", "video", "videos", "audio", "audios")
# Fields that change the text or which part of it is trained on. To ignore them would train on another text.
_UNREAD_ROW_FIELDS = (*_MEDIA_FIELDS, "documents", "functions", "chat_template_kwargs")
_UNREAD_MESSAGE_FIELDS = (*_MEDIA_FIELDS, "function_call", "train_detail", "loss_scale", "recipient")


def to_messages(row: Mapping[str, Json]) -> list[Message]:
    """Turn one dataset row into chat messages.

    Understands `messages`, ShareGPT `conversations`, `turns` (user turns only), `instruction`/`input`/`output`,
    `prompt`/`completion` (texts or lists of messages), `query`/`response`, `query`/`answers` (calls) and
    `question`/`answer` (GSM8K's calculator marks are removed and its `#### 7` becomes a sentence with the answer in a
    box, as the benchmark prompts ask for). A list of messages may be its JSON text. Beside them `system` or
    `system_prompt`, and beside one question and answer `history`, the exchanges before, and the answer's reasoning. A
    thinking model's reasoning is a message's `reasoning_content` (read as `reasoning` and `thinking`, too). An answer
    whose `train`, `weight` or `loss` is 0 keeps `train` False.

    A row with none of these columns, an unknown speaker, no text, or a field that would change the text and is not
    read, as `images`, is refused.
    """
    given: dict[str, Json] = {
        name: value for name, value in row.items() if value not in (None, "", []) and name != POSITION_COLUMN
    }
    _refuse_unread(given, _UNREAD_ROW_FIELDS)
    columns = next((pair for pair in _EXCHANGES if all(row.get(name) is not None for name in pair)), None)
    if name := next((name for name in ("messages", "conversations", "turns") if name in given), None):
        _refuse_unread(given, _EXCHANGE_FIELDS)
        turns = _checked_list(_unpacked(given[name]))
        messages = _as_messages([{"role": "user", "content": turn} for turn in turns] if name == "turns" else turns)
    elif columns:  # whose answer may be empty
        messages = _exchange(row, given, *columns)
    else:
        empty = sorted(set(row) - set(given) - {POSITION_COLUMN})
        raise ValueError(
            f"A row with columns {sorted(given)}{f' and nothing in {empty}' if empty else ''} is no conversation: "
            "expected messages, conversations, turns, instruction/output, prompt/completion, query/response or "
            "question/answer. Rename the columns of the dataset, or leave such rows out."
        )
    texts = [given[name] for name in _SYSTEM if name in given]
    has_system = bool(messages) and messages[0]["role"] in ("system", "developer")
    if has_system:
        texts.append(messages[0].get("content"))
    if not all(isinstance(text, str) for text in texts) or len({str(text).strip() for text in texts}) > 1:
        raise ValueError(
            f"The row has {' and '.join(repr(str(text)[:60]) for text in texts)} as its system message, expected one "
            f"text: {', '.join(f'`{name}`' for name in _SYSTEM)} or the first message."
        )
    return messages if has_system or not texts else [{"role": "system", "content": texts[0]}, *messages]


def _refuse_unread(given: Mapping[str, Json], unread: tuple[str, ...], owner: str = "a row") -> None:
    for name in unread:
        value = given.get(name)
        if value not in (None, "", [], {}) and not (name in REASONING and _is_switch(value)):
            raise ValueError(
                f"`{name}` of {owner} is {repr(value)[:60]}, which is not read there: leave the field out if the text "
                "is the same without it, else the row."
            )


def _is_switch(value: Json) -> bool:
    """Return whether a reasoning column only says that there is reasoning, and is not the reasoning."""
    return isinstance(value, bool) or value in ("on", "off")


def _exchange(
    row: Mapping[str, Json], given: Mapping[str, Json], question_column: str, answer_column: str
) -> list[Message]:
    question, answer = row[question_column], row[answer_column]
    if question_column == "instruction":
        parts = (question, given.get("input"), given.get("context"))
        question = "\n".join(str(part) for part in parts if part)
    else:
        _refuse_unread(given, ("input", "context"))
    if answer_column == "answer" and isinstance(answer, str):  # GSM8K's
        worked, marker, final = re.sub(r"<<.*?>>", "", answer).partition("\n#### ")
        answer = f"{worked}\nThe answer is \\boxed{{{final.strip()}}}." if marker else worked
    if answer_column == "answers":
        answers = [_normalized({"role": "assistant", "tool_calls": answer})]
    else:
        answers = _as_messages(answer, "assistant")
    reasoning = next((given[name] for name in REASONING if name in given and not _is_switch(given[name])), None)
    if reasoning is not None:
        answers[:1] = [_normalized({"thinking": reasoning, **answers[0]})]
    history = cast(Any, given.get("history", []))  # messages, or pairs of a question and its answer
    if not isinstance(history, list) or not all(isinstance(part, dict) for part in history):
        if not (isinstance(history, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in history)):
            raise ValueError(f"`history` is {str(history)[:60]!r}, expected pairs of a question and its answer.")
        history = [
            m for asked, said in history for m in (*_as_messages(asked, "user"), *_as_messages(said, "assistant"))
        ]
    return [*_as_messages(history), *_as_messages(question, "user"), *answers]


def read_tools(row: Mapping[str, Json]) -> list[Tool] | None:
    """Return the tools that a row's conversation may call, from a list of JSON schemas. The list, and each schema, may
    be JSON text."""
    given = row.get("tools")
    if not given or (isinstance(given, str) and not given.strip()):
        return None
    try:
        tools = _unpacked(given) if isinstance(given, str) else _without_nones(given)
        tools = [_unpacked(tool) for tool in _checked_list([] if tools is None else tools)]
        for tool in _checked_list(tools, dict):
            schema = tool["function"] if isinstance(tool.get("function"), dict) else tool
            if isinstance(schema.get("parameters"), str):  # which templates would write as one more text
                schema["parameters"] = json.loads(schema["parameters"])
        return tools or None
    except ValueError as error:
        raise ValueError(
            f"`tools` is {str(given)[:100]!r}, expected a list of JSON schemas, or the JSON text of one: correct "
            "it, or leave the column out."
        ) from error


def _unpacked(given: Json) -> Any:
    """Return the value of a JSON text, as which columns are stored whose values have several types; another value, or
    text, as it is."""
    try:
        return json.loads(given) if isinstance(given, str) else given
    except ValueError:
        return given


def _without_nones(part: Any) -> Any:
    """Return a part of a row without the None values that `datasets` fills in for missing fields."""
    if isinstance(part, dict):
        return {name: _without_nones(value) for name, value in part.items() if value is not None}
    return [_without_nones(value) for value in part] if isinstance(part, list) else part


def _as_messages(given: Json, role: str | None = None) -> list[Message]:
    """Return messages from a list of them, or from the text of one `role`."""
    if isinstance(given, str) and role:
        return [{"role": role, "content": given}]
    return [_normalized(message) for message in _checked_list(given, dict)]


def _normalized(given: Message) -> Message:
    """Return a message with role, text, reasoning and calls under the names that templates know."""
    message = _without_nones(given)
    for sharegpt, name in (("from", "role"), ("value", "content")):
        if sharegpt in message and name not in message:
            message[name] = message.pop(sharegpt)
    speaker = message.get("role")
    if not isinstance(speaker, str) or speaker not in _ROLES:  # templates render unknown roles in any way
        near = get_close_matches(str(speaker), _ROLES, n=1)
        raise ValueError(
            f"Unknown speaker {speaker!r} in a conversation{f' ({near[0]}, perhaps)' if near else ''}: expected "
            f"one of {sorted(_ROLES)}. Map the dataset's speakers to these."
        )
    message["role"] = _ROLES[speaker]
    _refuse_unread(message, _UNREAD_MESSAGE_FIELDS, f"a message by {speaker!r}")
    if message.pop("channel", None) not in (None, "final"):
        raise ValueError(
            f'A message by {speaker!r} is of the channel {given["channel"]!r}, expected "final": put reasoning into '
            "`reasoning_content` of the answer, and calls into its `tool_calls`."
        )
    if "content" in message:
        message["content"] = _text(message["content"], speaker)
    reasoning = [text for name in REASONING if (text := message.pop(name, None)) and not _is_switch(text)]
    if reasoning:
        message["reasoning_content"] = _text(reasoning[0], speaker)
        if any(text != reasoning[0] for text in reasoning):
            raise ValueError(f"A message by {speaker!r} has several reasonings, expected one of {list(REASONING)}.")
    if speaker in _CALLERS:
        calls = _parsed_calls(message.get("content"))
        message["tool_calls"] = [{"type": "function", "function": call} for call in calls]
        message["content"] = ""
    elif "tool_calls" in message:
        message["tool_calls"] = _parsed_calls(message["tool_calls"])
    if not {"content", "tool_calls", "reasoning_content"} & set(message):
        raise ValueError(f"A message by {message['role']!r} says None, expected text. Leave such rows out.")
    flags = [(name, message.pop(name)) for name in _TRAINING_FLAGS if name in message]
    for name, flag in flags:
        if flag not in (0, 1):
            raise ValueError(f"`{name}` of a message is {flag!r}, expected 0 or 1: an answer is trained on or not.")
    if message["role"] == "assistant" and not all(flag for _, flag in flags):
        message["train"] = False
    return message


def is_trained(answer: Message) -> bool:
    return answer.get("train") is not False


def _text(content: Json, speaker: str) -> str:
    """Return the text of a message; multimodal datasets split it into a list of parts."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        parts: list[Any] = [part.get("text") if isinstance(part, dict) else part for part in content]
        if all(isinstance(part, str) for part in parts):
            return "".join(parts)
    raise ValueError(f"A message by {speaker!r} says {repr(content)[:100]}, expected text. Leave such rows out.")


def _parsed_calls(given: Json) -> list[Json]:
    """Return a list of calls, from one, several, or their JSON text."""
    calls = _unpacked(given)
    calls = [_unpacked(call) for call in (calls if isinstance(calls, list) else [calls])]
    if not all(isinstance(call, dict) and isinstance(function_name(call), str) for call in calls):
        raise ValueError(f"A call is {str(given)[:100]!r}, expected its name and arguments, or the JSON text of them.")
    return calls


def function_name(tool: Mapping[str, Json]) -> Json:
    """Return the name of a tool or a call, with or without its `function`."""
    function = tool.get("function")
    return (function if isinstance(function, Mapping) else tool).get("name")


def says_nothing(message: Message) -> bool:
    """Return whether a message has no text, no reasoning and no calls."""
    texts = (message.get("content"), message.get("reasoning_content"))
    return not message.get("tool_calls") and not any(text and text.strip() for text in texts)


def _checked_list(given: Json, kind: type = object) -> list[Any]:
    if isinstance(given, list) and all(isinstance(part, kind) for part in given):
        return given
    raise ValueError(f"A conversation is {str(given)[:100]!r}, expected a list of messages.")
