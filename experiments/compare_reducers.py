"""Where the future-token information lies: drafters over every source and reducer, with and without KL.

    python experiments/compare_reducers.py --target examples/models/tiny-deepseek-v4 --answers answers.jsonl \
        --eval-answers held_out.jsonl --work-dir reducers --intermediate 2 --learning-rates 2e-3 4e-3 -- FLAGS

Every cell runs `train_drafter.py` with the same rows, steps and seed at each learning rate, from one feature cache
with all layers. Compared by the teacher-forced walk over the held-out answers, each cell at its best learning rate.
Finished cells are kept. Prints Markdown tables and writes `grid.csv`. FLAGS are flags of `train_drafter.py` for all
cells.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
from datetime import date
from pathlib import Path

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from hf_hyperdflash import HyperDFlashConfig, HyperDFlashDrafter
from hf_hyperdflash.benchmark.runner import hardware
from hf_hyperdflash.training.data.rows import load_rows, prepare_dataset
from hf_hyperdflash.training.features.store import FeatureCache
from hf_hyperdflash.training.script import main as train_drafter

REDUCERS = {"hc_gate": "gate", "fc": "fc", "hybrid": "gate + fc", "stream_mean": "stream mean"}


def layer_ids(source: str) -> list[int]:
    return [int(layer) for layer in source.split(",")]


def write_features(args: argparse.Namespace) -> None:
    """One cache of all layers: every cell reads its own from it."""
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    target = AutoModelForCausalLM.from_pretrained(args.target, dtype=torch.float32).eval()
    layers = [*range(target.config.num_hidden_layers - 1), -1]
    for name, source in (("train", args.answers), ("eval", args.eval_answers)):
        rows = prepare_dataset(load_rows(source), tokenizer, max_length=args.max_length, packing=False)
        FeatureCache.write(Path(args.work_dir) / "cache" / name, rows, target, target_layer_ids=layers)


def train(source: str, reducer: str, kl_weight: float, rate: float, args: argparse.Namespace) -> dict:
    """Metrics of one cell at one learning rate, and the reducer's number of parameters."""
    folder = Path(args.work_dir) / f"{source}_{reducer}_kl{kl_weight:g}_lr{rate:g}_seed{args.seed}"
    if not (folder / "training.json").exists():
        flags = [
            "--target", args.target, "--target_dtype", "float32", "--dataset", args.answers, "--rows", 10**6,
            "--eval_dataset", args.eval_answers, "--eval_prompts", 0, "--eval_strategy", "no", "--save_strategy", "no",
            "--feature_source", "cached", "--feature_cache_dir", Path(args.work_dir) / "cache", "--report_to", "none",
            "--target_layer_ids", *layer_ids(source), "--reducer", reducer, "--kl_weight", kl_weight,
            "--learning_rate", rate, "--max_length", args.max_length, "--seed", args.seed, "--output_dir", folder,
            *args.train_args,
        ]  # fmt: skip
        print(folder.name, flush=True)
        train_drafter(list(map(str, flags)))
    return json.loads((folder / "training.json").read_text())["metrics"]


def reducer_parameters(source: str, reducer: str, args: argparse.Namespace) -> int:
    target = AutoConfig.from_pretrained(args.target)
    shape = HyperDFlashConfig(
        hidden_size=target.hidden_size, target_hc_mult=target.hc_mult, reducer=reducer,
        target_layer_ids=layer_ids(source), num_hidden_layers=1,
    )  # fmt: skip
    with torch.device("meta"):
        drafter = HyperDFlashDrafter(shape)
    parts = [getattr(drafter, name) for name in ("hc_gate", "fc") if hasattr(drafter, name)]
    return sum(p.numel() for part in parts for p in part.parameters())


def grid(args: argparse.Namespace) -> list[dict]:
    cells = []
    for kl_weight in args.kl_weights:
        for source in args.sources:
            for reducer in args.reducers:
                taus = {
                    rate: train(source, reducer, kl_weight, rate, args)["eval_teacher_forced_tau"]
                    for rate in args.learning_rates
                }
                best = max(taus, key=taus.__getitem__)
                cells.append(
                    {"source": source, "reducer": reducer, "kl_weight": kl_weight, "tau": taus[best],
                     "learning_rate": best, "taus": taus}
                )  # fmt: skip
    return cells


def print_tables(cells: list[dict], args: argparse.Namespace) -> None:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout
    print(
        f"\n{date.today()}, {hardware('cuda' if torch.cuda.is_available() else 'cpu')}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}, commit {commit.strip()}, seed {args.seed}, learning rates "
        f"{', '.join(f'{rate:g}' for rate in args.learning_rates)}, {' '.join(args.train_args)}\n"
    )
    for kl_weight in args.kl_weights:
        print(f"KL weight {kl_weight:g}: tau (best learning rate)\n")
        print(f"| layers read | {' | '.join(REDUCERS[reducer] for reducer in args.reducers)} |")
        print("|---|" + "---:|" * len(args.reducers))
        for source in args.sources:
            row = [c for c in cells if c["source"] == source and c["kl_weight"] == kl_weight]
            shown = (f"{c['tau']:.2f} ({c['learning_rate']:g})" for c in row)
            print(f"| {source} | {' | '.join(shown)} |")
        print()
    print("Trainable parameters of the reducer\n")
    print(f"| layers read | {' | '.join(REDUCERS[reducer] for reducer in args.reducers)} |")
    print("|---|" + "---:|" * len(args.reducers))
    for source in args.sources:
        counts = (f"{reducer_parameters(source, reducer, args):,}" for reducer in args.reducers)
        print(f"| {source} | {' | '.join(counts)} |")


def write_csv(cells: list[dict], path: Path) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["layers", "reducer", "kl_weight", "learning_rate", "teacher_forced_tau"])
        for cell in cells:
            for rate, tau in cell["taus"].items():
                writer.writerow([cell["source"], cell["reducer"], cell["kl_weight"], rate, f"{tau:.4f}"])


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--answers", required=True, help="the target's own answers to the training prompts")
    parser.add_argument("--eval-answers", required=True, help="the target's own answers to held-out prompts")
    parser.add_argument("--work-dir", required=True)
    parser.add_argument(
        "--sources", nargs="+", default=["-1"], help="layers read, for example -- -1 2 2,-1 (-1 is pre-collapse)"
    )
    parser.add_argument("--reducers", nargs="+", default=list(REDUCERS), choices=list(REDUCERS))
    parser.add_argument("--kl-weights", type=float, nargs="+", default=[0.15, 0.0])
    parser.add_argument("--learning-rates", type=float, nargs="+", default=[2e-3, 4e-3])
    parser.add_argument("--max-length", type=int, default=512)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("train_args", nargs="*", help="after --: flags of train_drafter.py that all cells share")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    write_features(args)
    cells = grid(args)
    write_csv(cells, Path(args.work_dir) / "grid.csv")
    print_tables(cells, args)


if __name__ == "__main__":
    sys.exit(main())
