"""What the residual in a feature folder depends on: the checkpoint, the configuration, layers and number format.

A checkpoint is known by its commit on the Hub or by its files, so that every program that runs it has the same
identity. The loaded weights are read only where there is neither, because the model was made in code.
"""

from __future__ import annotations

import hashlib
import json
import reprlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias

import torch
from huggingface_hub import constants
from huggingface_hub.file_download import repo_folder_name
from safetensors import safe_open
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.hub import cached_file, extract_commit_hash

from ...drafters.weights import weight_files
from ...hub.gguf import SUFFIX, name_in_gguf
from ...targets.registry import target_of
from .fingerprint import config_fields, sha256, target_fingerprint

Identity: TypeAlias = dict[str, Any]

FEATURE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float8": torch.float8_e4m3fn}
# A weight file up to `_WHOLE` bytes is read whole; of a larger one a piece in each stretch, 0.4 % of a large
# checkpoint. Training changes values everywhere, so no stretch stays as it was.
_WHOLE, _STRETCH, _PIECE = 2**28, 2**24, 2**16
_PLAIN = ("F64", "F32", "F16", "BF16")  # numbers of a file that a loaded weight has, too
_SOURCES = ("revision", "files", "head", "body")  # how a checkpoint is known; the last two are digests of weights


def feature_identity(
    target: PreTrainedModel,
    *,
    dtype: str = "bfloat16",
    target_layer_ids: Sequence[int] = (-1,),
    tokenizer: PreTrainedTokenizerBase | None = None,
    by_weights: bool = False,
) -> Identity:
    """Return the identity of features of a target. Where its checkpoint is known the weights are not read: then a
    target on the meta device is enough. `by_weights` describes it by the weights in any case."""
    if dtype not in FEATURE_DTYPES:
        raise ValueError(f"`dtype` is {dtype!r}, expected one of {sorted(FEATURE_DTYPES)}.")
    family = target_of(target)
    return {
        "target": describe_target(target, by_weights),
        "tokenizer": None if tokenizer is None else _describe_tokenizer(tokenizer),
        "dtype": dtype,
        "target_layer_ids": list(target_layer_ids),
        "hc_mult": family.streams,
        "hidden_size": family.config.hidden_size,
    }


def describe_target(target: PreTrainedModel, by_weights: bool = False) -> Identity:
    """Return what is known of a target: the fields of its configuration, and commit, files or weights."""
    target_of(target)  # raises if it is no target
    name = str(target.config._name_or_path or "")
    source = {} if by_weights else checkpoint_source(name, getattr(target.config, "_commit_hash", None))
    if not source or not _is_as_saved(target, name, source.get("revision", "")):
        source = {part: digest for part, digest in target_fingerprint(target).items() if part != "config"}
    return {"repository": name, **source, "config": config_fields(target.config)}


def _describe_tokenizer(tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    vocabulary = [f"{token} {number}" for token, number in sorted(tokenizer.get_vocab().items())]
    return {"vocabulary": sha256(*vocabulary), "template": sha256(str(tokenizer.chat_template))}


def checkpoint_source(name: str, commit: str | None = None) -> dict[str, str]:
    """Return how the checkpoint of a folder, GGUF file or Hub id is known: its commit, or a digest of its weight files
    where there is none; nothing where there is neither."""
    path = Path(name)
    if name and path.exists():
        commit = extract_commit_hash(str(path.absolute() / "config.json"), None)  # of a folder in the Hub's cache
        if commit is None:
            return {"files": digest} if (digest := _files_digest(path)) else {}
    elif name:
        name, options = name_in_gguf(name, {})
        commit = commit or _only_commit(name)
        path = Path(options.get("gguf_file", ""))
    # A repository may have several GGUF files of one configuration.
    of_file = f" {path.name}" if path.suffix.lower() == SUFFIX else ""
    return {"revision": commit + of_file} if commit else {}


@torch.no_grad()
def _is_as_saved(target: PreTrainedModel, name: str, commit: str) -> bool:
    """Return whether a corner of every weight is that of its file, where both have it by one name and as plain
    numbers. Weights that were merged, trained or drawn in code are not."""
    folder = Path(name)
    if not folder.exists():
        how: dict[str, Any] = {"revision": commit, "local_files_only": True}
        with suppress(OSError):
            folder = Path(str(cached_file(name, "config.json", **how))).parent
    weights = {key: value for key, value in target.state_dict().items() if type(value) is torch.Tensor}
    with suppress(OSError):  # of a checkpoint that is not whole here
        for file in weight_files(folder):
            with safe_open(folder / file, "pt") as saved:
                for key in set(saved.keys()) & weights.keys():
                    values, own = saved.get_slice(key), weights[key]
                    is_plain = values.get_dtype() in _PLAIN and own.is_floating_point() and not own.is_meta
                    if is_plain and own.dim() and values.get_shape() == list(own.shape):
                        corner = tuple(slice(8) for _ in own.shape)
                        if not torch.equal(values[corner].to(own.dtype), own[corner].cpu()):
                            return False
    return True


def _only_commit(name: str) -> str | None:
    """Return the commit of a repository of which the Hub's cache has one alone. transformers 5.20 and later do not say
    which commit a model is of; of several it may be any."""
    try:
        folder = Path(constants.HF_HUB_CACHE, repo_folder_name(repo_id=name, repo_type="model"), "snapshots")
        commits = [snapshot.name for snapshot in folder.iterdir()]
    except OSError:
        return None
    return commits[0] if len(commits) == 1 else None


def _files_digest(path: Path) -> str:
    if path.is_file():
        files = [path]
    else:
        names = weight_files(path)
        files = [path / name for name in names] or sorted(path.glob("pytorch_model*.bin"))
    stats = [(file, file.stat()) for file in files]
    digests = [_file_digest(str(file), stat.st_size, stat.st_mtime_ns) for file, stat in stats]
    return sha256(*digests) if digests else ""


@lru_cache
def _file_digest(path: str, size: int, _: int) -> str:
    """Return the digest of a file; it is read once for each size and time of change."""
    digest = hashlib.sha256(str(size).encode())
    with open(path, "rb") as file:
        if size <= _WHOLE:
            while data := file.read(_STRETCH):
                digest.update(data)
        else:
            for start in range(0, size, _STRETCH):
                file.seek(start)
                digest.update(file.read(_PIECE))
    return digest.hexdigest()


def identity_key(identity: Identity) -> str:
    """Return the digest of what the bytes of a part depend on, which its header has. A target's name and the tokenizer
    are only recorded."""
    fields = {**identity, "tokenizer": None, "target": {**identity["target"], "repository": ""}}
    return sha256(json.dumps(fields, sort_keys=True))


def token_bytes(identity: Identity) -> int:
    """Return the bytes of a token's residual as it is stored."""
    per_stream = identity["hidden_size"] * FEATURE_DTYPES[identity["dtype"]].itemsize
    if identity["dtype"] == "float8":
        per_stream += torch.float32.itemsize  # its scale
    return int(len(identity["target_layer_ids"]) * identity["hc_mult"] * per_stream)


def is_by_weights(identity: Mapping[str, Any]) -> bool:
    """Return whether a target's description has digests of its weights, because its checkpoint was not known."""
    return "head" in identity["target"]


def check_identity(directory: Path, there: Identity, here: Identity) -> None:
    """Raise a `ValueError` if the identity of a folder differs in one of the given fields; more layers than are needed
    are no difference."""
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
    titles = {"revision": "revision", "files": "weight files", "head": "head weights", "body": "body weights"}
    # A target without layers has no digest of its body.
    parts = [
        f"{titles[part]}: {_short(old.get(part))} there, {_short(new.get(part))} here"
        for part in _SOURCES
        if old.get(part) != new.get(part) and not (part == "body" and new.get(part) == "")
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


def _short(digest: str | None) -> str:
    return digest[:12] if digest else "unknown"
