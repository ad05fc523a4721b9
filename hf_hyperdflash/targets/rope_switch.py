"""Where a target's rotary frequencies depend on how long its text is, and with them what can be drafted.

They follow the highest position of a forward, drafts included, whether or not those are accepted. So a round that
passes the length at which they change would turn the keys of tokens that plain decoding turns by what was before.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

# Which run a text from its start again once it is longer, in a new cache.
_RESTARTING = frozenset({"phi3", "phimoe", "phi4_multimodal"})


class RopeSwitch(NamedTuple):
    """A length of the text at which rotary frequencies change."""

    length: int
    is_at_every_token: bool  # once for all, or with every token from there on

    def most_drafts(self, seen: int) -> float:
        """How many drafts a round may have, one after the other, after `seen` tokens, the anchor included."""
        if seen <= self.length:
            return self.length - seen
        return 0 if self.is_at_every_token else math.inf


def rope_switch_of(config: Any) -> RopeSwitch | None:
    """A target's, by its text configuration; `None` where frequencies are the same for texts of any length."""
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [of for of in (rope, *rope.values()) if isinstance(of, Mapping) and of.get("rope_type")]
    if any("dynamic" in of["rope_type"] for of in kinds):
        return RopeSwitch(config.max_position_embeddings, is_at_every_token=True)
    lengths = [of["original_max_position_embeddings"] for of in kinds if of["rope_type"] == "longrope"]
    return RopeSwitch(min(lengths), is_at_every_token=False) if lengths else None


def check_restart(config: Any, length: int, most: int) -> None:
    """Raise a `ValueError` if a target starts its cache anew while a text grows from `length` to `most` tokens."""
    at = getattr(config, "original_max_position_embeddings", None)
    if config.model_type in _RESTARTING and at is not None and length <= at < most:
        raise ValueError(
            f"A {config.model_type} target starts its cache anew at {at + 1} tokens, where no draft can be taken "
            f"back: expected a text that ends before, and this one may have {most}. Set `max_length={at}`, or leave "
            "`assistant_model` out."
        )
