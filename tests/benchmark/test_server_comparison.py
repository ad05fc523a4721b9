"""A server that drafts with our own loop, right and with one thing wrong each: the doctor names that thing."""

import copy
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from transformers import AutoTokenizer
from typer.testing import CliRunner

from hf_hyperdflash import HyperDFlashDrafter, PromptLookupDrafter, load_drafter, load_target
from hf_hyperdflash.benchmark import server as asked
from hf_hyperdflash.benchmark import server_comparison as examined
from hf_hyperdflash.benchmark.doctor.examine import PROMPTS
from hf_hyperdflash.benchmark.server import DraftCounters, total
from hf_hyperdflash.benchmark.server_comparison import examine_server
from hf_hyperdflash.cli.app import app
from hf_hyperdflash.decoding.bind import unbind
from hf_hyperdflash.drafters.parts.layers import HyperDFlashRotaryEmbedding
from hf_hyperdflash.training.data.encoding import encode_prompts
from hf_hyperdflash.training.trials import Record

from ..conftest import MODELS, mostly_nightly
from ..helpers.tokenizers import characters

COUNT = 8  # drafts a round
TARGET, DRAFTER = MODELS / "tiny-deepseek-v4", MODELS / "tiny-deepseek-v4-hyperdflash"
FAR = {"rope_type": "default", "rope_theta": 1e6}
METRICS = """\
vllm:spec_decode_num_drafts_total{{engine="0",model_name="tiny"}} {rounds}
{positions}
"""
POSITION = 'vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",model_name="tiny",position="{at}"}} {count}'


class Server(ThreadingHTTPServer):
    """Serves a target and its drafter as vLLM does: texts, tokens and counters, which it keeps of its own rounds."""

    def __init__(self, target, drafter, tokenizer, tells_tokens=True, drafts=True, thinking=False, count=COUNT):
        super().__init__(("127.0.0.1", 0), Handler)
        self.target, self.drafter, self.tokenizer = target, drafter, tokenizer
        self.tells_tokens, self.drafts, self.thinking, self.rounds = tells_tokens, drafts, thinking, 0
        self.accepted = [0] * count
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    @property
    def root(self):
        return f"http://127.0.0.1:{self.server_port}"

    def metrics(self):
        lines = [POSITION.format(at=at, count=float(count)) for at, count in enumerate(self.accepted)]
        return METRICS.format(rounds=float(self.rounds), positions="\n".join(lines)) if self.drafts else ""

    def encode(self, messages):
        return encode_prompts(self.tokenizer, [{"messages": messages}], self.thinking)[0]

    def answer(self, messages, most):
        ids = self.encode(messages)
        self.drafter.bind(self.target)
        try:
            count = len(self.accepted)  # of which an engine's last round verifies all
            text = self.target.generate(
                ids, do_sample=False, max_new_tokens=most + count, assistant_model=self.drafter,
                num_assistant_tokens=count,
            )  # fmt: skip
        finally:
            unbind(self.target)
        stats, written = self.drafter.last_stats, 1
        for accepted, emitted in zip(stats.accepted, stats.emitted):
            if written >= most:
                break
            written, self.rounds = written + emitted, self.rounds + 1
            for at in range(accepted):
                self.accepted[at] += 1
        new = text[0, ids.shape[1] :][:most]
        usage = {"prompt_tokens": ids.shape[1], "completion_tokens": len(new)}
        return self.tokenizer.decode(new, skip_special_tokens=True), usage


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *args):
        pass

    def tell(self, page):
        self.send_response(404 if page is None else 200)
        self.end_headers()
        self.wfile.write((page or "").encode())

    def do_GET(self):
        listed = json.dumps({"data": [{"id": "tiny", "owned_by": "vllm"}]})
        self.tell({"/v1/models": listed, "/metrics": self.server.metrics()}.get(self.path))

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/tokenize":
            if not self.server.tells_tokens:
                return self.tell(None)
            if "messages" in asked:
                tokens = self.server.encode(asked["messages"])[0].tolist()
            else:
                tokens = self.server.tokenizer(asked["prompt"], add_special_tokens=False)["input_ids"]
            return self.tell(json.dumps({"count": len(tokens), "tokens": tokens}))
        text, usage = self.server.answer(asked["messages"], asked["max_tokens"])
        events = [{"choices": [{"delta": {"content": text}}]}, {"choices": [], "usage": usage}]
        return self.tell("".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n")


@pytest.fixture(scope="module")
def pair():
    target = load_target(TARGET, dtype=torch.float32)
    return target, load_drafter(DRAFTER, target=target), AutoTokenizer.from_pretrained(TARGET)


def served(pair, target=None, drafter=None, tokenizer=None, **told):
    own_target, own_drafter, own_tokenizer = pair
    server = Server(
        copy.deepcopy(target or own_target), drafter or copy.deepcopy(own_drafter), tokenizer or own_tokenizer, **told
    )
    try:
        return examine_server(*pair, server.root, prompts=PROMPTS[:3], max_new_tokens=20)
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(("tells_tokens", "count"), [(True, COUNT), (False, 3)])
def test_a_server_that_is_right(pair, tells_tokens, count):
    found = served(pair, tells_tokens=tells_tokens, count=count)
    assert not found.cause and found.same == (3, 3), str(found)
    assert found.here.rounds == found.there.rounds >= 9
    assert list(found.here.accepted) == list(found.there.accepted) and len(found.here.accepted) == count
    assert str(found).endswith("Nothing differs: the server accepts what is accepted here, position by position.")
    assert not any(text[:20] in found.record() for text in PROMPTS)


def with_config(drafter, **fields):
    drafter = copy.deepcopy(drafter)
    drafter.config.update(fields)
    drafter.rotary_emb = HyperDFlashRotaryEmbedding(drafter.config)
    return drafter


class Later(HyperDFlashDrafter):
    """Counts its block's positions from one more than it was trained with."""

    def forward(self, block_embeds, position_ids, *rest, **more):
        return super().forward(block_embeds, position_ids + 1, *rest, **more)


def later(drafter):
    drafter = copy.deepcopy(drafter)
    drafter.__class__ = Later
    return drafter


def without_precision(drafter):
    """In float16 the MLPs of this drafter overflow, which is the same in wider ones."""
    with torch.no_grad():
        for layer in drafter.layers:
            layer.mlp.up_proj.weight.mul_(2.0**16)
            layer.mlp.down_proj.weight.mul_(2.0**-16)
    return drafter


@pytest.mark.parametrize(
    ("cause", "told", "drafter"),
    mostly_nightly([
        ("layers", "`target_layer_ids` [2, 3, -1] instead of [1, 3, -1]", {"target_layer_ids": [2, 3, -1]}),
        ("anchor", "`sample_from_anchor` True", {"sample_from_anchor": True}),
        ("RoPE", "`rope_theta` 1,000,000 instead of 10,000", {"rope_parameters": FAR}),
        ("positions", "its block 1 position later", later),
    ]),
)  # fmt: skip
def test_a_server_that_reads_the_drafter_otherwise(pair, cause, told, drafter):
    changed = with_config(pair[1], **drafter) if isinstance(drafter, dict) else drafter(pair[1])
    found = served(pair, drafter=changed)
    assert found.cause == cause and told in found.meaning, str(found)
    assert min(found.tried, key=found.tried.get) == told and found.there.tau < found.here.tau
    assert f"FIRST DIFFERENCE ({cause}): The server accepts as if" in str(found)


@pytest.mark.nightly  # a server's drafts are compared whole
def test_a_server_whose_precision_does_not_hold_the_drafter(pair):
    target, drafter, tokenizer = pair
    drafter = without_precision(copy.deepcopy(drafter))
    found = served((target, drafter, tokenizer), drafter=copy.deepcopy(drafter).half())
    assert found.cause == "dtype" and "weights in float16" in found.meaning, str(found)


@pytest.mark.nightly  # a server's drafts are compared whole
def test_a_server_whose_drafter_has_other_weights(pair):
    """No reading of the right weights explains what another drafter accepts."""
    drafter = copy.deepcopy(pair[1])
    with torch.no_grad():
        for layer in drafter.layers:
            layer.mlp.down_proj.weight.mul_(-1)
    found = served(pair, drafter=drafter)
    assert found.cause == "drafter" and "from position 1 on" in found.meaning, str(found)


def test_a_server_with_another_target_is_told_before_its_drafts_are_compared(pair):
    target = copy.deepcopy(pair[0])
    with torch.no_grad():
        for weight in target.parameters():
            weight.mul_(1 + 0.3 * torch.randn(weight.shape))
    found = served(pair, target=target)
    assert found.cause == "target" and not found.tried, str(found)


def with_template(tokenizer, before):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = before + tokenizer.chat_template
    return tokenizer


@pytest.mark.parametrize(
    ("cause", "tells_tokens"),
    [("tokenizer", True), ("tokenizer", False), ("template", True), ("template", False), ("thinking", True)],
)
def test_a_server_with_other_tokens(pair, cause, tells_tokens):
    told = {
        "tokenizer": lambda: {"tokenizer": characters()},
        "template": lambda: {"tokenizer": with_template(pair[2], "Be brief. ")},
        "thinking": lambda: {"thinking": True},
    }[cause]()
    found = served(pair, tells_tokens=tells_tokens, **told)
    assert found.cause == cause and found.here is None, str(found)


def test_a_server_that_drafts_more_than_the_drafter_was_trained_for(pair):
    found = served(pair, drafter=PromptLookupDrafter(pair[0], num_draft_tokens=COUNT + 2), count=COUNT + 2)
    assert found.cause == "draft count" and f"set `num_speculative_tokens` to {COUNT}." in found.meaning, str(found)


def test_a_server_that_does_not_draft(pair):
    found = served(pair, drafts=False)
    assert found.cause == "no drafts" and "without a drafter" in found.meaning and found.same == (3, 3)


@pytest.fixture
def server(pair):
    started = Server(copy.deepcopy(pair[0]), with_config(pair[1], target_layer_ids=[2, 3, -1]), pair[2])
    yield started
    started.shutdown()
    started.server_close()


def test_the_command(server, tmp_path):
    command = ["doctor", "--target", str(TARGET), "--drafter", str(DRAFTER), "--dtype", "float32", "--quick"]
    command += ["--max-new-tokens", "20", "--endpoint", f"{server.root}/v1"]
    result = CliRunner().invoke(app, [*command, "--output", str(tmp_path / "o")])
    assert result.exit_code == 1 and "FIRST DIFFERENCE (layers)" in result.stdout, result.output
    assert json.loads((tmp_path / "o" / "served.json").read_text())["cause"] == "layers"
    for wrong, told in ((["--served-model", "other"], "serves tiny"), (["--context", "9"], "`--context` is for what")):
        assert told in str(CliRunner().invoke(app, [*command, *wrong]).exception)
    alone = CliRunner().invoke(app, [*command[:5], "--served-model", "tiny"])
    assert "add `--endpoint`" in str(alone.exception)


def test_an_answer_without_an_accepted_draft_counts(monkeypatch):
    """SGLang's lists end with the last position that was accepted at all: of such an answer there is none."""
    counted = [DraftCounters(20.0, [8.0, 4.0]), DraftCounters(17.0, []), None]
    answers = iter([Record("", 20, None, 0.0, 0.0, None, each) for each in counted])
    monkeypatch.setattr(asked.Server, "generate", lambda *_: next(answers))
    monkeypatch.setattr(asked.Server, "metrics", lambda _: "")
    _, found = examined._ask(asked.Server("http://localhost", "tiny"), ["a", "b", "c"], 20)
    assert found == counted
    there, here = total(found), DraftCounters(40.0, [9.0, 4.0, 4.0])
    assert there.tau == 1 + 12 / 37 and examined._gaps(here, there)[2] == 0.1
    assert not examined._is_same(here, there)
