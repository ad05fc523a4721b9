"""Training throughput and peak memory of a drafter, online and from a feature cache, in one run.

    python experiments/benchmark training --target examples/models/tiny-deepseek-v4

Each feature source runs in a process of its own, several times in turn: the optimizer steps after the warm-up are
timed, data loading included. Tokens are those of the rows, prompts included; blocks have their own column.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

import torch
import transformers
from datasets import Dataset
from transformers import AutoModelForCausalLM, TrainerCallback

from hf_hyperdflash import HyperDFlashDrafter, HyperDFlashTrainer, HyperDFlashTrainingArguments
from hf_hyperdflash.benchmark.runner import hardware

SOURCES = {
    "online": {},
    "cached, bfloat16": {"feature_source": "cached", "feature_dtype": "bfloat16"},
    "cached, float8": {"feature_source": "cached", "feature_dtype": "float8"},
}


class Clock(TrainerCallback):
    """Time of every optimizer step."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_step_end(self, args, state, control, **kwargs) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.times.append(time.perf_counter())


def random_rows(args: argparse.Namespace, vocab_size: int) -> Dataset:
    """Rows of random tokens, the second half supervised: throughput does not depend on what the text says."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, vocab_size, (args.steps * args.batch_size, args.seq_length), generator=generator)
    mask = [int(i >= args.seq_length // 2) for i in range(args.seq_length)]
    return Dataset.from_list([{"input_ids": row.tolist(), "loss_mask": mask} for row in ids])


def measure(args: argparse.Namespace) -> dict:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    target = AutoModelForCausalLM.from_pretrained(args.target, dtype=args.dtype).to(device)
    drafter = HyperDFlashDrafter.from_target(
        target, mask_token_id=args.mask_token_id, num_hidden_layers=args.layers, dtype=torch.float32
    )
    arguments = HyperDFlashTrainingArguments(
        output_dir=args.work_dir,
        per_device_train_batch_size=args.batch_size,
        max_steps=args.steps,
        num_anchors=args.anchors,
        bf16=args.bf16,
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=device == "cuda",
        feature_cache_dir=str(Path(args.work_dir) / args.source),
        **SOURCES[args.source],
    )
    clock = Clock()
    rows = random_rows(args, target.config.vocab_size)
    trainer = HyperDFlashTrainer(drafter, target, arguments, train_dataset=rows, callbacks=[clock])
    trainer.train()
    seconds = (clock.times[-1] - clock.times[args.warmup - 1]) / (args.steps - args.warmup)
    peak = (
        torch.cuda.max_memory_allocated()
        if device == "cuda"
        else 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    )
    return {"seconds": seconds, "peak": peak}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--layers", type=int, default=2, help="drafter layers")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--seq-length", type=int, default=256)
    parser.add_argument("--anchors", type=int, default=24)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--mask-token-id", type=int, default=3)
    parser.add_argument("--dtype", default="float32", help="of the target")
    parser.add_argument("--bf16", action="store_true", help="train the drafter in mixed precision")
    parser.add_argument("--work-dir", help="for the feature caches; a temporary folder by default")
    parser.add_argument("--source", choices=SOURCES, help="measure this one here and print JSON (used internally)")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    if args.source:
        print("RESULT", json.dumps(measure(args)))
        return
    with tempfile.TemporaryDirectory() as folder:
        results: dict[str, list[dict]] = {source: [] for source in SOURCES}
        for _ in range(args.repeats):
            for source in SOURCES:
                command = [
                    sys.executable,
                    Path(__file__).parent,
                    "training",
                    *sys.argv[1:],
                    "--source",
                    source,
                    "--work-dir",
                    args.work_dir or folder,
                ]
                done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
                line = next(line for line in done.stdout.splitlines() if line.startswith("RESULT"))
                results[source].append(json.loads(line.removeprefix("RESULT")))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print(
        f"{date.today()}, {hardware(device)}, torch {torch.__version__}, transformers "
        f"{transformers.__version__}; target {Path(args.target).name} in {args.dtype}, drafter of {args.layers} "
        f"layers, {args.batch_size} rows x {args.seq_length} tokens, {args.anchors} anchors a row; {args.repeats} "
        "repeats\n"
    )
    print("| features | tokens/s (lowest to highest) | blocks/s | peak memory, GB |\n|---|---:|---:|---:|")
    for source, runs in results.items():
        rates = [args.batch_size * args.seq_length / run["seconds"] for run in runs]
        blocks = statistics.median(args.batch_size * args.anchors / run["seconds"] for run in runs)
        peak = max(run["peak"] for run in runs) / 1e9
        span = f"{min(rates):,.0f} to {max(rates):,.0f}"
        print(f"| {source} | {statistics.median(rates):,.0f} ({span}) | {blocks:,.0f} | {peak:.2f} |")
