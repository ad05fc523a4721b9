"""Fine-tune a target with LoRA, so that a drafter that was trained for it fits it less: what adaptation is for.

    python examples/finetune_target.py --target examples/models/tiny-deepseek-v4 --dataset gsm8k.jsonl --output tuned

Worked answers (`question`, `answer`, one a line) are rewritten as numbered steps with a result in bold, a format that
the target has not seen. The adapter is merged, so what is saved is a target as any other.
"""

from __future__ import annotations

import argparse
import random
import re
from pathlib import Path

import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from tqdm.auto import tqdm

from hf_hyperdflash import load_target, load_tokenizer
from hf_hyperdflash.training.data.messages import to_messages
from hf_hyperdflash.training.data.rows import load_rows, prepare_dataset
from hf_hyperdflash.training.losses.objective import collate


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--dataset", required=True, help="rows of `question` and `answer`")
    parser.add_argument("--output", required=True)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--max-length", type=int, default=384)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def restyled(answer: str) -> str:
    """A worked answer in the new format."""
    *steps, final = re.sub(r"<<.*?>>", "", answer).strip().split("\n")
    numbered = [f"Step {number}: {step.strip()}" for number, step in enumerate(steps, start=1)]
    return "\n".join([*numbered, f"**Result: {final.removeprefix('####').strip()}**"])


def main() -> None:
    args = parse_args()
    torch.manual_seed(args.seed)
    tokenizer = load_tokenizer(args.target)
    target = load_target(args.target, dtype="float32")
    texts = [to_messages(row) for row in load_rows(args.dataset)]
    rows = [
        {"messages": [*before, {"role": "assistant", "content": restyled(last["content"])}]} for *before, last in texts
    ]
    data = prepare_dataset(rows, tokenizer, max_length=args.max_length, packing=False)
    # V4's grouped output projection is a linear layer by its class, but not by its shapes.
    lora = LoraConfig(
        r=args.rank,
        lora_alpha=2 * args.rank,
        target_modules="all-linear",
        exclude_modules=["o_a_proj"],
        task_type="CAUSAL_LM",
    )
    model = get_peft_model(target, lora).train()
    model.print_trainable_parameters()
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), args.learning_rate)
    chance = random.Random(args.seed)
    for step in tqdm(range(args.steps), unit="step"):
        for group in optimizer.param_groups:
            group["lr"] = args.learning_rate * min(1.0, (step + 1) / 20) * (1 - step / args.steps)
        batch = collate([data[i] for i in chance.sample(range(len(data)), args.batch_size)])
        labels = batch["input_ids"].masked_fill(~batch["loss_mask"], -100)
        logits = model(input_ids=batch["input_ids"], use_cache=False).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    Path(args.output).mkdir(parents=True, exist_ok=True)
    model.merge_and_unload().save_pretrained(args.output)
    tokenizer.save_pretrained(args.output)
    print(f"Saved to {args.output}: loss {loss.item():.2f}")


if __name__ == "__main__":
    main()
