"""Leads of the fastest method: against the report's averages, textbook variance, and pairs that must not differ."""

import math

import numpy as np
import pytest

from hf_hyperdflash.benchmark.leads import leads
from hf_hyperdflash.benchmark.results import averages, load, summarize

from ..benchmark.test_report import PLAIN, line, random_lines, settings, written

A, B = "HyperDFlash (6)", "MTP (3)"


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
    # 300 other streams of random numbers gave 0.99 of that, with a deviation of 0.02: five of them fit into 12 %, so less
    # than one stream in a million would fail here.
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
