"""How many drafts the rows of a batch make: what pays, settled before any is drawn, the same for all."""

import random

import pytest
import torch

from hf_hyperdflash import bind
from hf_hyperdflash.auto.acceptance import UNKNOWN, AcceptanceLine
from hf_hyperdflash.auto.policies import BatchPolicy, DraftingStats
from hf_hyperdflash.decoding import bind as binding
from hf_hyperdflash.decoding import loop as decoding
from hf_hyperdflash.decoding.bind import capture_residual
from hf_hyperdflash.decoding.stats import keep_trees

from ..conftest import prompt, tiny_drafter
from ..helpers import families
from ..helpers.schedules import have_learned, outcome
from ..helpers.tree_drafters import RandomChains

PLAIN, START = 0.020, 0.024  # seconds of a round: without the drafter and with it, but for its drafts


def simulated(known: DraftingStats, size: int, rounds: int, chance: float, each: float, seed: int = 0):
    """Tokens of a row and seconds of rounds whose drafts are accepted by `chance` and take `each` more."""
    generator, policy, tokens, spent = torch.Generator().manual_seed(seed), BatchPolicy(known), 0.0, 0.0
    for _ in range(rounds):
        made = policy.begin(100, [8] * size)
        kept = (torch.rand(size, made, generator=generator) < chance).long().cumprod(1).sum(1).tolist()
        took = START + each * made if policy.is_asked else PLAIN
        policy.end([outcome(made, accepted) for accepted in kept], took)
        tokens, spent = tokens + 1 + sum(kept) / size, spent + took
    return tokens, spent


@pytest.mark.parametrize("size", [2, 8])
def test_a_batch_in_which_no_draft_pays_drafts_none_and_looks_again(size):
    known = DraftingStats()
    simulated(known, size, 100, 0.2, each=0.004)
    tokens, spent = simulated(known, size, 1000, 0.2, each=0.004)
    assert spent / tokens < 1.02 * PLAIN
    simulated(known, size, 300, 0.9, each=0.004)
    tokens, spent = simulated(known, size, 500, 0.9, each=0.004)
    best = max((1 - 0.9 ** (k + 1)) / 0.1 / (START + 0.004 * k) for k in range(1, 9))
    assert tokens / spent > 0.95 * best


@pytest.mark.parametrize("each", [0.0005, 0.003, 0.008])
@pytest.mark.parametrize("chance", [0.4, 0.7, 0.95])
def test_it_is_near_the_best_number(chance, each):
    known = DraftingStats()
    simulated(known, 4, 200, chance, each)
    tokens, spent = simulated(known, 4, 1000, chance, each)
    fixed = [(1 - chance ** (k + 1)) / (1 - chance) / (START + each * k) for k in range(1, 9)]
    assert tokens / spent > 0.96 * max(1 / PLAIN, *fixed)


def test_what_pays_in_a_small_batch_need_not_in_a_large_one():
    """Each size has statistics of its own, and rows that end change the size."""
    known = DraftingStats()
    for _ in range(3):
        simulated(known, 2, 100, 0.8, each=0.001)
        simulated(known, 8, 100, 0.8, each=0.030)
    assert known.batches[2].is_drafting and not known.batches[4].is_drafting
    assert known.rounds == 0  # of single texts nothing was learned


def test_a_round_of_many_rows_tells_more_than_one_of_few():
    known = DraftingStats()
    for size in (2, 15):
        simulated(known, size, 6, 0.5, each=0.001)
        stats, heard = known.batches[size.bit_length()], []
        stats.judge = lambda *told, heard=heard: heard.append(told[2])
        simulated(known, size, 2, 0.5, each=0.001)
        assert heard == [size]


def test_a_batch_that_asks_its_drafter_makes_a_draft():
    """Also where none seems to pay: whether that is so is judged by what such a round took."""
    known = DraftingStats()
    simulated(known, 3, 6, 0.5, each=1.0)
    policy = BatchPolicy(known)
    policy.begin(100, [8] * 3)
    policy.end([outcome(8, 0)] * 3, START + 8.0)
    assert policy.begin(100, [8] * 3) == 1 and policy.is_asked


def test_rows_are_counted_by_the_drafts_that_they_made():
    """A row with less room, or a drafter that makes fewer drafts than it is asked for, rejects none of the others."""
    known = DraftingStats()
    policy = BatchPolicy(known)
    line, heard = AcceptanceLine(), []
    line.observe = lambda signal, accepted: heard.append((signal, accepted))
    known.batches[2] = DraftingStats(line)
    assert policy.begin(100, [8, 2, 6]) == 8
    by_a_stop = True  # what follows was not rejected
    policy.end([outcome(8, 3), outcome(2, 2), outcome(6, 1, by_a_stop)], 0.03)
    told = [(0, True)] * 3 + [(1, True)] * 2 + [(2, True), (3, False)]
    assert sorted(heard) == sorted((UNKNOWN ** (position + 1), accepted) for position, accepted in told)


@pytest.mark.parametrize("law", [(0.9, 0.5, 0.3, 0.2), (0.8, 0.8, 0.8, 0.8), (0.5, 0.7, 0.8, 0.85)])
def test_positions_are_on_a_line(law):
    """Acceptance that falls from one position to the next, that stays, that rises."""
    line, draw = AcceptanceLine(), random.Random(1)
    for _ in range(1500):
        for position, chance in enumerate(law):
            line.observe(UNKNOWN ** (position + 1), draw.random() < chance)
    assert [line(UNKNOWN ** (position + 1)) for position in range(4)] == pytest.approx(law, abs=0.12)


class RandomPolicy(BatchPolicy):
    """Any number of drafts in any round, often none."""

    most = 0  # in this round

    def begin(self, length, rooms):
        super().begin(length, rooms)
        RandomPolicy.most = drafts = chance.choice([0, 0, 1, 3, 6])
        self.is_asked = drafts > 0
        return drafts


chance = random.Random(0)


@pytest.mark.parametrize("family", [families.qwen3, families.gemma3])
def test_greedy_text_is_the_targets_whatever_is_drafted(family, monkeypatch):
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
    torch.manual_seed(0)
    target = bind(family().eval())
    rows = [prompt(length, seed=length)[0] for length in (9, 9, 9)]
    texts = [target.generate(row[None], do_sample=False, max_new_tokens=40)[0] for row in rows]
    drafter = Listener(target, texts)
    out = target.generate(
        torch.stack(rows), assistant_model=drafter, num_assistant_tokens="auto", do_sample=False, max_new_tokens=40
    )
    assert out.tolist() == [text.tolist() for text in texts]
    assert 1.0 < drafter.last_stats.tau
    for context, text in zip(drafter.contexts, texts):
        residual = torch.cat([part for part, *_ in context.seen], dim=1)
        with torch.no_grad(), capture_residual(target) as captured:
            target(text[None])
        torch.testing.assert_close(residual, captured[0][:, :-1], atol=1e-4, rtol=1e-4)


def test_it_hears_which_texts_have_ended(monkeypatch):
    class Hearing(BatchPolicy):
        def end(self, outcomes, seconds):
            super().end(outcomes, seconds)
            heard.append([outcome.is_last for outcome in outcomes])

    heard = []
    monkeypatch.setattr(decoding, "BatchPolicy", Hearing)
    torch.manual_seed(0)
    target = bind(families.qwen3().eval())
    ids = torch.cat([prompt(8, seed=seed) for seed in range(4)])
    texts = target.generate(ids, do_sample=False, max_new_tokens=20)
    drafter = RandomChains(target, list(texts))
    target.generate(ids, assistant_model=drafter, num_assistant_tokens="auto", do_sample=False, max_new_tokens=20)
    assert len(heard[0]) == 4 and all(heard[-1])
    assert [len(told) for told in heard[1:]] == [told.count(False) for told in heard[:-1]]


def test_what_is_known_of_batches_is_kept_from_one_to_the_next(monkeypatch):
    torch.manual_seed(0)
    target = bind(families.qwen3().eval())
    ids = torch.cat([prompt(8, seed=seed) for seed in range(4)])
    drafter = tiny_drafter(target)
    made, seen = [], []
    monkeypatch.setattr(binding, "DraftingStats", lambda: made.append(DraftingStats()) or made[-1])

    def generate():
        target.generate(ids, assistant_model=drafter, num_assistant_tokens="auto", do_sample=False, max_new_tokens=30)

    generate()
    (known,) = (each for each in made if each.batches)
    of_batches = known.batches[3].costs
    assert have_learned(of_batches) and not have_learned(known.costs) and not known.is_tried
    observe = of_batches.observe
    of_batches.observe = lambda *round_: seen.append(round_) or observe(*round_)
    generate()
    assert seen and known.batches[3].costs is of_batches and not any(have_learned(each.costs) for each in made)


def test_a_tree_of_any_size_is_a_chain_that_pays():
    torch.manual_seed(0)
    target = bind(families.qwen3().eval())
    ids = torch.cat([prompt(8, seed=seed) for seed in range(2)])
    plain = target.generate(ids, do_sample=False, max_new_tokens=20)
    drafter = tiny_drafter(target)
    with keep_trees():
        out = target.generate(ids, assistant_model=drafter, tree_budget="auto", do_sample=False, max_new_tokens=20)
    assert out.tolist() == plain.tolist()
    drafted = [tree.drafts for row in drafter.last_stats.rows for tree in row.trees]
    assert all(tree.is_chain for tree in drafted) and max(map(len, drafted)) > 1
