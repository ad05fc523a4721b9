"""Acceptance per draft position, an `evaluate` metric."""

from __future__ import annotations

import datasets
import evaluate

from hf_hyperdflash.benchmark.metrics import CITATION
from hf_hyperdflash.decoding.stats import SpeculationStats

_DESCRIPTION = """\
Acceptance of speculative decoding per draft position k = 1, 2, ..: the fraction of verification rounds in which draft
k was accepted (never rising with k, as an accepted draft needs all before it), and the conditional one, the fraction
of the rounds that accepted draft k - 1 which also accepted draft k.
"""

_INPUTS = """
Args:
    predictions (`list[int]`): Accepted drafts of each verification round (`SpeculationStats.accepted` of
        hf_hyperdflash).
    num_drafts (`int`, *optional*): Draft positions to report; the most that a round accepted by default.
Returns:
    acceptance (`list[float]`): Per draft position, the fraction of rounds that accepted it.
    conditional_acceptance (`list[float]`): The same among the rounds that accepted the position before; 0 where none
        did.
Examples:
    >>> metric = evaluate.load("hf_hyperdflash/benchmark/metrics/per_position_acceptance.py")
    >>> metric.compute(predictions=[2, 0, 1, 1], num_drafts=3)
    {'acceptance': [0.75, 0.25, 0.0], 'conditional_acceptance': [0.75, 0.3333333333333333, 0.0]}
"""


class PerPositionAcceptance(evaluate.Metric):
    """Acceptance per draft position (the paper's Figure 1); see `.inputs_description`."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation=CITATION,
            inputs_description=_INPUTS,
            features=datasets.Features({"predictions": datasets.Value("int64")}),
        )

    def _compute(self, predictions: list[int], num_drafts: int | None = None) -> dict[str, list[float]]:
        if not len(predictions):
            raise ValueError(
                "`predictions` is empty: expected the accepted drafts of at least one verification round."
            )
        if num_drafts is None:
            num_drafts = max(predictions)
        if min(predictions) < 0 or max(predictions) > num_drafts:
            raise ValueError(
                f"`predictions` runs from {min(predictions)} to {max(predictions)}: expected 0 to {num_drafts} "
                "accepted drafts a round. Pass accepted drafts, not emitted tokens, and the `num_drafts` of the run."
            )
        stats = SpeculationStats(rounds=len(predictions), draft_positions=num_drafts, accepted=predictions)
        return {"acceptance": stats.acceptance, "conditional_acceptance": stats.conditional_acceptance}
