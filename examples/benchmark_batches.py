"""Tokens per second of batches with a drafter, beside transformers' own batched decoding of the same prompts.

    python examples/benchmark_batches.py --target examples/models/tiny-deepseek-v4 \
        --drafter examples/models/tiny-deepseek-v4-hyperdflash --data suites --output batches

Prompts of different length and suite share a batch, padded on the left; plain and assisted take turns, so that the
machine's drift hits them alike. Every text of the assisted batch is compared with the one that transformers wrote, and
`--output` gets the table and all figures.
"""

from __future__ import annotations

import argparse
import datetime
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoTokenizer

from hf_hyperdflash import load_drafter, load_target
from hf_hyperdflash.benchmark.runner import hardware
from hf_hyperdflash.benchmark.suites import SUITES, load_suite


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="path or Hub id")
    parser.add_argument("--drafter", required=True, help="path or Hub id")
    parser.add_argument("--data", help="a folder of prompt suites; unset for the Hub")
    parser.add_argument("--suites", nargs="+", default=["gsm8k", "mbpp", "mt-bench"], choices=list(SUITES))
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[1, 2, 4, 8])
    parser.add_argument("--drafts", nargs="+", type=int, default=[2, 4, 6], help="a round; each is measured")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--runs", type=int, default=3, help="of each batch, after one that is not counted")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", help="a folder for results.json and report.md")
    return parser.parse_args()


def batch_of(prompts: list[str], tokenizer: Any, device: torch.device) -> dict[str, torch.Tensor]:
    texts = [
        tokenizer.apply_chat_template([{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True)
        for text in prompts
    ]
    return dict(tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False).to(device))


def timed(target: Any, inputs: dict[str, torch.Tensor], **options: Any) -> tuple[float, torch.Tensor]:
    began = time.perf_counter()
    out = target.generate(**inputs, do_sample=False, **options)
    if target.device.type != "cpu":
        torch.accelerator.synchronize(target.device)
    return time.perf_counter() - began, out


def differing(plain: torch.Tensor, assisted: torch.Tensor) -> int:
    """Texts that are not the same."""
    width = min(plain.shape[1], assisted.shape[1])
    return int((plain[:, :width] != assisted[:, :width]).any(-1).sum())


def measure(target: Any, drafter: Any, inputs: dict[str, torch.Tensor], arguments: argparse.Namespace) -> dict:
    """Seconds of each way, in random order in every run, and what the drafter did."""
    options = {"max_new_tokens": arguments.max_new_tokens}
    ways: dict[int, dict] = {0: options}
    ways |= {n: {**options, "assistant_model": drafter, "num_assistant_tokens": n} for n in arguments.drafts}
    seconds: dict[int, list[float]] = {way: [] for way in ways}
    texts, found = {}, {}
    for run in range(arguments.runs + 1):
        for way in random.Random(run).sample(list(ways), len(ways)):
            spent, texts[way] = timed(target, inputs, **ways[way])
            seconds[way] += [spent] if run else []
            if way:
                stats = drafter.last_stats
                found[way] = {"tau": stats.tau, "draft_share": stats.draft_seconds / max(stats.loop_seconds, 1e-9)}
    start = inputs["input_ids"].shape[1]
    pad = target.generation_config.pad_token_id
    tokens = int((texts[0][:, start:] != (-1 if pad is None else pad)).sum())
    plain = statistics.median(seconds[0])
    return {
        "batch": len(inputs["input_ids"]),
        "tokens": tokens,
        "plain_tokens_per_second": tokens / plain,
        "drafts": {
            n: {
                **found[n],
                "speedup": plain / statistics.median(seconds[n]),
                "tokens_per_second": tokens / statistics.median(seconds[n]),
                "differ": differing(texts[0], texts[n]),
            }
            for n in arguments.drafts
        },
    }


def table(results: list[dict], arguments: argparse.Namespace) -> str:
    counts = arguments.drafts
    lines = [
        "| batch | plain, tokens/s | " + " | ".join(f"{n} drafts, tokens/s" for n in counts) + " |",
        "|---:|---:|" + "---:|" * len(counts),
    ]
    for size in arguments.batch_sizes:
        of_size = [result for result in results if result["batch"] == size]

        def per_second(name: str, of_size: list[dict] = of_size, n: int | None = None) -> float:
            rates = [(r if n is None else r["drafts"][n])[name] for r in of_size]
            return sum(r["tokens"] for r in of_size) / sum(r["tokens"] / rate for r, rate in zip(of_size, rates))

        plain, cells = per_second("plain_tokens_per_second"), []
        for n in counts:
            rate = per_second("tokens_per_second", n=n)
            tau = statistics.fmean(r["drafts"][n]["tau"] for r in of_size)
            cells.append(f"{rate:.0f} ({rate / plain:.2f}×, tau {tau:.2f})")
        lines.append(f"| {size} | {plain:.0f} | " + " | ".join(cells) + " |")
    texts = sum(r["batch"] for r in results) * len(counts)
    differ = sum(of["differ"] for r in results for of in r["drafts"].values())
    return "\n".join([*lines, "", f"{texts} texts compared with transformers' own, {differ} differ."])


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    target = load_target(arguments.target, dtype=getattr(torch, arguments.dtype))
    drafter = load_drafter(arguments.drafter, target=target)
    drafter.bind(target)
    tokenizer = AutoTokenizer.from_pretrained(arguments.target, padding_side="left")
    most = max(arguments.batch_sizes)
    suites = [load_suite(name, arguments.data, most) for name in arguments.suites]
    prompts = [suite[index][0] for index in range(most) for suite in suites]  # the suites in turn
    results = []
    for size in arguments.batch_sizes:
        for start in range(0, most, size):
            inputs = batch_of(prompts[start : start + size], tokenizer, target.device)
            results.append(measure(target, drafter, inputs, arguments))
            print(json.dumps(results[-1]), flush=True)
    head = (
        f"{datetime.date.today()}, {hardware(target.device)}, {arguments.threads} thread(s), torch "
        f"{torch.__version__}, transformers {transformers.__version__}, {arguments.dtype}, {most} prompts of "
        f"{', '.join(arguments.suites)} in turn, "
        f"{arguments.max_new_tokens} new tokens, greedy, median of {arguments.runs} runs"
    )
    report = f"# Batches\n\n{head}\n\n{table(results, arguments)}\n"
    print(report)
    if arguments.output:
        folder = Path(arguments.output)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "report.md").write_text(report)
        (folder / "results.json").write_text(json.dumps({"settings": vars(arguments), "results": results}, indent=1))


if __name__ == "__main__":
    main()
