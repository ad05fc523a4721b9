"""How one `generate` of two rounds runs through the package: functions, calls, and switches from file to file.

    python experiments/trace_generate.py

The target is a tiny random DeepSeek-V4 (`--target qwen3`: a Qwen3), bound beforehand. A call is each time that a named
function of the package is entered, or resumed where it yields; a file switch is a call in another file than that of
the package's call before it. Returns do not count.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

import hf_hyperdflash
from hf_hyperdflash import HyperDFlashDrafter

SHAPE = dict(
    vocab_size=64, hidden_size=32, num_attention_heads=4, head_dim=16, max_position_embeddings=1024,
    initializer_range=0.1, bos_token_id=None, eos_token_id=None, pad_token_id=0,
)  # fmt: skip


def deepseek_v4() -> PreTrainedModel:
    kinds = ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"]
    config = DeepseekV4Config(
        **SHAPE, layer_types=kinds, num_hidden_layers=3, mlp_layer_types=["moe"] * 3, moe_intermediate_size=16,
        compress_rates={kinds[1]: 4, kinds[2]: 8}, sliding_window=8, partial_rotary_factor=0.5, q_lora_rank=16,
        o_groups=2, o_lora_rank=8, index_n_heads=8, index_head_dim=16, n_routed_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    return DeepseekV4ForCausalLM(config).eval()


def qwen3() -> PreTrainedModel:
    config = Qwen3Config(**SHAPE, num_hidden_layers=3, intermediate_size=48, num_key_value_heads=2)
    return Qwen3ForCausalLM(config).eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", choices=["deepseek_v4", "qwen3"], default="deepseek_v4")
    torch.manual_seed(0)
    target = {"deepseek_v4": deepseek_v4, "qwen3": qwen3}[parser.parse_args().target]()
    drafter = HyperDFlashDrafter.from_target(target, num_hidden_layers=2, mask_token_id=1).eval()
    drafter.bind(target)
    ids, package = torch.arange(2, 14)[None], str(Path(hf_hyperdflash.__file__).parent)
    calls: Counter[tuple[str, str]] = Counter()
    files: list[str] = []

    def entered(frame: FrameType, event: str, argument: Any) -> None:
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        if event == "call" and file.startswith(package) and not name.startswith("<"):
            calls[file, f"{name}:{frame.f_code.co_firstlineno}"] += 1
            files.append(file)

    # A random drafter is not right: a token of the prompt, one of each round, and a last that leaves no room to draft.
    sys.setprofile(entered)
    try:
        target.generate(ids, assistant_model=drafter, max_new_tokens=4, do_sample=False)
    finally:
        sys.setprofile(None)
    switches = Counter((before, after) for before, after in pairwise(files) if before != after)
    rounds = drafter.last_stats.rounds
    found = f"{len(calls)} functions in {len(set(files))} files, {len(files)} calls, {switches.total()} file switches"
    print(f"{rounds} rounds: {found}")
    for file, count in Counter(files).most_common():
        functions = ", ".join(f"{name} {n}" for (where, name), n in calls.most_common() if where == file)
        print(f"  {count:4} {Path(file).name}: {functions}")
    print("Most switches:")
    for (before, after), count in switches.most_common(12):
        print(f"  {count:4} {Path(before).name} to {Path(after).name}")


if __name__ == "__main__":
    main()
