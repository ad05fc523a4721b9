"""How drafts are drawn for a request: greedily or at random, after those logits processors that may run on drafts.

A draft that the target rejects was never part of the text, so a processor that remembers what it was called with must
not see it. Drafting without one costs acceptance, never correctness: what is drafted is verified with all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from transformers import LogitsProcessorList
from transformers.generation import logits_process as stock

from .tree import DraftTree

# What they return depends on the prefix and the scores that they are given, and on nothing that came before.
_STATELESS = {
    "EncoderNoRepeatNGramLogitsProcessor", "EncoderRepetitionPenaltyLogitsProcessor", "EpsilonLogitsWarper",
    "EtaLogitsWarper", "ExponentialDecayLengthPenalty", "ForcedBOSTokenLogitsProcessor",
    "ForcedEOSTokenLogitsProcessor",
    "InfNanRemoveLogitsProcessor", "LogitNormalization", "MinLengthLogitsProcessor",
    "MinNewTokensLengthLogitsProcessor", "MinPLogitsWarper", "NoBadWordsLogitsProcessor",
    "NoRepeatNGramLogitsProcessor",
    "RepetitionPenaltyLogitsProcessor", "SequenceBiasLogitsProcessor", "SuppressTokensAtBeginLogitsProcessor",
    "SuppressTokensLogitsProcessor", "TemperatureLogitsWarper", "TopHLogitsWarper", "TopKLogitsWarper",
    "TopPLogitsWarper",
    "TypicalLogitsWarper", "WatermarkLogitsProcessor",
}  # fmt: skip


def without_state(processors: LogitsProcessorList) -> LogitsProcessorList:
    """Those of `processors`, in their order, that are transformers' own and known to keep no state."""
    known = {getattr(stock, name, None) for name in _STATELESS}  # not every version has each
    return LogitsProcessorList(processor for processor in processors if type(processor) in known)


class DraftSampler:
    """Draws drafted tokens of one row as its request draws text.

    Args:
        processors: The request's.
        do_sample: Whether it samples.
    """

    def __init__(self, processors: LogitsProcessorList, do_sample: bool) -> None:
        self.processors, self.do_sample = without_state(processors), do_sample

    def draw(self, prefix: torch.Tensor, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """A token after a prefix.

        Args:
            prefix: `[1, seq]`, the text and the drafts before.
            logits: The drafter's, `[1, config.vocab_size]`.

        Returns:
            The token, `[1]`, and the distribution `[config.vocab_size]` that it was drawn from; `None` if it is the
            most probable one.
        """
        scores = self.processors(cast(torch.LongTensor, prefix), cast(Any, logits.to(prefix.device, torch.float32)))
        if not self.do_sample:
            return scores.argmax(-1), None
        q = scores.softmax(-1)
        return torch.multinomial(q, num_samples=1).squeeze(1), q[0]

    def chain(self, ids: torch.Tensor, logits: torch.Tensor) -> DraftTree:
        """Tokens one after the other, from logits that do not depend on them.

        Args:
            ids: `[1, seq]`, the text.
            logits: The drafter's, `[1, drafts, config.vocab_size]`.
        """
        if not self.do_sample and not len(self.processors):
            return DraftTree.chain(logits.argmax(-1)[0])
        return self.path(ids, logits.shape[1], lambda k, _: logits[:, k])

    def path(
        self, ids: torch.Tensor, count: int, logits_after: Callable[[int, torch.Tensor], torch.Tensor]
    ) -> DraftTree:
        """Tokens one after the other, each from logits that know those before it.

        Args:
            ids: `[1, seq]`, the text.
            count: How many.
            logits_after: The drafter's logits `[1, config.vocab_size]` of draft position k, from k and the token
                before it, `[1]`.
        """
        q: list[torch.Tensor | None] = []
        length = ids.shape[1]
        for k in range(count):
            token, drawn_from = self.draw(ids, logits_after(k, ids[:, -1]))
            ids, q = torch.cat([ids, token[:, None]], dim=1), [*q, drawn_from]
        return DraftTree.chain(ids[0, length:], q if self.do_sample else None)
