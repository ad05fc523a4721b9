"""What rounds are predicted to take, in worlds whose costs are known."""

import math
import random

import pytest

from hf_hyperdflash.auto.costs import RoundCosts

PLAIN, START, EACH = 0.020, 0.026, 0.002  # seconds of a round: without its drafter, with it, and of each draft
CHOICES = [8, None, 1, 4, 8, 6, 2]


def seconds(drafts: int | None, length: int = 100, texts: int = 1) -> float:
    """A line."""
    return PLAIN if drafts is None else START + EACH * drafts


def in_steps(drafts: int | None, length: int, texts: int) -> float:
    """Four drafts more take no longer than one: no line says so, the nearest measurements do."""
    return PLAIN if drafts is None else START + 0.012 * (drafts > 4)


def by_length(drafts: int | None, length: int, texts: int) -> float:
    return seconds(drafts) + 0.002 * length.bit_length()


def by_texts(drafts: int | None, length: int, texts: int) -> float:
    """A draft of each of six texts is six tokens."""
    return PLAIN + 0.003 * texts + (0.006 + EACH * texts * drafts if drafts is not None else 0.0)


def tried(cost=seconds, length=100, texts=1) -> RoundCosts:
    """That has seen its trials."""
    costs = RoundCosts()
    for drafts in (8, None, 4):
        costs.observe(length, drafts, cost(drafts, length, texts), texts, is_trial=True)
    return costs


def run(costs, rounds, choices=CHOICES, cost=seconds, length=100, texts=1, noise=0.0, draw=None):
    draw = draw or random.Random(0)
    for i in range(rounds):
        drafts = choices[i % len(choices)]
        costs.observe(length, drafts, cost(drafts, length, texts) * math.exp(noise * draw.gauss(0, 1)), texts)


def true(cost=seconds, length=100, texts=1) -> list[float]:
    """Of 0 to 8 drafts, in rounds without the drafter."""
    return [cost(drafts, length, texts) / cost(None, length, texts) for drafts in range(9)]


@pytest.mark.parametrize(
    ("cost", "noise", "measured", "asked"),
    [
        (seconds, 0.05, [(100, 1)], [(100, 1)]),
        (in_steps, 0.0, [(100, 1)], [(100, 1)]),
        (by_length, 0.0, [(100, 1), (1000, 1), (10_000, 1)], [(100, 1), (1000, 1), (3000, 1), (10_000, 1)]),
        (by_texts, 0.0, [(100, 4), (100, 6)], [(100, 4), (100, 5), (100, 6)]),
    ],
)  # fmt: skip
def test_costs_are_found(cost, noise, measured, asked):
    """Under noise and hiccups, and of lengths and batches that were not seen: those between are between."""
    costs, draw = tried(cost, *measured[0]), random.Random(1)
    for i in range(100):
        for length, texts in measured:
            run(costs, 10, [*range(9), None], cost, length, texts, noise, draw)
        if i % 4 == 3:
            run(costs, 1, [i % 9], lambda *round_: 20 * cost(*round_), *measured[0])
    for length, texts in asked:
        assert costs.predict(length, 8, texts) == pytest.approx(true(cost, length, texts), rel=0.07)


def test_three_trials_tell_of_all_numbers():
    assert tried().predict(100, 8) == pytest.approx(true(), rel=0.12)
    assert tried().predict(100, 3) == tried().predict(100, 8)[:4]


def tripled(drafts: int | None, *_) -> float:
    return PLAIN if drafts is None else START + 3 * EACH * drafts


def slowly(times: float):
    return lambda drafts, *_: times * seconds(drafts)


@pytest.mark.parametrize(
    ("before", "after", "expected", "tolerance"),
    [
        ((200, CHOICES, seconds), [(1, [8], slowly(50)), (16, CHOICES, seconds)], true(), 0.1),
        # A number that was seldom seen does not look dear.
        ((600, [1, 5, 8, None], seconds), [(1, [2], slowly(1.25)), (7, [1], seconds)], true(), 0.12),
        # A machine that slows down makes all rounds dearer, also those that were not tried since.
        ((300, CHOICES, seconds), [(60, [8], slowly(2))], true(), 0.1),
        # A draft that gets dearer is learned however long it was cheap.
        ((2000, CHOICES, seconds), [(4000, CHOICES, tripled)], true(tripled), 0.17),
    ],
    ids=["a hiccup", "seldom", "slower", "dearer"],
)
def test_worlds_change(before, after, expected, tolerance):
    costs = tried()
    for rounds, choices, cost in (before, *after):
        run(costs, rounds, choices, cost, noise=0.01)
    assert costs.predict(100, 8) == pytest.approx(expected, rel=tolerance)


def test_no_round_is_faster_than_the_fastest():
    """Where the line would say so, far from what was measured."""

    def steep(drafts, *_):
        return 0.1 if drafts is None else 0.02 * drafts

    costs = tried(steep)
    run(costs, 80, [4, 8, None], steep)
    assert min(costs.predict(2, 8)) * 0.1 > 0.9 * 0.02 * 4 / 2 and costs.predict(100, 0)[0] > 0


def test_a_coarse_clock_is_no_failure():
    costs = tried(lambda *round_: 0.0)
    run(costs, 40, cost=lambda *round_: 0.0)
    run(costs, 400)
    assert all(cost > 0 and math.isfinite(cost) for cost in costs.predict(100, 8))


def test_memory_is_bounded():
    costs, draw = tried(), random.Random(3)
    for _ in range(3000):
        run(costs, 1, [draw.choice([None, *range(17)])], noise=0.3, length=draw.randrange(1, 10**6), draw=draw)
    assert len(costs._model.centers) <= 64 and len(costs._measured) < 8 and len(costs._tables) < 32
    assert costs._model._sums[:, -2].max() <= 512
