"""Suites against a server on loopback that speaks OpenAI's protocol and counts drafts as vLLM does."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from typer.testing import CliRunner

from hf_hyperdflash.benchmark.endpoint import (
    DraftCounters,
    EndpointSettings,
    check_server,
    measure,
    read_counters,
)
from hf_hyperdflash.cli.app import app

METRICS = """\
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
vllm:spec_decode_num_drafts_total{{engine="0",model_name="tiny"}} {rounds}
vllm:spec_decode_num_drafts_total{{engine="1",model_name="tiny"}} {rounds}
vllm:spec_decode_num_drafts_total{{engine="0",model_name="other"}} 1000.0
vllm:spec_decode_num_drafts_created{{engine="0",model_name="tiny"}} 1.7e+09
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",model_name="tiny",position="0"}} {first}
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",model_name="tiny",position="10"}} {last}
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",model_name="tiny",position="2"}} {first}
"""


class Server(ThreadingHTTPServer):
    """Answers "<question> 1 2" in three pieces, of which each question accepts one draft in its two rounds."""

    def __init__(self, counts: bool = True):
        super().__init__(("127.0.0.1", 0), Handler)
        self.counts, self.asked, self.at_once, self.most, self.lock = counts, [], 0, 0, threading.Lock()
        self.gate = threading.Barrier(2)  # requests that wait for each other
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    @property
    def root(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *args):
        pass

    def do_GET(self):
        count = len(self.server.asked)
        pages = {"/v1/models": json.dumps({"data": [{"id": "tiny"}, {"id": "small"}]})}
        if self.server.counts:
            pages["/metrics"] = METRICS.format(rounds=5.0 + count, first=3.0 + count, last=1.0)
        page = pages.get(self.path)
        self.send_response(404 if page is None else 200)
        self.end_headers()
        self.wfile.write((page or "").encode())

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        question = body["messages"][-1]["content"]
        with self.server.lock:
            self.server.asked.append(body)
            self.server.at_once += 1
            self.server.most = max(self.server.most, self.server.at_once)
        if "together" in question:
            self.server.gate.wait(10)
        if "too long" in question:
            self.send_response(400)
            self.end_headers()
            self.wfile.write(b'{"error": {"message": "longer than 1024"}}')
        else:
            self.send_response(200)
            self.end_headers()
            for piece in (None, question, " 1", " 2"):
                event = {"choices": [{"delta": {} if piece is None else {"content": piece}}]}
                self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
            self.wfile.write(b'data: {"choices": [], "usage": {"completion_tokens": 3}}\n\ndata: [DONE]\n\n')
        with self.server.lock:
            self.server.at_once -= 1


@pytest.fixture
def server():
    made = Server()
    yield made
    made.shutdown()
    made.server_close()


def settings(server, **fields):
    return EndpointSettings(**{"endpoint": server.root, "model": "tiny", "suites": ["gsm8k"], **fields})


def test_turns_go_on_from_the_servers_own_answers(server):
    figures = measure(settings(server, max_new_tokens=7, seed=3), [["one", "two"], ["three"]], 0.5, 1)
    chats = [[(m["role"], m["content"]) for m in body["messages"]] for body in server.asked]
    assert chats == [
        [("user", "one")],
        [("user", "one"), ("assistant", "one 1 2"), ("user", "two")],
        [("user", "three")],
    ]
    told = {"model": "tiny", "max_tokens": 7, "temperature": 0.5, "seed": 3, "top_p": 1.0, "stream": True}
    assert all(body[name] == value for body in server.asked for name, value in told.items())
    assert (figures["answers"], figures["new_tokens"], figures["concurrency"]) == (3, 9, 1)
    assert 0 < figures["median_first_seconds"] <= figures["median_seconds"] <= figures["seconds"]
    assert figures["tokens_per_second"] == pytest.approx(9 / figures["seconds"])


def test_the_servers_counters_of_this_run_and_of_this_target(server):
    assert read_counters(settings(server)) == DraftCounters(10.0, [3.0, 3.0, 1.0])  # positions by number
    figures = measure(settings(server), [["a"], ["b"], ["c"]], 0.0, 1)
    assert figures["rounds"] == 6 and figures["acceptance"] == [0.5, 0.5, 0.0] and figures["tau"] == 2.0


def test_a_server_that_counts_nothing(server):
    server.counts = False
    figures = measure(settings(server), [["a"]], 0.0, 1)
    assert figures["tau"] is None and figures["rounds"] is None and figures["acceptance"] == []


def test_counters_of_a_server_that_has_drafted_nothing_before():
    assert DraftCounters(4, [2.0, 1.0]).since(DraftCounters(0, [])) == DraftCounters(4, [2.0, 1.0])
    assert DraftCounters(0, []).tau is None and DraftCounters(0, []).acceptance == []


@pytest.mark.parametrize("concurrency", [1, 2])
def test_as_many_prompts_at_a_time_as_asked(server, concurrency):
    text = "together" if concurrency == 2 else "alone"  # those wait for each other: one at a time would never end
    measure(settings(server), [[f"{text} {number}"] for number in range(4)], 0.0, concurrency)
    assert server.most == concurrency


@pytest.mark.parametrize("ending", ["", "/", "/v1", "/v1/"])
def test_the_command(server, tmp_path, ending):
    (tmp_path / "gsm8k.jsonl").write_text('{"turns": ["What is 3 plus 4?"]}\n{"turns": ["What is 2 times 8?"]}\n')
    output = tmp_path / "new" / "out"
    result = CliRunner().invoke(
        app,
        ["benchmark", "--endpoint", server.root + ending, "--target", "tiny", "--output", str(output), "--data",
         str(tmp_path), "--temperature", "0", "--temperature", "1", "--concurrency", "1", "--concurrency", "2",
         "--limit", "2", "--max-new-tokens", "5"],
    )  # fmt: skip
    assert result.exit_code == 0, (result.output, result.exception)
    table = [line.split(" | ") for line in result.output.splitlines() if line.startswith("| GSM8K")]
    assert [cells[1:4] for cells in table] == [["0", "1", "2"], ["0", "2", "2"], ["1", "1", "2"], ["1", "2", "2"]]
    assert table[0][-2:] == ["2.00", "50.0 50.0 0.0 |"]
    assert (output / "endpoint.md").read_text() in result.output
    stored = json.loads((output / "endpoint.json").read_text())
    assert len(stored["rows"]) == 4 and stored["run"]["data"] == tmp_path.name and stored["run"]["limit"] == 2


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--endpoint", "localhost:8000"], "`--endpoint` is 'localhost:8000', expected an address"),
        (["--endpoint", "ROOT", "--target", "large"], "'large', but .* serves tiny, small: give one of these"),
        (["--endpoint", "http://127.0.0.1:1"], "127.0.0.1:1/v1/models does not answer .*: start the server"),
        (["--endpoint", "ROOT", "--drafter", "mine"], "`--drafter` is .*, but a server at `--endpoint` has its own"),
        (["--endpoint", "ROOT", "--mode", "think-high"], "`--mode` is .*, but a server at `--endpoint` has its own"),
        (["--concurrency", "2"], "`--concurrency` is .*, but only servers are asked so: add `--endpoint`"),
        (["--endpoint", "ROOT", "--data", "DATA/long"], r"answers 400 \(.*longer than 1024"),
    ],
)
def test_what_is_wrong_is_told(server, tmp_path, options, told):
    (tmp_path / "gsm8k.jsonl").write_text('{"turns": ["one"]}\n')
    (tmp_path / "long").mkdir()
    (tmp_path / "long" / "gsm8k.jsonl").write_text('{"turns": ["too long"]}\n')
    given = [option.replace("ROOT", server.root).replace("DATA", str(tmp_path)) for option in options]
    defaults = {"--target": "tiny", "--data": str(tmp_path), "--output": str(tmp_path / "out")}
    for name, value in defaults.items():
        given += [] if name in given else [name, value]
    result = CliRunner().invoke(app, ["benchmark", *given])
    with pytest.raises(ValueError, match=told) as caught:
        raise result.exception
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_a_server_that_serves_the_target(server):
    check_server(settings(server, model="small"))
