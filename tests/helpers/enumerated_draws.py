"""Random draws that go every way, so that a law is computed instead of estimated."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, TypeVar
from unittest import mock

import pytest
import torch

T = TypeVar("T")


class Coin(torch.Tensor):
    """A uniform number in [0, 1) that says of nothing but a threshold whether it is below."""

    draws: Draws

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> torch.Tensor:
        assert function.__name__ in ("lt", "__lt__") and isinstance(args[0], Coin), f"not `random < x`: {function}"
        threshold = min(max(0.0, float(args[1])), 1.0)  # nothing is below a NaN
        return torch.tensor(args[0].draws.sample_index([1 - threshold, threshold]) == 1)


class Draws:
    """One run's random draws: those in `decided` as they say, the others each the first way that it can go.

    Attributes:
        probability: That the draws go this way.
        others: What else could be decided at the draws that `decided` did not hold.
    """

    def __init__(self, decided: list[int]) -> None:
        self.decided, self.others, self.at, self.probability = decided, [], 0, 1.0

    def sample_index(self, weights: list[float]) -> int:
        ways = [way for way, weight in enumerate(weights) if weight > 0]
        if self.at == len(self.decided):
            self.others += [[*self.decided, way] for way in ways[1:]]
            self.decided = [*self.decided, ways[0]]
        way = self.decided[self.at]
        self.at += 1
        self.probability *= weights[way] / sum(weights)
        return way

    def multinomial(self, weights: torch.Tensor, num_samples: int) -> torch.Tensor:
        rows = [self._without_replacement(row, num_samples) for row in weights.reshape(-1, weights.shape[-1]).tolist()]
        return torch.tensor(rows).view(*weights.shape[:-1], num_samples)

    def one(self, weights: torch.Tensor) -> torch.Tensor:
        return self.multinomial(weights, 1)

    def _without_replacement(self, weights: list[float], count: int) -> list[int]:
        """One after the other; once none is left that has a weight, the others in their order, as torch does."""
        drawn: list[int] = []
        for _ in range(count):
            left = [0.0 if token in drawn else weight for token, weight in enumerate(weights)]
            drawn.append(
                self.sample_index(left) if any(left) else next(t for t in range(len(weights)) if t not in drawn)
            )
        return drawn

    def rand_like(self, like: torch.Tensor) -> Coin:
        assert like.numel() == 1
        coin = torch.zeros(like.shape).as_subclass(Coin)
        coin.draws = self
        return coin


def every_outcome(run: Callable[[], T]) -> Iterator[tuple[float, T]]:
    """What `run` returns for every way in which its `sample_index`, `torch.multinomial` and `torch.rand_like(..) < x`
    can go, and how probable that is."""
    modules = [module for name, module in sys.modules.items() if name.startswith("hf_hyperdflash.")]
    drawing = [module for module in modules if hasattr(module, "sample_index")]
    pending: list[list[int]] = [[]]
    while pending:
        draws = Draws(pending.pop())
        with ExitStack() as patches:
            patches.enter_context(mock.patch.multiple(torch, multinomial=draws.multinomial, rand_like=draws.rand_like))
            for module in drawing:
                patches.enter_context(mock.patch.object(module, "sample_index", draws.one))
            result = run()
        pending += draws.others
        yield draws.probability, result


def assert_law_is_the_targets(law: dict[tuple[int, ...], float], p_after: Callable[[Any], torch.Tensor]) -> None:
    """Of all rounds that come to write a token after a prefix, the share that writes t is p(t | prefix)."""
    assert sum(law.values()) == pytest.approx(1)
    for prefix in {text[:at] for text in law for at in range(len(text))}:
        reached = sum(mass for text, mass in law.items() if text[: len(prefix)] == prefix and len(text) > len(prefix))
        for token, p in enumerate(p_after(prefix).tolist()):
            written = (*prefix, token)
            mass = sum(mass for text, mass in law.items() if text[: len(written)] == written)
            assert mass == pytest.approx(reached * p, abs=1e-6), written
