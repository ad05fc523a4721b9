"""Whether learning pays: a bandit that knows what its arms cost (SpecBlock, cost-aware adaptation).

An update is worth its seconds if what it brings to the requests to come, seconds that they take less, is more. Both
are measured: the cost each time, the gain on text that the update did not see. Where no arm pays, looks at them may
take a small share of the time that serving takes, and one comes when acceptance falls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

_LOOKS = 1 / 200  # of the serving time: what looks may take
_FELL = 0.85  # of the mean acceptance: a new kind of text
_AT_FIRST = 2  # looks at what is served, the second one if the first was promising
_AFTER_A_FALL = 3  # looks at a new kind of text, of which the first updates tell little
_FAST, _SLOW = 1 / 8, 1 / 64  # what a request counts in the two means of tau
_BELIEF = 1 / 3  # what a measured gain counts
_STALE = 8  # updates after which an arm is looked at again while another one pays


@dataclass
class Arm:
    """What is known of a way to update.

    Attributes:
        cost: Seconds of an update, a running mean.
        gain: By how much an update raises tokens per round, relatively, a running mean; `None` at first.
        waited: Updates by others since.
    """

    cost: float = 0.0
    gain: float | None = None
    waited: int = 0


@dataclass
class Bandit:
    """Chooses among arms.

    Args:
        names: Of the arms, the most powerful last, which is tried first.
        horizon: Requests that profit from an update.

    Attributes:
        arms: By name.
    """

    names: Sequence[str]
    horizon: int
    arms: dict[str, Arm] = field(init=False)

    def __post_init__(self) -> None:
        self.arms = {name: Arm() for name in reversed(self.names)}
        self._served = self._looked = self._seconds = 0.0
        self._requests, self._fast, self._slow, self._tries = 0, 0.0, 0.0, _AT_FIRST
        self._has_fallen = False

    def serve(self, tau: float, seconds: float) -> bool:
        """A request took so many seconds and brought so many tokens a round; whether that is the last sign of a new
        kind of text."""
        self._requests += 1
        self._served += seconds
        self._seconds += (seconds - self._seconds) * max(_SLOW, 1 / self._requests)
        self._fast += (tau - self._fast) * max(_FAST, 1 / self._requests)
        self._slow += (tau - self._slow) * max(_SLOW, 1 / self._requests)
        if self._fast >= _FELL * self._slow:
            return False
        self._tries, self._slow, self._has_fallen = _AFTER_A_FALL, self._fast, True
        for arm in self.arms.values():
            arm.gain = None  # what was measured was of another text
        return True

    def worth(self, name: str) -> float:
        """The seconds that an update is expected to save, less its own."""
        arm = self.arms[name]
        return -arm.cost if arm.gain is None else self.horizon * self._seconds * arm.gain / (1 + arm.gain) - arm.cost

    def pays(self, name: str) -> bool:
        """Whether it is expected to save more than it takes; else an update is a look."""
        return self.worth(name) > 0

    def choose(self) -> str | None:
        """An arm, or `None` to go on without an update."""
        best = max(self.arms, key=self.worth)
        if self.pays(best):
            return next((name for name, arm in self.arms.items() if arm.waited >= _STALE), best)
        unknown = [name for name, arm in self.arms.items() if arm.gain is None]
        look = (unknown or sorted(self.arms, key=lambda name: -self.arms[name].waited))[0]
        if self._tries > 0 or self._looked + self.arms[look].cost <= _LOOKS * self._served:
            return look
        return None

    def update(self, name: str, seconds: float, gain: float) -> None:
        """An update took so many seconds and raised tokens a round by so much, relatively."""
        arm = self.arms[name]
        if not self.pays(name):
            self._looked += seconds
            self._tries = self._tries - 1 if self._has_fallen or gain > 0 else 0
        arm.cost = seconds if not arm.cost else arm.cost + (seconds - arm.cost) * _BELIEF
        arm.gain = gain if arm.gain is None else arm.gain + (gain - arm.gain) * _BELIEF
        for other in self.arms.values():
            other.waited = 0 if other is arm else other.waited + 1
