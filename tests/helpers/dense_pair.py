"""A dense target and its drafter in folders of their own, made in code: of its drafts some are right."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from hf_hyperdflash import HyperDFlashDrafter

from ..conftest import MODELS
from .served_drafters import gate_over_layers

VOCABULARY, WIDTH, DRAFTS = 2048, 64, 6


@torch.no_grad()
def save_dense_pair(folder: Path) -> tuple[Path, Path]:
    """Save a random Qwen3 with the shipped target's tokenizer, and a drafter. Its Markov head knows what the target
    writes after each token alone; its block, which is random, and the text before a token have a say, too."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=96, num_hidden_layers=8, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, max_position_embeddings=2048, initializer_range=0.1, bos_token_id=0,
        eos_token_id=1, pad_token_id=2, tie_word_embeddings=False,
    )  # fmt: skip
    target = Qwen3ForCausalLM(config).eval()
    target.model.embed_tokens.weight.normal_()
    for layer in target.model.layers:
        layer.self_attn.o_proj.weight.mul_(0.05)  # how much the text before a token has to say
    drafter = fitted(target)
    paths = folder / "dense", folder / "dense-hyperdflash"
    target.save_pretrained(paths[0])
    AutoTokenizer.from_pretrained(MODELS / "tiny-deepseek-v4").save_pretrained(paths[0])
    drafter.config.target_name_or_path = paths[0].name
    drafter.save_pretrained(paths[1])
    return paths


def fitted(target: Qwen3ForCausalLM) -> HyperDFlashDrafter:
    drafter = gate_over_layers(
        target, head_dim=32, reducer="hc_gate", block_size=DRAFTS + 1, sequential_head="markov", head_rank=WIDTH
    )
    after_each = target.model(torch.arange(VOCABULARY)[:, None]).last_hidden_state[:, 0]
    drafter.markov_head.markov_w1.weight.copy_(after_each)
    drafter.markov_head.markov_w2.weight.copy_(target.lm_head.weight)
    drafter.norm.weight.mul_(0.1)  # how much the block has to say
    return drafter
