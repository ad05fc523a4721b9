"""Draft trees where the request says "auto": of the nodes that pay for themselves, or chains, whichever is faster.

A tree has the nodes whose survival, the probability to be accepted, is more than this generation writes tokens in the
time that one more node takes. It only falls along a path: what is not admitted has no descendant that would be (greedy
admission in order of survival, with early stop). For what is drawn at random that is settled before the draw.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..trees.growth import Admission
from ..trees.tree import ANCHOR, DraftTree
from .node_survival import NodeSurvival
from .schedule import Experience, FixedSchedule, Schedule

MOST_NODES = 64
_STEP = 4  # nodes that count as one in what a round takes
_TRIED = 16  # nodes of the largest tree before anything is known
_TURN = 16  # rounds of one way before the other's turn
_KNOWN = 48  # rounds of each way before they are compared
_LOOKS = 4, 32  # turns of the faster way from one of the other to the next: at first, and at most
_CURIOUS = 1 / 4  # of what a node has to be worth, in a round that looks at more


class NodeSchedule(Schedule):
    """Trees of the nodes that are worth what they take.

    Args:
        experience: Of the drafter's trees with the target; changed.
        sampler: Of the generation.
    """

    def __init__(self, experience: Experience, sampler: Any) -> None:
        super().__init__(experience)
        self.sampler = sampler

    def begin(self, length: int, room: int) -> int:
        steps = super().begin(length, MOST_NODES // _STEP)
        if not steps:
            return 0
        is_tried = self.experience.costs.is_tried
        self.sampler.tree_budget = min(MOST_NODES if is_tried else _TRIED, _STEP * steps)
        self.sampler.admission = Admission(self.experience.survival, self._least())
        return room

    def _least(self) -> float:
        """How probable it has to be that a node is accepted: what one takes, in tokens."""
        if not self.experience.costs.is_tried:
            return 0.0
        price = (self._prices[-1] - self._prices[1]) / (_STEP * (len(self._prices) - 2))
        return price * (_CURIOUS if self._is_trial else 1.0)

    def cut(self, tree: DraftTree) -> DraftTree:
        return tree

    def learn(self, tree: DraftTree, path: list[int], is_last: bool) -> None:
        if tree.confidence is None:
            return
        signals = tree.confidence.tolist()
        ends: list[int | None] = [] if is_last else [None]  # where no child was accepted, or the text ended
        for parent, accepted in zip([ANCHOR, *path], [*path, *ends]):
            children = tree.children.get(parent, [])
            rank = None if accepted is None else children.index(accepted)
            self.experience.survival.observe([signals[child] for child in children], rank, tree.q is not None)

    def end(self, drafts: int, accepted: int, seconds: float, is_last: bool) -> None:
        self.weigh(-(-drafts // _STEP), accepted, seconds)


@dataclass
class Turns:
    """What is known of a drafter's trees with a target, and whose turn it is: trees', or chains'.

    Attributes:
        trees: What is known of trees.
        are_trees: Whether it is theirs.
        left: Rounds of the turn that are left.
        seen: Rounds of trees so far.
        waited: Turns since the slower way was looked at.
        wait: Turns from one such look to the next.
    """

    trees: Experience = field(default_factory=lambda: Experience(survival=NodeSurvival()))
    are_trees: bool = False
    left: int = _KNOWN
    seen: int = 0
    waited: int = 0
    wait: int = _LOOKS[0]

    def take(self, chains: Experience) -> bool:
        """Whether the next round's drafts are a tree."""
        if not self.left:
            self.left, self.are_trees = _TURN, self._next(chains)
        self.left -= 1
        self.seen += self.are_trees
        return self.are_trees

    def _next(self, chains: Experience) -> bool:
        faster = self.trees.worth > chains.worth
        if self.seen < _KNOWN and chains.is_drafting and self.trees.is_drafting:
            return True  # where no chain pays, trees have but their looks
        self.waited += 1
        if self.waited < self.wait:
            return faster
        self.waited, self.wait = 0, min(2 * self.wait, _LOOKS[1])
        return not faster


class TreeSchedule(FixedSchedule):
    """Trees or chains, of what pays for itself, in turns until it is known which is faster.

    Args:
        experience: Of the drafter with the target; changed.
        sampler: Of the generation, whose `tree_budget` is set for every round.
    """

    def __init__(self, experience: Experience, sampler: Any) -> None:
        self.turns = experience.turns = experience.turns or Turns()
        self.sampler, self.chains = sampler, Schedule(experience)
        self.trees = NodeSchedule(self.turns.trees, sampler)
        sampler.schedule = self.chains
        self._leave_room()
        self._way: Schedule = self.chains

    def _leave_room(self) -> None:
        self.sampler.tree_budget = MOST_NODES  # for the deepest

    def begin(self, length: int, room: int) -> int:
        self._way = self.trees if self.turns.take(self.chains.experience) else self.chains
        self.sampler.tree_budget = None
        count = self._way.begin(length, room)
        self.is_asked = self._way.is_asked
        return count

    def cut(self, tree: DraftTree) -> DraftTree:
        return self._way.cut(tree)

    def learn(self, tree: DraftTree, path: list[int], is_last: bool) -> None:
        self._way.learn(tree, path, is_last)

    def end(self, drafts: int, accepted: int, seconds: float, is_last: bool) -> None:
        self._way.end(drafts, accepted, seconds, is_last)
        self._leave_room()
