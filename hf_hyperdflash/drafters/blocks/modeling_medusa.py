"""Medusa: heads on the target's last state, one for each token ahead, which do not depend on each other's drafts.

Head k of Cai et al. (arXiv 2401.10774, section 2.1.1) is W2_k (x + SiLU(W1_k x)), with one or more such residual
blocks. It reads the state x from which the target's LM head made the anchor, and drafts the k-th token after that.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from ...targets.compiled import CompiledForwards
from ...targets.target import Target
from ...trees.growth import GraphPlan, GrownChains, GrownNodes, grow_in_graph, independent_steps
from ...trees.tree import DraftTree
from ..configuration import WithCode
from ..parts.context import CompiledRounds, DraftContext
from ..reading import LastStateDrafter
from ..sampling import DraftRequest, draft_known, drafts_of, graph_plan


class MedusaConfig(WithCode, PreTrainedConfig):
    """Shape of Medusa heads.

    Args:
        medusa_num_heads: The number of heads, which is the most tokens drafted a round.
        medusa_num_layers: Residual blocks of each head.
        hidden_size, vocab_size: The target's.
        target_name_or_path, target_model_type: The target that they were made for, where it is known.
        hyperdflash_version: The version of the package that saved them.
    """

    model_type = "medusa_heads"

    medusa_num_heads: int = 5
    medusa_num_layers: int = 1
    hidden_size: int = 4096
    vocab_size: int = 32000
    target_name_or_path: str = ""
    target_model_type: str = ""
    hyperdflash_version: str = ""


class ResidualBlock(nn.Module):
    """x + SiLU(W x + b)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return states + nn.functional.silu(self.linear(states))


def medusa_heads(config: Any) -> dict[str, nn.Module]:
    """Return new heads by the names that published files have: "0", "1", ..."""
    width, heads = config.hidden_size, dict[str, nn.Module]()
    for k in range(config.medusa_num_heads):
        blocks = [ResidualBlock(width) for _ in range(config.medusa_num_layers)]
        heads[str(k)] = nn.Sequential(*blocks, nn.Linear(width, config.vocab_size, bias=False))
    return heads


class MedusaDrafter(LastStateDrafter):
    """Drafts with Medusa heads: `load_drafter` reads published ones, and none are trained here."""

    config: MedusaConfig
    config_class = MedusaConfig
    target_layer_ids = [-1]

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__(config)
        self.max_draft_tokens = config.medusa_num_heads
        for name, head in medusa_heads(config).items():
            self.add_module(name, head)
        self.post_init()

    def target_sizes(self) -> dict[str, int]:
        return {"hidden_size": self.config.hidden_size}

    @torch.no_grad()
    def draft(self, target: Target, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        """Draft with as many heads as tokens are asked for, in one pass; an empty context gives no drafts."""
        are_known = [each.context.pending is not None for each in requests]
        return draft_known(requests, are_known, partial(self._draft_known, target))

    def _draft_known(self, target: Target, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        compiled = requests[0].context.compiled
        if compiled is None:
            logits = self(target, torch.cat([each.context.pending[0] for each in requests]))
        else:
            # With all texts, whoever is asked for: the shapes stay.
            batch, filled = compiled.contexts, torch.zeros_like(requests[0].context.pending[0])
            residual = [filled if each.pending is None else each.pending[0] for each in batch]
            rows, counts = [batch.index(each.context) for each in requests], [0] * len(batch)
            for row, each in zip(rows, requests):
                counts[row] = each.num_drafts
            limits = torch.tensor(counts, device=self.device)
            plan = graph_plan(requests, self.device, self._on_accelerator)
            drafted = compiled.run(_draft_all, self, target, torch.cat(residual), limits, plan)
            if not isinstance(drafted, torch.Tensor):
                return drafts_of(drafted, requests, rows)
            logits = drafted[rows]
        return [
            each.sampler.draft_independent(each.ids, own[None, : each.num_drafts])
            for each, own in zip(requests, logits)
        ]

    def forward(self, target: Target, residual: torch.Tensor) -> torch.Tensor:
        """Return each head's logits after tokens, `[batch, config.medusa_num_heads, target.config.vocab_size]`, from
        their residual `[batch, 1, streams, config.hidden_size]`. Tokens that the target got later have minus
        infinity."""
        states = target.collapse(residual)[:, 0].to(self.device, self.dtype)
        logits = torch.stack([head(states) for head in self.children()], dim=1)
        added = target.config.vocab_size - self.config.vocab_size
        return nn.functional.pad(logits, (0, added), value=-torch.inf) if added else logits

    def compiled_contexts(
        self,
        target: Target,
        contexts: Sequence[DraftContext],
        max_tokens: int,
        max_new: int,
        max_drafts: int,
        compiled: CompiledForwards,
    ) -> Sequence[DraftContext]:
        for context in contexts:
            context.compiled = CompiledRounds(compiled, contexts, [], (), 0)
        return contexts


def _draft_all(
    drafter: MedusaDrafter,
    target: Target,
    residual: torch.Tensor,
    limits: torch.Tensor,
    plan: GraphPlan | None,
) -> torch.Tensor | GrownChains | GrownNodes:
    """Return the heads' logits, or what is asked for of drafts, trees at most `limits` `[texts]` deep."""
    logits = drafter(target, residual)
    if plan is None:
        return logits
    anchors = torch.zeros_like(limits)  # which no head reads
    return grow_in_graph(plan, anchors, limits, logits.shape[1], independent_steps(logits))
