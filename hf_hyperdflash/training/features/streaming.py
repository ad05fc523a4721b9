"""Training beside the producers: rows of a feature folder that is being filled, and parts that are deleted once a
checkpoint is past them."""

from __future__ import annotations

import math
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset, Sampler
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback, TrainerControl, TrainerState

from .identity import check_identity, feature_identity, identity_key, is_by_weights
from .locking import hold
from .parts import (
    Reader,
    check_joined,
    part_bytes,
    part_defect,
    read_lists,
    read_reader,
    read_row,
    row_digest,
    write_reader,
)
from .writing import Rows

_POLL, _TELL_AGAIN = 0.2, 60  # seconds between two looks for a part, and two lines about it


class StreamedFeatures(Dataset[dict[str, torch.Tensor]]):
    """Rows of a dataset with their residual from a folder that producers fill. An item waits until its part is there.

    Items are in the order of the folder's list, in which producers make them, whatever the order of the rows. Loss
    masks are the rows' own. A row that no list has is a `ValueError`, and so is a folder of another target, layers,
    number format or tokenizer.

    Args:
        directory: The folder. Without a list, the call waits for one.
        rows: Tokenized rows, map-style.
        target: The target, which needs no layers.
        dtype: Of the features.
        target_layer_ids: The layers that items have.
        tokenizer: The target's, if it is known.
    """

    def __init__(
        self,
        directory: Path,
        rows: Rows,
        target: PreTrainedModel,
        dtype: str,
        target_layer_ids: Sequence[int],
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        self.directory, self.target_layer_ids = directory, list(target_layer_ids)
        lists = _Patience().wait_for(lambda: read_lists(directory), f"a list of features in {directory}")
        self._patience = _Patience()
        there = lists[0].identity
        by_weights = is_by_weights(there)
        here = feature_identity(
            target, dtype=dtype, target_layer_ids=target_layer_ids, tokenizer=tokenizer, by_weights=by_weights
        )
        check_identity(directory, there, here)
        check_joined(lists)
        self.identity, self.key, self.lists = there, identity_key(there), lists
        self.rows: Any = rows.with_format("torch") if hasattr(rows, "with_format") else rows
        self._match()

    def _match(self) -> None:
        """Find the place of each row in the lists. Equal rows take the places of equal rows, one each."""
        waiting = defaultdict[str, list[int]](list)
        for i in range(len(self.rows)):
            row = self.rows[i]
            digest = row_digest(torch.as_tensor(row["input_ids"]), torch.as_tensor(row["position_ids"]))
            waiting[digest].append(i)
        last: dict[str, tuple[int, int]] = {}
        places: list[tuple[int, int, int]] = []  # list, row in it, row of the dataset
        for number, each in enumerate(self.lists):
            for row_there, digest in enumerate(each.digests):
                if digest in waiting:
                    last[digest] = number, row_there
                    if waiting[digest]:
                        places.append((number, row_there, waiting[digest].pop(0)))
        missing = [i for digest, left in waiting.items() if digest not in last for i in left]
        if missing:
            raise ValueError(
                f"{len(missing)} of {len(self.rows)} rows are not in the lists of {self.directory}, the first is row "
                f"{min(missing)}: make them with `hf-hyperdflash features` and the flags of this command about rows "
                "(`--dataset`, `--max_length`, `--packing`, `--chat_template`)."
            )
        places += [(*last[digest], i) for digest, left in waiting.items() for i in left]
        self.places = sorted(places)

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        """Return `input_ids`, `position_ids`, `loss_mask` and `residual` of the row that the list has at place `i`, as
        [`FeatureCache`] does."""
        number, row_there, i = self.places[i]
        owner = self.lists[number]
        at, row_in_part = owner.place(row_there)
        part = owner.parts[at]
        path = part.path(self.directory)

        def is_there() -> bool:
            if (defect := part_defect(path, self.key)) not in ("", "missing"):
                raise ValueError(f"The part {path} is {defect}: delete it, and have it made again.")
            return not defect

        self._patience.wait_for(is_there, f"part {at + 1} of {len(owner.parts)} in {self.directory}")
        found = read_row(path, row_in_part, self.identity["target_layer_ids"], self.target_layer_ids)
        own = self.rows[i]
        if not torch.equal(found["input_ids"], torch.as_tensor(own["input_ids"]).long()):
            raise ValueError(
                f"The part {path} has other tokens than its list says: delete it, and have it made again."
            )
        return {**found, "loss_mask": torch.as_tensor(own["loss_mask"]).bool()}


class FolderOrder(Sampler[int]):
    """The order of the folder in the first epoch, a random one in later ones, when all parts are there.

    The last of several processes' batches, `batch` rows together, are filled up with the last rows once more:
    accelerate would take the first ones, which may be deleted."""

    def __init__(self, rows: int, batch: int, seed: int, epoch: Callable[[], int]) -> None:
        self.rows, self.batch, self.seed, self.epoch = rows, batch, seed, epoch

    def __len__(self) -> int:
        return self.rows + -self.rows % self.batch

    def __iter__(self) -> Iterator[int]:
        order, epoch = list(range(self.rows)), self.epoch()
        if epoch:
            generator = torch.Generator().manual_seed(self.seed + epoch)
            order = torch.randperm(self.rows, generator=generator).tolist()
        more = len(self) - self.rows
        return iter(order + (order * more)[-more:] if more else order)


class _Patience:
    """Waits, and says now and then for what."""

    def __init__(self) -> None:
        self.told_at = -math.inf

    def wait_for(self, look: Callable[[], Any], what: str) -> Any:
        """Return what `look` returns once it is something."""
        again = ""
        while not (found := look()):
            if time.monotonic() - self.told_at > _TELL_AGAIN:
                print(f"Waiting for {what}, which is not made yet.{again}", file=sys.stderr, flush=True)
                self.told_at, again = time.monotonic(), " Is `hf-hyperdflash features` still running?"
            time.sleep(_POLL)
        return found


class DeletesTrainedParts(TrainerCallback):
    """Deletes parts that training is done with, and says so to the producers, who wait for it.

    A part is done with once a checkpoint is past its last row, so that a killed run finds the rows that it goes on
    with. Checkpoints are written as often as the size of the folder needs. A run that goes on from an earlier
    checkpoint has parts made again.

    Args:
        rows: The training rows.
        held_out: The rows of evaluations, whose parts stay.
        step_rows: Rows of an optimizer step, of all processes together.
        ahead: Rows that data loaders may read before their step.
        gigabytes: What the folder may hold.
    """

    def __init__(
        self,
        rows: StreamedFeatures,
        held_out: Sequence[StreamedFeatures],
        step_rows: int,
        ahead: int,
        gigabytes: float | None,
    ) -> None:
        if len(rows.lists) != 1:
            raise ValueError(
                f"`feature_retention` is 'delete', and {rows.directory} has {len(rows.lists)} lists, expected one: "
                "make all rows with one command, or 'keep' them."
            )
        self.rows, self.list, self.step_rows, self.gigabytes = rows, rows.lists[0], step_rows, gigabytes
        parts = self.list.parts
        self._part_of = [self.list.place(row)[0] for _, row, _ in rows.places]  # of each training row
        pinned = {self.list.place(row)[0] for each in held_out for _, row, _ in each.places}
        self.pinned = max(pinned, default=-1) + 1
        if self.pinned > len(pinned):
            raise ValueError(
                f"Held-out rows are in {len(pinned)} parts of {rows.directory} up to part {self.pinned}: training "
                "would delete some. Make the features with its `--eval_rows` or `--eval_dataset`, and its `--seed`."
            )
        sizes = (part_bytes(rows.identity, part.rows, part.tokens) for part in parts)
        self._starts = list(accumulate(sizes, initial=0))
        self.limit = None if gigabytes is None else int(gigabytes * 1e9)
        self._check_limit(ahead)
        self.reader = read_reader(rows.directory, self.list.path)
        self._saved_rows = 0

    def _check_limit(self, ahead: int) -> None:
        if self.limit is None:
            return
        count, at_once = len(self._part_of), self.step_rows + ahead
        spans = (
            self._starts[self._part_of[min(first + at_once, count) - 1] + 1] - self._starts[self._part_of[first]]
            for first in range(count)
        )
        needed = self._starts[self.pinned] + 2 * max(spans, default=0)
        if self.limit < needed:
            raise ValueError(
                f"`feature_gigabytes` is {self.gigabytes:g}, expected at least {needed / 1e9:.3g}: the held-out rows, "
                "and twice what a step trains on and what is read ahead. Allow more, or train on fewer rows at once."
            )

    def _first_needed(self, step: int) -> int:
        """Return the first part that is needed after a step."""
        done = step * self.step_rows
        return max(self.pinned, self._part_of[done] if done < len(self._part_of) else len(self.list.parts))

    def _release(self, state: TrainerState, is_over: bool = False) -> None:
        """Delete what a run that goes on from here does not need."""
        self._saved_rows = min(state.global_step * self.step_rows, len(self._part_of))
        if not state.is_world_process_zero:
            return
        first = self._first_needed(state.global_step)
        needed_again = {part.name for part in (*self.list.parts[: self.pinned], *self.list.parts[first:])}
        for part in self.list.parts[self.pinned : first]:
            if part.name not in needed_again:
                part.path(self.rows.directory).unlink(missing_ok=True)
        write_reader(self.rows.directory, Reader(self.list.path.name, first, self.pinned, self.gigabytes, is_over))

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if state.is_world_process_zero:
            self._lock = hold(self.rows.directory / "reader", "trained on")
        self._release(state)

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        done = min(state.global_step * self.step_rows, len(self._part_of)) - 1
        held = (
            self._starts[self._part_of[done] + 1]
            - self._starts[self._first_needed(self._saved_rows // self.step_rows)]
        )
        if self.limit is not None and held > (self.limit - self._starts[self.pinned]) / 2:
            control.should_save = True

    def on_save(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._release(state)

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if state.is_world_process_zero:
            write_reader(self.rows.directory, read_reader(self.rows.directory, self.list.path)._replace(is_over=True))
            self._lock.release()
