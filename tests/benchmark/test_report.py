"""The report's text and CSV, and the terminal's tables, in any width."""

import re

import pytest
from matplotlib.image import imread

from hf_hyperdflash.benchmark.report import markdown, print_fastest, print_results, write_report
from hf_hyperdflash.benchmark.results import averages, load, pool, summarize

from ..conftest import MODELS
from ..helpers.results_files import PLAIN, SUITES, line, random_lines, settings, tables, written

COMMITTED = MODELS.parents[1] / "experiments" / "results" / "smollm2-135m" / "drafter"


def text_of(path, lines, *runs):
    results = load(written(path, lines, *runs))
    return markdown(results, summarize(results), pool(results))


# Text and CSV


def test_a_committed_benchmark_is_written_again_as_it_was(tmp_path):
    """Of a run that was started three times: its settings, every table and every column, digit by digit."""
    write_report(COMMITTED / "results.jsonl", tmp_path / "new" / "folder")
    texts = [(folder / "report.md").read_text() for folder in (COMMITTED, tmp_path / "new" / "folder")]
    committed, again = ([line for line in text.splitlines() if line.startswith(("- ", "#", "|"))] for text in texts)
    assert again == committed and len(tables(texts[1])) == 6
    columns = [(folder / "summary.csv").read_bytes() for folder in (COMMITTED, tmp_path / "new" / "folder")]
    assert columns[0] == columns[1]
    for name in ("acceptance", "conditional_acceptance", "speedup_tau"):
        picture = imread(tmp_path / "new" / "folder" / f"{name}.png")
        assert f"({name}.png)" in texts[1] and min(picture.shape[:2]) > 400 and picture[..., :3].std() > 0.05


def test_modes_and_suites_are_in_the_papers_order(tmp_path):
    lines = random_lines(0, suites=["new-suite", *reversed(SUITES)], modes=("odd", "think-high", "non-think"))
    text = text_of(tmp_path / "r", [*lines, lines[-1]])
    order = ["## Non-think (the paper's Table 2)", "## Think-high (the paper's Table 3)", "## odd", "## Pictures"]
    assert [one for one in text.splitlines() if one.startswith("## ")] == order
    groups = "MATH: GSM8K (3), MATH-500 (3), AIME25 (3); CODE: HumanEval (3), MBPP (3), LCB (3); CHAT: MT-Bench (3)"
    assert f"{groups}; Other: new-suite (3)." in text and "replaces: 1." in text  # of a line that was written twice
    names = ["GSM8K", "MATH-500", "AIME25", "HumanEval", "MBPP", "LCB", "MT-Bench", "new-suite"]
    assert tables(text)[0][0] == ["Method", *names, "Average"]


def test_leads_details_and_acceptance(tmp_path):
    never = dict(rounds=0, emitted=[], accepted=[], draft_positions=0)
    lines = [
        one
        for prompt in range(3)
        for one in (
            line(PLAIN, prompt, peak_memory=2_500_000_000),
            line(
                "A|B", prompt, draft_positions=2, accepted=[0, 0, 0], emitted=[1, 1, 1]
            ),  # the settings do not name it
            line("MTP (3)", prompt, seconds=0.5, peak_memory=3_000_000_000, identical=not prompt),
            line("Lookup", prompt, **never),
        )
    ]
    text = text_of(tmp_path / "r", lines)
    main, leads, details, acceptance = tables(text)
    alone = text_of(
        tmp_path / "one", [one for one in lines if one["method"] in (PLAIN, "MTP (3)")], settings(["MTP (3)"])
    )
    assert tables(alone)[0][2] == ["MTP (3)", "2.00× / 3.00", "2.00× / 3.00"]  # of one method nothing is best
    assert [row[1] for row in main[2:]] == ["**2.00×** / **3.00**", "1.00× / 1.00", "1.00× / –"]
    assert leads == [
        ["Lead", "Temperature", "Speedup", "τ"],
        [r"MTP (3) over A\|B", "0", "+1.00× (+1.00 to +1.00)", "+2.00 (+2.00 to +2.00)"],
        ["MTP (3) over Lookup", "0", "+1.00× (+1.00 to +1.00)", "–"],
    ]
    assert details[1] == [
        "MTP (3)", "2.00×", "2.00 (2.00 to 2.00)", "3.00", "2.00", "33.33", "200.00", "12.5 %", "1.29×", "0.67",
        "3.00", "2 of 3",
    ]  # fmt: skip
    assert details[2][0] == r"A\|B" and details[2][-2:] == ["–", "–"]
    assert acceptance == [
        ["Method", "1", "2", "3"],
        ["MTP (3)", "100.0 / 100.0", "66.7 / 66.7", "33.3 / 50.0"],
        [r"A\|B", "0.0 / 0.0", "0.0 / 0.0", ""],
        ["Lookup", "", "", ""],
    ]
    assert "3 generations; target-only: 10.0 tokens/s, 100.00 ms a step, peak memory 2.50 GB" in text
    assert text.index("95 % intervals") < text.index("### Temperature")


# The terminal


@pytest.fixture
def printed(monkeypatch, capsys):
    """What is printed of a file, in so many columns."""
    for name in ("FORCE_COLOR", "NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)

    def lines_of(path, columns=120, show=print_results):
        monkeypatch.setenv("COLUMNS", str(columns))
        show(path)
        return capsys.readouterr().out.splitlines()

    return lines_of


@pytest.mark.parametrize("seed", range(2))
def test_every_figure_is_there_and_nothing_is_wider_than_the_terminal(printed, tmp_path, seed):
    path = written(tmp_path / "r.jsonl", random_lines(seed))
    rows = summarize(load(path))
    texts = {columns: printed(path, columns) for columns in (60, 80, 119, 120, 200)}
    for columns, lines in texts.items():
        assert max(map(len, lines)) <= columns
    wide, of_suites = "\n".join(texts[200]), {}
    for row in rows:
        of_suites.setdefault((row.temperature, row.method), []).append(f"{row.speedup:.2f}× {row.tau:.2f}")
    for (temperature, method), cells in of_suites.items():
        speedup, tau = averages(rows)["non-think", temperature, method]
        assert f"{method} " + " ".join([*cells, f"{speedup:.2f}× {tau:.2f}"]) in re.sub(r"  +", " ", wide)
    figures = [sorted(re.findall(r"\d\d?\.\d\d", "\n".join(lines))) for lines in texts.values()]
    assert all(each == figures[0] for each in figures)  # in fewer columns the same ones
    assert len(texts[119]) > len(texts[120])  # tau stands below the speedup
    differing, checked = sum(row.differing for row in rows), sum(row.checked for row in rows)
    assert texts[80][-1].startswith(f"{differing} of {checked} greedy texts ")


def of_speeds(speeds, **fields):
    """Lines of suites and methods with those speedups."""
    return [
        line(method, suite=suite, seconds=8 / speed, **fields)
        for suite, methods in speeds.items()
        for method, speed in {PLAIN: 1.0, **methods}.items()
    ]


def test_the_best_of_each_suite_is_bold(printed, monkeypatch, tmp_path):
    lines = of_speeds({"gsm8k": {"A (3)": 2.0, "B (3)": 4.0}, "mbpp": {"A (3)": 1.5, "B (3)": 1.25}})
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    text = "\n".join(printed(written(tmp_path / "r.jsonl", lines, settings(["A (3)", "B (3)"]))))
    assert re.findall(r"\x1b\[1m *([\d.]+×)", text) == ["1.50×", "4.00×", "2.62×"]


def test_a_suite_that_a_method_lacks_and_names_in_brackets(printed, tmp_path):
    names = ["[bold]A[/bold] (3)", "B (3)"]
    lines = [line(name, suite=suite) for suite in ("[mine]", "gsm8k") for name in (PLAIN, *names)]
    others = [one for one in lines if (one["method"], one["suite"]) != ("B (3)", "[mine]")]
    text = "\n".join(printed(written(tmp_path / "r.jsonl", others, settings(names))))
    assert "[bold]A[/bold] (3)" in text and "[mine]" in text and re.search(r"B \(3\) .*– –", text)


def test_a_sweep_names_the_fastest_number_of_drafts_per_suite(printed, tmp_path):
    few, many, modes = "HyperDFlash (2)", "HyperDFlash (6)", ("non-think", "think-high")
    speeds = {"gsm8k": {few: 2.0, many: 4.0}, "mbpp": {few: 4.0, many: 2.5}}
    lines = [one for mode in modes for one in of_speeds(speeds, mode=mode)]
    path = written(tmp_path / "r.jsonl", lines, settings([few, many]))
    table = [re.sub(r"  +", " ", text).rstrip() for text in printed(path, 80, print_fastest)]
    assert table[1] == "Suite Mode Temperature Fastest Speedup tau"
    best = {"GSM8K": many, "MBPP": few}
    assert table[3:] == [f"{suite} {mode} 0 {name} 4.00× 3.00" for mode in modes for suite, name in best.items()]
