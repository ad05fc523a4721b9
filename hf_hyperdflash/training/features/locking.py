"""One writer at a time for files that a killed run continues."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from filelock import FileLock, Timeout


@contextmanager
def only_writer(path: str | os.PathLike[str]) -> Iterator[None]:
    """Lock `<path>.lock`, or raise a `ValueError` at once if another process, or another call of this one, writes
    there. The lock file stays there; the system releases the lock of a dead process."""
    try:
        lock = FileLock(f"{os.fspath(path)}.lock").acquire(timeout=0)
    except Timeout as error:
        raise ValueError(
            f"{os.fspath(path)} is being written by another process: expected one at a time. Wait until that one has "
            "ended, or stop it and repeat this call, or write to another folder."
        ) from error
    with lock:
        yield
