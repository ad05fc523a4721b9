"""A schedule that says what it was asked."""

from __future__ import annotations

from hf_hyperdflash.auto.policies import FixedPolicy


class Asked(FixedPolicy):
    """Admits all drafts but the one of this number, and asks for no more than `most`."""

    def __init__(self, refused: int = 100, most: int = 100) -> None:
        self.refused, self.most = refused, most
        self.signals: list[float] = []

    def is_open(self) -> bool:
        return len(self.signals) < self.most

    def admits(self, signal: float) -> bool:
        self.signals.append(signal)
        return len(self.signals) <= self.refused
