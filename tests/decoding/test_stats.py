from __future__ import annotations

import threading
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_hyperdflash.decoding.stats import SpeculationStats, clock, exact_timing, keep_trees
from hf_hyperdflash.trees.tree import DraftTree

from ..conftest import half_right, prompt, tiny_target

# Of each target forward after the prefill: its drafts (`None` without room for any), and how many were accepted.
FORWARDS = st.lists(
    st.one_of(st.just((None, 0)), st.integers(0, 6).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n)))),
    max_size=12,
)


def chain(drafts: int) -> DraftTree:
    return DraftTree.chain(torch.zeros(drafts, dtype=torch.long))


def counted(forwards: list[tuple[int | None, int]]) -> SpeculationStats:
    stats = SpeculationStats(tokens=1)
    for drafts, accepted in forwards:
        stats.add_round(accepted + 1, accepted, None if drafts is None else chain(drafts))
    return stats


def share(of: list[bool]) -> float:
    return of.count(True) / len(of) if of else 0.0


@settings(deadline=None, max_examples=80)
@given(FORWARDS)
def test_figures_are_those_of_counting_round_by_round(forwards):
    stats, rounds = counted(forwards), [(drafts, right) for drafts, right in forwards if drafts is not None]
    most = max((drafts for drafts, _ in rounds), default=0)
    assert (stats.rounds, stats.draft_positions) == (len(rounds), most)
    assert stats.nodes == sum(drafts for drafts, _ in rounds)
    assert stats.tokens == 1 + sum(right + 1 for _, right in forwards)
    assert stats.accepted == [right for _, right in rounds] and stats.emitted == [right + 1 for _, right in rounds]
    mean = sum(right for _, right in rounds) / max(len(rounds), 1)
    assert stats.mean_accepted_drafts == pytest.approx(mean)
    assert stats.tau == pytest.approx(mean + 1 if rounds else 0)
    # Draft position k is accepted in a round where the positions before it are and the target wrote the same there.
    was_accepted = [[position < right for position in range(most)] for _, right in rounds]
    assert stats.acceptance == pytest.approx([share([each[k] for each in was_accepted]) for k in range(most)])
    after_the_one_before = [share([each[k] for each in was_accepted if k == 0 or each[k - 1]]) for k in range(most)]
    assert stats.conditional_acceptance == pytest.approx(after_the_one_before)


def test_they_are_printed_in_a_line():
    stats = counted([(2, 2), (2, 1), (2, 0), (2, 1)])
    rates = "drafts accepted at each position, %: 75, 25"
    assert str(stats) == f"{stats.tokens} tokens in 4 verification rounds: tau {stats.tau:.2f}, {rates}"
    assert f"emitted={stats.emitted}" in repr(stats)  # which has all
    batch = SpeculationStats(tokens=1, rounds=1, of_batch=[stats, stats])
    assert (
        str(batch) == "1 tokens of 2 rows in 1 verification round: tau 0.00, drafts accepted at each position, %: none"
    )


@settings(deadline=None, max_examples=60)
@given(FORWARDS, FORWARDS)
def test_two_calls_statistics_add_up_to_those_of_all_their_rounds(first, second):
    both, added, whole = counted(first), counted(second), counted(first + second)
    both.draft_seconds, both.verify_seconds, both.loop_seconds = 1, 2, 4
    added.draft_seconds, added.verify_seconds, added.loop_seconds = 8, 16, 64
    both.written, both.by_head, added.written, added.by_head = [0, 2], [False, True], [1], [True]
    alone = counted(second)
    both += added
    whole.tokens += 1  # each call's prefill writes one
    whole.draft_seconds, whole.verify_seconds, whole.loop_seconds = 9, 18, 68
    whole.written, whole.by_head = [0, 2, 1], [False, True, True]
    assert both == whole
    both.add_round(3, 2, chain(4))
    assert (added.emitted, added.accepted) == (alone.emitted, alone.accepted)  # what was added is not touched


@pytest.fixture
def waits(monkeypatch):
    """The accelerator's, which is not there."""
    seen = []
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: seen.append((threading.get_ident(), device)))
    return seen


GPU = torch.device("cuda:1")


def now(device):
    return clock(device)()


def elsewhere(call):
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


def test_exact_times_wait_for_the_accelerator_in_their_own_thread_alone(waits):
    me = threading.get_ident()
    before = time.perf_counter()
    assert before <= now(GPU) <= time.perf_counter() and waits == []
    with exact_timing():
        now(GPU)
        assert waits == [(me, GPU)]
        now(torch.device("cpu"))
        elsewhere(lambda: now(GPU))
        assert waits == [(me, GPU)]
        with exact_timing():
            now(GPU)
        now(GPU)  # still, after an inner one
        assert waits == [(me, GPU)] * 3
    now(GPU)
    assert len(waits) == 3


def test_exact_times_elsewhere_or_in_vain_change_nothing_here(waits):
    entered, leave = threading.Event(), threading.Event()

    def measure():
        with exact_timing():
            entered.set()
            leave.wait(10)
            now(GPU)

    other = threading.Thread(target=measure)
    other.start()
    assert entered.wait(10)
    now(GPU)
    assert waits == []
    leave.set()
    other.join()
    assert [device for _, device in waits] == [GPU]
    with pytest.raises(KeyError), exact_timing():
        raise KeyError
    now(GPU)
    assert len(waits) == 1


def rounds_of(stats, new):
    """What the kept trees say was written, by token."""
    told = {}
    for kept in stats.trees:
        assert kept.drafts.path(kept.accepted[-1]) == kept.accepted if kept.accepted else True
        assert kept.anchor == new[kept.first - 1] and kept.drafts.q is None
        tokens = kept.drafts.tokens[kept.accepted].tolist() + ([] if kept.own is None else [kept.own])
        told |= dict(zip(kept.tokens, tokens, strict=True))
        positions = [kept.drafts.depths[node] for node in kept.accepted] + [0] * (kept.own is not None)
        assert [stats.written[token] for token in kept.tokens] == positions
    return told


@pytest.mark.parametrize("options", [{}, {"tree_budget": 9}, {"do_sample": True, "tree_budget": 9}])
def test_trees_are_kept_where_that_is_asked_for(options):
    target = tiny_target()
    drafter = half_right(target, prompt(9), max_new_tokens=30)
    drafter.bind(target)
    options = {
        "assistant_model": drafter,
        "do_sample": False,
        "max_new_tokens": 30,
        "num_assistant_tokens": 4,
    } | options
    target.generate(prompt(9), **options)
    assert drafter.last_stats.trees == []
    with keep_trees():
        new = target.generate(prompt(9), **options)[0, 9:].tolist()
    stats = drafter.last_stats
    assert len(stats.trees) == stats.rounds and sum(len(kept.drafts) for kept in stats.trees) == stats.nodes
    assert [len(kept.accepted) for kept in stats.trees] == stats.accepted and sum(stats.accepted)
    told = rounds_of(stats, new)
    assert [told[token] for token in sorted(told)] == new[1 : 1 + len(told)] and len(told) == sum(stats.emitted)
    with keep_trees(), keep_trees():
        pass
    target.generate(prompt(9), **options)
    assert drafter.last_stats.trees == []


def test_a_thread_keeps_its_own_trees_alone():
    target = tiny_target()
    drafter = half_right(target, prompt(9), max_new_tokens=20)
    drafter.bind(target)
    seen = []

    def generate():
        target.generate(prompt(9), assistant_model=drafter, do_sample=False, max_new_tokens=20)
        seen.append(drafter.last_stats.trees)

    with keep_trees():
        elsewhere(generate)
    assert seen == [[]]


def test_a_tree_in_which_the_text_ends_has_no_token_of_the_targets_own():
    target = tiny_target()
    drafter = half_right(target, prompt(9), max_new_tokens=30)
    drafter.bind(target)
    options = {"assistant_model": drafter, "do_sample": False, "max_new_tokens": 30, "num_assistant_tokens": 4}
    new, written = target.generate(prompt(9), **options)[0, 9:].tolist(), drafter.last_stats.written
    last = max(token for token in range(30) if written[token] and new.index(new[token]) == token)
    with keep_trees():
        target.generate(prompt(9), eos_token_id=new[last], **options)
    stats = drafter.last_stats
    assert stats.trees[-1].own is None and stats.trees[-1].tokens[-1] == last
    assert rounds_of(stats, new) == dict(enumerate(new[1 : last + 1], start=1))
