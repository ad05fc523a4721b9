from dataclasses import FrozenInstanceError

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_hyperdflash.trees.tree import ANCHOR, DraftTree

from ..helpers.draft_trees import lists_of_parents, path_to


def of(parents: list[int]) -> DraftTree:
    return DraftTree(torch.arange(len(parents)) + 7, tuple(parents))


@settings(deadline=None, max_examples=100)
@given(lists_of_parents())
def test_what_a_tree_says_of_itself_is_what_its_parents_say(parents):
    tree, nodes = of(parents), range(len(parents))
    below = {parent: [node for node in nodes if parents[node] == parent] for parent in [ANCHOR, *nodes]}
    leaves = [node for node in nodes if not below[node]]
    assert len(tree) == len(parents)
    assert tree.children == {parent: children for parent, children in below.items() if children}
    assert tree.depths == tuple(len(path_to(node, parents)) for node in nodes)
    assert [tree.path(node) for node in [ANCHOR, *nodes]] == [path_to(node, parents) for node in [ANCHOR, *nodes]]
    assert tree.paths == [path_to(leaf, parents) for leaf in leaves]
    assert tree.is_chain == (len(leaves) <= 1)
    assert tree.mask.dtype == torch.bool and tree.mask.shape == (len(parents), len(parents))
    assert tree.mask.tolist() == [[seen in path_to(node, parents) for seen in nodes] for node in nodes]


@settings(deadline=None, max_examples=20)
@given(st.lists(st.integers(0, 60), max_size=8))
def test_a_chain_is_a_tree_with_one_path(tokens):
    q = [torch.rand(61) for _ in tokens]
    chain = DraftTree.chain(torch.tensor(tokens, dtype=torch.long), q)
    nodes = list(range(len(tokens)))
    assert chain.tokens.tolist() == tokens and chain.parents == tuple(node - 1 for node in nodes)
    kept = chain.q or ()
    assert isinstance(kept, tuple) and [id(one) for one in kept] == [id(one) for one in q]
    assert chain.is_chain and chain.paths == ([nodes] if nodes else [])
    assert chain.depths == tuple(node + 1 for node in nodes)
    assert torch.equal(chain.mask, torch.ones(len(nodes), len(nodes), dtype=torch.bool).tril())
    assert DraftTree.chain(chain.tokens).q is None and chain.confidence is None


def test_a_tree_does_not_change():
    tree = of([ANCHOR, 0])
    with pytest.raises(FrozenInstanceError):
        tree.parents = (ANCHOR, ANCHOR)


def test_the_first_nodes_keep_what_is_known_of_them():
    q = (torch.ones(9) / 9, None, torch.ones(9) / 9)
    tree = DraftTree(torch.tensor([5, 6, 7]), (ANCHOR, 0, 0), q, torch.rand(3), (1, 1, 2), (False, True, False))
    first = tree.first(2)
    assert (first.tokens.tolist(), first.parents) == ([5, 6], (ANCHOR, 0))
    assert [id(one) for one in first.q] == [id(one) for one in q[:2]]
    assert torch.equal(first.confidence, tree.confidence[:2])
    assert (first.passes, first.by_head) == ((1, 1), (False, True))


def test_a_path_shares_the_nodes_that_it_begins_with_and_its_own_come_last():
    q = tuple(torch.ones(9) / 9 for _ in range(3))
    tree = DraftTree(torch.tensor([5, 6, 7]), (ANCHOR, 0, 0), q, torch.rand(3), (1, 1, 2), (False, True, False))
    joined = tree.with_path([5, 7, 8, 6])
    assert (joined.tokens.tolist(), joined.parents) == ([5, 6, 7, 8, 6], (ANCHOR, 0, 0, 2, 3))
    assert joined.q == (*q, None, None) and joined.confidence is None
    assert (joined.passes, joined.by_head) == ((1, 1, 2, 0, 0), (False, True, False, False, False))
    other = tree.with_path([6, 5])
    assert (other.tokens.tolist(), other.parents) == ([5, 6, 7, 6, 5], (ANCHOR, 0, 0, ANCHOR, 3))
    assert tree.with_path([5, 6]) is tree and tree.with_path([]) is tree
    alone = DraftTree.chain(torch.empty(0, dtype=torch.long)).with_path([3, 4])
    assert (alone.tokens.tolist(), alone.parents, alone.q) == ([3, 4], (ANCHOR, 0), None)
