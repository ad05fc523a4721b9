"""Messages as a chat template reads them. Small conversations are rendered to find out how: what one family's template
reads, another's writes wrongly, refuses, or leaves out without a word."""

from __future__ import annotations

import json
import re
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, cast

from jinja2 import TemplateError, TemplateSyntaxError
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from .messages import REASONING, Message, Tool

Spans = list[tuple[int, int]]

_WORD = "quokka"  # said in a small conversation, and in no template
_ARGUMENTS = {"quokka": "one"}
_ID = "000000000"  # of a call: Mistral's templates want nine characters


def read_chat_template(path: str | Path, option: str) -> str:
    """Read the chat template that replaces a tokenizer's; errors name the `option`."""
    if not Path(path).is_file():
        raise ValueError(f"`{option}` is {str(path)!r}, and there is no such file.")
    try:
        template = Path(path).read_text(encoding="utf-8-sig")
        render_jinja_template(conversations=[], chat_template=template)
    except UnicodeDecodeError as error:
        raise ValueError(f"`{option}` is {str(path)!r}, which is not UTF-8 text.") from error
    except TemplateSyntaxError as error:
        raise ValueError(
            f"`{option}` is {str(path)!r}, which is no Jinja template: {error.message}, line {error.lineno}."
        ) from error
    return template


class TemplateReading(NamedTuple):
    """What a chat template reads and writes."""

    parts: frozenset[str]  # the roles whose `content` it reads as a list of parts alone
    call_content: str | None  # the `content` that a call without one needs; `None` if it needs none
    writes_arguments: bool  # the arguments of a call as they are, so that it needs their JSON text
    after_answer: str  # what it writes after an answer when the user goes on
    after_call: str  # what it writes after a call when the tool answers


class ChatTemplate:
    """A tokenizer's chat template, of several the one for `tools`, and how it reads messages. Raise a `ValueError` if
    there is none."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, tools: list[Tool] | None = None) -> None:
        if not tokenizer.chat_template:
            raise ValueError(
                f"The tokenizer {tokenizer.name_or_path!r} has no chat template, so prompts and answers cannot be "
                "told apart: set `tokenizer.chat_template` to a Jinja template (`--chat-template FILE` of "
                "`hf-hyperdflash train`)."
            )
        self.text, self.tools = tokenizer.get_chat_template(tools=tools), tools
        self.special_tokens = tokenizer.special_tokens_map
        self.reading = _reading(
            self.text, frozenset((name, str(token)) for name, token in self.special_tokens.items())
        )

    def render(
        self, messages: list[Message], thinking: bool, prompt: bool = False, blocks: Spans | None = None
    ) -> str:
        """Render a conversation, as `apply_chat_template` does. `blocks` gets the spans of the text between the
        template's tags."""
        conversation = _spelled(messages, self.text, self.reading)
        try:
            rendered = render_jinja_template(
                conversations=[conversation],
                tools=self.tools,  # type: ignore[arg-type]
                chat_template=self.text,
                return_assistant_tokens_mask=blocks is not None,
                add_generation_prompt=prompt,
                **{**self.special_tokens, "thinking": thinking, "enable_thinking": thinking},  # type: ignore[arg-type]
            )
        except Exception as error:  # a template raises anything
            kind = "" if type(error) is TemplateError else f"{type(error).__name__}: "  # its own `raise_exception`
            why = " ".join(f"{kind}{error}".split())
            raise ValueError(f"The chat template refuses the conversation ({why}).") from error
        (text,), found = cast(tuple[list[str], list[Spans]], rendered)
        try:
            text.encode()  # JSON can have half a character, as `"\ud83d"`, which no tokenizer can read
        except UnicodeEncodeError as error:
            raise ValueError(
                f"A text has half a character, {text[error.start]!r}: correct it, or leave such rows out."
            ) from error
        if blocks is not None:
            blocks += found[0]
        return text


@lru_cache(maxsize=32)
def _reading(template: str, special_tokens: frozenset[tuple[str, str]]) -> TemplateReading:
    parts: set[str] = set()
    variables: dict[str, Any] = dict(special_tokens)

    def said(role: str, text: str) -> Message:
        return {"role": role, "content": _parts(text) if role in parts else text}

    def written(*messages: Message) -> str:
        """Return the text of a conversation; an empty one if the template refuses it."""
        try:
            rendered: Any = render_jinja_template(conversations=[list(messages)], chat_template=template, **variables)
        except Exception:  # a template raises anything
            return ""
        return str(rendered[0][0])

    def settle_on_form(role: str, before: tuple[Message, ...], after: tuple[Message, ...]) -> None:
        """Write the content of a role in parts if its text is lost otherwise."""
        if _WORD in written(*before, said(role, _WORD), *after):
            return
        parts.add(role)
        if _WORD not in written(*before, said(role, _WORD), *after):
            parts.discard(role)

    settle_on_form("user", (), ())
    user = said("user", ".")
    settle_on_form("assistant", (user,), ())
    for role in ("system", "developer"):
        settle_on_form(role, (), (user,))
    forms: list[tuple[str | None, Any]] = list(product((None, ""), (_ARGUMENTS, json.dumps(_ARGUMENTS))))
    for content, arguments in [*forms, forms[0]]:  # the first, which the standard is, if all are refused
        function = {"name": _WORD, "arguments": arguments}
        call = {"role": "assistant", "tool_calls": [{"type": "function", "id": _ID, "function": function}]}
        call |= {} if content is None else said("assistant", content)
        text = written(user, call)
        if text and str(_ARGUMENTS) not in text:  # Python's way to write a dictionary is no model's
            break
    result = {"name": _WORD, "tool_call_id": _ID}
    settle_on_form("tool", (user, call), ())
    following = []
    for asked, reply in ((said("assistant", "."), user), (call, said("tool", ".") | result)):
        alone, continued = written(user, asked), written(user, asked, reply)
        following.append(continued[len(alone) :] if alone and continued.startswith(alone) else "")
    return TemplateReading(frozenset(parts), content, isinstance(arguments, str), *following)


def _parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


def _spelled(messages: list[Message], template: str, reading: TemplateReading) -> list[Message]:
    """Return messages in the words that a template reads: content as text or parts, reasoning under each name that it
    has for it (with transformers 5.24, `thinking` is one), and the arguments of calls as a dictionary or as text.
    Raise a `ValueError` if it needs a dictionary, and a call's arguments are the text of none."""
    names = [name for name in REASONING[1:] if re.search(rf"""[.'"]{name}\b""", template)]
    found = []
    for given in messages:
        message = dict(given)
        if "reasoning_content" in message:
            message = {**dict.fromkeys(names, message["reasoning_content"]), **message}
        if message.get("tool_calls"):
            message["tool_calls"] = [_spelled_call(call, reading) for call in message["tool_calls"]]
            if reading.call_content is not None:
                message.setdefault("content", reading.call_content)
        if message["role"] in reading.parts and isinstance(message.get("content"), str):
            message["content"] = _parts(message["content"])
        found.append(message)
    return found


def _spelled_call(call: dict[str, Any], reading: TemplateReading) -> dict[str, Any]:
    if isinstance(call.get("function"), dict):
        return {**call, "function": _spelled_call(call["function"], reading)}
    arguments = call.get("arguments")
    if arguments is None or isinstance(arguments, str) == reading.writes_arguments:
        return call
    if reading.writes_arguments:
        return {**call, "arguments": json.dumps(arguments, ensure_ascii=False)}
    try:
        parsed = json.loads(arguments) if arguments.strip() else {}
    except ValueError:
        parsed = None
    if not isinstance(parsed, dict):
        raise ValueError(
            f"The arguments of a call are {arguments[:100]!r}, expected a dictionary or the JSON text of one: correct "
            "them, or leave such rows out."
        )
    return {**call, "arguments": parsed}
