"""What a benchmark, a calibration and the doctor refuse. What their commands refuse is in test_cli."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

from hf_hyperdflash import PromptLookupDrafter
from hf_hyperdflash.benchmark import calibration
from hf_hyperdflash.benchmark.calibration import calibrate
from hf_hyperdflash.benchmark.doctor.ablations import fine_tune_briefly
from hf_hyperdflash.benchmark.doctor.examine import examine
from hf_hyperdflash.benchmark.results import load, pool, summarize
from hf_hyperdflash.benchmark.runner import BenchmarkSettings, run_benchmark
from hf_hyperdflash.benchmark.server_comparison import examine_server
from hf_hyperdflash.benchmark.suites import load_suite, suites_in
from hf_hyperdflash.cli.app import app
from hf_hyperdflash.training.trials import Local

from ..conftest import prompt, tiny_drafter, tiny_target
from ..helpers.families import qwen3
from ..helpers.loopback import Server, serving
from ..helpers.refusals import Refusal
from ..helpers.results_files import PLAIN, line, settings, written
from ..helpers.tokenizers import characters


@pytest.fixture
def folder(tmp_path):
    """A folder with suites, one that has none, and one with a prompt that a server does not take."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "mine.jsonl").write_text('{"turns": ["e"]}\n')
    (tmp_path / "none.jsonl").write_text("\n")
    for name, question in (("fine", "one"), ("long", "too long"), ("broken", "breaks off")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "gsm8k.jsonl").write_text(json.dumps({"turns": [question]}))
    return tmp_path


def offline(*_, **__):
    raise ConnectionError("no network")


def of_the_hub(patch, name):
    patch.setattr("datasets.load_dataset", offline)
    load_suite(name)


def bad_turns(line, *words):
    """A line of a suite that is refused by its number, an empty one before it."""

    def read(folder, _):
        (folder / "bad.jsonl").write_bytes(b'{"turns": ["e"]}\n\n' + line + b"\n")
        load_suite("bad", folder)

    return Refusal(read, ("bad.jsonl, line 3", *words))


def bad_line(*lines, words):
    """Lines of a results file, the second of which is refused."""

    def read(folder, _):
        (folder / "r").write_text("\n".join([*lines, json.dumps(line(PLAIN))]))
        load(folder / "r")

    return Refusal(read, (f"r, line {len(lines)}", *words))


def second(text, *words):
    return bad_line(json.dumps(settings()), text, words=words)


def unlike(suite_of_the_other):
    return [line(PLAIN, suite="a"), line("A", suite="a"), line(PLAIN, suite="b"), line(suite_of_the_other, suite="b")]


def run(folder, *names):
    target = tiny_target(2)
    methods = [Local(target, PromptLookupDrafter(target), name=name) for name in names]
    settings = BenchmarkSettings(["mine"], str(folder))
    run_benchmark(target, characters(), methods, settings, folder / "out" / "r.jsonl")


def at_a_server(*options, target="tiny", data="fine"):
    """A command that asks a server, and writes nothing."""

    def ask(folder, _):
        with serving(Server()) as server:
            given = ["--target", target, "--data", str(folder / data), "--output", str(folder / "out")]
            result = CliRunner().invoke(
                app, ["benchmark", *(part.replace("ROOT", server.root) for part in options), *given]
            )
        assert not (folder / "out").exists()
        raise result.exception

    return ask


def calibrated(confidence_head=True, prompts=6):
    def ask(_, patch):
        target = tiny_target()
        drafter = tiny_drafter(target, confidence_head=confidence_head)
        if prompts > 6:
            target.generation_config.eos_token_id = list(range(64))  # every text ends at once
            patch.setattr(calibration, "LEAST_ROUNDS", 15)
        else:
            patch.setattr(torch.nn.Module, "__call__", lambda *_: pytest.fail("nothing may run"))
        calibrate(target, drafter, [prompt(5)] * prompts, max_new_tokens=20)

    return ask


def without_a_served_model(model=None):
    def ask(_, __):
        with serving(Server()) as server:
            examine_server(None, None, None, server.root, model=model, prompts=[])

    return ask


def examined(**given):
    def ask(_, __):
        target = qwen3().eval()
        parts = {"drafter": PromptLookupDrafter(target), "tokenizer": characters(), "prompts": ["a"], **given}
        examine(target, parts.pop("drafter"), parts.pop("tokenizer"), **parts)

    return ask


def answers_that_end_at_once(_, __):
    target = tiny_target()
    fine_tune_briefly(target, tiny_drafter(target), [prompt(8)], [7], seconds=1)


ROOT = ("--endpoint", "ROOT")
REFUSED = {
    # Suites
    "no prompts asked for": Refusal(lambda folder, _: load_suite("mine", folder, limit=0), ("limit", "0", "1")),
    "an empty folder": Refusal(lambda folder, _: suites_in(folder / "empty"), ("empty", "<suite>.jsonl")),
    "an empty file": Refusal(lambda folder, _: load_suite("none", folder), ("'none'", "none.jsonl", "turns")),
    "no network": Refusal(lambda _, patch: of_the_hub(patch, "gsm8k"), ("gsm8k", "no network", "HF_HUB_OFFLINE")),
    "no such suite": Refusal(lambda _, patch: of_the_hub(patch, "nope"), ("'nope'", "gsm8k", "nope.jsonl")),
    "another field": bad_turns(b'{"prompt": "x"}', "no `turns`", '{"turns": ["..."]}'),
    "a list": bad_turns(b"[1]", "no `turns`"),
    "no turns": bad_turns(b'{"turns": []}', "`turns` is []", "list"),
    "turns of numbers": bad_turns(b'{"turns": [1]}', "`turns` is [1]"),
    "turns that are a text": bad_turns(b'{"turns": "What is 1 plus 1?"}', "`turns` is 'What is 1 plus 1"),
    "a blank turn": bad_turns(b'{"turns": [" "]}', "`turns` is [' ']"),
    "no UTF-8": bad_turns(b"\xff\xfe", "JSON"),
    "half a character": bad_turns(b'{"turns": ["\\ud800"]}', "half a character"),
    # A benchmark
    "no suites": Refusal(lambda *_: BenchmarkSettings(suites=[]), ("suites", "empty", "at least one")),
    "a cold temperature": Refusal(lambda *_: BenchmarkSettings(temperatures=[0, -1.0]), ("temperatures", "-1.0", "0")),
    "no round": Refusal(lambda *_: BenchmarkSettings(max_new_tokens=2), ("max_new_tokens", "2", "3")),
    "no method": Refusal(lambda folder, _: run(folder), ("method", "at least one")),
    "one name twice": Refusal(lambda folder, _: run(folder, "A", "A"), ("'A', 'A'", "once", "--drafter NAME=PATH")),
    # Its results
    "no object": second("[1, 2]", "expected"),
    "a line of another file": second(json.dumps({"run": 1}), "expected"),
    "a broken line": second('{"suite": "gsm', "JSON"),
    "a field that is missing": second(json.dumps(line("A", rounds=None)), "rounds"),
    "nearly no field": second(json.dumps({"method": PLAIN}), "suite, mode, temperature"),
    "no time": second(json.dumps(line(PLAIN, seconds=0.0)), "10", "0.0 seconds"),
    "no token": second(json.dumps(line(PLAIN, new_tokens=0)), "0 new tokens"),
    "no settings first": bad_line(json.dumps(line(PLAIN)), words=("settings", "run")),
    "nothing": Refusal(lambda folder, _: load(folder / "none.jsonl"), ("none.jsonl", "settings")),
    "nothing to compare": Refusal(
        lambda folder, _: summarize(load(written(folder / "r", [line(PLAIN, 0), line("A", 1)]))), ("2", "Target only")
    ),
    "no suite of all methods": Refusal(
        lambda folder, _: pool(load(written(folder / "r", unlike("B")))), ("'A'", "'B'", "same suites")
    ),
    # A server
    "no address": Refusal(at_a_server("--endpoint", "localhost:8000"), ("'localhost:8000'", "http://")),
    "no server": Refusal(at_a_server("--endpoint", "http://127.0.0.1:1"), ("127.0.0.1:1/v1/models", "start")),
    "another model": Refusal(at_a_server(*ROOT, target="large"), ("'large'", "tiny, small")),
    "a prompt that is too long": Refusal(at_a_server(*ROOT, data="long"), ("400", "longer than 1024")),
    "an answer that breaks off": Refusal(at_a_server(*ROOT, data="broken"), ("engine is dead", "log")),
    # The doctor
    "no questions": Refusal(examined(prompts=[]), ("`prompts`", "at least one")),
    "a context that does not fit": Refusal(examined(context=4000), ("`context`", "4000", "1 to ")),
    "a drafter's name": Refusal(examined(drafter="org/name"), ("`drafter`", "'org/name'", "`load_drafter`")),
    "a tokenizer's name": Refusal(examined(tokenizer="org/name"), ("`tokenizer`", "'org/name'", "from_pretrained")),
    "no text at a time": Refusal(examined(texts=0), ("`texts`", "0", "at least 1")),
    "answers that end at once": Refusal(answers_that_end_at_once, ("too short",)),
    "one of several models": Refusal(without_a_served_model(), ("tiny, small", "--served-model")),
    "no such model there": Refusal(without_a_served_model("other"), ("tiny, small", "--served-model")),
    # A calibration
    "no confidence": Refusal(calibrated(confidence_head=False), ("`confidence_head`", "False")),
    "few prompts": Refusal(calibrated(), ("6 prompts of 20", "57", "100")),
    "few rounds": Refusal(calibrated(prompts=8), ("4 prompts", "0 rounds", "15")),
}  # fmt: skip


@pytest.mark.parametrize("refusal", REFUSED.values(), ids=REFUSED)
def test_it_is_refused_in_one_line(refusal: Refusal, folder, monkeypatch):
    refusal.check(folder, monkeypatch)
