"""The feature cache: the target's residual of a dataset's rows on disk, written once and read many times."""

from __future__ import annotations

import copy
import errno
import hashlib
import json
import os
import reprlib
import shutil
import time
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypedDict

import torch
from safetensors import safe_open
from safetensors.torch import save
from tqdm import tqdm as PlainBar
from transformers import PreTrainedModel

from ...targets.registry import target_of
from ..runs.progress import progress_bar
from .capture import compute_document_residuals, split_documents
from .fingerprint import config_fields, target_fingerprint
from .locking import only_writer

if TYPE_CHECKING:
    import datasets

Rows: TypeAlias = "datasets.Dataset | Sequence[Mapping[str, Any]]"

_INDEX, _FORMAT, _UNFINISHED = "features.json", 2, ".tmp"
_INDEX_FIELDS = {
    "version", "target", "dtype", "target_layer_ids", "hc_mult", "hidden_size", "rows", "tokens", "rows_sha256",
    "shards",
}  # fmt: skip
_SHARD_FIELDS = {"name", "rows", "tokens", "bytes", "sha256"}
FEATURE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float8": torch.float8_e4m3fn}
_COLUMNS = {"input_ids": torch.int32, "loss_mask": torch.bool, "position_ids": torch.int32}
_SHARD_SECONDS, _SHARD_SIZE = 15, 2 * 2**30  # of a shard without a given size: the work that a killed call may lose
_RESERVED_BYTES = 64 * 2**20  # stays free on the disk: for file headers, the index, and other programs
_SPACE_ADVICE = (
    "Free some space or choose another directory, store it as dtype='float8' (half of bfloat16), use fewer rows, or "
    "train with feature_source='online', which stores nothing."
)


class TargetIdentity(TypedDict):
    """What an index says of the target that wrote the cache: fingerprints of its weights, and its configuration."""

    name: str
    head: str
    body: str
    config: dict[str, Any]


class Shard(TypedDict):
    """A file of a cache; `bytes` and `sha256` are known once it is written."""

    name: str
    rows: int
    tokens: int
    bytes: int | None
    sha256: str | None


class Index(TypedDict):
    """The file that says what is in a cache."""

    version: int
    target: TargetIdentity
    dtype: str
    target_layer_ids: list[int]
    hc_mult: int
    hidden_size: int
    rows: int
    tokens: int
    rows_sha256: str
    shards: list[Shard]


class FeatureCache(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """The target's residual streams of every row of a dataset, on disk: written once, read many times.

    By default it is the pre-collapse residual. Nothing else of the target is stored: the teacher's logits follow from
    the residual ([`~training.losses.teacher.teacher_states`]). Items are those of [`FeatureCache.__getitem__`]. A
    shard's checksum is verified once per process, before its first item is returned; after [`FeatureCache.verify`]
    data loader workers skip that.

    Args:
        directory: Where [`FeatureCache.write`] put it.
        target: The target it was written from. Loaded with `num_hidden_layers=0` it is enough to train from the cache:
            then only embedding, final norm, collapse and language model head are compared.

    Raises:
        ValueError: If there is no complete cache, a shard is missing or has another size, another target wrote it, or
            it is no target.
    """

    def __init__(self, directory: str | os.PathLike[str], target: PreTrainedModel) -> None:
        self._open(_folder(directory), _describe_target(target))

    def _open(self, directory: Path, identity: TargetIdentity) -> None:
        self.directory = directory
        self.index = _read_index(directory, identity)
        _check_shards(directory, self.index["shards"])
        self._first_rows = _first_rows(self.index)
        self._verified: set[str] = set()
        self.target_layer_ids: Sequence[int] = self.index["target_layer_ids"]

    def select_layers(self, target_layer_ids: Sequence[int]) -> FeatureCache:
        """Return the same cache with items that have the streams of these layers only.

        Raises:
            ValueError: If one of them is not stored.
        """
        _check_layers(self.directory, self.index, target_layer_ids)
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
        batch_size: int = 8,
        shard_size: int | None = None,
    ) -> FeatureCache:
        """Write the residual of all rows, continue an interrupted call, or open a complete cache.

        Prints the size before it writes. Shards appear under their names only when they are whole, and an interrupted
        call, repeated with the same arguments, goes on after them. With a given `shard_size` it ends in the same bytes
        as an uninterrupted one. Shards that were deleted are written again.

        Args:
            directory: Created if missing.
            rows: Map-style dataset, one row per training sequence: `input_ids`, `loss_mask` (0 or 1) and
                `position_ids` (counting from 0 in every packed document), lists of integers of one length.
            target: The target, in eval mode.
            dtype: `"float32"`, `"bfloat16"`, or `"float8"`: e4m3 with a float32 scale per token and stream.
            target_layer_ids: Layers whose streams are stored, as in [`capture_residual`]. A cache that exists and has
                more of them is opened for these.
            batch_size: Documents per forward of the target.
            shard_size: Bytes after which a new file begins; about twice as much memory is used. `None` for the bytes
                that this target computes in 15 seconds, measured when a cache begins, and at most 2 GiB: a killed call
                loses no more. A cache that exists continues with its own size.

        Raises:
            ValueError: If the rows are malformed, the disk is too small, the residual is not finite, the directory
                holds a cache of other rows, another target or another dtype, or another process is writing there.
            OSError: If writing fails. Shards that are complete stay; the same call continues after them.
        """
        path = _folder(directory)
        writer = _Writer(path, rows, target, dtype, target_layer_ids, batch_size)
        if not (path / _INDEX).exists() or writer.missing(writer.read_begun_index()):
            path.mkdir(parents=True, exist_ok=True)
            with only_writer(path / _INDEX):
                writer.complete(shard_size)
        cache = cls.__new__(cls)
        cache._open(path, writer.plan["target"])  # to compute it may read the target from disk, so it is reused
        return cache.select_layers(target_layer_ids)

    def __len__(self) -> int:
        return self.index["rows"]

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        """Return row `i` of the dataset.

        Returns:
            `input_ids` and `position_ids` (long), `loss_mask` (bool), `[seq]` each, and `residual`
            `[seq, len(target_layer_ids) * config.hc_mult, config.hidden_size]`, float32 if stored so, else bfloat16.

        Raises:
            ValueError: If the shard of the row is damaged.
        """
        if not -len(self) <= i < len(self):
            raise IndexError(f"Row {i} of a feature cache with {len(self)} rows.")
        i %= len(self)
        shard = bisect_right(self._first_rows, i) - 1
        name = self.index["shards"][shard]["name"]
        if name not in self._verified:
            self._verify([self.index["shards"][shard]])
        row = _read_row(self.directory / name, i - self._first_rows[shard])
        stored = self.index["target_layer_ids"]
        if list(self.target_layer_ids) != stored:
            for part in row.keys() & {"residual", "scale"}:
                layers = dict(zip(stored, row[part].chunk(len(stored), dim=1)))
                row[part] = torch.cat([layers[layer] for layer in self.target_layer_ids], dim=1)
        if "scale" in row:
            row["residual"] = (row["residual"].float() * row.pop("scale").unsqueeze(-1)).bfloat16()
        return {**row, "input_ids": row["input_ids"].long(), "position_ids": row["position_ids"].long()}

    def verify(self) -> None:
        """Compare the checksums of all shards.

        Raises:
            ValueError: Naming every shard that is damaged or belongs to another cache.
        """
        self._verify(self.index["shards"])

    def _verify(self, shards: list[Shard]) -> None:
        damaged = [shard["name"] for shard in shards if _sha256(self.directory / shard["name"]) != shard["sha256"]]
        if damaged:
            raise ValueError(
                f"{', '.join(damaged)} in {self.directory}: not what was written there (the SHA-256 differs), damaged "
                "or from another cache. Delete what is named and run `FeatureCache.write` again with the same "
                "arguments: it writes only what is missing."
            )
        self._verified.update(shard["name"] for shard in shards)


class _Writer:
    """Writes the missing shards of one cache. Its `plan` is the index of the cache without shards."""

    def __init__(
        self,
        directory: Path,
        rows: Rows,
        target: PreTrainedModel,
        dtype: str,
        target_layer_ids: Sequence[int],
        batch_size: int,
    ) -> None:
        family = target_of(target)
        if dtype not in FEATURE_DTYPES:
            raise ValueError(f"`dtype` is {dtype!r}, expected one of {sorted(FEATURE_DTYPES)}.")
        self.rows = rows.with_format("numpy") if hasattr(rows, "with_format") else rows
        self.directory, self.target, self.batch_size = directory, target, batch_size
        self.lengths, digest = self._scan(family.config.vocab_size)
        self.speed = 0.0  # tokens that the target computes in a second, once that is measured
        self.plan: Index = {
            "version": _FORMAT,
            "target": _describe_target(target),
            "dtype": dtype,
            "target_layer_ids": list(target_layer_ids),
            "hc_mult": family.streams,
            "hidden_size": family.config.hidden_size,
            "rows": len(self.lengths),
            "tokens": sum(self.lengths),
            "rows_sha256": digest,
            "shards": [],
        }

    def _scan(self, vocab_size: int) -> tuple[list[int], str]:
        """Check all rows, and return their lengths and the SHA-256 of their contents."""
        if not hasattr(self.rows, "__len__") or not len(self.rows):
            found = "empty" if hasattr(self.rows, "__len__") else f"a {type(self.rows).__name__} of unknown length"
            raise ValueError(
                f"The rows are {found}: expected a map-style dataset with at least one row. Load it without "
                "`streaming=True`."
            )
        lengths, digest = [], hashlib.sha256()
        for i in range(len(self.rows)):
            row = self._read_columns(i)
            _check_row(i, row, vocab_size)
            lengths.append(len(row["input_ids"]))
            digest.update(lengths[-1].to_bytes(8, "little"))
            for column in row.values():
                digest.update(column.numpy().tobytes())
        return lengths, digest.hexdigest()

    def _read_columns(self, i: int) -> dict[str, torch.Tensor]:
        row = self.rows[i]
        if missing := _COLUMNS.keys() - row.keys():
            raise ValueError(
                f"Row {i} has the columns {sorted(row)}, {sorted(missing)} are missing. Tokenize the dataset first."
            )
        return {name: torch.tensor(row[name], dtype=torch.long) for name in _COLUMNS}

    def read_begun_index(self) -> Index:
        """Read the index of a cache that was begun, and refuse one that differs from the plan."""
        index = _read_index(self.directory, self.plan["target"])
        differing = [
            f"{label} ({there} there, {here} here)"
            for label, there, here in (
                ("`dtype`", index["dtype"], self.plan["dtype"]),
                ("the number of rows", index["rows"], self.plan["rows"]),
                ("the number of tokens", index["tokens"], self.plan["tokens"]),
                (
                    "the SHA-256 of the rows' tokens, loss masks and positions",
                    index["rows_sha256"],
                    self.plan["rows_sha256"],
                ),
            )
            if there != here
        ]
        if differing:
            raise ValueError(
                f"The feature cache in {self.directory} differs in {', '.join(differing)}. Choose another directory, "
                "delete this one, or pass what it was written with."
            )
        _check_layers(self.directory, index, self.plan["target_layer_ids"])
        return index

    def missing(self, index: Index) -> list[int]:
        return [i for i, shard in enumerate(index["shards"]) if not _is_whole(self.directory / shard["name"], shard)]

    def complete(self, shard_size: int | None) -> None:
        """Write the missing shards of a cache that was begun or of a new one."""
        if not self.plan["target"]["body"]:
            raise ValueError(
                f"The feature cache in {self.directory} is not complete, and this target has no layers to run. Load "
                "it whole, without `num_hidden_layers=0`."
            )
        if (self.directory / _INDEX).exists():
            index = self.read_begun_index()
        else:
            index = {**self.plan, "shards": self._shards(shard_size or self._timed_shard_size())}
            self._announce_duration(index["tokens"])
        if missing := self.missing(index):  # another process may have written it until now
            self._prepare_disk(index, missing)
            self._write_shards(index, missing)

    def _timed_shard_size(self) -> int:
        """Return the bytes of features that the target computes in `_SHARD_SECONDS`, measured by one forward."""
        order = sorted(range(len(self.lengths)), key=lambda i: -self.lengths[i])
        longest = [self._read_columns(i) for i in order[: self.batch_size]]
        found = [part for row in longest for part in split_documents(row["input_ids"], row["position_ids"])]
        documents = sorted(found, key=len)[-self.batch_size :]
        began = time.perf_counter()
        for residual in compute_document_residuals(self.target, documents, self.plan["target_layer_ids"]):
            residual.cpu()
        self.speed = sum(map(len, documents)) / (time.perf_counter() - began)
        return min(_SHARD_SIZE, _size(self.plan, rows=0, tokens=int(self.speed * _SHARD_SECONDS)))

    def _announce_duration(self, tokens: int) -> None:
        """Say how long the target will run, and what else would take as long."""
        if self.speed:
            seconds = tokens / self.speed
            took = f"{seconds:.0f} seconds" if seconds < 100 else f"{seconds / 60:.0f} minutes"
            print(
                f"The target runs once over all rows, for about {took}. Without a cache (`feature_source='online'`) "
                "it does so in every epoch: one epoch is cheaper online, several are cheaper from the cache."
            )

    def _shards(self, shard_size: int) -> list[Shard]:
        """Plan shards of whole rows and at most `shard_size` bytes; a longer row gets its own shard."""
        starts, size_so_far = [0], 0
        for i, size in enumerate(_size(self.plan, 1, length) for length in self.lengths):
            if i > starts[-1] and size_so_far + size > shard_size:
                starts.append(i)
                size_so_far = 0
            size_so_far += size
        return [
            {
                "name": f"features-{i:05d}-of-{len(starts):05d}.safetensors",
                "rows": stop - start,
                "tokens": sum(self.lengths[start:stop]),
                "bytes": None,
                "sha256": None,
            }
            for i, (start, stop) in enumerate(zip(starts, [*starts[1:], len(self.lengths)]), 1)
        ]

    def _prepare_disk(self, index: Index, missing: list[int]) -> None:
        """Remove an interrupted call's files, print the bytes to write, and refuse a disk with too little space."""
        shards = [index["shards"][i] for i in missing]
        for shard in shards:
            for name in (shard["name"], shard["name"] + _UNFINISHED):
                (self.directory / name).unlink(missing_ok=True)
        needed = _size(index, sum(shard["rows"] for shard in shards), sum(shard["tokens"] for shard in shards))
        total, free = _size(index, index["rows"], index["tokens"]), shutil.disk_usage(self.directory).free
        print(
            f"Feature cache in {self.directory}: {index['rows']:,} rows, {index['tokens']:,} tokens, {_human(total)} "
            f"as {index['dtype']}. To be written: {_human(needed)}, free on the disk: {_human(free)}."
        )
        if free < needed + _RESERVED_BYTES:
            raise ValueError(
                f"The feature cache needs {_human(needed)} more in {self.directory}, where {_human(free)} are free "
                f"({_human(_RESERVED_BYTES)} stay reserved). {_SPACE_ADVICE}"
            )

    def _write_shards(self, index: Index, missing: list[int]) -> None:
        first_rows = _first_rows(index)
        total = sum(index["shards"][i]["tokens"] for i in missing)
        self._write(_INDEX, json.dumps(index, indent=1).encode())  # the same shards are planned after a kill
        with progress_bar(total=total, unit="token", unit_scale=True, desc="Feature cache", disable=None) as progress:
            for i in missing:
                shard = index["shards"][i]
                data = save(self._tensors(first_rows[i], shard["rows"], index, progress))
                shard["bytes"], shard["sha256"] = len(data), hashlib.sha256(data).hexdigest()
                self._write(shard["name"], data)
                self._write(_INDEX, json.dumps(index, indent=1).encode())

    def _tensors(self, first_row: int, count: int, index: Index, progress: PlainBar) -> dict[str, torch.Tensor]:
        """Return all rows of a shard end to end, their lengths and residual, computed in batches of similar length."""
        rows = [self._read_columns(i) for i in range(first_row, first_row + count)]
        lengths = [len(row["input_ids"]) for row in rows]
        ends = list(accumulate(lengths))
        columns = {name: torch.cat([row[name] for row in rows]) for name in _COLUMNS}
        starts = (columns["position_ids"] == 0).nonzero().flatten().tolist()
        documents = split_documents(columns["input_ids"], columns["position_ids"])
        # Longest first, so that too little memory shows at once. Batches end with the shard, so that a shard's bytes
        # do not depend on the call that writes it.
        order = sorted(range(len(documents)), key=lambda i: -len(documents[i]))
        stored: dict[str, torch.Tensor] = {}
        for at in range(0, len(order), self.batch_size):
            batch = order[at : at + self.batch_size]
            states = compute_document_residuals(self.target, [documents[i] for i in batch], index["target_layer_ids"])
            for i, residual in zip(batch, states):
                if not residual.isfinite().all():
                    raise ValueError(
                        f"The target's residual of row {first_row + bisect_right(ends, starts[i])} is not finite: it "
                        "would make the loss NaN. Load the target in bfloat16 or float32, or leave that row out."
                    )
                for name, value in _encode(residual, index["dtype"]).items():
                    if name not in stored:
                        stored[name] = torch.empty((ends[-1], *value.shape[1:]), dtype=value.dtype)
                    stored[name][starts[i] : starts[i] + len(value)] = value.cpu()
                progress.update(len(residual))
        narrow = {name: columns[name].to(kind) for name, kind in _COLUMNS.items()}
        return {**narrow, **stored, "lengths": torch.tensor(lengths)}

    def _write(self, name: str, data: bytes) -> None:
        """Write a file atomically: a reader, or the next call after a crash, finds all of it or nothing."""
        unfinished = self.directory / (name + _UNFINISHED)
        try:
            with open(unfinished, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(unfinished, self.directory / name)
        except OSError as error:
            unfinished.unlink(missing_ok=True)
            is_full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
            raise OSError(
                f"Writing {name} ({_human(len(data))}) to {self.directory} failed: {error.strerror}. The shards "
                f"before it are complete: the same call continues after them.{f' {_SPACE_ADVICE}' if is_full else ''}"
            ) from error


def _folder(directory: str | os.PathLike[str]) -> Path:
    if not isinstance(directory, (str, os.PathLike)):
        raise ValueError(f"`directory` is {directory!r}, expected the path of a feature cache.")
    return Path(directory)


def _describe_target(target: PreTrainedModel) -> TargetIdentity:
    digests = target_fingerprint(target)  # raises if it is no target
    fields = config_fields(target.config)  # not their digest, so that errors can name what differs
    name = target.config._name_or_path
    return {"name": name, "head": digests["head"], "body": digests["body"], "config": fields}


def _size(index: Index, rows: int, tokens: int) -> int:
    """Return the bytes on disk without file headers (under a kilobyte per shard)."""
    per_stream = index["hidden_size"] * FEATURE_DTYPES[index["dtype"]].itemsize
    if index["dtype"] == "float8":
        per_stream += torch.float32.itemsize  # its scale
    per_token = len(index["target_layer_ids"]) * index["hc_mult"] * per_stream
    return tokens * (per_token + sum(kind.itemsize for kind in _COLUMNS.values())) + rows * torch.int64.itemsize


def _check_row(i: int, row: dict[str, torch.Tensor], vocab_size: int) -> None:
    ids, mask, positions = row.values()
    if not (ids.shape == mask.shape == positions.shape == (ids.numel(),)) or not ids.numel():
        raise ValueError(
            f"Row {i} has columns of the shapes { {name: list(value.shape) for name, value in row.items()} }: "
            "expected lists of one length, at least 1."
        )
    if ids.min() < 0 or ids.max() >= vocab_size:
        raise ValueError(
            f"Row {i} has token ids from {ids.min()} to {ids.max()}, outside the target's vocabulary of {vocab_size}. "
            "Tokenize with the target's own tokenizer."
        )
    if mask.min() < 0 or mask.max() > 1:
        raise ValueError(f"Row {i} has a `loss_mask` with values from {mask.min()} to {mask.max()}: expected 0 and 1.")
    if positions[0] != 0 or ((positions[1:] != 0) & (positions[1:] != positions[:-1] + 1)).any():
        raise ValueError(f"The `position_ids` of row {i} do not count 0, 1, 2, .. in each of its documents.")


def _check_layers(directory: Path, index: Index, wanted: Sequence[int]) -> None:
    stored = index["target_layer_ids"]
    if not set(wanted) <= set(stored):
        raise ValueError(
            f"The feature cache in {directory} holds layers {stored}, but {list(wanted)} are needed (-1 is the "
            "pre-collapse residual). Write one with these `target_layer_ids` in another directory."
        )


def _human(size: float) -> str:
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:,.1f} TB"


def _encode(residual: torch.Tensor, dtype: str) -> dict[str, torch.Tensor]:
    kind = FEATURE_DTYPES[dtype]
    if dtype != "float8":
        return {"residual": residual.to(kind)}
    residual = residual.float()
    # At least the smallest normal number: a stream of zeros must not divide by zero.
    scale = (residual.abs().amax(-1) / torch.finfo(kind).max).clamp(min=torch.finfo(torch.float32).tiny)
    return {"residual": (residual / scale.unsqueeze(-1)).to(kind), "scale": scale}


def _read_index(directory: Path, identity: TargetIdentity) -> Index:
    """Read the index of a cache that this target wrote."""
    path = directory / _INDEX
    if not path.exists():
        raise ValueError(f"No feature cache in {directory}: {_INDEX} is missing. Write one with `FeatureCache.write`.")
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}). Delete the directory and write the cache again.") from error
    version = index.get("version") if isinstance(index, dict) else None
    if isinstance(version, int) and version != _FORMAT:
        raise ValueError(
            f"{path} has format version {version}, this release reads {_FORMAT}. Write the cache again in another "
            "directory, or install the release that wrote it."
        )
    shards = index.get("shards") if version is not None and _INDEX_FIELDS <= index.keys() else None
    if not isinstance(shards, list) or not all(isinstance(s, dict) and _SHARD_FIELDS <= s.keys() for s in shards):
        raise ValueError(
            f"{path} is no index of a feature cache: expected a JSON object with {', '.join(sorted(_INDEX_FIELDS))}. "
            "Choose another directory, or delete this one and write the cache again."
        )
    _check_target(directory, index["target"], identity)
    return index


def _check_target(directory: Path, written: TargetIdentity, current: TargetIdentity) -> None:
    differing = [
        f"{part} weights: {there[:12]} there, {here[:12]} here"
        for part, there, here in (
            ("head", written["head"], current["head"]),
            ("body", written["body"], current["body"]),
        )
        if here and here != there
    ]
    old, new = written["config"], current["config"]
    differing += [
        f"config.{name}: {reprlib.repr(old.get(name))} there, {reprlib.repr(new.get(name))} here"
        for name in sorted(old.keys() | new.keys())
        if old.get(name) != new.get(name)
    ]
    if differing:
        raise ValueError(
            f"The feature cache in {directory} was written from another target: {written['name']!r}, and this one is "
            f"{current['name']!r} ({'; '.join(differing)}). Load the target that wrote it, or write a cache of this "
            "one in another directory."
        )


def _check_shards(directory: Path, shards: list[Shard]) -> None:
    again = "Run `FeatureCache.write` again with the same arguments: it writes only what is missing."
    unwritten = sum(shard["sha256"] is None for shard in shards)
    if unwritten:
        raise ValueError(
            f"The feature cache in {directory} is unfinished: {unwritten} of {len(shards)} shards are not written. "
            f"{again}"
        )
    broken = [shard for shard in shards if not _is_whole(directory / shard["name"], shard)]
    if broken:
        named = ", ".join(f"{shard['name']} ({shard['bytes']:,} bytes)" for shard in broken)
        raise ValueError(f"Shards in {directory} are missing or not as long as they were written: {named}. {again}")


def _is_whole(path: Path, shard: Shard) -> bool:
    return shard["sha256"] is not None and path.is_file() and path.stat().st_size == shard["bytes"]


def _first_rows(index: Index) -> list[int]:
    return list(accumulate((shard["rows"] for shard in index["shards"]), initial=0))


def _sha256(path: Path) -> str:
    with open(path, "rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as data:
        return hashlib.sha256(data).hexdigest()


def _read_row(path: Path, row: int) -> dict[str, torch.Tensor]:
    # Opened for every row, which maps the file and reads a header. So no open file has to survive a fork or pickle.
    with safe_open(path, "pt") as file:
        lengths = file.get_tensor("lengths")
        end = int(lengths[: row + 1].sum())
        span = slice(end - int(lengths[row]), end)
        # A slice keeps the whole tensor's storage, which a data loader worker would send along.
        return {name: file.get_slice(name)[span].clone() for name in file.keys() if name != "lengths"}
