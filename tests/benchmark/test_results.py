"""Rows against naive loops over the lines, what killed and resumed runs leave behind, and the leads of the fastest
method against the averages, textbook variance, and pairs that must not differ."""

import json
import math
import random

import numpy as np
import pytest

from hf_hyperdflash.benchmark.report import markdown, write_report
from hf_hyperdflash.benchmark.results import averages, leads, load, pool, summarize

from ..helpers.results_files import METHODS, PLAIN, SUITES, line, random_lines, settings, tables, written

A, B = "HyperDFlash (6)", "MTP (3)"


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
    """Every figure of a row from the lines alone, `plain` being target-only's of the same prompts in the same
    order."""
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
        line("MTP (3)", 1, new_tokens=12, seconds=1.2, identical=False, peak_memory=4, emitted=[1], accepted=[0],
        rounds=1),
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
    for (mode, temperature, method), (speedup, tau) in averages(rows).items():
        mine = [row for row in rows if (row.mode, row.temperature, row.method) == (mode, temperature, method)]
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
    assert "1.00× / –" in (tmp_path / "out" / "report.md").read_text()
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


# Leads


def loaded(path, lines, methods=(A, B)):
    return load(written(path / "results.jsonl", lines, settings(methods=list(methods))))


def rounds(tokens, count):
    """So many tokens in `count` rounds, the last of which takes the rest."""
    emitted = [1] * (count - 1) + [tokens - count + 1]
    return dict(rounds=count, emitted=emitted, accepted=[n - 1 for n in emitted], draft_positions=9)


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


def test_what_prompts_have_in_common_cancels(tmp_path):
    """A is twice as fast as B and has one token a round more, on prompts that differ by a factor of nine."""
    lines = []
    for prompt, seconds in enumerate([1.0, 3.0, 9.0]):
        lines += [line(PLAIN, prompt, seconds=seconds), line(B, prompt, seconds=seconds, **rounds(10, 10))]
        lines.append(line(A, prompt, seconds=seconds / 2, **rounds(10, 5)))
    (lead,) = leads(loaded(tmp_path, lines))
    assert [lead.speedup.value, lead.speedup.low, lead.speedup.high] == pytest.approx([1, 1, 1])
    assert [lead.tau.value, lead.tau.low, lead.tau.high] == pytest.approx([1, 1, 1])


def test_all_methods_answer_the_same_drawn_prompts(tmp_path):
    """A has ten tokens a second and one token a round more than B on prompts that suit both, or neither."""
    lines = []
    for prompt, tokens in enumerate([10, 20, 40, 90]):
        lines += [line(PLAIN, prompt), line(B, prompt, new_tokens=tokens, **rounds(tokens, 10))]
        lines.append(line(A, prompt, new_tokens=tokens + 10, **rounds(tokens + 10, 10)))
    (lead,) = leads(loaded(tmp_path, lines))
    assert [lead.speedup.value, lead.speedup.low, lead.speedup.high] == pytest.approx([1, 1, 1])
    assert [lead.tau.value, lead.tau.low, lead.tau.high] == pytest.approx([1, 1, 1])


def test_both_turns_of_a_prompt_are_drawn_together(tmp_path):
    """A's gain on one turn is its loss on the other, so no draw of prompts shows a difference."""
    lines = []
    for prompt in range(4):
        for turn, tokens in enumerate([5, 15]):
            lines += [line(PLAIN, prompt, turn=turn), line(B, prompt, turn=turn)]
            lines.append(line(A, prompt, turn=turn, new_tokens=tokens))
    (lead,) = leads(loaded(tmp_path, lines))
    assert [lead.speedup.value, lead.speedup.low, lead.speedup.high] == pytest.approx([0, 0, 0])


def test_nothing_can_be_said_of_one_prompt_one_method_or_no_rounds(tmp_path):
    both = [line(name, prompt, seconds=1 + (name == B)) for prompt in range(3) for name in (PLAIN, A, B)]
    assert leads(loaded(tmp_path, [one for one in both if one["prompt"] == 0])) == []
    assert leads(loaded(tmp_path, [one for one in both if one["method"] != B], [A])) == []
    for one in both:
        if one["method"] == B:
            one |= dict(rounds=0, emitted=[], accepted=[], draft_positions=0)
    (lead,) = leads(loaded(tmp_path, both))
    assert lead.tau is None and lead.speedup.value == pytest.approx(0.5)


def test_suites_that_a_method_lacks_are_left_out(tmp_path):
    lines = [line(name, prompt) for prompt in range(3) for name in (PLAIN, A, B)]
    lines += [
        line(name, prompt, suite="mbpp", seconds=9.0 if name == A else 1.0)
        for prompt in range(3)
        for name in (PLAIN, A)
    ]
    (lead,) = leads(loaded(tmp_path, lines))
    assert lead.speedup.value == 0
