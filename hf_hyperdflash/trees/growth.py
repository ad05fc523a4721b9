"""How a draft tree grows, level by level: the most probable nodes first, or drawn at random.

Both ask the drafter once per level, for all nodes of it that go on.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple, Protocol

import torch

from .tree import ANCHOR, DraftTree

ACCEPTED = 0.7, 0.3, 0.25
"""How often a child is accepted once it comes into play, by its rank among its siblings, the last for all that follow:
as the shipped drafter's are."""


class NodeModel(Protocol):
    """What is known of how nodes fare ([`~auto.acceptance.NodeAcceptance`])."""

    later: tuple[float, ...]

    def of_likely(self, likely: torch.Tensor) -> torch.Tensor: ...
    def of_one(self, signal: float) -> float: ...


class Admission(NamedTuple):
    """Which nodes a tree may have: in order of their survival, until one is not worth it.

    Attributes:
        survival: What is known of nodes.
        least: How probable it has to be that a node is accepted.
    """

    survival: NodeModel
    least: float

    @property
    def log_least(self) -> float:
        """Where values of nodes are logarithms."""
        return math.log(self.least) if self.least else -math.inf


class DraftStep(NamedTuple):
    """What a drafter says after several paths.

    Attributes:
        logits: `[paths, config.vocab_size]`.
        confidence: How probable it holds it that the target accepts what it drafts next, `[paths]`; `None` if it has
            no opinion.
    """

    logits: torch.Tensor
    confidence: torch.Tensor | None = None


Steps = Callable[[int, torch.Tensor, torch.Tensor], DraftStep]
"""From a draft position k, the token before it on each path `[paths]`, and which path of the step before each goes on
from `[paths]`; for k = 0 one path, that of the anchor."""

Scored = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Scores `[paths, config.vocab_size]` as the request changes them, from the drafts before them on each path,
`[paths, drafts]`, and logits."""


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
    """The tree of the nodes that are most probable, by the product of the drafter's probabilities along the path.

    A node is never more probable than its parent, so what is not among the best of all nodes so far has no descendant
    among the best: each level goes on from those that are, or from the `width` best of these.

    Args:
        ids: `[1, seq]`, the text.
        count: Its greatest depth.
        budget: The most nodes.
        steps: The drafter.
        scored: The request's processors.
        width: How many nodes of a level go on at most; `None` for any number.
        children: How many each of them has at most; `None` for any number.
        admission: Which nodes are worth it, by what is known of their survival; `None` for all, by the drafter's word.
    """
    width, children = min(width or budget, budget), min(children or budget, budget)
    tokens, parents = ids.new_empty(0), ids.new_empty(0)
    values, signals = torch.empty(0, device=ids.device), torch.empty(0, device=ids.device)
    least = -math.inf if admission is None else admission.log_least
    level, rows, of_level = ids[:, -1], ids.new_zeros(1), torch.zeros(1, device=ids.device)
    places, paths = ids.new_full((1,), ANCHOR), ids[:, :0]
    for k in range(count):
        likely = (scored(paths, steps(k, level, rows).logits) / SHARPENED).log_softmax(-1)
        best = likely.topk(min(children, likely.shape[-1]), dim=-1)
        chances = best.values if admission is None else admission.survival.of_likely(best.values)
        found = (of_level[:, None] + chances).flatten().nan_to_num(nan=-torch.inf, neginf=-torch.inf)
        start, each = len(values), best.values.shape[1]
        # A level has no more of the best than there are nodes: of a large tree it has far more in all, dear to sort.
        of_best = found.topk(min(budget, len(found))).indices.sort().values
        values = torch.cat([values, found[of_best]])
        signals = torch.cat([signals, best.values.flatten()[of_best]])
        tokens = torch.cat([tokens, best.indices.flatten()[of_best]])
        parents = torch.cat([parents, places[of_best // each]])
        among = values.sort(descending=True, stable=True).indices[:budget]
        places = among[(among >= start) & (values[among] > least)][:width].sort().values
        if not len(places):
            break
        rows = of_best[places - start] // each
        level, of_level = tokens[places], values[places]
        paths = torch.cat([paths[rows], level[:, None]], dim=1)
    kept = values.sort(descending=True, stable=True).indices[:budget]
    kept = kept[values[kept] > least].sort().values
    number = {ANCHOR: ANCHOR, **{place: node for node, place in enumerate(kept.tolist())}}
    of_tree = tuple(number[parent] for parent in parents[kept].tolist())
    return DraftTree(tokens[kept], of_tree, confidence=None if admission is None else signals[kept].exp())


def width_for(budget: int) -> int:
    """From how many nodes of a level a tree of the most probable ones goes on. Early levels hold as many as the whole
    tree, of which nearly all give way to deeper ones: to ask the drafter about them takes time and finds nothing."""
    return max(4, budget // 4)


def drawn(
    ids: torch.Tensor, count: int, budget: int, steps: Steps, scored: Scored, admission: Admission | None = None
) -> DraftTree:
    """A tree of random draws, siblings without replacement.

    How many children a node gets is settled before any of them is drawn, from what is known of the paths so far, and
    what is drawn stays: so each is drawn from its `q` and no other, and verification is exact (multi-round rejection:
    SpecInfer, algorithm 2; Sequoia). How many nodes a level gets does not depend on the text at all.

    Args:
        ids: `[1, seq]`, the text.
        count: Its greatest depth.
        budget: The most nodes.
        steps: The drafter.
        scored: The request's processors.
        admission: Which nodes are worth it, by what is known of their survival; `None` for all that there is room for.
    """
    tokens: list[torch.Tensor] = []
    parents: list[int] = []
    q: list[torch.Tensor] = []
    signals: list[float] = []
    later, least = (ACCEPTED[1:], -1.0) if admission is None else (admission.survival.later, admission.least)
    level, rows, places, values, paths = ids[:, -1], ids.new_zeros(1), [ANCHOR], [1.0], ids[:, :0]
    for k, width in enumerate(level_sizes(count, budget)):
        step = steps(k, level, rows)
        left = scored(paths, step.logits).softmax(-1)
        if admission is not None:
            said = left.amax(-1).tolist()
            sure = [admission.survival.of_one(each) for each in said]
        else:
            said = sure = [ACCEPTED[0]] * len(places) if step.confidence is None else step.confidence.tolist()
        slots = [
            (value * hit, row, rank)
            for row, (value, each) in enumerate(zip(values, sure))
            for rank, hit in enumerate(hits_of(each, width, later))
            if value * hit > least
        ]
        if not slots:
            break
        # Of equals the earlier sibling: no child without those before it.
        slots = heapq.nlargest(width, slots, key=lambda slot: (slot[0], -slot[2]))
        most = min(max(rank for _, _, rank in slots) + 1, left.shape[-1])
        draws = torch.multinomial(left, most)  # one after the other
        new_rows: list[int] = []
        new_values: list[float] = []
        is_there = left.gather(-1, draws).gt(0).tolist()
        for value, row, rank in sorted(slots, key=lambda slot: slot[1:]):
            if rank < most and is_there[row][rank]:
                before = draws[row, :rank]
                rest = left[row].index_fill(0, before, 0.0)
                q.append(rest / rest.sum())
                tokens.append(draws[row, rank])
                parents.append(places[row])
                signals.append(said[row])
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
"""Temperature of the probabilities by which nodes are compared where the target's best token is what counts: a drafter
learns to draw as the target does, and what it would draw most often is the target's best token more often still."""


def hits_of(first: float, ranks: int, later: tuple[float, ...] = ACCEPTED[1:]) -> list[float]:
    """How probable it is that the target goes on with the child of each rank: those before it have to be rejected. The
    first is never held to be less probable than the second."""
    hits, reached = [], 1.0
    for rank in range(ranks):
        accepted = later[min(rank, len(later)) - 1] if rank else max(first, later[0])
        hits.append(reached * accepted)
        reached *= 1 - accepted
    return hits


@lru_cache
def level_sizes(count: int, budget: int) -> list[int]:
    """How many nodes each level of a drawn tree gets: those of the tree that is best where children are accepted as
    often as [`ACCEPTED`] says (Sequoia's construction).

    Args:
        count: The greatest depth.
        budget: Nodes.
    """
    sizes, hits = [0] * count, hits_of(ACCEPTED[0], budget)
    heap = [(-hits[0], 1.0, 0, 0)]  # by value: what the parent is worth, its depth, and the rank among its children
    for _ in range(budget):
        value, parent, depth, rank = heapq.heappop(heap)
        sizes[depth] += 1
        if rank + 1 < budget:
            heapq.heappush(heap, (-parent * hits[rank + 1], parent, depth, rank + 1))
        if depth + 1 < count:
            heapq.heappush(heap, (value * hits[0], -value, depth + 1, 0))
    return [size for size in sizes if size]
