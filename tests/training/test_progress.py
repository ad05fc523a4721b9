"""How far long work is: a bar for somebody who watches, a line now and then for a file."""

import pytest

from hf_hyperdflash.training.runs import progress
from hf_hyperdflash.training.runs.progress import progress_bar


@pytest.mark.parametrize(("seconds", "disable", "lines"), [(0, None, 3), (30, None, 0), (0, True, 0)])
def test_a_line_now_and_then_where_nobody_watches(monkeypatch, capsys, seconds, disable, lines):
    monkeypatch.setattr(progress, "_SECONDS", seconds)
    assert list(progress_bar(range(3), desc="work", unit="step", leave=False, disable=disable)) == [0, 1, 2]
    told = capsys.readouterr()
    assert told.out == "" and "\r" not in told.err and len(told.err.splitlines()) == lines
    assert all(line.startswith("work: ") and f"{i}/3" in line for i, line in enumerate(told.err.splitlines(), start=1))


def test_work_that_counts_itself_has_lines_too(monkeypatch, capsys):
    monkeypatch.setattr(progress, "_SECONDS", 0)
    with progress_bar(total=50, desc="tokens", disable=None) as bar:
        bar.update(20)
        bar.update(30)
    assert [line.split("|")[0].split()[-1] for line in capsys.readouterr().err.splitlines()] == ["40%", "100%"]
