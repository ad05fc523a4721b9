"""Reads a server's counts of its drafts: vLLM's at `/metrics`, SGLang's in each answer or, less exact, at
`/metrics`."""

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
# Fields of a chat request for SGLang (0.5.20 has them, 0.5.16 does not). Other servers may refuse unknown fields.
SGLANG_OPTIONS = {"return_spec_tokens_details": True}


class DraftCounters(NamedTuple):
    """A server's counters, since its start or of some answers.

    Attributes:
        rounds: Verification rounds.
        accepted: Accepted drafts per draft position. SGLang's end with the last position that was accepted at all.
    """

    rounds: float
    accepted: list[float]

    def since(self, before: DraftCounters) -> DraftCounters:
        """Return the counts since `before`."""
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


class RunCounts(NamedTuple):
    """The counts of a run's drafts.

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


def counts_of_run(model: str, answers: Iterable[DraftCounters | None], before: str, after: str) -> RunCounts:
    """Return the most exact counts of the drafts of a run.

    Args:
        model: The target, as the server calls it.
        answers: The server's counts of each answer; `None` where it gave none.
        before: Its page `/metrics` before the run, empty if there is none.
        after: The page after the run.
    """
    counted = total(answers) or vllm_counters(after, model).since(vllm_counters(before, model))
    if counted.rounds or counted.accepted:
        return RunCounts(counted.rounds, counted.tau, counted.acceptance, "run" if counted.rounds else None)
    (rounds, written), (earlier, earlier_written) = sglang_rounds(after, model), sglang_rounds(before, model)
    if rounds > earlier:
        return RunCounts(rounds - earlier, (written - earlier_written) / (rounds - earlier), [], "run")
    latest = sglang_interval(after, model)
    return RunCounts(None, latest, [], None if latest is None else "latest interval")


def vllm_counters(page: str, model: str) -> DraftCounters:
    """Read vLLM's counters of a model's drafts; all are empty if they are not on the page."""
    rounds, accepted = 0.0, defaultdict[int, float](float)
    for name, labels, value in _samples(page, model):
        if name == _DRAFTS:
            rounds += value
        elif name == _ACCEPTED and (position := re.search(r'position="(\d+)"', labels)):
            accepted[int(position[1])] += value
    return DraftCounters(rounds, [accepted[k] for k in sorted(accepted)])


def sglang_counted(event: dict[str, Any]) -> DraftCounters | None:
    """Read SGLang's counts of an answer from an event of its stream; `None` if the event has none.

    They are a histogram: how many rounds accepted no draft, one draft, and so on.
    """
    details = (event.get("sglext") or {}).get("spec_tokens_details")
    if details is None:
        return None
    histogram = details["spec_correct_drafts_histogram"]
    return DraftCounters(details["spec_verify_ct"], [float(sum(histogram[k:])) for k in range(1, len(histogram))])


def sglang_rounds(page: str, model: str) -> tuple[float, float]:
    """Read SGLang's verification rounds of finished requests, and the tokens that they wrote.

    The first token of a request, which the prompt's forward writes, is not counted, nor are drafts that were accepted
    after a text's end. So tau is a little lower than by the other counts.
    """
    found = defaultdict[str, float](float)
    for name, _, value in _samples(page, model):
        found[name] += value
    return found[_ROUNDS], found[_TOKENS] - found[_REQUESTS]


def sglang_interval(page: str, model: str) -> float | None:
    """Read the mean tokens per verification round of SGLang's latest interval, averaged over replicas.

    It is a gauge that is set every `--decode-log-interval` forwards; `None` before the first time.
    """
    values = [value for name, _, value in _samples(page, model) if name == _INTERVAL and value > 0]
    return sum(values) / len(values) if values else None


def total(counters: Iterable[DraftCounters | None]) -> DraftCounters | None:
    """Add up counters; `None` if there are none."""
    known = [of for of in counters if of is not None]
    accepted = [sum(column) for column in zip_longest(*(of.accepted for of in known), fillvalue=0.0)]
    return DraftCounters(sum(of.rounds for of in known), accepted) if known else None


def _samples(page: str, model: str) -> Iterator[tuple[str, str, float]]:
    """Yield name, labels and value of each sample of a model on a page."""
    for name, labels, value in _SAMPLE.findall(page):
        if f'model_name="{model}"' in labels:
            yield name, labels, float(value)
