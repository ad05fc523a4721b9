"""What rounds are predicted to take, in worlds whose costs are known."""

import math
import random
import sys
import threading

import pytest

from hf_hyperdflash.auto.costs import RoundCosts

from ..helpers.schedules import have_learned

PLAIN, START, EACH = 0.020, 0.026, 0.002  # seconds of a round: without its drafter, with it, and of each draft
CHOICES = [8, None, 1, 4, 8, 6, 2]


def seconds(drafts: int | None) -> float:
    return PLAIN if drafts is None else START + EACH * drafts


def relative(drafts: int) -> float:
    return seconds(drafts) / PLAIN


def tried(cost=seconds) -> RoundCosts:
    """That has seen its trials."""
    costs = RoundCosts()
    for drafts in (8, None, 4):
        costs.observe(100, drafts, cost(drafts), is_trial=True)
    return costs


def run(costs, rounds, choices, cost=seconds, length=100, noise=0.0, draw=None, texts=1):
    draw = draw or random.Random(0)
    for i in range(rounds):
        drafts = choices[i % len(choices)]
        costs.observe(length, drafts, cost(drafts) * math.exp(noise * draw.gauss(0, 1)), texts)


def test_three_trials_tell_of_all_numbers():
    costs = RoundCosts()
    assert not have_learned(costs)
    costs.observe(100, 8, seconds(8), is_trial=True)
    assert have_learned(costs)
    costs.observe(100, None, seconds(None), is_trial=True)
    costs.observe(100, 4, seconds(4), is_trial=True)
    assert costs.predict(100, 8) == pytest.approx([relative(k) for k in range(9)], rel=0.12)
    assert costs.predict(100, 3) == costs.predict(100, 8)[:4]


def test_costs_are_found_under_noise_and_hiccups():
    costs, draw = tried(), random.Random(1)
    for i in range(600):
        run(costs, 1, [CHOICES[i % 7]], lambda k, i=i: seconds(k) * (20 if i % 37 == 5 else 1), noise=0.05, draw=draw)
    assert costs.predict(100, 8) == pytest.approx([relative(k) for k in range(9)], rel=0.05)


def test_one_hiccup_changes_little():
    costs = tried()
    run(costs, 200, CHOICES)
    before = costs.predict(100, 8)
    run(costs, 1, [8], lambda k: 50 * seconds(k))
    run(costs, 16, CHOICES)
    assert costs.predict(100, 8) == pytest.approx(before, rel=0.03)


def test_kernels_have_widths():
    """Four drafts more take no longer than one: no line says so, the nearest measurements do."""

    def in_steps(drafts):
        return PLAIN if drafts is None else START + (0.012 if drafts > 4 else 0.0)

    costs = tried(in_steps)
    run(costs, 600, [*range(9), None], in_steps)
    extra = [cost * PLAIN for cost in costs.predict(100, 8)]
    assert extra[4] - extra[0] < 0.002 and extra[8] - extra[5] < 0.002 and extra[5] - extra[4] > 0.010


def test_a_number_that_was_seldom_seen_does_not_look_dear():
    costs, draw = tried(), random.Random(2)
    run(costs, 600, [1, 5, 8, None], noise=0.01, draw=draw)
    run(costs, 8, [2, *[1] * 8], lambda k: 1.25 * seconds(8) if k == 2 else seconds(k))
    assert costs.predict(100, 8)[2] == pytest.approx(relative(2), rel=0.12)


def test_a_machine_that_slows_down_makes_all_rounds_dearer():
    """Also those that were not tried since."""
    costs = tried()
    run(costs, 300, CHOICES, noise=0.03)
    run(costs, 60, [8], lambda k: 2 * seconds(k), noise=0.03)
    assert costs.predict(100, 8) == pytest.approx([relative(k) for k in range(9)], rel=0.1)
    assert costs._pace / tried()._pace == pytest.approx(2, rel=0.1)


def test_a_draft_that_gets_dearer_is_learned_however_long_it_was_cheap():
    def dear(drafts):
        return seconds(drafts) if drafts is None else START + 3 * EACH * drafts

    costs = tried()
    run(costs, 2000, CHOICES)
    run(costs, 4000, CHOICES, dear)
    extra = [cost - costs.predict(100, 8)[0] for cost in costs.predict(100, 8)]
    assert extra[8] == pytest.approx(3 * EACH * 8 / PLAIN, rel=0.25)


def test_longer_texts_take_longer():
    """Of lengths that were not seen, those between are between."""

    def at(length):
        return lambda k: seconds(k) + 0.002 * length.bit_length()

    costs = tried(at(100))
    for _ in range(60):
        for length in (100, 1000, 10_000):
            run(costs, 7, CHOICES, at(length), length)
    for length in (100, 1000, 3000, 10_000):
        expected = [at(length)(k) / at(length)(None) for k in range(9)]
        assert costs.predict(length, 8) == pytest.approx(expected, rel=0.06)


def test_larger_batches_take_longer():
    """A draft of each of six texts is six tokens."""

    def of(texts):
        return lambda k: seconds(None) + 0.003 * texts + (0.006 + EACH * texts * k if k is not None else 0.0)

    costs = RoundCosts()
    for texts in (4, 6):
        for drafts in (8, None, 4):
            costs.observe(100, drafts, of(texts)(drafts), texts, is_trial=True)
    for _ in range(40):
        for texts in (4, 6):
            run(costs, 7, CHOICES, of(texts), texts=texts)
    for texts in (4, 5, 6):
        expected = [of(texts)(k) / of(texts)(None) for k in range(9)]
        assert costs.predict(100, 8, texts) == pytest.approx(expected, rel=0.1)


def test_no_round_is_faster_than_the_fastest():
    """Where the line would say so, far from what was measured."""
    costs = tried(lambda k: 0.1 if k is None else 0.02 * k)
    run(costs, 80, [4, 8, None], lambda k: 0.1 if k is None else 0.02 * k)
    assert min(costs.predict(2, 8)) * 0.1 > 0.9 * 0.02 * 4 / 2 and costs.predict(100, 0)[0] > 0


def test_a_coarse_clock_is_no_failure():
    costs = tried(lambda k: 0.0)
    run(costs, 40, CHOICES, lambda k: 0.0)
    run(costs, 400, CHOICES)
    assert all(cost > 0 and math.isfinite(cost) for cost in costs.predict(100, 8))


def test_memory_is_bounded():
    costs, draw = tried(), random.Random(3)
    for _ in range(3000):
        run(costs, 1, [draw.choice([None, *range(17)])], noise=0.3, length=draw.randrange(1, 10**6), draw=draw)
    assert len(costs._model.centers_) <= 64 and len(costs._measured) < 8 and len(costs._tables) < 32
    assert costs._model._sums[:, -2].max() <= 512


def test_threads_may_learn_at_once():
    costs, wrong = tried(), []

    def work(seed):
        draw = random.Random(seed)
        try:
            for _ in range(300):
                run(costs, 1, [draw.choice(CHOICES)], noise=0.05, length=2 ** draw.randrange(1, 12), draw=draw)
                predicted = costs.predict(2 ** draw.randrange(1, 12), draw.randrange(9))
                assert all(cost > 0 for cost in predicted)
        except BaseException as error:
            wrong.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not wrong
