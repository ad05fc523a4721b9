"""What `tools/write_numbers.py` writes is what the committed results say."""

import re

import pytest

from ..conftest import MODELS
from ..helpers.processes import python

ROOT = MODELS.parent.parent
SCRIPT = ROOT / "tools" / "write_numbers.py"
BLOCK = '<!-- result: average tiny-deepseek-v4/heads "State head (8)" 0 {} -->{}<!-- end -->'


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
