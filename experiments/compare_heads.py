"""What a draft gains from knowing the one before it: drafters of one size with every head and both losses.

    python experiments/compare_heads.py --target examples/models/tiny-deepseek-v4 --answers answers.jsonl \
        --eval-answers greedy.jsonl --eval-sampled sampled.jsonl --work-dir heads -- --max_steps 3000

Every cell runs `train_drafter.py` on the same rows, steps and seed from one feature cache; what a head or reducer
takes is taken from the MLPs, so that all have as many parameters as the one named by `--size-of`. Compared over the
held-out answers: tau of the teacher-forced walk over greedy ones (temperature 0), and over sampled ones (temperature
1) the tau that follows from the drafts' total variation from the target. Finished cells are kept, `--jobs` of them run
at once. Prints a Markdown table and writes `heads.csv`. What stands after `--` are flags of `train_drafter.py` for all
cells.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import date
from itertools import product
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_hyperdflash import HyperDFlashDrafter
from hf_hyperdflash.benchmark.runner import hardware
from hf_hyperdflash.training.arguments import HyperDFlashTrainingArguments
from hf_hyperdflash.training.data.rows import load_rows, prepare_dataset
from hf_hyperdflash.training.features.store import FeatureCache
from hf_hyperdflash.training.trainer import HyperDFlashTrainer

TRAIN = Path(__file__).parent.parent / "examples" / "train_drafter.py"


@dataclass(frozen=True)
class Cell:
    """One drafter of the comparison."""

    reducer: str
    head: str
    recipe: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.reducer}_{self.head}_{self.recipe}_seed{self.seed}"


def layers_of(reducer: str, args: argparse.Namespace) -> list[int]:
    """What a reducer reads: vanilla DFlash not the last layer, the paper's gate nothing else."""
    return {"fc": args.intermediate, "hc_gate": [-1]}.get(reducer, [*args.intermediate, -1])


def parameters(cell: Cell, width: int, target, args: argparse.Namespace) -> int:
    drafter = HyperDFlashDrafter.from_target(
        target, reducer=cell.reducer, target_layer_ids=layers_of(cell.reducer, args), num_hidden_layers=args.layers,
        sequential_head=cell.head, head_rank=args.head_ranks[cell.head], intermediate_size=width, mask_token_id=0,
    )  # fmt: skip
    return sum(p.numel() for p in drafter.parameters())


def width_for(cell: Cell, size: int, target, args: argparse.Namespace) -> int:
    """The width of the MLPs, a multiple of 8, that brings a drafter nearest to `size` parameters."""
    at_8, at_16 = (parameters(cell, width, target, args) for width in (8, 16))
    return max(8, 8 + 8 * round((size - at_8) / (at_16 - at_8)))


def write_features(target, args: argparse.Namespace) -> None:
    """One cache of all layers that any cell reads; each takes its own from it."""
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    layers = [*args.intermediate, -1]
    for name, sources in (("train", args.answers), ("eval", [args.eval_answers]), ("sampled", [args.eval_sampled])):
        rows = [row for source in sources for row in load_rows(source)]
        rows = prepare_dataset(rows, tokenizer, max_length=args.max_length, packing=False)
        FeatureCache.write(Path(args.work_dir) / "cache" / name, rows, target, target_layer_ids=layers)


def train(cell: Cell, width: int, target, args: argparse.Namespace) -> dict:
    """The metrics of one cell, trained now or before."""
    folder = Path(args.work_dir) / cell.name
    record = folder / "training.json"
    if not record.exists():
        head = (
            ["--sequential_head", cell.head, "--head_rank", args.head_ranks[cell.head]] if cell.head != "none" else []
        )
        flags = [
            "--target", args.target, "--target_dtype", "float32", "--dataset", *args.answers, "--rows", 10**6,
            "--eval_dataset", args.eval_answers, "--eval_prompts", 0, "--eval_strategy", "no", "--save_strategy", "no",
            "--feature_source", "cached", "--feature_cache_dir", Path(args.work_dir) / "cache", "--report_to", "none",
            "--layers", args.layers, "--intermediate_size", width, "--reducer", cell.reducer, "--target_layer_ids",
            *layers_of(cell.reducer, args), *(head if cell.head != "none" else []), "--recipe", cell.recipe,
            "--max_length", args.max_length,
            "--seed", cell.seed, "--output_dir", folder, "--disable_tqdm", "true", *args.train_args,
        ]  # fmt: skip
        print(cell.name, flush=True)
        with (Path(args.work_dir) / f"{cell.name}.log").open("w") as log:
            done = subprocess.run([sys.executable, TRAIN, *map(str, flags)], stdout=log, stderr=log, check=False)
        if done.returncode:
            raise SystemExit(f"{cell.name} failed: see {log.name}.")
    return json.loads(record.read_text())["metrics"] | sampled(cell, target, args)


def sampled(cell: Cell, target, args: argparse.Namespace) -> dict:
    """What a trained cell makes of answers that were sampled."""
    folder, work_dir = Path(args.work_dir) / cell.name, Path(args.work_dir)
    record = folder / "sampled.json"
    if not record.exists():
        drafter = HyperDFlashDrafter.from_pretrained(folder, dtype=torch.float32)
        settings = HyperDFlashTrainingArguments(
            output_dir=str(folder), recipe=cell.recipe, report_to="none", disable_tqdm=True
        )
        cache = FeatureCache(work_dir / "cache" / "sampled", target)
        trainer = HyperDFlashTrainer(drafter, target, settings, eval_dataset=cache)
        record.write_text(json.dumps(trainer.evaluate(metric_key_prefix="sampled"), indent=1))
    return json.loads(record.read_text())


def print_table(cells: dict[Cell, dict], widths: dict[Cell, int], target, args: argparse.Namespace) -> None:
    print(
        f"\n{date.today()}, {hardware('cuda' if torch.cuda.is_available() else 'cpu')}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}, {' '.join(args.train_args)}\n"
    )
    print("| reducer | head | loss | seed | parameters | tau, T = 0 | expected tau, T = 1 |")
    print("|---|---|---|---:|---:|---:|---:|")
    rows = []
    for cell, metrics in cells.items():
        size = parameters(cell, widths[cell], target, args)
        taus = metrics["eval_teacher_forced_tau"], metrics["sampled_expected_tau"]
        rows.append([cell.reducer, cell.head, cell.recipe, cell.seed, size, *(f"{tau:.4f}" for tau in taus)])
        shown = [cell.reducer, cell.head, cell.recipe, cell.seed, f"{size:,}", *(f"{tau:.2f}" for tau in taus)]
        print(f"| {' | '.join(map(str, shown))} |")
    with (Path(args.work_dir) / "heads.csv").open("w", newline="") as file:
        names = ["reducer", "head", "loss", "seed", "parameters", "teacher_forced_tau", "expected_tau"]
        csv.writer(file).writerows([names, *rows])


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--answers", nargs="+", required=True, help="the target's own answers to the training prompts")
    parser.add_argument("--eval-answers", required=True, help="the target's greedy answers to held-out prompts")
    parser.add_argument("--eval-sampled", required=True, help="its answers to them at temperature 1")
    parser.add_argument("--work-dir", required=True)
    parser.add_argument("--reducers", nargs="+", default=["fc", "hc_gate", "hybrid"])
    parser.add_argument("--heads", nargs="+", default=["none", "markov", "recurrent", "selector", "state"])
    parser.add_argument("--recipes", nargs="+", default=["hyperdflash", "ours"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--intermediate", nargs="+", type=int, default=[1, 3], help="layers read beside the last")
    parser.add_argument("--table-rank", type=int, default=128, help="of heads with a table of the vocabulary")
    parser.add_argument("--state-rank", type=int, default=256, help="width of the state head")
    parser.add_argument(
        "--size-of", default="hybrid", help="all have as many parameters as this reducer without a head"
    )
    parser.add_argument("--max-length", type=int, default=512)
    parser.add_argument("--jobs", type=int, default=1, help="cells that are trained at the same time")
    parser.add_argument("train_args", nargs="*", help="after --: flags of train_drafter.py that all cells share")
    args = parser.parse_args()
    args.head_ranks = dict.fromkeys(args.heads, args.table_rank) | {"none": 1, "state": args.state_rank}
    return args


def main() -> None:
    args = parse_args()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    target = AutoModelForCausalLM.from_pretrained(args.target, dtype=torch.float32).eval()
    write_features(target, args)
    grid = product(args.reducers, args.heads, args.recipes, args.seeds)
    cells = [Cell(*values) for values in grid]
    reference = Cell(args.size_of, "none", args.recipes[0], 0)
    size = parameters(reference, 3 * target.config.hidden_size, target, args)
    widths = {cell: width_for(cell, size, target, args) for cell in cells}
    with ThreadPoolExecutor(args.jobs) as pool:
        metrics = list(pool.map(lambda cell: train(cell, widths[cell], target, args), cells))
    print_table(dict(zip(cells, metrics)), widths, target, args)


if __name__ == "__main__":
    main()
