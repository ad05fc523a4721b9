"""Measure the chunked drafter loss: peak memory and time of forward plus backward, beside the unchunked one and with
total variation at every draft position and a Markov head's table.

Every measurement is a fresh process, the variants take turns, and all see the same states, so that neither the others'
memory nor the machine's drift counts. Memory is what the loss adds to the states and the head's weight: the growth of
the peak resident set on a CPU, of the allocator's peak on a GPU. CPU seconds, of all threads, are what a busy machine
disturbs less than the clock. The defaults need 10 GB of free memory.

    python experiments/benchmark loss
    python experiments/benchmark loss --device cuda --dtype bfloat16 --hidden-size 4096 --chunk-size 256 512 --passes
    10
"""

from __future__ import annotations

import argparse
import datetime
import json
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

from hf_hyperdflash.benchmark.runner import hardware
from hf_hyperdflash.drafters.parts.heads import HeadOutput
from hf_hyperdflash.training.losses.loss import DraftHead, LossTerms, drafter_loss

KL_WEIGHT, KL_TEMPERATURE, TV_WEIGHT = 0.15, 1.0, 1.0
UNCHUNKED = 0
TERMS = ("", "+ TV", "+ TV, table")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vocab-size", type=int, default=129280)
    parser.add_argument("--hidden-size", type=int, default=1024)
    parser.add_argument("--anchors", type=int, default=512)
    parser.add_argument("--drafts", type=int, default=6)
    parser.add_argument("--kl-positions", type=int, default=2)
    parser.add_argument("--rank", type=int, default=256, help="of the table")
    parser.add_argument("--chunk-size", type=int, nargs="+", default=[256], help="one chunked variant for each")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"], help="of states and head")
    parser.add_argument("--repeats", type=int, default=3, help="processes per variant")
    parser.add_argument("--passes", type=int, default=1, help="timed passes per process")
    parser.add_argument("--chunked-only", action="store_true", help="leave the unchunked loss out")
    # The chunk size and the terms of this very process.
    parser.add_argument("--measure", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--terms", default="", choices=TERMS, help=argparse.SUPPRESS)
    return parser.parse_args()


def forward_backward(
    arguments: argparse.Namespace, tensors: tuple[torch.Tensor, ...], head: nn.Module
) -> torch.Tensor:
    hidden, labels, teacher, vectors, table = tensors
    hidden.grad = vectors.grad = table.grad = None
    distilled = teacher[:, : arguments.kl_positions]
    if arguments.measure == UNCHUNKED:
        with torch.no_grad():
            taught = (head(distilled).float() / KL_TEMPERATURE).log_softmax(-1)
        logits = head(hidden).float()
        student = (logits[:, : taught.shape[1]] / KL_TEMPERATURE).log_softmax(-1)
        kl = KL_TEMPERATURE**2 * F.kl_div(student, taught, reduction="sum", log_target=True) / taught[..., 0].numel()
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten()) + KL_WEIGHT * kl
    else:
        options = {"kl_weight": KL_WEIGHT, "kl_temperature": KL_TEMPERATURE, "chunk_size": arguments.measure}
        drafted, draft_head = HeadOutput(hidden), DraftHead(head)
        if arguments.terms:
            distilled = teacher
            options |= {"kl_positions": arguments.kl_positions, "tv_weight": TV_WEIGHT}
        if arguments.terms.endswith("table"):
            drafted, draft_head = HeadOutput(hidden, vectors), DraftHead(head, table)
        loss = drafter_loss(drafted, labels, distilled, LossTerms(**options), draft_head).loss
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
    teacher = torch.randn(arguments.anchors, arguments.drafts, arguments.hidden_size, **options)
    vectors = torch.randn(arguments.anchors, arguments.drafts, arguments.rank, device=hidden.device)
    table = 0.1 * torch.randn(arguments.vocab_size, arguments.rank, device=hidden.device)
    vectors, table = vectors.requires_grad_(), table.requires_grad_()
    labels = torch.randint(arguments.vocab_size, hidden.shape[:2], device=hidden.device)
    # Loads the libraries, so that their memory and time are not the loss's.
    one = (hidden[:1].detach().requires_grad_(), labels[:1], teacher[:1], vectors[:1].detach().requires_grad_(), table)
    forward_backward(arguments, one, head)
    table.grad = None
    before = peak_bytes(hidden.device)
    tensors = hidden, labels, teacher, vectors, table
    if hidden.is_cuda:  # kernels and allocator warm up per size
        forward_backward(arguments, tensors, head)
    passes = [timed_pass(arguments, tensors, head) for _ in range(arguments.passes)]
    return {"peak": peak_bytes(hidden.device) - before, "passes": passes}


def measure_in_process(chunk_size: int, terms: str) -> dict:
    command = [
        sys.executable,
        Path(__file__).parent,
        "loss",
        *sys.argv[1:],
        "--measure",
        str(chunk_size),
        "--terms",
        terms,
    ]
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if result.returncode != 0:
        raise RuntimeError(f"Measuring chunk size {chunk_size} ended with code {result.returncode}: out of memory?")
    print(f"chunk size {chunk_size} {terms}: {result.stdout.strip()}", file=sys.stderr)
    return json.loads(result.stdout)


def summary(runs: list[dict]) -> tuple[float, float, float]:
    """Medians of the peak in MiB, the seconds and the CPU seconds."""
    passes = [one for run in runs for one in run["passes"]]
    seconds, cpu_seconds = (statistics.median(one[name] for one in passes) for name in ("seconds", "cpu_seconds"))
    return statistics.median(run["peak"] for run in runs) / 2**20, seconds, cpu_seconds


def report(arguments: argparse.Namespace, results: dict[tuple[int, str], list[dict]]) -> None:
    sizes = f"vocabulary {arguments.vocab_size:,}, hidden {arguments.hidden_size}, {arguments.anchors} anchors"
    print(f"{datetime.date.today()}, {platform.platform()}, {hardware(arguments.device)}, torch {torch.__version__}")
    print(f"{sizes} x {arguments.drafts} positions, KL on {arguments.kl_positions}, {arguments.dtype}")
    print(f"medians of {arguments.repeats} processes x {arguments.passes} passes; ratios to the first row\n")
    columns = (
        "peak MiB",
        "ratio",
        "seconds",
        "min to max",
        "ratio",
        "CPU s",
        "ratio",
        "value, gradient of the states",
    )
    print(f"| loss | {' | '.join(columns)} |\n|:---|{'---:|' * len(columns)}")
    base_peak, base_seconds, base_cpu = summary(next(iter(results.values())))
    for (chunk_size, terms), runs in results.items():
        name = "unchunked" if chunk_size == UNCHUNKED else f"chunks {chunk_size} {terms}".strip()
        peak, seconds, cpu = summary(runs)
        every = [one["seconds"] for run in runs for one in run["passes"]]
        first = runs[0]["passes"][0]
        print(
            f"| {name} | {peak:.0f} | {peak / base_peak:5.3f} "
            f"| {seconds:.3f} | {min(every):.3f} - {max(every):.3f} | {seconds / base_seconds:.2f} "
            f"| {cpu:.3f} | {cpu / base_cpu:.2f} | {first['loss']:.4f}, {first['gradient']:.6f} |"
        )


def main() -> None:
    arguments = parse_arguments()
    if arguments.measure is not None:
        print(json.dumps(measure(arguments)))
        return
    chunked = [(chunk_size, terms) for chunk_size in arguments.chunk_size for terms in TERMS]
    variants = chunked if arguments.chunked_only else [(UNCHUNKED, ""), *chunked]
    results: dict[tuple[int, str], list[dict]] = {variant: [] for variant in variants}
    for repeat in range(arguments.repeats):
        for variant in variants if repeat % 2 == 0 else reversed(variants):
            results[variant].append(measure_in_process(*variant))
    report(arguments, results)
