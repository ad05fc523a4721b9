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
        stats.add_round(None if drafts is None else chain(drafts), [*range(accepted)], torch.zeros(accepted + 2))
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
    batch = SpeculationStats(tokens=1, rounds=1, of_batch=[stats, stats])
    for said, words in ((stats, ["9 tokens", "4 ", "tau 2.00", "75, 25"]), (batch, ["2 rows", "1 ", "tau 0.00"])):
        assert "\n" not in str(said) and all(word in str(said) for word in words)


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
    both.add_round(chain(4), [0, 1], torch.zeros(4))
    assert (added.emitted, added.accepted) == (alone.emitted, alone.accepted)  # what was added is not touched


GPU = torch.device("cuda:1")


def elsewhere(call):
    """What a call returns in a thread of its own."""
    said = []
    thread = threading.Thread(target=lambda: said.append(call()))
    thread.start()
    thread.join()
    return said[0]


def test_exact_times_wait_for_the_accelerator_in_their_own_thread_alone(monkeypatch):
    waits = []  # the accelerator's, which is not there
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: waits.append((threading.get_ident(), device)))
    before = time.perf_counter()

    def looked(device=GPU):
        seen = len(waits)
        assert before <= clock(device)() <= time.perf_counter()
        return waits[seen:]

    def measured():
        with exact_timing():
            return looked()

    own = [(threading.get_ident(), GPU)]
    assert looked() == []
    with exact_timing():
        assert looked() == own and looked(torch.device("cpu")) == [] and elsewhere(looked) == []
        with exact_timing():
            assert looked() == own
        assert looked() == own  # still, after an inner one
    ((other, device),) = elsewhere(measured)
    assert looked() == [] and device == GPU and other != own[0][0]
    with pytest.raises(KeyError), exact_timing():
        raise KeyError
    assert looked() == []


def test_trees_are_kept_only_where_and_while_that_is_asked_for():
    """What they say is looked at in `test_requests`."""
    target = tiny_target()
    drafter = half_right(target, prompt(9), max_new_tokens=20)
    drafter.bind(target)

    def kept():
        target.generate(prompt(9), assistant_model=drafter, do_sample=False, max_new_tokens=20)
        return bool(drafter.last_stats.trees)

    assert not kept()
    with keep_trees():
        with keep_trees():
            pass
        assert kept()
        assert not elsewhere(kept)
    assert not kept()


def test_a_line_has_the_first_positions_and_what_was_known():
    stats = counted([(20, 20), (2, 0)])
    stats.known_nodes, stats.known_accepted = 18, 17
    assert f": {', '.join(['50'] * 16)}, …; copied or forced: 17 of 18" in str(stats)
    assert str(counted([(2, 1)])).endswith("%: 100, 0")
