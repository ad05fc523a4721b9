"""Is generating slower than at an earlier commit? Both packages run in one process, in turns, and write the same text.

    python tools/compare_speed.py --before main~5                                # small random targets
    python tools/compare_speed.py --before main~5 --pair model.gguf my-drafter    # a real pair, too
    python tools/compare_speed.py --before main~5 --only "qwen3 chain" --turns 60

Of each case: CPU seconds of the new package by those of the old one, the median of turns side by side, and its
standard error. A machine that does other work at the same time shows larger errors.
"""

from __future__ import annotations

import argparse
import importlib
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

ROOT = Path(__file__).resolve().parents[1]
OLD = "hf_before"  # the name of the earlier package
WAYS: dict[str, dict[str, Any]] = {
    "chain": {}, "tree": {"tree_budget": 16}, "batch": {}, "compiled": {"cache_implementation": "static"},
    "compiled tree": {"tree_budget": 16, "cache_implementation": "static"},
}  # fmt: skip


def earlier_package(commit: str, folder: Path) -> None:
    """Write the package of a commit, under another name, where it can be imported."""
    packed = subprocess.run(["git", "archive", commit, "hf_hyperdflash"], cwd=ROOT, check=True, capture_output=True)
    subprocess.run(["tar", "x", "-C", folder], input=packed.stdout, check=True)
    for path in folder.rglob("*.py"):
        path.write_text(path.read_text(encoding="utf-8").replace("hf_hyperdflash", OLD), encoding="utf-8")
    (folder / "hf_hyperdflash").rename(folder / OLD)
    sys.path.insert(0, str(folder))


def qwen3() -> PreTrainedModel:
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=4096, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=8,
            num_key_value_heads=4, head_dim=32, max_position_embeddings=4096, initializer_range=0.2,
        )
    )  # fmt: skip


def deepseek_v4() -> PreTrainedModel:
    return DeepseekV4ForCausalLM(
        DeepseekV4Config(
            vocab_size=1024, hidden_size=128, moe_intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
            num_key_value_heads=1, head_dim=32, q_lora_rank=32, o_lora_rank=32, o_groups=2, n_routed_experts=4,
            num_experts_per_tok=2, hc_mult=4, hc_sinkhorn_iters=4, sliding_window=64, index_n_heads=32,
            index_head_dim=16, index_topk=32, mlp_layer_types=["moe"] * 4, max_position_embeddings=4096,
            initializer_range=0.2,
        )
    )  # fmt: skip


RANDOM: dict[str, tuple[Callable[[], PreTrainedModel], str, dict[str, Any]]] = {
    "qwen3": (qwen3, "HyperDFlashDrafter", {"block_size": 8, "num_hidden_layers": 2, "mask_token_id": 0}),
    "qwen3 eagle3": (qwen3, "Eagle3Drafter", {}),
    "deepseek_v4": (deepseek_v4, "HyperDFlashDrafter", {"block_size": 8, "num_hidden_layers": 2, "mask_token_id": 0}),
}


def random_pair(name: str, package: Any) -> tuple[Any, Any]:
    """Return a target and a bound drafter, the same weights for each package."""
    build, kind, fields = RANDOM[name]
    torch.manual_seed(0)
    target = build().eval()
    drafter = getattr(package, kind).from_target(target, **fields).eval()
    drafter.bind(target)
    return target, drafter


def loaded_pair(paths: list[str], package: Any) -> tuple[Any, Any]:
    target = package.load_target(paths[0], dtype="float32")
    drafter = package.load_drafter(paths[1], target=target)
    drafter.bind(target)
    return target, drafter


def generation(target: Any, drafter: Any, way: str, tokens: int) -> Callable[[], torch.Tensor]:
    """Return a call that writes `tokens` greedily."""
    generator, rows = torch.Generator().manual_seed(0), 4 if way == "batch" else 1
    ids = torch.randint(3, target.config.get_text_config().vocab_size, (rows, 40), generator=generator)
    options: dict[str, Any] = {
        "attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": tokens,
        "assistant_model": drafter, **WAYS[way],
    }  # fmt: skip
    target.generation_config.eos_token_id = None  # all texts are as long as each other
    return lambda: target.generate(ids, **options)


def compare(old: Callable[[], torch.Tensor], new: Callable[[], torch.Tensor], turns: int) -> tuple[float, float]:
    """Return the median ratio of CPU seconds, new by old, and its standard error."""
    for _ in range(3):  # compiled forwards are built in the first calls
        texts = old(), new()
    if not torch.equal(*texts):
        raise SystemExit("The two packages write different texts: their times say nothing.")
    ratios = []
    for _ in range(turns):
        seconds = {}
        for call in random.sample([old, new], 2):
            began = time.process_time()
            call()
            seconds[call] = time.process_time() - began
        ratios.append(seconds[new] / seconds[old])
    return statistics.median(ratios), 1.25 * statistics.stdev(ratios) / len(ratios) ** 0.5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", required=True, help="a commit")
    parser.add_argument(
        "--pair", nargs=2, metavar=("TARGET", "DRAFTER"), help="what load_target and load_drafter read"
    )
    parser.add_argument("--only", default="", help="part of a case's name")
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--tokens", type=int, default=64)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        earlier_package(arguments.before, Path(folder))
        old, new = importlib.import_module(OLD), importlib.import_module("hf_hyperdflash")
        print(f"{'CPU seconds of now by ' + arguments.before:40}{'ratio':>8}{'error':>8}")
        for name in [*RANDOM, *(["pair"] if arguments.pair else [])]:
            ways = [way for way in WAYS if arguments.only in f"{name} {way}"]
            if name == "deepseek_v4":  # whose rounds are not compiled
                ways = [way for way in ways if not way.startswith("compiled")]
            if not ways:
                continue
            pairs = [
                loaded_pair(arguments.pair, package) if name == "pair" else random_pair(name, package)
                for package in (old, new)
            ]
            for way in ways:
                before, now = (generation(*pair, way, arguments.tokens) for pair in pairs)
                ratio, error = compare(before, now, arguments.turns)
                print(f"{name + ' ' + way:40}{ratio:8.3f}{error:8.3f}", flush=True)


if __name__ == "__main__":
    main()
