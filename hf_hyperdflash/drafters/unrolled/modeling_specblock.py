"""SpecBlock: blocks of dependent draft positions, a tree of them in a few passes (SpecBlock, arXiv 2605.07243)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn

from ...targets.target import Target
from ...trees.tree import DraftTree
from ..parts.layers import DrafterRMSNorm, HyperDFlashLayer
from ..parts.rank_head import RankHead, rank_features
from ..sampling import DraftRequest
from .configuration import SpecBlockConfig
from .drafter import UnrolledDrafter, Unrolling
from .rank_growth import Blocks, BlockStep, grow_blocks

_LOGITS_AT_ONCE = 256


class SpecBlockNetwork(nn.Module):
    """The layers of SpecBlock, before a base of drafters: the package's, or that of `portable/`."""

    config: Any

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        width, eps = config.hidden_size, config.rms_norm_eps
        self.condition_norm, self.token_norm, self.slot_norm = (DrafterRMSNorm(width, eps=eps) for _ in range(3))
        self.slot_embeddings = nn.Embedding(config.block_size, width)
        self.fuse = nn.Linear(3 * width, width, bias=False)
        self.layers = nn.ModuleList(HyperDFlashLayer(config) for _ in range(config.num_hidden_layers))
        shifts = config.num_hidden_layers - 1 if config.shift else 0
        self.shift_proj = nn.ModuleList(nn.Linear(2 * width, width, bias=False) for _ in range(shifts))
        self.rank_head = RankHead(config) if config.rank_head else None
        cast(Any, self).post_init()

    def _begin(self, condition: torch.Tensor, embeds: torch.Tensor) -> torch.Tensor:
        size = self.config.block_size
        inputs = torch.cat([self.condition_norm(condition), self.token_norm(embeds)], dim=-1).unsqueeze(2)
        if self.config.broadcast:
            inputs = inputs.expand(-1, -1, size, -1)
        else:
            inputs = nn.functional.pad(inputs, (0, 0, 0, size - 1))
        slots = self.slot_norm(self.slot_embeddings.weight).expand(*inputs.shape[:3], -1)
        return self.fuse(torch.cat([inputs, slots], dim=-1)).flatten(1, 2)

    def _between(self, index: int, hidden: torch.Tensor) -> torch.Tensor:
        if not index or not self.config.shift:
            return hidden
        slots = hidden.unflatten(1, (-1, self.config.block_size))
        before = torch.cat([slots[:, :, :1], slots[:, :, :-1]], dim=2)
        return self.shift_proj[index - 1](torch.cat([slots, before], dim=-1)).flatten(1, 2)


class SpecBlockDrafter(SpecBlockNetwork, UnrolledDrafter):
    """Drafts blocks whose slots depend on each other, and later blocks from any slot of an earlier one.

    Use [`from_target`] or `load_drafter`, `drafter.bind(target)` once, then
    `target.generate(**inputs, assistant_model=drafter, tree_budget=60)`.
    """

    config: SpecBlockConfig
    config_class = SpecBlockConfig
    _no_split_modules = ["HyperDFlashLayer"]
    moves_positions = False  # the authors' checkpoints are trained and used so

    def _ranks(self, normed: torch.Tensor, head: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor | None:
        if self.rank_head is None:
            return None
        states = normed.flatten(0, -2)
        with torch.no_grad():
            features = torch.cat([rank_features(head(chunk)) for chunk in states.detach().split(_LOGITS_AT_ONCE)])
        return self.rank_head(states, features.to(states.device)).unflatten(0, normed.shape[:-1])

    def _draft(self, target: Target, unrolling: Unrolling, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        if requests[0].sampler.tree_budget is None:
            return self._draft_chains(target, unrolling, requests)
        return grow_blocks(requests, self._blocks(target, unrolling), self.config)

    def _draft_chains(self, target: Target, unrolling: Unrolling, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        """Draft chains block by block. A block's slots do not depend on its tokens: these are drawn at once."""
        blocks: list[list[DraftTree]] = [[] for _ in requests]
        texts, counts = [each.ids for each in requests], [each.num_drafts for each in requests]
        admission = requests[0].sampler.chain_admission  # which only a text alone has
        for start in range(0, max(counts), self.config.block_size):
            if start:
                if admission is not None and (len(blocks[0][-1]) < self.config.block_size or not admission.is_open()):
                    break
                unrolling.extend_chain(torch.cat([text[0, -1:] for text in texts]).to(self.device))
            logits = self.logits(target, unrolling.states[:, : max(counts) - start])
            for row, each in enumerate(requests):
                block = each.sampler.draft_independent(
                    texts[row], logits[row : row + 1, : max(0, counts[row] - start)]
                )
                texts[row] = torch.cat([texts[row], block.tokens[None].to(texts[row].device)], dim=1)
                blocks[row].append(block)
        return [self._chain_of(of_sequence) for of_sequence in blocks]

    def _chain_of(self, blocks: Sequence[DraftTree]) -> DraftTree:
        """Return the chain of a sequence's blocks, one after the other."""
        tree = DraftTree.chain(
            torch.cat([block.tokens for block in blocks]), [q for block in blocks for q in block.q or ()]
        )
        return replace(tree, passes=tuple(1 + k // self.config.block_size for k in range(len(tree))))

    def _blocks(self, target: Target, unrolling: Unrolling) -> Blocks:
        def blocks(earlier: torch.Tensor, slots: torch.Tensor, tokens: torch.Tensor) -> BlockStep:
            states = unrolling.states
            if len(earlier):
                earlier, slots, tokens = (each.to(self.device) for each in (earlier, slots, tokens))
                states = unrolling.branch(earlier, slots, tokens)
            normed = self.norm(states)
            drafted = self.drafted_logits(target, normed)
            ranks = None
            if self.rank_head is not None:
                ranks = self.rank_head(normed, rank_features(drafted).to(normed.device)).float().softmax(-1)
            return BlockStep(self.to_full_vocabulary(target, drafted), ranks)

        return blocks
