"""A server of OpenAI's protocol as a method, and the report of a run over the prompt suites against one.

One streamed POST a turn needs no OpenAI client, and a thread per prompt waits for it.
"""

from __future__ import annotations

import json
import platform
import re
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from itertools import product, zip_longest
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from ..training.data.endpoint import Endpoint, fetch, opened
from ..training.trials import Record
from .runner import BenchmarkSettings, hardware, started
from .suites import suite_title

# Fields of a chat request for SGLang (0.5.20 has them, 0.5.16 does not). Other servers may refuse unknown fields.
_SGLANG_OPTIONS = {"return_spec_tokens_details": True}


@dataclass(frozen=True)
class Server(Endpoint):
    """A server, as a method of [`~training.trials.run`] whose prompts are conversations."""

    seed: int = 0

    @cached_property
    def is_sglang(self) -> bool:
        return self.models().get(self.model, {}).get("owned_by") == "sglang"

    def metrics(self) -> str:
        """Return the page of counters, empty if there is none."""
        try:
            return fetch(f"{self.root}/metrics")
        except ValueError:  # no such page
            return ""

    def generate(self, prompt: list[dict[str, str]], temperature: float, max_new_tokens: int) -> Record:
        """Ask for the next turn of a conversation, and read the stream."""
        body = {
            "model": self.model, "messages": prompt, "max_tokens": max_new_tokens, "top_p": 1.0,
            "temperature": temperature, "seed": self.seed, "stream": True, "stream_options": {"include_usage": True},
            **(_SGLANG_OPTIONS if self.is_sglang else {}),
        }  # fmt: skip
        began, first, new_tokens, prompt_tokens, counted, pieces = time.perf_counter(), None, 0, None, None, []
        url = f"{self.root}/v1/chat/completions"
        with opened(url, body) as lines:
            for line in lines:
                data = line.removeprefix(b"data:").strip()
                if not line.startswith(b"data:") or data == b"[DONE]":
                    continue
                event = json.loads(data)
                if error := event.get("error"):  # the status of a stream that has begun is always 200
                    raise ValueError(f"{url} breaks off ({str(error)[:300]}): look at its log.")
                usage = event.get("usage") or {}
                new_tokens = usage.get("completion_tokens", new_tokens)
                prompt_tokens = usage.get("prompt_tokens", prompt_tokens)
                counted = parse_sglang_counters(event) or counted
                delta = event["choices"][0]["delta"] if event.get("choices") else {}
                content = delta.get("content") or ""
                if first is None and (content or delta.get("reasoning_content") or delta.get("reasoning")):
                    first = time.perf_counter()
                pieces.append(content)
        ended = time.perf_counter()
        return Record(
            "".join(pieces), new_tokens, prompt_tokens, ended - began, (first or ended) - began, None, counted
        )


# What a server counts of its drafts: vLLM at `/metrics`, SGLang in each answer or, less exactly, at `/metrics`

_SAMPLE = re.compile(r"^((?:vllm|sglang):\w+)\{(.*)\} (\S+)$", re.MULTILINE)
_DRAFTS, _ACCEPTED = "vllm:spec_decode_num_drafts_total", "vllm:spec_decode_num_accepted_tokens_per_pos_total"
_ROUNDS = "sglang:spec_verify_calls_total"
_TOKENS, _REQUESTS = "sglang:generation_tokens_total", "sglang:num_requests_total"
_INTERVAL = "sglang:spec_accept_length"


class DraftCounters(NamedTuple):
    """A server's counters, since its start or of some answers."""

    rounds: float
    accepted: list[float]  # per draft position; SGLang's end with the last position that was accepted at all

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


def counts_of_answers(model: str, answers: Iterable[DraftCounters | None], before: str, after: str) -> DraftCounters:
    """Return the counts of some answers' drafts: those that came with them, or the difference of vLLM's counters on
    the pages `/metrics` before and after them (empty if there are none)."""
    return total(answers) or vllm_counters(after, model).since(vllm_counters(before, model))


def vllm_counters(page: str, model: str) -> DraftCounters:
    """Read vLLM's counters of a model's drafts; all are empty if they are not on the page."""
    rounds, accepted = 0.0, defaultdict[int, float](float)
    for name, labels, value in _samples(page, model):
        if name == _DRAFTS:
            rounds += value
        elif name == _ACCEPTED and (position := re.search(r'position="(\d+)"', labels)):
            accepted[int(position[1])] += value
    return DraftCounters(rounds, [accepted[k] for k in sorted(accepted)])


def parse_sglang_counters(event: dict[str, Any]) -> DraftCounters | None:
    """Read SGLang's counts of an answer from an event of its stream; `None` if the event has none."""
    details = (event.get("sglext") or {}).get("spec_tokens_details")
    if details is None:
        return None
    # How many rounds accepted no draft, one draft, and so on.
    histogram = details["spec_correct_drafts_histogram"]
    return DraftCounters(details["spec_verify_ct"], [float(sum(histogram[k:])) for k in range(1, len(histogram))])


def sglang_rounds(page: str, model: str) -> tuple[float, float]:
    """Read SGLang's verification rounds of finished requests, and the tokens that they wrote."""
    found = defaultdict[str, float](float)
    for name, _, value in _samples(page, model):
        found[name] += value
    # The prompt's forward writes the first token of a request. Drafts that were accepted after a text's end are not
    # counted, so tau is a little lower than by the other counts.
    return found[_ROUNDS], found[_TOKENS] - found[_REQUESTS]


def sglang_interval(page: str, model: str) -> float | None:
    """Read the mean tokens per verification round of SGLang's latest interval, averaged over replicas."""
    # A gauge that is set every `--decode-log-interval` forwards, and is 0 before.
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


# A run over the suites


def measure(
    server: Server, prompts: Sequence[Sequence[str]], temperature: float, concurrency: int, max_new_tokens: int
) -> dict[str, Any]:
    """Ask every turn of some prompts, so many prompts at a time, and return the figures."""

    def converse(turns: Sequence[str]) -> list[Record]:
        messages: list[dict[str, str]] = []
        answers: list[Record] = []
        for turn in turns:
            messages.append({"role": "user", "content": turn})
            answers.append(server.generate(messages, temperature, max_new_tokens))
            messages.append({"role": "assistant", "content": answers[-1].output})  # the server's own answer
        return answers

    before, _ = server.metrics(), server.is_sglang  # which is asked for once
    began = time.perf_counter()
    with ThreadPoolExecutor(concurrency) as pool:
        answers = [answer for conversation in pool.map(converse, prompts) for answer in conversation]
    seconds, after = time.perf_counter() - began, server.metrics()
    tokens = sum(answer.new_tokens for answer in answers)
    counts = counts_of_answers(server.model, [answer.counted for answer in answers], before, after)
    rounds: float | None = counts.rounds
    tau, tau_of = counts.tau, "run" if rounds else None
    if not rounds and not counts.accepted:
        # SGLang, started without counts in answers: its counters of all positions together or, if it has none, the
        # mean of the last few rounds that it reported, which are not all of the run's and may be older than it.
        (all_rounds, written), (earlier, earlier_written) = (
            sglang_rounds(page, server.model) for page in (after, before)
        )
        if all_rounds > earlier:
            rounds, tau, tau_of = all_rounds - earlier, (written - earlier_written) / (all_rounds - earlier), "run"
        else:
            rounds, tau = None, sglang_interval(after, server.model)
            tau_of = None if tau is None else "latest interval"
    return {
        "temperature": temperature,
        "concurrency": concurrency,
        "answers": len(answers),
        "new_tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "median_seconds": median(answer.seconds for answer in answers),
        "median_first_seconds": median(answer.first_seconds for answer in answers),
        "rounds": rounds,
        "tau": tau,
        "acceptance": counts.acceptance,
        "tau_of": tau_of,
    }


def run_endpoint(server: Server, settings: BenchmarkSettings, concurrency: Sequence[int], output: Path) -> None:
    """Ask every suite at every temperature and concurrency; write `endpoint.json` and `endpoint.md` into `output`."""
    suites = settings.prompts()
    if server.model not in (names := server.models()):
        raise ValueError(
            f"`--target` is {server.model!r}, but {server.endpoint} serves {', '.join(names)}: give one of these."
        )
    rows = [
        {"suite": name, **measure(server, prompts, temperature, at_once, settings.max_new_tokens)}
        for temperature, at_once, (name, prompts) in product(settings.temperatures, concurrency, suites.items())
    ]
    run = {
        **started(),
        "client": f"{hardware('cpu')}, Python {platform.python_version()}",
        "endpoint": server.endpoint,
        "model": server.model,
        "suites": settings.suites,
        "data": settings.data and Path(settings.data).name,
        "temperatures": settings.temperatures,
        "concurrency": concurrency,
        "limit": settings.limit,
        "max_new_tokens": settings.max_new_tokens,
        "seed": server.seed,
    }
    output.mkdir(parents=True, exist_ok=True)
    (output / "endpoint.json").write_text(json.dumps({"run": run, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    (output / "endpoint.md").write_text(markdown(run, rows), encoding="utf-8")


def markdown(run: dict[str, Any], rows: Sequence[dict[str, Any]]) -> str:
    """Return the report, with a line per suite, temperature and concurrency."""
    lines = [
        f"# {run['model']} at {run['endpoint']}",
        "",
        f"{run['date']}, asked from {run['client']}; {run['limit'] or 'all'} prompts of each suite, at most "
        f"{run['max_new_tokens']} new tokens a turn. `{run['command']}`",
        "",
        "| suite | temperature | at a time | answers | tokens/s | median s | first piece, s | τ | accepted, % |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---|",
    ]
    for row in rows:
        tau = "–" if row["tau"] is None else f"{row['tau']:.2f}"
        tau += " (latest)" if row["tau_of"] == "latest interval" else ""
        accepted = " ".join(f"{100 * share:.1f}" for share in row["acceptance"]) or "–"
        lines.append(
            f"| {suite_title(row['suite'])} | {row['temperature']:g} | {row['concurrency']} | {row['answers']} | "
            f"{row['tokens_per_second']:.1f} | {row['median_seconds']:.2f} | {row['median_first_seconds']:.2f} | "
            f"{tau} | {accepted} |"
        )
    counts = ["τ (tokens a verification round) and acceptance per draft position are the server's own counters."]
    if any(row["tau_of"] == "latest interval" for row in rows):
        counts.append("(latest): of the last few rounds that the server reported, not the mean over the run.")
    return "\n".join([*lines, "", " ".join(counts), ""])
