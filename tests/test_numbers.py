"""Measured figures of the pages come from the committed results, through the blocks of `tools/write_numbers.py`."""

import re

import pytest

from .conftest import MODELS
from .helpers.processes import python

ROOT = MODELS.parent.parent
SCRIPT = ROOT / "tools" / "write_numbers.py"
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "model_cards" / "parts").glob("*.md")),
]
PAGES += sorted((ROOT / "experiments" / "results").rglob("README.md"))
BLOCK = '<!-- result: average tiny-deepseek-v4/heads "State head (8)" 0 {} -->{}<!-- end -->'


def test_no_block_is_stale():
    ran = python(SCRIPT, "--check")
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize(
    ("field", "figure", "status"), [("tau", "6.14", 0), ("tau", "6.15", 1), ("speedup", "2.77×", 0), ("tau", "", 1)]
)
def test_a_stale_block_is_named_and_filled(tmp_path, field, figure, status):
    """By the average that stands in the benchmark's report."""
    page = tmp_path / "page.md"
    page.write_text(f"It writes {BLOCK.format(field, figure)} tokens.")
    ran = python(SCRIPT, "--check", page)
    assert ran.returncode == status and ("page.md: average tiny-deepseek-v4/heads" in ran.stderr) == bool(status)
    assert python(SCRIPT, page).returncode == python(SCRIPT, "--check", page).returncode == 0
    report = (ROOT / "experiments" / "results" / "tiny-deepseek-v4" / "heads" / "report.md").read_text()
    (row,) = re.findall(
        r"^\| State head \(8\) \|.*\| (.*) \|$", report.partition("*Temperature = 1*")[0], re.MULTILINE
    )
    filled = re.search(r"-->(.*?)<!--", page.read_text())[1]
    assert filled in row.replace("*", "").split(" / ")


def test_a_block_that_asks_for_nothing_ends_in_one_line(tmp_path):
    (tmp_path / "page.md").write_text("<!-- result: average tiny-deepseek-v4/heads Nobody 0 tau --><!-- end -->")
    ran = python(SCRIPT, tmp_path / "page.md")
    assert ran.returncode == 1 and ran.stderr.count("\n") == 1 and "Nobody" in ran.stderr


MEASURED = re.compile(r"\d ?×|\d ?%|\d ms\b|±|\btau (?:of )?\d|\d tokens (?:a|per) (?:round|second)|\d times as")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_no_measured_figure_stands_outside_of_a_block(page):
    """But in what a program prints."""
    text = re.sub(
        r"<!-- result: .*?<!-- end -->|^```.*?^```|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL | re.MULTILINE
    )
    assert MEASURED.findall(text) == []
