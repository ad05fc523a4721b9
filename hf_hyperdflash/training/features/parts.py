"""The files of a feature folder: parts with the residual of some rows, and lists of parts in the order of the rows.

A part is `<name>.safetensors`: whole rows end to end, `input_ids`, `position_ids`, `residual` (with `scale` in float8)
and `lengths`; `identity` in its header is [`~identity.identity_key`]. Its name is a digest of token ids and positions
alone, so that a serving engine can write it: loss masks stay with whoever has the rows, in a file beside the list. A
part that is there is whole, and parts made anywhere are joined by putting their files into one folder.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save

from .identity import Identity, check_identity, identity_key, token_bytes
from .part_file import ID_TYPE, part_path, sha256, write_atomically

FORMAT, LISTS, READER = 4, "features*.json", "reader.json"


class Part(NamedTuple):
    """A file of a cache: its name without a suffix, which is the digest of its rows."""

    name: str
    rows: int
    tokens: int

    def path(self, directory: Path) -> Path:
        return part_path(directory, self.name)


def part_bytes(identity: Identity, rows: int, tokens: int) -> int:
    """Return the bytes on disk of a part without its header (under a kilobyte)."""
    return tokens * (token_bytes(identity) + 2 * ID_TYPE.itemsize) + rows * torch.int64.itemsize


# Parts


def part_defect(path: Path, key: str) -> str:
    """Return what is wrong with a part: `"missing"`, `"damaged"`, `"of another target, layers or dtype"`, or nothing.
    Its header says how long a whole file is."""
    try:
        with safe_open(path, "pt") as file:
            return "" if file.metadata() == {"identity": key} else "of another target, layers or dtype"
    except FileNotFoundError:
        return "missing"
    except SafetensorError:
        return "damaged"


def read_row(path: Path, index: int, stored_layers: Sequence[int], layers: Sequence[int]) -> dict[str, torch.Tensor]:
    """Read a row of a part: `input_ids` and `position_ids` (long), `[seq]`, and the `residual` of some layers, `[seq,
    len(layers) * hc_mult, hidden_size]`, float32 if stored so, else bfloat16."""
    # Opened for every row, which maps the file and reads a header: no open file has to survive a fork or pickle.
    with safe_open(path, "pt") as file:
        lengths = file.get_tensor("lengths")
        end = int(lengths[: index + 1].sum())
        span = slice(end - int(lengths[index]), end)
        # A slice keeps the whole tensor's storage, which a data loader worker would send along.
        row = {name: file.get_slice(name)[span].clone() for name in file.keys() if name != "lengths"}
    if list(layers) != list(stored_layers):
        for part in row.keys() & {"residual", "scale"}:
            by_layer = dict(zip(stored_layers, row[part].chunk(len(stored_layers), dim=1)))
            row[part] = torch.cat([by_layer[layer] for layer in layers], dim=1)
    if "scale" in row:
        row["residual"] = (row["residual"].float() * row.pop("scale").unsqueeze(-1)).bfloat16()
    return {**row, "input_ids": row["input_ids"].long(), "position_ids": row["position_ids"].long()}


# Lists


@dataclass(frozen=True)
class PartList:
    """A list of parts, for the rows of one dataset: `<path>` has their names, `<path>.rows` what is known of each row.
    It is written before its parts."""

    path: Path
    identity: Identity
    parts: list[Part]

    @cached_property
    def rows(self) -> dict[str, torch.Tensor]:
        """`digests`, `[rows, 16]` bytes, `lengths`, `[rows]`, and `loss_mask` of all rows end to end."""
        return load_file(_rows_path(self.path))

    @cached_property
    def digests(self) -> list[str]:
        """The digest of every row."""
        return [bytes(row).hex() for row in self.rows["digests"].numpy()]

    @cached_property
    def first_rows(self) -> list[int]:
        """The first row of each part, and the number of all rows."""
        return list(accumulate((part.rows for part in self.parts), initial=0))

    def place(self, row: int) -> tuple[int, int]:
        """Return the number of the part that has a row, and the row's number in it."""
        part = bisect_right(self.first_rows, row) - 1
        return part, row - self.first_rows[part]

    def mask_of(self, row: int) -> torch.Tensor:
        """Return the loss mask of a row, `[seq]`, boolean."""
        end = int(self._ends[row])
        return self.rows["loss_mask"][end - int(self.rows["lengths"][row]) : end].clone()

    @cached_property
    def _ends(self) -> torch.Tensor:
        return self.rows["lengths"].cumsum(0)

    def delete(self) -> None:
        self.path.unlink(missing_ok=True)
        _rows_path(self.path).unlink(missing_ok=True)


def _rows_path(path: Path) -> Path:
    return path.with_suffix(".rows")


def list_path(directory: Path, identity: Identity, parts: Sequence[Part], masks: torch.Tensor) -> Path:
    """Return the path of a list, which says what is stored of which rows, and their loss masks."""
    masked = hashlib.sha256(masks.numpy().tobytes()).hexdigest()
    return directory / f"features-{sha256(identity_key(identity), *(part.name for part in parts), masked)[:16]}.json"


def write_list(
    path: Path, identity: Identity, parts: Sequence[Part], digests: Sequence[str], lengths: Sequence[int],
    masks: torch.Tensor,
) -> None:  # fmt: skip
    packed = torch.tensor([list(bytes.fromhex(digest)) for digest in digests], dtype=torch.uint8)
    rows = {"digests": packed, "lengths": torch.tensor(lengths), "loss_mask": masks}
    write_atomically(_rows_path(path), save(rows))
    content = {"version": FORMAT, "identity": identity, "parts": parts}
    write_atomically(path, json.dumps(content, indent=1).encode())  # the list is there once this is


def read_lists(directory: Path) -> list[PartList]:
    """Return the lists of a folder, or raise a `ValueError` if one is damaged or of another release."""
    found = []
    for path in sorted(directory.glob(LISTS)):
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if content["version"] != FORMAT:
                raise ValueError(f"its format has version {content['version']}, and this release reads {FORMAT}")
            found.append(PartList(path, content["identity"], [Part(*part) for part in content["parts"]]))
            with safe_open(_rows_path(path), "pt"):
                pass
        except FileNotFoundError as error:
            if path.exists():
                raise ValueError(
                    f"{path} lacks {_rows_path(path).name}, which has its rows: put it into the folder, too."
                ) from error
        except (ValueError, KeyError, TypeError, SafetensorError) as error:
            raise ValueError(
                f"{path} is damaged, of another release or no list of features ({error!r}). Delete it and write the "
                "cache again: parts of this release that are whole stay."
            ) from error
    return found


def check_joined(lists: Sequence[PartList]) -> None:
    """Raise a `ValueError` if lists of one folder are of different targets, layers or formats, or have the same
    rows in other parts."""
    first, owners = lists[0], dict[str, tuple[Part, PartList]]()
    for each in lists:
        directory = each.path.parent
        check_identity(directory, first.identity, each.identity)
        check_identity(directory, each.identity, first.identity)
        known, doubled = dict(owners), set[tuple[str, str]]()
        for number, part in enumerate(each.parts):
            for row in range(each.first_rows[number], each.first_rows[number + 1]):
                digest = each.digests[row]
                other = known.get(digest)
                if other is not None and other[0] != part:
                    doubled.add((other[0].name, part.name))
                owners.setdefault(digest, (part, each))
        if doubled:
            one, two = min(doubled)
            raise ValueError(
                f"The feature cache in {directory} has rows twice: {len(doubled)} pairs of parts share rows, the "
                f"first {one} and {two}, because their lists group the rows differently. Remove {each.path.name}, or "
                "use another directory for it."
            )


# Training beside the producers


class Reader(NamedTuple):
    """What a training that deletes parts says to those who make them."""

    list_name: str = ""  # of the list that it follows
    first: int = 0  # the first part that it still needs; those before it, but the first `pinned`, are deleted
    pinned: int = 0  # parts with held-out rows, which stay
    gigabytes: float | None = None  # what the folder may hold
    is_over: bool = False


def read_reader(directory: Path, path: Path) -> Reader:
    """Return what a training that follows a list says; the default if there is none."""
    try:
        reader = Reader(**json.loads((directory / READER).read_text(encoding="utf-8")))
    except (FileNotFoundError, ValueError, TypeError):
        return Reader()
    return reader if reader.list_name == path.name else Reader()


def write_reader(directory: Path, reader: Reader) -> None:
    write_atomically(directory / READER, json.dumps(reader._asdict()).encode())
