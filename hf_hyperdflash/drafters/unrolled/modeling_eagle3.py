"""EAGLE-3 drafts a token at a time: the first from three of the target's layers, each later one from its own state.

Read in SafeAILab's `cnets.py` and speculators 0.9, whose checkpoints `load_drafter` reads. The first layer attends
over the normed embedding of the next token beside the normed state, and adds to the state; other layers, where there
are any, are as usual.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from ...targets.target import Target
from ...trees.growth import DraftStep, level_sizes
from ...trees.tree import DraftTree
from ..sampling import DraftRequest, drafts_in_step
from .configuration_eagle3 import Eagle3Config
from .drafter import UnrolledDrafter, Unrolling
from .networks import Eagle3Network


class Eagle3Drafter(Eagle3Network, UnrolledDrafter):
    """Drafts one token at a time, or a tree of them, from three of the target's layers and then from its own states.

    Use [`from_target`] or `load_drafter`, `drafter.bind(target)` once, then
    `target.generate(**inputs, assistant_model=drafter, tree_budget=60)`.
    """

    config: Eagle3Config
    config_class = Eagle3Config
    _no_split_modules = ["Eagle3Layer", "HyperDFlashLayer"]

    @property
    def tree_width(self) -> int:
        return self.config.tree_width

    def most_blocks(self, budget: int, do_sample: bool) -> int:
        if not do_sample:
            return min(budget, self.tree_width)
        of_all = (level_sizes(count, budget)[:-1] for count in range(1, self.max_draft_tokens + 1))
        return max(max(sizes, default=1) for sizes in of_all)

    def _draft(self, target: Target, unrolling: Unrolling, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        vocabulary = self.draft_vocabulary(target)
        first, are_chains = 0, requests[0].sampler.tree_budget is None  # number of the block of the first path

        def steps(k: int, tokens: torch.Tensor, rows: torch.Tensor) -> DraftStep:
            nonlocal first
            states = unrolling.states
            if k and are_chains:
                states = unrolling.extend_chain(tokens.to(self.device))
            elif k:
                blocks = first + rows.to(self.device)
                first = len(unrolling.states)
                states = unrolling.branch(blocks, torch.zeros_like(blocks), tokens.to(self.device))
            logits = self.drafted_logits(target, self.norm(states[:, 0]))
            return DraftStep(logits, vocabulary=vocabulary)

        trees = drafts_in_step(requests, steps, self.config.tree_width)
        return [replace(tree, passes=tree.depths) for tree in trees]
