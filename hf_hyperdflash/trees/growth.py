"""Grows draft trees level by level: from their most probable nodes, or from random draws.

Both ways ask the drafter once per level, for all nodes of the level that get children, of all texts.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple, Protocol

import torch
from torch import nn

from .draws import sample_index, sample_siblings
from .padding import Padding
from .tree import ANCHOR, DraftTree

ACCEPTED = 0.7, 0.3, 0.25
"""How often a child is accepted once it is tried, by its rank among its siblings; the last number is for all later
ranks. Measured with the shipped drafter."""

EDGE = 1e-3  # a probability nearer to 0 or 1 counts as this


class NodeModel(Protocol):
    """Predicts how often nodes are accepted, by a line from one log-odds to the other
    ([`~auto.acceptance.AcceptanceLine`]).

    Attributes:
        line: Its slope and intercept.
    """

    @property
    def line(self) -> tuple[float, float]: ...
    def __call__(self, p: float) -> float: ...


class Admission(NamedTuple):
    """Which nodes a tree may have: those that are accepted often enough.

    Attributes:
        survival: Predicts how often nodes are accepted.
        min_probability: The lowest probability of acceptance with which a node is admitted.
    """

    survival: NodeModel
    min_probability: float

    @property
    def log_min_probability(self) -> float:
        """The logarithm of `min_probability`."""
        return math.log(self.min_probability) if self.min_probability else -math.inf

    def numbers(self, device: torch.device) -> torch.Tensor:
        """Return slope and intercept of `survival`, and `log_min_probability`, `[3]`: inputs of a graph, new in every
        round."""
        return torch.tensor([*self.survival.line, self.log_min_probability], device=device)


class ChainAdmission(Protocol):
    """Admits the drafts of a chain one by one ([`~auto.policies.ChainPolicy`])."""

    def is_open(self) -> bool: ...
    def admits(self, signal: float) -> bool: ...


class DraftVocabulary(NamedTuple):
    """The tokens that a drafter can draft.

    Attributes:
        ids: `[tokens]`.
        vocab_size: The number of tokens of the target.
    """

    ids: torch.Tensor
    vocab_size: int

    def spread(self, of_drafted: torch.Tensor, others: float) -> torch.Tensor:
        """Return `[..., vocab_size]` from the values of the tokens that can be drafted, `[..., tokens]`."""
        full = of_drafted.new_full((*of_drafted.shape[:-1], self.vocab_size), others)
        return full.index_copy_(-1, self.ids.to(full.device), of_drafted)


class DraftStep(NamedTuple):
    """A drafter's output after several paths.

    Attributes:
        logits: `[paths, config.vocab_size]`, or those of `vocabulary` alone.
        confidence: Its probability that the target accepts the next draft, `[paths]`; `None` if it gives none.
        vocabulary: The tokens that the logits are of; `None` for all.
    """

    logits: torch.Tensor
    confidence: torch.Tensor | None = None
    vocabulary: DraftVocabulary | None = None

    def token_ids(self, columns: torch.Tensor) -> torch.Tensor:
        """Return the tokens of columns of the logits."""
        return columns if self.vocabulary is None else self.vocabulary.ids.to(columns.device)[columns]

    def over_all_tokens(self, distributions: torch.Tensor) -> torch.Tensor:
        """Return distributions over columns of the logits as such of all tokens."""
        return distributions if self.vocabulary is None else self.vocabulary.spread(distributions, 0.0)

    def whole(self) -> DraftStep:
        """Return the same with logits of all tokens."""
        if self.vocabulary is None:
            return self
        return DraftStep(self.vocabulary.spread(self.logits, -torch.inf), self.confidence)


Steps = Callable[[int, torch.Tensor, torch.Tensor], DraftStep]
"""A drafter as a function of a draft position k, the token before it on each path `[paths]`, and, for each path, the
index of the path of the step before that it continues `[paths]`. At k = 0 there is one path for each text, its
anchor's; a text's paths stand together, and texts in their order."""

Scored = Callable[[torch.Tensor, DraftStep, Sequence[int]], DraftStep]
"""Applies the requests' logits processors: from the drafts so far on each path, `[paths, drafts]`, the drafter's step,
and the number of each text's paths, to a step with scores in place of logits."""


def independent_steps(logits: torch.Tensor) -> Steps:
    """Return a drafter whose drafts do not depend on each other, for a graph, where each text has as many paths.

    Args:
        logits: `[batch, drafts, config.vocab_size]`.
    """

    def steps(k: int, tokens: torch.Tensor, rows: torch.Tensor) -> DraftStep:
        return DraftStep(logits[:, k].repeat_interleave(len(tokens) // len(logits), dim=0))

    return steps


class GrownChains(NamedTuple):
    """A chain of each text, on the device.

    Attributes:
        tokens: `[batch, drafts]`.
        confidence: The drafter's probability that the target accepts each, `[batch, drafts]`; `None` if it gives none.
        signals: The drafter's probability of each, `[batch, drafts]`; `None` where nobody learns from it.
        q: The distributions that they were drawn from, for each draft `[batch, config.vocab_size]`; none of the most
            probable tokens.
    """

    tokens: torch.Tensor
    confidence: torch.Tensor | None
    signals: torch.Tensor | None
    q: Sequence[torch.Tensor] = ()


class GrownNodes(NamedTuple):
    """The nodes of a tree of each text, on the device.

    Attributes:
        tokens: `[batch, nodes]`.
        places: The number of each node, and of its parent, among all that were compared, `[2, batch, nodes]`.
            [`ANCHOR`] stands for the anchor, and for what only fills up, behind all nodes.
        signals: The drafter's probability of each, `[batch, nodes]`; `None` where nobody learns from it.
    """

    tokens: torch.Tensor
    places: torch.Tensor
    signals: torch.Tensor | None

    def trees(self) -> list[DraftTree]:
        """Return the trees, with one wait for the device."""
        trees = []
        for text, (own, parents) in enumerate(zip(*self.places.tolist())):
            count = len(own) - own.count(ANCHOR)
            number = {ANCHOR: ANCHOR, **{place: node for node, place in enumerate(own[:count])}}
            sure = None if self.signals is None else self.signals[text, :count]
            own_parents = tuple(number[parent] for parent in parents[:count])
            trees.append(DraftTree(self.tokens[text, :count], own_parents, confidence=sure))
        return trees


def most_probable(
    anchors: torch.Tensor,
    counts: Sequence[int],
    budget: int,
    steps: Steps,
    scored: Scored,
    width: int | None = None,
    children: int | None = None,
    admission: Admission | None = None,
) -> list[DraftTree]:
    """Grow the tree of the most probable nodes of each text, by the product of the drafter's probabilities along the
    path.

    A node is never more probable than its parent. So a node that is not among the best so far has no descendant among
    the best, and each level gives children only to those that are, or to the `width` best of these.

    Args:
        anchors: The last token of each text, `[batch]`.
        counts: The greatest depth of each tree.
        budget: The most nodes of a tree.
        steps: The drafter.
        scored: The requests' processors.
        width: The most nodes of a level that get children; `None` for any number.
        children: The most children of a node; `None` for any number.
        admission: Which nodes are admitted; `None` for all.
    """
    depth = max(counts)
    depths = torch.tensor(counts, device=anchors.device) if len(set(counts)) > 1 else depth
    admitted = None if admission is None else admission.numbers(anchors.device)
    return grow_best(anchors, depths, depth, budget, steps, scored, width, children, admitted).trees()


def grow_best(
    anchors: torch.Tensor,
    counts: torch.Tensor | int,
    depth: int,
    budget: int,
    steps: Steps,
    scored: Scored | None,
    width: int | None = None,
    children: int | None = None,
    admission: torch.Tensor | None = None,
) -> GrownNodes:
    """Do the same as [`most_probable`], eagerly or inside a graph.

    Args:
        counts: The greatest depth of each tree, `[batch]`, or of all.
        depth: The greatest of any tree.
        scored: The requests' processors; `None` inside a graph, which has none. Its levels ask the drafter about as
            many nodes of every text, some of which only fill up, and never wait for the device.
        admission: The numbers of an [`Admission`]; `None` to admit all nodes.
    """
    width, children, depth = min(width or budget, budget), min(children or budget, budget), min(depth, budget)
    min_probability = -math.inf if admission is None else admission[2]
    # Of all nodes so far, `[batch, nodes]`; what only fills up has minus infinity for a value.
    tokens = parents = anchors.new_empty(len(anchors), 0)
    values = signals = torch.empty(len(anchors), 0, device=anchors.device)
    # Of the nodes that get children: in the order of `steps`, and `[batch, most of a text]`.
    level, rows, paths = anchors, torch.arange(len(anchors), device=anchors.device), anchors.new_empty(len(anchors), 0)
    padding = Padding([1] * len(anchors), anchors.device)
    places, level_values = torch.full_like(level, ANCHOR)[:, None], torch.zeros_like(level, dtype=torch.float)[:, None]
    depths = counts if isinstance(counts, int) else counts[:, None]
    for k in range(depth):
        step = steps(k, level, rows)
        step = step if scored is None else scored(paths, step, padding.counts)
        likely = (step.logits.float() / SHARPENED).log_softmax(-1)
        best = likely.topk(min(children, likely.shape[-1]), dim=-1)
        chances = best.values if admission is None else log_chances(best.values, admission)
        found = level_values[..., None] + padding.add(chances, -math.inf)
        found = found.flatten(1).nan_to_num(nan=-torch.inf, neginf=-torch.inf)
        start, each = values.shape[1], best.values.shape[1]
        # No more than `budget` nodes of a level can be among the best, and to sort all that there are would be slow.
        best_found = found.topk(min(budget, found.shape[1])).indices.sort().values
        values = torch.cat([values, found.gather(1, best_found)], dim=1)
        if admission is not None:
            signals = torch.cat([signals, padding.add(best.values).flatten(1).gather(1, best_found)], dim=1)
        ids = padding.add(step.token_ids(best.indices)).flatten(1)
        tokens = torch.cat([tokens, ids.gather(1, best_found)], dim=1)
        parents = torch.cat([parents, places.gather(1, best_found // each)], dim=1)
        if k + 1 == depth:
            break
        among = values.sort(descending=True, stable=True).indices[:, :budget]
        is_open = (among >= start) & (values.gather(1, among) > min_probability) & (depths > k + 1)
        # Of `budget` nodes k are ancestors of each, and for a child of the last one there is no place.
        largest = min(width, budget - k - 1)
        is_open &= is_open.cumsum(1) <= largest
        numbers = padding.numbers
        open_counts = is_open.sum(1).tolist() if scored is not None else [min(largest, among.shape[1])] * len(anchors)
        padding = Padding(open_counts, anchors.device)
        if not padding.width:
            break
        places = among.where(is_open, ANCHOR).sort().values[:, -padding.width :]
        node = places.clamp(min=start)
        level, level_values = padding.remove(tokens.gather(1, node)), values.gather(1, node)
        if scored is None:
            level_values = level_values.where(places >= 0, -torch.inf)
        rows = padding.remove(numbers.gather(1, best_found.gather(1, node - start) // each))
        paths = torch.cat([paths[rows], level[:, None]], dim=1)
    # The best ones, in the order of their making.
    kept = values.sort(descending=True, stable=True).indices[:, :budget]
    made = values.shape[1]
    kept = kept.where(values.gather(1, kept) > min_probability, made).sort().values
    nodes = kept.clamp(max=made - 1)
    own = torch.stack([kept.where(kept < made, ANCHOR), parents.gather(1, nodes)])
    return GrownNodes(tokens.gather(1, nodes), own, None if admission is None else signals.gather(1, nodes).exp())


def log_chances(log_p: torch.Tensor, line: torch.Tensor) -> torch.Tensor:
    """Return the logarithms of probabilities of acceptance from those of the drafter's probabilities, by a
    [`NodeModel`]'s `line`, `[2 or more]`."""
    log_p = log_p.clamp(math.log(EDGE), math.log1p(-EDGE))
    return nn.functional.logsigmoid(line[0] * (log_p - torch.log1p(-log_p.exp())) + line[1])


class GraphPlan(NamedTuple):
    """What a graph is to draft.

    Attributes:
        tree_budget: The most nodes of a tree; `None` for chains.
        admission: The numbers of an [`Admission`]; `None` to admit all nodes.
        has_signals: Whether somebody admits the drafts of chains one by one.
    """

    tree_budget: int | None
    admission: torch.Tensor | None
    has_signals: bool


def grow_in_graph(
    plan: GraphPlan,
    anchors: torch.Tensor,
    counts: torch.Tensor,
    depth: int,
    steps: Steps,
    width: int | None = None,
) -> GrownChains | GrownNodes:
    """Draft the most probable chain of each text, or the tree of its most probable nodes, inside a graph.

    Args:
        plan: Which of them.
        anchors: The last token of each text, `[batch]`.
        counts: The greatest depth of each tree, `[batch]`.
        depth: The number of drafts of chains, and the greatest depth of any tree.
        steps: The drafter.
        width: Of a tree, how many nodes of a level go on at most, and how many children each has; `None` for as many
            as are worth it.
    """
    if plan.tree_budget is not None:
        going_on = width or width_for(plan.tree_budget)
        return grow_best(anchors, counts, depth, plan.tree_budget, steps, None, going_on, width, plan.admission)
    return grow_chains(anchors, depth, steps, has_signals=plan.has_signals)


def grow_chains(
    anchors: torch.Tensor,
    depth: int,
    steps: Steps,
    scored: Scored | None = None,
    do_sample: bool = False,
    admission: ChainAdmission | None = None,
    has_signals: bool = False,
) -> GrownChains:
    """Draft a chain of each text, one draft of all at a time, eagerly or inside a graph.

    Args:
        anchors: The last token of each text, `[batch]`.
        depth: The number of drafts.
        steps: The drafter, with the texts as paths.
        scored: The requests' processors; `None` inside a graph, which has none.
        do_sample: Whether tokens are drawn; else they are the most probable ones.
        admission: Who admits the drafts of the only text one by one; `None` for all.
        has_signals: Whether to return the drafter's probabilities, for somebody who admits drafts afterwards.
    """
    count, tokens = len(anchors), anchors
    drafts, rows = anchors.new_empty(count, 0), torch.arange(count, device=anchors.device)
    confidence: list[torch.Tensor] = []
    signals: list[torch.Tensor] = []
    q: list[torch.Tensor] = []
    for k in range(depth):
        if admission is not None and not admission.is_open():
            break
        step = steps(k, tokens, rows)
        step = step if scored is None else scored(drafts, step, [1] * count)
        # By what is known before the token is drawn: afterwards it would be chosen by what it is.
        if admission is not None and not admission.admits(float(best_chances(step.logits))):
            break
        if do_sample:
            distribution = step.logits.softmax(-1)
            best = sample_index(distribution).squeeze(1)
            q.append(step.over_all_tokens(distribution))
        else:
            best = step.logits.argmax(-1)
        tokens = step.token_ids(best)
        drafts = torch.cat([drafts, tokens[:, None]], dim=1)
        confidence += [] if step.confidence is None else [step.confidence]
        signals += [best_chances(step.logits)] if has_signals else []
    sure, likely = (torch.stack(each, dim=1) if each else None for each in (confidence, signals))
    return GrownChains(drafts, sure, likely, q)


def best_chances(scores: torch.Tensor) -> torch.Tensor:
    """Return the probability of the best token, `[...]`, from scores `[..., config.vocab_size]`."""
    return scores.float().softmax(-1).amax(-1)


def width_for(budget: int) -> int:
    """Return how many nodes of a level get children in a tree of the most probable nodes. An early level has as many
    candidates as the whole tree has nodes, and deeper nodes replace nearly all of them: to ask the drafter about those
    takes time for nothing."""
    return max(4, budget // 4)


def drawn(
    anchors: torch.Tensor,
    counts: Sequence[int],
    budget: int,
    steps: Steps,
    scored: Scored,
    admission: Admission | None = None,
) -> list[DraftTree]:
    """Grow a tree of random draws for each text, siblings without replacement.

    The number of a node's children is decided before any of them is drawn, from the paths so far, and every draw stays
    in the tree. So each token is drawn from its `q` and no other distribution, and verification is exact (multi-round
    rejection: SpecInfer, algorithm 2; Sequoia). The number of a level's nodes does not depend on the text at all.

    Args:
        anchors: The last token of each text, `[batch]`.
        counts: The greatest depth of each tree.
        budget: The most nodes of a tree.
        steps: The drafter.
        scored: The requests' processors.
        admission: Which nodes are admitted; `None` for all that there is room for.
    """
    trees = [_DrawnTree(level_sizes(count, budget), admission) for count in counts]
    level, rows, paths = anchors, torch.arange(len(anchors), device=anchors.device), anchors.new_empty(len(anchors), 0)
    for k in range(max(counts)):
        step = scored(paths, steps(k, level, rows), [len(tree.places) for tree in trees])
        distributions = step.logits.softmax(-1)
        if admission is not None:
            signals = distributions.amax(-1).tolist()
        else:
            signals = [ACCEPTED[0]] * len(level) if step.confidence is None else step.confidence.tolist()
        candidates, first = [], 0
        for tree in trees:
            own = signals[first : first + len(tree.places)]
            candidates.append([(first + row, row, rank, value) for row, rank, value in tree.candidates(k, own)])
            first += len(own)
        if not any(candidates):
            break
        largest = min(max(rank for own in candidates for _, _, rank, _ in own) + 1, distributions.shape[-1])
        draws = sample_siblings(distributions, largest)
        are_there = draws.are_there.tolist()
        candidates = [
            [candidate for candidate in own if candidate[2] < largest and are_there[candidate[0]][candidate[2]]]
            for own in candidates
        ]
        if not any(candidates):  # nothing is drawn from what is no number
            break
        drawn_rows, ranks = zip(*((row, rank) for own in candidates for row, _, rank, _ in own))
        rows = torch.tensor(drawn_rows, device=anchors.device)
        level = step.token_ids(draws.indices[rows, torch.tensor(ranks, device=anchors.device)])
        q = _drawn_from(step, draws.weights, drawn_rows, ranks)
        for tree, own, own_tokens in zip(trees, candidates, level.split([len(own) for own in candidates])):
            tree.add([candidate[1:] for candidate in own], own_tokens, [next(q) for _ in own])
        paths = torch.cat([paths[rows], level[:, None]], dim=1)
        going_on = [bool(tree.places) for tree, own in zip(trees, candidates) for _ in own]
        if not any(going_on):
            break
        if not all(going_on):
            left = torch.tensor([row for row, goes_on in enumerate(going_on) if goes_on], device=anchors.device)
            level, rows, paths = level[left], rows[left], paths[left]
    return [tree.tree(anchors) for tree in trees]


def _drawn_from(
    step: DraftStep, weights: list[torch.Tensor], rows: Sequence[int], ranks: Sequence[int]
) -> Iterator[torch.Tensor]:
    """Yield the distribution of each draw, from the weights of all rows by rank."""
    of_rank: dict[int, Iterator[torch.Tensor]] = {}
    for rank in sorted(set(ranks)):
        index = [row for row, other in zip(rows, ranks) if other == rank]
        left = weights[rank] if index == list(range(len(weights[rank]))) else weights[rank][index]
        of_rank[rank] = iter(step.over_all_tokens(left / left.sum(-1, keepdim=True)).unbind())
    return (next(of_rank[rank]) for rank in ranks)


class _DrawnTree:
    """The nodes that were drawn for one text.

    Args:
        sizes: The most nodes of each level.
        admission: Which nodes are admitted.

    Attributes:
        places: The nodes of the last level, if another may follow.
    """

    def __init__(self, sizes: list[int], admission: Admission | None) -> None:
        self.sizes, self.admission, self.places, self.values = sizes, admission, [ANCHOR], [1.0]
        self.tokens: list[torch.Tensor] = []
        self.parents: list[int] = []
        self.q: list[torch.Tensor] = []
        self.signals: list[float] = []
        self._level_signals: list[float] = []

    def candidates(self, k: int, signals: list[float]) -> list[tuple[int, int, float]]:
        """Return the children to draw for the last level's nodes: the place there, the rank among its siblings, and
        the probability that it is accepted.

        Args:
            k: The draft position.
            signals: For each node of the last level, what tells how often its child is accepted.
        """
        admission, self._level_signals = self.admission, signals
        width = self.sizes[k] if k < len(self.sizes) else 0
        chances = signals if admission is None else [admission.survival(signal) for signal in signals]
        min_probability = -1.0 if admission is None else admission.min_probability
        candidates = [
            (row, rank, value * hit)
            for row, (value, chance) in enumerate(zip(self.values, chances))
            for rank, hit in enumerate(hits_of(chance, width))
            if value * hit > min_probability
        ]
        # Of equals the earlier sibling: no child without those before it.
        return sorted(heapq.nlargest(width, candidates, key=lambda candidate: (candidate[2], -candidate[1])))

    def add(self, candidates: list[tuple[int, int, float]], tokens: torch.Tensor, q: list[torch.Tensor]) -> None:
        """Add what was drawn for some of its slots as the next level."""
        start = len(self.parents)
        self.tokens.append(tokens)
        self.parents += [self.places[row] for row, _, _ in candidates]
        self.signals += [self._level_signals[row] for row, _, _ in candidates]
        self.q += q
        goes_on = len(self.tokens) < len(self.sizes)
        self.places = list(range(start, len(self.parents))) if goes_on else []
        self.values = [value for _, _, value in candidates] if goes_on else []

    def tree(self, like: torch.Tensor) -> DraftTree:
        """Return the tree, of tokens like `like`."""
        if not self.parents:
            return DraftTree.chain(like[:0])
        confidence = None if self.admission is None else torch.tensor(self.signals)
        return DraftTree(torch.cat(self.tokens), tuple(self.parents), tuple(self.q), confidence)


SHARPENED = 0.55
"""Temperature of the probabilities by which nodes are compared in greedy decoding. A drafter is trained to draw as the
target does; its most probable token is the target's best one more often than its probability says."""


def hits_of(first: float, ranks: int) -> list[float]:
    """Return the probability that the child of each rank is accepted, for which those before it must be rejected. The
    first one's chance is taken as at least the second one's."""
    hits, tried = [], 1.0
    for rank in range(ranks):
        accepted = ACCEPTED[min(rank, len(ACCEPTED) - 1)] if rank else max(first, ACCEPTED[1])
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
