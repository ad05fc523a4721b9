"""`hf-hyperdflash train`: its help, what it refuses before any work, and the record of what happened."""

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

TARGET = str(MODELS / "tiny-deepseek-v4")


def write(path: Path, rows: list) -> str:
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return str(path)


def chats(count: int, answer: str = "it is this, my friend.") -> list[dict]:
    said = [("user", "what is it?"), ("assistant", answer)]
    return [{"messages": [{"role": role, "content": f"{i}: {text}"} for role, text in said]} for i in range(count)]


def flags(tmp_path, dataset, **others) -> list[str]:
    values = dict(target=TARGET, dataset=dataset, output_dir=tmp_path / "out", report_to="none", layers=1, max_steps=2,
                  eval_rows=2, eval_prompts=1, eval_max_new_tokens=4, num_anchors=4) | others  # fmt: skip
    given = [part for name, value in values.items() if value is not None for part in (f"--{name}", str(value))]
    return [*given, "--use_cpu"]


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
    theirs = {part.name for part in fields(TrainingArguments)}
    for name in own - theirs:
        assert entries[name][1] == "".join((actions[name].help or "").replace("%%", "%").split()), name
    entries = {name: entry for name, entry in entries.items() if entry[1]}
    for name, (default, _) in entries.items():
        if type(actions[name].default) in (int, float):
            assert float(default) == actions[name].default, name


BAD = {
    "empty": ("", r"rows\.jsonl is empty"),
    "binary": ("\udcff\udcfe\x00\x01", r"rows\.jsonl:1 is not UTF-8"),
    "malformed": ('{"question": "q", "answer": "a"}\n\n{"question": \n', r"rows\.jsonl:3 is no JSON .*column 13"),
    "no object": ('{"question": "q", "answer": "a"}\n[1, 2]\n', r"rows\.jsonl:2 is a list"),
    "latin-1": (
        '{"question": "q", "answer": "a"}\n{"question": "\udce9", "answer": "a"}\n',
        r"rows\.jsonl:2 is not UTF-8",
    ),
    "three rows": ('{"question": "q", "answer": "a"}\n' * 3, r"rows\.jsonl has 3 rows, and `--eval_rows` holds 64"),
}


@pytest.mark.parametrize("name", BAD)
def test_data_that_cannot_be_used_is_said_before_the_target_is_loaded(tmp_path, name, monkeypatch):
    text, message = BAD[name]
    data = tmp_path / "rows.jsonl"
    data.write_bytes(text.encode(errors="surrogateescape"))
    monkeypatch.setattr(
        "hf_hyperdflash.training.script.load_target", lambda *args, **kwargs: pytest.fail("it was loaded")
    )
    with pytest.raises(ValueError, match=message):
        main(flags(tmp_path, data, eval_rows=64))
    if name != "three rows":
        with pytest.raises(ValueError, match=message):
            main([*flags(tmp_path, data, eval_dataset="other.jsonl"), "--streaming"])
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]


IDS = {
    "ids": ({"input_ids": [1, 2, 2048], "loss_mask": [1, 1, 1]}, r"`input_ids` has 2048, expected ids below 2048"),
    "below": ({"input_ids": [1, -2, 8], "loss_mask": [1, 1, 1]}, r"`input_ids` has -2, expected ids below 2048"),
    "hole": ({"input_ids": [1, None, 8], "loss_mask": [1, 1, 1]}, r"`input_ids` has nothing at 1"),
}


@pytest.mark.parametrize("name", IDS)
def test_tokens_of_another_tokenizer_are_refused_by_file_and_line(tmp_path, name):
    bad, message = IDS[name]
    rows = [{"input_ids": [1, 2, 3, 4], "loss_mask": [1, 1, 1, 1]}] * 5
    good, data = write(tmp_path / "good.jsonl", rows), write(tmp_path / "rows.jsonl", [*rows, bad, *rows])
    with pytest.raises(ValueError, match=rf"rows\.jsonl:6: .*{message}"):
        main(flags(tmp_path, data, eval_dataset=good, eval_prompts=0))


ROWS = {
    "speaker": (
        {"messages": [{"role": "usr", "content": "q"}, {"role": "assistant", "content": "a"}]},
        "'usr' .*user, perhaps",
    ),
    "no text": ({"messages": [{"role": "user", "content": None}, {"role": "assistant", "content": "a"}]}, "says None"),
    "nothing": ({"messages": None}, r"nothing in \['messages'\] is no conversation"),
    "images": ({**chats(1)[0], "images": ["a.png"]}, r"`images` of a row is "),
    "template": (
        {"messages": [{"role": "system", "content": "s"}, *chats(1)[0]["messages"]]},
        r"The chat template refuses the conversation \(No system message, please\)\.",
    ),
}


@pytest.mark.parametrize("streaming", mostly_nightly([False, True]))
@pytest.mark.parametrize("name", ROWS)
def test_a_row_that_cannot_be_used_stops_no_run_and_is_named_by_file_and_line(tmp_path, name, streaming, caplog):
    """Neither among the rows to train on nor among those to generate from."""
    bad, message = ROWS[name]
    template = "{% if messages[0].role == 'system' %}{{ raise_exception('No system message, please') }}{% endif %}"
    own = (MODELS / "tiny-deepseek-v4" / "chat_template.jinja").read_text()
    (tmp_path / "template.jinja").write_text(template + own)
    rows = chats(5)
    data = write(tmp_path / "rows.jsonl", [*rows, bad, *rows])
    held_out = write(tmp_path / "held-out.jsonl", [bad, *rows])
    arguments = flags(tmp_path, data, eval_dataset=held_out, eval_prompts=2, chat_template=tmp_path / "template.jinja")
    with caplog.at_level(logging.WARNING, "hf_hyperdflash.training.data.rows"):
        main([*arguments, *(["--streaming"] if streaming else [])])
    place = r"rows\.jsonl, row 5" if streaming else r"rows\.jsonl:6"
    of = r"\d+" if streaming else "11"
    assert any(
        re.match(rf"Skipped 1 of {of} rows that cannot be used.* \S+{place}: .*{message}", line)
        for line in caplog.messages
    )
    assert any(re.match(rf"Skipped 1 of 6 rows .*held-out\.jsonl:1: .*{message}", line) for line in caplog.messages)
    caplog.clear()
    with pytest.raises(ValueError, match=rf"^Nothing to train on in .*only\.jsonl.*: .*{message}"):
        main(
            flags(
                tmp_path,
                write(tmp_path / "only.jsonl", [bad] * 3),
                eval_dataset=held_out,
                output_dir=tmp_path / "o",
                chat_template=tmp_path / "template.jinja",
            )
        )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--stage", "2"], "`--stage 2` goes on from stage 1: name its drafter"),
        (["--learning_rat", "1"], "knows no '--learning_rat': --learning_rate, perhaps"),
        (["--target_dtype", "float7"], "`--target_dtype` is 'float7', expected"),
        (["--save_dtype", "nn"], "`--save_dtype` is 'nn', expected"),
        (["--save_dtype", "int64"], "`--save_dtype` is 'int64', expected"),
        (["--target_dtype", "int8"], "`--target_dtype` is 'int8', expected"),
        (["--max_steps", "-5"], "`max_steps` is -5, expected a whole number of at least 1"),
        (["--sliding_window", "some"], "`--sliding_window` is 'some', expected a number of tokens, or none"),
        (["--drafter", "x", "--sliding_window", "5"], "`--sliding_window` is for a new drafter"),
        (["--streaming"], "`--streaming` needs `--eval_dataset`"),
        (["--streaming", "--eval_dataset", "x", "--max_steps", "-1"], "`--streaming` needs `--max_steps`"),
        (["--output_dir", __file__], r"test_script\.py', a file: expected a folder"),
        (
            ["--output_dir", f"{__file__}/x"],
            r"`--output_dir` is .*/x', which cannot be made, because .*\.py is a file",
        ),
        (
            ["--eval_strategy", "steps", "--metric_for_best_model", "tau", "--eval_prompts", "0"],
            r"`metric_for_best_model` is 'tau', which is measured by generating: .*`--eval_prompts` above 0",
        ),
        (
            ["--eval_strategy", "steps", "--metric_for_best_model", "taus"],
            "is 'taus', expected tau, teacher_forced_tau",
        ),
        (["--device_map", "cuda:7"], "`--device_map` is 'cuda:7', but this torch sees only a cpu"),
        (["--device_map", "gpu"], "`--device_map` is 'gpu', expected auto, balanced"),
        (
            ["--streaming", "--eval_dataset", "x", "--draft_vocab_size", "9"],
            "`--draft_vocab_size` counts the tokens of a dataset, not of a stream",
        ),
        (["--draft_vocab_size", "-1"], "`--draft_vocab_size` is -1, expected at least 0"),
        (["--eval_rows", "0"], "`--eval_rows` is 0"),
        (["--confidence_weight", "0.5"], "`confidence_weight` is 0.5, .* no confidence head: .*`--confidence_head`"),
        (
            ["--blind_weight", "0.5"],
            "`blind_weight` is 0.5, .* no head that chooses among candidates: .*`--sequent",
        ),
        (["--learning_rate", "-1e-3"], "`learning_rate` is -0.001, expected a number of at least 0"),
        (["--reducer", "foo"], "`--reducer` is 'foo', expected hc_gate, fc, hybrid or stream_mean."),
        (["--sequential_head", "foo"], "`--sequential_head` is 'foo', expected none, markov, "),
        (["--recipe", "best"], "--recipe.*invalid choice: 'best'"),
        (["--tv_weight", "-1"], "`tv_weight` is -1.0, expected a number of at least 0"),
        (["--chat_template", "nowhere.jinja"], "'nowhere.jinja', and there is no such file"),
        (["--output_dir"], "--output_dir.*expected one argument.*`train --help`"),
        (["--stage", "3"], "--stage.*invalid choice: 3"),
        (["--stage", "x"], "--stage.*invalid int value: 'x'"),
        (["--kl_weight", "x"], "--kl_weight.*invalid float value: 'x'"),
        (["--report_to", "wandbee"], "`report_to` names 'wandbee', which is not installed"),
        (["--rows", "0"], "`--rows` is 0, expected at least 1"),
        (["--layers", "0"], "`--layers` is 0, expected at least 1"),
        (["--max_length", "3"], "`--max_length` is 3, expected more than `--num_draft_tokens`, 6"),
        (["--fp16"], "`fp16` is True, expected a GPU"),
        (["--resume_from_checkpoint", "true"], "No checkpoint in .*out to go on from"),
    ],
)
def test_flags_that_do_not_fit_are_refused_before_any_work(tmp_path, monkeypatch, given, message):
    for name in ("cuda", "accelerator"):
        monkeypatch.setattr(f"torch.{name}.is_available", lambda: False)
    arguments = flags(tmp_path, "nowhere.jsonl", layers=None)
    with pytest.raises(ValueError, match=message):
        main([*arguments, *given])
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_said_before_any_work(tmp_path, monkeypatch):
    monkeypatch.setattr("os.access", lambda path, mode: str(path) != str(tmp_path))  # root may write everywhere
    with pytest.raises(ValueError, match=r"`--output_dir` is .*out', but .* cannot be written to: choose another"):
        main(flags(tmp_path, "nowhere.jsonl"))


def test_rows_longer_than_what_the_target_has_positions_for_are_not_asked_for(tmp_path):
    data = write(tmp_path / "rows.jsonl", chats(6))
    with pytest.raises(ValueError, match=r"`max_length` is 4096, expected at most 2048, the positions that"):
        main(flags(tmp_path, data, max_length=4096))


def test_a_table_that_is_none_is_told_once(tmp_path, monkeypatch):
    """`datasets` logs it, too, without the line."""
    data, told = tmp_path / "rows.jsonl", []
    data.write_text('{"question": "q", "answer": "a"}\n{"question": \n')
    reader = logging.getLogger("datasets.packaged_modules.json.json")
    monkeypatch.setattr(reader, "callHandlers", lambda record: told.append(record.getMessage()))
    with pytest.raises(ValueError, match=r"rows\.jsonl:2 is no JSON"):
        main(flags(tmp_path, data))
    assert told == [] and reader.isEnabledFor(logging.ERROR)


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


def test_a_flag_that_there_is_not_is_refused():
    for slip in ("--learning_rat", "--learning-rat=1"):
        done = CliRunner().invoke(app, ["train", "--target", "x", "--output_dir", "y", slip, "1"])
        assert re.match(f"`train` knows no '{slip}': --learning.rate, perhaps", str(done.exception)), done.exception


@pytest.mark.parametrize("missing", ["target", "output_dir"])
def test_a_flag_that_has_to_be_there_is_named(tmp_path, missing):
    with pytest.raises(ValueError, match=f"required: --{missing}"):
        main(flags(tmp_path, "nowhere.jsonl", **{missing: None}))


@pytest.mark.parametrize(
    ("written", "message"),
    [(b"a\n{% if %}", "no Jinja template: .*, line 2"), (b"\xe9", "not UTF-8"), (b"{% generation %}", "no Jinja")],
)
def test_a_chat_template_that_is_none_is_refused_before_any_work(tmp_path, written, message):
    (tmp_path / "bad.jinja").write_bytes(written)
    with pytest.raises(ValueError, match=rf"`--chat_template` is .*bad\.jinja', which is {message}"):
        main(flags(tmp_path, "nowhere.jsonl", chat_template=tmp_path / "bad.jinja"))


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
        history = json.loads((tmp_path / "out" / "trainer_state.json").read_text())["log_history"]
        assert any("eval_conditional_acceptance_2" in entry for entry in history)  # what no line has


@pytest.mark.parametrize(
    ("logs", "line"),
    [
        ({"loss": 1.23456, "epoch": 2.0}, "step 7: loss 1.235"),
        (
            {"eval_long_teacher_forced_acceptance_1": 0.5, "eval_long_teacher_forced_acceptance_2": 0.254,
             "eval_long_loss": 2.0, "eval_long_teacher_forced_tau": 1.756, "eval_long_runtime": 3.0},
            "step 7, held out: loss 2, teacher-forced tau 1.76; accepted at each position, %: 50, 25",
        ),
        ({"eval_loss": 2.5, "eval_runtime": 1.0, "epoch": 1.0}, "step 7: eval loss 2.5, eval runtime 1"),
        ({"told": "so", "count": 10**6}, "step 7: told so, count 1000000"),
    ],
)  # fmt: skip
def test_an_entry_of_the_log_is_a_line(logs, line):
    assert format_entry(7, logs) == line


def test_a_run_that_diverges_ends_the_line_of_its_bar(tmp_path, capfd):
    data = write(tmp_path / "rows.jsonl", chats(6))
    worse = dict(learning_rate=1e18, max_grad_norm=0, optim="sgd", kl_weight=0, max_steps=40, warmup_steps=0)
    worse |= dict(disable_tqdm=False)
    with pytest.raises(ValueError, match="the drafter diverged"):
        main(flags(tmp_path, data, **worse))
    assert capfd.readouterr().err.endswith("\n")


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
    assert last.startswith(f"Error: The drafter cannot be written to {tmp_path / 'out'} (") and "make room" in last


def test_the_record_tells_what_happened(tmp_path, caplog, capsys):
    data = write(tmp_path / "rows.jsonl", chats(10))
    more = dict(max_length=12, num_train_epochs=7, sliding_window="none", save_steps=1, warmup_steps=0.5, max_steps=3)
    more |= dict(recipe="dspark", kl_weight=0.3, sequential_head="markov", head_rank=4)
    old = os.umask(0o022)
    try:
        main(flags(tmp_path, data, **more))
    finally:
        os.umask(old)
    assert "Cut 8 of 8 sequences to 12 tokens, `max_length`: raise it" in caplog.text
    assert "Reading" in (said := capsys.readouterr().err) and f"Loading {TARGET}" in said
    assert "Training on 8 rows, 2 held out (by `--eval_rows 2`), 1 of them to generate from" in said
    folder = tmp_path / "out"
    facts = json.loads((folder / "training.json").read_text())["settings"]
    happened = {"steps": 3, "schedule_steps": 3, "warmup_steps": 2, "train_rows": 8, "held_out_rows": 2, "epochs": 1.5}
    assert {name: facts[name] for name in happened} == happened and not {"num_train_epochs", "eval_rows"} & set(facts)
    rules = {
        "lr_scheduler_type": "cosine",
        "max_grad_norm": 1.0,
        "adam_beta1": 0.9,
        "adam_beta2": 0.999,
        "weight_decay": 0.0,
    }
    assert {name: facts[name] for name in rules} == rules
    loss = {"recipe": "dspark", "ce_weight": 0.1, "tv_weight": 1.8, "kl_weight": 0.3, "kl_positions": 2}
    loss |= {"loss_decay": 4.0, "confidence_weight": 0.0, "blind_weight": 0.0}  # without such heads
    assert {name: facts[name] for name in loss} == loss
    card = str(drafter_card(folder))
    for line in (
        "| schedule | cosine |", "| Adam's first beta | 0.9 |", "| gradients clipped to norm | 1 |",
        "| epochs | 1.5 |",
        "| loss | dspark |", "| total variation weight | 1.8 |", "| steps | 3 |", "| rows held out | 2 |",
        "| warm-up steps | 2 |", "| Adam's epsilon | 1e-08 |",
    ):  # fmt: skip
        assert line in card, line
    assert HyperDFlashConfig.from_pretrained(folder).sliding_window is None
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.rglob("*") if path.is_file()} == {0o644}
    with pytest.raises(ValueError, match=r"tokenized, so that there is no prompt"):
        ids = AutoTokenizer.from_pretrained(TARGET)("some text").input_ids
        rows = [{"input_ids": ids, "loss_mask": [1] * len(ids)}] * 4
        main(flags(tmp_path, write(tmp_path / "ids.jsonl", rows), resume_from_checkpoint="true"))


def test_deepseeks_own_drafter_is_trained_on(tmp_path):
    """One that was saved goes in as an earlier stage's drafter, and comes out as what it was."""
    config = AutoConfig.from_pretrained(TARGET)
    for name, value in dspark_fields(target_layer_ids=[2, 4]).items():
        setattr(config, name, value)
    drafter = DeepseekV4DSparkDrafter(DeepseekV4DSparkConfig.from_target_config(config, blocks=1))
    drafter.save_pretrained(tmp_path / "dspark")
    main(flags(tmp_path, write(tmp_path / "rows.jsonl", chats(6)), drafter=tmp_path / "dspark", layers=None))
    trained = load_drafter(tmp_path / "out")
    assert type(trained) is DeepseekV4DSparkDrafter and trained.config.target_layer_ids == [2, -1]
    assert not torch.equal(trained.main_proj.weight.float(), drafter.main_proj.weight)
    record = json.loads((tmp_path / "out" / TRAINING_RECORD).read_text())
    assert record["settings"]["steps"] == 2 and "eval_tau" in record["history"][-1]
    heads = dict(drafter=tmp_path / "dspark", layers=None, sequential_head="state")
    heads |= dict(output_dir=tmp_path / "headed")
    with pytest.raises(ValueError, match="A DeepseekV4DSparkDrafter comes with its heads, expected none of seq"):
        main(flags(tmp_path, "nowhere.jsonl", **heads))


def test_a_head_is_trained_onto_an_earlier_drafter(tmp_path):
    """What the drafter knows stays; without enough training it drafts as before."""
    data, heads = write(tmp_path / "rows.jsonl", chats(6)), dict(sequential_head="state", head_rank=8, layers=None)
    before = headless(load_drafter(MODELS / "tiny-deepseek-v4-hyperdflash", dtype=torch.float32))
    before.save_pretrained(tmp_path / "blind")
    main(flags(tmp_path, data, drafter=tmp_path / "blind", learning_rate=1e-9, save_dtype="float32", **heads))
    trained = load_drafter(tmp_path / "out")
    assert trained.config.sequential_head == "state" and trained.head.down_proj.weight.any()
    torch.testing.assert_close(trained.norm.weight, before.norm.weight, rtol=0, atol=1e-6)
    settings = json.loads((tmp_path / "out" / TRAINING_RECORD).read_text())["settings"]
    assert settings["sequential_head"] == "state" and settings["head_rank"] == 8 and settings["num_draft_tokens"] == 8
    with pytest.raises(ValueError, match="but the drafter has one already"):
        main(flags(tmp_path, "nowhere.jsonl", drafter=tmp_path / "out", output_dir=tmp_path / "twice", **heads))


# Takes seconds: two runs of training.
@pytest.mark.parametrize("kind", mostly_nightly(["hyperdflash", "eagle3"]))
def test_a_vocabulary_of_the_drafters_own_is_chosen_trained_and_trained_on(tmp_path, kind):
    data = write(tmp_path / "rows.jsonl", chats(6))
    main(flags(tmp_path, data, drafter_type=kind, draft_vocab_size=50, save_dtype="float32"))
    first = load_drafter(tmp_path / "out")
    said = AutoTokenizer.from_pretrained(TARGET)(" friend").input_ids[-1]
    assert first.config.draft_vocab_size == 50 and said in first.draft_ids.tolist()
    assert json.loads((tmp_path / "out" / TRAINING_RECORD).read_text())["settings"]["draft_vocab_size"] == 50
    again = dict(drafter=tmp_path / "out", output_dir=tmp_path / "more", layers=None, save_dtype="float32")
    main(flags(tmp_path, data, **again))
    more = load_drafter(tmp_path / "more")
    assert torch.equal(more.draft_ids, first.draft_ids) and not torch.equal(more.lm_head.weight, first.lm_head.weight)
    again["output_dir"] = tmp_path / "others"
    main(
        flags(
            tmp_path, write(tmp_path / "others.jsonl", chats(6, answer=" a small river")), **again, draft_vocab_size=40
        )
    )
    others = load_drafter(tmp_path / "others")
    assert others.config.draft_vocab_size == 40 and others.lm_head.weight.shape[0] == len(others.draft_ids) == 40
    said = AutoTokenizer.from_pretrained(TARGET)(" river").input_ids[-1]
    assert said in others.draft_ids.tolist() and said not in first.draft_ids.tolist()
    again["output_dir"] = tmp_path / "never"
    with pytest.raises(ValueError, match=f"`--draft_vocab_size 0` is not for `--drafter {tmp_path / 'out'}`"):
        main(flags(tmp_path, "nowhere.jsonl", **again, draft_vocab_size=0))
    with pytest.raises(
        ValueError, match="drafts all tokens by the target's LM head: expected a drafter with an LM head"
    ):
        all_tokens = dict(again, drafter=MODELS / "tiny-deepseek-v4-hyperdflash")
        main(flags(tmp_path, "nowhere.jsonl", **all_tokens, draft_vocab_size=40))


@pytest.mark.parametrize("drafts", [10, None])
def test_an_earlier_drafter_goes_on_with_longer_blocks_or_its_own(tmp_path, drafts):
    """No weight depends on how many drafts a block has; temperatures are of the weights and positions it had."""
    data, sure = write(tmp_path / "rows.jsonl", chats(6)), load_drafter(MODELS / "tiny-deepseek-v4-hyperdflash")
    sure.config.confidence_temperatures = [2.0] * 8
    sure.save_pretrained(tmp_path / "sure")
    main(flags(tmp_path, data, drafter=tmp_path / "sure", num_draft_tokens=drafts, layers=None))
    trained, drafts = load_drafter(tmp_path / "out"), drafts or 8
    assert trained.max_draft_tokens == drafts and trained.config.confidence_temperatures is None
    assert json.loads((tmp_path / "out" / TRAINING_RECORD).read_text())["settings"]["num_draft_tokens"] == drafts


def test_rows_that_nobody_answers_are_told_by_their_own_columns(tmp_path):
    data = write(tmp_path / "rows.jsonl", [{"turns": ["What is it?"]}] * 6)
    with pytest.raises(ValueError, match=r"in 4 rows, the first .*rows\.jsonl:\d \(columns \['turns'\]\)"):
        main(flags(tmp_path, data))


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
    assert ended.value.code == 130 and told.startswith(
        "Stopped. The same command with `--resume_from_checkpoint true` goes"
    )
    assert str(newest_complete(tmp_path / "out")[0]) in told
    with pytest.raises(ValueError, match="other rows"):
        other = write(tmp_path / "other.jsonl", [*chats(11), *chats(1)])
        main(flags(tmp_path, other, max_steps=1, eval_prompts=0, resume_from_checkpoint="true"))


# Takes seconds: two runs of training.
def test_an_earlier_run_is_replaced_only_where_that_is_said(tmp_path, monkeypatch):
    """Nothing is loaded before; the checkpoints go once training can begin, and not when it cannot."""
    data = write(tmp_path / "rows.jsonl", chats(12))
    more = dict(max_steps=2, save_steps=1, eval_prompts=0)
    main(flags(tmp_path, data, **more))
    out = tmp_path / "out"
    named = lambda: sorted(path.name for path in out.glob("checkpoint-*"))  # noqa: E731
    loaded = "hf_hyperdflash.training.script.load_rows"
    with monkeypatch.context() as patched:
        patched.setattr(loaded, lambda *args, **kwargs: pytest.fail("it was loaded"))
        with pytest.raises(
            ValueError, match=r"out', which has 2 checkpoints of an earlier run, up to checkpoint-2: go"
        ):
            main(flags(tmp_path, data, **more))
        with pytest.raises(ValueError, match="begins anew and `--resume_from_checkpoint` goes on: leave one"):
            main(flags(tmp_path, data, **more, overwrite_output_dir="true", resume_from_checkpoint="true"))
    with pytest.raises(ValueError, match="No dataset file"):
        main(flags(tmp_path, tmp_path / "none.jsonl", **more, overwrite_output_dir="true"))
    assert named() == ["checkpoint-1", "checkpoint-2"]
    main(flags(tmp_path, data, eval_prompts=0, max_steps=1, save_strategy="no", overwrite_output_dir="true"))
    assert not named() and json.loads((out / TRAINING_RECORD).read_text())["settings"]["steps"] == 1
    with pytest.raises(ValueError, match=r"out', which has a trained drafter: name another"):
        main(flags(tmp_path, data, **more))


DIFFERENT = {
    "layers": (dict(layers=2), "`num_hidden_layers` was 1 and is 2"),
    "recipe": (dict(recipe="ours"), "`recipe` was 'hyperdflash' and is 'ours'"),
    "length": (dict(max_length=16), "the data differs .*`max_length` was 2048 and is 16"),
    "rows": (dict(eval_rows=3), r"the data differs \(10 rows then, 9 now\)"),
    "kind": (dict(drafter_type="eagle3", recipe="eagle3"), "its drafter is a HyperDFlashDrafter, this one a Eagle3"),
    "target": (dict(target="other"), r"the target differs \(its weights\)\. Go on with"),
}


# Takes seconds: three runs of training.
def test_a_run_goes_on_as_itself_alone(tmp_path):
    """What it may change are its length, and what it logs, saves and evaluates."""
    data = write(tmp_path / "rows.jsonl", chats(12))
    main(flags(tmp_path, data, save_steps=1, eval_prompts=0))
    model = load_target(TARGET, dtype="float32")
    with torch.no_grad():
        model.get_input_embeddings().weight[5] += 1
    model.save_pretrained(tmp_path / "other")
    AutoTokenizer.from_pretrained(TARGET).save_pretrained(tmp_path / "other")
    for given, said in DIFFERENT.values():
        given = {**given, "target": tmp_path / "other"} if "target" in given else given
        with pytest.raises(ValueError, match=rf"checkpoint-2 is of another run: .*{said}"):
            main(flags(tmp_path, data, max_steps=4, eval_prompts=0, resume_from_checkpoint="true", **given))
    changed = dict(max_steps=3, logging_steps=1, save_steps=7, eval_prompts=1, learning_rate=1e-4)
    main(flags(tmp_path, data, resume_from_checkpoint="true", **changed))
    assert json.loads((tmp_path / "out" / TRAINING_RECORD).read_text())["settings"]["steps"] == 3


def test_somebody_elses_drafter_is_trained_on(tmp_path, dense_pair):
    """In another program's layout, which does not say what target it is for: afterwards it does."""
    data, target = write(tmp_path / "rows.jsonl", chats(6)), load_target(dense_pair[0])
    drafter = HyperDFlashDrafter.from_target(target, reducer="fc", target_layer_ids=[0, 2], mask_token_id=1)
    export_dflash(drafter, tmp_path / "theirs")
    options = dict(drafter=tmp_path / "theirs", layers=None, target=dense_pair[0])
    main(flags(tmp_path, data, **options))
    trained = load_drafter(tmp_path / "out")
    assert not torch.equal(trained.fc.weight, drafter.fc.weight)
    assert trained.config.target_name_or_path == dense_pair[0].name and trained.config.target_model_type == "qwen3"


@pytest.mark.nightly  # a target of 49,152 tokens is trained for
def test_a_large_vocabulary_of_a_narrow_target_is_cut_to_what_answers_have(tmp_path, capsys):
    target, tokenizer = chatting_llama(hidden_size=16, intermediate_size=16)
    for part in (target, tokenizer):
        part.save_pretrained(tmp_path / "target")
    rows = chats(30)
    data, of_target = write(tmp_path / "rows.jsonl", rows), dict(target=tmp_path / "target", eval_prompts=0)
    main(flags(tmp_path, data, **of_target))
    drafter = load_drafter(tmp_path / "out")
    assert 0 < drafter.config.draft_vocab_size < drafter.config.vocab_size == len(tokenizer)
    answers = [message["content"] for row in rows for message in row["messages"] if message["role"] == "assistant"]
    said = [token for text in answers for token in tokenizer(text)["input_ids"]]
    drafted = {*drafter.draft_ids.tolist()}
    assert sum(token in drafted for token in said) >= 0.99 * len(said)
    told = capsys.readouterr().err
    assert f"The drafter drafts {len(drafted)} of {len(tokenizer)} tokens, " in told
    assert "of the answers and 100.0 % of those held out" in told and "`--draft_vocab_size 0` drafts all" in told
    main(flags(tmp_path, data, **of_target, draft_vocab_size=0, output_dir=tmp_path / "all"))
    assert load_drafter(tmp_path / "all").config.draft_vocab_size == 0
    # Nor where a head chooses among candidates, which training takes of a whole vocabulary alone.
    main(flags(tmp_path, data, **of_target, sequential_head="selector", output_dir=tmp_path / "selector"))
    assert load_drafter(tmp_path / "selector").config.draft_vocab_size == 0
    main(flags(tmp_path, data, **of_target, layers=2, output_dir=tmp_path / "wider"))  # 13 * 2 * 16 > 307
    assert load_drafter(tmp_path / "wider").config.draft_vocab_size == 0
