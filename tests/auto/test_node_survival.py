"""What is known of a tree's nodes, and which of them are worth it."""

from __future__ import annotations

import math
import random

import pytest
import torch

from hf_hyperdflash.auto.node_survival import ACCEPTED, NodeSurvival


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def log_odds(p: float) -> float:
    return math.log(p / (1 - p))


def test_a_drafter_is_taken_at_its_word_at_first():
    survival, said = NodeSurvival(), torch.tensor([0.9, 0.5, 0.01])
    torch.testing.assert_close(survival.of_likely(said.log()).exp(), said)
    assert survival.of_one(0.25) == pytest.approx(0.25) and survival.later == ACCEPTED[1:]
    assert survival.of_likely(torch.tensor([-math.inf, 0.0])).isfinite().all()


@pytest.mark.parametrize("are_drawn", [False, True])
def test_it_learns_how_often_nodes_are_accepted(are_drawn):
    """By a law of half the slope, from 4,000 nodes with three children: where nodes are the most probable ones one at
    most of them is right, where they are drawn each has its turn once those before it were rejected."""
    draw, survival = random.Random(3), NodeSurvival()

    def chance(said: float) -> float:
        return sigmoid(0.5 * log_odds(said) - 0.4)

    for _ in range(4000):
        signals = [draw.uniform(0.4, 0.95)] * 3 if are_drawn else [draw.uniform(0.3, 0.9), 0.08, 0.02]
        of_children = [chance(signals[0]), 0.5, 0.1] if are_drawn else [chance(said) for said in signals]
        accepted, left = None, 1.0
        for rank, each in enumerate(of_children):
            if accepted is None and draw.random() < (each if are_drawn else each / left):
                accepted = rank
            left -= each
        survival.observe(signals, accepted, are_drawn)
    for said in (0.4, 0.6, 0.9) if are_drawn else (0.02, 0.08, 0.4, 0.8):
        assert survival.of_one(said) == pytest.approx(chance(said), abs=0.06)
        assert float(survival.of_likely(torch.tensor([said]).log()).exp()) == pytest.approx(survival.of_one(said))
    if are_drawn:
        assert survival.later == pytest.approx((0.5, 0.1), abs=0.16)
    else:
        assert survival.later == ACCEPTED[1:]


def test_a_later_sibling_is_never_held_to_be_better():
    survival = NodeSurvival()
    for _ in range(200):
        survival.observe([0.5, 0.5, 0.5], 2, are_drawn=True)
    assert survival.later[0] >= survival.later[1] and survival.later[0] < 0.1
