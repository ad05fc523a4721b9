"""The rules against brute force: greedy on random trees, sampled as exact laws over all trees and all draws."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_hyperdflash.trees.acceptance import greedy_walk, sampled_walk, traversal_walk
from hf_hyperdflash.trees.draws import sample_index
from hf_hyperdflash.trees.tree import ANCHOR, DraftTree

from ..helpers.draft_trees import SAMPLING_RULES, WHOLE_TREE_RULES, parents_and_tokens, path_to, steps_by
from ..helpers.enumerated_draws import assert_law_is_the_targets, every_outcome

Text = tuple[int, ...]
Siblings = list[tuple[int, torch.Tensor | None]]  # a token and the distribution that it was drawn from
Law = dict[Text, float]


# Greedy


@settings(deadline=None, max_examples=200)
@given(st.integers(2, 4).flatmap(lambda size: st.tuples(st.just(size), parents_and_tokens(size))), st.integers(0, 9))
def test_greedy_takes_the_longest_path_that_the_target_would_have_written(tree, seed):
    vocab_size, (parents, tokens) = tree
    drafts = DraftTree(torch.tensor(tokens, dtype=torch.long), tuple(parents))

    def written_after(text: list[int]) -> int:
        return random.Random(f"{seed} {text}").randrange(vocab_size)

    def text_to(node: int) -> list[int]:
        return [tokens[each] for each in path_to(node, parents)]

    paths = [path_to(node, parents) for node in range(ANCHOR, len(tokens))]
    right = [path for path in paths if all(tokens[node] == written_after(text_to(parents[node])) for node in path)]
    longest = max(right, key=len)
    asked: list[int] = []
    expected, done = [(tokens[node], node) for node in longest], []
    expected.append((written_after([tokens[node] for node in longest]), None))
    for step in greedy_walk(drafts, tokens, lambda node: asked.append(node) or written_after(text_to(node))):
        done.append(step)
        assert asked == [ANCHOR, *longest][: len(done)]  # what comes next is asked for once this one is written
    assert done == expected and asked == [ANCHOR, *longest]


# Sampled: how siblings are drafted. Each function gives every outcome with its probability.


def drawn(q: torch.Tensor, count: int) -> Iterator[tuple[float, Siblings]]:
    """One after the other without replacement, each from what is left of `q`."""
    if count == 0 or q.sum() == 0:
        yield 1.0, []
        return
    q = q / q.sum()
    for token in q.nonzero().flatten().tolist():
        left = q.clone()
        left[token] = 0
        for probability, others in drawn(left, count - 1):
            yield q[token].item() * probability, [(token, q), *others]


def drawn_again(q: torch.Tensor, count: int) -> Iterator[tuple[float, Siblings]]:
    """Each from the whole of `q`, so that a token can come twice."""
    if count == 0:
        yield 1.0, []
        return
    for token in q.nonzero().flatten().tolist():
        for probability, others in drawn_again(q, count - 1):
            yield q[token].item() * probability, [(token, q), *others]


def most_probable(q: torch.Tensor, count: int) -> Iterator[tuple[float, Siblings]]:
    yield 1.0, [(token, None) for token in q.topk(count).indices.tolist()]


def drawn_then_fixed(q: torch.Tensor, count: int) -> Iterator[tuple[float, Siblings]]:
    """All but one are drawn, the last is the most probable of the others."""
    for probability, siblings in drawn(q, count - 1):
        taken = {token for token, _ in siblings}
        yield probability, [*siblings, (next(t for t in q.argsort().tolist()[::-1] if t not in taken), None)]


def fixed_then_drawn(q: torch.Tensor, count: int) -> Iterator[tuple[float, Siblings]]:
    """The most probable one, the others are drawn as if it was not there: one can be the same token."""
    for probability, siblings in drawn(q, count - 1):
        yield probability, [(int(q.argmax()), None), *siblings]


DRAFTINGS = [drawn, drawn_again, most_probable, drawn_then_fixed, fixed_then_drawn]


def distribution(weights: list[int]) -> torch.Tensor:
    return torch.tensor(weights, dtype=torch.float64) / sum(weights)


def some_distribution(vocab_size: int, *name: object) -> torch.Tensor:
    """A different one for every name, with a zero here and there."""
    weights = random.Random(str(name)).choices(range(6), k=vocab_size)
    return distribution(weights if any(weights) else [1] * vocab_size)


class Branch:
    """A node of a drafted tree and what hangs from it."""

    def __init__(self, token: int, q: torch.Tensor | None, below: list[Branch]) -> None:
        self.token, self.q, self.below = token, q, below


def drafted(
    text: Text, shape: list[tuple[Callable, int]], q_after: Callable[[Text], torch.Tensor]
) -> Iterator[tuple[float, list[Branch]]]:
    """Every tree that can be drafted after a text, `shape` saying how siblings come about at each depth."""
    if not shape:
        yield 1.0, []
        return
    (drafting, count), *below = shape
    for probability, siblings in drafting(q_after(text), count):
        families: list[tuple[float, list[Branch]]] = [(probability, [])]
        for token, q in siblings:
            families = [
                (so_far * more, [*family, Branch(token, q, children)])
                for so_far, family in families
                for more, children in drafted((*text, token), below, q_after)
            ]
        yield from families


def as_tree(branches: list[Branch]) -> DraftTree:
    """Depth by depth, so that a family's nodes do not lie beside their children."""
    tokens, parents, q = [], [], []
    level = [(branch, ANCHOR) for branch in branches]
    while level:
        following = []
        for branch, parent in level:
            following += [(child, len(tokens)) for child in branch.below]
            tokens.append(branch.token)
            parents.append(parent)
            q.append(branch.q)
        level = following
    return DraftTree(torch.tensor(tokens, dtype=torch.long), tuple(parents), tuple(q))


def walked(
    tree: DraftTree, p_after: Callable[[Text], torch.Tensor], rule: Callable = sampled_walk
) -> tuple[Text, int]:
    """A round's text and how many of its tokens are accepted drafts."""
    drafts, text, at, asked = tree.tokens.tolist(), [], ANCHOR, []

    def p_asked(path: Text) -> torch.Tensor:
        asked.append(path)
        return p_after(path)

    for token, node in steps_by(rule, tree, p_asked):
        assert rule in WHOLE_TREE_RULES or asked == [tuple(text[:at]) for at in range(len(text) + 1)]
        text.append(token)
        if node is None:
            return tuple(text), len(text) - 1
        assert tree.parents[node] == at and drafts[node] == token
        at = node
    raise AssertionError("the target's own token did not come")


def law_of_a_round(
    shape: list[tuple[Callable, int]],
    p_after: Callable[[Text], torch.Tensor],
    q_after: Callable[[Text], torch.Tensor],
    rule: Callable = sampled_walk,
) -> tuple[Law, float]:
    """The probability of every text that a round can write, and that its first token is an accepted draft."""
    law: Law = defaultdict(float)
    accepted = 0.0
    for probability, branches in drafted((), shape, q_after):
        tree = as_tree(branches)
        for weight, (text, right) in every_outcome(lambda tree=tree: walked(tree, p_after, rule)):
            law[text] += probability * weight
            accepted += probability * weight * (right > 0)
    return law, accepted


def expected_tokens(law: Law) -> float:
    return sum(len(text) * mass for text, mass in law.items())


SHAPES = {
    "one": [(drawn, 1)],
    "chain": [(drawn, 1)] * 3,
    "siblings": [(drawn, 2), (drawn, 2)],
    "drawn again": [(drawn_again, 2), (drawn_again, 2)],
    "top k": [(most_probable, 2), (most_probable, 2), (most_probable, 1)],
    "fixed chain": [(most_probable, 1)] * 3,
    "fixed above, drawn below": [(most_probable, 2), (drawn, 2)],
    "drawn above, fixed below": [(drawn, 2), (most_probable, 2)],
    "both among siblings": [(drawn_then_fixed, 2), (fixed_then_drawn, 2)],
    "three of three": [(drawn, 3), (drawn, 1)],
}


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("rule", SAMPLING_RULES)
def test_every_token_of_a_round_has_the_targets_distribution(rule, name, seed):
    def p_after(text: Text) -> torch.Tensor:
        return some_distribution(3, "p", name, seed, text)

    def q_after(text: Text) -> torch.Tensor:
        return some_distribution(3, "q", name, seed, text)

    law, accepted = law_of_a_round(SHAPES[name], p_after, q_after, rule)
    assert_law_is_the_targets(law, p_after)
    assert max(map(len, law)) > 1 and 0 < accepted
    if rule is traversal_walk and name != "both among siblings":  # where drawn and fixed ones are tried in other order
        assert expected_tokens(law) > expected_tokens(law_of_a_round(SHAPES[name], p_after, q_after)[0]) - 1e-9


# Drawn trees of which a part, or nothing, is as the path that joins them; and chains, and nothing beside the path.
JOINED = {"chain": SHAPES["chain"], "siblings": SHAPES["siblings"], "three of three": SHAPES["three of three"],
          "drawn again": [(drawn_again, 2), (drawn_again, 1)], "path alone": []}  # fmt: skip


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("name", JOINED)
@pytest.mark.parametrize("rule", SAMPLING_RULES)
def test_a_known_path_that_joins_drawn_ones_leaves_the_targets_distribution(rule, name, seed):
    def p_after(text: Text) -> torch.Tensor:
        return some_distribution(3, "p", name, seed, text)

    path, law, alone = random.Random(seed).choices(range(3), k=3), defaultdict(float), defaultdict(float)
    for probability, branches in drafted((), JOINED[name], lambda text: some_distribution(3, "q", name, seed, text)):
        tree = as_tree(branches)
        for drafts, found in ((tree, alone), (tree.with_path(path), law)):
            for weight, (text, _) in every_outcome(lambda drafts=drafts: walked(drafts, p_after, rule)):
                found[text] += probability * weight
    assert_law_is_the_targets(law, p_after)
    assert expected_tokens(law) >= expected_tokens(alone) - 1e-9


def weights_of(vocab_size: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, 4), min_size=vocab_size, max_size=vocab_size).filter(any)


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(SAMPLING_RULES),
    st.sampled_from(DRAFTINGS),
    st.integers(2, 4).flatmap(
        lambda size: st.tuples(weights_of(size), weights_of(size), st.integers(1, min(size, 3)))
    ),
)
def test_siblings_of_every_kind_leave_the_targets_distribution(rule, drafting, case):
    p, q, count = distribution(case[0]), distribution(case[1]), case[2]
    law, _ = law_of_a_round([(drafting, count)], lambda text: p, lambda text: q, rule)
    assert_law_is_the_targets(law, lambda text: p)


# Sampled: how often drafts are accepted.


def multi_round(p: list[float], siblings: list[tuple[int, list[float]]]) -> float:
    """SpecInfer (Miao et al. 2023), algorithm 2: that one of the drawn siblings is accepted."""
    if not siblings:
        return 0.0
    (token, q), *others = siblings
    accepted = min(1.0, p[token] / q[token])
    more = [max(0.0, a - b) for a, b in zip(p, q)]
    if accepted == 1 or not sum(more):
        return accepted
    return accepted + (1 - accepted) * multi_round([a / sum(more) for a in more], others)


CASES = [
    ([1, 2, 3, 4], [4, 3, 2, 1]),
    ([5, 1, 0, 0], [0, 1, 1, 5]),
    ([1, 1, 1, 1], [7, 1, 1, 1]),
    ([6, 0, 1, 0], [1, 1, 1, 1]),
    ([2, 2, 3, 1], [2, 2, 3, 1]),
]


@pytest.mark.parametrize(("p_weights", "q_weights"), CASES)
@pytest.mark.parametrize("rule", SAMPLING_RULES)
def test_how_often_drafts_are_accepted(rule, p_weights, q_weights):
    p, q = distribution(p_weights), distribution(q_weights)

    def accepted(drafting: Callable, count: int) -> float:
        return law_of_a_round([(drafting, count)], lambda text: p, lambda text: q, rule)[1]

    # One draft: 1 - 1/2 ||p - q||_1 (Leviathan et al. 2023, corollary 3.6).
    assert accepted(drawn, 1) == pytest.approx(1 - (p - q).abs().sum().item() / 2, abs=1e-9)
    # Several drawn from the same q: all are rejected if each in turn is, and what is left of p is the same after any.
    lost, left = 1.0, p
    for count in (1, 2, 3):
        distance = (left - q).abs().sum().item() / 2
        lost *= distance
        assert accepted(drawn_again, count) == pytest.approx(1 - lost, abs=1e-9)
        left = (left - q).clamp(min=0) / distance if distance > 1e-12 else left
    # Without replacement: algorithm 2 over every order, and all of the vocabulary cannot be wrong.
    for count in (2, 3, 4):
        expected = sum(
            probability * multi_round(p.tolist(), [(token, each.tolist()) for token, each in siblings])
            for probability, siblings in drawn(q, count)
        )
        assert accepted(drawn, count) == pytest.approx(expected, abs=1e-9)
    if all(q_weights):
        assert accepted(drawn, 4) == pytest.approx(1, abs=1e-9)
    # Not drawn: what the target holds of them.
    for count in (1, 2, 3):
        assert accepted(most_probable, count) == pytest.approx(p[q.topk(count).indices].sum().item(), abs=1e-9)


def block_verification(p: list[list[float]], q: list[list[float]], drafts: list[int]) -> list[float]:
    """Sun et al. 2024, algorithm 2, for one chain: how probable it is that so many drafts are accepted."""
    weight, last = 1.0, [1.0]  # of no draft
    for i, token in enumerate(drafts, start=1):
        weight = min(weight * p[i - 1][token] / q[i - 1][token], 1.0)
        if i < len(drafts):
            more = sum(max(weight * a - b, 0.0) for a, b in zip(p[i], q[i]))
            last.append(more / (more + 1 - weight) if more + 1 - weight else 1.0)
        else:
            last.append(weight)
    chances = []
    for i, chance in enumerate(last):  # accepted are as many as the last that comes out
        after = 1.0
        for later in last[i + 1 :]:
            after *= 1 - later
        chances.append(chance * after)
    return chances


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 5), st.integers(0, 10**6))
def test_a_chain_is_traversed_as_block_verification_says(count, seed):
    generator = torch.Generator().manual_seed(seed)
    p, q = torch.randn(2, count + 1, 3, generator=generator, dtype=torch.float64).mul(2).softmax(-1)
    drafts = torch.multinomial(q[:count], 1, generator=generator)[:, 0]
    tree = DraftTree.chain(drafts, list(q[:count]))
    found = [0.0] * (count + 1)
    for probability, steps in every_outcome(lambda: list(traversal_walk(tree, p))):
        found[len(steps) - 1] += probability
    assert found == pytest.approx(block_verification(p.tolist(), q.tolist(), drafts.tolist()), abs=1e-9)


# Sampled, with torch's own random numbers.


def one_number(weights: torch.Tensor) -> int:
    """An index by one uniform number: the first at which the running sum is beyond it."""
    wanted, beyond = float(torch.rand(1, dtype=torch.float64)) * sum(weights.tolist()), 0.0
    for index, weight in enumerate(weights.tolist()):
        beyond += weight
        if beyond > wanted:
            return index
    raise AssertionError(weights)


@pytest.mark.parametrize("values", [1, 7, 256, 1000, 1024, 1025])
def test_every_index_is_drawn_by_the_numbers_that_are_its_own(values, monkeypatch):
    """Those between the running sum before it and its own, at both ends of them; a weight of 0 has none."""
    generator = torch.Generator().manual_seed(values)
    weights = torch.randn(values, generator=generator).mul(2).exp() * (torch.rand(values, generator=generator) < 0.7)
    weights[int(torch.randint(values, (), generator=generator))] = 1.0
    above = weights.double().cumsum(0) / weights.sum(dtype=torch.float64)
    own, below = torch.nonzero(weights)[:, 0], above - weights / weights.sum(dtype=torch.float64)
    for end in (0.001, 0.5, 0.999):
        numbers = (below + (above - below) * end)[own, None]
        monkeypatch.setattr(torch, "rand", lambda *shape, numbers=numbers, **options: numbers)
        assert torch.equal(sample_index(weights.expand(len(own), -1))[:, 0], own)


@pytest.mark.parametrize("values", [2, 512, 515])
def test_what_is_no_number_becomes_the_last_index_and_a_weight_of_zero_is_never_drawn(values, monkeypatch):
    assert sample_index(torch.full((2, values), torch.nan)).tolist() == [[values - 1]] * 2
    one = torch.zeros(values).index_fill(0, torch.tensor([values // 2 - 1]), 0.3)
    for number in (0.0, 1 - 2**-53):
        numbers = torch.full((1,), number, dtype=torch.float64)
        monkeypatch.setattr(torch, "rand", lambda *shape, numbers=numbers, **options: numbers)
        assert sample_index(one).tolist() == [values // 2 - 1]


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 6), st.integers(0, 10**6), st.sampled_from([0.3, 1.0, 4.0]))
def test_a_seed_gives_a_chains_text_as_the_textbooks_loop(drafts, seed, agreement):
    """Leviathan et al. 2023, algorithm 1, draft by draft: the same random numbers for the same questions."""
    torch.manual_seed(seed)
    logits = torch.randn(drafts + 1, 8) * 2
    p, q = logits.softmax(-1), (logits + torch.randn(drafts + 1, 8) / agreement).softmax(-1)
    tokens = [int(torch.multinomial(q[k], 1)) for k in range(drafts)]

    torch.manual_seed(seed + 1)
    expected: list[tuple[int, int | None]] = []
    for k, token in enumerate(tokens):
        if torch.rand(()) < p[k, token] / q[k, token]:
            expected.append((token, k))
            continue
        expected.append((one_number((p[k] - q[k]).clamp(min=0)), None))
        break
    else:
        expected.append((one_number(p[drafts]), None))
    following = torch.rand(4)

    torch.manual_seed(seed + 1)
    tree = DraftTree.chain(torch.tensor(tokens, dtype=torch.long), list(q[:drafts]))
    assert list(sampled_walk(tree, tokens, lambda node: p[node + 1])) == expected
    assert torch.equal(torch.rand(4), following)  # and no number more or less


@pytest.mark.parametrize("rule", SAMPLING_RULES)
def test_a_rejected_draft_of_equal_distributions(rule):
    """Rounding can leave the target nowhere more than the drafter: then it is drawn from what was left before."""
    q = torch.tensor([0.5, 0.5, 0.0])
    siblings = [Branch(0, q, []), Branch(1, torch.tensor([0.0, 1.0, 0.0]), [])]
    for count, rejected in ((1, {(0,), (1,)}), (2, {(0,)})):  # the second draft is rejected with good reason
        tree = as_tree(siblings[:count])
        outcomes = [
            outcome for _, outcome in every_outcome(lambda tree=tree: walked(tree, lambda text: q * 0.9, rule))
        ]
        assert {text for text, right in outcomes if not right} == rejected
    certain, tiny = torch.tensor([1.0, 0.0, 0.0]), torch.tensor([1.0, 1e-9, 0.0])  # drafted once in 10^9 rounds
    outcomes = every_outcome(lambda: walked(as_tree([Branch(1, tiny, [])]), lambda text: certain, rule))
    assert {text for _, (text, _) in outcomes} == {(0,)}  # what the target rules out is not written even then
