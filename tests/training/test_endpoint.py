"""Requests in flight to a real server on loopback that fails, hangs, cuts the connection, dies and comes back."""

import json
import subprocess
import sys
import threading
import time

import pytest

from hf_hyperdflash.training.data import endpoint as endpoints
from hf_hyperdflash.training.data.endpoint import (
    Endpoint,
    RequestFailed,
    RequestRefused,
    Requests,
    ServerError,
    find_endpoint,
)

from ..helpers.loopback import Server, serving
from ..helpers.refusals import Refusal

PATH = "/v1/completions"


class Troubled(Server):
    """Says after each number whether it is even. `troubles` has what goes wrong first, by number: statuses, `None` for
    a cut connection, a text for a page that is no JSON, and an event to wait for."""

    def __init__(self, troubles=None, barrier=None, **options):
        self.troubles, self.barrier = troubles or {}, barrier
        self.inside, self.together = 0, 0
        super().__init__(**options)

    def answer(self, path, body):
        with self.lock:
            self.asked.append(body["prompt"])
            self.inside += 1
            self.together = max(self.together, self.inside)
            troubles = self.troubles.get(body["prompt"], [])
            trouble = troubles.pop(0) if troubles else 200
        if self.barrier:
            self.barrier.wait(20)
        if isinstance(trouble, threading.Event):
            trouble.wait(20)
            trouble = None
        with self.lock:
            self.inside -= 1
        if isinstance(trouble, str):
            return 200, trouble
        return trouble, json.dumps({"even": body["prompt"] % 2 == 0} if trouble == 200 else {"error": "so it is"})


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(endpoints, "FIRST_WAIT", 0.01)
    monkeypatch.setattr(endpoints, "LONGEST_WAIT", 0.05)


def answered(server, numbers, concurrency=4, timeout=5.0):
    """The answers by number, the client, and the lines that it reported."""
    lines = []
    client = Requests(Endpoint(server.root, "tiny"), concurrency, timeout, report=lines.append)
    found = list(client.map(lambda number: client.post(PATH, {"prompt": number})["even"], numbers))
    assert len(dict(found)) == len(found)  # each once
    return dict(found), client, lines


@pytest.mark.parametrize("concurrency", [1, 8])
def test_as_many_requests_as_told_are_in_flight(concurrency):
    taken = []

    def numbers():
        for number in range(32):
            taken.append(number - len(server.asked))  # how far ahead of the server items are read
            yield number

    with serving(Troubled(barrier=threading.Barrier(concurrency))) as server:  # fewer at a time would never end
        found, client, lines = answered(server, numbers(), concurrency, timeout=30.0)
    assert found == {number: number % 2 == 0 for number in range(32)}
    assert server.together == concurrency and max(taken) <= concurrency
    assert (client.retried, lines) == (0, [])


def test_what_fails_is_tried_again_with_growing_waits_and_counted(monkeypatch):
    waits = []
    monkeypatch.setattr(threading.Event, "wait", lambda event, seconds=None, wait=threading.Event.wait: (
        waits.append(seconds) if seconds in (0.01, 0.02, 0.04, 0.05) else None, wait(event, seconds))[1])  # fmt: skip
    troubles = {3: [500, None, "<html>", "[1]"], 4: [503, 429], 5: [408]}
    with serving(Troubled({number: list(each) for number, each in troubles.items()})) as server:
        found, client, lines = answered(server, range(8), concurrency=1)
    assert found == {number: number % 2 == 0 for number in range(8)}
    assert waits == [0.01, 0.02, 0.04, 0.05, 0.01, 0.02, 0.01]
    assert client.retried == 7 and len(server.asked) == 15
    assert len(lines) == 3 and "500" in lines[0] and "so far 4 times" in lines[2]


def test_a_request_that_is_refused_is_asked_once_and_others_go_on():
    with serving(Troubled({number: [400 + number] for number in (0, 13, 22)})) as server:
        found, client, _ = answered(server, range(24))
    refused = {number: answer for number, answer in found.items() if isinstance(answer, RequestRefused)}
    assert refused.keys() == {0, 13, 22} and "413" in str(refused[13]) and "so it is" in str(refused[13])
    assert client.retried == 0 and len(server.asked) == 24


def test_one_that_always_fails_is_given_up_and_others_go_on():
    with serving(Troubled({5: [500] * 100})) as server:
        found, client, _ = answered(server, range(12), concurrency=1)
    assert isinstance(found.pop(5), RequestFailed) and len(found) == 11
    assert client.retried == endpoints.MAX_TRIES - 1


def test_a_server_that_only_fails_ends_the_run():
    with serving(Troubled({number: [500] * 100 for number in range(100)})) as server:
        Refusal(lambda: answered(server, range(100)), ("500", "so it is", "in a row", "log"), ServerError).check()
    assert len(server.asked) < 100


def test_a_hanging_answer_is_asked_for_again():
    gone = threading.Event()
    try:
        with serving(Troubled({2: [gone]})) as server:
            found, client, lines = answered(server, range(4), timeout=0.5)
    finally:
        gone.set()
    assert found[2] is True and client.retried == 1 and "0.5 seconds" in lines[0]


def test_a_server_that_dies_comes_back_and_the_run_goes_on():
    first = Troubled()

    def numbers():
        yield from range(6)
        first.shutdown()
        first.server_close()
        threading.Timer(0.3, lambda: seconds.append(Troubled(port=first.server_port))).start()
        yield from range(6, 40)

    seconds = []
    found, client, _ = answered(first, numbers())
    with serving(seconds[0]) as second:
        assert found == {number: number % 2 == 0 for number in range(40)}
        assert client.retried > 3 and len(first.asked) + len(second.asked) == 40


def test_a_server_that_stays_away_ends_the_run_in_a_line():
    with serving(Troubled()) as server:
        pass
    began = time.monotonic()
    words = (server.root, "0.3 seconds", "The same command")
    Refusal(lambda: answered(server, range(9), timeout=0.3), words, ServerError).check()
    assert time.monotonic() - began >= 0.3


@pytest.mark.parametrize(("status", "words"), [(401, ("OPENAI_API_KEY",)), (404, (PATH,))])
def test_what_no_request_can_do_better_ends_the_run(status, words):
    with serving(Troubled({0: [status]})) as server:
        Refusal(lambda: answered(server, range(9), concurrency=1), (str(status), *words), ServerError).check()
    assert len(server.asked) == 1


def test_a_caller_that_stops_leaves_nothing_behind(monkeypatch):
    monkeypatch.setattr(endpoints, "FIRST_WAIT", 60.0)  # nobody waits so long before the request is tried again
    monkeypatch.setattr(endpoints, "LONGEST_WAIT", 60.0)
    with serving(Troubled({number: [500] * 100 for number in range(1, 9)})) as server:
        client = Requests(Endpoint(server.root, "tiny"), 4, 5.0, report=lambda line: None)
        running = threading.active_count()
        with pytest.raises(ZeroDivisionError):
            for _ in client.map(lambda number: client.post(PATH, {"prompt": number}), range(100)):
                raise ZeroDivisionError
        until = time.monotonic() + 5
        while threading.active_count() > running and time.monotonic() < until:
            time.sleep(0.01)
        assert threading.active_count() == running
        assert dict(client.map(lambda number: number, "ab")) == {"a": "a", "b": "b"}  # it can be used again
        monkeypatch.setattr(endpoints, "FIRST_WAIT", 0.01)
        server.troubles[9] = [500]
        assert client.post(PATH, {"prompt": 9}) == {"even": False} and server.asked.count(9) == 2


STOPPED = """
import os, signal, sys, threading
from hf_hyperdflash.training.data.endpoint import Endpoint, Requests
requests = Requests(Endpoint(sys.argv[1], "tiny"), 4)
signal.signal(signal.SIGINT, signal.default_int_handler)
threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
list(requests.map(lambda number: requests.post("/v1/completions", {"prompt": number}), range(9)))
"""


def test_ctrl_c_waits_for_no_answer():
    gone = threading.Event()
    try:
        with serving(Troubled({number: [gone] for number in range(9)})) as server:
            command = [sys.executable, "-c", STOPPED, server.root]  # would wait for 20 seconds
            ended = subprocess.run(command, capture_output=True, text=True, check=False)
            assert not gone.is_set() and len(server.asked) == 4 and server.inside == 4
    finally:
        gone.set()
    assert "KeyboardInterrupt" in ended.stderr


def test_a_model_is_found_or_the_servers_models_are_named():
    with serving(Troubled(models=("tiny",))) as server:
        assert find_endpoint(f"{server.root}/v1/").model == "tiny" and find_endpoint(server.root, "tiny").root
        Refusal(lambda: find_endpoint(server.root, "large"), ("tiny", "`--model`")).check()
    with serving(Troubled(models=())) as server:
        assert find_endpoint(server.root, "folder").model == "folder"
        Refusal(lambda: find_endpoint(server.root), (server.root, "`--model`")).check()
    with serving(Troubled()) as server:
        Refusal(
            lambda: find_endpoint(server.root, option="--served-model"), ("tiny, small", "`--served-model`")
        ).check()
        Refusal(lambda: find_endpoint(f"{server.root}/x"), ("404",)).check()
    Refusal(lambda: find_endpoint("localhost:8000"), ("'localhost:8000'", "http://")).check()
    Refusal(lambda: find_endpoint("http://127.0.0.1:1"), ("127.0.0.1:1/v1/models", "start")).check()


def test_the_key_of_the_environment_goes_along(monkeypatch):
    seen = []

    class Keyed(Troubled):
        def finish_request(self, request, address):
            seen.append(request.recv(4096, 2).decode())  # 2: MSG_PEEK
            super().finish_request(request, address)

    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    with serving(Keyed(models=("tiny",))) as server:
        find_endpoint(server.root)
    assert "Authorization: Bearer secret" in seen[0]
