"""P-EAGLE drafts all tokens of a round in one pass: EAGLE-3's layers, and a mask for what is not known yet.

Behind the entries of a text there is one more for each further draft. It reads a learned state where an entry reads
the target's, and the embedding of a mask token where an entry reads that of the next token. So a draft does not depend
on the other drafts. Hui et al., arXiv 2602.01469; read in vLLM's `llama_eagle3.py` and speculators' `peagle`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...targets.compiled import CompiledForwards
from ...targets.registry import target_of
from ...targets.target import Target
from ...targets.vocabulary import find_mask_token
from ...trees.growth import GraphPlan, GrownChains, GrownNodes, grow_in_graph, independent_steps
from ...trees.tree import DraftTree
from ..parts.context import ContextColumns, DraftContext, padded_pending
from ..parts.layers import KeysValues
from ..sampling import DraftRequest, drafts_of, graph_plan
from .configuration import PEagleConfig
from .modeling_eagle3 import Eagle3Drafter, Eagle3Network


class PEagleNetwork(Eagle3Network):
    """The layers of P-EAGLE, before a base of drafters: the package's, or that of `portable/`."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        streams = 1 if config.any_streams else config.target_hc_mult
        self.mask_hidden = nn.Embedding(streams * len(config.target_layer_ids or ()), config.target_hidden_size)
        cast(Any, self).post_init()

    def next_condition(self, states: torch.Tensor) -> torch.Tensor:
        streams = torch.arange(self.mask_hidden.num_embeddings, device=states.device)
        return self.condition(self.mask_hidden(streams)[None, None]).flatten().expand_as(states)

    def later_ids(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.full_like(ids, self.config.mask_token_id)


class PEagleDrafter(PEagleNetwork, Eagle3Drafter):
    """Drafts several tokens in one pass from three of the target's layers.

    Use [`from_target`] or `load_drafter`, `drafter.bind(target)` once, then
    `target.generate(**inputs, assistant_model=drafter)`. The last token of a text stays pending: its entry is made
    again in the pass that drafts after it.
    """

    config: PEagleConfig
    config_class = PEagleConfig

    @classmethod
    def from_target(
        cls,
        target: PreTrainedModel,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        mask_token_id: int | None = None,
        **options: Any,
    ) -> PEagleDrafter:
        """Build an untrained drafter that fits a target, as [`UnrolledDrafter.from_target`].

        Args:
            target: The model to draft for. It is read, not changed.
            tokenizer: The target's, in which a mask token is looked for; the one beside its weights if left out.
            mask_token_id: A token that no text has; found by [`~targets.vocabulary.find_mask_token`] if left out.
                Where there is none it is 0, because the learned state tells a mask from a token.
            **options: `dtype`, and any field of [`PEagleConfig`].

        Raises:
            ValueError: If it is no target, or there is no such field.
        """
        if mask_token_id is None:
            mask_token_id = find_mask_token(target_of(target), tokenizer) or 0
        return cast(PEagleDrafter, super().from_target(target, mask_token_id=mask_token_id, **options))

    def flush_pending(self, target: Target, contexts: Sequence[DraftContext]) -> None:
        """Make the entries of all pending tokens but each text's last one."""
        if longer := [context for context in contexts if context.new_count > 1]:
            super().flush_pending(target, longer)

    def _keep_entries(self, contexts: Sequence[DraftContext], *_: object) -> None:
        for context in contexts:
            if context.pending is not None:
                context.length += context.new_count - 1
                context.pending = tuple(part[:, -1:].clone() for part in context.pending)

    def _draft_known(self, target: Target, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        contexts = [each.context for each in requests]
        compiled, rows, drafted = contexts[0].compiled, list(range(len(requests))), None
        if compiled is not None and all(compiled.fits(context) for context in contexts):
            plan, rows = graph_plan(requests, self.device, self._on_accelerator), [each.row for each in contexts]
            logits, drafted = compiled.run(_draft_best, self, target, *compiled.inputs(requests, 1), plan)
        else:
            masks = max(each.num_drafts for each in requests) - 1
            columns, pending = ContextColumns.of(self, contexts, masks), padded_pending(contexts, self.device)
            logits = _run_masked(self, target, columns, pending, masks)
        self._keep_entries(contexts)
        if drafted is not None:
            return drafts_of(drafted, requests, rows)
        return [
            each.sampler.draft_independent(each.ids, logits[row : row + 1, : each.num_drafts])
            for each, row in zip(requests, rows)
        ]

    def compiled_contexts(
        self,
        target: Target,
        contexts: Sequence[DraftContext],
        max_tokens: int,
        max_new: int,
        max_drafts: int,
        compiled: CompiledForwards,
    ) -> Sequence[DraftContext]:
        return super().compiled_contexts(target, contexts, max_tokens, max_new + 1, max_drafts, compiled)

    def max_blocks(self, budget: int, do_sample: bool) -> int:
        return 1


def _run_masked(
    drafter: PEagleDrafter,
    target: Target,
    columns: ContextColumns,
    pending: tuple[torch.Tensor, ...],
    masks: int,
) -> torch.Tensor:
    """Make the entries of pending tokens and of `masks` behind each text's last one; return the logits of its drafts,
    `[texts, 1 + masks, target.config.vocab_size]`."""
    residual, position_ids, next_ids = pending
    condition, steps = drafter.condition(residual), torch.arange(1, masks + 1, device=residual.device)
    masked = drafter.next_condition(condition[:, -1:].expand(-1, masks, -1))
    ids = torch.cat([next_ids, drafter.later_ids(next_ids[:, -1:].expand(-1, masks))], dim=1)
    positions = torch.cat([position_ids, position_ids[:, -1:] + steps], dim=1) + 1
    layers = [columns.layer(index) for index in range(len(columns.keys_values))]
    inputs = torch.cat([condition, masked], dim=1), drafter.embed(target, ids), positions, layers
    states = drafter.run(*inputs, columns.causal_mask(residual.device))[:, -1 - masks :, 0]
    return drafter.to_full_vocabulary(target, drafter.drafted_logits(target, drafter.norm(states)))


def _draft_best(
    drafter: PEagleDrafter,
    target: Target,
    keys_values: Sequence[KeysValues],
    ids: torch.Tensor,
    position_ids: torch.Tensor,
    pending: tuple[torch.Tensor, ...],
    counts: torch.Tensor,
    attended: int,
    plan: GraphPlan | None,
) -> tuple[torch.Tensor, GrownChains | GrownNodes | None]:
    """Draft for each text inside a graph; return the logits and the most probable drafts.

    Args:
        keys_values, ..., attended: See [`~drafters.parts.context.CompiledRounds.inputs`].
        plan: Which drafts; `None` for none.
    """
    max_new = pending[1].shape[1]  # the tokens that a round adds, and the last one before
    depth = min(max_new - 2, drafter.max_draft_tokens)
    columns = ContextColumns(keys_values, counts, max_new, depth - 1, attended)
    logits = _run_masked(drafter, target, columns, pending, depth - 1)
    if plan is None:
        return logits, None
    return logits, grow_in_graph(plan, ids[:, 0], counts[:, 2], depth, independent_steps(logits))
