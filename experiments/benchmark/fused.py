"""What fused hyper-connections (`bind(target, fuse=True)`) save: operations of a layer, time, and how far logits move.

Operations are counted on a CPU, for one token after 512, at the shape of DeepSeek-V4-Flash's layers: what PyTorch
dispatches and what an accelerator would be given to launch, views left out. A compiled module counts as one, and so
does a Triton kernel, which is not run for that. Time is the processor's, of a real bound target, fused and not by
turns. The first compilation starts from an empty cache of torch's; the second process finds it full.

    python experiments/benchmark fused
    python experiments/benchmark fused --target PATH --dtype bfloat16
"""

from __future__ import annotations

import argparse
import copy
import datetime
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import transformers
from benchmark.rounds import NO_KERNEL
from gpu import Settings, deepseek_v4_flash, prompt_of
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, PreTrainedModel

from hf_hyperdflash import bind, load_target
from hf_hyperdflash.targets import fused
from hf_hyperdflash.targets.caches.name import CACHE

ROOT = Path(__file__).resolve().parents[2]
PAST = 512
WAYS = ("as it is", "fused on a CPU", "fused by Triton")
COMPILE = """
import sys, time, torch
from hf_hyperdflash import bind, load_target
target = load_target(sys.argv[1], dtype=getattr(torch, sys.argv[2]))
torch.compile(lambda x: x + 1)(torch.ones(8))  # what any first compilation of a process takes
began = time.perf_counter()
bind(target, fuse=True)
print(time.perf_counter() - began)
"""


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default=str(ROOT / "examples" / "models" / "tiny-deepseek-v4"))
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"], help="of what is timed")
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


class Operations(TorchDispatchMode):
    """Counts operations by the kind of decoder layer in which they run.

    Args:
        model: A V4, whose layers it follows.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.counts: Counter[str | None] = Counter()
        self.kind: str | None = None
        self.is_paused = False
        for kind, layer in zip(model.config.layer_types, model.model.layers):
            layer.register_forward_pre_hook(lambda *_, kind=kind: setattr(self, "kind", kind))
            layer.register_forward_hook(lambda *_: setattr(self, "kind", None))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[self.kind] += not self.is_paused and func.overloadpacket.__name__ not in NO_KERNEL
        return func(*args, **(kwargs or {}))

    def compiled(self, kernel: Any, module: Any, inputs: torch.Tensor) -> Any:
        """Stand for `Fusion.run` with a compiled forward."""
        self.is_paused = True
        outputs = type(module).forward(module, inputs)
        self.is_paused = False
        self.counts[self.kind] += 1
        return outputs

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        """Stand for a Triton kernel. Its outputs stay as they are: no count depends on them."""

        def launch(*args: Any, **kwargs: Any) -> None:
            self.counts[self.kind] += 1

        return launch


@torch.no_grad()
def operations_of_layers(way: str) -> dict[str, float]:
    """Of each kind of layer, in one forward over one token."""
    settings = Settings(torch.device("cpu"), True, None, None, None, 8, 1)
    model = deepseek_v4_flash(settings, 4)
    with patch.object(torch.accelerator, "is_available", lambda: True):  # else a CPU has no forward replaced
        fusion = bind(model).hyperdflash_binding.fusion
    operations, vocabulary = Operations(model), model.config.vocab_size
    cache = DynamicCache(config=model.config)
    model(prompt_of(PAST, settings, vocabulary), None, None, cache)
    with ExitStack() as stack:
        if way == "fused on a CPU":
            fusion.on_cpu, fusion.run = True, operations.compiled
        elif way == "fused by Triton":
            kernels = SimpleNamespace(hyper_connection=operations, rms_norm=operations)
            stack.enter_context(patch.object(fused, "_kernels", lambda: kernels))
            stack.enter_context(patch.object(fused, "_is_interpreted", lambda: True))
            fusion.run = lambda kernel, module, inputs: kernel(module, inputs)
        stack.enter_context(operations)
        model(prompt_of(1, settings, vocabulary), None, None, cache)
    layers = Counter(model.config.layer_types)
    return {kind: operations.counts[kind] / count for kind, count in layers.items()}


@torch.no_grad()
def moved(path: str, dtype: torch.dtype) -> tuple[float, float, float]:
    """The mean and the largest difference of the logits of 512 tokens, and their largest absolute value."""
    target = load_target(path, dtype=dtype)
    ids = torch.randint(2, target.config.vocab_size, (1, PAST), generator=torch.Generator().manual_seed(0))
    before = target(ids).logits.float()
    difference = (bind(target, fuse=True)(ids).logits.float() - before).abs()
    return float(difference.mean()), float(difference.max()), float(before.abs().max())


@torch.no_grad()
def milliseconds(arguments: argparse.Namespace, widths: tuple[int, ...]) -> list[tuple[int, float, float, float]]:
    """Of a forward after [`PAST`] tokens, by width: not fused, fused, and the median ratio of neighbours in time."""
    stock = bind(load_target(arguments.target, dtype=getattr(torch, arguments.dtype)))
    targets, rows = (stock, bind(copy.deepcopy(stock), fuse=True)), []
    for width in widths:
        ids = torch.randint(2, stock.config.vocab_size, (1, PAST + width), generator=torch.Generator().manual_seed(0))
        taken: tuple[list[float], list[float]] = ([], [])
        caches = [DynamicCache(config=stock.config) for _ in targets]
        for target, cache in zip(targets, caches):
            target(ids[:, :PAST], **{CACHE: cache})
        for repeat in range(arguments.repeats + 2):
            for which in (0, 1) if repeat % 2 else (1, 0):
                cache = copy.deepcopy(caches[which])
                began = time.process_time()
                targets[which](ids[:, PAST:], **{CACHE: cache})
                taken[which].append((time.process_time() - began) * 1e3)
        own, other = (times[2:] for times in taken)
        ratio = statistics.median(after / before for before, after in zip(own, other))
        rows.append((width, statistics.median(own), statistics.median(other), ratio))
    return rows


def compile_seconds(arguments: argparse.Namespace) -> list[float]:
    """Of `bind(target, fuse=True)` in two processes with one cache of torch's, empty before the first."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": folder, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-c", COMPILE, arguments.target, arguments.dtype]
        said = [subprocess.run(command, env=environment, check=True, capture_output=True, text=True) for _ in range(2)]
    return [float(process.stdout.split()[-1]) for process in said]


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    transformers.logging.set_verbosity_error()
    name = Path(arguments.target).name
    print("# Fused hyper-connections\n")
    print(f"{datetime.date.today()}, {platform.machine()}, {os.cpu_count()} cores, {arguments.threads} threads")
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, target {name}, {arguments.dtype}\n")
    counts = {way: operations_of_layers(way) for way in WAYS}
    print(f"| operations of a layer | {' | '.join(WAYS)} |\n|---|{'---:|' * len(WAYS)}")
    for kind in counts[WAYS[0]]:
        print(f"| {kind.replace('_', ' ')} | {' | '.join(f'{counts[way][kind]:.0f}' for way in WAYS)} |")
    print("\n| forward, tokens | ms | fused, ms | fused / not |\n|---:|---:|---:|---:|")
    for width, own, other, ratio in milliseconds(arguments, (1, 4, 8)):
        print(f"| {width} | {own:.2f} | {other:.2f} | {ratio:.2f} |")
    print("\n| dtype | logits move by, on average | at most | largest logit |\n|---|---:|---:|---:|")
    for dtype in ("float32", "bfloat16"):
        mean, most, largest = moved(arguments.target, getattr(torch, dtype))
        print(f"| {dtype} | {mean:.1e} | {most:.1e} | {largest:.1f} |")
    first, second = compile_seconds(arguments)
    print("\n| to compile | seconds |\n|---|---:|")
    print(f"| first time | {first:.1f} |\n| with torch's cache | {second:.1f} |")
