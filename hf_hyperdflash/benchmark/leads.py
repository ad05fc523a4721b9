"""How far the fastest method of a benchmark is ahead of each other one, and how sure that is.

Two methods answer the same prompts, so what differs between prompts mostly cancels in their difference; its interval
says whether other prompts could have turned the order round.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .intervals import Interval, draw, interval
from .results import Pair, Results, complete, paired


@dataclass(frozen=True)
class Lead:
    """What the method with the highest average speedup has more than another one, averaged over suites.

    Attributes:
        speedup: Difference of the average speedups, at least 0.
        tau: Difference of the average tau; `None` where one of the two had no verification round.
    """

    mode: str
    temperature: float
    fastest: str
    method: str
    speedup: Interval
    tau: Interval | None


def leads(results: Results) -> list[Lead]:
    """The lead over every other method, per mode and temperature, over the suites that all methods have.

    Prompts of each suite are drawn again (see [`~benchmark.intervals.draw`]), both turns of one together, the same for all methods.
    The seed of a training and the machine are not drawn again, so what they change is not in the intervals.

    Returns:
        None of a mode and temperature where a suite has a single prompt.
    """
    pairs = paired(results)
    cells: dict[tuple[str, float], list[dict[str, list[Pair]]]] = {}
    for key in complete(pairs):
        cells.setdefault(key[:2], []).append(pairs[key])
    return [lead for (mode, heat), suites in cells.items() for lead in _leads(mode, heat, suites)]


def _leads(mode: str, heat: float, suites: list[dict[str, list[Pair]]]) -> list[Lead]:
    rng = np.random.default_rng(0)
    speedups: dict[str, list[np.ndarray]] = {}
    taus: dict[str, list[np.ndarray]] = {}
    for cell in suites:
        sums = {method: _sums(pairs) for method, pairs in cell.items()}
        prompts = len(next(iter(sums.values())))
        if prompts < 2:
            return []
        drawn = draw(prompts, rng)  # the same for all methods
        for method, of in sums.items():
            tokens, seconds, plain_tokens, plain_seconds, emitted, rounds = (drawn @ of).T
            with np.errstate(invalid="ignore"):  # no round, no tau
                speedups.setdefault(method, []).append(tokens / seconds * plain_seconds / plain_tokens)
                taus.setdefault(method, []).append(emitted / rounds)
    speedup = {method: np.mean(of, axis=0) for method, of in speedups.items()}
    tau = {method: np.mean(of, axis=0) for method, of in taus.items()}
    fastest = max(speedup, key=lambda method: speedup[method][0])
    return [
        Lead(mode, heat, fastest, method, interval(speedup[fastest] - of), _tau(tau[fastest] - tau[method]))
        for method, of in speedup.items()
        if method != fastest
    ]


def _sums(pairs: list[Pair]) -> np.ndarray:
    """`[prompts, 6]`: what a speedup and tau are made of, of each prompt with all its turns."""
    sums: dict[int, np.ndarray] = {}
    for line, plain in pairs:
        figures = [line["new_tokens"], line["seconds"], plain["new_tokens"], plain["seconds"]]
        figures += [sum(line["emitted"]), line["rounds"]]
        sums[line["prompt"]] = sums.get(line["prompt"], np.zeros(len(figures))) + figures
    return np.stack(list(sums.values()))


def _tau(values: np.ndarray) -> Interval | None:
    return None if np.isnan(values[0]) or np.isnan(values[1:]).all() else interval(values)
