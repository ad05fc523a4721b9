"""Train the drafters of a grid in turns, so that all have had the same time whenever it is stopped.

    python experiments/train_in_turns.py smollm2 --target SmolLM2-135M-Instruct.Q4_1.gguf --drafter DRAFTER \
        --answers greedy.jsonl sampled.jsonl --work-dir smollm2 -- --per_device_train_batch_size 8 --num_anchors 40

`experiments/sweep.py` says what a grid is; what stands after `--` are flags of `hf-hyperdflash train` for all. The
drafter that has had the least time is next. Time is what its own steps took of the CPU: the target's forward counts
for none, because all read the same rows in the same order, and what the target computes for a step is kept until all
have had it. Stopped at any moment (Ctrl-C and SIGTERM end a turn early), the same command goes on from the last turns,
on another machine, too, with a copy of the folder.

The learning rate stays as it is after the warm-up, because nobody knows when the end is. Instead the mean of the
weights over the last tenth or so of the steps is measured and kept: `CELL/drafter` in the folder. After 50 steps, and
whenever their number has doubled, tau of the teacher-forced walk over held-out answers is measured (`--curve-rows`),
and with `--measure`, which trains nothing, over all held-out ones. Writes `report.md` and `results.json`. With
`--suites`, a folder of prompts, `--measure` also runs `hf-hyperdflash benchmark`: tau, acceptance of each position and
tokens a second at temperature 0 and 1, of the grid's METHODS and of prompt lookup. It goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from sweep import COMMAND, read_grid
from transformers import PrinterCallback, TrainerCallback

from hf_hyperdflash import HyperDFlashTrainer, load_drafter, load_target, load_tokenizer
from hf_hyperdflash.benchmark.runner import hardware
from hf_hyperdflash.training.data.rows import load_rows, prepare_dataset
from hf_hyperdflash.training.runs.checkpoints import newest_complete
from hf_hyperdflash.training.script import earlier_drafter, load_data, new_drafter, parse

FIRST_MEASURED = 50  # steps; then at each doubling
SHARPNESS = 9  # of the mean: step t has weight t ** SHARPNESS, so that half of it is of the last 7 % of the steps
SAVED_EVERY = 1800  # seconds by the clock, where others use the machine


class SharedFeatures(HyperDFlashTrainer):
    """Reads what the target computes for a batch from a folder, and computes it if no other drafter has had it."""

    folder: Path
    target_seconds = 0.0

    def residual(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        began = time.process_time()
        step = f"{self.state.global_step:07}" if self.model.training else "held-out"
        digest = hashlib.sha256(batch["input_ids"].numpy().tobytes())
        digest.update(str(self.objective.layer_ids).encode())
        path = self.folder / f"{step}-{digest.hexdigest()[:16]}.safetensors"
        if not path.exists():
            save_file({"residual": super().residual(batch)}, path.with_suffix(".part"))
            path.with_suffix(".part").rename(path)
        found = load_file(path)["residual"]
        self.target_seconds += time.process_time() - began
        return found


class Turn(TrainerCallback):
    """Ends a turn when its time is over, and takes the mean of the weights over the steps so far."""

    def __init__(self, trainer: SharedFeatures, seconds: float, before: float, mean: dict[str, torch.Tensor]) -> None:
        self.trainer, self.seconds, self.before, self.mean = trainer, seconds, before, mean
        self.used, self.saved_at, self.is_stopped = 0.0, time.monotonic(), False

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.began = time.process_time() - self.trainer.target_seconds

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.used += time.process_time() - self.trainer.target_seconds - self.began
        weights = self.trainer.model.state_dict()
        share = (SHARPNESS + 1) / (state.global_step + SHARPNESS)
        for name, value in weights.items():
            if not value.is_floating_point() or state.global_step == 1:
                self.mean[name] = value.detach().clone()
            else:
                self.mean[name].lerp_(value, share)
        control.should_training_stop = self.used >= self.seconds or self.is_stopped
        if control.should_training_stop or time.monotonic() - self.saved_at > SAVED_EVERY:
            control.should_save, self.saved_at = True, time.monotonic()
            save_file(self.mean, mean_file(args, state.global_step), {"seconds": str(self.before + self.used)})

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        for path in Path(args.output_dir).glob("mean-*"):
            if path != mean_file(args, state.global_step):
                path.unlink()

    def stop(self, *_: Any) -> None:
        self.is_stopped = True


def mean_file(training: Any, step: int) -> Path:
    return Path(training.output_dir) / f"mean-{step}.safetensors"


class Turns:
    """The drafters of a grid, each in its folder with the newest checkpoint."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.work_dir = args, args.work_dir
        self.grid = read_grid(args.grid)
        self.names = args.cells or list(self.grid.CELLS)
        self.target = load_target(args.target, dtype=args.dtype)
        self.tokenizer = load_tokenizer(args.target)
        self.features = args.work_dir / "features"
        self.features.mkdir(parents=True, exist_ok=True)
        self.rows, self.held_out = self.prepare_rows()

    def prepare_rows(self) -> tuple[Any, Any]:
        """The tokenized rows, once; training and held-out ones are split as `train` does it."""
        script, training = parse(self.flags(self.names[0]))
        parts, raw = [], None
        for place, name in enumerate(("rows", "held-out")):
            folder = self.work_dir / name
            if not folder.exists():
                raw = raw or load_data(script, training.seed)
                length = training.max_length or 512
                prepare_dataset(raw[place], self.tokenizer, max_length=length).save_to_disk(str(folder))
            parts.append(load_rows(str(folder)))
        return parts[0], parts[1]

    def folder(self, name: str) -> Path:
        return self.work_dir / name.replace(",", "").replace(" ", "-")

    def flags(self, name: str) -> list[str]:
        shared = [
            "--target", self.args.target, "--dataset", *self.args.answers, "--eval_rows", 96, "--eval_prompts", 0,
            "--output_dir", self.folder(name), "--max_steps", 10**6, "--lr_scheduler_type", "constant_with_warmup",
            "--warmup_steps", 60, "--save_strategy", "no", "--eval_strategy", "no", "--save_total_limit", 1,
            "--report_to", "none", "--disable_tqdm", "true", "--use_cpu", "true", "--max_length", 512,
        ]  # fmt: skip
        own = shlex.split(self.grid.CELLS[name].format(**vars(self.args)))
        return [*map(str, shared), *self.args.train_args, *own]

    def facts(self, name: str) -> dict[str, float]:
        """How many steps a drafter has had, and how many seconds."""
        checkpoint, _ = newest_complete(self.folder(name))
        if checkpoint is None:
            return {"steps": 0, "seconds": 0.0}
        steps = int(checkpoint.name.rpartition("-")[2])
        with safe_open(self.folder(name) / f"mean-{steps}.safetensors", "pt") as file:
            return {"steps": steps, "seconds": float(file.metadata()["seconds"])}

    def trainer(self, name: str, drafter: Any, held_out: Any) -> SharedFeatures:
        _, training = parse(self.flags(name))
        trainer = SharedFeatures(drafter, self.target, training, train_dataset=self.rows, eval_dataset=held_out)
        trainer.folder = self.features
        trainer.remove_callback(PrinterCallback)
        return trainer

    def turn(self, name: str) -> None:
        script, training = parse(self.flags(name))
        folder, before = self.folder(name), self.facts(name)
        checkpoint, _ = newest_complete(folder)
        torch.manual_seed(training.seed)
        if checkpoint:
            drafter: Any = load_drafter(str(checkpoint), dtype=torch.float32)
        else:
            is_new = not script.drafter
            drafter = new_drafter(script, self.target, self.tokenizer) if is_new else earlier_drafter(script, 0)
        trainer = self.trainer(name, drafter, self.held_out.select(range(self.args.curve_rows)))
        if not checkpoint and script.draft_vocab_size:
            trainer.choose_vocabulary()
        mean = load_file(mean_file(training, int(before["steps"]))) if checkpoint else {}
        seconds = min(self.args.turn, self.args.seconds - before["seconds"])
        turn = Turn(trainer, seconds, before["seconds"], mean)
        trainer.add_callback(turn)
        for sign in (signal.SIGINT, signal.SIGTERM):
            signal.signal(sign, turn.stop)
        trainer.train(resume_from_checkpoint=bool(checkpoint))
        after = self.facts(name)
        print(f"{name}: {after['steps']} steps, {after['seconds']:.0f} s", flush=True)
        drafter.load_state_dict(turn.mean)
        drafter.save_pretrained(folder / "drafter")
        if turn.is_stopped:
            raise SystemExit("Stopped. The same command goes on.")
        next_one = FIRST_MEASURED
        while next_one <= before["steps"]:
            next_one *= 2
        if after["steps"] >= next_one:
            self.note(name, trainer, self.args.curve_rows)
        done = min(self.facts(each)["steps"] for each in self.names)
        for path in self.features.glob("[0-9]*"):
            if int(path.name[:7]) < done:
                path.unlink()

    def note(self, name: str, trainer: SharedFeatures, rows: int) -> None:
        """Measure the mean of the weights, and add a line to the drafter's curve."""
        metrics = trainer.evaluate()
        found = {key.removeprefix("eval_"): value for key, value in metrics.items()}
        kept = {k: v for k, v in found.items() if k in ("loss", "expected_tau") or k.startswith("teacher_forced")}
        size = sum(parameter.numel() for parameter in trainer.model.parameters())
        line = {"drafter": name, **self.facts(name), "rows": rows, "parameters": size, **kept}
        with (self.work_dir / "curves.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        self.report()

    def measure(self) -> None:
        """Measure each drafter, as it is now, on all held-out rows."""
        for name in self.names:
            if self.facts(name)["steps"]:
                drafter = load_drafter(str(self.folder(name) / "drafter"), dtype=torch.float32)
                self.note(name, self.trainer(name, drafter, self.held_out), len(self.held_out))

    def benchmark(self) -> None:
        """Measure each drafter by generation, beside prompt lookup."""
        args, methods = self.args, []
        for name in self.names:
            for settings in getattr(self.grid, "METHODS", {}).get(name, ()):
                methods += ["--drafter", f"{name} ({settings})={self.folder(name) / 'drafter'}"]
        command = [COMMAND, "benchmark", "--target", args.target, *methods, "--prompt-lookup", 7]
        command += ["--data", args.suites, "--limit", args.limit, "--max-new-tokens", args.max_new_tokens]
        command += ["--temperature", 0, "--temperature", 1, "--dtype", args.dtype, "--threads", 1]
        command = [*map(str, command), "--output", str(self.work_dir / "benchmark")]
        print(shlex.join(command), flush=True)
        subprocess.run(command, check=True)

    def report(self) -> None:
        found = [json.loads(line) for line in (self.work_dir / "curves.jsonl").read_text().splitlines()]
        found.sort(key=lambda line: (self.names.index(line["drafter"]), line["rows"], line["steps"]))
        settings = {
            "date": str(datetime.date.today()), "hardware": hardware("cpu"), "threads": torch.get_num_threads(),
            "torch": torch.__version__, "transformers": transformers.__version__, "target": self.args.dtype,
            "flags of train": shlex.join(self.args.train_args),
        }  # fmt: skip
        lines = ["# Drafters that are trained in turns", "", *(f"- {key}: {value}" for key, value in settings.items())]
        head = ["drafter", "parameters", "steps", "CPU minutes", "held-out rows", "tau, T = 0", "expected tau, T = 1"]
        lines += ["", f"| {' | '.join(head)} |", "|---|---:|---:|---:|---:|---:|---:|"]
        for each in found:
            taus = f"{each['teacher_forced_tau']:.2f} | {each['expected_tau']:.2f}"
            where = f"{each['steps']} | {each['seconds'] / 60:.1f} | {each['rows']}"
            lines.append(f"| {each['drafter']} | {each['parameters']:,} | {where} | {taus} |")
        (self.work_dir / "report.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
        flags = {name: self.grid.CELLS[name] for name in self.names}
        results = {"settings": settings, "drafters": flags, "curves": found}
        (self.work_dir / "results.json").write_text(json.dumps(results, indent=1), encoding="utf-8")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("grid", help="the name of a grid, or a file")
    parser.add_argument("--target", required=True)
    parser.add_argument("--dtype", default="bfloat16", help="of the target")
    parser.add_argument("--drafter", help="that a grid goes on from")
    parser.add_argument("--answers", nargs="+", required=True, help="the target's own answers to the training prompts")
    parser.add_argument("--work-dir", type=Path, required=True)
    parser.add_argument("--cells", nargs="+", help="some of the grid's; unset for all")
    parser.add_argument("--turn", type=float, default=60, help="seconds of the CPU for a drafter's own steps")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="that each drafter has had at the end")
    parser.add_argument("--curve-rows", type=int, default=32, help="held-out rows of the measurements between")
    parser.add_argument("--measure", action="store_true", help="train nothing, and measure on all held-out rows")
    parser.add_argument("--suites", help="with `--measure`: a folder of prompt suites to generate from, too")
    parser.add_argument("--limit", type=int, default=8, help="prompts of each suite")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    end = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    args = parser.parse_args(sys.argv[1:end])
    args.train_args = sys.argv[end + 1 :]
    return args


def main() -> None:
    turns = Turns(parse_args())
    if turns.args.measure:
        turns.measure()
        if turns.args.suites:
            turns.benchmark()
        return
    while True:
        had = {name: turns.facts(name)["seconds"] for name in turns.names}
        name = min(had, key=lambda each: had[each])
        if had[name] >= turns.args.seconds:
            return
        turns.turn(name)


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as error:  # what the user can mend
        raise SystemExit(f"Error: {' '.join(str(error).split())}") from None
