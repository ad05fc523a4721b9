"""Prompt lookup as a drafter: the rival that needs no weights, in the loop and with the statistics of the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from transformers import PreTrainedModel
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from .decoding import Choice, SpeculationStats
from .targets import collapse_of


@dataclass
class LookupContext:
    """Nothing but how far the sequence was seen."""

    end: int = 0


class PromptLookupDrafter:
    """Drafts what followed the last tokens where they occurred before (transformers' own prompt lookup).

    `generate(prompt_lookup_num_tokens=...)` on a bound target drafts the same tokens in transformers' loop; this one
    keeps statistics, stops at stop strings and continues from a filled cache.

    Args:
        target: The target, of which only the configuration is kept.
        num_draft_tokens: Most drafted tokens per round.
        max_matching_ngram_size: Longest run of last tokens to look for.

    Raises:
        ValueError: If it is no target (see [`~runtime.targets.collapse_of`]), or either number is less than 1.
    """

    target_layer_ids: tuple[int, ...] = ()

    def __init__(self, target: PreTrainedModel, num_draft_tokens: int = 10, max_matching_ngram_size: int = 2) -> None:
        collapse_of(target)  # which says what a target is, if it is none
        self.config = target.config  # `generate` compares vocabularies
        self.num_draft_tokens = self.check_num_draft_tokens(num_draft_tokens)
        if type(max_matching_ngram_size) is not int or max_matching_ngram_size < 1:
            raise ValueError(
                f"`max_matching_ngram_size` is {max_matching_ngram_size!r}, expected an integer of at least 1."
            )
        self.max_matching_ngram_size = max_matching_ngram_size
        self.last_stats: SpeculationStats | None = None
        self.synchronize_timing = False

    def check_target(self, target: Any) -> None:
        """Every target will do."""

    def check_num_draft_tokens(self, value: int) -> int:
        """Return `value` if it is a number of tokens to draft.

        Raises:
            ValueError: If not.
        """
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"Cannot draft {value!r} tokens a round: expected a whole number, at least 1.")
        return value

    def new_context(self) -> LookupContext:
        """An empty context for one sequence."""
        return LookupContext()

    def extend(self, *args: Any) -> None:
        """Nothing to take in: the text itself is looked up."""

    def draft(
        self,
        target: Any,
        context: LookupContext,
        ids: torch.Tensor,
        position_ids: torch.Tensor,
        count: int,
        choose: Choice,
    ) -> None:
        """Draft at most `count` tokens, none if the last tokens are new."""
        lookup = PromptLookupCandidateGenerator(
            num_output_tokens=count,
            max_matching_ngram_size=self.max_matching_ngram_size,
            max_length=ids.shape[1] + count + 1,
        )
        candidates, _ = lookup.get_candidates(cast(torch.LongTensor, ids))
        choose.propose(candidates[:, ids.shape[1] :])
