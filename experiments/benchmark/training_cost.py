"""What training a drafter costs at full size, by the number of rows: a model of tokens, bytes and operations.

A model, no measurement: operations are those of the weights, forward and backward, attention over the context is left
out, and what an accelerator does of them in a second, as a server's tokens per second, is an assumption of yours.

    python experiments/benchmark training_cost
    python experiments/benchmark training_cost --rows 20000 --answer-tokens 900 --teraflops 400
"""

from __future__ import annotations

import argparse

import torch
from benchmark.heads import BF16, block, lm_head, step, table, verification
from benchmark.tree_cost import FOR_QWEN3_8B, QWEN3_8B, dense
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM, Qwen3ForCausalLM

from hf_hyperdflash import HyperDFlashDrafter, HyperDFlashTrainingArguments
from hf_hyperdflash.drafters.blocks.configuration_hyperdflash import HyperDFlashConfig

HEAD = dict(sequential_head="state", head_rank=512, head_candidates=1024)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", type=int, default=[5000, 50000, 500000])
    parser.add_argument("--prompt-tokens", type=int, default=100)
    parser.add_argument("--answer-tokens", type=int, default=300)
    parser.add_argument("--tokens-per-second", type=float, default=1000, help="of a server that writes the answers")
    parser.add_argument("--teraflops", type=float, default=150, help="that an accelerator does in a second")
    return parser.parse_args()


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
    most = HyperDFlashTrainingArguments.num_anchors
    anchors, tokens = min(most, arguments.answer_tokens), arguments.prompt_tokens + arguments.answer_tokens
    second = arguments.teraflops * 1e12
    print(
        f"A row: {arguments.prompt_tokens} tokens of prompt, {arguments.answer_tokens} of answer, {anchors} anchors. "
        f"Answers at {arguments.tokens_per_second:g} tokens/s, operations at {arguments.teraflops:g} TFLOP/s."
    )
    targets = {"DeepSeek-V4-Flash": (verification(flash, 1), of_flash), "Qwen3-8B": (dense(qwen, 1), of_qwen)}
    for name, (token, drafter) in targets.items():
        wide = drafter.config.num_streams * drafter.config.target_hidden_size * BF16
        rows = []
        for count in arguments.rows:
            times = [
                count * arguments.answer_tokens / arguments.tokens_per_second,
                count * tokens * token.operations / second,
                count * anchors * operations_of_an_anchor(drafter) / second,
            ]
            rows.append(
                [f"{count:,}", *(f"{seconds / 3600:.1f}" for seconds in times), f"{count * tokens * wide / 1e9:,.0f}"]
            )
        print(f"\n## {name}\n")
        table(
            ["rows", "hours to write the answers", "target's forward, hours", "an epoch, hours", "feature cache, GB"],
            rows,
        )
