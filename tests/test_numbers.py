"""Measured numbers of the pages are those of the committed results.

A table is traced row by row: every number of a row, in its order, as the results have it at as many decimals. A
sentence is written here with gaps, which the results fill; the page must have it so. What looks measured and is
neither is a failure.
"""

import csv
import json
import math
import re
from collections import defaultdict
from functools import cache

import pytest

from .conftest import MODELS

ROOT = MODELS.parent.parent
RESULTS = ROOT / "examples" / "results"
V4 = "tiny-deepseek-v4"
PAGES = {page.stem: page.read_text() for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]}
NUMBER = re.compile(r"(?<![\w.])\d+(?:,\d{3})*(?:\.\d+)?(?!\w)")
MEASURED = re.compile(  # what a sentence has to be traced for
    r"\d\.\d\d×|\d\.\d\d? times|\d\.\d\d tokens|\d %(?! interval)|\d (?:ms|µs)\b|\btau (?:of |was )?\d"
)


@cache
def averages(folder: str) -> dict:
    """Of a benchmark, by method and temperature: tau and speedup as the report's Average has them, unweighted over
    suites, milliseconds over all rounds."""
    found = defaultdict(lambda: defaultdict(list))
    with (RESULTS / folder / "summary.csv").open() as file:
        for row in csv.DictReader(file):
            of, rounds = found[row["method"], float(row["temperature"])], int(row["rounds"])
            for name in ("tau", "speedup", "draft_ms", "verify_ms"):
                of[name].append((float(row[name]), rounds if name.endswith("ms") else 1))
    return {
        key: {name: sum(v * w for v, w in all_) / sum(w for _, w in all_) for name, all_ in of.items()}
        for key, of in found.items()
    }


def figures(folder: str, method: str, temperature: float, *names: str) -> list[float]:
    return [averages(f"{V4}/{folder}")[method, temperature][name] for name in names]


def ratio(folder: str, method: str, other: str, temperature: float, name: str) -> float:
    return figures(folder, method, temperature, name)[0] / figures(folder, other, temperature, name)[0]


def lead(folder: str, method: str, other: str, temperature: int) -> list[str]:
    """By how much the fastest is ahead of another method, of the report: speedup and tau, each with its interval."""
    report = (RESULTS / V4 / folder / "report.md").read_text()
    (line,) = re.findall(
        rf"^\| {re.escape(f'{method} over {other} | {temperature} |')} (.*) \|$", report, re.MULTILINE
    )
    return re.findall(r"[+-]\d\.\d\d", line)


@cache
def served(temperature: int) -> dict:
    """Of a stream, by policy and part: tau, tokens per second, tau of the last 50 requests."""
    path = RESULTS / V4 / "adaptation" / f"temperature-{temperature}" / "results.json"
    found = {}
    for policy, requests in json.loads(path.read_text())["served"].items():
        for part in {request["part"] for request in requests}:
            of = [request for request in requests if request["part"] == part]
            tau, late = (sum(r["emitted"] for r in some) / sum(r["rounds"] for r in some) for some in (of, of[-50:]))
            found[policy, part] = tau, sum(r["tokens"] for r in of) / sum(r["seconds"] for r in of), late
    return found


def faster(temperature: int) -> float:
    part = "tuned:gsm8k"
    return served(temperature)["bandit", part][1] / served(temperature)["never", part][1]


# Tables: the page, how the table begins, and of a row's label its numbers.

TREES = {
    "chain of 8": "State head (8)",
    **{f"{nodes} nodes": f"State head (8, {nodes} nodes)" for nodes in (8, 16, 32, 64)},
    "MTP tuned, chain of 6": "MTP tuned (6)",
    "MTP tuned, 32 nodes": "MTP tuned (6, 32 nodes)",
    "blind, 52b9ed6, 32 nodes": "Blind, 52b9ed6 (6, 32 nodes)",
}
ONE_SIZE = {
    **{f"SpecBlock, chain of {drafts}": f"SpecBlock ({drafts})" for drafts in (4, 8)},
    **{f"SpecBlock, {nodes} nodes": f"SpecBlock (8, {nodes} nodes)" for nodes in (16, 60)},
    **{f"EAGLE-3, chain of {drafts}": f"EAGLE-3 ({drafts})" for drafts in (4, 7)},
    **{f"EAGLE-3, {nodes} nodes": f"EAGLE-3 (7, {nodes} nodes)" for nodes in (16, 60)},
    "state head, chain of 6": "State head (6)",
    "state head, 16 nodes": "State head (6, 16 nodes)",
}
AUTO = {
    "state head, 4 drafts": "State head (4)",
    "state head, 6 drafts": "State head (6)",
    "state head, 8 drafts": "State head (8)",
    'state head, `"auto"`': "State head (auto)",
    "untrained, 6 drafts": "Untrained (6)",
    'untrained, `"auto"`': "Untrained (auto)",
}
TELLS = {
    "recent average": "recent average",
    "the confidence head, as calibrated": "confidence head",
    "counted by the best token's probability": "best token's probability, counted",
    "linear least squares on all that is known": "linear least squares",
    "ASLM on the same, 8 neighbours": "ASLM, 8 neighbours",
}
POLICIES = {"no adaptation": "never", "always": "always", "where it pays": "bandit"}


def of_trees(label):
    names = ("tau", "speedup", "draft_ms", "verify_ms")
    return [value for at in (0.0, 1.0) for value in figures("trees", TREES[label], at, *names)]


def of_rules(label):
    found = json.loads((RESULTS / V4 / "verification" / "results.json").read_text())["results"][label]
    down, up = found["judged"].values()
    alone, *drafted = (found["tokens"][way] / found["seconds"][way] for way in found["tokens"])
    slow, fast = (rate / alone for rate in drafted)
    return [down, up, up / down, slow, fast, fast / slow]


def of_one_size(label):
    values = []
    for target in (V4, "tiny-qwen3"):
        greedy, drawn = (averages(f"{target}/specblock/temperature-{at}")[ONE_SIZE[label], at] for at in (0, 1))
        values += [greedy["tau"], greedy["speedup"], drawn["tau"], drawn["speedup"]]
        values += [greedy["draft_ms"], greedy["verify_ms"]]
    return values


def of_ablation(label):
    found = averages("tiny-qwen3/specblock/ablation")
    return [found[f"{label} ({shape})", at]["tau"] for shape in ("8", "8, 60 nodes") for at in (0, 1)]


def of_auto(label):
    return [v for at in (0, 1) for v in figures(f"auto/temperature-{at}", AUTO[label], at, "tau", "speedup")]


def of_what_tells(label):
    found = json.loads((RESULTS / V4 / "survival" / "figures.json").read_text())["figures"]
    names = ("Brier score", "AUC", "microseconds a round")
    return [found[at][TELLS[label]][name] for at in "01" for name in names]


def of_the_stream(label):
    of = {part: served(0)[POLICIES[label], part] for part in ("gsm8k", "mbpp", "tuned:gsm8k")}
    return [value for part in of.values() for value in part[:2]] + [of["tuned:gsm8k"][2]]


def of_reducers(*label):
    layers = {"the pre-collapse residual": "-1", "1 and 3": "1,3", "1, 3 and the pre-collapse residual": "1,3,-1"}
    best = defaultdict(float)
    with (RESULTS / V4 / "reducers.csv").open() as file:
        for row in csv.DictReader(file):
            if (row["layers"], float(row["kl_weight"])) == (layers[label[0]], float(label[1])):
                best[row["reducer"]] = max(best[row["reducer"]], float(row["teacher_forced_tau"]))
    return [best[name] for name in ("hc_gate", "fc", "hybrid", "stream_mean")]


def of_candidates(label):
    count = 0 if label.startswith("all") else int(label)
    with (RESULTS / V4 / "candidates" / "candidates.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if int(row["candidates"]) == count]
    return [float(row[name]) for row in rows for name in ("teacher_forced_tau", "expected_tau")]


def of_loss(label):
    """Peak memory and CPU seconds, each with its ratio."""
    names = {
        "all logits at once": "unchunked",
        "chunks of 256 draft positions (the default)": "chunks 256",
        "the same with total variation at every position": "chunks 256 + TV",
        "and a head's table": "chunks 256 + TV, table",
    }
    report = (RESULTS / "loss" / "report.md").read_text().splitlines()
    (row,) = (cells(line) for line in report if line.startswith(f"| {names[label]} |"))
    return [float(row[column]) for column in (1, 2, 6, 7)]


def of_throughput(label):
    report = (RESULTS / V4 / "training" / "report.md").read_text().splitlines()
    (row,) = (line for line in report if line.startswith(f"| {label} |"))
    return [float(number.replace(",", "")) for number in NUMBER.findall(" ".join(cells(row)[1:]))]


CHOICES = {
    "exact KL teacher, equal position weights, the target's own answers, bfloat16 cache": "exact KL teacher",
    "no KL (`--kl_weight 0`)": "no KL",
    "mean-pooled KL teacher, the paper's (`--kl_teacher mean_pool`)": "mean-pooled KL teacher",
    "decayed position weights (`--loss_decay 4`)": "decayed position weights",
    "the dataset's original answers": "original answers",
    "float8 cache (`--feature_dtype float8`)": "float8 cache",
    "online features": "online features",
}


def of_choices(label):
    report = (RESULTS / V4 / "choices" / "report.md").read_text().splitlines()
    (row,) = (cells(line) for line in report if line.startswith(f"| {CHOICES[label]}"))
    return [float(value) for value in row[1:3]]


def of_heads(head, loss):
    with (RESULTS / V4 / "heads-and-losses" / "heads.csv").open() as file:
        found = {(row["reducer"], row["head"], row["loss"]): row for row in csv.DictReader(file)}
    rows = [found[reducer, head.strip("`"), loss.strip("`")] for reducer in ("hc_gate", "hybrid")]
    return [float(row[name]) for row in rows for name in ("teacher_forced_tau", "expected_tau")]


def of_seeds(head, loss, seed):
    report = (RESULTS / V4 / "heads-and-losses" / "vanilla-and-seeds" / "report.md").read_text().splitlines()
    found = {tuple(row[:4]): row for row in map(cells, report) if len(row) == 7}
    of = (head.strip("`"), loss.strip("`"), seed)
    keys = [(reducer, *of) for reducer in ("fc", "hc_gate", "hybrid")]
    rows = [found[key] for key in keys if key in found]
    return [float(value) for row in rows for value in row[5:]]


def of_swept(label):
    reducer, head = label.replace("`", "").split(", ")
    name = {"fc": "Vanilla", "hc_gate": "Gate", "hybrid": "Hybrid"}[reducer] + (
        "" if head == "no head" else f" + {head}"
    )
    found = [
        averages(f"{V4}/heads-and-losses/swept/temperature-{at}")[f"{name} ({n})", at] for at in (0, 1) for n in (3, 6)
    ]
    return [of[what] for of in found for what in ("tau", "speedup")]


@cache
def rows_and_taus():
    """Of the curve over training rows: rows, tau at temperature 0 and at temperature 1."""
    report = (RESULTS / V4 / "rows" / "report.md").read_text()
    found = re.findall(r"^\| ([\d,]+) \| (\d\.\d\d) \| (\d\.\d\d) \|$", report, re.MULTILINE)
    return {rows: (float(greedy), float(drawn)) for rows, greedy, drawn in found}


def of_rows(label):
    return list(rows_and_taus()[label])


def with_more_rows():
    """How the gain of four times the rows shrinks, and where tau would end with 50,000 and 500,000 rows."""
    taus = [greedy for greedy, _ in rows_and_taus().values()]
    before, last = taus[-2] - taus[-3], taus[-1] - taus[-2]
    shrinks = round(last / before, 1)
    rest = last * shrinks / (1 - shrinks)
    return shrinks, *(taus[-1] + rest * (1 - shrinks ** math.log(rows / 6364, 4)) for rows in (50_000, 500_000))


TRACED = [
    ("training", "| rows | tau, T = 0 | expected", of_rows),
    ("trees", "| | tau, T = 0 | speedup", of_trees),
    ("trees", "| drafts | tau, from the anchor", of_rules),
    ("drafters", "| | V4, T = 0 | T = 1 | ms", of_one_size),
    ("drafters", "| | chain of 8, T = 0", of_ablation),
    ("choosing-drafts", "| | tau / speedup, T = 0", of_auto),
    ("choosing-drafts", "| | Brier score, T = 0", of_what_tells),
    ("adapting", "| | tau / tokens per second, math", of_the_stream),
    ("benchmarks", "| layers read | KL weight", of_reducers),
    ("drafters", "| candidates | weight 0", of_candidates),
    ("training", "| loss | peak memory, MiB", of_loss),
    ("training", "| features | tokens/s", of_throughput),
    ("training", "| training | tau | teacher-forced |", of_choices),
    ("benchmarks", "| head | loss | the paper's gate", of_heads),
    ("benchmarks", "| head | loss | seed", of_seeds),
    ("benchmarks", "| reducer, head | T = 0, 3 drafts", of_swept),
]
COPIED = {"heads": 0, ".": 1}  # of benchmarks.md, the tables of these reports


def tables(page: str) -> list[list[str]]:
    return [found.splitlines() for found in re.findall(r"(?:^\|.*\n)+", PAGES[page], re.MULTILINE)]


def cells(row: str) -> list[str]:
    return [cell.strip().replace("*", "") for cell in re.split(r"(?<!\\)\|", row)[1:-1]]


def says(shown: str, value: float) -> bool:
    decimals = len(shown.partition(".")[2])
    return abs(float(shown.replace(",", "")) - value) <= 0.5 * 10**-decimals + 1e-9


@pytest.mark.parametrize(("page", "begins", "numbers"), TRACED, ids=lambda value: getattr(value, "__name__", None))
def test_tables_are_the_results(page, begins, numbers):
    (table,) = [table for table in tables(page) if table[0].startswith(begins)]
    labels = numbers.__code__.co_argcount or 2  # of_reducers: the layers and the weight
    assert len(table) > 4
    for row in table[2:]:
        label, shown = cells(row)[:labels], NUMBER.findall(" ".join(cells(row)[labels:]).replace("×", ""))
        expected = numbers(*label)
        assert len(shown) == len(expected), row
        wrong = [(have, value) for have, value in zip(shown, expected) if not says(have, value)]
        assert not wrong, (row, wrong)


@pytest.mark.parametrize("report", COPIED)
def test_tables_of_benchmarks_are_the_reports(report):
    table = [table for table in tables("benchmarks") if table[0].startswith("| Method |")][COPIED[report]]
    rows = (RESULTS / V4 / report / "report.md").read_text().splitlines()
    start = rows.index(table[0])
    assert len(table) > 20
    assert table == rows[start : start + len(table)] and not rows[start + len(table)].startswith("|")


# Tables whose rows stand in a report as they are.
ROW_BY_ROW = [
    ("serving", "| requests at a time |", "tiny-qwen3/vllm/report.md"),
    ("benchmarks", "| batch | transformers, deepseek_v4 |", f"{V4}/batches/report.md"),
    ("benchmarks", "| batch | transformers, qwen3 |", "tiny-qwen3/batches/report.md"),
    ("tools", "| V4, batches of |", f"{V4}/lm-eval/report.md"),
    ("tools", "| Qwen3, batches of |", "tiny-qwen3/lm-eval/report.md"),
    ("tools", "| Qwen3, rollouts a step |", "tiny-qwen3/grpo/report.md"),
    ("tools", "| V4, rollouts a step |", f"{V4}/grpo/report.md"),
]


@pytest.mark.parametrize(("page", "begins", "report"), ROW_BY_ROW)
def test_rows_are_the_reports(page, begins, report):
    (table,) = [table for table in tables(page) if table[0].startswith(begins)]
    rows = (RESULTS / report).read_text().splitlines()
    start = rows.index(table[2])
    assert len(table) > 3 and table[2:] == rows[start : start + len(table) - 2]


def test_no_table_is_left():
    known = [(page, begins) for page, begins, _ in TRACED + ROW_BY_ROW] + [("benchmarks", "| Method |")]
    for page in PAGES.keys() - {"targets"}:  # whose decimals are versions of transformers
        for table in tables(page):
            if any(re.search(r"\d\.\d\d|\d×", cell) for row in table[2:] for cell in cells(row)):
                assert any(page == one and table[0].startswith(begins) for one, begins in known), (page, table[0])


# Sentences: the page, the sentence with gaps, and what the results say.

HEAD, BLIND, MTP_TUNED = "State head (8)", "Blind, 52b9ed6 (6)", "MTP tuned (6)"
PAPER, WITH_HEAD = "Paper, 1500 steps (6)", "Paper + state head, 1500 steps (6)"
SEED_1 = "HyperDFlash hybrid, seed 1 (6)", "Vanilla DFlash, seed 1 (6)"
HYBRID, GATE, VANILLA = "HyperDFlash hybrid (6)", "HyperDFlash (6)", "Vanilla DFlash (6)"
BOTH = ("speedup", "tau")


def of(folder, *methods, temperature=0):
    return [value for method in methods for value in figures(folder, method, temperature, *BOTH)]


def speeds(folder, *methods, temperature=0):
    return [figures(folder, method, temperature, "speedup")[0] for method in methods]


def over_seeds(method):
    one, other = of(".", f"{method} (6)"), of("seed-1", f"{method}, seed 1 (6)")
    return [(a + b) / 2 for a, b in zip(one, other)]


def cheaper():
    """What SpecBlock takes to draft, in % of EAGLE-3: the least and the most of both targets and sizes."""
    shares = []
    for target in (V4, "tiny-qwen3"):
        all_ = averages(f"{target}/specblock/temperature-0")
        for nodes in (16, 60):
            ours, theirs = (all_[f"{name}, {nodes} nodes)", 0]["draft_ms"] for name in ("SpecBlock (8", "EAGLE-3 (7"))
            shares.append(100 * ours / theirs)
    return [min(shares), max(shares)]


def own_time():
    """Neither the target's nor the drafter's, in % of a round: the least and the most."""
    with (RESULTS / V4 / "summary.csv").open() as file:
        shares = [100 * float(row["overhead"]) for row in csv.DictReader(file)]
    return [min(shares), max(shares)]


def a_node(name):
    """Milliseconds of each node of a tree of 64 beyond the first 8: the least and the most of both temperatures."""
    trees = [f"State head (8, {nodes} nodes)" for nodes in (8, 64)]
    few, many = ([figures("trees", tree, at, name)[0] for at in (0, 1)] for tree in trees)
    each = [(last - first) / 56 for first, last in zip(few, many)]
    return [min(each), max(each)]


def one_look():
    """What a stream on which nothing can be gained spends on learning: seconds, their share in %, all seconds."""
    path = RESULTS / V4 / "adaptation" / "temperature-0" / "results.json"
    requests = [r for r in json.loads(path.read_text())["served"]["bandit"] if not r["part"].startswith("tuned")]
    spent, all_ = (sum(r[name] for r in requests) for name in ("cost", "seconds"))
    return [spent, len(requests), 100 * spent / all_, all_]


def calibrated():
    """That all drafts up to one are accepted, over all of them: error before and after in %, AUC after."""
    report = (RESULTS / V4 / "calibration" / "calibration.md").read_text()
    row = next(cells(line) for line in report.splitlines() if line.startswith("| all |"))
    return [float(row[6].split()[0]), float(row[7].split()[0]), float(row[9])]


def told(path, pattern):
    """What a report says in words."""
    found = re.findall(pattern, (RESULTS / path).read_text())
    assert len(found) == 1, (path, pattern, found)
    return [float(value) for value in ([found[0]] if isinstance(found[0], str) else found[0])]


TABLES = ["markov", "gated_markov", "recurrent", "selector"]


def head_shares(part, heads, candidates):
    """Of a round, in %: bytes that heads read, or time."""
    report = (RESULTS / "head-cost" / "report.md").read_text()
    (section,) = re.findall(rf"^## {part}.*?(?=^## |\Z)", report, re.MULTILINE | re.DOTALL)
    rows = [cells(line) for line in section.splitlines() if line.startswith("| ")]
    column = next(i for i, name in enumerate(rows[0]) if name in ("of its bytes", "of a round"))
    return [float(row[column].rstrip("%")) for head in heads for row in rows if row[:2] == [head, candidates]]


def of_cache():
    """What a step with the rewindable cache takes more, without recording, with it, and the stock one again, in %;
    what these hold, in KiB."""
    report = (RESULTS / V4 / "cache" / "report.md").read_text().splitlines()
    stock, again, still, recording = [cells(line) for line in report if line.startswith("| ")][1:]
    shares = [float(row[2]) for row in (still, recording, again)]
    return [*shares[:2], abs(shares[2]), *(f"{int(row[3]):,}" for row in (still, recording, stock))]


def behind():
    """By how much "auto" is slower than the best number, on average, in %: the most of both temperatures."""
    speeds_of = (
        [figures(f"auto/temperature-{at}", f"State head ({n})", at, "speedup")[0] for n in (4, 6, 8, "auto")]
        for at in (0, 1)
    )
    return max(100 * (1 - auto / max(fixed)) for *fixed, auto in speeds_of)


def greedy_texts(*folders):
    """How many texts drafters wrote at temperature 0, if all of them are the target's own."""
    lines = [line for of in folders for line in (RESULTS / of / "results.jsonl").read_text().splitlines()]
    texts = [text for text in map(json.loads, lines) if text.get("temperature") == 0]
    drafted = [text for text in texts if text["method"] != "Target only"]
    assert all(text["identical"] for text in drafted)
    return len(drafted)


SUITE_NAMES = {
    "gsm8k": "GSM8K", "math500": "MATH-500", "livecodebench": "LiveCodeBench", "mbpp": "MBPP",
    "humaneval": "HumanEval",
}  # fmt: skip


def furthest_behind(temperature):
    """The suite on which "auto" is slowest beside the best number: % behind, its name, both speeds, that number."""
    speeds_of = defaultdict(dict)
    with (RESULTS / V4 / "auto" / f"temperature-{temperature}" / "summary.csv").open() as file:
        for row in csv.DictReader(file):
            speeds_of[row["suite"]][row["method"]] = float(row["speedup"])
    found = []
    for suite, of_suite in speeds_of.items():
        auto, best = of_suite["State head (auto)"], max((of_suite[f"State head ({n})"], n) for n in (4, 6, 8))
        found.append((100 * (1 - auto / best[0]), SUITE_NAMES.get(suite, suite), auto, *best))
    return list(max(found))


SENTENCES = [
    ("benchmarks", "All {:,} greedy texts of this run are the target's own", [greedy_texts(f"{V4}/heads")]),
    ("benchmarks", "All {:,} greedy texts are the target's own, token for token, and so are", [greedy_texts(V4)]),
    ("trees", "{:,} greedy texts of which none differs", [greedy_texts(f"{V4}/trees")]),
    ("choosing-drafts", "of {:,} greedy texts none differs", [greedy_texts(f"{V4}/auto/temperature-0")]),
    (
        "drafters",
        "of {:,} greedy texts none differs",
        [greedy_texts(*(f"{target}/specblock/temperature-0" for target in (V4, "tiny-qwen3")))],
    ),
    ("choosing-drafts", "On average over the suites it is within {:.1f} % of the best number", [behind()]),
    (
        "choosing-drafts",
        "at worst {:.0f} % behind on {} at temperature 0 ({:.2f}× against {:.2f}× with {} drafts), and {:.0f} % "
        "behind on {} at temperature 1 ({:.2f}× against {:.2f}× with {} drafts)",
        furthest_behind(0) + furthest_behind(1),
    ),
    (
        "using",
        "a step takes {:.1f} % longer without recording and {:.1f} % with it, where the stock cache measured twice "
        "differs by {:.1f} %",
        of_cache()[:3],
    ),
    ("using", "It holds {} KiB and {} KiB, the stock cache {}.", of_cache()[3:]),
    (
        "benchmarks",
        "A round drafts {:.1f} ms where the blind one drafts {:.1f}: eight steps of the head on a CPU, where the "
        "target's step takes {:.0f} ms.",
        [
            *(figures("heads", name, 0, "draft_ms")[0] for name in (HEAD, BLIND)),
            told(f"{V4}/heads/report.md", r"(?s)\A.*?target-only: [\d.]+ tokens/s, ([\d.]+) ms a step")[0],
        ],
    ),
    (
        "benchmarks",
        "Our own time, outside the target's and the drafter's forwards, is {:.0f} to {:.0f} % of a round.",
        own_time(),
    ),
    (
        "trees",
        "two drafts gain next to nothing, eight {:.0f} % more tokens a round",
        [100 * (of_rules("chain of 8")[2] - 1)],
    ),
    (
        "trees",
        "on a CPU every node costs, {:.1f} to {:.1f} ms to verify and {:.1f} to {:.1f} to draft.",
        [*a_node("verify_ms"), *a_node("draft_ms")],
    ),
    (
        "choosing-drafts",
        "its error lies between the two in {:.0f} of 24 conditions and gains {:.0f} % of what kernel ridge gains",
        told("aslm/report.md", r"ASLM k=8\*\*: between them in (\d+) of 24 .* gains (\d+)% \(median\)"),
    ),
    (
        "adapting",
        "it takes one look, {:.1f} seconds, in {} requests: {:.1f} % of these {:.0f} seconds",
        one_look(),
    ),
    ("adapting", "whenever tokens per round fall by 15 %", []),  # a setting of the bandit's
    (
        "drafters",
        "expected calibration error falls from {:.1f} to {:.1f} %; an accepted draft has the higher confidence of two "
        "with a probability of {:.2f}",
        calibrated(),
    ),
    (
        "drafters",
        "heads with a table take {:.1f} to {:.1f} % of a round of six drafts at V4-Flash's size with the whole "
        "vocabulary and at most {:.1f} % with 256 candidates; the state head takes {:.1f} % with its 1,024 "
        "candidates, and {:.0f} % without them",
        [
            *(choose(head_shares("Counted", TABLES, "all")) for choose in (min, max)),
            max(head_shares("Counted", TABLES, "256")), *head_shares("Counted", ["state"], "1024"),
            *head_shares("Counted", ["state"], "all"),
        ],
    ),
    (
        "drafters",
        "{:.1f} to {:.1f} % for tables and {:.1f} % for the state head",
        [
            *(
                choose(head_shares("Timed", TABLES[:-1], "all") + head_shares("Timed", ["selector"], "16"))
                for choose in (min, max)
            ),
            *head_shares("Timed", ["state"], "all"),
        ],
    ),
    (
        "training",
        "Each fourfold increase in rows gains {:.2f} of what the previous one gained. Were that to go on, with as "
        "many steps as here, tau at temperature 0 would be {:.2f} with 50,000 rows and {:.2f} with 500,000:",
        with_more_rows(),
    ),
    ("training", "the paper reports 3.69 tokens a round with six drafts", []),
    ("drafters", "(44 to 52 % there)", []),  # of the paper
    (
        "serving",
        "(tau {:.2f} here, {:.2f} there: vLLM counts",
        told("tiny-qwen3/vllm/report.md", r"tau ([\d.]+) in \d+ rounds, ours ([\d.]+) in"),
    ),
    (
        "README",
        "**{:.2f}×** the target's speed at temperature 0, {:.2f} tokens a round, where the target's own MTP block, "
        "tuned as long on the same text, has {:.2f}×; "
        "- **{:.2f}×** and {:.2f} at temperature 1, where drafts are [settled from the end of their "
        "path](docs/trees.md#at-temperatures-above-0): draft by draft, as elsewhere, it would be {:.2f}× and {:.2f};",
        [*of("heads", HEAD), *speeds("heads", MTP_TUNED), *(of_rules("chain of 8")[i] for i in (4, 1, 3, 0))],
    ),
    ("README", "was {:.2f} times as fast as without, updates included.", [faster(0)]),
    ("adapting", "After the change it is {:.2f} times as fast as without adaptation", [faster(0)]),
    (
        "adapting",
        "{:.2f} times as fast after the change, tau {:.2f} without and {:.2f} in the last 50 requests, where "
        "the untuned "
        "target had {:.2f}.",
        [
            faster(1), served(1)["never", "tuned:gsm8k"][0], served(1)["bandit", "tuned:gsm8k"][2],
            served(1)["never", "gsm8k"][0],
        ],
    ),
    (
        "benchmarks",
        "its tau is {:.2f} times that of the first release's drafter, and it is {:.2f} times as fast, {}× "
        "(95 % interval {} "
        "to {}); at temperature 1 tau is {:.2f} times, speed {:.2f} times, {}× ({} to {}), and {:.2f} times "
        "that of the "
        "earlier drafter with three drafts",
        [
            ratio("heads", HEAD, BLIND, 0, "tau"), ratio("heads", HEAD, BLIND, 0, "speedup"),
            *lead("heads", HEAD, BLIND, 0)[:3], ratio("heads", HEAD, BLIND, 1, "tau"),
            ratio("heads", HEAD, BLIND, 1, "speedup"), *lead("heads", HEAD, BLIND, 1)[:3],
            ratio("heads", HEAD, "Blind, 52b9ed6 (3)", 1, "speedup"),
        ],
    ),
    (
        "benchmarks",
        "as ours with six ({:.2f} and {:.2f} at temperature 0), and fewer than ours with eight ({:.2f}; "
        "{:.2f} and {:.2f} at "
        "temperature 1), by six passes where ours takes one pass and a small step a draft: {:.2f}× and {:.2f}×.",
        [
            *(figures("heads", name, 0, "tau")[0] for name in (MTP_TUNED, "State head (6)", HEAD)),
            *(figures("heads", name, 1, "tau")[0] for name in (MTP_TUNED, HEAD)), *speeds("heads", MTP_TUNED, HEAD),
        ],
    ),
    (
        "benchmarks",
        "its tau is {:.2f} times as large at temperature 0 and {:.2f} times at temperature 1, and it is "
        "{:.2f} and {:.2f} "
        "times as fast",
        [ratio("heads", WITH_HEAD, PAPER, at, name) for name in ("tau", "speedup") for at in (0, 1)],
    ),
    (
        "benchmarks",
        "a block drafter is {:.2f} to {:.2f} times as fast as the target alone, its own MTP block {:.2f} "
        "times, the same "
        "tuned on its answers {:.2f} times. The hybrid was the fastest here, though by less than these "
        "prompts can tell "
        "from the other three ({:.2f}× ahead of vanilla DFlash, 95 % interval {} to {}).",
        [
            *(choose(speeds(".", HYBRID, GATE, VANILLA, "HyperDFlash on 1, 3 (6)")) for choose in (min, max)),
            *speeds(".", "MTP (3)", MTP_TUNED), float(lead(".", HYBRID, VANILLA, 0)[0]),
            *lead(".", HYBRID, VANILLA, 0)[1:3],
        ],
    ),
    (
        "benchmarks",
        "Tau of the paper's gate is {:.2f} times that of MTP (3) and {:.2f} times that of MTP (6) (the "
        "paper: 1.26 and 1.20). "
        "Tuned MTP is another matter, which the paper does not have: {:.2f} times with three drafts (the "
        "hybrid {:.2f}), "
        "{:.2f} times with six ({:.2f}).",
        [
            ratio(".", GATE, "MTP (3)", 0, "tau"), ratio(".", GATE, "MTP (6)", 0, "tau"),
            *(ratio(".", name, f"MTP tuned ({n})", 0, "tau") for n in (3, 6) for name in (GATE, HYBRID)),
        ],
    ),
    (
        "benchmarks",
        "the hybrid has {:.2f}× / {:.2f} and vanilla DFlash {:.2f}× / {:.2f}, {:.2f}× ({} to {}) and {:.2f} "
        "tokens ({} to {}) "
        "behind ([figures](../examples/results/tiny-deepseek-v4/seed-1/report.md)); over both seeds {:.2f}× "
        "/ {:.2f} and "
        "{:.2f}× / {:.2f}.",
        [
            *of("seed-1", *SEED_1),
            *(
                float(text) if i % 3 == 0 else text
                for i, text in enumerate(lead("seed-1", *SEED_1, 0))
            ),
            *over_seeds("HyperDFlash hybrid"), *over_seeds("Vanilla DFlash"),
        ],
    ),
    (
        "benchmarks",
        "With three each the hybrid has {:.2f}× / {:.2f}, the paper's gate {:.2f}× / {:.2f}, vanilla DFlash "
        "{:.2f}× / {:.2f}, "
        "tuned MTP {:.2f}× / {:.2f}, MTP {:.2f}× / {:.2f} (the same prompts",
        of(
            "temperature-1-three-drafts", "HyperDFlash hybrid (3)", "HyperDFlash (3)", "Vanilla DFlash (3)",
            "MTP tuned (3)", "MTP (3)", temperature=1,
        ),
    ),
    (
        "benchmarks",
        "MTP (3) {:.2f}× / {:.2f}, MTP (6) {:.2f}× / {:.2f}, MTP tuned (3) {:.2f}× / {:.2f}, MTP tuned (6) "
        "{:.2f}× / {:.2f}, "
        "vanilla DFlash (6) {:.2f}× / {:.2f}, HyperDFlash (6) {:.2f}× / {:.2f}, on 1, 3 {:.2f}× / {:.2f}, hybrid (6) "
        "{:.2f}× / {:.2f}.",
        of(
            "think-high", "MTP (3)", "MTP (6)", "MTP tuned (3)", MTP_TUNED, VANILLA, GATE,
            "HyperDFlash on 1, 3 (6)", HYBRID,
        ),
    ),
    (
        "trees",
        "With 32 nodes tau is {:.2f} times the chain's at temperature 0 and {:.2f} times at temperature 1, "
        "with 64 nodes "
        "{:.2f} and {:.2f} times.",
        [ratio("trees", f"State head (8, {nodes} nodes)", HEAD, at, "tau") for nodes in (32, 64) for at in (0, 1)],
    ),
    (
        "trees",
        "on Qwen3-8B a round costs 1.23 tokens' bytes with any tree, so the chain's 4.96 times fewer bytes a "
        "token become "
        "6.21 with 32 nodes (T = 1: 2.52 and 3.07).",  # a model, not measured: examples/model_trees.py prints it
        [],
    ),
    ("trees", "so that 1.74 times with 8 nodes (0.87 at T = 1) is the best of these", []),  # the same
    ("drafters", "SpecBlock's drafting costs {:.0f} to {:.0f} % of EAGLE-3's with equal trees", cheaper()),
    ("index", "and seven rounds that brought 6.86 tokens each.", []),  # compared in test_docs.py
]  # fmt: skip


def prose(page: str) -> str:
    text = re.sub(r"^```.*?^```|^\|.*?$", "", PAGES[page], flags=re.MULTILINE | re.DOTALL)
    return " ".join(text.split())


@pytest.mark.parametrize("sentence", SENTENCES, ids=lambda sentence: f"{sentence[0]}-{sentence[1][:30]}")
def test_sentences_are_the_results(sentence):
    page, text, values = sentence
    assert text.count("{") == len(values)
    assert text.format(*values) in prose(page), text.format(*values)


@pytest.mark.parametrize("page", PAGES)
def test_no_sentence_is_left(page):
    left = prose(page)
    for one, text, values in SENTENCES:
        left = left.replace(text.format(*values), "") if one == page else left
    assert not MEASURED.findall(left), [left[m.start() - 60 : m.end() + 20] for m in MEASURED.finditer(left)]


def test_dates_are_the_reports():
    """Date, torch and transformers that a paragraph names are in the reports that it links."""
    told = 0
    for page, text in PAGES.items():
        folder = ROOT if page == "README" else ROOT / "docs"
        for paragraph in text.split("\n\n"):
            links = re.findall(r"\]\(([^)\s]*examples/results/[^)\s#]+\.md)", paragraph)
            said = re.findall(r"2026-\d\d-\d\d|(?:torch|transformers)\s\d\.\d+\.\d+", paragraph)
            if links and said:
                reports = "".join((folder / link).read_text() for link in links).replace(":", "")
                missing = [fact for fact in said if " ".join(fact.split()) not in reports]
                assert not missing, (page, links, missing)
                told += 1
    assert told > 5
