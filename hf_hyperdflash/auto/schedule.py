"""How many tokens a round drafts, or how many nodes its tree has, where the request says "auto": what pays for itself.

Drafts of a chain are worth drafting and verifying if the tokens that they add, their probabilities to be accepted, are
more than this generation writes in the time that they take. The product of probabilities along a chain only falls: the
first draft that is not worth it, whatever may follow, ends the chain (greedy admission with early stop).

Whether a draft is verified never depends on the token drawn for it, only on what was known before: else text that is
drawn at random would not be the target's. Greedy text is the target's whatever is verified.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from ..trees.tree import DraftTree
from .survival import Survival

_PRICED = 512.0  # rounds that what a number of drafts takes is the mean of
_PRIOR_PRICE = 32.0  # rounds that the line through all numbers counts as much as
_TRIALS = 6  # rounds before anything is known
_LEVEL = 1 / 8  # what a round's time counts in how fast the machine is now
_HICCUP = 1.6  # times what was expected: what is beyond is no price
_SETTLED = 4  # rounds with a number of drafts before their times tell of the machine
_GAIN = 1.02  # what drafting has to bring where it did not pay before
_PROBED = 2  # drafts of a look at a drafter that did not pay, at least
_JUDGED = 1 / 64  # what a round counts in whether drafting pays
_LOOKS = 8, 64  # rounds from one look at another way to the next: at first, and at most
_RARE_LOOKS = 256  # at most, where drafting pays
_LATE_LOOKS = 128  # at most, where it does not
_LOOK = 1 / 8  # what a look counts in the mean of others
_BLIND = 0.7  # the signal of a drafter that gives none


class RoundCosts:
    """What a round takes by its number of drafts, as measured: one target and one drafter, on their devices.

    As a share of a level of seconds that all numbers have in common, one for texts of about a length: a machine that
    gets busy, or a text that grows, makes all numbers dearer, also those that were not tried since. What pays depends
    on shares alone. (Were it to depend on the level, which noise moves, more would be drafted just where the level is
    too low, and would look too dear.)

    Several threads may observe at once: one's number may get lost, which changes nothing that matters. Dictionaries
    are copied, which is one step for other threads where going through them is many, and what belongs to a key is
    there before the key.
    """

    def __init__(self) -> None:
        self._levels: dict[int, float] = {}  # by the binary logarithm of the text's length
        # By number of drafts; `None` where the drafter was not asked.
        self._shares: dict[int | None, float] = {}
        self._times: dict[int | None, float] = {}
        self._rounds = 0

    def observe(self, length: int, drafts: int | None, seconds: float) -> float:
        """A round after so many tokens and with so many drafts took so long; `None`: the drafter was not asked.

        Returns:
            The share of such rounds, by all that is known.
        """
        seconds = max(seconds, 1e-9)  # a clock may be coarse
        if length.bit_length() in self._levels or drafts not in self._shares:
            level = self._level(length) or seconds
        else:
            level = seconds / self._shares[drafts]
        share = seconds / level
        expected = self._shares.get(drafts, max(self._shares.copy().values(), default=share))
        self._rounds += 1
        is_first, is_trial = drafts not in self._times, self._rounds <= _TRIALS and drafts is not None
        times = 1 if is_trial else min(self._times.get(drafts, 0) + 1, _PRICED)
        self._times[drafts] = times
        share = min(share, (2 if is_first else _HICCUP) * expected)
        if times > _SETTLED:
            level *= 1 + _LEVEL * (share / expected - 1)
        if times == 1:  # a drafter's first rounds are slow: the best of few tells most, and as much as one
            self._shares[drafts] = share if is_first else min(share, expected)
        else:
            self._shares[drafts] = expected + (share - expected) / times
        self._levels[length.bit_length()] = level
        return self._shares[drafts]

    def _level(self, length: int) -> float:
        nearest = min(self._levels.copy(), key=lambda other: abs(other - length.bit_length()), default=None)
        return 0.0 if nearest is None else self._levels[nearest]

    @property
    def plain(self) -> float:
        """The share of a round in which the drafter is not asked; 0.0 if that is not known."""
        return self._shares.get(None, 0.0)

    def further(self, most: int) -> list[float]:
        """What rounds with 0, 1, .. `most` drafts take more than the one with none, drafting and verification: what
        each number took where it was often seen, else by the line through all of them. None takes less than a smaller
        one: where it seems so, both take their mean."""
        shares = self._shares.copy()
        start, slope = _line([(k, share, self._times[k]) for k, share in shares.items() if k is not None])
        told: list[tuple[float, float, int]] = []  # mean share, rounds it is the mean of, how many numbers have it
        for drafts in range(most + 1):
            times, line = self._times.get(drafts, 0.0), start + slope * drafts
            rounds = times + _PRIOR_PRICE
            share, count = (shares.get(drafts, line) * times + line * _PRIOR_PRICE) / rounds, 1
            while told and told[-1][0] > share:
                other, others, width = told.pop()
                share, rounds = (share * rounds + other * others) / (rounds + others), rounds + others
                count += width
            told.append((share, rounds, count))
        level = [share for share, _, count in told for _ in range(count)]
        return [share - level[0] for share in level]

    @property
    def is_tried(self) -> bool:
        """Whether enough was tried for something to be known."""
        return self._rounds >= _TRIALS

    def trial(self, room: int) -> int | None:
        """The number of drafts to try next, before anything is known: as many as there is room for, none, and half as
        many, which writes more than one would and tells of the line as well."""
        return (room, None, -(-room // 2))[self._rounds % 3]


def _line(points: list[tuple[int, float, float]]) -> tuple[float, float]:
    """Start and slope, not below 0, of the line through weighted points."""
    total = sum(weight for *_, weight in points)
    if len(points) < 2:
        return points[0][1] if points else 0.0, 0.0
    x, y = (sum(point[i] * point[2] for point in points) / total for i in (0, 1))
    spread = sum(weight * (k - x) ** 2 for k, _, weight in points)
    slope = max(0.0, sum(weight * (k - x) * (share - y) for k, share, weight in points) / spread)
    return y - slope * x, slope


@dataclass
class Experience:
    """What is known of a drafter with a target, kept from generation to generation for as long as that is bound.

    Attributes:
        survival: How probable acceptance is.
        costs: What rounds take.
        is_drafting: Whether it pays to ask the drafter.
        tokens: That rounds write whose drafter is asked, a running mean.
        share: That they take, in the measure of `costs`.
        rounds: How many there were since that changed, and as many as what was known then counts.
        wait: Rounds from one look at the other way to the next.
        waited: How many of these are over.
        doubt: Relative standard error of one round, about: how much worse drafting may look and not be.
        turns: The same of its trees, once there were some.
        batches: The same of batches, by the binary logarithm of their size.
    """

    survival: Any = field(default_factory=Survival)
    costs: RoundCosts = field(default_factory=RoundCosts)
    is_drafting: bool = True
    tokens: float = 0.0
    share: float = 0.0
    rounds: int = 0
    wait: int = _LOOKS[1]
    waited: int = 0
    doubt: float = 0.5
    turns: Any = None
    batches: dict[int, Experience] = field(default_factory=dict)

    @property
    def gain(self) -> float:
        """How many times as fast rounds are whose drafter is asked; 0.0 if that is not known."""
        return self.tokens * self.costs.plain / self.share if self.share else 0.0

    @property
    def worth(self) -> float:
        """How many times as fast as rounds without drafts its rounds are."""
        return self.gain if self.is_drafting else 1.0

    def asks(self) -> bool:
        """Whether the drafter is asked in this round: where that pays, but for a look at rounds without it, or
        else for a look at it."""
        self.waited += 1
        is_look = self.waited >= self.wait
        if is_look:
            self.waited = 0
            self.wait = min(2 * self.wait, _RARE_LOOKS) if self.is_drafting else self.wait
        return self.is_drafting != is_look

    def drafts_all(self) -> bool:
        """Whether this round drafts as much as there is room for, once in as many rounds as there are between looks at
        first: what seemed too dear by chance would never be seen again."""
        return self.is_drafting and self.waited % _LOOKS[1] == _LOOKS[1] // 2

    def judge(self, tokens: float, share: float) -> None:
        """Whether to ask the drafter, by the tokens of a round in which it was, and the share of such rounds."""
        self.rounds += 1
        weight = max(_JUDGED if self.is_drafting else _LOOK, 1 / self.rounds)
        self.tokens += (tokens - self.tokens) * weight
        self.share += (share - self.share) * weight
        gain = self.gain
        if not self.costs.plain:
            return
        is_known = self.rounds >= 2 * _LOOKS[0]
        if self.is_drafting and is_known and gain < 1 - self.doubt / math.sqrt(self.rounds):
            self._change(False, _LOOKS[0])
        elif not self.is_drafting and gain > _GAIN:
            self._change(True, _LOOKS[1])
        elif not self.is_drafting:
            self.wait = min(2 * self.wait, _LATE_LOOKS)

    def _change(self, is_drafting: bool, wait: int) -> None:
        self.is_drafting, self.wait, self.waited, self.rounds = is_drafting, wait, 0, _LOOKS[0]


class FixedSchedule:
    """As many drafts as were asked for, every round."""

    is_asked = True  # whether the drafter drafts in this round, and so is to know what was accepted

    def begin(self, length: int, room: int) -> int:
        """Begin a round after a text of that length, with room for so many drafts; how many may be made."""
        return room

    def learn(self, tree: DraftTree, path: list[int], is_last: bool) -> None:
        """Hear which nodes of a tree were accepted, and whether the text has ended."""

    def end(self, drafts: int, accepted: int, seconds: float, is_last: bool) -> None:
        """End it."""

    def cut(self, tree: DraftTree) -> DraftTree:
        """What of the drafts is verified."""
        return tree


class Schedule(FixedSchedule):
    """As many as pay for themselves.

    Args:
        experience: Of the drafter with the target; changed.
    """

    def __init__(self, experience: Experience) -> None:
        self.experience = experience
        self._is_first = True  # of the generation, which takes longer than others
        self._is_trial = False
        self._sure = 0
        self._signals: list[float] = []
        self._reaches: list[float] = []  # how probable all drafts before each were held to be accepted
        self._prices: list[float] = []  # of each number of drafts, in tokens
        self._reached, self._length = 1.0, 0

    def begin(self, length: int, room: int) -> int:
        known = self.experience
        self._signals, self._reaches, self._reached, self._length = [], [], 1.0, length
        tries = not self._is_first and not known.costs.is_tried
        count = known.costs.trial(room) if tries else room
        self.is_asked = count is not None if tries else known.asks()
        if not self.is_asked:
            return 0
        plain = known.costs.plain
        rates = [known.tokens / known.share if known.share else 0.0, 1 / plain if plain else 0.0]
        self._prices = [max(rates) * share for share in known.costs.further(room)]
        self._is_trial = tries or known.drafts_all()
        # A look makes some drafts in any case: by those that are not made nothing is learned.
        self._sure = 0 if known.is_drafting else _PROBED
        return count or 0

    def is_open(self) -> bool:
        """Whether the drafter is to be asked for one more draft: not if even a certain one would not pay."""
        return self._is_trial or len(self._signals) < self._sure or self._pays(1.0)

    def admits(self, signal: float) -> bool:
        """Whether the next draft is drawn and verified.

        Args:
            signal: What the drafter says of it before it is drawn, in [0, 1].
        """
        chance = self.experience.survival(signal, self._reached)
        if not self._is_trial and len(self._signals) >= self._sure and not self._pays(chance):
            return False
        self._reaches.append(self._reached)
        self._reached *= chance
        self._signals.append(signal)
        return True

    def _pays(self, chance: float) -> bool:
        """Whether some number of further drafts brings more than it takes, if those after the next are accepted as
        probably as is usual, or as it is. One more may cost what several do: kernels have widths."""
        here, reached, gained = len(self._signals), self._reached * chance, 0.0
        following = max(chance, self.experience.survival.usual)
        for price in self._prices[here + 1 :]:
            gained += reached
            reached *= following
            if gained >= price - self._prices[here]:
                return True
        return False

    def cut(self, tree: DraftTree) -> DraftTree:
        """Of drafts that were not admitted one by one, as of a drafter that does without a sampler, those that are."""
        if self._signals or not len(tree) or not tree.is_chain:
            return tree
        count = next((k for k in range(len(tree)) if not self.admits(_BLIND)), len(tree))
        return tree.first(count)

    def end(self, drafts: int, accepted: int, seconds: float, is_last: bool) -> None:
        # What was held of drafts varies less than what came of them, and may be wrong: each counts half. Not in a look
        # at a drafter that did not pay, of which what is held may be long past.
        is_held = self._reaches and self.experience.is_drafting
        held = sum([*self._reaches[1:], self._reached]) if is_held else accepted
        self.count(accepted, is_last)
        self.weigh(drafts, (accepted + held) / 2, seconds)

    def count(self, accepted: int, is_last: bool) -> None:
        """Learn of the drafts whose fate is known: the accepted ones, and the next if the text has not ended."""
        for place, signal in enumerate(self._signals[: accepted + (not is_last)]):
            self.experience.survival.observe(signal, place < accepted, self._reaches[place])

    def weigh(self, drafts: int, accepted: float, seconds: float) -> None:
        """Learn what the round took and brought."""
        known = self.experience
        if not self._is_first:
            share = known.costs.observe(self._length, drafts if self.is_asked else None, seconds)
            if self.is_asked and not self._is_trial:
                known.judge(1 + accepted, share)
        self._is_first = False
