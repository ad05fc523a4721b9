"""What a server tells of its drafts: vLLM at `/metrics`, SGLang with each answer and, of less use, at `/metrics`."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import zip_longest
from typing import Any, NamedTuple

_SAMPLE = re.compile(r"^((?:vllm|sglang):\w+)\{(.*)\} (\S+)$", re.MULTILINE)
_DRAFTS, _ACCEPTED = "vllm:spec_decode_num_drafts_total", "vllm:spec_decode_num_accepted_tokens_per_pos_total"
_ROUNDS = "sglang:spec_verify_calls_total"
_TOKENS, _REQUESTS = "sglang:generation_tokens_total", "sglang:num_requests_total"
_INTERVAL = "sglang:spec_accept_length"
# What SGLang (0.5.20 has it, 0.5.16 does not) is asked for with a chat. Others may refuse what they do not know.
SGLANG_ASKED = {"return_spec_tokens_details": True}


class DraftCounters(NamedTuple):
    """A server's counters, since its start or of some answers.

    Attributes:
        rounds: Verification rounds.
        accepted: Accepted drafts per draft position. SGLang's end with the last position that was accepted at all.
    """

    rounds: float
    accepted: list[float]

    def since(self, before: DraftCounters) -> DraftCounters:
        """What was counted after `before` was."""
        earlier = [*before.accepted, *[0.0] * len(self.accepted)]
        return DraftCounters(self.rounds - before.rounds, [a - b for a, b in zip(self.accepted, earlier)])

    @property
    def tau(self) -> float | None:
        """Mean tokens per verification round."""
        return 1 + sum(self.accepted) / self.rounds if self.rounds else None

    @property
    def acceptance(self) -> list[float]:
        """Per draft position: the fraction of rounds in which it was accepted."""
        return [count / self.rounds for count in self.accepted] if self.rounds else []


class Told(NamedTuple):
    """What is known of a run's drafts.

    Attributes:
        rounds: Verification rounds of the run.
        tau: Mean tokens per verification round.
        acceptance: Per draft position: the fraction of rounds in which it was accepted.
        tau_of: What `tau` is the mean over: "run", or "latest interval", the last few rounds that the server reported,
            which are not all of the run's and may be older than it; `None` if nothing is known.
    """

    rounds: float | None
    tau: float | None
    acceptance: list[float]
    tau_of: str | None


def told_of_run(model: str, answers: Iterable[DraftCounters | None], before: str, after: str) -> Told:
    """The most exact of what a server tells of the drafts of a run.

    Args:
        model: The target, as the server calls it.
        answers: What it counted of each answer, `None` where it told nothing.
        before: Its page `/metrics` before the run, empty if there is none.
        after: And after it.
    """
    counted = total(answers) or vllm_counters(after, model).since(vllm_counters(before, model))
    if counted.rounds or counted.accepted:
        return Told(counted.rounds, counted.tau, counted.acceptance, "run" if counted.rounds else None)
    (rounds, written), (earlier, earlier_written) = sglang_rounds(after, model), sglang_rounds(before, model)
    if rounds > earlier:
        return Told(rounds - earlier, (written - earlier_written) / (rounds - earlier), [], "run")
    latest = sglang_interval(after, model)
    return Told(None, latest, [], None if latest is None else "latest interval")


def vllm_counters(page: str, model: str) -> DraftCounters:
    """vLLM's counters of a model's drafts; none at all if they are not on the page."""
    rounds, accepted = 0.0, defaultdict[int, float](float)
    for name, labels, value in _samples(page, model):
        if name == _DRAFTS:
            rounds += value
        elif name == _ACCEPTED and (place := re.search(r'position="(\d+)"', labels)):
            accepted[int(place[1])] += value
    return DraftCounters(rounds, [accepted[k] for k in sorted(accepted)])


def sglang_counted(event: dict[str, Any]) -> DraftCounters | None:
    """What SGLang counted of an answer, by the event of its stream that tells so; `None` by others.

    It has a histogram: how many rounds accepted none of their drafts, one, and so on.
    """
    details = (event.get("sglext") or {}).get("spec_tokens_details")
    if details is None:
        return None
    histogram = details["spec_correct_drafts_histogram"]
    return DraftCounters(details["spec_verify_ct"], [float(sum(histogram[k:])) for k in range(1, len(histogram))])


def sglang_rounds(page: str, model: str) -> tuple[float, float]:
    """SGLang's verification rounds of finished requests, and the tokens that they wrote.

    Each request's first token is not among these, its prompt's forward wrote it; nor is what was accepted past a
    text's end, so that tau by these is a little less than by the other counts.
    """
    found = defaultdict[str, float](float)
    for name, _, value in _samples(page, model):
        found[name] += value
    return found[_ROUNDS], found[_TOKENS] - found[_REQUESTS]


def sglang_interval(page: str, model: str) -> float | None:
    """Mean tokens per verification round of SGLang's latest interval, of several replicas their mean: a gauge that is
    set once in so many forwards (`--decode-log-interval`); `None` before the first time."""
    told = [value for name, _, value in _samples(page, model) if name == _INTERVAL and value > 0]
    return sum(told) / len(told) if told else None


def total(counters: Iterable[DraftCounters | None]) -> DraftCounters | None:
    """All of them together; `None` if there is none."""
    there = [of for of in counters if of is not None]
    accepted = [sum(column) for column in zip_longest(*(of.accepted for of in there), fillvalue=0.0)]
    return DraftCounters(sum(of.rounds for of in there), accepted) if there else None


def _samples(page: str, model: str) -> Iterator[tuple[str, str, float]]:
    """Name, labels and value of what a page has of a model."""
    for name, labels, value in _SAMPLE.findall(page):
        if f'model_name="{model}"' in labels:
            yield name, labels, float(value)
