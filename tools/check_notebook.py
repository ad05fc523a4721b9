"""Run the notebook from where it lies, and compare what it shows with what it was saved with.

    python tools/check_notebook.py           # exit status 1 and the cell, if it shows something else
    python tools/check_notebook.py --write   # save what it shows now

Cells with the tag `measured` show this machine's numbers: of those the words are compared.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import nbclient
import nbformat

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOK = ROOT / "examples" / "notebook.ipynb"


def shown(cell: Any) -> list[str]:
    """What a reader sees below a cell; warnings of other libraries, of which each machine has its own, apart."""
    outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    texts = [output.get("text") or output.data.get("text/html") or output.data["text/plain"] for output in outputs]
    return [
        re.sub(r"\s*[\d.]+", " N", text) if "measured" in cell.metadata.get("tags", ()) else text for text in texts
    ]


def main() -> int:
    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    saved, ran = nbformat.read(NOTEBOOK, 4), nbformat.read(NOTEBOOK, 4)
    options = {"timeout": 300, "record_timing": False, "resources": {"metadata": {"path": str(NOTEBOOK.parent)}}}
    nbclient.NotebookClient(ran, **options).execute()
    if "--write" in sys.argv:
        ran.metadata = saved.metadata
        for cell in ran.cells:
            if cell.cell_type == "code":
                cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
        nbformat.write(ran, NOTEBOOK)
        return 0
    pairs = [(a, b) for a, b in zip(saved.cells, ran.cells, strict=True) if a.cell_type == "code"]
    for before, after in pairs:
        if shown(before) != shown(after):
            print(f"{before.source}\n\nwas saved with\n{shown(before)}\nand shows\n{shown(after)}", file=sys.stderr)
            return 1
    told = "\n".join(text for _, cell in pairs for text in shown(cell))
    if "False" in told or told.count("True") != 3:
        print(f"Expected three comparisons that are True, got:\n{told}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
