"""What the measurements here share: arguments, the pair, timed calls of `generate`, rows that a killed run keeps."""

from __future__ import annotations

import argparse
import json
import shlex
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers.generation.streamers import BaseStreamer

from hf_hyperdflash import load_drafter, load_target, load_tokenizer
from hf_hyperdflash.benchmark.intervals import drawn_ratios
from hf_hyperdflash.benchmark.runner import environment

HERE = Path(__file__).resolve().parent


def arguments_of(doc: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="path, .gguf file or Hub id")
    parser.add_argument("--drafter", required=True, help="path or Hub id")
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=96, help="new tokens of each text, at most")
    parser.add_argument("--output", type=Path, required=True, help="folder of rows.jsonl, results.json and report.md")
    return parser


def run(main: Callable[[], None]) -> None:
    """Run a script; what the user can mend ends in one line."""
    try:
        main()
    except (ValueError, OSError, ImportError) as error:
        raise SystemExit(f"Error: {' '.join(str(error).split())}") from None


def load_pair(arguments: argparse.Namespace, drafters: int) -> tuple[Any, Any, list[Any]]:
    """Return target, tokenizer, and bound drafters: each keeps its own knowledge of what pays ("auto")."""
    torch.set_num_threads(arguments.threads)
    transformers.logging.set_verbosity_error()
    target = load_target(arguments.target, dtype=arguments.dtype)
    loaded = [load_drafter(arguments.drafter, target=target) for _ in range(drafters)]
    for drafter in loaded:
        drafter.bind(target)
    return target, load_tokenizer(arguments.target), loaded


class _FirstToken(BaseStreamer):
    """Takes the times of the first new token, which comes after the prompt."""

    def __init__(self) -> None:
        self.times: list[np.ndarray] = []

    def put(self, value: torch.Tensor) -> None:
        self.times = [*self.times[:1], _now()] if len(self.times) < 2 else self.times

    def end(self) -> None:
        pass


def _now() -> np.ndarray:
    return np.array([time.process_time(), time.perf_counter()])


def timed(generate: Any, ids: torch.Tensor, tokens: int, **options: Any) -> tuple[dict[str, Any], list[int]]:
    """Generate greedily after one prompt `[1, seq]`, and return the figures and the new tokens."""
    first, began = _FirstToken(), _now()
    output = generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False, streamer=first, **options
    )
    whole, decoding = _now() - began, _now() - first.times[1]
    new = output[0, ids.shape[1] :].tolist()
    drafter = options.get("assistant_model")
    rounds = len(new) - 1 if drafter is None else drafter.last_stats.rounds
    figures = {"cpu": whole[0], "wall": whole[1], "decoding_cpu": decoding[0], "decoding_wall": decoding[1]}
    return {"tokens": len(new), "rounds": rounds, **{n: round(float(s), 4) for n, s in figures.items()}}, new


class Rows:
    """Rows in a file, one a line. A run with the same settings goes on where an earlier one was killed."""

    def __init__(self, arguments: argparse.Namespace, *names: str) -> None:
        arguments.output.mkdir(parents=True, exist_ok=True)
        names = "target", "drafter", "dtype", "threads", "tokens", *names
        self.path, settings = arguments.output / "rows.jsonl", {name: getattr(arguments, name) for name in names}
        lines = self.path.read_text(encoding="utf-8").split("\n")[:-1] if self.path.exists() else []  # whole lines
        self.path.write_text("".join(f"{line}\n" for line in lines or [json.dumps(settings)]), encoding="utf-8")
        if lines and (earlier := json.loads(lines[0])) != settings:
            raise SystemExit(
                f"Error: {self.path} has rows of {earlier}, expected {settings}: choose another --output."
            )
        self.rows: list[dict[str, Any]] = [json.loads(line) for line in lines[1:]]

    def has(self, **key: Any) -> bool:
        return any(key.items() <= {name: row.get(name) for name in key}.items() for row in self.rows)

    def add(self, **row: Any) -> None:
        self.rows.append(row)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def facts_of(target: Any) -> dict[str, Any]:
    """Return what a report says of its run, with folders of this machine by name."""
    facts = environment(target)
    words = [Path(word).name if Path(word).exists() else word for word in shlex.split(str(facts["command"]))]
    return {**facts, "command": shlex.join(words)}


def head(title: str, facts: dict[str, Any]) -> str:
    lines = [f"- {name}: {', '.join(f'{n} {v}' for n, v in value.items()) if isinstance(value, dict) else value}"
             for name, value in facts.items()]  # fmt: skip
    return "\n".join([f"# {title}", "", *lines])


def rates(rows: list[dict[str, Any]], method: str, clock: str) -> np.ndarray:
    """Return the tokens a second of a method, first of all rows, then of each draw of them."""
    figures = [row["methods"][method] for row in rows]
    spent = np.array([each[clock] for each in figures])
    return drawn_ratios(np.array([each["tokens"] for each in figures], dtype=float), spent)
