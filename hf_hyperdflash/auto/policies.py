"""How much a round drafts where the request says "auto": what pays for itself.

A draft pays if the tokens that it adds, its probability to be accepted, are more than this generation writes in the
time that it takes. Along a path that probability only falls: the first draft that does not pay, whatever may follow,
ends a chain, and a node that does not pay has no descendant that would (greedy admission with early stop).

Whether a draft is verified never depends on the token drawn for it, only on what was known before: else text that is
drawn at random would not be the target's. Greedy text is the target's whatever is verified.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from ..drafters.sampling import DraftSampler
from ..trees.growth import Admission
from ..trees.tree import ANCHOR, DraftTree
from .acceptance import UNKNOWN, AcceptanceLine, NodeAcceptance, PositionAcceptance
from .costs import RoundCosts

MOST_NODES = 64  # of a tree
TRIALS = 4  # rounds before anything is known: with all drafts, without the drafter, with all and with half of them
MEMORY = 64  # rounds that the mean of recent ones remembers
INTERVALS = {True: (64, 256), False: (8, 128)}  # rounds between probes, first and at most, if drafting pays or not
TURNS = 4, 32  # rounds between probes of trees or chains, first and at most


@dataclass
class Probes:
    """Says when to try what does not seem to pay: after `interval` calls, which doubles up to `most`."""

    interval: int
    most: int
    waited: int = 0

    def is_due(self) -> bool:
        """Whether it is time."""
        self.waited += 1
        if self.waited < self.interval:
            return False
        self.waited, self.interval = 0, min(2 * self.interval, self.most)
        return True


@dataclass
class DraftingStats:
    """What is known of a drafter with a target, kept from generation to generation for as long as that is bound.

    Attributes:
        acceptance: Predicts which drafts are accepted.
        costs: Predicts what rounds take.
        is_drafting: Whether it pays to ask the drafter.
        tokens: That rounds write in which the drafter is asked, a running mean.
        cost: What they take, in rounds without the drafter.
        rounds: How many these means are of; what was known before the last change of `is_drafting` counts as a few.
        trials: Rounds that tried what was not known.
        probes: Of the drafter where it does not pay, of rounds without it where it does.
        relative_error: Relative standard error of one round, about: how much worse drafting may look by chance.
        trees: The same of the drafter's trees, once there are some.
        turns: Probes of trees or chains, whichever are slower.
        batches: The same of batches, by the binary logarithm of their size.
    """

    acceptance: Any = field(default_factory=AcceptanceLine)
    costs: RoundCosts = field(default_factory=RoundCosts)
    is_drafting: bool = True
    tokens: float = 0.0
    cost: float = 0.0
    rounds: int = 0
    trials: int = 0
    probes: Probes = field(default_factory=lambda: Probes(*INTERVALS[True]))
    relative_error: float = 0.5
    trees: DraftingStats | None = None
    turns: Probes = field(default_factory=lambda: Probes(*TURNS))
    batches: dict[int, DraftingStats] = field(default_factory=dict)

    @property
    def is_tried(self) -> bool:
        """Whether enough was tried for something to be known."""
        return self.trials >= TRIALS and self.costs.is_known

    @property
    def speedup(self) -> float:
        """Of rounds as they are chosen now, over rounds without drafts."""
        return self.tokens / self.cost if self.is_drafting and self.cost else 1.0

    def drafts_all(self) -> bool:
        """Whether this round drafts as much as there is room for, once between two probes: what seemed too dear by
        chance would never be seen again."""
        first = INTERVALS[True][0]
        return self.is_drafting and self.probes.waited % first == first // 2

    def judge(self, tokens: float, cost: float) -> None:
        """Decide whether to ask the drafter from now on, by a round in which it was asked."""
        self.rounds += self.is_drafting or not self.rounds
        weight = max(1 / MEMORY, 1 / self.rounds)
        self.tokens += (tokens - self.tokens) * weight
        self.cost += (cost - self.cost) * weight
        gain, few = self.tokens / self.cost, INTERVALS[False][0]
        # A change has to be worth it: 2 %, or what chance can explain.
        too_slow = self.rounds >= 2 * few and gain < 1 - self.relative_error / math.sqrt(min(self.rounds, MEMORY))
        if too_slow if self.is_drafting else gain > 1.02:
            self.is_drafting, self.rounds = not self.is_drafting, few
            self.probes = Probes(*INTERVALS[self.is_drafting])


class Outcome(NamedTuple):
    """What came of a sequence's drafts in a round.

    Attributes:
        tree: The drafts.
        path: The accepted nodes, from the anchor on.
        is_last: Whether the text has ended.
    """

    tree: DraftTree
    path: list[int]
    is_last: bool


class FixedPolicy:
    """As many drafts as were asked for, every round.

    Attributes:
        is_asked: Whether the drafter drafts in this round, and so is to know what was accepted.
    """

    is_asked = True

    def begin(self, length: int, rooms: Sequence[int]) -> int:
        """Begin a round and return how many drafts, one after the other, each sequence may have.

        Args:
            length: Tokens of the longest text.
            rooms: For how many drafts each sequence has room.
        """
        return max(rooms)

    def sampler(self, sampler: DraftSampler) -> DraftSampler:
        """Return a sequence's sampler with what this round admits."""
        return sampler

    def cut(self, tree: DraftTree) -> DraftTree:
        """Return what of the drafts is verified."""
        return tree

    def end(self, outcomes: Sequence[Outcome], seconds: float) -> None:
        """Learn what came of each sequence's drafts in a round that took so long."""


class ChainPolicy(FixedPolicy):
    """Chains of as many drafts as pay.

    Args:
        stats: Of the drafter with the target; changed.
    """

    def __init__(self, stats: DraftingStats) -> None:
        self.stats, self.texts = stats, 1
        self._is_first = True  # round of the generation, which takes longer than others
        self._is_trial = self._drafts_all = False
        self._least = 0  # drafts in any case
        self._signals: list[float] = []
        self._reached: list[float] = [1.0]  # the probability that all drafts before each are accepted
        self._costs: list[float] = []  # of each number of drafts
        self._length = 0

    def begin(self, length: int, rooms: Sequence[int]) -> int:
        stats, self.texts, self._length, self._signals, self._reached = self.stats, len(rooms), length, [], [1.0]
        room = max(rooms)
        self._is_trial = not self._is_first and not stats.is_tried and room > 0
        count = (room, None, room, -(-room // 2))[stats.trials % TRIALS] if self._is_trial else room
        wants_drafts = count is not None if self._is_trial else stats.probes.is_due() != stats.is_drafting
        self.is_asked = wants_drafts and room > 0  # without room it is a round like any without the drafter
        if not self.is_asked:
            return 0
        predicted = stats.costs.predict(length, room, self.texts) if stats.is_tried else [0.0] * (room + 1)
        # In tokens that this generation writes meanwhile: at least what rounds without the drafter do.
        self._costs = [cost * max(stats.speedup, 1.0) for cost in predicted]
        self._drafts_all = self._is_trial or stats.drafts_all()
        # A probe makes some drafts in any case: nothing is learned from those that are not made.
        self._least = 0 if stats.is_drafting else 2
        return count or 0

    def sampler(self, sampler: DraftSampler) -> DraftSampler:
        return replace(sampler, tree_budget=None, chain_admission=self)

    def is_open(self) -> bool:
        """Whether the drafter is to be asked for one more draft: not if even a certain one would not pay."""
        return self._drafts_all or len(self._signals) < self._least or self._pays(1.0)

    def admits(self, signal: float) -> bool:
        """Whether the next draft is drawn and verified.

        Args:
            signal: What the drafter says of it before it is drawn, in [0, 1].
        """
        chance = self.stats.acceptance(signal)
        if not self._drafts_all and len(self._signals) >= self._least and not self._pays(chance):
            return False
        self._signals.append(signal)
        self._reached.append(self._reached[-1] * chance)
        return True

    def _pays(self, chance: float) -> bool:
        """Whether some number of further drafts brings more than it takes, if each is accepted as probably as the
        next. One more may cost what several do: kernels have widths."""
        here, reached, gained = len(self._signals), self._reached[-1], 0.0
        for cost in self._costs[here + 1 :]:
            reached *= chance
            gained += reached
            if gained >= cost - self._costs[here]:
                return True
        return False

    def cut(self, tree: DraftTree) -> DraftTree:
        """Of drafts that were not admitted one by one, as of a drafter that does without a sampler, those that are."""
        if self._signals or not len(tree) or not tree.is_chain:
            return tree
        count = next((k for k in range(len(tree)) if not self.admits(UNKNOWN)), len(tree))
        return tree.first(count)

    def end(self, outcomes: Sequence[Outcome], seconds: float) -> None:
        (outcome,) = outcomes
        accepted = len(outcome.path)
        # What was expected of drafts varies less than what came of them, and may be wrong: each counts half. Not in a
        # probe of a drafter that did not pay, of which what is known may be long past.
        expected = sum(self._reached[1:]) if self._signals and self.stats.is_drafting else accepted
        self.count(accepted, outcome.is_last)
        self.weigh(len(outcome.tree), (accepted + expected) / 2, seconds)

    def count(self, accepted: int, is_last: bool) -> None:
        """Learn from the drafts whose fate is known: the accepted ones, and the next if the text has not ended."""
        for place, signal in enumerate(self._signals[: accepted + (not is_last)]):
            self.stats.acceptance.observe(signal, place < accepted)

    def weigh(self, drafts: int, accepted: float, seconds: float) -> None:
        """Learn what the round took and brought."""
        stats = self.stats
        # A generation's first round is slow, and so is a drafter's: they tell nothing.
        if not self._is_first and (stats.trials > 0 if self._is_trial else stats.is_tried):
            asked_for = drafts if self.is_asked else None
            stats.costs.observe(self._length, asked_for, seconds, self.texts, self._is_trial)
        stats.trials += self._is_trial
        if self.is_asked and not self._is_first and not self._drafts_all:
            stats.judge(1 + accepted, stats.costs.predict(self._length, drafts, self.texts)[drafts])
        self._is_first = False


class NodePolicy(ChainPolicy):
    """Trees of the nodes that pay."""

    def begin(self, length: int, rooms: Sequence[int]) -> int:
        nodes = MOST_NODES if self.stats.is_tried else MOST_NODES // 4
        self._most = super().begin(length, [nodes if max(rooms) else 0])
        return max(rooms) if self._most else 0

    def sampler(self, sampler: DraftSampler) -> DraftSampler:
        least = max(self._costs[-1] - self._costs[0], 0.0) / self._most  # what a node costs
        return replace(sampler, tree_budget=self._most, node_admission=Admission(self.stats.acceptance, least))

    def cut(self, tree: DraftTree) -> DraftTree:
        return tree

    def end(self, outcomes: Sequence[Outcome], seconds: float) -> None:
        (outcome,) = outcomes
        self.learn(outcome)
        self.weigh(len(outcome.tree), len(outcome.path), seconds)

    def learn(self, outcome: Outcome) -> None:
        """Learn which nodes of a tree were accepted."""
        tree, path = outcome.tree, outcome.path
        if tree.confidence is None:
            return
        signals = tree.confidence.tolist()
        ends: list[int | None] = [] if outcome.is_last else [None]  # where no child was accepted, or the text ended
        for parent, accepted in zip([ANCHOR, *path], [*path, *ends]):
            children = tree.children.get(parent, [])
            rank = None if accepted is None else children.index(accepted)
            self.stats.acceptance.observe([signals[child] for child in children], rank, tree.q is not None)


class TreePolicy(FixedPolicy):
    """Trees or chains, of what pays, by turns until it is known which are faster.

    Args:
        stats: Of the drafter with the target; changed.
    """

    def __init__(self, stats: DraftingStats) -> None:
        stats.trees = stats.trees or DraftingStats(NodeAcceptance())
        self.chains, self.trees = ChainPolicy(stats), NodePolicy(stats.trees)
        self._chosen = self.chains

    def begin(self, length: int, rooms: Sequence[int]) -> int:
        self._chosen = self.trees if self._are_trees_next(self.chains.stats, self.trees.stats) else self.chains
        count = self._chosen.begin(length, rooms)
        self.is_asked = self._chosen.is_asked
        return count

    @staticmethod
    def _are_trees_next(chains: DraftingStats, trees: DraftingStats) -> bool:
        if min(chains.rounds, trees.rounds) < MEMORY // 2 and chains.is_drafting and trees.is_drafting:
            return trees.rounds < chains.rounds
        return (trees.speedup > chains.speedup) != trees.turns.is_due()

    def sampler(self, sampler: DraftSampler) -> DraftSampler:
        return self._chosen.sampler(sampler)

    def cut(self, tree: DraftTree) -> DraftTree:
        return self._chosen.cut(tree)

    def end(self, outcomes: Sequence[Outcome], seconds: float) -> None:
        self._chosen.end(outcomes, seconds)


class BatchPolicy(FixedPolicy):
    """As many drafts for all sequences of a batch as pay, settled before any is drawn: they share a forward, so what a
    draft costs is none of a text's own.

    Args:
        stats: Of the drafter with the target; changed.
    """

    def __init__(self, stats: DraftingStats) -> None:
        self._stats, self._policies = stats, dict[int, ChainPolicy]()

    def begin(self, length: int, rooms: Sequence[int]) -> int:
        policy = self._policy_for(len(rooms))
        most = policy.begin(length, rooms)
        self.is_asked = most > 0
        # One at least where the drafter is asked at all: whether that pays is judged by what it took.
        return next((position for position in range(most) if not policy.admits(position)), most) or min(most, 1)

    def end(self, outcomes: Sequence[Outcome], seconds: float) -> None:
        policy = self._policy_for(len(outcomes))
        for tree, path, is_last in outcomes:
            policy.count(len(path), is_last=is_last or len(path) == len(tree))
        accepted = sum(len(outcome.path) for outcome in outcomes)
        policy.weigh(max(len(outcome.tree) for outcome in outcomes), accepted / len(outcomes), seconds)

    def _policy_for(self, texts: int) -> ChainPolicy:
        size = texts.bit_length()
        if size not in self._policies:
            error = self._stats.relative_error / math.sqrt(texts)
            stats = DraftingStats(PositionAcceptance(), relative_error=error)
            self._policies[size] = ChainPolicy(self._stats.batches.setdefault(size, stats))
        return self._policies[size]
