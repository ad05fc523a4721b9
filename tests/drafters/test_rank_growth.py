"""How trees of blocks grow, against all nodes that there can be and all ways that draws can go."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LogitsProcessorList
from transformers.generation import logits_process as stock

from hf_hyperdflash.auto.acceptance import AcceptanceLine
from hf_hyperdflash.drafters.sampling import DraftRequest, DraftSampler
from hf_hyperdflash.drafters.unrolled.modeling_specblock import BlockStep, grow_blocks
from hf_hyperdflash.trees.growth import ACCEPTED, Admission, level_sizes

from ..helpers.draft_trees import SAMPLING_RULES, steps_by
from ..helpers.enumerated_draws import assert_law_is_the_targets, every_outcome

IDS = torch.tensor([[1, 0]])


class Talker:
    """A drafter of blocks: what a block says depends on which block it goes on from, at which slot, with which token.

    Attributes:
        passes: How many blocks each pass had.
    """

    def __init__(self, vocabulary: int, slots: int, seed: int, ranked: bool = True) -> None:
        self.vocabulary, self.slots, self.seed, self.ranked = vocabulary, slots, seed, ranked
        self.made: list[tuple] = []
        self.passes: list[int] = []

    def logits(self, block: tuple, slot: int) -> torch.Tensor:
        chance = random.Random(f"{self.seed} {block} {slot}")
        return torch.tensor([chance.gauss(0, 1.5) for _ in range(self.vocabulary)])

    def ranks(self, block: tuple, slot: int) -> torch.Tensor:
        chance = random.Random(f"ranks {self.seed} {block} {slot}")
        return torch.tensor([chance.gauss(0.4, 1.5), *(chance.gauss(0, 1) for _ in range(3))]).softmax(0)

    def __call__(self, come_from: torch.Tensor, slots: torch.Tensor, tokens: torch.Tensor) -> BlockStep:
        places = zip(come_from.tolist(), slots.tolist(), tokens.tolist())
        new = [(*self.made[block], (slot, token)) for block, slot, token in places] or [()]
        assert bool(self.made) == bool(len(come_from))
        self.made += new
        self.passes.append(len(new))
        logits = torch.stack([torch.stack([self.logits(each, slot) for slot in range(self.slots)]) for each in new])
        ranks = torch.stack([torch.stack([self.ranks(each, slot) for slot in range(self.slots)]) for each in new])
        return BlockStep(logits, ranks if self.ranked else None)


def shape(branching, max_blocks):
    return SimpleNamespace(branching=branching, max_blocks=max_blocks)


def sampler(budget, do_sample=False, processors=()):
    return DraftSampler(LogitsProcessorList(processors), do_sample, budget)


def grown(count, sampler, talker, config):
    (tree,) = grow_blocks([DraftRequest(None, IDS, IDS, count, sampler)], talker, config)
    return tree


def paths_of(tree) -> list[tuple[int, ...]]:
    return [tuple(tree.tokens[tree.path(node)].tolist()) for node in range(len(tree))]


def all_nodes(talker, branching, max_blocks, count, scored=lambda path, logits: logits):
    """Every node that the rules admit, with its value: a loop over blocks, slots and children."""
    nodes: dict[tuple[int, ...], float] = {}

    def expand(block, path, value, level):
        for slot in range(talker.slots):
            if len(path) == count:
                return
            width = branching[int(talker.ranks(block, slot).argmax())] if talker.ranked else branching[0]
            if not width and not path:
                width = 1
            likely = scored(path, talker.logits(block, slot)).log_softmax(-1).tolist()
            best = sorted(range(talker.vocabulary), key=lambda token: -likely[token])[:width]
            for rank, token in enumerate(best):
                nodes[(*path, token)] = value + likely[token]
                if (rank or slot == talker.slots - 1) and level + 1 < max_blocks:
                    expand((*block, (slot, token)), (*path, token), value + likely[token], level + 1)
            if not best:
                return
            path, value = (*path, best[0]), value + likely[best[0]]

    expand((), (), 0.0, 0)
    return nodes


RULES = [([2, 4, 10, 0], 2), ([1, 2, 3, 0], 3), ([2, 3, 0, 4], 1), ([3, 0, 2, 5], 2)]


@settings(deadline=None, max_examples=120)
@given(
    st.integers(0, 10**6), st.integers(1, 40), st.integers(1, 9), st.sampled_from(RULES), st.booleans(), st.booleans(),
    st.sampled_from([None, 0.0, 0.05, 0.2, 0.999]),
)  # fmt: skip
def test_the_tree_is_the_best_of_all_nodes(seed, budget, count, rules, ranked, is_read, least):
    """As the request's processors see them, each node's own prefix; and of those that are worth it, by what is known
    of survival, not by the drafter's word."""
    branching, max_blocks = rules
    if not ranked:
        branching = branching[:1]
    talker, penalty = Talker(12, 3, seed, ranked), stock.RepetitionPenaltyLogitsProcessor(3.0)
    survival = AcceptanceLine()
    for told in (0.1, 0.5, 0.9) * 100:
        survival.observe(told, told > 0.4)

    def scored(path, logits):
        return penalty(torch.tensor([[*IDS[0].tolist(), *path]]), logits[None])[0] if is_read else logits

    drawn_by = sampler(budget, processors=[penalty] * is_read)
    drawn_by = replace(drawn_by, node_admission=None if least is None else Admission(survival, least))
    tree = grown(count, drawn_by, talker, shape(branching, max_blocks))
    of_path = {
        path: math.exp(value) for path, value in all_nodes(talker, branching, max_blocks, count, scored).items()
    }
    said = {path: value / of_path.get(path[:-1], 1.0) for path, value in of_path.items()}  # of the node alone
    worth = of_path
    if least is not None:
        worth = {path: math.prod(survival(said[path[: k + 1]]) for k in range(len(path))) for path in said}
    best = sorted((path for path in worth if worth[path] > (least or 0.0)), key=lambda path: -worth[path])[:budget]
    assert set(paths_of(tree)) == set(best) and len(tree) == len(best)
    assert len(talker.passes) <= max_blocks and max(talker.passes) <= budget and tree.q is None
    if least is not None:
        assert tree.confidence.tolist() == pytest.approx([said[path] for path in paths_of(tree)], rel=1e-4)


class Talkers:
    """Drafters of several texts in one, which know by the blocks that others continue alone whose these are."""

    def __init__(self, *talkers: Talker) -> None:
        self.talkers, self.owners = talkers, []  # of each block its text, and its number there

    def __call__(self, come_from: torch.Tensor, slots: torch.Tensor, tokens: torch.Tensor) -> BlockStep:
        places = [self.owners[block] for block in come_from.tolist()]
        assert places == sorted(places, key=lambda place: place[0])
        steps = []
        for text, talker in enumerate(self.talkers):
            own = [at for at, (owner, _) in enumerate(places) if owner == text]
            if own or not self.owners or not len(come_from):
                numbers, start = torch.tensor([places[at][1] for at in own], dtype=torch.long), len(talker.made)
                steps.append(talker(numbers, slots[own], tokens[own]))
                self.owners += [(text, number) for number in range(start, len(talker.made))]
        ranks = None if steps[0].ranks is None else torch.cat([step.ranks for step in steps])
        return BlockStep(torch.cat([step.logits for step in steps]), ranks)


# Vocabulary, slots, depth for each text, budget, blocks.
LAWS = [(3, 2, [3], 5, 2), (3, 1, [3], 4, 3), (4, 2, [2], 3, 1), (2, 1, [1, 2], 3, 2)]


@pytest.mark.parametrize("least", [None, 0.22])
@pytest.mark.parametrize(("vocabulary", "slots", "depths", "budget", "max_blocks"), LAWS)
@pytest.mark.parametrize("rule", SAMPLING_RULES)
def test_text_with_drawn_trees_is_the_targets(rule, vocabulary, slots, depths, budget, max_blocks, least):
    """Draws and verification together, as an exact law over whole rounds. Texts that draft together know nothing of
    each other."""
    targets = [Talker(vocabulary, 1, 77 + text) for text in range(len(depths))]
    widest, most = 0, 0

    def p_after(text: int):
        return lambda path: targets[text].logits(path, 0).double().softmax(-1)

    def round_() -> tuple[tuple[int, ...], ...]:
        nonlocal widest, most
        talkers = Talkers(*(Talker(vocabulary, slots, 5 + text) for text in range(len(depths))))
        drawn_by = sampler(budget, True)
        drawn_by = replace(drawn_by, node_admission=None if least is None else Admission(AcceptanceLine(), least))
        requests = [DraftRequest(None, IDS, IDS, depth, drawn_by) for depth in depths]
        trees = grow_blocks(requests, talkers, shape([2, 3, 3, 1], max_blocks))
        for tree, depth in zip(trees, depths):
            assert 1 <= len(tree) <= budget and max(tree.depths) <= depth
            assert len(set(paths_of(tree))) == len(tree)
            most = max(most, len(tree))
            widest = max(widest, *(len(children) for children in tree.children.values()))
        return tuple(
            tuple(token for token, _ in steps_by(rule, tree, p_after(text))) for text, tree in enumerate(trees)
        )

    law: dict[tuple, float] = defaultdict(float)
    of_each: list[dict[tuple[int, ...], float]] = [defaultdict(float) for _ in depths]
    for probability, texts in every_outcome(round_):
        law[texts] += probability
        for of_text, text in zip(of_each, texts):
            of_text[text] += probability
    assert widest > 1 if least is None else most < budget
    for texts, mass in law.items():
        assert mass == pytest.approx(math.prod(of[text] for of, text in zip(of_each, texts)), abs=1e-6)
    for text, of_text in enumerate(of_each):
        assert max(map(len, of_text)) > 1
        assert_law_is_the_targets(of_text, p_after(text))


@pytest.mark.parametrize(("count", "budget", "passes"), [(5, 9, 1), (3, 9, 1), (6, 24, 2), (8, 30, 3), (4, 40, 2)])
@pytest.mark.parametrize(("slots", "ranked", "told"), [(1, True, 0), (2, False, 400), (3, True, 0), (3, True, 400)])
def test_draws_are_those_that_are_accepted_most_often(count, budget, passes, slots, ranked, told):
    """All places that a pass could draw for, by the product of what is known of each node on the way. Ranks have no
    say: a draw is not the first for being the most probable one."""
    survival, sizes = AcceptanceLine(), level_sizes(count, budget)
    for _ in range(told):
        survival.observe(0.2, False)
        survival.observe(0.8, True)
        survival.observe(0.8, False)
    drawn_by, talker = sampler(budget, True), Talker(60, slots, 11, ranked)
    drawn_by = replace(drawn_by, node_admission=Admission(survival, 0.0) if told else None)
    tree = grown(count, drawn_by, talker, shape([1, 0, 0, 0] if ranked else [1], passes))
    later = ACCEPTED[1:]

    def chance(block: tuple, slot: int, rank: int) -> float:
        signal = float(talker.ranks(block, slot)[0]) if ranked else ACCEPTED[0]
        first = max(survival(signal), later[0]) if told else ACCEPTED[0]
        tried = [first, later[0], *[later[1]] * rank]
        return math.prod(1 - each for each in tried[:rank]) * tried[rank]

    worth, starts, due = {(): 1.0}, [((), ())], 0
    for made in range(1, passes + 1):
        places = []  # (worth, the path before it, its rank), of every place
        for block, path in starts:
            for slot in range(min(slots, count - len(path))):
                at, before = len(places), path
                for rank in range(budget):
                    places.append((worth[before] * chance(block, slot, rank), before, rank, block, slot))
                children = [node for node in paths_of(tree) if node[:-1] == before]
                if not children:
                    break
                path = children[0]
                worth[path] = places[at][0]
        nodes = [node for node, of in zip(paths_of(tree), tree.passes) if of == made]
        best = sorted((place[0] for place in places), reverse=True)[: len(nodes)]
        next_starts = []
        for node in nodes:
            rank = [other for other in paths_of(tree) if other[:-1] == node[:-1]].index(node)
            value, _, _, block, slot = next(place for place in places if place[1:3] == (node[:-1], rank))
            worth[node] = value
            if (rank or slot == slots - 1) and len(node) < count:
                next_starts.append(((*block, (slot, node[-1])), node))
        assert sorted((worth[node] for node in nodes), reverse=True) == pytest.approx(best)
        due += len(nodes)
        assert due == (budget if made == passes else sum(sizes[: made * slots]))
        # A later pass has no more blocks than there is room for nodes.
        starts = sorted(next_starts, key=lambda start: -worth[start[1]])[: budget - due]
    assert due == len(tree) == budget
