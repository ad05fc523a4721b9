"""Which version this is: part of the code that goes with every saved drafter, and of its configuration."""

from __future__ import annotations

__version__ = "0.3.0.dev0"


def series(version: str) -> tuple[int, ...]:
    """Return the major and minor number, which change when older code may not understand newer files; empty for no
    version."""
    return tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())
