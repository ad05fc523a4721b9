"""The report against naive loops over the lines, and what killed and resumed runs leave behind."""

import csv
import json
import random
import sys
from itertools import combinations

import pytest
from matplotlib.image import imread

from hf_hyperdflash.benchmark.figures import acceptance_figure, speedup_figure
from hf_hyperdflash.benchmark.report import markdown, write_csv, write_report
from hf_hyperdflash.benchmark.results import averages, load, pool, summarize

PLAIN = "Target only"
METHODS = [
    "MTP (3)",
    "MTP (6)",
    "Vanilla DFlash (6)",
    "Prompt lookup (10)",
    "HyperDFlash (6)",
    "HyperDFlash hybrid (6)",
]
SUITES = ["gsm8k", "math500", "aime25", "humaneval", "mbpp", "livecodebench", "mt-bench"]
NOT_OF_PLAIN = ["rounds", "draft_positions", "emitted", "accepted", "draft_seconds", "verify_seconds", "loop_seconds"]


def settings(methods=METHODS, **changes):
    run = {
        "date": "2026-11-21",
        "command": "python -m bench --limit 2 | tee log",
        "commit": None,
        "hardware": "AMD EPYC 7B13, 2 cores",
        "threads": 1,
        "versions": {"torch": "2.13.0+cpu", "python": "3.11"},
        "dtype": "float32",
        "target": "tiny-deepseek-v4",
        "methods": {name: "described" for name in methods},
        "suites": {"gsm8k": "gsm8k.jsonl"},
        "limit": 2,
        "seed": 0,
        "max_new_tokens": 128,
    }
    return {"run": {**run, **changes}}


def line(method, prompt=0, **fields):
    """Ten tokens in one second; three rounds of up to three drafts where the method is not target-only."""
    of_all = dict(
        suite="gsm8k", mode="non-think", temperature=0.0, prompt=prompt, turn=0, method=method, prompt_tokens=5,
        new_tokens=10, seconds=1.0, decode_seconds=0.9, peak_memory=None, identical=None, first_difference=None,
    )  # fmt: skip
    speculative = dict(
        rounds=3, draft_positions=3, emitted=[4, 3, 2], accepted=[3, 2, 1], draft_seconds=0.1, verify_seconds=0.6,
        loop_seconds=0.8,
    )  # fmt: skip
    return {**of_all, **(dict.fromkeys(NOT_OF_PLAIN) if method == PLAIN else speculative), **fields}


def written(path, lines, *runs, end="\n"):
    path.write_text("\n".join(json.dumps(one) for one in [*(runs or [settings()]), *lines]) + end, encoding="utf-8")
    return path


def random_line(rng, method, drafts=6, **fields):
    common = dict(seconds=rng.uniform(1, 4), new_tokens=rng.randint(2, 60), peak_memory=rng.choice([None, 5, 7, 9]))
    common |= dict(decode_seconds=rng.uniform(0.5, 1), **fields)
    if method == PLAIN:
        return line(method, **common)
    accepted = [rng.randint(0, rng.randint(0, drafts)) for _ in range(rng.randint(0, 9))]
    return line(
        method,
        **common,
        rounds=len(accepted),
        draft_positions=drafts if accepted else 0,
        accepted=accepted,
        emitted=[n + 1 for n in accepted],
        draft_seconds=rng.uniform(0.1, 0.2),
        verify_seconds=rng.uniform(0.2, 0.5),
        loop_seconds=rng.uniform(0.8, 1),
        identical=rng.choice([None, True, False]),
    )


def random_lines(seed, suites=SUITES, methods=METHODS, temperatures=(0.0, 1.0), modes=("non-think",), prompts=3):
    rng = random.Random(seed)
    drafts = {method: 3 + 7 * ("(10)" in method) + 3 * ("(6)" in method) for method in methods}
    return [
        random_line(
            rng, method, drafts.get(method, 6), suite=suite, mode=mode, temperature=heat, prompt=prompt // 2, turn=prompt % 2
        )
        for mode in modes
        for heat in temperatures
        for suite in suites
        for prompt in range(prompts)
        for method in [PLAIN, *methods]
    ]  # fmt: skip


def total(lines, name):
    result = 0
    for one in lines:
        result += one[name]
    return result


def quantile(values, share):
    """Linear between neighbours."""
    values, at = sorted(values), share * (len(values) - 1)
    below = int(at)
    above = min(below + 1, len(values) - 1)
    return values[below] + (at - below) * (values[above] - values[below])


def check_row(row, lines, plain):
    """Every figure of a row from the lines alone, `plain` being target-only's of the same prompts in the same order."""
    ratios = [a["new_tokens"] / a["seconds"] * b["seconds"] / b["new_tokens"] for a, b in zip(lines, plain)]
    rate = total(lines, "new_tokens") / total(lines, "seconds")
    plain_rate = total(plain, "new_tokens") / total(plain, "seconds")
    step = total(plain, "decode_seconds") / sum(one["new_tokens"] - 1 for one in plain)
    rounds = [(e, a) for one in lines for e, a in zip(one["emitted"], one["accepted"])]
    draft, verify = total(lines, "draft_seconds"), total(lines, "verify_seconds")
    assert row.generations == len(lines) and row.new_tokens == total(lines, "new_tokens")
    assert row.tokens_per_second == pytest.approx(rate)
    assert row.target_tokens_per_second == pytest.approx(plain_rate)
    assert row.speedup == pytest.approx(rate / plain_rate)
    quartiles = [row.speedup_25, row.speedup_median, row.speedup_75]
    assert quartiles == pytest.approx([quantile(ratios, share) for share in (0.25, 0.5, 0.75)])
    assert row.overhead == pytest.approx(1 - (draft + verify) / total(lines, "loop_seconds"))
    assert row.target_step_ms == pytest.approx(1000 * step)
    flags = [one["identical"] for one in lines]
    assert (row.checked, row.differing) == (len(flags) - flags.count(None), flags.count(False))
    for peak, of in ((row.peak_memory, lines), (row.target_peak_memory, plain)):
        known = [one["peak_memory"] for one in of if one["peak_memory"] is not None]
        assert peak == (max(known) if known else None)
    check_rounds(row, rounds, draft, verify, step)


def check_rounds(row, rounds, draft, verify, step):
    assert row.rounds == len(rounds)
    if not rounds:
        assert {row.tau, row.accepted_drafts, row.draft_ms, row.verify_ms, row.bound, row.efficiency} == {None}
        assert row.acceptance == row.conditional_acceptance == []
        return
    tau = sum(emitted for emitted, _ in rounds) / len(rounds)
    assert row.tau == pytest.approx(tau)
    assert row.accepted_drafts == pytest.approx(sum(accepted for _, accepted in rounds) / len(rounds))
    assert row.draft_ms == pytest.approx(1000 * draft / len(rounds))
    assert row.verify_ms == pytest.approx(1000 * verify / len(rounds))
    assert row.bound == pytest.approx(step * tau / ((draft + verify) / len(rounds)))
    assert row.efficiency == pytest.approx(row.speedup / tau)
    assert len(row.acceptance) == len(row.conditional_acceptance)
    for k, (prefix, conditional) in enumerate(zip(row.acceptance, row.conditional_acceptance), start=1):
        reached = sum(accepted >= k for _, accepted in rounds)
        before = sum(accepted >= k - 1 for _, accepted in rounds)
        assert prefix == pytest.approx(reached / len(rounds))
        assert conditional == pytest.approx(reached / before if before else 0)


def of(lines, row, method, suites=None):
    return [
        one
        for one in lines
        if (one["mode"], one["temperature"], one["method"]) == (row.mode, row.temperature, method)
        and one["suite"] in (suites or [row.suite])
    ]


# Figures


def test_known_answers(tmp_path):
    lines = [
        line(PLAIN, 0, new_tokens=11, seconds=2.0, decode_seconds=1.0),
        line("MTP (3)", 0, new_tokens=10, seconds=1.0, identical=True),
        line(PLAIN, 1, new_tokens=11, seconds=2.4, decode_seconds=2.0, peak_memory=3),
        line("MTP (3)", 1, new_tokens=12, seconds=1.2, identical=False, peak_memory=4, emitted=[1], accepted=[0], rounds=1),
    ]  # fmt: skip
    (row,) = summarize(load(written(tmp_path / "r", lines)))
    assert row.speedup == pytest.approx((22 / 2.2) / (22 / 4.4))  # 2
    assert row.speedup_median == pytest.approx((20 / 11 + 24 / 11) / 2)  # 2 as well: 1.82 and 2.18
    assert row.speedup_25 == pytest.approx(20 / 11 + 0.25 * 4 / 11)
    assert (row.tau, row.accepted_drafts, row.rounds) == (2.5, 1.5, 4)
    assert row.acceptance == [0.75, 0.5, 0.25] and row.conditional_acceptance == pytest.approx([0.75, 2 / 3, 0.5])
    assert (row.draft_ms, row.verify_ms) == pytest.approx((50, 300)) and row.overhead == pytest.approx(1 - 1.4 / 1.6)
    assert row.target_step_ms == pytest.approx(150) and row.bound == pytest.approx(0.15 * 2.5 / 0.35)
    assert row.efficiency == pytest.approx(0.8)
    assert (row.peak_memory, row.target_peak_memory, row.checked, row.differing) == (4, 3, 2, 1)


@pytest.mark.parametrize("seed", range(5))
def test_rows_and_pools_are_the_loops(tmp_path, seed):
    lines = random_lines(seed, modes=("think-high", "non-think"), methods=METHODS[:3], suites=SUITES[:3])
    random.Random(seed).shuffle(lines)
    results = load(written(tmp_path / "r", lines))
    rows, pooled = summarize(results), pool(results)
    assert (len(rows), len(pooled)) == (2 * 2 * 3 * 3, 2 * 2 * 3)
    for row in rows + pooled:
        suites = SUITES if row.suite == "all" else [row.suite]
        place = [(one["suite"], one["prompt"], one["turn"]) for one in of(lines, row, PLAIN, suites)]
        mine = {(one["suite"], one["prompt"], one["turn"]): one for one in of(lines, row, row.method, suites)}
        check_row(row, [mine[where] for where in place], of(lines, row, PLAIN, suites))


def test_average_is_unweighted(tmp_path):
    rows = summarize(load(written(tmp_path / "r", random_lines(3))))
    for (mode, heat, method), (speedup, tau) in averages(rows).items():
        mine = [row for row in rows if (row.mode, row.temperature, row.method) == (mode, heat, method)]
        assert len(mine) == 7
        assert speedup == pytest.approx(sum(row.speedup for row in mine) / 7)
        assert tau == pytest.approx(sum(row.tau for row in mine) / 7)


def test_a_generation_without_rounds(tmp_path):
    none = dict(
        rounds=0, draft_positions=0, emitted=[], accepted=[], loop_seconds=0.0, verify_seconds=0, draft_seconds=0
    )
    lines = [line(method, i, **(none if method != PLAIN else {})) for i in range(2) for method in (PLAIN, "MTP (3)")]
    (row,) = summarize(load(written(tmp_path / "r", lines)))
    assert row.speedup == 1 and row.acceptance == []
    assert {row.tau, row.accepted_drafts, row.draft_ms, row.verify_ms, row.overhead, row.bound, row.efficiency} == {
        None
    }
    write_report(tmp_path / "r", tmp_path / "out")
    assert "**1.00×** / –" in (tmp_path / "out" / "report.md").read_text()
    lines[1] = line("MTP (3)", 0)  # beside one with rounds it adds tokens and time, no rounds
    (row,) = summarize(load(written(tmp_path / "r", lines)))
    assert (row.rounds, row.tau, row.new_tokens) == (3, 3.0, 20)


# Killed and resumed runs


@pytest.mark.parametrize("half", ['{"suite": "gsm8k", "met', '{"suite": "gsm8k", "command": "\u00d7'.encode()[:-1]])
def test_half_a_last_line_is_left_out(tmp_path, half):
    path = written(tmp_path / "r", [line(PLAIN), line("MTP (3)")])
    with path.open("ab") as file:
        file.write(half if isinstance(half, bytes) else half.encode())
    assert len(load(path).generations) == 2


@pytest.mark.parametrize(
    ("bad", "number", "message"),
    [
        ('{"suite": "gsm', 2, "not JSON"),
        ("[1, 2]", 2, "generation's JSON object"),
        (json.dumps(line("MTP (3)", rounds=None)), 2, "no rounds"),
        (json.dumps({"method": PLAIN}), 2, "no suite, mode, temperature"),
        (json.dumps(line(PLAIN, seconds=0.0)), 2, "10 new tokens in 0.0 seconds"),
        (json.dumps(line(PLAIN, new_tokens=0)), 2, "0 new tokens"),
    ],
)
def test_a_bad_line_is_named(tmp_path, bad, number, message):
    path = tmp_path / "r"
    path.write_text("\n".join([json.dumps(settings()), bad, json.dumps(line(PLAIN))]))
    with pytest.raises(ValueError, match=rf"r, line {number}: .*{message}"):
        load(path)


def test_settings_come_first(tmp_path):
    path = tmp_path / "r"
    path.write_text(json.dumps(line(PLAIN)) + "\n" + json.dumps(settings()))
    with pytest.raises(ValueError, match="line 1: expected the settings"):
        load(path)
    path.write_text("")
    with pytest.raises(ValueError, match="no settings"):
        load(path)


def test_nothing_to_compare(tmp_path):
    with pytest.raises(ValueError, match="None of the 2 generations"):
        summarize(load(written(tmp_path / "r", [line(PLAIN, 0), line("MTP (3)", 1)])))
    lines = [line(PLAIN, suite="a"), line("MTP (3)", suite="a"), line(PLAIN, suite="b"), line("MTP (6)", suite="b")]
    with pytest.raises(ValueError, match="No suite has every method"):
        pool(load(written(tmp_path / "r", lines)))


@pytest.mark.parametrize("seed", range(6))
def test_only_prompts_that_all_methods_have_count(tmp_path, seed):
    """A killed run: the last suite has any of the lines it should have."""
    rng, methods = random.Random(seed), METHODS[:3]
    lines = random_lines(seed, suites=SUITES[:2], methods=methods, temperatures=(0.0,), prompts=6)
    kept = [one for one in lines if one["suite"] == "gsm8k" or rng.random() < 0.8]
    results = load(written(tmp_path / "r", kept))
    have = {}
    for one in kept:
        have.setdefault((one["suite"], one["prompt"], one["turn"]), set()).add(one["method"])
    rows = summarize(results)
    for row in rows:
        common = [key for key, names in have.items() if key[0] == row.suite and names == {PLAIN, *methods}]
        by_key = {(one["suite"], one["prompt"], one["turn"]): one for one in kept if one["method"] == row.method}
        plain = {(one["suite"], one["prompt"], one["turn"]): one for one in kept if one["method"] == PLAIN}
        check_row(row, [by_key[key] for key in common], [plain[key] for key in common])
    counted = sum(row.generations for row in rows) + sum(row.generations for row in rows if row.method == methods[0])
    text = markdown(results, rows, pool(results))
    assert ("Left out" in text) == (counted < len(kept))
    assert counted == len(kept) or f": {len(kept) - counted} generations." in text


def test_a_method_that_has_not_begun_a_suite_keeps_it_out_of_the_average(tmp_path):
    lines = random_lines(1, suites=["gsm8k", "mbpp"], methods=METHODS[:2], temperatures=(0.0,))
    lines = [one for one in lines if (one["suite"], one["method"]) != ("mbpp", "MTP (6)")]
    results = load(written(tmp_path / "r", lines))
    rows = summarize(results)
    assert [(row.suite, row.method) for row in rows] == [
        ("gsm8k", "MTP (3)"),
        ("gsm8k", "MTP (6)"),
        ("mbpp", "MTP (3)"),
    ]
    assert averages(rows) == {
        ("non-think", 0.0, row.method): (pytest.approx(row.speedup), pytest.approx(row.tau)) for row in rows[:2]
    }
    assert [row.generations for row in pool(results)] == [3, 3]
    table = tables(markdown(results, rows, pool(results)))[0]
    assert table[3][0] == "MTP (6)" and table[3][2] == "– / –"


def test_a_repeated_generation_replaces_the_earlier(tmp_path):
    lines = [line(PLAIN), line("MTP (3)"), line("MTP (3)", seconds=0.5)]
    (row,) = summarize(load(written(tmp_path / "r", lines)))
    assert (row.generations, row.speedup) == (1, 2)


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


def tables(text):
    """The pipe tables of a Markdown text, each a list of rows of cells, without the line of dashes."""
    found, last = [], ""
    for text_line in text.splitlines():
        if text_line.startswith("|"):
            found += [] if last.startswith("|") else [[]]
            found[-1].append([cell.strip() for cell in text_line.strip("|").split(" | ")])
        last = text_line
    return [[row for row in table if not row[0].startswith("---")] for table in found]


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
    for heat, body in ((0.0, table[2:8]), (1.0, table[9:])):
        means = averages(rows)
        for column, suite in enumerate([*SUITES, "new-suite", None], start=1):
            pairs = [
                means["non-think", heat, method] if suite is None else next(
                    (row.speedup, row.tau)
                    for row in rows
                    if (row.mode, row.temperature, row.suite, row.method) == ("non-think", heat, suite, method)
                )
                for method in METHODS
            ]  # fmt: skip
            best = [max(round(pair[i], 2) for pair in pairs) for i in range(2)]
            for cell, pair in zip((row[column] for row in body), pairs):
                texts = [f"{pair[0]:.2f}×", f"{pair[1]:.2f}"]
                bold = [f"**{t}**" if round(v, 2) == b else t for t, v, b in zip(texts, pair, best)]
                assert cell == " / ".join(bold)
    assert "MATH: GSM8K (3), MATH-500 (3), AIME25 (3); CODE: HumanEval (3)" in text and "Other: new-suite (3)" in text


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
        "MTP (3)", "2.00×", "2.00 (2.00 to 2.00)", "3.00", "2.00", "33.33", "200.00", "12.5 %", "1.29×", "0.67", "3.00",
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


# Pictures


def texts(figure):
    """Every text that is drawn, with its box in pixels."""
    figure.draw_without_rendering()
    renderer = figure.canvas.get_renderer()
    found = [*figure.texts, *(text for legend in figure.legends for text in legend.get_texts())]
    for axes in figure.axes:
        found += [axes.title, axes.xaxis.label, axes.yaxis.label, *axes.texts]
        for axis in (axes.xaxis, axes.yaxis):
            low, high = axis.get_view_interval()
            found += [tick.label1 for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]
    plain = type(figure.axes[0].title)  # an annotation's own extent includes its line
    return [(text.get_text(), plain.get_window_extent(text, renderer)) for text in found if text.get_text()]


def realistic(seed, methods=METHODS, suites=SUITES, **grid):
    """Lines whose speedups follow their tau, so that points crowd as they do in a real run."""
    rng = random.Random(seed)
    lines = random_lines(seed, methods=methods, suites=suites, **grid)
    for one in lines:
        one["seconds"] = one["new_tokens"] * rng.uniform(0.95, 1.05)
        if one["method"] == PLAIN:
            continue
        drafts = int(one["method"].split("(")[1].split(")")[0])
        share = 0.45 + 0.06 * METHODS.index(one["method"]) - 0.02 * SUITES.index(one["suite"])
        one["accepted"] = [next((n for n in range(drafts) if rng.random() > share), drafts) for _ in range(40)]
        one |= dict(emitted=[n + 1 for n in one["accepted"]], rounds=40, draft_positions=drafts)
        one["seconds"] *= (1.5 + 0.05 * drafts) / (sum(one["emitted"]) / 40)
    return lines


@pytest.mark.parametrize(
    ("seed", "grid"),
    [
        (0, {}),
        (1, {"modes": ("non-think", "think-high")}),
        (2, {"temperatures": (0.0,)}),
        (3, {"temperatures": (1.0,), "methods": METHODS[:1], "suites": SUITES[:1]}),
        (4, {"modes": ("think-high",), "methods": METHODS[3:], "suites": SUITES[2:4]}),
    ],
)
def test_texts_are_inside_and_apart(tmp_path, seed, grid):
    results = load(written(tmp_path / "r", realistic(seed, **grid)))
    rows, methods = summarize(results), grid.get("methods", METHODS)
    panels = len(grid.get("modes", [0])) * len(grid.get("temperatures", [0, 1]))
    for figure, times in ((acceptance_figure(pool(results)), 1), (speedup_figure(rows), panels)):
        assert len(figure.axes) == panels
        drawn = texts(figure)
        names = [text for text, _ in drawn if text in METHODS]
        assert sorted(names) == sorted(methods * times)
        for text, box in drawn:
            assert figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1, text
            assert figure.bbox.y0 <= box.y0 and box.y1 <= figure.bbox.y1, text
        for (one, box), (other, other_box) in combinations(drawn, 2):
            assert not box.overlaps(other_box), (one, other)


def test_pictures_show_the_figures(tmp_path):
    results = load(written(tmp_path / "r", realistic(0)))
    rows, pooled = summarize(results), pool(results)
    for axes, heat in zip(acceptance_figure(pooled).axes, (0.0, 1.0)):
        drawn = [list(curve.get_ydata()) for curve in axes.lines]
        assert drawn == [row.acceptance for row in pooled if row.temperature == heat]
        assert (
            len({curve.get_color() for curve in axes.lines}) == len({curve.get_marker() for curve in axes.lines}) == 6
        )
    for axes, heat in zip(speedup_figure(rows).axes, (0.0, 1.0)):
        points = {tuple(curve.get_xydata()[0]) for curve in axes.lines if len(curve.get_xydata()) == 1}
        means = {(tau, speedup) for key, (speedup, tau) in averages(rows).items() if key[1] == heat}
        assert points == means | {(row.tau, row.speedup) for row in rows if row.temperature == heat}
        for curve in axes.lines:
            if len(curve.get_xydata()) == 2:  # from the origin, with the slope that is written at its end
                assert tuple(curve.get_xydata()[0]) == (0, 0)


def test_every_method_has_its_own_colour_and_marker(tmp_path):
    methods = [f"Method {i} (6)" for i in range(20)]
    lines = [line(method) for method in [PLAIN, *methods]]
    pooled = pool(load(written(tmp_path / "r", lines, settings([PLAIN, *methods]))))
    for axes in acceptance_figure(pooled).axes:
        assert len({(curve.get_color(), curve.get_marker()) for curve in axes.lines}) == len(methods)


def test_report_is_written_whole(tmp_path):
    write_report(written(tmp_path / "r", realistic(0, modes=("non-think",))), tmp_path / "new" / "folder")
    files = {path.name for path in (tmp_path / "new" / "folder").iterdir()}
    assert files == {"report.md", "summary.csv", "acceptance.png", "speedup_tau.png"}
    for name in ("acceptance.png", "speedup_tau.png"):
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
    assert "takes the place of: 1." in text and "4.00×" in text
    results = load(written(tmp_path / "r.jsonl", lines[:2], settings(["MTP (3)"])))
    assert "takes the place" not in markdown(results, summarize(results), pool(results))
