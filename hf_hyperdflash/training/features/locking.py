"""Locks between processes: for files that a killed run continues, and for parts that several processes make.

They are the system's own locks on a file (`flock`), which die with their process, at once and without a clock. On NFS
Linux carries them to the server, where a lock of a machine that died ends with its lease. Where a file system has no
locks, parts are made twice and nothing else happens: correctness rests on the atomic renaming of whole files.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import BaseFileLock, FileLock, Timeout


def hold(path: str | os.PathLike[str], what: str = "written") -> BaseFileLock:
    """Lock `<path>.lock` and return the lock, or raise a `ValueError` at once if another process, or another call of
    this one, has it. The lock file stays there; the system releases the lock of a dead process."""
    lock = FileLock(f"{os.fspath(path)}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise ValueError(
            f"{os.fspath(path)} is being {what} by another process: expected one at a time. Wait until that one has "
            "ended, or stop it and repeat this call, or use another folder."
        ) from error
    return lock


@contextmanager
def only_writer(path: str | os.PathLike[str]) -> Iterator[None]:
    """[`hold`] a lock for a while."""
    with hold(path):
        yield


@contextmanager
def one_at_a_time(path: Path) -> Iterator[None]:
    """Wait for `<path>.lock`, and hold it."""
    try:
        lock = FileLock(f"{path}.lock").acquire()
    except NotImplementedError:  # a file system without locks
        yield
    else:
        with lock:
            yield


@contextmanager
def claim(path: Path) -> Iterator[bool]:
    """Lock `<path>.lock` if nobody has, and yield whether this call has it now. The file goes with the claim: who
    locks it a moment later finds what was made."""
    try:
        lock = FileLock(f"{path}.lock").acquire(timeout=0)
    except Timeout:
        yield False
        return
    except NotImplementedError:
        yield True
        return
    with lock:
        try:
            yield True
        finally:
            Path(f"{path}.lock").unlink(missing_ok=True)
