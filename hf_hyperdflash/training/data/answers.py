"""Answers of the target itself to the prompts of a dataset: drafters that are trained on them accept more.

Every user turn of a conversation is answered in sequence; the answers of the dataset are not read. The target answers
here, or a server does (`served_answers`).

Here, prompts of about one length share a batch, padded on the left; prompts of exactly one length where the target's
text would depend on the padding, as DeepSeek-V4's does. Batches and random seeds follow from the prompts alone, so
that a stopped run that is started again with the same arguments ends in the same text.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import groupby, takewhile
from pathlib import Path
from typing import Any, cast

import torch
from torch.nn.utils.rnn import pad_sequence
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...targets.registry import target_of
from .encoding import end_ids_of
from .file_positions import locating_errors
from .messages import Json, Message, Tool, read_tools, to_messages
from .rows import load_rows
from .templates import ChatTemplate

Answer = tuple[Message, bool]  # and whether it is cut off, so that it has no end to learn from

END_THINK = "</think>"
CHUNK = 16  # batches of conversations with several turns that are answered together: their lengths drift apart


@dataclass(frozen=True)
class AnswerSettings:
    """What shapes an answer. All but the batch size is written beside the answers (`answers.jsonl.settings`). A
    temperature of 0 is greedy, `dtype` is the target's as it was asked for, and the seed is that of sampling and of
    the order of the batches."""

    question_suffix: str = ""
    max_prompt_length: int = 4096
    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    thinking: bool = False
    seed: int = 0
    dtype: str | None = None
    batch_size: int = 64

    def written(self, target: str, tokenizer: PreTrainedTokenizerBase | None = None) -> dict[str, str | float | None]:
        """Return what is written beside the answers, the target without this machine's folders. Without a tokenizer
        it is a server that answers, whose template and dtype are its own."""
        is_folder = Path(target).is_absolute() or Path(target).exists()
        found = {"target": Path(target).name if is_folder else target, **asdict(self)}
        del found["batch_size"]
        if tokenizer is None:
            del found["dtype"]
        else:
            found["chat_template"] = hashlib.sha256(str(tokenizer.chat_template).encode()).hexdigest()[:16]
        return found


def check_tokenizer(target: str, tokenizer: PreTrainedTokenizerBase, thinking: bool) -> None:
    """Raise a `ValueError` if the tokenizer has no chat template, or no end of the reasoning that is asked for."""
    if not tokenizer.chat_template:
        raise ValueError(f"The tokenizer of {target} has no chat template: name one with `--chat-template FILE`.")
    if thinking and END_THINK not in tokenizer.get_vocab():
        raise ValueError(f"`--thinking`: the tokenizer of {target} has no {END_THINK} token to end reasoning with.")


class Conversation:
    """Messages so far and user turns that wait; `ids` is the prompt of the next answer. Without a tokenizer there are
    none: a server's own template makes its prompts."""

    def __init__(
        self, row: Mapping[str, Json], settings: AnswerSettings, tokenizer: PreTrainedTokenizerBase | None = None
    ) -> None:
        self.tokenizer, self.settings, self.tools = tokenizer, settings, read_tools(row)
        turns = [dict(message) for message in to_messages(row) if message["role"] != "assistant"]
        if row.get("question"):
            [turn for turn in turns if turn["role"] == "user"][-1]["content"] += settings.question_suffix
        # Up to the first that depends on an answer of the dataset, as a tool's does.
        self.waiting = list(takewhile(lambda turn: turn["role"] in ("system", "developer", "user"), turns))
        self.prompt_id = prompt_id(self.waiting, self.tools)
        self.has_several = sum(turn["role"] == "user" for turn in self.waiting) > 1
        self.messages: list[Message] = []
        self.truncated = False
        self.ids: list[int] = []
        self.new_tokens = 0
        self.exact: list[tuple[list[int], list[int]]] = []  # each prompt and answer, if a server gives their tokens

    def ask(self) -> bool:
        """Go on to the next user turn. False if the conversation is over, as where the chat template refuses more."""
        messages = list(self.messages)
        while self.waiting and (not messages or messages[-1]["role"] != "user"):
            messages.append(self.waiting.pop(0))
        if self.truncated or not messages or messages[-1]["role"] != "user":
            return False
        if self.tokenizer is not None:
            try:
                text = ChatTemplate(self.tokenizer, self.tools).render(messages, self.settings.thinking, prompt=True)
            except ValueError:
                if not self.messages:
                    raise
                return False
            ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
            if len(ids) > self.settings.max_prompt_length:
                return False
            self.ids = ids
        self.messages = messages
        return True

    def add(self, answer: Answer) -> None:
        message, self.truncated = answer
        self.messages.append(message)
        if message.get("tool_calls"):  # nobody says what the tool answers
            self.waiting.clear()

    def row(self) -> dict[str, object]:
        """Return the line that is written of it. If all tokens are known, it has those of the last prompt and answer,
        and a loss mask of the answers in them: an earlier one that the template changes later is not marked."""
        row = {"messages": self.messages, "truncated": self.truncated, "prompt_id": self.prompt_id}
        row |= {"tools": json.dumps(self.tools)} if self.tools else {}
        if len(self.exact) == sum(message["role"] == "assistant" for message in self.messages):
            ids = [token for part in self.exact[-1] for token in part]
            mask = [0] * len(ids)
            for prompt, answer in self.exact:
                first, end = len(prompt), len(prompt) + len(answer)
                if ids[:first] == prompt and ids[first:end] == answer:
                    mask[first:end] = [1] * len(answer)
            row |= {"input_ids": ids, "loss_mask": mask}
        return row


def prompt_id(messages: list[Message], tools: list[Tool] | None = None) -> str:
    """Return what a conversation is recognized by when a run goes on: its tools, its system prompt and all user
    turns."""
    asked = [[m["role"], m["content"]] for m in messages if m["role"] != "assistant"] + (tools or [])
    return hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:16]


def read_conversations(
    sources: Iterable[str],
    tokenizer: PreTrainedTokenizerBase | None,
    settings: AnswerSettings,
    split: str = "train",
    limit: int | None = None,
) -> list[Conversation]:
    """Return the different prompts of datasets, `limit` rows of each, and print what is left out."""
    found: dict[str, Conversation] = {}
    refused: list[str] = []
    read = 0
    for source in sources:
        rows = load_rows(source, split)
        for row in rows.select(range(min(limit or len(rows), len(rows)))):
            read += 1
            try:
                with locating_errors(row, read - 1):
                    conversation = Conversation(row, settings, tokenizer)
                    if conversation.prompt_id not in found and conversation.ask():
                        found[conversation.prompt_id] = conversation
            except ValueError as error:
                refused.append(str(error))
    rest = read - len(found) - len(refused)
    print(f"{len(found)} conversations; {rest} repeated, too long or without a question")
    if refused:
        message = f"{len(refused)} of {read} rows cannot be used, the first of them {refused[0]}"
        if not found:
            raise ValueError(message)
        print(f"Skipped {message}")
    return list(found.values())


class WrittenAnswers:
    """The answers in a file, and what shaped them in the file beside it. Those of other settings are refused."""

    def __init__(self, path: Path, settings: Mapping[str, str | float | None]) -> None:
        self.path = path
        self.beside = path.with_name(f"{path.name}.settings")  # a suffix that nobody reads as rows
        is_there = self.beside.exists() and self.path.exists()
        then = json.loads(self.beside.read_text(encoding="utf-8")) if is_there else {}
        changed = sorted(
            name for name in then.keys() & settings.keys() if not _is_same(then[name], settings[name], name)
        )
        if changed:
            differ = "; ".join(
                f"{'the target' if name == 'target' else '--' + name.replace('_', '-')} was {then[name]!r} and is "
                f"{settings[name]!r}"
                for name in changed
            )
            raise ValueError(
                f"{self.path} has answers of other settings: {differ}. Name another --output, or delete that one."
            )
        # Another way of answering may go on. One of them has a dtype, and one the target's whole name.
        self.settings = {**then, **settings}
        self.settings["target"] = max(then.get("target", ""), settings["target"], key=len)
        self.answers = self._read()
        self.cut = [answers[-1][1] for answers in self.answers.values()]

    def _read(self) -> dict[str, list[Answer]]:
        """Return messages by conversation. The unfinished last line of a killed run is removed."""
        if not self.path.exists():
            return {}
        lines, newline, _ = self.path.read_bytes().rpartition(b"\n")
        found = {}
        for number, line in enumerate(lines.splitlines(), start=1):
            try:
                row = json.loads(line)
                *earlier, last = row["messages"]
                answers = [*((message, False) for message in earlier), (last, row["truncated"])]
            except (ValueError, KeyError, TypeError):
                raise ValueError(
                    f"{self.path}:{number} was not written by `hf-hyperdflash answers`: name another --output."
                ) from None
            found[row.get("prompt_id") or prompt_id(row["messages"])] = answers
        os.truncate(self.path, len(lines + newline))
        return found

    def add(self, asked: list[Conversation], answered: Iterable[list[Conversation]]) -> None:
        """Write a line of each conversation that has none yet as soon as it is over, and show how far it is."""
        waiting = {conversation.prompt_id for conversation in asked} - self.answers.keys()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self.beside.with_name(f"{self.beside.name}.tmp")  # a kill leaves the settings whole
        unfinished.write_text(json.dumps(self.settings, indent=1))
        os.replace(unfinished, self.beside)
        bar = {"total": len(asked), "initial": len(asked) - len(waiting), "smoothing": 0}  # its end by the mean
        tokens, began = 0, time.monotonic()
        with self.path.open("a") as file, tqdm(**bar, desc="answering", unit="prompt") as progress:
            for over in answered:
                new = [conversation for conversation in over if conversation.prompt_id in waiting]
                file.writelines(json.dumps(conversation.row()) + "\n" for conversation in new)
                file.flush()
                self.cut += [conversation.truncated for conversation in new]
                tokens += sum(conversation.new_tokens for conversation in new)
                progress.set_postfix_str(f"{tokens / (time.monotonic() - began):,.0f} tokens/s", refresh=False)
                progress.update(len(new))  # at once: the first of a batch took no less time than all of it

    def summary(self, max_new_tokens: int) -> str:
        text = f"{len(self.cut)} rows in {self.path}"
        if any(self.cut):
            text += (
                f"; {sum(self.cut)} of them hit --max-new-tokens {max_new_tokens}: training uses these as far as they "
                "go, without an end"
            )
        return f"{text}."


def _is_same(then: object, now: object, name: str) -> bool:
    """Return whether a setting is what it was. One server knows a target by its folder, another by its name on the
    Hub, of which the folder has the last part."""
    if name != "target" or ("/" in str(then) and "/" in str(now)):
        return then == now
    return str(then).rpartition("/")[2] == str(now).rpartition("/")[2]


def answer_here(
    target: PreTrainedModel, asked: list[Conversation], written: Mapping[str, list[Answer]]
) -> Iterator[list[Conversation]]:
    """Let the target answer conversations, in batches; yield those that are over. Those that are written already are
    answered again if others of their batch are not."""
    how = asked[0].settings
    # Conversations that share batches: single turns; longer ones with neighbours in length.
    single, several = ([c for c in asked if c.has_several == wanted] for wanted in (False, True))
    chunks, size = _batches(single, target), CHUNK * how.batch_size
    several.sort(key=lambda c: len(c.ids))
    chunks += [several[first : first + size] for first in range(0, len(several), size)]
    random.Random(how.seed).shuffle(chunks)  # a run that is stopped early has seen prompts of all kinds
    for chunk in chunks:
        while chunk:
            following: list[Conversation] = []
            for batch in _batches(chunk, target):
                if all(len(c.messages) < len(written.get(c.prompt_id, ())) for c in batch):
                    answers = [written[c.prompt_id][len(c.messages)] for c in batch]
                else:
                    answers = answer_batch(target, batch)
                over: list[Conversation] = []
                for conversation, answer in zip(batch, answers):
                    conversation.add(answer)
                    (following if conversation.ask() else over).append(conversation)
                yield over
            chunk = following


def _batches(conversations: list[Conversation], target: PreTrainedModel) -> list[list[Conversation]]:
    """Return batches of neighbours in length, or of one length where the text would depend on the padding; the
    shortest prompts first."""
    ordered, by_length = sorted(conversations, key=lambda c: len(c.ids)), target_of(target).skips_padding
    groups = [list(group) for _, group in groupby(ordered, key=lambda c: len(c.ids) if by_length else 0)]
    size = conversations[0].settings.batch_size if conversations else 1
    return [group[first : first + size] for group in groups for first in range(0, len(group), size)]


def answer_batch(target: PreTrainedModel, batch: list[Conversation]) -> list[Answer]:
    """Return the target's answers to the prompts of a batch."""
    tokenizer, how = cast(PreTrainedTokenizerBase, batch[0].tokenizer), batch[0].settings
    device = cast(torch.Tensor, target.get_input_embeddings().weight).device
    prompts = [torch.tensor(conversation.ids, device=device) for conversation in batch]
    masks = [torch.ones_like(prompt) for prompt in prompts]
    ids, mask = (pad_sequence(rows, batch_first=True, padding_side="left") for rows in (prompts, masks))
    torch.manual_seed(how.seed + int(batch[0].prompt_id[:8], 16) + len(batch[0].messages))
    options: dict[str, Any] = {"do_sample": False}
    if how.temperature:
        options = {"do_sample": True, "temperature": how.temperature, "top_p": how.top_p, "top_k": 0}
    out = cast(Any, target).generate(ids, attention_mask=mask, max_new_tokens=how.max_new_tokens, **options)
    ends = end_ids_of(target)
    rows = out[:, ids.shape[1] :].tolist()
    for conversation, row in zip(batch, rows):
        conversation.new_tokens += next((place + 1 for place, token in enumerate(row) if token in ends), len(row))
    return [parse_answer(tokenizer, row, ends, how.thinking) for row in rows]


def parse_answer(tokenizer: PreTrainedTokenizerBase, ids: list[int], ends: list[int], thinking: bool) -> Answer:
    """Return the message of generated tokens, its reasoning apart, and whether it is cut off."""
    end = next((place for place, token in enumerate(ids) if token in ends), None)
    ids, truncated, message = ids[:end], end is None, {"role": "assistant"}
    if thinking:
        mark = tokenizer.convert_tokens_to_ids(END_THINK)
        at = ids.index(mark) if mark in ids else len(ids)
        truncated |= at == len(ids)
        message["reasoning_content"], ids = str(tokenizer.decode(ids[:at], skip_special_tokens=True)), ids[at + 1 :]
    message["content"] = str(tokenizer.decode(ids, skip_special_tokens=True))
    # A cut may fall within a character.
    return {key: text.rstrip("\ufffd") if truncated else text for key, text in message.items()}, truncated
