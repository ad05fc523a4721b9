"""The one way upwards: a drafter asks the package's own table for `bind` and what else is above it."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def upper(name: str) -> Any:
    """Return what the package calls by this name."""
    return getattr(import_module(__name__.rpartition(".")[0]), name)
