"""Rows of JSON files with the file and line of each, for error messages, and the line where a file is damaged."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

_VISIBLE, _DECODER = re.compile(r"\S"), json.JSONDecoder()
POSITION_COLUMN = "_place"  # the column with the file and line of a row


@contextmanager
def locating_errors(row: Mapping[str, object], number: int) -> Iterator[None]:
    """Prefix the message of a `ValueError` with the position of the row."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{row.get(POSITION_COLUMN) or f'Row {number} (the first is 0)'}: {error}") from error


def read_rows(path: str) -> Iterator[dict[str, object]]:
    """Yield the rows of a JSON or JSON Lines file as they are, each with its position, or raise a `ValueError` with
    the line that is damaged.

    `datasets` takes a text for what it means in a column of several types: an answer "42" for a number. And it does
    not say where a file is damaged, nor check that its text is UTF-8, which would fail later."""
    with open(path, "rb") as file:
        first = next(filter(bytes.strip, file), b"").removeprefix(codecs.BOM_UTF8).strip()
        if not first:
            raise ValueError(f"{path} is empty: expected a JSON object on every line.")
        # One document has all rows in a list, or objects over several lines.
        is_document = first.startswith(b"[") or not first.endswith(b"}")
        file.seek(0)
        for line, encoded in enumerate([file.read()] if is_document else file, start=1):
            try:
                text, end = encoded.decode("utf-8-sig").rstrip(), 0
                while visible := _VISIBLE.search(text, end):
                    start = visible.start()
                    line += text.count("\n", end, start)
                    found, end = _DECODER.raw_decode(text, start)
                    rows = found if is_document and isinstance(found, list) else [found]
                    if not rows:
                        raise ValueError(f"{path} has no rows.")
                    for number, row in enumerate(rows):
                        position = f"{path}, row {number}" if rows is found else f"{path}:{line}"
                        if not isinstance(row, dict):
                            raise ValueError(
                                f"{position} is a {type(row).__name__}, expected an object of columns and values."
                            )
                        yield {**row, POSITION_COLUMN: position}
                    line += text.count("\n", start, end)
            except UnicodeDecodeError as error:
                line += encoded[: error.start].count(b"\n")
                raise ValueError(f"{path}:{line} is not UTF-8 text: save the file as UTF-8.") from error
            except json.JSONDecodeError as error:
                line += text.count("\n", start, error.pos)
                raise ValueError(
                    f"{path}:{line} is no JSON ({error.msg}, column {error.colno}): expected an object on every line."
                ) from error
