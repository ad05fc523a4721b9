"""Whether the token ids of a target are those that a drafter was made for."""

from __future__ import annotations

import functools
import logging
from weakref import WeakKeyDictionary

from transformers import PreTrainedConfig, PreTrainedModel

from ..targets.mask_token import tokenizer_at
from ..targets.target import Target

logger = logging.getLogger(__name__)

_MOST_ADDED = 2048  # rows: special tokens of a fine-tuned model, and what pads an embedding to a multiple
_RENAMED = 0.01  # of the tokens: a fine-tuned model's names for some that were reserved

# For each target, the numbers of tokens that were reported: a copy of a drafter is not reported again.
_said: WeakKeyDictionary[PreTrainedModel, set[tuple[int, int]]] = WeakKeyDictionary()


def check_vocabulary(config: PreTrainedConfig, target: Target, fix: str) -> None:
    """Check that the token ids of a drafter's configuration are the target's. The target may have more: a fine-tuned
    one, to whose embedding rows were added, is taken to be a copy of the drafter's own unless something tells
    otherwise, and a line says so.

    Args:
        config: The drafter's.
        target: The target.
        fix: For the message.

    Raises:
        ValueError: If there are other ids.
    """
    own, targets = config.get_text_config(decoder=True).vocab_size, target.config.vocab_size
    if own == targets:
        return
    why = _why_others(config, target, targets - own) if own < targets else ""
    if own > targets or why:
        raise ValueError(
            f"The drafter was made for a target with `vocab_size` {own}, but this target's is {targets}{why}. {fix}"
        )
    said = _said.setdefault(target.model, set())
    if (own, targets) not in said:
        said.add((own, targets))
        logger.warning(
            "The target has %d tokens and the drafter was made for %d: the first %d are taken to be the same, as of a "
            "fine-tuned target with more rows in its embedding.",
            targets,
            own,
            own,
        )


def _why_others(config: PreTrainedConfig, target: Target, added: int) -> str:
    """Return what tells that a target's ids are others than those of a drafter's own, in words that go on from the
    numbers of tokens; `""` if nothing does.

    Args:
        config: The drafter's.
        target: The target.
        added: How many tokens it has more.
    """
    own, model = target.config, target.model
    kind, layers = (getattr(config, f"target_{name}", None) for name in ("model_type", "num_layers"))
    if kind and kind != own.model_type:
        return f" and it is a {own.model_type} model, not a {kind} one"
    if layers and own.num_hidden_layers not in (0, layers):  # 0: it was loaded for its head alone
        return f" and it has {own.num_hidden_layers} layers, not {layers}"
    given = model.config._name_or_path or model.name_or_path
    for name in (config._name_or_path, getattr(config, "target_name_or_path", "")):
        are_same = _have_same_ids(name, given)
        if are_same is not None:
            return "" if are_same else ", whose tokenizer has other ids"
    if added > _MOST_ADDED:
        return f", expected at most {_MOST_ADDED} more where no tokenizers are here to be compared"
    return ""


@functools.cache
def _have_same_ids(name: str, other: str) -> bool | None:
    """Return whether the tokenizer beside some weights, `other`, has the ids of the one beside `name`, and maybe more;
    `None` if one of them is not on this machine."""
    ours, theirs = (tokenizer_at(each) for each in (name, other))
    if ours is None or theirs is None:
        return None
    ids, others = ours.get_vocab(), theirs.get_vocab()
    return sum(others.get(token) != id for token, id in ids.items()) <= _RENAMED * len(ids)
