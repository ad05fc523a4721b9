"""Train every drafter of a grid on the same rows, steps and seed, and compare them.

    python experiments/sweep.py heads --target examples/models/tiny-deepseek-v4 --answers answers.jsonl \
        --eval-answers greedy.jsonl --eval-sampled sampled.jsonl --work-dir heads -- --max_steps 3000

A grid is a file of `experiments/grids`, or one of your own. It has CELLS: each drafter's flags of `hf-hyperdflash
train`, in which `{drafter}` and `{work_dir}` stand for those options. It may have more:

    LIKE     a cell; the others' MLPs are made so wide that all have as many parameters as it (`--parameters`: as many)
    RATES    learning rates that each cell is trained at; the table shows the best of them
    START    fields of the configuration that `--drafter` gets before it is trained on
    CONFIGS  fields of the configuration that each trained drafter is measured with, each under a name
    METHODS  of some cells: drafts and nodes to measure with `hf-hyperdflash benchmark`, if `--suites` is given

All cells read one feature cache. Finished cells are kept, others go on from their checkpoint. Measured on held-out
answers: tau of the teacher-forced walk over greedy ones (temperature 0), and over sampled ones (temperature 1) the tau
that follows from the drafts' total variation from the target. Prints a Markdown table and writes `cells.csv`. What
stands after `--` are flags of `hf-hyperdflash train` for all cells.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import json
import os
import runpy
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from transformers import PrinterCallback

from hf_hyperdflash import HyperDFlashTrainer, HyperDFlashTrainingArguments, load_drafter, load_target, load_tokenizer
from hf_hyperdflash.benchmark.runner import hardware
from hf_hyperdflash.training.data.rows import load_rows, prepare_dataset
from hf_hyperdflash.training.features.store import FeatureCache
from hf_hyperdflash.training.script import earlier_drafter, new_drafter, parse

GRIDS = Path(__file__).parent / "grids"
COMMAND = str(Path(sys.executable).with_name("hf-hyperdflash"))


@dataclass(frozen=True)
class Cell:
    """One training: a drafter of the grid at one learning rate, if the grid has several, and with one seed."""

    name: str
    rate: float | None
    seed: int

    def folder(self, work_dir: Path) -> Path:
        rate = "" if self.rate is None else f"-{self.rate:g}"
        name = self.name.replace(",", "").replace(" ", "-").replace("/", "-")
        return work_dir / f"{name}{rate}-seed{self.seed}"


class Sweep:
    """A grid over one target and its answers."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.work_dir = args, args.work_dir
        self.grid = read_grid(args.grid)
        self.names = args.cells or list(self.grid.CELLS)
        self.target = load_target(args.target, dtype=torch.float32)
        self.tokenizer = load_tokenizer(args.target)
        self.widths: dict[str, int] = {}
        if start := getattr(self.grid, "START", None):
            drafter: Any = load_drafter(args.drafter, dtype=torch.float32)
            vars(drafter.config).update(start)
            args.drafter = self.work_dir / "start"
            drafter.save_pretrained(args.drafter)

    def flags(self, name: str, width: int | None = None) -> list[str]:
        """All that `train` is told of a cell, but its rate, seed and folder."""
        args, own = self.args, shlex.split(self.grid.CELLS[name].format(**vars(self.args)))
        cache = "cache" if not {"--dataset", "--feature_dtype"} & {*own} else f"cache of {name}"
        shared = [
            "--target", args.target, "--target_dtype", "float32", "--dataset", *args.answers, "--rows", 10**6,
            "--eval_dataset", args.eval_answers, "--eval_prompts", 0, "--eval_strategy", "no", "--save_total_limit", 1,
            "--feature_source", "cached", "--feature_cache_dir", self.work_dir / cache, "--report_to", "none",
            "--max_length", args.max_length, "--save_dtype", "float32", "--disable_tqdm", "true",
        ]  # fmt: skip
        wide = ["--intermediate_size", width] if width else []
        return [*map(str, [*shared, *wide]), *own, *args.train_args]

    def untrained(self, name: str, width: int | None = None) -> Any:
        script, _ = parse([*self.flags(name, width), "--output_dir", str(self.work_dir), "--use_cpu", "true"])
        return earlier_drafter(script, 0) if script.drafter else new_drafter(script, self.target, self.tokenizer)

    def size(self, name: str, width: int | None = None) -> int:
        return sum(parameter.numel() for parameter in self.untrained(name, width).parameters())

    def choose_widths(self) -> None:
        """The width of the MLPs, a multiple of 8, that brings each drafter nearest to the size that all shall have."""
        like = getattr(self.grid, "LIKE", None)
        wanted = self.args.parameters or (self.size(like) if like else None)
        for name in self.names if wanted else ():
            at_8, at_16 = (self.size(name, width) for width in (8, 16))
            self.widths[name] = max(8, 8 + 8 * round((wanted - at_8) / (at_16 - at_8)))

    def write_features(self) -> None:
        """One cache of all layers that any cell reads; each takes its own from it."""
        read = {layer for name in self.names for layer in self.untrained(name).config.target_layer_ids} - {-1}
        greedy, sampled = self.args.eval_answers, self.args.eval_sampled or self.args.eval_answers
        for name, sources in {"train": self.args.answers, "eval": [greedy], "sampled": [sampled]}.items():
            rows = [row for source in sources for row in load_rows(source)]
            rows = prepare_dataset(rows, self.tokenizer, max_length=self.args.max_length, packing=False)
            FeatureCache.write(self.work_dir / "cache" / name, rows, self.target, target_layer_ids=[*sorted(read), -1])

    def train(self, cell: Cell) -> None:
        folder = cell.folder(self.work_dir)
        if (folder / "training.json").exists():
            return
        print(folder.name, flush=True)
        command = [COMMAND, "train", *self.flags(cell.name, self.widths.get(cell.name)), "--seed", str(cell.seed)]
        command += ["--output_dir", str(folder)] + ([] if cell.rate is None else ["--learning_rate", str(cell.rate)])
        command += ["--resume_from_checkpoint", "true"] if [*folder.glob("checkpoint-*")] else []
        with folder.with_suffix(".log").open("w") as log:
            done = subprocess.run(command, stdout=log, stderr=log, check=False)
        if done.returncode:
            raise SystemExit(f"{folder.name} failed: see {log.name}.")

    def measured(self, cell: Cell) -> dict[str, dict[str, float]]:
        """Of each configuration: tau at temperature 0 and 1, and by real generation where training was told to."""
        folder = cell.folder(self.work_dir)
        record = folder / "measured.json"
        if not record.exists():
            drafter: Any = load_drafter(folder, dtype=torch.float32)
            settings = HyperDFlashTrainingArguments(str(folder), report_to="none", disable_tqdm=True)
            caches = {name: FeatureCache(self.work_dir / "cache" / name, self.target) for name in ("eval", "sampled")}
            trainer = HyperDFlashTrainer(drafter, self.target, settings, eval_dataset=caches["eval"])
            trainer.remove_callback(PrinterCallback)
            found: dict[str, dict[str, float]] = {}
            for name, fields in getattr(self.grid, "CONFIGS", {"": {}}).items():
                vars(drafter.config).update(fields)
                greedy, sampled = (trainer.evaluate(cache) for cache in caches.values())
                found[name] = {"tau": greedy["eval_teacher_forced_tau"], "expected": sampled["eval_expected_tau"]}
                generated = json.loads((folder / "training.json").read_text())["metrics"].get("eval_tau")
                found[name] |= {} if generated is None else {"generated": generated}
            record.write_text(json.dumps(found, indent=1))
        return json.loads(record.read_text())

    def report(self, found: dict[Cell, dict[str, dict[str, float]]]) -> None:
        versions = f"torch {torch.__version__}, transformers {transformers.__version__}, float32"
        where = f"{hardware('cpu')}, {torch.get_num_threads()} thread(s)"
        print(f"\n{datetime.date.today()}, {where}, {versions}, {' '.join(self.args.train_args)}\n")
        print("| drafter | parameters | learning rate | tau, T = 0 | expected tau, T = 1 | tau by generation |")
        print("|---|---:|---:|---:|---:|---:|")
        rates = dict.fromkeys(cell.rate for cell in found)
        for name, config in product(self.names, next(iter(found.values()))):
            means: dict[float | None, dict[str, float]] = {}
            for rate in rates:
                of_seeds = [taus[config] for cell, taus in found.items() if (cell.name, cell.rate) == (name, rate)]
                means[rate] = {key: sum(each[key] for each in of_seeds) / len(of_seeds) for key in of_seeds[0]}
            best = max(means, key=lambda rate: means[rate]["tau"])
            taus = [
                f"{means[best][key]:.2f}" if key in means[best] else "" for key in ("tau", "expected", "generated")
            ]
            size, rate = self.size(name, self.widths.get(name)), "" if best is None else f"{best:g}"
            cells = [f"{name}{', ' if config else ''}{config}", f"{size:,}", rate, *taus]
            print(f"| {' | '.join(cells)} |")
        with (self.work_dir / "cells.csv").open("w", newline="") as file:
            lines = csv.writer(file)
            lines.writerow(["drafter", "learning_rate", "seed", "configuration", "tau", "expected_tau", "generated"])
            for cell, of in found.items():
                for config, taus in of.items():
                    lines.writerow([cell.name, cell.rate, cell.seed, config, *taus.values()])

    def benchmark(self) -> None:
        methods: list[str] = []
        for name in self.names:
            folder = Cell(name, next(iter(self.rates())), self.args.seeds[0]).folder(self.work_dir)
            for settings in getattr(self.grid, "METHODS", {}).get(name, ()):
                methods += ["--drafter", f"{name} ({settings})={folder}"]
        command = [COMMAND, "benchmark", "--target", self.args.target, *methods, "--data", self.args.suites]
        command += [*"--limit 8 --temperature 0 --temperature 1 --threads 1".split(), "--max-new-tokens"]
        command += [str(self.args.max_new_tokens), "--output", str(self.work_dir / "results")]
        print(shlex.join(command), flush=True)
        subprocess.run(command, check=True)

    def rates(self) -> list[float | None]:
        return list(getattr(self.grid, "RATES", [None]))


def read_grid(name: str) -> SimpleNamespace:
    path = Path(name) if name.endswith(".py") else GRIDS / f"{name}.py"
    if not path.exists():
        known = ", ".join(sorted(grid.stem for grid in GRIDS.glob("*.py")))
        raise SystemExit(f"Error: the grid is {name!r}, expected a file that ends in .py, or one of {known}.")
    return SimpleNamespace(**runpy.run_path(str(path)))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("grid", help="the name of a grid, or a file")
    parser.add_argument("--target", required=True)
    parser.add_argument("--drafter", help="that a grid goes on from")
    parser.add_argument("--answers", nargs="+", required=True, help="the target's own answers to the training prompts")
    parser.add_argument("--eval-answers", required=True, help="the target's greedy answers to held-out prompts")
    parser.add_argument("--eval-sampled", help="its answers to them at temperature 1; unset for the greedy ones")
    parser.add_argument("--work-dir", type=Path, required=True)
    parser.add_argument("--cells", nargs="+", help="some of the grid's; unset for all")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--parameters", type=int, help="that all drafters have")
    parser.add_argument("--suites", help="a folder of prompt suites for the benchmark; unset for training alone")
    parser.add_argument("--max-new-tokens", type=int, default=128, help="of the benchmark")
    parser.add_argument("--max-length", type=int, default=512)
    parser.add_argument("--jobs", type=int, default=1, help="cells that are trained at the same time")
    end = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    args = parser.parse_args(sys.argv[1:end])
    args.train_args = sys.argv[end + 1 :]
    return args


def main() -> None:
    args = parse_args()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    args.work_dir.mkdir(parents=True, exist_ok=True)
    sweep = Sweep(args)
    sweep.choose_widths()
    sweep.write_features()
    cells = [Cell(*values) for values in product(sweep.names, sweep.rates(), args.seeds)]
    with ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(sweep.train, cells))
    sweep.report({cell: sweep.measured(cell) for cell in cells})
    if args.suites:
        sweep.benchmark()


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as error:  # what the user can mend
        raise SystemExit(f"Error: {' '.join(str(error).split())}") from None
