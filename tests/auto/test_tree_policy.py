"""Trees of the nodes that pay for themselves, in a world whose rounds cost and bring what is known."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from transformers import LogitsProcessorList

from hf_hyperdflash.auto.acceptance import AcceptanceLine
from hf_hyperdflash.auto.policies import MOST_NODES, DraftingStats, Outcome, TreePolicy
from hf_hyperdflash.drafters.sampling import DraftSampler
from hf_hyperdflash.trees.tree import ANCHOR, DraftTree

from ..helpers.schedules import outcome

PLAIN, START = 0.020, 0.026  # seconds of a round without its drafter, and with it
ROOM = 8


SAMPLER = DraftSampler(LogitsProcessorList(), do_sample=False)


@dataclass
class World:
    """Drafts that are accepted one after the other with probability `chance`; a tree's nodes, in order of their
    survival, with the powers of `wide`, one of them at most after each.

    Attributes:
        of_node: Seconds that a tree's node takes.
        of_draft: Seconds that a chain's draft takes.
    """

    chance: float
    wide: float
    of_node: float = 0.0008
    of_draft: float = 0.0008

    def tree(self, least: float, budget: int) -> tuple[int, float]:
        """How many nodes are more probable than `least`, and what they bring."""
        survival = [self.wide ** (k + 1) for k in range(budget) if self.wide ** (k + 1) > least]
        return len(survival), sum(survival)

    def best(self) -> float:
        """Tokens a second of the best that can be done every time."""
        trees = [(1 + self.tree(0.0, n)[1]) / (START + n * self.of_node) for n in range(MOST_NODES + 1)]
        gained = [sum(self.chance ** (k + 1) for k in range(n)) for n in range(ROOM + 1)]
        chains = [(1 + gain) / (START + n * self.of_draft) for n, gain in enumerate(gained)]
        return max(1 / PLAIN, *trees, *chains)

    def best_trees(self) -> float:
        return max((1 + self.tree(0.0, n)[1]) / (START + n * self.of_node) for n in range(1, MOST_NODES + 1))


def run(world: World, policy: Any, rounds: int, draw: random.Random) -> tuple[float, float, int]:
    """Tokens, seconds and how many rounds had trees."""
    tokens = spent = 0.0
    trees = 0
    for _ in range(rounds):
        count = policy.begin(100, [ROOM])
        sampler = policy.sampler(SAMPLER) if count else SAMPLER
        if sampler.tree_budget is not None:
            trees += 1
            nodes, gain = world.tree(sampler.node_admission.least, sampler.tree_budget)
            brought = min(nodes, int(gain) + (draw.random() < gain % 1))
            took = START + nodes * world.of_node
        else:
            nodes = brought = 0
            admission = sampler.chain_admission
            while nodes < count and admission.is_open() and admission.admits(world.chance):
                nodes += 1
            while brought < nodes and draw.random() < world.chance:
                brought += 1
            took = START + nodes * world.of_draft if count else PLAIN
        took *= 0.95 + 0.1 * draw.random()
        policy.end([outcome(nodes, brought)], took)
        tokens, spent = tokens + 1 + brought, spent + took
    return tokens, spent, trees


@pytest.mark.parametrize(
    ("world", "has_trees"),
    [
        (World(0.7, 0.9), True),
        (World(0.7, 0.97), True),
        (World(0.9, 0.9), None),
        (World(0.9, 0.7, of_node=0.002, of_draft=0.0004), False),
        (World(0.0, 0.0), False),
        (World(0.2, 0.3), False),
    ],
    ids=str,
)
def test_what_is_fastest_is_drafted(world, has_trees):
    policy, draw = TreePolicy(DraftingStats()), random.Random(1)
    run(world, policy, 500, draw)
    tokens, spent, trees = run(world, policy, 3000, draw)
    assert tokens / spent > 0.95 * world.best()
    assert has_trees is None or (trees > 2000) == has_trees


def test_a_hopeless_drafter_costs_little():
    tokens, spent, _ = run(World(0.0, 0.0), TreePolicy(DraftingStats()), 400, random.Random(2))
    assert spent < 1.05 * 400 * PLAIN and tokens == 400


def test_it_drafts_again_where_the_text_changes():
    policy, draw = TreePolicy(DraftingStats()), random.Random(4)
    run(World(0.0, 0.0), policy, 1000, draw)
    good = World(0.6, 0.95)
    run(good, policy, 3000, draw)
    tokens, spent, trees = run(good, policy, 1000, draw)
    assert tokens / spent > 0.9 * good.best() and trees > 700


def test_the_slower_way_is_looked_at_again():
    """Of trees nothing is heard while chains are drafted."""
    policy, draw = TreePolicy(DraftingStats()), random.Random(6)
    assert run(World(0.9, 0.7, of_node=0.002, of_draft=0.0004), policy, 1500, draw)[2] < 300
    wide = World(0.7, 0.97)
    run(wide, policy, 3000, draw)
    assert run(wide, policy, 1000, draw)[2] > 700


def test_the_next_generation_knows_what_was_found():
    known, draw, good = DraftingStats(), random.Random(5), World(0.5, 0.95)
    for _ in range(20):
        run(good, TreePolicy(known), 60, draw)
    assert run(good, TreePolicy(known), 64, draw)[2] >= 40


@pytest.mark.parametrize("are_drawn", [False, True])
def test_it_learns_of_the_children_of_what_was_accepted(are_drawn):
    """A node whose parent was rejected tells nothing, nor do the children of the last one of a text. Of drawn siblings
    the first tells alone."""

    class Heard(AcceptanceLine):
        def __init__(self) -> None:
            super().__init__()
            self.heard: list = []

        def observe(self, p, accepted):
            self.heard.append((round(p, 3), accepted))

    def heard_of(told: Outcome) -> list:
        policy, heard = TreePolicy(DraftingStats()), Heard()
        policy.are_trees, policy.stats = True, DraftingStats(heard)
        policy._learn(told)
        return heard.heard

    said = torch.tensor([0.5, 0.25, 0.75, 0.125, 0.875, 0.375])
    q = tuple(torch.ones(6)) if are_drawn else None
    tree = DraftTree(torch.arange(6), (ANCHOR, ANCHOR, 1, 1, 0, 2), q, said)
    first = [(0.5, False), (0.25, True), (0.75, True), (0.125, False)]
    first = [each for each in first if not are_drawn or each[0] in (0.5, 0.75)]
    assert heard_of(Outcome(tree, [1, 2], False)) == [*first, (0.375, False)]
    assert heard_of(Outcome(tree, [1, 2], True)) == first
    assert heard_of(outcome(2, 1)) == []
