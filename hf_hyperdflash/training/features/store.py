"""The feature cache: the target's residual of a dataset's rows on disk, written once and read many times.

A folder has parts, each a file with a group of rows and named by them, and lists of parts in the order of the rows. A
list is written before its parts, and a part that is there is whole. So a killed call goes on with the parts that are
missing, and caches of one target are joined by putting their files into one folder.
"""

from __future__ import annotations

import copy
import errno
import hashlib
import json
import os
import reprlib
import shutil
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from rich.filesize import decimal
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from tqdm import tqdm as PlainBar
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...targets.registry import target_of
from ..losses.objective import compute_document_residuals, split_documents
from ..runs.progress import progress_bar
from .fingerprint import config_fields, sha256, target_fingerprint
from .locking import only_writer

if TYPE_CHECKING:
    import datasets

Rows: TypeAlias = "datasets.Dataset | Sequence[Mapping[str, Any]]"
Identity: TypeAlias = dict[str, Any]

_FORMAT, _UNFINISHED, _LISTS = 3, ".tmp", "features*.json"
FEATURE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float8": torch.float8_e4m3fn}
_COLUMNS = {"input_ids": torch.int32, "loss_mask": torch.bool, "position_ids": torch.int32}
_SHARD_SIZE = 256 * 2**20  # the work that a killed call may lose
_RESERVED_BYTES = 64 * 2**20  # stays free on the disk: for file headers, the list, and other programs
_SPACE_ADVICE = (
    "Free some space or choose another directory, store it as dtype='float8' (half of bfloat16), use fewer rows, or "
    "train with feature_source='online', which stores nothing."
)


class Part(NamedTuple):
    """A file of a cache: its name without a suffix, which is the digest of its rows."""

    name: str
    rows: int
    tokens: int


class FeatureCache(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """The residual of every row of a dataset, by default the pre-collapse one, from which the teacher's logits follow.

    A target loaded with `num_hidden_layers=0` is enough to train from the cache: then only embedding, final norm,
    collapse and language model head are compared. `identity` is what the residual depends on, `parts` are the files in
    the order of the rows, and items have the streams of `target_layer_ids`. Anything but one complete cache of the
    target, or several that can be joined, is a `ValueError`.
    """

    def __init__(self, directory: str | os.PathLike[str], target: PreTrainedModel | Identity) -> None:
        """Open the cache for a target, or for its description, which takes time: every weight is read."""
        directory = self.directory = Path(directory)
        target = target if isinstance(target, dict) else _describe_target(target)
        lists = _read_lists(directory)
        if not lists:
            raise ValueError(f"No feature cache in {directory}: write one with `FeatureCache.write`.")
        self.identity: Identity = lists[0][0]
        _check_identity(directory, self.identity, {"target": target})
        self.parts: list[Part] = []
        for identity, parts in lists:
            _check_identity(directory, self.identity, identity)
            _check_identity(directory, identity, self.identity)
            seen = set(self.parts)  # rows that two lists have are there once
            self.parts += [part for part in parts if part not in seen]
        if missing := [part for part in self.parts if not _is_whole(directory, part, self.identity)]:
            raise ValueError(
                f"The feature cache in {directory} is unfinished: {len(missing)} of {len(self.parts)} parts are not "
                f"there or damaged, the first of them {missing[0].name}. Run `FeatureCache.write` again with the same "
                "arguments: it writes only what is missing."
            )
        self._first_rows = list(accumulate((part.rows for part in self.parts), initial=0))
        self.target_layer_ids: Sequence[int] = self.identity["target_layer_ids"]

    def select_layers(self, target_layer_ids: Sequence[int]) -> FeatureCache:
        """Return the same cache with items that have the streams of these layers only, or raise a `ValueError` if one
        of them is not stored."""
        _check_identity(self.directory, self.identity, {"target_layer_ids": target_layer_ids})
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
        shard_size: int = _SHARD_SIZE,
    ) -> FeatureCache:
        """Write the residual of all rows, continue an interrupted call, or open a complete cache.

        Rows are map-style, one per training sequence: `input_ids`, `loss_mask` (0 or 1) and `position_ids` (counting
        from 0 in every packed document), lists of integers of one length. `"float8"` is e4m3 with a float32 scale per
        token and stream. A repeated call ends in the same bytes as an uninterrupted one. Parts of some of the rows
        that are there already are used, and a cache with more layers is opened for the given ones. A new part begins
        after `shard_size` bytes; about twice as much memory is used.

        What does not fit, rows, disk, what is in the directory, is a `ValueError` before anything is written; a write
        that fails is an `OSError`.
        """
        if dtype not in FEATURE_DTYPES:
            raise ValueError(f"`dtype` is {dtype!r}, expected one of {sorted(FEATURE_DTYPES)}.")
        path, family = Path(directory), target_of(target)
        identity: Identity = {
            "target": _describe_target(target),
            "tokenizer": None,
            "dtype": dtype,
            "target_layer_ids": list(target_layer_ids),
            "hc_mult": family.streams,
            "hidden_size": family.config.hidden_size,
        }
        if tokenizer is not None:
            vocabulary = [f"{token} {number}" for token, number in sorted(tokenizer.get_vocab().items())]
            digests = {"vocabulary": sha256(*vocabulary), "template": sha256(str(tokenizer.chat_template))}
            identity["tokenizer"] = digests
        writer = _Writer(path, rows, target, identity, batch_size, shard_size)
        if not writer.list_path.exists() or writer.missing():
            path.mkdir(parents=True, exist_ok=True)
            with only_writer(path / "features"):
                writer.complete()
        return cls(path, identity["target"]).select_layers(target_layer_ids)

    def __len__(self) -> int:
        return self._first_rows[-1]

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        """Return `input_ids` and `position_ids` (long), `loss_mask` (bool), `[seq]` each, and `residual`,
        `[seq, len(target_layer_ids) * config.hc_mult, config.hidden_size]`, float32 if stored so, else bfloat16."""
        i = range(len(self))[i]
        at = bisect_right(self._first_rows, i) - 1
        # Opened for every row, which maps the file and reads a header: no open file has to survive a fork or pickle.
        with safe_open(self.directory / f"{self.parts[at].name}.safetensors", "pt") as file:
            lengths = file.get_tensor("lengths")
            end = int(lengths[: i - self._first_rows[at] + 1].sum())
            span = slice(end - int(lengths[i - self._first_rows[at]]), end)
            # A slice keeps the whole tensor's storage, which a data loader worker would send along.
            row = {name: file.get_slice(name)[span].clone() for name in file.keys() if name != "lengths"}
        stored = self.identity["target_layer_ids"]
        if list(self.target_layer_ids) != stored:
            for part in row.keys() & {"residual", "scale"}:
                layers = dict(zip(stored, row[part].chunk(len(stored), dim=1)))
                row[part] = torch.cat([layers[layer] for layer in self.target_layer_ids], dim=1)
        if "scale" in row:
            row["residual"] = (row["residual"].float() * row.pop("scale").unsqueeze(-1)).bfloat16()
        return {**row, "input_ids": row["input_ids"].long(), "position_ids": row["position_ids"].long()}

    @property
    def digest(self) -> str:
        """The SHA-256 of what is stored of which rows."""
        return sha256(_key(self.identity), *(part.name for part in self.parts))


@dataclass
class _Writer:
    """Writes the missing parts of one cache."""

    directory: Path
    rows: Rows
    target: PreTrainedModel
    identity: Identity
    batch_size: int
    shard_size: int

    def __post_init__(self) -> None:
        self.rows = self.rows.with_format("numpy") if hasattr(self.rows, "with_format") else self.rows
        if not hasattr(self.rows, "__len__") or not len(self.rows):
            found = "empty" if hasattr(self.rows, "__len__") else f"a {type(self.rows).__name__} of unknown length"
            raise ValueError(
                f"The rows are {found}: expected a map-style dataset with at least one row. Load it without "
                "`streaming=True`."
            )
        self.lengths, self.digests = list[int](), list[str]()
        for i in range(len(self.rows)):
            row = self._read_columns(i)
            self.lengths.append(len(row["input_ids"]))
            columns = b"".join(column.numpy().tobytes() for column in row.values())
            self.digests.append(hashlib.sha256(columns).hexdigest())
        self.plan()

    def plan(self) -> None:
        """Group the rows, as the parts that are there have them, and refuse a folder with parts of other rows."""
        there = _read_lists(self.directory)
        for known, _ in there:
            _check_identity(self.directory, known, self.identity)
            self.identity = known  # which may have more layers
        written = {part for _, parts in there for part in parts}
        self.parts = self._group(written)
        if others := written - set(self.parts):
            raise ValueError(
                f"The feature cache in {self.directory} has other data, {sum(part.rows for part in others)} rows that "
                f"are not among these {len(self.rows)} with these tokens, loss masks and positions. Use the rows that "
                "it was written with, or another directory."
            )
        digest = sha256(_key(self.identity), *(part.name for part in self.parts))
        self.list_path = self.directory / f"features-{digest[:16]}.json"

    def _read_columns(self, i: int) -> dict[str, torch.Tensor]:
        row = self.rows[i]
        columns = {name: torch.tensor(row.get(name, ()), dtype=torch.long) for name in _COLUMNS}
        ids, mask, positions = columns.values()
        if not (ids.shape == mask.shape == positions.shape == (ids.numel(),)) or not ids.numel():
            raise ValueError(
                f"Row {i} has columns of the shapes { {name: list(value.shape) for name, value in columns.items()} }: "
                "expected lists of one length, at least 1. Tokenize the dataset first."
            )
        vocab_size = target_of(self.target).config.vocab_size
        for name, most in (("input_ids", vocab_size - 1), ("loss_mask", 1)):
            least, largest = columns[name].aminmax()
            if least < 0 or largest > most:
                raise ValueError(
                    f"Row {i} has `{name}` from {least} to {largest}, expected 0 to {most}, with the target's own "
                    f"tokenizer and its vocabulary of {vocab_size}."
                )
        if positions[0] != 0 or ((positions[1:] != 0) & (positions[1:] != positions[:-1] + 1)).any():
            raise ValueError(f"The `position_ids` of row {i} do not count 0, 1, 2, .. in each of its documents.")
        return columns

    def _group(self, known: set[Part]) -> list[Part]:
        """Group the rows: as known parts have them, else up to `shard_size` bytes a group; a longer row gets its
        own."""
        counts, parts, start = sorted({part.rows for part in known}, reverse=True), list[Part](), 0

        def group(stop: int) -> Part:
            return Part(sha256(*self.digests[start:stop])[:32], stop - start, sum(self.lengths[start:stop]))

        while start < len(self.rows):
            count = next((n for n in counts if group(start + n) in known), 0)
            if not count:
                sizes = accumulate(_size(self.identity, 1, self.lengths[i]) for i in range(start, len(self.rows)))
                within = (n for n, size in enumerate(sizes) if size > self.shard_size)
                count = max(1, next(within, len(self.rows) - start))
            parts.append(group(start + count))
            start += count
        return parts

    def missing(self) -> list[int]:
        return [i for i, part in enumerate(self.parts) if not _is_whole(self.directory, part, self.identity)]

    def complete(self) -> None:
        self.plan()  # again: until now another process may have written there
        missing = self.missing()
        if missing and not len(target_of(self.target).layers):
            raise ValueError(
                f"The feature cache in {self.directory} is not complete, and this target has no layers to run. Load "
                "it whole, without `num_hidden_layers=0`."
            )
        for unfinished in self.directory.glob(f"*{_UNFINISHED}"):
            unfinished.unlink()
        _, rows, tokens = zip(*self.parts)
        needed = _size(self.identity, sum(rows[i] for i in missing), sum(tokens[i] for i in missing))
        free = shutil.disk_usage(self.directory).free
        print(
            f"Feature cache in {self.directory}: {sum(rows):,} rows, {sum(tokens):,} tokens, "
            f"{decimal(_size(self.identity, sum(rows), sum(tokens)))} as {self.identity['dtype']}. To be written: "
            f"{decimal(needed)}, free on the disk: {decimal(free)}."
        )
        if free < needed + _RESERVED_BYTES:
            raise ValueError(
                f"The feature cache needs {decimal(needed)} more in {self.directory}, where {decimal(free)} are free "
                f"({decimal(_RESERVED_BYTES)} stay reserved). {_SPACE_ADVICE}"
            )
        content = {"version": _FORMAT, "identity": self.identity, "parts": self.parts}
        self._write(self.list_path, json.dumps(content, indent=1).encode())
        for earlier in set(self.directory.glob(_LISTS)) - {self.list_path}:  # all of its parts are in this one
            earlier.unlink()
        first_rows, total = list(accumulate(rows, initial=0)), sum(tokens[i] for i in missing)
        with progress_bar(total=total, unit="token", unit_scale=True, desc="Feature cache", disable=None) as progress:
            for i in missing:
                tensors = self._tensors(first_rows[i], rows[i], progress)
                data = save(tensors, {"identity": _key(self.identity)})
                self._write(self.directory / f"{self.parts[i].name}.safetensors", data)

    def _tensors(self, first_row: int, count: int, progress: PlainBar) -> dict[str, torch.Tensor]:
        """Return all rows of a part end to end, their lengths and residual, computed in batches of similar length."""
        rows = [self._read_columns(i) for i in range(first_row, first_row + count)]
        lengths = [len(row["input_ids"]) for row in rows]
        ends = list(accumulate(lengths))
        columns = {name: torch.cat([row[name] for row in rows]) for name in _COLUMNS}
        starts = (columns["position_ids"] == 0).nonzero().flatten().tolist()
        documents = split_documents(columns["input_ids"], columns["position_ids"])
        # Longest first, so that too little memory shows at once. Batches end with the part, so that its bytes do not
        # depend on the call that writes it.
        order = sorted(range(len(documents)), key=lambda i: -len(documents[i]))
        stored: dict[str, torch.Tensor] = {}
        for at in range(0, len(order), self.batch_size):
            batch = order[at : at + self.batch_size]
            layers = self.identity["target_layer_ids"]
            states = compute_document_residuals(self.target, [documents[i] for i in batch], layers)
            for i, residual in zip(batch, states):
                if not residual.isfinite().all():
                    raise ValueError(
                        f"The target's residual of row {first_row + bisect_right(ends, starts[i])} is not finite: it "
                        "would make the loss NaN. Load the target in bfloat16 or float32, or leave that row out."
                    )
                for name, value in _encode(residual, self.identity["dtype"]).items():
                    if name not in stored:
                        stored[name] = torch.empty((ends[-1], *value.shape[1:]), dtype=value.dtype)
                    stored[name][starts[i] : starts[i] + len(value)] = value.cpu()
                progress.update(len(residual))
        narrow = {name: columns[name].to(kind) for name, kind in _COLUMNS.items()}
        return {**narrow, **stored, "lengths": torch.tensor(lengths)}

    def _write(self, path: Path, data: bytes) -> None:
        """Write a file atomically: a reader, or the next call after a crash, finds all of it or nothing."""
        unfinished = path.with_name(path.name + _UNFINISHED)
        try:
            with open(unfinished, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(unfinished, path)
        except OSError as error:
            unfinished.unlink(missing_ok=True)
            is_full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
            raise OSError(
                f"Writing {path.name} ({decimal(len(data))}) to {self.directory} failed: {error.strerror}. The parts "
                f"before it are complete: the same call continues after them.{f' {_SPACE_ADVICE}' if is_full else ''}"
            ) from error


def _describe_target(target: PreTrainedModel) -> Identity:
    digests = target_fingerprint(target)  # raises if it is no target
    return {
        "repository": target.config._name_or_path,
        "revision": getattr(target.config, "_commit_hash", None),  # of the Hub's
        "head": digests["head"],
        "body": digests["body"],
        "config": config_fields(target.config),  # not their digest, so that errors can name what differs
    }


def _key(identity: Identity) -> str:
    """Return the digest of what the bytes of a part depend on. A target's name and the tokenizer are only recorded."""
    fields = {**identity, "tokenizer": None, "target": {**identity["target"], "repository": "", "revision": ""}}
    return sha256(json.dumps(fields, sort_keys=True))


def _size(identity: Identity, rows: int, tokens: int) -> int:
    """Return the bytes on disk without file headers (under a kilobyte per part)."""
    per_stream = identity["hidden_size"] * FEATURE_DTYPES[identity["dtype"]].itemsize
    if identity["dtype"] == "float8":
        per_stream += torch.float32.itemsize  # its scale
    per_token = len(identity["target_layer_ids"]) * identity["hc_mult"] * per_stream
    return tokens * (per_token + sum(kind.itemsize for kind in _COLUMNS.values())) + rows * torch.int64.itemsize


def _encode(residual: torch.Tensor, dtype: str) -> dict[str, torch.Tensor]:
    kind = FEATURE_DTYPES[dtype]
    if dtype != "float8":
        return {"residual": residual.to(kind)}
    residual = residual.float()
    # At least the smallest normal number: a stream of zeros must not divide by zero.
    scale = (residual.abs().amax(-1) / torch.finfo(kind).max).clamp(min=torch.finfo(torch.float32).tiny)
    return {"residual": (residual / scale.unsqueeze(-1)).to(kind), "scale": scale}


def _read_lists(directory: Path) -> list[tuple[Identity, list[Part]]]:
    """Return the identity and the parts of each cache in a folder."""
    found = []
    for path in sorted(directory.glob(_LISTS)):
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if content["version"] != _FORMAT:
                raise ValueError(f"its format has version {content['version']}, and this release reads {_FORMAT}")
            found.append((content["identity"], [Part(*part) for part in content["parts"]]))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path} is damaged, of another release or no list of features ({error!r}). Delete it and write the "
                "cache again: parts of this release that are whole stay."
            ) from error
    return found


def _check_identity(directory: Path, there: Identity, here: Identity) -> None:
    """Refuse a cache whose identity differs in one of the given fields; more layers than are needed are no
    difference."""
    here = {**there, **here}
    layers, needed = there["target_layer_ids"], list(here["target_layer_ids"])
    differing = [] if set(needed) <= set(layers) else [f"holds layers {layers}, but {needed} are needed"]
    if here["dtype"] != there["dtype"]:
        differing.append(f"`dtype` {there['dtype']} there, {here['dtype']} here")
    if here["tokenizer"] and there["tokenizer"]:  # where both are known
        for part, digest in there["tokenizer"].items():
            if digest != here["tokenizer"][part]:
                differing.append(f"another {part} of the tokenizer")
    old, new = there["target"], here["target"]
    parts = [
        f"{part} weights: {old[part][:12]} there, {new[part][:12]} here"
        for part in ("head", "body")
        if new[part] and new[part] != old[part]  # a target without layers has no body
    ]
    parts += [
        f"config.{name}: {reprlib.repr(old['config'].get(name))} there, {reprlib.repr(new['config'].get(name))} here"
        for name in sorted(old["config"].keys() | new["config"].keys())
        if old["config"].get(name) != new["config"].get(name)
    ]
    if parts:
        names = f"{old['repository']!r} there, {new['repository']!r} here"
        differing.append(f"another target, {names} ({'; '.join(parts)})")
    if differing:
        raise ValueError(
            f"The feature cache in {directory} is not the one that is needed: {'; '.join(differing)}. Use what it was "
            "written with, or another directory."
        )


def _is_whole(directory: Path, part: Part, identity: Identity) -> bool:
    """Return whether a part is there, as long as its header says, and of this identity."""
    try:
        with safe_open(directory / f"{part.name}.safetensors", "pt") as file:
            return file.metadata() == {"identity": _key(identity)}
    except (FileNotFoundError, SafetensorError):
        return False
