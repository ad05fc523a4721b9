"""Conversations to tokens: a prompt to answer, or a whole conversation with the assistant's tokens marked."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping
from itertools import accumulate
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .file_positions import locating_errors
from .messages import Message, Tool, function_name, is_trained, read_tools, says_nothing, to_messages
from .templates import ChatTemplate, Spans

_GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")


def encode_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[Message],
    truncated: bool = False,
    tools: list[Tool] | None = None,
    end_ids: Collection[int] | None = None,
    notes: list[str] | None = None,
) -> dict[str, list[int]]:
    """Tokenize a conversation with the tokenizer's chat template and mark the assistant's tokens: `input_ids` `[seq]`
    and `loss_mask` `[seq]`, 1 on the tokens of answers including the end of the turn.

    The answers are the text inside the template's `{% generation %}` tags. In a template without tags, an answer is
    what the conversation up to it adds to its generation prompt; an answer that is rendered differently once the
    conversation goes on (templates that drop old reasoning) is not supervised. Neither is one whose `train` is False,
    nor the end of a `truncated` one. What follows the last answer is left out. A turn with `reasoning_content` is in
    thinking mode.

    Where an answer has no end token of its own (`end_ids`, or any special token), and the next turn begins with one
    (GLM's `<|user|>`), that belongs to the answer. It is added after the last one.

    Tokens are those of the whole text, as the tokenizer writes them. One that reaches from a prompt into an answer,
    which generation never writes, is written as two where the tokenizer can, else it is not supervised.

    `notes` gets the reasons of what is not supervised, keys of [`~training.data.rows.LOG_LINES`]: one for each answer.
    """
    notes = [] if notes is None else notes
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    notes += ["excluded" for i in answers if not is_trained(messages[i])]
    trained = [i for i in answers if is_trained(messages[i])]
    if trained and trained[-1] + 1 < len(messages):
        notes += ["tail"] * (trained[-1] == answers[-1])
        messages, truncated = messages[: trained[-1] + 1], False
    template = ChatTemplate(tokenizer, tools)
    text, found, reasons = _answer_spans(template, messages)
    notes += reasons + _omitted_parts(text, messages, tools)
    spans = [span for span in found if span is not None]
    if spans:
        text, spans = _with_ends(tokenizer, template, text, spans, messages[-1], end_ids)
    if truncated and spans and found[-1] is not None and messages[-1]["role"] == "assistant":
        # The text ends after the words of the last answer. If they are not found, that is not supervised.
        located, answer = len(spans), messages[-1].get("content") or messages[-1].get("reasoning_content") or ""
        for words in (answer, answer.strip()):
            first = text.rfind(words) if words else -1
            cut = first + len(words)
            if any(start <= first and cut <= end for start, end in spans):
                text, spans = text[:cut], [(start, min(end, cut)) for start, end in spans if start < cut]
                break
        else:
            spans = spans[:-1]
        notes += ["uncut"] * (located - len(spans))
    ids, mask, joined = _tokens(tokenizer, text, spans)
    notes += ["joined"] * joined
    return {"input_ids": ids, "loss_mask": mask}


def end_ids_of(target: PreTrainedModel) -> list[int]:
    """Return the tokens that end a target's text."""
    ends: Any = target.generation_config.eos_token_id if target.generation_config else None
    return [] if ends is None else list(ends) if isinstance(ends, (list, tuple)) else [int(ends)]


def _tokens(tokenizer: PreTrainedTokenizerBase, text: str, spans: Spans) -> tuple[list[int], list[int], int]:
    """Return the tokens of a text, whether each lies in one of the spans, and how many spans have none, because the
    token that they are in begins before them."""
    ids, ends = _tokens_with_ends(tokenizer, text, [cut for span in spans for cut in span])
    whole = set(ends)
    straddling = [start for start, _ in spans if start and start not in whole]
    if straddling:
        parts = [
            (_tokens_with_ends(tokenizer, text[start:end], ()), start)
            for start, end in zip([0, *straddling], [*straddling, len(text)])
        ]
        apart = [token for (tokens, _), _ in parts for token in tokens]
        text_apart, whole_text = (tokenizer.decode(each, clean_up_tokenization_spaces=False) for each in (apart, ids))
        if text_apart == whole_text:  # else a part got a space of its own, say
            ids, ends = apart, [start + end for (_, those), start in parts for end in those]
    mask, joined = [0] * len(ids), 0
    for start, end in spans:
        first, stop = bisect_right(ends, start), bisect_right(ends, end)
        if start and ends[first - 1 : first] != [start]:
            first += 1
            joined += first >= stop and bool(text[start:end].strip())
        # Some end tokens take the white space with them that follows.
        if 0 < stop < len(ids) and ends[stop - 1] < end and not text[end : ends[stop]].strip():
            stop += 1
        mask[first:stop] = [1] * (stop - first)
    return ids, mask, joined


def _tokens_with_ends(
    tokenizer: PreTrainedTokenizerBase, text: str, cuts: Iterable[int]
) -> tuple[list[int], list[int]]:
    """Return the tokens of a text and the end of each in it. Without offsets, a token ends at the next of `cuts`."""
    if tokenizer.is_fast:
        encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        return encoding["input_ids"], list(accumulate((end for _, end in encoding["offset_mapping"]), max))
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    ends: list[int] = []
    for cut in sorted({*cuts, len(text)}):
        before = tokenizer(text[:cut], add_special_tokens=False)["input_ids"]
        if ids[: len(before)] != before:
            raise ValueError(
                f"{type(tokenizer).__name__} does not say where its tokens are, and writes {text[:cut][-20:]!r} "
                f"otherwise where {text[cut:][:20]!r} follows. Use a fast tokenizer, or leave such rows out."
            )
        ends += [cut] * (len(before) - len(ends))
    return ids, ends


def _answer_spans(
    template: ChatTemplate, messages: list[Message]
) -> tuple[str, list[tuple[int, int] | None], list[str]]:
    """Return the rendered conversation, the spans `text[start:end]` of the answers, None where one is not found, and
    why those are not."""
    if not _GENERATION_TAG.search(template.text):
        return _spans_by_prefix(template, messages)
    blocks: Spans = []
    text = template.render(messages, bool(messages[-1].get("reasoning_content")), blocks=blocks)
    answers = [message for message in messages if message["role"] == "assistant"]
    if len(blocks) == len(answers):
        blocks = [block for block, answer in zip(blocks, answers) if is_trained(answer)]
    elif not all(map(is_trained, answers)):
        raise ValueError(
            f"Some answers are not to be trained on (`train`), and which ones cannot be told: {len(answers)} answers "
            f"have {len(blocks)} blocks of {{% generation %}} in the chat template's text."
        )
    spans = [(start, end) if start < end else None for start, end in blocks]
    said = sum(not says_nothing(answer) for answer in answers if is_trained(answer))
    return text, spans, ["untagged"] * (said - sum(span is not None for span in spans))


def _with_ends(
    tokenizer: PreTrainedTokenizerBase,
    template: ChatTemplate,
    text: str,
    spans: Spans,
    last: Message,
    end_ids: Collection[int] | None,
) -> tuple[str, Spans]:
    """Let each answer end with the token that ends it: its own, without the white space after it, which is never
    generated; else the one that the next turn begins with, which follows the last answer, too."""
    added = tokenizer.added_tokens_decoder.values()
    special = [*tokenizer.all_special_tokens, *(token.content for token in added if token.special)]
    ends = special if end_ids is None else list(filter(None, tokenizer.convert_ids_to_tokens(list(end_ids))))
    openings = []  # of the turns after an answer and after a call, with the white space before them
    for following in (template.reading.after_answer, template.reading.after_call):
        space = len(following) - len(following.lstrip())
        begun = [following[: space + len(end)] for end in ends if following.startswith(end, space)]
        openings.append(max(begun, key=len, default=""))
    own = (*special, *ends)
    if spans[-1][1] == len(text) and last["role"] == "assistant" and not text.rstrip().endswith(own):
        text += openings[bool(last.get("tool_calls"))]
    ended = []
    for start, end in spans:
        answer = text[start:end].rstrip()
        if answer.endswith(own):
            end = start + len(answer)
        else:
            end += max((len(opening) for opening in openings if text.startswith(opening, end)), default=0)
        ended.append((start, end))
    return text, ended


def _omitted_parts(text: str, messages: list[Message], tools: list[Tool] | None) -> list[str]:
    """Return the parts of a row that the chat template does not write: keys of [`~training.data.rows.LOG_LINES`]."""
    calls = [call for message in messages for call in message.get("tool_calls") or ()]
    parts_by_kind = {
        "system": [message.get("content") for message in messages if message["role"] == "system"],
        "reasoning": [message.get("reasoning_content") for message in messages[-1:]],
        "tools": [function_name(tool) for tool in tools or ()],
        "calls": [function_name(call) for call in calls],
    }
    return [
        name for name, parts in parts_by_kind.items() if any(str(part or "").strip() not in text for part in parts)
    ]


def _spans_by_prefix(
    template: ChatTemplate, messages: list[Message]
) -> tuple[str, list[tuple[int, int] | None], list[str]]:
    thinks = [bool(message.get("reasoning_content")) for message in messages]
    text = template.render(messages, thinks[-1])
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant" and is_trained(message)]
    spans: list[tuple[int, int] | None] = []
    reasons = []
    for i in answers:
        spans.append(None)
        if i == 0:
            reasons.append("unasked")
            continue
        through = template.render(messages[: i + 1], thinks[i])
        reason = "unprompted"
        for thinking in (thinks[i], not thinks[i]):  # the other one where reasoning is written into the content
            prompt = template.render(messages[:i], thinking, prompt=True)
            if not through.startswith(prompt):
                continue
            if through == prompt and not says_nothing(messages[i]):
                reason = "unwritten"
            elif text.startswith(through):
                spans[-1] = (len(prompt), len(through))
                break
            else:
                reason = "untrained"
        if spans[-1] is None:
            reasons.append(reason)
    if reasons and reasons[-1] == "unprompted" and not any(spans):
        raise ValueError(
            f"No answer can be located in the conversation that begins with {str(messages[0])[:200]}: the chat "
            f"template renders {text[-200:]!r}, which does not continue its own generation prompt {prompt[-100:]!r}. "
            "Put the assistant's text of the template between {% generation %} and {% endgeneration %}, or move "
            "reasoning to `reasoning_content`."
        )
    return text, spans, reasons


def encode_prompts(
    tokenizer: PreTrainedTokenizerBase,
    rows: Iterable[Mapping[str, Any]],
    thinking: bool = False,
    at_most: int | None = None,
) -> list[torch.Tensor]:
    """Return generation prompts of dataset rows, `[1, seq]` each: each conversation without its last answer. Of
    several user turns without an answer, only the first is asked. `thinking` asks for reasoning.

    With `at_most`, rows that give no prompt are skipped until so many are found. Raise a `ValueError` if the tokenizer
    has no chat template, or a row (with `at_most`, every row) no user turn, or the template refuses it."""
    ChatTemplate(tokenizer)  # says that there is none, which is no row's fault
    prompts: list[torch.Tensor] = []
    refused: ValueError | None = None
    for number, row in enumerate(rows):
        if at_most is not None and len(prompts) == at_most:
            break
        if not isinstance(row, Mapping):
            raise ValueError(f'Row {number} (the first is 0) is {row!r}, expected a row like {{"turns": ["..."]}}.')
        try:
            with locating_errors(row, number):
                messages = to_messages(row)
                roles = [message["role"] for message in messages]
                while roles and roles[-1] == "assistant":
                    roles.pop()
                while roles[-2:] == ["user", "user"]:
                    roles.pop()
                if not roles:
                    raise ValueError("The conversation asks nothing: expected a message before the answer.")
                text = ChatTemplate(tokenizer, read_tools(row)).render(messages[: len(roles)], thinking, prompt=True)
        except ValueError as error:
            if at_most is None:
                raise
            refused = refused or error
            continue
        prompts.append(tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"])
    if refused and not prompts:
        raise refused
    return prompts
