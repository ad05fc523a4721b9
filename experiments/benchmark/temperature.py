"""What a verification round costs at temperature 1 beside one at temperature 0, of equal drafters, drafts and texts.

Target and drafter are random and the vocabulary is as large as a real one's, so that much of a round is what draws and
settles drafts. The ways take turns in random order with the same models, so that the machine's drift and the place of
the weights hit them alike; each turn at temperature 1 is compared with the one at temperature 0 beside it. A round
lasts from one forward of the target to the next.

    python experiments/benchmark temperature
    python experiments/benchmark temperature --head state
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import random
import statistics
from typing import Any

import torch
import transformers
from benchmark.loop import Rival, random_target, spread, take_turn

from hf_hyperdflash import HyperDFlashDrafter
from hf_hyperdflash.drafters.parts.heads import HEADS

WAYS: dict[str, dict[str, Any]] = {
    "T = 0": {"do_sample": False},
    "T = 1, top_k=50, transformers' default": {"do_sample": True, "temperature": 1.0, "top_k": 50},
    "T = 1, top_k=0": {"do_sample": True, "temperature": 1.0, "top_k": 0},
}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=6, help="of the target, at least 5")
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--vocab-size", type=int, default=49152)
    parser.add_argument("--block-size", type=int, default=8)
    parser.add_argument("--head", default="none", choices=["none", *HEADS], help="of the drafter, a sequential one")
    parser.add_argument("--tree-budget", type=int, help="nodes of a draft tree; chains if unset")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--prompt", type=int, default=32, help="tokens")
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--turns", type=int, default=24, help="of each way, after one that is not counted")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    transformers.logging.set_verbosity_error()
    target, order = random_target(arguments), random.Random(0)
    drafter = HyperDFlashDrafter.from_target(
        target, num_hidden_layers=2, num_draft_tokens=arguments.block_size - 1, mask_token_id=1,
        target_layer_ids=[1, arguments.layers // 2, arguments.layers - 2], sequential_head=arguments.head,
    )  # fmt: skip
    drafter.bind(target)
    prompt, count = torch.randint(2, arguments.vocab_size, (1, arguments.prompt)), arguments.max_new_tokens
    ways = {
        name: {**options, "assistant_model": drafter, "tree_budget": arguments.tree_budget}
        for name, options in WAYS.items()
    }
    rivals = [
        Rival(name, target, lambda ids, count, options=options: target.generate(ids, max_new_tokens=count, **options))
        for name, options in ways.items()
    ]
    for rival in rivals:
        rival.loop(prompt, count)
    for _ in range(arguments.turns):
        for rival in order.sample(rivals, len(rivals)):
            take_turn(rival, prompt, count)
    print(f"{datetime.date.today()}, {platform.platform()}, {platform.machine()} CPU seconds, {os.cpu_count()} cores")
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {arguments.threads} threads, float32")
    print(
        f"Qwen3 of {arguments.layers} layers, width {arguments.hidden_size}, vocabulary {arguments.vocab_size}, random"
    )
    print(
        f"block of {arguments.block_size - 1} drafts, head {arguments.head}, tree {arguments.tree_budget}, untrained"
    )
    print(f"a prompt of {arguments.prompt} tokens, {count} new ones, {arguments.turns} turns of each way\n")
    print("| rounds at | tokens a round | ms | times one at T = 0 (lowest to highest of turns) |\n|---|---:|---:|---|")
    of_each = [[sum(turn) / len(turn) for turn in rival.seconds] for rival in rivals]
    for rival, means in zip(rivals, of_each):
        tau = (count - 1) * arguments.turns / sum(map(len, rival.rounds))
        print(f"| {rival.name} | {tau:.2f} | {statistics.median(means) * 1e3:.2f} | {spread(means, of_each[0])} |")
