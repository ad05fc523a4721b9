"""Where the other programs are, and how to get them. `.ci/compat` makes an environment that has all of them."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

PACKAGES = {
    "dflash": "pip install --no-deps dflash==0.1.0",
    "speculators": "pip install --no-deps speculators==0.9.0 && pip install loguru pydantic-settings",
}
CHECKOUTS = {
    "DEEPSPEC": "git clone https://github.com/deepseek-ai/DeepSpec && export DEEPSPEC=$PWD/DeepSpec",
    "EAGLE": "git clone https://github.com/SafeAILab/EAGLE && export EAGLE=$PWD/EAGLE",
    "SPECBLOCK": "git clone https://github.com/shiweijiezero/SpecBlock && export SPECBLOCK=$PWD/SpecBlock",
}


def require_package(name: str) -> None:
    """Skip the test where a package is missing."""
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed: {PACKAGES[name]}")


def require_checkout(variable: str) -> Path:
    """Return the checkout that an environment variable names; skip the test where none does."""
    if not (path := os.environ.get(variable)):
        pytest.skip(f"${variable} names no checkout: {CHECKOUTS[variable]}")
    return Path(path)
