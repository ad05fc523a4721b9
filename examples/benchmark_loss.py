"""Measure the chunked drafter loss against the unchunked one: peak memory and time of forward plus backward.

Every measurement is a fresh process, the variants take turns, and all see the same states, so that neither the others'
memory nor the machine's drift counts. Memory is what the loss adds to the states and the head's weight: the growth of
the peak resident set on a CPU, of the allocator's peak on a GPU. CPU seconds, of all threads, are what a busy machine
disturbs less than the clock. The defaults need 10 GB of free memory.

    python examples/benchmark_loss.py
    python examples/benchmark_loss.py --device cuda --dtype bfloat16 --hidden-size 4096 --chunk-size 256 512 --passes
    10
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
import torch.nn.functional as F
from torch import nn

from hf_hyperdflash.training.losses import drafter_loss

KL_WEIGHT, KL_TEMPERATURE = 0.15, 1.0
UNCHUNKED = 0


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
    parser.add_argument("--passes", type=int, default=1, help="timed passes per process")
    parser.add_argument("--measure", type=int, help=argparse.SUPPRESS)  # the chunk size of this very process
    return parser.parse_args()


def forward_backward(
    arguments: argparse.Namespace, tensors: tuple[torch.Tensor, ...], head: nn.Module
) -> torch.Tensor:
    hidden, labels, teacher = tensors
    hidden.grad = None
    if arguments.measure == UNCHUNKED:
        with torch.no_grad():
            taught = (head(teacher).float() / KL_TEMPERATURE).log_softmax(-1)
        logits = head(hidden).float()
        student = (logits[:, : taught.shape[1]] / KL_TEMPERATURE).log_softmax(-1)
        kl = KL_TEMPERATURE**2 * F.kl_div(student, taught, reduction="sum", log_target=True) / taught[..., 0].numel()
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten()) + KL_WEIGHT * kl
    else:
        options = {"kl_weight": KL_WEIGHT, "kl_temperature": KL_TEMPERATURE, "chunk_size": arguments.measure}
        loss = drafter_loss(hidden, labels, teacher, head=head, **options).loss
    loss.backward()
    return loss.detach()


def timed_pass(arguments: argparse.Namespace, tensors: tuple[torch.Tensor, ...], head: nn.Module) -> dict[str, float]:
    if tensors[0].is_cuda:
        torch.cuda.synchronize()
    clock, cpu = time.perf_counter(), time.process_time()
    loss = forward_backward(arguments, tensors, head).item()
    gradient = tensors[0].grad.norm().item()  # waits for the GPU
    seconds, cpu_seconds = time.perf_counter() - clock, time.process_time() - cpu
    return {"seconds": seconds, "cpu_seconds": cpu_seconds, "loss": loss, "gradient": gradient}


def peak_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def measure(arguments: argparse.Namespace) -> dict:
    """Run one variant in this process: its peak above the inputs, and what each pass took and computed."""
    torch.manual_seed(0)
    options = {"dtype": getattr(torch, arguments.dtype), "device": torch.device(arguments.device)}
    head = nn.Linear(arguments.hidden_size, arguments.vocab_size, bias=False, **options).requires_grad_(False)
    hidden = torch.randn(arguments.anchors, arguments.drafts, arguments.hidden_size, **options).requires_grad_()
    teacher = torch.randn(arguments.anchors, arguments.kl_positions, arguments.hidden_size, **options)
    labels = torch.randint(arguments.vocab_size, hidden.shape[:2], device=hidden.device)
    # Loads the libraries, so that their memory and time are not the loss's.
    forward_backward(arguments, (hidden[:1].detach().requires_grad_(), labels[:1], teacher[:1]), head)
    before = peak_bytes(hidden.device)
    if hidden.is_cuda:  # kernels and allocator warm up per size
        forward_backward(arguments, (hidden, labels, teacher), head)
    passes = [timed_pass(arguments, (hidden, labels, teacher), head) for _ in range(arguments.passes)]
    return {"peak": peak_bytes(hidden.device) - before, "passes": passes}


def measure_in_process(chunk_size: int) -> dict:
    command = [sys.executable, __file__, *sys.argv[1:], "--measure", str(chunk_size)]
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if result.returncode != 0:
        raise RuntimeError(f"Measuring chunk size {chunk_size} ended with code {result.returncode}: out of memory?")
    print(f"chunk size {chunk_size}: {result.stdout.strip()}", file=sys.stderr)
    return json.loads(result.stdout)


def summary(runs: list[dict]) -> tuple[float, float, float]:
    """Medians of the peak in MiB, the seconds and the CPU seconds."""
    passes = [one for run in runs for one in run["passes"]]
    seconds, cpu_seconds = (statistics.median(one[name] for one in passes) for name in ("seconds", "cpu_seconds"))
    return statistics.median(run["peak"] for run in runs) / 2**20, seconds, cpu_seconds


def hardware(device: str) -> str:
    cpu_info = Path("/proc/cpuinfo")
    lines = cpu_info.read_text().splitlines() if cpu_info.exists() else []
    cpu = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
    cpu += f" ({os.cpu_count()} cores, {torch.get_num_threads()} threads)"
    return f"{torch.cuda.get_device_name(device)}, {cpu}" if device.startswith("cuda") else cpu


def report(arguments: argparse.Namespace, results: dict[int, list[dict]]) -> None:
    sizes = f"vocabulary {arguments.vocab_size:,}, hidden {arguments.hidden_size}, {arguments.anchors} anchors"
    print(f"{datetime.date.today()}, {platform.platform()}, {hardware(arguments.device)}, torch {torch.__version__}")
    print(f"{sizes} x {arguments.drafts} positions, KL on {arguments.kl_positions}, {arguments.dtype}")
    print(f"medians of {arguments.repeats} processes x {arguments.passes} passes; ratios to unchunked\n")
    print(
        "| loss        | peak MiB | ratio | seconds | min to max        | ratio |   CPU s | ratio | value, gradient  |"
    )
    print(
        "|:------------|---------:|------:|--------:|:------------------|------:|--------:|------:|:-----------------|"
    )
    base_peak, base_seconds, base_cpu = summary(results[UNCHUNKED])
    for chunk_size, runs in results.items():
        name = "unchunked" if chunk_size == UNCHUNKED else f"chunks {chunk_size}"
        peak, seconds, cpu = summary(runs)
        every = [one["seconds"] for run in runs for one in run["passes"]]
        first = runs[0]["passes"][0]
        print(
            f"| {name:<11} | {peak:8.0f} | {peak / base_peak:5.3f} "
            f"| {seconds:7.3f} | {min(every):7.3f} - {max(every):7.3f} | {seconds / base_seconds:5.2f} "
            f"| {cpu:7.3f} | {cpu / base_cpu:5.2f} | {first['loss']:.4f}, {first['gradient']:.6f} |"
        )


def main() -> None:
    arguments = parse_arguments()
    if arguments.measure is not None:
        print(json.dumps(measure(arguments)))
        return
    variants = [UNCHUNKED, *arguments.chunk_size]
    results: dict[int, list[dict]] = {chunk_size: [] for chunk_size in variants}
    for repeat in range(arguments.repeats):
        for chunk_size in variants if repeat % 2 == 0 else reversed(variants):
            results[chunk_size].append(measure_in_process(chunk_size))
    report(arguments, results)


if __name__ == "__main__":
    main()
