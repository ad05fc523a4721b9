"""What is known of a target's tokens: whether a drafter's ids are the same, and which token no text has."""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from transformers import (
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from .target import Target

logger = logging.getLogger(__name__)

_RENAMED = 0.01  # of the tokens: a fine-tuned model's names for some that were reserved

# For each target, the numbers of tokens of drafters and its own that were found to fit: a line says so once.
_fitting: WeakKeyDictionary[PreTrainedModel, set[tuple[int, int]]] = WeakKeyDictionary()

# Tokens that no text of a family has, where its vocabulary does not show it, by the text model's type and the size of
# its vocabulary: what DeepSeek's own DSpark drafter masks with, and `<|reserved_200000|>` of gpt-oss, whose padding
# token ends texts, too. Its chat format leaves that one unused, and other DFlash drafters mask with it.
_MASK_TOKENS = {("deepseek_v4", 129280): 128799, ("gpt_oss", 201088): 200000}
# The names of tokens that a tokenizer reserves for later uses, and
_RESERVED = re.compile(r"reserved|unused|place.?holder|(extra|dummy|control|special)(.id|.token)?.?\d", re.IGNORECASE)
# of the marks between a repository's files, issues and notebooks in a pretraining corpus (StarCoder's).
_DOCUMENT_MARKS = re.compile(
    r"repo_?name|file_?(name|sep)|gh_stars|issue_|jupyter_|empty_output|commit_(before|msg|after)"
)


def check_vocabulary(config: PreTrainedConfig, target: Target, fix: str) -> None:
    """Raise a `ValueError` with a `fix` if the token ids of a drafter's configuration are not the target's. The target
    may have more: a fine-tuned one, to whose embedding rows were added, is taken to be a copy of the drafter's own
    unless something tells otherwise, and a line says so."""
    own, targets = config.get_text_config(decoder=True).vocab_size, target.config.vocab_size
    fitting = _fitting.setdefault(target.model, set())
    # Of a target that had as many, the ids are the same whatever was added since.
    why = "" if own >= targets or (own, own) in fitting else _why_others(config, target, own)
    if own > targets or why:
        raise ValueError(
            f"The drafter was made for a target with `vocab_size` {own}, but this target's is {targets}. {why}{fix}"
        )
    if own < targets and (own, targets) not in fitting:
        logger.warning(
            "The target has %d tokens and the drafter was made for %d: the first %d are taken to be the same, as of a "
            "fine-tuned target with more rows in its embedding.",
            targets,
            own,
            own,
        )
    fitting.add((own, targets))


def _why_others(config: PreTrainedConfig, target: Target, count: int) -> str:
    """Return what tells that a target with more tokens is no copy of a drafter's own, which has `count`, in a sentence
    and a space; `""` if nothing does."""
    own, model = target.config, target.model
    kind, layers = (getattr(config, f"target_{name}", None) for name in ("model_type", "num_layers"))
    if kind and kind != own.model_type:
        return f"It is a {own.model_type} model, not a {kind} one. "
    if layers and own.num_hidden_layers not in (0, layers):  # 0: it was loaded for its head alone
        return f"It has {own.num_hidden_layers} layers, not {layers}. "
    given = model.config._name_or_path or model.name_or_path
    for name in (config._name_or_path, getattr(config, "target_name_or_path", "")):
        are_same = _have_same_ids(name, count, given, own.vocab_size)
        if are_same is not None:
            return "" if are_same else "Its tokenizer gives other ids. "
    if own.vocab_size > count + count // 2:  # special tokens, and rows that pad to a multiple, are few
        return f"Where no tokenizers are here to be compared, it may have {count + count // 2} at most. "
    return ""


@functools.cache
def _have_same_ids(name: str, count: int, other: str, other_count: int) -> bool | None:
    """Return whether the tokenizer beside some weights, `other`, has the ids of the one beside `name`, and maybe more;
    `None` if one of them is not on this machine."""
    ours, theirs = tokenizer_at(name, count), tokenizer_at(other, other_count)
    if ours is None or theirs is None:
        return None
    ids, others = ours.get_vocab(), theirs.get_vocab()
    return sum(others.get(token) != id for token, id in ids.items()) <= _RENAMED * len(ids)


def tokenizer_at(name: str, vocab_size: int) -> PreTrainedTokenizerBase | None:
    """Return the tokenizer beside weights of so many tokens, by their folder, GGUF file or Hub id, if it is on this
    machine."""
    if not name:
        return None
    path = Path(name)
    try:
        if path.suffix == ".gguf":  # `AutoTokenizer` goes through the whole file once more for its type
            found: Any = PreTrainedTokenizerFast.from_pretrained(
                path.parent, gguf_file=path.name, local_files_only=True
            )
        else:
            found = AutoTokenizer.from_pretrained(name, local_files_only=True, trust_remote_code=False)
        return found if 2 * len(found) > vocab_size else None  # where there is none, some kinds come with five tokens
    except Exception as error:  # whoever asks does without
        logger.info("No tokenizer was found in %s: %s", path.name, error)
        return None


# The token that stands at the draft positions of a block


def find_mask_token(target: Target, tokenizer: PreTrainedTokenizerBase | None = None) -> int | None:
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
    config = target.config
    tokenizer = tokenizer or tokenizer_at(target.model.config._name_or_path, config.vocab_size)
    found = next(_candidates(target, tokenizer), None)
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
    if (config.model_type, config.vocab_size) in _MASK_TOKENS:
        yield _MASK_TOKENS[config.model_type, config.vocab_size], "the target family's own"
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
