"""How trees grow, against all paths there are and all ways that draws can go."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter, defaultdict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LogitsProcessorList
from transformers.generation import logits_process as stock

from hf_hyperdflash.auto.acceptance import AcceptanceLine
from hf_hyperdflash.drafters.sampling import DraftSampler
from hf_hyperdflash.trees.draws import sample_siblings
from hf_hyperdflash.trees.growth import (
    ACCEPTED,
    SHARPENED,
    Admission,
    DraftStep,
    DraftVocabulary,
    drawn,
    grow_best,
    level_sizes,
    most_probable,
)

from ..conftest import mostly_nightly
from ..helpers.draft_trees import SAMPLING_RULES, steps_by
from ..helpers.enumerated_draws import assert_law_is_the_targets, every_outcome

ANCHOR_TOKEN = 0
IDS = torch.tensor([[1, ANCHOR_TOKEN]])


class Talker:
    """A drafter whose logits depend on the whole path, which it knows only by what it is told of rows.

    Attributes:
        asked: The paths of each call.
    """

    def __init__(self, vocabulary: int, seed: int, sure: bool = False, holes: bool = False) -> None:
        self.vocabulary, self.seed, self.sure, self.holes = vocabulary, seed, sure, holes
        self.asked: list[list[tuple[int, ...]]] = []

    def logits(self, path: tuple[int, ...]) -> torch.Tensor:
        chance = random.Random(f"{self.seed} {path}")
        logits = [chance.gauss(0, 1.5) for _ in range(self.vocabulary)]
        if self.holes and chance.random() < 0.5:
            logits[chance.randrange(self.vocabulary)] = -math.inf
        return torch.tensor(logits)

    def confidence(self, path: tuple[int, ...]) -> float:
        return random.Random(f"sure {self.seed} {path}").random()

    def __call__(self, k: int, tokens: torch.Tensor, rows: torch.Tensor) -> DraftStep:
        assert len(self.asked) == k
        if k:
            paths = [(*self.asked[-1][row], token) for row, token in zip(rows.tolist(), tokens.tolist())]
        else:
            assert (tokens.tolist(), rows.tolist()) == ([ANCHOR_TOKEN], [0])
            paths = [()]
        self.asked.append(paths)
        sure = torch.tensor([self.confidence(path) for path in paths]) if self.sure else None
        return DraftStep(torch.stack([self.logits(path) for path in paths]), sure)


def as_they_are(prefixes: torch.Tensor, step: DraftStep, counts: list[int]) -> DraftStep:
    assert prefixes.shape[0] == step.logits.shape[0] == sum(counts)
    return step


def paths_of(tree) -> list[tuple[int, ...]]:
    return [tuple(tree.tokens[tree.path(node)].tolist()) for node in range(len(tree))]


@settings(deadline=None, max_examples=120)
@given(
    st.integers(2, 4), st.integers(1, 4), st.integers(1, 30), st.none() | st.integers(1, 6), st.integers(0, 10**6),
    st.booleans(),
)  # fmt: skip
def test_nodes_are_the_best_of_all_paths_or_of_those_that_go_on(vocabulary, depth, budget, width, seed, holes):
    """In plain loops. With a `width` the best nodes of all so far are kept, and so many of a level go on."""
    talker, kept, level = Talker(vocabulary, seed, holes=holes), {}, {(): 0.0}
    for _ in range(depth):
        found = {
            (*path, token): value + logp
            for path, value in level.items()
            for token, logp in enumerate((talker.logits(path).double() / SHARPENED).log_softmax(-1).tolist())
            if math.isfinite(logp)
        }
        kept |= found
        if width is None:
            level = found
            continue
        kept = {path: kept[path] for path in sorted(kept, key=kept.get, reverse=True)[:budget]}
        going = [path for path in sorted(found, key=found.get, reverse=True) if path in kept][:width]
        level = {path: found[path] for path in going}
    best = sorted(kept, key=kept.get, reverse=True)[:budget]
    (tree,) = most_probable(IDS[:, -1], [depth], budget, talker, as_they_are, width)
    assert sorted(paths_of(tree)) == sorted(best) and tree.q is None
    assert len(talker.asked) <= depth and all(len(paths) <= (width or budget) for paths in talker.asked)
    once = [path for paths in talker.asked for path in paths]
    assert len(once) == len(set(once))  # and of each node with children it was asked
    assert {path[:-1] for path in best} <= set(once)


def test_a_tree_asks_about_a_quarter_of_its_budget_a_level():
    asked = {}
    for budget in (2, 16, 40):
        talker = Talker(60, 1)
        DraftSampler(LogitsProcessorList(), False, tree_budget=budget).grow(IDS, 4, talker)
        asked[budget] = max(map(len, talker.asked))
    assert asked == {2: 1, 16: 4, 40: 10}


LAWS = [(2, 3, 4, False), (3, 2, 6, True), (3, 2, 3, False), (2, 2, 6, True), (4, 1, 3, True)]


@pytest.mark.parametrize(("vocabulary", "depth", "budget", "sure"), LAWS)
@pytest.mark.parametrize("holes", [False, True])
def test_drawn_trees_say_what_each_node_was_drawn_from(vocabulary, depth, budget, sure, holes):
    """Every way that the draws can go is as probable as the nodes' own q make it."""
    law, trees = defaultdict(float), {}
    for probability, (tree, talker) in every_outcome(lambda: grown(vocabulary, depth, budget, sure, holes)):
        law[tree.parents, tuple(tree.tokens.tolist())] += probability
        trees[tree.parents, tuple(tree.tokens.tolist())] = tree, talker
    for key, (tree, talker) in trees.items():
        of_q = math.prod(float(q[token]) for q, token in zip(tree.q, tree.tokens.tolist()))
        assert law[key] == pytest.approx(of_q, rel=1e-5)
        for node, path in enumerate(paths_of(tree)):
            siblings = tree.children[tree.parents[node]]
            left = talker.logits(path[:-1]).softmax(-1)
            left[tree.tokens[[other for other in siblings if other < node]]] = 0
            torch.testing.assert_close(tree.q[node], left / left.sum())
        assert len(set(paths_of(tree))) == len(tree) <= budget and max(tree.depths) <= depth
    assert any(len(children) > 1 for tree, _ in trees.values() for children in tree.children.values())


def test_levels_are_as_wide_whatever_the_text_and_children_go_where_the_drafter_is_sure():
    for sure in (False, True):
        trees = [drawn(IDS[:, -1], [4], 12, Talker(20, seed, sure), as_they_are)[0] for seed in range(20)]
        assert len({tuple(sorted(tree.depths)) for tree in trees}) == 1
        assert (len({tree.parents for tree in trees}) > 1) == sure


def grown(vocabulary, depth, budget, sure, holes=False, admission=None):
    talker = Talker(vocabulary, 5, sure, holes)
    return drawn(IDS[:, -1], [depth], budget, talker, as_they_are, admission)[0], talker


def assert_text_is_the_targets(rule, vocabulary: int, grow) -> None:
    """Draws and verification together, as an exact law over whole rounds."""
    target = Talker(vocabulary, 77)

    def p_after(path: tuple[int, ...]) -> torch.Tensor:
        return target.logits(path).double().softmax(-1)

    law = defaultdict(float)
    for probability, text in every_outcome(lambda: tuple(token for token, _ in steps_by(rule, grow(), p_after))):
        law[text] += probability
    assert_law_is_the_targets(law, p_after)


WORTH = mostly_nightly([(2, 3, 7, True, 0.48), (3, 2, 6, True, 0.08), (3, 2, 6, True, 0.04)])


@pytest.mark.parametrize(
    ("vocabulary", "depth", "budget", "sure", "least"), [*((*law, None) for law in [*LAWS, (2, 3, 5, True)]), *WORTH]
)
@pytest.mark.parametrize("rule", SAMPLING_RULES)
def test_text_with_drawn_trees_is_the_targets(rule, vocabulary, depth, budget, sure, least):
    """Also of trees that have no more than what is worth it, whose shape depends on what is drawn."""
    survival, shapes = AcceptanceLine(), set()
    survival.observe(0.6, True)  # so that it is not the drafter's word
    admission = None if least is None else Admission(survival, least)

    def grow():
        tree, talker = grown(vocabulary, depth, budget, sure, admission=admission)
        shapes.add(tree.parents)
        said = [float(talker.logits(path[:-1]).softmax(-1).max()) for path in paths_of(tree)]
        assert least is None or tree.confidence is None or tree.confidence.tolist() == pytest.approx(said, rel=1e-5)
        return tree

    assert_text_is_the_targets(rule, vocabulary, grow)
    assert least is None or len(shapes) > 1


class Narrow(Talker):
    """Has logits of some tokens only, in an order of its own."""

    vocabulary_of_drafts = DraftVocabulary(torch.tensor([4, 1, 2]), 6)

    def __call__(self, k: int, tokens: torch.Tensor, rows: torch.Tensor) -> DraftStep:
        assert set(tokens.tolist()) <= ({1, 2, 4} if k else {ANCHOR_TOKEN})
        logits = super().__call__(k, tokens, rows).logits
        return DraftStep(logits[:, self.vocabulary_of_drafts.ids], vocabulary=self.vocabulary_of_drafts)


class Wide(Narrow):
    """The same with minus infinity for the others."""

    def __call__(self, k: int, tokens: torch.Tensor, rows: torch.Tensor) -> DraftStep:
        return super().__call__(k, tokens, rows).whole()


@pytest.mark.parametrize("processors", [[], [stock.NoRepeatNGramLogitsProcessor(1)]], ids=["none", "one"])
@pytest.mark.parametrize("budget", [None, 3])
@pytest.mark.parametrize("do_sample", [False, True])
def test_drafts_of_some_tokens_are_those_of_all_of_which_the_others_are_impossible(do_sample, budget, processors):
    sampler, laws = DraftSampler(LogitsProcessorList(processors), do_sample, budget), []
    for kind in (Narrow, Wide):
        law = {}
        for probability, tree in every_outcome(lambda kind=kind: sampler.grow(IDS, 2, kind(6, 3))):
            assert set(tree.tokens.tolist()) <= {1, 2, 4} and len(tree) == (budget or 2)
            q = [each for of_node in tree.q or () for each in of_node.tolist()]
            key = tree.parents, tuple(tree.tokens.tolist())
            law[key] = [law.get(key, [0.0])[0] + probability, *q]  # what is drawn too many stays unused
        laws.append(law)
    assert laws[0].keys() == laws[1].keys() and (len(laws[0]) > 1) == do_sample
    for key, of_narrow in laws[0].items():
        assert of_narrow == pytest.approx(laws[1][key], abs=1e-6)


class Talkers:
    """Drafters of several texts in one, which know by rows alone whose paths they are asked about."""

    def __init__(self, *talkers: Talker) -> None:
        self.talkers, self.texts, self.asked = talkers, list(range(len(talkers))), []

    def __call__(self, k: int, tokens: torch.Tensor, rows: torch.Tensor) -> DraftStep:
        texts = [self.texts[row] for row in rows.tolist()]
        assert texts == sorted(texts)
        steps = []
        for text, talker in enumerate(self.talkers):
            own = [at for at, other in enumerate(texts) if other == text]
            if own:
                steps.append(talker(k, tokens[own], rows[own] - self.texts.index(text)))
        self.texts = texts
        self.asked.append(texts)
        sure = None if steps[0].confidence is None else torch.cat([step.confidence for step in steps])
        return DraftStep(torch.cat([step.logits for step in steps]), sure)


def tree_of(tree) -> tuple:
    sure = None if tree.confidence is None else [round(each, 5) for each in tree.confidence.tolist()]
    return tree.tokens.tolist(), tree.parents, sure


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(1, 5), min_size=2, max_size=4), st.integers(1, 30), st.integers(1, 6), st.booleans(),
    st.booleans(), st.integers(0, 10**6),
)  # fmt: skip
def test_each_text_has_the_tree_that_it_has_alone(counts, budget, width, holes, is_admitted, seed):
    talkers = [Talker(4, seed + text, holes=holes) for text in range(len(counts))]
    survival = AcceptanceLine()
    survival.observe(0.6, True)
    options = {"width": width, "admission": Admission(survival, 0.02) if is_admitted else None}
    together = Talkers(*talkers)
    trees = most_probable(IDS[:, -1].repeat(len(counts)), counts, budget, together, as_they_are, **options)
    for text, (tree, count) in enumerate(zip(trees, counts)):
        talker = Talker(4, seed + text, holes=holes)
        (alone,) = most_probable(IDS[:, -1], [count], budget, talker, as_they_are, **options)
        assert tree_of(tree) == tree_of(alone)
        assert talkers[text].asked == talker.asked  # of none more than it would be alone
    assert len(together.asked) == max(len(talker.asked) for talker in talkers)
    # The same inside a graph, in which every text has as many paths, and trees as deep.
    together = Talkers(*(Talker(4, seed + text, holes=holes) for text in range(len(counts))))
    anchors, depths = IDS[:, -1].repeat(len(counts)), torch.tensor(counts)
    admitted = None if options["admission"] is None else options["admission"].numbers(anchors.device)
    fixed = grow_best(anchors, depths, max(counts), budget, together, None, width, None, admitted).trees()
    assert [tree_of(tree) for tree in fixed] == [tree_of(tree) for tree in trees]
    assert len(together.asked) == min(max(counts), budget)
    for k, texts in enumerate(together.asked):
        (paths,) = {texts.count(text) for text in range(len(counts))}
        assert 1 <= paths <= (min(width, budget - k + 1) if k else 1)


@pytest.mark.parametrize("least", [None, 0.3])
@pytest.mark.parametrize("rule", SAMPLING_RULES)
def test_texts_with_trees_that_are_drawn_together_are_the_targets_and_know_nothing_of_each_other(rule, least):
    """The joint law of two texts, by every way that draws can go."""
    targets, shapes = [Talker(2, seed) for seed in (77, 78)], [set(), set()]
    admission = None if least is None else Admission(AcceptanceLine(), least)

    def p_after(text: int):
        return lambda path: targets[text].logits(path).double().softmax(-1)

    def round_() -> tuple[tuple[int, ...], ...]:
        drafter, anchors = Talkers(Talker(2, 5, True), Talker(2, 6, True)), IDS[:, -1].repeat(2)
        trees = drawn(anchors, [1, 2], 3, drafter, as_they_are, admission)
        for tree, seen, depth in zip(trees, shapes, (1, 2)):
            seen.add(tree.parents)
            assert max(tree.depths, default=0) == depth or least is not None
        return tuple(
            tuple(token for token, _ in steps_by(rule, tree, p_after(text))) for text, tree in enumerate(trees)
        )

    law = defaultdict(float)
    for probability, texts in every_outcome(round_):
        law[texts] += probability
    assert sum(law.values()) == pytest.approx(1) and any(len(tokens) == 3 for _, tokens in law)
    of_each = [defaultdict(float), defaultdict(float)]
    for texts, mass in law.items():
        for of_text, text in zip(of_each, texts):
            of_text[text] += mass
    for texts, mass in law.items():
        assert mass == pytest.approx(of_each[0][texts[0]] * of_each[1][texts[1]], abs=1e-6)
    for text, of_text in enumerate(of_each):
        assert_law_is_the_targets(of_text, p_after(text))


@pytest.mark.parametrize("least", [0.0, 0.03, 0.1, 0.3, 0.999])
def test_a_tree_has_what_is_worth_it(least):
    """By what is known of survival, not by the drafter's word."""
    survival = AcceptanceLine()
    for said in (0.1, 0.5, 0.9) * 100:
        survival.observe(said, said > 0.4)
    talker = Talker(4, 11)
    (tree,) = most_probable(IDS[:, -1], [3], 200, talker, as_they_are, admission=Admission(survival, least))
    expected = {}
    for path in [path for depth in (1, 2, 3) for path in itertools.product(range(4), repeat=depth)]:
        said = [float((talker.logits(path[:k]) / SHARPENED).softmax(-1)[path[k]]) for k in range(len(path))]
        if math.prod(survival(each) for each in said) > least:
            expected[path] = said[-1]
    assert set(paths_of(tree)) == set(expected) and bool(expected) == (least < 0.9)
    assert tree.confidence.tolist() == pytest.approx([expected[path] for path in paths_of(tree)], rel=1e-4)
    assert {path for level in talker.asked[1:] for path in level} <= set(expected)  # nothing goes on from others


def test_siblings_are_drawn_without_replacement_one_after_the_other():
    """Chi-square over ordered pairs, 11 degrees of freedom, wrong once in a million seeds."""
    weights, times = torch.tensor([0.5, 0.3, 0.15, 0.05]), 40_000
    pairs = sample_siblings(weights.expand(times, -1), 2).indices.tolist()
    counts, chi = Counter(map(tuple, pairs)), 0.0
    for first in range(4):
        for second in set(range(4)) - {first}:
            expected = times * float(weights[first] * weights[second] / (1 - weights[first]))
            chi += (counts[first, second] - expected) ** 2 / expected
    assert chi < 49.0


def test_siblings_end_where_no_weight_is_left():
    weights = torch.tensor([[0.0, 3.0, 0.0, 1.0], [1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 2.0]])
    siblings = sample_siblings(weights, 4)
    assert siblings.are_there.tolist() == [[True, True, False, False], [True] * 4, [True, False, False, False]]
    for row, (indices, are_there) in enumerate(zip(siblings.indices.tolist(), siblings.are_there.tolist())):
        drawn_ones = [index for index, is_there in zip(indices, are_there) if is_there]
        assert sorted(drawn_ones) == weights[row].nonzero().flatten().tolist()
        for rank, left in enumerate(siblings.weights):  # each by what those before it have left
            expected = [0.0 if index in indices[:rank] else each for index, each in enumerate(weights[row].tolist())]
            assert left[row].tolist() == expected


def law_of_ranks(budget: int) -> list[float]:
    """How probable it is that each of so many siblings is accepted."""
    hits, reached = [], 1.0
    for rank in range(budget):
        accepted = ACCEPTED[min(rank, 2)]
        hits.append(reached * accepted)
        reached *= 1 - accepted
    return hits


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 10), st.integers(1, 80))
def test_levels_are_those_of_the_best_tree_of_its_law(count, budget):
    hits = law_of_ranks(budget)
    # All nodes that are worth anything, level by level: the value of each is that of its parent times its rank's.
    level, worth = [1.0], []
    for depth in range(count):
        level = sorted((value * hit for value in level for hit in hits), reverse=True)[:budget]
        worth += [(value, -depth) for value in level]
    best = sorted(worth, reverse=True)[:budget]
    sizes = level_sizes(count, budget)
    assert sum(sizes) == budget and len(sizes) <= count and all(sizes)
    value = sum(value for value, _ in best)
    of_sizes = sum(
        sum(sorted((v for v, d in worth if -d == depth), reverse=True)[:size]) for depth, size in enumerate(sizes)
    )
    assert of_sizes == pytest.approx(value)


@pytest.mark.parametrize("count", [2, 4])
def test_where_the_drafter_says_nothing_of_itself_children_go_where_the_law_of_ranks_has_them(count):
    (tree,) = drawn(IDS[:, -1], [count], 12, Talker(20, 1), as_they_are)
    hits, worth = law_of_ranks(12), []
    for node, parent in enumerate(tree.parents):
        rank = tree.children[parent].index(node)
        worth.append(hits[rank] * (1.0 if parent < 0 else worth[parent]))
    by_level, sizes, level = Counter(tree.depths), level_sizes(count, 12), [1.0]
    for depth, size in enumerate(sizes, start=1):  # of each level the best that the level before allows
        level = sorted((value * hit for value in level for hit in hits), reverse=True)[:size]
        assert by_level[depth] == size
        assert sorted(w for w, d in zip(worth, tree.depths) if d == depth) == pytest.approx(sorted(level))


def test_a_text_that_has_few_tokens_left_takes_none_from_another():
    """Texts that are drawn for together: one may draw one token, the other any of three."""
    one, three = [0.0, -math.inf, -math.inf], [0.0, 0.0, 0.0]
    for both in ([one, three], [three, one]):
        step = DraftStep(torch.tensor(both))
        trees = drawn(IDS[:, -1].repeat(2), [1, 1], 3, lambda *_, step=step: step, as_they_are)
        assert [len(tree) for tree in trees] == [3 if logits is three else 1 for logits in both]
        assert all(q.isfinite().all() for tree in trees for q in tree.q)


@pytest.mark.parametrize("do_sample", [False, True])
def test_each_path_is_changed_by_the_requests_processors_as_it_stands(do_sample):
    processors = LogitsProcessorList([stock.NoRepeatNGramLogitsProcessor(1)])
    sampler = DraftSampler(processors, do_sample, tree_budget=9)
    tree = sampler.grow(torch.tensor([[4, ANCHOR_TOKEN]]), 3, Talker(6, 2))
    assert len(tree) == 9 and len(tree.paths) > 1
    for path in paths_of(tree):
        assert len(set(path)) == len(path) and not {4, ANCHOR_TOKEN} & set(path)


@pytest.mark.parametrize("grow", [drawn, most_probable])
def test_processors_are_told_the_drafts_of_each_path(grow):
    talker, told = Talker(4, 1), []

    def scored(prefixes: torch.Tensor, step: DraftStep, counts: list[int]) -> DraftStep:
        told.append([tuple(path) for path in prefixes.tolist()])
        return step

    grow(IDS[:, -1], [3], 9, talker, scored)
    assert told == talker.asked and len(told) == 3


def test_a_budget_is_no_tree_where_nothing_fits():
    assert len(DraftSampler(LogitsProcessorList(), True, tree_budget=9).grow(IDS, 0, Talker(3, 1))) == 0
