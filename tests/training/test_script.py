"""`hf-hyperdflash train`: its help, what it does, and the record of what happened. What it refuses before any work:
tests/refusals/test_training.py."""

import json
import logging
import os
import re
import shutil
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
from safetensors.torch import load_file
from transformers import AutoTokenizer, TrainingArguments
from typer.testing import CliRunner

from hf_hyperdflash import HyperDFlashConfig, HyperDFlashDrafter, HyperDFlashTrainer, load_drafter, load_target
from hf_hyperdflash.cli.app import app
from hf_hyperdflash.drafters.parts.heads import HEADS
from hf_hyperdflash.drafters.parts.reducers import REDUCERS
from hf_hyperdflash.hub import loading
from hf_hyperdflash.hub.cards import TRAINING_RECORD, drafter_card
from hf_hyperdflash.hub.formats import export_dflash
from hf_hyperdflash.training.acceptance import AcceptanceCallback
from hf_hyperdflash.training.arguments import HyperDFlashTrainingArguments
from hf_hyperdflash.training.flags import ScriptArguments, help_text
from hf_hyperdflash.training.runs.checkpoints import newest_complete
from hf_hyperdflash.training.runs.progress import format_entry
from hf_hyperdflash.training.script import _quiet_output, main, make_parser

from ..conftest import MODELS, mostly_nightly
from ..helpers import mtp_targets
from ..helpers.gguf_files import chatting_llama
from ..helpers.headed_drafters import headless
from ..helpers.processes import python
from ..helpers.refusals import Refusal
from ..helpers.tokenizers import characters

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


def shown_help(command):
    """The lines of a command's help, which loads nothing heavy."""
    code = f"""
import sys
from hf_hyperdflash.cli.app import app
app([{command!r}, "--help"], standalone_mode=False)
print([name for name in ("torch", "transformers", "datasets", "numpy") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    *shown, loaded = done.stdout.splitlines()
    assert loaded == "[]" and shown[0].startswith("usage: ")
    return shown


def test_the_help_is_the_parsers_and_loads_nothing_heavy():
    shown_help("train")
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
    assert actions["reducer"].choices == tuple(REDUCERS) and actions["sequential_head"].choices == ("none", *HEADS)


def test_defaults_that_differ_from_transformers(tmp_path):
    args = HyperDFlashTrainingArguments(str(tmp_path), use_cpu=True)
    assert not (args.dataloader_pin_memory or args.ddp_find_unused_parameters or args.remove_unused_columns)
    assert args.accelerator_config.dispatch_batches is False and args.learning_rate == 8e-4
    alone = dict(ce_weight=0, kl_weight=0, tv_weight=1.0)  # which is enough to train with
    assert HyperDFlashTrainingArguments(str(tmp_path), use_cpu=True, **alone).kl_positions == 2


# What happens, and what is recorded of it

LOGGED = [
    *["step N: loss N, grad norm N, learning rate N, cross entropy N, kl N, tv N"] * 3,
    "N steps in N s, mean loss N",
    "step N, held out: loss N, teacher-forced tau N, N expected at temperature N; accepted at each position, %: {}",
    "step N, generated: tau N, N tokens/s; accepted at each position, %: {}",
]


def test_the_record_tells_what_happened(train, caplog, capsys, tmp_path):
    (tmp_path / "chat.jinja").write_text("\ufeff" + Path(TARGET, "chat_template.jinja").read_text())
    more = dict(
        max_length=12,
        num_train_epochs=7,
        sliding_window="none",
        save_steps=1,
        warmup_steps=0.5,
        max_steps=3,
        logging_steps=1,
    )
    more |= dict(recipe="dspark", kl_weight=0.3, sequential_head="markov", head_rank=4)
    folder = train(chats(10), chat_template=tmp_path / "chat.jinja", **more)
    assert "8 of 8" in caplog.text and "12 tokens" in caplog.text
    logged, told = capsys.readouterr()
    for line in ("Reading", f"Loading {TARGET}", "8 rows, 2 held out (by `--eval_rows 2`), 1 of them"):
        assert line in told, line
    shown = [re.sub(r"-?\d+(\.\d+)?(e[+-]\d+)?", "N", line) for line in logged.splitlines()]
    *shown, saved = [re.sub(r"(N, )*N$", "{}", line) if "%" in line else line for line in shown]
    assert shown == LOGGED and saved.startswith("Saved to ") and "%|" not in told
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


ENTRIES = [
    (
        {"eval_long_teacher_forced_acceptance_1": 0.5, "eval_long_teacher_forced_acceptance_2": 0.254,
         "eval_long_loss": 2.0, "eval_long_teacher_forced_tau": 1.756, "eval_long_runtime": 3.0},
        "step 7, held out: loss 2, teacher-forced tau 1.76; accepted at each position, %: 50, 25",
    ),
    ({"eval_loss": 2.5, "eval_runtime": 1.0, "epoch": 1.0}, "step 7: eval loss 2.5, eval runtime 1"),
    ({"train_runtime": 9.6, "train_loss": 1.5}, "7 steps in 10 s, mean loss 1.5"),
    ({"told": "so", "count": 10**6, "loss": 1.23456}, "step 7: told so, count 1000000, loss 1.235"),
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
        logging.getLogger("hf_hyperdflash.targets.vocabulary").warning("The drafter's mask token is 3")
        assert not datasets.utils.is_progress_bar_enabled()
    assert len(caplog.messages) == 1 - process and datasets.utils.is_progress_bar_enabled()
    logging.getLogger("hf_hyperdflash.targets.vocabulary").warning("again")
    assert caplog.messages[-1] == "again"


def test_a_row_that_cannot_be_used_stops_no_run_and_is_named_by_file_and_line(train, tmp_path, caplog):
    """Neither among the rows of a stream to train on nor among those to generate from."""
    system = [{"messages": [{"role": "system", "content": "s"}, *chats(1)[0]["messages"]]}]
    template = tmp_path / "template.jinja"
    refusing = "{% if messages[0].role == 'system' %}{{ raise_exception('No system message, please') }}{% endif %}"
    template.write_text(refusing + Path(TARGET, "chat_template.jinja").read_text())
    given = dict(eval_dataset=write(tmp_path / "held-out.jsonl", [*system, *chats(3)]), chat_template=template)
    train([*chats(3), *system], streaming="true", **given)
    for place in ("rows.jsonl:4", "held-out.jsonl:1"):
        assert any(place in line and "No system message" in line for line in caplog.messages), caplog.messages
    Refusal(lambda: train(system * 3, out="o", **given), ("rows.jsonl:1", "No system message")).check()


def test_a_run_that_diverges_ends_the_line_of_its_bar(train, capfd):
    worse = dict(learning_rate=1e18, max_grad_norm=0, optim="sgd", kl_weight=0, max_steps=40, warmup_steps=0)
    Refusal(lambda: train(**worse, disable_tqdm=False), ("diverged", "learning_rate")).check()
    told = capfd.readouterr().err
    assert "%|" in told and told.endswith("\n")


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


def shipped(folder, target):
    drafter = load_drafter(SHIPPED, dtype=torch.float32)
    drafter.config.confidence_temperatures = [2.0] * 8  # of the weights and positions that it has
    drafter.save_pretrained(folder)
    return drafter


def headless_one(folder, target):
    headless(load_drafter(SHIPPED, dtype=torch.float32)).save_pretrained(folder)
    return load_drafter(folder, dtype=torch.float32)


def somebody_elses(folder, target):
    """In another program's layout, which does not say what target it is for: afterwards it does."""
    drafter = HyperDFlashDrafter.from_target(
        load_target(target), reducer="fc", target_layer_ids=[0, 2], mask_token_id=1
    )
    export_dflash(drafter, folder)
    return drafter


HEAD = dict(sequential_head="state", head_rank=8)
EARLIER = {  # flags, and what its configuration has afterwards
    shipped: ({}, {"confidence_temperatures": None}, 8),
    headless_one: (HEAD, HEAD, 8),
    somebody_elses: ({"num_draft_tokens": 10}, {"target_name_or_path": "target", "target_model_type": "qwen3"}, 10),
}


@pytest.mark.parametrize("earlier", EARLIER)
def test_an_earlier_drafter_goes_on_as_what_it_was(train, tmp_path, dense_pair, earlier):
    """What it knows stays: without enough training it drafts as before. No weight depends on the number of drafts."""
    (tmp_path / "target").symlink_to(dense_pair[0] if earlier is somebody_elses else TARGET)
    before = earlier(tmp_path / "earlier", tmp_path / "target").state_dict()
    given, fields, drafts = EARLIER[earlier]
    given = dict(drafter=tmp_path / "earlier", layers=None, target=tmp_path / "target", **given)
    trained = load_drafter(out := train(**given, save_dtype="float32", learning_rate=1e-5))
    assert {field: getattr(trained.config, field) for field in fields} == fields
    facts = settings_of(out)
    assert (
        trained.max_draft_tokens == drafts == facts["num_draft_tokens"]
        and facts.items() >= fields.items() & HEAD.items()
    )
    after = trained.state_dict()
    changed = [name for name, value in before.items() if not torch.equal(after[name], value)]
    assert changed and all((after[name] - before[name]).abs().max() < 1e-4 for name in changed)


# Takes seconds: two runs of training.
def test_an_adapter_of_an_earlier_drafter_is_trained_and_saved_alone(train, tmp_path):
    """It goes on from a checkpoint, and the drafter that it is of takes it."""
    of_drafter = dict(drafter=SHIPPED, layers=None, lora_rank=3, learning_rate=1e-2)
    out = train(**of_drafter, save_steps=1)
    files = {file.name for file in out.iterdir() if file.is_file()}
    assert {"adapter_config.json", "adapter_model.safetensors", TRAINING_RECORD} <= files
    assert not files & {"config.json", "model.safetensors"}
    assert settings_of(out)["lora_rank"] == 3 and settings_of(out)["steps"] == 2
    tensors = load_file(out / "adapter_model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    drafter = load_drafter(SHIPPED, dtype=torch.float32)
    drafter.load_adapter(out, "trained")
    config = drafter.peft_config["trained"]
    assert (config.r, config.base_model_name_or_path) == (3, SHIPPED.name)
    assert any(tensor.abs().max() > 0 for key, tensor in tensors.items() if "lora_B" in key)
    train(**of_drafter, save_steps=1, max_steps=3, resume_from_checkpoint="true")
    assert settings_of(out)["steps"] == 3


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


@pytest.mark.parametrize("own", mostly_nightly(["deepseek_v4", "deepseek_v3", "qwen3_next"]))
def test_the_heads_in_a_targets_checkpoint_are_trained_on(train, tmp_path, own):
    """By the name of the target; what is saved has them alone, and goes on as others do."""
    folder, known = TARGET, chats(6)
    if own != "deepseek_v4":
        folder, known = str(mtp_targets.write(own, tmp_path / "target")), [{"input_ids": [*range(2, 40)]}] * 6
        characters().save_pretrained(folder)
        known = [row | {"loss_mask": [False] * 8 + [True] * 30} for row in known]
    how = dict(target=folder, drafter=folder, layers=None, eval_prompts=0, save_dtype="float32", learning_rate=1e-3)
    trained, before = load_drafter(out := train(known, **how)), load_drafter(folder, dtype=torch.float32)
    changed = [
        name for name, value in before.state_dict().items() if not torch.equal(trained.state_dict()[name], value)
    ]
    assert type(trained) is type(before) and len(changed) > 5
    assert settings_of(out)["drafter"] == Path(folder).name
    again = load_drafter(train(known, out="more", **how | {"drafter": out}))
    assert type(again) is type(before)


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


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_says_how_to_go_on(tmp_path, capsys, sent):
    """By Ctrl-C, by a launcher whose other process is gone, by a cluster that takes its machine back."""
    data = write(tmp_path / "rows.jsonl", chats(12))
    arguments = flags(tmp_path, data, max_steps=100000, save_steps=1, save_total_limit=1, eval_prompts=0)

    def press_control_c():
        # The second: while it is being written, the first is whole.
        while not list((tmp_path / "out").glob("checkpoint-[!1]*/trainer_state.json")):
            time.sleep(0.05)
        os.kill(os.getpid(), sent)

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
def test_an_earlier_run_is_replaced_only_where_that_is_said(train, tmp_path, monkeypatch, caplog):
    """Nothing is loaded before; the checkpoints go once training can begin, and not when it cannot."""
    more = dict(max_steps=2, save_steps=1, eval_prompts=0)
    out = train(chats(12), **more)
    assert {stat.S_IMODE(path.stat().st_mode) for path in out.glob("*.safetensors")} == {0o666 & ~umask()}
    with monkeypatch.context() as patched:
        patched.setattr("hf_hyperdflash.training.script.load_rows", lambda *_, **__: pytest.fail("it was loaded"))
        Refusal(lambda: train(**more), (str(out), "2 checkpoints", "checkpoint-2")).check()
    Refusal(lambda: train("none.jsonl", **more, overwrite_output_dir="true"), ("none.jsonl",)).check()
    assert sorted(path.name for path in out.glob("checkpoint-*")) == ["checkpoint-1", "checkpoint-2"]
    pushed = []  # by the run that may replace it
    monkeypatch.setattr(HyperDFlashTrainer, "init_hf_repo", lambda _: None)
    monkeypatch.setattr(HyperDFlashTrainer, "upload", lambda trainer: pushed.append(trainer.state.global_step))
    replacing = dict(eval_prompts=0, max_steps=1, save_strategy="no", overwrite_output_dir="true")
    train(chats(12), **replacing, push_to_hub="true")
    assert pushed == [1]
    assert not list(out.glob("checkpoint-*")) and settings_of(out)["steps"] == 1
    assert f"{out} has a trained drafter, which this run overwrites." in caplog.text
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


# Without the target's layers


def test_a_cache_is_made_by_the_whole_target_and_trained_on_without_its_layers(train, tmp_path, monkeypatch, caplog):
    """Whose drafter is that of the whole target, whether its layers were needed for a part or not."""
    cached = dict(feature_source="cached", feature_cache_dir=tmp_path / "features", save_dtype="float32")
    loaded = []
    real = loading.load_target
    monkeypatch.setattr(loading, "load_target", lambda *a, **k: loaded.append(real(*a, **k)) or loaded[-1])
    whole = load_drafter(train(**cached, out="whole"))
    (layers,) = (len(each.model.layers) for each in loaded)
    for made in (False, True):
        loaded.clear()
        caplog.clear()
        if made:
            shutil.rmtree(tmp_path / "features")
        part = load_drafter(train(**cached, out=f"part-{made}", eval_prompts=0))
        assert sorted(len(each.model.layers) for each in loaded) == [0] + [layers] * made
        assert ("loaded while it is made" in caplog.text) == made
        for name, value in whole.state_dict().items():
            torch.testing.assert_close(part.state_dict()[name], value)
        assert settings_of(tmp_path / f"part-{made}")["eval_prompts"] == 0
        assert part.config.target_num_layers == layers and part.config.target_fingerprint.split()[1] == "-"


def test_a_target_larger_than_memory_is_not_generated_from(train, tmp_path, monkeypatch, capsys):
    cached = dict(feature_source="cached", feature_cache_dir=tmp_path / "features", eval_prompts=None)
    train(**cached, out="whole")
    monkeypatch.setattr(loading, "memory_here", lambda: 1000)
    capsys.readouterr()
    train(**cached, out="part")
    told = capsys.readouterr().err
    assert "more than this machine's memory" in told and "0 of them to generate from" in told
    tau = dict(metric_for_best_model="tau", eval_strategy="steps")
    Refusal(lambda: train(**cached, **tau, out="tau"), ("metric_for_best_model", "'tau'")).check()
    shutil.rmtree(tmp_path / "features")
    Refusal(lambda: train(**cached, out="none"), ("not complete", "memory", "elsewhere")).check()


def test_nothing_is_generated_from_a_target_without_layers(tmp_path):
    target = load_target(TARGET, dtype="float32", without_layers=True)
    trainer = SimpleNamespace(target=target)
    words = ("without its layers", "--eval_prompts 0")
    Refusal(lambda: AcceptanceCallback(trainer, [torch.tensor([[1, 2]])]), words).check()
