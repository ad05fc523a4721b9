"""Measures a server of OpenAI's protocol with the prompt suites, and reads the server's counts of its drafts.

It uses the standard library: one streamed POST a turn needs no OpenAI client, and a thread per prompt waits for it.
"""

from __future__ import annotations

import json
import platform
import shlex
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import date
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from ..runner import hardware
from ..suites import load_suite, suite_title
from .served_counts import SGLANG_OPTIONS, DraftCounters, counts_of_run, sglang_counted, vllm_counters


class Answer(NamedTuple):
    """A server's answer to one turn.

    Attributes:
        text: The text without reasoning.
        new_tokens: Its tokens, as the server counts them.
        seconds: Seconds until its end.
        first_seconds: Seconds until its first piece.
        counted: The server's counts of its drafts; `None` if it gives none.
        prompt_tokens: Tokens of the conversation so far, as the server counts them; `None` if it does not say.
    """

    text: str
    new_tokens: int
    seconds: float
    first_seconds: float
    counted: DraftCounters | None
    prompt_tokens: int | None = None


@dataclass(frozen=True)
class EndpointSettings:
    """The settings of a run against a server.

    Args:
        endpoint: The server's address, with `/v1` or without.
        model: The target, as the server calls it.
        suites: Names of suites, see [`load_suite`].
        data: Folder with `<suite>.jsonl` files; `None` for the Hub.
        temperatures: 0 is greedy.
        concurrency: Numbers of prompts that are asked at the same time, each in a run of its own.
        limit: Prompts of each suite; `None` for all.
        max_new_tokens: Most new tokens per turn.
        seed: Seed of sampling, for servers that accept one.

    Raises:
        ValueError: If the address is none.
    """

    endpoint: str
    model: str
    suites: list[str]
    data: str | None = None
    temperatures: list[float] = field(default_factory=lambda: [0.0])
    concurrency: list[int] = field(default_factory=lambda: [1])
    limit: int | None = None
    max_new_tokens: int = 2048
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.endpoint.startswith(("http://", "https://")):
            raise ValueError(f"`--endpoint` is {self.endpoint!r}, expected an address: http://localhost:8000.")

    @property
    def root(self) -> str:
        """The address without `/v1`."""
        return self.endpoint.rstrip("/").removesuffix("/v1")


def check_server(settings: EndpointSettings) -> None:
    """Raise a `ValueError` if no server answers, or it does not serve the target."""
    names = list(served_models(settings))
    if settings.model not in names:
        raise ValueError(
            f"`--target` is {settings.model!r}, but {settings.endpoint} serves {', '.join(names)}: give one of these."
        )


def served_models(settings: EndpointSettings) -> dict[str, str | None]:
    """Return the models that a server serves, with their owner, which is the server's kind."""
    listed = json.loads(fetch(f"{settings.root}/v1/models"))["data"]
    return {model["id"]: model.get("owned_by") for model in listed}


def read_counters(settings: EndpointSettings) -> DraftCounters | None:
    """Read the server's counts of its drafts at `/metrics`, as vLLM gives them; `None` if there are none."""
    counted = vllm_counters(metrics(settings), settings.model)
    return counted if counted.accepted else None


def metrics(settings: EndpointSettings) -> str:
    """Return a server's page of counters, empty if it has none."""
    try:
        return fetch(f"{settings.root}/metrics")
    except ValueError:  # no such page
        return ""


def fetch(url: str, body: object = None) -> str:
    """Fetch the page at an address, or the answer to a JSON body.

    Raises:
        ValueError: If the server does not answer.
    """
    with _opened(url, body) as response:
        return response.read().decode()


@contextmanager
def _opened(url: str, body: object) -> Iterator[HTTPResponse]:
    data = None if body is None else json.dumps(body).encode()
    try:
        with urlopen(Request(url, data, {"Content-Type": "application/json"})) as response:
            yield response
    except HTTPError as error:
        counts = error.read().decode(errors="replace")[:300]
        raise ValueError(f"{url} answers {error.code} ({counts}): ask for what the server has.") from error
    except (OSError, HTTPException) as error:
        raise ValueError(f"{url} does not answer ({error}): start the server, or look at its log.") from error


def ask(
    settings: EndpointSettings, messages: list[dict[str, str]], temperature: float, more: dict[str, Any]
) -> Answer:
    """Ask the server for the next turn of a conversation, and read its stream.

    Args:
        settings: The settings of the run.
        messages: The conversation.
        temperature: 0 is greedy.
        more: Further fields of the request.

    Raises:
        ValueError: If it refuses, or breaks off.
    """
    body = {
        "model": settings.model, "messages": messages, "max_tokens": settings.max_new_tokens, "top_p": 1.0,
        "temperature": temperature, "seed": settings.seed, "stream": True, "stream_options": {"include_usage": True},
        **more,
    }  # fmt: skip
    began, first, tokens, prompt, counted, pieces = time.perf_counter(), None, 0, None, None, []
    url = f"{settings.root}/v1/chat/completions"
    with _opened(url, body) as lines:
        for event in _events(lines):
            if error := event.get("error"):  # the status of a stream that has begun is always 200
                raise ValueError(f"{url} breaks off ({str(error)[:300]}): look at its log.")
            usage = event.get("usage") or {}
            tokens, prompt = usage.get("completion_tokens", tokens), usage.get("prompt_tokens", prompt)
            counted = sglang_counted(event) or counted
            delta = event["choices"][0]["delta"] if event.get("choices") else {}
            content = delta.get("content") or ""
            if first is None and (content or delta.get("reasoning_content") or delta.get("reasoning")):
                first = time.perf_counter()
            pieces.append(content)
    ended = time.perf_counter()
    return Answer("".join(pieces), tokens, ended - began, (first or ended) - began, counted, prompt)


def _events(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    for line in lines:
        data = line.removeprefix(b"data:").strip()
        if line.startswith(b"data:") and data != b"[DONE]":
            yield json.loads(data)


def converse(
    settings: EndpointSettings, turns: Sequence[str], temperature: float, more: dict[str, Any]
) -> list[Answer]:
    """Ask every turn of a prompt; each continues from the server's own answers."""
    messages: list[dict[str, str]] = []
    answers: list[Answer] = []
    for turn in turns:
        messages.append({"role": "user", "content": turn})
        answers.append(ask(settings, messages, temperature, more))
        messages.append({"role": "assistant", "content": answers[-1].text})
    return answers


def measure(
    settings: EndpointSettings, prompts: Sequence[Sequence[str]], temperature: float, concurrency: int
) -> dict[str, Any]:
    """Measure one run over some prompts."""
    more = SGLANG_OPTIONS if served_models(settings).get(settings.model) == "sglang" else {}
    before, began = metrics(settings), time.perf_counter()
    with ThreadPoolExecutor(concurrency) as pool:
        conversations = list(pool.map(lambda turns: converse(settings, turns, temperature, more), prompts))
    seconds, after = time.perf_counter() - began, metrics(settings)
    answers = [answer for answers in conversations for answer in answers]
    tokens = sum(answer.new_tokens for answer in answers)
    counts = counts_of_run(settings.model, [answer.counted for answer in answers], before, after)
    return {
        "temperature": temperature,
        "concurrency": concurrency,
        "answers": len(answers),
        "new_tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "median_seconds": median(answer.seconds for answer in answers),
        "median_first_seconds": median(answer.first_seconds for answer in answers),
        **counts._asdict(),
    }


def run_endpoint(settings: EndpointSettings, output: Path) -> list[dict[str, Any]]:
    """Ask every suite at every temperature and concurrency; write `endpoint.json` and `endpoint.md` into `output`.

    Raises:
        ValueError: If suites cannot be loaded, or the server does not answer, does not serve the target, or breaks
            off.
    """
    suites = {name: load_suite(name, settings.data, settings.limit) for name in settings.suites}
    check_server(settings)
    rows = [
        {"suite": name, **measure(settings, prompts, temperature, concurrency)}
        for temperature in settings.temperatures
        for concurrency in settings.concurrency
        for name, prompts in suites.items()
    ]
    run = {
        "date": date.today().isoformat(),
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "client": f"{hardware('cpu')}, Python {platform.python_version()}",
        **asdict(settings),
        "data": settings.data and Path(settings.data).name,
    }
    output.mkdir(parents=True, exist_ok=True)
    (output / "endpoint.json").write_text(json.dumps({"run": run, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    (output / "endpoint.md").write_text(markdown(run, rows), encoding="utf-8")
    return rows


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
