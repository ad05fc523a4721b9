"""Answers of a target that a server of OpenAI's protocol serves: many conversations at a time.

Messages go there, so that chat template, reasoning and tool calls are the engine's own. If it gives the tokens of
prompt and answer, as vLLM does, a row has them; else training tokenizes the texts again.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

from .answers import END_THINK, Answer, AnswerSettings, Conversation
from .endpoint import RequestFailed, RequestRefused, Requests
from .messages import REASONING, Message

CHAT = "/v1/chat/completions"
_MAX_SEED = 2**31  # llama.cpp's are of 32 bits
_BEGIN_THINK = "<think>"  # which some generate, and others have in their prompt
_ENDED = ("stop", "tool_calls", "function_call")


class ServedTarget:
    """A server's model, which answers conversations.

    Args:
        requests: To the server.
        settings: What shapes an answer.
        report: Gets a line of what the server cannot do.

    Raises:
        ValueError: if the server does not answer, or cannot do what the settings ask for.
    """

    def __init__(self, requests: Requests, settings: AnswerSettings, report: Callable[[str], object] = print) -> None:
        self.requests, self.settings, self.report = requests, settings, report
        self.refused: list[RequestRefused] = []
        self.options: dict[str, object] = {}
        wanted: dict[str, object] = {
            "chat_template_kwargs": {"thinking": settings.thinking, "enable_thinking": settings.thinking},
            "return_token_ids": True,
        }
        if settings.temperature:
            wanted["top_k"] = -1  # all tokens, whatever the target's own generation configuration says
        hello = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}
        ours = {"chat_template_kwargs": wanted["chat_template_kwargs"]}  # which `transformers serve` takes alone
        for options in (wanted, ours, {}):
            try:
                answer = requests.post(CHAT, {**hello, **options})
                self.options = options
                break
            except RequestRefused as error:
                if isinstance(error, RequestFailed) or not options:
                    raise
        where, refused = requests.endpoint.root, [name for name in wanted if name not in self.options]
        if settings.thinking and "chat_template_kwargs" in refused:
            raise ValueError(
                f"`--thinking`: {where} takes no `chat_template_kwargs`, which ask for reasoning: leave it out."
            )
        if refused:
            report(f"{where} does not take {', '.join(refused)}: its own defaults hold.")
        if _tokens(answer) is None:
            if "prompt_tokens" not in (answer.get("usage") or {}):
                report(f"{where} does not tell the length of prompts: `--max-prompt-length` has no effect.")
            report(f"{where} gives no token ids: training tokenizes the text again, with the target's chat template.")

    def answer(self, asked: list[Conversation]) -> Iterator[list[Conversation]]:
        """Yield conversations one by one, as they are over. Those without an answer are left out, and counted."""
        ordered = list(asked)
        random.Random(self.settings.seed).shuffle(ordered)  # a run that is stopped early has seen prompts of all kinds
        for conversation, error in self.requests.map(self._converse, ordered):
            if error is not None:
                self.refused.append(error)
            else:
                yield [conversation]

    def summary(self) -> str:
        """Return what went wrong, in a line; empty if nothing did."""
        lines = []
        if self.requests.retried:
            lines.append(f"{self.requests.retried} requests were tried again.")
        if self.refused:
            lines.append(
                f"{len(self.refused)} prompts have no answer, the first of them because {self.refused[0]} The same "
                "command asks for them again."
            )
        return " ".join(lines)

    def _converse(self, conversation: Conversation) -> None:
        """Answer all turns of a conversation, or those before the first that the server refuses: it may be too long
        for it by then."""
        while True:
            try:
                conversation.add(self._ask(conversation))
            except RequestRefused as error:
                answered = [i for i, message in enumerate(conversation.messages) if message["role"] == "assistant"]
                if isinstance(error, RequestFailed) or not answered:
                    raise
                del conversation.messages[answered[-1] + 1 :]
                return
            if not conversation.ask():
                return

    def _ask(self, conversation: Conversation) -> Answer:
        """Ask for the next answer. Raise [`RequestRefused`] also if its prompt turns out to be longer than it may
        be."""
        how = self.settings
        body: dict[str, object] = {
            "messages": conversation.messages, "max_tokens": how.max_new_tokens, "temperature": how.temperature,
            "top_p": how.top_p, **self.options,
        }  # fmt: skip
        if how.temperature:
            seed = how.seed + int(conversation.prompt_id[:8], 16) + len(conversation.messages)
            body["seed"] = seed % _MAX_SEED
        if conversation.tools:
            conversation.tools = [
                tool if "function" in tool else {"type": "function", "function": tool} for tool in conversation.tools
            ]
            body["tools"] = conversation.tools
        told = self.requests.post(CHAT, body)
        usage, tokens = told.get("usage") or {}, _tokens(told)
        answer = read_answer(told, how.thinking)
        if tokens is not None:
            usage = {"prompt_tokens": len(tokens[0]), "completion_tokens": len(tokens[1])}
        length, limit = usage.get("prompt_tokens") or 0, how.max_prompt_length
        if length > limit:
            raise RequestRefused(f"a prompt has {length} tokens, more than `--max-prompt-length` {limit}.")
        conversation.new_tokens += usage.get("completion_tokens") or 0
        if tokens is not None:
            conversation.exact.append(tokens)
        return answer


def read_answer(told: dict[str, Any], thinking: bool) -> Answer:
    """Return the message of a server's answer, its reasoning and calls apart, and whether it is cut off. Raise
    [`RequestRefused`] if it is none."""
    try:
        choice = told["choices"][0]
        given, ending = choice["message"], choice.get("finish_reason")
        content = given.get("content") or ""
    except (LookupError, TypeError, AttributeError):
        raise RequestRefused(f"The server answers {str(told)[:200]!r}, expected `choices` with a message.") from None
    if ending not in (*_ENDED, "length"):
        raise RequestRefused(f"The server ends an answer because of {ending!r}, expected stop or length.")
    truncated, calls = ending == "length", given.get("tool_calls")
    reasoning = next((given[name] for name in REASONING if given.get(name)), None)
    if thinking and reasoning is None:  # a server without a parser for it
        before, mark, after = content.partition(END_THINK)
        if not mark and not (truncated and content.startswith(_BEGIN_THINK)):
            raise RequestFailed(
                f"`--thinking`: the server answers without reasoning ({content[:60]!r}). Its model has none, or it "
                "was started without a parser for it (vLLM: `--reasoning-parser`)."
            )
        reasoning, content = before.removeprefix(_BEGIN_THINK), after
    if reasoning is not None and not content and not calls:
        truncated = True  # no end of it is there to learn from
    message: Message = {"role": "assistant", "content": content}
    if reasoning is not None:
        message["reasoning_content"] = reasoning
    if truncated:  # a cut may fall within a character
        message = {name: text.rstrip("\ufffd") for name, text in message.items()}
    return (message | {"tool_calls": calls} if calls else message), truncated


def _tokens(told: dict[str, Any]) -> tuple[list[int], list[int]] | None:
    """Return the tokens of prompt and answer, as vLLM gives them; `None` if a server does not."""
    prompt, answer = told.get("prompt_token_ids"), (told.get("choices") or [{}])[0].get("token_ids")
    return (prompt, answer) if prompt and answer else None
