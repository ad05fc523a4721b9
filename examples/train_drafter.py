"""Train a HyperDFlash drafter on a target's own answers (Eq. 3: cross-entropy plus LM-head distillation).

    python examples/train_drafter.py --target tiny-v4 --data answers.jsonl --output tiny-v4-hyperdflash

The target's residuals are computed once and kept in memory in bfloat16 (their size is printed first). A killed run
started again with the same `--output` goes on from its last checkpoint.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from pathlib import Path

import torch
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_hyperdflash import HyperDFlashDrafter, capture_residual, drafter_loss
from hf_hyperdflash.data import block_labels, block_mask, load_rows, sample_anchors, to_messages
from hf_hyperdflash.target import logits_from_residual


def encode(tokenizer, row: dict, max_length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids `[seq]` of a conversation and a mask that is `True` on the last assistant turn."""
    messages = to_messages(row)
    prompt = tokenizer.apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=True)
    full = prompt + messages[-1]["content"] + ("" if row.get("truncated") else tokenizer.eos_token)
    start = len(tokenizer(prompt, add_special_tokens=False).input_ids)
    ids = torch.tensor(tokenizer(full, add_special_tokens=False).input_ids[:max_length])
    return ids, torch.arange(len(ids)) >= start


@torch.no_grad()
def add_residuals(target, examples: list[dict], batch_size: int, dtype: torch.dtype) -> None:
    """Store each example's pre-collapse residual `[seq, hc_mult, hidden]`. Padding on the right changes nothing: every
    part of V4 is causal."""
    order = sorted(examples, key=lambda example: len(example["ids"]))
    for first in tqdm(range(0, len(order), batch_size), desc="residuals", unit="batch"):
        batch = order[first : first + batch_size]
        ids = torch.nn.utils.rnn.pad_sequence([e["ids"] for e in batch], batch_first=True).to(target.device)
        with capture_residual(target) as residuals:
            target.base_model(input_ids=ids, use_cache=False)
        for example, residual in zip(batch, residuals[0]):
            example["residual"] = residual[: len(example["ids"])].to(dtype).cpu()


def collate(batch: list[dict], device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    def pad(name):
        return torch.nn.utils.rnn.pad_sequence([e[name] for e in batch], batch_first=True).to(device)

    return pad("ids"), pad("loss_mask"), pad("residual").float()


def block_logits(drafter, target, ids, residual, anchors) -> torch.Tensor:
    """Draft logits `[batch, anchors, drafts, vocab]` through the same functions that generation uses."""
    size = drafter.config.block_size
    tokens = torch.full((*anchors.shape, size), drafter.config.mask_token_id, device=ids.device)
    tokens[..., 0] = ids.gather(1, anchors.clamp(min=0))
    positions = anchors.clamp(min=0).unsqueeze(-1) + torch.arange(size, device=ids.device)
    context_positions = torch.arange(ids.shape[1], device=ids.device).expand(ids.shape)
    hidden = drafter(
        target.get_input_embeddings()(tokens.flatten(1)),
        positions.flatten(1),
        drafter.encode_context(residual, context_positions),
        block_mask(anchors, size, ids.shape[1], drafter.config.sliding_window),
    )
    return target.get_output_embeddings()(hidden.unflatten(1, (-1, size))[:, :, 1:])


def batch_loss(drafter, target, batch, args, generator) -> tuple[torch.Tensor, list[int]]:
    """Loss of one batch and, per block, how many drafts in a row equal the target's own tokens."""
    ids, loss_mask, residual = collate(batch, target.device)
    anchors = sample_anchors(loss_mask, args.num_anchors, generator)
    labels = block_labels(ids, loss_mask, anchors, drafter.config.max_draft_tokens)
    logits = block_logits(drafter, target, ids, residual, anchors)
    with torch.no_grad():
        rows = torch.arange(ids.shape[0], device=ids.device).view(-1, 1, 1)
        steps = torch.arange(args.kl_positions, device=ids.device)
        at = (anchors.clamp(min=0).unsqueeze(-1) + steps).clamp(max=ids.shape[1] - 1)
        teacher = logits_from_residual(target, residual[rows, at].flatten(0, 1))
        valid = (labels != -100).all(-1)
        matched = ((logits.argmax(-1) == labels).long().cumprod(-1).sum(-1))[valid]
    loss = drafter_loss(logits.flatten(0, 1), labels.flatten(0, 1), teacher, args.kl_weight, args.kl_temperature)
    return loss, matched.tolist()


@torch.no_grad()
def teacher_forced_tau(drafter, target, examples: list[dict], args) -> float:
    """Estimate of tau on answers that were not trained on: 1 + mean accepted drafts over random anchors."""
    generator = torch.Generator().manual_seed(0)
    matched: list[int] = []
    for first in range(0, len(examples), args.batch_size):
        matched += batch_loss(drafter, target, examples[first : first + args.batch_size], args, generator)[1]
    return 1 + sum(matched) / max(len(matched), 1)


def train(drafter, target, train_set, held_out, args) -> list[dict]:
    decayed = [p for p in drafter.parameters() if p.ndim >= 2]
    plain = [p for p in drafter.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.01}, {"params": plain, "weight_decay": 0.0}], betas=(0.9, 0.95)
    )
    steps_per_epoch = math.ceil(len(train_set) / args.batch_size)
    total = steps_per_epoch * args.epochs
    checkpoint = Path(args.output) / "training_state.pt"
    done, history = 0, []
    if checkpoint.exists():
        state = torch.load(checkpoint, map_location=target.device)
        drafter.load_state_dict(state["drafter"])
        optimizer.load_state_dict(state["optimizer"])
        done, history = state["epoch"], state["history"]
        print(f"Going on from epoch {done} of {checkpoint}")
    progress = tqdm(total=total, initial=done * steps_per_epoch, desc="drafter", unit="step")
    for epoch in range(done, args.epochs):
        order = list(range(len(train_set)))
        random.Random(args.seed + epoch).shuffle(order)
        generator = torch.Generator().manual_seed(args.seed + epoch)
        losses, matched = [], []
        for index in range(steps_per_epoch):
            step = epoch * steps_per_epoch + index
            warmup = min(1.0, (step + 1) / args.warmup_steps)
            for group in optimizer.param_groups:
                group["lr"] = (
                    args.learning_rate * warmup * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / total)))
                )
            chosen = order[index * args.batch_size : (index + 1) * args.batch_size]
            loss, hits = batch_loss(drafter, target, [train_set[i] for i in chosen], args, generator)
            if not torch.isfinite(loss):
                raise RuntimeError(
                    f"Loss is {loss.item()} at step {step}: lower --learning-rate (now {args.learning_rate}). The last "
                    f"good state is {checkpoint}."
                )
            loss.backward()
            torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            matched += hits
            progress.update()
            if index % 10 == 9:
                tau = 1 + sum(matched[-2000:]) / max(len(matched[-2000:]), 1)
                progress.set_postfix(loss=f"{sum(losses[-50:]) / len(losses[-50:]):.3f}", tau=f"{tau:.2f}")
        tau = teacher_forced_tau(drafter, target, held_out, args)
        history.append({"epoch": epoch + 1, "loss": sum(losses) / len(losses), "teacher_forced_tau": tau})
        progress.write(f"epoch {epoch + 1}: loss {history[-1]['loss']:.3f}, teacher-forced tau on held-out {tau:.2f}")
        checkpoint.parent.mkdir(parents=True, exist_ok=True)
        partial = checkpoint.with_suffix(".partial")
        state = {"drafter": drafter.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({**state, "epoch": epoch + 1, "history": history}, partial)
        partial.replace(checkpoint)
    return history


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="path or Hub id")
    parser.add_argument("--data", action="append", required=True, help="the target's own answers; repeatable")
    parser.add_argument("--output", required=True)
    parser.add_argument("--layers", type=int, default=2, help="drafter layers")
    parser.add_argument("--reducer", choices=["hc_gate", "fc"], help="default: the gate where it can be inherited")
    parser.add_argument("--num-draft-tokens", type=int, default=6)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--num-anchors", type=int, default=24, help="blocks per sequence and step")
    parser.add_argument("--learning-rate", type=float, default=8e-4)
    parser.add_argument("--warmup-steps", type=int, default=50)
    parser.add_argument("--kl-weight", type=float, default=0.15)
    parser.add_argument("--kl-positions", type=int, default=2)
    parser.add_argument("--kl-temperature", type=float, default=1.0)
    parser.add_argument("--max-length", type=int, default=512)
    parser.add_argument("--held-out", type=int, default=64, help="examples kept for the estimate of tau")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="bfloat16", help="of the saved drafter; training is in float32")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    target = AutoModelForCausalLM.from_pretrained(args.target, dtype=torch.float32).to(device).eval()
    target.requires_grad_(False)
    examples = []
    for row in (row for source in args.data for row in load_rows(source)):
        ids, loss_mask = encode(tokenizer, row, args.max_length)
        if loss_mask.sum() > 1:
            examples.append({"ids": ids, "loss_mask": loss_mask})
    random.Random(args.seed).shuffle(examples)
    tokens = sum(len(e["ids"]) for e in examples)
    answer_tokens = sum(int(e["loss_mask"].sum()) for e in examples)
    size = tokens * target.config.hc_mult * target.config.hidden_size * 2
    print(
        f"{len(examples)} examples, {tokens:,} tokens, {answer_tokens:,} of them answers; residuals {size / 1e9:.2f} GB"
    )
    add_residuals(target, examples, args.batch_size, torch.bfloat16)
    torch.manual_seed(args.seed)
    drafter = HyperDFlashDrafter.from_target(
        target,
        reducer=args.reducer,
        mask_token_id=tokenizer.mask_token_id,
        num_draft_tokens=args.num_draft_tokens,
        num_hidden_layers=args.layers,
        dtype=torch.float32,
        target_name_or_path=Path(args.target).name if Path(args.target).exists() else args.target,
    )
    print(f"drafter: {sum(p.numel() for p in drafter.parameters()) / 1e6:.2f} M parameters, {drafter.config.reducer}")
    history = train(drafter, target, examples[args.held_out :], examples[: args.held_out], args)
    output = Path(args.output)
    drafter.save_pretrained(output)
    # Loading casts what may be cast; the gate stays float32.
    HyperDFlashDrafter.from_pretrained(output, dtype=args.dtype).save_pretrained(output)
    facts = {**vars(args), "examples": len(examples), "tokens": tokens, "answer_tokens": answer_tokens}
    facts |= {"data": [Path(s).name for s in args.data], "target": Path(args.target).name, "output": output.name}
    (output / "training.json").write_text(json.dumps({**facts, "history": history}, indent=1))
    print(f"Saved to {output}")


if __name__ == "__main__":
    main()
