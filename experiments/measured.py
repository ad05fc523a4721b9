"""When, where and with which versions something was measured."""

from __future__ import annotations

import datetime
import importlib.metadata
import importlib.util
import subprocess
from collections.abc import Iterable
from pathlib import Path

import torch

from hf_hyperdflash.benchmark.runner import hardware


def circumstances(packages: Iterable[str], checkouts: dict[str, str | None] | None = None) -> str:
    """Of packages the versions and of checkouts, by their name, the commits; what is not there is left out."""
    found = [f"{name} {importlib.metadata.version(name)}" for name in packages if importlib.util.find_spec(name)]
    found += [f"{name} at {commit_of(path)}" for name, path in (checkouts or {}).items() if path]
    return (
        f"{datetime.date.today()}, {hardware('cpu')}, {torch.get_num_threads()} thread(s), {', '.join(found)}, float32"
    )


def commit_of(path: str) -> str:
    folder = Path(path)
    command = ["git", "-C", folder if folder.is_dir() else folder.parent, "rev-parse", "--short=10", "HEAD"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    return ran.stdout.strip() or "a commit that git does not know"
