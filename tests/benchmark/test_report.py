"""The report's text and CSV, and the terminal's tables, in any width."""

import csv
import json
import re
import sys

import pytest
from matplotlib.image import imread

from hf_hyperdflash.benchmark.report import markdown, print_fastest, print_results, write_csv, write_report
from hf_hyperdflash.benchmark.results import averages, load, pool, summarize

from ..helpers.results_files import METHODS, PLAIN, SUITES, line, random_lines, realistic, settings, tables, written


def test_resumed_settings_are_all_shown(tmp_path):
    path = tmp_path / "r"
    parts = [settings(), line(PLAIN), settings(date="2026-11-22", commit="abc1234"), line("MTP (3)")]
    path.write_text("\n".join(map(json.dumps, parts)))
    write_report(path, tmp_path / "out")
    text = (tmp_path / "out" / "report.md").read_text()
    for expected in (
        "- date: 2026-11-21; 2026-11-22", "- commit: none; abc1234", "- hardware: AMD EPYC 7B13, 2 cores\n",
        "- threads: 1\n", "- versions: torch 2.13.0+cpu, python 3.11\n", "- dtype: float32\n", "- limit: 2\n",
        "- target: tiny-deepseek-v4\n", "- seed: 0\n", "- max new tokens: 128\n",
        "- command: `python -m bench --limit 2 | tee log`\n",
    ):  # fmt: skip
        assert expected in text


# Text and CSV


def test_main_table_is_the_papers(tmp_path):
    lines = random_lines(0, suites=["new-suite", *reversed(SUITES)], modes=("odd", "think-high", "non-think"))
    results = load(written(tmp_path / "r", lines))
    rows = summarize(results)
    text = markdown(results, rows, pool(results))
    order = ["## Non-think (the paper's Table 2)", "## Think-high (the paper's Table 3)", "## odd", "## Pictures"]
    assert [one for one in text.splitlines() if one.startswith("## ")] == order
    table = tables(text)[0]
    assert len({len(row) for row in table}) == 1
    names = ["GSM8K", "MATH-500", "AIME25", "HumanEval", "MBPP", "LCB", "MT-Bench", "new-suite"]
    assert table[0] == ["Method", *names, "Average"]
    assert [row[0] for row in table[1:]] == ["*Temperature = 0*", *METHODS, "*Temperature = 1*", *METHODS]
    for temperature, body in ((0.0, table[2:8]), (1.0, table[9:])):
        means = averages(rows)
        for column, suite in enumerate([*SUITES, "new-suite", None], start=1):
            pairs = [
                means["non-think", temperature, method] if suite is None else next(
                    (row.speedup, row.tau)
                    for row in rows
                    if (row.mode, row.temperature, row.suite, row.method) == ("non-think", temperature, suite, method)
                )
                for method in METHODS
            ]  # fmt: skip
            best = [max(round(pair[i], 2) for pair in pairs) for i in range(2)]
            for cell, pair in zip((row[column] for row in body), pairs):
                texts = [f"{pair[0]:.2f}×", f"{pair[1]:.2f}"]
                bold = [f"**{t}**" if round(v, 2) == b else t for t, v, b in zip(texts, pair, best)]
                assert cell == " / ".join(bold)
    assert "MATH: GSM8K (3), MATH-500 (3), AIME25 (3); CODE: HumanEval (3)" in text and "Other: new-suite (3)" in text


def test_of_one_method_nothing_is_best(tmp_path):
    results = load(written(tmp_path / "r", [one for one in random_lines(0) if one["method"] in (PLAIN, METHODS[0])]))
    table = tables(markdown(results, summarize(results), pool(results)))[0]
    assert table[2][0] == METHODS[0] and not any("**" in cell for row in table for cell in row)


def test_leads_follow_the_main_table(tmp_path):
    lines = [line(name, prompt) for prompt in range(3) for name in (PLAIN, "A|B", "MTP (3)", "Lookup")]
    for one in lines:
        if one["method"] == "MTP (3)":
            one |= dict(seconds=0.5, rounds=2, emitted=[5, 5], accepted=[4, 4], draft_positions=4)
        elif one["method"] == "Lookup":
            one |= dict(rounds=0, emitted=[], accepted=[], draft_positions=0)
    results = load(written(tmp_path / "r", lines))
    text = markdown(results, summarize(results), pool(results))
    assert tables(text)[1] == [
        ["Lead", "Temperature", "Speedup", "τ"],
        [r"MTP (3) over A\|B", "0", "+1.00× (+1.00 to +1.00)", "+2.00 (+2.00 to +2.00)"],
        ["MTP (3) over Lookup", "0", "+1.00× (+1.00 to +1.00)", "–"],
    ]
    assert text.index("95 % intervals") < text.index("### Temperature")


def test_details_and_acceptance(tmp_path):
    lines = [
        line(PLAIN, peak_memory=2_500_000_000),
        line("MTP (3)", seconds=0.5, peak_memory=3_000_000_000, identical=False),
        line("A|B", draft_positions=2, accepted=[0, 0, 0], emitted=[1, 1, 1]),
    ]
    results = load(written(tmp_path / "r", lines))
    text = markdown(results, summarize(results), pool(results))
    _, details, acceptance = tables(text)
    assert details[1] == [
        "MTP (3)", "2.00×", "2.00 (2.00 to 2.00)", "3.00", "2.00", "33.33", "200.00", "12.5 %", "1.29×", "0.67",
        "3.00",
        "1 of 1",
    ]  # fmt: skip
    assert details[2][0] == r"A\|B" and details[2][-2:] == ["–", "–"]  # a method the settings do not name
    assert acceptance[1:] == [
        ["MTP (3)", "100.0 / 100.0", "66.7 / 66.7", "33.3 / 50.0"],
        [r"A\|B", "0.0 / 0.0", "0.0 / 0.0", ""],
    ]
    assert "1 generations; target-only: 10.0 tokens/s, 100.00 ms a step, peak memory 2.50 GB" in text


def test_csv_has_every_figure(tmp_path):
    rows = summarize(load(written(tmp_path / "r", random_lines(4, suites=["mbpp", "gsm8k"]))))
    write_csv(rows, tmp_path / "s.csv")
    with (tmp_path / "s.csv").open() as file:
        read = list(csv.DictReader(file))
    assert [one["method"] for one in read] == METHODS * 4 and [one["suite"] for one in read[::6]] == [
        "gsm8k",
        "mbpp",
    ] * 2
    for one, row in zip(read, rows):
        for k in range(1, 11):
            for column, values in (("acceptance", row.acceptance), ("conditional", row.conditional_acceptance)):
                expected = values[k - 1] if k <= len(values) else None
                assert one.pop(f"{column}_{k}") == ("" if expected is None else str(expected))
        for name, value in one.items():
            assert value == ("" if getattr(row, name) is None else str(getattr(row, name))), name
        assert set(one) == set(vars(row)) - {"acceptance", "conditional_acceptance"}


def test_report_is_written_whole(tmp_path):
    write_report(written(tmp_path / "r", realistic(0, modes=("non-think",))), tmp_path / "new" / "folder")
    files = {path.name for path in (tmp_path / "new" / "folder").iterdir()}
    assert files == {"report.md", "summary.csv", "acceptance.png", "conditional_acceptance.png", "speedup_tau.png"}
    for name in ("acceptance.png", "conditional_acceptance.png", "speedup_tau.png"):
        picture = imread(tmp_path / "new" / "folder" / name)
        assert min(picture.shape[:2]) > 400 and picture[..., :3].std() > 0.05
        assert f"({name})" in (tmp_path / "new" / "folder" / "report.md").read_text()


def test_without_matplotlib_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install \"hf-hyperdflash\[benchmark\]\""):
        write_report(written(tmp_path / "r", realistic(0)), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_generations_that_were_written_twice_are_told(tmp_path):
    lines = [line(PLAIN), line("MTP (3)", seconds=0.5), line("MTP (3)", seconds=0.25)]
    results = load(written(tmp_path / "r.jsonl", lines, settings(["MTP (3)"])))
    text = markdown(results, summarize(results), pool(results))
    assert "method replaces: 1." in text and "4.00×" in text
    results = load(written(tmp_path / "r.jsonl", lines[:2], settings(["MTP (3)"])))
    assert "takes the place" not in markdown(results, summarize(results), pool(results))


# The terminal


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
    for (temperature, method), cells in of_suites.items():
        speedup, tau = averages(rows)["non-think", temperature, method]
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
    others = [one for one in lines if (one["method"], one["suite"]) != ("B (3)", "[mine]")]
    path = written(tmp_path / "r.jsonl", others, settings(names))
    text = "\n".join(printed(monkeypatch, capsys, 120, path))
    assert "[bold]A[/bold] (3)" in text and "[mine]" in text and re.search(r"B \(3\) .*– –", text)


def test_a_sweep_names_the_fastest_number_of_drafts_per_suite(monkeypatch, capsys, tmp_path):
    few, many = "HyperDFlash (2)", "HyperDFlash (6)"
    speeds = {"gsm8k": {few: 2.0, many: 4.0}, "mbpp": {few: 4.0, many: 2.5}}
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
