"""The commands of docs/serving.md, with files of this repository for the names in capitals."""

from __future__ import annotations

import shlex
import sys

from ..conftest import MODELS
from ..test_snippets import ROOT, snippets

NAME = str(MODELS / "tiny-deepseek-v4")
FILLED_IN = {"TARGET": NAME, "DRAFTER": f"{NAME}-hyperdflash", "python": sys.executable}


def command(begins: str, **names: str) -> list[str]:
    """The page's one command that begins so, and what else is filled in."""
    lines = "\n".join(snippets(ROOT / "docs" / "serving.md", "bash")).splitlines()
    (words,) = [shlex.split(line) for line in lines if line.startswith(begins)]
    filled_in = {**FILLED_IN, **names}
    words = [filled_in.get(word, word) for word in words]
    return [str(ROOT / word) if word.startswith("examples/") else word for word in words]
