"""Train a tiny Qwen3, a dense target beside the tiny DeepSeek-V4: the same tokenizer, data and chat format.

    python tools/train_tiny_qwen3.py --data openai/gsm8k:main --data code.json --output tiny-qwen3

A killed run started again with the same `--output` goes on from its last checkpoint.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import torch
from train_tiny_target import packed_rows, target_messages
from transformers import (
    AutoTokenizer,
    Qwen3Config,
    Qwen3ForCausalLM,
    Trainer,
    TrainingArguments,
    default_data_collator,
)

from hf_hyperdflash.training.data.rows import load_rows

SHIPPED = Path(__file__).parent.parent / "examples" / "models" / "tiny-deepseek-v4"


def tiny_config(tokenizer, args: argparse.Namespace) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=args.hidden_size,
        intermediate_size=2 * args.hidden_size,
        num_hidden_layers=args.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", action="append", required=True, help="a .json/.jsonl path or Hub name; repeatable")
    parser.add_argument("--output", required=True, help="where the checkpoint and the training state go")
    parser.add_argument("--tokenizer", default=str(SHIPPED), help="a model's folder or Hub name")
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--seq-length", type=int, default=512)
    parser.add_argument("--learning-rate", type=float, default=2.5e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="bfloat16", help="of the saved checkpoint; training is in float32")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    rng, tokenizer = random.Random(args.seed), AutoTokenizer.from_pretrained(args.tokenizer)
    conversations = [target_messages(row, rng) for source in args.data for row in load_rows(source)]
    documents = [
        tokenizer(tokenizer.apply_chat_template(c, tokenize=False), add_special_tokens=False).input_ids
        for c in conversations
    ]
    torch.manual_seed(args.seed)
    target = Qwen3ForCausalLM(tiny_config(tokenizer, args))
    tokens = sum(map(len, documents))
    millions = sum(p.numel() for p in target.parameters()) / 1e6
    print(f"{len(documents)} documents, {tokens:,} tokens; target {millions:.2f} M parameters")
    rows = packed_rows(documents, args.seq_length - 2, args.seed).tolist()
    trainer = Trainer(
        target,
        TrainingArguments(
            args.output,
            max_steps=args.steps,
            per_device_train_batch_size=args.batch_size,
            learning_rate=args.learning_rate,
            lr_scheduler_type="cosine_with_min_lr",
            lr_scheduler_kwargs={"min_lr_rate": 0.05},
            warmup_steps=60,
            weight_decay=0.1,
            adam_beta2=0.95,
            logging_steps=min(50, args.steps),
            save_steps=100,
            save_total_limit=1,
            disable_tqdm=True,
            report_to="none",
            seed=args.seed,
        ),
        train_dataset=[{"input_ids": row, "labels": row} for row in rows],
        data_collator=default_data_collator,
    )
    trainer.train(resume_from_checkpoint=any(Path(args.output).glob("checkpoint-*")))
    target.generation_config.update(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    target.cpu().to(getattr(torch, args.dtype)).save_pretrained(args.output)
    tokenizer.save_pretrained(args.output)
    history = [{"step": line["step"], "loss": line["loss"]} for line in trainer.state.log_history if "loss" in line]
    facts = {**vars(args), "documents": len(documents), "tokens": tokens, "history": history}
    facts |= {"data": [Path(source).name for source in args.data], "output": Path(args.output).name}
    facts |= {"tokenizer": Path(args.tokenizer).name}
    (Path(args.output) / "training.json").write_text(json.dumps(facts, indent=1))
    print(f"Saved to {args.output}: loss {history[-1]['loss']:.3f}")


if __name__ == "__main__":
    main()
