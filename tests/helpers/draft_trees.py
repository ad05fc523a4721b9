"""Random draft trees, as plain lists, and what the rules for drawn text make of a tree."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from hypothesis import strategies as st

from hf_hyperdflash.decoding.request import Pair
from hf_hyperdflash.trees.acceptance import Step, sampled_walk, traversal_walk
from hf_hyperdflash.trees.tree import ANCHOR, DraftTree

WHOLE_TREE_RULES: list[Any] = [traversal_walk]  # which read the target's distributions after all nodes
SAMPLING_RULES = [sampled_walk, *WHOLE_TREE_RULES]


@st.composite
def lists_of_parents(draw, most: int = 12) -> list[int]:
    return [draw(st.integers(ANCHOR, node - 1)) for node in range(draw(st.integers(0, most)))]


@st.composite
def parents_and_tokens(draw, vocab_size: int, most: int = 12) -> tuple[list[int], list[int]]:
    """A tree whose siblings differ, so that a text follows at most one path through it."""
    parents: list[int] = []
    tokens: list[int] = []
    for _ in range(draw(st.integers(0, most))):
        places = [
            (parent, token)
            for parent in range(ANCHOR, len(parents))
            for token in range(vocab_size)
            if (parent, token) not in zip(parents, tokens)
        ]
        parent, token = draw(st.sampled_from(places))
        parents.append(parent)
        tokens.append(token)
    return parents, tokens


def path_to(node: int, parents: list[int]) -> list[int]:
    return [] if node == ANCHOR else [*path_to(parents[node], parents), node]


def steps_by(rule: Any, tree: DraftTree, p_after: Callable[[tuple[int, ...]], torch.Tensor]) -> Iterator[Step]:
    """What a rule of [`SAMPLING_RULES`] writes, where `p_after` is the target's distribution after drafted tokens."""
    drafts, parents = tree.tokens.tolist(), list(tree.parents)

    def after(node: int) -> torch.Tensor:
        return p_after(tuple(drafts[each] for each in path_to(node, parents)))

    if rule in WHOLE_TREE_RULES:
        return rule(tree, torch.stack([after(node) for node in range(ANCHOR, len(tree))]))
    return rule(tree, drafts, after)


def noted_drafts(monkeypatch) -> dict[tuple[int, ...], list[tuple[list[int], tuple[int, ...]]]]:
    """Note what is drafted from now on: after each text, ids and parents of each tree."""
    drafted, draft = {}, Pair.draft

    def noted(pair, requests):
        trees = draft(pair, requests)
        for request, tree in zip(requests, trees):
            drafted.setdefault(tuple(request.ids[0].tolist()), []).append((tree.tokens.tolist(), tree.parents))
        return trees

    monkeypatch.setattr(Pair, "draft", noted)
    return drafted
