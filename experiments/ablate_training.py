"""What each choice in training is worth: drafters trained at equal budget, compared by real generation.

    python experiments/ablate_training.py --target examples/models/tiny-deepseek-v4 --answers answers.jsonl \
        --original gsm8k.jsonl --original codealpaca.json --eval-answers held_out.jsonl --work-dir ablation

`--answers` and `--eval-answers` are the target's own (`regenerate_answers.py`), `--original` the datasets they were
regenerated from. Every variant runs `train_drafter.py` with the same rows, steps and seed, changing one thing.
Finished runs are kept: a killed ablation goes on where it stopped. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from datetime import date
from pathlib import Path

import torch
import transformers

from hf_hyperdflash.benchmark.runner import hardware
from hf_hyperdflash.training.data.messages import to_messages
from hf_hyperdflash.training.data.rows import load_rows

# What is compared, and the flags that differ from the first line's.
TRAIN = Path(__file__).parent.parent / "examples" / "train_drafter.py"
CACHED = ["--feature_source", "cached"]
VARIANTS = {
    "exact KL teacher, equal weights, own answers, bfloat16 cache": CACHED,
    "no KL": [*CACHED, "--kl_weight", "0"],
    "mean-pooled KL teacher (the paper's)": [*CACHED, "--kl_teacher", "mean_pool"],
    "decayed position weights, exp(-(k-1)/4)": [*CACHED, "--loss_decay", "4"],
    "original answers instead of the target's own": [*CACHED],
    "float8 cache": [*CACHED, "--feature_dtype", "float8"],
    "online features": [],
}
ORIGINAL = "original answers instead of the target's own"


def original_answers(args: argparse.Namespace) -> Path:
    """The prompts of `--answers` with the datasets' answers."""
    known = {}
    for source in args.original:
        for row in load_rows(source):
            question, answer = (message["content"] for message in to_messages(row)[:2])
            known[question.strip()] = answer
    path = Path(args.work_dir) / "original.jsonl"
    with path.open("w") as file:
        for row in load_rows(args.answers):
            prompt = row["messages"][0]
            asked = prompt["content"].strip()
            answer = known.get(asked) or known.get(asked.removesuffix(args.question_suffix.strip()).strip())
            if answer is None:
                raise ValueError(f"No original answer to {asked[:80]!r}: pass the datasets the prompts are from.")
            file.write(json.dumps({"messages": [prompt, {"role": "assistant", "content": answer}]}) + "\n")
    return path


def run(name: str, flags: list[str], seed: int, dataset: Path, args: argparse.Namespace) -> dict:
    folder = Path(args.work_dir) / f"{list(VARIANTS).index(name)}-seed{seed}"
    facts = folder / "training.json"
    if not facts.exists():
        cache = f"cache-{dataset.stem}-{'float8' if 'float8' in flags else 'bfloat16'}"
        command = [
            sys.executable, TRAIN, "--target", args.target, "--dataset", dataset,
            "--eval_dataset", args.eval_answers, "--output_dir", folder, "--seed", seed, "--report_to", "none",
            "--feature_cache_dir", Path(args.work_dir) / cache, "--eval_strategy", "no", "--save_strategy", "no",
            "--eval_prompts", 10**6, *flags, *args.train_args,
        ]  # fmt: skip
        print(name, f"(seed {seed})", flush=True)
        subprocess.run(list(map(str, command)), check=True)
    return json.loads(facts.read_text())


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--answers", required=True, help="the target's own answers to the training prompts")
    parser.add_argument(
        "--original", action="append", required=True, help="the datasets the prompts are from; repeatable"
    )
    parser.add_argument("--question-suffix", default="", help="what regenerate_answers.py was told to append")
    parser.add_argument("--eval-answers", required=True, help="the target's own answers to held-out prompts")
    parser.add_argument("--work-dir", required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("train_args", nargs="*", help="after --: flags of train_drafter.py that all variants share")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    Path(args.work_dir).mkdir(parents=True, exist_ok=True)
    datasets = {name: Path(args.answers) for name in VARIANTS} | {ORIGINAL: original_answers(args)}
    results: dict[str, list[dict]] = {name: [] for name in VARIANTS}
    for seed in args.seeds:
        for name, flags in VARIANTS.items():
            results[name].append(run(name, flags, seed, datasets[name], args)["metrics"])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print(
        f"\n{date.today()}, {hardware(device)}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}, {len(args.seeds)} seed(s), {' '.join(args.train_args)}\n"
    )
    print("| training | tau | teacher-forced tau | tau of each seed |\n|---|---:|---:|---|")
    for name, runs in results.items():
        taus = [metrics["eval_tau"] for metrics in runs]
        forced = [metrics["eval_teacher_forced_tau"] for metrics in runs]
        each = ", ".join(f"{tau:.2f}" for tau in taus)
        print(f"| {name} | {sum(taus) / len(taus):.2f} | {sum(forced) / len(forced):.2f} | {each} |")


if __name__ == "__main__":
    main()
