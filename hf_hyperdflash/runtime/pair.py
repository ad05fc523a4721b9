"""Whether a drafter fits a target."""

from __future__ import annotations

import logging
from pathlib import PurePath
from typing import Any

from transformers import PreTrainedModel

from .targets import check_layers, family_of

logger = logging.getLogger(__name__)


def check_pair(config: Any, target: PreTrainedModel, drafter: str) -> None:
    """Check that a drafter's configuration fits a target; warn where only the target's name differs.

    Args:
        config: The drafter's.
        target: The target.
        drafter: Its class, for the message.

    Raises:
        ValueError: Naming both values, if they cannot work together.
    """
    family = family_of(target)
    own = family.config
    kind = getattr(config, "target_model_type", "")
    kind = f", a {kind} model," if kind else ""
    for what, drafters, targets in (
        ("vocab_size", config.vocab_size, own.vocab_size),
        ("hidden_size", config.target_hidden_size, own.hidden_size),
        ("hc_mult", config.target_hc_mult, family.paths),
    ):
        if drafters != targets:
            raise ValueError(
                f"The drafter was made for a target with `{what}` {drafters}, but this target's is {targets}. Load "
                f"the drafter's own target{kind} or make a drafter with `{drafter}.from_target(target)`."
            )
    deepest = max(config.target_layer_ids or [-1])
    if own.num_hidden_layers and deepest >= own.num_hidden_layers:  # loaded without layers: for its head alone
        raise ValueError(
            f"The drafter reads layers {config.target_layer_ids}, but this target's are 0 to "
            f"{own.num_hidden_layers - 1} (-1 for the last)."
        )
    check_layers(family, config.target_layer_ids or [-1])
    if (getattr(config, "mask_token_id", None) or 0) >= own.vocab_size:
        raise ValueError(
            f"The drafter's mask token {config.mask_token_id} is outside the target's vocabulary of {own.vocab_size}."
        )
    made_for, given = PurePath(config.target_name_or_path).name, PurePath(target.config._name_or_path).name
    if made_for and given and made_for.lower() != given.lower():
        logger.warning(
            "The drafter was made for %r and is used with %r: the text stays the target's own, but fewer drafts may "
            "be accepted.",
            config.target_name_or_path,
            target.config._name_or_path,
        )
