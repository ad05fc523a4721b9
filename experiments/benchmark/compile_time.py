"""How long the first text of compiled rounds takes, with and without what torch has cached, and what a static cache
holds.

Each measurement is a process of its own. The first has an empty folder for torch's cache, the second has what the
first left there, as every later process of a user. The second text of a process compiles nothing. Seconds are the
processor's on a CPU, those of the C++ compiler included.

    python experiments/benchmark compile_time --output experiments/results/compiled/compile-time
    python experiments/benchmark compile_time --target SMOLLM2 --drafter DRAFTER --output FOLDER
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel, StaticCache

from hf_hyperdflash import Drafter, HyperDFlashDrafter, load_drafter, load_target
from hf_hyperdflash.benchmark.results import save_report

from . import loop
from .compiled import compile_config, hardware, name_of_target

WAYS: dict[str, dict[str, Any]] = {"plain": {}, "chain": {}, "16 nodes": dict(tree_budget=16)}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", help="a folder or a name; a random Qwen3 by default")
    parser.add_argument("--drafter", help="the target's, a folder or a name")
    parser.add_argument("--room", type=int, default=4096, help="slots of the static cache")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, help="a folder for report.md and results.json")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)  # of a process that measures
    arguments = parser.parse_args()
    if bool(arguments.target) != bool(arguments.drafter):
        parser.error("`--target` and `--drafter` belong together.")
    arguments.dtype = "bfloat16" if arguments.target else "float32"
    vars(arguments).update(layers=6, hidden_size=256, vocab_size=4096)  # as `loop` has them
    return arguments


def pair(arguments: argparse.Namespace) -> tuple[PreTrainedModel, Drafter]:
    if arguments.target:
        dtype = getattr(torch, arguments.dtype)
        return load_target(arguments.target, dtype=dtype), load_drafter(arguments.drafter, dtype=dtype)
    target = loop.random_target(arguments)
    return target, HyperDFlashDrafter.from_target(
        target, num_hidden_layers=2, num_draft_tokens=7, mask_token_id=1, target_layer_ids=[1, 3, 4]
    )


def clock(ids: torch.Tensor) -> float:
    """Seconds: of the processor on a CPU, for this process and those that it waited for."""
    return sum(os.times()[:4]) if ids.device.type == "cpu" else loop.clock(ids)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the seconds of the first text and of the second, and the bytes of the cache for one text."""
    target, drafter = pair(arguments)
    target.to(arguments.device)
    options: dict[str, Any] = dict(max_new_tokens=32, do_sample=False, pad_token_id=0)
    options |= dict(cache_implementation="static", max_cache_len=arguments.room, compile_config=compile_config())
    if arguments.way != "plain":
        drafter.to(arguments.device).bind(target)  # type: ignore[attr-defined]
        options |= dict(assistant_model=drafter, **WAYS[arguments.way])
    seconds = []
    for seed in range(2):
        torch.manual_seed(seed)
        ids = torch.randint(2, 4000, (1, 24 + seed), device=arguments.device)
        began = clock(ids)
        target.generate(ids, **options)
        seconds.append(clock(ids) - began)
    config: Any = target.config
    cache = StaticCache(config=config, max_cache_len=arguments.room)
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    shape = 1, config.num_key_value_heads, 1, width
    for layer in range(config.num_hidden_layers):
        states = torch.zeros(shape, dtype=target.dtype)
        cache.update(states, states, layer)
    held = sum(states.nbytes for layer in cache.layers for states in (layer.keys, layer.values))
    return {"way": arguments.way, "first": seconds[0], "second": seconds[1], "cache_bytes": held}


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    transformers.logging.set_verbosity_error()
    if arguments.way:
        with torch.no_grad():
            print(json.dumps(measure(arguments)))
        return
    results = []
    for way in WAYS:
        with TemporaryDirectory() as folder:
            for cached in (False, True):
                command = [sys.executable, Path(__file__).parent, "compile_time", *sys.argv[1:], "--way", way]
                environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": folder, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
                done = subprocess.run(command, env=environment, capture_output=True, text=True)
                if done.returncode:
                    raise ValueError((done.stderr.strip() or "no word").splitlines()[-1])
                results.append({**json.loads(done.stdout.splitlines()[-1]), "cached": cached})
                print(results[-1], flush=True)
    kind = "" if arguments.device.startswith("cuda") else ", CPU seconds with one process that compiles"
    head = f"{hardware(arguments)} {name_of_target(arguments)}, {arguments.dtype}{kind}."
    held = results[0]["cache_bytes"] / 2**20
    report = f"{head}\n\n{table(results)}\n\nKeys and values of {arguments.room:,} tokens: {held:.0f} MiB."
    print(report)
    save_report(f"# What compiling takes\n\n{report}\n", arguments, results=results)


def table(results: list[dict[str, Any]]) -> str:
    lines = ["| rounds | first text, s | first text with torch's cache, s | second text, s |", "|---|---:|---:|---:|"]
    for fresh, cached in zip(results[::2], results[1::2]):
        seconds = fresh["first"], cached["first"], cached["second"]
        lines.append(f"| {fresh['way']} | {' | '.join(f'{value:.1f}' for value in seconds)} |")
    return "\n".join(lines)
