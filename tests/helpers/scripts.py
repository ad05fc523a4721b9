"""Run a script of the repository, and read what it prints."""

from __future__ import annotations

from pathlib import Path

from .processes import python

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
DRAFTER = str(EXAMPLES / "models" / "tiny-deepseek-v4-hyperdflash")


def run(script: str, *arguments: object) -> str:
    result = python(ROOT / script, *arguments)
    assert result.returncode == 0, result.stderr
    return result.stdout


def rows_of(table: str) -> dict[str, list[str]]:
    cells = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| ")]
    return {name: rest for name, *rest in cells[1:]}
