"""Whether learning pays: a bandit that knows the cost of its arms (SpecBlock, cost-aware adaptation).

An update pays if it saves the requests to come more seconds than it takes. Both are measured: the cost with each
update, the gain on requests that came after it. An update of an arm that is not known to pay is a trial. Trials may
take a small share of the serving time, that of the `horizon` requests to come included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

_TRIAL_SHARE = 1 / 200  # of the serving time, for trials
_DROP = 0.85  # tau below this share of its long mean is a sign of a new kind of text
_FAST_RATE, _SLOW_RATE = 1 / 8, 1 / 64  # weight of a request in the two running means of tau
_GAIN_RATE = 2 / 3  # weight of a new measurement in the running means of an arm: what is learned once, is learned
_STALE = 8  # updates of others after which an arm is tried again


@dataclass
class Arm:
    """A way to update, with its measured cost and gain, which are running means."""

    cost: float = 0.0  # seconds of an update
    gain: float | None = None  # the relative increase of tokens per round by an update; `None` at first
    updates_since: int = 0  # updates of other arms since the last one of this arm


@dataclass
class Bandit:
    """Chooses among arms, the cheapest one first, which is tried first. `horizon` requests profit from an update."""

    names: Sequence[str]
    horizon: int
    arms: dict[str, Arm] = field(init=False)

    def __post_init__(self) -> None:
        self.arms = {name: Arm() for name in self.names}
        self._serving_seconds = self._trial_seconds = self._seconds_per_request = 0.0
        self._requests, self._fast_tau, self._slow_tau, self._kinds = 0, 0.0, 0.0, 1

    def record_request(self, tau: float, seconds: float) -> bool:
        """Record the tokens per round and the seconds of a request, and return whether a new kind of text has
        begun."""
        self._requests += 1
        self._serving_seconds += seconds
        self._seconds_per_request += (seconds - self._seconds_per_request) * max(_SLOW_RATE, 1 / self._requests)
        self._fast_tau += (tau - self._fast_tau) * max(_FAST_RATE, 1 / self._requests)
        self._slow_tau += (tau - self._slow_tau) * max(_SLOW_RATE, 1 / self._requests)
        if self._fast_tau >= _DROP * self._slow_tau:
            return False
        self._slow_tau = self._fast_tau
        self._kinds += 1
        for arm in self.arms.values():
            arm.gain = None  # it was measured on another kind of text
        return True

    def expected_saving(self, name: str) -> float:
        """Return the seconds that an update is expected to save, minus its own."""
        arm = self.arms[name]
        gain = arm.gain or 0.0
        return self.horizon * self._seconds_per_request * gain / (1 + gain) - arm.cost

    def pays(self, name: str) -> bool:
        """Return whether an update is expected to save more time than it takes. Otherwise an update is a trial."""
        return self.expected_saving(name) > 0

    def trial_seconds_left(self) -> float:
        """Return what trials may still take. Each kind of text has the horizon's share anew."""
        to_come = self._kinds * self.horizon * self._seconds_per_request
        return _TRIAL_SHARE * (self._serving_seconds + to_come) - self._trial_seconds

    def choose(self) -> str | None:
        """Return the arm to update, or `None` for no update."""
        best = max(self.arms, key=self.expected_saving)
        if self.pays(best):
            return next((name for name, arm in self.arms.items() if arm.updates_since >= _STALE), best)
        unknown = [name for name, arm in self.arms.items() if arm.gain is None]
        trial = (unknown or sorted(self.arms, key=lambda name: -self.arms[name].updates_since))[0]
        left = self.trial_seconds_left()
        return trial if left > 0 and left >= self.arms[trial].cost else None

    def record_cost(self, name: str | None, seconds: float) -> None:
        """Record the seconds of an update and of judging the one before; `None` where there was no update."""
        if name is None or not self.pays(name):
            self._trial_seconds += seconds
        if name is None:
            return
        arm = self.arms[name]
        arm.cost = seconds if not arm.cost else arm.cost + (seconds - arm.cost) * _GAIN_RATE
        for other in self.arms.values():
            other.updates_since = 0 if other is arm else other.updates_since + 1

    def record_gain(self, name: str, gain: float) -> None:
        """Record the relative increase of tokens per round that an update brought."""
        arm = self.arms[name]
        arm.gain = gain if arm.gain is None else arm.gain + (gain - arm.gain) * _GAIN_RATE
