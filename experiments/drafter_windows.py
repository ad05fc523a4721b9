"""A drafter's acceptance after prompts longer than its training rows: as it is, with a window, interpolated, clamped.

    python experiments/drafter_windows.py --target SMOLLM2 --drafter examples/models/smollm2-135m-hyperdflash \
        --data SUITES --answers greedy.jsonl.gz --output experiments/results/smollm2-135m/windows

A prompt is a conversation: as many earlier questions with their answers as fit (`--answers`, lines of `messages`), and
a suite's question. The target writes its greedy text once with the drafter. Then each variant
drafts the rounds of that same text from what the drafter was handed, so that variants differ by their drafts alone.
tau is the tokens a round, the interval that of a bootstrap over prompts. A prompt that is in `results.json` is not run
again.

"Interpolated" divides all positions, so that the last one is a trained one. "Clamped at 512" sees every token, those
further away than 512 positions as if they were 512 away. As the anchor moves on, all keys are then made anew: this
shows what it would bring, not how it would be served. To clamp positions inside a window of 512 would be the window
itself: RoPE tells distances alone (`test_a_block_knows_distances_alone`).
"""

from __future__ import annotations

import argparse
import copy
import datetime
import gzip
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import LogitsProcessorList

from hf_hyperdflash import load_drafter, load_target, load_tokenizer
from hf_hyperdflash.benchmark.intervals import drawn_ratios, interval
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
    parser.add_argument("--clamped", type=int, nargs="*", default=[512], help="the longest distance")
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


def variants(drafter: Any, length: int, arguments: argparse.Namespace) -> dict[str, tuple[Any, int | None]]:
    """Return copies of the drafter, by what is changed, and the longest distance that each is to see."""
    found: dict[str, tuple[Any, int | None]] = {AS_IS: (drafter, None)}
    for window in arguments.windows:
        windowed = copy.deepcopy(drafter)
        windowed.config.sliding_window = window
        found[f"window of {window:,}"] = windowed, None
    factor = max(1.0, length / arguments.trained)
    interpolated = copy.deepcopy(drafter)
    rope = interpolated.config.rope_parameters
    interpolated.config.rope_parameters = {**rope, "rope_type": "linear", "factor": factor}
    interpolated.rotary_emb = HyperDFlashRotaryEmbedding(interpolated.config)
    found["interpolated"] = interpolated, None
    return found | {f"clamped at {distance:,}": (drafter, distance) for distance in arguments.clamped}


@torch.no_grad()
def rounds_of(
    drafter: Any, distance: int | None, target: Any, handed: list[torch.Tensor], text: torch.Tensor, prompt_length: int
) -> tuple[int, int]:
    """Draft the rounds of a text `[1, seq]`; return tokens and rounds."""
    seen, context, sampler = target_of(target), drafter.new_context(), DraftSampler(LogitsProcessorList(), False)
    positions = torch.arange(text.shape[1])[None]
    residual, of_tokens, following = handed
    known, anchor, rounds = 0, prompt_length, 0
    while anchor + 1 < text.shape[1]:
        if distance is not None:
            known, context = 0, drafter.new_context()
            of_tokens = positions = (torch.arange(text.shape[1])[None] - max(anchor - distance, 0)).clamp(min=0)
        drafter.extend(seen, context, *(part[:, known:anchor] for part in (residual, of_tokens, following)))
        known = anchor
        count = min(drafter.max_draft_tokens, text.shape[1] - anchor - 1)
        request = DraftRequest(context, text[:, : anchor + 1], positions[:, : anchor + 1], count, sampler)
        (tree,) = drafter.draft(seen, [request])
        right = [bool(a == b) for a, b in zip(tree.tokens, text[0, anchor + 1 :])]
        anchor, rounds = min(anchor + 1 + [*right, False].index(False), text.shape[1] - 1), rounds + 1
    return text.shape[1] - 1 - prompt_length, rounds


def measure(
    result: dict[str, Any], ids: torch.Tensor, target: Any, drafter: Any, arguments: argparse.Namespace
) -> None:
    """Add tokens and rounds of a prompt `[1, seq]` to the result of its length, by variant."""
    drafter.observer = heard = Handed()
    text = target.generate(ids, assistant_model=drafter, max_new_tokens=arguments.max_new_tokens, do_sample=False)
    drafter.observer = None
    handed, prompt_length = heard.all(), ids.shape[1]
    text = text[:, : handed[0].shape[1] + 1]
    for name, variant in variants(drafter, result["length"], arguments).items():
        counts = rounds_of(*variant, target, handed, text, prompt_length)
        result["counts"].setdefault(name, []).append(counts)
    result["prompts"].append(prompt_length)


def taus(counts: list[tuple[int, int]]) -> np.ndarray:
    """Return tau of each draw of the prompts."""
    tokens, rounds = np.array(counts, dtype=float).T
    return drawn_ratios(tokens, rounds)


def table(results: list[dict[str, Any]]) -> str:
    lines = [
        "| tokens before | drafter | tau | 95 % | beside as it is | 95 % |",
        "|---:|---|---:|---|---:|---|",
    ]
    for result in results:
        for name, counts in result["counts"].items():
            own, before = taus(counts), taus(result["counts"][AS_IS])
            (tau, low, high), (ratio, least, most) = interval(own), interval(own / before)
            beside = "" if name == AS_IS else f"{least:.2f} to {most:.2f}"
            lines.append(
                f"| {result['length']:,} | {name} | {tau:.2f} | {low:.2f} to {high:.2f} | {ratio:.2f} | {beside} |"
            )
    return "\n".join(lines)


def earlier_results(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    path = Path(arguments.output or "", "results.json")
    if not arguments.output or not path.exists():
        return []
    earlier = json.loads(path.read_text(encoding="utf-8"))
    for name in ("prompts", "windows", "clamped", "trained", "max_new_tokens", "dtype", "suites"):
        known, own = earlier["settings"].get(name), vars(arguments)[name]
        if known != own:
            raise SystemExit(
                f"Error: {path} has {name} {known}, expected {own} as this run has: pass another --output."
            )
    return earlier["results"]


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    transformers.logging.set_verbosity_error()
    results = {each["length"]: each for each in earlier_results(arguments)}
    for length in arguments.lengths:
        results.setdefault(length, {"length": length, "prompts": [], "counts": {}})
    missing = [length for length in arguments.lengths if len(results[length]["prompts"]) < arguments.prompts]
    if missing:
        target = load_target(arguments.target, dtype=getattr(torch, arguments.dtype))
        drafter, tokenizer = load_drafter(arguments.drafter, target=target), load_tokenizer(arguments.target)
        drafter.bind(target)
    for length in missing:
        for number, ids in enumerate(prompts_of(length, tokenizer, arguments)):
            if number >= len(results[length]["prompts"]):
                began = time.perf_counter()
                measure(results[length], ids, target, drafter, arguments)
                save(results, arguments)
                print(f"{length:,} tokens, prompt {number + 1}: {time.perf_counter() - began:.0f} s", flush=True)
    save(results, arguments)  # also where every prompt was known
    print(table([results[length] for length in sorted(results)]))


def save(results: dict[int, dict[str, Any]], arguments: argparse.Namespace) -> None:
    """Save the results of each length that has some."""
    found = [results[length] for length in sorted(results) if results[length]["prompts"]]
    head = (
        f"{datetime.date.today()}, {hardware('cpu')}, {arguments.threads} thread(s), {arguments.dtype}, torch "
        f"{torch.__version__}, transformers {transformers.__version__}. {arguments.prompts} prompts of each length, "
        f"from {', '.join(arguments.suites)} after earlier turns; {arguments.max_new_tokens} tokens, temperature 0. "
        f"The drafter was trained at about {arguments.trained} positions."
    )
    save_report(f"# Windows of a drafter\n\n{head}\n\n{table(found)}\n", arguments, results=found)


if __name__ == "__main__":
    main()
