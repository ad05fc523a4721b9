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
        self._tables: dict[tuple[int, int, bool], list[float]] = {}

    def observe(
        self,
        length: int,
        drafts: int | None,
        seconds: float,
        texts: int = 1,
        is_trial: bool = False,
        known_drafts: int = 0,
    ) -> None:
        """Learn from one round, in which each text verified `drafts`; `None` if the drafter was not asked, and each
        verified `known_drafts`. In a trial nothing is known of rounds like it: the model learns at once."""
        seconds = max(seconds, 1e-9)  # a clock may be coarse
        self._pace = self._pace or seconds
        cost = seconds / self._pace
        if not is_trial:
            if drafts is None:
                expected = self._table(length, known_drafts, texts, asks_drafter=False)[known_drafts]
            else:
                expected = self._table(length, drafts, texts)[drafts]
            cost = min(cost, HICCUP * expected)
            self._pace *= 1 + (cost / expected - 1) / ROUNDS
        measured = self._measured = [
            *self._measured,
            (_inputs(length.bit_length(), drafts, texts, known_drafts), cost),
        ]
        if is_trial or len(measured) >= ROUNDS:
            inputs, costs = zip(*measured)
            self._fastest = min(self._fastest, *costs)
            self._model = copy.copy(self._model).partial_fit(inputs, costs)
            self._measured, self._tables = [], {}

    def predict(self, length: int, max_drafts: int, texts: int = 1) -> list[float]:
        """Return what rounds with 0, 1, .. `max_drafts` a text take, in units of a round without the drafter."""
        plain = self._table(length, 0, texts, asks_drafter=False)[0]
        return [cost / plain for cost in self._table(length, max_drafts, texts)[: max_drafts + 1]]

    def predict_known(self, length: int, max_drafts: int, texts: int = 1) -> list[float]:
        """Do the same of rounds without the drafter, whose drafts are known."""
        costs = self._table(length, max_drafts, texts, asks_drafter=False)[: max_drafts + 1]
        return [cost / costs[0] for cost in costs]

    def _table(self, length: int, max_drafts: int, texts: int, asks_drafter: bool = True) -> list[float]:
        """Return costs of rounds with 0, 1, .. drafts: none faster than the fastest measured."""
        key, tables = (length.bit_length(), texts, asks_drafter), self._tables
        table = tables.get(key, [])
        if len(table) < max_drafts + 1:
            counts = range(max_drafts + 1)
            inputs = [_inputs(key[0], *((k, texts) if asks_drafter else (None, texts, k))) for k in counts]
            table = tables[key] = self._model.predict(inputs).clip(self._fastest).tolist()
        return table


def _inputs(doublings: int, drafts: int | None, texts: int, known_drafts: int = 0) -> Inputs:
    return texts * (1 + (drafts or 0) + known_drafts), float(drafts is not None), doublings, texts
