"""A drafter's acceptance after prompts longer than its training rows: as it is, with a window, and interpolated.

    python experiments/drafter_windows.py --target SMOLLM2 --drafter examples/models/smollm2-135m-hyperdflash \
        --data SUITES --answers greedy.jsonl.gz --output experiments/results/smollm2-135m/windows

A prompt is a conversation: as many earlier questions with their answers as fit (`--answers`, lines of `messages`), and
a suite's question. The target writes its greedy text once with the drafter. Then each variant
drafts the rounds of that same text from what the drafter was handed, so that variants differ by their drafts alone.
tau is the tokens a round, the interval that of a bootstrap over prompts. A length that is in `results.json` is not run
again.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import gzip
import json
import math
import random
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import LogitsProcessorList

from hf_hyperdflash import load_drafter, load_target, load_tokenizer
from hf_hyperdflash.benchmark.results import save_report
from hf_hyperdflash.benchmark.runner import hardware
from hf_hyperdflash.benchmark.suites import load_suite
from hf_hyperdflash.drafters.base import Observer
from hf_hyperdflash.drafters.parts.layers import HyperDFlashRotaryEmbedding
from hf_hyperdflash.drafters.sampling import DraftRequest, DraftSampler
from hf_hyperdflash.targets.registry import target_of

AS_IS = "as it is"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="path, GGUF file or Hub id")
    parser.add_argument("--drafter", required=True, help="path or Hub id of a block drafter without a window")
    parser.add_argument("--data", required=True, help="a folder of prompt suites")
    parser.add_argument("--answers", required=True, type=Path, help="earlier turns: lines of `messages`, .jsonl[.gz]")
    parser.add_argument("--suites", nargs="+", default=["gsm8k", "mbpp"])
    parser.add_argument("--prompts", type=int, default=8, help="of each length")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048, 4096, 8000], help="tokens, about")
    parser.add_argument("--windows", type=int, nargs="*", default=[128, 256, 512, 1024, 2048])
    parser.add_argument("--trained", type=int, default=512, help="positions that the drafter was trained at, about")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", help="a folder for results.json and report.md")
    return parser.parse_args()


class Handed(Observer):
    """Keeps what the drafter is handed."""

    def __init__(self) -> None:
        self.parts: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []

    def add_tokens(
        self, residual: torch.Tensor, position_ids: torch.Tensor, next_ids: torch.Tensor, is_written: bool
    ) -> None:
        self.parts.append((residual.clone(), position_ids.clone(), next_ids.clone()))

    def all(self) -> list[torch.Tensor]:
        return [torch.cat(parts, dim=1) for parts in zip(*self.parts)]


def prompts_of(length: int, tokenizer: Any, arguments: argparse.Namespace) -> Iterator[torch.Tensor]:
    """Make conversations of at most so many tokens, and nearly as many."""
    opened = gzip.open if arguments.answers.suffix == ".gz" else open
    with opened(arguments.answers, "rt", encoding="utf-8") as file:
        rows = [row["messages"] for row in map(json.loads, file) if row.get("finished", True)]
    questions = [load_suite(suite, arguments.data, arguments.prompts) for suite in arguments.suites]
    draw = random.Random(0)
    for number in range(arguments.prompts):
        turns = questions[number % len(questions)][number // len(questions)]
        messages, misses = [{"role": "user", "content": turns[0]}], 0
        ids = encoded(tokenizer, messages)
        while misses < 20:
            longer = [*draw.choice(rows), *messages]
            more = encoded(tokenizer, longer)
            if more.shape[1] > length:
                misses += 1
                continue
            messages, ids = longer, more
        yield ids


def encoded(tokenizer: Any, messages: list[dict[str, str]]) -> torch.Tensor:
    options = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
    return tokenizer.apply_chat_template(messages, **options)["input_ids"]


def variants(drafter: Any, length: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Copies of the drafter, by what is changed: fields of its configuration."""
    found = {AS_IS: drafter}
    for window in arguments.windows:
        found[f"window of {window:,}"] = windowed = copy.deepcopy(drafter)
        windowed.config.sliding_window = window
    factor = max(1.0, length / arguments.trained)
    found["interpolated"] = interpolated = copy.deepcopy(drafter)
    rope = interpolated.config.rope_parameters
    interpolated.config.rope_parameters = {**rope, "rope_type": "linear", "factor": factor}
    interpolated.rotary_emb = HyperDFlashRotaryEmbedding(interpolated.config)
    return found


@torch.no_grad()
def rounds_of(
    drafter: Any, target: Any, handed: list[torch.Tensor], text: torch.Tensor, prompt_length: int
) -> tuple[int, int, list[float]]:
    """Draft the rounds of a text `[1, seq]`; return tokens, rounds, and the milliseconds of each draft."""
    seen, context, sampler = target_of(target), drafter.new_context(), DraftSampler(LogitsProcessorList(), False)
    positions = torch.arange(text.shape[1])[None]
    known, anchor, rounds, seconds = 0, prompt_length, 0, []
    while anchor + 1 < text.shape[1]:
        drafter.extend(seen, context, *(part[:, known:anchor] for part in handed))
        known = anchor
        count = min(drafter.max_draft_tokens, text.shape[1] - anchor - 1)
        request = DraftRequest(context, text[:, : anchor + 1], positions[:, : anchor + 1], count, sampler)
        began = time.perf_counter()
        (tree,) = drafter.draft(seen, [request])
        seconds.append(time.perf_counter() - began)
        right = [bool(a == b) for a, b in zip(tree.tokens, text[0, anchor + 1 :])]
        anchor, rounds = min(anchor + 1 + [*right, False].index(False), text.shape[1] - 1), rounds + 1
    return text.shape[1] - 1 - prompt_length, rounds, [1e3 * each for each in seconds[2:]]


def measured(length: int, target: Any, drafter: Any, tokenizer: Any, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return tokens and rounds of each prompt, and a draft's median milliseconds, by variant."""
    made = variants(drafter, length, arguments)
    counts: dict[str, list[tuple[int, int]]] = {name: [] for name in made}
    times: dict[str, list[float]] = {name: [] for name in made}
    lengths = []
    for ids in prompts_of(length, tokenizer, arguments):
        drafter.observer = heard = Handed()
        text = target.generate(
            ids, assistant_model=drafter, max_new_tokens=arguments.max_new_tokens, do_sample=False
        )  # fmt: skip
        drafter.observer = None
        handed, prompt_length = heard.all(), ids.shape[1]
        text = text[:, : handed[0].shape[1] + 1]
        lengths.append(prompt_length)
        for name, variant in made.items():
            tokens, rounds, milliseconds = rounds_of(variant, target, handed, text, prompt_length)
            counts[name].append((tokens, rounds))
            times[name] += milliseconds
    return {
        "length": length,
        "prompts": lengths,
        "counts": counts,
        "draft_ms": {name: statistics.median(each) for name, each in times.items() if each},
    }


def interval(counts: list[tuple[int, int]], others: list[tuple[int, int]] | None = None) -> tuple[float, float, float]:
    """Return tau, or its ratio to another's of the same prompts, with a bootstrap's 95 % interval."""

    def figure(chosen: list[int]) -> float:
        def tau(of: list[tuple[int, int]]) -> float:
            return sum(of[i][0] for i in chosen) / sum(of[i][1] for i in chosen)

        return tau(counts) / (1.0 if others is None else tau(others))

    draw, numbers = random.Random(0), range(len(counts))
    found = sorted(figure(draw.choices(numbers, k=len(counts))) for _ in range(2000))
    return figure(list(numbers)), found[50], found[1949]


def table(results: list[dict[str, Any]]) -> str:
    lines = [
        "| tokens before | drafter | tau | 95 % | beside as it is | 95 % | a draft, ms |",
        "|---:|---|---:|---|---:|---|---:|",
    ]
    for result in results:
        for name, counts in result["counts"].items():
            (tau, low, high), (ratio, least, most) = (
                interval(counts, others) for others in (None, result["counts"][AS_IS])
            )
            beside = "" if name == AS_IS else f"{least:.2f} to {most:.2f}"
            lines.append(
                f"| {result['length']:,} | {name} | {tau:.2f} | {low:.2f} to {high:.2f} | {ratio:.2f} | {beside} | "
                f"{result['draft_ms'].get(name, math.nan):.1f} |"
            )
    return "\n".join(lines)


def earlier_results(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    path = Path(arguments.output or "", "results.json")
    if not arguments.output or not path.exists():
        return []
    earlier = json.loads(path.read_text(encoding="utf-8"))
    for name in ("prompts", "windows", "trained", "max_new_tokens", "dtype", "suites"):
        if earlier["settings"][name] != vars(arguments)[name]:
            raise SystemExit(
                f"Error: {path} has {name} {earlier['settings'][name]}, expected {vars(arguments)[name]} as this run "
                "has: pass another --output."
            )
    return earlier["results"]


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    transformers.logging.set_verbosity_error()
    results = earlier_results(arguments)
    if missing := [length for length in arguments.lengths if length not in [each["length"] for each in results]]:
        target = load_target(arguments.target, dtype=getattr(torch, arguments.dtype))
        drafter, tokenizer = load_drafter(arguments.drafter, target=target), load_tokenizer(arguments.target)
        drafter.bind(target)
        for length in missing:
            began = time.perf_counter()
            results.append(measured(length, target, drafter, tokenizer, arguments))
            results.sort(key=lambda each: each["length"])
            save(results, arguments)
            print(f"{length:,} tokens: {time.perf_counter() - began:.0f} s", flush=True)
    print(table(results))


def save(results: list[dict[str, Any]], arguments: argparse.Namespace) -> None:
    head = (
        f"{datetime.date.today()}, {hardware('cpu')}, {arguments.threads} thread(s), {arguments.dtype}, torch "
        f"{torch.__version__}, transformers {transformers.__version__}. {arguments.prompts} prompts of each length, "
        f"from {', '.join(arguments.suites)} after earlier turns; {arguments.max_new_tokens} tokens, temperature 0. "
        f"The drafter was trained at about {arguments.trained} positions. A draft is timed without what it waits for."
    )
    save_report(f"# Windows of a drafter\n\n{head}\n\n{table(results)}\n", arguments, results=results)


if __name__ == "__main__":
    main()
