"""Training throughput beside speculators' DFlash: the same drafter, rows, anchors a row, block and loss in one run.

    pip install --no-deps speculators==0.9.0 hs-connectors==0.9.0  # in an environment of its own, with the next line
    pip install openai sniffio loguru pydantic-settings
    python experiments/benchmark speculators --output speculators
    python experiments/benchmark speculators --device cuda --dtype bfloat16 --vocab-size 129280 --hidden-size 2048 \
        --attention sdpa flex_attention

Both train a vanilla DFlash drafter of the same weights for a random Qwen3 on one row a step; the target's features are
in memory for both. A step is forward, loss, backward, clipping and AdamW, as each package's trainer does them; the two
take turns, step by step. The loss is 0.1 cross-entropy and 0.9 total variation at every draft position, weighted
exp(-(k-1)/4). Before anything is timed, both must say the same total variation for the same anchors.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from datetime import date
from importlib.metadata import version

import speculators.models.dflash.core as theirs
import torch
import transformers
from speculators.losses import resolve_loss_config
from speculators.models.dflash import DFlashSpeculatorConfig
from transformers import Qwen3Config, Qwen3ForCausalLM

from hf_hyperdflash import HyperDFlashDrafter, HyperDFlashTrainer, HyperDFlashTrainingArguments
from hf_hyperdflash.benchmark.results import save_report
from hf_hyperdflash.benchmark.runner import hardware
from hf_hyperdflash.training.losses.loss import position_weights
from hf_hyperdflash.training.losses.objective import collate

DECAY = 4.0
WEIGHTS = {"ce": 0.1, "tv": 0.9}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab-size", type=int, default=32000)
    parser.add_argument("--hidden-size", type=int, default=512)
    parser.add_argument("--target-layers", type=int, default=6)
    parser.add_argument("--layers", type=int, default=2, help="of the drafter")
    parser.add_argument("--seq-length", type=int, default=1024)
    parser.add_argument("--anchors", type=int, default=128)
    parser.add_argument("--block-size", type=int, default=8)
    parser.add_argument("--steps", type=int, default=12, help="timed ones of each")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="float32", help="of the target, the features, and autocast")
    parser.add_argument("--attention", nargs="+", default=["sdpa"], help="of our drafter, a variant for each")
    parser.add_argument("--output", help="a folder for results.json and report.md")
    return parser.parse_args()


def random_target(args: argparse.Namespace) -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=args.vocab_size, hidden_size=args.hidden_size, intermediate_size=3 * args.hidden_size,
        num_hidden_layers=args.target_layers, num_attention_heads=args.hidden_size // 64,
        num_key_value_heads=max(1, args.hidden_size // 256), head_dim=64, tie_word_embeddings=False,
        initializer_range=0.1,
    )  # fmt: skip
    return Qwen3ForCausalLM(config).to(args.device, getattr(torch, args.dtype)).eval()


def our_step(
    target: Qwen3ForCausalLM, rows: list[dict], attention: str, args: argparse.Namespace
) -> tuple[HyperDFlashTrainer, Callable[[int], None]]:
    own = target.config
    drafter = HyperDFlashDrafter.from_target(
        target, reducer="fc", target_layer_ids=list(range(own.num_hidden_layers - 1)), mask_token_id=0,
        num_draft_tokens=args.block_size - 1, num_hidden_layers=args.layers, head_dim=own.head_dim,
        num_attention_heads=own.num_attention_heads, num_key_value_heads=own.num_key_value_heads,
        dtype=torch.float32,
    )  # fmt: skip
    drafter.set_attn_implementation(attention)
    arguments = HyperDFlashTrainingArguments(
        "unused", per_device_train_batch_size=1, num_anchors=args.anchors, ce_weight=WEIGHTS["ce"], kl_weight=0.0,
        tv_weight=WEIGHTS["tv"], loss_decay=DECAY, max_length=args.seq_length, report_to="none", save_strategy="no",
        use_cpu=args.device == "cpu",
    )  # fmt: skip
    plain = [{"input_ids": row["input_ids"].tolist(), "loss_mask": row["loss_mask"].tolist()} for row in rows]
    trainer = HyperDFlashTrainer(drafter, target, arguments, train_dataset=plain)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=1e-4)
    drafter.train()

    def step(number: int) -> None:
        batch = collate([rows[number % len(rows)]])
        batch = {name: value.to(args.device) for name, value in batch.items()}
        trainer.state.global_step = number
        batches, counts = trainer.get_batch_samples(iter([batch]), 1, torch.device(args.device))
        with torch.autocast(args.device, getattr(torch, args.dtype), enabled=args.dtype != "float32"):
            loss = trainer.compute_loss(drafter, batches[0], num_items_in_batch=counts)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        optimizer.step()

    return trainer, step


def their_step(
    drafter: HyperDFlashDrafter, target: Qwen3ForCausalLM, rows: list[dict], args: argparse.Namespace
) -> tuple[theirs.DFlashDraftModel, dict, Callable[[int], None]]:
    layers = Qwen3Config(**{**target.config.to_dict(), "num_hidden_layers": args.layers, "layer_types": None})
    layers._attn_implementation = "sdpa" if args.device == "cpu" else "simple_flex_attention"
    config = DFlashSpeculatorConfig(
        transformer_layer_config=layers, draft_vocab_size=args.vocab_size, block_size=args.block_size,
        aux_hidden_state_layer_ids=[i + 1 for i in drafter.target_layer_ids], mask_token_id=0,
    )  # fmt: skip
    model = theirs.DFlashDraftModel(config).to(args.device)
    shared = {
        "embed_tokens.weight": target.model.embed_tokens.weight,
        "verifier_norm.weight": target.model.norm.weight,
    }
    shared |= dict.fromkeys(("lm_head.weight", "verifier_lm_head.weight"), target.lm_head.weight)
    told = model.load_state_dict({**drafter.state_dict(), **shared}, strict=False)
    sizes = [sum(p.numel() for p in each.parameters() if p.requires_grad) for each in (drafter, model)]
    if told.unexpected_keys or set(told.missing_keys) - {"rotary_emb.inv_freq"} or sizes[0] != sizes[1]:
        raise SystemExit(f"The drafters differ: {told}, {sizes} parameters.")
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    implementation = "eager" if args.device == "cpu" else "fused"
    losses = resolve_loss_config(json.dumps(WEIGHTS), implementation)
    options = {"loss_config": losses, "gamma": DECAY, "max_anchors": args.anchors}
    model.train()

    def step(number: int) -> None:
        with torch.autocast(args.device, getattr(torch, args.dtype), enabled=args.dtype != "float32"):
            _, loss, _ = model(**their_batch(rows[number % len(rows)], args), **options)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return model, {**options, "loss_config": {"tv": (losses["tv"][0], 1.0)}}, step


def their_batch(row: dict, args: argparse.Namespace) -> dict[str, torch.Tensor]:
    """A row in their layout: the features of the layers beside each other, and the last layer's output."""
    batch = {
        "input_ids": row["input_ids"], "loss_mask": row["loss_mask"], "position_ids": row["position_ids"],
        "document_ids": torch.zeros_like(row["input_ids"]), "hidden_states": row["residual"][:, :-1].flatten(1),
        "verifier_last_hidden_states": row["residual"][:, -1],
    }  # fmt: skip
    return {name: value.unsqueeze(0).to(args.device) for name, value in batch.items()}


@torch.no_grad()
def check_same_loss(
    trainer: HyperDFlashTrainer, model: theirs.DFlashDraftModel, options: dict, row: dict, args: argparse.Namespace
) -> None:
    """Both packages' total variation of the same blocks; theirs is divided by the number of positions, ours by their
    weights."""
    batch = {name: value.to(args.device) for name, value in collate([row]).items()}
    trainer.objective.add_anchors(batch, 0)
    whole = (batch["labels"][0] != -100).all(-1)
    batch["anchors"], batch["labels"] = batch["anchors"][:, whole], batch["labels"][:, whole]
    anchors = batch["anchors"][0]
    select, theirs.select_anchors = theirs.select_anchors, lambda *_: (anchors, torch.ones_like(anchors).bool())
    loss = model(**their_batch(row, args), **{**options, "max_anchors": len(anchors)})[1].item()
    theirs.select_anchors = select
    weights = position_weights(args.block_size - 1, DECAY)
    ours = trainer.compute_loss(trainer.model, batch, return_outputs=True)[1].tv.item() * weights.mean().item()
    print(f"total variation of {len(anchors)} equal blocks, weighted: ours {ours:.6f}, theirs {loss:.6f}\n")
    if abs(ours - loss) > 1e-3 * loss:
        raise SystemExit("They do not compute the same.")


def main() -> None:
    args = parse_args()
    target = random_target(args)
    generator = torch.Generator().manual_seed(1)
    rows = []
    for _ in range(4):
        ids = torch.randint(1, args.vocab_size, (args.seq_length,), generator=generator)
        mask = torch.arange(args.seq_length) >= args.seq_length // 4
        rows.append({"input_ids": ids, "loss_mask": mask, "position_ids": torch.arange(args.seq_length)})
    steps: dict[str, Callable[[int], None]] = {}
    for attention in args.attention:
        trainer, steps[f"ours, {attention}"] = our_step(target, rows, attention, args)
    for row in rows:
        ids, positions = (row[name].unsqueeze(0).to(args.device) for name in ("input_ids", "position_ids"))
        row["residual"] = trainer.residual({"input_ids": ids, "position_ids": positions})[0].cpu()
    model, options, steps[f"speculators, {'sdpa' if args.device == 'cpu' else 'flex, compiled'}"] = their_step(
        trainer.model, target, rows, args
    )
    check_same_loss(trainer, model, options, rows[0], args)
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(args.warmup + args.steps):
        for name in list(steps) if number % 2 else reversed(steps):
            began = time.perf_counter()
            steps[name](number)
            if args.device != "cpu":
                torch.cuda.synchronize()
            if number >= args.warmup:
                seconds[name].append(time.perf_counter() - began)
    head = (
        f"{date.today()}, {hardware(args.device)}, torch {torch.__version__}, transformers "
        f"{transformers.__version__}, "
        f"speculators {version('speculators')}; {args.dtype}, vocabulary {args.vocab_size:,}, width "
        f"{args.hidden_size}, {args.layers} layers that read {args.target_layers - 1} of the target's, rows of "
        f"{args.seq_length} tokens, {args.anchors} anchors x {args.block_size}; {args.steps} steps of each in turn"
    )
    report = f"# Training steps beside speculators'\n\n{head}\n\n{table(seconds, args)}\n"
    print(report)
    save_report(report, args, seconds=seconds)


def table(seconds: dict[str, list[float]], args: argparse.Namespace) -> str:
    lines = ["| | tokens/s: median (lowest to highest) | blocks/s | against speculators |", "|---|---:|---:|---:|"]
    base = statistics.median(list(seconds.values())[-1])
    for name, times in seconds.items():
        middle = statistics.median(times)
        rates = [args.seq_length / each for each in (middle, max(times), min(times))]
        lines.append(
            f"| {name} | {rates[0]:,.0f} ({rates[1]:,.0f} to {rates[2]:,.0f}) | {args.anchors / middle:,.0f} | "
            f"{base / middle:.2f} |"
        )
    return "\n".join(lines)
