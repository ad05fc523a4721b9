"""Whether the pages and the files of a release say what is: each fault is a line, and lint runs it.

python tools/check_pages.py                  # README, docs/, model cards, docstrings, CITATION.cff, workflows ..
python tools/check_pages.py --site FOLDER    # and the site that mkdocs built there
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import os
import re
import shlex
import sys
import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import typer
import yaml

ROOT = Path(__file__).resolve().parents[1]
DOCS, PACKAGE = ROOT / "docs", ROOT / "hf_hyperdflash"
sys.path.insert(0, str(ROOT))
README, CONTRIBUTING, CHANGELOG = (ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "CHANGELOG"))
RECIPES = sorted((DOCS / "extending").glob("*.md"))
CARDS = sorted((ROOT / "model_cards").glob("*.md"))
PAGES = [README, CONTRIBUTING, CHANGELOG, *sorted(DOCS.rglob("*.md")), *CARDS]
PAGES += [page for folder in ("examples", "experiments") for page in sorted((ROOT / folder).rglob("*.md"))]
# Of a figure that somebody measured, which a block of `tools/write_numbers.py` has to fill.
MEASURED = re.compile(r"\d ?×|\d ?%|\d ms\b|±|\btau (?:of )?\d|\d tokens (?:a|per) (?:round|second)|\d times as")
STEPS = (".ci/wheel", "mkdocs build", "ruff check", "ruff format --check", "mypy", "pytest", ".ci/lowest_tests")
NOUNS = set("A After An As Each How In It Of One Some That The Those What Where Whether Which Who".split())

Faults = Iterator[tuple[Path, str]]  # where, and what is wrong


def links_and_anchors() -> Faults:
    """Every link leads somewhere, and from the README to every page of docs/."""
    reached, waiting = {README}, {README}
    while waiting:
        found = {(page.parent / link.partition("#")[0]).resolve() for page in waiting for link in links_of(page)}
        waiting = {path for path in found if path.suffix == ".md" and path.exists()} - reached
        reached |= waiting
    for page in DOCS.rglob("*.md"):
        if page not in reached:
            yield page, "no link leads here from the README"
    for page in PAGES:
        for link in links_of(page):
            path, _, anchor = link.partition("#")
            other = (page.parent / path).resolve() if path else page
            if not other.exists() or (anchor and anchor not in anchors_of(other)):
                yield page, f"the link {link} leads nowhere"


@cache
def links_of(page: Path) -> list[str]:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if not link.startswith("http")]


def anchors_of(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def lengths() -> Faults:
    """The pages are few and short. Of the README `wc -w` counts, elsewhere what a reader sees."""

    def words(*pages: Path) -> int:
        shown = [re.sub(r"<!--.*?-->", "", page.read_text(), flags=re.DOTALL) for page in pages]
        return sum(bool(re.search(r"\w", word)) for text in shown for word in text.split())

    pages = sorted(DOCS.glob("*.md"))
    found = [(README, len(README.read_text().split()), 900), (CONTRIBUTING, words(CONTRIBUTING), 800)]
    for page, count, most in [*found, (DOCS, words(*pages), 11_300)]:
        if count > most:
            yield page, f"{count} words, at most {most}"
    if len(pages) > 11:
        yield DOCS, f"{len(pages)} pages, at most 11"


def what_contributors_are_told_of() -> Faults:
    """Paths and names of the recipes are there. SGLang's are its own."""
    code = "\n".join(path.read_text() for part in (PACKAGE, ROOT / "tests") for path in part.rglob("*.py"))
    defined = set(re.findall(r"(?:\bdef |\bclass |\bself\.)(\w+)", code)) | {"layer_norm_eps"}  # transformers' own
    defined |= set(re.findall(r"\b(\w+)[\"']?(?: *[:=]|\])", code))
    for page in (CONTRIBUTING, *RECIPES):
        text = page.read_text().partition("# What SGLang gives")[0]
        for path in re.findall(r"`((?:\w+|\.ci)/[\w./-]*)`", text):
            if "NAME" not in path and not any((at / path).exists() for at in (ROOT, PACKAGE)):
                yield page, f"there is no {path}"
        if page not in RECIPES or page.stem == "sglang":
            continue
        for name in re.findall(r"`[\w.]*\.(\w+)\([^`]*\)`", text):
            if f"def {name}(" not in code and f".{name}(" not in code:
                yield page, f"no method is called {name}"
        for name in set(re.findall(r"`(\w+)`", text)):
            if "NAME" not in name and not any(name in each for each in defined):  # of a test a part is enough
                yield page, f"nothing is called {name}"


def quoted_messages() -> Faults:
    """What the page on trouble quotes is said by the program."""

    def texts(source: Path) -> Iterator[str]:
        """Every string of a module, with a gap for each value that is put in."""
        tree = ast.parse(source.read_text())
        inside = {part for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "…" for part in node.values]
                yield "".join(map(str, parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in inside:
                yield re.sub(r"%[sd]", "…", node.value)

    page = DOCS / "troubleshooting.md"
    rows = [line for line in page.read_text().splitlines() if line.startswith("|")]
    said = "\n".join(text for path in PACKAGE.rglob("*.py") for text in texts(path))
    said += "assisted generation is not supported with stateful models, such as DeepseekV4ForCausalLM"  # transformers'
    for quote in (quote for row in rows for quote in re.findall(r'"([^"]{16,})"', row)):
        if not re.search("[^\n]*?".join(map(re.escape, quote.split("…"))), said):
            yield page, f"nobody says {quote!r}"


def reference() -> Faults:
    """The page has every public name, and each once."""
    import hf_hyperdflash

    page = DOCS / "reference.md"
    shown = re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE)
    public = {f"hf_hyperdflash.{module}.{name}" for name, module in hf_hyperdflash._MODULE_OF.items()}
    for name in sorted(public - set(shown)) + sorted({name for name in shown if shown.count(name) > 1}):
        yield page, f"{name} is there {shown.count(name)} times, expected once"


def docstrings() -> Faults:
    """They begin with a verb, where a property's may name what it is, and refer to what there is."""
    names, references = {"Trainer", "TrainingArguments"}, []
    for path in PACKAGE.rglob("*.py"):
        names.add(path.stem)
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            if not isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module):
                continue
            said = ast.get_docstring(node) or ""
            references += [(path, name) for name in re.findall(r"\[`~?([\w.]+)`\]", said)]
            if not isinstance(node, ast.Module):
                names.add(node.name)
            if (
                isinstance(node, ast.FunctionDef)
                and not node.decorator_list
                and said.split(" ")[0].rstrip(",:") in NOUNS
            ):
                yield path, f"the docstring of {node.name} begins with {said.split()[0]!r}, expected what it does"
    for path, name in references:
        if name.rpartition(".")[2] not in names:
            yield path, f"nothing is called {name}"


def figures() -> Faults:
    """No measured figure stands outside of a block, but in what a program prints."""
    results = sorted((ROOT / "experiments" / "results").rglob("README.md"))
    for page in [README, *sorted(DOCS.rglob("*.md")), *sorted((ROOT / "model_cards/parts").glob("*.md")), *results]:
        aside = r"<!-- result: .*?<!-- end -->|^```.*?^```|`[^`\n]*`"
        text = re.sub(aside, "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
        for figure in MEASURED.findall(text):
            yield page, f"{figure!r} is measured, and in no block of tools/write_numbers.py"


def results() -> Faults:
    """Results in git are small, raw lines are there only for the two cards, and none names a folder of a machine."""
    folder = ROOT / "experiments" / "results"
    kept = [path for path in folder.rglob("*") if path.is_file()]
    size, raw = sum(path.stat().st_size for path in kept), [path for path in kept if path.suffix == ".jsonl"]
    if size > 6e6 or len(raw) > 2:
        yield folder, f"{size / 1e6:.1f} MB and {len(raw)} files of raw lines, at most 6 MB and 2"
    for path in (path for path in kept if path.suffix in (".json", ".jsonl", ".md", ".csv")):
        for place in re.findall(r"""["' =](/(?:\w[\w.-]*/)+)""", path.read_text(encoding="utf-8")):
            yield path, f"it names {place}, a folder of a machine"


def release() -> Faults:
    """Citation, changelog, workflows, forms and the Space's requirements are this version's."""
    import hf_hyperdflash

    version = hf_hyperdflash.__version__
    number = re.match(r"\d+\.\d+\.\d+", version)
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    if number is None or citation["version"] != number[0]:
        yield ROOT / "CITATION.cff", f"the version is {citation['version']}, and the package's {version}"
    if citation["references"][0]["title"] not in README.read_text():
        yield README, "the paper of CITATION.cff is not named"
    first = re.search(r"^## (\S+)(.*)$", CHANGELOG.read_text(), re.MULTILINE)
    if first is None or number is None or first[1] != number[0] or ("dev" in version) != ("unreleased" in first[2]):
        yield CHANGELOG, f"it does not begin with {version}"
    workflows = [yaml.safe_load((ROOT / ".github/workflows" / name).read_text()) for name in ("ci.yml", "nightly.yml")]
    jobs = [job for workflow in workflows for job in workflow["jobs"].values()]
    commands = " ".join(step["run"] for job in jobs for step in job["steps"] if "run" in step)
    for script in (".ci/run", ".ci/space", ".ci/nightly"):
        if script not in commands:
            yield ROOT / ".github/workflows", f"no job runs {script}"
    nightly, run = (ROOT / ".ci" / name for name in ("nightly", "run"))
    for part in workflows[1]["jobs"]["part"]["strategy"]["matrix"]["part"]:  # its own, or another script
        if f"\n{part}() {{" not in nightly.read_text() and not os.access(ROOT / ".ci" / part, os.X_OK):
            yield nightly, f"there is no part {part}"
    for step in STEPS:
        if step not in run.read_text():
            yield run, f"it does not run {step}"
    for listed in (ROOT / ".ci" / name for name in ("once", "lowest_tests")):
        for path in listed.read_text().splitlines():
            if not path.startswith("#") and not (ROOT / path).exists():
                yield listed, f"there is no {path}"
    needed = {line for line in (ROOT / "examples/space/requirements.txt").read_text().splitlines() if line[:1] != "#"}
    project = re.search(r"^dependencies = \[\n(.*?)^\]", (ROOT / "pyproject.toml").read_text(), re.M | re.S)
    declared = set(re.findall(r'^  "(.*)",$', project[1], re.M)) if project else set()
    if {re.match(r"\w*", line)[0] for line in needed ^ declared} != {"gradio"}:  # type: ignore[index]
        yield ROOT / "examples/space/requirements.txt", "expected gradio, and what pyproject.toml has"


def missing_imports(tree: ast.AST) -> Iterator[str]:
    """What code imports of the package and is not there."""
    import hf_hyperdflash

    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "hf_hyperdflash":
            yield from (f"hf_hyperdflash has no {n.name}" for n in node.names if n.name not in hf_hyperdflash.__all__)
        elif (
            isinstance(node, ast.ImportFrom)
            and (node.module or "").startswith("hf_hyperdflash.")
            and (
                not str(node.module).endswith(".NAME")  # of a recipe
            )
        ):
            place = ROOT / (node.module or "").replace(".", "/")
            found = [file for file in (place.with_suffix(".py"), place / "__init__.py") if file.exists()]
            text = found[0].read_text() if found else ""
            for name in (each.name for each in node.names):
                if not re.search(rf"\b{name}\b", text) and not (place / f"{name}.py").exists():
                    yield f"{node.module} has no {name}"


def scripts() -> Faults:
    """What scripts import of the package is there, and grids have flags of `train`; one that loads a target loads its
    tokenizer alike: `AutoTokenizer` cannot read a GGUF file by its path."""
    for path in (path for folder in ("examples", "experiments", "tools") for path in (ROOT / folder).rglob("*.py")):
        tree = ast.parse(path.read_text())
        yield from ((path, fault) for fault in missing_imports(tree))
        if path.parts[-2] != "tools" and "load_target(" in path.read_text() and "AutoTokenizer" in path.read_text():
            yield path, "`AutoTokenizer` beside `load_target`: expected `load_tokenizer`"
        if path.parts[-2] == "grids":
            # Without what it imports of the package, which takes seconds.
            code = [node for node in tree.body if "hf_hyperdflash" not in str(getattr(node, "module", ""))]
            found: dict[str, Any] = {"__name__": path.stem}
            exec(compile(ast.Module(code, []), str(path), "exec"), found)
            for flag in re.findall(r"--(\w+)", " ".join(found["CELLS"].values())):
                if flag.removeprefix("no_") not in train_flags():
                    yield path, f"`train` has no --{flag}"
            if unknown := {found.get("LIKE"), *found.get("METHODS", ())} - {None, *found["CELLS"]}:
                yield path, f"there is no cell {unknown}"


@cache
def train_flags(with_features: bool = False) -> set[str]:
    """Ours, those of `features` alone if wanted, and transformers' own, which are read without importing it."""
    from dataclasses import fields

    from hf_hyperdflash.training.flags import FeatureFlags, ScriptArguments, TrainingFlags

    (folder,) = importlib.util.find_spec("transformers").submodule_search_locations  # type: ignore[union-attr, misc]
    theirs = re.findall(r"^    (\w+): ", (Path(folder) / "training_args.py").read_text(), re.MULTILINE)
    kinds = (ScriptArguments, TrainingFlags, *[FeatureFlags] * with_features)
    return {*theirs, *(field.name for kind in kinds for field in fields(kind))}


def commands() -> Faults:
    """Commands of the pages name scripts, commands and options that there are."""
    from hf_hyperdflash.cli.app import app

    ours = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    for page in PAGES:
        lines = "\n".join(re.findall(r"```bash\n(.*?)```", page.read_text(), re.DOTALL)).replace("\\\n", " ")
        for line in lines.splitlines():
            words = [word for word in shlex.split(line, comments=True) if word != "--"]
            plain = [word for word in words if not word.startswith("-")]
            ours_of = re.compile(r"(.*/)?hf-hyperdflash|(examples|experiments|tools)/\S+")
            scripts = (i for i, word in enumerate(plain) if ours_of.fullmatch(word) and not word.endswith(".yaml"))
            at = next(scripts, None)
            if at is None or plain[0] == "hf":
                continue
            program, rest = plain[at], plain[at + 1 :]
            known = {"--config_file", "--num_processes"}  # accelerate's
            if not program.endswith("hf-hyperdflash"):
                if not (ROOT / program).exists():
                    yield page, f"there is no {program}"
                    continue
                files = [ROOT / program] if program.endswith(".py") else list((ROOT / program).rglob("*.py"))
                texts = "\n".join(file.read_text() for file in files if file.is_file())
                known |= set(re.findall(r"add_argument\(\s*\"(--[\w-]+)\"", texts))
            elif rest and rest[0] in ours:
                known |= {name for option in ours[rest[0]].params for name in option.opts}
            elif rest:
                yield page, f"there is no command {rest[0]!r}"
            if "train_drafter" in program or rest[:1] in (["train"], ["features"]) or " -- " in line:
                known |= {f"--{flag}" for flag in train_flags(rest[:1] == ["features"])}
            given = {word.partition("=")[0] for word in words if word.startswith("--")}
            for option in sorted(given - known):
                yield page, f"{program} has no {option}"


def snippets() -> Faults:
    """Python of the pages can be read, imports what there is, and passes public functions arguments that they have.
    `tools/check_snippets.py` runs it."""
    import hf_hyperdflash

    parameters: dict[str, set[str]] = {}
    for name, module in hf_hyperdflash._MODULE_OF.items():
        place = PACKAGE / module.replace(".", "/")
        path = place.with_suffix(".py") if place.with_suffix(".py").exists() else place / "__init__.py"
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name == name and node.args.kwarg is None:
                args = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                parameters[name] = {arg.arg for arg in args}
    for page in (page for page in PAGES if page != CHANGELOG):
        for code in re.findall(r"^( *)```python\n(.*?)```", page.read_text(), re.DOTALL | re.MULTILINE):
            try:
                tree = ast.parse(textwrap.dedent(code[1]))
            except SyntaxError as error:
                yield page, f"a snippet cannot be read: {error}"
                continue
            yield from ((page, fault) for fault in missing_imports(tree))
            for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
                name = call.func.id if isinstance(call.func, ast.Name) else ""
                for keyword in call.keywords if name in parameters else ():
                    if keyword.arg is not None and keyword.arg not in parameters[name]:
                        yield page, f"{name} has no `{keyword.arg}`"


def constants_of_auto() -> Faults:
    """The table of `auto` says of each constant what speaks for it."""
    table = (PACKAGE / "auto/__init__.py").read_text()
    for name in ("acceptance", "costs", "policies"):
        for constant in re.findall(r"^([A-Z_]+) = [\d.]+", (PACKAGE / f"auto/{name}.py").read_text(), re.MULTILINE):
            if f"`{name}.{constant}`" not in table:
                yield PACKAGE / "auto/__init__.py", f"nothing speaks for {name}.{constant}"


def site(folder: Path) -> Faults:
    """What mkdocs built has every page, its lists are lists, and its references lead somewhere."""
    made = {path.relative_to(folder).as_posix() for path in folder.rglob("*")}
    for name in [*(f"{page.stem}.html" for page in DOCS.glob("*.md")), "overview.html", "CHANGELOG.html"]:
        if name not in made:
            yield folder, f"there is no {name}"
    recipe, shown = (DOCS / "extending/family.md").read_text(), (folder / "extending/family.html").read_text()
    article = shown[shown.index("<article") :]
    if article.count("<li>") != len(re.findall(r"^ *(?:\d+\.|-) ", recipe, re.MULTILINE)):
        yield folder / "extending/family.html", "a list is no list"
    text = (folder / "reference.html").read_text()
    for place in ("decoding.bind", "drafters.base.Drafter"):  # the same name twice: what is nearer is meant
        linked = re.search(
            r'href="#([\w.]+)"><code>unbind</code>', text[text.index(f'id="hf_hyperdflash.{place}.bind"') :]
        )
        if linked is None or linked[1] != f"hf_hyperdflash.{place}.unbind" or "[<code>" in text or "[`" in text:
            yield folder / "reference.html", f"a reference of {place} leads elsewhere"


CHECKS = (
    links_and_anchors, lengths, what_contributors_are_told_of, quoted_messages, reference, docstrings, figures,
    results, release, scripts, commands, snippets, constants_of_auto,
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--site", type=Path, help="what mkdocs built")
    asked = parser.parse_args().site
    faults = [fault for check in CHECKS for fault in check()]
    faults += [] if asked is None else site(asked)
    for where, what in faults:
        print(f"{where.relative_to(ROOT) if where.is_relative_to(ROOT) else where}: {what}", file=sys.stderr)
    return bool(faults)


if __name__ == "__main__":
    raise SystemExit(main())
