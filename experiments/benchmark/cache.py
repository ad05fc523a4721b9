"""Measure what the rewindable cache costs in plain greedy decoding, against the stock DeepSeek-V4 cache.

Every step feeds the same token to the same model once per cache, in random order, so that the machine's drift hits
all of them alike. The stock cache runs twice: the second run's overhead is the noise of the measurement.

    python experiments/benchmark cache
    python experiments/benchmark cache --target PATH --dtype bfloat16 --device cuda
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import transformers
from transformers import (
    AutoModelForCausalLM,
    DeepseekV4Config,
    DeepseekV4ForCausalLM,
    DynamicCache,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.cache_utils import Cache

from hf_hyperdflash.targets.caches.deepseek_v4 import make_rewindable
from hf_hyperdflash.targets.caches.name import CACHE


@dataclass
class Arm:
    """One cache under measurement: the seconds and the bytes it took."""

    name: str
    cache: Cache
    after_step: Callable[[Cache], None] | None = None
    seconds: list[float] = field(default_factory=list)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", help="checkpoint of a V4 model; default: a random model built here")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--prompt-length", type=int, default=512)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--warmup", type=int, default=10, help="steps that are run but not counted")
    parser.add_argument("--max-rewind", type=int, default=128)
    parser.add_argument("--layers", type=int, default=6, help="layers of the random model")
    parser.add_argument("--hidden-size", type=int, default=512, help="hidden size of the random model")
    return parser.parse_args()


def random_config(layers: int, hidden_size: int) -> DeepseekV4Config:
    """V4-Flash's layer pattern, window and compression rates, at a small width."""
    compressed = ["compressed_sparse_attention", "heavily_compressed_attention"] * layers
    return DeepseekV4Config(
        vocab_size=4096,
        hidden_size=hidden_size,
        moe_intermediate_size=hidden_size // 2,
        num_hidden_layers=layers,
        num_attention_heads=8,
        head_dim=128,
        q_lora_rank=hidden_size // 4,
        num_experts_per_tok=2,
        n_routed_experts=8,
        layer_types=(["sliding_attention"] * 2 + compressed)[:layers],
        o_groups=2,
        o_lora_rank=hidden_size // 4,
        index_n_heads=8,
        index_head_dim=64,
        sliding_window=128,
    )


def load_model(arguments: argparse.Namespace) -> PreTrainedModel:
    dtype = getattr(torch, arguments.dtype)
    if arguments.target:
        model = AutoModelForCausalLM.from_pretrained(arguments.target, dtype=dtype)
    else:
        torch.manual_seed(0)
        model = DeepseekV4ForCausalLM(random_config(arguments.layers, arguments.hidden_size)).to(dtype)
    return model.to(arguments.device).eval()


def make_arms(config: PreTrainedConfig, max_rewind: int) -> list[Arm]:
    recording = make_rewindable(DynamicCache(config=config), max_rewind)
    recording.activate_past_recording()
    return [
        Arm("stock", DynamicCache(config=config)),
        Arm("stock again (noise)", DynamicCache(config=config)),
        Arm("rewindable, not recording", make_rewindable(DynamicCache(config=config), max_rewind)),
        Arm("rewindable, recording + crop(0)", recording, after_step=lambda cache: cache.crop(0)),
    ]


def decode_step(model: PreTrainedModel, arm: Arm, ids: torch.Tensor) -> torch.Tensor:
    """One forward on `ids`, `[1, seq]`, as long as it takes; returns the greedy next token, `[1, 1]`."""
    synchronize = torch.cuda.synchronize if ids.is_cuda else lambda: None
    synchronize()
    start = time.perf_counter()
    token = model(ids, **{CACHE: arm.cache}, logits_to_keep=1).logits.argmax(-1)
    if arm.after_step is not None:
        arm.after_step(arm.cache)
    synchronize()
    arm.seconds.append(time.perf_counter() - start)
    return token


@torch.no_grad()
def measure(model: PreTrainedModel, arms: list[Arm], prompt: torch.Tensor, steps: int, warmup: int) -> None:
    ids, order = prompt, random.Random(0)
    for step in range(1 + warmup + steps):
        tokens = [decode_step(model, arm, ids) for arm in order.sample(arms, len(arms))]
        if any(not torch.equal(token, tokens[0]) for token in tokens):
            raise RuntimeError(f"The caches disagree about the token of step {step}: {tokens}. They must not.")
        ids = tokens[0]
    for arm in arms:
        del arm.seconds[: 1 + warmup]


def held_bytes(thing: object) -> int:
    """Bytes of all distinct storages reachable from a cache."""

    def storages(thing: object) -> dict[int, int]:
        if isinstance(thing, torch.Tensor):
            return {thing.untyped_storage().data_ptr(): thing.untyped_storage().nbytes()}
        if isinstance(thing, dict):
            thing = list(thing.values())
        elif hasattr(thing, "__dict__"):
            thing = list(vars(thing).values())
        items = thing if isinstance(thing, (list, tuple)) else []
        return {address: size for item in items for address, size in storages(item).items()}

    return sum(storages(thing).values())


def report(arms: list[Arm], arguments: argparse.Namespace) -> None:
    device = torch.cuda.get_device_name() if arguments.device.startswith("cuda") else platform.machine()
    cores = f"{os.cpu_count()} cores, {torch.get_num_threads()} threads"
    print(f"{datetime.date.today()}, {platform.platform()}, {device}, {cores}")
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {arguments.dtype}")
    print(f"target: {arguments.target or f'random, {arguments.layers} layers, hidden {arguments.hidden_size}'}")
    print(f"prompt {arguments.prompt_length}, {arguments.steps} steps, max_rewind {arguments.max_rewind}\n")
    print(f"| {'cache':<31} | median step ms | overhead % | held KiB |")
    print(f"|:{'-' * 31}-|---------------:|-----------:|---------:|")
    for arm in arms:
        median = statistics.median(arm.seconds) * 1e3
        # Step by step: a step and its stock twin ran within the same moment.
        ratio = statistics.median(own / stock for own, stock in zip(arm.seconds, arms[0].seconds))
        kib = held_bytes(arm.cache) / 1024
        print(f"| {arm.name:<31} | {median:14.3f} | {100 * (ratio - 1):+10.2f} | {kib:8.0f} |")


def main() -> None:
    arguments = parse_arguments()
    model = load_model(arguments)
    prompt = torch.randint(1, model.config.vocab_size, (1, arguments.prompt_length), device=model.device)
    arms = make_arms(model.config, arguments.max_rewind)
    measure(model, arms, prompt, arguments.steps, arguments.warmup)
    report(arms, arguments)
