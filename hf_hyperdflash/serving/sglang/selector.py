"""A selector for SGLang's loop: it chooses drafts with a sequential head, a draft vocabulary, or both.

SGLang calls a selector (DFlash 2's) with the block's states and the anchor, and expects tokens, candidates and their
probabilities. This one returns one candidate of probability 1 for each draft position, the head's best. SGLang without
a selector does the same, and its verification is exact for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.runtime_context import get_parallel
from sglang.srt.speculative.dflash_utils import is_dense_head_weight
from torch import nn

from ...drafters.parts.heads import SequentialHead
from ..ordered_drafts import ordered_logits


class HeadSelector(nn.Module):
    """Chooses a drafter's drafts, with a sequential head or without one."""

    top_k = 1  # number of candidates that SGLang allocates
    draft_ids: torch.Tensor | None

    def __init__(self, config: Any, head: type[SequentialHead] | None) -> None:
        super().__init__()
        self.count, self.mask_token_id = config.head_candidates or 0, config.mask_token_id
        self.head = None if head is None else head(config)
        size = config.draft_vocab_size
        self.lm_head = nn.Linear(config.target_hidden_size, size, bias=False) if size else None
        self.register_buffer("draft_ids", torch.zeros(size, dtype=torch.long) if size else None)
        self.embed: Callable[[torch.Tensor], torch.Tensor] | None = None
        self.rows: torch.Tensor | None = None

    def meet(self, target: Any, config: Any) -> None:
        """Set the embeddings and the LM head of SGLang's target; raise a `ValueError` if this GPU has only a part of
        them, or logits are not just states times the LM head."""
        weight: Any = getattr(getattr(target, "lm_head", None), "weight", None)
        changed = {
            name: value
            for name in ("final_logit_softcapping", "logits_scaling", "logit_scale")
            if (value := getattr(config, name, None)) not in (None, 1)
        }
        for is_unsupported, expected, found in (
            (get_parallel().tp_size != 1, "--tp-size 1", f"it is {get_parallel().tp_size}"),
            (self.lm_head is None and not is_dense_head_weight(weight), "an LM head that is not quantized",
             f"this target's is a {type(getattr(target, 'lm_head', None)).__name__}"),
            (self.lm_head is None and bool(changed), "a target whose logits are its LM head's",
             f"this one's have {changed}"),
        ):  # fmt: skip
            if is_unsupported:
                raise ValueError(
                    f"A drafter with a sequential head or a draft vocabulary is served by SGLang with {expected}, but "
                    f"{found}: serve with vLLM, or train with `--sequential_head none` and all tokens."
                )
        table, scale = target.get_input_embeddings(), 1.0
        if hasattr(target, "get_dflash_noise_embedding_scale"):
            scale = float(target.get_dflash_noise_embedding_scale())
        self.embed = lambda ids: table(ids) * scale
        self.rows = (weight[: config.vocab_size] if self.lm_head is None else self.lm_head.weight).detach()

    @torch.no_grad()
    def build_lattice(
        self,
        *,
        candidate_ids: torch.Tensor,
        unary_logits: torch.Tensor,
        hidden_states: torch.Tensor,
        anchor_token_ids: torch.Tensor,
    ) -> torch.Tensor:
        """Return logits `[batch, drafts, tokens that can be drafted]` for states `[batch, drafts, config.hidden_size]`
        after anchors `[batch]`; each position is given the best token of the one before it."""
        if self.embed is None:
            raise ValueError("A selector has met no target: expected `meet` before drafts are asked for.")
        if self.head is None:
            return self._logits(hidden_states)
        anchors = anchor_token_ids.long()
        return ordered_logits(
            self.head, hidden_states, anchors, self._logits, self.embed, self._to_token_ids, self.count
        )  # fmt: skip

    @torch.no_grad()
    def sample_path(
        self, *, candidate_ids: torch.Tensor, scores: torch.Tensor, **sampling: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the drafts `[batch, drafts]` and their probabilities `[batch, drafts, 1]`, all 1. The drafts are also
        written into the candidates `[batch, drafts, 1]`, which SGLang reads afterwards."""
        tokens = self._to_token_ids(scores.argmax(-1))
        candidate_ids.copy_(tokens.unsqueeze(-1))
        return tokens, torch.ones_like(candidate_ids, dtype=torch.float32)

    def _logits(self, states: torch.Tensor) -> torch.Tensor:
        logits = nn.functional.linear(states.to(self.rows.dtype), self.rows)  # type: ignore[union-attr, arg-type]
        if self.draft_ids is None:
            logits[..., self.mask_token_id] = -torch.inf  # never drafted
            return logits
        return logits.masked_fill(self.draft_ids == self.mask_token_id, -torch.inf)

    def _to_token_ids(self, index: torch.Tensor) -> torch.Tensor:
        return index if self.draft_ids is None else self.draft_ids[index]

    # Weights

    def owns(self, name: str) -> bool:
        """Return whether a weight of a drafter's folder belongs to the selector, by its name."""
        module = name.partition(".")[0]
        return module in ("lm_head", "draft_ids") or (self.head is not None and module == self.head.key)

    def load(self, weights: dict[str, torch.Tensor]) -> None:
        """Load the selector's weights, by their names in a drafter's folder."""
        key = "" if self.head is None else f"{self.head.key}."
        self.load_state_dict({f"head.{n.removeprefix(key)}" if key and n.startswith(key) else n: weight
                              for n, weight in weights.items()})  # fmt: skip
