"""Where in its data a mistake is: the file and line of a row, and the line at which a file stops being rows."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

PLACE = "_place"  # a column: where the row was read


def with_places(rows: Dataset | IterableDataset, source: str) -> Dataset | IterableDataset:
    """Add the column [`PLACE`]: file and line of a JSON Lines file, else what was read and the number of the row."""
    from datasets import Dataset

    if not isinstance(rows, Dataset):
        return rows.map(lambda row, number: {PLACE: f"{source}, row {number}"}, with_indices=True)
    lines: list[int] = []
    if os.path.isfile(source) and not source.endswith(".parquet"):
        with open(source, "rb") as file:
            lines = [number for number, line in enumerate(file, start=1) if line.strip()]
    told = [f"{source}:{line}" for line in lines[: len(rows)]]
    if len(lines) < len(rows) or source.endswith(".json"):
        told = [f"{source}, row {number}" for number in range(len(rows))]
    return rows.add_column(PLACE, told)


@contextmanager
def at_row(row: Mapping[str, Any], number: int) -> Iterator[None]:
    """Put before the words of a `ValueError` where the row is."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{row.get(PLACE) or f'Row {number} (the first is 0)'}: {error}") from error


def why_unreadable(path: str, lines: int | None = None) -> str | None:
    """Where and why a JSON or JSON Lines file, or the first `lines` of one, is no table of rows, which a reader of
    whole files does not say."""
    with open(path, "rb") as file:
        start = file.read(4096).lstrip()
    if not start:
        return f"{path} is empty: expected a JSON object on every line."
    if start.startswith(b"[") or start.splitlines()[0].strip() == b"{":  # all rows in one, or one over several lines
        return _why_no_document(path)
    with open(path, "rb") as file:
        for number, line in enumerate(islice(file, lines), start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line.strip().decode("utf-8-sig"))
            except UnicodeDecodeError:
                return f"{path}:{number} is not UTF-8 text: expected a JSON object on every line."
            except json.JSONDecodeError as error:
                where = f"{error.msg}, column {error.colno}"
                return f"{path}:{number} is no JSON ({where}): expected an object on every line."
            if not isinstance(row, dict):
                return f"{path}:{number} is a {type(row).__name__}, expected an object of columns and values."
    return None


def why_no_text(path: str) -> str | None:
    """The first line of a file that is not UTF-8."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                line.decode()
            except UnicodeDecodeError:
                return f"{path}:{number} is not UTF-8 text: expected a JSON object on every line."
    return None


def why_unlike(path: str) -> str | None:
    """The first row of a JSON Lines file that has something else in a column than the rows before."""
    kinds: dict[str, tuple[str, int]] = {}
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            for name, kind in _kinds(json.loads(line)) if line.strip() else ():
                first, where = kinds.setdefault(name, (kind, number))
                if kind != first:
                    return f"{path}:{number}: `{name}` is {kind}, but in line {where} {first}. Make them alike."
    return None


def _why_no_document(path: str) -> str | None:
    try:
        with open(path, encoding="utf-8") as file:
            rows = json.load(file)
    except json.JSONDecodeError as error:
        return f"{path}:{error.lineno} is no JSON ({error.msg})."
    except ValueError as error:
        return f"{path} is not UTF-8 text ({error})."
    for number, row in enumerate(rows if isinstance(rows, list) else ()):
        if not isinstance(row, dict):
            return f"{path}: row {number} is a {type(row).__name__}, expected an object of columns and values."
    return None if rows else f"{path} has no rows."


def _kinds(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """The kind of every part of a row that is not null; numbers are of one."""
    if isinstance(value, dict):
        yield name, "an object"
        for key, part in value.items():
            yield from _kinds(part, f"{name}.{key}" if name else key)
    elif isinstance(value, list):
        yield name, "a list"
        for part in value:
            yield from _kinds(part, f"{name}[]")
    elif value is not None:
        yield name, {str: "text", bool: "true or false"}.get(type(value), "a number")
