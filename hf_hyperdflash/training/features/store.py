"""The feature cache: the target's residual of a dataset's rows on disk, written once and read many times.

[`~parts`] says what files it has, [`~writing`] who makes them, [`~identity`] what may be put together.
"""

from __future__ import annotations

import copy
import logging
import os
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .identity import Identity, check_identity, describe_target, feature_identity, identity_key, is_by_weights
from .part_file import sha256
from .parts import Part, PartList, check_joined, part_defect, read_lists, read_row
from .writing import SHARD_SIZE, FeatureWriter, Rows, TargetProducer

logger = logging.getLogger(__name__)


class FeatureCache(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """The residual of every row of a dataset, by default the pre-collapse one, from which the teacher's logits follow.

    A target loaded with `num_hidden_layers=0` is enough to train from the cache. `identity` is what the residual
    depends on, `parts` are the files in the order of the rows, and items have the streams of `target_layer_ids`.
    Anything but one complete cache of the target, or several that can be joined, is a `ValueError`.
    """

    def __init__(self, directory: str | os.PathLike[str], target: PreTrainedModel | Identity) -> None:
        """Open the cache for a target, or for its description ([`~identity.describe_target`])."""
        directory = self.directory = Path(directory)
        lists = read_lists(directory)
        if not lists:
            if not isinstance(target, dict):
                describe_target(target)  # raises if it is no target
            raise ValueError(f"No feature cache in {directory}: write one with `FeatureCache.write`.")
        self.identity = lists[0].identity
        if not isinstance(target, dict):
            target = describe_target(target, by_weights=is_by_weights(self.identity))
        check_identity(directory, self.identity, {"target": target})
        check_joined(lists)
        self.parts: list[Part] = []
        self._sources: list[tuple[PartList, int]] = []  # the list of each part, and its first row there
        for each in lists:
            seen = set(self.parts)  # rows that two lists have are there once
            for part, first_row in zip(each.parts, each.first_rows):
                if part not in seen:
                    self.parts.append(part)
                    self._sources.append((each, first_row))
        key = identity_key(self.identity)
        defects = [(part, part_defect(part.path(directory), key)) for part in self.parts]
        if missing := [(part, defect) for part, defect in defects if defect]:
            raise ValueError(
                f"The feature cache in {directory} is unfinished: {len(missing)} of {len(self.parts)} parts are not "
                f"whole, the first of them {missing[0][0].name}, which is {missing[0][1]}. Run `FeatureCache.write` "
                "again with the same arguments: it writes only what is missing."
            )
        if foreign := {path.stem for path in directory.glob("*.safetensors")} - {part.name for part in self.parts}:
            logger.warning(
                "%s has %d parts of no list, the first %s: not read.", directory, len(foreign), min(foreign)
            )
        self._first_rows = list(accumulate((part.rows for part in self.parts), initial=0))
        self.target_layer_ids: Sequence[int] = self.identity["target_layer_ids"]

    def select_layers(self, target_layer_ids: Sequence[int]) -> FeatureCache:
        """Return the same cache with items that have the streams of these layers only, or raise a `ValueError` if one
        of them is not stored."""
        check_identity(self.directory, self.identity, {"target_layer_ids": target_layer_ids})
        chosen = copy.copy(self)
        chosen.target_layer_ids = list(target_layer_ids)
        return chosen

    @classmethod
    def write(
        cls,
        directory: str | os.PathLike[str],
        rows: Rows,
        target: PreTrainedModel,
        *,
        dtype: str = "bfloat16",
        target_layer_ids: Sequence[int] = (-1,),
        tokenizer: PreTrainedTokenizerBase | None = None,
        batch_size: int = 8,
        shard_size: int = SHARD_SIZE,
    ) -> FeatureCache:
        """Write the residual of all rows, continue an interrupted call, or open a complete cache.

        Rows are those of [`~writing.FeatureWriter`]. `"float8"` is e4m3 with a float32 scale per token and stream. A
        repeated call ends in the same bytes as an uninterrupted one, and calls of several processes share the work.
        Parts of some of the rows that are there already are used, and a cache with more layers is opened for the given
        ones. A new part begins after `shard_size` bytes; about twice as much memory is used.

        What does not fit, rows, disk, what is in the directory, is a `ValueError` before anything is written; a write
        that fails is an `OSError`.
        """
        path = Path(directory)
        there = read_lists(path)
        identity = feature_identity(
            target,
            dtype=dtype,
            target_layer_ids=target_layer_ids,
            tokenizer=tokenizer,
            by_weights=bool(there) and is_by_weights(there[0].identity),
        )
        FeatureWriter(path, rows, TargetProducer(target, identity, batch_size), shard_size).complete()
        return cls(path, identity["target"]).select_layers(target_layer_ids)

    def __len__(self) -> int:
        return self._first_rows[-1]

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        """Return `input_ids` and `position_ids` (long), `loss_mask` (bool), `[seq]` each, and `residual`,
        `[seq, len(target_layer_ids) * config.hc_mult, config.hidden_size]`, float32 if stored so, else bfloat16."""
        i = range(len(self))[i]
        at = bisect_right(self._first_rows, i) - 1
        row = i - self._first_rows[at]
        source, first_row = self._sources[at]
        read = read_row(
            self.parts[at].path(self.directory), row, self.identity["target_layer_ids"], self.target_layer_ids
        )
        return {**read, "loss_mask": source.mask_of(first_row + row)}

    @property
    def digest(self) -> str:
        """The SHA-256 of what is stored of which rows."""
        names = dict.fromkeys(each.path.stem for each, _ in self._sources)
        return sha256(identity_key(self.identity), *names, *(part.name for part in self.parts))
