"""Text of real models where the request says "auto". That it is the target's with every kind of drafter is in
tests/contracts; here are drafters that are asked in some rounds alone, and what is learned of them."""

from __future__ import annotations

import copy
import pickle
import random
import time

import pytest
import torch

from hf_hyperdflash import bind, capture_residual
from hf_hyperdflash.auto.costs import RoundCosts
from hf_hyperdflash.auto.policies import BatchPolicy, ChainPolicy, FixedPolicy
from hf_hyperdflash.decoding.stats import keep_trees

from ..conftest import half_right, prompt, tiny_drafter, tiny_target
from ..helpers.families import gemma3, qwen3
from ..helpers.headed_drafters import headed
from ..helpers.tree_drafters import RandomChains, is_wide
from ..helpers.unrolled import unrolled

AUTO = {"num_assistant_tokens": "auto", "do_sample": False}


def at_random(round_: int) -> int:
    return random.Random(round_).choice([0, 0, 1, 3, 6])


def not_before(wakes: int):
    return lambda round_: 6 * (round_ >= wakes)


class Listener(RandomChains):
    """Has heard all of a text whenever it is asked, but for what is far away after a long sleep."""

    def propose(self, target, context, ids, position_ids, count, sampler):
        heard = {
            position: token for _, *parts in context.seen for position, token in zip(*(p[0].tolist() for p in parts))
        }
        expected = dict(enumerate(ids[0, 1:].tolist()))
        assert heard.items() <= expected.items() and set(expected) - set(heard) <= {*range(9, 9 + 64)}
        return super().propose(target, context, ids, position_ids, count, sampler)


# Takes seconds: up to 170 tokens, one a round.
@pytest.mark.parametrize(
    ("family", "rows", "rounds", "new"),
    [
        (qwen3, 3, at_random, 40), (gemma3, 3, at_random, 40), (tiny_target, 1, at_random, 40),
        (tiny_target, 1, not_before(100), 110), (qwen3, 1, not_before(150), 160),
        *((tiny_target, 1, not_before(1000), new) for new in (1, 30, 64, 70)),
    ],
)  # fmt: skip
def test_a_drafter_that_is_not_always_asked_hears_of_all_tokens(family, rows, rounds, new, monkeypatch):
    """Of all when it is asked, and where a text ends; after a sleep of 128 rounds of those that are near."""
    asked = iter(range(1000))

    def begin(self, length, rooms):
        count = min(rounds(next(asked)), max(rooms))
        self.asks_drafter = count > 0
        return count

    for kind in (ChainPolicy, BatchPolicy):
        monkeypatch.setattr(kind, "begin", begin)
        for name in ("sampler", "cut", "end"):
            monkeypatch.setattr(kind, name, getattr(FixedPolicy, name))
    target = bind(family().eval())
    ids = torch.cat([prompt(9, seed=seed) for seed in range(rows)])
    texts = torch.cat([target.generate(row, do_sample=False, max_new_tokens=new) for row in ids.split(1)])
    drafter = Listener(target, list(texts))
    assert torch.equal(target.generate(ids, assistant_model=drafter, max_new_tokens=new, **AUTO), texts)
    assert (drafter.last_stats.tau > 1) == bool(drafter.trees)
    for context, text in zip(drafter.contexts, texts, strict=True):
        residual, positions, _ = (torch.cat(parts, dim=1) for parts in zip(*context.seen))
        told = positions[0].tolist()
        assert told == sorted(set(told)) and told[-1] == len(text) - 2
        missing = sorted({*range(len(text) - 1)} - {*told})
        assert missing == (list(range(9, 9 + 64)) if new == 160 else [])
        with torch.no_grad(), capture_residual(target) as captured:
            target(text[None])
        torch.testing.assert_close(residual, captured[0][:, told], atol=1e-4, rtol=1e-4)


# Drawn text is compared with nothing here, so of drawn trees one from each way of growing them is enough.
@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("kind", ["state", "specblock"])
def test_trees_and_chains_of_any_size_are_tried(target, kind, do_sample):
    drafter = headed(target, "state") if kind == "state" else unrolled("specblock", target)
    plain, ids, seen = target.generate(prompt(12), max_new_tokens=50, do_sample=False), prompt(12), set()
    drafter.bind(target)
    for _ in range(3):
        with keep_trees():
            asked = dict(assistant_model=drafter, tree_budget="auto", max_new_tokens=50, do_sample=do_sample)
            out = target.generate(ids, **asked)
        assert out.shape[1] <= 62 if do_sample else torch.equal(out, plain)
        seen |= {(len(tree.drafts) > 0, is_wide(tree.drafts)) for tree in drafter.last_stats.trees}
    assert seen == {(False, False), (True, False), (True, True)}


def test_a_number_of_nodes_goes_with_any_number_of_drafts_and_a_batch_has_chains(target):
    ids, options = prompt(12), dict(max_new_tokens=40, do_sample=False)
    plain, drafter = target.generate(ids, **options), half_right(target, ids, max_new_tokens=40)
    drafter.bind(target)
    out = target.generate(ids, assistant_model=drafter, tree_budget=9, num_assistant_tokens="auto", **options)
    assert torch.equal(out, plain) and drafter.last_stats.nodes >= 8 * drafter.last_stats.rounds
    target = bind(qwen3().eval())
    ids, drafter = torch.cat([prompt(8, seed=seed) for seed in range(2)]), tiny_drafter(target)
    with keep_trees():
        out = target.generate(ids, assistant_model=drafter, tree_budget="auto", **options)
    assert torch.equal(out, target.generate(ids, **options))
    drafted = [tree.drafts for row in drafter.last_stats.rows for tree in row.trees]
    assert all(tree.is_chain for tree in drafted) and max(map(len, drafted)) > 1


# What is learned


@pytest.fixture
def learned(monkeypatch):
    """Where rounds were learned from, and what they took."""
    told, observe = [], RoundCosts.observe

    def listening(self, length, drafts, seconds, *rest, **options):
        told.append((self, seconds))
        observe(self, length, drafts, seconds, *rest, **options)

    monkeypatch.setattr(RoundCosts, "observe", listening)
    return told


def test_what_is_known_is_kept_for_as_long_as_the_target_is_bound(learned):
    target, places = qwen3().eval(), []
    drafter = tiny_drafter(target)

    def place(asked, do_sample=False, rows=1):
        """The number of the place that a generation learns in."""
        learned.clear()
        ids = prompt(12).repeat(rows, 1)
        asked.generate(ids, assistant_model=drafter, max_new_tokens=30, do_sample=do_sample, pad_token_id=0)
        (found,) = {id(costs): costs for costs, _ in learned}.values()
        if not any(each is found for each in places):
            places.append(found)
        return next(number for number, each in enumerate(places) if each is found)

    drafter.num_draft_tokens = "auto"
    drafter.bind(target)
    assert [place(target), place(target, True), place(target), place(target, True)] == [0, 1, 0, 1]
    assert [place(target, rows=3), place(target)] == [2, 0]
    copies = copy.deepcopy(target), pickle.loads(pickle.dumps(target))
    drafter.unbind(target)
    drafter.bind(target)
    # Copies know nothing, nor does a target that was given back.
    assert [place(other) for other in (*copies, target)] == [3, 4, 5]


def test_the_callers_streamer_is_no_price_of_a_round(target, monkeypatch, learned):
    class Slow:
        def put(self, value):
            clock[0] += 1000

        def end(self):
            pass

    clock = [0.0]

    def now():
        clock[0] += 1e-3
        return clock[0]

    monkeypatch.setattr(time, "perf_counter", now)
    drafter = tiny_drafter(target)
    drafter.bind(target)
    target.generate(prompt(12), assistant_model=drafter, max_new_tokens=20, streamer=Slow(), **AUTO)
    assert len(learned) > 5 and 0 < max(seconds for _, seconds in learned) < 1
