"""Break the package on purpose, one place at a time, and see which tests notice.

    python tools/mutants.py record               # run the suite once, and keep which test runs which line
    python tools/mutants.py run --count 60       # break 60 places; goes on where it was stopped
    python tools/mutants.py table                # what was found, by room, and what survived
    python tools/mutants.py run --earlier FILE --commit COMMIT   # those of an earlier results.jsonl, in today's code

Each mutant meets the tests that run its line, the quickest first, and the first failure ends it. Tests of the short
set come before those of the night, so that the table says what only the night finds. `record` needs pytest-cov.
Everything is kept in build/mutants/; mutants are made in a copy of the last commit, never in your tree.

After a large change of code or tests the last form compares like with like: a place is looked up by its function and
text, else by its line's text in another function, else one is drawn from the same room.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / "build" / "mutants"
COVERAGE, DURATIONS, RESULTS = WORK / "coverage", ROOT / "build" / "durations.tsv", WORK / "results.jsonl"
ROOMS = ("trees", "decoding", "drafters", "targets", "training/losses")
SECONDS = 600  # a mutant that no test found until then has survived
HANGS = 120  # a test that takes longer hangs: the mutant is found
SETS = {"short": "not compat and not nightly", "night": "nightly and not compat"}
SWAPS: dict[type, type] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult,
}  # fmt: skip


class Mutant(NamedTuple):
    """One place of one file, with what stands there and what replaces it; lines and columns are those of `ast`."""

    path: str
    function: str
    place: tuple[int, int, int, int]
    now: str
    then: str


def mutants_of(path: str, source: str) -> Iterator[Mutant]:
    """Every mutant of the functions of a file. Errors, annotations, decorators and docstrings stay as they are."""

    def replaced(node: ast.AST, then: ast.AST | str, function: str) -> Mutant:
        place = (node.lineno, node.col_offset, node.end_lineno, node.end_col_offset)  # type: ignore[attr-defined]
        now = ast.get_source_segment(source, node) or ""
        words = then if isinstance(then, str) else f"({ast.unparse(then)})"
        return Mutant(path, function, place, now, words)

    def visit(node: ast.AST, function: str) -> Iterator[Mutant]:
        if isinstance(node, ast.FunctionDef):
            for statement in node.body:
                yield from visit(statement, f"{function}.{node.name}".removeprefix("."))
            return
        if isinstance(node, ast.ClassDef):
            for statement in node.body:
                if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
                    yield from visit(statement, f"{function}.{node.name}".removeprefix("."))
            return
        if isinstance(node, (ast.Raise, ast.Import, ast.ImportFrom, ast.JoinedStr)):
            return
        if isinstance(node, ast.AnnAssign):
            if node.value is not None:
                yield from visit(node.value, function)
            return
        if function:
            yield from (replaced(node, then, function) for then in changes_of(node))
        for child in ast.iter_child_nodes(node):
            yield from visit(child, function)

    for node in ast.parse(source).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield from visit(node, "")


def changes_of(node: ast.AST) -> Iterator[ast.AST | str]:
    """What may stand in a node's place."""
    changed: Any = copy.deepcopy(node)
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        changed.ops = [SWAPS[type(node.ops[0])]()]
        yield changed
    elif isinstance(node, (ast.BoolOp, ast.BinOp)) and type(node.op) in SWAPS:
        changed.op = SWAPS[type(node.op)]()
        yield changed
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield node.operand
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield ast.Constant(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int):
        yield ast.Constant(node.value + 1)
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield "pass"
    elif isinstance(node, ast.IfExp):
        changed.body, changed.orelse = node.orelse, node.body
        yield changed


def chosen(rooms: list[str], count: int, seed: int) -> list[Mutant]:
    """`count` mutants, at most one of a function."""
    files = (path for room in rooms for path in sorted((ROOT / "hf_hyperdflash" / room).rglob("*.py")))
    mutants = [m for path in files for m in mutants_of(path.relative_to(ROOT).as_posix(), path.read_text())]
    random.Random(seed).shuffle(mutants)
    of_functions = {(mutant.path, mutant.function): mutant for mutant in reversed(mutants)}
    return [mutant for mutant in mutants if of_functions[mutant.path, mutant.function] is mutant][:count]


def moved(earlier: Iterable[Mutant], commit: str, seed: int) -> list[Mutant]:
    """Where mutants of an earlier commit stand today. One whose code is gone is replaced by a draw from its room."""
    by_function, by_line = defaultdict(list), defaultdict(list)  # today's, in the order of their lines
    by_room = defaultdict(list)
    for file in sorted((ROOT / "hf_hyperdflash").rglob("*.py")):
        path, source = file.relative_to(ROOT).as_posix(), file.read_text()
        lines = source.splitlines()
        for mutant in mutants_of(path, source):
            by_function[mutant.path, mutant.function, mutant.now, mutant.then].append(mutant)
            by_line[lines[mutant.place[0] - 1].strip(), mutant.now, mutant.then].append(mutant)
            by_room[Path(path).parts[1]].append(mutant)

    found: list[Mutant | None] = []
    for mutant in earlier:
        show = ["git", "show", f"{commit}:{mutant.path}"]
        source = subprocess.run(show, cwd=ROOT, check=True, capture_output=True, text=True).stdout
        key = (mutant.path, mutant.function, mutant.now, mutant.then)
        alike = [other for other in mutants_of(mutant.path, source) if (*other[:2], *other[3:]) == key]
        number = [tuple(other.place) for other in alike].index(tuple(mutant.place))  # which of several in its function
        line = source.splitlines()[mutant.place[0] - 1].strip()
        today = by_function[key] or by_line[line, mutant.now, mutant.then]
        found.append(today[min(number, len(today) - 1)] if today else None)

    taken = {(mutant.path, mutant.function) for mutant in found if mutant}
    for number, mutant in enumerate(earlier):
        if found[number] is None:
            of_room = by_room[Path(mutant.path).parts[1]]
            free = [other for other in of_room if (other.path, other.function) not in taken]
            drawn = random.Random(seed + number).choice(free)
            taken.add((drawn.path, drawn.function))
            found[number] = drawn
    return [mutant for mutant in found if mutant]


def broken(mutant: Mutant) -> str:
    """The file with the mutant in it."""
    lines = (ROOT / mutant.path).read_bytes().splitlines(keepends=True)  # columns count bytes
    first, start, last, end = mutant.place
    before, after = lines[first - 1][:start], lines[last - 1][end:]
    return b"".join([*lines[: first - 1], before, mutant.then.encode(), after, *lines[last:]]).decode()


def tests_of(mutant: Mutant) -> list[str]:
    """The tests that run the mutant's lines, the quickest first."""
    from coverage import CoverageData

    data = CoverageData(str(COVERAGE))
    data.read()
    recorded = [name for name in data.measured_files() if name.endswith("/" + mutant.path)]
    by_line = data.contexts_by_lineno(recorded[0]) if recorded else {}
    first, _, last, _ = mutant.place
    tests = {test.rpartition("|")[0] for line in range(first, last + 1) for test in by_line.get(line, ())} - {""}
    seconds = dict(line.split("\t")[::-1] for line in DURATIONS.read_text().splitlines() if "::" in line)
    # A name with this folder's path in it is another one in the copy: its function is run with all arguments.
    names = {test.partition("[")[0] if str(ROOT) in test else test for test in tests}
    return sorted(names, key=lambda test: float(seconds.get(test, 0)))


def run_tests(tests: list[str], which: str, seconds: float, folder: str) -> str:
    """Run tests until the first fails.

    Returns:
        The test that failed; "a test hangs"; "" if all passed; "not judged: " and why if they did not run.
    """
    listed = Path(folder, "build-tests.txt")
    listed.write_text("\n".join(tests))
    command = [
        sys.executable, "-m", "pytest", "-n0", "-x", "-q", "-p", "no:cacheprovider", "--hypothesis-profile=ci",
        "-m", SETS[which], "-o", f"faulthandler_timeout={HANGS}", "-o", "faulthandler_exit_on_timeout=true",
        f"@{listed}",
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": folder, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return "not judged: out of time"
    if done.returncode in (0, 5):  # 5: none of these tests is in this set
        return ""
    failed = [line.split()[1] for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if failed and done.returncode == 1:
        return failed[0]
    broken_files = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("ERROR tests/")]
    if broken_files and "ERROR collecting tests/" in done.stdout:  # its tables already run the package
        return broken_files[0]
    is_hanging = "Timeout (" in done.stderr  # as faulthandler says
    return "a test hangs" if is_hanging else f"not judged: pytest ended with status {done.returncode}"


def judge(mutant: Mutant, folder: str) -> dict[str, Any]:
    """Which set of tests finds a mutant, and with which test."""
    tests, began = tests_of(mutant), time.monotonic()
    found = {"tests": len(tests), "set": "", "by": "", "survived": "" if tests else "survived: no test runs this line"}
    Path(folder, mutant.path).write_text(broken(mutant))
    try:
        for which in SETS if tests else ():
            by = run_tests(tests, which, SECONDS - (time.monotonic() - began), folder)
            if by.startswith("not judged"):
                found["survived"] = by
                break
            if by:
                found |= {"set": which, "by": by}
                break
    finally:
        Path(folder, mutant.path).write_text((ROOT / mutant.path).read_text())
    return found | {"seconds": round(time.monotonic() - began)}


def record() -> None:
    """Run the suite under coverage, with each line's tests."""
    WORK.mkdir(parents=True, exist_ok=True)
    settings = WORK / "settings.ini"  # `coverage.*` are data, and erased
    settings.write_text(f"[run]\nsource_pkgs = hf_hyperdflash\nparallel = true\ndata_file = {COVERAGE}\n")
    options = ["--cov=hf_hyperdflash", f"--cov-config={settings}", "--cov-context=test", "--cov-report="]
    command = [sys.executable, "-m", "pytest", "--hypothesis-profile=ci", "-m", "not compat", *options]
    subprocess.run(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"})


def run(mutants: list[Mutant]) -> None:
    """Judge the mutants that have not been judged yet."""
    WORK.mkdir(parents=True, exist_ok=True)
    known = {json.dumps(row["mutant"]) for row in rows()}
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["git", "worktree", "add", "-q", "--detach", folder], cwd=ROOT, check=True)
        try:
            for number, mutant in enumerate(mutants, 1):
                if json.dumps(mutant) in known:
                    continue
                row = {"mutant": mutant, **judge(mutant, folder)}
                with RESULTS.open("a") as results:
                    results.write(json.dumps(row) + "\n")
                print(f"{number}/{len(mutants)} {said(row)}", flush=True)
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", folder], cwd=ROOT, check=True)


def rows(results: Path = RESULTS) -> list[dict[str, Any]]:
    """What was judged so far."""
    return [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []


def said(row: dict[str, Any]) -> str:
    """A mutant and what became of it, in a line."""
    mutant = Mutant(*row["mutant"])
    result = f"found by the {row['set']} set: {row['by']}" if row["set"] else (row["survived"] or "survived")
    now, then = (" ".join(text.split())[:60] for text in (mutant.now, mutant.then))
    return f"{mutant.path}:{mutant.place[0]} `{now}` -> `{then}`: {result} ({row['tests']} tests, {row['seconds']} s)"


def table() -> None:
    """Print what was found by room, then each mutant that the short set does not find."""
    counts = Counter(
        (Path(row["mutant"][0]).parts[1], row["set"] or (row["survived"] or "survived").partition(":")[0])
        for row in rows()
    )
    print("| room | mutants | short set | night alone | survived | not judged |\n|---|---:|---:|---:|---:|---:|")
    for room in sorted({room for room, _ in counts}):
        of_room = [counts[room, which] for which in (*SETS, "survived", "not judged")]
        print(f"| {room} | {sum(of_room)} | " + " | ".join(map(str, of_room)) + " |")
    print(*(f"- {said(row)}" for row in rows() if row["set"] != "short"), sep="\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["record", "run", "table"])
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rooms", nargs="+", default=list(ROOMS), help="folders of the package")
    parser.add_argument("--earlier", type=Path, help="results.jsonl of an earlier commit")
    parser.add_argument("--commit", help="that commit")
    arguments = parser.parse_args()
    if arguments.what == "run" and arguments.earlier:
        mutants = [Mutant(*row["mutant"]) for row in rows(arguments.earlier)]
        run(moved(mutants, arguments.commit, arguments.seed))
    elif arguments.what == "run":
        run(chosen(arguments.rooms, arguments.count, arguments.seed))
    else:
        {"record": record, "table": table}[arguments.what]()


if __name__ == "__main__":
    main()
