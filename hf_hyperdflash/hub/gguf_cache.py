"""Keeps what transformers reads from a GGUF file as a folder: reading the file takes many seconds, the folder one.

The folder is `<HF_HOME>/hf_hyperdflash/gguf/<file>/<version>/<part>`. A part is the configuration, the tokenizer, or
the weights in one dtype. Of each file the newest version alone is kept.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import transformers
from filelock import FileLock, Timeout
from huggingface_hub import constants
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..version import __version__

logger = logging.getLogger(__name__)

SWITCH = "HF_HYPERDFLASH_GGUF_CACHE"  # an environment variable: 0 keeps nothing
_OF_CLASS = ("padding_side", "model_input_names")  # which a tokenizer has from its class
_HEADER = 2**24  # bytes: more than headers have with their vocabularies

Part = TypeVar("Part")


def cached(
    path: Path,
    part: str,
    read: Callable[[], Part],
    load: Callable[[Path], Part],
    is_kept: bool = True,
) -> Part:
    """Return a part of a GGUF file, which `save_pretrained` saves: loaded from its folder, or else read from the file
    and kept as a folder, unless there is not twice the free space that it takes."""
    if os.environ.get(SWITCH, "").upper() in ("0", "OFF", "NO", "FALSE"):
        return read()
    # The folder for this file as it is now, and for the versions of transformers and this package.
    facts = path.stat()
    with path.open("rb") as file:
        header = hashlib.sha256(file.read(_HEADER)).hexdigest()
    names = str(path.resolve()), (facts.st_size, facts.st_mtime_ns, header, transformers.__version__, __version__)
    place, version = (hashlib.sha256(repr(each).encode()).hexdigest()[:16] for each in names)
    folder = Path(constants.HF_HOME, "hf_hyperdflash", "gguf", f"{path.stem}-{place}", version, part)
    is_there = os.path.isdir(folder)
    if is_there:
        try:
            return load(folder)
        except Exception as error:  # a damaged file can end in any; what the caller asked wrongly, `read` raises again
            said = (str(error) or type(error).__name__).splitlines()[0]
            logger.warning("%s cannot be loaded (%.100s): %s is read again.", folder, said, path)
    found = read()
    if is_kept:
        try:
            _keep(folder, found, is_damaged=is_there)
        except Exception as error:  # of the system, of safetensors, of a file system without locks
            _tell_not_kept(folder.parents[1], getattr(error, "strerror", None) or str(error))
    return found


def _keep(folder: Path, part: Any, is_damaged: bool) -> None:
    """Save a part where nobody sees it, then give it its name, and remove what there is of other versions. Another
    process that does the same for this file goes first."""
    version, place = folder.parent, folder.parents[1]
    size = part.get_memory_footprint() if isinstance(part, PreTrainedModel) else 0
    version.mkdir(parents=True, exist_ok=True)
    if shutil.disk_usage(version).free < 2 * size:
        raise OSError(f"that takes {size / 1e6:,.0f} MB, and twice as many must be free")
    try:
        lock = FileLock(place / "lock").acquire(timeout=0)
    except Timeout:
        return
    with lock:
        if os.path.isdir(folder) and not is_damaged:
            return
        unfinished = place / "unfinished"
        for old in place.iterdir():
            if old.is_dir() and old != version:
                shutil.rmtree(old, ignore_errors=True)
        try:
            if isinstance(part, PreTrainedTokenizerBase):  # in the folder it has another class, with other defaults
                part.init_kwargs |= {own: getattr(part, own) for own in _OF_CLASS}
            # A shard takes as much of the memory, too.
            part.save_pretrained(unfinished, **({"max_shard_size": "5GB"} if size else {}))
            for file in unfinished.iterdir():
                with file.open("rb+") as written:
                    os.fsync(written)  # or its name may reach the disk without its bytes
            shutil.rmtree(folder, ignore_errors=True)
            unfinished.rename(folder)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    if size:
        logger.warning(
            "What was read is kept for the next time: %s MB in %s. %s=0 switches that off.",
            f"{size / 1e6:,.0f}",
            folder,
            SWITCH,
        )


@functools.cache
def _tell_not_kept(place: Path, why: str) -> None:
    """Say once why nothing is kept."""
    logger.warning("What is read of a GGUF file is not kept in %s (%s): the next time takes as long.", place, why)
