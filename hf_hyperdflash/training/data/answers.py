"""Answers of the target itself to the prompts of a dataset: drafters that are trained on them accept more.

Every user turn of a conversation is answered in sequence; the answers of the dataset are not read. Prompts of about
one length share a batch, padded on the left; prompts of exactly one length where the target's text would depend on
the padding, as DeepSeek-V4's does. Batches and random seeds follow from the prompts alone, so that a stopped run that
is started again with the same arguments ends in the same text.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
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

    def written(self, target: str, tokenizer: PreTrainedTokenizerBase) -> dict[str, str | float | None]:
        """Return what is written beside the answers, the target without this machine's folders."""
        template = hashlib.sha256(str(tokenizer.chat_template).encode()).hexdigest()[:16]
        name = Path(target).name if Path(target).exists() else target
        shaping = {key: value for key, value in asdict(self).items() if key != "batch_size"}
        return {"target": name, "chat_template": template, **shaping}


def check_tokenizer(target: str, tokenizer: PreTrainedTokenizerBase, thinking: bool) -> None:
    """Raise a `ValueError` if the tokenizer has no chat template, or no end of the reasoning that is asked for."""
    if not tokenizer.chat_template:
        raise ValueError(f"The tokenizer of {target} has no chat template: name one with `--chat-template FILE`.")
    if thinking and END_THINK not in tokenizer.get_vocab():
        raise ValueError(f"`--thinking`: the tokenizer of {target} has no {END_THINK} token to end reasoning with.")


class Conversation:
    """Messages so far and user turns that wait; `ids` is the prompt of the next answer."""

    def __init__(self, row: Mapping[str, Json], tokenizer: PreTrainedTokenizerBase, settings: AnswerSettings) -> None:
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

    def ask(self) -> bool:
        """Go on to the next user turn. False if the conversation is over, as where the chat template refuses more."""
        messages = list(self.messages)
        while self.waiting and (not messages or messages[-1]["role"] != "user"):
            messages.append(self.waiting.pop(0))
        if self.truncated or not messages or messages[-1]["role"] != "user":
            return False
        try:
            text = ChatTemplate(self.tokenizer, self.tools).render(messages, self.settings.thinking, prompt=True)
        except ValueError:
            if not self.messages:
                raise
            return False
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        if len(ids) > self.settings.max_prompt_length:
            return False
        self.messages, self.ids = messages, ids
        return True

    def row(self) -> dict[str, object]:
        """Return the line that is written of it."""
        row = {"messages": self.messages, "truncated": self.truncated, "prompt_id": self.prompt_id}
        return row | ({"tools": json.dumps(self.tools)} if self.tools else {})


def prompt_id(messages: list[Message], tools: list[Tool] | None = None) -> str:
    """Return what a conversation is recognized by when a run goes on: its tools, its system prompt and all user
    turns."""
    asked = [[m["role"], m["content"]] for m in messages if m["role"] != "assistant"] + (tools or [])
    return hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:16]


def read_conversations(
    sources: Iterable[str],
    tokenizer: PreTrainedTokenizerBase,
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
                    conversation = Conversation(row, tokenizer, settings)
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
        self.path, self.settings = path, settings
        self.beside = path.with_name(f"{path.name}.settings")  # a suffix that nobody reads as rows
        is_there = self.beside.exists() and self.path.exists()
        then = json.loads(self.beside.read_text(encoding="utf-8")) if is_there else {}
        changed = sorted(name for name in then.keys() & self.settings.keys() if then[name] != self.settings[name])
        if changed:
            differ = "; ".join(
                f"--{name.replace('_', '-')} was {then[name]!r} and is {self.settings[name]!r}" for name in changed
            )
            raise ValueError(
                f"{self.path} has answers of other settings: {differ}. Name another --output, or delete that one."
            )
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

    def add(self, target: PreTrainedModel, asked: list[Conversation]) -> None:
        """Answer the conversations that have no answer yet, and write each line at once."""
        how = asked[0].settings
        waiting = {conversation.prompt_id for conversation in asked} - self.answers.keys()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self.beside.with_name(f"{self.beside.name}.tmp")  # a kill leaves the settings whole
        unfinished.write_text(json.dumps(self.settings, indent=1))
        os.replace(unfinished, self.beside)
        # Conversations that share batches: single turns; longer ones with neighbours in length.
        single, several = ([c for c in asked if c.has_several == wanted] for wanted in (False, True))
        chunks, size = _batches(single, target), CHUNK * how.batch_size
        several.sort(key=lambda c: len(c.ids))
        chunks += [several[first : first + size] for first in range(0, len(several), size)]
        random.Random(how.seed).shuffle(chunks)  # a run that is stopped early has seen prompts of all kinds
        bar = {"total": len(asked), "initial": len(asked) - len(waiting), "smoothing": 0}  # its end by the mean
        with self.path.open("a") as file, tqdm(**bar, desc="answering", unit="prompt") as progress:
            for chunk in chunks:
                for over in self._answered(target, chunk):
                    new = [conversation for conversation in over if conversation.prompt_id in waiting]
                    file.writelines(json.dumps(conversation.row()) + "\n" for conversation in new)
                    file.flush()
                    self.cut += [conversation.truncated for conversation in new]
                    progress.update(len(new))  # at once: the first of a batch took no less time than all of it

    def _answered(self, target: PreTrainedModel, chunk: list[Conversation]) -> Iterator[list[Conversation]]:
        """Answer all turns of some conversations; yield those of a batch that are over. One that is all written is
        only read."""
        while chunk:
            following: list[Conversation] = []
            for batch in _batches(chunk, target):
                if all(len(c.messages) < len(self.answers.get(c.prompt_id, ())) for c in batch):
                    answers = [self.answers[c.prompt_id][len(c.messages)] for c in batch]
                else:
                    answers = answer_batch(target, batch)
                over: list[Conversation] = []
                for conversation, (message, truncated) in zip(batch, answers):
                    conversation.truncated = truncated
                    conversation.messages.append(message)
                    (following if conversation.ask() else over).append(conversation)
                yield over
            chunk = following

    def summary(self, max_new_tokens: int) -> str:
        text = f"{len(self.cut)} rows in {self.path}"
        if any(self.cut):
            text += (
                f"; {sum(self.cut)} of them hit --max-new-tokens {max_new_tokens}: training uses these as far as they "
                "go, without an end"
            )
        return f"{text}."


def _batches(conversations: list[Conversation], target: PreTrainedModel) -> list[list[Conversation]]:
    """Return batches of neighbours in length, or of one length where the text would depend on the padding; the
    shortest prompts first."""
    ordered, by_length = sorted(conversations, key=lambda c: len(c.ids)), target_of(target).skips_padding
    groups = [list(group) for _, group in groupby(ordered, key=lambda c: len(c.ids) if by_length else 0)]
    size = conversations[0].settings.batch_size if conversations else 1
    return [group[first : first + size] for group in groups for first in range(0, len(group), size)]


def answer_batch(target: PreTrainedModel, batch: list[Conversation]) -> list[Answer]:
    """Return the target's answers to the prompts of a batch."""
    tokenizer, how = batch[0].tokenizer, batch[0].settings
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
    return [parse_answer(tokenizer, row, ends, how.thinking) for row in out[:, ids.shape[1] :].tolist()]


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
