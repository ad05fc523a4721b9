"""Grows a draft tree level by level: from its most probable nodes, or from random draws.

Both ways ask the drafter once per level, for all nodes of the level that get children.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple, Protocol

import torch

from .acceptance import sample_siblings
from .tree import ANCHOR, DraftTree

ACCEPTED = 0.7, 0.3, 0.25
"""How often a child is accepted once it is tried, by its rank among its siblings; the last number is for all later
ranks. Measured with the shipped drafter."""


class NodeModel(Protocol):
    """Predicts how often nodes are accepted ([`~auto.acceptance.NodeAcceptance`])."""

    later: tuple[float, ...]

    def log_chances(self, likely: torch.Tensor) -> torch.Tensor: ...
    def chance(self, signal: float) -> float: ...


class Admission(NamedTuple):
    """Which nodes a tree may have: those that are accepted often enough.

    Attributes:
        survival: Predicts how often nodes are accepted.
        least: The lowest probability of acceptance with which a node is admitted.
    """

    survival: NodeModel
    least: float

    @property
    def log_least(self) -> float:
        """The logarithm of `least`."""
        return math.log(self.least) if self.least else -math.inf


class DraftStep(NamedTuple):
    """A drafter's output after several paths.

    Attributes:
        logits: `[paths, config.vocab_size]`.
        confidence: Its probability that the target accepts the next draft, `[paths]`; `None` if it gives none.
    """

    logits: torch.Tensor
    confidence: torch.Tensor | None = None


Steps = Callable[[int, torch.Tensor, torch.Tensor], DraftStep]
"""A drafter as a function of a draft position k, the token before it on each path `[paths]`, and, for each path, the
index of the path of the step before that it continues `[paths]`. At k = 0 there is one path, the anchor's."""

Scored = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Applies the request's logits processors: from the drafts so far on each path, `[paths, drafts]`, and logits
`[paths, config.vocab_size]` to scores of the same shape."""


def most_probable(
    ids: torch.Tensor,
    count: int,
    budget: int,
    steps: Steps,
    scored: Scored,
    width: int | None = None,
    children: int | None = None,
    admission: Admission | None = None,
) -> DraftTree:
    """Grow the tree of the most probable nodes, by the product of the drafter's probabilities along the path.

    A node is never more probable than its parent. So a node that is not among the best so far has no descendant among
    the best, and each level gives children only to those that are, or to the `width` best of these.

    Args:
        ids: `[1, seq]`, the text.
        count: The greatest depth.
        budget: The most nodes.
        steps: The drafter.
        scored: The request's processors.
        width: The most nodes of a level that get children; `None` for any number.
        children: The most children of a node; `None` for any number.
        admission: Which nodes are admitted; `None` for all.
    """
    width, children = min(width or budget, budget), min(children or budget, budget)
    tokens, parents = ids.new_empty(0), ids.new_empty(0)
    values, signals = torch.empty(0, device=ids.device), torch.empty(0, device=ids.device)
    least = -math.inf if admission is None else admission.log_least
    level, rows, level_values = ids[:, -1], ids.new_zeros(1), torch.zeros(1, device=ids.device)
    places, paths = ids.new_full((1,), ANCHOR), ids[:, :0]
    for k in range(count):
        likely = (scored(paths, steps(k, level, rows).logits) / SHARPENED).log_softmax(-1)
        best = likely.topk(min(children, likely.shape[-1]), dim=-1)
        chances = best.values if admission is None else admission.survival.log_chances(best.values)
        found = (level_values[:, None] + chances).flatten().nan_to_num(nan=-torch.inf, neginf=-torch.inf)
        start, each = len(values), best.values.shape[1]
        # No more than `budget` nodes of a level can be among the best, and to sort all that there are would be slow.
        best_found = found.topk(min(budget, len(found))).indices.sort().values
        values = torch.cat([values, found[best_found]])
        signals = torch.cat([signals, best.values.flatten()[best_found]])
        tokens = torch.cat([tokens, best.indices.flatten()[best_found]])
        parents = torch.cat([parents, places[best_found // each]])
        among = values.sort(descending=True, stable=True).indices[:budget]
        places = among[(among >= start) & (values[among] > least)][:width].sort().values
        if not len(places):
            break
        rows = best_found[places - start] // each
        level, level_values = tokens[places], values[places]
        paths = torch.cat([paths[rows], level[:, None]], dim=1)
    kept = values.sort(descending=True, stable=True).indices[:budget]
    kept = kept[values[kept] > least].sort().values
    number = {ANCHOR: ANCHOR, **{place: node for node, place in enumerate(kept.tolist())}}
    tree_parents = tuple(number[parent] for parent in parents[kept].tolist())
    return DraftTree(tokens[kept], tree_parents, confidence=None if admission is None else signals[kept].exp())


def width_for(budget: int) -> int:
    """Return how many nodes of a level get children in a tree of the most probable nodes. An early level has as many
    candidates as the whole tree has nodes, and deeper nodes replace nearly all of them: to ask the drafter about those
    takes time for nothing."""
    return max(4, budget // 4)


def drawn(
    ids: torch.Tensor, count: int, budget: int, steps: Steps, scored: Scored, admission: Admission | None = None
) -> DraftTree:
    """Grow a tree of random draws, siblings without replacement.

    The number of a node's children is decided before any of them is drawn, from the paths so far, and every draw stays
    in the tree. So each token is drawn from its `q` and no other distribution, and verification is exact (multi-round
    rejection: SpecInfer, algorithm 2; Sequoia). The number of a level's nodes does not depend on the text at all.

    Args:
        ids: `[1, seq]`, the text.
        count: The greatest depth.
        budget: The most nodes.
        steps: The drafter.
        scored: The request's processors.
        admission: Which nodes are admitted; `None` for all that there is room for.
    """
    tokens: list[torch.Tensor] = []
    parents: list[int] = []
    q: list[torch.Tensor] = []
    signals: list[float] = []
    later, least = (ACCEPTED[1:], -1.0) if admission is None else (admission.survival.later, admission.least)
    level, rows, places, values, paths = ids[:, -1], ids.new_zeros(1), [ANCHOR], [1.0], ids[:, :0]
    for k, width in enumerate(level_sizes(count, budget)):
        step = steps(k, level, rows)
        distributions = scored(paths, step.logits).softmax(-1)
        if admission is not None:
            level_signals = distributions.amax(-1).tolist()
            chances = [admission.survival.chance(signal) for signal in level_signals]
        else:
            chances = [ACCEPTED[0]] * len(places) if step.confidence is None else step.confidence.tolist()
            level_signals = chances
        slots = [
            (value * hit, row, rank)
            for row, (value, chance) in enumerate(zip(values, chances))
            for rank, hit in enumerate(hits_of(chance, width, later))
            if value * hit > least
        ]
        if not slots:
            break
        # Of equals the earlier sibling: no child without those before it.
        slots = heapq.nlargest(width, slots, key=lambda slot: (slot[0], -slot[2]))
        most = min(max(rank for _, _, rank in slots) + 1, distributions.shape[-1])
        draws = sample_siblings(distributions, most)
        new_rows: list[int] = []
        new_values: list[float] = []
        are_there = draws.are_there.tolist()
        for value, row, rank in sorted(slots, key=lambda slot: slot[1:]):
            if rank < most and are_there[row][rank]:
                rest = draws.weights[rank][row]
                q.append(rest / rest.sum())
                tokens.append(draws.indices[row, rank])
                parents.append(places[row])
                signals.append(level_signals[row])
                new_rows.append(row)
                new_values.append(value)
        places, values = list(range(len(parents) - len(new_rows), len(parents))), new_values
        rows, level = torch.tensor(new_rows, device=ids.device), torch.stack(tokens[len(tokens) - len(new_rows) :])
        paths = torch.cat([paths[rows], level[:, None]], dim=1)
    if not tokens:
        return DraftTree.chain(ids[0, :0])
    confidence = None if admission is None else torch.tensor(signals)
    return DraftTree(torch.stack(tokens), tuple(parents), tuple(q), confidence)


SHARPENED = 0.55
"""Temperature of the probabilities by which nodes are compared in greedy decoding. A drafter is trained to draw as the
target does; its most probable token is the target's best one more often than its probability says."""


def hits_of(first: float, ranks: int, later: tuple[float, ...] = ACCEPTED[1:]) -> list[float]:
    """Return the probability that the child of each rank is accepted, for which those before it must be rejected. The
    first one's chance is taken as at least the second one's."""
    hits, tried = [], 1.0
    for rank in range(ranks):
        accepted = later[min(rank, len(later)) - 1] if rank else max(first, later[0])
        hits.append(tried * accepted)
        tried *= 1 - accepted
    return hits


@lru_cache
def level_sizes(count: int, budget: int) -> list[int]:
    """Return the number of nodes on each level of a drawn tree: those of the best tree for children that are accepted
    as often as [`ACCEPTED`] says (Sequoia's construction).

    Args:
        count: The greatest depth.
        budget: Nodes.
    """
    sizes, hits = [0] * count, hits_of(ACCEPTED[0], budget)
    heap = [(-hits[0], 1.0, 0, 0)]  # by value: the parent's value, its depth, and the rank among its children
    for _ in range(budget):
        value, parent, depth, rank = heapq.heappop(heap)
        sizes[depth] += 1
        if rank + 1 < budget:
            heapq.heappush(heap, (-parent * hits[rank + 1], parent, depth, rank + 1))
        if depth + 1 < count:
            heapq.heappush(heap, (value * hits[0], -value, depth + 1, 0))
    return [size for size in sizes if size]
