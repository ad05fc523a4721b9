"""The house and its aims: how many rooms and files there are, and how much of them one call enters.

    python tools/house.py            # today's figures beside the aims
    python tools/house.py --check    # exit status 1 if a figure is worse than the recorded one
    python tools/house.py --write    # record today's figures in tools/house.json

CI runs the check. A change that has to make a figure worse records it, and its commit says why.
"""

from __future__ import annotations

import ast
import json
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from graphlib import TopologicalSorter
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGE, RECORD = ROOT / "hf_hyperdflash", Path(__file__).with_suffix(".json")
CI_SECONDS = ROOT / "build" / "ci-seconds.txt"  # as `.ci/run` leaves it
sys.path.insert(0, str(ROOT))
# A room may import only rooms to its left. `serving` stands beside them: engines import it, and nothing here does.
ROOMS = (
    "version", "upper", "trees", "grammars", "targets", "drafters", "portable", "auto", "decoding", "hub", "training",
    "benchmark", "cli",
)  # fmt: skip
# A drafter says of what type its last statistics are. What it calls above it, it asks the package's table for.
UPWARDS = {("drafters.base", "decoding.stats")}
# A figure and the most that it should be; `None` for no aim.
AIMS: dict[str, float | None] = {
    "rooms": 11,
    "files in the fullest room": 12,
    "longest chain of imports": 12,
    "files in a circle of imports": 0,
    "functions of the package": 1250,
    "files that a greedy chain enters": 18,
    "functions that a greedy chain enters": 130,
    "files that a tree enters": 20,
    "functions that a tree enters": None,
    "files that a batch enters": 20,
    "functions that a batch enters": None,
    "files that a training step enters": 16,
    "functions that a training step enters": 80,
    "classes that hold keys and values": 9,
    "functions with one caller and at most three lines": None,
    "docstring lines outside the reference": None,
    "annotations that say Any, %": 6,
    "lines that a saved block drafter carries": 1500,
    "lines of benchmark, training, hub and cli": 10000,
    "lines of decoding, drafters, targets, trees and auto": 9000,
    "lines of the package without portable": 20000,
    "lines of portable": 3500,
    "lines of tests": 22000,
}


def modules() -> dict[str, Path]:
    """Every module but the packages' own, by its name within the package."""
    paths = (path for path in sorted(PACKAGE.rglob("*.py")) if path.stem != "__init__")
    return {".".join(path.relative_to(PACKAGE).with_suffix("").parts): path for path in paths}


def fullest_room() -> int:
    """Files of the room that has most; a room within a room counts as one."""

    def size(room: Path) -> int:
        inner = [path for path in room.iterdir() if (path / "__init__.py").exists()]
        return len(inner) + sum(path.stem != "__init__" for path in room.glob("*.py"))

    return max(size(room) for room in rooms())


def rooms() -> list[Path]:
    return [path for path in PACKAGE.iterdir() if (path / "__init__.py").exists()]


def longest_chain() -> int:
    """Modules on the longest way from one to what it imports, and on."""
    graph, depth = import_graph(), {}
    for name in TopologicalSorter(graph).static_order():
        depth[name] = 1 + max((depth[other] for other in graph[name]), default=0)
    return max(depth.values())


def files_in_a_circle() -> int:
    """Modules from which imports, also those inside functions, lead back to themselves."""
    graph = import_graph()

    def reached(name: str) -> set[str]:
        found: set[str] = set()
        left = [name]
        while left:
            new = graph[left.pop()] - found
            found |= new
            left += new
        return found

    return sum(name in reached(name) for name in graph)


def functions() -> int:
    """Functions of the package, methods and inner ones included, without those of `portable`."""
    trees = (ast.parse(path.read_text()) for name, path in modules().items() if not name.startswith("portable."))
    return sum(isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) for tree in trees for node in ast.walk(tree))


def import_graph() -> dict[str, set[str]]:
    """Of each module those that it imports, anywhere in it, but for the ways upwards."""
    there = modules()
    return {name: {b for b in imports(path, there) if (name, b) not in UPWARDS} for name, path in there.items()}


def imports(path: Path, there: dict[str, Path]) -> set[str]:
    """Modules of the package that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            folder = path.parents[node.level - 1].relative_to(PACKAGE).parts
            name = ".".join([*folder, *(node.module or "").split(".")]).strip(".")
            found |= {name} if name in there else {f"{name}.{part.name}".strip(".") for part in node.names}
    return found & there.keys()


def share_of_any() -> float:
    """Of all annotations of arguments, results and variables, those with `Any` in them, in %."""
    said = []
    for path in modules().values():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                said.append(node.returns)
            elif isinstance(node, (ast.arg, ast.AnnAssign)):
                said.append(node.annotation)
    there = [annotation for annotation in said if annotation is not None]
    any_in = [each for each in there if any(isinstance(n, ast.Name) and n.id == "Any" for n in ast.walk(each))]
    return round(100 * len(any_in) / len(there), 1)


def classes_with_keys_and_values() -> int:
    """Classes of the caches' and drafters' rooms that are named for what they hold: no modules, and no protocols."""
    named = re.compile(r"(Cache|Context|Layers?|Keys|Entries|Buffers|State|Batch|Unrolling)$")
    count = 0
    for name, path in modules().items():
        if name.startswith(("drafters.", "targets.caches.")):
            classes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)]
            for each in classes:
                is_module = any(isinstance(n, ast.FunctionDef) and n.name == "forward" for n in each.body)
                is_protocol = any("Protocol" in ast.unparse(base) for base in each.bases)
                count += bool(named.search(each.name)) and not is_module and not is_protocol
    return count


def short_functions_of_one_caller() -> int:
    """Functions of at most three lines beside their docstring whose name is used once in the package: not those that a
    library calls, nor those that a name is given to elsewhere, as in `__all__`."""
    uses: Counter[str] = Counter()
    short: Counter[str] = Counter()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Name):
                uses[node.id] += 1
            elif isinstance(node, ast.Attribute):
                uses[node.attr] += 1
            elif isinstance(node, ast.FunctionDef):
                body = node.body[1:] if ast.get_docstring(node) is not None else node.body
                is_short = bool(body) and body[-1].end_lineno - body[0].lineno < 3
                short[node.name] += 1 if is_short else 2  # of two functions nobody knows which one is called
    return sum(count == 1 and uses[name] == 1 for name, count in short.items())


def docstring_lines_outside_the_reference() -> int:
    """Lines of docstrings, but for those of `docs/reference.md`: modules' own, and objects that the page names."""
    page = (ROOT / "docs/reference.md").read_text()
    named = set(re.findall(r"^::: hf_hyperdflash\.(\S+)", page, re.MULTILINE))
    count = 0

    def visit(node: ast.Module | ast.ClassDef | ast.FunctionDef, name: str, is_named: bool) -> None:
        nonlocal count
        if not is_named and ast.get_docstring(node) is not None:
            count += node.body[0].end_lineno - node.body[0].lineno + 1  # type: ignore[operator]
        for inner in node.body:
            if isinstance(inner, (ast.ClassDef, ast.FunctionDef)):
                visit(inner, f"{name}.{inner.name}", is_named or f"{name}.{inner.name}" in named)

    for name, path in modules().items():
        visit(ast.parse(path.read_text()), name, False)
    return count


@contextmanager
def entered(functions: set[tuple[str, str]]) -> Iterator[None]:
    """Collect the package's functions that are called inside, by file and name."""
    start = f"{PACKAGE}/"

    def called(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(start):
            functions.add((frame.f_code.co_filename, frame.f_code.co_qualname))

    sys.setprofile(called)
    try:
        yield
    finally:
        sys.setprofile(None)


def tiny_pair() -> tuple[Any, Any]:
    """A tiny Qwen3 and a HyperDFlash drafter."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from hf_hyperdflash import HyperDFlashDrafter

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    target = Qwen3ForCausalLM(Qwen3Config(vocab_size=64, head_dim=16, num_hidden_layers=4, **sizes)).eval()
    drafter = HyperDFlashDrafter.from_target(target, target_layer_ids=[0, 2], mask_token_id=63, num_hidden_layers=1)
    drafter.bind(target)
    return target, drafter


def calls(target: Any, drafter: Any) -> dict[str, Callable[[], Any]]:
    """A greedy chain, a tree, a batch and a training step."""
    import torch

    from hf_hyperdflash import HyperDFlashTrainer, HyperDFlashTrainingArguments

    one, two = torch.arange(1, 9)[None], torch.arange(1, 17).view(2, 8)

    def generate(ids: torch.Tensor, **options: Any) -> Callable[[], Any]:
        given = {"inputs": ids, "attention_mask": torch.ones_like(ids), "assistant_model": drafter, "pad_token_id": 0}
        return lambda: target.generate(**given, do_sample=False, max_new_tokens=12, **options)

    rows = [{"input_ids": list(range(1, 17)), "loss_mask": [1] * 16} for _ in range(2)]
    arguments = HyperDFlashTrainingArguments(
        tempfile.mkdtemp(), max_steps=1, use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True
    )
    trainer = HyperDFlashTrainer(drafter, target, arguments, train_dataset=rows)
    batch = next(iter(trainer.get_train_dataloader()))
    return {
        "a greedy chain": generate(one),
        "a tree": generate(one, tree_budget=8),
        "a batch": generate(two),
        "a training step": lambda: trainer.training_step(trainer.model, batch),
    }


def figures() -> dict[str, float]:
    target, drafter = tiny_pair()
    found: dict[str, float] = {
        "rooms": len(rooms()),
        "files in the fullest room": fullest_room(),
        "longest chain of imports": longest_chain(),
        "files in a circle of imports": files_in_a_circle(),
        "functions of the package": functions(),
    }
    for name, call in calls(target, drafter).items():
        seen: set[tuple[str, str]] = set()
        with entered(seen):
            call()
        found[f"files that {name} enters"] = len({file for file, _ in seen})
        found[f"functions that {name} enters"] = len(seen)
    found["classes that hold keys and values"] = classes_with_keys_and_values()
    found["functions with one caller and at most three lines"] = short_functions_of_one_caller()
    found["docstring lines outside the reference"] = docstring_lines_outside_the_reference()
    found["annotations that say Any, %"] = share_of_any()
    with tempfile.TemporaryDirectory() as folder:
        drafter.save_pretrained(folder)
        found["lines that a saved block drafter carries"] = lines_in(Path(folder))
    of_rooms = {room.name: lines_in(room) for room in rooms()}
    for names in ("benchmark", "training", "hub", "cli"), ("decoding", "drafters", "targets", "trees", "auto"):
        said = f"{', '.join(names[:-1])} and {names[-1]}"
        found[f"lines of {said}"] = sum(of_rooms[name] for name in names)
    found["lines of portable"] = of_rooms.get("portable", 0)
    found["lines of the package without portable"] = lines_in(PACKAGE) - found["lines of portable"]
    found["lines of tests"] = lines_in(ROOT / "tests")
    return found


def lines_in(folder: Path) -> int:
    return sum(len(path.read_text().splitlines()) for path in folder.rglob("*.py"))


def main() -> int:
    today = figures()
    if "--write" in sys.argv:
        RECORD.write_text(json.dumps(today, indent=2) + "\n")
    recorded = json.loads(RECORD.read_text())
    print(f"{'':50}{'today':>8}{'recorded':>10}{'aim':>8}")
    for name, aim in AIMS.items():
        print(f"{name:50}{today[name]:>8}{recorded[name]:>10}{'' if aim is None else aim:>8}")
    if CI_SECONDS.exists():  # of the last `.ci/run` here, on whatever machine that was: printed, and never checked
        print(f"{'minutes of CI':50}{float(CI_SECONDS.read_text()) / 60:>8.1f}{'':>10}{17:>8}")
    # How many functions are entered depends on which drafts are accepted, which rounding may change; and a test more
    # needs no reason.
    checked = [name for name in AIMS if not name.startswith("functions that") and name != "lines of tests"]
    worse = [name for name in checked if today[name] > recorded[name]]
    if "--check" in sys.argv and worse:
        print(f"Worse than recorded: {', '.join(worse)}. Make it better, or record it with --write and say why.")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
