"""A block's draft positions one after the other, each with the token chosen before it."""

from __future__ import annotations

from typing import Any, cast

import torch
from transformers import PreTrainedModel

from .heads import ConfidenceHead, SequentialHead
from .targets import family_of

# Below any candidate's logit: chosen only where a request's processors leave no candidate.
_NO_CANDIDATE = 1e4


class BlockPath:
    """The logits of one block's draft positions, which a sequential head makes known to each other.

    Args:
        drafter: With `config`, `logits`, `head` and `confidence_head`.
        target: For its embedding and LM head.
        hidden: The block's states, `[1, drafts, config.target_hidden_size]`.

    Attributes:
        confidence: Of the positions so far, how probable it is that their drafts are accepted, `[1]` each; empty
            without a confidence head.
    """

    def __init__(self, drafter: Any, target: PreTrainedModel, hidden: torch.Tensor) -> None:
        self.drafter, self.target, self.hidden, self.config = drafter, target, hidden, drafter.config
        self.head: SequentialHead | None = drafter.head
        self.confidence_head: ConfidenceHead | None = drafter.confidence_head
        self.confidence: list[torch.Tensor] = []
        self._carried: torch.Tensor | None = None
        count = 0 if self.head is None else self.config.head_candidates or 0
        # [1, drafts, drafted vocabulary], without the head; nothing asks for it where that scores every token anew.
        is_asked = self.head is None or self.head.table is not None or count
        self._blind = drafter.logits(target, hidden) if is_asked else None
        self._candidates = None if self._blind is None or not count else self._blind.topk(count, dim=-1).indices

    def logits_after(self, k: int, token: torch.Tensor) -> torch.Tensor:
        """`[1, config.vocab_size]` of draft position `k` after `token` `[1]`; once for each k, in order."""
        hidden, memory = self.hidden[:, k], None
        blind = None if self._blind is None else self._blind[:, k]
        if self.head is None:
            logits = cast(torch.Tensor, blind)
        else:
            token = token.to(hidden.device)
            embeds = self._embeds(token) if self.head.reads_embeds else None
            states, vectors, memory, self._carried = self.head(hidden, token, embeds, self._carried)
            if blind is None:
                logits = self.drafter.logits(self.target, states)
            elif self._candidates is None:
                logits = blind + torch.nn.functional.linear(vectors, self.drafter.head.table).to(blind)
            else:
                logits = self._best(blind.float(), self._candidates[:, k], states, vectors)
        if self.confidence_head is not None:
            temperature = (self.config.confidence_temperatures or [1.0] * (k + 1))[k]
            self.confidence.append(torch.sigmoid(self.confidence_head(hidden, memory).float() / temperature))
        return self.drafter.of_vocabulary(logits)

    def _embeds(self, token: torch.Tensor) -> torch.Tensor:
        return family_of(self.target).embed(token[:, None])[:, 0]

    def _best(
        self, blind: torch.Tensor, ids: torch.Tensor, states: torch.Tensor, vectors: torch.Tensor | None
    ) -> torch.Tensor:
        """Of the block's best tokens; the others stand far below."""
        if vectors is None:
            scores = self.drafter.logits_of(self.target, states, ids)
        else:
            rows = self.drafter.head.table[ids.to(vectors.device)]
            scores = blind.gather(-1, ids) + torch.einsum("br,bcr->bc", vectors, rows).to(blind)
        return (blind - _NO_CANDIDATE).scatter(-1, ids, scores.to(blind))
