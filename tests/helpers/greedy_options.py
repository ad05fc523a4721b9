"""Requests for greedy text after a prompt of 20 tokens, in the many ways that `generate` takes them."""

import torch
from transformers import GenerationConfig, LogitsProcessorList, RepetitionPenaltyLogitsProcessor

GREEDY_OPTIONS = {
    "length": dict(max_length=29),
    "one token": dict(max_new_tokens=1),
    "two tokens": dict(max_new_tokens=2),
    "processors": dict(max_new_tokens=25, repetition_penalty=1.3, no_repeat_ngram_size=3, min_new_tokens=20),
    "bad words": dict(max_new_tokens=25, bad_words_ids=[[5], [6, 7]]),
    "config object": dict(generation_config=GenerationConfig(max_new_tokens=25, do_sample=False)),
    "attention mask": dict(max_new_tokens=25, attention_mask=torch.ones(1, 20, dtype=torch.long)),
    "chunked prefill": dict(max_new_tokens=25, prefill_chunk_size=6),
    "own processor": dict(
        max_new_tokens=25, logits_processor=LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.5)])
    ),
}
