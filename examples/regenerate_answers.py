"""Rewrite a dataset's answers with the target itself: drafters trained on the target's own text accept more.

    python examples/regenerate_answers.py --target tiny-v4 --data openai/gsm8k:main --output answers.jsonl

Every user turn of a conversation is answered in sequence; the answers of the dataset are not read. Prompts of about
one length share a batch, padded on the left; of exactly one length where the target's text would depend on padding, as
DeepSeek-V4's does. A killed run started again with the same arguments goes on where it stopped and ends in the same
text: batches and random seeds follow from the prompts. More prompts may be added so, by another --limit or --data.
What shapes the answers is written beside them (`answers.jsonl.settings`): other settings need another --output.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import random
from collections.abc import Iterator
from itertools import groupby, takewhile
from pathlib import Path

import torch
from torch.nn.utils.rnn import pad_sequence
from tqdm.auto import tqdm
from transformers import AutoTokenizer

from hf_hyperdflash import load_target
from hf_hyperdflash.cli.models import check_writable
from hf_hyperdflash.hub.loading import check_target
from hf_hyperdflash.targets.registry import target_of
from hf_hyperdflash.training.data.file_positions import add_file_positions, locating_errors
from hf_hyperdflash.training.data.messages import Message, read_tools, to_messages
from hf_hyperdflash.training.data.rows import load_rows, render

Answer = tuple[Message, bool]  # and whether it is cut off, so that it has no end to learn from

END_THINK = "</think>"
SHAPING = (
    "question_suffix", "max_prompt_length", "max_new_tokens", "temperature", "top_p", "thinking", "seed", "dtype",
)  # fmt: skip
CHUNK = 16  # batches of conversations with several turns that are answered together: their lengths drift apart


def function_name(messages: list[Message], tools: list | None = None) -> str:
    """What a conversation is recognized by when a run goes on: its tools, its system prompt and all user turns."""
    asked = [[m["role"], m["content"]] for m in messages if m["role"] != "assistant"] + (tools or [])
    return hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:16]


class Conversation:
    """Messages so far and user turns that wait; `ids` is the prompt of the next answer."""

    def __init__(self, turns: list[Message], tools: list | None) -> None:
        self.name, self.waiting, self.tools = function_name(turns, tools), turns, tools
        self.several = sum(m["role"] == "user" for m in turns) > 1
        self.messages: list[Message] = []
        self.truncated = False

    def ask(self, tokenizer, args: argparse.Namespace) -> bool:
        """Go on to the next user turn. False if the conversation is over, as where the chat template refuses more."""
        messages = list(self.messages)
        while self.waiting and (not messages or messages[-1]["role"] != "user"):
            messages.append(self.waiting.pop(0))
        if self.truncated or not messages or messages[-1]["role"] != "user":
            return False
        try:
            text = render(tokenizer, messages, self.tools, args.thinking, prompt=True)
        except ValueError:
            if not self.messages:
                raise
            return False
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        if len(ids) > args.max_prompt_length:
            return False
        self.messages, self.ids = messages, ids
        return True


def user_turns(row: dict, suffix: str) -> list[Message]:
    """System and user messages up to the first that depends on an answer of the dataset, as a tool's does."""
    turns = [dict(m) for m in to_messages(row) if m["role"] != "assistant"]
    if row.get("question"):
        [m for m in turns if m["role"] == "user"][-1]["content"] += suffix
    return list(takewhile(lambda m: m["role"] in ("system", "developer", "user"), turns))


def read_conversations(tokenizer, args: argparse.Namespace) -> list[Conversation]:
    found: dict[str, Conversation] = {}
    refused: list[str] = []
    read = 0
    for source in args.data:
        rows = load_rows(source, args.split)
        rows = add_file_positions(rows.select(range(min(args.limit or len(rows), len(rows)))), source)
        for row in rows:
            read += 1
            try:
                with locating_errors(row, read - 1):
                    conversation = Conversation(user_turns(row, args.question_suffix), read_tools(row))
                    if conversation.name not in found and conversation.ask(tokenizer, args):
                        found[conversation.name] = conversation
            except ValueError as error:
                refused.append(str(error))
    rest = read - len(found) - len(refused)
    print(f"{len(found)} conversations; {rest} repeated, too long or without a question")
    if refused:
        told = f"{len(refused)} of {read} rows cannot be used, the first of them {refused[0]}"
        if not found:
            raise ValueError(told)
        print(f"Skipped {told}")
    return list(found.values())


def alike(conversations: list[Conversation], target) -> list[list[Conversation]]:
    """Those that may share batches, shortest first: all of them, or those of each length."""
    ordered = sorted(conversations, key=lambda c: len(c.ids))
    by_length = target_of(target).skips_padding
    return [list(group) for _, group in groupby(ordered, key=lambda c: len(c.ids) if by_length else 0)]


def pieces(conversations: list[Conversation], size: int) -> list[list[Conversation]]:
    return [conversations[first : first + size] for first in range(0, len(conversations), size)]


def chunks(conversations: list[Conversation], target, args: argparse.Namespace) -> list[list[Conversation]]:
    """Conversations that share batches: single turns; longer ones with neighbours in length."""
    single, size = [c for c in conversations if not c.several], CHUNK * args.batch_size
    result = [piece for group in alike(single, target) for piece in pieces(group, args.batch_size)]
    result += pieces(sorted((c for c in conversations if c.several), key=lambda c: len(c.ids)), size)
    random.Random(args.seed).shuffle(result)  # a run that is stopped early has seen prompts of all kinds
    return result


def regenerate(target, tokenizer, chunk, done: dict[str, list[Answer]], args) -> Iterator[list[Conversation]]:
    """Answer all turns of some conversations; yield those of a batch that are over. One that is all done is only
    read."""
    while chunk:
        following = []
        for group in alike(chunk, target):
            for batch in pieces(group, args.batch_size):
                if all(len(c.messages) < len(done.get(c.name, ())) for c in batch):
                    answers = [done[c.name][len(c.messages)] for c in batch]
                else:
                    answers = generate(target, tokenizer, batch, args)
                over = []
                for conversation, (message, conversation.truncated) in zip(batch, answers):
                    conversation.messages.append(message)
                    (following if conversation.ask(tokenizer, args) else over).append(conversation)
                yield over
        chunk = following


def generate(target, tokenizer, batch: list[Conversation], args: argparse.Namespace) -> list[Answer]:
    prompts = [torch.tensor(c.ids, device=target.get_input_embeddings().weight.device) for c in batch]
    masks = [torch.ones_like(prompt) for prompt in prompts]
    ids, mask = (pad_sequence(rows, batch_first=True, padding_side="left") for rows in (prompts, masks))
    torch.manual_seed(args.seed + int(batch[0].name[:8], 16) + len(batch[0].messages))
    options: dict = {"do_sample": False}
    if args.temperature:
        options = {"do_sample": True, "temperature": args.temperature, "top_p": args.top_p, "top_k": 0}
    out = target.generate(ids, attention_mask=mask, max_new_tokens=args.max_new_tokens, **options)
    ends = target.generation_config.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    return [answer_of(tokenizer, row, ends, args.thinking) for row in out[:, ids.shape[1] :].tolist()]


def answer_of(tokenizer, ids: list[int], ends: list[int], thinking: bool) -> Answer:
    end = next((i for i, token in enumerate(ids) if token in ends), None)
    ids, truncated, message = ids[:end], end is None, {"role": "assistant"}
    if thinking:
        mark = tokenizer.convert_tokens_to_ids(END_THINK)
        at = ids.index(mark) if mark in ids else len(ids)
        truncated |= at == len(ids)
        message["reasoning_content"], ids = tokenizer.decode(ids[:at], skip_special_tokens=True), ids[at + 1 :]
    message["content"] = tokenizer.decode(ids, skip_special_tokens=True)
    # A cut may fall within a character.
    return {k: v.rstrip("\ufffd") if truncated else v for k, v in message.items()}, truncated


def read_done(output: Path) -> dict[str, list[Answer]]:
    """Messages that are written already, by conversation. The unfinished last line of a killed run is removed."""
    if not output.exists():
        return {}
    lines, newline, _ = output.read_bytes().rpartition(b"\n")
    done = {}
    for number, line in enumerate(lines.splitlines(), start=1):
        try:
            row = json.loads(line)
            answers = [(message, False) for message in row["messages"][:-1]] + [
                (row["messages"][-1], row["truncated"])
            ]
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{output}:{number} was not written by this script: name another --output.") from None
        done[row.get("prompt_id") or function_name(row["messages"])] = answers
    os.truncate(output, len(lines + newline))
    return done


def shaping(args: argparse.Namespace, tokenizer) -> dict:
    """The settings that shape an answer, as they are written beside the answers."""
    template = hashlib.sha256(tokenizer.chat_template.encode()).hexdigest()[:16]
    target = Path(args.target).name if Path(args.target).exists() else args.target
    return {"target": target, "chat_template": template, **{name: getattr(args, name) for name in SHAPING}}


def check_settings(output: Path, now: dict) -> None:
    """Refuse to add answers to those that were written with other settings."""
    beside = settings_of(output)
    then = json.loads(beside.read_text()) if beside.exists() and output.exists() else {}
    changed = [name for name in then.keys() & now.keys() if then[name] != now[name]]
    if changed:
        told = "; ".join(f"--{n.replace('_', '-')} was {then[n]!r} and is {now[n]!r}" for n in sorted(changed))
        raise ValueError(f"{output} has answers of other settings: {told}. Name another --output, or delete that one.")


def settings_of(output: Path) -> Path:
    return output.with_name(f"{output.name}.settings")  # a suffix that nobody reads as rows


def check(args: argparse.Namespace) -> None:
    """Refuse what cannot go well before anything is loaded or written."""
    for name in ("limit", "batch_size", "max_prompt_length", "max_new_tokens"):
        if (value := getattr(args, name)) is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} is {value}, expected at least 1.")
    if not 0 <= args.temperature < math.inf:
        raise ValueError(f"--temperature is {args.temperature}, expected at least 0, which is greedy.")
    if not 0 < args.top_p <= 1:
        raise ValueError(f"--top-p is {args.top_p}, expected more than 0 and at most 1.")
    check_writable(Path(args.output).parent)
    check_target(args.target)


def print_end(output: Path, cut: list[bool], args: argparse.Namespace) -> None:
    told = f"{len(cut)} rows in {output}"
    if any(cut):
        told += (
            f"; {sum(cut)} of them hit --max-new-tokens {args.max_new_tokens}: training uses these as far as they go, "
            "without an end"
        )
    print(f"{told}.")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="path or Hub id")
    parser.add_argument("--data", action="append", required=True, help="path or Hub name; repeatable")
    parser.add_argument("--split", default="train")
    parser.add_argument("--chat-template", help="a Jinja file, where the tokenizer has none")
    parser.add_argument("--output", required=True, help="a .jsonl file of messages; appended to")
    parser.add_argument("--question-suffix", default="", help="appended to the prompt of question/answer rows")
    parser.add_argument("--limit", type=int, help="rows per dataset")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--max-prompt-length", type=int, default=4096, help="longer ones end a conversation")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--temperature", type=float, default=0.0, help="0 for greedy")
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--thinking", action="store_true", help="reason first; stored as reasoning_content")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", help="default: bfloat16 on CUDA, else float32")
    parser.add_argument("--device-map", help="as for from_pretrained; default: the first CUDA device or the CPU")
    parser.add_argument("--trust-remote-code", action="store_true", help="run the code that the target brings along")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    check(args)
    cuda = torch.cuda.is_available()
    tokenizer = AutoTokenizer.from_pretrained(args.target, trust_remote_code=args.trust_remote_code)
    if args.chat_template:
        tokenizer.chat_template = Path(args.chat_template).read_text()
    if not tokenizer.chat_template:
        raise SystemExit(f"The tokenizer of {args.target} has no chat template: name one with --chat-template FILE.")
    if args.thinking and END_THINK not in tokenizer.get_vocab():
        raise SystemExit(f"--thinking: the tokenizer of {args.target} has no {END_THINK} token to end reasoning with.")
    dtype = args.dtype or ("bfloat16" if cuda else "float32")
    device_map = args.device_map or ("cuda:0" if cuda else "cpu")
    conversations = read_conversations(tokenizer, args)
    output = Path(args.output)
    settings = shaping(args, tokenizer)
    check_settings(output, settings)
    done = read_done(output)
    cut = [answers[-1][1] for answers in done.values()]
    todo = {c.name for c in conversations} - done.keys()
    if not todo:
        print(f"All {len(conversations)} prompts are answered already.")
        return print_end(output, cut, args)
    if done:
        print(f"{len(done)} rows are in {output} already, {len(todo)} prompts to answer.")
    print(f"Loading {args.target} ...")
    target = load_target(args.target, dtype=dtype, device_map=device_map, trust_remote_code=args.trust_remote_code)
    output.parent.mkdir(parents=True, exist_ok=True)
    settings_of(output).write_text(json.dumps(settings, indent=1))
    bar = {"total": len(conversations), "initial": len(conversations) - len(todo), "smoothing": 0}  # ETA by the mean
    with output.open("a") as file, tqdm(**bar, desc="regenerating", unit="prompt") as progress:
        for chunk in chunks(conversations, target, args):
            for over in regenerate(target, tokenizer, chunk, done, args):
                new = [c for c in over if c.name in todo]
                for c in new:
                    row = {"messages": c.messages, "truncated": c.truncated, "prompt_id": c.name}
                    file.write(json.dumps(row | ({"tools": json.dumps(c.tools)} if c.tools else {})) + "\n")
                    cut.append(c.truncated)
                file.flush()
                progress.update(len(new))  # at once: the first of a batch took no less time than all of it
    print_end(output, cut, args)


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError, ImportError) as error:
        raise SystemExit(f"Error: {error}") from None
    except KeyboardInterrupt:
        raise SystemExit("Stopped. The same command goes on from what is written.") from None
