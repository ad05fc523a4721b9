"""A server of OpenAI's protocol, and many requests to it in flight, each of which is tried again where that can help.

It uses the standard library. A request is one POST whose answer comes whole, a thread waits for it, and what is worth
code is what to do when it fails, which no client does for us: `openai` tries again and counts nothing, and `httpx` is
what one `huggingface_hub` brings and the next one does not.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from itertools import islice
from queue import SimpleQueue
from typing import Any, TypeVar
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

Item = TypeVar("Item")
Answer = TypeVar("Answer")

FIRST_WAIT, LONGEST_WAIT = 1.0, 30.0  # seconds before a request is tried again; each wait is twice the one before
MAX_TRIES = 6  # of a request that reached the server
MAX_FAILED = 3  # requests in a row that failed so often, before the run ends
_LISTING_SECONDS = 30

_UNUSABLE = (401, 403, 404, 405)  # the key, or the address: no request will do better
_AWAY = (429, 502, 503)  # a server that is full or starts, or the proxy of one that is away
_FAILED = (408, 409, 425, *range(500, 600))  # other statuses from 400 are this request's own fault


class ServerError(ValueError):
    """A server's answer is an error, or it gives none. `status` is HTTP's, `None` without an answer; `is_away` is
    true if no server took the request."""

    def __init__(self, message: str, status: int | None = None, is_away: bool = False) -> None:
        super().__init__(message)
        self.status, self.is_away = status, is_away


class RequestRefused(ValueError):
    """The server refuses one request. Others go on."""


class RequestFailed(RequestRefused):
    """One request failed again and again. Others go on, until [`MAX_FAILED`] in a row fail so."""


@dataclass(frozen=True)
class Endpoint:
    """A server of OpenAI's protocol, as vLLM, SGLang and llama.cpp have one, and the name of a model there.

    If the environment has `OPENAI_API_KEY`, it goes along with each request.
    """

    endpoint: str
    model: str

    def __post_init__(self) -> None:
        if not self.endpoint.startswith(("http://", "https://")):
            raise ValueError(f"`--endpoint` is {self.endpoint!r}, expected an address: http://localhost:8000.")

    @property
    def root(self) -> str:
        """The address without `/v1`."""
        return self.endpoint.rstrip("/").removesuffix("/v1")

    def target(self) -> str:
        """Return what is served: vLLM and SGLang tell the repository or the folder, others only their name of it."""
        return self.models().get(self.model, {}).get("root") or self.model

    def models(self) -> dict[str, dict[str, Any]]:
        """Return the models that the server serves, with what it says of each: `owned_by` is the server's kind."""
        url = f"{self.root}/v1/models"
        listed = fetch_json(url, timeout=_LISTING_SECONDS).get("data")
        if not isinstance(listed, list) or not all(isinstance(model, dict) and "id" in model for model in listed):
            raise ValueError(f"{url} lists no models: expected the address of a server of OpenAI's protocol.")
        return {model["id"]: model for model in listed}


def find_endpoint(address: str, model: str | None = None, option: str = "--model") -> Endpoint:
    """Return the endpoint of a server's model, by default its only one. Raise a `ValueError` that names the `option`
    if the server does not have it. One that lists none (`transformers serve` of a folder) has whatever is named."""
    models = Endpoint(address, "").models()
    if not models and model is None:
        raise ValueError(f"{address} lists no model: name what it serves with `{option}`.")
    if models and model not in models and (model is not None or len(models) != 1):
        raise ValueError(f"{address} serves {', '.join(models)}: name one of these with `{option}`.")
    return Endpoint(address, model or next(iter(models)))


class Requests:
    """Many requests to a server in flight.

    A request that fails is tried again after 1, 2, 4, .. and at most 30 seconds. One that failed 6 times is given up,
    and so is the run after three such ones without an answer between them. While the server is away (nobody takes the
    connection, or it says that it is full), nothing is given up for as long as an answer may take.

    Args:
        endpoint: The server, and the model that is asked.
        concurrency: How many requests are in flight.
        timeout: Seconds that an answer may take, and that the server may be away.
        report: Gets a line when requests are tried again; by default it is written to stderr.

    Attributes:
        retried: How often a request was tried again.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        concurrency: int = 64,
        timeout: float = 600,
        report: Callable[[str], object] | None = None,
    ) -> None:
        self.endpoint, self.concurrency, self.timeout = endpoint, concurrency, timeout
        self.report = report or (lambda line: print(line, file=sys.stderr))
        self.retried = 0
        self._lock = threading.Lock()
        self._here = threading.local()  # has, in a thread of `map`, what says that nobody waits for it any more

    def post(self, path: str, body: Mapping[str, object]) -> dict[str, Any]:
        """Ask the server's model, and return the answer; several threads may call this.

        Args:
            path: Where to: `/v1/chat/completions`, say.
            body: The request, without `model`.

        Returns:
            The answer, which is a JSON object.

        Raises:
            RequestRefused: if the request is wrong, or fails again and again.
            ServerError: if no request can do better: a wrong key, an address that there is not, or no server.
        """
        url, stopped = f"{self.endpoint.root}{path}", getattr(self._here, "stopped", None) or threading.Event()
        tries, waits, away_since = 0, 0, None
        while not stopped.is_set():
            try:
                return fetch_json(url, {"model": self.endpoint.model, **body}, self.timeout)
            except ServerError as error:
                if stopped.is_set():
                    break
                if error.status in _UNUSABLE:
                    raise
                if error.status is not None and error.status >= 400 and error.status not in (*_FAILED, *_AWAY):
                    raise RequestRefused(str(error)) from error
                now = time.monotonic()
                if error.is_away:
                    away_since = away_since or now
                    if now - away_since > self.timeout:
                        raise ServerError(
                            f"{error} It was tried for {self.timeout:g} seconds. The same command goes on from here.",
                            is_away=True,
                        ) from error
                else:
                    tries, away_since = tries + 1, None
                    if tries == MAX_TRIES:
                        raise RequestFailed(f"{error} It was tried {tries} times.") from error
                self._count(error)
            stopped.wait(min(FIRST_WAIT * 2**waits, LONGEST_WAIT))
            waits += 1
        raise RequestRefused("Nobody waits for this answer any more.")

    def _count(self, error: ServerError) -> None:
        with self._lock:
            self.retried += 1
            retried = self.retried
        if retried.bit_count() == 1:  # whenever their number has doubled
            self.report(f"{error} Trying again (so far {retried} times).")

    def map(
        self, ask: Callable[[Item], Answer], items: Iterable[Item]
    ) -> Iterator[tuple[Item, Answer | RequestRefused]]:
        """Yield each item with what `ask` returns of it, as soon as that is known. `ask` runs in threads, of as many
        items as may be in flight, and calls [`post`]. Further items are taken when there is room for them.

        If `ask` raises [`RequestRefused`], this is what is yielded of the item; other errors are raised."""
        todo, done = SimpleQueue[list[Item]](), SimpleQueue[tuple[Item, Any]]()
        stopped = threading.Event()

        def work() -> None:
            self._here.stopped = stopped
            while given := todo.get():
                try:
                    done.put((given[0], ask(given[0])))
                except BaseException as error:  # which the caller gets
                    done.put((given[0], error))

        left, threads, in_flight, failed, is_over = iter(items), 0, 0, 0, False
        try:
            while True:
                while in_flight < self.concurrency and not is_over:
                    given = list(islice(left, 1))
                    is_over = not given
                    if given:
                        todo.put(given)
                        in_flight += 1
                    if in_flight > threads:
                        # A daemon: Ctrl-C waits for no answer, as it would with a pool of `concurrent.futures`.
                        threading.Thread(target=work, daemon=True).start()
                        threads += 1
                if not in_flight:
                    return
                item, answer = done.get()
                in_flight -= 1
                if isinstance(answer, BaseException) and not isinstance(answer, RequestRefused):
                    raise answer
                failed = failed + 1 if isinstance(answer, RequestFailed) else 0
                if failed == MAX_FAILED:
                    raise ServerError(f"{answer} {failed} requests in a row failed so: look at the server's log.")
                yield item, answer
        finally:
            stopped.set()
            for _ in range(threads):
                todo.put([])


def fetch_json(url: str, body: object = None, timeout: float | None = None) -> dict[str, Any]:
    """Fetch the JSON object at an address, or the answer to a JSON body."""
    page = fetch(url, body, timeout)
    try:
        found = json.loads(page)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ServerError(
            f"{url} answers {page[:100]!r}, expected a JSON object: is it a server of OpenAI's protocol?"
        )
    return found


def fetch(url: str, body: object = None, timeout: float | None = None) -> str:
    """Fetch the page at an address, or the answer to a JSON body."""
    with opened(url, body, timeout) as response:
        return response.read().decode(errors="replace")


@contextmanager
def opened(url: str, body: object = None, timeout: float | None = None) -> Iterator[HTTPResponse]:
    """Open the page at an address, or the answer to a JSON body. A [`ServerError`] says what goes wrong, until the
    response is read."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    if key := os.environ.get("OPENAI_API_KEY"):
        headers["Authorization"] = f"Bearer {key}"
    try:
        with urlopen(Request(url, data, headers), timeout=timeout) as response:
            yield response
    except HTTPError as error:
        why = error.reason
        with suppress(OSError, HTTPException):
            why = error.read().decode(errors="replace")[:300] or why
        is_key = error.code in (401, 403)
        advice = "set OPENAI_API_KEY to the server's key" if is_key else "ask for what the server has"
        message = f"{url} answers {error.code} ({why}): {advice}."
        raise ServerError(message, error.code, error.code in _AWAY) from error
    except TimeoutError as error:
        raise ServerError(f"{url} gives no answer within {timeout:g} seconds: look at the server's log.") from error
    except (OSError, HTTPException) as error:
        # urlopen's own error is one of the connection; others come from a server that has the request.
        reason = getattr(error, "reason", error)
        cause = getattr(reason, "strerror", None) or reason
        message = f"{url} does not answer ({cause}): start the server, or look at its log."
        raise ServerError(message, is_away=isinstance(error, URLError)) from error
