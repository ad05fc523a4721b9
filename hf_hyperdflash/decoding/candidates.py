"""Our drafters in transformers' own protocol, for its assisted loop and for loops of one's own."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from transformers import LogitsProcessorList
from transformers.generation.candidate_generator import CandidateGenerator
from transformers.generation.configuration_utils import GenerationConfig
from transformers.utils.generic import ModelOutput

from ..drafters.sampling import DraftRequest, DraftSampler
from ..targets.caches.name import CACHE
from ..targets.caches.seen_keys import CachedText
from ..targets.hooks import Round
from .request import Pair


class DraftCandidateGenerator(CandidateGenerator):
    """Candidates from a drafter, in a loop that calls the bound target once a round and crops its cache.

    A bound target's `_get_candidate_generator(assistant_model=drafter, ...)` makes one; `target.generate(...,
    assistant_model=drafter)` runs our own loop instead, which is exact where transformers' loop is not: that one runs
    past stop strings inside a block, feeds the prompt again when it goes on from a filled cache, cannot hand out
    DeepSeek-V4's hidden states (`output_hidden_states`), and lets its compressors pool left padding with text.
    Elsewhere the tokens are the same. It is to be used by one thread, the one that makes it, and reads the first
    forward of the target after each call of [`get_candidates`].

    Args:
        pair: A bound target and its drafter.
        num_drafts: Most drafts a round.
        generation_config: The request's.
        logits_processor: The request's.
    """

    requires_model_outputs = True
    model_kwargs_overrides: dict[str, Any] = {}

    def __init__(
        self,
        pair: Pair,
        num_drafts: int,
        generation_config: GenerationConfig,
        logits_processor: LogitsProcessorList | None = None,
    ) -> None:
        self.num_drafts, self.max_length = num_drafts, generation_config.max_length
        self.sampler = DraftSampler(logits_processor or LogitsProcessorList(), generation_config.do_sample)
        self.pair, self.context = pair, pair.drafter.new_context()
        residual = pair.target.hyperdflash_binding.residual
        self._capture = residual.new_capture(pair.facts.layer_ids, max_forwards=1)
        weakref.finalize(self, residual.captures.add(self._capture))

    def get_candidates(  # type: ignore[override]
        self,
        input_ids: torch.LongTensor,
        model_kwargs: dict[str, Any] | None = None,
        model_outputs: ModelOutput | None = None,
        is_first_iteration: bool = False,
        n_last_matches: int = 0,
        **kwargs: object,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the text and drafts after it.

        Args:
            input_ids: `[1, seq]`, the accepted tokens.
            model_kwargs: Of the target, with its `position_ids` and its cache, for drafters that attend over that.
            model_outputs: Of its last forward, over the drafts of the last call.
            is_first_iteration: Whether the prompt is still to be run: there is nothing to draft from yet.
            n_last_matches: How many of the last drafts were accepted.

        Returns:
            `[1, seq + drafts]`, and logits `[1, drafts, config.vocab_size]` of the distributions that they were drawn
            from; `None` if they were not drawn at random.
        """
        end = input_ids.shape[1] - 1  # of what the target has seen
        count = min(self.num_drafts, self.max_length - end - 2)
        if is_first_iteration or count < 1:
            self._capture.captured.clear()
            return input_ids, None
        # True positions, below 0 for padding on the left.
        mask = (model_kwargs or {}).get("attention_mask")
        counted = torch.ones_like(input_ids) if mask is None else mask[:, : input_ids.shape[1]]
        counted = torch.nn.functional.pad(counted, (0, input_ids.shape[1] - counted.shape[1]), value=1)
        positions = counted.cumsum(-1) - 1
        if not self.context.end:  # the prompt's forward is over
            self._unseen = 0 if mask is None else int((counted == 0).sum())
            self._round = Round(0, shows_attention=True)  # to whom it likes
            weakref.finalize(self, self.pair.target.rounds.add(self._round))
        self._round.position = end - self._unseen
        self._take_in(input_ids, positions, end)
        switch = self.pair.target.rope_switch
        if switch is not None:
            count = int(min(count, switch.max_drafts(1 + int(positions[0, -1]))))
            if count < 1:
                return input_ids, None
        cache = (model_kwargs or {}).get(CACHE)
        cached = None if cache is None else CachedText(cache, real=None if mask is None else counted[:, :end])
        request = DraftRequest(self.context, input_ids, positions, count, self.sampler, cached)
        (tree,) = self.pair.draft([request])
        drafts = tree.tokens[None].to(input_ids.device)
        q = [part for part in tree.q or () if part is not None]
        logits = torch.stack(q).log()[None] if q and len(q) == len(tree) else None
        return torch.cat([input_ids, drafts], dim=1), logits

    def update_candidate_strategy(self, input_ids: torch.LongTensor, scores: torch.Tensor, num_matches: int) -> None:
        """Do nothing: the next call of [`get_candidates`] sees what was accepted."""

    def _take_in(self, ids: torch.Tensor, positions: torch.Tensor, end: int) -> None:
        """Give the drafter the tokens that the target's last forward was right about, without padding."""
        start, residual = self.context.end, None
        if self.pair.facts.layer_ids:
            captured = self._capture.captured.pop() if self._capture.captured else None
            reads_all = start > 0 or getattr(self.pair.drafter, "reads_each_token", True)  # of a copy of this code
            if captured is None or (reads_all and captured.shape[1] < end - start):
                raise ValueError(
                    f"The target has not been run over the tokens {start} to {end} since the last candidates: "
                    "expected one forward a round, in the thread that made the generator, and an empty cache at first."
                )
            residual = captured[:, : end - start]
            start = end - residual.shape[1]  # a target's last layers may run a prompt's last token alone
        real = slice(0 if self.context.end else max(0, int((positions[0] < 0).sum()) - start), None)
        positions, following = positions.clamp(min=0)[:, start:end], ids[:, start + 1 : end + 1]
        residual = None if residual is None else residual[:, real]
        self.pair.extend(self.context, residual, positions[:, real], following[:, real])
        self.context.end = end
