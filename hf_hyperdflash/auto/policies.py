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
from typing import NamedTuple

from ..drafters.sampling import DraftSampler
from ..trees.growth import Admission
from ..trees.tree import ANCHOR, DraftTree
from .acceptance import UNKNOWN, AcceptanceLine
from .copies import ACCEPTED, REACHED, KnownPath, KnownStats
from .costs import RoundCosts

MAX_AUTO_NODES = 64  # of a tree
MEMORY = 32  # rounds that the mean of recent ones remembers
FEW = 8  # rounds that an earlier judgement counts as, and that lie between probes at first
RARE = 128  # rounds between probes, at most
ERROR = 0.5  # relative standard error of one round, about
TRUSTED = 20.0  # known tokens, expected and written, that are held to have been seen before any was


@dataclass
class Probes:
    """Says when to try what does not seem to pay: after `interval` rounds, which doubles each time."""

    interval: int = field(default_factory=lambda: FEW)
    waited: int = 0  # of these rounds

    def is_due(self) -> bool:
        """Return whether to probe in this round."""
        self.waited += 1
        if self.waited < self.interval:
            return False
        self.waited, self.interval = 0, min(2 * self.interval, RARE)
        return True


@dataclass
class DraftingStats:
    """What is known of a drafter with a target, kept from generation to generation for as long as that is bound."""

    acceptance: AcceptanceLine = field(default_factory=AcceptanceLine)
    costs: RoundCosts = field(default_factory=RoundCosts)
    is_drafting: bool = True  # whether it pays to ask the drafter
    tokens: float = 0.0  # that rounds write in which the drafter is asked, a running mean
    cost: float = 0.0  # what they take, in rounds without the drafter
    rounds: int = 0  # that these means are of; what was known before `is_drafting` last changed counts as a few
    trials: int = 0  # rounds that tried what was not known, or known long ago
    probes: Probes = field(default_factory=Probes)  # of the drafter where it does not pay, else of other counts
    trees: DraftingStats | None = None  # the same of the drafter's trees, once there are some
    turns: Probes = field(default_factory=Probes)  # of trees or chains, whichever are slower
    batches: dict[int, DraftingStats] = field(default_factory=dict)  # the same, by the binary logarithm of the size
    expected: float = TRUSTED  # known tokens of recent rounds without the drafter
    written: float = TRUSTED  # of these

    @property
    def is_tried(self) -> bool:
        """Whether rounds of each kind were tried."""
        return self.trials >= len(trial_draft_counts(0))

    @property
    def speedup(self) -> float:
        """Of rounds as they are chosen now, over rounds without drafts."""
        return self.tokens / self.cost if self.is_drafting and self.cost else 1.0

    @property
    def trust(self) -> float:
        """What part of the known tokens that were expected is written. Chances of copies are learned wherever there is
        one, most of all inside of long ones; instead of the drafter they are taken at other places."""
        return min(self.written / self.expected, 1.0)

    def observe_known(self, expected: float, written: int) -> None:
        """Learn from a round without the drafter how many of its known tokens were written."""
        self.expected += expected - self.expected / MEMORY
        self.written += written - self.written / MEMORY

    def judge(self, tokens: float, cost: float, texts: int = 1) -> None:
        """Decide whether to ask the drafter from now on, by a round in which each text got `tokens` for `cost`."""
        self.rounds += self.is_drafting or not self.rounds
        weight = max(1 / MEMORY, 1 / self.rounds)
        self.tokens += (tokens - self.tokens) * weight
        self.cost += (cost - self.cost) * weight
        gain = self.tokens / self.cost
        # Of one round: accepted drafts vary as rare events do, those that are never accepted hardly. What many texts
        # bring varies less, and a loss that chance can explain is none.
        error = min(ERROR, math.sqrt(max(self.tokens - 1, 1 / MEMORY)))
        too_slow = self.rounds >= 2 * FEW and gain < 1 - error / math.sqrt(texts * min(self.rounds, MEMORY))
        if too_slow if self.is_drafting else gain > 1:
            self.is_drafting, self.rounds, self.probes = not self.is_drafting, FEW, Probes()
        elif not self.is_drafting and tokens > cost:
            self.probes = Probes()  # it paid this time, and so may soon again


def trial_draft_counts(limit: int) -> tuple[int, ...]:
    """Return how many drafts the rounds have that are tried, one after the other; 0 without the drafter."""
    return limit, 0, limit, -(-limit // 2)


class Outcome(NamedTuple):
    """What came of a sequence's drafts in a round."""

    tree: DraftTree  # the drafter's
    path: list[int]  # its accepted nodes, from the anchor on
    is_last: bool  # whether the text has ended
    known_drafts: int = 0  # nodes beside these, which were known without the drafter
    known_accepted: int = 0  # of these


class FixedPolicy:
    """As many drafts as were asked for, every round.

    Args:
        are_trees: Whether they are trees.
        known: What is known of copies; `None` where nobody has any.
    """

    asks_drafter = True  # whether the drafter drafts in this round, and so is to know what was accepted

    def __init__(self, are_trees: bool = False, known: KnownStats | None = None) -> None:
        self.are_trees, self._known_stats = are_trees, known

    def begin(self, length: int, draft_limits: Sequence[int]) -> int:
        """Begin a round after at most `length` tokens, and return how many drafts, one after the other, each sequence
        may have; `draft_limits` says how many drafts each text has room for."""
        return max(draft_limits)

    def join(self, paths: Sequence[KnownPath | None], draft_counts: Sequence[int]) -> list[tuple[int, bool]]:
        """Return for each text how many tokens of its known path are verified, and whether the drafter is asked for
        drafts beside it.

        Args:
            paths: What is known of each.
            draft_counts: How many drafts, one after the other, each would get from the drafter.
        """
        joined = []
        for path in paths:
            reach = [] if path is None else [chance for chance in path.reach if chance >= REACHED]
            is_better = sum(reach) >= (ACCEPTED if self._known_stats is None else self._known_stats.accepted)
            joined.append((len(reach), False) if is_better else (len(reach) if self.are_trees else 0, True))
        return joined

    def sampler(self, sampler: DraftSampler) -> DraftSampler:
        """Return a sequence's sampler with what this round admits."""
        return sampler

    def cut(self, tree: DraftTree) -> DraftTree:
        """Return those of the drafts that are verified."""
        return tree

    def end(self, outcomes: Sequence[Outcome], seconds: float | None) -> None:
        """Learn from a round. `seconds` is `None` where it says nothing of others like it: something was compiled."""
        if self._known_stats is not None:
            for outcome in outcomes:
                if len(outcome.tree):
                    self._known_stats.observe(len(outcome.path))


class ChainPolicy(FixedPolicy):
    """Chains of as many drafts as pay."""

    def __init__(self, stats: DraftingStats) -> None:
        super().__init__()
        self.stats = self._known = stats  # of the drafter with the target; changed
        self._is_first = True  # round of the generation, which takes longer than others
        self._is_trial = self._is_known = False  # the latter where all drafts are known without the drafter
        self._expected = 0.0  # of these
        self._min_drafts = 1  # drafts in any case
        self._signals: list[float] = []
        self._reached = 1.0  # the probability that all of these drafts are accepted
        self._costs: list[float] = []  # of each number of drafts
        self._length, self._texts = 0, 1

    def begin(self, length: int, draft_limits: Sequence[int]) -> int:
        stats, limit = self.stats, max(draft_limits)
        self._length, self._texts, self._signals, self._reached = length, len(draft_limits), [], 1.0
        is_probe = limit > 0 and not self._is_first and (not stats.is_tried or stats.probes.is_due())
        self._is_trial, self._is_known = is_probe and stats.is_drafting, False
        if self._is_trial:
            counts = trial_draft_counts(limit)
            count = counts[stats.trials % len(counts)]
        else:
            count = limit if stats.is_drafting or is_probe else 0
        self._min_drafts = count if self._is_trial else 1
        self.asks_drafter = count > 0
        if self.asks_drafter:
            predicted = stats.costs.predict(length, limit, self._texts) if stats.is_tried else [0.0] * (limit + 1)
            # In tokens that this generation writes meanwhile: at least what rounds without the drafter do.
            self._costs = [cost * max(stats.speedup, 1.0) for cost in predicted]
        return count

    def join(self, paths: Sequence[KnownPath | None], draft_counts: Sequence[int]) -> list[tuple[int, bool]]:
        stats, texts = self.stats, len(paths)
        if self._is_trial or not stats.is_tried:
            return [(0, True)] * texts
        # Rounds without the drafter, by how many drafts each text has at most.
        trust = stats.trust
        reach = [[] if path is None else [trust * chance for chance in path.reach] for path in paths]
        longest = max(map(len, reach))
        costs, tokens, best, best_count = stats.costs.predict_known(self._length, longest, texts), 1.0, 0.0, 0
        for count in range(1, longest + 1):
            tokens += sum(own[count - 1] for own in reach if len(own) >= count) / texts
            if tokens / costs[count] > best:
                best, best_count = tokens / costs[count], count
        if best > max(stats.speedup, 1.0):
            joined = [(min(best_count, len(own)), False) for own in reach]
        else:
            joined = [self._beside(own, count) for own, count in zip(reach, draft_counts)]
        self._is_known = not any(asks_drafter for _, asks_drafter in joined)
        self._expected = sum(sum(own[:count]) for own, (count, _) in zip(reach, joined)) / trust
        return joined

    def _beside(self, reach: list[float], draft_count: int) -> tuple[int, bool]:
        """Return what [`join`] does for a text in a round in which the drafter is asked."""
        return 0, True

    def sampler(self, sampler: DraftSampler) -> DraftSampler:
        return replace(sampler, tree_budget=None, chain_admission=self)

    def is_open(self) -> bool:
        """Return whether to ask the drafter for one more draft: not if even a certain one would not pay."""
        return self._pays(1.0)

    def admits(self, signal: float) -> bool:
        """Return whether the next draft is drawn and verified, by what the drafter says of it before, in [0, 1]."""
        chance = self.stats.acceptance(signal)
        if not self._pays(chance):
            return False
        self._signals.append(signal)
        self._reached *= chance
        return True

    def _pays(self, chance: float) -> bool:
        """Return whether some number of further drafts brings more than it takes, if each is accepted as probably as
        the next. One more may cost what several do: kernels have widths."""
        here, reached, gained = len(self._signals), self._reached, 0.0
        for cost in self._costs[here + 1 :]:
            reached *= chance
            gained += reached
            if gained >= cost - self._costs[here]:
                return True
        return here < self._min_drafts

    def cut(self, tree: DraftTree) -> DraftTree:
        """Return the drafts that pay, where they were not admitted one by one: of a drafter that asks no sampler."""
        return tree if self._signals or not tree.is_chain else tree.first(self._admit_unseen(len(tree)))

    def _admit_unseen(self, count: int) -> int:
        """Return how many of `count` drafts are admitted whose signals are not known: by their positions."""
        return next((k for k in range(count) if not self.admits(UNKNOWN ** (k + 1))), count)

    def end(self, outcomes: Sequence[Outcome], seconds: float | None) -> None:
        for outcome in outcomes:
            self._learn(outcome)
        if self._is_known and not any(outcome.is_last for outcome in outcomes):
            self.stats.observe_known(self._expected, sum(outcome.known_accepted for outcome in outcomes))
        if seconds is None:  # a trial is not over then
            return
        drafts = max(len(outcome.tree) + outcome.known_drafts for outcome in outcomes)
        tokens = 1 + sum(len(outcome.path) + outcome.known_accepted for outcome in outcomes) / len(outcomes)
        stats, was_asked = self.stats, self.asks_drafter and not self._is_known
        # A generation's first round is slow, and so is a drafter's: they tell nothing.
        if not self._is_first and stats.trials > 0:
            asked_for, known = (drafts, 0) if was_asked else (None, drafts)
            stats.costs.observe(self._length, asked_for, seconds, self._texts, not stats.is_tried, known)
        if was_asked and not self._is_first and not self._is_trial:
            cost = stats.costs.predict(self._length, drafts, self._texts)[drafts]
            stats.judge(tokens, cost, self._texts)
        stats.trials += self._is_trial
        self._is_first = False

    def _learn(self, outcome: Outcome) -> None:
        """Learn from the drafts whose fate is known: the accepted ones, and the next if it was rejected."""
        accepted = len(outcome.path)
        is_rejected = accepted < len(outcome.tree) and not outcome.is_last
        for place, signal in enumerate(self._signals[: accepted + is_rejected]):
            self.stats.acceptance.observe(signal, place < accepted)


class TreePolicy(ChainPolicy):
    """Trees of the nodes that pay, or chains, by turns until it is known which are faster."""

    def __init__(self, stats: DraftingStats) -> None:
        super().__init__(stats)
        self._trees = stats.trees = stats.trees or DraftingStats()

    def begin(self, length: int, draft_limits: Sequence[int]) -> int:
        self.are_trees = self._are_trees_next(self._known, self._trees)
        self.stats = self._trees if self.are_trees else self._known
        if not self.are_trees:
            return super().begin(length, draft_limits)
        self._nodes = super().begin(length, [MAX_AUTO_NODES if max(draft_limits) else 0])
        return max(draft_limits) if self._nodes else 0

    @staticmethod
    def _are_trees_next(chains: DraftingStats, trees: DraftingStats) -> bool:
        if min(chains.rounds, trees.rounds) < MEMORY and chains.is_drafting and trees.is_drafting:
            return trees.rounds < chains.rounds
        return (trees.speedup > chains.speedup) != trees.turns.is_due()

    def _beside(self, reach: list[float], draft_count: int) -> tuple[int, bool]:
        return (sum(chance > self._node_cost for chance in reach) if self.are_trees and draft_count else 0), True

    @property
    def _node_cost(self) -> float:
        return max(self._costs[-1] - self._costs[0], 0.0) / MAX_AUTO_NODES

    def sampler(self, sampler: DraftSampler) -> DraftSampler:
        if not self.are_trees:
            return super().sampler(sampler)
        admission = Admission(self.stats.acceptance, self._node_cost)
        return replace(sampler, tree_budget=self._nodes, node_admission=admission)

    def cut(self, tree: DraftTree) -> DraftTree:
        return tree if self.are_trees else super().cut(tree)

    def _learn(self, outcome: Outcome) -> None:
        """Learn which nodes were accepted, of those whose parents were. What becomes of a drawn sibling depends on
        those before it: the first is as a draft of a chain, and of others nothing is learned."""
        tree, path = outcome.tree, outcome.path
        if not self.are_trees:
            return super()._learn(outcome)
        if tree.confidence is None:
            return None
        signals = tree.confidence.tolist()
        ends: list[int | None] = [] if outcome.is_last else [None]  # where no child was accepted, or the text ended
        for parent, accepted in zip([ANCHOR, *path], [*path, *ends]):
            children = tree.children.get(parent, [])
            for child in children if tree.q is None else children[:1]:
                self.stats.acceptance.observe(signals[child], child == accepted)


class BatchPolicy(ChainPolicy):
    """As many drafts for all sequences of a batch as pay, settled before any is drawn: they share a forward, so what a
    draft costs is none of a text's own."""

    def begin(self, length: int, draft_limits: Sequence[int]) -> int:
        self.stats = self._known.batches.setdefault(len(draft_limits).bit_length(), DraftingStats())
        return self._admit_unseen(super().begin(length, draft_limits))

    def _beside(self, reach: list[float], draft_count: int) -> tuple[int, bool]:
        """Return as many tokens of a copy as the round has drafts, where they bring more than these."""
        known = reach[:draft_count]
        return (len(known), False) if sum(known) > self.stats.tokens - 1 else (0, True)

    def sampler(self, sampler: DraftSampler) -> DraftSampler:
        return sampler
