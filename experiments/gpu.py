"""What this project does on a GPU: is the text right, and where does the time go. Run it first wherever there is one.

    python experiments/gpu.py OUTPUT [--seconds 330] [--only PART ..]
    python experiments/gpu.py OUTPUT --only smollm2 --target FOLDER --drafter FOLDER --prompts FOLDER
    python experiments/gpu.py OUTPUT --tiny --device cpu        # the same code on toys, to try the script

At most 6 minutes and 40 GiB of GPU memory with what is set here. The parts, in this order:

- `machine`: versions, memory bandwidth, matrix rate, what one launch costs the CPU.
- `qwen3-8b`: a Qwen3 of the 8B's shape, random, bfloat16. A forward over 1 to 64 tokens after 512 positions, plain
  decoding eager and compiled, a round of ours with 7 and 15 drafts and with trees of 32 nodes, and of each how many
  kernels it launches and how often it waits for the device. Nothing is accepted there, so that rounds count, not
  tokens.
- `qwen3-8b-compiled`: the forwards as one CUDA graph of eager kernels, the same with compiled norms and MLPs, and
  compiled as a whole.
- `deepseek-v4`: four layers of DeepSeek-V4-Flash's widths, fewer experts (which changes no operation). Launches and
  milliseconds a layer, the share of the hyper-connections, the same with these and the norms fused.
- `text`: greedy float32 texts of small random targets of every family, each beside the stock text of a copy that was
  never bound.
- `smollm2`: tokens a second of a real pair, side by side: stock eager, compiled and with prompt lookup, ours.

Each part writes OUTPUT/PART.json as it goes, and prints what it writes. A part whose file is there and has no error is
skipped; one that fails writes its error, and the script goes on; one that does not fit into what is left of
`--seconds` is not begun. Results are committed, as they are, to `experiments/results/gpu/`.
"""

from __future__ import annotations

import argparse
import copy
import gc
import itertools
import json
import os
import platform
import random
import re
import signal
import statistics
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the package as it is here, and the families of its tests
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch  # noqa: E402
import transformers  # noqa: E402
from torch.autograd import DeviceType  # noqa: E402
from torch.profiler import ProfilerActivity, profile, record_function  # noqa: E402
from transformers import (  # noqa: E402
    CompileConfig,
    DeepseekV4Config,
    DeepseekV4ForCausalLM,
    DynamicCache,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    StaticCache,
)

import hf_hyperdflash  # noqa: E402
from hf_hyperdflash import HyperDFlashDrafter, PromptLookupDrafter, bind, load_drafter, load_target, load_tokenizer  # noqa: E402
from hf_hyperdflash.benchmark.suites import load_suite  # noqa: E402
from hf_hyperdflash.decoding.stats import exact_timing  # noqa: E402
from hf_hyperdflash.targets.caches.name import CACHE  # noqa: E402
from hf_hyperdflash.training.data.encoding import encode_prompts  # noqa: E402

Found = Iterator[tuple[str, Any]]  # what a part has to say, piece by piece
WIDTHS = (1, 2, 4, 8, 16, 32, 64)
PAST = 512  # positions before what is timed
ROOM = 1024  # of static caches
LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx", "cudaGraphLaunch")
WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize")  # what the profiler and we end with is of the device


@dataclass
class Settings:
    """What was asked for, and the sizes that follow from it."""

    device: torch.device
    tiny: bool
    target: str | None
    drafter: str | None
    prompts: str | None
    new_tokens: int
    per_suite: int

    def sized(self, full: int, tiny: int) -> int:
        return tiny if self.tiny else full

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"


# Measuring


def synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def seconds_of(call: Callable[[], Any], device: torch.device) -> float:
    """Wall-clock seconds until the device is done."""
    synchronize(device)
    began = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - began


def milliseconds(
    call: Callable[[], Any], device: torch.device, after: Callable[[], Any] = lambda: None, repeats: int = 8
) -> float:
    """Median of `repeats` calls after two that do not count; `after` runs between them, untimed."""
    taken = []
    for _ in range(repeats + 2):
        taken.append(seconds_of(call, device))
        after()
    return round(statistics.median(taken[2:]) * 1e3, 4)


def profiler_for(settings: Settings, *labels: str) -> profile:
    """Of launches, waits and kernels; of operations, which are many, only where labels have to be seen."""
    of_device = [ProfilerActivity.CUDA] if settings.is_cuda else []
    return profile(activities=[*of_device, *([ProfilerActivity.CPU] if labels or not of_device else [])])


def launches_of(call: Callable[[], Any], settings: Settings, *labels: str) -> dict[str, Any]:
    """What one call has the device do ([`counted`])."""
    synchronize(settings.device)
    with profiler_for(settings, *labels) as profiler:
        call()
        synchronize(settings.device)
    return counted(profiler, *labels)


def counted(profiler: profile, *labels: str) -> dict[str, Any]:
    """Kernels launched, waits, copies to the host, milliseconds in which kernels ran; and of each
    label ([`labelled`]) how often it was called, what it launched and its part of the CPU's time."""
    events = profiler.events()
    on_host = [event for event in events if event.device_type == DeviceType.CPU]
    kernels = [event for event in events if event.device_type == DeviceType.CUDA and event.name not in labels]
    names = Counter(event.name for event in on_host)
    began = sorted(event.time_range.start for event in on_host if event.name in LAUNCHES)
    found: dict[str, Any] = {
        "launches": len(began),
        "waits": sum(names[name] for name in WAITS),
        "copies_to_host": sum("DtoH" in event.name for event in kernels),
        "device_ms": round(sum(event.time_range.elapsed_us() for event in kernels) / 1e3, 4),
    }
    for label in labels:
        ranges = [event.time_range for event in on_host if event.name == label]
        inside = sum(any(r.start <= at <= r.end for r in ranges) for at in began)
        cpu_ms = sum(r.elapsed_us() for r in ranges) / 1e3
        found[label] = {"calls": len(ranges), "launches": inside, "profiled_cpu_ms": round(cpu_ms, 4)}
    return found


@contextmanager
def labelled(modules: dict[str, list[Any]]) -> Iterator[None]:
    """Let the profiler see the forwards of modules under a label."""

    def under(label: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            with record_function(label):
                return forward(*args, **kwargs)

        return wrapped

    for label, those in modules.items():
        for module in those:
            module.forward = under(label, module.forward)
    try:
        yield
    finally:
        for module in itertools.chain(*modules.values()):
            del module.forward


def replay_of(call: Callable[[], Any], settings: Settings) -> Callable[[], Any]:
    """The call as one CUDA graph; as it is where there is none."""
    if not settings.is_cuda:
        return call
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


# Parts


def machine(settings: Settings) -> Found:
    """What it runs on, and its ceilings."""
    device = settings.device
    yield "date", str(date.today())
    yield "torch", torch.__version__
    yield "transformers", transformers.__version__
    yield "hf_hyperdflash", hf_hyperdflash.__version__
    yield "python", platform.python_version()
    yield "cpus", os.cpu_count()
    yield "device", torch.cuda.get_device_name(device) if settings.is_cuda else platform.machine()
    if settings.is_cuda:
        yield "memory_gib", round(torch.cuda.get_device_properties(device).total_memory / 2**30, 1)
    yield "bandwidth", bandwidth(settings)
    size = settings.sized(8192, 256)
    left, right = (torch.randn(size, size, dtype=torch.bfloat16, device=device) for _ in range(2))
    yield "bfloat16_tflops", round(2 * size**3 / milliseconds(partial(torch.mm, left, right), device) / 1e9, 1)
    one = torch.zeros(1, device=device)

    def thousand_launches() -> None:
        for _ in range(1000):
            one.add_(1)

    yield "microseconds_a_launch", milliseconds(thousand_launches, device)
    began = time.perf_counter()
    sum(i * i for i in range(1_000_000))
    yield "nanoseconds_a_python_step", round((time.perf_counter() - began) * 1e3, 1)


def bandwidth(settings: Settings) -> dict[str, float]:
    """GB a second: a copy, of bytes read and written, and a sum, of bytes read."""
    data = torch.randn(settings.sized(2**30, 2**20), dtype=torch.bfloat16, device=settings.device)
    other, size = torch.empty_like(data), data.numel() * data.element_size() / 1e6
    return {
        "copy": round(2 * size / milliseconds(partial(other.copy_, data), settings.device), 1),
        "read": round(size / milliseconds(data.amax, settings.device), 1),
    }


def qwen3_8b(settings: Settings) -> PreTrainedModel:
    """Random, made where and as it is used: never in float32, which would be twice as large."""
    sized = settings.sized
    config = Qwen3Config(
        vocab_size=sized(151936, 512), hidden_size=sized(4096, 64), num_hidden_layers=sized(36, 2),
        num_attention_heads=sized(32, 4), num_key_value_heads=sized(8, 2), head_dim=sized(128, 16),
        intermediate_size=sized(12288, 96), max_position_embeddings=40960, tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6}, bos_token_id=None, eos_token_id=None,
        pad_token_id=0,
    )  # fmt: skip
    return made(Qwen3ForCausalLM, config, settings)


def made(kind: Any, config: Any, settings: Settings) -> PreTrainedModel:
    torch.manual_seed(0)
    with settings.device:
        model: PreTrainedModel = kind._from_config(config, dtype=torch.bfloat16).eval()
    model.generation_config.eos_token_id = None
    return model


def untrained(model: PreTrainedModel, settings: Settings, drafts: int) -> HyperDFlashDrafter:
    """A block drafter of five layers."""
    with settings.device:
        made_for = HyperDFlashDrafter.from_target(
            model, mask_token_id=1, num_hidden_layers=settings.sized(5, 2), num_draft_tokens=drafts
        )
    return made_for.eval()


def read_once(model: PreTrainedModel, gb_a_second: dict[str, float]) -> dict[str, Any]:
    """Parameters, and the least time in which a token's can be read: all but the embedding, of which it is a row."""
    embedding: Any = model.get_input_embeddings()
    sizes = [p.numel() * p.element_size() for p in model.parameters() if p is not embedding.weight]
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "gb_a_token": round(sum(sizes) / 1e9, 3),
        "milliseconds": round(sum(sizes) / 1e6 / max(gb_a_second.values()), 3),
    }


def prompt_of(length: int, settings: Settings, vocabulary: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(2, vocabulary, (1, length), generator=generator).to(settings.device)


@torch.no_grad()
def eager_forwards(model: PreTrainedModel, settings: Settings, widths: tuple[int, ...]) -> dict[str, float]:
    """Milliseconds over so many tokens, with a dynamic cache, which grows by them each time."""
    vocabulary, found = model.config.vocab_size, {}
    for width in widths:
        cache = DynamicCache(config=model.config)
        model(prompt_of(PAST, settings, vocabulary), None, None, cache)
        forward = partial(model, prompt_of(width, settings, vocabulary), None, None, cache)
        found[str(width)] = milliseconds(forward, settings.device)
    return found


def plain(model: PreTrainedModel, settings: Settings, **options: Any) -> dict[str, Any]:
    """Stock greedy decoding after [`PAST`] tokens, by the difference of two lengths: milliseconds a token, launches,
    and seconds of the first call, in which what is to be compiled is."""
    ids, (few, many) = prompt_of(PAST, settings, model.config.vocab_size), (8, settings.sized(40, 12))

    def write(count: int) -> Any:
        return model.generate(ids, max_new_tokens=count, do_sample=False, **options)

    first = seconds_of(partial(write, many), settings.device)
    write(many)  # where CUDA graphs are recorded
    short, long = (
        statistics.median(seconds_of(partial(write, count), settings.device) for _ in range(3))
        for count in (few, many)
    )
    less, more = (launches_of(partial(write, n), settings) for n in (3, 5))
    return {
        "first_call_s": round(first, 2),
        "ms_a_token": round((long - short) * 1e3 / (many - few), 3),
        "of_a_token": {name: round((more[name] - less[name]) / 2, 3) for name in more},
    }


def rounds(target: PreTrainedModel, drafter: Any, settings: Settings, **options: Any) -> dict[str, Any]:
    """Of our verification round: milliseconds as it runs; where they go, with the device waited for at each step; and
    what it has the device do. The last rounds, which have no room for all drafts, do not count."""
    count = settings.sized(16, 4)
    with_rounds = partial(rounds_of, target, drafter, settings, count, **options)
    with_rounds()
    runs = [with_rounds() for _ in range(3)]
    with exact_timing():
        exact = with_rounds()
    profiler = profiler_for(settings)
    with_rounds(profiler=profiler)
    of_two = counted(profiler)
    steps = "ms_a_round", "drafting_ms", "verifying_ms"
    return {
        "ms_a_round": round(statistics.median(run["ms_a_round"] for run in runs), 3),
        "nodes_a_round": round(exact["nodes"], 3),
        "waiting_at_each_step": {name: round(exact[name], 3) for name in steps},
        "of_a_round": {name: round(value / 2, 3) for name, value in of_two.items()},
    }


def rounds_of(
    target: PreTrainedModel,
    drafter: Any,
    settings: Settings,
    count: int,
    profiler: profile | None = None,
    **options: Any,
) -> dict[str, float]:
    """A text after [`PAST`] tokens, of which `count` rounds are timed, from the third on, or two of them profiled."""
    marks: list[dict[str, float]] = []
    ids, draft = prompt_of(PAST, settings, target.config.vocab_size), drafter.draft

    def marked(*args: Any) -> Any:
        if profiler is not None and len(marks) in (2, 4):
            synchronize(settings.device)
            (profiler.start if len(marks) == 2 else profiler.stop)()
        done = drafter.last_stats
        at, drafting, verifying = time.perf_counter(), done.draft_seconds, done.verify_seconds
        marks.append(
            {
                "ms_a_round": at * 1e3, "drafting_ms": drafting * 1e3, "verifying_ms": verifying * 1e3,
                "nodes": done.nodes, "rounds": done.rounds,
            }
        )  # fmt: skip
        return draft(*args)

    drafter.draft = marked
    try:
        new = count + 4 + drafter.max_draft_tokens
        target.generate(ids, assistant_model=drafter, max_new_tokens=new, do_sample=False, **options)
    finally:
        del drafter.draft
    first, last = marks[2], marks[min(2 + count, len(marks) - 1)]
    return {name: (last[name] - first[name]) / (last["rounds"] - first["rounds"]) for name in first}


def qwen3(settings: Settings) -> Found:
    """The 8B's shape, as our code runs today, beside what a user has without us."""
    speed, model = bandwidth(settings), qwen3_8b(settings)
    yield "bandwidth_gb_a_second", speed
    yield "weights_read_once", read_once(model, speed)
    yield "eager_forward_ms", eager_forwards(model, settings, WIDTHS)
    yield "plain_eager", plain(model, settings)
    drafter = untrained(model, settings, 15)
    yield "drafter_parameters", sum(p.numel() for p in drafter.parameters())
    drafter.bind(model)
    for name, options in {
        "7 drafts": {"num_assistant_tokens": 7}, "15 drafts": {"num_assistant_tokens": 15},
        "32 nodes": {"tree_budget": 32},
    }.items():  # fmt: skip
        yield f"round, {name}", rounds(model, drafter, settings, **options)
    drafter.unbind(model)
    compiled = {"cache_implementation": "static"}
    yield "plain_compiled", plain(model, settings, **compiled, **compile_anywhere(settings))
    yield "peak_gib", peak(settings)


def compile_anywhere(settings: Settings) -> dict[str, Any]:
    """Stock compiles by itself on a GPU; on a CPU it has to be told, and has no CUDA graphs."""
    if settings.is_cuda:
        return {}
    config = CompileConfig(mode="default")
    config._compile_all_devices = True
    return {"compile_config": config}


def peak(settings: Settings) -> float:
    return round(torch.cuda.max_memory_allocated(settings.device) / 2**30, 2) if settings.is_cuda else 0.0


class StaticForward:
    """A target's forward after [`PAST`] positions of a static cache, over any width, without a wait for the device.

    Args:
        model: Whose attention takes a mask.
        settings: Of the run.
    """

    def __init__(self, model: PreTrainedModel, settings: Settings) -> None:
        self.model, self.settings = model, settings
        self.cache = StaticCache(config=model.config, max_cache_len=ROOM)
        model(prompt_of(PAST, settings, model.config.vocab_size), None, None, self.cache)

    def over(self, width: int, forward: Any) -> tuple[Callable[[], Any], Callable[[], Any]]:
        """The forward over so many tokens, and what takes them back."""
        places = torch.arange(PAST, PAST + width, device=self.settings.device)
        mask = torch.arange(ROOM, device=self.settings.device) <= places[:, None]
        ids = prompt_of(width, self.settings, self.model.config.vocab_size)
        lengths: Any = [layer.cumulative_length for layer in self.cache.layers]
        inputs = ids, mask[None, None], places[None]
        for tensor, dimension in zip(inputs, (1, 2, 1)):
            if width > 1:  # of one it is a number
                torch._dynamo.maybe_mark_dynamic(tensor, dimension)
        call = partial(forward, *inputs, self.cache)
        return call, partial(torch._foreach_sub_, lengths, width)

    def timed(self, width: int, make: Callable[[Callable[[], Any]], Callable[[], Any]], forward: Any) -> float:
        call, take_back = self.over(width, forward)
        lengths: Any = [layer.cumulative_length for layer in self.cache.layers]
        call = make(call)
        for length in lengths:
            length.fill_(PAST)  # where making it has run it
        return milliseconds(call, self.settings.device, take_back)


@torch.no_grad()
def qwen3_compiled(settings: Settings) -> Found:
    """Ways to run the same forward without Python's time for each kernel."""
    model = qwen3_8b(settings)
    static = StaticForward(model, settings)
    as_graph = partial(replay_of, settings=settings)
    yield "eager_static_ms", {w: static.timed(w, lambda call: call, model) for w in WIDTHS}
    yield "graph_of_eager_kernels_ms", {w: static.timed(w, as_graph, model) for w in WIDTHS}
    parts = [m for m in model.modules() if type(m).__name__ in ("Qwen3RMSNorm", "Qwen3MLP")]
    for part in parts:
        part.compile(fullgraph=True, dynamic=True)
    began = time.perf_counter()
    first = static.over(8, model)
    first[0]()
    first[1]()
    yield "graph_of_compiled_norms_and_mlps_compile_s", round(time.perf_counter() - began, 1)
    yield "graph_of_compiled_norms_and_mlps_ms", {w: static.timed(w, as_graph, model) for w in WIDTHS}
    for part in parts:
        part._compiled_call_impl = None
    torch._dynamo.reset()
    yield from compiled_whole(static, settings)
    yield "peak_gib", peak(settings)


def compiled_whole(static: StaticForward, settings: Settings) -> Found:
    """As transformers compiles a forward, but for every width at once and without a graph break."""
    mode = "reduce-overhead" if settings.is_cuda else "default"
    forward = torch.compile(static.model.__call__, mode=mode, fullgraph=True)

    def step(*args: Any) -> Any:
        torch.compiler.cudagraph_mark_step_begin()
        return forward(*args)

    for width in (8, 16, 32, 64, 4, 2, 1):  # what is most worth knowing first
        call, take_back = static.over(width, step)
        first = seconds_of(call, settings.device)
        take_back()
        yield (
            f"compiled_whole, {width} tokens",
            {
                "first_call_s": round(first, 1),
                "ms": static.timed(width, lambda call: call, step),
                "graphs_so_far": torch._dynamo.utils.counters["stats"]["unique_graphs"],
            },
        )
    call, take_back = static.over(16, step)
    yield "compiled_whole, launches over 16 tokens", launches_of(call, settings)


def deepseek_v4_flash(settings: Settings, experts: int) -> PreTrainedModel:
    """Random layers of its widths, the two kinds that 41 of its 43 have, in turn."""
    sized, kinds = settings.sized, ["compressed_sparse_attention", "heavily_compressed_attention"] * 2
    config = DeepseekV4Config(
        vocab_size=sized(129280, 512), hidden_size=sized(4096, 64), moe_intermediate_size=sized(2048, 16),
        num_hidden_layers=len(kinds), layer_types=kinds, mlp_layer_types=["moe"] * len(kinds),
        num_attention_heads=sized(64, 4), head_dim=sized(512, 16), q_lora_rank=sized(1024, 16),
        o_groups=sized(8, 2), o_lora_rank=sized(1024, 8), index_n_heads=sized(64, 8),
        index_head_dim=sized(128, 16), n_routed_experts=experts, num_experts_per_tok=sized(6, 2),
        partial_rotary_factor=sized(1, 4) / 8, compress_rates=dict(zip(kinds, (4, 128))), sliding_window=128,
        max_position_embeddings=4096, bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return made(DeepseekV4ForCausalLM, config, settings)


def deepseek_v4(settings: Settings) -> Found:
    """What a layer costs, and how much of it the hyper-connections are."""
    experts, widths = settings.sized(128, 4), (1, 4, 7, 16)
    model = deepseek_v4_flash(settings, experts)
    layers, parts = list(model.model.layers), [type(m).__name__ for m in model.modules()]
    mixers = [m for m in model.modules() if type(m).__name__ == "DeepseekV4HyperConnection"]
    yield "made_of", {
        "layers": model.config.layer_types, "layers_of_v4_flash": 43, "experts": experts,
        "experts_of_v4_flash": 256, "hyper_connections": len(mixers), "modules": len(parts),
        "parameters": sum(p.numel() for p in model.parameters()),
    }  # fmt: skip
    yield "forward_ms", eager_forwards(model, settings, widths)
    yield "of_a_forward", launches_of_layers(model, settings, {"layer": layers, "hyper-connection": mixers})
    yield "hyper_connection_alone_ms", of_one(mixers[0], settings)
    drafter = untrained(model, settings, 6)
    yield "drafter_parameters", sum(p.numel() for p in drafter.parameters())
    drafter.bind(model)
    bind(model, fuse=False)
    yield "round, 6 drafts", rounds(model, drafter, settings)
    before, began = logits_of(model, settings), time.perf_counter()
    bind(model, fuse=True)
    after = logits_of(model, settings)
    yield "fused_first_forward_s", round(time.perf_counter() - began, 1)
    yield "is_fused", not vars(model)["hyperdflash_binding"].fusion.is_off  # else its warning says why
    yield "largest_difference_of_fused_logits", float((after - before).abs().max())
    yield "largest_logit", float(before.abs().max())
    yield "fused_forward_ms", eager_forwards(model, settings, widths)
    yield "fused_of_a_forward", launches_of_layers(model, settings, {"layer": layers})
    yield "fused_hyper_connection_alone_ms", of_one(mixers[0], settings)
    yield "fused round, 6 drafts", rounds(model, drafter, settings)
    drafter.unbind(model)
    yield "peak_gib", peak(settings)


@torch.no_grad()
def launches_of_layers(model: PreTrainedModel, settings: Settings, modules: dict[str, list[Any]]) -> dict[str, Any]:
    """Of one forward over one token after [`PAST`]."""
    cache, vocabulary = DynamicCache(config=model.config), model.config.vocab_size
    model(prompt_of(PAST, settings, vocabulary), None, None, cache)
    forward = partial(model, prompt_of(1, settings, vocabulary), None, None, cache)
    forward()
    with labelled(modules):
        found = launches_of(forward, settings, *modules)
    cache = DynamicCache(config=model.config)
    model(prompt_of(PAST, settings, vocabulary), None, None, cache)
    forward = partial(model, prompt_of(1, settings, vocabulary), None, None, cache)
    for kind, layer in zip(model.config.layer_types[:2], modules["layer"]):
        with labelled({kind: [layer]}):
            found[kind] = launches_of(forward, settings, kind)[kind]
    return found


@torch.no_grad()
def of_one(mixer: Any, settings: Settings) -> dict[str, float]:
    """Milliseconds of one hyper-connection over so many tokens."""
    paths, width = mixer.hc_mult, mixer.fn.shape[1] // mixer.hc_mult
    found = {}
    for tokens in (1, 7, 16):
        streams = torch.randn(1, tokens, paths, width, dtype=torch.bfloat16, device=settings.device)
        found[str(tokens)] = milliseconds(partial(mixer, streams), settings.device, repeats=30)
    return found


@torch.no_grad()
def logits_of(model: PreTrainedModel, settings: Settings) -> torch.Tensor:
    return model(prompt_of(24, settings, model.config.vocab_size)).logits.float()


def text(settings: Settings) -> Found:
    """Texts of every family and kind of drafting, and which differ from the stock text."""
    from tests.helpers import families

    makers = [*families.FAMILIES, *families.ALSO_MASKED]
    compared, differing, failed = Counter[str](), [], {}
    for maker in makers[: settings.sized(len(makers), 2)]:
        torch.manual_seed(0)
        target = maker().eval().to(settings.device)
        for name, written in texts_of(target, settings):
            try:
                expected, found = written()
            except Exception as error:  # one more thing to know, and the others still count
                failed[f"{maker.__name__}, {name}"] = " ".join(f"{type(error).__name__}: {error}".split())[:300]
                continue
            compared[maker.__name__] += len(expected)
            differing += [f"{maker.__name__}, {name}"] * sum(a != b for a, b in zip(expected, found))
        yield "texts", compared.total()
        yield "differing", differing
        yield "failed", failed
        yield "texts_of_each", dict(compared)


def texts_of(target: Any, settings: Settings) -> Iterator[tuple[str, Callable[[], tuple[list[Any], list[Any]]]]]:
    """Kinds of drafting, each with what writes the stock texts and ours."""
    from tests.conftest import half_right_about
    from tests.helpers.tree_drafters import RandomChains, RandomTrees

    stock = copy.deepcopy(target)
    rows = [prompt_of(length, settings, 64) for length in (20, 9, 14)]
    twice = torch.cat([rows[1], rows[1]], dim=1)
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 24, "pad_token_id": 0}
    bind(target)
    texts = {ids: stock.generate(ids, **options)[0] for ids in (*rows, twice)}
    kinds = {"a chain": {}, "a tree": {"tree_budget": 9}, "auto": {"num_assistant_tokens": "auto"}}

    def alone(drafter: Callable[[], Any], ids: torch.Tensor, **more: Any) -> tuple[list[Any], list[Any]]:
        found = target.generate(ids, assistant_model=drafter(), **options, **more)
        return [texts[ids].tolist()], [found[0].tolist()]

    def batch(kind: Any) -> tuple[list[Any], list[Any]]:
        longest = max(row.shape[1] for row in rows)
        padding = [longest - row.shape[1] for row in rows]
        ids = torch.cat([torch.nn.functional.pad(row, (n, 0)) for row, n in zip(rows, padding)])
        mask = (torch.arange(longest) >= torch.tensor(padding)[:, None]).long().to(settings.device)
        drafter = kind(target, [texts[row] for row in rows], seed=1)
        found = target.generate(ids, attention_mask=mask, assistant_model=drafter, **options)
        ends = [n + len(texts[row]) for row, n in zip(rows, padding)]
        return [texts[row].tolist() for row in rows], [of[n:e].tolist() for of, n, e in zip(found, padding, ends)]

    yield "prompt lookup", partial(alone, lambda: PromptLookupDrafter(target, 3), twice)
    for name, more in kinds.items():
        yield f"blocks, {name}", partial(alone, lambda: half_right_about(target, texts[rows[0]]), rows[0], **more)
    for kind in (RandomChains, RandomTrees):
        if not (kind is RandomTrees and target.config.model_type == "remote_v4"):
            yield f"a batch, {kind.__name__}", partial(batch, kind)
    if target.config.model_type in ("qwen3", "llama", "gemma3_text"):
        for kind, name in itertools.product(("eagle3", "specblock"), ("a chain", "a tree")):
            going_on = partial(unrolled_on_device, kind, target)
            yield f"{kind}, {name}", partial(alone, going_on, rows[2], **kinds[name])


def unrolled_on_device(kind: str, target: Any) -> Any:
    """A drafter that goes on from states of its own draft."""
    from tests.helpers.unrolled import unrolled

    return unrolled(kind, target).to(target.device)


def smollm2(settings: Settings) -> Found:
    """Tokens a second of a real pair."""
    if not (settings.target and settings.drafter and settings.prompts):
        yield "skipped", "no --target, --drafter and --prompts were given"
        return
    dtype, device = torch.bfloat16, settings.device
    stock, target = (load_target(settings.target, dtype=dtype).to(device) for _ in range(2))
    tokenizer = load_tokenizer(settings.target)
    drafter = load_drafter(settings.drafter, dtype=dtype, device=device)
    drafter.bind(target)
    suites = {}
    for name in ("gsm8k", "mbpp", "mt-bench"):
        asked_of = [{"turns": turns} for turns in load_suite(name, settings.prompts, settings.per_suite)]
        suites[name] = encode_prompts(tokenizer, asked_of)
    asked = [(suite, ids.to(device)) for those in zip(*suites.values()) for suite, ids in zip(suites, those)]
    yield "setting", {
        "new_tokens": settings.new_tokens, "prompts_a_suite": settings.per_suite, "dtype": str(dtype),
        "prompt_tokens": [ids.shape[1] for _, ids in asked],
    }  # fmt: skip
    warm, longest = {}, max((ids for _, ids in asked), key=lambda ids: ids.shape[1])
    rows = rivals(stock, target, drafter, longest.shape[1], settings)
    for name, write in rows.items():  # the longest prompt first, so that a static cache has room for all
        warm[name] = round(sum(seconds_of(partial(write, longest, t), device) for t in (0, 1)), 2)
    yield "warm_up_s", warm
    order, runs, texts = random.Random(0), [], {}
    for number, (suite, ids) in enumerate(asked):
        for temperature, name in itertools.product((0, 1), order.sample(list(rows), len(rows))):
            torch.manual_seed(number)
            synchronize(device)
            began = time.perf_counter()
            text, tau = rows[name](ids, temperature)
            synchronize(device)
            seconds, new = time.perf_counter() - began, text.shape[1] - ids.shape[1]
            texts[temperature, number, name] = text[0].tolist()
            runs.append(
                {
                    "temperature": temperature, "suite": suite, "prompt": number, "row": name, "tau": tau,
                    "tokens": new, "seconds": round(seconds, 4),
                }
            )  # fmt: skip
        yield "runs", runs
        if (number + 1) % len(suites) == 0:
            for temperature in (0, 1):
                yield f"table, temperature {temperature}", table(runs, temperature, rows, suites)
            same = [n for n in rows for k in range(number + 1) if texts[0, k, n] == texts[0, k, "stock eager"]]
            yield "greedy_texts_as_stock_eager's", {"of": number + 1, **Counter(same)}


def rivals(stock: Any, target: Any, drafter: Any, longest: int, settings: Settings) -> dict[str, Any]:
    """By name what writes a text from a prompt at a temperature, and tells its tau."""
    most = {"max_new_tokens": settings.new_tokens}

    def of_stock(ids: torch.Tensor, temperature: int, **options: Any) -> tuple[torch.Tensor, float]:
        forwards: list[int] = []
        counts = "prompt_lookup_num_tokens" in options
        handle = stock.register_forward_pre_hook(lambda *_: forwards.append(1)) if counts else None
        text = stock.generate(ids, do_sample=bool(temperature), **most, **options)
        if handle is not None:
            handle.remove()
        new = text.shape[1] - ids.shape[1]
        return text, round((new - 1) / max(1, len(forwards) - 1), 3) if counts else 1.0

    def of_ours(ids: torch.Tensor, temperature: int, **options: Any) -> tuple[torch.Tensor, float]:
        text = target.generate(ids, assistant_model=drafter, do_sample=bool(temperature), **most, **options)
        return text, round(drafter.last_stats.tau, 3)

    def into_one_cache(ids: torch.Tensor, temperature: int) -> tuple[torch.Tensor, float]:
        cache.reset()
        return of_stock(ids, temperature, **{CACHE: cache}, **compile_anywhere(settings))

    # As long as stock's own will be, so that what was compiled for it serves this one too.
    cache = StaticCache(config=stock.config, max_cache_len=longest + settings.new_tokens - 1)
    static = {"cache_implementation": "static", **compile_anywhere(settings)}
    return {
        "stock eager": of_stock,
        "stock compiled": partial(of_stock, **static),
        "stock compiled, one cache": into_one_cache,
        "stock prompt lookup": partial(of_stock, prompt_lookup_num_tokens=10),
        f"ours, {drafter.max_draft_tokens} drafts": partial(of_ours, num_assistant_tokens=drafter.max_draft_tokens),
        "ours, 16 nodes": partial(of_ours, tree_budget=16),
        "ours, auto": partial(of_ours, num_assistant_tokens="auto"),
    }


def table(runs: list[dict[str, Any]], temperature: int, rows: Any, suites: Any) -> dict[str, Any]:
    """Of each row, by suite and over all: tokens a second, times those of stock eager and compiled, tau."""

    def rate(row: str, suite: str) -> tuple[float, float]:
        those = [
            run for run in runs
            if run["row"] == row and run["temperature"] == temperature and suite in ("all", run["suite"])
        ]  # fmt: skip
        speed = sum(run["tokens"] for run in those) / sum(run["seconds"] for run in those)
        return speed, statistics.mean(run["tau"] for run in those)

    found: dict[str, Any] = {}
    for row, suite in itertools.product(rows, (*suites, "all")):
        speed, tau = rate(row, suite)
        found.setdefault(row, {})[suite] = {
            "tokens_a_second": round(speed, 1), "of_eager": round(speed / rate("stock eager", suite)[0], 3),
            "of_compiled": round(speed / rate("stock compiled", suite)[0], 3), "tau": round(tau, 3),
        }  # fmt: skip
    return found


# Running


class TookTooLong(BaseException):
    """What its time limit ends a part with: nothing that a compiler, or the part, takes for an error of its own."""


# What each has to say, and the seconds that it may take.
PARTS: dict[str, tuple[Callable[[Settings], Found], int]] = {
    "machine": (machine, 20),
    "qwen3-8b": (qwen3, 130),
    "qwen3-8b-compiled": (qwen3_compiled, 120),
    "deepseek-v4": (deepseek_v4, 70),
    "smollm2": (smollm2, 130),
    "text": (text, 80),
}


def run(name: str, output: Path, settings: Settings, seconds: float) -> None:
    """One part, with its file written after each piece, and stopped where it takes longer than it may."""
    part, path, found, began = PARTS[name][0], output / f"{name}.json", {}, time.perf_counter()

    def stop(*_: Any) -> None:
        raise TookTooLong(f"more than {seconds:.0f} s")

    def keep() -> None:
        found["seconds"] = round(time.perf_counter() - began, 1)
        path.with_suffix(".partial").write_text(json.dumps(found, indent=1) + "\n")
        path.with_suffix(".partial").replace(path)

    if settings.is_cuda:
        torch.cuda.reset_peak_memory_stats(settings.device)
    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, max(1.0, seconds))
    try:
        for key, value in part(settings):
            found[key] = value
            keep()
            if key != "runs":
                print(f"{name}: {time.perf_counter() - began:6.1f} s  {key}: {json.dumps(value)[:700]}", flush=True)
    except (Exception, TookTooLong) as error:
        found["error"] = f"{type(error).__name__}: {error}"[:2000]
        here = f"{ROOT}/|{Path(torch.__file__).parents[1]}/"  # no folder of this machine is kept
        found["where"] = re.sub(here, "", traceback.format_exc()).splitlines()[-12:]
        print(f"{name}: {found['error']}", *found["where"], sep="\n  ", flush=True)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        keep()


def is_done(path: Path) -> bool:
    return path.is_file() and "error" not in json.loads(path.read_text())


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path, help="folder of the results, one JSON file a part")
    parser.add_argument("--seconds", type=float, default=330, help="of all parts together")
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="toys instead of models, to try the script")
    parser.add_argument("--target", help="folder of a real target, for smollm2")
    parser.add_argument("--drafter", help="folder of its drafter")
    parser.add_argument("--prompts", help="folder with gsm8k.jsonl, mbpp.jsonl and mt-bench.jsonl")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--prompts-a-suite", type=int, default=4)
    arguments = parser.parse_args()
    if arguments.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error(
            f"`--device` is {arguments.device!r}, and torch {torch.__version__} finds no GPU here, expected one: run "
            "it on a machine that has one, or try the script with `--device cpu --tiny`."
        )
    return arguments


def main() -> None:
    arguments, began = parse_arguments(), time.perf_counter()
    settings = Settings(
        torch.device(arguments.device), arguments.tiny, arguments.target, arguments.drafter, arguments.prompts,
        arguments.new_tokens, arguments.prompts_a_suite,
    )  # fmt: skip
    transformers.logging.set_verbosity_error()
    arguments.output.mkdir(parents=True, exist_ok=True)
    for name in PARTS:
        left, most = arguments.seconds - (time.perf_counter() - began), PARTS[name][1]
        if name not in arguments.only:
            continue
        if is_done(arguments.output / f"{name}.json"):
            print(f"{name}: is there")
        elif left < most / 2:
            print(f"{name}: not begun, {left:.0f} s are left")
        else:
            run(name, arguments.output, settings, left if arguments.tiny else min(left, most))
            torch._dynamo.reset()
            gc.collect()
            if settings.is_cuda:
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
