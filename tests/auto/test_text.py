"""Text of real models where the request says "auto": the target's, whatever is drafted, and what is known is kept."""

import copy
import itertools
import pickle
import random

import pytest
import torch
from transformers import LogitsProcessorList

from hf_hyperdflash import DeepseekV4MTPDrafter, PromptLookupDrafter, bind, capture_residual
from hf_hyperdflash.auto.costs import RoundCosts
from hf_hyperdflash.auto.policies import BatchPolicy, DraftingStats, Probes, TreePolicy
from hf_hyperdflash.decoding import bind as binding
from hf_hyperdflash.decoding import continuation
from hf_hyperdflash.decoding import loop as decoding
from hf_hyperdflash.decoding.stats import keep_trees
from hf_hyperdflash.drafters.sampling import DraftSampler
from hf_hyperdflash.targets.caches.name import CACHE, cache_of
from hf_hyperdflash.targets.registry import target_of

from ..conftest import half_right, prompt, tiny_drafter, tiny_target
from ..helpers import families
from ..helpers.families import qwen3
from ..helpers.headed_drafters import headed
from ..helpers.schedules import have_learned
from ..helpers.tree_drafters import RandomChains
from ..helpers.unrolled import unrolled

AUTO = {"num_assistant_tokens": "auto", "do_sample": False}
DRAFTERS = {
    "blind": lambda target: tiny_drafter(target, reducer="fc"),
    "half right": lambda target: half_right(target, prompt(12), max_new_tokens=60),
    "state": lambda target: headed(target, "state", reducer="fc"),
    "confident": lambda target: headed(target, "markov", reducer="fc", confidence_head=True),
    "mtp": lambda target: DeepseekV4MTPDrafter(target.config).eval(),
    "lookup": PromptLookupDrafter,
    "specblock": lambda target: unrolled("specblock", target),
    "eagle3": lambda target: unrolled("eagle3", target),
}


@pytest.fixture
def known(monkeypatch):
    """What is known of each pair that is bound."""
    known = DraftingStats()
    monkeypatch.setattr(binding, "DraftingStats", lambda: known)
    return known


def sleeping(known: DraftingStats, wait: int) -> None:
    """Let the drafter sleep for so many rounds."""
    for drafts, seconds in ((8, 0.042), (None, 0.02), (4, 0.034)):
        known.costs.observe(100, drafts, seconds, is_trial=True)
    known.tokens, known.cost, known.rounds, known.trials = 1.0, 3.0, 100, 100
    known.is_drafting, known.probes = False, Probes(wait)


# The policy knows the drafter's signals and rounds' times, and no target: each kind once, and one on either cache.
@pytest.mark.parametrize(
    ("make", "kind"),
    [(tiny_target, "half right"), (tiny_target, "mtp"),
     *((qwen3, kind) for kind in ("blind", "state", "confident", "lookup", "specblock"))],
)  # fmt: skip
def test_greedy_text_is_the_targets(make, kind):
    target, ids = make().eval(), prompt(12)
    drafter = DRAFTERS[kind](target)
    plain = target.generate(ids, max_new_tokens=60, do_sample=False)
    drafter.bind(target)
    for _ in range(2):
        out = target.generate(ids, assistant_model=drafter, max_new_tokens=60, **AUTO)
        stats = drafter.last_stats
        assert torch.equal(out, plain) and stats.tokens == out.shape[1] - 12
        assert 0 <= stats.tokens - 1 - sum(stats.emitted) <= 1  # no room before the end
    asked = {"assistant_model": drafter, **AUTO}
    whole = target.generate(ids, max_new_tokens=20, return_dict_in_generate=True, **asked)
    assert torch.equal(target.generate(whole.sequences, max_new_tokens=40, **asked, **{CACHE: cache_of(whole)}), plain)


# Drawn text is compared with nothing here, so of drawn trees one from each way of growing them is enough.
@pytest.mark.parametrize(
    ("kind", "do_sample"),
    [*((kind, False) for kind in ("state", "mtp", "lookup", "specblock", "eagle3")),
     ("state", True), ("specblock", True)],
)  # fmt: skip
def test_text_of_trees_of_any_size(target, kind, do_sample, known, monkeypatch):
    ids, verified, end = prompt(12), [], TreePolicy.end
    drafter = headed(target, "state") if kind == "state" else DRAFTERS[kind](target)
    plain = None if do_sample else target.generate(ids, max_new_tokens=50, do_sample=False)

    def listened(self, outcomes, seconds):
        verified.append((self.are_trees, len(outcomes[0].tree) > 0))
        end(self, outcomes, seconds)

    monkeypatch.setattr(TreePolicy, "end", listened)
    drafter.bind(target)
    for _ in range(3):
        out = target.generate(ids, assistant_model=drafter, tree_budget="auto", max_new_tokens=50, do_sample=do_sample)
        assert plain is None or torch.equal(out, plain)
        assert out.shape[1] <= 62
    assert set(verified) == set(
        itertools.product([False, True], repeat=2)
    )  # chains and trees, with drafts and without


def test_trees_that_cannot_be_verified_are_chains_that_pay(monkeypatch, known):
    target, ids = qwen3().eval(), prompt(12)
    drafter = tiny_drafter(target, reducer="fc")
    drafter.bind(target)
    monkeypatch.setattr(decoding, "verification_of", lambda family, cache: "chain")
    plain = target.generate(ids, max_new_tokens=30, do_sample=False)
    out = target.generate(ids, assistant_model=drafter, tree_budget="auto", max_new_tokens=30, do_sample=False)
    assert torch.equal(out, plain) and have_learned(known.costs)


def test_a_number_of_nodes_goes_with_any_number_of_drafts(target):
    ids = prompt(12)
    drafter = half_right(target, ids, max_new_tokens=40)
    plain = target.generate(ids, max_new_tokens=40, do_sample=False)
    drafter.bind(target)
    out = target.generate(ids, assistant_model=drafter, tree_budget=9, max_new_tokens=40, **AUTO)
    assert torch.equal(out, plain) and drafter.last_stats.nodes >= 8 * drafter.last_stats.rounds


# Batches


class RandomPolicy(BatchPolicy):
    """Any number of drafts in any round, often none."""

    draw, most = random.Random(0), 0

    def begin(self, length, rooms):
        super().begin(length, rooms)
        RandomPolicy.most = drafts = self.draw.choice([0, 0, 1, 3, 6])
        self.is_asked = drafts > 0
        return drafts


@pytest.mark.parametrize("family", [families.qwen3, families.gemma3])
def test_greedy_text_of_a_batch_is_the_targets_whatever_is_drafted(family, monkeypatch):
    """Also that of a drafter which sleeps and wakes: it has the whole of each row's residual then."""

    class Listener(RandomChains):
        def propose_batch(self, target, wanted):
            for each in wanted:
                told = torch.cat([following for *_, following in each.context.seen], dim=1)
                assert told[0].tolist() == each.ids[0, 1:].tolist()
            return super().propose_batch(target, wanted)

        def propose(self, target, context, ids, position_ids, count, sampler):
            assert 1 <= count <= RandomPolicy.most
            return super().propose(target, context, ids, position_ids, count, sampler)

    monkeypatch.setattr(decoding, "BatchPolicy", RandomPolicy)
    target = bind(family().eval())
    rows = torch.cat([prompt(9, seed=seed) for seed in range(3)])
    texts = [target.generate(row[None], do_sample=False, max_new_tokens=40)[0] for row in rows]
    drafter = Listener(target, texts)
    out = target.generate(rows, assistant_model=drafter, max_new_tokens=40, **AUTO)
    assert out.tolist() == [text.tolist() for text in texts] and drafter.last_stats.tau > 1.0
    for context, text in zip(drafter.contexts, texts):
        residual = torch.cat([part for part, *_ in context.seen], dim=1)
        with torch.no_grad(), capture_residual(target) as captured:
            target(text[None])
        torch.testing.assert_close(residual, captured[0][:, :-1], atol=1e-4, rtol=1e-4)


def test_it_hears_which_texts_have_ended(monkeypatch, known):
    class Hearing(BatchPolicy):
        def end(self, outcomes, seconds):
            super().end(outcomes, seconds)
            heard.append([outcome.is_last for outcome in outcomes])

    heard = []
    monkeypatch.setattr(decoding, "BatchPolicy", Hearing)
    target = bind(families.qwen3().eval())
    ids = torch.cat([prompt(8, seed=seed) for seed in range(4)])
    texts = target.generate(ids, do_sample=False, max_new_tokens=20)
    target.generate(ids, assistant_model=RandomChains(target, list(texts)), max_new_tokens=20, **AUTO)
    assert len(heard[0]) == 4 and all(heard[-1])
    assert [len(told) for told in heard[1:]] == [told.count(False) for told in heard[:-1]]
    assert have_learned(known.batches[3].costs) and not have_learned(known.costs)  # of single texts nothing


def test_a_tree_of_any_size_is_a_chain_that_pays_in_a_batch():
    target = bind(families.qwen3().eval())
    ids = torch.cat([prompt(8, seed=seed) for seed in range(2)])
    plain = target.generate(ids, do_sample=False, max_new_tokens=20)
    drafter = tiny_drafter(target)
    with keep_trees():
        out = target.generate(ids, assistant_model=drafter, tree_budget="auto", do_sample=False, max_new_tokens=20)
    assert out.tolist() == plain.tolist()
    drafted = [tree.drafts for row in drafter.last_stats.rows for tree in row.trees]
    assert all(tree.is_chain for tree in drafted) and max(map(len, drafted)) > 1


# Drafters that sleep


# Takes seconds: 200 tokens, one a round.
@pytest.mark.parametrize(("make", "wait"), [(tiny_target, 100), (qwen3, 150)])
def test_what_a_sleeping_drafter_takes_in_late(make, wait, monkeypatch, known):
    """All, and it drafts what a drafter would that never slept; after a long sleep what is near, the last 64 tokens at
    least."""
    target = make().eval()
    drafter, ids, taken, read = tiny_drafter(target, reducer="fc"), prompt(12), [], []
    drafter.bind(target)
    sleeping(known, wait)
    extend = drafter.extend

    def listened(target, context, residual, position_ids, next_ids):
        assert residual.shape[1] == position_ids.shape[1] == next_ids.shape[1]
        taken.append(position_ids[0].tolist())
        read.append(residual)
        extend(target, context, residual, position_ids, next_ids)

    monkeypatch.setattr(drafter, "extend", listened)
    asked = {"assistant_model": drafter, "max_new_tokens": 200, "return_dict_in_generate": True, "do_sample": False}
    slept = target.generate(ids, num_assistant_tokens="auto", **asked)
    tokens = slept.sequences.shape[1] - 1
    assert drafter.last_stats.rounds > 150 and len(taken) < 70 and max(map(len, taken[1:])) < 128
    told = [position for positions in taken for position in positions]
    assert told == sorted(set(told)) and told[-1] == tokens - 1 and told[:12] == list(range(12))
    missing = sorted({*range(tokens)} - {*told})
    assert missing == ([] if wait == 100 else list(range(12, 12 + 64)))
    with torch.no_grad(), capture_residual(target, drafter.target_layer_ids) as captured:
        target(slept.sequences)
    for positions, residual in zip(taken, read):  # of these tokens, and no others
        torch.testing.assert_close(residual, captured[0][:, positions], atol=1e-4, rtol=1e-4)
    awake = target.generate(ids, num_assistant_tokens=1, **asked)
    assert torch.equal(slept.sequences, awake.sequences)
    contexts = [continuation.context_of(cache_of(out), drafter) for out in (slept, awake)]
    assert contexts[0].end == contexts[1].end == cache_of(slept).get_seq_length()
    if not missing:
        after, positions = slept.sequences, torch.arange(slept.sequences.shape[1])[None]
        sampler = DraftSampler(LogitsProcessorList(), True)
        one, other = (drafter.propose(target_of(target), each, after, positions, 6, sampler) for each in contexts)
        torch.testing.assert_close(one.q[0], other.q[0], atol=1e-5, rtol=1e-5)  # what follows depends on the draw


def test_a_sleeping_drafter_has_its_text_where_the_text_ends(target, known):
    drafter = tiny_drafter(target)
    drafter.bind(target)
    for length in (1, 30, 64, 70):
        sleeping(known, 400)
        out = target.generate(
            prompt(12), assistant_model=drafter, max_new_tokens=length, return_dict_in_generate=True, **AUTO
        )
        context = continuation.context_of(cache_of(out), drafter)
        assert context.end == cache_of(out).get_seq_length() == 11 + length


def test_a_drafter_woken_by_another_generation_catches_up(target, monkeypatch, known):
    drafter, behind = tiny_drafter(target), []
    drafter.bind(target)
    sleeping(known, 10**6)
    propose = drafter.propose

    def listened(target, context, ids, *rest):
        behind.append(ids.shape[1] - 1 - context.end)
        return propose(target, context, ids, *rest)

    class Waking:
        count = 0

        def put(self, value):
            self.count += 1
            if self.count == 9:
                known.is_drafting, known.probes = True, Probes(64)

        def end(self):
            pass

    monkeypatch.setattr(drafter, "propose", listened)
    plain = target.generate(prompt(12), max_new_tokens=30, do_sample=False)
    out = target.generate(prompt(12), assistant_model=drafter, streamer=Waking(), max_new_tokens=30, **AUTO)
    assert torch.equal(out, plain) and behind and set(behind) == {0}


# What is known


def test_what_is_known_is_kept_for_as_long_as_the_target_is_bound(target, monkeypatch):
    made, drafter, ids = [], tiny_drafter(target), prompt(12)
    monkeypatch.setattr(binding, "DraftingStats", lambda: made.append(DraftingStats()) or made[-1])
    drafter.num_draft_tokens = "auto"
    drafter.bind(target)

    def learned_in(asked, do_sample):
        """Which of all that were made changes with a generation."""
        before, fresh = list(map(pickle.dumps, made)), pickle.dumps(DraftingStats())
        asked.generate(ids, assistant_model=drafter, max_new_tokens=30, do_sample=do_sample)
        pairs = itertools.zip_longest(made, before, fillvalue=fresh)
        (place,) = (place for place, (known, old) in enumerate(pairs) if pickle.dumps(known) != old)
        return place

    greedy, sampled = learned_in(target, False), learned_in(target, True)
    assert greedy != sampled and have_learned(made[greedy].costs)
    assert learned_in(target, False) == greedy and learned_in(target, True) == sampled
    copies = copy.deepcopy(target), pickle.loads(pickle.dumps(target))
    assert all(type(other) is type(target) for other in copies)
    drafter.unbind(target)
    drafter.bind(target)
    places = [greedy, sampled, *(learned_in(other, False) for other in (*copies, target))]
    assert len(set(places)) == 5  # copies know nothing, nor does a target that was given back


def test_the_callers_streamer_is_no_price_of_a_round(target, monkeypatch):
    class Slow:
        def put(self, value):
            clock[0] += 1000

        def end(self):
            pass

    clock, heard = [0.0], []

    def now():
        clock[0] += 1e-3
        return clock[0]

    monkeypatch.setattr("hf_hyperdflash.decoding.sequence.clock", lambda device: now)
    observe = RoundCosts.observe
    monkeypatch.setattr(RoundCosts, "observe", lambda self, *told: heard.append(told[2]) or observe(self, *told))
    drafter = tiny_drafter(target)
    drafter.bind(target)
    target.generate(prompt(12), assistant_model=drafter, max_new_tokens=20, streamer=Slow(), **AUTO)
    assert len(heard) > 5 and 0 < max(heard) < 1
