"""SpecBlock against EAGLE-3, against blocks with a state head, and without each of its mechanisms.

    python experiments/compare_specblock.py --target examples/models/tiny-deepseek-v4 --answers answers.jsonl \
        --eval-answers greedy.jsonl --suites suites --work-dir specblock --reads 1 3 -1 --reducer hybrid \
        -- --max_steps 1500

Every cell runs `train_drafter.py` on the same rows, steps and seed from one feature cache; what a mechanism takes is
taken from the MLPs, so that all have one size. Finished cells are kept, others gone on with, `--jobs` of them at once.
Then `hf-hyperdflash benchmark` measures all of them in one run, chains and trees, and writes its report to `results`
in the working folder. What stands after `--` are flags of `train_drafter.py` for all cells.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from transformers import AutoTokenizer

from hf_hyperdflash import load_target
from hf_hyperdflash.training.data.rows import load_rows, prepare_dataset
from hf_hyperdflash.training.features.store import FeatureCache
from hf_hyperdflash.training.script import new_drafter, parse

TRAIN = Path(__file__).parent.parent / "examples" / "train_drafter.py"
SPECBLOCK = ["--drafter_type", "specblock", "--recipe", "specblock"]
ONE_LAYER = ["--layers", "1", "--no_shift", "--valid_prefix", "false"]  # there is nothing to shift between
CELLS: dict[str, list[str]] = {
    "SpecBlock": SPECBLOCK,
    "EAGLE-3": ["--drafter_type", "eagle3", "--recipe", "eagle3"],
    "State head": ["--layers", "2", "--sequential_head", "state", "--head_rank", "256", "--recipe", "ours"],
    "without shift": [*SPECBLOCK, "--no_shift"],
    "without broadcast": [*SPECBLOCK, "--no_broadcast"],
    "without valid prefix": [*SPECBLOCK, "--valid_prefix", "false"],
    "without shift and valid prefix": [*SPECBLOCK, "--no_shift", "--valid_prefix", "false"],
    "without rank head": [*SPECBLOCK, "--no_rank_head"],
    "blocks of three": [*SPECBLOCK, *ONE_LAYER, "--block_size", "3", "--max_blocks", "3"],
    "blocks of two": [*SPECBLOCK, *ONE_LAYER, "--block_size", "2", "--max_blocks", "4"],
}
CHAINS = {  # whose chains are measured, too
    "SpecBlock", "without shift and valid prefix", "blocks of three", "blocks of two", "EAGLE-3", "State head",
}  # fmt: skip


def flags_of(name: str, width: int, args: argparse.Namespace) -> list[str]:
    """All flags of a cell but its folder."""
    flags = [
        "--target", args.target, "--target_dtype", "float32", "--dataset", *args.answers, "--rows", 10**6,
        "--eval_dataset", args.eval_answers, "--eval_prompts", 0, "--eval_strategy", "no", "--save_total_limit", 1,
        "--feature_source", "cached", "--feature_cache_dir", Path(args.work_dir) / "cache", "--report_to", "none",
        "--reducer", args.reducer, "--target_layer_ids", *args.reads, "--max_length", args.max_length,
        "--disable_tqdm", "true", "--save_dtype", "float32", "--intermediate_size", width, *CELLS[name],
        *args.train_args,
    ]  # fmt: skip
    return [str(flag) for flag in flags]


def size_of(name: str, width: int, target, args: argparse.Namespace) -> int:
    script, _ = parse([*flags_of(name, width, args), "--output_dir", str(args.work_dir), "--use_cpu", "true"])
    drafter = new_drafter(script, target, AutoTokenizer.from_pretrained(args.target))
    return sum(parameter.numel() for parameter in drafter.parameters())


def width_for(name: str, target, args: argparse.Namespace) -> int:
    """The width of the MLPs, a multiple of 8, that brings a drafter nearest to `--parameters`."""
    at_8, at_16 = (size_of(name, width, target, args) for width in (8, 16))
    return max(8, 8 + 8 * round((args.parameters - at_8) / (at_16 - at_8)))


def write_features(target, args: argparse.Namespace) -> None:
    tokenizer, layers = AutoTokenizer.from_pretrained(args.target), sorted({*args.reads, -1} - {-1}) + [-1]
    for name, sources in (("train", args.answers), ("eval", [args.eval_answers])):
        rows = [row for source in sources for row in load_rows(source)]
        rows = prepare_dataset(rows, tokenizer, max_length=args.max_length, packing=False)
        FeatureCache.write(Path(args.work_dir) / "cache" / name, rows, target, target_layer_ids=layers)


def train(name: str, width: int, args: argparse.Namespace) -> dict:
    """The metrics of one cell, trained now or before, or gone on with."""
    folder = Path(args.work_dir) / name.replace(" ", "-")
    if not (folder / "training.json").exists():
        resume = ["--resume_from_checkpoint", "true"] if list(folder.glob("checkpoint-*")) else []
        print(name, flush=True)
        with folder.with_suffix(".log").open("w") as log:
            command = [sys.executable, str(TRAIN), *flags_of(name, width, args), "--output_dir", str(folder), *resume]
            done = subprocess.run(command, stdout=log, stderr=log, check=False)
        if done.returncode:
            raise SystemExit(f"{name} failed: see {log.name}.")
    return json.loads((folder / "training.json").read_text())["metrics"]


def benchmark(names: list[str], args: argparse.Namespace) -> None:
    work_dir, drafts = Path(args.work_dir), {"EAGLE-3": 7, "State head": 6, "blocks of three": 9}
    methods: list[str] = []
    for name in names:
        depth, folder = drafts.get(name, 8), work_dir / name.replace(" ", "-")
        methods += ["--drafter", f"{name} ({depth})={folder}"] if name in CHAINS else []
        for budget in args.budgets:
            methods += ["--drafter", f"{name} ({depth}, {budget} nodes)={folder}"]
    command = [
        str(Path(sys.executable).with_name("hf-hyperdflash")), "benchmark", "--target", args.target, *methods,
        "--data", args.suites,
        "--limit", str(args.limit), "--max-new-tokens", str(args.max_new_tokens), "--temperature", "0",
        "--temperature", "1", "--threads", "1", "--output", str(work_dir / "results"),
    ]  # fmt: skip
    print(" ".join(command), flush=True)
    subprocess.run(command, check=True)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--answers", nargs="+", required=True, help="the target's own answers to the training prompts")
    parser.add_argument("--eval-answers", required=True, help="the target's greedy answers to held-out prompts")
    parser.add_argument("--suites", help="a folder of prompt suites for the benchmark; unset for training alone")
    parser.add_argument("--work-dir", required=True)
    parser.add_argument("--cells", nargs="+", default=list(CELLS), choices=list(CELLS))
    parser.add_argument("--reads", nargs="+", type=int, required=True, help="layers of the target that all cells read")
    parser.add_argument("--reducer", default="fc")
    parser.add_argument("--parameters", type=int, default=2_035_000)
    parser.add_argument("--budgets", nargs="+", type=int, default=[16, 60], help="nodes of the trees")
    parser.add_argument("--limit", type=int, default=8, help="prompts of each suite")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--max-length", type=int, default=512)
    parser.add_argument("--jobs", type=int, default=1, help="cells that are trained at the same time")
    parser.add_argument("train_args", nargs="*", help="after --: flags of train_drafter.py that all cells share")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    target = load_target(args.target, dtype=torch.float32)
    write_features(target, args)
    widths = {name: width_for(name, target, args) for name in args.cells}
    with ThreadPoolExecutor(args.jobs) as pool:
        metrics = list(pool.map(lambda name: train(name, widths[name], args), args.cells))
    print("| drafter | parameters | tau of its chain, held-out text | expected at temperature 1 |")
    print("|---|---:|---:|---:|")
    for name, found in zip(args.cells, metrics):
        size = size_of(name, widths[name], target, args)
        print(f"| {name} | {size:,} | {found['eval_teacher_forced_tau']:.2f} | {found['eval_expected_tau']:.2f} |")
    if args.suites:
        benchmark(args.cells, args)


if __name__ == "__main__":
    main()
