"""Prints a line for each entry of a training's log, and how far other long work is. `trainer_state.json` has every
figure."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from itertools import count, takewhile

from tqdm import tqdm as PlainBar
from tqdm.auto import tqdm
from transformers import PrinterCallback, ProgressCallback, TrainerState

# Evaluations: name, prefix of the acceptance per position, and figures. Generation's log repeats the estimates.
_EVALUATIONS: tuple[tuple[str, str, dict[str, str]], ...] = (
    ("generated", "acceptance_", {"tau": "tau {:.2f}", "tokens_per_second": "{:.1f} tokens/s"}),
    (
        "held out",
        "teacher_forced_acceptance_",
        {
            "loss": "loss {:.4g}",
            "teacher_forced_tau": "teacher-forced tau {:.2f}",
            "expected_tau": "{:.2f} expected at temperature 1",
        },
    ),
)

_SECONDS = 30  # between the lines that stand for a bar


class _ProgressLines(PlainBar):
    """Prints a bar's text as a line now and then, for log files. Work that takes less than that prints none."""

    def __init__(self, *args: object, **options: object) -> None:
        super().__init__(*args, **{**options, "leave": False, "mininterval": _SECONDS, "maxinterval": _SECONDS})

    def display(self, msg: str | None = None, pos: int | None = None) -> None:
        if msg is None and self.n:
            print(self, file=sys.stderr, flush=True)


def progress_bar(*args: object, disable: bool | None, **options: object) -> PlainBar:
    """Return tqdm's bar. `disable` is `True` for none, `False` for one, `None` for one on a terminal and a line now
    and then elsewhere."""
    if disable is None and not sys.stderr.isatty():
        return _ProgressLines(*args, **options)
    return tqdm(*args, disable=disable, **options)


def format_entry(step: int, logs: Mapping[str, float]) -> str:
    """Format an entry of the log as a line: all values of a step; loss, tau and acceptance of an evaluation; the
    duration of the whole run."""
    if "train_runtime" in logs:
        return f"{step} steps in {logs['train_runtime']:.0f} s, mean loss {logs.get('train_loss', 0):.4g}"
    prefix = next((name.removesuffix("runtime") for name in logs if name.endswith("_runtime")), "eval_")
    for kind, start, titles in _EVALUATIONS:
        names = takewhile(logs.__contains__, (f"{prefix}{start}{k}" for k in count(1)))
        if rates := [logs[name] for name in names]:
            facts = [title.format(logs[prefix + name]) for name, title in titles.items() if prefix + name in logs]
            percent = ", ".join(f"{100 * rate:.0f}" for rate in rates)
            return f"step {step}, {kind}: {', '.join(facts)}; accepted at each position, %: {percent}"
    entries = {name.replace("_", " "): value for name, value in logs.items() if name not in ("epoch", "total_flos")}
    values = (f"{value:.4g}" if isinstance(value, float) else value for value in entries.values())
    return f"step {step}: {', '.join(f'{name} {value}' for name, value in zip(entries, values))}"


class LinesAboveBar(ProgressCallback):
    """transformers' progress bar, with a line for each entry instead of a dictionary."""

    def on_log(
        self, args: object, state: TrainerState, control: object, logs: dict[str, float] | None = None, **_: object
    ) -> None:
        if state.is_world_process_zero and self.training_bar is not None:
            self.training_bar.write(format_entry(state.global_step, logs or {}))


class Lines(PrinterCallback):
    """Prints a line for each entry where there is no bar."""

    def on_log(
        self, args: object, state: TrainerState, control: object, logs: dict[str, float] | None = None, **_: object
    ) -> None:
        if state.is_world_process_zero:
            print(format_entry(state.global_step, logs or {}), flush=True)
