"""What training says as it goes: a line for each entry of its log, of which `trainer_state.json` has every figure."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count, takewhile
from typing import Any

from transformers import PrinterCallback, ProgressCallback, TrainerControl, TrainerState, TrainingArguments

# An evaluation by what it did, what its acceptance is called, and its figures. Generation logs the walk's again.
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


def line_of(step: int, logs: Mapping[str, Any]) -> str:
    """An entry of the log in a line: of a step all of it, of an evaluation loss, tau and acceptance, of the whole run
    how long it took."""
    if "train_runtime" in logs:
        return f"{step} steps in {logs['train_runtime']:.0f} s, mean loss {logs.get('train_loss', 0):.4g}"
    prefix = next((name.removesuffix("runtime") for name in logs if name.endswith("_runtime")), "eval_")
    for kind, start, titles in _EVALUATIONS:
        if rates := _numbered(logs, prefix + start):
            told = [title.format(logs[prefix + name]) for name, title in titles.items() if prefix + name in logs]
            percent = ", ".join(f"{100 * rate:.0f}" for rate in rates)
            return f"step {step}, {kind}: {', '.join(told)}; accepted at each position, %: {percent}"
    shown = {name.replace("_", " "): value for name, value in logs.items() if name not in ("epoch", "total_flos")}
    values = (f"{value:.4g}" if isinstance(value, float) else value for value in shown.values())
    return f"step {step}: {', '.join(f'{name} {value}' for name, value in zip(shown, values))}"


def _numbered(logs: Mapping[str, Any], start: str) -> list[float]:
    names = takewhile(logs.__contains__, (f"{start}{k}" for k in count(1)))
    return [logs[name] for name in names]


class LinesAboveBar(ProgressCallback):
    """transformers' progress bar, with lines for dictionaries."""

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any
    ) -> None:
        if state.is_world_process_zero and self.training_bar is not None:
            self.training_bar.write(line_of(state.global_step, logs))


class Lines(PrinterCallback):
    """The same where there is no bar."""

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any
    ) -> None:
        if state.is_world_process_zero:
            print(line_of(state.global_step, logs), flush=True)
