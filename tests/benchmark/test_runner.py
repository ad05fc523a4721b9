import copy
import itertools
import json
import multiprocessing
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_hyperdflash import HyperDFlashDrafter, PromptLookupDrafter
from hf_hyperdflash.benchmark.results import TARGET_ONLY
from hf_hyperdflash.benchmark.runner import BenchmarkSettings, hardware, run_benchmark
from hf_hyperdflash.training.data.encoding import encode_prompts
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
def data(tmp_path):
    for name, prompts in SUITE.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"turns": turns}) + "\n" for turns in prompts))
    return str(tmp_path)


def settings(data, **fields):
    return BenchmarkSettings(**{"suites": list(SUITE), "data": data, "max_new_tokens": 20, **fields})


def drafting(name, target, drafter, count=None, budget=None, **more):
    options = {"num_assistant_tokens": count, "tree_budget": budget}
    return Local(target, drafter, options, name, **more)


def methods(target, drafter):
    return [
        drafting("HyperDFlash (6)", target, drafter, 6),
        drafting("HyperDFlash (2)", target, drafter, 2),
        drafting("Prompt lookup (3)", target, PromptLookupDrafter(target, 3)),
    ]


def read(path):
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [line["run"] for line in lines if "run" in line], [line for line in lines if "run" not in line]


def without_times(record):
    return {k: v for k, v in record.items() if "seconds" not in k and k != "peak_memory"}


def test_a_method_with_a_budget_grows_trees(pair, data, tmp_path):
    target, tokenizer, drafter = pair
    method, chosen = drafting("Trees (3, 9 nodes)", target, drafter, 3, 9), settings(data, suites=["gsm8k"])
    _, records = read(run_benchmark(target, tokenizer, [method], chosen, tmp_path / "r.jsonl"))
    assert {record["identical"] for record in records} == {None, True}
    assert drafter.last_stats.nodes > 5 * drafter.last_stats.rounds and drafter.last_stats.draft_positions == 3


def test_an_adaptive_method_learns_from_its_own_texts(pair, data, tmp_path):
    target, tokenizer, drafter = pair
    own, heard = copy.deepcopy(drafter), []
    adapt = own.adapt
    own.adapt = lambda target: heard.append(adapt(target, every=2, policy="always", steps=1)) or heard[0]
    chosen = settings(data)
    learns = [
        drafting("Fixed (3)", target, drafter, 3),
        drafting("Learns (3, adaptive)", target, own, 3, is_adaptive=True),
    ]
    runs, records = read(run_benchmark(target, tokenizer, learns, chosen, tmp_path / "r.jsonl"))
    texts = [record for record in records if record["method"] == "Learns (3, adaptive)"]
    assert len(heard) == 1 and len(heard[0].log) == len(texts) and any(decision.arm for decision in heard[0].log)
    assert {record["identical"] for record in records} == {None, True}
    assert runs[0]["methods"]["Learns (3, adaptive)"].endswith("parameters, learns while it serves")
    assert own.observer is None and drafter.observer is None


# Takes seconds: every method of a benchmark writes texts.
def test_every_method_runs_every_turn_and_writes_the_targets_text(pair, data, tmp_path):
    target, tokenizer, drafter = pair
    path = run_benchmark(target, tokenizer, methods(target, drafter), settings(data), tmp_path / "out" / "r.jsonl")
    runs, records = read(path)
    assert len(records) == 4 * (2 + 2) and len(runs) == 1
    assert drafter.num_draft_tokens == 8  # as it was
    assert runs[0]["methods"].keys() == {r["method"] for r in records} and runs[0]["dtype"] == "float32"
    size = sum(weight.numel() for weight in drafter.parameters())
    described = f"HyperDFlashDrafter, hybrid over layers [1, 3, -1], {size:,} parameters"
    assert runs[0]["methods"]["HyperDFlash (6)"] == described
    assert runs[0]["methods"]["Prompt lookup (3)"] == "PromptLookupDrafter"
    for record in records:
        place = [r for r in records if all(r[k] == record[k] for k in ("suite", "prompt", "turn"))]
        assert [r["method"] for r in place].count(record["method"]) == 1
        own = next(r for r in place if r["method"] == TARGET_ONLY)
        assert record["new_tokens"] == len(own["output_ids"])
        if record is own:
            assert record["rounds"] is None and record["identical"] is None
            continue
        assert record["identical"] is True and record["first_difference"] is None
        assert record["rounds"] == len(record["emitted"]) == len(record["accepted"]) > 0
        assert sum(record["emitted"]) in (record["new_tokens"] - 1, record["new_tokens"] - 2)
        assert record["draft_positions"] <= int(record["method"].partition("(")[2][0])
    # Methods take turns at being first.
    firsts = {r["method"] for i, r in enumerate(records) if i % 4 == 0}
    assert len(firsts) > 1


def test_the_second_turn_follows_the_targets_own_answer(pair, data, tmp_path):
    target, tokenizer, drafter = pair
    path = run_benchmark(
        target, tokenizer, methods(target, drafter)[2:], settings(data, suites=["mt-bench"], modes=["think-high"]),
        tmp_path / "r.jsonl",
    )  # fmt: skip
    _, records = read(path)
    first = next(r for r in records if r["method"] == TARGET_ONLY and r["turn"] == 0)
    answer = tokenizer.decode(first["output_ids"], skip_special_tokens=True).rpartition("</think>")[2]
    turns = SUITE["mt-bench"][0]
    messages = [{"role": "user", "content": turns[0]}]
    asked = encode_prompts(tokenizer, [{"messages": messages}], thinking=True)[0]
    assert first["prompt_tokens"] == asked.shape[1]
    messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": turns[1]}]
    asked = encode_prompts(tokenizer, [{"messages": messages}], thinking=True)[0]
    assert {r["prompt_tokens"] for r in records if r["turn"] == 1} == {asked.shape[1]}
    expected = target.generate(asked, do_sample=False, max_new_tokens=20)[0, asked.shape[1] :].tolist()
    assert next(r for r in records if r["method"] == TARGET_ONLY and r["turn"] == 1)["output_ids"] == expected


def test_what_a_target_thought_is_no_part_of_the_conversation(pair, data, tmp_path):
    target, tokenizer, drafter = pair
    thinking = copy.copy(tokenizer)
    thinking.decode = lambda ids, **options: "<think>Let me see.</think>It is."
    chosen = settings(data, suites=["mt-bench"], max_new_tokens=4)
    path = run_benchmark(target, thinking, methods(target, drafter)[2:], chosen, tmp_path / "r.jsonl")
    turns = SUITE["mt-bench"][0]
    messages = [{"role": "user", "content": turns[0]}, {"role": "assistant", "content": "It is."}]
    asked = encode_prompts(tokenizer, [{"messages": [*messages, {"role": "user", "content": turns[1]}]}])[0]
    assert {r["prompt_tokens"] for r in read(path)[1] if r["turn"] == 1} == {asked.shape[1]}


def test_steps_are_timed_from_the_first_token_on(pair, data, tmp_path, monkeypatch):
    """With a clock that ticks whenever it is looked at: at the beginning, for the prompt and every token, at the
    end."""
    target, tokenizer, drafter = pair
    monkeypatch.setattr(time, "perf_counter", map(float, itertools.count()).__next__)
    chosen = settings(data, suites=["gsm8k"], limit=1, max_new_tokens=6)
    path = run_benchmark(target, tokenizer, methods(target, drafter)[2:], chosen, tmp_path / "r.jsonl")
    records = {record["method"]: record for record in read(path)[1]}
    own, lookup = records[TARGET_ONLY], records["Prompt lookup (3)"]
    assert (own["seconds"], own["decode_seconds"]) == (own["new_tokens"] + 2, own["new_tokens"])
    assert 0 < lookup["draft_seconds"] + lookup["verify_seconds"] < lookup["loop_seconds"] < lookup["decode_seconds"]


def test_texts_are_drawn_from_the_whole_distribution_each_for_itself(pair, data, tmp_path, monkeypatch):
    target, tokenizer, drafter = pair
    monkeypatch.setattr(target.generation_config, "top_k", 1)  # what the target's maker recommends is not asked
    (Path(data) / "gsm8k.jsonl").write_text((json.dumps({"turns": SUITE["gsm8k"][0]}) + "\n") * 2)
    chosen = settings(data, suites=["gsm8k"], temperatures=[0.0, 3.0], max_new_tokens=12)
    path = run_benchmark(target, tokenizer, methods(target, drafter)[2:], chosen, tmp_path / "r.jsonl")
    texts = [r["output_ids"] for r in read(path)[1] if r["method"] == TARGET_ONLY]
    assert len(texts) == 4 and texts[0] == texts[1] != texts[2] != texts[3] != texts[0]


def test_the_first_difference_of_a_text_that_ends_early_is_its_end(pair, data, tmp_path, monkeypatch):
    target, tokenizer, drafter = pair

    def generate(ids, **options):
        text = type(target).generate(target, ids, **options)
        return text[:, :-3] if "assistant_model" in options else text

    monkeypatch.setattr(target, "generate", generate)
    chosen = settings(data, suites=["gsm8k"], limit=1, max_new_tokens=8)
    _, records = read(
        run_benchmark(target, tokenizer, [drafting("Mine", target, drafter)], chosen, tmp_path / "r.jsonl")
    )
    mine = next(r for r in records if r["method"] == "Mine")
    assert (mine["identical"], mine["first_difference"], mine["new_tokens"]) == (False, 5, 5)


@pytest.mark.nightly  # a process that is killed, twice
def test_a_killed_run_goes_on_where_it_stopped(pair, data, tmp_path, capsys):
    target, tokenizer, drafter = pair
    chosen = methods(target, drafter)[:1]
    sampled = settings(data, temperatures=[0.0, 1.0], max_new_tokens=8)
    whole = run_benchmark(target, tokenizer, chosen, sampled, tmp_path / "whole.jsonl")
    lines = whole.read_text().splitlines()
    expected = [without_times(r) for r in read(whole)[1]]
    for cut in (1, len(lines) - 2):
        killed = tmp_path / f"killed-{cut}.jsonl"
        killed.write_text("\n".join([*lines[:cut], lines[cut][:40]]))
        runs, records = read(run_benchmark(target, tokenizer, chosen, sampled, killed))
        assert sorted(map(str, map(without_times, records))) == sorted(map(str, expected)) and len(runs) == 2
        told = f"{cut - 1} of {len(expected)} generations are there already, in {killed}."
        assert (told in capsys.readouterr().err) == (cut > 1)
    assert len(read(run_benchmark(target, tokenizer, chosen, sampled, whole))[1]) == len(
        expected
    )  # nothing left to do
    with pytest.raises(ValueError, match=r"line 1: .*`max_new_tokens` 8, this one has 30"):
        run_benchmark(target, tokenizer, chosen, settings(data, temperatures=[0.0, 1.0], max_new_tokens=30), whole)


@pytest.fixture(scope="module")
def done(pair, tmp_path_factory):
    """A finished run of one prompt by one method, and what it was run with."""
    folder = tmp_path_factory.mktemp("done")
    (folder / "gsm8k.jsonl").write_text('{"turns": ["What is 5 times 6?"]}\n')
    target, tokenizer, drafter = pair
    run = (
        target,
        tokenizer,
        [drafting("Mine (2)", target, drafter, 2)],
        settings(str(folder), suites=["gsm8k"], max_new_tokens=4),
    )
    return run, run_benchmark(*run, folder / "r.jsonl")


def changed_prompt(monkeypatch, target, tokenizer, drafter, run):
    monkeypatch.setattr(run[3], "data", shutil.copytree(run[3].data, run[3].data + "-copy/" + Path(run[3].data).name))
    (Path(run[3].data) / "gsm8k.jsonl").write_text('{"turns": ["What is 5 times 7?"]}\n')


def changed_template(monkeypatch, target, tokenizer, drafter, run):
    later = "{% if messages | length > 3 %}x{% endif %}"  # nothing that a first turn shows
    monkeypatch.setattr(tokenizer, "chat_template", tokenizer.chat_template + later)


def nudge(monkeypatch, module):
    weight = module.weight.detach().clone()
    weight.view(-1)[77] += 0.01
    monkeypatch.setitem(module._parameters, "weight", torch.nn.Parameter(weight))


def changed_drafter(monkeypatch, target, tokenizer, drafter, run):
    nudge(monkeypatch, drafter.norm)


def changed_target(monkeypatch, target, tokenizer, drafter, run):
    nudge(monkeypatch, target.lm_head)


def changed_config(monkeypatch, target, tokenizer, drafter, run):
    monkeypatch.setattr(target.config, "rms_norm_eps", 2e-6)


def changed_version(monkeypatch, target, tokenizer, drafter, run):
    monkeypatch.setattr("hf_hyperdflash.benchmark.runner.__version__", "0.0.7")


def changed_commit(monkeypatch, target, tokenizer, drafter, run):
    monkeypatch.setattr("hf_hyperdflash.benchmark.runner.commit", lambda: "abc1234")


def changed_data(monkeypatch, target, tokenizer, drafter, run):
    monkeypatch.setattr(run[3], "data", shutil.copytree(run[3].data, run[3].data + "-moved"))


@pytest.mark.parametrize(
    ("change", "fact"),
    [
        (changed_prompt, "prompts_digest"), (changed_template, "prompts_digest"),
        (changed_drafter, r"weights_digest of Mine \(2\)"), (changed_target, "weights_digest of Target only"),
        (changed_config, "weights_digest of Target only"), (changed_version, "versions of hf_hyperdflash"),
        (changed_commit, "commit"), (changed_data, "data"),
    ],
)  # fmt: skip
def test_another_run_is_not_continued(pair, done, tmp_path, monkeypatch, change, fact):
    run, finished = done
    path = Path(shutil.copy(finished, tmp_path))
    change(monkeypatch, *pair, run)
    with pytest.raises(ValueError, match=rf"line 1: the run there has `{fact}` .*, this one has "):
        run_benchmark(*run, path)
    assert path.read_bytes() == finished.read_bytes()


def test_a_run_of_other_methods_is_not_continued(pair, done, tmp_path):
    (target, tokenizer, drafter), (run, finished) = pair, done
    path = Path(shutil.copy(finished, tmp_path))
    message = r"line 1: the run there has the methods Mine \(2\), .*; this one has Target only, Yours\. .*`--output`"
    with pytest.raises(ValueError, match=message):
        run_benchmark(target, tokenizer, [drafting("Yours", target, drafter)], run[3], path)
    assert path.read_bytes() == finished.read_bytes()


def test_every_header_counts_and_every_line_is_looked_at(done, tmp_path):
    run, finished = done
    first, *records = finished.read_text().splitlines()
    path, header = tmp_path / "r.jsonl", json.loads(first)["run"]
    without = {name: value for name, value in header.items() if name != "weights_digest"}
    for later, message in (
        (json.dumps({"run": {**header, "seed": 5}}), "line 4: .* `seed` 5, this one has 0"),
        (json.dumps({"run": {**header, "new": 1}}), "line 4: .* `new` 1, this one has no value"),
        (json.dumps({"run": without}), "line 4: .* `weights_digest of .*` no value, this one has"),
        ('{"suite": "gsm8k"}', "line 4: no mode, temperature, "), ("[]", "line 4: expected a generation"),
        ('{"run": 1}', "line 4: expected a generation.*or choose another output"), ("nonsense", "line 4: not JSON"),
    ):  # fmt: skip
        path.write_text("\n".join([first, *records, later, ""]))
        with pytest.raises(ValueError, match=rf"r\.jsonl, {message}"):
            run_benchmark(*run, path)
    path.write_text("\n".join([*records, ""]))
    with pytest.raises(ValueError, match="line 1: expected the settings"):
        run_benchmark(*run, path)


def test_a_finished_run_generates_nothing_more(done, tmp_path, monkeypatch):
    run, finished = done
    monkeypatch.setattr(run[0], "generate", None)
    path = run_benchmark(*run, shutil.copy(finished, tmp_path))
    assert [len(lines) for lines in read(path)] == [2, 2]


def benchmark_forever(run, path, began):
    def generate(*args, **kwargs):
        began.send(None)
        signal.pause()

    run[0].generate = generate
    run_benchmark(*run, path)


def test_a_second_process_is_told_of_the_first_and_a_dead_one_is_forgotten(done, tmp_path):
    run, finished = done
    path = tmp_path / "out" / "r.jsonl"
    receiver, sender = multiprocessing.Pipe(duplex=False)
    first = multiprocessing.get_context("fork").Process(target=benchmark_forever, args=(run, path, sender))
    first.start()
    receiver.recv()
    try:
        with pytest.raises(ValueError, match=r"r\.jsonl is being written by another process"):
            run_benchmark(*run, path)
    finally:
        first.kill()
        first.join()
    runs, records = read(run_benchmark(*run, path))
    assert len(runs) == 2 and list(map(without_times, records)) == list(map(without_times, read(finished)[1]))


def test_a_record_is_written_as_soon_as_it_can_be_compared(pair, done, tmp_path, monkeypatch):
    """A kill during the last method of a prompt loses that one only."""
    target, tokenizer, drafter = pair
    (_, _, _, chosen), _ = done
    asked = []

    def generate(*args, **kwargs):
        asked.append(None)
        if len(asked) == 6:  # three warm up
            raise KeyboardInterrupt
        return type(target).generate(target, *args, **kwargs)

    monkeypatch.setattr(target, "generate", generate)
    several = methods(target, drafter)[:2]
    with pytest.raises(KeyboardInterrupt):
        run_benchmark(target, tokenizer, several, chosen, tmp_path / "r.jsonl")
    assert [record["method"] for record in read(tmp_path / "r.jsonl")[1]] == [TARGET_ONLY, several[0].name]
    run_benchmark(target, tokenizer, several, chosen, tmp_path / "r.jsonl")
    assert len(asked) == 6 + 3 + 1


def test_nothing_to_compare_is_refused(pair, data, tmp_path):
    target, tokenizer, _ = pair
    with pytest.raises(ValueError, match="No method is given"):
        run_benchmark(target, tokenizer, [], settings(data), tmp_path / "out" / "r.jsonl")
    assert not (tmp_path / "out").exists()


def test_a_difference_is_counted(pair, data, tmp_path):
    target, tokenizer, _ = pair

    class Wrong(PromptLookupDrafter):
        """Changes the target under our feet at every other generation: its texts cannot be the same."""

        hook = None

        def new_context(self):
            if self.hook is None:
                self.hook = target.lm_head.register_forward_hook(lambda module, args, logits: logits.roll(1, -1))
            else:
                self.hook = self.hook.remove()
            return super().new_context()

    wrong = Wrong(target, 3)
    path = run_benchmark(
        target,
        tokenizer,
        [drafting("Wrong (3)", target, wrong)],
        settings(data, suites=["gsm8k"]),
        tmp_path / "r.jsonl",
    )
    target.lm_head._forward_hooks.clear()
    # On while warming up and for the first text of the target, off for its own; on for both of the second prompt.
    flags = [(r["identical"], r["first_difference"]) for r in read(path)[1] if r["method"] == "Wrong (3)"]
    assert flags == [(False, 0), (True, None)]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"suites": []}, "suites"), ({"modes": ["thinking"]}, "thinking"), ({"temperatures": [-1.0]}, "at least 0"),
        ({"limit": 0}, "limit"), ({"max_new_tokens": 2}, "max_new_tokens"),
    ],
)  # fmt: skip
def test_bad_settings_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        BenchmarkSettings(**fields)


def test_names_must_differ_and_hardware_is_named(pair, data, tmp_path):
    target, tokenizer, drafter = pair
    with pytest.raises(ValueError, match=r"each once\. Name .* `--drafter NAME=PATH`"):
        run_benchmark(target, tokenizer, [drafting("A", target, drafter)] * 2, settings(data), tmp_path / "r.jsonl")
    assert "core" in hardware("cpu")
