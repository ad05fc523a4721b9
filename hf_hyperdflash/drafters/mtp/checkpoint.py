"""Reads the MTP heads in a target's checkpoint, and those that were saved apart, which have the same layout."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

from ...targets.registry import target_of
from ..deepseek_v4.checkpoint import CheckpointTensors
from ..weights import HubOptions, check_source
from .families import AROUND, FAMILIES, REFUSED, text_config_of

if TYPE_CHECKING:
    from typing_extensions import Unpack

Read = Callable[[], torch.Tensor]


class HeadTensors(CheckpointTensors):
    """The tensors of the MTP heads in a checkpoint in safetensors, by the names that a saved drafter has for them.

    Files are fetched when tensors are read, and only those with such tensors in them.

    Args:
        name: Path or Hub id.
        config: The checkpoint's text configuration.
        hub_kwargs: Arguments of `cached_file`.

    Raises:
        ValueError: If there are no such tensors.
    """

    drafter = "MTPDrafter"

    def __init__(self, name: str, config: PreTrainedConfig, hub_kwargs: HubOptions) -> None:
        self._own_name = FAMILIES[config.model_type].own_name(config)
        super().__init__(name, config, hub_kwargs)

    def own_name(self, stored: str) -> str:
        return self._own_name(stored)

    def none_found(self) -> str:
        return (
            f"{self.name} has no tensors of MTP heads, expected those of a {self.config.model_type}'s. transformers' "
            "`save_pretrained` drops them: pass the path or Hub id of the original checkpoint."
        )


def carries_heads(fields: Mapping[str, Any]) -> bool:
    """Return whether a config.json is of a target of a family with MTP heads, even if [`heads_in`] refuses it."""
    text = fields.get("text_config")
    kinds = fields.get("model_type"), text.get("model_type") if isinstance(text, dict) else None
    return not {*FAMILIES, *REFUSED, *AROUND}.isdisjoint(kinds)


def heads_in(target: PreTrainedModel | str | Path, **hub_kwargs: Unpack[HubOptions]) -> tuple[Any, HeadTensors]:
    """Return a target's configuration and the tensors of the heads in its checkpoint, by the path or Hub id of that,
    or by the loaded target.

    Raises:
        ValueError: If its family has no MTP heads, or its configuration or its checkpoint none.
    """
    if isinstance(target, PreTrainedModel):
        target_of(target)  # says what a target is, if it is none
        config, name = target.config, target.config._name_or_path
        hub_kwargs["revision"] = hub_kwargs.get("revision") or getattr(config, "_commit_hash", None)
    else:
        check_source(target, "target")
        name = str(target)
        config = AutoConfig.from_pretrained(name, **hub_kwargs)
    own = text_config_of(config)
    if own.model_type in REFUSED:
        raise ValueError(
            f"{name} is a {own.model_type} model, whose MTP head is not read: {REFUSED[own.model_type]}. "
            f"`hf-hyperdflash drafters {name}` lists other drafters for it."
        )
    family = FAMILIES.get(own.model_type)
    if family is None or not family.heads(own):
        why = f"is a {own.model_type} model" if family is None else "says in its config.json that it has none"
        raise ValueError(
            f"{name} {why}, expected a target with MTP heads ({', '.join(FAMILIES)}). "
            f"`hf-hyperdflash drafters {name}` lists other drafters for it."
        )
    return config, HeadTensors(name, own, hub_kwargs)


def is_done(rule: Any, stored: Iterable[str]) -> bool:
    """Return whether a checkpoint stores what one of transformers' rules would make. Qwen3.6 stores the experts of a
    layer as one tensor, and Qwen3.5 each."""
    made = rule.target_patterns if isinstance(rule, WeightConverter) else ()
    return any(re.search(pattern, name) for pattern in made for name in stored)


def converted(
    tensors: Mapping[str, Read], rules: list[Any], model: PreTrainedModel
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a model's tensors, one at a time, that transformers' rules make of those of a checkpoint.

    Args:
        tensors: A function for each name that returns its tensor.
        rules: The renamings, then the conversions.
        model: The model, of whose tensors some rules read sizes.
    """
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    made: dict[str, Any] = {}
    for name in sorted(tensors, key=dot_natural_key):
        key, pattern = rename_source_key(name, renamings, converters)
        each = made.setdefault(key, deepcopy(by_pattern[pattern]) if pattern else WeightRenaming(name, key))
        each.add_tensor(key, name, pattern or name, cast(Any, tensors[name]))
    for key, each in made.items():
        for name, value in each.convert(key, model=model, config=model.config).items():
            yield name, value[0] if isinstance(value, list) else value
