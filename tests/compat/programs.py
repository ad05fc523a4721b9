"""Where the other programs are. `.ci/compat` makes an environment that has all of them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def require_package(name: str) -> None:
    """Skip the test where a package is missing."""
    pytest.importorskip(name, reason=f"{name} is not installed: .ci/compat installs it")


def require_checkout(variable: str) -> Path:
    """Return the checkout that an environment variable names; skip the test where none does."""
    if not (path := os.environ.get(variable)):
        pytest.skip(f"${variable} names no checkout: .ci/compat makes one")
    return Path(path)
