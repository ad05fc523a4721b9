"""What of a draft tree the target accepts: rules over one row's tree and the target's scores, and nothing else.

A rule walks down from the anchor. It asks for what the target says after a node only once that node is accepted, so
that logits processors see every accepted prefix once and in order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from .tree import ANCHOR, DraftTree

Step = tuple[int, int | None]
"""A token that the target writes, and the node that drafted it; `None` for the target's own, the last of a round."""


def greedy_walk(tree: DraftTree, drafts: Sequence[int], choice_after: Callable[[int], int]) -> Iterator[Step]:
    """Accept what the target would have chosen.

    Args:
        tree: The drafts.
        drafts: `tree.tokens`, on the host.
        choice_after: The target's token after a node, or after the anchor ([`ANCHOR`]).

    Yields:
        Accepted drafts from the anchor on, then the target's own token.
    """
    node: int | None = ANCHOR
    while node is not None:
        token = choice_after(node)
        node = next((child for child in tree.children.get(node, ()) if drafts[child] == token), None)
        yield token, node


def sampled_walk(
    tree: DraftTree, drafts: Sequence[int], distribution_after: Callable[[int], torch.Tensor]
) -> Iterator[Step]:
    """Accept at random, so that the text is distributed as the target's, whatever the drafts are.

    Siblings that were drawn at random are tried one after the other: each is accepted with probability min(1, p/q),
    and else `p` becomes what it has more of than `q` (Leviathan et al., algorithm 1, with one draft; SpecInfer,
    algorithm 2, with several). What is left of `p` is drawn from; a sibling that was not drawn at random is right if
    it comes out.

    Args:
        tree: The drafts.
        drafts: `tree.tokens`, on the host.
        distribution_after: The target's distribution `[config.vocab_size]` after a node, or after the anchor
            ([`ANCHOR`]).

    Yields:
        As [`greedy_walk`].
    """
    node: int | None = ANCHOR
    while node is not None:
        token, node = _drawn(tree, drafts, tree.children.get(node, []), distribution_after(node))
        yield token, node


def _drawn(tree: DraftTree, drafts: Sequence[int], siblings: list[int], p: torch.Tensor) -> Step:
    fixed: dict[int, int] = {}
    for node in siblings:
        q, token = tree.q[node] if tree.q else None, drafts[node]
        if q is None:
            fixed.setdefault(token, node)
            continue
        ratio = p[token] / q[token]
        if bool(torch.rand_like(ratio) < ratio):
            return token, node
        p = _left(p, q)
    token = int(torch.multinomial(p, num_samples=1))
    return token, fixed.get(token)


def _left(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """What `p` has more of than `q`, as a distribution."""
    more = (p - q).clamp(min=0)
    total = more.sum()
    return torch.where(total > 0, more / total, p)  # rounding can leave nothing where the two are equal
