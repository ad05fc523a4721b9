"""`hf-hyperdflash answers --endpoint`: what a real server on loopback answers is written, each row right and once,
whoever is killed in between."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import pytest
from transformers import AutoTokenizer

from hf_hyperdflash.cli.app import app
from hf_hyperdflash.training.data import endpoint as endpoints
from hf_hyperdflash.training.data.endpoint import RequestRefused
from hf_hyperdflash.training.data.rows import prepare_dataset
from hf_hyperdflash.training.data.served_answers import read_answer

from ..conftest import MODELS
from ..helpers import loopback
from ..helpers.chats import chat
from ..helpers.loopback import Engine, serving
from ..helpers.refusals import Refusal

TARGET = MODELS / "tiny-deepseek-v4"
TOOL = {"name": "add", "parameters": {"type": "object", "properties": {}}}
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(endpoints, "FIRST_WAIT", 0.01)
    monkeypatch.setattr(endpoints, "LONGEST_WAIT", 0.05)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


@pytest.fixture
def ask(tmp_path):
    """Run the command over rows, and return the rows that are written."""

    def run(server, rows, *options, output="answers.jsonl"):
        (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
        app(arguments(tmp_path, getattr(server, "root", server), output, *options), standalone_mode=False)
        return [json.loads(line) for line in (tmp_path / output).read_text().splitlines()]

    return run


def arguments(folder, root, output="answers.jsonl", *options):
    given = ["answers", "--endpoint", root, "--data", folder / "data.jsonl", "--output", folder / output, *options]
    return list(map(str, given))


def turns(*questions):
    return {"turns": list(questions)}


def said(row):
    return [message["content"] for message in row["messages"]]


def numbers(count):
    return [turns(f"question {number}") for number in range(count)]


def test_every_setting_goes_to_the_server(ask):
    with serving(Engine()) as server:
        settings = ["--temperature", 0.5, "--top-p", 0.9, "--max-new-tokens", 7, "--seed", 3, "--model", "tiny"]
        settings += ["--question-suffix", "!"]
        rows = ask(server, [{"question": "one", "answer": "x"}, turns("two", "three")], *settings)
        asked = {body["messages"][-1]["content"]: body for body in server.asked}
        again = ask(server, [turns("one!"), turns("two", "three")], *settings, output="again.jsonl")
    expected = [["one!", "one! 1 2"], ["two", "two 1 2", "three", "three 1 2"]]
    assert sorted(map(said, rows)) == expected == sorted(map(said, again))
    told = {"model": "tiny", "temperature": 0.5, "top_p": 0.9, "top_k": -1, "max_tokens": 7, "return_token_ids": True,
            "chat_template_kwargs": {"thinking": False, "enable_thinking": False}}  # fmt: skip
    for question in ("one!", "two", "three"):
        assert {**asked[question], "messages": None, "seed": None} == {**told, "messages": None, "seed": None}
    seeds = [asked[question]["seed"] for question in ("one!", "two", "three")]
    assert len(set(seeds)) == 3 and {body["seed"] for body in server.asked if "seed" in body} == set(seeds)


def test_rows_have_the_servers_own_tokens(ask, capsys):
    with serving(Engine()) as server:
        rows = {len(row["messages"]): row for row in ask(server, [turns("ab"), turns("ab", "abc")])}
    assert rows[2]["input_ids"] == [102, 1, 2, 3] and rows[2]["loss_mask"] == [0, 1, 1, 1]
    # The second prompt, as this server writes it, does not begin with the first one and its answer.
    assert rows[4]["input_ids"] == [102, 106, 103, 1, 2, 3] and rows[4]["loss_mask"] == [0, 0, 0, 1, 1, 1]
    assert "token ids" not in capsys.readouterr().err


class Engines(Engine):
    """A prompt begins with the earlier prompts and answers."""

    def reply(self, body):
        told = super().reply(body)
        told["prompt_token_ids"] = [9] + [token for _ in body["messages"][2::2] for token in (1, 2, 3, 9)]
        return told


def test_an_earlier_answer_is_trained_on_if_its_tokens_are_in_the_last_prompt(ask):
    with serving(Engines()) as server:
        (row,) = ask(server, [turns("a", "b", "c")])
    assert row["input_ids"] == [9, 1, 2, 3] * 3 and row["loss_mask"] == [0, 1, 1, 1] * 3
    prepared = prepare_dataset([row], None, max_length=64)
    assert prepared[0]["input_ids"] == row["input_ids"] and prepared[0]["loss_mask"] == row["loss_mask"]


def test_rows_with_another_targets_tokens_are_tokenized_again(ask, caplog):
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    with serving(Engine()) as server:
        rows = ask(server, [turns("How many?")])
    (theirs,) = prepare_dataset(rows, tokenizer, max_length=64)
    (alone,) = prepare_dataset([{"messages": rows[0]["messages"]}], tokenizer, max_length=64)
    assert theirs == alone and "Tokenized again are 1 of 1 rows" in caplog.text
    caplog.clear()
    as_it_is = {name: value for name, value in rows[0].items() if name != "prompt_id"}  # a row of somebody else
    assert prepare_dataset([as_it_is], tokenizer, max_length=64)[0]["input_ids"] == rows[0]["input_ids"]
    ours = {**rows[0], "input_ids": alone["input_ids"], "loss_mask": alone["loss_mask"]}
    assert prepare_dataset([ours], tokenizer, max_length=64)[0] == alone
    assert "Tokenized again" not in caplog.text


@pytest.mark.parametrize(
    ("refuses", "words"),
    [(["return_token_ids"], ["return_token_ids", "tokenizes the text again"]),
     (["return_token_ids", "chat_template_kwargs"], ["chat_template_kwargs, return_token_ids"])],
)  # fmt: skip
def test_a_server_that_takes_less_is_asked_for_less_and_lines_say_so(ask, capsys, refuses, words):
    class Texts(Engine):
        def reply(self, body):
            told = super().reply(body)
            del told["prompt_token_ids"], told["choices"][0]["token_ids"]
            return told

    with serving(Texts(refuses=refuses)) as server:
        (row,) = ask(server, [turns("ab")])
        assert said(row) == ["ab", "ab 1 2"] and "input_ids" not in row and server.asked[-1]["max_tokens"] == 256
        lines = capsys.readouterr().err
        assert [word for word in (server.root, "gives no token ids", *words) if word not in lines] == []
        if "chat_template_kwargs" in refuses:
            refusal = Refusal(ask, ("`--thinking`", server.root))
            refusal.check(server, [turns("b")], "--thinking", output="b.jsonl")


def test_reasoning_and_calls_are_kept_as_fields(ask):
    class Callers(Engine):
        def message(self, body):
            question = body["messages"][-1]["content"]
            if question == "call":
                return {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning": "so"}
            if question == "raw":
                return {"role": "assistant", "content": "<think>so</think>yes"}
            return {"role": "assistant", "content": "yes", "reasoning_content": "so"}

    rows = [{"messages": chat("call", "x", "more", "y"), "tools": [TOOL]}, turns("raw"), turns("field", "field")]
    with serving(Callers()) as server:
        found = {row["messages"][0]["content"]: row for row in ask(server, rows, "--thinking")}
    assert [body["tools"] for body in server.asked if "tools" in body] == [[{"type": "function", "function": TOOL}]]
    answer = {"role": "assistant", "content": "yes", "reasoning_content": "so"}
    assert found["raw"]["messages"][1] == answer == found["field"]["messages"][3] and not found["raw"]["truncated"]
    assert found["call"]["messages"][1:] == [{**answer, "content": "", "tool_calls": [CALL]}]  # it ends there
    sent = next(body for body in server.asked if len(body["messages"]) == 3)
    assert sent["messages"][1] == answer and sent["chat_template_kwargs"]["enable_thinking"] is True
    tokenizer = AutoTokenizer.from_pretrained(TARGET)  # what is written can be trained on as text, too
    texts = [{name: value for name, value in row.items() if "mask" not in name} for row in found.values()]
    assert len(prepare_dataset(texts, tokenizer, max_length=512)) == 3


def told(finish_reason="stop", **message):
    return {"choices": [{"finish_reason": finish_reason, "message": {"role": "assistant", **message}}]}


@pytest.mark.parametrize(
    ("answer", "thinking", "expected", "truncated"),
    [(told(content="yes"), False, {"content": "yes"}, False),
     (told("length", content="ye\ufffd"), False, {"content": "ye"}, True),
     (told(content=None, reasoning="so"), True, {"content": "", "reasoning_content": "so"}, True),
     (told("length", content="<think>so"), True, {"content": "", "reasoning_content": "so"}, True),
     (told(content="so</think>yes"), True, {"content": "yes", "reasoning_content": "so"}, False),
     (told(content="yes", reasoning="so"), False, {"content": "yes", "reasoning_content": "so"}, False)],
)  # fmt: skip
def test_what_a_server_says_is_read(answer, thinking, expected, truncated):
    assert read_answer(answer, thinking) == ({"role": "assistant", **expected}, truncated)


@pytest.mark.parametrize(
    ("answer", "word"),
    [({}, "choices"), ({"choices": []}, "choices"), (told("content_filter", content=""), "content_filter"),
     (told(None, content="x"), "None"), (told(content="yes"), "--reasoning-parser"),
     (told("length", content="ye"), "--reasoning-parser")],
)  # fmt: skip
def test_what_is_no_answer_is_refused(answer, word):
    Refusal(lambda: read_answer(answer, True), (word,), RequestRefused).check()


def test_a_model_that_does_not_reason_ends_the_run(ask, tmp_path):
    with serving(Engine()) as server:
        Refusal(lambda: ask(server, numbers(100), "--thinking"), ("`--thinking`", "1 2", "--reasoning-parser")).check()
    assert len(server.asked) < 100 and (tmp_path / "answers.jsonl").read_text() == ""


def test_prompts_without_an_answer_are_counted_and_asked_for_again(ask, capsys):
    troubles = {
        "question 3": [400],
        "question 5": [500, None, 503],
        "question 7": [500] * 6,
        "late": [400],
        "later": [500] * 6,
    }
    rows = [*numbers(9), turns("first", "late"), turns("start", "later")]
    with serving(Engine(troubles)) as server:
        found = ask(server, rows, "--concurrency", 4)
        told = capsys.readouterr().err
        assert "13 requests were tried again. 3 prompts have no answer, the first of them because" in told
        assert sorted(said(row)[0] for row in found) == sorted(
            ["first", *(f"question {number}" for number in range(9) if number not in (3, 7))]
        )
        assert ["first", "first 1 2"] in map(said, found)  # up to the turn that the server refuses
        again = ask(server, rows)
    assert len(again) == 11 and again[:8] == found and ["start", "start 1 2", "later", "later 1 2"] in map(said, again)
    assert "tried again" not in capsys.readouterr().err


def test_nothing_is_written_of_a_prompt_that_is_too_long(ask, capsys):
    with serving(Engine()) as server:
        long = {"messages": [{"role": "system", "content": "s"}, *chat("long", "x")]}
        assert len(ask(server, [long, turns("d")], "--max-prompt-length", 1, output="one.jsonl")) == 1
        assert "1 prompts have no answer" in (lines := capsys.readouterr().err) and "a prompt has 2 tokens" in lines
    with serving(Engines()) as server:
        found = ask(server, [turns("a", "b", "c"), turns("d")], "--max-prompt-length", 5)
    assert sorted(map(said, found)) == [["a", "a 1 2", "b", "b 1 2"], ["d", "d 1 2"]]
    assert [len(row["input_ids"]) for row in sorted(found, key=said)] == [8, 4]


def test_all_refused_is_an_error(ask):
    with serving(Engine({f"question {number}": [400] for number in range(5)})) as server:
        Refusal(lambda: ask(server, numbers(5)), ("No prompt", "400", "so it is")).check()


@contextmanager
def killable(port, seconds):
    """A server in a process of its own."""
    process = subprocess.Popen([sys.executable, loopback.__file__, str(port), str(seconds)])
    try:
        until = time.monotonic() + 30
        while time.monotonic() < until:
            with socket.socket() as probe:
                if not probe.connect_ex(("127.0.0.1", port)):
                    break
            time.sleep(0.02)
        yield process
    finally:
        process.kill()
        process.wait()


def test_a_server_that_is_killed_and_comes_back_costs_no_row(ask, tmp_path, capsys):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    over = threading.Event()

    def trouble():
        for _ in range(4):
            with killable(port, 0.02) as server:
                over.wait(0.4)
                server.send_signal(signal.SIGKILL)
        with killable(port, 0.0):
            over.wait(60)

    threading.Thread(target=trouble).start()
    try:
        until = time.monotonic() + 30
        while not socket.socket().connect_ex(("127.0.0.1", port)) == 0 and time.monotonic() < until:
            time.sleep(0.01)
        rows = ask(f"http://127.0.0.1:{port}", numbers(300), "--concurrency", 4)
    finally:
        over.set()
    assert sorted(map(said, rows)) == sorted([f"question {n}", f"question {n} 1 2"] for n in range(300))
    assert "tried again" in capsys.readouterr().err


def test_a_client_that_is_killed_goes_on_with_each_row_once(ask, tmp_path):
    """kill -9 of the command's own process, which takes seconds to start."""
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, numbers(400))))
    output = tmp_path / "answers.jsonl"
    with serving(Engine(seconds=0.05)) as server:
        command = [sys.executable, "-m", "hf_hyperdflash.cli.app", *arguments(tmp_path, server.root)]
        process = subprocess.Popen([*command, "--concurrency", "4"], stderr=subprocess.PIPE, env={**os.environ})
        try:
            until = time.monotonic() + 300
            while time.monotonic() < until and process.poll() is None:
                if output.exists() and output.read_bytes().count(b"\n") > 50:
                    break
                time.sleep(0.01)
        finally:
            process.kill()
        _, told = process.communicate()
        kept = output.read_text().splitlines()
        assert process.returncode == -signal.SIGKILL and 50 < len(kept) < 400, told.decode()
        with output.open("a") as file:
            file.write(kept[0][:40])  # as a kill in the middle of a line would leave it
        rows = ask(server, numbers(400), "--concurrency", 16)
    assert sorted(map(said, rows)) == sorted([f"question {n}", f"question {n} 1 2"] for n in range(400))
    assert [json.loads(line) for line in kept] == rows[: len(kept)]


def test_another_server_of_the_same_model_goes_on_and_one_of_another_is_refused(ask, tmp_path):
    def listed(name, root):
        server = Engine(models=(name,))
        server.more = {"root": root} if root else {}
        return server

    with serving(listed("a", "org/target")) as server:
        first = ask(server, numbers(3))
    with serving(listed("b", "/models/target")) as server:
        assert len(ask(server, numbers(5))) == 5
    for name, root, given in (
        ("c", "org2/target2", ()), ("c", "org2/target", ()), ("a", None, ()), ("a", "org/target", ("--top-p", 0.5))
    ):  # fmt: skip
        with serving(listed(name, root)) as server:
            words = ("answers.jsonl", "--top-p" if given else "the target was", "--output")
            Refusal(lambda server=server, given=given: ask(server, numbers(6), *given), words).check()
            assert server.asked == []  # before any work
    assert len((tmp_path / "answers.jsonl").read_text().splitlines()) == 5 and len(first) == 3
