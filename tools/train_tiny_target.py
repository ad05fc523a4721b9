"""Train a tiny DeepSeek-V4 (tokenizer, target and native MTP head) from chat text.

    python tools/train_tiny_target.py --data openai/gsm8k:main --data code.json --output tiny-v4

Every mechanism of DeepSeek-V4 is present: hyper-connections with Sinkhorn, sliding, compressed-sparse and
heavily-compressed attention, hash and top-k mixtures of experts, and the MTP head, whose tensors are stored in the
same checkpoint under DeepSeek's `mtp.0.*` names (transformers ignores them on load). A killed run started again with
the same `--output` goes on from its last checkpoint.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm.auto import tqdm
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM, PreTrainedTokenizerFast
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HyperConnection

from hf_hyperdflash import DeepseekV4MTPDrafter
from hf_hyperdflash.training.data.messages import Message, to_messages
from hf_hyperdflash.training.data.rows import load_rows

BOS, EOS, PAD, MASK = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>", "<｜mask｜>"
USER, ASSISTANT, THINK, END_THINK = "<｜User｜>", "<｜Assistant｜>", "<think>", "</think>"
SPECIAL_TOKENS = [BOS, EOS, PAD, MASK, USER, ASSISTANT, THINK, END_THINK]
BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'system' %}{{ m.content }}"
    "{% elif m.role == 'user' %}{{ '" + USER + "' + m.content }}"
    "{% else %}{{ '" + ASSISTANT + "' }}"
    "{% if m.reasoning_content %}{{ '" + THINK + "' }}{% else %}{{ '" + END_THINK + "' }}{% endif %}"
    "{% generation %}{% if m.reasoning_content %}{{ m.reasoning_content + '" + END_THINK + "' }}{% endif %}"
    "{{ m.content + eos_token }}{% endgeneration %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '" + ASSISTANT + "' }}"
    "{{ '" + THINK + "' if thinking or enable_thinking else '" + END_THINK + "' }}{% endif %}"
)


def target_messages(row: dict, rng: random.Random) -> list[Message]:
    """One row as messages. Worked answers ask for a box half of the time, and think a quarter of the time."""
    messages = to_messages(row)
    if "question" in row:
        if rng.random() < 0.5:
            messages[0]["content"] += BOXED
        steps, _, final = messages[1]["content"].rpartition("\n")
        if steps and rng.random() < 0.25:
            messages[1] = {"role": "assistant", "reasoning_content": steps, "content": final}
    return messages


def train_tokenizer(texts: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    # Single digits: a tiny model can only learn arithmetic digit by digit.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=SPECIAL_TOKENS,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        mask_token=MASK,
        additional_special_tokens=[USER, ASSISTANT, THINK, END_THINK],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def tiny_config(tokenizer: PreTrainedTokenizerFast, args: argparse.Namespace) -> DeepseekV4Config:
    pattern = ["sliding_attention"] + ["compressed_sparse_attention", "heavily_compressed_attention"] * args.layers
    return DeepseekV4Config(
        vocab_size=len(tokenizer),
        hidden_size=args.hidden_size,
        num_hidden_layers=args.layers,
        layer_types=pattern[: args.layers],
        mlp_layer_types=(["hash_moe"] + ["moe"] * args.layers)[: args.layers],
        compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 16},
        sliding_window=64,
        num_attention_heads=4,
        head_dim=64,
        partial_rotary_factor=0.5,
        q_lora_rank=128,
        o_groups=2,
        o_lora_rank=64,
        index_n_heads=4,
        index_head_dim=32,
        index_topk=64,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=args.hidden_size * 3 // 4,
        max_position_embeddings=2048,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def build_models(config: DeepseekV4Config, seed: int) -> tuple[DeepseekV4ForCausalLM, DeepseekV4MTPDrafter]:
    torch.manual_seed(seed)
    target = DeepseekV4ForCausalLM(config)
    target.set_experts_implementation("grouped_mm")
    mtp = DeepseekV4MTPDrafter(config)
    for name, table in target.named_buffers():
        if name.endswith("tid2eid"):  # each token id goes to a fixed random pair of experts
            scores = torch.rand(config.vocab_size, config.n_routed_experts)
            table.copy_(scores.topk(config.num_experts_per_tok).indices)
    return target, mtp


def packed_rows(documents: list[list[int]], length: int, seed: int) -> torch.Tensor:
    """Shuffle and concatenate the documents into rows `[num_rows, length + 2]` (two more for the MTP labels)."""
    order = list(range(len(documents)))
    random.Random(seed).shuffle(order)
    stream = [token for i in order for token in documents[i]]
    width = length + 2
    return torch.tensor(stream[: len(stream) // width * width]).view(-1, width)


def joint_loss(target: DeepseekV4ForCausalLM, mtp: DeepseekV4MTPDrafter, rows: torch.Tensor, mtp_weight: float):
    """Next-token loss of the target plus the MTP head's loss on the token after next."""
    length = rows.shape[1] - 2
    captured: dict[str, torch.Tensor] = {}
    hook = target.model.hc_head.register_forward_pre_hook(lambda _, args: captured.update(residual=args[0]))
    try:
        logits = target(input_ids=rows[:, :length], use_cache=False).logits
    finally:
        hook.remove()
    vocab = logits.shape[-1]
    target_loss = F.cross_entropy(logits.view(-1, vocab).float(), rows[:, 1 : length + 1].reshape(-1))
    embeds = target.model.embed_tokens(rows[:, 1 : length + 1])
    hidden = mtp.collapse(mtp(captured["residual"], embeds))
    mtp_logits = target.lm_head(hidden)
    mtp_loss = F.cross_entropy(mtp_logits.view(-1, vocab).float(), rows[:, 2:].reshape(-1))
    return target_loss + mtp_weight * mtp_loss, target_loss.detach(), mtp_loss.detach()


@torch.no_grad()
def balance_experts(target: DeepseekV4ForCausalLM, input_ids: torch.Tensor, rate: float = 0.01) -> None:
    """DeepSeek's loss-free balancing: nudge each expert's selection bias against its load on `input_ids`."""
    hooks, loads = [], {}
    for layer in target.model.layers:
        gate = layer.mlp.gate
        if hasattr(gate, "e_score_correction_bias"):
            hooks.append(gate.register_forward_hook(lambda g, _, out: loads.update({g: out[2].flatten()})))
    try:
        with torch.compiler.set_stance("force_eager"):
            target.model(input_ids=input_ids, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    for gate, experts in loads.items():
        load = experts.bincount(minlength=gate.num_experts).float()
        gate.e_score_correction_bias += rate * (load.mean() - load).sign()


def learning_rate(step: int, args: argparse.Namespace) -> float:
    warmup = min(1.0, (step + 1) / args.warmup_steps)
    return args.learning_rate * warmup * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / args.steps)))


def compile_hyper_connections(target: DeepseekV4ForCausalLM, mtp: DeepseekV4MTPDrafter) -> None:
    """Compile the Sinkhorn loops, a hundred tiny operations a layer each: a third more tokens per second on a CPU.
    Compiling whole blocks is slower there: inductor's backward recomputes the loop inside larger kernels."""
    for module in [*target.modules(), *mtp.modules()]:
        if isinstance(module, DeepseekV4HyperConnection):
            module.compile(dynamic=False)


def train(target, mtp, documents, args, device) -> list[dict]:
    parameters = [*target.parameters(), *mtp.parameters()]
    decayed = [p for p in parameters if p.ndim >= 2]
    plain = [p for p in parameters if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}],
        lr=args.learning_rate,
        betas=(0.9, 0.95),
    )
    checkpoint = Path(args.output) / "training_state.pt"
    step, history = 0, []
    if checkpoint.exists():
        state = torch.load(checkpoint, map_location=device)
        target.load_state_dict(state["target"])
        mtp.load_state_dict(state["mtp"])
        optimizer.load_state_dict(state["optimizer"])
        step, history = state["step"], state["history"]
        print(f"Going on from step {step} of {checkpoint}")
    if args.compile:
        compile_hyper_connections(target, mtp)
    epoch, rows = -1, torch.empty(0)
    progress = tqdm(total=args.steps, initial=step, desc="target", unit="step")
    while step < args.steps:
        tokens_per_epoch = packed_rows(documents, args.seq_length, args.seed).shape[0] // args.batch_size
        if step // tokens_per_epoch != epoch:
            epoch = step // tokens_per_epoch
            rows = packed_rows(documents, args.seq_length, args.seed + epoch)
        first = step % tokens_per_epoch * args.batch_size
        batch = rows[first : first + args.batch_size].to(device)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss, target_loss, mtp_loss = joint_loss(target, mtp, batch, args.mtp_weight)
        if not torch.isfinite(loss):
            raise RuntimeError(
                f"Loss is {loss.item()} at step {step}: lower --learning-rate (now {args.learning_rate}). "
                f"The last good state is {checkpoint}."
            )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step % 8 == 0:
            balance_experts(target, batch[:1, : args.seq_length])
        if step % 10 == 0 or step == args.steps:
            history.append({"step": step, "loss": target_loss.item(), "mtp_loss": mtp_loss.item()})
            progress.set_postfix(loss=f"{target_loss.item():.3f}", mtp=f"{mtp_loss.item():.3f}")
        progress.update()
        if step % args.save_every == 0 or step == args.steps:
            save_state(checkpoint, target, mtp, optimizer, step, history)
    return history


def save_state(path: Path, target, mtp, optimizer, step: int, history: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")  # a kill while writing must not cost the last good state
    state = {"target": target.state_dict(), "mtp": mtp.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save({**state, "step": step, "history": history}, partial)
    partial.replace(path)


def save_checkpoint(target, mtp, tokenizer, output: Path, dtype: torch.dtype) -> None:
    """Write the target in `dtype` (float32 where V4 demands it) with the MTP tensors in the same file."""
    target.cpu().float().save_pretrained(output)
    shipped = DeepseekV4ForCausalLM.from_pretrained(output, dtype=dtype)  # loading casts only what V4 allows
    shipped.generation_config.update(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    shipped.save_pretrained(output)
    weights = output / "model.safetensors"
    tensors = load_file(weights)
    keep_float32 = ("hc_", "norm", "sink", "bias", "ape")
    for name, tensor in mtp.deepseek_state_dict().items():
        tensor = tensor.detach().float().cpu()
        tensors[name] = tensor if any(part in name for part in keep_float32) else tensor.to(dtype)
    save_file(tensors, weights, metadata={"format": "pt"})
    tokenizer.save_pretrained(output)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", action="append", required=True, help="a .json/.jsonl path or Hub name; repeatable")
    parser.add_argument("--output", required=True, help="where the checkpoint and the training state go")
    parser.add_argument("--vocab-size", type=int, default=2048)
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2200)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--seq-length", type=int, default=256)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--warmup-steps", type=int, default=60)
    parser.add_argument("--mtp-weight", type=float, default=0.3)
    parser.add_argument("--save-every", type=int, default=100, help="steps between resumable states")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="bfloat16", help="of the saved checkpoint; training is in float32")
    parser.add_argument(
        "--no-compile", dest="compile", action="store_false", help="do not torch.compile the Sinkhorn loops"
    )
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rng = random.Random(args.seed)
    rows = [row for source in args.data for row in load_rows(source)]
    conversations = [target_messages(row, rng) for row in rows]
    tokenizer = train_tokenizer(
        [m[k] for c in conversations for m in c for k in ("content", "reasoning_content") if k in m], args.vocab_size
    )
    documents = [
        tokenizer(tokenizer.apply_chat_template(c, tokenize=False), add_special_tokens=False).input_ids
        for c in tqdm(conversations, desc="tokenizing", unit="doc")
    ]
    target, mtp = build_models(tiny_config(tokenizer, args), args.seed)
    millions = sum(p.numel() for p in target.parameters()) / 1e6, sum(p.numel() for p in mtp.parameters()) / 1e6
    print(
        f"{len(documents)} documents, {sum(map(len, documents)):,} tokens; target {millions[0]:.2f} M parameters, "
        f"MTP head {millions[1]:.2f} M; on {device}"
    )
    history = train(target.to(device), mtp.to(device), documents, args, device)
    output = Path(args.output)
    save_checkpoint(target, mtp, tokenizer, output, getattr(torch, args.dtype))
    facts = {**vars(args), "documents": len(documents), "tokens": sum(map(len, documents)), "history": history}
    facts["data"] = [Path(source).name for source in args.data]
    facts["output"] = output.name
    (output / "training.json").write_text(json.dumps(facts, indent=1))
    print(f"Saved to {output}: loss {history[-1]['loss']:.3f}, MTP loss {history[-1]['mtp_loss']:.3f}")


if __name__ == "__main__":
    main()
