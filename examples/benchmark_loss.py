"""Measure the chunked drafter loss against the unchunked one: peak memory and time of forward plus backward.

Every measurement is a fresh process, the variants take turns, and both see the same states, so that neither the other's
memory nor the machine's drift counts. Memory is what the loss adds to the states and the head's weight: the growth of
the peak resident set on a CPU, of the allocator's peak on a GPU. The defaults need 10 GB of free memory.

    python examples/benchmark_loss.py
    python examples/benchmark_loss.py --device cuda --dtype bfloat16 --hidden-size 4096 --chunk-size 256 512 1024
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch import nn

from hf_hyperdflash.losses import chunked_drafter_loss, drafter_loss

KL_WEIGHT, KL_TEMPERATURE = 0.15, 1.0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vocab-size", type=int, default=129280)
    parser.add_argument("--hidden-size", type=int, default=1024)
    parser.add_argument("--anchors", type=int, default=512)
    parser.add_argument("--drafts", type=int, default=6)
    parser.add_argument("--kl-positions", type=int, default=2)
    parser.add_argument("--chunk-size", type=int, nargs="+", default=[256], help="one chunked variant for each")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"], help="of states and head")
    parser.add_argument("--repeats", type=int, default=3, help="processes per variant")
    parser.add_argument("--passes", type=int, default=1, help="timed passes per process, after one that warms up")
    parser.add_argument("--measure", type=int, help=argparse.SUPPRESS)  # this process's chunk size; 0: unchunked
    return parser.parse_args()


def forward_backward(
    arguments: argparse.Namespace, tensors: tuple[torch.Tensor, ...], head: nn.Module
) -> torch.Tensor:
    hidden, labels, teacher = tensors
    hidden.grad = None
    if arguments.measure:
        loss = chunked_drafter_loss(
            hidden, labels, head, teacher,
            kl_weight=KL_WEIGHT, kl_temperature=KL_TEMPERATURE, chunk_size=arguments.measure,
        ).loss  # fmt: skip
    else:
        with torch.no_grad():
            teacher_logits = head(teacher)
        loss = drafter_loss(head(hidden), labels, teacher_logits, KL_WEIGHT, KL_TEMPERATURE)
    loss.backward()
    return loss.detach()


def peak_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def measure(arguments: argparse.Namespace) -> dict[str, float | list[float]]:
    """Run one variant in this process: its peak above the inputs, the seconds of each pass, and what it computed."""
    torch.manual_seed(0)
    options = {"dtype": getattr(torch, arguments.dtype), "device": torch.device(arguments.device)}
    head = nn.Linear(arguments.hidden_size, arguments.vocab_size, bias=False, **options).requires_grad_(False)
    hidden = torch.randn(arguments.anchors, arguments.drafts, arguments.hidden_size, **options).requires_grad_()
    teacher = torch.randn(arguments.anchors, arguments.kl_positions, arguments.hidden_size, **options)
    labels = torch.randint(arguments.vocab_size, hidden.shape[:2], device=hidden.device)
    # Loads the libraries, so that their memory is not the loss's.
    forward_backward(arguments, (hidden[:1].detach().requires_grad_(), labels[:1], teacher[:1]), head)
    before, seconds = peak_bytes(hidden.device), []
    for _ in range(1 + arguments.passes):
        start = time.perf_counter()
        loss = forward_backward(arguments, (hidden, labels, teacher), head).item()
        gradient = hidden.grad.norm().item()
        seconds.append(time.perf_counter() - start)
    peak = peak_bytes(hidden.device) - before
    return {"peak": peak, "seconds": seconds[1:], "loss": loss, "gradient": gradient}


def measure_in_process(chunk_size: int) -> dict:
    command = [sys.executable, __file__, *sys.argv[1:], "--measure", str(chunk_size)]
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if result.returncode != 0:
        raise RuntimeError(f"Measuring chunk size {chunk_size} ended with code {result.returncode}: out of memory?")
    return json.loads(result.stdout.splitlines()[-1])


def hardware(device: str) -> str:
    cpu_info = Path("/proc/cpuinfo")
    lines = cpu_info.read_text().splitlines() if cpu_info.exists() else []
    cpu = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
    cpu += f" ({os.cpu_count()} cores, {torch.get_num_threads()} threads)"
    return f"{torch.cuda.get_device_name(device)}, {cpu}" if device.startswith("cuda") else cpu


def report(arguments: argparse.Namespace, results: dict[int, list[dict]]) -> None:
    print(f"{datetime.date.today()}, {platform.platform()}, {hardware(arguments.device)}, torch {torch.__version__}")
    print(
        f"vocabulary {arguments.vocab_size:,}, hidden {arguments.hidden_size}, {arguments.anchors} anchors x "
        f"{arguments.drafts} positions, KL on {arguments.kl_positions}, {arguments.dtype}, "
        f"{arguments.repeats} processes x {arguments.passes} passes\n"
    )
    print(
        "| loss         | peak MiB | of unchunked | median s | min - max s   | of unchunked |       loss | gradient |"
    )
    print(
        "|:-------------|---------:|-------------:|---------:|:--------------|-------------:|-----------:|---------:|"
    )
    memory, median = {}, {}
    for chunk_size, runs in results.items():
        seconds = [second for run in runs for second in run["seconds"]]
        memory[chunk_size] = statistics.median(run["peak"] for run in runs) / 2**20
        median[chunk_size] = statistics.median(seconds)
        name = f"chunks {chunk_size}" if chunk_size else "unchunked"
        print(
            f"| {name:<12} | {memory[chunk_size]:8.0f} | {memory[chunk_size] / memory[0]:12.3f} "
            f"| {median[chunk_size]:8.3f} | {min(seconds):6.3f} - {max(seconds):.3f} "
            f"| {median[chunk_size] / median[0]:12.3f} | {runs[0]['loss']:10.6f} | {runs[0]['gradient']:8.6f} |"
        )


def main() -> None:
    arguments = parse_arguments()
    if arguments.measure is not None:
        print(json.dumps(measure(arguments)))
        return
    variants = [0, *arguments.chunk_size]
    results: dict[int, list[dict]] = {chunk_size: [] for chunk_size in variants}
    for repeat in range(arguments.repeats):
        for chunk_size in variants if repeat % 2 == 0 else reversed(variants):
            results[chunk_size].append(measure_in_process(chunk_size))
    report(arguments, results)


if __name__ == "__main__":
    main()
