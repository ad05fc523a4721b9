"""Where a target's rotary frequencies depend on the length of its text, which limits what can be drafted.

The frequencies depend on the highest position of a forward, drafts included, whether or not those are accepted. So a
round over the length at which they change would apply new frequencies to tokens for which plain decoding uses the old.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from transformers import PreTrainedConfig

# They run a text from its start again, in a new cache, once it is longer than the length of the switch.
_RESTARTING = frozenset({"phi3", "phimoe", "phi4_multimodal"})


class RopeSwitch(NamedTuple):
    """A length of the text at which rotary frequencies change."""

    length: int
    is_at_every_token: bool  # whether they change with every token from there on, or only once

    def max_drafts(self, seen: int) -> float:
        """Return how deep the drafts of a round may go after `seen` tokens, the anchor included."""
        if seen <= self.length:
            return self.length - seen
        return 0 if self.is_at_every_token else math.inf


def rope_switch_of(config: PreTrainedConfig) -> RopeSwitch | None:
    """Return the switch of a target by its text configuration; `None` if its frequencies never change."""
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [each for each in (rope, *rope.values()) if isinstance(each, Mapping) and each.get("rope_type")]
    if any("dynamic" in each["rope_type"] for each in kinds):
        return RopeSwitch(config.max_position_embeddings, is_at_every_token=True)
    lengths = [each["original_max_position_embeddings"] for each in kinds if each["rope_type"] == "longrope"]
    return RopeSwitch(min(lengths), is_at_every_token=False) if lengths else None


def check_restart(config: PreTrainedConfig, length: int, max_length: int, padding: int) -> None:
    """Raise a `ValueError` if a target starts its cache anew while a text grows from `length` to `most` tokens. The
    target does not see the first `padding` of them."""
    at = getattr(config, "original_max_position_embeddings", None)
    if config.model_type in _RESTARTING and at is not None and length - padding <= at < max_length - padding:
        raise ValueError(
            f"A {config.model_type} target starts its cache anew at {at + 1} tokens, where no draft can be taken "
            f"back: expected a text that ends before, and one of {length - padding} may have {max_length - padding}. "
            f"Set `max_length={at + padding}`, or leave `assistant_model` out."
        )
