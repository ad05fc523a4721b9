"""When, where and with which versions something was measured, and the files that its run leaves."""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import importlib.util
import json
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

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


def keep(report: str, arguments: argparse.Namespace, **figures: Any) -> None:
    """Write report.md and results.json, if `--output` was given. Files and folders of this machine go in by name."""
    if not arguments.output:
        return
    folder = Path(arguments.output)
    folder.mkdir(parents=True, exist_ok=True)
    settings = {
        name: Path(value).name if isinstance(value, (str, Path)) and Path(value).exists() else value
        for name, value in vars(arguments).items()
        if name != "output"
    }
    (folder / "report.md").write_text(report, encoding="utf-8")
    (folder / "results.json").write_text(json.dumps({"settings": settings, **figures}, indent=1), encoding="utf-8")
