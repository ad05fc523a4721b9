"""The README and the pages of docs/: short enough, no link that leads nowhere, and what they quote is said."""

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import hf_hyperdflash

from .helpers.processes import python

ROOT = Path(__file__).parent.parent
DOCS, PACKAGE = ROOT / "docs", ROOT / "hf_hyperdflash"
LINKED = [page for part in ("examples", "experiments") for page in sorted((ROOT / part).rglob("*.md"))]
LINKED += sorted((ROOT / "model_cards").glob("*.md"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted(DOCS.rglob("*.md")), *LINKED]


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def snippets(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)


def links(page: Path) -> list[str]:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if not link.startswith("http")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page):
    for link in links(page):
        path, _, anchor = link.partition("#")
        other = (page.parent / path).resolve() if path else page
        assert other.exists(), link
        assert not anchor or anchor in anchors(other), link


def test_every_page_is_reached_from_the_readme():
    reached = waiting = {PAGES[0]}
    while waiting:
        found = {(page.parent / link.partition("#")[0]).resolve() for page in waiting for link in links(page)}
        waiting = {path for path in found if path.suffix == ".md"} - reached
        reached = reached | waiting
    assert reached > set(DOCS.rglob("*.md"))


@pytest.mark.parametrize("page", [PAGES[1], *sorted((DOCS / "extending").glob("*.md"))], ids=lambda page: page.stem)
def test_paths_that_contributors_are_told_of_are_there(page):
    """Of the repository, or of the package; SGLang's are its own."""
    named = re.findall(r"`((?:\w+|\.ci)/[\w./-]*)`", page.read_text().partition("# What SGLang gives")[0])
    assert [
        path for path in named if "NAME" not in path and not any((at / path).exists() for at in (ROOT, PACKAGE))
    ] == []


def test_names_that_contributors_are_told_of_are_defined():
    """Somewhere in the code or in a configuration: as a function, a class, a value or a field."""
    pages = [page for page in (DOCS / "extending").glob("*.md") if page.stem != "sglang"]  # SGLang's are its own
    named = {name for page in pages for name in re.findall(r"`(\w+)`", page.read_text()) if "NAME" not in name}
    code = "\n".join(path.read_text() for part in (PACKAGE, ROOT / "tests") for path in part.rglob("*.py"))
    defined = set(re.findall(r"(?:\bdef |\bclass |\bself\.)(\w+)", code))
    defined |= set(re.findall(r"\b(\w+)[\"']?(?: *[:=]|\])", code))
    # Of tests a part of the name is enough; the last one is transformers'.
    assert [name for name in named if not any(name in each for each in {*defined, "layer_norm_eps"})] == []


def words(*pages: Path) -> int:
    """Of what a reader sees: no comments, no bars of tables."""
    shown = [re.sub(r"<!--.*?-->", "", page.read_text(), flags=re.DOTALL) for page in pages]
    return sum(bool(re.search(r"\w", word)) for text in shown for word in text.split())


def test_the_pages_are_few_and_short():
    pages = sorted(DOCS.glob("*.md"))
    assert len(PAGES[0].read_text().split()) <= 900  # as `wc -w` counts
    assert words(PAGES[1]) <= 800
    assert len(pages) <= 10 and words(*pages) <= 10_000


def test_the_readmes_first_snippet(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    exec(re.findall(r"```python\n(.*?)```", PAGES[0].read_text(), re.DOTALL)[0], {})
    text, _, tau = capsys.readouterr().out.strip().removesuffix(" tokens a round").rpartition(" ")
    assert "The number of marbles is 12 + 24 = 24 marbles." in text and float(tau) > 2  # docs/index.md's


@pytest.mark.nightly  # the script of the page in a process
def test_the_first_text_is_as_the_page_shows_it():
    page = (DOCS / "index.md").read_text()
    (asked,) = re.findall(r'--show "(.*)"', page)
    (shown,) = re.findall(r"```text\n(.*?)```", page, re.DOTALL)
    models = ROOT / "examples" / "models"
    pair = ["--target", models / "tiny-deepseek-v4", "--drafter", models / "tiny-deepseek-v4-hyperdflash"]
    terminal = {**os.environ, "FORCE_COLOR": "1", "TERM": "xterm"}
    code = "from hf_hyperdflash.cli.app import run; run()"
    ran = python("-c", code, "generate", *pair, "--show", asked, env=terminal)
    assert ran.returncode == 0, ran.stderr
    beneath, colours = r"\x1bD.*?\x1b8", r"\x1b\[[\d;]*m"
    printed = re.sub(f"{beneath}|{colours}", "", ran.stdout, flags=re.DOTALL)
    without_speed = [re.sub(r"(?:[\d.]+|…) tokens/s", "", text) for text in (printed + ran.stderr, shown)]
    said, lines = (
        " ".join(without_speed[0].split()),
        [" ".join(line.split()) for line in without_speed[1].splitlines()],
    )
    assert [line for line in lines if line not in said] == []
    assert "Loading weights" not in ran.stderr  # transformers' bar, which a pipe does not need


def texts(source: Path) -> Iterator[str]:
    """Every string of a module, with a gap for each value that is put in."""
    tree = ast.parse(source.read_text())
    inside = {part for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in inside:
            yield re.sub(r"%[sd]", "…", node.value)


@pytest.mark.nightly  # each message comes from the program that says it
def test_quoted_messages_are_the_programs():
    page = (DOCS / "troubleshooting.md").read_text()
    quoted = [
        quote for line in page.splitlines() if line.startswith("|") for quote in re.findall(r'"([^"]{16,})"', line)
    ]
    assert len(quoted) > 30
    ours = [text for path in PACKAGE.rglob("*.py") for text in texts(path)]
    stateful = "assisted generation is not supported with stateful models, such as DeepseekV4ForCausalLM"
    for quote in quoted:
        pattern = re.compile(".*?".join(map(re.escape, re.split("…", quote))), re.DOTALL)
        assert quote == stateful or any(pattern.search(text) for text in ours), quote


def test_the_reference_has_the_public_names():
    page = (DOCS / "reference.md").read_text()
    shown = re.findall(r"^::: (\S+)$", page, re.MULTILINE)
    public = {f"hf_hyperdflash.{module}.{name}" for name, module in hf_hyperdflash._MODULE_OF.items()}
    assert public <= set(shown) and len(shown) == len(set(shown))


def test_docstrings_refer_to_what_there_is():
    """As [`name`] or [`~module.name`]."""
    names, references = {"Trainer", "TrainingArguments"}, []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module):
                references += re.findall(r"\[`~?([\w.]+)`\]", ast.get_docstring(node) or "")
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                names.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
        names.add(path.stem)
    assert len(references) > 50
    assert [reference for reference in references if reference.rpartition(".")[2] not in names] == []


@pytest.mark.nightly  # the shipped pair writes texts
def test_the_drawings_are_what_the_shipped_pair_does():
    script = DOCS / "draw_concepts.py"
    ran = python(script, "--check")
    assert ran.returncode == 0, f"run {script.name}: {ran.stderr}"


def test_the_race_is_its_record():
    script = DOCS / "draw_race.py"
    ran = python(script, "--check")
    assert ran.returncode == 0, f"run {script.name}: {ran.stderr}"
    assert (DOCS / "pictures" / "race.svg").stat().st_size < 150_000


def test_the_races_record_is_whole():
    """One text, written twice, in rounds that add up. The model is not here to write it again."""
    results = ROOT / "experiments" / "results" / "smollm2-135m" / "race" / "race.json"
    record = json.loads(results.read_text())
    plain, drafted = record["plain"], record["drafted"]
    assert plain["tokens"] == drafted["tokens"] and f'"{record["run"]["prompt"]}"' in (DOCS / "index.md").read_text()
    count = len(record["pieces"])
    assert 1 + sum(drafted["emitted"]) == count == len(drafted["written"])  # the first is the prompt's forward's
    assert 1 + sum(by == 0 for by in drafted["written"][1:]) <= 1 + len(drafted["emitted"]) < count
    for one in (plain, drafted):
        assert len(one["seconds"]) == count and one["seconds"] == sorted(one["seconds"])


@pytest.mark.nightly  # mkdocs builds it, as `.ci/run` does by itself
def test_the_site(tmp_path):
    """As `mkdocs build --strict` makes it, with every page of docs/ and what they link to."""
    pytest.importorskip("mkdocs", reason="the extra `docs` is not installed")
    config = DOCS / "site" / "mkdocs.yml"
    command = [sys.executable, "-m", "mkdocs", "build", "-q", "--strict", "-f", config, "-d", tmp_path / "site"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    made = {path.relative_to(tmp_path / "site").as_posix() for path in (tmp_path / "site").rglob("*")}
    assert {f"{page.stem}.html" for page in DOCS.glob("*.md")} <= made
    assert {"overview.html", "CHANGELOG.html", "experiments/results/tiny-deepseek-v4/trees/draft_trees.png"} <= made
    assert not any(name.endswith(".py") for name in made)
    recipe = (DOCS / "extending" / "family.md").read_text()
    shown = (tmp_path / "site" / "extending" / "family.html").read_text()
    items = re.findall(r"^ *(?:\d+\.|-) ", recipe, re.MULTILINE)
    lists = re.findall(r"^ *1\. |(?<=\n)\n- ", recipe, re.MULTILINE)
    article = shown[shown.index("<article") :]
    assert article.count("<li>") == len(items) > 10
    assert article.count("<ol>") + article.count("<ul>") == len(lists)
    reference = (tmp_path / "site" / "reference.html").read_text()
    assert "[<code>" not in reference and "[`" not in reference
    for place in ("decoding.bind", "drafters.base.Drafter"):  # the same name twice: what is nearer is meant
        start = reference.index(f'id="hf_hyperdflash.{place}.bind"')
        linked = re.search(r'href="#([\w.]+)"><code>unbind</code>', reference[start:])
        assert linked[1] == f"hf_hyperdflash.{place}.unbind"
