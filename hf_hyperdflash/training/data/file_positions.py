"""The file and line of each row, for error messages; the rows of a file, and the line at which it cannot be read."""

from __future__ import annotations

import codecs
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

POSITION_COLUMN = "_place"  # the column with the file and line of a row


def add_file_positions(rows: Dataset | IterableDataset, source: str) -> Dataset | IterableDataset:
    """Add the column [`POSITION_COLUMN`]: file and line of a JSON Lines file, else the source and the row's number."""
    from datasets import Dataset

    if not isinstance(rows, Dataset):
        return rows.map(lambda row, number: {POSITION_COLUMN: f"{source}, row {number}"}, with_indices=True)
    lines: list[int] = []
    if os.path.isfile(source) and not source.endswith(".parquet"):
        with open(source, "rb") as file:
            lines = [number for number, line in enumerate(file, start=1) if line.strip()]
    positions = [f"{source}:{line}" for line in lines[: len(rows)]]
    if len(lines) < len(rows) or source.endswith(".json"):
        positions = [f"{source}, row {number}" for number in range(len(rows))]
    return rows.add_column(POSITION_COLUMN, positions)


@contextmanager
def locating_errors(row: Mapping[str, object], number: int) -> Iterator[None]:
    """Prefix the message of a `ValueError` with the position of the row."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{row.get(POSITION_COLUMN) or f'Row {number} (the first is 0)'}: {error}") from error


def read_rows(path: str) -> Iterator[dict[str, object]]:
    """Yield the rows of a JSON or JSON Lines file as they are, or raise a `ValueError` with the line that is damaged.

    `datasets` takes a text for what it means in a column of several types: an answer "42" for a number. And it does
    not say where a file is damaged."""
    with open(path, "rb") as file:
        start = file.read(4096).removeprefix(codecs.BOM_UTF8).lstrip()
        if not start:
            raise ValueError(f"{path} is empty: expected a JSON object on every line.")
        # One document has all rows, or one over several lines.
        is_document = start.startswith(b"[") or start.splitlines()[0].strip() == b"{"
        file.seek(0)
        for number, text in enumerate([file.read()] if is_document else file, start=1):
            if not text.strip():
                continue
            try:
                found = json.loads(text.decode("utf-8-sig").rstrip())
            except UnicodeDecodeError as error:
                raise _not_utf8(path, number + text[: error.start].count(b"\n")) from error
            except json.JSONDecodeError as error:
                raise ValueError(
                    f"{path}:{number + error.lineno - 1} is no JSON ({error.msg}, column {error.colno}): expected an "
                    "object on every line."
                ) from error
            rows = found if is_document and isinstance(found, list) else [found]
            if not rows:
                raise ValueError(f"{path} has no rows.")
            for row_number, row in enumerate(rows):
                if not isinstance(row, dict):
                    where = f"{path}: row {row_number}" if is_document else f"{path}:{number}"
                    raise ValueError(f"{where} is a {type(row).__name__}, expected an object of columns and values.")
                yield row


def check_encoding(path: str) -> None:
    """Raise a `ValueError` with the first line of a file that is not UTF-8: readers of `datasets` do not check text,
    which would fail later."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                line.decode()
            except UnicodeDecodeError as error:
                raise _not_utf8(path, number) from error


def _not_utf8(path: str, line: int) -> ValueError:
    return ValueError(f"{path}:{line} is not UTF-8 text: save the file as UTF-8.")
