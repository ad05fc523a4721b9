"""What it costs a sequential head to choose among the block's own best tokens, by the weight of their cross-entropy.

    python experiments/compare_candidates.py --target examples/models/tiny-deepseek-v4 \
        --drafter examples/models/tiny-deepseek-v4-hyperdflash --answers answers.jsonl --eval-answers greedy.jsonl \
        --eval-sampled sampled.jsonl --work-dir candidates -- --recipe ours --max_steps 600

Candidates are chosen by the block's own logits, which `--blind_weight` trains. For each weight the drafter is trained
on for a while, choosing among the first of `--candidates`, and then measured with each number of them over the
held-out answers: tau of the teacher-forced walk over greedy ones (temperature 0), and the tau that follows over
sampled ones from the drafts' total variation from the target (temperature 1). Finished trainings are kept. Prints a
Markdown table and writes `candidates.csv`. What stands after `--` are flags of `train_drafter.py` for all weights.
"""

from __future__ import annotations

import argparse
import csv
import os
import subprocess
import sys
from datetime import date
from pathlib import Path

import torch
import transformers
from transformers import AutoTokenizer, PrinterCallback

from hf_hyperdflash import HyperDFlashDrafter, load_target
from hf_hyperdflash.benchmark.runner import hardware
from hf_hyperdflash.training.arguments import HyperDFlashTrainingArguments
from hf_hyperdflash.training.data.rows import load_rows, prepare_dataset
from hf_hyperdflash.training.trainer import HyperDFlashTrainer

TRAIN = Path(__file__).parent.parent / "examples" / "train_drafter.py"
ALL = 0  # candidates: the whole vocabulary


def train(weight: float, args: argparse.Namespace) -> Path:
    """The folder of a drafter that was trained on with this weight, now or before."""
    start, folder = Path(args.work_dir) / "start", Path(args.work_dir) / f"weight-{weight:g}"
    if (folder / "training.json").exists():
        return folder
    drafter = HyperDFlashDrafter.from_pretrained(args.drafter, dtype=torch.float32)
    drafter.config.head_candidates = args.candidates[0]
    drafter.save_pretrained(start)
    flags = [
        "--target", args.target, "--target_dtype", "float32", "--drafter", start, "--dataset", *args.answers,
        "--rows", 10**6, "--eval_dataset", args.eval_answers, "--eval_prompts", 0,
        "--eval_strategy", "no", "--save_strategy", "no", "--feature_source", "cached",
        "--feature_cache_dir", Path(args.work_dir) / "cache", "--report_to", "none", "--max_length", args.max_length,
        "--save_dtype", "float32", "--blind_weight", weight, "--output_dir", folder, "--disable_tqdm", "true",
        *args.train_args,
    ]  # fmt: skip
    print(folder.name, flush=True)
    with (Path(args.work_dir) / f"{folder.name}.log").open("w") as log:
        done = subprocess.run([sys.executable, TRAIN, *map(str, flags)], stdout=log, stderr=log, check=False)
    if done.returncode:
        raise SystemExit(f"{folder.name} failed: see {log.name}.")
    return folder


def measure(folder: Path, target, rows: dict[str, list], args: argparse.Namespace) -> dict[int, tuple[float, float]]:
    """Tau at temperature 0 and 1 by the number of candidates."""
    drafter = HyperDFlashDrafter.from_pretrained(folder, dtype=torch.float32)
    settings = HyperDFlashTrainingArguments(str(folder), report_to="none", disable_tqdm=True)
    trainer, found = HyperDFlashTrainer(drafter, target, settings, eval_dataset=rows["greedy"]), {}
    trainer.remove_callback(PrinterCallback)
    for count in (ALL, *args.candidates):
        drafter.config.head_candidates = count
        greedy, sampled = (trainer.evaluate(rows[name]) for name in ("greedy", "sampled"))
        found[count] = greedy["eval_teacher_forced_tau"], sampled["eval_expected_tau"]
    return found


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--drafter", required=True, help="with a sequential head; trained on from here")
    parser.add_argument("--answers", nargs="+", required=True, help="the target's own answers to the training prompts")
    parser.add_argument("--eval-answers", required=True, help="the target's greedy answers to held-out prompts")
    parser.add_argument("--eval-sampled", required=True, help="its answers to them at temperature 1")
    parser.add_argument("--work-dir", required=True)
    parser.add_argument("--weights", nargs="+", type=float, default=[0, 0.1, 0.3, 1])
    parser.add_argument("--candidates", nargs="+", type=int, default=[256, 64])
    parser.add_argument("--max-length", type=int, default=512)
    parser.add_argument("train_args", nargs="*", help="after --: flags of train_drafter.py that all weights share")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    target, tokenizer = load_target(args.target, dtype="float32"), AutoTokenizer.from_pretrained(args.target)
    sources = {"greedy": args.eval_answers, "sampled": args.eval_sampled}
    rows = {
        name: prepare_dataset(load_rows(source), tokenizer, max_length=args.max_length, packing=False)
        for name, source in sources.items()
    }
    found = {weight: measure(train(weight, args), target, rows, args) for weight in args.weights}
    print(
        f"\n{date.today()}, {hardware('cuda' if torch.cuda.is_available() else 'cpu')}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}, {len(load_rows(args.eval_answers))} held-out answers, "
        f"{' '.join(args.train_args)}\n"
    )
    print(f"| candidates | weight {' | '.join(f'{weight:g}' for weight in found)} |")
    print("|---:|" + "---:|" * len(found))
    for count in (ALL, *args.candidates):
        name = f"all {target.config.vocab_size:,}" if count == ALL else count
        cells = ["{:.2f} / {:.2f}".format(*of[count]) for of in found.values()]
        print(f"| {name} | {' | '.join(cells)} |")
    with (Path(args.work_dir) / "candidates.csv").open("w", newline="") as file:
        lines = [[count, weight, *of[count]] for weight, of in found.items() for count in of]
        csv.writer(file).writerows([["candidates", "blind_weight", "teacher_forced_tau", "expected_tau"], *lines])


if __name__ == "__main__":
    main()
