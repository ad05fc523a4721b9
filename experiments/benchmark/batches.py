"""Tokens per second of batches with a drafter, beside transformers' own batched decoding of the same prompts.

    python experiments/benchmark batches --target examples/models/tiny-deepseek-v4 \
        --drafter examples/models/tiny-deepseek-v4-hyperdflash --data suites --output batches

Prompts of different length and suite share a batch, padded on the left; plain and assisted take turns, so that the
machine's drift hits them alike. Every text, transformers' too, is compared with the one that transformers writes for
its prompt alone, and `--output` gets the table and all figures.
"""

from __future__ import annotations

import argparse
import datetime
import json
import random
import statistics
import time
from typing import Any

import torch
import transformers

from hf_hyperdflash import load_drafter, load_target, load_tokenizer
from hf_hyperdflash.benchmark.results import save_report
from hf_hyperdflash.benchmark.runner import hardware
from hf_hyperdflash.benchmark.suites import load_suite


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="path or Hub id")
    parser.add_argument("--drafter", required=True, help="path or Hub id")
    parser.add_argument("--data", help="a folder of prompt suites; unset for the Hub")
    parser.add_argument("--suites", nargs="+", default=["gsm8k", "mbpp", "mt-bench"])
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[1, 2, 4, 8])
    drafts = {"type": count_or_auto, "default": [2, 4, 6, "auto"], "help": "a round; each is measured"}
    parser.add_argument("--drafts", nargs="+", **drafts)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--runs", type=int, default=3, help="of each batch, after one that is not counted")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", help="a folder for results.json and report.md")
    return parser.parse_args()


def count_or_auto(value: str) -> int | str:
    return value if value == "auto" else int(value)


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


def written(texts: torch.Tensor, start: int, pad: int | None) -> list[list[int]]:
    """The new tokens of each row, without padding."""
    rows = [row[start:].tolist() for row in texts]
    return [row[: row.index(pad)] if pad in row else row for row in rows]


def measure(target: Any, drafter: Any, inputs: Any, alone: list[list[int]], arguments: argparse.Namespace) -> dict:
    """Tokens per second of each way, in random order in every run, and what the drafter did."""
    options = {"max_new_tokens": arguments.max_new_tokens}
    ways: dict[int | str, dict] = {0: options}
    ways |= {n: {**options, "assistant_model": drafter, "num_assistant_tokens": n} for n in arguments.drafts}
    seconds: dict[int | str, list[float]] = {way: [] for way in ways}
    found: dict[int | str, dict] = {}
    for run in range(arguments.runs + 1):
        for way in random.Random(run).sample(list(ways), len(ways)):
            spent, texts = timed(target, inputs, **ways[way])
            seconds[way] += [spent] if run else []
            own = written(texts, inputs["input_ids"].shape[1], target.generation_config.pad_token_id)
            found[way] = {
                "tokens": sum(map(len, own)),
                "differ": sum(one != other for one, other in zip(own, alone)),
                "tau": drafter.last_stats.tau if way else None,
            }
    for way, spent in seconds.items():
        found[way]["tokens_per_second"] = found[way]["tokens"] / statistics.median(spent)
    return {"batch": len(alone), "drafts": found}


def table(results: list[dict], arguments: argparse.Namespace, model: str) -> str:
    counts = arguments.drafts
    names = ['`"auto"`' if count == "auto" else f"{count} drafts" for count in counts]
    lines = [
        f"| batch | transformers, {model} | {' | '.join(names)} |",
        "|---:|---:|" + "---:|" * len(counts),
    ]
    for size in arguments.batch_sizes:
        ways = {n: [result["drafts"][n] for result in results if result["batch"] == size] for n in (0, *counts)}
        rates = {
            n: sum(each["tokens"] for each in of) / sum(each["tokens"] / each["tokens_per_second"] for each in of)
            for n, of in ways.items()
        }
        taus = {n: statistics.fmean(each["tau"] for each in ways[n]) for n in counts}
        drafted = [f"{rates[n]:.0f} ({rates[n] / rates[0]:.2f}×, tau {taus[n]:.2f})" for n in counts]
        lines.append(f"| {size} | {rates[0]:.0f} | " + " | ".join(drafted) + " |")
    differ = {n: sum(result["drafts"][n]["differ"] for result in results) for n in (0, *counts)}
    texts = sum(result["batch"] for result in results)
    told = (
        f"Tokens per second. Of {texts * len(counts)} texts with a drafter {sum(differ.values()) - differ[0]} differ "
        f"from that of the prompt alone, of {texts} of transformers' own batches {differ[0]}."
    )
    return "\n".join([*lines, "", told])


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    target = load_target(arguments.target, dtype=getattr(torch, arguments.dtype))
    drafter = load_drafter(arguments.drafter, target=target)
    drafter.bind(target)
    tokenizer = load_tokenizer(arguments.target, padding_side="left")
    most = max(arguments.batch_sizes)
    suites = [load_suite(name, arguments.data, most) for name in arguments.suites]
    prompts = [suite[index][0] for index in range(most) for suite in suites]  # the suites in turn
    prompts, alone, results = prompts[:most], [], []
    for prompt in prompts:
        inputs = batch_of([prompt], tokenizer, target.device)
        text = timed(target, inputs, max_new_tokens=arguments.max_new_tokens)[1]
        alone += written(text, inputs["input_ids"].shape[1], target.generation_config.pad_token_id)
    for size in arguments.batch_sizes:
        for start in range(0, most, size):
            inputs = batch_of(prompts[start : start + size], tokenizer, target.device)
            results.append(measure(target, drafter, inputs, alone[start : start + size], arguments))
            print(json.dumps(results[-1]), flush=True)
    head = (
        f"{datetime.date.today()}, {hardware(target.device)}, {arguments.threads} thread(s), torch "
        f"{torch.__version__}, transformers {transformers.__version__}, {arguments.dtype}, {most} prompts of "
        f"{', '.join(arguments.suites)} in turn, "
        f"{arguments.max_new_tokens} new tokens, greedy, median of {arguments.runs} runs"
    )
    report = f"# Batches\n\n{head}\n\n{table(results, arguments, target.config.model_type)}\n"
    print(report)
    save_report(report, arguments, results=results)
