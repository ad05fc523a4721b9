"""Drafts that are known without a drafter, and how probable it is that a text goes on as it did elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from typing import NamedTuple

MAX_KNOWN = 31  # drafts of a path that is known: a round of 32 positions, which kernels are made for
MEMORY = 64  # tokens
PRIORS = 0.1, 0.1, 0.2, 0.5, 0.75, 0.9, 0.95
"""Of a match of 0, 1, 2, 4, 8, 16 or 32 tokens and more: how probable it is that the next token is the copy's, before
any was seen. Each counts as [`PRECISION`] tokens. They are low: that copies are right is learned without
drafting them."""

RESUMED = 0.3, 0.5
"""Of a copy that goes on behind a difference, after 1 and after 2 or 3 tokens that are the same again."""

PRECISION = 4.0  # tokens
REACHED = 0.3  # the lowest probability with which a round that has no costs reaches a draft of a path
ACCEPTED = 1.5  # of a drafter's drafts in a round, before any was seen
ROUNDS = 16  # that the mean of accepted drafts remembers


class KnownPath(NamedTuple):
    """How a text may go on, known without the drafter.

    Attributes:
        tokens: One after the other.
        chances: Of each, how probable it is that the target writes it after those before it. They depend on the text
            alone, never on what was drafted after it: else drawn text would not have the target's law.
    """

    tokens: Sequence[int]
    chances: Sequence[float]

    @property
    def reach(self) -> list[float]:
        """How probable it is that the target writes the path as far as each token."""
        return list(accumulate(self.chances, mul))

    def first(self, count: int) -> KnownPath:
        """Return the path of the first tokens alone."""
        return KnownPath(self.tokens[:count], self.chances[:count])


@dataclass
class CopyChances:
    """How often the next token was that of a copy, by the length of the match: running means."""

    means: list[float] = field(default_factory=lambda: [*PRIORS, *RESUMED])
    seen: list[float] = field(default_factory=lambda: [PRECISION] * len(PRIORS + RESUMED))

    def __call__(self, length: int, is_resumed: bool = False) -> float:
        """Return how probable the next token of a copy is after a match of `length` tokens.

        Args:
            length: Of the match.
            is_resumed: Whether the copy goes on behind a difference.
        """
        return self.means[self._place(length, is_resumed)]

    def observe(self, length: int, is_right: bool, is_resumed: bool = False) -> None:
        """Learn from a token that was written, whether or not the copy was drafted."""
        place = self._place(length, is_resumed)
        self.seen[place] = min(self.seen[place] + 1, MEMORY)
        self.means[place] += (is_right - self.means[place]) / self.seen[place]

    @staticmethod
    def _place(length: int, is_resumed: bool) -> int:
        doublings = length.bit_length()
        if is_resumed and doublings <= len(RESUMED):
            return len(PRIORS) + doublings - 1
        return min(doublings, len(PRIORS) - 1)


@dataclass
class KnownStats:
    """What is known of copies for a drafter with a target, kept for as long as that is bound.

    Attributes:
        chances: Of copies.
        accepted: Drafts of a round in which the drafter is asked, as many as a request asks for; a running mean.
    """

    chances: CopyChances = field(default_factory=CopyChances)
    accepted: float = ACCEPTED

    def observe(self, accepted: int) -> None:
        """Learn from a round in which the drafter was asked."""
        self.accepted += (accepted - self.accepted) / ROUNDS
