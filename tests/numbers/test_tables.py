"""Every table of the pages that has measured numbers is that of the committed results.

A table is traced row by row: every number of a row, in its order, as the results have it at as many decimals.
"""

import csv
import json
import re
from collections import defaultdict

import pytest

from .pages import NUMBER, PAGES, cells, says, tables
from .results import RESULTS, V4, averages, figures, rows_and_taus, rules, served

# Of a row's label, its numbers.

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
BEST = ONE_SIZE | {
    **{f"blocks of two, chain of {drafts}": f"blocks of two ({drafts})" for drafts in (2, 4, 6, 8)},
    **{f"blocks of two, {nodes} nodes": f"blocks of two (8, {nodes} nodes)" for nodes in (16, 60)},
    **{f"EAGLE-3, chain of {drafts}": f"EAGLE-3 ({drafts})" for drafts in (2, 3, 5, 6)},
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
    "by the best token's probability, a line and counts": "best token's probability, counted",
    "linear least squares on all that is known": "linear least squares",
    "ASLM on the same, 8 neighbours": "ASLM, 8 neighbours",
}
POLICIES = {"no adaptation": "never", "always": "always", "where it pays": "bandit"}


def of_trees(label):
    names = ("tau", "speedup", "draft_ms", "verify_ms")
    folder = "trees/mtp-tuned" if label.startswith("MTP") else "trees"
    return [value for at in (0.0, 1.0) for value in figures(folder, TREES[label], at, *names)]


def of_trees_of_the_dense_pair(label):
    shape = f"chain of {label[-1]} ({label[-1]})" if label.startswith("chain") else f"state head (6, {label})"
    found = [averages(f"tiny-qwen3/trees/temperature-{at}")[shape, at] for at in (0, 1)]
    return [of[name] for of in found for name in ("tau", "speedup", "draft_ms", "verify_ms")]


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


def of_ablation_on_the_v4(label):
    found = {at: averages(f"{V4}/specblock/ablation/temperature-{at}") for at in (0, 1)}
    return [found[at][f"{label} ({shape})", at]["tau"] for shape in ("8", "8, 60 nodes") for at in (0, 1)]


def of_best_settings(label):
    found = [averages(f"{V4}/specblock/small-blocks/temperature-{at}")[BEST[label], at] for at in (0, 1)]
    return [of[name] for of in found for name in ("tau", "speedup")] + [found[0]["draft_ms"], found[0]["verify_ms"]]


def of_auto(label):
    return [v for at in (0, 1) for v in figures(f"auto/temperature-{at}", AUTO[label], at, "tau", "speedup")]


def of_the_dense_pair(label):
    name = f"HyperDFlash ({label.split()[0] if label[0].isdigit() else 'auto'})"
    of = {at: averages(f"tiny-qwen3/auto/temperature-{at}")[name, at] for at in (0, 1)}
    return [of[at][value] for at in (0, 1) for value in ("tau", "speedup")]


def of_trees_that_pay(label):
    name = {"chain of 8": "8", '`"auto"`': "auto, auto nodes"}.get(label, f"8, {label}")
    method = "Untrained (auto, auto nodes)" if label.startswith("untrained") else f"State head ({name})"
    return [v for at in (0, 1) for v in figures(f"auto/trees-temperature-{at}", method, at, "tau", "speedup")]


def of_long_blocks(label):
    name = label.replace('`"auto"`', "auto").removeprefix("shipped, ").removesuffix(" drafts")
    name = f"16, {name}" if name.endswith("nodes") else name
    method = f"{'shipped' if label.startswith('shipped') else 'long blocks'} ({name})"
    return [v for at in (0, 1) for v in figures(f"auto/long-blocks/temperature-{at}", method, at, "tau", "speedup")]


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
    count = 0 if label == "all 2,048" else int(label)
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


REDUCERS = {"fc": "Vanilla", "hc_gate": "Gate", "hybrid": "Hybrid"}


def of_heads(head, loss):
    """Of each reducer, by the report's tables: with seed 0 unless the label says another."""
    loss, _, seed = loss.replace("`", "").partition(", seed ")
    report = (RESULTS / V4 / "heads-and-losses" / "report.md").read_text().splitlines()
    found = {tuple(row[:4]): row for row in map(cells, report) if len(row) == 7}
    keys = [(reducer, head.strip("`"), loss, seed or "0") for reducer in REDUCERS]
    return [float(value) for key in keys for value in found[key][5:]]


def of_swept(head, loss):
    """Of each reducer and temperature, the number of drafts that was fastest: speedup, number and tau."""
    told = []
    for at in (0, 1):
        found = averages(f"{V4}/heads-and-losses/swept/temperature-{at}")
        for reducer in REDUCERS.values():
            of = {n: found[f"{reducer}, {head.strip('`')}, {loss} ({n})", at] for n in (2, 4, 6)}
            best = max(of, key=lambda n: float(of[n]["speedup"]))
            told += [of[best]["speedup"], best, of[best]["tau"]]
    return told


def of_rows(label):
    return list(rows_and_taus()[label])


# The page, how the table begins, and of a row's label its numbers.

TRACED = [
    ("training", "| rows | tau, T = 0 | expected", of_rows),
    ("trees", "| | tau, T = 0 | speedup", of_trees),
    ("trees", "| dense pair | tau, T = 0 | speedup", of_trees_of_the_dense_pair),
    ("trees", "| drafts | tau, from the anchor", rules),
    ("drafters", "| | V4, T = 0 | T = 1 | ms", of_one_size),
    ("drafters", "| | chain of 8, T = 0 | T = 1 | 60 nodes, T = 0 | T = 1 |", of_ablation),
    ("drafters", "| V4, best settings | T = 0 | T = 1 | ms |", of_best_settings),
    ("drafters", "| V4 | chain of 8, T = 0 | T = 1 | 60 nodes, T = 0 | T = 1 |", of_ablation_on_the_v4),
    ("choosing-drafts", "| | tau / speedup, T = 0", of_auto),
    ("choosing-drafts", "| `tree_budget` | tau / speedup, T = 0", of_trees_that_pay),
    ("choosing-drafts", "| dense pair | tau / speedup, T = 0", of_the_dense_pair),
    ("choosing-drafts", "| blocks of 16 | tau / speedup, T = 0", of_long_blocks),
    ("choosing-drafts", "| | Brier score, T = 0", of_what_tells),
    (
        "adapting",
        "| | tau / tokens per second, math | code | fine-tuned target | its last 50 requests' tau |",
        of_the_stream,
    ),
    ("benchmarks", "| layers read | KL weight", of_reducers),
    ("drafters", "| candidates | weight 0 | 0.1 | 1 |", of_candidates),
    ("training", "| loss | peak memory, MiB", of_loss),
    ("training", "| features | tokens/s", of_throughput),
    ("training", "| training | tau | teacher-forced |", of_choices),
    ("benchmarks", "| head | loss | `fc` | `hc_gate`", of_heads),
    ("benchmarks", "| head | loss | T = 0, `fc` |", of_swept),
]
COPIED = {"heads": 0, ".": 1}  # of benchmarks.md, the tables of these reports


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
    ("choosing-drafts", "| V4, at most 8 drafts |", f"{V4}/auto/simulated/report.md"),
    ("choosing-drafts", "| dense pair, at most 6 |", "tiny-qwen3/auto/simulated/report.md"),
    ("serving", "| requests at a time |", "tiny-qwen3/vllm/report.md"),
    ("benchmarks", "| batch | transformers, deepseek_v4 | 4 drafts | 8 drafts |", f"{V4}/batches/report.md"),
    ("benchmarks", "| batch | transformers, qwen3 | 2 drafts | 4 drafts | 6 drafts |", "tiny-qwen3/batches/report.md"),
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


# Of a model, not measured: test_examples.py compares them with what examples/model_training.py prints.
ESTIMATED = [("training", "| DeepSeek-V4-Flash, rows |"), ("training", "| Qwen3-8B, rows |")]


def test_no_table_is_left():
    known = [(page, begins) for page, begins, _ in TRACED + ROW_BY_ROW] + [("benchmarks", "| Method |")]
    for page in PAGES.keys() - {"targets"}:  # whose decimals are versions of transformers
        for table in tables(page):
            if any(re.search(r"\d\.\d\d|\d×", cell) for row in table[2:] for cell in cells(row)):
                assert any(page == one and table[0].startswith(begins) for one, begins in known), (page, table[0])
