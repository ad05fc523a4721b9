"""Runs a sequential head over a block's draft positions, one after the other, on one path or on several."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import torch

from ...targets.target import Target
from ...trees.growth import DraftStep
from ...trees.tree import DraftTree
from ..parts.heads import ConfidenceHead, SequentialHead

# What is subtracted from other tokens' logits: they are chosen only where processors leave no candidate.
_NO_CANDIDATE = 1e4


class BlockPath:
    """Computes the logits of the draft positions of one block of each text, each from the token chosen before it (a
    sequential head).

    Args:
        drafter: A block drafter.
        target: For its embedding and LM head.
        hidden: The blocks' states, `[batch, drafts, config.target_hidden_size]`.
    """

    def __init__(self, drafter: Any, target: Target, hidden: torch.Tensor) -> None:
        self.drafter, self.target, self.hidden, self.config = drafter, target, hidden, drafter.config
        self.head: SequentialHead | None = drafter.head
        self.confidence_head: ConfidenceHead | None = drafter.confidence_head
        self._carried: torch.Tensor | None = None
        self._texts: torch.Tensor | None = None  # the text of each path of the last call; `None` of the only one
        count = 0 if self.head is None else self.config.head_candidates or 0
        # [batch, drafts, drafted vocabulary], without the head; not needed where the head scores every token anew.
        self._vocabulary = drafter.draft_vocabulary(target)
        is_needed = self.head is None or self.head.table is not None or count
        self._blind = drafter.logits(target, hidden) if is_needed else None
        self._candidates = None if self._blind is None or not count else self._blind.topk(count, dim=-1).indices

    def __call__(self, k: int, tokens: torch.Tensor, rows: torch.Tensor) -> DraftStep:
        """Run draft position `k` for several paths. It is called once for each k, in order.

        Args:
            k: The draft position.
            tokens: The last token of each path, `[paths]`.
            rows: For each path, the index of the path of the call before that it continues, `[paths]`.
        """
        if len(self.hidden) > 1:
            self._texts = (
                rows.to(self.hidden.device) if self._texts is None else self._texts[rows.to(self._texts.device)]
            )
        hidden, memory = self._of_paths(self.hidden, k, len(tokens)), None
        blind = None if self._blind is None else self._of_paths(self._blind, k, len(tokens))
        if self.head is None:
            logits = cast(torch.Tensor, blind)
        else:
            tokens, rows = tokens.to(hidden.device), rows.to(hidden.device)
            embeds = self.target.embed(tokens[:, None])[:, 0] if self.head.reads_embeds else None
            carried = None if self._carried is None else self._carried[rows]
            if not k:  # the anchor may be a token that the target got later, and of which tables know nothing
                tokens = tokens.clamp(max=self.config.vocab_size - 1)
            states, vectors, memory, self._carried = self.head(hidden, tokens, embeds, carried)
            if blind is None:
                logits = self.drafter.logits(self.target, states)
            elif self._candidates is None:
                logits = blind + torch.nn.functional.linear(vectors, self.drafter.head.table).to(blind)
            else:
                ids = self._of_paths(self._candidates, k, len(tokens))
                logits = self._best(blind.float(), ids, states, vectors)
        return DraftStep(logits, self._confidence(k, hidden, memory), self._vocabulary)

    def _of_paths(self, parts: torch.Tensor, k: int, paths: int) -> torch.Tensor:
        """Return what each path reads at draft position `k`, `[paths, ...]`, of its text's row of
        `[batch, drafts, ...]`."""
        return parts[:, k].expand(paths, -1) if self._texts is None else parts[self._texts, k]

    def with_head_choices(self, tree: DraftTree) -> DraftTree:
        """Return a tree of this block with `by_head`: whether the head chose each node, although the block alone finds
        another token more probable, before the request's processors."""
        blind = self.drafter.logits(self.target, self.hidden) if self._blind is None else self._blind
        alone = self.drafter.to_full_vocabulary(self.target, blind)[0].argmax(-1).tolist()
        drafts = zip(tree.tokens.tolist(), tree.depths)
        return replace(tree, by_head=tuple(token != alone[depth - 1] for token, depth in drafts))

    def _confidence(self, k: int, hidden: torch.Tensor, memory: torch.Tensor | None) -> torch.Tensor | None:
        if self.confidence_head is None:
            return None
        temperature = (self.config.confidence_temperatures or [1.0] * (k + 1))[k]
        return torch.sigmoid(self.confidence_head(hidden, memory).float() / temperature)

    def _best(
        self, blind: torch.Tensor, ids: torch.Tensor, states: torch.Tensor, vectors: torch.Tensor | None
    ) -> torch.Tensor:
        """Return logits in which the block's best tokens have the head's scores, and all others are far below."""
        if vectors is None:
            scores = self.drafter.logits_of(self.target, states, ids)
        else:
            rows = self.drafter.head.table[ids.to(vectors.device)]
            scores = blind.gather(-1, ids) + torch.einsum("br,bcr->bc", vectors, rows).to(blind)
        scores = scores.to(blind).masked_fill(blind.gather(-1, ids) == -torch.inf, -torch.inf)  # the mask token
        return (blind - _NO_CANDIDATE).scatter(-1, ids, scores)
