"""Draw the package's rooms and their imports into docs/site/rooms.md, from the code.

python docs/draw_rooms.py            # writes the page
python docs/draw_rooms.py --check    # exit status 1 if it is not what the code says
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE, PAGE = ROOT / "hf_hyperdflash", ROOT / "docs" / "site" / "rooms.md"
ORDER = (
    "version",
    "trees",
    "targets",
    "drafters",
    "auto",
    "decoding",
    "hub",
    "training",
    "benchmark",
    "cli",
    "serving",
)
BIND = ("drafters", "decoding")  # `drafter.bind(target)`, the one call upwards


def modules() -> dict[str, Path]:
    """Every module but the packages' own, `trees.growth` for example."""
    found = {
        ".".join(path.relative_to(PACKAGE).with_suffix("").parts): path
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.stem != "__init__"
    }
    return dict(sorted(found.items(), key=lambda item: ORDER.index(room_of(item[0]))))


def room_of(module: str) -> str:
    return module.partition(".")[0]


def imports(module: str, there: dict[str, Path]) -> set[str]:
    """Modules of the package that a module imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(there[module].read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level:
            folder = there[module].parents[node.level - 1].relative_to(PACKAGE).parts
            name = ".".join([*folder, *(node.module or "").split(".")]).strip(".")
            found |= {name} if name in there else {f"{name}.{part.name}".strip(".") for part in node.names}
    return found & there.keys()


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
    graph = {(a, b) for a in there for b in imports(a, there)}
    between = {(room_of(a), room_of(b)) for a, b in graph if "version" not in (a, b)} - {BIND}
    lines = ["# Map of the package", "", "`docs/draw_rooms.py` writes this page from the code; a test compares.", ""]
    lines += ["Who imports whom, room by room:", "", *flowchart({(a, b) for a, b in between if a != b}), ""]
    for room in ORDER:
        inside = PACKAGE / room / "__init__.py"
        lines += [f"## {room}", "", first_words(inside), ""] if inside.exists() else ["## Beside the rooms", ""]
        lines += ["| file | what |", "|---|---|"]
        for path in (path for module, path in there.items() if room_of(module) == room):
            lines.append(f"| `{path.relative_to(PACKAGE).as_posix()}` | {first_words(path)} |")
        lines.append("")
    return "\n".join(lines)


def first_words(path: Path) -> str:
    """The first paragraph of a module's docstring."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return text.partition("\n\n")[0].replace("\n", " ").replace("|", "\\|")


def main() -> int:
    if "--check" in sys.argv:
        return int(rooms() != PAGE.read_text(encoding="utf-8"))
    PAGE.write_text(rooms(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
