"""What a round takes, learned from the rounds before: an augmented space linear model at work."""

from __future__ import annotations

import copy

from .aslm import AugmentedSpaceLinearModel

ROUNDS = 8  # that the model learns from at once, as one call is dearer than its rows; and that the pace is a mean of
HICCUP = 1.6  # times what was expected; what a round takes beyond is no price
CENTERS = 64  # of the model
MEMORY = 512  # rounds, of each centre

Inputs = tuple[float, float, float, float]


class RoundCosts:
    """Predicts what a round takes: one target and one drafter on their devices.

    A least-squares line says what is common to all rounds: what a verified token costs, asking the drafter, doubling
    the text, a text more in the batch. The mean error of the nearest measurements corrects it, as kernels have widths.
    Costs are in units of a pace in seconds: a machine that gets busy makes all rounds dearer, also those that were not
    measured since.

    Memory is bounded, and old rounds are forgotten where new ones come. Several threads may observe at once: a
    measurement may get lost, which changes nothing that matters, and a model is complete before others see it.
    """

    def __init__(self) -> None:
        # Equal inputs share a centre, others do not while there is room.
        self._model = AugmentedSpaceLinearModel(
            quantization=1e-9, max_centers=CENTERS, memory=MEMORY, shrinkage=ROUNDS
        )
        self._pace, self._fastest = 0.0, 1.0
        self._measured: list[tuple[Inputs, float]] = []
        self._tables: dict[tuple[int, int], list[float]] = {}

    def observe(self, length: int, drafts: int | None, seconds: float, texts: int = 1, is_trial: bool = False) -> None:
        """Learn from one round, in which each text verified `drafts`; `None` if the drafter was not asked. In a trial
        nothing is known of rounds like it: the model learns at once."""
        seconds = max(seconds, 1e-9)  # a clock may be coarse
        self._pace = self._pace or seconds
        cost = seconds / self._pace
        if not is_trial:
            expected = self._table(length, drafts or 0, texts)[0 if drafts is None else drafts + 1]
            cost = min(cost, HICCUP * expected)
            self._pace *= 1 + (cost / expected - 1) / ROUNDS
        measured = self._measured = [*self._measured, (_inputs(length.bit_length(), drafts, texts), cost)]
        if is_trial or len(measured) >= ROUNDS:
            inputs, costs = zip(*measured)
            self._fastest = min(self._fastest, *costs)
            self._model = copy.copy(self._model).partial_fit(inputs, costs)
            self._measured, self._tables = [], {}

    def predict(self, length: int, max_drafts: int, texts: int = 1) -> list[float]:
        """Return what rounds with 0, 1, .. `max_drafts` a text take, in units of a round without the drafter."""
        plain, *others = self._table(length, max_drafts, texts)
        return [cost / plain for cost in others[: max_drafts + 1]]

    def _table(self, length: int, max_drafts: int, texts: int) -> list[float]:
        """Return costs: of a round without the drafter, then of rounds with 0, 1, .. drafts: none faster than the
        fastest measured."""
        key, tables = (length.bit_length(), texts), self._tables
        table = tables.get(key, [])
        if len(table) < max_drafts + 2:
            inputs = [_inputs(key[0], drafts, texts) for drafts in (None, *range(max_drafts + 1))]
            table = tables[key] = self._model.predict(inputs).clip(self._fastest).tolist()
        return table


def _inputs(doublings: int, drafts: int | None, texts: int) -> Inputs:
    return texts * (1 + (drafts or 0)), float(drafts is not None), doublings, texts
