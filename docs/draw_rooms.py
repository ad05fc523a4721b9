"""Draw the package's rooms and their imports into docs/site/rooms.md, from the code.

python docs/draw_rooms.py            # writes the page
python docs/draw_rooms.py --check    # exit status 1 if it is not what the code says
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tools"))
from house import PACKAGE, ROOMS, import_graph, modules  # noqa: E402

PAGE = ROOT / "docs" / "site" / "rooms.md"
ORDER = (*ROOMS, "serving")


def room_of(module: str) -> str:
    return module.partition(".")[0]


def flowchart(edges: set[tuple[str, str]]) -> list[str]:
    """Edges that no longer way says already, as a Mermaid drawing."""
    below: dict[str, set[str]] = {}

    def reach(node: str) -> set[str]:
        if node not in below:
            below[node] = set()
            for a, b in edges:
                if a == node:
                    below[node] |= {b} | reach(b)
        return below[node]

    direct = sorted((a, b) for a, b in edges if not any(b in reach(c) for d, c in edges if d == a and c != b))
    return ["```mermaid", "flowchart TD", *(f"  {a} --> {b}" for a, b in direct), "```"]


def rooms() -> str:
    there = modules()
    graph = {(a, b) for a, imported in import_graph().items() for b in imported}
    beside = [name for name in ORDER if name in there]
    between = {(room_of(a), room_of(b)) for a, b in graph if a not in beside and b not in beside}
    lines = ["# Map of the package", "", "`docs/draw_rooms.py` writes this page from the code; a test compares.", ""]
    lines += ["Who imports whom, room by room:", "", *flowchart({(a, b) for a, b in between if a != b}), ""]
    for room in ORDER:
        if room not in beside:
            lines += [f"## {room}", "", first_words(PACKAGE / room / "__init__.py"), ""]
        elif room == beside[0]:
            lines += ["## Beside the rooms", ""]
        lines += ["| file | what |", "|---|---|"] if room not in beside[1:] else []
        for path in (path for module, path in there.items() if room_of(module) == room):
            lines.append(f"| `{path.relative_to(PACKAGE).as_posix()}` | {first_words(path)} |")
        lines += [] if room in beside[:-1] else [""]
    return "\n".join(lines)


def first_words(path: Path) -> str:
    """The first paragraph of a module's docstring."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return text.partition("\n\n")[0].replace("\n", " ").replace("|", "\\|")


def main() -> int:
    if "--check" in sys.argv:
        is_stale = rooms() != PAGE.read_text(encoding="utf-8")
        if is_stale:
            print(f"{PAGE.name} is not what the code says: run `python docs/draw_rooms.py`.", file=sys.stderr)
        return int(is_stale)
    PAGE.write_text(rooms(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
