"""Suites against a server on loopback that speaks OpenAI's protocol and counts drafts as vLLM does, or SGLang.

SGLang's own words are here as its server 0.5.23 wrote them for a small Qwen3 pair; `tests/serving/test_sglang.py` asks
the real one.
"""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from typer.testing import CliRunner

from hf_hyperdflash.benchmark import server as asked
from hf_hyperdflash.benchmark.server import DraftCounters, parse_sglang_counters, total, vllm_counters
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

SGLANG_MODEL = {"id": "tiny", "object": "model", "created": 1795556807, "owned_by": "sglang", "root": "tiny",
                "parent": None, "max_model_len": 512}  # fmt: skip
SGLANG_GAUGE = """\
# HELP sglang:spec_accept_length Mean acceptance length of speculative decoding (accepted drafts + bonus token per forward).
# TYPE sglang:spec_accept_length gauge
sglang:spec_accept_length{{engine_type="unified",model_name="tiny",moe_ep_rank="0",pp_rank="0",tp_rank="0"}} {latest}
# HELP sglang:spec_accept_rate Speculative acceptance rate (`accepted drafts / proposed drafts` in batch).
# TYPE sglang:spec_accept_rate gauge
sglang:spec_accept_rate{{engine_type="unified",model_name="tiny",moe_ep_rank="0",pp_rank="0",tp_rank="0"}} 0.2
"""  # noqa: E501
SGLANG_COUNTERS = """\
# HELP sglang:generation_tokens_total Number of generation tokens processed.
# TYPE sglang:generation_tokens_total counter
sglang:generation_tokens_total{{engine_type="unified",is_streaming="false",model_name="tiny"}} 8.0
sglang:generation_tokens_total{{engine_type="unified",is_streaming="true",model_name="tiny"}} {tokens}
# HELP sglang:spec_verify_calls_total Number of speculative decoding verification calls.
# TYPE sglang:spec_verify_calls_total counter
sglang:spec_verify_calls_total{{engine_type="unified",model_name="tiny"}} {rounds}
sglang:spec_verify_calls_total{{engine_type="unified",model_name="other"}} 1000.0
# HELP sglang:num_requests_total Number of requests processed.
# TYPE sglang:num_requests_total counter
sglang:num_requests_total{{engine_type="unified",is_streaming="false",model_name="tiny"}} 1.0
sglang:num_requests_total{{engine_type="unified",is_streaming="true",model_name="tiny"}} {requests}
"""
# The first answer's and the second one's, of further ones the second's again.
SGLANG_DETAILS = [
    {"spec_accept_rate": 0.19642857142857142, "spec_accept_length": 2.142857142857143, "spec_cap_length": 0.0,
     "spec_block_accept_length": 0.0, "spec_num_correct_drafts": 33, "spec_num_proposed_drafts": 168,
     "spec_verify_ct": 28, "spec_correct_drafts_histogram": [15, 7, 1, 2, 0, 0, 3], "spec_cap_lens_histogram": []},
    {"spec_accept_rate": 0.4270833333333333, "spec_accept_length": 3.5625, "spec_cap_length": 0.0,
     "spec_block_accept_length": 0.0, "spec_num_correct_drafts": 41, "spec_num_proposed_drafts": 96,
     "spec_verify_ct": 16, "spec_correct_drafts_histogram": [4, 1, 4, 0, 5, 0, 2], "spec_cap_lens_histogram": []},
]  # fmt: skip


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

    def models(self) -> list[dict]:
        return [{"id": "tiny"}, {"id": "small"}]

    def metrics(self) -> str | None:
        count = len(self.asked)
        return METRICS.format(rounds=5.0 + count, first=3.0 + count, last=1.0) if self.counts else None

    def last_events(self, body: dict) -> list[dict]:
        return [{"choices": [], "usage": {"completion_tokens": 3}}]


class SGLang(Server):
    """With each answer's counts if it is asked and has them, and with metrics if it was started so: counters, which
    came to SGLang before those, and its gauge."""

    def __init__(self, details: bool = True, counters: bool = True, latest: float | None = 2.225):
        self.details, self.counters, self.latest = details, counters, latest
        super().__init__()

    def models(self) -> list[dict]:
        return [SGLANG_MODEL]

    def metrics(self) -> str | None:
        count = len(self.asked)
        if self.latest is None:
            return None
        counted = SGLANG_COUNTERS.format(tokens=100.0 + 3 * count, rounds=40.0 + count, requests=7.0 + count)
        return SGLANG_GAUGE.format(latest=self.latest) + (counted if self.counters else "")

    def last_events(self, body: dict) -> list[dict]:
        told = SGLANG_DETAILS[min(len(self.asked), len(SGLANG_DETAILS)) - 1]
        usage = super().last_events(body)
        if not self.details or not body.get("return_spec_tokens_details"):
            return usage
        return [{"choices": [], "usage": None, "sglext": {"spec_tokens_details": told}}, *usage]


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *args):
        pass

    def do_GET(self):
        listed = json.dumps({"object": "list", "data": self.server.models()})
        page = {"/v1/models": listed, "/metrics": self.server.metrics()}.get(self.path)
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
            if "breaks off" in question:  # as vLLM and SGLang do
                self.wfile.write(b'data: {"error": {"message": "engine is dead", "code": 500}}\n\n')
            for event in self.server.last_events(body):
                self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
            self.wfile.write(b"data: [DONE]\n\n")
        with self.server.lock:
            self.server.at_once -= 1


@pytest.fixture
def serve():
    """Of a class of servers one, with its own arguments."""
    started = []

    def start(kind, **told):
        started.append(kind(**told))
        return started[-1]

    yield start
    for made in started:
        made.shutdown()
        made.server_close()


@pytest.fixture
def server(serve):
    return serve(Server)


def measure(server, prompts, temperature=0.0, concurrency=1, max_new_tokens=2048, seed=0):
    return asked.measure(asked.Server(server.root, "tiny", seed), prompts, temperature, concurrency, max_new_tokens)


def test_turns_go_on_from_the_servers_own_answers(server):
    figures = measure(server, [["one", "two"], ["three"]], 0.5, max_new_tokens=7, seed=3)
    chats = [[(m["role"], m["content"]) for m in body["messages"]] for body in server.asked]
    assert chats == [
        [("user", "one")],
        [("user", "one"), ("assistant", "one 1 2"), ("user", "two")],
        [("user", "three")],
    ]
    told = {"model": "tiny", "max_tokens": 7, "temperature": 0.5, "seed": 3, "top_p": 1.0, "stream": True}
    assert all(body[name] == value for body in server.asked for name, value in told.items())
    assert all("return_spec_tokens_details" not in body for body in server.asked)  # others may refuse such words
    assert (figures["answers"], figures["new_tokens"], figures["concurrency"]) == (3, 9, 1)
    assert 0 < figures["median_first_seconds"] <= figures["median_seconds"] <= figures["seconds"]
    assert figures["tokens_per_second"] == pytest.approx(9 / figures["seconds"])


def test_the_servers_counters_of_this_run_and_of_this_target(server):
    assert vllm_counters(server.metrics(), "tiny") == DraftCounters(10.0, [3.0, 3.0, 1.0])  # positions by number
    figures = measure(server, [["a"], ["b"], ["c"]])
    assert figures["rounds"] == 6 and figures["acceptance"] == [0.5, 0.5, 0.0] and figures["tau"] == 2.0
    assert figures["tau_of"] == "run"


def test_a_server_that_counts_nothing(server):
    server.counts = False
    figures = measure(server, [["a"]])
    assert figures["tau"] is None and figures["rounds"] is None and figures["acceptance"] == []
    assert figures["tau_of"] is None


@pytest.mark.parametrize("latest", [2.225, None])  # with `--enable-metrics` and without
def test_what_sglang_counts_of_each_answer(serve, latest):
    figures = measure(serve(SGLang, latest=latest), [["a", "b"]])
    # Of 28 rounds 13 accepted a draft, 6 two, 5 three, 3 four, five and six; of 16 rounds 12, 11, 7, 7, 2, 2.
    of = [13 + 12, 6 + 11, 5 + 7, 3 + 7, 3 + 2, 3 + 2]
    assert (figures["rounds"], figures["tau_of"]) == (28 + 16, "run")
    assert figures["acceptance"] == [count / 44 for count in of]
    assert figures["tau"] == pytest.approx(1 + (33 + 41) / 44)  # as its own totals have it


def test_answers_of_which_each_got_another_way_down_its_drafts():
    def told(*histogram):
        return parse_sglang_counters({"sglext": {"spec_tokens_details": {
            "spec_verify_ct": sum(histogram), "spec_correct_drafts_histogram": histogram
        }}})  # fmt: skip

    assert total([told(1, 0, 2), None, told(4), told(0, 1)]) == DraftCounters(8, [3, 2])
    assert total([parse_sglang_counters({"choices": []}), None]) is None


def test_an_sglang_that_counts_rounds_alone(serve):
    figures = measure(serve(SGLang, details=False), [["a"], ["b"], ["c"]])
    assert (figures["rounds"], figures["tau"], figures["acceptance"]) == (3, 2.0, [])  # 9 tokens, 3 by prompts
    assert figures["tau_of"] == "run"


def test_an_sglang_that_tells_its_latest_interval_alone(serve):
    figures = measure(serve(SGLang, details=False, counters=False), [["a"]])
    assert (figures["rounds"], figures["tau"], figures["acceptance"]) == (None, 2.225, [])
    assert figures["tau_of"] == "latest interval"


@pytest.mark.parametrize("latest", [0.0, None])
def test_an_sglang_that_does_not_draft_or_is_not_asked_to_tell(serve, latest):
    figures = measure(serve(SGLang, details=False, counters=False, latest=latest), [["a"]])
    assert (figures["rounds"], figures["tau"], figures["tau_of"]) == (None, None, None)


def test_a_latest_interval_is_called_that(serve, tmp_path):
    (tmp_path / "gsm8k.jsonl").write_text('{"turns": ["What is 3 plus 4?"]}\n')
    given = ["--target", "tiny", "--data", str(tmp_path), "--output", str(tmp_path / "out")]
    for told, cell in ((False, "| 2.23 (latest) | – |"), (True, "| 2.18 | 46.4 21.4 17.9 10.7 10.7 10.7 |")):
        made = serve(SGLang, details=told, counters=told, latest=2.2251)
        result = CliRunner().invoke(app, ["benchmark", "--endpoint", made.root, *given])
        assert result.exit_code == 0, (result.output, result.exception)
        assert cell in result.output and ("not the mean over the run" in result.output) == (not told)


def test_counters_of_a_server_that_has_drafted_nothing_before():
    assert DraftCounters(4, [2.0, 1.0]).since(DraftCounters(0, [])) == DraftCounters(4, [2.0, 1.0])
    assert DraftCounters(0, []).tau is None and DraftCounters(0, []).acceptance == []


@pytest.mark.parametrize("concurrency", [1, 2])
def test_as_many_prompts_at_a_time_as_asked(server, concurrency):
    text = "together" if concurrency == 2 else "alone"  # those wait for each other: one at a time would never end
    measure(server, [[f"{text} {number}"] for number in range(4)], concurrency=concurrency)
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
        (["--endpoint", "ROOT", "--data", "DATA/broken"], r"breaks off \(.*engine is dead.*\): look at its log"),
    ],
)
def test_what_is_wrong_is_told(server, tmp_path, options, told):
    (tmp_path / "gsm8k.jsonl").write_text('{"turns": ["one"]}\n')
    for folder, question in (("long", "too long"), ("broken", "breaks off")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "gsm8k.jsonl").write_text(f'{{"turns": ["{question}"]}}\n')
    given = [option.replace("ROOT", server.root).replace("DATA", str(tmp_path)) for option in options]
    defaults = {"--target": "tiny", "--data": str(tmp_path), "--output": str(tmp_path / "out")}
    for name, value in defaults.items():
        given += [] if name in given else [name, value]
    result = CliRunner().invoke(app, ["benchmark", *given])
    with pytest.raises(ValueError, match=told) as caught:
        raise result.exception
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()
