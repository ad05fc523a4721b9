"""How many tokens each row of a batch drafts in a round where the request says "auto".

Rows share a forward, so that what a draft costs is none of a row's own: all rows draft the same number, settled before
any is drawn by what is known of draft positions, and none where none pays, as in large batches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from .schedule import Experience, FixedSchedule, Schedule

_SEEN = 0.99  # what is left of a count with each further draft at the same position
_PRIOR = 4.0  # drafts that the position before counts as much as
_UNSEEN = 0.7  # held of the first position before any draft is known


class PositionSurvival:
    """How probable it is that a draft is accepted once those before it are, by its position."""

    usual = 0.0  # what is known of each position is all there is

    def __init__(self) -> None:
        self._drafts: dict[int, float] = {}
        self._accepted: dict[int, float] = {}

    def __call__(self, position: int, reached: float = 1.0) -> float:
        """The probability at a position, 0 for the first, whatever is held of those before."""
        chance = _UNSEEN
        for earlier in range(position + 1):
            drafts, accepted = self._drafts.get(earlier, 0.0), self._accepted.get(earlier, 0.0)
            chance = (accepted + _PRIOR * chance) / (drafts + _PRIOR)
        return chance

    def observe(self, position: int, accepted: bool, reached: float = 1.0) -> None:
        """Hear what became of a draft whose predecessors were accepted."""
        self._drafts[position] = _SEEN * self._drafts.get(position, 0.0) + 1
        self._accepted[position] = _SEEN * self._accepted.get(position, 0.0) + accepted


class RowSchedule(FixedSchedule):
    """Of one row: what was settled for all."""

    def __init__(self) -> None:
        self.drafts = 0

    def begin(self, length: int, room: int) -> int:
        self.is_asked = self.drafts > 0
        return min(room, self.drafts)


class BatchSchedule:
    """Settles the number of drafts from round to round.

    Args:
        experience: Of the drafter with the target; changed.
        rows: Of the batch: they get a schedule that follows.
    """

    def __init__(self, experience: Experience, rows: Sequence[Any]) -> None:
        self._experience, self._of_size = experience, dict[int, Schedule]()
        for row in rows:
            row.schedule = RowSchedule()

    def begin(self, rows: Sequence[Any]) -> None:
        """Begin a round of the rows that are left."""
        schedule = self._schedule_of(len(rows))
        room = max(row.room() for row in rows)
        most = schedule.begin(max(row.row.length for row in rows), room)
        # One at least where the drafter is asked at all: whether that pays is judged by what it took.
        drafts = next((position for position in range(most) if not schedule.admits(position)), most) or min(most, 1)
        for row in rows:
            row.schedule.drafts = drafts

    def end(self, rows: Sequence[Any], drafted: Sequence[int], accepted: Sequence[int], seconds: float) -> None:
        """End it.

        Args:
            rows: Those of `begin`.
            drafted: How many tokens each drafted.
            accepted: How many of these were accepted.
            seconds: What the round took.
        """
        schedule = self._schedule_of(len(rows))
        for row, made, kept in zip(rows, drafted, accepted):
            schedule.count(kept, is_last=row.row.finished or kept == made)
        schedule.weigh(max(drafted), sum(accepted) / len(rows), seconds)

    def _schedule_of(self, rows: int) -> Schedule:
        size = rows.bit_length()
        if size not in self._of_size:
            doubt = self._experience.doubt / math.sqrt(rows)
            known = Experience(survival=PositionSurvival(), doubt=doubt)
            known = self._experience.batches.setdefault(size, known)
            self._of_size[size] = Schedule(known)
        return self._of_size[size]
