"""A part of a feature folder as a file: its name, its tensors, how it is written.

Torch and safetensors alone, because serving engines write parts, too.
"""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from rich.filesize import decimal
from safetensors.torch import save

FEATURE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float8": torch.float8_e4m3fn}
UNFINISHED = ".tmp"
ID_TYPE = torch.int32
SPACE_ADVICE = (
    "Free some space or choose another directory, store it as dtype='float8' (half of bfloat16), use fewer rows, or "
    "train with feature_source='online', which stores nothing."
)


def sha256(*texts: str) -> str:
    return hashlib.sha256(" ".join(texts).encode()).hexdigest()


def row_digest(input_ids: torch.Tensor, position_ids: torch.Tensor) -> str:
    """Return the digest of a row: 32 hexadecimal digits of SHA-256 over its token ids and positions, 64-bit numbers
    each."""
    ids, positions = (column.long().contiguous().numpy().tobytes() for column in (input_ids, position_ids))
    return hashlib.sha256(ids + positions).hexdigest()[:32]


def part_name(digests: Sequence[str]) -> str:
    """Return the name of a part with the rows of these digests."""
    return sha256(*digests)[:32]


def part_path(directory: Path, name: str) -> Path:
    return directory / f"{name}.safetensors"


def encode(residual: torch.Tensor, dtype: str) -> dict[str, torch.Tensor]:
    """Return the tensors that a part has of a residual `[seq, streams, hidden_size]`: itself in a number format, for
    `"float8"` with a float32 `scale`, `[seq, streams]`."""
    kind = FEATURE_DTYPES[dtype]
    if dtype != "float8":
        return {"residual": residual.to(kind)}
    residual = residual.float()
    # At least the smallest normal number: a stream of zeros must not divide by zero.
    scale = (residual.abs().amax(-1) / torch.finfo(kind).max).clamp(min=torch.finfo(torch.float32).tiny)
    return {"residual": (residual / scale.unsqueeze(-1)).to(kind), "scale": scale}


def save_part(
    path: Path, key: str, rows: Sequence[Mapping[str, torch.Tensor]], stored: Mapping[str, torch.Tensor]
) -> None:
    """Write a part atomically. `rows` have `input_ids` and `position_ids`, `stored` is what [`encode`] returns, of all
    rows end to end."""
    columns = {name: torch.cat([row[name] for row in rows]).to(ID_TYPE) for name in ("input_ids", "position_ids")}
    lengths = torch.tensor([len(row["input_ids"]) for row in rows])
    write_atomically(path, save({**columns, **stored, "lengths": lengths}, {"identity": key}))


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file such that a reader, or the next call after a crash, finds all of it or nothing."""
    unfinished = path.with_name(path.name + UNFINISHED)
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
            f"Writing {path.name} ({decimal(len(data))}) to {path.parent} failed: {error.strerror}. The parts "
            f"before it are complete: the same call continues after them.{f' {SPACE_ADVICE}' if is_full else ''}"
        ) from error
