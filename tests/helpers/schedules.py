"""A policy that says what it was asked, and what came of a chain of drafts."""

from __future__ import annotations

import torch

from hf_hyperdflash.auto.policies import FixedPolicy, Outcome
from hf_hyperdflash.trees.tree import DraftTree


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


def outcome(drafts: int, accepted: int, is_last: bool = False) -> Outcome:
    """Of a chain, of which so many were accepted."""
    return Outcome(DraftTree.chain(torch.zeros(drafts, dtype=torch.long)), list(range(accepted)), is_last)
