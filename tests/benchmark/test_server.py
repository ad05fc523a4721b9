"""Suites against a server on loopback that counts drafts as vLLM does, or SGLang.

SGLang's own words are here as its server 0.5.23 wrote them for a small Qwen3 pair; `tests/serving/test_sglang.py` asks
the real one.
"""

import json

import pytest
from typer.testing import CliRunner

from hf_hyperdflash.benchmark import server as asked
from hf_hyperdflash.benchmark.server import DraftCounters, parse_sglang_counters, total, vllm_counters
from hf_hyperdflash.cli.app import app

from ..helpers.loopback import Server, serving

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
SGLANG_GAUGE = """\
# TYPE sglang:spec_accept_length gauge
sglang:spec_accept_length{{engine_type="unified",model_name="tiny",moe_ep_rank="0",pp_rank="0",tp_rank="0"}} {latest}
sglang:spec_accept_length{{engine_type="second",model_name="tiny",moe_ep_rank="0",pp_rank="0",tp_rank="0"}} {latest}
sglang:spec_accept_rate{{engine_type="unified",model_name="tiny",moe_ep_rank="0",pp_rank="0",tp_rank="0"}} 0.2
"""
SGLANG_COUNTERS = """\
# TYPE sglang:generation_tokens_total counter
sglang:generation_tokens_total{{engine_type="unified",is_streaming="false",model_name="tiny"}} 8.0
sglang:generation_tokens_total{{engine_type="unified",is_streaming="true",model_name="tiny"}} {tokens}
sglang:spec_verify_calls_total{{engine_type="unified",model_name="tiny"}} {rounds}
sglang:spec_verify_calls_total{{engine_type="unified",model_name="other"}} 1000.0
sglang:num_requests_total{{engine_type="unified",is_streaming="false",model_name="tiny"}} 1.0
sglang:num_requests_total{{engine_type="unified",is_streaming="true",model_name="tiny"}} {requests}
"""
# The first answer's and the second one's.
SGLANG_DETAILS = [
    {"spec_accept_length": 2.142857142857143, "spec_num_correct_drafts": 33, "spec_num_proposed_drafts": 168,
     "spec_verify_ct": 28, "spec_correct_drafts_histogram": [15, 7, 1, 2, 0, 0, 3], "spec_cap_lens_histogram": []},
    {"spec_accept_length": 3.5625, "spec_num_correct_drafts": 41, "spec_num_proposed_drafts": 96,
     "spec_verify_ct": 16, "spec_correct_drafts_histogram": [4, 1, 4, 0, 5, 0, 2], "spec_cap_lens_histogram": []},
]  # fmt: skip


class VLLM(Server):
    """Each question accepts one draft in its two rounds, if it counts."""

    def __init__(self, counts=True):
        self.counts = counts
        super().__init__()

    def metrics(self):
        count = len(self.asked)
        return METRICS.format(rounds=5.0 + count, first=3.0 + count, last=1.0) if self.counts else None


class SGLang(Server):
    """With each answer's counts if it is asked and has them, and with metrics if it was started so: counters, which
    came to SGLang before those, and its gauge."""

    def __init__(self, details=True, counters=True, latest=2.225):
        self.details, self.counters, self.latest = details, counters, latest
        super().__init__(("tiny",), "sglang")

    def metrics(self):
        count = len(self.asked)
        if self.latest is None:
            return None
        counted = SGLANG_COUNTERS.format(tokens=100.0 + 3 * count, rounds=40.0 + count, requests=7.0 + count)
        return SGLANG_GAUGE.format(latest=self.latest) + (counted if self.counters else "")

    def last_events(self, body):
        usage = super().last_events(body)
        if not self.details or not body.get("return_spec_tokens_details"):
            return usage
        told = SGLANG_DETAILS[len(self.asked) - 1]
        return [{"choices": [], "usage": None, "sglext": {"spec_tokens_details": told}}, *usage]


@pytest.fixture
def server():
    with serving(VLLM()) as server:
        yield server


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
    told = {"model": "tiny", "max_tokens": 7, "temperature": 0.5, "seed": 3, "top_p": 1.0, "stream": True,
            "stream_options": {"include_usage": True}}  # fmt: skip
    assert all({**body, "messages": None} == {**told, "messages": None} for body in server.asked)
    assert (figures["answers"], figures["new_tokens"], figures["concurrency"], figures["temperature"]) == (
        3,
        9,
        1,
        0.5,
    )
    assert 0 < figures["median_first_seconds"] <= figures["median_seconds"] <= figures["seconds"]
    assert figures["tokens_per_second"] == pytest.approx(9 / figures["seconds"])


# Of SGLang's 28 rounds 13 accepted a draft, 6 two, 5 three, 3 four, five and six; of 16 rounds 12, 11, 7, 7, 2, 2.
TOLD = (28 + 16, 1 + (33 + 41) / 44, [n / 44 for n in (13 + 12, 6 + 11, 5 + 7, 3 + 7, 3 + 2, 3 + 2)], "run")
NOTHING = (None, None, [], None)


@pytest.mark.parametrize(
    ("kind", "given", "expected"),
    [
        (VLLM, {}, (4, 2.0, [0.5, 0.5, 0.0], "run")),  # of this run and this target, positions by number
        (VLLM, {"counts": False}, NOTHING),
        (SGLang, {}, TOLD),
        (SGLang, {"latest": None}, TOLD),  # without `--enable-metrics`
        (SGLang, {"details": False}, (2, 2.0, [], "run")),  # 6 tokens, of which prompts wrote 2
        (SGLang, {"details": False, "counters": False}, (None, 2.225, [], "latest interval")),
        (SGLang, {"details": False, "counters": False, "latest": 0.0}, NOTHING),  # it does not draft
        (SGLang, {"details": False, "counters": False, "latest": None}, NOTHING),
    ],
)
def test_the_most_exact_of_a_servers_counts_are_taken(kind, given, expected):
    with serving(kind(**given)) as server:
        figures = measure(server, [["a"], ["b"]])
    assert tuple(figures[name] for name in ("rounds", "tau", "acceptance", "tau_of")) == expected


def test_counts_are_added_and_taken_from_each_other():
    def told(*histogram):
        details = {"spec_verify_ct": sum(histogram), "spec_correct_drafts_histogram": histogram}
        return parse_sglang_counters({"sglext": {"spec_tokens_details": details}})

    assert total([told(1, 0, 2), None, told(4), told(0, 1)]) == DraftCounters(8, [3, 2])
    assert total([parse_sglang_counters({"choices": []}), None]) is None
    page = METRICS.format(rounds=5.0, first=3.0, last=1.0)
    assert vllm_counters(page, "tiny") == DraftCounters(10.0, [3.0, 3.0, 1.0])
    assert DraftCounters(4, [2.0, 1.0]).since(DraftCounters(1, [])) == DraftCounters(3, [2.0, 1.0])
    assert DraftCounters(0, []).tau is None and DraftCounters(0, []).acceptance == []


@pytest.mark.parametrize("concurrency", [1, 2])
def test_as_many_prompts_at_a_time_as_asked(server, concurrency):
    text = "together" if concurrency == 2 else "alone"  # those wait for each other: one at a time would never end
    measure(server, [[f"{text} {number}"] for number in range(4)], concurrency=concurrency)
    assert server.most == concurrency


@pytest.mark.parametrize("ending", ["", "/v1/"])
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


@pytest.mark.parametrize(("told", "cells"), [(False, ["2.23 (latest)", "–"]), (True, ["2.00", "–"])])
def test_a_latest_interval_is_called_that(told, cells):
    with serving(SGLang(details=False, counters=told, latest=2.2251)) as server:
        row = {"suite": "gsm8k", **measure(server, [["a"]])}
    run = dict.fromkeys(("model", "endpoint", "date", "client", "limit", "max_new_tokens", "command"), "x")
    page = asked.markdown(run, [row])
    assert [line.split(" | ")[-2:] for line in page.splitlines() if "GSM8K" in line] == [[cells[0], cells[1] + " |"]]
    assert ("not the mean over the run" in page) == (not told)
