"""The README and the pages of docs/: short enough, no link that leads nowhere, and the first snippet runs."""

import ast
import re
from pathlib import Path
from textwrap import dedent

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def snippets(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\(([^)\s]+)\)", page.read_text())
    for link in links:
        if link.startswith("http"):
            continue
        path, _, anchor = link.partition("#")
        other = (page.parent / path).resolve() if path else page
        assert other.exists(), link
        assert not anchor or anchor in anchors(other), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_snippets_are_python(page):
    for snippet in snippets(page):
        ast.parse(dedent(snippet))


def test_every_page_is_reached_from_the_readme():
    text = PAGES[0].read_text()
    assert all(f"docs/{page.name}" in text for page in PAGES[3:])
    assert len(PAGES) > 8


def test_the_readme_is_short():
    assert len(PAGES[0].read_text().split()) <= 900


def test_the_readmes_first_snippet(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    exec(snippets(PAGES[0])[0], {})
    text, _, tau = capsys.readouterr().out.strip().rpartition(" ")
    assert "The total number of marbles" in text and float(tau) > 2
