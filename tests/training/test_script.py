"""`hf-hyperdflash train`: its help, what it does, and the record of what happened. What it refuses before any work:
tests/refusals/test_training.py."""

import json
import logging
import os
import re
import signal
import stat
import subprocess
import sys
import threading
import time
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import datasets
import pytest
import torch
from transformers import AutoConfig, AutoTokenizer, TrainingArguments
from typer.testing import CliRunner

from hf_hyperdflash import DeepseekV4DSparkDrafter, HyperDFlashConfig, HyperDFlashDrafter, load_drafter, load_target
from hf_hyperdflash.cli.app import app
from hf_hyperdflash.drafters.deepseek_v4.configuration_dspark import DeepseekV4DSparkConfig
from hf_hyperdflash.hub.cards import TRAINING_RECORD, drafter_card
from hf_hyperdflash.hub.formats import export_dflash
from hf_hyperdflash.training.arguments import HyperDFlashTrainingArguments
from hf_hyperdflash.training.flags import ScriptArguments, help_text
from hf_hyperdflash.training.runs.checkpoints import newest_complete
from hf_hyperdflash.training.runs.progress import format_entry
from hf_hyperdflash.training.script import _quiet_output, main, make_parser

from ..conftest import MODELS, mostly_nightly
from ..helpers.deepseek_checkpoints import dspark_fields
from ..helpers.gguf_files import chatting_llama
from ..helpers.headed_drafters import headless
from ..helpers.processes import python
from ..helpers.refusals import Refusal

TARGET, SHIPPED = str(MODELS / "tiny-deepseek-v4"), MODELS / "tiny-deepseek-v4-hyperdflash"


def write(path: Path, rows: list) -> str:
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return str(path)


def chats(count: int, answer: str = "it is this, my friend.") -> list[dict]:
    said = [("user", "what is it?"), ("assistant", answer)]
    return [{"messages": [{"role": role, "content": f"{i}: {text}"} for role, text in said]} for i in range(count)]


def flags(folder, dataset, **others) -> list[str]:
    values = dict(target=TARGET, dataset=dataset, output_dir=folder / "out", report_to="none", layers=1, max_steps=2,
                  eval_rows=2, eval_prompts=1, eval_max_new_tokens=4, num_anchors=4) | others  # fmt: skip
    given = [part for name, value in values.items() if value is not None for part in (f"--{name}", str(value))]
    return [*given, "--use_cpu"]


def settings_of(folder) -> dict:
    return json.loads((folder / TRAINING_RECORD).read_text())["settings"]


@pytest.fixture
def train(tmp_path):
    """Run the command on some chats; `out` is where it writes."""

    def run(rows=None, out="out", **given):
        data = rows if isinstance(rows, str) else write(tmp_path / "rows.jsonl", rows or chats(6))
        main(flags(tmp_path, data, **{"output_dir": tmp_path / out, **given}))
        return tmp_path / out

    return run


def test_the_help_is_the_parsers_and_loads_nothing_heavy():
    code = """
import sys
from hf_hyperdflash.cli.app import app
app(["train", "--help"], standalone_mode=False)
print([name for name in ("torch", "transformers", "datasets", "numpy") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    *shown, loaded = done.stdout.splitlines()
    assert loaded == "[]" and shown[0].startswith("usage: ")
    entries: dict[str, list[str]] = {}
    for line in help_text("train").split("\n\nThe run:\n")[1].splitlines():
        if line.startswith("  --"):
            name, _, default = line[4:].partition(" ")
            entries[name] = [default.partition(" (stage 2")[0], ""]
        elif line.startswith("        "):
            entries[name][1] += "".join(line.split())
    # `--x` and the `--no_x` that comes with a switch that is on have one name.
    actions = {action.dest: action for action in reversed(make_parser([])._actions) if action.dest != "help"}
    own = {part.name for part in (*fields(ScriptArguments), *fields(HyperDFlashTrainingArguments))}
    for name in own - {part.name for part in fields(TrainingArguments)}:
        assert entries[name][1] == "".join((actions[name].help or "").replace("%%", "%").split()), name
    for name, (default, described) in entries.items():
        if described and type(actions[name].default) in (int, float):
            assert float(default) == actions[name].default, name


# What happens, and what is recorded of it


def test_the_record_tells_what_happened(train, caplog, capsys, tmp_path):
    (tmp_path / "chat.jinja").write_text("\ufeff" + Path(TARGET, "chat_template.jinja").read_text())
    more = dict(max_length=12, num_train_epochs=7, sliding_window="none", save_steps=1, warmup_steps=0.5, max_steps=3)
    more |= dict(recipe="dspark", kl_weight=0.3, sequential_head="markov", head_rank=4)
    folder = train(chats(10), chat_template=tmp_path / "chat.jinja", **more)
    assert "8 of 8" in caplog.text and "12 tokens" in caplog.text
    assert "Reading" in (said := capsys.readouterr().err) and f"Loading {TARGET}" in said
    assert "8 rows, 2 held out (by `--eval_rows 2`), 1 of them" in said
    expected = {
        "steps": 3, "schedule_steps": 3, "warmup_steps": 2, "train_rows": 8, "held_out_rows": 2, "epochs": 1.5,
        "lr_scheduler_type": "cosine", "max_grad_norm": 1.0, "adam_beta1": 0.9, "adam_beta2": 0.999,
        "weight_decay": 0.0,
        "recipe": "dspark", "ce_weight": 0.1, "tv_weight": 1.8, "kl_weight": 0.3, "kl_positions": 2, "loss_decay": 4.0,
        "confidence_weight": 0.0, "blind_weight": 0.0,  # without such heads
        "chat_template": "chat.jinja", "dataset": ["rows.jsonl"], "target": "tiny-deepseek-v4",
    }  # fmt: skip
    facts = settings_of(folder)
    assert {name: facts[name] for name in expected} == expected and not {"num_train_epochs", "eval_rows"} & set(facts)
    history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    assert any("eval_conditional_acceptance_2" in entry for entry in history)  # what no line has
    card = str(drafter_card(folder))
    for line in (
        "| schedule | cosine |", "| Adam's first beta | 0.9 |", "| gradients clipped to norm | 1 |",
        "| epochs | 1.5 |", "| loss | dspark |", "| total variation weight | 1.8 |", "| steps | 3 |",
        "| rows held out | 2 |", "| warm-up steps | 2 |", "| Adam's epsilon | 1e-08 |",
    ):  # fmt: skip
        assert line in card, line
    assert HyperDFlashConfig.from_pretrained(folder).sliding_window is None


LOGGED = [
    *["step N: loss N, grad norm N, learning rate N, cross entropy N, kl N"] * 2,
    "step N, held out: loss N, teacher-forced tau N, N expected at temperature N; accepted at each position, %: {}",
    "step N, generated: tau N, N tokens/s; accepted at each position, %: {}",
    "N steps in N s, mean loss N",
]


@pytest.mark.nightly  # a command in a process of its own
def test_the_command_shows_how_far_it_is_and_no_warning_of_pinned_memory(tmp_path):
    """In a process of its own: the command sets how much transformers says when that is first imported."""
    command = ["-c", "from hf_hyperdflash.cli.app import run; run()", "train"]
    given = flags(tmp_path, write(tmp_path / "chats.jsonl", chats(6)))
    given += ["--logging_steps", "1", "--eval_strategy", "steps", "--eval_steps", "2"]
    for more in (["--disable_tqdm", "false"], ["--overwrite_output_dir", "true"]):
        # There is no terminal, so that bars have to be asked for.
        done = python(*command, *given, *more)
        assert done.returncode == 0, done.stderr
        for bar in ("2/2 [", "%|"):
            assert (bar in done.stderr) is ("false" in more)
        assert "pin_memory" not in done.stderr
        lines = [line for line in done.stdout.replace("\r", "\n").splitlines() if line.startswith(("step", "2 steps"))]
        shown = [re.sub(r"-?\d+(\.\d+)?(e[+-]\d+)?", "N", line) for line in lines[:5]]
        shown = [re.sub(r"(N, )*N$", "{}", line) if "%" in line else line for line in shown]
        assert shown == LOGGED
        assert [line[:7] for line in lines[:5]] == ["step 1:", "step 2:", "step 2,", "step 2,", "2 steps"]


ENTRIES = [
    ({"loss": 1.23456, "epoch": 2.0}, "step 7: loss 1.235"),
    (
        {"eval_long_teacher_forced_acceptance_1": 0.5, "eval_long_teacher_forced_acceptance_2": 0.254,
         "eval_long_loss": 2.0, "eval_long_teacher_forced_tau": 1.756, "eval_long_runtime": 3.0},
        "step 7, held out: loss 2, teacher-forced tau 1.76; accepted at each position, %: 50, 25",
    ),
    ({"eval_loss": 2.5, "eval_runtime": 1.0, "epoch": 1.0}, "step 7: eval loss 2.5, eval runtime 1"),
    ({"train_runtime": 9.6, "train_loss": 1.5}, "7 steps in 10 s, mean loss 1.5"),
    ({"told": "so", "count": 10**6}, "step 7: told so, count 1000000"),
]  # fmt: skip


@pytest.mark.parametrize(("logs", "line"), ENTRIES)
def test_an_entry_of_the_log_is_a_line(logs, line):
    assert format_entry(7, logs) == line


@pytest.mark.parametrize("process", [0, 1])
def test_of_several_processes_one_tells_of_loading(process, monkeypatch, caplog):
    monkeypatch.setenv("RANK", str(process))
    done = CliRunner().invoke(app, ["train", "--stage", "x"])
    assert ("Loading PyTorch" in done.stderr) is (process == 0)
    with _quiet_output(SimpleNamespace(process_index=process, disable_tqdm=True)):
        logging.getLogger("hf_hyperdflash.targets.mask_token").warning("The drafter's mask token is 3")
        assert not datasets.utils.is_progress_bar_enabled()
    assert len(caplog.messages) == 1 - process and datasets.utils.is_progress_bar_enabled()
    logging.getLogger("hf_hyperdflash.targets.mask_token").warning("again")
    assert caplog.messages[-1] == "again"


BAD_ROWS = {  # a row, and words of its reason
    "speaker": ({"messages": [{"role": "usr", "content": "q"}, {"role": "assistant", "content": "a"}]}, "'usr'"),
    "template": (
        {"messages": [{"role": "system", "content": "s"}, *chats(1)[0]["messages"]]}, "No system message, please"
    ),
}  # fmt: skip


@pytest.mark.parametrize(("name", "streaming"), [("speaker", True), ("template", False)])
def test_a_row_that_cannot_be_used_stops_no_run_and_is_named_by_file_and_line(tmp_path, name, streaming, caplog):
    """Neither among the rows to train on nor among those to generate from."""
    bad, words = BAD_ROWS[name]
    refusing = "{% if messages[0].role == 'system' %}{{ raise_exception('No system message, please') }}{% endif %}"
    template = tmp_path / "template.jinja"
    template.write_text(refusing + Path(TARGET, "chat_template.jinja").read_text())
    rows = chats(5)
    data, held_out = write(tmp_path / "rows.jsonl", [*rows, bad]), write(tmp_path / "held-out.jsonl", [bad, *rows])
    given = dict(eval_dataset=held_out, eval_prompts=2, chat_template=template)
    main([*flags(tmp_path, data, **given), *(["--streaming"] if streaming else [])])
    for where in ("rows.jsonl:6", "held-out.jsonl:1"):
        assert any(where in line and words in line for line in caplog.messages), caplog.messages
    only = write(tmp_path / "only.jsonl", [bad] * 3)
    Refusal(lambda: main(flags(tmp_path, only, output_dir=tmp_path / "o", **given)), ("only.jsonl", words)).check()


def test_a_run_that_diverges_ends_the_line_of_its_bar(train, capfd):
    worse = dict(learning_rate=1e18, max_grad_norm=0, optim="sgd", kl_weight=0, max_steps=40, warmup_steps=0)
    Refusal(lambda: train(**worse, disable_tqdm=False), ("diverged", "learning_rate")).check()
    assert capfd.readouterr().err.endswith("\n")


# Takes seconds: a command in a process of its own.
def test_a_disk_that_is_full_at_the_end_is_told_in_one_line(tmp_path):
    """No file can grow past 256 KB, which is what a full disk does to a writer."""
    data = write(tmp_path / "rows.jsonl", chats(6))
    code = f"""
import resource, sys
from hf_hyperdflash.cli.app import run
resource.setrlimit(resource.RLIMIT_FSIZE, (2**18, 2**18))
sys.argv = ["hf-hyperdflash", "train", *{flags(tmp_path, data, save_strategy="no")!r}]
run()
"""
    (tmp_path / "run.py").write_text(code)
    done = python(tmp_path / "run.py", env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])})
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr[-2000:]
    *_, last = done.stderr.splitlines()
    assert last.startswith("Error: ") and str(tmp_path / "out") in last and "make room" in last


# Earlier drafters


def test_deepseeks_own_drafter_is_trained_on(train, tmp_path):
    """One that was saved goes in as an earlier stage's drafter, and comes out as what it was."""
    config = AutoConfig.from_pretrained(TARGET)
    for name, value in dspark_fields(target_layer_ids=[2, 4]).items():
        setattr(config, name, value)
    drafter = DeepseekV4DSparkDrafter(DeepseekV4DSparkConfig.from_target_config(config, blocks=1))
    drafter.save_pretrained(tmp_path / "dspark")
    given = dict(drafter=tmp_path / "dspark", layers=None)
    trained = load_drafter(train(**given))
    assert type(trained) is DeepseekV4DSparkDrafter and trained.config.target_layer_ids == [2, -1]
    assert not torch.equal(trained.main_proj.weight.float(), drafter.main_proj.weight)
    record = json.loads((tmp_path / "out" / TRAINING_RECORD).read_text())
    assert record["settings"]["steps"] == 2 and "eval_tau" in record["history"][-1]
    words = ("DeepseekV4DSparkDrafter", "expected none")
    Refusal(lambda: train(**given, out="more", sequential_head="state"), words).check()


def test_a_head_is_trained_onto_an_earlier_drafter(train, tmp_path):
    """What the drafter knows stays; without enough training it drafts as before."""
    before = headless(load_drafter(SHIPPED, dtype=torch.float32))
    before.save_pretrained(tmp_path / "blind")
    heads = dict(sequential_head="state", head_rank=8, layers=None)
    out = train(drafter=tmp_path / "blind", learning_rate=1e-9, save_dtype="float32", **heads)
    trained, settings = load_drafter(out), settings_of(out)
    assert trained.config.sequential_head == "state" and trained.head.down_proj.weight.any()
    torch.testing.assert_close(trained.norm.weight, before.norm.weight, rtol=0, atol=1e-6)
    assert settings["sequential_head"] == "state" and settings["head_rank"] == 8 and settings["num_draft_tokens"] == 8


@pytest.mark.parametrize("drafts", [10, None])
def test_an_earlier_drafter_goes_on_with_longer_blocks_or_its_own(train, tmp_path, drafts):
    """No weight depends on how many drafts a block has; temperatures are of the weights and positions it had."""
    sure = load_drafter(SHIPPED)
    sure.config.confidence_temperatures = [2.0] * 8
    sure.save_pretrained(tmp_path / "sure")
    out = train(drafter=tmp_path / "sure", num_draft_tokens=drafts, layers=None)
    trained, drafts = load_drafter(out), drafts or 8
    assert trained.max_draft_tokens == drafts == settings_of(out)["num_draft_tokens"]
    assert trained.config.confidence_temperatures is None


# Takes seconds: three runs of training.
@pytest.mark.parametrize("kind", mostly_nightly(["hyperdflash", "eagle3"]))
def test_a_vocabulary_of_the_drafters_own_is_chosen_trained_and_trained_on(train, tmp_path, kind):
    first = load_drafter(out := train(drafter_type=kind, draft_vocab_size=50, save_dtype="float32"))
    said = AutoTokenizer.from_pretrained(TARGET)(" friend").input_ids[-1]
    assert first.config.draft_vocab_size == settings_of(out)["draft_vocab_size"] == 50
    assert said in first.draft_ids.tolist()
    again = dict(drafter=out, layers=None, save_dtype="float32")
    more = load_drafter(train(out="more", **again))
    assert torch.equal(more.draft_ids, first.draft_ids) and not torch.equal(more.lm_head.weight, first.lm_head.weight)
    others = load_drafter(train(chats(6, answer=" a small river"), out="others", **again, draft_vocab_size=40))
    assert others.config.draft_vocab_size == 40 and others.lm_head.weight.shape[0] == len(others.draft_ids) == 40
    said = AutoTokenizer.from_pretrained(TARGET)(" river").input_ids[-1]
    assert said in others.draft_ids.tolist() and said not in first.draft_ids.tolist()


def test_somebody_elses_drafter_is_trained_on(train, tmp_path, dense_pair):
    """In another program's layout, which does not say what target it is for: afterwards it does."""
    target = load_target(dense_pair[0])
    drafter = HyperDFlashDrafter.from_target(target, reducer="fc", target_layer_ids=[0, 2], mask_token_id=1)
    export_dflash(drafter, tmp_path / "theirs")
    trained = load_drafter(train(drafter=tmp_path / "theirs", layers=None, target=dense_pair[0]))
    assert not torch.equal(trained.fc.weight, drafter.fc.weight)
    assert trained.config.target_name_or_path == dense_pair[0].name and trained.config.target_model_type == "qwen3"


@pytest.mark.nightly  # a target of 49,152 tokens is trained for
def test_a_large_vocabulary_of_a_narrow_target_is_cut_to_what_answers_have(train, tmp_path, capsys):
    target, tokenizer = chatting_llama(hidden_size=16, intermediate_size=16)
    for part in (target, tokenizer):
        part.save_pretrained(tmp_path / "target")
    rows, of_target = chats(30), dict(target=tmp_path / "target", eval_prompts=0)
    drafter = load_drafter(train(rows, **of_target))
    assert 0 < drafter.config.draft_vocab_size < drafter.config.vocab_size == len(tokenizer)
    said = [token for row in rows for token in tokenizer(row["messages"][1]["content"])["input_ids"]]
    drafted = {*drafter.draft_ids.tolist()}
    assert sum(token in drafted for token in said) >= 0.99 * len(said)
    told = capsys.readouterr().err
    assert f"{len(drafted)} of {len(tokenizer)} tokens, " in told and "100.0 % of those held out" in told
    # Nor where a head chooses among candidates, which training takes of a whole vocabulary alone; 13 * 2 * 16 > 307.
    for name, given in (("all", "draft_vocab_size=0"), ("selector", "sequential_head=selector"), ("wide", "layers=2")):
        flag, _, value = given.partition("=")
        assert load_drafter(train(rows, out=name, **of_target, **{flag: value})).config.draft_vocab_size == 0


# Stopped, gone on with, replaced


def test_an_interrupted_run_says_how_to_go_on(tmp_path, capsys):
    data = write(tmp_path / "rows.jsonl", chats(12))
    arguments = flags(tmp_path, data, max_steps=100000, save_steps=1, save_total_limit=1, eval_prompts=0)

    def press_control_c():
        # The second: while it is being written, the first is whole.
        while not list((tmp_path / "out").glob("checkpoint-[!1]*/trainer_state.json")):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    threading.Thread(target=press_control_c, daemon=True).start()
    try:
        with pytest.raises(SystemExit) as ended:
            main(arguments)
    finally:
        signal.signal(signal.SIGINT, before)
    told = capsys.readouterr().err.splitlines()[-1]
    assert ended.value.code == 130 and "--resume_from_checkpoint true" in told
    assert str(newest_complete(tmp_path / "out")[0]) in told


# Takes seconds: two runs of training.
def test_an_earlier_run_is_replaced_only_where_that_is_said(train, tmp_path, monkeypatch):
    """Nothing is loaded before; the checkpoints go once training can begin, and not when it cannot."""
    more = dict(max_steps=2, save_steps=1, eval_prompts=0)
    out = train(chats(12), **more)
    assert {stat.S_IMODE(path.stat().st_mode) for path in out.glob("*.safetensors")} == {0o666 & ~umask()}
    with monkeypatch.context() as patched:
        patched.setattr("hf_hyperdflash.training.script.load_rows", lambda *_, **__: pytest.fail("it was loaded"))
        Refusal(lambda: train(**more), (str(out), "2 checkpoints", "checkpoint-2")).check()
    Refusal(lambda: train("none.jsonl", **more, overwrite_output_dir="true"), ("none.jsonl",)).check()
    assert sorted(path.name for path in out.glob("checkpoint-*")) == ["checkpoint-1", "checkpoint-2"]
    train(chats(12), eval_prompts=0, max_steps=1, save_strategy="no", overwrite_output_dir="true")
    assert not list(out.glob("checkpoint-*")) and settings_of(out)["steps"] == 1
    Refusal(lambda: train(**more), (str(out), "a trained drafter")).check()


def umask():
    now = os.umask(0)
    os.umask(now)
    return now


DIFFERENT = {
    "layers": (dict(layers=2), ("`num_hidden_layers`", "1", "2")),
    "recipe": (dict(recipe="ours"), ("`recipe`", "'hyperdflash'", "'ours'")),
    "length": (dict(max_length=16), ("the data differs", "`max_length`", "2048", "16")),
    "rows": (dict(eval_rows=3), ("the data differs", "10 rows", "9 ")),
    "other rows": (dict(rows=chats(12, "no.")), ("the data differs", "other rows")),
    "kind": (dict(drafter_type="eagle3", recipe="eagle3"), ("HyperDFlashDrafter", "Eagle3")),
    "target": (dict(target="other"), ("the target differs", "weights")),
}


# Takes seconds: two runs of training.
def test_a_run_goes_on_as_itself_alone(train, tmp_path):
    """What it may change are its length, and what it logs, saves and evaluates."""
    train(chats(12), save_steps=1, eval_prompts=0)
    model = load_target(TARGET, dtype="float32")
    with torch.no_grad():
        model.get_input_embeddings().weight[5] += 1
    model.save_pretrained(tmp_path / "other")
    AutoTokenizer.from_pretrained(TARGET).save_pretrained(tmp_path / "other")
    on = dict(max_steps=3, resume_from_checkpoint="true")
    for given, words in DIFFERENT.values():
        given = {"rows": chats(12), **given, **({"target": tmp_path / "other"} if "target" in given else {})}
        Refusal(lambda given=given: train(eval_prompts=0, **on, **given), ("checkpoint-2", *words)).check()
    out = train(chats(12), logging_steps=1, save_steps=7, eval_prompts=1, learning_rate=1e-4, **on)
    assert settings_of(out)["steps"] == 3
