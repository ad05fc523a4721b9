"""Acceptance rules: which nodes of one sequence's draft tree the target accepts, from the target's scores alone.

Each yields the accepted drafts from the anchor on, then the target's own token. [`greedy_walk`] and [`sampled_walk`]
walk down from the anchor. They ask for the target's scores after a node, or after the anchor ([`ANCHOR`]), only when
that node is accepted, so that logits processors see every accepted prefix once and in order. [`traversal_walk`] reads
the scores of the whole tree first, and so accepts more of it. `drafts` are `tree.tokens`, on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from .draws import sample_index
from .tree import ANCHOR, DraftTree

Step = tuple[int, int | None]
"""A token that the target writes, and the node that drafted it; `None` for the target's own, the last of a round."""


def greedy_walk(tree: DraftTree, drafts: Sequence[int], choice_after: Callable[[int], int]) -> Iterator[Step]:
    """Accept the drafts that the target itself would have chosen."""
    node: int | None = ANCHOR
    while node is not None:
        token = choice_after(node)
        node = next((child for child in tree.children.get(node, ()) if drafts[child] == token), None)
        yield token, node


def sampled_walk(
    tree: DraftTree, drafts: Sequence[int], distribution_after: Callable[[int], torch.Tensor]
) -> Iterator[Step]:
    """Accept drafts at random, so that the text has the target's distribution, whatever the drafts are.

    Siblings that were drawn at random are tried one after the other. Each is accepted with probability min(1, p/q);
    after a rejection, `p` becomes the normalized positive part of `p - q` (Leviathan et al., algorithm 1, with one
    draft; SpecInfer, algorithm 2, with several). If all are rejected, a token is drawn from the last `p`. A sibling
    that was not drawn at random is accepted if it is that token. Distributions are `[config.vocab_size]`.
    """
    node: int | None = ANCHOR
    while node is not None:
        token, node = _sampled_step(tree, drafts, tree.children.get(node, []), distribution_after(node))
        yield token, node


def _sampled_step(tree: DraftTree, drafts: Sequence[int], siblings: list[int], p: torch.Tensor) -> Step:
    fixed: dict[int, int] = {}
    for node in siblings:
        q, token = tree.q[node] if tree.q else None, drafts[node]
        if q is None:
            fixed.setdefault(token, node)
            continue
        ratio = p[token] / q[token]
        if bool(torch.rand_like(ratio) < ratio):
            return token, node
        more = (p - q).clamp(min=0)
        total = more.sum()
        p = torch.where(total > 0, more / total, p)  # where the two are equal, rounding can make both sides 0
    token = int(sample_index(p))
    return token, fixed.get(token)


def traversal_walk(tree: DraftTree, p: torch.Tensor) -> Iterator[Step]:
    """Accept drafts at random, so that the text has the target's distribution, and as much of each path as possible.

    [`sampled_walk`] gives up a path at its first rejected draft. Here each path is judged as a whole, from its end. A
    node is accepted, alone or with nodes after it, with probability min(1, w p/q), where w is this probability of its
    parent. So a draft that is more probable for the target than for the drafter makes up for an earlier one that is
    less probable. When a sibling and all nodes below it are rejected, the remaining w and p go to the next sibling,
    and at last to the parent itself. For a chain this is block verification (Sun et al., arXiv 2403.10444, algorithm
    2), for a tree traversal verification (Weng et al., arXiv 2505.12398). A draft that was not drawn at random has a q
    of 1. All is decided before the first token is yielded, with one wait for the device.

    Args:
        tree: The drafts.
        p: The target's distributions after the anchor and after each node, `[nodes + 1, config.vocab_size]`.
    """
    tokens, certain = tree.tokens.to(p.device), torch.ones_like(p[0, :1])
    # Of the anchor and of each node. What remains is not normalized: its sum is beside it.
    weights, remaining, sums = [certain], [p[0]], [certain]
    for node, parent in enumerate(tree.parents):
        weight, before, drafted = weights[parent + 1], remaining[parent + 1], tokens[node : node + 1]
        q = tree.q[node] if tree.q else None
        q = torch.zeros_like(before).scatter(0, drafted, 1.0) if q is None else q
        scale = weight / sums[parent + 1]
        weights.append((scale * before.gather(0, drafted) / q.gather(0, drafted)).clamp(max=1))
        remaining.append(p[node + 1])
        sums.append(certain)
        more = (scale * before).sub_(q).clamp_(min=0)
        total = more.sum()
        rejected = 1 - weight + total  # all below this node
        weights[parent + 1] = torch.where(rejected > 0, total / rejected, weight)
        remaining[parent + 1] = torch.where(total > 0, more, before)
        sums[parent + 1] = torch.where(total > 0, total, sums[parent + 1])
    # All nodes, each after its descendants and after its earlier siblings; the anchor last.
    order, waiting = [], [ANCHOR]
    while waiting:
        order.append(waiting.pop())
        waiting += tree.children.get(order[-1], ())
    order.reverse()
    ends = torch.cat([weights[node + 1] for node in order[:-1]] + [certain])  # of each node, unless an earlier one
    ends = ends.nan_to_num(nan=0.0)  # a draft whose q is no number is rejected, and leaves p as it is
    end = sample_index(ends * torch.cat([certain, (1 - ends[:-1]).cumprod(0)]))
    left = [remaining[node + 1] for node in order]  # put together only where to read `end` would be to wait
    own = sample_index(left[int(end)] if p.is_cpu else torch.stack(left).index_select(0, end)[0])
    last, token, *drafts = torch.cat([end, own, tokens]).cpu().tolist()
    for node in tree.path(order[last]):
        yield drafts[node], node
    yield token, None
