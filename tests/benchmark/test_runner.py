"""Benchmarks of the shipped pair over two suites: what is recorded, and how a run goes on."""

import copy
import itertools
import json
import shutil
import subprocess
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_hyperdflash import HyperDFlashDrafter, PromptLookupDrafter
from hf_hyperdflash.benchmark.results import TARGET_ONLY
from hf_hyperdflash.benchmark.runner import BenchmarkSettings, commit, hardware, run_benchmark
from hf_hyperdflash.training.data.encoding import encode_prompts
from hf_hyperdflash.training.features.locking import only_writer
from hf_hyperdflash.training.trials import Local

from ..conftest import MODELS

SUITE = {
    "gsm8k": [["Tom has 3 pens and buys 4 more. How many pens has he?"], ["What is 5 times 6?"]],
    "mt-bench": [["Write a function that adds two numbers.", "Now subtract them."]],
}


@pytest.fixture(scope="module")
def pair():
    target = AutoModelForCausalLM.from_pretrained(MODELS / "tiny-deepseek-v4", dtype=torch.float32).eval()
    drafter = HyperDFlashDrafter.from_pretrained(MODELS / "tiny-deepseek-v4-hyperdflash", dtype=torch.float32).eval()
    drafter.bind(target)
    return target, AutoTokenizer.from_pretrained(MODELS / "tiny-deepseek-v4"), drafter


@pytest.fixture
def benchmark(pair, tmp_path):
    """Run methods with the pair; the runs' settings and the records."""
    for name, prompts in SUITE.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"turns": turns}) + "\n" for turns in prompts))

    def run(methods, path=None, tokenizer=pair[1], **fields):
        fields = {"suites": list(SUITE), "data": str(tmp_path), "max_new_tokens": 20, **fields}
        return read(
            run_benchmark(pair[0], tokenizer, methods, BenchmarkSettings(**fields), path or tmp_path / "r.jsonl")
        )

    return run


def drafting(name, target, drafter, count=None, budget=None, **more):
    return Local(target, drafter, {"num_assistant_tokens": count, "tree_budget": budget}, name, **more)


def lookup(target):
    return drafting("Prompt lookup (3)", target, PromptLookupDrafter(target, 3))


def read(path):
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [line["run"] for line in lines if "run" in line], [line for line in lines if "run" not in line]


def without_times(record):
    return {k: v for k, v in record.items() if "seconds" not in k and k != "peak_memory"}


# What is recorded


# Takes seconds: every method of a benchmark writes texts.
def test_every_method_runs_every_turn_and_writes_the_targets_text(pair, benchmark):
    target, _, drafter = pair
    trees = drafting("Trees (3, 9 nodes)", target, drafter, 3, 9)
    methods = [drafting("HyperDFlash (6)", target, drafter, 6), lookup(target), trees]
    runs, records = benchmark(methods)
    assert drafter.num_draft_tokens == 8  # as it was
    assert drafter.last_stats.nodes > 5 * drafter.last_stats.rounds and drafter.last_stats.draft_positions == 3
    parts = f"HyperDFlashDrafter, hybrid over layers [1, 3, -1], {sum(w.numel() for w in drafter.parameters()):,}"
    assert [run["methods"] for run in runs] == [{
        TARGET_ONLY: "one token per forward", "HyperDFlash (6)": f"{parts} parameters",
        "Prompt lookup (3)": "PromptLookupDrafter", "Trees (3, 9 nodes)": f"{parts} parameters",
    }]  # fmt: skip
    assert runs[0]["dtype"] == "float32" and "core" in runs[0]["hardware"] == hardware("cpu")
    names = list(runs[0]["methods"])
    places = [("gsm8k", 0, 0), ("gsm8k", 1, 0), ("mt-bench", 0, 0), ("mt-bench", 0, 1)]
    turns = [names[n % 4 :] + names[: n % 4] for n in (0, 1, 0, 1)]  # at being first, by prompt and turn
    written = [(record["suite"], record["prompt"], record["turn"], record["method"]) for record in records]
    assert written == [(*place, name) for place, turn in zip(places, turns) for name in turn]
    for record in records:
        own = next(r for r in records if r["method"] == TARGET_ONLY and all(
            r[k] == record[k] for k in ("suite", "prompt", "turn")
        ))  # fmt: skip
        assert record["new_tokens"] == len(own["output_ids"]) and record["first_difference"] is None
        assert record["peak_memory"] > 1e8 and record["seconds"] > record["decode_seconds"] > 0
        if record is own:
            assert record["rounds"] is None and record["identical"] is None
            continue
        assert record["identical"] is True
        assert record["rounds"] == len(record["emitted"]) == len(record["accepted"]) > 0
        assert sum(record["emitted"]) in (record["new_tokens"] - 1, record["new_tokens"] - 2)
        assert record["draft_positions"] <= int(record["method"].partition("(")[2][0])


def test_an_adaptive_method_learns_from_its_own_texts(pair, benchmark):
    target, _, drafter = pair
    own, heard = copy.deepcopy(drafter), []
    adapt = own.adapt
    own.adapt = lambda target: heard.append(adapt(target, every=2, policy="always", steps=1)) or heard[0]
    learns = drafting("Learns (3, adaptive)", target, own, 3, is_adaptive=True)
    runs, records = benchmark([drafting("Fixed (3)", target, drafter, 3), learns])
    texts = [record for record in records if record["method"] == learns.name]
    assert len(heard) == 1 and len(heard[0].log) == len(texts) and any(decision.arm for decision in heard[0].log)
    assert {record["identical"] for record in records} == {None, True}
    assert runs[0]["methods"][learns.name].endswith("parameters, learns while it serves")
    assert own.observer is None and drafter.observer is None


@pytest.mark.parametrize("mode", ["non-think", "think-high"])
def test_the_second_turn_follows_the_targets_own_answer_without_what_it_thought(pair, benchmark, mode):
    target, tokenizer, _ = pair
    own, turns = copy.copy(tokenizer), SUITE["mt-bench"][0]
    if mode == "think-high":
        own.decode = lambda ids, skip_special_tokens: "<think>Let me see.</think>It is." * skip_special_tokens
    _, records = benchmark([lookup(target)], tokenizer=own, suites=["mt-bench"], modes=[mode])
    first = next(r for r in records if r["method"] == TARGET_ONLY and r["turn"] == 0)
    answer = "It is." if mode == "think-high" else tokenizer.decode(first["output_ids"], skip_special_tokens=True)
    messages = [{"role": "user", "content": turns[0]}]
    for turn in (0, 1):
        (asked,) = encode_prompts(tokenizer, [{"messages": messages}], thinking=mode == "think-high")
        assert {r["prompt_tokens"] for r in records if r["turn"] == turn} == {asked.shape[1]}
        expected = target.generate(asked, do_sample=False, max_new_tokens=20)[0, asked.shape[1] :].tolist()
        texts = [r["output_ids"] for r in records if r["method"] == TARGET_ONLY and r["turn"] == turn]
        assert texts == [expected]
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": turns[1]}]


def test_the_commit_of_the_checkout_is_recorded():
    told = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True
    )
    assert (commit() or "").removesuffix("-dirty") == told.stdout.strip()


def test_steps_are_timed_from_the_first_token_on(pair, benchmark, monkeypatch):
    """With a clock that ticks whenever it is looked at: at the beginning, for the prompt and every token, at the
    end."""
    monkeypatch.setattr(time, "perf_counter", map(float, itertools.count()).__next__)
    _, records = benchmark([lookup(pair[0])], suites=["gsm8k"], limit=1, max_new_tokens=6)
    own, drafted = sorted(records, key=lambda record: record["method"] != TARGET_ONLY)
    assert (own["seconds"], own["decode_seconds"]) == (own["new_tokens"] + 2, own["new_tokens"])
    assert (
        0 < drafted["draft_seconds"] + drafted["verify_seconds"] < drafted["loop_seconds"] < drafted["decode_seconds"]
    )


def test_texts_are_drawn_from_the_whole_distribution_each_for_itself(pair, benchmark, tmp_path, monkeypatch):
    monkeypatch.setattr(pair[0].generation_config, "top_k", 1)  # what the target's maker recommends is not asked
    (tmp_path / "gsm8k.jsonl").write_text((json.dumps({"turns": SUITE["gsm8k"][0]}) + "\n") * 2)
    _, records = benchmark([lookup(pair[0])], suites=["gsm8k"], temperatures=[0.0, 3.0], max_new_tokens=12)
    texts = [r["output_ids"] for r in records if r["method"] == TARGET_ONLY]
    assert len(texts) == 4 and texts[0] == texts[1] != texts[2] != texts[3] != texts[0]
    assert {r["identical"] for r in records if r["temperature"]} == {None}


def test_the_first_difference_is_recorded(pair, benchmark, monkeypatch):
    """Of a text that is another from its third token on, and of one that ends early."""
    target, drafted = pair[0], []

    def generate(ids, **options):
        text = type(target).generate(target, ids, **options)
        if "assistant_model" in options:
            drafted.append(None)
            if len(drafted) > 2:  # one warms up
                return text[:, :-3]
            text[0, ids.shape[1] + 2] += 1
        return text

    monkeypatch.setattr(target, "generate", generate)
    _, records = benchmark([lookup(target)], suites=["gsm8k"], max_new_tokens=8)
    flags = [(r["identical"], r["first_difference"], r["new_tokens"]) for r in records if r["method"] != TARGET_ONLY]
    assert flags == [(False, 2, 8), (False, 5, 5)]


# A run that goes on


@pytest.fixture(scope="module")
def done(pair, tmp_path_factory):
    """A finished run of one prompt by one method, and what it was run with."""
    folder = tmp_path_factory.mktemp("done")
    (folder / "gsm8k.jsonl").write_text('{"turns": ["What is 5 times 6?"]}\n')
    settings = BenchmarkSettings(["gsm8k"], str(folder), max_new_tokens=4)
    run = [*pair[:2], [drafting("Mine (2)", *pair[::2], 2)], settings]
    return run, run_benchmark(*run, folder / "r.jsonl")


def with_prompt(patch, run):
    moved = shutil.copytree(run[3].data, run[3].data + "-copy/" + Path(run[3].data).name)
    patch.setattr(run[3], "data", moved)
    Path(moved, "gsm8k.jsonl").write_text('{"turns": ["What is 5 times 7?"]}\n')


def with_template(patch, run):
    later = "{% if messages | length > 3 %}x{% endif %}"  # nothing that a first turn shows
    patch.setattr(run[1], "chat_template", run[1].chat_template + later)


def nudge(patch, module):
    weight = module.weight.detach().clone()
    weight.view(-1)[77] += 0.01
    patch.setitem(module._parameters, "weight", torch.nn.Parameter(weight))


CHANGED = {
    "prompt": (with_prompt, "prompts_digest"),
    "template": (with_template, "prompts_digest"),
    "drafter": (lambda patch, run: nudge(patch, run[2][0].drafter.norm), "weights_digest of Mine (2)"),
    "target": (lambda patch, run: nudge(patch, run[0].lm_head), "weights_digest of Target only"),
    "configuration": (
        lambda patch, run: patch.setattr(run[0].config, "rms_norm_eps", 2e-6), "weights_digest of Target only"
    ),
    "methods": (
        lambda patch, run: run.__setitem__(2, [drafting("Yours", run[0], run[2][0].drafter)]), "Mine (2), Target"
    ),
}  # fmt: skip


@pytest.mark.parametrize(("change", "fact"), CHANGED.values(), ids=CHANGED)
def test_another_run_is_not_continued(done, tmp_path, monkeypatch, change, fact):
    run, finished = list(done[0]), done[1]
    path = Path(shutil.copy(finished, tmp_path))
    change(monkeypatch, run)
    with pytest.raises(ValueError) as refused:
        run_benchmark(*run, path)
    message = str(refused.value)
    assert "line 1: " in message and fact in message and "`--output`" in message and "\n" not in message
    assert path.read_bytes() == finished.read_bytes()


def test_every_fact_of_every_header_counts_and_every_line_is_looked_at(done, tmp_path):
    run, finished = done
    first, *records = finished.read_text().splitlines()
    path, header = tmp_path / "r.jsonl", json.loads(first)["run"]
    facts = {"commit", "hardware", "threads", "dtype", "target", "data", "limit", "max_new_tokens", "seed", "modes"}
    changes = [({**header, fact: "other"}, (f"`{fact}` other", "this one has")) for fact in facts]
    changes.append(({**header, "versions": {**header["versions"], "torch": "1"}}, ("`versions of torch` 1",)))
    changes.append(({**header, "new": 1}, ("`new` 1", "no value")))
    changes.append(({k: v for k, v in header.items() if k != "weights_digest"}, ("`weights_digest of ", "no value")))
    assert facts <= header.keys()
    later = [(json.dumps({"run": changed}), words) for changed, words in changes]
    for line, words in [*later, ("nonsense", ("JSON",))]:  # the last is no generation
        path.write_text("\n".join([first, *records, line, ""]))
        with pytest.raises(ValueError) as refused:
            run_benchmark(*run, path)
        assert all(word in str(refused.value) for word in ("r.jsonl, line 4", *words)), refused.value


def test_a_finished_run_generates_nothing_more_and_dates_do_not_matter(done, tmp_path, monkeypatch):
    run, finished = done
    monkeypatch.setattr(run[0], "generate", None)
    monkeypatch.setattr(
        "hf_hyperdflash.benchmark.runner.started", lambda: {"date": "2030-01-01", "command": "another"}
    )
    runs, records = read(run_benchmark(*run, shutil.copy(finished, tmp_path)))
    assert [each["date"] == "2030-01-01" for each in runs] == [False, True] and len(records) == 2


def test_only_one_writes_into_a_file(done, tmp_path):
    path = tmp_path / "out" / "r.jsonl"
    path.parent.mkdir()
    with only_writer(path), pytest.raises(ValueError, match=r"r\.jsonl .* another process"):
        run_benchmark(*done[0], path)
    runs, records = read(run_benchmark(*done[0], path))  # a lock that nobody holds any more is none
    assert len(runs) == 1 and list(map(without_times, records)) == list(map(without_times, read(done[1])[1]))


def test_a_killed_run_goes_on_where_it_stopped(pair, benchmark, tmp_path, monkeypatch, capsys):
    """A record is written as soon as it can be compared: a kill during the last method of a prompt loses that one
    only, and half a line that it was about to write."""
    target, _, drafter = pair
    asked = []

    def generate(*args, **kwargs):
        asked.append(None)
        if len(asked) == 6:  # three warm up
            raise KeyboardInterrupt
        return type(target).generate(target, *args, **kwargs)

    several, path = [drafting("Mine (2)", target, drafter, 2), lookup(target)], tmp_path / "r.jsonl"
    fields = {"suites": ["gsm8k"], "limit": 1, "max_new_tokens": 4, "temperatures": [0.7]}
    _, whole = benchmark(several, tmp_path / "whole.jsonl", **fields)
    monkeypatch.setattr(target, "generate", generate)
    with pytest.raises(KeyboardInterrupt):
        benchmark(several, path, **fields)
    assert [record["method"] for record in read(path)[1]] == [TARGET_ONLY, several[0].name]
    with path.open("a") as file:
        file.write('{"suite": "gs')
    runs, records = benchmark(several, path, **fields)
    assert len(asked) == 6 + 3 + 1 and len(runs) == 2 and "2 of 3 " in capsys.readouterr().err
    assert list(map(without_times, records)) == list(map(without_times, whole))
