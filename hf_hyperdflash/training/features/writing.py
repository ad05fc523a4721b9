"""Writes the missing parts of a feature folder. Several processes share the work: each claims a part before it makes
it, and a claim ends with its process.

What makes a part is a [`Producer`]: a target in this process, or a client of an engine that writes files itself.
"""

from __future__ import annotations

import shutil
import sys
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import accumulate, islice, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

import torch
from rich.filesize import decimal
from transformers import PreTrainedModel

from ...targets.registry import target_of
from ..losses.objective import compute_document_residuals, split_documents
from ..runs.progress import progress_bar
from .identity import Identity, check_identity, identity_key
from .locking import claim, one_at_a_time
from .part_file import SPACE_ADVICE, encode, part_name, row_digest, save_part
from .parts import Part, Reader, list_path, part_bytes, part_defect, read_lists, read_reader, write_list

if TYPE_CHECKING:
    import datasets

Rows: TypeAlias = "datasets.Dataset | Sequence[Mapping[str, Any]]"
Row = dict[str, torch.Tensor]

SHARD_SIZE = 256 * 2**20  # the work that a killed call may lose
_RESERVED_BYTES = 64 * 2**20  # stays free on the disk: for file headers, the list, and other programs
_POLL, _TELL_AGAIN = 0.2, 60  # seconds between two looks at what others do, and two lines about it
_LOOK_AHEAD = 4096  # parts that may be claimed at a time
_OTHERS = "Waiting for parts that other processes make."
_COLUMNS = ("input_ids", "loss_mask", "position_ids")


class Job(NamedTuple):
    """A part that is to be made, claimed by this process."""

    part: Part
    path: Path  # of the file, which has to be there, whole, when the job is done
    identity: Identity  # what to store: its layers, its dtype
    rows: list[Row]  # `input_ids` and `position_ids` of each, long, `[seq]`
    first_row: int  # the number of the first in the dataset
    progress: Callable[[int], object]  # takes the number of tokens that are done

    @property
    def key(self) -> str:
        """What the file's header has as `identity`."""
        return identity_key(self.identity)


class Producer(Protocol):
    """What makes the parts of a feature folder."""

    identity: Identity  # of what it makes; a folder with more layers is written as it is
    vocab_size: int
    concurrency: int  # threads that call `make` at the same time
    rows_per_part: int | None  # of new parts; `None` for as many as fit into a part's size

    def check(self, longest: int) -> None:
        """Raise a `ValueError` or an `OSError` if it cannot make parts of rows of up to `longest` tokens."""

    def make(self, job: Job) -> None:
        """Make the file of a part, or have it made, atomically ([`save_part`])."""


class TargetProducer:
    """A target in this process, which runs over `batch_size` documents at once. One without weights is loaded by
    `load` once a part is missing."""

    concurrency = 1
    rows_per_part: int | None = None

    def __init__(
        self,
        target: PreTrainedModel,
        identity: Identity,
        batch_size: int = 8,
        load: Callable[[], PreTrainedModel] | None = None,
    ) -> None:
        self.target, self.identity, self.batch_size, self.load = target, identity, batch_size, load
        self.vocab_size: int = target_of(target).config.vocab_size

    def check(self, longest: int) -> None:
        self.target = self.load() if self.load else self.target
        if not len(target_of(self.target).layers):
            raise ValueError(
                "The feature cache is not complete, and this target has no layers to run. Load it whole, without "
                "`num_hidden_layers=0`."
            )

    def make(self, job: Job) -> None:
        """Compute the residual of all rows in batches of documents of similar length."""
        ids, positions = (torch.cat([row[name] for row in job.rows]) for name in ("input_ids", "position_ids"))
        ends = list(accumulate(len(row["input_ids"]) for row in job.rows))
        starts = (positions == 0).nonzero().flatten().tolist()
        documents = split_documents(ids, positions)
        # Longest first, so that too little memory shows at once. Batches end with the part, so that its bytes do not
        # depend on the call that writes it.
        order = sorted(range(len(documents)), key=lambda i: -len(documents[i]))
        stored: dict[str, torch.Tensor] = {}
        for at in range(0, len(order), self.batch_size):
            batch = order[at : at + self.batch_size]
            layers = job.identity["target_layer_ids"]
            states = compute_document_residuals(self.target, [documents[i] for i in batch], layers)
            for i, residual in zip(batch, states):
                if not residual.isfinite().all():
                    raise ValueError(
                        f"The target's residual of row {job.first_row + bisect_right(ends, starts[i])} is not finite: "
                        "it would make the loss NaN. Load the target in bfloat16 or float32, or leave that row out."
                    )
                for name, value in encode(residual, job.identity["dtype"]).items():
                    if name not in stored:
                        stored[name] = torch.empty((ends[-1], *value.shape[1:]), dtype=value.dtype)
                    stored[name][starts[i] : starts[i] + len(value)] = value.cpu()
                job.progress(len(residual))
        save_part(job.path, job.key, job.rows, stored)


class FeatureWriter:
    """Plans the parts of a dataset's rows in a folder, and has the missing ones made.

    Rows are map-style, one per training sequence: `input_ids`, `loss_mask` (0 or 1) and `position_ids` (counting from
    0 in every packed document), lists of integers of one length. A `ValueError` says what does not fit: rows, or what
    is in the folder.

    Args:
        directory: The folder.
        rows: The rows, in the order in which training is to read them.
        producer: What makes the parts.
        shard_size: Bytes of a new part, unless the producer says how many rows it has; a longer row has its own.
        share: `(3, 8)` makes the third of eight shares of the parts alone, the others are made elsewhere.
        gigabytes: What the folder may hold, while a training deletes parts ([`Reader`]) that it is done with.
    """

    def __init__(
        self,
        directory: Path,
        rows: Rows,
        producer: Producer,
        shard_size: int = SHARD_SIZE,
        share: tuple[int, int] = (1, 1),
        gigabytes: float | None = None,
    ) -> None:
        self.directory, self.producer, self.shard_size, self.share = directory, producer, shard_size, share
        self.gigabytes = gigabytes
        self.rows: Any = rows.with_format("numpy") if hasattr(rows, "with_format") else rows
        if not hasattr(rows, "__len__") or not len(rows):
            found = "empty" if hasattr(rows, "__len__") else f"a {type(rows).__name__} of unknown length"
            raise ValueError(
                f"The rows are {found}: expected a map-style dataset with at least one row. Load it without "
                "`streaming=True`."
            )
        self.lengths, self.digests, masks = list[int](), list[str](), list[torch.Tensor]()
        for i in range(len(rows)):
            row = self._read_columns(i)
            self.lengths.append(len(row["input_ids"]))
            self.digests.append(row_digest(row["input_ids"], row["position_ids"]))
            masks.append(row["loss_mask"].bool())
        self.masks = torch.cat(masks)
        self._is_stopped = threading.Event()
        self._mutex = threading.Lock()
        self._busy: set[int] = set()  # parts that threads of this process make
        self._claimed_elsewhere: dict[int, float] = {}  # when that was seen
        self.plan()

    def plan(self) -> None:
        """Group the rows, as the parts that are there have them, and refuse a folder with parts of other rows."""
        self.identity, there = self.producer.identity, read_lists(self.directory)
        for each in there:
            check_identity(self.directory, each.identity, self.identity)
            self.identity = each.identity  # which may have more layers
        written = {part for each in there for part in each.parts}
        self.parts = self._group(written)
        if others := written - set(self.parts):
            raise ValueError(
                f"The feature cache in {self.directory} has other data, {sum(part.rows for part in others)} rows that "
                f"are not among these {len(self.rows)} with these tokens and positions. Use the rows that it was "
                "written with, or another directory."
            )
        self.first_rows = list(accumulate((part.rows for part in self.parts), initial=0))
        self.key = identity_key(self.identity)
        self.list_path = list_path(self.directory, self.identity, self.parts, self.masks)
        sizes = (part_bytes(self.identity, part.rows, part.tokens) for part in self.parts)
        self._starts = list(accumulate(sizes, initial=0))  # bytes before each part, and of all

    def _read_columns(self, i: int) -> Row:
        row = self.rows[i]
        columns = {name: torch.tensor(row.get(name, ()), dtype=torch.long) for name in _COLUMNS}
        ids, mask, positions = columns.values()
        if not (ids.shape == mask.shape == positions.shape == (ids.numel(),)) or not ids.numel():
            raise ValueError(
                f"Row {i} has columns of the shapes { {name: list(value.shape) for name, value in columns.items()} }: "
                "expected lists of one length, at least 1. Tokenize the dataset first."
            )
        vocab_size = self.producer.vocab_size
        for name, largest in (("input_ids", vocab_size - 1), ("loss_mask", 1)):
            low, high = columns[name].aminmax()
            if low < 0 or high > largest:
                raise ValueError(
                    f"Row {i} has `{name}` from {low} to {high}, expected 0 to {largest}, with the target's own "
                    f"tokenizer and its vocabulary of {vocab_size}."
                )
        if positions[0] != 0 or ((positions[1:] != 0) & (positions[1:] != positions[:-1] + 1)).any():
            raise ValueError(f"The `position_ids` of row {i} do not count 0, 1, 2, .. in each of its documents.")
        return columns

    def _group(self, known: set[Part]) -> list[Part]:
        """Group the rows: as known parts have them, else as many as the producer wants, or up to `shard_size` bytes; a
        longer row gets its own part."""
        counts, parts, start = sorted({part.rows for part in known}, reverse=True), list[Part](), 0

        def group(stop: int) -> Part:
            return Part(part_name(self.digests[start:stop]), stop - start, sum(self.lengths[start:stop]))

        while start < len(self.rows):
            count = next((n for n in counts if group(start + n) in known), 0) or self.producer.rows_per_part or 0
            if not count:
                sizes = accumulate(part_bytes(self.identity, 1, self.lengths[i]) for i in range(start, len(self.rows)))
                within = (n for n, size in enumerate(sizes) if size > self.shard_size)
                count = max(1, next(within, len(self.rows) - start))
            parts.append(group(min(start + count, len(self.rows))))
            start += parts[-1].rows
        return parts

    def missing(self) -> list[int]:
        """Return the numbers of the parts that this call has to make: not there, damaged, or of another identity."""
        reader, (share, shares) = read_reader(self.directory, self.list_path), self.share
        numbers = (i for i in range(share - 1, len(self.parts), shares) if not _is_trained(i, reader))
        return [i for i in numbers if part_defect(self.parts[i].path(self.directory), self.key)]

    def complete(self) -> None:
        """Write the list and have all missing parts made, here or by others that are at work in the folder.

        A disk without space is a `ValueError` before anything is written, a write that fails an `OSError`; what is
        written stays, and the same call goes on after it."""
        if [each.path for each in read_lists(self.directory)] == [self.list_path] and not self.missing():
            return  # also where nothing can be written
        self.directory.mkdir(parents=True, exist_ok=True)
        with one_at_a_time(self.directory / "features"):
            self.plan()  # again: until now another process may have written there
            missing = self.missing()
            self._check_space(missing)
            if missing:
                self.producer.check(max(self.lengths))
            if not self.list_path.exists():
                write_list(self.list_path, self.identity, self.parts, self.digests, self.lengths, self.masks)
            for earlier in read_lists(self.directory):  # all of whose parts are in this list
                if earlier.path != self.list_path:
                    earlier.delete()
        self._left, self._began, self._made = dict.fromkeys(missing), time.monotonic(), 0
        self._tokens_done = self._seen_first = 0
        total = sum(self.parts[i].tokens for i in missing)
        with progress_bar(total=total, unit="token", unit_scale=True, desc="Feature cache", disable=None) as self._bar:
            if self.producer.concurrency == 1:
                self._work()
                return
            with ThreadPoolExecutor(self.producer.concurrency) as pool:
                try:
                    for thread in [pool.submit(self._work) for _ in range(self.producer.concurrency)]:
                        thread.result()
                finally:  # of Ctrl-C, too: no thread begins another part
                    self._is_stopped.set()

    def summary(self) -> str:
        """Say what the folder has now: missing parts, and files that are none of its."""
        reader = read_reader(self.directory, self.list_path)
        trained = sum(_is_trained(i, reader) for i in range(len(self.parts)))
        defects = [part_defect(part.path(self.directory), self.key) for part in self.parts]
        missing = [i for i, defect in enumerate(defects) if defect and not _is_trained(i, reader)]
        said = f"{len(self.parts) - len(missing) - trained} of {len(self.parts)} parts are in {self.directory}"
        said += f", {trained} were trained on and deleted" if trained else ""
        if missing:
            said += f", {len(missing)} are not: the first is part {missing[0] + 1}, {self.parts[missing[0]].name}"
            said += f", {defects[missing[0]]}" * (defects[missing[0]] != "missing")
        known = {part.name for part in self.parts}
        if foreign := sorted({path.stem for path in self.directory.glob("*.safetensors")} - known):
            said += f"; {len(foreign)} files are of other rows, the first {foreign[0]}"
        return f"{said}."

    def _check_space(self, missing: Sequence[int]) -> None:
        """Print how large the cache is, and refuse a disk without space for it."""
        sizes = [stop - start for start, stop in pairwise(self._starts)]
        needed, free = sum(sizes[i] for i in missing), shutil.disk_usage(self.directory).free
        allowed = self._limit
        limit = f", at most {decimal(allowed)} at a time" if allowed and allowed < needed else ""
        print(
            f"Feature cache in {self.directory}: {len(self.rows):,} rows, {sum(self.lengths):,} tokens, "
            f"{decimal(sum(sizes))} as {self.identity['dtype']}. To be written: "
            f"{decimal(needed)}{limit}, free on the disk: {decimal(free)}."
        )
        if allowed and max(sizes) > allowed:
            raise ValueError(
                f"`feature_gigabytes` is {allowed / 1e9:g}, and a part of the features takes up to "
                f"{decimal(max(sizes))}: allow more."
            )
        needed = min(needed, allowed or needed)
        if free < needed + _RESERVED_BYTES:
            raise ValueError(
                f"The feature cache needs {decimal(needed)} more in {self.directory}, where {decimal(free)} are free "
                f"({decimal(_RESERVED_BYTES)} stay reserved). {SPACE_ADVICE}"
            )

    @property
    def _limit(self) -> int | None:
        """The bytes that the folder may hold, as this call or the training beside it says."""
        given = (self.gigabytes, read_reader(self.directory, self.list_path).gigabytes)
        return min((int(each * 1e9) for each in given if each is not None), default=None)

    def _fits(self, i: int, reader: Reader) -> bool:
        """Return whether a part may be made now: all from the first that training needs up to this one can be in the
        folder at once. So everybody knows without counting files, and the next part that training needs always
        fits."""
        limit = self._limit
        if limit is None or i < reader.pinned:
            return True
        first = max(reader.first, reader.pinned)
        return self._starts[reader.pinned] + self._starts[i + 1] - self._starts[first] <= limit

    # The work of one thread

    def _work(self) -> None:
        try:
            while not self._is_stopped.is_set():
                with self._claimed() as i:
                    if i is None:
                        return
                    self._make(i)
        except BaseException:
            self._is_stopped.set()
            raise

    def _make(self, i: int) -> None:
        part, first = self.parts[i], self.first_rows[i]
        rows = [self._read_columns(row) for row in range(first, first + part.rows)]
        path = part.path(self.directory)
        self.producer.make(Job(part, path, self.identity, rows, first, self._bar.update))
        if defect := part_defect(path, self.key):
            raise OSError(f"The part {path} was made, and is {defect}.")
        with self._mutex:
            self._made += 1
            self._tokens_done += part.tokens
            if self._made == self.producer.concurrency:  # each thread has made one
                speed = self._tokens_done / (time.monotonic() - self._began)
                left = sum(self.parts[number].tokens for number in self._left) - part.tokens
                print(
                    f"{speed:,.0f} tokens a second here: {_duration(left / speed)} for the other {left:,}, if nobody "
                    "helps and nothing waits.",
                    flush=True,
                )

    @contextmanager
    def _claimed(self) -> Iterator[int | None]:
        """Claim the first part that nobody makes, and yield its number; `None` once all are there, or this process
        makes the others. Wait for those that others make: if they die, the parts have to be made here."""
        told, told_at = "", 0.0
        while not self._is_stopped.is_set():
            reader, why = read_reader(self.directory, self.list_path), ""
            with self._mutex:
                if reader.first < self._seen_first:  # training goes on from an earlier checkpoint
                    self._left = dict.fromkeys(self.missing())
                self._seen_first = reader.first
                first = list(islice(self._left, _LOOK_AHEAD))
            for i in first:
                path = self.parts[i].path(self.directory)
                with self._mutex:
                    if i in self._busy or i not in self._left:  # another thread's
                        continue
                    if _is_trained(i, reader) or not part_defect(path, self.key):
                        del self._left[i]
                        continue
                    if not self._fits(i, reader):
                        why = (
                            f"Training needs part {reader.first + 1} of {len(self.parts)} next: waiting until "
                            f"`train --feature_retention delete` has deleted some, because the folder holds "
                            f"{decimal(self._limit or 0)} at most."
                        )
                        break
                    if time.monotonic() - self._claimed_elsewhere.get(i, -_POLL) < _POLL:
                        why = why or _OTHERS
                        continue
                    self._busy.add(i)
                try:
                    with claim(path) as is_ours:
                        if not is_ours:
                            self._claimed_elsewhere[i], why = time.monotonic(), why or _OTHERS
                        elif part_defect(path, self.key):  # as it was before the claim
                            yield i
                            self._left.pop(i, None)
                            return
                finally:
                    self._busy.discard(i)
            if why and reader.is_over:
                print(f"Training is over: {len(self._left)} parts are not made.", file=sys.stderr, flush=True)
                why = ""
            if not why:
                break
            if why != told or time.monotonic() - told_at > _TELL_AGAIN:
                print(why, file=sys.stderr, flush=True)
                told, told_at = why, time.monotonic()
            time.sleep(_POLL)
        yield None


def _is_trained(i: int, reader: Reader) -> bool:
    return reader.pinned <= i < reader.first


def _duration(seconds: float) -> str:
    return f"{seconds / 3600:.1f} hours" if seconds >= 3600 else f"{seconds / 60:.1f} minutes"
