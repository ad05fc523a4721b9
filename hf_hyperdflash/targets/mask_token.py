"""Finds the token that stands at the draft positions of a block: one of the target's vocabulary that no text has."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .registry import target_of, tokenizer_at
from .target import Target

logger = logging.getLogger(__name__)

# The names of tokens that a tokenizer reserves for later uses, and
_RESERVED = re.compile(r"reserved|unused|place.?holder|(extra|dummy|control|special)(.id|.token)?.?\d", re.IGNORECASE)
# of the marks between a repository's files, issues and notebooks in a pretraining corpus (StarCoder's).
_DOCUMENT_MARKS = re.compile(
    r"repo_?name|file_?(name|sep)|gh_stars|issue_|jupyter_|empty_output|commit_(before|msg|after)"
)


def find_mask_token(target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None) -> int | None:
    """Return a token that can stand for "not known yet", and log which one and why. `None` if there is none: the
    drafter then has a mask vector of its own.

    The first of these that exists, except tokens that the chat template names: the tokenizer's mask token; the first
    id after the tokenizer's last, where the embedding has more rows (z-lab's drafters for Qwen3 use it); a token that
    the tokenizer reserves for later uses; a padding token that does not end texts, too; and, where there is a chat
    template, a special token that marks the parts of documents in pretraining alone.

    Args:
        target: The target.
        tokenizer: Its tokenizer; by default the one beside its weights. Nothing is downloaded for that.

    Raises:
        ValueError: If `tokenizer` is no tokenizer.
    """
    if tokenizer is not None and not hasattr(tokenizer, "mask_token_id"):
        raise ValueError(
            f"`tokenizer` is {tokenizer!r:.60}, expected a tokenizer: load it with `AutoTokenizer.from_pretrained` "
            "first."
        )
    seen = target_of(target)
    config = seen.config
    tokenizer = tokenizer or tokenizer_at(seen.model.config._name_or_path, config.vocab_size)
    found = next(_candidates(seen, tokenizer), None)
    if found is None:
        logger.warning(
            "The drafter gets a mask vector of its own: of the %s target's vocabulary of %d tokens, %s. This package "
            "trains it and drafts with it; other layouts and serving engines need a token: `mask_token_id` "
            "(`--mask_token_id`), the id of one that never occurs in text.",
            config.model_type,
            config.vocab_size,
            "none is sure to be in no text" if tokenizer else "whose tokenizer is not known (pass `tokenizer`), none",
        )
        return None
    token, what = found
    logger.warning("The drafter's mask token is %d, %s. `mask_token_id` chooses another.", token, what)
    return token


def _candidates(target: Target, tokenizer: PreTrainedTokenizerBase | None) -> Iterator[tuple[int, str]]:
    """Yield pairs of a token and what it is, the best first."""
    config = target.config
    # With these texts begin or end, or have what the tokenizer does not know.
    ends: set[int] = set()
    for owner in (config, target.model.generation_config, tokenizer):
        for name in ("bos_token_id", "eos_token_id", "unk_token_id"):
            value = getattr(owner, name, None)
            ends |= set(value if isinstance(value, list) else [] if value is None else [value])
    if tokenizer is not None and tokenizer.mask_token_id is not None:
        yield tokenizer.mask_token_id, f"the tokenizer's {tokenizer.mask_token!r}"
    if target.mask_token_id is not None:
        yield target.mask_token_id, "the target family's own"
    if tokenizer is not None:
        unused = max(tokenizer.get_vocab().values()) + 1
        if unused < config.vocab_size:
            yield unused, "the first that the tokenizer does not use"
        template = str(tokenizer.chat_template or "")
        added = {
            id: text
            for text, id in sorted(tokenizer.get_added_vocab().items(), key=lambda entry: entry[1])
            if id not in ends and text not in template
        }
        for token, text in added.items():
            if _RESERVED.search(text):
                yield token, f"{text!r}, which the tokenizer reserves"
    pad = config.pad_token_id if tokenizer is None else tokenizer.pad_token_id
    if pad is not None and 0 <= pad < config.vocab_size and pad not in ends:
        yield pad, "the padding token"
    if tokenizer is not None and template:  # without a template, texts may be such documents
        for token in reversed(added):
            if _DOCUMENT_MARKS.search(added[token]) and tokenizer.added_tokens_decoder[token].special:
                yield token, f"{added[token]!r}, which chats have no use for"
