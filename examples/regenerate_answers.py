"""Rewrite a dataset's answers with the target itself: drafters trained on the target's own text accept more.

    python examples/regenerate_answers.py --target tiny-v4 --data openai/gsm8k:main --output answers.jsonl

Prompts of equal length share a batch, so nothing is padded (DeepSeek-V4's compressors see padding). A killed run
started again goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import defaultdict
from pathlib import Path

import torch
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_hyperdflash.data import load_rows, to_messages


def prompts_by_length(sources: list[str], suffix: str, limit: int | None, tokenizer) -> dict[int, list[dict]]:
    groups: dict[int, list[dict]] = defaultdict(list)
    for source in sources:
        rows = load_rows(source)
        for row in rows.select(range(min(limit or len(rows), len(rows)))):
            question = to_messages(row)[0]["content"] + (suffix if "question" in row else "")
            messages = [{"role": "user", "content": question}]
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            ids = tokenizer(text, add_special_tokens=False).input_ids
            groups[len(ids)].append({"messages": messages, "ids": ids})
    return groups


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="path or Hub id")
    parser.add_argument("--data", action="append", required=True, help="path or Hub name; repeatable")
    parser.add_argument("--output", required=True, help="a .jsonl file of messages; appended to")
    parser.add_argument("--question-suffix", default="", help="appended to the prompt of question/answer rows")
    parser.add_argument("--limit", type=int, help="rows per dataset")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--temperature", type=float, default=0.0, help="0 for greedy")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    torch.manual_seed(args.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    target = AutoModelForCausalLM.from_pretrained(args.target, dtype=dtype).to(device).eval()
    output = Path(args.output)
    done = set()
    if output.exists():
        done = {json.loads(line)["messages"][0]["content"] for line in output.read_text().splitlines()}
    groups = prompts_by_length(args.data, args.question_suffix, args.limit, tokenizer)
    todo = {n: [p for p in group if p["messages"][0]["content"] not in done] for n, group in groups.items()}
    sampling = {"do_sample": True, "temperature": args.temperature} if args.temperature else {"do_sample": False}
    progress = tqdm(total=sum(map(len, todo.values())), desc="regenerating", unit="prompt")
    tokens = 0
    with output.open("a") as file:
        lengths = list(todo)
        random.Random(args.seed).shuffle(lengths)  # a run that is stopped early has seen prompts of all kinds
        for length in lengths:
            group = todo[length]
            for first in range(0, len(group), args.batch_size):
                batch = group[first : first + args.batch_size]
                ids = torch.tensor([p["ids"] for p in batch], device=device)
                out = target.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=args.max_new_tokens,
                                      **sampling)  # fmt: skip
                for prompt, answer in zip(batch, out[:, length:]):
                    text = tokenizer.decode(answer, skip_special_tokens=True)
                    tokens += int((answer != tokenizer.pad_token_id).sum())
                    messages = [*prompt["messages"], {"role": "assistant", "content": text}]
                    truncated = tokenizer.eos_token_id not in answer  # no end to learn from
                    file.write(json.dumps({"messages": messages, "truncated": truncated}) + "\n")
                file.flush()
                progress.update(len(batch))
                progress.set_postfix(tokens=tokens)


if __name__ == "__main__":
    main()
