"""The file and line of each row, for error messages; the rows of a file, and the line at which it cannot be read."""

from __future__ import annotations

import codecs
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Any

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
def locating_errors(row: Mapping[str, Any], number: int) -> Iterator[None]:
    """Prefix the message of a `ValueError` with the position of the row."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{row.get(POSITION_COLUMN) or f'Row {number} (the first is 0)'}: {error}") from error


def read_rows(path: str) -> Iterator[Any]:
    """Yield the rows of a JSON or JSON Lines file as they are.

    `datasets` takes a text for what it means in a column of several types: an answer "42" for a number.

    Raises:
        ValueError: With the line that is no JSON.
    """
    if _is_document(path):
        with open(path, encoding="utf-8-sig") as file:
            document = json.load(file)
        yield from document if isinstance(document, list) else [document]
        return
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                if line.strip():
                    yield json.loads(line.strip().decode("utf-8-sig"))
            except ValueError as error:  # half a character is one, too
                raise ValueError(f"{path}:{number} is no JSON ({error}): expected an object on every line.") from error


def _is_document(path: str) -> bool | None:
    """Return whether a file is one JSON document, all rows or one over several lines; `None` if it is empty."""
    with open(path, "rb") as file:
        start = file.read(4096).removeprefix(codecs.BOM_UTF8).lstrip()
    return start.startswith(b"[") or start.splitlines()[0].strip() == b"{" if start else None


def json_error(path: str, lines: int | None = None) -> str | None:
    """Return where and why a JSON or JSON Lines file, or its first `lines`, is no table of rows; `None` if it is one.

    `datasets` does not say it.
    """
    if (is_one := _is_document(path)) is None:
        return f"{path} is empty: expected a JSON object on every line."
    if is_one:
        return _document_error(path)
    with open(path, "rb") as file:
        for number, line in enumerate(islice(file, lines), start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line.strip().decode("utf-8-sig"))
            except UnicodeDecodeError:
                return f"{path}:{number} is not UTF-8 text: save the file as UTF-8."
            except json.JSONDecodeError as error:
                first_line = f"{error.msg}, column {error.colno}"
                return f"{path}:{number} is no JSON ({first_line}): expected an object on every line."
            if not isinstance(row, dict):
                return f"{path}:{number} is a {type(row).__name__}, expected an object of columns and values."
    return None


def encoding_error(path: str) -> str | None:
    """Return a message with the first line of a file that is not UTF-8; `None` if all are."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                line.decode()
            except UnicodeDecodeError:
                return f"{path}:{number} is not UTF-8 text: save the file as UTF-8."
    return None


def type_mismatch(path: str) -> str | None:
    """Return a message with the first row of a JSON Lines file that has another type in a column than earlier rows."""
    types: dict[str, tuple[str, int]] = {}
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            for name, found_type in _types(json.loads(line.decode("utf-8-sig"))) if line.strip() else ():
                first, first_line = types.setdefault(name, (found_type, number))
                if found_type != first:
                    return (
                        f"{path}:{number}: `{name}` is {found_type}, but in line {first_line} {first}. "
                        "Make them alike."
                    )
    return None


def _document_error(path: str) -> str | None:
    try:
        with open(path, encoding="utf-8-sig") as file:
            rows = json.load(file)
    except json.JSONDecodeError as error:
        return f"{path}:{error.lineno} is no JSON ({error.msg})."
    except ValueError as error:
        return f"{path} is not UTF-8 text ({error})."
    for number, row in enumerate(rows if isinstance(rows, list) else ()):
        if not isinstance(row, dict):
            return f"{path}: row {number} is a {type(row).__name__}, expected an object of columns and values."
    return None if rows else f"{path} has no rows."


def _types(value: object, name: str = "") -> Iterator[tuple[str, str]]:
    """Yield name and type of each part of a row that is not null. All numbers have one type."""
    if isinstance(value, dict):
        yield name, "an object"
        for key, part in value.items():
            yield from _types(part, f"{name}.{key}" if name else key)
    elif isinstance(value, list):
        yield name, "a list"
        for part in value:
            yield from _types(part, f"{name}[]")
    elif value is not None:
        yield name, {str: "text", bool: "true or false"}.get(type(value), "a number")
