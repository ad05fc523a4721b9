"""Tables in the terminal: the report's figures, in any width."""

import re

import pytest

from hf_hyperdflash.benchmark.results import averages, load, summarize
from hf_hyperdflash.benchmark.terminal import print_fastest, print_results

from ..benchmark.test_report import PLAIN, line, random_lines, settings, written


@pytest.fixture(autouse=True)
def plain_text(monkeypatch):
    for name in ("FORCE_COLOR", "NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)


def printed(monkeypatch, capsys, columns, path, show=print_results):
    monkeypatch.setenv("COLUMNS", str(columns))
    show(path)
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("seed", range(3))
def test_every_figure_is_there_and_nothing_is_wider_than_the_terminal(monkeypatch, capsys, tmp_path, seed):
    path = written(tmp_path / "r.jsonl", random_lines(seed))
    rows = summarize(load(path))
    texts = {columns: printed(monkeypatch, capsys, columns, path) for columns in (60, 80, 100, 130, 200)}
    for columns, lines in texts.items():
        assert max(map(len, lines)) <= columns
    wide, of_suites = "\n".join(texts[200]), {}
    for row in rows:
        of_suites.setdefault((row.temperature, row.method), []).append(f"{row.speedup:.2f}× {row.tau:.2f}")
    for (heat, method), cells in of_suites.items():
        speedup, tau = averages(rows)["non-think", heat, method]
        assert f"{method} " + " ".join([*cells, f"{speedup:.2f}× {tau:.2f}"]) in re.sub(r"  +", " ", wide)
    for columns in (60, 80):  # in fewer columns the same figures
        figures = [sorted(re.findall(r"\d\d?\.\d\d", "\n".join(lines))) for lines in (texts[columns], texts[200])]
        assert figures[0] == figures[1]
    differing, checked = sum(row.differing for row in rows), sum(row.checked for row in rows)
    assert texts[80][-1] == f"{differing} of {checked} greedy texts differ from the target's own."


def test_the_best_of_each_suite_is_bold(monkeypatch, capsys, tmp_path):
    speeds = {"gsm8k": {"A (3)": 2.0, "B (3)": 4.0}, "mbpp": {"A (3)": 1.5, "B (3)": 1.25}}
    lines = [
        line(method, suite=suite, seconds=8 / speed)
        for suite, methods in speeds.items()
        for method, speed in {PLAIN: 1.0, **methods}.items()
    ]
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    path = written(tmp_path / "r.jsonl", lines, settings(["A (3)", "B (3)"]))
    text = "\n".join(printed(monkeypatch, capsys, 120, path))
    assert re.findall(r"\x1b\[1m *([\d.]+×)", text) == ["1.50×", "4.00×", "2.62×"]


def test_a_suite_that_a_method_lacks_and_names_in_brackets(monkeypatch, capsys, tmp_path):
    names = ["[bold]A[/bold] (3)", "B (3)"]
    lines = [line(name, suite=suite) for suite in ("[mine]", "gsm8k") for name in (PLAIN, *names)]
    path = written(tmp_path / "r.jsonl", [one for one in lines if (one["method"], one["suite"]) != ("B (3)", "[mine]")], settings(names))  # fmt: skip
    text = "\n".join(printed(monkeypatch, capsys, 120, path))
    assert "[bold]A[/bold] (3)" in text and "[mine]" in text and re.search(r"B \(3\) .*– –", text)


def test_a_sweep_names_the_fastest_number_of_drafts_per_suite(monkeypatch, capsys, tmp_path):
    speeds = {"gsm8k": {"HyperDFlash (2)": 2.0, "HyperDFlash (6)": 4.0}, "mbpp": {"HyperDFlash (2)": 4.0, "HyperDFlash (6)": 2.5}}  # fmt: skip
    lines = [
        line(method, suite=suite, mode=mode, seconds=8 / speed)
        for mode in ("non-think", "think-high")
        for suite, methods in speeds.items()
        for method, speed in {PLAIN: 1.0, **methods}.items()
    ]
    path = written(tmp_path / "r.jsonl", lines, settings(["HyperDFlash (2)", "HyperDFlash (6)"]))
    table = [re.sub(r"  +", " ", text).rstrip() for text in printed(monkeypatch, capsys, 80, path, print_fastest)]
    assert table[1] == "Suite Mode Temperature Fastest Speedup tau"
    assert table[3:] == [
        f"{suite} {mode} 0 HyperDFlash ({drafts}) 4.00× 3.00"
        for mode in ("non-think", "think-high")
        for suite, drafts in (("GSM8K", 6), ("MBPP", 2))
    ]
