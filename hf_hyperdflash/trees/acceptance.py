"""Acceptance rules: which nodes of one sequence's draft tree the target accepts, from the target's scores alone.

Each yields the accepted drafts from the anchor on, then the target's own token. [`greedy_walk`] and [`sampled_walk`]
walk down from the anchor. They ask for the target's scores after a node, or after the anchor ([`ANCHOR`]), only when
that node is accepted, so that logits processors see every accepted prefix once and in order. [`traversal_walk`] reads
the scores of the whole tree first, and so accepts more of it. `drafts` are `tree.tokens`, on the host.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

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


def sample_index(weights: torch.Tensor) -> torch.Tensor:
    """Sample an index `[..., 1]` with probability proportional to `weights` `[..., values]`, by one uniform number and
    the running sum. Weights are at least 0, and not all of them 0.

    A race of random numbers, one for each value, as in `torch.multinomial`, takes 20 times as long for a vocabulary of
    49,152 tokens on a CPU. Sums are in float64: in float32 the rarest tokens would never be drawn. Running sums of all
    values would be megabytes, which a CPU gets from the system and gives back every time: there they are of stretches
    of values, and then of the values of one. An accelerator waits for launches instead.
    """
    dtype = torch.float32 if weights.device.type == "mps" else torch.float64  # which MPS does not have
    share = torch.rand(*weights.shape[:-1], 1, dtype=dtype, device=weights.device)
    width = math.gcd(weights.shape[-1], 256) if weights.is_cpu else 1
    if width < 64:
        sums = weights.cumsum(-1, dtype=dtype)
        return _first_beyond(share * sums[..., -1:], sums)
    stretches = weights.unflatten(-1, (-1, width))
    sums = stretches.sum(-1, dtype=dtype).cumsum(-1)
    wanted = share * sums[..., -1:]
    stretch = _first_beyond(wanted, sums)
    to_its_end = sums.gather(-1, stretch) - wanted
    sums = stretches.take_along_dim(stretch[..., None], -2).squeeze(-2).cumsum(-1, dtype=dtype)
    return stretch * width + _first_beyond((sums[..., -1:] - to_its_end).clamp(min=0), sums)


def _first_beyond(number: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
    """Return the first index whose running sum is beyond a number, `[..., 1]`: its weight is not 0. What is no number
    becomes the last index."""
    return torch.searchsorted(sums, number, right=True).clamp(max=sums.shape[-1] - 1)


class Siblings(NamedTuple):
    """Indices that were sampled one after the other, without replacement."""

    indices: torch.Tensor  # [..., count]
    are_there: torch.Tensor  # [..., count], whether a weight was left for each
    weights: list[torch.Tensor]  # what each was sampled by, [..., values]


def sample_siblings(weights: torch.Tensor, count: int) -> Siblings:
    """Sample `count` indices one after the other, as [`sample_index`], each by the weights that are left."""
    indices, before = [], [weights]
    for _ in range(count):
        indices.append(sample_index(before[-1]))
        before.append(before[-1].scatter(-1, indices[-1], 0.0))
    are_there = [left.gather(-1, index) > 0 for left, index in zip(before, indices)]
    return Siblings(torch.cat(indices, dim=-1), torch.cat(are_there, dim=-1), before[:-1])
