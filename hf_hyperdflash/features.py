"""The conditioning feature: the target's pre-collapse residual of whole documents, read now or from disk."""

from __future__ import annotations

import copy
import hashlib
import json
import math
import os
import shutil
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from accelerate.utils import align_module_device
from safetensors import safe_open
from safetensors.torch import save
from torch.nn.utils.rnn import pad_sequence
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from .target import capture_residual, collapse_of, describe

if TYPE_CHECKING:
    import datasets

Rows: TypeAlias = "datasets.Dataset | Sequence[Mapping[str, Any]]"

_INDEX, _FORMAT = "features.json", 1
FEATURE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float8": torch.float8_e4m3fn}
_COLUMNS = {"input_ids": torch.int32, "loss_mask": torch.bool, "position_ids": torch.int32}
_SAMPLED = 64  # elements of every parameter that go into a fingerprint
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
    flat, starts = input_ids.flatten(), (position_ids.flatten() == 0).nonzero().flatten().tolist()
    documents = _residual_of_documents(target, flat.tensor_split(starts[1:]), target_layer_ids)
    return torch.cat(documents).to(input_ids.device).unflatten(0, input_ids.shape)


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
    ([`~target.teacher_states`]). Items are those of [`FeatureCache.__getitem__`]. A shard's checksum is verified
    once per process, before its first item is returned; after [`FeatureCache.verify`] data loader workers skip that.

    Args:
        directory: Where [`FeatureCache.write`] put it.
        target: The target it was written from. Loaded with `num_hidden_layers=0` it is enough to train from the cache:
            then only embedding, final norm, collapse and language model head are compared.

    Raises:
        ValueError: If there is no complete cache, a shard is missing or has another size, or another target wrote it.
    """

    def __init__(self, directory: str | os.PathLike[str], target: PreTrainedModel) -> None:
        self._open(Path(directory), _identity(target))

    def _open(self, directory: Path, identity: dict[str, str]) -> None:
        self.directory = directory
        self.index = _read_index(directory)
        _check_target(directory, self.index, identity)
        _check_shards(self.directory, self.index["shards"])
        self._first_rows = _first_rows(self.index)
        self._verified: set[str] = set()
        self.target_layer_ids: Sequence[int] = _stored_layers(self.index)

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
        shard_size: int = 2 * 2**30,
    ) -> FeatureCache:
        """Write the residual of all rows, continue where an interrupted call stopped, or open what is complete.

        Prints the size first. To be called by one process. Shards appear under their names only when they are whole.
        An interrupted call, repeated with the same arguments, ends in the same bytes as an uninterrupted one. Shards
        that were deleted are written again.

        Args:
            directory: Created if missing.
            rows: Map-style dataset, one row per training sequence: `input_ids`, `loss_mask` (0 or 1) and
                `position_ids` (counting from 0 in every packed document), lists of integers of one length.
            target: The target, in eval mode.
            dtype: `"float32"`, `"bfloat16"`, or `"float8"`: e4m3 with a float32 scale per token and path.
            target_layer_ids: Whose paths, as in [`capture_residual`]. A cache that exists and holds more is opened
                for these.
            batch_size: Documents per forward of the target.
            shard_size: Bytes after which a new file begins; about twice as much memory is used. A cache that exists
                keeps its own.

        Raises:
            ValueError: If the rows are malformed, the disk is too small, the residual is not finite, or the directory
                holds a cache of other rows, another target or another dtype.
            OSError: If writing fails. Shards that are complete stay; the same call continues after them.
        """
        path = Path(directory)
        rows = rows.with_format("numpy") if hasattr(rows, "with_format") else rows
        plan = _plan(rows, target, dtype, target_layer_ids, shard_size)
        index = _resume(path, plan) if (path / _INDEX).exists() else plan
        todo = [i for i, shard in enumerate(index["shards"]) if not _is_whole(path / shard["name"], shard)]
        if todo and not plan["target"]["body"]:
            raise ValueError(
                f"{len(todo)} shards are to be written to {path}, but this target has no layers to run. Load it whole, "
                "without `num_hidden_layers=0`."
            )
        if todo:
            _prepare_disk(path, index, todo)
            _write_shards(path, index, todo, rows, target, batch_size)
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
        stored = _stored_layers(self.index)
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
    facts = describe(target)
    return _size(len(target_layer_ids) * facts.hc_mult, facts.hidden_size, dtype, rows, tokens)


def _size(paths: int, hidden_size: int, dtype: str, rows: int, tokens: int) -> int:
    if dtype not in FEATURE_DTYPES:
        raise ValueError(f"`dtype` is {dtype!r}, expected one of {sorted(FEATURE_DTYPES)}.")
    scale = torch.float32.itemsize if dtype == "float8" else 0
    per_token = paths * (hidden_size * FEATURE_DTYPES[dtype].itemsize + scale)
    return tokens * (per_token + sum(kind.itemsize for kind in _COLUMNS.values())) + rows * torch.int64.itemsize


@torch.no_grad()
def target_fingerprint(target: PreTrainedModel) -> dict[str, str]:
    """SHA-256 of what tells one target from another, the same for a float32 and a bfloat16 load of a checkpoint.

    Taken over names, shapes and 64 evenly spaced elements, in bfloat16, of every parameter and saved buffer: a change
    to a few elements may go unnoticed, another checkpoint, a fine-tuned or a quantized one does not. Offloaded
    parameters are fetched one module at a time, FSDP2's are gathered (all ranks must call).

    Returns:
        `"head"` over embedding, final norm, collapse and language model head, what training reads beside the cache,
        and `"body"` over the rest; an empty string for a target loaded without layers.

    Raises:
        ValueError: If it is no target, or the values of a parameter are not in this process.
    """
    roots = (*collapse_of(target).modules, target.get_input_embeddings(), target.get_output_embeddings())
    heads = {id(module) for root in roots for module in root.modules()}
    parts: dict[str, list[tuple[str, bytes]]] = {"head": [], "body": []}
    saved = set(target.state_dict())
    for prefix, module in target.named_modules(remove_duplicate=False):
        with align_module_device(module):
            tensors = [*module.named_parameters(prefix, recurse=False), *module.named_buffers(prefix, recurse=False)]
            part = parts["head" if id(module) in heads else "body"]
            part += [
                (f"{name} {list(value.shape)} ", _sample(name, value)) for name, value in tensors if name in saved
            ]
    return {part: _digest(values) if values else "" for part, values in parts.items()}


def _sample(name: str, value: torch.Tensor) -> bytes:
    if value.is_meta or not value.numel():
        raise ValueError(
            f"The values of the target's {name} are not in this process (device {value.device}, shape "
            f"{list(value.shape)}): the target cannot be recognised. Open the feature cache before the target is "
            "sharded with ZeRO-3, or load the target outside of ZeRO-3."
        )
    value = value.full_tensor() if hasattr(value, "full_tensor") else value
    sample = value.flatten()[:: math.ceil(value.numel() / _SAMPLED)]
    return sample.to("cpu", torch.bfloat16).view(torch.int16).numpy().tobytes()


def _digest(values: list[tuple[str, bytes]]) -> str:
    digest = hashlib.sha256()
    for name, sample in sorted(values):
        digest.update(name.encode() + sample)
    return digest.hexdigest()


def _identity(target: PreTrainedModel) -> dict[str, str]:
    return {"name": target.config._name_or_path, **target_fingerprint(target)}


def _plan(
    rows: Rows, target: PreTrainedModel, dtype: str, target_layer_ids: Sequence[int], shard_size: int
) -> dict[str, Any]:
    """The index of a cache before anything is written: which rows go to which shard follows from their lengths."""
    facts = describe(target)
    lengths, digest = _scan(rows, facts.vocab_size)
    paths = len(target_layer_ids) * facts.hc_mult
    sizes = [_size(paths, facts.hidden_size, dtype, 1, length) for length in lengths]
    shards = [
        {"rows": stop - start, "tokens": sum(lengths[start:stop]), "bytes": None, "sha256": None}
        for start, stop in _split(sizes, shard_size)
    ]
    return {
        "version": _FORMAT,
        "target": _identity(target),
        "dtype": dtype,
        "target_layer_ids": list(target_layer_ids),
        "hc_mult": facts.hc_mult,
        "hidden_size": facts.hidden_size,
        "rows": len(lengths),
        "tokens": sum(lengths),
        "rows_sha256": digest,
        "shards": [
            {"name": f"features-{i:05d}-of-{len(shards):05d}.safetensors", **shard}
            for i, shard in enumerate(shards, 1)
        ],
    }


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


def _stored_layers(index: dict[str, Any]) -> list[int]:
    return index.get("target_layer_ids", [-1])  # caches from before layers could be chosen


def _check_layers(directory: Path, index: dict[str, Any], wanted: Sequence[int]) -> None:
    stored = _stored_layers(index)
    if not set(wanted) <= set(stored):
        raise ValueError(
            f"The feature cache in {directory} holds layers {stored}, but {list(wanted)} are needed (-1 is the "
            "pre-collapse residual). Write one with these `target_layer_ids` in another directory."
        )


def _prepare_disk(directory: Path, index: dict[str, Any], todo: list[int]) -> None:
    """Print what will be written, after removing what an interrupted call left, and refuse what does not fit."""
    directory.mkdir(parents=True, exist_ok=True)
    for i in todo:
        shard = directory / index["shards"][i]["name"]
        shard.unlink(missing_ok=True)
        _unfinished(shard).unlink(missing_ok=True)
    needed, free = sum(_shard_size(index, i) for i in todo), shutil.disk_usage(directory).free
    total = sum(_shard_size(index, i) for i in range(len(index["shards"])))
    print(
        f"Feature cache in {directory}: {index['rows']:,} rows, {index['tokens']:,} tokens, {_human(total)} as "
        f"{index['dtype']}. To be written: {_human(needed)}, free on the disk: {_human(free)}."
    )
    if free < needed + _RESERVE:
        raise ValueError(
            f"The feature cache needs {_human(needed)} more in {directory}, where {_human(free)} are free "
            f"({_human(_RESERVE)} stay reserved). {_ROOM}"
        )


def _shard_size(index: dict[str, Any], i: int) -> int:
    shard = index["shards"][i]
    paths = len(_stored_layers(index)) * index["hc_mult"]
    return _size(paths, index["hidden_size"], index["dtype"], shard["rows"], shard["tokens"])


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
    with tqdm(total=total, unit="token", unit_scale=True, desc="Feature cache") as progress:
        for i in todo:
            shard, first = index["shards"][i], first_rows[i]
            held = [_row(rows, row) for row in range(first, first + shard["rows"])]
            data = save(_shard_tensors(held, first, target, index, batch_size, progress))
            shard.update(bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
            try:
                _write_whole(directory / shard["name"], data)
                _write_whole(directory / _INDEX, json.dumps(index, indent=1).encode())
            except OSError as error:
                raise OSError(
                    error.errno,
                    f"Writing {shard['name']} ({_human(len(data))}) to {directory} failed: {error.strerror}. The shards "
                    f"before it are complete: the same call continues after them. {_ROOM}",
                ) from error


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
    documents = columns["input_ids"].tensor_split(starts[1:])
    # Longest first: memory that does not suffice shows at once. Batches end with the shard, so that a shard's bytes
    # do not depend on which call writes it.
    order = sorted(range(len(documents)), key=lambda i: -len(documents[i]))
    stored: dict[str, torch.Tensor] = {}
    for at in range(0, len(order), batch_size):
        batch = order[at : at + batch_size]
        states = _residual_of_documents(target, [documents[i] for i in batch], _stored_layers(index))
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


def _write_whole(path: Path, data: bytes) -> None:
    """A reader, or the next call after a crash, finds all of the file or none of it."""
    try:
        with open(_unfinished(path), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(_unfinished(path), path)
    except OSError:
        _unfinished(path).unlink(missing_ok=True)
        raise


def _read_index(directory: Path) -> dict[str, Any]:
    path = directory / _INDEX
    if not path.exists():
        raise ValueError(f"No feature cache in {directory}: {_INDEX} is missing. Write one with `FeatureCache.write`.")
    try:
        index = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}). Delete the directory and write the cache again.") from error
    if index.get("version") != _FORMAT:
        raise ValueError(
            f"{path} has format version {index.get('version')}, this release reads {_FORMAT}. Write the cache again in "
            "another directory, or install the release that wrote it."
        )
    return index


def _check_target(directory: Path, index: dict[str, Any], given: dict[str, str]) -> None:
    written = index["target"]
    differing = [part for part in ("head", "body") if given[part] and given[part] != written[part]]
    if differing:
        prints = ", ".join(f"{part}: {written[part][:12]} there, {given[part][:12]} here" for part in differing)
        raise ValueError(
            f"The feature cache in {directory} was written from another target: {written['name']!r}, and this one is "
            f"{given['name']!r} (fingerprints differ, {prints}). Load the target that wrote it, or write a cache of this "
            "one in another directory."
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
