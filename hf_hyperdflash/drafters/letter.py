"""Joins the code that goes with a saved drafter: definitions of this package's files, as one file that needs none.

A letter has what a class of `portable/` uses, and what that uses, each definition as it stands in its own file. So
reducers, heads and layers are the package's own; the loop and the contexts are those of `portable/`.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from ..version import __version__

_ROOT = Path(__file__).parents[1]
# Of each kind of drafter the file of `portable/` that has a class of the same name, and its configuration's.
PORTABLE = {
    "hyperdflash": "blocks", "eagle3": "unrolled", "peagle": "unrolled", "specblock": "unrolled",
    "medusa_heads": "medusa",
    "deepseek_v4_dspark": "deepseek_v4", "deepseek_v4_mtp": "deepseek_v4",
}  # fmt: skip
_WIDTH = 119  # of a line

_CHOICE = '''"""The drafter in this folder: the installed package hf_hyperdflash runs it, or else `{letter}.py`."""

MADE_BY = "{version}"  # the hf_hyperdflash that saved it

# In a `try`: for imports in one transformers asks for no installation.
try:
    from hf_hyperdflash import __version__
    from packaging.version import Version

    if Version(__version__) < Version(MADE_BY):
        raise ValueError(
            f"The drafter was saved by hf_hyperdflash {{MADE_BY}}, and {{__version__}} is installed, which is older: "
            "`pip install -U hf-hyperdflash`."
        )
    from hf_hyperdflash import {config}, {drafter}  # noqa: F401
except ImportError:
    from .{letter} import {config}, {drafter}  # noqa: F401
'''

_ABOUT = """Drafts for a language model, without the package hf_hyperdflash that trained and saved this drafter.

hf_hyperdflash {version} joined this file from its own. In this order: what computes drafts, the target, the loop that
drafts, verifies and accepts (`speculative_decoding`), and the drafter. It needs torch and transformers, and opens
neither files nor connections. One text at a time, drafted in a chain; for more `pip install hf-hyperdflash`.
"""


def carried_code(config: type, drafter: type, chosen: Mapping[str, str]) -> dict[str, str]:
    """Return the code that goes with a drafter of this package, by file names; `chosen` is as for [`letter`]."""
    kind: str = config.model_type  # type: ignore[attr-defined]
    name = f"portable_{kind}"
    choice = _CHOICE.format(letter=name, version=__version__, config=config.__name__, drafter=drafter.__name__)
    path = _ROOT / "portable" / f"{PORTABLE[kind]}.py"
    text = letter(path, [config.__name__, drafter.__name__], _ABOUT.format(version=__version__), chosen)
    return {f"modeling_{kind}.py": choice, f"{name}.py": text}


class Statement(NamedTuple):
    """A definition at the top of a file."""

    text: str  # with the comments before it
    uses: set[str]  # the names that it runs
    typed: set[str]  # the names in its annotations, which nothing runs


class Module:
    """A file: its definitions, and where its other names come from."""

    def __init__(self, path: Path) -> None:
        lines, tree = path.read_text(encoding="utf-8").splitlines(), ast.parse(path.read_text(encoding="utf-8"))
        self.path, self.title = path, (ast.get_docstring(tree) or "").partition("\n")[0]
        self.statements: dict[int, Statement] = {}  # by their first line
        self.defined: dict[str, int] = {}  # the statement of each name, by its first line
        self.ours: dict[str, tuple[Path, str]] = {}  # imported from this package: the file, and the name there
        # Imported from elsewhere: the module, and the name there; "" for the module itself.
        self.others: dict[str, tuple[str, str]] = {}
        first = 0
        for place, node in enumerate(tree.body):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                self._add_import(node)
            elif not isinstance(node, (ast.Expr, ast.If)):  # a docstring, or what is for type checkers alone
                stop = node.end_lineno or 0
                if place + 1 < len(tree.body) and isinstance(tree.body[place + 1], ast.Expr):
                    stop = tree.body[place + 1].end_lineno or 0  # what a constant means
                self.statements[first] = Statement("\n".join(lines[first:stop]).strip("\n"), *_uses(node))
                self.defined |= dict.fromkeys(_names_of(node), first)
            first = node.end_lineno or 0

    def _add_import(self, node: ast.Import | ast.ImportFrom) -> None:
        for alias in node.names:
            name = alias.asname or alias.name
            if isinstance(node, ast.Import):
                self.others[name] = alias.name, ""
            elif node.level:
                parts = (node.module or "").split(".")
                self.ours[name] = self.path.parents[node.level - 1].joinpath(*parts).with_suffix(".py"), alias.name
            elif node.module != "__future__":
                self.others[name] = node.module or "", alias.name


def _uses(node: ast.AST) -> tuple[set[str], set[str]]:
    """Return the names that a statement runs, and those in its annotations."""
    typed: set[str] = set()
    annotations = set()
    for each in ast.walk(node):
        for part in (getattr(each, "annotation", None), getattr(each, "returns", None)):
            if isinstance(part, ast.AST):
                names = [name for name in ast.walk(part) if isinstance(name, ast.Name)]
                annotations |= set(names)
                typed |= {name.id for name in names}
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name) and each not in annotations}, typed


def _names_of(node: ast.stmt) -> Iterator[str]:
    """Return the names that a statement defines."""
    if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
        yield node.name
    elif isinstance(node, (ast.Assign, ast.AnnAssign)):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        yield from (each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name))


_module = cache(Module)


def letter(path: Path, names: list[str], about: str, chosen: Mapping[str, str]) -> str:
    """Return one file, `about` its docstring, with these names of a file of this package and all that they use of it.
    Of the tables in `chosen` it has the one key that is needed; of an unknown one the table is empty."""
    wanted: dict[Path, set[int]] = {}  # in the order in which the files are needed
    others: dict[str, tuple[str, str]] = {}
    places: dict[str, Path] = {}
    texts: dict[tuple[Path, int], str] = {}
    typed: dict[str, Path] = {}

    def add(path: Path, name: str) -> None:
        module = _module(path)
        if name in module.ours:
            add(*module.ours[name])
        elif name in module.others:
            if others.setdefault(name, module.others[name]) != module.others[name]:
                raise ValueError(f"`{name}` is imported from two modules: {others[name]}, {module.others[name]}.")
        elif name in module.defined and module.defined[name] not in wanted.setdefault(path, set()):
            if places.setdefault(name, path) != path:
                raise ValueError(f"`{name}` is defined in {places[name]} and in {path}, expected names of their own.")
            first = module.defined[name]
            wanted[path].add(first)
            statement = module.statements[first]
            if name in chosen:
                statement = _with_one_key(statement, chosen[name])
            texts[path, first] = statement.text
            typed.update(dict.fromkeys(statement.typed, path))
            for used in sorted(statement.uses):
                add(path, used)

    for name in names:
        add(path, name)
    types = []  # of this package, in annotations alone
    for name, path in sorted(typed.items()):
        module = _module(path)
        if name not in places and name in module.others:
            others.setdefault(name, module.others[name])
        if name not in places and (name in module.ours or name in module.defined):
            types.append(name)
    others["Any"] = "typing", "Any"
    text = f'"""{about}"""\n\nfrom __future__ import annotations\n\n{_imports(others)}'
    if types:
        text += f"\n\n{' = '.join(types)} = Any  # in annotations alone"
    for file in _ordered(wanted):
        text += f"\n\n\n# {file.name}: {_module(file).title}\n"
        was_constant = True
        for first in sorted(wanted[file]):
            own = texts[file, first]
            is_constant = not re.search(r"^(class|def|@)", own, re.MULTILINE)
            text += ("" if text.endswith("\n") else "\n" if is_constant and was_constant else "\n\n\n") + own
            was_constant = is_constant
    return text + "\n"


def _with_one_key(statement: Statement, key: str) -> Statement:
    """Return the definition of a table with one of its keys alone."""
    node: Any = ast.parse(statement.text).body[0]
    pairs = [(name, value) for name, value in zip(node.value.keys, node.value.values) if ast.literal_eval(name) == key]
    node.value = ast.Dict([name for name, _ in pairs], [value for _, value in pairs])
    text = ast.unparse(node) + ("" if pairs else "  # nothing of it is needed here")
    return Statement(text, *_uses(node))


def _ordered(files: dict[Path, set[int]]) -> list[Path]:
    """Return files so that each comes after those that it imports from."""
    done: dict[Path, None] = {}

    def add(path: Path) -> None:
        if path not in done:
            for other in sorted({place for place, _ in _module(path).ours.values()} & files.keys()):
                add(other)
            done[path] = None

    for path in files:
        add(path)
    return list(done)


def _imports(names: dict[str, tuple[str, str]]) -> str:
    """Return import statements, sorted."""
    lines, of_modules = [], defaultdict(list)
    for name, (module, there) in sorted(names.items()):
        if there:
            of_modules[module].append(there if there == name else f"{there} as {name}")
        else:
            lines.append(f"import {module}" if module == name else f"import {module} as {name}")
    for module, imported in sorted(of_modules.items()):
        line = f"from {module} import {', '.join(imported)}"
        if len(line) > _WIDTH:
            filled = textwrap.fill(", ".join(imported), _WIDTH, initial_indent="    ", subsequent_indent="    ")
            line = f"from {module} import (\n{filled},\n)"
        lines.append(line)
    return "\n".join(lines)
