"""New prompts by the target itself: it continues the beginning of a user's turn (Magpie, arXiv:2406.08464).

    python tools/sample_prompts.py --target examples/models/tiny-deepseek-v4 --count 4000 --output prompts.jsonl
    hf-hyperdflash answers --target ... --data prompts.jsonl --output answers.jsonl

A target answers prompts it was trained on more predictably than a user's. Where the prompts of its training are all
there is, a drafter trained on its answers to them has seen the easy case only; sampled prompts are as new as a user's.
Works for targets that were trained on whole chats. A killed run goes on.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import torch
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_hyperdflash.cli.session import check_writable
from hf_hyperdflash.hub.loading import check_target

MOST_BARREN = 20


def turn_around(tokenizer) -> tuple[str, str]:
    """What the chat template puts before a user's turn and at once after it."""
    mark = "PROMPT"
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": mark}], tokenize=False, add_generation_prompt=True
    )
    before, _, after = text.partition(mark)
    return before, after


def read_known(output: Path) -> set[str]:
    """Lines that are written already. The unfinished last line of a killed run is removed."""
    if not output.exists():
        return set()
    written, newline, _ = output.read_bytes().rpartition(b"\n")
    os.truncate(output, len(written + newline))
    return set(written.decode("utf-8").splitlines())


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--output", required=True, help="a .jsonl file of messages; appended to")
    parser.add_argument("--count", type=int, default=4000)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--max-new-tokens", type=int, default=128, help="longer prompts are left out")
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    for name in ("count", "batch_size", "max_new_tokens"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(args, name)}, expected at least 1.")
    if args.temperature <= 0:
        parser.error(f"--temperature is {args.temperature}, expected above 0: greedily a target writes one prompt.")
    return args


def main() -> None:
    args = parse_args()
    check_writable(Path(args.output).parent)
    check_target(args.target)
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = "auto" if device == "cuda" else torch.float32
    target = AutoModelForCausalLM.from_pretrained(args.target, dtype=dtype, device_map=device).eval()
    before, after = turn_around(tokenizer)
    start = tokenizer(before, add_special_tokens=False, return_tensors="pt").input_ids.to(device)
    end = tokenizer(after, add_special_tokens=False).input_ids[0]
    output = Path(args.output)
    output.parent.mkdir(parents=True, exist_ok=True)
    known = read_known(output)
    # ETA by the mean: what a batch yields varies.
    bar = tqdm(total=args.count, initial=len(known), unit="prompt", smoothing=0)
    barren = 0  # batches in a row without a new prompt
    with output.open("a") as file, bar as progress:
        while len(known) < args.count:
            if barren == MOST_BARREN:
                raise ValueError(
                    f"{MOST_BARREN} batches in a row of {args.batch_size} prompts with at most {args.max_new_tokens} "
                    f"tokens have no new one that ends; {len(known)} are written. Expected a target that was trained "
                    "on whole chats: try a larger --max-new-tokens, --batch-size or --temperature."
                )
            torch.manual_seed(args.seed + len(known) + barren)  # the last one's would draw the last one's prompts
            ids = start.repeat(args.batch_size, 1)
            out = target.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=True, temperature=args.temperature, top_k=0,
                eos_token_id=end, pad_token_id=end, max_new_tokens=args.max_new_tokens,
            )  # fmt: skip
            for row in out[:, ids.shape[1] :].tolist():
                text = tokenizer.decode(row[: row.index(end)], skip_special_tokens=True).strip() if end in row else ""
                line = json.dumps({"messages": [{"role": "user", "content": text}]})
                if text and line not in known and len(known) < args.count:
                    known.add(line)
                    file.write(line + "\n")
            file.flush()
            barren = barren + 1 if progress.n == len(known) else 0
            progress.update(len(known) - progress.n)


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError, ImportError) as error:
        raise SystemExit(f"Error: {error}") from None
    except KeyboardInterrupt:
        raise SystemExit("Stopped. The same command goes on from what is written.") from None
