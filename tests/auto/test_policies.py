"""As many drafts as pay: of simulated machines and drafters the best number is known, and "auto" is near it."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LogitsProcessorList

from hf_hyperdflash.auto.acceptance import UNKNOWN, AcceptanceLine
from hf_hyperdflash.auto.policies import (
    MAX_AUTO_NODES,
    BatchPolicy,
    ChainPolicy,
    DraftingStats,
    FixedPolicy,
    Outcome,
    Probes,
    TreePolicy,
)
from hf_hyperdflash.drafters.sampling import DraftSampler
from hf_hyperdflash.trees.tree import ANCHOR, DraftTree

from ..helpers.draft_trees import SAMPLING_RULES
from ..helpers.schedules import outcome
from ..trees.test_growth import IDS, Talker, assert_text_is_the_targets

PLAIN, ROOM = 0.020, 8  # seconds of a round without its drafter, and drafts of a round
GREEDY = DraftSampler(LogitsProcessorList(), do_sample=False)


@dataclass(frozen=True)
class World:
    """A drafter on a machine."""

    chance: float  # that the next draft of a chain is accepted
    wide: float = 0.0  # the survival of a tree's nodes, the most probable first, is the powers of this
    start: float = 0.026  # seconds of a round with the drafter and no draft
    of_draft: float = 0.002  # seconds of each draft of a chain
    of_node: float = 0.0008  # and of each node of a tree
    width: int = 1  # this many drafts more take no longer than none: kernels have widths
    noise: float = 0.0  # the standard deviation of the logarithm of a round's seconds
    room: int = ROOM  # most drafts of a round

    def seconds(self, drafts: int | None) -> float:
        return PLAIN if drafts is None else self.start + self.of_draft * (drafts - drafts % self.width)

    def survivals(self, least: float, budget: int) -> list[float]:
        """Of a tree's nodes that are more probable than `least`."""
        return [self.wide ** (k + 1) for k in range(budget) if self.wide ** (k + 1) > least]

    def best(self, kind: type) -> float:
        """Tokens a second of the best that can be done every time."""
        chains = [
            (1 + sum(self.chance ** (k + 1) for k in range(drafts))) / self.seconds(drafts)
            for drafts in range(1, self.room + 1)
        ]
        trees = [
            (1 + sum(self.survivals(0.0, nodes))) / (self.start + nodes * self.of_node)
            for nodes in range(1, MAX_AUTO_NODES + 1)
        ]
        return max(1 / PLAIN, *chains, *(trees if kind is TreePolicy else ())) / math.exp(self.noise**2 / 2)


class Run(NamedTuple):
    """Tokens of a text, seconds, and the rounds that asked the drafter, and that had trees."""

    tokens: float
    seconds: float
    asked: int
    trees: int


def run(world: World, policy: Any, rounds: int, draw: random.Random, texts: int = 1) -> Run:
    tokens, spent, asked, trees = 0.0, 0.0, 0, 0
    for _ in range(rounds):
        count, drafts = policy.begin(100, [world.room] * texts), 0
        sampler = policy.sampler(GREEDY) if count else GREEDY
        if sampler.tree_budget is not None:
            survivals = world.survivals(sampler.node_admission.min_probability, sampler.tree_budget)
            drafts, gain = len(survivals), sum(survivals)
            accepted = [min(drafts, int(gain) + (draw.random() < gain % 1))]
            took, trees = world.start + drafts * world.of_node, trees + 1
        else:
            admission = sampler.chain_admission  # a batch's drafts are admitted beforehand
            while drafts < count and (admission is None or (admission.is_open() and admission.admits(0.5))):
                drafts += 1
            accepted = [
                next((k for k in range(drafts) if draw.random() >= world.chance), drafts) for _ in range(texts)
            ]
            took = world.seconds(drafts if policy.asks_drafter else None)
        took *= math.exp(world.noise * draw.gauss(0, 1))
        policy.end([outcome(drafts, kept) for kept in accepted], took)
        tokens, spent, asked = tokens + 1 + sum(accepted) / texts, spent + took, asked + policy.asks_drafter
    return Run(tokens, spent, asked, trees)


class Heard(AcceptanceLine):
    """Keeps what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[tuple[float, bool]] = []

    def observe(self, p: float, accepted: bool) -> None:
        self.told.append((round(p, 3), accepted))


# What is lost beside the best


KINDS = {ChainPolicy: 1, BatchPolicy: 4}


@pytest.mark.parametrize(
    "machine", [{"of_draft": 0.0005}, {"of_draft": 0.003}, {"of_draft": 0.0024, "width": 5}], ids=str
)
@pytest.mark.parametrize("chance", [0.3, 0.7, 0.95])
@pytest.mark.parametrize(("kind", "texts"), KINDS.items())
def test_on_any_machine_less_than_5_percent_is_lost(kind, texts, chance, machine):
    world, policy, draw = World(chance, **machine), kind(DraftingStats()), random.Random(0)
    run(world, policy, 200, draw, texts)
    done = run(world, policy, 1500, draw, texts)
    assert done.tokens / done.seconds > 0.95 * world.best(kind)


@pytest.mark.parametrize(
    ("world", "has_trees"),
    [
        (World(0.7, 0.9, of_draft=0.0008), True),
        (World(0.7, 0.97, of_draft=0.0008), True),
        (World(0.9, 0.9, of_draft=0.0008), None),
        (World(0.9, 0.7, of_draft=0.0004, of_node=0.002), False),
        (World(0.2, 0.3, of_draft=0.0008), False),
    ],
    ids=str,
)
def test_trees_or_chains_whichever_are_faster(world, has_trees):
    policy, draw = TreePolicy(DraftingStats()), random.Random(1)
    run(world, policy, 500, draw)
    done = run(world, policy, 2000, draw)
    assert done.tokens / done.seconds > 0.95 * world.best(TreePolicy)
    assert has_trees is None or (done.trees > 1300) == has_trees


@pytest.mark.parametrize(("kind", "texts"), [*KINDS.items(), (TreePolicy, 1)])
def test_a_hopeless_drafter_costs_2_percent_and_is_found_again_when_it_is_good(kind, texts):
    policy, draw, good = kind(DraftingStats()), random.Random(0), World(0.9, 0.95)
    run(World(0.02), policy, 100, draw, texts)
    done = run(World(0.02), policy, 2000, draw, texts)
    assert done.seconds / done.tokens < 1.02 * PLAIN and done.asked < 0.02 * 2000
    run(good, policy, 2000, draw, texts)
    done = run(good, policy, 1000, draw, texts)
    assert done.tokens / done.seconds > 0.92 * good.best(kind) and 0.98 * 1000 < done.asked < 1000


def test_the_slower_way_is_looked_at_again():
    """Of trees nothing is heard while chains are drafted. What was found, the next generation knows."""
    known, draw = DraftingStats(), random.Random(6)
    assert run(World(0.9, 0.7, of_draft=0.0004, of_node=0.002), TreePolicy(known), 1500, draw).trees < 300
    wide = World(0.7, 0.97, of_draft=0.0008)
    run(wide, TreePolicy(known), 3000, draw)
    assert run(wide, TreePolicy(known), 64, draw).trees >= 40


def test_what_pays_in_a_small_batch_need_not_in_a_large_one():
    """Each size has statistics of its own, and rows that end change the size."""
    known, draw, asked = DraftingStats(), random.Random(0), {}
    for _ in range(4):
        for texts, world in ((2, World(0.8, of_draft=0.001)), (8, World(0.8, of_draft=0.030))):
            asked[texts] = run(world, BatchPolicy(known), 100, draw, texts).asked
    assert asked[2] > 90 and asked[8] < 10
    assert known.rounds == 0  # of single texts nothing was learned


@pytest.mark.parametrize(
    ("world", "generations", "before", "rounds", "share"),
    [
        # A restless machine, whose rounds take half or twice as long by chance: drafting pays by a third.
        (World(0.6, noise=0.5), 8, 300, 1500, 0.75),
        # A drafter whose rounds bring a tenth more than their price.
        (World(0.5, start=0.0278, room=2), 10, 0, 400, 0.8),
    ],
    ids=["noise", "a small gain"],
)
def test_bad_luck_is_no_reason_to_stop_drafting(world, generations, before, rounds, share):
    done = []
    for seed in range(generations):
        policy, draw = ChainPolicy(DraftingStats()), random.Random(seed)
        run(world, policy, before, draw)
        done.append(run(world, policy, rounds, draw))
    tokens, seconds, asked, _ = map(sum, zip(*done))
    assert asked > share * generations * rounds
    assert tokens / seconds > 0.9 * world.best(ChainPolicy)


def test_what_seemed_too_dear_is_seen_again():
    """More than four drafts took twice as long when they were first made, and nothing would make them again."""
    world, known, draw = World(0.95), DraftingStats(trials=100), random.Random(0)
    for i, drafts in enumerate((4, 8, None, 1, 2, 3, 4, 5, 6, 7, 8) * 4):
        slow = 2 if drafts is not None and drafts > 4 else 1
        known.costs.observe(100, drafts, slow * world.seconds(drafts), is_trial=i < 3)
    assert known.costs.predict(100, 8)[8] > 1.4 * world.seconds(8) / PLAIN
    run(world, ChainPolicy(known), 6000, draw)
    done = run(world, ChainPolicy(known), 1000, draw)
    assert done.tokens / done.seconds > 0.95 * world.best(ChainPolicy)


# What is tried


@pytest.mark.parametrize("kind", [ChainPolicy, TreePolicy])
def test_what_tells_nothing_of_drafts_is_no_trial(kind):
    """A round without room, as the last of a text, asks nothing. One that compiled takes seconds: drafts would seem
    free beside it."""
    known, world = DraftingStats(), World(0.0)
    policy = kind(known)
    for _ in range(12):
        assert policy.begin(30, [0]) == 0 and not policy.asks_drafter
        policy.end([outcome(0, 0)], 0.01)
    assert known.trials == 0 and not known.is_tried
    policy = ChainPolicy(known)
    for place in range(30):
        count = policy.begin(100, [8])
        admitted = sum(policy.admits(0.0) for _ in range(count))
        policy.end([outcome(admitted, 0)], None if place % 3 else world.seconds(admitted if count else None))
    assert known.is_tried and known.costs.predict(100, 8)[8] > 1.1


# What is admitted


def experienced(tokens: float = 3.0, span: float = 0.04) -> DraftingStats:
    """Of rounds that write `tokens` in `span` seconds."""
    known, world = DraftingStats(tokens=tokens, cost=span / PLAIN, rounds=100, trials=100), World(0.0)
    for drafts in (8, None, 4):
        known.costs.observe(100, drafts, world.seconds(drafts), is_trial=True)
    for drafts in (*range(9), None) * 40:
        known.costs.observe(100, drafts, world.seconds(drafts))
    return known


def begun(known: DraftingStats, room: int = 8) -> ChainPolicy:
    """In a round that is not its generation's first."""
    policy = ChainPolicy(known)
    tokens, rounds = known.tokens, known.rounds
    policy.begin(99, [room])
    policy.end([outcome(0, 0)], World(0.0).seconds(0))
    known.is_drafting, known.probes = True, Probes(64)
    assert policy.begin(100, [room]) == room
    assert (tokens, rounds) == (known.tokens, known.rounds)
    return policy


@settings(deadline=None)
@given(st.lists(st.floats(0.01, 0.99), min_size=1, max_size=8), st.floats(1.0, 8.0), st.floats(0.02, 0.08))
def test_admitted_are_as_many_as_gain_most(chances, tokens, span):
    policy, each = begun(experienced(tokens, span), len(chances)), World(0.0).of_draft
    admitted = 0
    while admitted < len(chances) and policy.is_open() and policy.admits(chances[admitted]):
        admitted += 1
    rate = max(tokens / span, 1 / PLAIN)
    through = list(itertools.accumulate(chances, lambda a, b: a * b))
    gains = [sum(through[:count]) - rate * each * count for count in range(len(chances) + 1)]
    # As far as costs are known: the predicted price of a draft is within a hundredth of the true one.
    assert gains[admitted] >= max(gains[1:]) - 0.01 * rate * each * len(chances)  # one is made in any case


def test_a_tree_that_nobody_admitted_is_cut_without_a_look_at_it():
    chain = DraftTree.chain(torch.arange(6), list(torch.eye(6)))
    policy = begun(experienced(5.0, 0.04))
    cut = policy.cut(chain)
    assert cut.tokens.tolist() == [0, 1] and len(cut.q) == 2  # 0.7 and 0.49: 0.34 after two, 0.12 after three
    assert policy.cut(chain) is chain  # they have been admitted
    assert FixedPolicy().cut(chain) is chain
    tree = DraftTree(torch.arange(3), (-1, -1, 0))
    assert begun(experienced(5.0, 0.04)).cut(tree) is tree


# What is learned


@pytest.mark.parametrize(
    ("accepted", "is_last", "told"),
    [(2, False, [1, 1, 0]), (2, True, [1, 1]), (0, False, [0]), (4, False, [1, 1, 1, 1])],
)
def test_only_drafts_whose_fate_is_known_are_counted(accepted, is_last, told):
    known = experienced(3.0, 0.06)
    policy, known.acceptance, known.rounds = begun(known), Heard(), 0  # the first round that is judged counts alone
    signals = [0.9, 0.91, 0.92, 0.93]
    assert all(map(policy.admits, signals))
    policy.end([outcome(4, accepted, is_last)], 2 * World(0.0).seconds(4))
    assert known.acceptance.told == list(zip(signals, map(bool, told)))
    # It is judged by what it brought and by what such rounds take, not by this one's clock.
    assert known.tokens == 1 + accepted and known.cost == pytest.approx(World(0.0).seconds(4) / PLAIN, rel=0.05)


def test_rows_are_counted_by_the_drafts_that_they_made():
    """A row with less room, or a drafter that makes fewer drafts than it is asked for, rejects none of the others."""
    known, line = DraftingStats(), Heard()
    known.batches[2] = DraftingStats(line)
    policy = BatchPolicy(known)
    assert policy.begin(100, [8, 2, 6]) == 8
    policy.end([outcome(8, 3), outcome(2, 2), outcome(6, 1, is_last=True)], 0.03)
    told = [(0, True)] * 3 + [(1, True)] * 2 + [(2, True), (3, False)]
    assert sorted(line.told) == sorted((round(UNKNOWN ** (place + 1), 3), accepted) for place, accepted in told)


@pytest.mark.parametrize("are_drawn", [False, True])
def test_it_learns_of_the_children_of_what_was_accepted(are_drawn):
    """A node whose parent was rejected tells nothing, nor do the children of the last one of a text. Of drawn siblings
    the first tells alone."""

    def heard_of(told: Outcome) -> list:
        policy, line = TreePolicy(DraftingStats()), Heard()
        policy.are_trees, policy.stats = True, DraftingStats(line)
        policy.end([told], None)
        return line.told

    said = torch.tensor([0.5, 0.25, 0.75, 0.125, 0.875, 0.375])
    q = tuple(torch.ones(6)) if are_drawn else None
    tree = DraftTree(torch.arange(6), (ANCHOR, ANCHOR, 1, 1, 0, 2), q, said)
    first = [(0.5, False), (0.25, True), (0.75, True), (0.125, False)]
    first = [each for each in first if not are_drawn or each[0] in (0.5, 0.75)]
    assert heard_of(Outcome(tree, [1, 2], False)) == [*first, (0.375, False)]
    assert heard_of(Outcome(tree, [1, 2], True)) == first
    assert heard_of(outcome(2, 1)) == []


# What is drawn at random


def strict() -> ChainPolicy:
    """One that stops at some places of some paths and goes on at others."""
    return begun(experienced(3.5, 0.05))


def chain_by(policy: ChainPolicy | None) -> DraftTree:
    return DraftSampler(LogitsProcessorList(), True, chain_admission=policy).grow(IDS, 3, Talker(3, 5))


@pytest.mark.parametrize("rule", SAMPLING_RULES)
def test_text_drawn_at_random_is_distributed_as_the_targets(rule):
    lengths = set()

    def drafted() -> DraftTree:
        chain = chain_by(strict())
        lengths.add(len(chain))
        return chain

    assert_text_is_the_targets(rule, 3, drafted)
    assert len(lengths) > 1  # it depends on the path where drafting ends


@pytest.mark.parametrize("rule", SAMPLING_RULES)
def test_a_policy_that_looks_at_the_token_changes_the_distribution(rule):
    def drafted() -> DraftTree:
        chain = chain_by(None)
        likely = [float(q[token]) for q, token in zip(chain.q, chain.tokens)]
        return chain.first(next((k for k, value in enumerate(likely) if value < 0.35), len(chain)))

    with pytest.raises(AssertionError):
        assert_text_is_the_targets(rule, 3, drafted)
