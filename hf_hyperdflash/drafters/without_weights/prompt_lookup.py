"""Prompt lookup as a drafter without weights, in the same loop and with the same statistics as the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from transformers import PreTrainedModel
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from ...targets.registry import target_of
from ...targets.target import Target
from ...trees.tree import DraftTree
from ..base import Drafter
from ..sampling import DraftRequest


class PromptLookupDrafter(Drafter):
    """Drafts what followed the last tokens where they occurred before (transformers' own prompt lookup).

    `generate(prompt_lookup_num_tokens=...)` on a bound target drafts the same tokens in transformers' loop; this one
    keeps statistics, stops at stop strings and continues from a filled cache.

    Args:
        target: The target, of which only the configuration is kept.
        num_draft_tokens: Most drafted tokens per round.
        max_matching_ngram_size: Longest run of last tokens to look for.

    Raises:
        ValueError: If `target` is no target (see [`~targets.registry.target_of`]), or either number is less than 1.
    """

    def __init__(self, target: PreTrainedModel, num_draft_tokens: int = 10, max_matching_ngram_size: int = 2) -> None:
        target_of(target)  # which says what a target is, if it is none
        self.config = target.config  # `generate` compares vocabularies
        self._usual_drafts = self.num_draft_tokens = num_draft_tokens
        if type(max_matching_ngram_size) is not int or max_matching_ngram_size < 1:
            raise ValueError(
                f"`max_matching_ngram_size` is {max_matching_ngram_size!r}, expected an integer of at least 1."
            )
        self.max_matching_ngram_size = max_matching_ngram_size

    def draft(self, target: Target, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        """Draft at most as many tokens as are asked for, none after a text whose last tokens are new."""
        trees = []
        for _, ids, _, num_drafts, *_ in requests:
            lookup = PromptLookupCandidateGenerator(
                num_output_tokens=num_drafts,
                max_matching_ngram_size=self.max_matching_ngram_size,
                max_length=ids.shape[1] + num_drafts + 1,
            )
            candidates, _ = lookup.get_candidates(cast(torch.LongTensor, ids))
            trees.append(DraftTree.chain(candidates[0, ids.shape[1] :]))
        return trees
