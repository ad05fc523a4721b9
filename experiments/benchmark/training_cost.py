"""What training a drafter costs at full size, by the number of rows: a model of tokens, bytes and operations.

A model, no measurement: operations are those of the weights, forward and backward, attention over the context is left
out, and what an accelerator does of them in a second, as a server's tokens per second, is an assumption of yours.
The last table has what must be held at once: by the engine that makes the states, and by the trainer, which has the
target's embedding, final norm, LM head and collapse, and the drafter with its gradients and Adam's moments.

    python experiments/benchmark training_cost
    python experiments/benchmark training_cost --rows 20000 --answer-tokens 900 --teraflops 400
"""

from __future__ import annotations

import argparse
import math

import torch
from benchmark.heads import BF16, FP4, FP8, FP32, block, lm_head, step, table, verification
from benchmark.tree_cost import FOR_QWEN3_8B, QWEN3_8B, dense
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    DeepseekV4Config,
    DeepseekV4ForCausalLM,
    PreTrainedModel,
    Qwen3ForCausalLM,
)

from hf_hyperdflash import HyperDFlashDrafter, HyperDFlashTrainingArguments
from hf_hyperdflash.drafters.blocks.configuration_hyperdflash import HyperDFlashConfig
from hf_hyperdflash.targets.registry import target_of

HEAD = dict(sequential_head="state", head_rank=512, head_candidates=1024)
KEPT_FREE = 0.2  # of a device that serves: for keys and values, and what it computes


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", type=int, default=[5000, 50000, 500000])
    parser.add_argument("--prompt-tokens", type=int, default=100)
    parser.add_argument("--answer-tokens", type=int, default=300)
    parser.add_argument("--tokens-per-second", type=float, default=1000, help="of a server that writes the answers")
    parser.add_argument("--teraflops", type=float, default=150, help="that an accelerator does in a second")
    parser.add_argument("--device-gigabytes", type=float, default=141, help="of an accelerator that serves")
    return parser.parse_args()


def released(target: PreTrainedModel, of_experts: float, of_others: float) -> float:
    """The bytes of a target's weights as it is released: of experts, of other layers, and of the ends in bfloat16."""
    sizes = {name: parameter.numel() for name, parameter in target.named_parameters()}
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    ends = sum(target.get_submodule(name).weight.numel() for name in ("model.embed_tokens", "lm_head"))
    return of_experts * experts + of_others * (sum(sizes.values()) - experts - ends) + BF16 * ends


def held(target: PreTrainedModel, drafter: HyperDFlashDrafter) -> tuple[float, float]:
    """The bytes that the trainer has of a target in bfloat16, and those of a drafter that is trained in float32."""
    seen = target_of(target)
    modules = (seen.input_embedding, seen.output_head, *seen.collapse_modules)
    ends = sum(parameter.numel() for module in modules for parameter in module.parameters())
    return BF16 * ends, 4 * FP32 * sum(parameter.numel() for parameter in drafter.parameters())


def stored(drafter: HyperDFlashDrafter) -> int:
    """The streams of a token in a feature cache: those that the drafter reads, and the last layer's, the teacher's."""
    config = drafter.config
    return config.num_streams + config.target_hc_mult * (config.target_layer_ids[-1] != -1)


def operations_of_an_anchor(drafter: HyperDFlashDrafter) -> float:
    """A block forward and backward: weights that are trained count three times, the target's LM head, which passes
    gradients on, twice."""
    drafts = drafter.config.max_draft_tokens
    return (
        3 * block(drafter).operations + 2 * lm_head(drafter, drafts).operations + 3 * drafts * step(drafter).operations
    )


def main() -> None:
    arguments = parse_arguments()
    with torch.device("meta"):
        flash, qwen = DeepseekV4ForCausalLM(DeepseekV4Config()), Qwen3ForCausalLM(QWEN3_8B)
        of_flash = HyperDFlashDrafter(HyperDFlashConfig(**HEAD))
        of_qwen = HyperDFlashDrafter(HyperDFlashConfig(**HEAD, **FOR_QWEN3_8B))
        large = DeepseekV3ForCausalLM(DeepseekV3Config())
        of_large = HyperDFlashDrafter.from_target(large, mask_token_id=0, **HEAD)
    most = HyperDFlashTrainingArguments.num_anchors
    anchors, tokens = min(most, arguments.answer_tokens), arguments.prompt_tokens + arguments.answer_tokens
    second = arguments.teraflops * 1e12
    print(
        f"A row: {arguments.prompt_tokens} tokens of prompt, {arguments.answer_tokens} of answer, {anchors} anchors. "
        f"Answers at {arguments.tokens_per_second:g} tokens/s, operations at {arguments.teraflops:g} TFLOP/s."
    )
    targets = {
        "DeepSeek-V4-Flash": (flash, verification(flash, 1), of_flash, released(flash, FP4, FP8)),
        "DeepSeek-V3, 671B": (large, verification(large, 1), of_large, released(large, FP8, FP8)),
        "Qwen3-8B": (qwen, dense(qwen, 1), of_qwen, released(qwen, BF16, BF16)),
    }
    largest: dict[str, str] = {}  # of each target, the hours of the largest number of rows
    for name, (_, token, drafter, _) in targets.items():
        wide = stored(drafter) * drafter.config.target_hidden_size * BF16
        rows = []
        for count in arguments.rows:
            times = [
                count * arguments.answer_tokens / arguments.tokens_per_second,
                count * tokens * token.operations / second,
                count * anchors * operations_of_an_anchor(drafter) / second,
            ]
            hours = [f"{seconds / 3600:.1f}" for seconds in times]
            rows.append([f"{count:,}", *hours, f"{count * tokens * wide / 1e9:,.0f}"])
            largest[name] = " / ".join(hours)
        print(f"\n## {name}\n")
        table(
            ["rows", "hours to write the answers", "target's forward, hours", "an epoch, hours", "feature cache, GB"],
            rows,
        )
    print(
        f"\n## What is held at once, computed, on devices of {arguments.device_gigabytes:g} GB of which "
        f"{KEPT_FREE:.0%} stays free\n"
    )
    lines = []
    for name, (target, _, drafter, size) in targets.items():
        ends, trained = held(target, drafter)
        wide = stored(drafter) * drafter.config.target_hidden_size
        devices = math.ceil(size / (arguments.device_gigabytes * 1e9 * (1 - KEPT_FREE)))
        bytes_of_token = f"{BF16 * wide / 1e3:.1f} / {(wide + FP32 * stored(drafter)) / 1e3:.1f}"
        params = sum(parameter.numel() for parameter in drafter.parameters()) / 1e9
        counts = (size / 1e9, devices, ends / 1e9, 100 * ends / size, params, trained / 1e9)
        lines.append([name, *(f"{count:,.3g}" for count in counts), bytes_of_token, largest[name]])
    header = [
        "target", "weights as released, GB", "devices that serve it", "read by the trainer, GB", "of the weights, %",
        "drafter, billion parameters", "drafter in training, GB", "features of a token, bfloat16 / float8, kB",
        f"hours for {arguments.rows[-1]:,} rows: answers / states / an epoch",
    ]  # fmt: skip
    table(header, lines)
