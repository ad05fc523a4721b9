"""A server that drafts with our own loop, right and with one thing wrong each: the doctor names that thing."""

import copy
import json
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from transformers import AutoTokenizer
from typer.testing import CliRunner

from hf_hyperdflash import HyperDFlashDrafter, PromptLookupDrafter, load_drafter, load_target
from hf_hyperdflash.benchmark import server_comparison as examined
from hf_hyperdflash.benchmark.doctor.examine import PROMPTS
from hf_hyperdflash.benchmark.server import DraftCounters, counts_of_answers, total
from hf_hyperdflash.benchmark.server_comparison import examine_server
from hf_hyperdflash.cli.app import app
from hf_hyperdflash.decoding.bind import unbind
from hf_hyperdflash.drafters.parts.layers import HyperDFlashRotaryEmbedding
from hf_hyperdflash.training.data.encoding import encode_prompts

from ..conftest import MODELS
from ..helpers.loopback import Server, events, serving
from ..helpers.tokenizers import characters

COUNT = 8  # drafts a round
TARGET, DRAFTER = MODELS / "tiny-deepseek-v4", MODELS / "tiny-deepseek-v4-hyperdflash"
POSITION = 'vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",model_name="tiny",position="{at}"}} {count}'


class VLLM(Server):
    """Serves a target and its drafter: texts, tokens and counters, which it keeps of its own rounds."""

    def __init__(self, target, drafter, tokenizer, tells_tokens=True, drafts=True, thinking=False, count=COUNT):
        self.target, self.drafter, self.tokenizer = copy.deepcopy(target), drafter, tokenizer
        self.tells_tokens, self.drafts, self.thinking, self.rounds = tells_tokens, drafts, thinking, 0
        self.accepted = [0] * count
        super().__init__(("tiny",))

    def metrics(self):
        lines = [f'vllm:spec_decode_num_drafts_total{{engine="0",model_name="tiny"}} {float(self.rounds)}']
        lines += [POSITION.format(at=at, count=float(count)) for at, count in enumerate(self.accepted)]
        return "\n".join([*lines, ""]) if self.drafts else ""

    def answer(self, path, body):
        chat = body.get("messages") and encode_prompts(self.tokenizer, [body], self.thinking)[0]
        if path == "/tokenize":
            if not self.tells_tokens:
                return 404, None
            plain = None if chat is not None else self.tokenizer(body["prompt"], add_special_tokens=False)["input_ids"]
            return 200, json.dumps({"tokens": plain or chat[0].tolist()})
        most, count = body["max_tokens"], len(self.accepted)  # of which an engine's last round verifies all
        self.drafter.bind(self.target)
        try:
            text = self.target.generate(
                chat, do_sample=False, max_new_tokens=most + count, assistant_model=self.drafter,
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
        new = text[0, chat.shape[1] :][:most]
        usage = {"prompt_tokens": chat.shape[1], "completion_tokens": len(new)}
        text = self.tokenizer.decode(new, skip_special_tokens=True)
        return 200, events({"choices": [{"delta": {"content": text}}]}, {"choices": [], "usage": usage})


@pytest.fixture(scope="module")
def pair():
    target = load_target(TARGET, dtype=torch.float32)
    return target, load_drafter(DRAFTER, target=target), AutoTokenizer.from_pretrained(TARGET)


def examined_with(pair, **served):
    """The comparison with a server of which something is another than here."""
    parts = {"target": pair[0], "drafter": copy.deepcopy(pair[1]), "tokenizer": pair[2], **served}
    with serving(VLLM(**parts)) as server:
        return examine_server(*pair, server.root, prompts=PROMPTS[:3], max_new_tokens=20)


@pytest.mark.parametrize(("tells_tokens", "count"), [(True, COUNT), (False, 3)])
def test_a_server_that_is_right(pair, tells_tokens, count):
    found = examined_with(pair, tells_tokens=tells_tokens, count=count)
    assert not found.cause and found.same == (3, 3) and found.tells_tokens == tells_tokens, str(found)
    assert found.here.rounds == found.there.rounds >= 9
    assert list(found.here.accepted) == list(found.there.accepted) and len(found.here.accepted) == count
    first, *_, last = str(found).splitlines()
    assert first.startswith("3 of 3 ") and last == found.meaning and f"{found.here.tau:.2f}" in str(found)
    assert not any(text[:20] in found.record() for text in PROMPTS)


# One thing wrong


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


def in_float16(drafter):
    """In float16 the MLPs of this drafter overflow; in wider types they compute what they did."""
    for layer in drafter.layers:
        layer.mlp.up_proj.weight.data.mul_(2.0**16)
        layer.mlp.down_proj.weight.data.mul_(2.0**-16)
    return copy.deepcopy(drafter).half()


def with_other_weights(drafter):
    drafter = copy.deepcopy(drafter)
    for layer in drafter.layers:
        layer.mlp.down_proj.weight.data.mul_(-1)
    return drafter


def noisy(target):
    target = copy.deepcopy(target)
    for weight in target.parameters():
        weight.data.mul_(1 + 0.3 * torch.randn(weight.shape))
    return target


def with_template(tokenizer, before):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = before + tokenizer.chat_template
    return tokenizer


class Wrong(NamedTuple):
    """What a server has of a pair, and what is named."""

    served: Callable[..., dict[str, Any]]
    cause: str
    words: str = ""
    reading: str = ""  # the reading of the drafter that explains it
    nightly: bool = False  # its drafts are compared whole


LAYERS, ROPE = "`target_layer_ids` [2, 3, -1] instead of [1, 3, -1]", "`rope_theta` 1,000,000 instead of 10,000"
FAR = {"rope_type": "default", "rope_theta": 1e6}
WRONG = {
    "anchor": Wrong(
        lambda _, drafter, __: {"drafter": with_config(drafter, sample_from_anchor=True)}, "anchor",
        "`sample_from_anchor` True", "`sample_from_anchor` True", nightly=True,
    ),
    "RoPE": Wrong(
        lambda _, drafter, __: {"drafter": with_config(drafter, rope_parameters=FAR)}, "RoPE", ROPE, ROPE, nightly=True
    ),
    "positions": Wrong(
        lambda _, drafter, __: {"drafter": later(drafter)}, "positions", "block 1 position later",
        "its block 1 position later", nightly=True,
    ),
    "dtype": Wrong(
        lambda _, drafter, __: {"drafter": in_float16(drafter)}, "dtype", "float16", "weights in float16", nightly=True
    ),
    "weights": Wrong(
        lambda _, drafter, __: {"drafter": with_other_weights(drafter)}, "drafter", "from position 1 on", nightly=True
    ),
    "target": Wrong(lambda target, *_: {"target": noisy(target)}, "target"),
    "tokenizer": Wrong(lambda *_: {"tokenizer": characters()}, "tokenizer"),
    "tokenizer, not told": Wrong(lambda *_: {"tokenizer": characters(), "tells_tokens": False}, "tokenizer"),
    "template": Wrong(lambda *pair: {"tokenizer": with_template(pair[2], "Be brief. ")}, "template"),
    "template, not told": Wrong(
        lambda *pair: {"tokenizer": with_template(pair[2], "Be brief. "), "tells_tokens": False}, "template"
    ),
    "thinking": Wrong(lambda *_: {"thinking": True}, "thinking", "off"),
    "more drafts": Wrong(
        lambda target, *_: {"drafter": PromptLookupDrafter(target, num_draft_tokens=10), "count": 10}, "draft count",
        f"`num_speculative_tokens` to {COUNT}",
    ),
    "no drafts": Wrong(lambda *_: {"drafts": False}, "no drafts", "without a drafter"),
}  # fmt: skip


@pytest.mark.parametrize(
    "wrong", [pytest.param(each, id=name, marks=[pytest.mark.nightly] * each.nightly) for name, each in WRONG.items()]
)
def test_the_first_thing_that_differs_is_named(pair, wrong):
    pair = (pair[0], copy.deepcopy(pair[1]), pair[2])
    found = examined_with(pair, **wrong.served(*pair))
    assert found.cause == wrong.cause and wrong.words in found.meaning, str(found)
    assert str(found).splitlines()[-1] == f"FIRST DIFFERENCE ({wrong.cause}): {found.meaning}"
    # Before the drafts are compared nothing of them is tried.
    assert bool(found.tried) == (bool(wrong.reading) or wrong.cause == "drafter")
    if wrong.reading:
        assert min(found.tried, key=found.tried.get) == wrong.reading and found.there.tau < found.here.tau
    if wrong.cause in ("tokenizer", "template", "thinking"):
        assert found.here is None
    if wrong.cause == "no drafts":
        assert found.same == (3, 3)


def test_the_command(pair, tmp_path):
    """The layers are counted one too high at the server."""
    wrong = with_config(pair[1], target_layer_ids=[2, 3, -1])
    command = ["doctor", "--target", str(TARGET), "--drafter", str(DRAFTER), "--dtype", "float32", "--quick"]
    with serving(VLLM(pair[0], wrong, pair[2])) as server:
        command += ["--max-new-tokens", "20", "--endpoint", f"{server.root}/v1", "--output", str(tmp_path / "o")]
        result = CliRunner().invoke(app, command)
    assert result.exit_code == 1 and "FIRST DIFFERENCE (layers)" in result.stdout, result.output
    record = json.loads((tmp_path / "o" / "served.json").read_text())
    assert record["cause"] == "layers" and LAYERS in record["meaning"]
    assert min(record["tried"], key=record["tried"].get) == LAYERS


def test_an_answer_without_an_accepted_draft_counts():
    """SGLang's lists end with the last position that was accepted at all: of such an answer there is none."""
    counted = [DraftCounters(20.0, [8.0, 4.0]), DraftCounters(17.0, []), None]
    there = total(counts_of_answers("tiny", [each], "", "") for each in counted)
    assert there == DraftCounters(37.0, [8.0, 4.0]) and there.tau == 1 + 12 / 37
    assert examined._gaps(there, DraftCounters(40.0, [9.0, 4.0, 4.0]))[2] == 0.1
