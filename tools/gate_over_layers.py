"""An untrained drafter with a gate over several layers of a target that has no gate to inherit, for training on.

    python tools/gate_over_layers.py --target examples/models/tiny-qwen3 --target-layer-ids 1 3 5 -1 \
        --sequential-head state --layers 2 --output fresh
    hf-hyperdflash train --target examples/models/tiny-qwen3 --drafter fresh --dataset answers.jsonl ...

`HyperDFlashDrafter.from_target` refuses a gate there: the paper's is a copy of the target's. This one starts even.
"""

from __future__ import annotations

import argparse

import torch

from hf_hyperdflash import HyperDFlashDrafter, load_target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="path or Hub id")
    parser.add_argument("--target-layer-ids", type=int, nargs="+", required=True, help="-1 is the last")
    parser.add_argument("--sequential-head", default="none")
    parser.add_argument("--layers", type=int, default=2, help="of the drafter")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", required=True, help="folder")
    args = parser.parse_args()
    target = load_target(args.target, dtype=torch.float32)
    torch.manual_seed(args.seed)
    fitted = HyperDFlashDrafter.from_target(
        target, reducer="fc", target_layer_ids=args.target_layer_ids, num_hidden_layers=args.layers,
        sequential_head=args.sequential_head,
    )  # fmt: skip
    fitted.config.reducer = "hc_gate"
    HyperDFlashDrafter(fitted.config).save_pretrained(args.output)


if __name__ == "__main__":
    main()
