"""GRPO with TRL, whose rollouts a drafter speeds up: the same text distribution, while the target's weights change.

    python examples/grpo_with_drafter.py --target examples/models/tiny-deepseek-v4 \
        --drafter examples/models/tiny-deepseek-v4-hyperdflash --data gsm8k.jsonl --output grpo

`--data` has one `{"question": ...}` a line. Each size of `--rollouts` is trained from the same start alone, with the
drafter, and, with `--adapt`, with a drafter that learns from what the target says of its drafts. Rollouts are drawn at
temperature 1, so that no two runs write the same text: speeds are told per token that was written. At the end greedy
text of the trained target, drafted, is compared with its own.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import sys
import time
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from datasets import Dataset

from hf_hyperdflash import load_drafter, load_target, load_tokenizer
from hf_hyperdflash.benchmark.results import save_report
from hf_hyperdflash.benchmark.runner import hardware

try:
    from trl import GRPOConfig, GRPOTrainer
except ImportError as error:
    raise SystemExit(f"Error: {error}: pip install trl.") from None

ASKED = "\nPlease reason step by step, and put your final answer within \\boxed{}."
TITLES = {"alone": "target alone", "drafted": "with the drafter", "adapted": "with the drafter, learning"}


def boxed_and_short(completions: list[list[dict[str, str]]], **_: Any) -> list[float]:
    """The reward: 1 for a boxed number, less a thousandth for each character."""
    texts = [completion[0]["content"] for completion in completions]
    return [float("\\boxed{" in text) - len(text) / 1000 for text in texts]


class TimedTrainer(GRPOTrainer):
    """TRL's trainer, with the seconds of each step and of its rollouts, their tokens, and the drafter's tau. On a CPU
    they are the process's own, as what else runs on the machine does not count."""

    def __init__(self, *args: Any, drafter: Any = None, **options: Any) -> None:
        super().__init__(*args, **options)
        self.drafter, self.steps = drafter, []
        self.now = time.process_time if self.args.device.type == "cpu" else time.perf_counter

    def _generate_single_turn(self, *args: Any, **options: Any) -> Any:
        began = self.now()
        found = super()._generate_single_turn(*args, **options)
        tau = self.drafter.last_stats.tau if self.drafter is not None else None
        self.steps.append({"rollouts": self.now() - began, "tokens": sum(map(len, found[0])), "tau": tau})
        return found

    def training_step(self, *args: Any, **options: Any) -> torch.Tensor:
        began = self.now()
        loss = super().training_step(*args, **options)
        self.steps[-1]["seconds"] = self.now() - began
        return loss


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="path or Hub id")
    parser.add_argument("--drafter", required=True, help="path or Hub id")
    parser.add_argument("--data", required=True, help="JSON lines with `question`")
    parser.add_argument("--rollouts", nargs="+", type=int, default=[2, 4, 8], help="of a step, all of one prompt")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--drafts", type=int, help="a round; the drafter's own number if left out")
    parser.add_argument("--adapt", action="store_true", help="also with a drafter that learns")
    parser.add_argument("--learning-rate", type=float, default=1e-5)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", help="a folder for results.json and report.md")
    arguments = parser.parse_args()
    if arguments.steps < 2:
        parser.error(f"`--steps` is {arguments.steps}, expected at least 2: the first is not counted in the figures.")
    return arguments


def train(way: str, rollouts: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """One training: each step's figures, and of how many prompts the trained target's greedy text, drafted, is its
    own."""
    target = load_target(arguments.target, dtype=torch.float32)
    tokenizer = load_tokenizer(arguments.target)
    drafter = load_drafter(arguments.drafter, target=target, dtype=torch.float32)
    if arguments.drafts is not None:
        drafter.num_draft_tokens = arguments.drafts
    if way != "alone":
        drafter.bind(target, as_default=True)  # TRL's calls of `generate` name no drafter
    learning = drafter.adapt(target) if way == "adapted" else None
    with open(arguments.data, encoding="utf-8-sig") as lines:
        questions = [json.loads(line)["question"] for line in islice(lines, arguments.steps)]
    prompts = [[{"role": "user", "content": question + ASKED}] for question in questions]
    is_new = "activation_checkpointing" in GRPOConfig.__dataclass_fields__  # from transformers 5.24 on
    checkpointing = {"activation_checkpointing" if is_new else "gradient_checkpointing": False}
    with TemporaryDirectory() as folder:
        config = GRPOConfig(
            folder, max_steps=arguments.steps, learning_rate=arguments.learning_rate, num_generations=rollouts,
            per_device_train_batch_size=rollouts, max_completion_length=arguments.max_new_tokens, bf16=False,
            **checkpointing, use_cpu=not torch.cuda.is_available(), report_to="none", save_strategy="no",
            logging_steps=arguments.steps, disable_tqdm=True,
            router_aux_loss_coef=0.0,  # which TRL 1.16 cannot compute for DeepSeek-V4
        )  # fmt: skip
        trainer = TimedTrainer(
            target, boxed_and_short, config, Dataset.from_dict({"prompt": prompts}), processing_class=tokenizer,
            drafter=None if way == "alone" else drafter,
        )  # fmt: skip
        trainer.train()
    if learning is not None:
        learning.stop()
    return {"way": way, "rollouts": rollouts, "steps": trainer.steps, "same": same_greedy(target, drafter, trainer)}


def same_greedy(target: Any, drafter: Any, trainer: Any) -> list[bool]:
    """Of four prompts, whether the trained target writes the same with the drafter as without."""
    target.eval()
    drafter.bind(target)
    same = []
    for entry in trainer.train_dataset.select(range(min(4, len(trainer.train_dataset)))):
        inputs = trainer.processing_class.apply_chat_template(
            entry["prompt"], add_generation_prompt=True, return_tensors="pt", return_dict=True
        ).to(target.device)
        texts = [
            target.generate(**inputs, assistant_model=one, do_sample=False, max_new_tokens=64)
            for one in (None, drafter)
        ]
        same.append(torch.equal(*texts))
    return same


def summary(run: dict[str, Any]) -> dict[str, float]:
    """Tokens a second in rollouts and in whole steps, the first left out; tau of the first and last quarter."""
    steps, quarter = run["steps"][1:], max(1, len(run["steps"]) // 4)
    tokens = sum(step["tokens"] for step in steps)
    found = {name: tokens / sum(step[name] for step in steps) for name in ("rollouts", "seconds")}
    if run["way"] != "alone":
        taus = [step["tau"] for step in run["steps"]]
        found |= {"early": statistics.fmean(taus[:quarter]), "late": statistics.fmean(taus[-quarter:])}
    return found


def table(runs: list[dict[str, Any]]) -> str:
    lines = [
        "| rollouts a step | | rollouts, tokens/s | whole steps, tokens/s | tau, first quarter | last quarter |",
        "|---:|---|---:|---:|---:|---:|",
    ]
    alone = {run["rollouts"]: summary(run) for run in runs if run["way"] == "alone"}
    for run in runs:
        own, base = summary(run), alone[run["rollouts"]]
        is_alone = run["way"] == "alone"
        rates = [
            f"{own[name]:.0f}" + ("" if is_alone else f" ({own[name] / base[name]:.2f}×)")
            for name in ("rollouts", "seconds")
        ]
        taus = ["", ""] if is_alone else [f"{own[name]:.2f}" for name in ("early", "late")]
        lines.append(f"| {run['rollouts']} | {TITLES[run['way']]} | {' | '.join([*rates, *taus])} |")
    same = [one for run in runs for one in run["same"]]
    told = f"Greedy texts of the trained targets, drafted, that are their own: {sum(same)} of {len(same)}."
    return "\n".join([*lines, "", told])


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    ways = ["alone", "drafted", *(["adapted"] if arguments.adapt else [])]
    runs = []
    for rollouts in arguments.rollouts:
        for way in ways:
            runs.append(train(way, rollouts, arguments))
            print(rollouts, way, json.dumps(summary(runs[-1])), flush=True)
    versions = ", ".join(f"{name} {version(name)}" for name in ("trl", "torch", "transformers"))
    head = (
        f"{datetime.date.today()}, {hardware('cuda' if torch.cuda.is_available() else 'cpu')}, {arguments.threads} "
        f"thread(s), {versions}, float32, {arguments.steps} steps of one prompt each, at most "
        f"{arguments.max_new_tokens} new tokens, temperature 1, learning rate {arguments.learning_rate}, "
        f"seconds {'' if torch.cuda.is_available() else 'of the processor'}, "
        f"{Path(arguments.target).name} with {Path(arguments.drafter).name}"
        + (f", {arguments.drafts} drafts a round" if arguments.drafts else "")
    )
    report = f"# GRPO\n\n{head}\n\n{table(runs)}\n"
    print(report)
    save_report(report, arguments, runs=runs)


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="backslashreplace")  # what it writes may have letters that the terminal lacks
    try:
        main()
    except (ValueError, OSError) as error:  # what the user can mend
        raise SystemExit(f"Error: {' '.join(str(error).split())}") from None
