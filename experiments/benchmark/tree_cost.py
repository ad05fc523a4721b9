"""Where draft trees would pay at full size: a model of the bytes that a round reads, with a benchmark's tau.

A model, no measurement: at batch 1 an accelerator waits for weights. A forward over n tokens reads every dense weight
once and, of E experts of which each token chooses k, E (1 - (1 - k/E)^n); so a tree is almost free on a dense target
and not on a mixture of experts. How long texts would be accepted there is not known: tau is that of the benchmark
given, of a small target and its drafter. Attention over the context, activations and launches are left out.

    python experiments/benchmark tree_cost --results experiments/results/tiny-deepseek-v4/trees
"""

from __future__ import annotations

import argparse
import csv
import re
from collections.abc import Callable
from pathlib import Path

import torch
from benchmark.heads import BF16, Cost, block, lm_head, step, table, verification
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from hf_hyperdflash import HyperDFlashDrafter
from hf_hyperdflash.drafters.blocks.configuration_hyperdflash import HyperDFlashConfig

QWEN3_8B = Qwen3Config(
    vocab_size=151936, hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32,
    num_key_value_heads=8, head_dim=128, tie_word_embeddings=False,
)  # fmt: skip
FOR_QWEN3_8B = dict(
    reducer="fc", target_layer_ids=[1, 17, 32], target_hc_mult=1, vocab_size=QWEN3_8B.vocab_size,
    target_hidden_size=4096, hidden_size=4096, intermediate_size=12288, mask_token_id=0,
)  # fmt: skip


def dense(target: PreTrainedModel, tokens: int) -> Cost:
    """One forward of a dense target in bfloat16, by its weights."""
    sizes = sum(parameter.numel() for parameter in target.parameters())
    used = sizes - target.get_input_embeddings().weight.numel()
    return Cost(2 * tokens * used, BF16 * used)


def drafting(drafter: HyperDFlashDrafter, drafts: int) -> Cost:
    """One pass of the block and a step of the head for each level: weights are read once for all paths of it."""
    return block(drafter) + lm_head(drafter, drafts) + drafts * step(drafter)


def measured(results: Path) -> dict[tuple[str, int, int | None], dict[str, tuple[float, float]]]:
    """Of each drafter's name, drafts and nodes: tau and measured speedup by temperature, averaged over suites."""
    found: dict[tuple[str, int, int | None], dict[str, list[tuple[float, float]]]] = {}
    for row in csv.DictReader((results / "summary.csv").open()):
        named = re.fullmatch(r"(.*) \((\d+)(?:, (\d+) nodes)?\)", row["method"])
        if named and row["tau"]:
            key = named[1], int(named[2]), int(named[3]) if named[3] else None
            found.setdefault(key, {}).setdefault(row["temperature"], []).append(
                (float(row["tau"]), float(row["speedup"]))
            )
    return {
        key: {at: (sum(t for t, _ in of) / len(of), sum(s for _, s in of) / len(of)) for at, of in by.items()}
        for key, by in found.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, required=True, help="folder of a benchmark with trees")
    parser.add_argument("--method", default="State head", help="whose accepted lengths")
    arguments = parser.parse_args()
    taus = {key: value for key, value in measured(arguments.results).items() if key[0] == arguments.method}
    if not taus:
        parser.error(f"--results {arguments.results} has no method called {arguments.method!r}.")
    with torch.device("meta"):
        flash = DeepseekV4ForCausalLM(DeepseekV4Config())
        qwen = Qwen3ForCausalLM(QWEN3_8B)
        head = dict(sequential_head="state", head_rank=512, head_candidates=1024, block_size=9)
        of_flash = HyperDFlashDrafter(HyperDFlashConfig(**head))
        of_qwen = HyperDFlashDrafter(HyperDFlashConfig(**head, **FOR_QWEN3_8B))
    targets: dict[str, tuple[Callable[[int], Cost], HyperDFlashDrafter]] = {
        "DeepSeek-V4-Flash": (lambda n: verification(flash, n), of_flash),
        "Qwen3-8B": (lambda n: dense(qwen, n), of_qwen),
    }
    for at in sorted({at for by in taus.values() for at in by}, key=float):
        rows = []
        for (_, drafts, nodes), by in taus.items():
            if at not in by:
                continue
            tau, speedup = by[at]
            row = [f"chain of {drafts}" if nodes is None else nodes, f"{tau:.2f}", f"{speedup:.2f}×"]
            for verify, of_target in targets.values():
                read = verify((nodes or drafts) + 1) + drafting(of_target, drafts)
                once = verify(1)
                row += [f"{read.bytes / once.bytes:.2f}", f"{tau * once.bytes / read.bytes:.2f}×"]
            rows.append(row)
        print(f"\n## Temperature {float(at):g}\n")
        header = ["nodes", "tau", "measured here"]
        for name in targets:
            header += [f"{name}: bytes of a round / of a token", "speedup by bytes"]
        table(header, rows)
