"""Tune a DeepSeek-V4's own MTP block on the target's answers, for several steps ahead: a baseline at its best.

    python experiments/train_mtp.py --target examples/models/tiny-deepseek-v4 --dataset answers.jsonl --output mtp

V4's block was trained one step ahead, on whatever text the target was trained on. Here it is fed its own streams
(`--steps-ahead` times) over rows of the target's own answers, with cross-entropy at every step; step j reads what step
j - 1 wrote at the same entries. Attention sees the entries of its own step, at inference those of the first: an
approximation. Benchmark it with `hf-hyperdflash benchmark --drafter "MTP tuned (3)=mtp"`.
"""

from __future__ import annotations

import argparse
import math
from itertools import chain, islice, repeat
from pathlib import Path

import torch
import torch.nn.functional as F
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_hyperdflash import DeepseekV4MTPDrafter
from hf_hyperdflash.training.data.rows import load_rows, prepare_dataset
from hf_hyperdflash.training.features.store import FeatureCache
from hf_hyperdflash.training.losses.objective import Batch, collate


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--dataset", required=True, help="the target's own answers (`hf-hyperdflash answers`)")
    parser.add_argument("--output", required=True, help="folder of the tuned block; features are cached beside it")
    parser.add_argument("--feature-cache-dir", help="a FeatureCache of these rows; <output>/features if unset")
    parser.add_argument("--steps-ahead", type=int, default=3)
    parser.add_argument("--step-decay", type=float, default=4.0, help="step j weighs exp(-(j-1)/step_decay)")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--learning-rate", type=float, default=5e-4)
    parser.add_argument("--warmup-steps", type=int, default=50)
    parser.add_argument("--max-length", type=int, default=512)
    parser.add_argument("--save-steps", type=int, default=500, help="a killed run goes on from its last such step")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def chain_losses(drafter: DeepseekV4MTPDrafter, target, batch: Batch, steps_ahead: int) -> list[torch.Tensor]:
    """Cross-entropy of each step; step j at entry t reads the token at t + j and predicts the one at t + j + 1."""
    ids, mask, streams = batch["input_ids"], batch["loss_mask"], batch["residual"].float()
    losses = []
    for step in range(1, steps_ahead + 1):
        length = ids.shape[1] - step - 1
        if length < 1:
            break
        embeds = target.get_input_embeddings()(ids[:, step : step + length])
        positions = torch.arange(step - 1, step - 1 + length)[None]
        streams = drafter(streams[:, :length], embeds, positions)
        labels = ids[:, step + 1 : step + 1 + length].masked_fill(~mask[:, step + 1 : step + 1 + length], -100)
        at = labels != -100
        logits = target.get_output_embeddings()(drafter.collapse(streams[at].unsqueeze(0)))
        losses.append(F.cross_entropy(logits[0].float(), labels[at]))
    return losses


def main() -> None:
    args = parse_args()
    torch.manual_seed(args.seed)
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    target = AutoModelForCausalLM.from_pretrained(args.target, dtype=torch.float32).eval().requires_grad_(False)
    drafter = DeepseekV4MTPDrafter.from_target(target, dtype=torch.float32).train()
    drafter.set_experts_implementation("grouped_mm")
    rows = prepare_dataset(load_rows(args.dataset), tokenizer, max_length=args.max_length, packing=False)
    cache = FeatureCache.write(args.feature_cache_dir or Path(args.output) / "features", rows, target)
    loader = torch.utils.data.DataLoader(cache, args.batch_size, shuffle=True, collate_fn=collate)
    optimizer = torch.optim.AdamW(drafter.parameters(), args.learning_rate, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda i: min(1, (i + 1) / args.warmup_steps) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * i / args.steps))),
    )
    checkpoint, done = Path(args.output) / "checkpoint.pt", 0
    checkpoint.parent.mkdir(parents=True, exist_ok=True)
    states = {"drafter": drafter, "optimizer": optimizer, "schedule": schedule}
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        done = saved.pop("step")
        for name, state in saved.items():
            states[name].load_state_dict(state)
        torch.manual_seed(args.seed + done)  # not the rows of the first steps again
    with tqdm(total=args.steps, initial=done, unit="step") as progress:
        for batch in islice(chain.from_iterable(repeat(loader)), args.steps - done):
            losses = chain_losses(drafter, target, batch, args.steps_ahead)
            sum(math.exp(-j / args.step_decay) * loss for j, loss in enumerate(losses)).backward()
            torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            progress.update()
            if progress.n % 20 == 0:
                progress.set_postfix_str(" ".join(f"{loss.item():.2f}" for loss in losses))
            if progress.n % args.save_steps == 0 and progress.n < args.steps:
                saved = {name: state.state_dict() for name, state in states.items()}
                torch.save(saved | {"step": progress.n}, checkpoint.with_suffix(".new"))
                checkpoint.with_suffix(".new").replace(checkpoint)  # whole or not at all
    drafter.save_pretrained(args.output)
    tokenizer.save_pretrained(args.output)
    checkpoint.unlink(missing_ok=True)
    print(f"Saved to {args.output}: loss of each step {' '.join(f'{loss.item():.2f}' for loss in losses)}")


if __name__ == "__main__":
    main()
