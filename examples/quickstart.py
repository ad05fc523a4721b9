"""See it work: a small trained DeepSeek-V4 writes the same text with and without a HyperDFlash drafter.

    python examples/quickstart.py
    python examples/quickstart.py --prompt "Write a function that adds two numbers."
    python examples/quickstart.py --target org/my-v4 --drafter org/my-v4-hyperdflash

Each prompt is generated twice, plain and assisted, one right after the other, so that drift of the machine cancels.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import sys
import time
from datetime import date
from pathlib import Path

import torch
import transformers
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer

from hf_hyperdflash import HyperDFlashDrafter
from hf_hyperdflash.decoding.stats import SpeculationStats

MODELS = Path(__file__).parent / "models"
PROMPTS = [
    "Tom has 12 marbles. He buys 3 bags with 8 marbles each and gives 10 marbles to his sister. How many marbles does "
    "Tom have now?",
    "A baker sells 24 loaves of bread each day for $3 each. How much money does she make in a week?",
    "Write a Python function to find the largest number in a list.",
    "Write a Python function that checks if a string is a palindrome.",
]


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 up")
    return int(text)


def temperature(text: str) -> float:
    if not 0 <= float(text) < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not 0 or above")
    return float(text)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default=str(MODELS / "tiny-deepseek-v4"), help="path or Hub id")
    parser.add_argument("--drafter", default=str(MODELS / "tiny-deepseek-v4-hyperdflash"), help="path or Hub id")
    parser.add_argument("--prompt", action="append", help="a prompt of your own; repeatable")
    parser.add_argument("--prompts", help="a .jsonl file with a list of `turns` a line; the first turn is the prompt")
    parser.add_argument("--limit", type=positive, help="only the first so many prompts, wherever they come from")
    parser.add_argument("--max-new-tokens", type=positive, default=200)
    parser.add_argument(
        "--num-draft-tokens", type=positive, help="drafted tokens per round; default: all the drafter has"
    )
    parser.add_argument("--temperature", type=temperature, default=0.0, help="0 for greedy")
    parser.add_argument("--dtype", help="default: float32 on the CPU, the checkpoint's elsewhere")
    parser.add_argument("--picture", default="acceptance.png", help="where the picture goes")
    parser.add_argument("--quiet", action="store_true", help="do not show the text")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def load(args: argparse.Namespace):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = args.dtype or ("float32" if device == "cpu" else "auto")
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    target = AutoModelForCausalLM.from_pretrained(args.target, dtype=dtype, device_map=device).eval()
    drafter = HyperDFlashDrafter.from_pretrained(args.drafter, dtype=target.dtype, device_map=device).eval()
    if args.num_draft_tokens:
        drafter.num_draft_tokens = drafter.check_num_draft_tokens(args.num_draft_tokens)
    drafter.bind(target)
    return tokenizer, target, drafter


def read_prompts(args: argparse.Namespace) -> list[str]:
    prompts = args.prompt or PROMPTS
    if args.prompts:
        if not Path(args.prompts).is_file():
            raise ValueError(f"There is no file {args.prompts}, expected one with a list of `turns` a line.")
        lines = Path(args.prompts).read_bytes().splitlines()[: args.limit]
        prompts = [first_turn(line, f"{args.prompts}, line {number}") for number, line in enumerate(lines, start=1)]
    if not prompts:
        raise ValueError(f"{args.prompts} has no prompts.")
    return prompts[: args.limit]


def first_turn(line: bytes, place: str) -> str:
    try:
        turns = json.loads(line.decode("utf-8-sig"))["turns"]
    except (ValueError, TypeError, KeyError):
        turns = None
    if not isinstance(turns, list) or not turns or not isinstance(turns[0], str):
        raise ValueError(f'{place} has no list of turns, expected {{"turns": ["..."]}}.')
    return turns[0]


def timed(target, inputs, **options) -> tuple[torch.Tensor, float]:
    """New tokens and the seconds that `generate` took."""
    began = time.perf_counter()
    out = target.generate(**inputs, **options)
    if target.device.type == "cuda":
        torch.cuda.synchronize()
    return out[0, inputs["input_ids"].shape[1] :], time.perf_counter() - began


def show(console: Console, rows: list[dict], stats: SpeculationStats, greedy: bool) -> None:
    table = Table(title="Plain and assisted decoding, side by side")
    table.add_column("prompt", no_wrap=True)
    for heading in ("tokens", "plain tok/s", "assisted tok/s", "speedup", "tau", "identical"):
        table.add_column(heading, justify="right")
    plain, assisted = sum(r["plain"] for r in rows), sum(r["assisted"] for r in rows)
    plain_tokens, tokens = sum(r["plain_tokens"] for r in rows), sum(r["tokens"] for r in rows)
    shown = rows if len(rows) <= 8 else []
    for r in shown:
        same = ("yes" if r["same"] else "NO") if greedy else "sampled"
        table.add_row(
            r["name"], str(r["tokens"]), f"{r['plain_tokens'] / r['plain']:.1f}", f"{r['tokens'] / r['assisted']:.1f}",
            f"{r['tokens'] / r['assisted'] * r['plain'] / r['plain_tokens']:.2f}x", f"{r['tau']:.2f}", same,
        )  # fmt: skip
    equal = sum(r["same"] for r in rows)
    same = ("yes" if equal == len(rows) else f"{equal} of {len(rows)}") if greedy else "sampled"
    if shown:
        table.add_section()
    table.add_row(
        f"all {len(rows)}", str(tokens), f"{plain_tokens / plain:.1f}", f"{tokens / assisted:.1f}",
        f"{tokens / assisted * plain / plain_tokens:.2f}x", f"{stats.tau:.2f}", same,
    )  # fmt: skip
    console.print(table)
    console.print(
        f"{stats.rounds} verification round{'s' * (stats.rounds != 1)}, {stats.mean_accepted_drafts:.2f} accepted "
        f"drafts a round; {1e3 * stats.draft_seconds / max(stats.rounds, 1):.2f} ms drafting and "
        f"{1e3 * stats.verify_seconds / max(stats.rounds, 1):.2f} ms verifying a round, "
        f"{1e3 * plain / plain_tokens:.2f} ms a plain token"
    )


def draw(stats: SpeculationStats, path: str, title: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    positions = range(1, len(stats.acceptance) + 1)
    figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
    axes.bar(positions, stats.acceptance, color="#4477aa", label="accepted (all before it too)")
    axes.plot(positions, stats.conditional_acceptance, "o-", color="#ee6677", label="accepted, given the one before")
    for position, value in zip(positions, stats.acceptance):
        axes.annotate(f"{value:.2f}", (position, 0.02), ha="center", va="bottom", fontsize=9, color="white")
    axes.set(xlabel="draft position", ylabel="fraction of rounds", ylim=(0, 1.02), title=title, xticks=list(positions))
    figure.legend(loc="outside lower center", ncols=2, fontsize=9)
    figure.savefig(path, dpi=150)


def main() -> None:
    args = parse_args()
    console = Console()
    prompts = read_prompts(args)
    torch.manual_seed(args.seed)
    console.print(f"Loading {args.target} and {args.drafter} ..", highlight=False)
    tokenizer, target, drafter = load(args)
    where = torch.cuda.get_device_name() if target.device.type == "cuda" else f"{os.cpu_count()} CPU cores"
    console.print(
        f"{date.today()}, {where} ({platform.machine()}), torch {torch.__version__}, transformers "
        f"{transformers.__version__}, {target.dtype}, {drafter.num_draft_tokens} drafts a round"
    )
    options = {"max_new_tokens": args.max_new_tokens, "do_sample": args.temperature > 0}
    if args.temperature > 0:
        options |= {"temperature": args.temperature, "top_k": 0}
    rows, stats = [], SpeculationStats()
    for index, text in enumerate([prompts[0], *prompts]):
        messages = [{"role": "user", "content": text}]
        inputs = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        ).to(target.device)
        if index == 0:  # warm-up
            timed(target, inputs, **{**options, "max_new_tokens": 16}, assistant_model=drafter)
            timed(target, inputs, **{**options, "max_new_tokens": 16})
            continue
        if not args.quiet:
            console.print(f"\n[bold]{text}[/bold]", highlight=False)
            streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
            target.generate(**inputs, **options, assistant_model=drafter, streamer=streamer)
        plain, plain_seconds = timed(target, inputs, **options)
        assisted, assisted_seconds = timed(target, inputs, **options, assistant_model=drafter)
        stats += drafter.last_stats
        rows.append(
            {"name": text if len(text) <= 14 else text[:13] + "…", "plain": plain_seconds,
            "assisted": assisted_seconds,
             "plain_tokens": len(plain), "tokens": len(assisted), "same": torch.equal(plain, assisted),
             "tau": drafter.last_stats.tau}
        )  # fmt: skip
    show(console, rows, stats, greedy=args.temperature == 0)
    if stats.acceptance:
        draw(stats, args.picture, f"Accepted drafts by position, tau {stats.tau:.2f}")
        console.print(f"Per-position acceptance drawn to {args.picture}")


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="backslashreplace")  # what it writes may have letters that the terminal lacks
    try:
        main()
    except (ValueError, OSError, ImportError) as error:  # what the user can mend
        sys.exit(f"Error: {' '.join(str(error).split())}")
