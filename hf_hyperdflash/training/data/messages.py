"""Rows of chat datasets to messages: what of a row is read, and what is refused by its name."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from .places import PLACE

Message = dict[str, Any]

_ROLES = {
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "model"), "assistant"),
    **dict.fromkeys(("function_call", "tool_call"), "assistant"),  # its text is the call
    **dict.fromkeys(("tool", "observation", "tool_response"), "tool"),
    **{role: role for role in ("system", "developer")},
}
_CALLERS = ("function_call", "tool_call")
_EXCHANGES = (
    ("instruction", "output"), ("prompt", "completion"), ("question", "answer"),
    ("query", "response"), ("question", "response"), ("prompt", "response"), ("instruction", "response"),
)  # fmt: skip
_SYSTEM = ("system", "system_prompt")
REASONING = ("reasoning_content", "reasoning", "thinking")
_TRAINED = ("train", "weight", "loss")  # of an answer: whether it is trained on
_OF_AN_EXCHANGE = ("history", *REASONING)
_NO_TEXT = ("image", "images", "video", "videos", "audio", "audios")
# What would change the text or what of it is trained on: silence would train on something else than the row says.
_UNREAD_OF_A_ROW = (*_NO_TEXT, "documents", "functions", "chat_template_kwargs")
_UNREAD_OF_A_MESSAGE = (*_NO_TEXT, "function_call", "train_detail", "loss_scale", "recipient")


def to_messages(row: Mapping[str, Any]) -> list[Message]:
    """Turn one dataset row into chat messages.

    Understands `messages`, ShareGPT `conversations`, `turns` (user turns only), `instruction`/`input`/`output`,
    `prompt`/`completion` (texts or lists of messages), `query`/`response` and `question`/`answer` (GSM8K's calculator
    marks are removed and its `#### 7` becomes a sentence with the answer in a box, as the benchmark prompts ask for).
    Beside them `system` or `system_prompt`, and beside one question and answer `history`, the exchanges before, and
    the answer's reasoning. A thinking model's reasoning is a message's `reasoning_content` (read as `reasoning` and
    `thinking`, too). An answer whose `train`, `weight` or `loss` is 0 keeps `train` False.

    Raises:
        ValueError: If the row has none of these columns, a conversation an unknown speaker or no text, or there is a
            field that would change the text and is not read, as `images`.
    """
    given = {name: value for name, value in row.items() if value not in (None, "", []) and name != PLACE}
    _refuse_unread(given, _UNREAD_OF_A_ROW)
    return _with_system(given, _conversation(row, given))


def _conversation(row: Mapping[str, Any], given: dict[str, Any]) -> list[Message]:
    told: list[Any] = []
    if "messages" in given:
        told = _listed(given["messages"])
    elif "conversations" in given:
        told = [_from_sharegpt(turn) for turn in _listed(given["conversations"])]
    elif "turns" in given:
        told = [{"role": "user", "content": turn} for turn in _listed(given["turns"])]
    if told:
        _refuse_unread(given, _OF_AN_EXCHANGE)
        return _as_messages(told)
    there = {name for name, value in row.items() if value is not None}  # an answer may be empty
    for asked, answered in _EXCHANGES:
        if asked in there and answered in there:
            return _exchange(row, given, asked, answered)
    empty = sorted(set(row) - set(given) - {PLACE})
    raise ValueError(
        f"A row with columns {sorted(given)}{f' and nothing in {empty}' if empty else ''} is no conversation: "
        "expected messages, conversations, turns, instruction/output, prompt/completion, query/response or "
        "question/answer. Rename the columns of the dataset, or leave such rows out."
    )


def _refuse_unread(given: Mapping[str, Any], unread: tuple[str, ...], of: str = "a row") -> None:
    for name in unread:
        value = given.get(name)
        if value not in (None, "", [], {}) and not (name in REASONING and _is_mode(value)):
            raise ValueError(
                f"`{name}` of {of} is {repr(value)[:60]}, which is not read there: leave the field out if the text is "
                "the same without it, else the row."
            )


def _is_mode(value: Any) -> bool:
    """Whether a column tells that there is reasoning, instead of the reasoning."""
    return isinstance(value, bool) or value in ("on", "off")


def _with_system(given: Mapping[str, Any], messages: list[Message]) -> list[Message]:
    said = [given[name] for name in _SYSTEM if name in given]
    if messages and messages[0]["role"] in ("system", "developer"):
        said.append(messages[0].get("content"))
    if not all(isinstance(text, str) for text in said) or len({str(text).strip() for text in said}) > 1:
        raise ValueError(
            f"The row has {' and '.join(repr(str(text)[:60]) for text in said)} as its system message, expected one "
            f"text: {', '.join(f'`{name}`' for name in _SYSTEM)} or the first message."
        )
    if not said or (messages and messages[0]["role"] in ("system", "developer")):
        return messages
    return [{"role": "system", "content": said[0]}, *messages]


def _exchange(row: Mapping[str, Any], given: Mapping[str, Any], asked: str, answered: str) -> list[Message]:
    question, answer = row[asked], row[answered]
    if asked == "instruction":
        parts = (question, given.get("input"), given.get("context"))
        question = "\n".join(str(part) for part in parts if part)
    else:
        _refuse_unread(given, ("input", "context"))
    answers = _as_messages(_clean_worked_answer(answer) if answered == "answer" else answer, "assistant")
    reasoning = next((given[name] for name in REASONING if name in given and not _is_mode(given[name])), None)
    if reasoning is not None:
        answers[:1] = [_read({"thinking": reasoning, **answers[0]})]
    return [*_history(given.get("history", [])), *_as_messages(question, "user"), *answers]


def _history(given: Any) -> list[Message]:
    """The exchanges before: pairs of question and answer, or messages."""
    if isinstance(given, list) and all(isinstance(part, dict) for part in given):
        return _as_messages(given)
    if not (isinstance(given, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in given)):
        raise ValueError(f"`history` is {str(given)[:60]!r}, expected pairs of a question and its answer.")
    return [m for pair in given for m in (*_as_messages(pair[0], "user"), *_as_messages(pair[1], "assistant"))]


def tools_of(row: Mapping[str, Any]) -> list[Any] | None:
    """The tools that a row's conversation may call, for the chat template: a list of JSON schemas or its JSON text.

    Raises:
        ValueError: If its `tools` are neither.
    """
    given = row.get("tools")
    if not given:
        return None
    try:
        tools = json.loads(given) if isinstance(given, str) else _without_gaps(given)
        return _listed(tools, dict) or None
    except ValueError as error:
        raise ValueError(
            f"`tools` is {str(given)[:100]!r}, expected a list of JSON schemas, or the JSON text of one: correct "
            "it, or leave the column out."
        ) from error


def _without_gaps(part: Any) -> Any:
    """Without what `datasets` fills with None where other rows have something."""
    if isinstance(part, dict):
        return {name: _without_gaps(value) for name, value in part.items() if value is not None}
    return [_without_gaps(value) for value in part] if isinstance(part, list) else part


def _as_messages(given: Any, role: str | None = None) -> list[Message]:
    """A list of messages, or a text of somebody."""
    if isinstance(given, str) and role:
        return [{"role": role, "content": given}]
    return [_read(message) for message in _listed(given, dict)]


def _read(given: Message) -> Message:
    """A message with its role, text, reasoning and calls under the names that templates know."""
    message = _without_gaps(given)
    speaker = message.get("role")
    if not isinstance(speaker, str) or speaker not in _ROLES:  # a template would render it as it pleases
        near = get_close_matches(str(speaker), _ROLES, n=1)
        raise ValueError(
            f"Unknown speaker {speaker!r} in a conversation{f' ({near[0]}, perhaps)' if near else ''}: expected "
            f"one of {sorted(_ROLES)}. Map the dataset's speakers to these."
        )
    message["role"] = _ROLES[speaker]
    _refuse_unread(message, _UNREAD_OF_A_MESSAGE, f"a message by {speaker!r}")
    if message.pop("channel", None) not in (None, "final"):
        raise ValueError(
            f'A message by {speaker!r} is of the channel {given["channel"]!r}, expected "final": put reasoning into '
            "`reasoning_content` of the answer, and calls into its `tool_calls`."
        )
    if "content" in message:
        message["content"] = _text(message["content"], speaker)
    reasoning = [text for name in REASONING if (text := message.pop(name, None)) and not _is_mode(text)]
    if reasoning:
        message["reasoning_content"] = _text(reasoning[0], speaker)
        if any(text != reasoning[0] for text in reasoning):
            raise ValueError(f"A message by {speaker!r} has several reasonings, expected one of {list(REASONING)}.")
    if speaker in _CALLERS:
        calls = _calls(message.get("content"))
        message["tool_calls"] = [{"type": "function", "function": call} for call in calls]
        message["content"] = ""
    elif "tool_calls" in message:
        message["tool_calls"] = _calls(message["tool_calls"])
    if not {"content", "tool_calls", "reasoning_content"} & set(message):
        raise ValueError(f"A message by {message['role']!r} says None, expected text. Leave such rows out.")
    if not _is_trained(message) and message["role"] == "assistant":
        message["train"] = False
    return message


def _text(content: Any, speaker: str) -> str:
    """What is said, of which multimodal datasets make a list of parts."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        parts: list[Any] = [part.get("text") if isinstance(part, dict) else part for part in content]
        if all(isinstance(part, str) for part in parts):
            return "".join(parts)
    raise ValueError(f"A message by {speaker!r} says {repr(content)[:100]}, expected text. Leave such rows out.")


def _is_trained(message: Message) -> bool:
    flags = [(name, message.pop(name)) for name in _TRAINED if name in message]
    for name, flag in flags:
        if flag not in (0, 1):
            raise ValueError(f"`{name}` of a message is {flag!r}, expected 0 or 1: an answer is trained on or not.")
    return all(flag for _, flag in flags)


def _calls(given: Any) -> list[Any]:
    """One or more calls, or their JSON text."""
    try:
        calls = json.loads(given) if isinstance(given, str) else given
    except ValueError:
        calls = None
    calls = calls if isinstance(calls, list) else [calls]
    if not all(isinstance(call, dict) and isinstance(name_of(call), str) for call in calls):
        raise ValueError(f"A call is {str(given)[:100]!r}, expected its name and arguments, or the JSON text of them.")
    return calls


def name_of(tool: Mapping[str, Any]) -> Any:
    """Of a tool or a call, with or without its `function`."""
    function = tool.get("function")
    return (function if isinstance(function, Mapping) else tool).get("name")


def _listed(given: Any, kind: type = object) -> list[Any]:
    if isinstance(given, list) and all(isinstance(part, kind) for part in given):
        return given
    raise ValueError(f"A conversation is {str(given)[:100]!r}, expected a list of messages.")


def _from_sharegpt(turn: Any) -> Message:
    if not isinstance(turn, Mapping):
        raise ValueError(f"A turn of a conversation is {turn!r}, expected `from` and `value`.")
    message = {name: value for name, value in turn.items() if name not in ("from", "value") and value is not None}
    for name, theirs in (("role", "from"), ("content", "value")):
        if turn.get(theirs) is not None:
            message[name] = turn[theirs]
    return message


def _clean_worked_answer(answer: Any) -> Any:
    if not isinstance(answer, str):
        return answer
    steps, marker, final = re.sub(r"<<.*?>>", "", answer).partition("\n#### ")
    return f"{steps}\nThe answer is \\boxed{{{final.strip()}}}." if marker else steps
