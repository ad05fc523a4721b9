"""Which tokens that are known without the drafter a round verifies, and whether it asks the drafter beside them."""

from __future__ import annotations

import itertools
import operator
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hf_hyperdflash.auto.copies import REACHED, KnownPath, KnownStats
from hf_hyperdflash.auto.costs import RoundCosts
from hf_hyperdflash.auto.policies import (
    MAX_AUTO_NODES,
    BatchPolicy,
    ChainPolicy,
    DraftingStats,
    FixedPolicy,
    Probes,
    TreePolicy,
)

from ..helpers.schedules import outcome

ROOM = 6  # most drafts of a round
CHANCES = st.lists(st.floats(0.05, 0.99), min_size=1, max_size=20)
PATHS = st.lists(st.none() | CHANCES, min_size=1, max_size=4).filter(any)


class Priced(RoundCosts):
    """Known prices of rounds: four positions more cost as much as the first of them. Notes what it is told."""

    def __init__(self, step: float) -> None:
        super().__init__()
        self.step, self.told = step, list[tuple[Any, ...]]()

    def price(self, drafts: int) -> float:
        return 1 + self.step * -(-drafts // 4)

    def predict(self, length: int, max_drafts: int, texts: int = 1) -> list[float]:
        return [0.4 + self.price(drafts) for drafts in range(max_drafts + 1)]

    def predict_known(self, length: int, max_drafts: int, texts: int = 1) -> list[float]:
        return [self.price(drafts) for drafts in range(max_drafts + 1)]

    def observe(self, length: int, drafts: int | None, seconds: float, *others: Any) -> None:
        self.told.append((drafts, others[-1]))


def known(step: float, tokens: float, **others: Any) -> DraftingStats:
    """Of rounds with the drafter that write `tokens` while two without it are run."""
    own = dict(costs=Priced(step), tokens=tokens, cost=2.0, rounds=100, trials=100, probes=Probes(99))
    return DraftingStats(**own | others)


def paths_of(chances: list[list[float] | None]) -> list[KnownPath | None]:
    return [None if own is None else KnownPath(range(len(own)), own) for own in chances]


def reach_of(own: list[float] | None) -> list[float]:
    return list(itertools.accumulate(own or [], operator.mul))


def begun(policy: ChainPolicy, texts: int = 1) -> Any:
    """A policy in a round that is not its generation's first."""
    policy.begin(99, [ROOM] * texts)
    policy.end([outcome(0, 0)] * texts, None)
    policy._is_first = False  # of what a clock would say, nothing is learned here
    policy.begin(100, [ROOM] * texts)
    return policy


def best_without_the_drafter(chances: list[list[float] | None], costs: Priced) -> tuple[float, int]:
    """Tokens a text that are written while one round without drafts runs, and by how many drafts."""
    longest = max(len(own or []) for own in chances)
    rates = [
        ((1 + sum(sum(reach_of(own)[:count]) for own in chances) / len(chances)) / costs.price(count), count)
        for count in range(1, longest + 1)
    ]
    return max(rates, key=lambda rate: rate[0])


@settings(deadline=None)
@given(PATHS, st.floats(0.0, 0.5), st.floats(0.5, 8.0))
@example([[0.9] * 8], 1.1, 0.5)  # four drafts, and not the four after them
def test_a_chain_is_left_out_for_known_tokens_that_bring_more(chances, step, tokens):
    stats = known(step, tokens)
    policy = begun(ChainPolicy(stats), len(chances))
    rate, count = best_without_the_drafter(chances, stats.costs)
    joined = policy.join(paths_of(chances), [ROOM] * len(chances))
    if rate > max(tokens / 2, 1.0) + 1e-9:
        assert joined == [(min(count, len(own or [])), False) for own in chances]
    elif rate < max(tokens / 2, 1.0) - 1e-9:
        assert joined == [(0, True)] * len(chances)


@pytest.mark.parametrize("others", [dict(trials=0), dict(probes=Probes(1))])
def test_a_round_that_tries_the_drafter_has_no_known_tokens(others):
    assert begun(ChainPolicy(known(0.1, 1.0, **others))).join(paths_of([[0.99] * 20]), [ROOM]) == [(0, True)]


@pytest.mark.parametrize(("tokens", "told"), [(1.0, (None, 3)), (40.0, (2, 0))])
def test_a_round_of_known_tokens_tells_what_such_rounds_take_and_judges_no_drafter(tokens, told):
    stats = known(0.1, tokens)
    policy = begun(ChainPolicy(stats))
    ((_, asks_drafter),) = policy.join(paths_of([[0.99] * 8]), [ROOM])
    rounds = stats.rounds
    policy.end([outcome(2, 1) if asks_drafter else outcome(0, 0)._replace(known_drafts=3, known_accepted=2)], 0.1)
    assert stats.costs.told[-1] == told and stats.rounds - rounds == asks_drafter


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 8), st.booleans()), max_size=40))
def test_known_tokens_are_trusted_as_far_as_they_were_written(rounds):
    stats, chances = known(0.0, 1.0), [0.9] * 8
    policy, expected, written = begun(ChainPolicy(stats)), 20.0, 20.0  # before any was seen
    for accepted, is_last in rounds:
        policy.begin(100, [ROOM])
        ((count, asks_drafter),) = policy.join(paths_of([chances]), [ROOM])
        assert not asks_drafter and count == 8
        policy.end([outcome(0, 0, is_last)._replace(known_drafts=count, known_accepted=accepted)], 0.1)
        if not is_last:  # else the text's end may have cut them off
            expected = expected * 31 / 32 + sum(reach_of(chances))
            written = written * 31 / 32 + accepted
    assert stats.trust == pytest.approx(min(written / expected, 1.0))
    if stats.trust > 0.2:
        assert chosen_at(stats, 1.2) and not chosen_at(stats, 0.8)


def chosen_at(stats: DraftingStats, share: float) -> bool:
    """Whether known tokens are chosen that would bring so much more than the drafter, if they were trusted less."""
    stats.tokens = 2.0 * (1 + stats.trust * 4 * 0.9 / share)
    policy = begun(ChainPolicy(stats))
    return policy.join([KnownPath(range(4), [0.9, 1.0, 1.0, 1.0])], [ROOM]) == [(4, False)]


@settings(deadline=None)
@given(CHANCES, st.floats(0.01, 0.4), st.floats(3.0, 8.0))
def test_beside_a_tree_are_the_known_tokens_that_pay(chances, step, tokens):
    chains, trees = known(step, 1.0), known(step, tokens)
    chains.trees, trees.turns = trees, Probes(99)
    policy = begun(TreePolicy(chains))
    assert policy.are_trees
    rate, _ = best_without_the_drafter([chances], trees.costs)
    ((count, asks_drafter),) = policy.join(paths_of([chances]), [ROOM])
    prices = trees.costs.predict(100, MAX_AUTO_NODES)
    node = (prices[-1] - prices[0]) / MAX_AUTO_NODES * max(tokens / 2, 1.0)  # in tokens written meanwhile
    if rate < max(tokens / 2, 1.0) - 1e-9:
        assert asks_drafter and count == sum(reach > node for reach in reach_of(chances))
        assert policy.join(paths_of([chances]), [0]) == [(0, True)]  # a text without drafts has no tree
    elif rate > max(tokens / 2, 1.0) + 1e-9:
        assert not asks_drafter


@settings(deadline=None)
@given(st.lists(CHANCES, min_size=2, max_size=4), st.floats(3.0, 8.0))
def test_a_text_of_a_batch_takes_its_copy_instead_of_drafts_that_bring_less(chances, tokens):
    stats = DraftingStats()
    stats.batches[len(chances).bit_length()] = own = known(0.5, tokens)
    policy = begun(BatchPolicy(stats), len(chances))
    if best_without_the_drafter(chances, own.costs)[0] > tokens / 2 - 1e-9:
        return  # then nobody asks the drafter
    count = 3  # drafts of each text
    expected = [(len(each), False) if sum(each) > tokens - 1 else (0, True) for each in
                (reach_of(text)[:count] for text in chances)]  # fmt: skip
    assert policy.join(paths_of(chances), [count] * len(chances)) == expected


@settings(deadline=None)
@given(PATHS, st.floats(0.1, 6.0), st.booleans())
def test_where_nothing_has_costs_known_tokens_are_compared_with_what_drafts_bring(chances, accepted, are_trees):
    joined = FixedPolicy(are_trees, KnownStats(accepted=accepted)).join(paths_of(chances), [ROOM] * len(chances))
    assert len(joined) == len(chances)
    for text, (count, asks_drafter) in zip(chances, joined):
        probable = [reach for reach in reach_of(text) if reach >= REACHED]
        assert asks_drafter == (sum(probable) < accepted)
        assert count == (len(probable) if are_trees or not asks_drafter else 0)
