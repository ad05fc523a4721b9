"""Accepted length (tau), an `evaluate` metric: the mean number of tokens per verification round."""

from __future__ import annotations

import datasets
import evaluate

from hf_hyperdflash.benchmark.metrics import CITATION
from hf_hyperdflash.decoding.stats import SpeculationStats

_DESCRIPTION = """\
Accepted length (tau) of speculative decoding: the mean number of tokens emitted per verification round, accepted
drafts plus the target's own token. 1 is plain decoding; with d drafts a round at most d + 1.
"""

_INPUTS = """
Args:
    predictions (`list[int]`): Tokens emitted in each verification round, at least 1 each
        (`SpeculationStats.emitted` of hf_hyperdflash).
Returns:
    acceptance_length (`float`): Mean tokens per verification round.
    rounds (`int`): Number of verification rounds.
Examples:
    >>> metric = evaluate.load("hf_hyperdflash/benchmark/metrics/acceptance_length.py")
    >>> metric.compute(predictions=[4, 1, 7])
    {'acceptance_length': 4.0, 'rounds': 3}
"""


class AcceptanceLength(evaluate.Metric):
    """Mean number of tokens per verification round (the paper's tau); see `.inputs_description`."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation=CITATION,
            inputs_description=_INPUTS,
            features=datasets.Features({"predictions": datasets.Value("int64")}),
        )

    def _compute(self, predictions: list[int]) -> dict[str, float | int]:
        if not len(predictions):
            raise ValueError("`predictions` is empty: expected the tokens emitted in at least one verification round.")
        if min(predictions) < 1:
            raise ValueError(
                f"`predictions` holds {min(predictions)}: a round emits at least the target's own token. Pass emitted "
                "tokens, not accepted drafts."
            )
        stats = SpeculationStats(rounds=len(predictions), emitted=predictions)
        return {"acceptance_length": stats.tau, "rounds": stats.rounds}
