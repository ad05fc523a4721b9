"""What a script's run leaves in its `--output` folder: the report, and every figure with the settings."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any


def keep(report: str, arguments: argparse.Namespace, **figures: Any) -> None:
    """Write report.md and results.json, if a folder was asked for. Files and folders of this machine go in by name."""
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
