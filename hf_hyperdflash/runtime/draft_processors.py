"""Which of a request's logits processors may run on drafts.

A draft that the target rejects was never part of the text, so a processor that remembers what it was called with must not
see it. Drafting without one costs acceptance, never correctness: what is drafted is verified with all of them.
"""

from __future__ import annotations

from transformers import LogitsProcessorList
from transformers.generation import logits_process as stock

# What they return depends on the prefix and the scores that they are given, and on nothing that came before.
_STATELESS = {
    "EncoderNoRepeatNGramLogitsProcessor", "EncoderRepetitionPenaltyLogitsProcessor", "EpsilonLogitsWarper",
    "EtaLogitsWarper", "ExponentialDecayLengthPenalty", "ForcedBOSTokenLogitsProcessor", "ForcedEOSTokenLogitsProcessor",
    "InfNanRemoveLogitsProcessor", "LogitNormalization", "MinLengthLogitsProcessor",
    "MinNewTokensLengthLogitsProcessor", "MinPLogitsWarper", "NoBadWordsLogitsProcessor", "NoRepeatNGramLogitsProcessor",
    "RepetitionPenaltyLogitsProcessor", "SequenceBiasLogitsProcessor", "SuppressTokensAtBeginLogitsProcessor",
    "SuppressTokensLogitsProcessor", "TemperatureLogitsWarper", "TopHLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper",
    "TypicalLogitsWarper", "WatermarkLogitsProcessor",
}  # fmt: skip


def without_state(processors: LogitsProcessorList) -> LogitsProcessorList:
    """Those of `processors`, in their order, that are transformers' own and known to keep no state."""
    known = {getattr(stock, name, None) for name in _STATELESS}  # not every version has each
    return LogitsProcessorList(processor for processor in processors if type(processor) in known)
