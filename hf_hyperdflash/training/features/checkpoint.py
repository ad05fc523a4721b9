"""How a checkpoint is known without loading it: by its commit on the Hub, or by its weight files."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path

from huggingface_hub import constants
from huggingface_hub.file_download import repo_folder_name
from transformers.utils.hub import extract_commit_hash

from ...drafters.weights import weight_files
from ...hub.gguf import SUFFIX, name_in_gguf
from .part_file import sha256

# A weight file up to `_WHOLE` bytes is read whole; of a larger one a piece in each stretch, 0.4 % of a large
# checkpoint. Training changes values everywhere, so no stretch stays as it was.
_WHOLE, _STRETCH, _PIECE = 2**28, 2**24, 2**16


def checkpoint_source(name: str, commit: str | None = None) -> dict[str, str]:
    """Return how the checkpoint of a folder, GGUF file or Hub id is known: its commit, or a digest of its weight files
    where there is none; nothing where there is neither."""
    path = Path(name)
    if name and path.exists():
        commit = extract_commit_hash(str(path.absolute() / "config.json"), None)  # of a folder in the Hub's cache
        if commit is None:
            return {"files": digest} if (digest := _files_digest(path)) else {}
        # A repository may have several targets of one configuration, each in a folder of its own.
        commit += str(path.absolute()).rpartition(commit)[2] if path.is_dir() else ""
    elif name:
        name, options = name_in_gguf(name, {})
        commit = commit or _only_commit(name)
        path = Path(options.get("gguf_file", ""))
    # A repository may have several GGUF files of one configuration.
    of_file = f" {path.name}" if path.suffix.lower() == SUFFIX else ""
    return {"revision": commit + of_file} if commit else {}


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
