"""The conditioning feature: the target's pre-collapse residual of whole documents, read now or from disk."""

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
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch.nn.utils.rnn import pad_sequence
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from ..runtime.binding import capture_residual
from ..runtime.targets import family_of
from .fingerprint import config_fields, target_fingerprint
from .locking import only_writer

if TYPE_CHECKING:
    import datasets

Rows: TypeAlias = "datasets.Dataset | Sequence[Mapping[str, Any]]"

_INDEX, _FORMAT = "features.json", 2
_INDEX_FIELDS = {
    "version", "target", "dtype", "target_layer_ids", "hc_mult", "hidden_size", "rows", "tokens", "rows_sha256", "shards",
}  # fmt: skip
FEATURE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float8": torch.float8_e4m3fn}
_COLUMNS = {"input_ids": torch.int32, "loss_mask": torch.bool, "position_ids": torch.int32}
_SHARD_SECONDS, _SHARD_SIZE = 15, 2 * 2**30  # of a shard, unless its size is given: what a killed call may lose
_RESERVE = 64 * 2**20  # bytes left free on the disk: file headers, the index, and whoever else writes there
_ROOM = (
    "Free some space or choose another directory, store it as dtype='float8' (half of bfloat16), use fewer rows, or "
    "train with feature_source='online', which stores nothing."
)


@torch.no_grad()
def residual_of(
    target: PreTrainedModel,
    input_ids: torch.Tensor,
    position_ids: torch.Tensor,
    target_layer_ids: Sequence[int] = (-1,),
) -> torch.Tensor:
    """Residual paths, by default the pre-collapse ones, of right-padded or packed rows.

    Every document runs on its own, so that none sees another: V4's compressors have no mask for that. Padding on the
    right changes nothing, every part of V4 is causal.

    Args:
        target: The target, in eval mode.
        input_ids: `[batch, seq]`.
        position_ids: `[batch, seq]`, counting from 0 in every document of a row.
        target_layer_ids: As in [`capture_residual`].

    Returns:
        `[batch, seq, len(target_layer_ids) * config.hc_mult, config.hidden_size]` on the device of `input_ids`.
    """
    packed = bool((position_ids != torch.arange(input_ids.shape[1], device=position_ids.device)).any())
    if not packed:
        return _forward(target, input_ids, target_layer_ids).to(input_ids.device)
    documents = _documents(input_ids.flatten(), position_ids.flatten())
    residual = _residual_of_documents(target, documents, target_layer_ids)
    return torch.cat(residual).to(input_ids.device).unflatten(0, input_ids.shape)


def _documents(input_ids: torch.Tensor, position_ids: torch.Tensor) -> Sequence[torch.Tensor]:
    """The ids of each document, of rows that were laid end to end."""
    return input_ids.tensor_split((position_ids == 0).nonzero().flatten().tolist()[1:])


@torch.no_grad()
def _residual_of_documents(
    target: PreTrainedModel, documents: Sequence[torch.Tensor], target_layer_ids: Sequence[int]
) -> list[torch.Tensor]:
    residual = _forward(target, pad_sequence(list(documents), batch_first=True), target_layer_ids)
    return [states[: len(ids)] for states, ids in zip(residual, documents)]


def _forward(target: PreTrainedModel, input_ids: torch.Tensor, target_layer_ids: Sequence[int]) -> torch.Tensor:
    if target.device.type != "meta":  # an offloaded target: accelerate's hooks bring the ids to where they run
        input_ids = input_ids.to(target.device)
    with capture_residual(target, target_layer_ids) as captured:
        target.base_model(input_ids=input_ids, use_cache=False)
    return captured[0]


class FeatureCache(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """The target's residual paths of every row of a dataset, on disk: written once, trained on many times.

    By default those of the pre-collapse residual. Nothing else of the target is stored: the teacher's logits follow from the residual
    ([`~runtime.targets.teacher_states`]). Items are those of [`FeatureCache.__getitem__`]. A shard's checksum is verified
    once per process, before its first item is returned; after [`FeatureCache.verify`] data loader workers skip that.

    Args:
        directory: Where [`FeatureCache.write`] put it.
        target: The target it was written from. Loaded with `num_hidden_layers=0` it is enough to train from the cache:
            then only embedding, final norm, collapse and language model head are compared.

    Raises:
        ValueError: If there is no complete cache, a shard is missing or has another size, another target wrote it, or it is
            no target.
    """

    def __init__(self, directory: str | os.PathLike[str], target: PreTrainedModel) -> None:
        family_of(target)  # which says what a target is, if it is none
        self._open(_folder(directory), _identity(target))

    def _open(self, directory: Path, identity: dict[str, Any]) -> None:
        self.directory = directory
        self.index = _read_index(directory)
        _check_target(directory, self.index, identity)
        _check_shards(self.directory, self.index["shards"])
        self._first_rows = _first_rows(self.index)
        self._verified: set[str] = set()
        self.target_layer_ids: Sequence[int] = self.index["target_layer_ids"]

    def of_layers(self, target_layer_ids: Sequence[int]) -> FeatureCache:
        """The same cache, whose items have the paths of these layers only.

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
        """Write the residual of all rows, continue where an interrupted call stopped, or open what is complete.

        Prints the size before it writes. Shards appear under their names only when they are whole, and an interrupted
        call, repeated with the same arguments, goes on after them. With a given `shard_size` it ends in the same bytes
        as an uninterrupted one. Shards that were deleted are written again.

        Args:
            directory: Created if missing.
            rows: Map-style dataset, one row per training sequence: `input_ids`, `loss_mask` (0 or 1) and
                `position_ids` (counting from 0 in every packed document), lists of integers of one length.
            target: The target, in eval mode.
            dtype: `"float32"`, `"bfloat16"`, or `"float8"`: e4m3 with a float32 scale per token and path.
            target_layer_ids: Whose paths, as in [`capture_residual`]. A cache that exists and holds more is opened
                for these.
            batch_size: Documents per forward of the target.
            shard_size: Bytes after which a new file begins; about twice as much memory is used. `None` for what this
                target computes in a quarter of a minute, measured when a cache begins, and at most 2 GiB: no more is
                lost when the call is killed. A cache that exists keeps its own.

        Raises:
            ValueError: If the rows are malformed, the disk is too small, the residual is not finite, the directory holds
                a cache of other rows, another target or another dtype, or another process is writing there.
            OSError: If writing fails. Shards that are complete stay; the same call continues after them.
        """
        path = _folder(directory)
        rows = rows.with_format("numpy") if hasattr(rows, "with_format") else rows
        plan, lengths = _plan(rows, target, dtype, target_layer_ids)
        if not _is_complete(path, plan):
            path.mkdir(parents=True, exist_ok=True)
            with only_writer(path / _INDEX):
                _complete(path, plan, lengths, rows, target, batch_size, shard_size)
        cache = cls.__new__(cls)
        cache._open(path, plan["target"])  # not again from the target: its fingerprint may mean reading it from disk
        return cache.of_layers(target_layer_ids)

    def __len__(self) -> int:
        return self.index["rows"]

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        """Row `i` of the dataset.

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

    def _verify(self, shards: list[dict[str, Any]]) -> None:
        damaged = [shard["name"] for shard in shards if _sha256(self.directory / shard["name"]) != shard["sha256"]]
        if damaged:
            raise ValueError(
                f"{', '.join(damaged)} in {self.directory}: not what was written there (the SHA-256 differs), damaged "
                "or from another cache. Delete what is named and run `FeatureCache.write` again with the same "
                "arguments: it writes only what is missing."
            )
        self._verified.update(shard["name"] for shard in shards)


def estimate_size(
    target: PreTrainedModel,
    rows: int,
    tokens: int,
    dtype: str = "bfloat16",
    target_layer_ids: Sequence[int] = (-1,),
) -> int:
    """Bytes of a feature cache, but for file headers (under a kilobyte per shard).

    Args:
        target: The target.
        rows: Number of rows.
        tokens: Their tokens in all.
        dtype: As in [`FeatureCache.write`], like the next.
        target_layer_ids: Whose paths.

    Raises:
        ValueError: If it is no target or `dtype` is unknown.
    """
    family = family_of(target)
    return _size(len(target_layer_ids) * family.paths, family.config.hidden_size, _known(dtype), rows, tokens)


def _known(dtype: str) -> str:
    if dtype not in FEATURE_DTYPES:
        raise ValueError(f"`dtype` is {dtype!r}, expected one of {sorted(FEATURE_DTYPES)}.")
    return dtype


def _size(paths: int, hidden_size: int, dtype: str, rows: int, tokens: int) -> int:
    scale = torch.float32.itemsize if dtype == "float8" else 0
    per_token = paths * (hidden_size * FEATURE_DTYPES[dtype].itemsize + scale)
    return tokens * (per_token + sum(kind.itemsize for kind in _COLUMNS.values())) + rows * torch.int64.itemsize


def _folder(directory: Any) -> Path:
    if not isinstance(directory, (str, os.PathLike)):
        raise ValueError(f"`directory` is {directory!r}, expected the path of a feature cache.")
    return Path(directory)


def _identity(target: PreTrainedModel) -> dict[str, Any]:
    return {
        "name": target.config._name_or_path,
        **target_fingerprint(target),
        "config": config_fields(target.config),  # not their digest: what differs can be named
    }


def _plan(
    rows: Rows, target: PreTrainedModel, dtype: str, target_layer_ids: Sequence[int]
) -> tuple[dict[str, Any], list[int]]:
    """The index of a cache that has no shards yet, and the rows' lengths."""
    family, dtype = family_of(target), _known(dtype)
    lengths, digest = _scan(rows, family.config.vocab_size)
    plan = {
        "version": _FORMAT,
        "target": _identity(target),
        "dtype": dtype,
        "target_layer_ids": list(target_layer_ids),
        "hc_mult": family.paths,
        "hidden_size": family.config.hidden_size,
        "rows": len(lengths),
        "tokens": sum(lengths),
        "rows_sha256": digest,
        "shards": [],
    }
    return plan, lengths


def _is_complete(directory: Path, plan: dict[str, Any]) -> bool:
    return (directory / _INDEX).exists() and not _todo(directory, _resume(directory, plan))


def _todo(directory: Path, index: dict[str, Any]) -> list[int]:
    return [i for i, shard in enumerate(index["shards"]) if not _is_whole(directory / shard["name"], shard)]


def _complete(
    directory: Path,
    plan: dict[str, Any],
    lengths: list[int],
    rows: Rows,
    target: PreTrainedModel,
    batch_size: int,
    shard_size: int | None,
) -> None:
    """Write what is missing, of a cache that was begun or of a new one."""
    if not plan["target"]["body"]:
        raise ValueError(
            f"The feature cache in {directory} is not complete, and this target has no layers to run. Load it whole, "
            "without `num_hidden_layers=0`."
        )
    if (directory / _INDEX).exists():
        index = _resume(directory, plan)
    else:
        size = shard_size or _size_in_time(rows, lengths, target, plan, batch_size)
        index = {**plan, "shards": _shards(plan, lengths, size)}
    todo = _todo(directory, index)
    if todo:  # not if another process wrote it until now
        _prepare_disk(directory, index, todo)
        _write_shards(directory, index, todo, rows, target, batch_size)


def _size_in_time(
    rows: Rows, lengths: list[int], target: PreTrainedModel, plan: dict[str, Any], batch_size: int
) -> int:
    """Bytes of features that the target computes in `_SHARD_SECONDS`, judged by a forward over one batch."""
    longest = [_row(rows, i) for i in sorted(range(len(lengths)), key=lambda i: -lengths[i])[:batch_size]]
    found = [part for row in longest for part in _documents(row["input_ids"], row["position_ids"])]
    documents = sorted(found, key=len)[-batch_size:]
    began = time.perf_counter()
    for residual in _residual_of_documents(target, documents, plan["target_layer_ids"]):
        residual.cpu()
    seconds = time.perf_counter() - began
    computed = _size_of(plan, rows=0, tokens=sum(map(len, documents)))
    return min(_SHARD_SIZE, int(computed * _SHARD_SECONDS / seconds))


def _shards(plan: dict[str, Any], lengths: list[int], shard_size: int) -> list[dict[str, Any]]:
    """Which rows go to which shard."""
    ranges = list(_split([_size_of(plan, 1, length) for length in lengths], shard_size))
    return [
        {
            "name": f"features-{i:05d}-of-{len(ranges):05d}.safetensors",
            "rows": stop - start,
            "tokens": sum(lengths[start:stop]),
            "bytes": None,
            "sha256": None,
        }
        for i, (start, stop) in enumerate(ranges, 1)
    ]


def _size_of(index: dict[str, Any], rows: int, tokens: int) -> int:
    paths = len(index["target_layer_ids"]) * index["hc_mult"]
    return _size(paths, index["hidden_size"], index["dtype"], rows, tokens)


def _scan(rows: Rows, vocab_size: int) -> tuple[list[int], str]:
    """Check all rows; their lengths and the SHA-256 of their contents."""
    if not hasattr(rows, "__len__") or not len(rows):
        raise ValueError(
            f"The rows are {'empty' if hasattr(rows, '__len__') else f'a {type(rows).__name__} of unknown length'}: "
            "expected a map-style dataset with at least one row. Load it without `streaming=True`."
        )
    lengths, digest = [], hashlib.sha256()
    for i in range(len(rows)):
        row = _row(rows, i)
        _check_row(i, row, vocab_size)
        lengths.append(len(row["input_ids"]))
        digest.update(lengths[-1].to_bytes(8, "little"))
        for column in row.values():
            digest.update(column.numpy().tobytes())
    return lengths, digest.hexdigest()


def _row(rows: Rows, i: int) -> dict[str, torch.Tensor]:
    row = rows[i]
    if missing := _COLUMNS.keys() - row.keys():
        raise ValueError(
            f"Row {i} has the columns {sorted(row)}, {sorted(missing)} are missing. Tokenize the dataset first."
        )
    return {name: torch.tensor(row[name], dtype=torch.long) for name in _COLUMNS}


def _check_row(i: int, row: dict[str, torch.Tensor], vocab_size: int) -> None:
    ids, mask, positions = row.values()
    if not (ids.shape == mask.shape == positions.shape == (ids.numel(),)) or not ids.numel():
        raise ValueError(
            f"Row {i} has columns of the shapes { {name: list(value.shape) for name, value in row.items()} }: expected "
            "lists of one length, at least 1."
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


def _split(sizes: list[int], shard_size: int) -> Iterator[tuple[int, int]]:
    """Ranges of rows of at most `shard_size` bytes; a longer row gets a shard of its own."""
    start = held = 0
    for i, size in enumerate(sizes):
        if i > start and held + size > shard_size:
            yield start, i
            start, held = i, 0
        held += size
    yield start, len(sizes)


def _resume(directory: Path, plan: dict[str, Any]) -> dict[str, Any]:
    """The index of what was written so far, if it is the same cache."""
    index = _read_index(directory)
    _check_target(directory, index, plan["target"])
    differing = [
        f"{what} ({index[key]} there, {plan[key]} here)"
        for key, what in (
            ("dtype", "`dtype`"),
            ("rows", "the number of rows"),
            ("tokens", "the number of tokens"),
            ("rows_sha256", "the SHA-256 of the rows' tokens, loss masks and positions"),
        )
        if index[key] != plan[key]
    ]
    if differing:
        raise ValueError(
            f"The feature cache in {directory} differs in {', '.join(differing)}. Choose another directory, delete this "
            "one, or pass what it was written with."
        )
    _check_layers(directory, index, plan["target_layer_ids"])
    return index


def _check_layers(directory: Path, index: dict[str, Any], wanted: Sequence[int]) -> None:
    stored = index["target_layer_ids"]
    if not set(wanted) <= set(stored):
        raise ValueError(
            f"The feature cache in {directory} holds layers {stored}, but {list(wanted)} are needed (-1 is the "
            "pre-collapse residual). Write one with these `target_layer_ids` in another directory."
        )


def _prepare_disk(directory: Path, index: dict[str, Any], todo: list[int]) -> None:
    """Print what will be written, after removing what an interrupted call left, and refuse what does not fit."""
    for i in todo:
        shard = directory / index["shards"][i]["name"]
        shard.unlink(missing_ok=True)
        _unfinished(shard).unlink(missing_ok=True)
    missing = [index["shards"][i] for i in todo]
    needed = _size_of(index, sum(shard["rows"] for shard in missing), sum(shard["tokens"] for shard in missing))
    total, free = _size_of(index, index["rows"], index["tokens"]), shutil.disk_usage(directory).free
    print(
        f"Feature cache in {directory}: {index['rows']:,} rows, {index['tokens']:,} tokens, {_human(total)} as "
        f"{index['dtype']}. To be written: {_human(needed)}, free on the disk: {_human(free)}."
    )
    if free < needed + _RESERVE:
        raise ValueError(
            f"The feature cache needs {_human(needed)} more in {directory}, where {_human(free)} are free "
            f"({_human(_RESERVE)} stay reserved). {_ROOM}"
        )


def _human(size: float) -> str:
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:,.1f} TB"


def _write_shards(
    directory: Path, index: dict[str, Any], todo: list[int], rows: Rows, target: PreTrainedModel, batch_size: int
) -> None:
    first_rows = _first_rows(index)
    total = sum(index["shards"][i]["tokens"] for i in todo)
    _write(directory, _INDEX, json.dumps(index, indent=1).encode())  # the same shards are planned after a kill
    with tqdm(total=total, unit="token", unit_scale=True, desc="Feature cache") as progress:
        for i in todo:
            shard, first = index["shards"][i], first_rows[i]
            held = [_row(rows, row) for row in range(first, first + shard["rows"])]
            data = save(_shard_tensors(held, first, target, index, batch_size, progress))
            shard.update(bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
            _write(directory, shard["name"], data)
            _write(directory, _INDEX, json.dumps(index, indent=1).encode())


def _shard_tensors(
    rows: list[dict[str, torch.Tensor]],
    first_row: int,
    target: PreTrainedModel,
    index: dict[str, Any],
    batch_size: int,
    progress: tqdm,
) -> dict[str, torch.Tensor]:
    """All rows of a shard end to end, their lengths, and their residual, computed in batches of similar length."""
    lengths = [len(row["input_ids"]) for row in rows]
    ends = list(accumulate(lengths))
    columns = {name: torch.cat([row[name] for row in rows]) for name in _COLUMNS}
    starts = (columns["position_ids"] == 0).nonzero().flatten().tolist()
    documents = _documents(columns["input_ids"], columns["position_ids"])
    # Longest first: memory that does not suffice shows at once. Batches end with the shard, so that a shard's bytes
    # do not depend on which call writes it.
    order = sorted(range(len(documents)), key=lambda i: -len(documents[i]))
    stored: dict[str, torch.Tensor] = {}
    for at in range(0, len(order), batch_size):
        batch = order[at : at + batch_size]
        states = _residual_of_documents(target, [documents[i] for i in batch], index["target_layer_ids"])
        for i, residual in zip(batch, states):
            _check_finite(residual, first_row + bisect_right(ends, starts[i]))
            for name, value in _encode(residual, index["dtype"]).items():
                if name not in stored:
                    stored[name] = torch.empty((ends[-1], *value.shape[1:]), dtype=value.dtype)
                stored[name][starts[i] : starts[i] + len(value)] = value.cpu()
            progress.update(len(residual))
    narrow = {name: columns[name].to(kind) for name, kind in _COLUMNS.items()}
    return {**narrow, **stored, "lengths": torch.tensor(lengths)}


def _check_finite(residual: torch.Tensor, row: int) -> None:
    if not residual.isfinite().all():
        raise ValueError(
            f"The target's residual of row {row} is not finite: it would make the loss NaN. Load the target in bfloat16 "
            "or float32, or leave that row out."
        )


def _encode(residual: torch.Tensor, dtype: str) -> dict[str, torch.Tensor]:
    kind = FEATURE_DTYPES[dtype]
    if dtype != "float8":
        return {"residual": residual.to(kind)}
    residual = residual.float()
    # At least the smallest normal number: a stream of zeros must not divide by zero.
    scale = (residual.abs().amax(-1) / torch.finfo(kind).max).clamp(min=torch.finfo(torch.float32).tiny)
    return {"residual": (residual / scale.unsqueeze(-1)).to(kind), "scale": scale}


def _unfinished(path: Path) -> Path:
    return path.with_name(path.name + ".tmp")


def _write(directory: Path, name: str, data: bytes) -> None:
    """A reader, or the next call after a crash, finds all of the file or none of it."""
    path = directory / name
    try:
        with open(_unfinished(path), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(_unfinished(path), path)
    except OSError as error:
        _unfinished(path).unlink(missing_ok=True)
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        raise OSError(
            f"Writing {name} ({_human(len(data))}) to {directory} failed: {error.strerror}. The shards before it are "
            f"complete: the same call continues after them.{f' {_ROOM}' if is_full else ''}"
        ) from error


def _read_index(directory: Path) -> dict[str, Any]:
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
    shards = index.get("shards") if version is not None else None
    if not isinstance(shards, list) or not _INDEX_FIELDS <= index.keys() or not all(map(_is_shard, shards)):
        raise ValueError(
            f"{path} is no index of a feature cache: expected a JSON object with {', '.join(sorted(_INDEX_FIELDS))}. "
            "Choose another directory, or delete this one and write the cache again."
        )
    return index


def _is_shard(entry: Any) -> bool:
    return isinstance(entry, dict) and {"name", "rows", "tokens", "bytes", "sha256"} <= entry.keys()


def _check_target(directory: Path, index: dict[str, Any], given: dict[str, Any]) -> None:
    written = index["target"]
    differing = [
        f"{part} weights: {written[part][:12]} there, {given[part][:12]} here"
        for part in ("head", "body")
        if given[part] and given[part] != written[part]
    ]
    differing += [
        f"config.{name}: {reprlib.repr(written['config'].get(name))} there, "
        f"{reprlib.repr(given['config'].get(name))} here"
        for name in sorted(written["config"].keys() | given["config"].keys())
        if written["config"].get(name) != given["config"].get(name)
    ]
    if differing:
        raise ValueError(
            f"The feature cache in {directory} was written from another target: {written['name']!r}, and this one is "
            f"{given['name']!r} ({'; '.join(differing)}). Load the target that wrote it, or write a cache of this one in "
            "another directory."
        )


def _check_shards(directory: Path, shards: list[dict[str, Any]]) -> None:
    again = "Run `FeatureCache.write` again with the same arguments: it writes only what is missing."
    missing = [shard["name"] for shard in shards if shard["sha256"] is None]
    if missing:
        raise ValueError(
            f"The feature cache in {directory} is unfinished: {len(missing)} of {len(shards)} shards are not written. "
            f"{again}"
        )
    broken = [shard for shard in shards if not _is_whole(directory / shard["name"], shard)]
    if broken:
        named = ", ".join(f"{shard['name']} ({shard['bytes']:,} bytes)" for shard in broken)
        raise ValueError(f"Shards in {directory} are missing or not as long as they were written: {named}. {again}")


def _is_whole(path: Path, shard: dict[str, Any]) -> bool:
    return shard["sha256"] is not None and path.is_file() and path.stat().st_size == shard["bytes"]


def _first_rows(index: dict[str, Any]) -> list[int]:
    return list(accumulate((shard["rows"] for shard in index["shards"]), initial=0))


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(2**20):
            digest.update(chunk)
    return digest.hexdigest()


def _read_row(path: Path, row: int) -> dict[str, torch.Tensor]:
    # Opened for every row: this maps the file and reads a header, and nothing open needs to survive a fork or a pickle.
    with safe_open(path, "pt") as file:
        lengths = file.get_tensor("lengths")
        end = int(lengths[: row + 1].sum())
        span = slice(end - int(lengths[row]), end)
        # A slice keeps the whole tensor's storage, which a data loader worker would send along.
        return {name: file.get_slice(name)[span].clone() for name in file.keys() if name != "lengths"}
