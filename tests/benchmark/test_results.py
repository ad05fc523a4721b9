"""Rows against naive loops over the lines, what killed and resumed runs leave behind, and the leads of the fastest
method against the averages, textbook variance, and pairs that must not differ."""

import itertools
import math
import random

import numpy as np
import pytest

from hf_hyperdflash.benchmark.report import markdown
from hf_hyperdflash.benchmark.results import averages, leads, load, pool, summarize

from ..helpers.results_files import METHODS, PLAIN, SUITES, line, random_lines, settings, tables, written

A, B = "HyperDFlash (6)", "MTP (3)"
NO_ROUNDS = dict(rounds=0, draft_positions=0, emitted=[], accepted=[])


def total(lines, name):
    return sum(one[name] for one in lines)


def quantile(values, share):
    """Linear between neighbours."""
    values, at = sorted(values), share * (len(values) - 1)
    below = int(at)
    above = min(below + 1, len(values) - 1)
    return values[below] + (at - below) * (values[above] - values[below])


def check_row(row, lines, plain):
    """Every figure of a row from the lines alone, `plain` being target-only's of the same prompts in the same
    order."""
    ratios = [a["new_tokens"] / a["seconds"] * b["seconds"] / b["new_tokens"] for a, b in zip(lines, plain)]
    rate = total(lines, "new_tokens") / total(lines, "seconds")
    plain_rate = total(plain, "new_tokens") / total(plain, "seconds")
    step = total(plain, "decode_seconds") / sum(one["new_tokens"] - 1 for one in plain)
    rounds = [(e, a) for one in lines for e, a in zip(one["emitted"], one["accepted"])]
    busy = total(lines, "draft_seconds") + total(lines, "verify_seconds")
    assert row.generations == len(lines) and row.new_tokens == total(lines, "new_tokens")
    assert row.tokens_per_second == pytest.approx(rate)
    assert row.target_tokens_per_second == pytest.approx(plain_rate)
    assert row.speedup == pytest.approx(rate / plain_rate)
    quartiles = [row.speedup_25, row.speedup_median, row.speedup_75]
    assert quartiles == pytest.approx([quantile(ratios, share) for share in (0.25, 0.5, 0.75)])
    assert row.overhead == pytest.approx(1 - busy / total(lines, "loop_seconds"))
    assert row.target_step_ms == pytest.approx(1000 * step)
    flags = [one["identical"] for one in lines]
    assert (row.checked, row.differing) == (len(flags) - flags.count(None), flags.count(False))
    for peak, of in ((row.peak_memory, lines), (row.target_peak_memory, plain)):
        known = [one["peak_memory"] for one in of if one["peak_memory"] is not None]
        assert peak == (max(known) if known else None)
    assert row.rounds == len(rounds)
    if not rounds:
        assert {row.tau, row.accepted_drafts, row.draft_ms, row.verify_ms, row.bound, row.efficiency} == {None}
        assert row.acceptance == row.conditional_acceptance == []
        return
    tau = sum(emitted for emitted, _ in rounds) / len(rounds)
    assert row.tau == pytest.approx(tau)
    assert row.accepted_drafts == pytest.approx(sum(accepted for _, accepted in rounds) / len(rounds))
    assert row.draft_ms == pytest.approx(1000 * total(lines, "draft_seconds") / len(rounds))
    assert row.verify_ms == pytest.approx(1000 * total(lines, "verify_seconds") / len(rounds))
    assert row.bound == pytest.approx(step * tau / (busy / len(rounds)))
    assert row.efficiency == pytest.approx(row.speedup / tau)
    assert len(row.acceptance) == len(row.conditional_acceptance)
    for k, (prefix, conditional) in enumerate(zip(row.acceptance, row.conditional_acceptance), start=1):
        reached = sum(accepted >= k for _, accepted in rounds)
        before = sum(accepted >= k - 1 for _, accepted in rounds)
        assert prefix == pytest.approx(reached / len(rounds))
        assert conditional == pytest.approx(reached / before if before else 0)


# Figures


@pytest.mark.parametrize(("seed", "kept"), [(0, 1.0), (1, 1.0), (2, 0.8), (3, 0.8)])
def test_rows_pools_and_averages_are_the_loops(tmp_path, seed, kept):
    """Of a killed run the last suite has any of the lines it should have: prompts count that all methods have."""
    rng, methods, suites = random.Random(seed), METHODS[:3], SUITES[:3]
    lines = random_lines(seed, modes=("think-high", "non-think"), methods=methods, suites=suites, prompts=6)
    lines = [one for one in lines if one["suite"] != suites[-1] or rng.random() < kept]
    rng.shuffle(lines)
    results = load(written(tmp_path / "r", lines))
    have = {}
    for one in lines:
        place = one["mode"], one["temperature"], one["suite"]
        have.setdefault((place, one["prompt"], one["turn"]), {})[one["method"]] = one
    common = [(key[0], of) for key, of in have.items() if len(of) == 4]

    rows, pooled, means = summarize(results), pool(results), averages(summarize(results))
    there, grid = {place for place, _ in common}, itertools.product(("non-think", "think-high"), (0.0, 1.0), suites)
    places = [(*place, method) for place in grid if place in there for method in methods]
    assert [(row.mode, row.temperature, row.suite, row.method) for row in rows] == places
    for row in rows + pooled:
        of_row = [
            of for place, of in common if place[:2] == (row.mode, row.temperature) and row.suite in ("all", place[2])
        ]  # in any order, but of both alike
        check_row(row, [of[row.method] for of in of_row], [of[PLAIN] for of in of_row])
    assert [(row.mode, row.temperature, row.method) for row in pooled] == list(means)
    for (mode, temperature, method), average in means.items():
        mine = [row for row in rows if (row.mode, row.temperature, row.method) == (mode, temperature, method)]
        assert average == pytest.approx([total(map(vars, mine), name) / len(mine) for name in ("speedup", "tau")])
    text, left = markdown(results, rows, pooled), len(lines) - 4 * len(common)
    assert ("Left out" in text) == bool(left) and (not left or f" {left} generations." in text)


def test_a_generation_without_rounds(tmp_path):
    none = {**NO_ROUNDS, "loop_seconds": 0.0, "verify_seconds": 0, "draft_seconds": 0}
    lines = [line(method, i, **(none if method != PLAIN else {})) for i in range(2) for method in (PLAIN, B)]
    (row,) = summarize(load(written(tmp_path / "r", lines)))
    figures = {row.tau, row.accepted_drafts, row.draft_ms, row.verify_ms, row.overhead, row.bound, row.efficiency}
    assert row.speedup == 1 and row.acceptance == [] and figures == {None}
    lines[1] = line(B, 0)  # beside one with rounds it adds tokens and time, no rounds
    (row,) = summarize(load(written(tmp_path / "r", lines)))
    assert (row.rounds, row.tau, row.new_tokens) == (3, 3.0, 20)
    assert load(written(tmp_path / "r", [line(PLAIN, new_tokens=1)])).generations[0]["new_tokens"] == 1


# Killed and resumed runs


@pytest.mark.parametrize("half", [b'{"suite": "gsm8k", "met', '{"suite": "gsm8k", "command": "\u00d7'.encode()[:-1]])
def test_half_a_last_line_is_left_out_and_a_later_line_replaces_an_earlier(tmp_path, half):
    path = written(tmp_path / "r", [line(PLAIN), line(B), line(B, seconds=0.5)])
    path.write_bytes(path.read_bytes() + half)
    results = load(path)
    (row,) = summarize(results)
    assert (len(results.generations), results.replaced, row.generations, row.speedup) == (2, 1, 1, 2)


def test_a_method_that_has_not_begun_a_suite_keeps_it_out_of_the_average(tmp_path):
    lines = random_lines(1, suites=["gsm8k", "mbpp"], methods=METHODS[:2], temperatures=(0.0,))
    lines = [one for one in lines if (one["suite"], one["method"]) != ("mbpp", "MTP (6)")]
    results = load(written(tmp_path / "r", lines))
    rows = summarize(results)
    assert [(row.suite, row.method) for row in rows] == [("gsm8k", B), ("gsm8k", "MTP (6)"), ("mbpp", B)]
    assert averages(rows) == {
        ("non-think", 0.0, row.method): (pytest.approx(row.speedup), pytest.approx(row.tau)) for row in rows[:2]
    }
    assert [row.generations for row in pool(results)] == [3, 3]
    (lead,) = leads(results)
    assert lead.speedup.value == pytest.approx(abs(rows[0].speedup - rows[1].speedup))
    table = tables(markdown(results, rows, pool(results)))[0]
    assert table[3][0] == "MTP (6)" and table[3][2] == "– / –"


# Leads


def loaded(path, lines, methods=(A, B)):
    return load(written(path / "results.jsonl", lines, settings(methods=list(methods))))


def test_values_are_differences_of_the_averages(tmp_path):
    methods = [A, B, "Vanilla DFlash (6)"]
    results = loaded(tmp_path, random_lines(3, methods=methods, prompts=6), methods)
    means, found = averages(summarize(results)), leads(results)
    assert [(lead.mode, lead.temperature) for lead in found] == [("non-think", 0.0)] * 2 + [("non-think", 1.0)] * 2
    for lead in found:
        ahead, other = (means[lead.mode, lead.temperature, name] for name in (lead.fastest, lead.method))
        assert ahead[0] == max(means[lead.mode, lead.temperature, name][0] for name in methods)
        assert lead.speedup.value == pytest.approx(ahead[0] - other[0])
        assert lead.tau.value == pytest.approx(ahead[1] - other[1])
        assert lead.speedup.low <= lead.speedup.value <= lead.speedup.high


def test_the_interval_is_that_of_a_mean_of_strata(tmp_path):
    """Where a suite's speedup is a mean over prompts, its standard error is the textbook's, also of few prompts."""
    rng, suites, prompts, lines, variance = np.random.default_rng(1), ["gsm8k", "mbpp", "humaneval"], 4, [], 0.0
    for suite in suites:
        tokens = rng.integers(20, 60, size=prompts)
        variance += (tokens / 10).var(ddof=1) / prompts / len(suites) ** 2
        for prompt, count in enumerate(tokens.tolist()):  # one second each, target-only and B 10 tokens
            lines += [line(PLAIN, prompt, suite=suite), line(B, prompt, suite=suite)]
            lines.append(line(A, prompt, suite=suite, new_tokens=count))
    (lead,) = leads(loaded(tmp_path, lines))
    assert (lead.fastest, lead.method) == (A, B)
    # 300 other streams of random numbers gave 0.99 of that, with a deviation of 0.02: five of them fit into 12 %, so
    # less than one stream in a million would fail here.
    assert lead.speedup.high - lead.speedup.low == pytest.approx(2 * 1.96 * math.sqrt(variance), rel=0.12)
    assert lead.tau.low == lead.tau.high == 0


def test_nothing_can_be_said_of_one_prompt_one_method_or_no_rounds(tmp_path):
    both = [line(name, prompt, seconds=1 + (name == B)) for prompt in range(3) for name in (PLAIN, A, B)]
    assert leads(loaded(tmp_path, [one for one in both if one["prompt"] == 0])) == []
    assert leads(loaded(tmp_path, [one for one in both if one["method"] != B], [A])) == []
    both = [{**one, **NO_ROUNDS} if one["method"] == B else one for one in both]
    (lead,) = leads(loaded(tmp_path, both))
    assert lead.tau is None and lead.speedup.value == pytest.approx(0.5)
