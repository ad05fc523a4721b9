"""Tiny drafters with sequential heads that have learned something, and what they draft."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LogitsProcessorList

from hf_hyperdflash import HyperDFlashConfig, HyperDFlashDrafter
from hf_hyperdflash.drafters.parts.layers import block_inputs
from hf_hyperdflash.drafters.sampling import DraftRequest, DraftSampler
from hf_hyperdflash.targets.registry import target_of
from hf_hyperdflash.trees.tree import DraftTree

from ..conftest import tiny_drafter
from .oracle_heads import EPSILON


def headed(target: Any, kind: str, **fields: Any) -> HyperDFlashDrafter:
    fields = {
        "head_rank": 5,
        "head_state_size": 6,
        "rms_norm_eps": EPSILON,
        "num_hidden_layers": 1,
        "head_dim": 16,
        **fields,
    }
    return learned(tiny_drafter(target, sequential_head=kind, **fields))


def headless(drafter: HyperDFlashDrafter) -> HyperDFlashDrafter:
    """The same weights, but for those of its heads."""
    fields = {"sequential_head": "none", "head_candidates": None, "confidence_head": False}
    plain = HyperDFlashDrafter(HyperDFlashConfig.from_dict({**drafter.config.to_dict(), **fields}))
    plain.load_state_dict(drafter.state_dict(), strict=False)
    return plain.eval()


@torch.no_grad()
def learned(drafter: HyperDFlashDrafter) -> HyperDFlashDrafter:
    """With other heads than it starts with, and a draft vocabulary that is not the first tokens."""
    for part in (drafter.head, drafter.confidence_head):
        for parameter in () if part is None else part.parameters():
            parameter.normal_(std=0.4)
    if drafter.config.draft_vocab_size:
        drafter.lm_head.weight.normal_(std=0.4)
        drafter.draft_ids.copy_(torch.randperm(drafter.config.vocab_size)[: drafter.config.draft_vocab_size])
    return drafter


def residual_before(drafter: HyperDFlashDrafter, length: int) -> torch.Tensor:
    """Of the tokens before an anchor, `[1, length, config.num_streams, config.target_hidden_size]`, the same for each
    drafter and each length as far as they go."""
    generator, config = torch.Generator().manual_seed(3), drafter.config
    return torch.randn(1, length, config.num_streams, config.target_hidden_size, generator=generator)


def proposed(
    drafter: HyperDFlashDrafter,
    target: Any,
    ids: torch.Tensor,
    do_sample: bool = False,
    processors: Any = (),
    count: int | None = None,
    budget: int | None = None,
) -> tuple[DraftTree, torch.Tensor]:
    """What is drafted after `ids`, a chain or a tree of at most `budget` nodes, and the block's states that it comes
    from, `[drafts, config.target_hidden_size]`."""
    config, seen, length = drafter.config, target_of(target), ids.shape[1] - 1
    count = drafter.max_draft_tokens if count is None else count
    residual, positions = residual_before(drafter, length).to(drafter.dtype), torch.arange(length + 1)[None]
    block, ahead = block_inputs(ids[:, -1:], torch.tensor([[length]]), config.block_size, config.mask_token_id)
    with torch.no_grad():
        hidden = drafter(seen.embed(block), ahead, residual=residual, residual_position_ids=positions[:, :-1])
    context, first = drafter.new_context(), 0 if config.sample_from_anchor else 1
    drafter.extend(seen, context, residual, positions[:, :-1], ids[:, 1:])
    sampler = DraftSampler(LogitsProcessorList(processors), do_sample, budget)
    (tree,) = drafter.draft(seen, [DraftRequest(context, ids, positions, count, sampler)])
    return tree, hidden[0, first : first + count]
