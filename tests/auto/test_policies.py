"""As many drafts as pay: what is admitted, what is measured, when drafting stops; the text stays the target's."""

import copy
import itertools
import math
import pickle
import random
from collections import defaultdict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LogitsProcessorList

from hf_hyperdflash import DeepseekV4MTPDrafter, PromptLookupDrafter
from hf_hyperdflash.auto.costs import RoundCosts
from hf_hyperdflash.auto.policies import FEW, RARE, ChainPolicy, DraftingStats, FixedPolicy, Probes, TreePolicy
from hf_hyperdflash.decoding import bind as binding
from hf_hyperdflash.decoding import continuation
from hf_hyperdflash.decoding import loop as decoding
from hf_hyperdflash.drafters.sampling import DraftSampler
from hf_hyperdflash.targets.caches.name import CACHE, cache_of
from hf_hyperdflash.targets.registry import target_of
from hf_hyperdflash.trees.growth import DraftStep
from hf_hyperdflash.trees.tree import DraftTree

from ..conftest import half_right, prompt, tiny_drafter, tiny_target
from ..helpers.draft_trees import SAMPLING_RULES, steps_by
from ..helpers.enumerated_draws import every_outcome
from ..helpers.families import qwen3
from ..helpers.headed_drafters import headed
from ..helpers.schedules import have_learned, outcome
from ..helpers.unrolled import unrolled

PLAIN, START, EACH = 0.020, 0.026, 0.002  # seconds of a round: without its drafter, with it, and of each draft


def seconds(drafts: int | None) -> float:
    return PLAIN if drafts is None else START + EACH * drafts


def experienced(tokens: float = 3.0, span: float = 0.04) -> DraftingStats:
    """Of rounds that cost as above, and write `tokens` in `span` seconds."""
    known = DraftingStats(tokens=tokens, cost=span / PLAIN, rounds=100, trials=100)
    for drafts in (8, None, 4):
        known.costs.observe(100, drafts, seconds(drafts), is_trial=True)
    for drafts in (*range(9), None) * 40:
        known.costs.observe(100, drafts, seconds(drafts))
    return known


def begun(known: DraftingStats, room: int = 8) -> ChainPolicy:
    """In a round that is not its generation's first."""
    policy = ChainPolicy(known)
    tokens, rounds = known.tokens, known.rounds
    policy.begin(99, [room])
    policy.end([outcome(0, 0)], seconds(0))
    known.is_drafting, known.probes = True, Probes(64)
    assert policy.begin(100, [room]) == room
    assert (tokens, rounds) == (known.tokens, known.rounds)
    return policy


# What is admitted


@settings(deadline=None)
@given(st.lists(st.floats(0.01, 0.99), min_size=1, max_size=8), st.floats(1.0, 8.0), st.floats(0.02, 0.08))
def test_admitted_are_as_many_as_gain_most(chances, tokens, span):
    known = experienced(tokens, span)
    schedule = begun(known, len(chances))
    admitted = 0
    while admitted < len(chances) and schedule.is_open() and schedule.admits(chances[admitted]):
        admitted += 1
    rate = max(tokens / span, 1 / PLAIN)
    through = list(itertools.accumulate(chances, lambda a, b: a * b))
    gains = [sum(through[:count]) - rate * EACH * count for count in range(len(chances) + 1)]
    # As far as costs are known: the predicted price of a draft is within a hundredth of the true one.
    assert gains[admitted] >= max(gains[1:]) - 0.01 * rate * EACH * len(chances)  # one is made in any case


def test_nothing_is_asked_of_the_drafter_that_even_a_certain_draft_would_not_pay():
    schedule = begun(experienced(5.0, 0.04))  # a draft has to be accepted in a quarter of all rounds
    assert schedule.is_open() and schedule.admits(0.4) and schedule.is_open() and not schedule.admits(0.5)
    assert schedule.admits(0.7) and schedule.is_open() and not schedule.admits(0.8)
    schedule = begun(experienced(5.0, 0.009))  # more than any draft can bring: one is made, as the drafter was asked
    assert schedule.is_open() and schedule.admits(0.1)
    assert not schedule.is_open() and not schedule.admits(1.0)


def test_a_tree_that_nobody_admitted_is_cut_without_a_look_at_it():
    chain = DraftTree.chain(torch.arange(6), list(torch.eye(6)))
    schedule = begun(experienced(5.0, 0.04))
    cut = schedule.cut(chain)
    assert cut.tokens.tolist() == [0, 1] and len(cut.q) == 2  # 0.7 and 0.49: 0.34 after two, 0.12 after three
    assert schedule.cut(chain) is chain  # they have been admitted
    assert FixedPolicy().cut(chain) is chain
    tree = DraftTree(torch.arange(3), (-1, -1, 0))
    assert begun(experienced(5.0, 0.04)).cut(tree) is tree


def test_only_drafts_whose_fate_is_known_are_counted():
    for accepted, is_last, told in (
        (2, False, [1, 1, 0]),
        (2, True, [1, 1]),
        (0, False, [0]),
        (4, False, [1, 1, 1, 1]),
    ):
        known = experienced(3.0, 0.06)
        schedule = begun(known)
        heard = []
        known.acceptance.observe = lambda signal, right, heard=heard: heard.append((signal, right))
        signals = [0.9, 0.91, 0.92, 0.93]
        assert all(map(schedule.admits, signals))
        schedule.end([outcome(4, accepted, is_last)], 0.03)
        assert heard == list(zip(signals, map(bool, told)))


# What is measured


def test_drafts_that_cost_as_much_together_as_one_are_admitted_together():
    """Kernels have widths: four drafts more take no longer than one."""

    def in_steps(drafts):
        return PLAIN if drafts is None else START + (0.012 if drafts > 4 else 0.0)

    known, generator = DraftingStats(tokens=3.0, cost=0.04 / PLAIN, rounds=100, trials=100), random.Random(0)
    for drafts in (8, None, 4):
        known.costs.observe(100, drafts, in_steps(drafts), is_trial=True)
    for _ in range(1200):
        drafts = generator.choice([None, *range(9)])
        known.costs.observe(100, drafts, in_steps(drafts))
    for chance, count in ((0.7, 4), (0.95, 8)):  # 0.9 tokens in 12 ms
        schedule = begun(known)
        admitted = 0
        while admitted < 8 and schedule.is_open() and schedule.admits(chance):
            admitted += 1
        assert admitted == count


def test_a_machine_that_gets_slower_changes_nothing_of_what_pays():
    """All numbers of drafts get dearer alike, and less is written in a second: were it not so, noise would decide."""
    known = experienced()
    for drafts in (4, None, 8, 1) * 100:
        known.costs.observe(100, drafts, seconds(drafts))

    def admitted() -> int:
        schedule, count = begun(known), 0
        while count < 8 and schedule.is_open() and schedule.admits(0.7):
            count += 1
        return count

    before = admitted()
    for drafts in (4, None, 8, 1) * 10:
        known.costs.observe(100, drafts, 1.6 * seconds(drafts))
    assert 2 < before < 8 and admitted() == before


def test_slow_first_rounds_do_not_make_many_drafts_dear():
    """A drafter's first round with a number of drafts takes twice as long, and what is tried first comes first."""
    known = DraftingStats()
    schedule, seen, made = ChainPolicy(known), set(), []
    for _ in range(60):
        count, drafts = schedule.begin(100, [8]), 0
        while drafts < count and schedule.is_open() and schedule.admits(0.9):
            drafts += 1
        key = drafts if count else None
        took = seconds(key) * (1 if key in seen or key is None else 2)
        seen.add(key)
        made.append(drafts)
        schedule.end([outcome(drafts, drafts)], took)
    assert made[-20:] == [8] * 20
    predicted = known.costs.predict(100, 8)
    assert predicted[8] == pytest.approx(seconds(8) / PLAIN, rel=0.1)


def test_what_is_not_known_is_tried():
    known, tried = DraftingStats(), []
    schedule = ChainPolicy(known)
    for _ in range(12):
        count = schedule.begin(100, [8])
        tried.append(count)
        drafts = 0
        while drafts < count and schedule.is_open() and schedule.admits(0.99):
            drafts += 1
        schedule.end([outcome(drafts, drafts)], seconds(drafts if count else None))
    assert tried == [8, 8, 0, 8, 4, *[8] * 7]  # the first two take longer than others, and count for nothing
    assert known.costs.predict(100, 4)[4] == pytest.approx(seconds(4) / PLAIN, rel=0.12)
    schedule = ChainPolicy(known)  # the next generation knows
    assert [schedule.begin(100, [8]), schedule.begin(100, [3])] == [8, 3]


def test_a_drafter_of_one_token_is_not_tried_for_ever():
    known = DraftingStats()
    schedule = ChainPolicy(known)
    for _ in range(14):
        count = schedule.begin(100, [1])
        admitted = count and schedule.admits(0.9)
        schedule.end([outcome(int(admitted), int(admitted))], seconds(int(admitted) if count else None))
    assert known.rounds >= 4


def test_a_round_that_tells_nothing_is_no_trial():
    """One that compiled takes seconds: a target that is slow once without drafts would make them seem free."""
    known = DraftingStats()
    schedule = ChainPolicy(known)
    for place in range(30):
        count = schedule.begin(100, [8])
        admitted = sum(schedule.admits(0.0) for _ in range(count))
        made = outcome(admitted, 0)
        schedule.end([made], None if place % 3 else seconds(admitted if count else None))
    assert known.is_tried and known.costs.predict(100, 8)[8] > 1.1


# When drafting stops


@pytest.mark.parametrize("accepted", [0, 1, 2])
def test_a_round_is_judged_by_what_it_brought_and_what_such_rounds_take(accepted):
    known = experienced()
    policy, known.rounds = begun(known), 0  # the first counts alone
    assert policy.admits(0.9) and policy.admits(0.8)
    policy.end([outcome(2, accepted, True)], 2 * seconds(2))
    assert known.tokens == 1 + accepted and known.cost == pytest.approx(seconds(2) / PLAIN, rel=0.05)


def test_a_probe_of_a_drafter_that_does_not_pay_makes_a_draft():
    known = experienced()
    known.is_drafting, known.probes = False, Probes(1)
    policy = ChainPolicy(known)
    policy.begin(99, [8])
    policy.end([outcome(0, 0)], seconds(None))
    assert policy.begin(100, [8]) == 8
    assert [policy.is_open() and policy.admits(0.001) for _ in range(2)] == [True, False]


def test_a_probe_that_paid_is_repeated_soon():
    known = DraftingStats(is_drafting=False, tokens=1.0, cost=2.0, rounds=FEW, probes=Probes(RARE))
    known.judge(1.0, 1.5)
    assert not known.is_drafting and known.probes.interval == RARE
    known.judge(2.0, 1.5)
    assert not known.is_drafting and known.probes == Probes(FEW)
    for _ in range(FEW):
        known.judge(3.0, 1.5)
    assert known.is_drafting


def test_a_loss_that_chance_can_explain_is_none():
    """A batch's rounds say more than one text's, and a drafter that is never right leaves little to chance."""
    for tokens, texts, stops in ((1.9, 1, False), (1.9, 16, True), (1.0, 1, True)):
        known = DraftingStats(tokens=tokens, cost=tokens / 0.95, rounds=100)
        known.judge(tokens, tokens / 0.95, texts)
        assert known.is_drafting != stops


def test_means_are_of_recent_rounds():
    known = experienced(tokens=1.0, span=0.04)
    for _ in range(1000):
        known.judge(1.0, 0.1)
    for _ in range(200):
        known.judge(5.0, 0.1)
    assert known.tokens > 4.5


def test_the_first_trial_tells_nothing_of_costs():
    known, heard = DraftingStats(), []
    known.costs.observe = lambda *told: heard.append(told[1])
    policy = ChainPolicy(known)
    for _ in range(5):  # the first of the generation, and four trials
        policy.begin(100, [8])
        policy.end([outcome(8 if policy.is_asked else 0, 0)], 0.02)
    assert heard == [None, 8, 8]


def test_what_a_round_without_drafts_brought_is_what_counts():
    known = experienced()
    schedule, known.rounds = begun(known), 0
    schedule.end([outcome(0, 0)], seconds(0))
    assert known.tokens == 1


def simulated(known: DraftingStats, rounds: int, chance: float, generator: torch.Generator, noise: float = 0.0):
    """Tokens and seconds of rounds of a drafter whose drafts are accepted by `chance`, on a machine whose times are
    `noise` apart, as standard deviation of their logarithm."""
    schedule, tokens, spent = ChainPolicy(known), 0, 0.0
    for _ in range(rounds):
        count, drafts = schedule.begin(100, [8]), 0
        while drafts < count and schedule.is_open() and schedule.admits(0.5):
            drafts += 1
        accepted = next((k for k in range(drafts) if torch.rand((), generator=generator) >= chance), drafts)
        took = seconds(drafts if count else None) * math.exp(noise * float(torch.randn((), generator=generator)))
        schedule.end([outcome(drafts, accepted)], took)
        tokens, spent = tokens + 1 + accepted, spent + took
    return tokens, spent


def test_a_hopeless_drafter_costs_next_to_nothing_and_a_good_one_is_found_again():
    known, generator = DraftingStats(), torch.Generator().manual_seed(0)
    tokens, spent = simulated(known, 2000, 0.02, generator)
    assert spent / tokens < 1.02 * PLAIN
    assert not known.is_drafting
    simulated(known, 700, 0.9, generator)
    assert known.is_drafting
    tokens, spent = simulated(known, 500, 0.9, generator)
    best = max((1 - 0.9 ** (k + 1)) / 0.1 / seconds(k) for k in range(9))
    assert tokens / spent > 0.93 * best


def test_a_drafter_that_pays_a_little_is_not_given_up_by_bad_luck():
    """Ten drafters whose rounds bring a tenth more than their price, through 400 rounds each."""
    asked = 0
    for seed in range(10):
        known, generator = DraftingStats(), torch.Generator().manual_seed(seed)
        schedule = ChainPolicy(known)
        for _ in range(400):
            count = schedule.begin(100, [8])
            admitted = 0
            while schedule.is_open() and count and admitted < 2 and schedule.admits(0.9):
                admitted += 1
            accepted = sum((torch.rand(admitted, generator=generator) < 0.5).long().cumprod(0).tolist())
            asked += bool(count)
            schedule.end([outcome(admitted, accepted)], 0.0278 + EACH * admitted if count else PLAIN)
    assert asked > 0.8 * 4000


@pytest.mark.parametrize("chance", [0.3, 0.5, 0.7, 0.9])
def test_it_is_near_the_best_fixed_number(chance):
    known, generator = DraftingStats(), torch.Generator().manual_seed(1)
    tokens, spent = simulated(known, 3000, chance, generator)
    fixed = [(1 - chance ** (k + 1)) / (1 - chance) / seconds(k) for k in range(1, 9)]
    assert tokens / spent > 0.96 * max(1 / PLAIN, *fixed)


def test_a_restless_machine_is_no_reason_to_stop_drafting():
    """Rounds that take half or twice as long as others by chance: drafting pays by a third and looks no dearer."""
    tokens, spent, asked, seeds = 0, 0.0, 0, 12
    for seed in range(seeds):
        known, generator = DraftingStats(), torch.Generator().manual_seed(seed)
        simulated(known, 300, 0.6, generator, noise=0.5)
        for _ in range(30):
            made = simulated(known, 50, 0.6, generator, noise=0.5)
            tokens, spent, asked = tokens + made[0], spent + made[1], asked + known.is_drafting
    mean = math.exp(0.5**2 / 2)  # of times whose logarithms are so far apart
    best = max((1 - 0.6 ** (k + 1)) / 0.4 / seconds(k) for k in range(1, 9)) / mean
    assert tokens / spent > 0.9 * best and asked > 0.75 * seeds * 30, (tokens / spent / best, asked / seeds / 30)


def test_what_seemed_too_dear_is_seen_again():
    """More than four drafts took twice as long when they were first made, and nothing would make them again."""
    known, generator = DraftingStats(trials=100), torch.Generator().manual_seed(0)
    for i, drafts in enumerate((4, 8, None, 1, 2, 3, 4, 5, 6, 7, 8) * 4):
        slow = 2 if drafts is not None and drafts > 4 else 1
        known.costs.observe(100, drafts, slow * seconds(drafts), is_trial=i < 3)
    dear = known.costs.predict(100, 8)[8]
    simulated(known, 6000, 0.95, generator)
    tokens, spent = simulated(known, 1000, 0.95, generator)
    best = (1 - 0.95**9) / 0.05 / seconds(8)
    assert dear > 1.4 * seconds(8) / PLAIN and tokens / spent > 0.95 * best


def test_a_trial_has_all_the_room_and_no_more():
    """Where drafting pays, trials go on, further and further apart: with all drafts, with none, and with half of
    them, however little seems worth it. Near the end of a text there is room for none."""
    known, tried = DraftingStats(), []
    schedule = ChainPolicy(known)
    for i in range(1000):
        room, trials = 0 if i in (3, 4, 5, 6) else 8, known.trials
        count, drafts = schedule.begin(100, [room]), 0
        assert count <= room
        while drafts < count and schedule.is_open() and schedule.admits(0.01):  # not worth a second one
            drafts += 1
        known.is_drafting = True
        schedule.end([outcome(drafts, 0)], seconds(drafts if schedule.is_asked else None))
        tried += [drafts] if known.trials > trials else []
        assert drafts <= 1 or known.trials > trials or not known.is_tried
    assert len(tried) > 10 and tried == ([8, 0, 8, 4] * 40)[: len(tried)]


def test_where_drafting_pays_rounds_without_it_are_rare():
    known, generator = DraftingStats(), torch.Generator().manual_seed(0)
    schedule, plain = ChainPolicy(known), 0
    for _ in range(4000):
        count, drafts = schedule.begin(100, [8]), 0
        plain += not count
        while drafts < count and schedule.is_open() and schedule.admits(0.5):
            drafts += 1
        accepted = sum((torch.rand(drafts, generator=generator) < 0.9).long().cumprod(0).tolist())
        schedule.end([outcome(drafts, accepted)], seconds(drafts if count else None))
    assert 5 < plain < 4000 / 128


# The text


def conditional(path: tuple[int, ...], kind: int) -> torch.Tensor:
    """A distribution over four tokens after a path, the drafter's (0) or the target's (1)."""
    generator = torch.Generator().manual_seed(hash((*path, kind, 7)) % 2**31)
    return (
        torch.rand(4, generator=generator).pow(2).softmax(-1)
        if kind
        else torch.rand(4, generator=generator).softmax(-1)
    )


def law_of(drafted, rule) -> dict[tuple[int, ...], float]:
    """Of three tokens of text, where `drafted` gives a round's tree."""

    def text() -> tuple[int, ...]:
        tree = drafted()
        written: list[int] = []
        for token, _ in steps_by(rule, tree, lambda path: conditional(path, 1)):
            written.append(token)
        while len(written) < 3:
            written.append(int(torch.multinomial(conditional(tuple(written), 1), 1)))
        return tuple(written[:3])

    law: dict[tuple[int, ...], float] = defaultdict(float)
    for probability, written in every_outcome(text):
        law[written] += probability
    return law


def drafted_by(schedule_of):
    def drafted() -> DraftTree:
        schedule = schedule_of()
        sampler = DraftSampler(LogitsProcessorList(), True, chain_admission=schedule)
        path: list[int] = []

        def steps(k, tokens, rows) -> DraftStep:
            path[:] = [*path[: max(k - 1, 0)], *([int(tokens[0])] if k else [])]
            return DraftStep(conditional(tuple(path), 0).log()[None])

        return sampler.grow(torch.zeros(1, 1, dtype=torch.long), 3, steps)

    return drafted


def target_law() -> dict[tuple[int, ...], float]:
    law = {}
    for text in itertools.product(range(4), repeat=3):
        law[text] = 1.0
        for place, token in enumerate(text):
            law[text] *= float(conditional(text[:place], 1)[token])
    return law


def strict() -> ChainPolicy:
    """One that stops at some places of some paths and goes on at others."""
    return begun(experienced(3.5, 0.05))


@pytest.mark.parametrize("rule", SAMPLING_RULES)
def test_text_drawn_at_random_is_distributed_as_the_targets(rule):
    lengths = {len(outcome) for _, outcome in every_outcome(lambda: tuple(drafted_by(strict)().tokens.tolist()))}
    assert len(lengths) > 1  # it depends on the path where drafting ends
    law, expected = law_of(drafted_by(strict), rule), target_law()
    assert all(law[text] == pytest.approx(expected[text], abs=1e-5) for text in expected)


@pytest.mark.parametrize("rule", SAMPLING_RULES)
def test_a_schedule_that_looks_at_the_token_changes_the_distribution(rule):
    def drafted() -> DraftTree:
        tree = drafted_by(lambda: None)()
        likely = [float(q[token]) for q, token in zip(tree.q, tree.tokens)]
        return tree.first(next((k for k, value in enumerate(likely) if value < 0.25), len(tree)))

    law, expected = law_of(drafted, rule), target_law()
    assert max(abs(law[text] - expected[text]) for text in expected) > 0.01


# The schedule knows the drafter's signals and rounds' times, and no target: each kind once, and one on either cache.
@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (tiny_target, "blind"), (tiny_target, "mtp"), (qwen3, "blind"), (qwen3, "state"), (qwen3, "confident"),
        (qwen3, "lookup"), (qwen3, "specblock"),
    ],
)  # fmt: skip
def test_greedy_text_is_the_targets(make, kind):
    target = make().eval()
    ids = prompt(12)
    drafter = {
        "blind": lambda: (
            half_right(target, ids, max_new_tokens=60) if make is tiny_target else tiny_drafter(target, reducer="fc")
        ),
        "state": lambda: headed(target, "state", reducer="fc"),
        "confident": lambda: headed(target, "markov", reducer="fc", confidence_head=True),
        "mtp": lambda: DeepseekV4MTPDrafter(target.config).eval(),
        "lookup": lambda: PromptLookupDrafter(target),
        "specblock": lambda: unrolled("specblock", target),
    }[kind]()
    plain = target.generate(ids, max_new_tokens=60, do_sample=False)
    drafter.bind(target)
    for _ in range(3):
        out = target.generate(
            ids, assistant_model=drafter, num_assistant_tokens="auto", max_new_tokens=60, do_sample=False
        )
        assert torch.equal(out, plain)
        assert 0 <= drafter.last_stats.tokens - 1 - sum(drafter.last_stats.emitted) <= 1  # no room before the end
        assert drafter.last_stats.tokens == out.shape[1] - 12
    whole = target.generate(
        ids, assistant_model=drafter, num_assistant_tokens="auto", max_new_tokens=20, do_sample=False,
        return_dict_in_generate=True,
    )  # fmt: skip
    gone_on = target.generate(
        whole.sequences, assistant_model=drafter, num_assistant_tokens="auto", max_new_tokens=40, do_sample=False,
        **{CACHE: cache_of(whole)},
    )  # fmt: skip
    assert torch.equal(gone_on, plain)


def test_probes_of_a_drafter_that_does_not_pay_become_rare():
    known, generator, probed = DraftingStats(), torch.Generator().manual_seed(0), []
    for _ in range(2000):
        simulated(known, 2, 0.0, generator)  # two rounds of a generation
        probed.append(known.probes.interval)
    assert not known.is_drafting and probed[-1] == RARE and {FEW, 2 * FEW, RARE // 2} <= {*probed}


def test_intervals_double():
    probes = Probes(RARE // 4)
    due = [call for call in range(1, 5 * RARE) if probes.is_due()]
    assert due == [int(RARE * times) for times in (0.25, 0.75, 1.75, 2.75, 3.75, 4.75)]


@pytest.mark.parametrize(("make", "wait"), [(tiny_target, 100), (qwen3, 150)])
def test_what_a_sleeping_drafter_takes_in_late(make, wait, monkeypatch):
    """All, and it drafts what a drafter would that never slept; after a long sleep what is near, the last 64 tokens at
    least."""
    target = make().eval()
    drafter, ids = tiny_drafter(target, reducer="fc"), prompt(12)
    drafter.bind(target)
    known = experienced(1.0, 0.06)
    monkeypatch.setattr(binding, "DraftingStats", lambda: known)
    known.is_drafting, known.probes, taken, extend = False, Probes(wait), [], drafter.extend

    def listened(target, context, residual, position_ids, next_ids):
        assert residual.shape[1] == position_ids.shape[1] == next_ids.shape[1]
        taken.append(position_ids[0].tolist())
        read.append(residual)
        extend(target, context, residual, position_ids, next_ids)

    read = []
    monkeypatch.setattr(drafter, "extend", listened)
    slept = target.generate(
        ids, assistant_model=drafter, num_assistant_tokens="auto", max_new_tokens=200, do_sample=False,
        return_dict_in_generate=True,
    )  # fmt: skip
    tokens = slept.sequences.shape[1] - 1
    assert drafter.last_stats.rounds > 150 and len(taken) < 70 and max(map(len, taken[1:])) < 128
    told = [position for positions in taken for position in positions]
    assert told == sorted(set(told)) and told[-1] == tokens - 1 and told[:12] == list(range(12))
    missing = sorted({*range(tokens)} - {*told})
    assert missing == ([] if wait == 100 else list(range(12, 12 + 64)))
    with torch.no_grad(), binding.capture_residual(target, drafter.target_layer_ids) as captured:
        target(slept.sequences)
    for positions, residual in zip(taken, read):  # of these tokens, and no others
        torch.testing.assert_close(residual, captured[0][:, positions], atol=1e-4, rtol=1e-4)
    awake = target.generate(
        ids, assistant_model=drafter, num_assistant_tokens=1, max_new_tokens=200, do_sample=False,
        return_dict_in_generate=True,
    )  # fmt: skip
    assert torch.equal(slept.sequences, awake.sequences)
    contexts = [continuation.context_of(cache_of(out), drafter) for out in (slept, awake)]
    assert contexts[0].end == contexts[1].end == cache_of(slept).get_seq_length()
    if missing:
        return
    after, positions = slept.sequences, torch.arange(slept.sequences.shape[1])[None]
    trees = [
        drafter.propose(target_of(target), context, after, positions, 6, DraftSampler(LogitsProcessorList(), True))
        for context in contexts
        if torch.manual_seed(0)
    ]
    for mine, other in zip(trees[0].q, trees[1].q):
        assert torch.allclose(mine, other, atol=1e-5)
        break  # what follows depends on the draw


def test_a_sleeping_drafter_has_its_text_where_the_text_ends(target, monkeypatch):
    drafter, ids = tiny_drafter(target), prompt(12)
    drafter.bind(target)
    known = experienced(1.0, 0.06)
    monkeypatch.setattr(binding, "DraftingStats", lambda: known)
    for length in (1, 2, 30, 64, 70):
        known.is_drafting, known.probes = False, Probes(400)
        out = target.generate(
            ids, assistant_model=drafter, num_assistant_tokens="auto", max_new_tokens=length, do_sample=False,
            return_dict_in_generate=True,
        )  # fmt: skip
        context = continuation.context_of(cache_of(out), drafter)
        assert context.end == cache_of(out).get_seq_length() == 11 + length


def test_what_is_known_is_kept_for_as_long_as_the_target_is_bound(target, monkeypatch):
    made, drafter, ids = [], tiny_drafter(target), prompt(12)
    monkeypatch.setattr(binding, "DraftingStats", lambda: made.append(DraftingStats()) or made[-1])
    drafter.num_draft_tokens = "auto"
    drafter.bind(target)

    def learned_in(asked, do_sample):
        """Which of all that were made changes with a generation."""
        before, fresh = list(map(pickle.dumps, made)), pickle.dumps(DraftingStats())
        asked.generate(ids, assistant_model=drafter, max_new_tokens=30, do_sample=do_sample)
        changed = [
            place
            for place, (known, old) in enumerate(itertools.zip_longest(made, before, fillvalue=fresh))
            if pickle.dumps(known) != old
        ]
        (place,) = changed
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
    target.generate(
        prompt(12), assistant_model=drafter, num_assistant_tokens="auto", max_new_tokens=20, do_sample=False,
        streamer=Slow(),
    )  # fmt: skip
    assert len(heard) > 5 and 0 < max(heard) < 1


def test_where_no_schedule_is(target):
    drafter, ids = half_right(target, prompt(12), max_new_tokens=40), prompt(12)
    plain = target.generate(ids, max_new_tokens=40, do_sample=False)
    drafter.bind(target)
    asked = {"assistant_model": drafter, "max_new_tokens": 40, "do_sample": False}
    trees = target.generate(ids, **asked, num_assistant_tokens="auto", tree_budget=9)
    assert torch.equal(trees, plain) and drafter.last_stats.nodes >= 8 * drafter.last_stats.rounds
    cache = cache_of(target.generate(ids, max_new_tokens=1, return_dict_in_generate=True))
    generator = target._get_candidate_generator(
        generation_config=target._prepare_generation_config(None, num_assistant_tokens="auto", max_length=60)[0],
        input_ids=ids, inputs_tensor=ids, logits_processor=None, assistant_model=drafter,
        model_kwargs={CACHE: cache},
    )  # fmt: skip
    assert generator.num_drafts == 6


@pytest.mark.parametrize("wrong", ["Auto", "", "6", 0, 7, 2.0, True])
def test_what_is_neither_a_number_nor_auto_is_refused(target, wrong):
    drafter = tiny_drafter(target)
    drafter.bind(target)
    with pytest.raises(
        ValueError, match=r"cannot draft .* expected a whole number from 1 to 6, or 'auto'\."
    ) as refused:
        drafter.num_draft_tokens = wrong
    advice = {7: "train one with a larger `num_draft_tokens`.", 0: "Leave `assistant_model` out for plain generation."}
    assert str(refused.value).endswith(advice.get(wrong if type(wrong) is int else None, "or 'auto'."))
    with pytest.raises(ValueError, match=r"cannot draft .* expected a whole number from 1 to 6, or 'auto'\."):
        target.generate(prompt(12), assistant_model=drafter, num_assistant_tokens=wrong, max_new_tokens=5)


def test_a_drafter_woken_by_another_generation_catches_up(target, monkeypatch):
    drafter, known = tiny_drafter(target), experienced(1.0, 0.06)
    drafter.bind(target)
    monkeypatch.setattr(binding, "DraftingStats", lambda: known)
    known.is_drafting, known.probes, propose, behind = False, Probes(10**6), drafter.propose, []

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
    asked = {"max_new_tokens": 30, "do_sample": False}
    plain = target.generate(prompt(12), **asked)
    out = target.generate(
        prompt(12), assistant_model=drafter, num_assistant_tokens="auto", streamer=Waking(), **asked
    )  # fmt: skip
    assert torch.equal(out, plain) and behind and set(behind) == {0}


# Trees


# Drawn text is compared with nothing here, so of drawn trees one from each way of growing them is enough.
@pytest.mark.parametrize(
    ("kind", "do_sample"),
    [
        *((kind, False) for kind in ("state", "mtp", "lookup", "specblock", "eagle3")),
        ("state", True),
        ("specblock", True),
    ],
)
def test_text_of_trees_of_any_size(target, kind, do_sample, monkeypatch):
    ids = prompt(12)
    drafter = {
        "state": lambda: headed(target, "state"),
        "mtp": lambda: DeepseekV4MTPDrafter(target.config).eval(),
        "lookup": lambda: PromptLookupDrafter(target),
        "specblock": lambda: unrolled("specblock", target),
        "eagle3": lambda: unrolled("eagle3", target),
    }[kind]()
    plain = None if do_sample else target.generate(ids, max_new_tokens=50, do_sample=False)
    drafter.bind(target)
    asked = {"assistant_model": drafter, "tree_budget": "auto", "max_new_tokens": 50, "do_sample": do_sample}
    known, verified = DraftingStats(), []
    end = TreePolicy.end

    def listened(self, outcomes, seconds):
        verified.append((self.are_trees, len(outcomes[0].tree)))
        end(self, outcomes, seconds)

    monkeypatch.setattr(TreePolicy, "end", listened)
    monkeypatch.setattr(binding, "DraftingStats", lambda: known)
    for _ in range(3):
        out = target.generate(ids, **asked)
        assert plain is None or torch.equal(out, plain)
        assert out.shape[1] <= 62
    assert {are_trees for are_trees, drafts in verified if drafts} == {False, True}
    assert {are_trees for are_trees, drafts in verified if not drafts} == {False, True}


def test_trees_that_cannot_be_verified_are_chains_that_pay(monkeypatch, caplog):
    target = qwen3().eval()
    drafter, ids = tiny_drafter(target, reducer="fc"), prompt(12)
    drafter.bind(target)
    monkeypatch.setattr(decoding, "verification_of", lambda family, cache: "chain")
    known = DraftingStats()
    monkeypatch.setattr(binding, "DraftingStats", lambda: known)
    plain = target.generate(ids, max_new_tokens=30, do_sample=False)
    out = target.generate(ids, assistant_model=drafter, tree_budget="auto", max_new_tokens=30, do_sample=False)
    assert torch.equal(out, plain) and "`tree_budget` is auto" in caplog.text
    assert have_learned(known.costs)


@pytest.mark.parametrize("kind", [ChainPolicy, TreePolicy])
def test_a_round_without_room_is_one_without_the_drafter(kind):
    """As the last of a text is: nothing is asked, no trial is spent, and its seconds are a plain round's."""
    stats = DraftingStats()
    policy = kind(stats)
    for _ in range(12):
        assert policy.begin(30, [0]) == 0 and not policy.is_asked
        policy.end([outcome(0, 0)], 0.01)
    assert stats.trials == 0 and not stats.is_tried
