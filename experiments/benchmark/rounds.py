"""What a verification round of ours and of the loops beside it is made of: kernels, waits for the device, Python time.

Counted on a CPU, for any device: a kernel is an operation that a GPU would be given to launch, a wait is where the
host needs a value that a GPU would still have to compute. Target, drafter and loops are those of `loop.py`.

    pip install --no-deps dflash==0.1.0
    python experiments/benchmark rounds
"""

from __future__ import annotations

import cProfile
import importlib.util
import pstats
import sys
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from benchmark.loop import Rival, line_up, parse_arguments, random_target, take_turn, trained_drafter
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import hf_hyperdflash
from hf_hyperdflash.hub.formats import export_dflash

# Views, allocations and reads: nothing to launch.
NO_KERNEL = {
    "alias", "as_strided", "detach", "empty", "empty_like", "expand", "_local_scalar_dense", "new_empty", "permute",
    "_reshape_alias", "select", "slice", "split", "split_with_sizes", "squeeze", "t", "transpose", "unbind",
    "_unsafe_view", "unsqueeze", "view",
}  # fmt: skip
# How often each waits on a GPU: `multinomial` reads twice whether its input is a distribution.
WAITS = {"_local_scalar_dense": 1, "item": 1, "nonzero": 1, "masked_select": 1, "equal": 1, "multinomial": 2}
READS = {"tolist", "cpu", "numpy"}  # no operation at all on a CPU
ON_THE_HOST = ("_wrong_with",)  # functions that read what lies on the host, and nothing where that would be a wait


class Operations(TorchDispatchMode):
    """Counts kernels, and waits by the place in the code that makes them."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels, self.waits = 0, Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        waits = WAITS.get(name, 0)
        if name in ("index", "index_put_"):  # by a mask, whose true places have to be counted
            waits = sum(index is not None and index.dtype == torch.bool for index in args[1])
        if waits:
            self.waits[caller()] += waits
        self.kernels += name not in NO_KERNEL
        return func(*args, **(kwargs or {}))


class Methods(TorchFunctionMode):
    """Counts the waits that are no operation on a CPU."""

    def __init__(self, waits: Counter[str]) -> None:
        super().__init__()
        self.waits = waits
        self.on_host: torch.Tensor | None = None  # what was copied there last: to read that is no wait

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, result = getattr(func, "__name__", ""), func(*args, **(kwargs or {}))
        if name in READS and args[0] is not self.on_host and not caller().endswith(ON_THE_HOST):
            self.waits[caller()] += 1
        self.on_host = result if name == "cpu" else self.on_host
        return result


def caller() -> str:
    frame: Any = sys._getframe(2)
    while "/torch/" in frame.f_code.co_filename or frame.f_code.co_filename == __file__:
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}"


def operations_of_rounds(rival: Rival, prompt: torch.Tensor, count: int) -> tuple[float, dict[str, float]]:
    """A round's kernels, and its waits by place: means from the end of the prompt's forward to the last round's."""
    operations, seen = Operations(), []
    # With somebody's hook ours is not in inference mode, which hides what an operation is made of.
    handle = rival.target.register_forward_pre_hook(
        lambda *_: seen.append((operations.kernels, operations.waits.copy()))
    )
    with operations, Methods(operations.waits):
        rival.loop(prompt, count)
    handle.remove()
    (kernels, waits), (all_kernels, all_waits), rounds = seen[1], seen[-1], len(seen) - 2
    return (all_kernels - kernels) / rounds, {place: n / rounds for place, n in (all_waits - waits).most_common()}


def python_of_rounds(rival: Rival, prompt: torch.Tensor, count: int, rows: int) -> list[tuple[float, float, str]]:
    """The package's functions: milliseconds a round with and without what they call, the longest first."""
    profiler = cProfile.Profile()
    profiler.runcall(rival.loop, prompt, count)
    rounds, package = len(rival.rounds[0]), str(Path(hf_hyperdflash.__file__).parent)
    found = [
        (whole * 1e3 / rounds, own * 1e3 / rounds, f"{Path(file).name}:{line} {name}")
        for (file, line, name), (_, _, own, whole, _) in pstats.Stats(profiler).stats.items()
        if file.startswith(package)
    ]
    return sorted(found, reverse=True)[:rows]


def main() -> None:
    arguments = parse_arguments()
    arguments.device = "cpu"
    torch.set_num_threads(arguments.threads)
    transformers.logging.set_verbosity_error()
    target = random_target(arguments)
    prompt, count = torch.randint(2, arguments.vocab_size, (1, 32)), arguments.max_new_tokens
    expected = target.generate(prompt, max_new_tokens=count, do_sample=False)[0].tolist()
    if importlib.util.find_spec("dflash"):  # nor is its
        module = importlib.import_module("dflash.model")
        module.dflash_generate = torch.no_grad()(module.dflash_generate.__wrapped__)
    with TemporaryDirectory() as folder:
        export_dflash(trained_drafter(target, [prompt], arguments), folder)
        rivals, absent = line_up(target, Path(folder))
    for rival in rivals:
        take_turn(rival, prompt, count)
    found = {rival.name: operations_of_rounds(rival, prompt, count) for rival in rivals}
    print("| loop | text | tau | kernels a round | waits a round |\n|---|---|---|---|---|")
    for rival in rivals:
        kernels, waits = found[rival.name]
        text = "the target's" if rival.texts[0] == expected else "ANOTHER"
        tau = (count - 1) / len(rival.rounds[0])
        print(f"| {rival.name} | {text} | {tau:.2f} | {kernels:.1f} | {sum(waits.values()):.1f} |")
    for why in absent:
        print(f"\n{why}.")
    for name, (_, waits) in found.items():
        print(f"\nWhere {name} waits, times a round")
        for place, times in waits.items():
            print(f"  {times:5.2f} {place}")
    print("\nOur Python, milliseconds a round with and without what it calls, under a profiler, which slows it down")
    for whole, own, place in python_of_rounds(rivals[0], prompt, count, rows=15):
        print(f"  {whole:7.3f} {own:7.3f} {place}")
