import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from safetensors.torch import load_file, save_file
from transformers import AutoConfig
from typer.testing import CliRunner

import hf_hyperdflash
from hf_hyperdflash import HyperDFlashDrafter
from hf_hyperdflash.cli import options
from hf_hyperdflash.cli.app import app
from hf_hyperdflash.cli.app import run as entry_point
from hf_hyperdflash.decoding.request import MOST_NODES
from hf_hyperdflash.hub.kinds import KINDS
from hf_hyperdflash.training.features.fingerprint import changed_parts
from hf_hyperdflash.training.script import main as train_main

from ..conftest import MODELS, mostly_nightly, tiny_drafter, tiny_target
from ..helpers.deepseek_checkpoints import dspark_fields, dspark_shapes, random_tensors
from ..helpers.families import deepseek_v4_remote_code, glm5_next, qwen3
from ..helpers.headed_drafters import headless
from ..helpers.tokenizers import characters
from ..helpers.unrolled import unrolled

COMMANDS = typer.main.get_command(app).commands
TARGET, DRAFTER = str(MODELS / "tiny-deepseek-v4"), str(MODELS / "tiny-deepseek-v4-hyperdflash")
NAME = "HyperDFlash hybrid, state head"  # by default


@pytest.fixture
def data(tmp_path):
    (tmp_path / "gsm8k.jsonl").write_text('{"turns": ["What is 3 plus 4?"]}\n{"turns": ["What is 2 times 8?"]}\n')
    return tmp_path


def run(*args):
    result = CliRunner().invoke(app, list(map(str, args)))
    assert result.exit_code == 0, (result.output, result.exception)
    return result.output


@pytest.mark.parametrize("command", [name for name in COMMANDS if name != "train"])  # whose own test is in test_script
def test_help_explains_every_option(monkeypatch, command):
    explains(monkeypatch, {part.opts[0]: part.help for part in COMMANDS[command].params}, command)


def test_without_a_command_every_command_is_explained(monkeypatch):
    explains(monkeypatch, {name: command.help for name, command in COMMANDS.items()})


def explains(monkeypatch, helps: dict[str, str], *command):
    monkeypatch.setenv("COLUMNS", "200")  # on which each has one line
    shown = [line.strip("│* ") for line in run(*command, *(["--help"] if command else [])).splitlines()]
    for name, help in helps.items():
        (line,) = (line for line in shown if line.startswith(f"{name} "))
        assert help and help in line, name


def test_benchmark_writes_results_and_report(data, tmp_path):
    out = tmp_path / "out"
    printed = run(
        "benchmark", "--target", TARGET, "--drafter", DRAFTER, "--drafter", f"Mine (2)={DRAFTER}", "--mtp", 3,
        "--mtp", 1, "--prompt-lookup", 4, "--suite", "gsm8k", "--data", data, "--limit", 1,
        "--max-new-tokens", 10, "--drafter", f"Tree (3, 9 nodes)={DRAFTER}", "--drafter", f"Mine (auto)={DRAFTER}",
        "--drafter", f"Tree (auto, auto nodes)={DRAFTER}", "--drafter", f"Learns (2, adaptive)={DRAFTER}",
        "--output", out,
    )  # fmt: skip
    assert str(out / "report.md") in printed and "Non-think, temperature 0" in printed and "GSM8K" in printed
    lines = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    names = ["Target only", "MTP (3)", "MTP (1)", "Prompt lookup (4)", f"{NAME} (8)", "Mine (2)", "Tree (3, 9 nodes)",
             "Mine (auto)", "Tree (auto, auto nodes)", "Learns (2, adaptive)"]  # fmt: skip
    assert list(lines[0]["run"]["methods"]) == names and {line["method"] for line in lines[1:]} == set(names)
    assert {line["identical"] for line in lines[1:]} == {None, True}
    drafted = {line["method"]: line["draft_positions"] for line in lines[1:]}
    assert drafted["Mine (2)"] == 2 and drafted["MTP (1)"] == 1 and 1 <= drafted["Tree (3, 9 nodes)"] <= 3
    report = (out / "report.md").read_text()
    assert "tiny-deepseek-v4" in report and all(name in report for name in names[1:])
    pictures = ("acceptance.png", "conditional_acceptance.png", "speedup_tau.png")
    assert all((out / name).stat().st_size > 500 for name in ("summary.csv", *pictures))
    # The card of the drafter that was measured has the figures; that of another has not.
    of_results = ["--results", out, "--method", f"{NAME} (8)"]
    run("card", DRAFTER, *of_results, "--output", tmp_path / "card.md")
    assert "model-index" in (tmp_path / "card.md").read_text()
    other = HyperDFlashDrafter.from_pretrained(DRAFTER)
    other.norm.weight.data[0] += 1
    other.save_pretrained(tmp_path / "other")
    refused = CliRunner().invoke(app, list(map(str, ["card", tmp_path / "other", *of_results])))
    assert f"{NAME} (8) was run with other weights" in str(refused.exception)
    assert "model-index" not in (tmp_path / "other" / "README.md").read_text()


def test_a_card_with_names_of_this_machine_says_so(tmp_path):
    drafter = tiny_drafter(tiny_target())
    drafter.config.target_name_or_path = "my-target"
    drafter.save_pretrained(tmp_path / "mine")
    said = run("card", tmp_path / "mine")
    assert f"loads '{tmp_path / 'mine'}', which is on no Hub: `--repo-id org/name`" in said
    assert "loads 'my-target', which is on no Hub: `--target org/name`" in said
    assert "names no licence, and the Hub will show none: `--license apache-2.0`" in said
    named = run("card", tmp_path / "mine", "--repo-id", "org/mine", "--target", "org/target", "--license", "mit")
    assert "on no Hub" not in named and "licence" not in named


def with_dspark(folder: Path) -> Path:
    """The shipped target as July's checkpoints are: a random DSpark drafter in place of its MTP block."""
    copied(TARGET, folder, "model.safetensors")
    fields = json.loads((folder / "config.json").read_text()) | dspark_fields(target_layer_ids=[0, 4])
    (folder / "config.json").write_text(json.dumps(fields))
    tensors = load_file(Path(TARGET) / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith("mtp.")}
    drafter = random_tensors(dspark_shapes(AutoConfig.from_pretrained(folder), blocks=1))
    save_file({**kept, **drafter}, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_a_target_is_compared_with_whichever_drafter_it_carries(monkeypatch, capsys, data, tmp_path):
    target, out = with_dspark(tmp_path / "july"), tmp_path / "out"
    command = ["--target", target, "--suite", "gsm8k", "--data", data, "--limit", 1, "--output", out]
    run("benchmark", *command, "--mtp", 2, "--max-new-tokens", 8)
    lines = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    assert list(lines[0]["run"]["methods"]) == ["Target only", "DSpark (2)"]
    (drafted,) = (line for line in lines[1:] if line["method"] == "DSpark (2)")
    assert drafted["identical"] and drafted["draft_positions"] == 2
    code, said = ended(monkeypatch, capsys, "benchmark", *command, "--mtp", 6)
    assert code == 1 and "cannot draft 6 tokens a round: expected a whole number from 1 to 5" in said[-1]
    printed = run("generate", "--target", target, "--drafter", target, "--max-new-tokens", 8, "What is 3 plus 4?")
    assert "tau" in printed


def test_a_drafter_without_a_name_is_called_what_it_is(data, tmp_path):
    given, target = [], hf_hyperdflash.load_target(TARGET, dtype="float32")
    for kind in ("specblock", "eagle3"):
        unrolled(kind, target).save_pretrained(tmp_path / kind)
        given += ["--drafter", tmp_path / kind]
    out = tmp_path / "out"
    run("benchmark", "--target", TARGET, *given, "--suite", "gsm8k", "--data", data, "--limit", 1,
        "--max-new-tokens", 4, "--output", out)  # fmt: skip
    first = json.loads((out / "results.jsonl").read_text().splitlines()[0])
    assert list(first["run"]["methods"]) == ["Target only", "SpecBlock (8)", "EAGLE-3 (7)"]


def test_sweep_recommends_a_number_of_drafts(data, tmp_path):
    printed = run(
        "sweep", "--target", TARGET, "--drafter", DRAFTER, "--drafter", TARGET, "--num-draft-tokens", 2,
        "--num-draft-tokens", 5, "--suite", "gsm8k", "--data", data, "--limit", 1, "--max-new-tokens", 12,
        "--output", tmp_path / "out",
    )  # fmt: skip
    assert "The fastest on each suite" in printed and f"{NAME} (5)" in printed
    run_facts = json.loads((tmp_path / "out" / "results.jsonl").read_text().splitlines()[0])["run"]
    assert list(run_facts["methods"]) == ["Target only", f"{NAME} (2)", f"{NAME} (5)", "MTP (2)", "MTP (5)"]


@pytest.mark.parametrize("command", ["benchmark", "sweep"])
def test_suites_are_read_before_a_model_is_loaded_and_after_all_that_is_quicker(
    command, monkeypatch, capsys, wrong, tmp_path
):
    """All of a folder where none is named. On the Hub they may take minutes: what a folder tells comes first."""
    options = [command, "--data", tmp_path, "--output", tmp_path / "out", "--target"]
    (tmp_path / "mbpp.jsonl").write_text('{"turns": ["Hello?"]}\n')
    (tmp_path / "mine.jsonl").write_text('{"turns": "Hello?"}\n')
    cut = wrong / "cut-target"
    for given, message in (
        (["nowhere", "--drafter", DRAFTER], "The folder nowhere does not exist"),
        ([cut, "--drafter", "nowhere"], "The folder nowhere does not exist"),
        ([cut, "--drafter", f"X (9)={DRAFTER}"], "cannot draft 9 tokens"),
        ([cut, "--drafter", DRAFTER, "--device-map", "toaster"], "`--device-map` is 'toaster'"),
        ([cut, "--drafter", DRAFTER], "mine.jsonl, line 1: `turns` is 'Hello?'"),
    ):
        code, said = ended(monkeypatch, capsys, *options, *given)
        assert code == 1 and message in said[-1]
    (tmp_path / "mine.jsonl").write_text('{"turns": ["Hello?"]}\n')
    code, said = ended(monkeypatch, capsys, *options, cut, "--drafter", DRAFTER)
    assert code == 1 and "cut-target are damaged" in said[-1] and not (tmp_path / "out").exists()


@pytest.fixture
def confident(tmp_path):
    """The shipped drafter, which has a confidence head, to be written to."""
    shutil.copytree(DRAFTER, tmp_path / "confident")
    return tmp_path / "confident"


def test_calibrate_writes_temperatures_and_a_report(monkeypatch, confident, tmp_path):
    monkeypatch.setattr("hf_hyperdflash.benchmark.calibration.LEAST_ROUNDS", 2)
    rows = [{"turns": ["What is 3 plus 4?"]}, {"question": "What is 2 times 8?", "answer": "16"}, {"turns": ["Hi!"]}]
    (tmp_path / "held_out.jsonl").write_text("\n".join(map(json.dumps, rows)))
    before = json.loads((confident / "config.json").read_text())
    arguments = [
        "calibrate", "--target", TARGET, "--drafter", confident, "--data", tmp_path / "held_out.jsonl", "--limit", 2,
        "--max-new-tokens", 14, "--temperature", 0.8, "--seed", 3, "--output",
    ]  # fmt: skip
    run(*arguments, tmp_path / "first")
    printed = run(*arguments, tmp_path / "out")
    after = json.loads((confident / "config.json").read_text())
    temperatures = after["confidence_temperatures"]
    assert len(temperatures) == 8 and after == before | {"confidence_temperatures": temperatures}
    assert str(temperatures) in printed and "Error" in printed and str(tmp_path / "out" / "calibration.md") in printed
    facts = json.loads((tmp_path / "out" / "calibration.json").read_text())
    assert facts["temperatures"] == temperatures and facts["rounds"][1] == facts["through"][0]["after"]["total"]
    settings = facts["settings"]
    assert settings["data"] == "held_out.jsonl" and settings["drafter"] == "confident" and settings["prompts"] == 2
    assert (settings["max_new_tokens"], settings["temperature"], settings["seed"]) == (14, 0.8, 3)
    again = json.loads((tmp_path / "first" / "calibration.json").read_text())
    assert all(again[name] == facts[name] for name in ("temperatures", "rounds", "through", "given"))
    assert all((tmp_path / "out" / name).stat().st_size > 500 for name in ("calibration.md", "reliability.png"))


def ended(monkeypatch, capsys, *arguments) -> tuple[int, list[str]]:
    """The exit status of the command, and what it wrote to stderr beside what it loads."""
    monkeypatch.setattr("sys.argv", ["hf-hyperdflash", *map(str, arguments)])
    with pytest.raises(SystemExit) as stopped:
        entry_point()
    lines = capsys.readouterr().err.splitlines()
    return stopped.value.code or 0, [line for line in lines if line.strip() and not line.startswith("Loading ")]


def copied(source: str | Path, folder: Path, name: str = "", content: str | bytes | None = None) -> None:
    """A checkpoint one of whose files has another content, or none."""
    shutil.copytree(source, folder)
    if name:
        (folder / name).unlink()
        if content is not None:
            (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)


@pytest.fixture(scope="module")
def wrong(tmp_path_factory):
    """A folder of things that are not what they are given as."""
    folder = tmp_path_factory.mktemp("wrong")
    (folder / "file").write_text("x")
    (folder / "empty").mkdir()
    (folder / "adapter").mkdir()
    (folder / "adapter" / "adapter_config.json").write_text("{}")
    for name, config in {
        "no-json": "{", "a-list": "[1]", "binary": b"\xff\xfe", "no-type": "{}", "unknown": '{"model_type": "gpt99"}',
        "configured": '{"model_type": "llama"}', "zlab": '{"dflash_config": {}}',
        "mtp": '{"model_type": "deepseek_v4", "architectures": ["DeepseekV4MTPDrafter"]}',
        "wordy-mtp": '{"architectures": ["DeepseekV4MTPDrafter"], "num_attention_heads": "four"}',
    }.items():  # fmt: skip
        (folder / name).mkdir()
        (folder / name / "config.json").write_bytes(config.encode() if isinstance(config, str) else config)
    weights, fields = "model.safetensors", json.loads((MODELS / "tiny-deepseek-v4" / "config.json").read_text())
    for name, cut in {"target": TARGET, "drafter": DRAFTER}.items():
        copied(cut, folder / f"cut-{name}", weights, (Path(cut) / weights).read_bytes()[:5000])
        copied(cut, folder / f"bare-{name}", weights)
    copied(TARGET, folder / "wide", "config.json", json.dumps(fields | {"hidden_size": 128}))
    copied(TARGET, folder / "wordy", "config.json", json.dumps(fields | {"num_attention_heads": "four"}))
    copied(TARGET, folder / "speechless", "tokenizer.json")
    (folder / "speechless" / "tokenizer_config.json").unlink()
    copied(TARGET, folder / "stuttering", "tokenizer.json", "{")
    copied(TARGET, folder / "wordless", "tokenizer.json", "{}")
    copied(TARGET, folder / "untemplated", "chat_template.jinja", "{% for %}")
    (folder / "results").mkdir()
    (folder / "notes.md").write_bytes(b"\xff")
    (folder / "rows.jsonl").write_text('{"question": "What is 3 plus 4?", "answer": "7"}\n' * 3)
    (folder / "odd.jsonl").write_text('{"turns": ["What is 3 plus 4?"]}\n{"text": "Hi"}\n')
    (folder / "torn.jsonl").write_text('{"turns": ["What is 3 plus 4?"]}\n{"turns": ["Wh')
    blind = headless(HyperDFlashDrafter.from_pretrained(DRAFTER))
    blind.save_pretrained(folder / "blind")
    fields = json.loads((folder / "blind" / "config.json").read_text())
    copied(folder / "blind", folder / "confident", "config.json", json.dumps(fields | {"confidence_head": True}))
    for kind in ("specblock", "eagle3"):
        unrolled(kind, tiny_target()).save_pretrained(folder / kind)
    flat = tiny_drafter(
        qwen3(), reducer="fc", target_layer_ids=[0, 2], sliding_window=None, sample_from_anchor=True
    )  # fmt: skip
    flat.save_pretrained(folder / "flat")
    copied(folder / "flat", folder / "cut-flat", weights, (folder / "flat" / weights).read_bytes()[:5000])
    (folder / "data").mkdir()
    (folder / "data" / "gsm8k.jsonl").write_text('{"turns": ["What is 3 plus 4?"]}\n')
    return folder


NO_CHECKPOINT = {
    "no/where/at": "The folder no/where/at does not exist, and it is no Hub id",
    "no-org/no-model": "The folder no-org/no-model does not exist, and as a Hub id it has no configuration",
    "two words": "The folder two words does not exist, and it is no Hub id",
    " ": "is empty, expected a folder or a Hub id",
    "file": "file is a file, expected a folder",
    "empty": "The folder empty has no config.json",
    "adapter": "The folder adapter has a PEFT adapter, expected a whole",
    "no-json": "no-json/config.json is no JSON (Expecting property name enclosed in double quotes, line 1, column 2)",
    "a-list": "The config.json of a-list holds a list, expected an object",
    "binary": "binary/config.json is no text in UTF-8",
}
NO_TARGET = {
    **NO_CHECKPOINT,
    "no-type": "has `model_type` None, expected one that transformers",
    "unknown": "has `model_type` 'gpt99'",
    "configured": "The folder configured has no weights",
    DRAFTER: "is a HyperDFlash drafter, expected the target that it drafts for",
    "mtp": "mtp is an MTP drafter, expected the target",
    "zlab": "zlab is a drafter in another program's layout, expected the target",
    "cut-target": "The weights of cut-target are damaged",
    "bare-target": "The folder bare-target has no weights",
    "wide": "The weights of wide have other shapes than its config.json says",
    "wordy": "The config.json of wordy has a wrong value: Validation error for field 'num_attention_heads'",
    "speechless": "speechless has no tokenizer that can be loaded",
    "stuttering": "stuttering has no tokenizer that can be loaded",
    "wordless": "wordless has no tokenizer that can be loaded",
    "untemplated": "The chat template of untemplated is no Jinja template: Expected an expression",
}
NO_DRAFTER = {
    **NO_CHECKPOINT,
    "no-type": "is a model of type None, expected a drafter",
    "configured": "is a model of type 'llama', expected a drafter",
    "cut-target": "The weights of cut-target are damaged",
    "bare-target": "bare-target has no model.safetensors, expected a checkpoint in safetensors",
    "cut-drafter": "The weights of cut-drafter are damaged",
    "bare-drafter": "The folder bare-drafter has no weights",
}
PAIR = ["--target", TARGET, "--drafter", DRAFTER]
ASK = ["generate", *PAIR, "hi"]
COMPARE = ["benchmark", "--target", TARGET, "--suite", "gsm8k", "--data", "data", "--output", "out"]
SWEEP = ["sweep", "--target", TARGET, "--suite", "gsm8k", "--data", "data", "--output", "out"]
TRAIN = [
    "train",
    "--dataset",
    "rows.jsonl",
    "--eval_rows",
    "1",
    "--output_dir",
    "out",
    "--use_cpu",
    "--report_to",
    "none",
]
EXPORT = ["export", "cut-flat", "out", "--format", "deepspec"]
ANSWERS = ["answers", "--target", TARGET, "--output", "out.jsonl"]
CALIBRATE = ["calibrate", "--target", TARGET, "--max-new-tokens", "200", "--drafter"]
NAMED = (
    'expected PATH, NAME=PATH, "NAME (4)=PATH", "NAME (auto)=PATH", "NAME (4, 16 nodes)=PATH" or '
    '"NAME (4, adaptive)=PATH"'
)
MISTAKES: list[tuple[list[str], int, str]] = [
    *((["generate", "--target", name, "--drafter", DRAFTER, "hi"], 1, said) for name, said in NO_TARGET.items()
      if name != "wide"),
    *(([command, "--target", "wide", "--drafter", DRAFTER, *rest], 1, "`hidden_size` 256, but this target's is 128")
      for command, *rest in (["generate", "hi"], ["doctor"], ["train", *TRAIN[1:]])),
    *((["generate", "--target", TARGET, "--drafter", name, "hi"], 1, said) for name, said in NO_DRAFTER.items()),
    *((["doctor", "--target", TARGET, "--drafter", name], 1, said) for name, said in NO_CHECKPOINT.items()),
    *((["export", name, "out"], 1, said) for name, said in NO_DRAFTER.items() if name != "cut-drafter"),
    (["export", "cut-drafter", "out"], 1, "cannot be written in the z-lab layout"),
    (EXPORT, 1, "holds copies of the target's embedding and LM head"),
    ([*EXPORT, "--target", "nowhere"], 1, "The folder nowhere does not exist"),
    ([*EXPORT, "--target", TARGET], 1, "The drafter was made for a target with `vocab_size` "),
    *(([command, name, *rest], 1, NO_DRAFTER[name]) for name in ("empty", "adapter", "no-json", "a-list", "configured")
      for command, *rest in (["card"], ["push", "org/name"])),
    ([*ASK, "--dtype", "float7"], 2, "'float7' is not one of auto, bfloat16, float16, float32"),
    ([*ASK, "--threads", "-1"], 2, "Invalid value for '--threads': '-1' should be"),
    ([*ASK, "--threads", "two"], 2, "Invalid value for '--threads': 'two' should be a valid integer"),
    ([*ASK, "--temperature", "hot"], 2, "Invalid value for '--temperature': 'hot' should be a valid number"),
    ([*ASK, "--tree-budget", "1025"], 2, "'1025' is more nodes than a draft tree can have: 1024 at most, or auto."),
    ([*COMPARE, "--drafter", f"X (4, 1025 nodes)={DRAFTER}"], 1, "expected at most 1024 nodes, or auto."),
    ([*ASK, "--device-map", "cuda:77"], 1, "`--device-map` is 'cuda:77', but this torch sees"),
    ([*ASK, "--device-map", "toaster"], 1, "`--device-map` is 'toaster', expected auto, balanced"),
    *(([*ASK, option, wrong], 2, f"'{wrong}' is neither a number, 1 or above, nor auto")
      for option in ("--num-draft-tokens", "--tree-budget") for wrong in ("0", "many", "-1", "2.5")),
    ([*ASK, "--num-draft-tokens", "9"], 1, "cannot draft 9 tokens"),
    ([*ASK, "--temperature", "-1"], 2, "-1.0 is no temperature"),
    ([*ASK, "--temperature", "nan"], 2, "nan is no temperature"),
    ([*ASK, "--temperature", "inf"], 2, "inf is no temperature"),
    ([*ASK, "--max-new-tokens", "0"], 2, "Invalid value for '--max-new-tokens': '0' should be greater than"),
    ([*ASK, "--seed", "-1"], 2, "Invalid value for '--seed': '-1' should be greater than"),
    (["generate", *PAIR, " "], 1, "The prompt is empty"),
    (["generate", *PAIR], 2, "Missing argument 'prompt' (What to ask, as one chat turn: \"What is 2 + 3?\"). See"),
    (["generate", "--target", TARGET, "hi"], 2, "of the drafter, or prompt-lookup; `hf-hyperdflash drafters TARGET`"),
    ([*ASK, "there"], 2, "unexpected extra argument"),
    ([*ASK, "--colour", "red"], 2, "No such option"),
    (["generalize"], 2, "No such command 'generalize'"),
    (["doctor", *PAIR, "--max-new-tokens", "2"], 2, "Invalid value for '--max-new-tokens'"),
    (["card", "nowhere"], 2, "'nowhere' does not exist"),
    (["card", DRAFTER, "--results", "nowhere"], 2, "'nowhere' does not exist"),
    (["card", DRAFTER, "--results", "results"], 1, "The folder results has no results.jsonl"),
    (["card", DRAFTER, "--notes", "nowhere.md"], 2, "'nowhere.md' does not exist"),
    (["card", DRAFTER, "--notes", "notes.md", "--output", "out.md"], 1, "notes.md is no text in UTF-8"),
    (["card", DRAFTER, "--output", "file/card.md"], 1, "file is a file"),
    (["card", DRAFTER, "--dtype", "float7"], 2, "'float7' is not one of"),
    *(([command, name, *rest], 1, f"{KINDS[-2]} or {KINDS[-1]}, saved")
      for name in ("zlab", TARGET)
      for command, *rest in (["card"], ["push", "org/name"])),
    *((["export", name, "out"], 1, "expected a HyperDFlash drafter, saved by this package")
      for name in ("mtp", "zlab", TARGET)),
    (["card", "wordy-mtp", "--output", "out.md"], 1, "Validation error for field 'num_attention_heads'"),
    (["export", DRAFTER, "out"], 1, "cannot be written in the z-lab layout"),
    (["export", DRAFTER, TARGET], 1, "has a model that is no export (deepseek_v4), expected a folder that may be"),
    (["export", DRAFTER, "file"], 2, "'file' is a file"),
    (["export", DRAFTER, "file/out"], 1, "file is a file"),
    (["export", DRAFTER, "out", "--format", "tarball"], 1, "`format` is 'tarball'"),
    (["push", "nowhere", "org/name"], 2, "'nowhere' does not exist"),
    (["push", DRAFTER, "a/b/c"], 1, "The repository is 'a/b/c', expected a name on the Hub"),
    ([*CALIBRATE, "nowhere", "--data", "rows.jsonl"], 2, "'nowhere' does not exist"),
    ([*CALIBRATE, "file", "--data", "rows.jsonl"], 2, "'file' is a file"),
    *(([*CALIBRATE, name, "--data", "rows.jsonl"], 1, NO_DRAFTER[name]) for name in ("empty", "no-json")),
    (["calibrate", "--target", "no/where/at", *CALIBRATE[3:], "blind", "--data", "rows.jsonl"], 1,
     "`confidence_head` of the drafter is False"),
    ([*CALIBRATE, "mtp", "--data", "rows.jsonl"], 1, "mtp is an MTP drafter, expected a HyperDFlash"),
    *(([*CALIBRATE, name, "--data", "rows.jsonl"], 1, "`confidence_head` of the drafter is False")
      for name in ("specblock", "eagle3")),
    ([*CALIBRATE, "confident", "--data", "nowhere.jsonl"], 1, "No dataset file at 'nowhere.jsonl'"),
    ([*CALIBRATE, "confident", "--data", "torn.jsonl"], 1, "torn.jsonl:2 is no JSON"),
    ([*CALIBRATE, "confident", "--data", "odd.jsonl"], 1, "odd.jsonl:2: A row with columns"),
    ([*CALIBRATE, "confident", "--data", "rows.jsonl", "--max-new-tokens", "50"], 1, "give at most 49 rounds"),
    ([*CALIBRATE, "confident", "--data", "rows.jsonl", "--max-new-tokens", "2"], 2, "'--max-new-tokens'"),
    ([*CALIBRATE, "confident", "--data", "rows.jsonl", "--limit", "1"], 2, "Invalid value for '--limit'"),
    ([*CALIBRATE, "confident", "--data", "rows.jsonl", "--temperature", "-1"], 2, "-1.0 is no temperature"),
    ([*CALIBRATE, "confident", "--data", "rows.jsonl", "--output", "file"], 2, "'file' is a file"),
    ([*CALIBRATE, "confident", "--data", "rows.jsonl", "--output", "file/out"], 1, "file is a file"),
    ([*CALIBRATE, "confident", "--data", "rows.jsonl"], 1, "missing"),
    (["calibrate", "--target", "no/where/at", *CALIBRATE[3:], "confident", "--data", "rows.jsonl"], 1,
     NO_TARGET["no/where/at"]),
    *(([*ANSWERS, *rest], status, message) for rest, status, message in (
        (["--data", "nowhere.jsonl"], 1, "No dataset file at 'nowhere.jsonl'"),
        (["--data", "rows.jsonl", "--top-p", "0"], 2, "0.0 is no top-p: more than 0 and at most 1"),
        (["--data", "rows.jsonl", "--limit", "0"], 2, "Invalid value for '--limit'"),
        (["--data", "rows.jsonl", "--chat-template", "nowhere"], 2, "'nowhere' does not exist"),
        (["--data", "rows.jsonl", "--output", "file/out.jsonl"], 1, "file is a file"),
        (["--data", "rows.jsonl", "--target", "no/where/at"], 1, NO_TARGET["no/where/at"]),
    )),
    (COMPARE, 1, "No method is given"),
    *(([*COMPARE, "--drafter", f"{name}={DRAFTER}"], 1, NAMED)
      for name in ("X (a)", "X (0)", "X (2", "", "X (4, 0 nodes)")),
    ([*COMPARE, "--drafter", "X="], 1, NAMED),
    ([*COMPARE, "--drafter", "X=no/where/at"], 1, NO_DRAFTER["no/where/at"]),
    ([*COMPARE, "--drafter", f"X (99)={DRAFTER}"], 1, "cannot draft 99 tokens"),
    ([*COMPARE, "--mtp", "0"], 2, "Invalid value for '--mtp'"),
    ([*COMPARE, "--prompt-lookup", "0"], 2, "Invalid value for '--prompt-lookup'"),
    ([*COMPARE, "--mtp", "1", "--limit", "0"], 2, "Invalid value for '--limit'"),
    ([*COMPARE, "--mtp", "1", "--max-new-tokens", "2"], 2, "Invalid value for '--max-new-tokens'"),
    ([*COMPARE, "--mtp", "1", "--temperature", "-1"], 2, "-1.0 is no temperature"),
    ([*COMPARE, "--mtp", "1", "--temperature", "nan"], 2, "nan is no temperature"),
    ([*COMPARE, "--mtp", "1", "--mode", "deep"], 1, "`modes` has ['deep']"),
    ([*COMPARE, "--mtp", "1", "--data", "nowhere"], 1, "nowhere"),
    ([*COMPARE, "--mtp", "1", "--data", "file"], 1, "file"),
    ([*COMPARE, "--mtp", "1", "--suite", "chess"], 1, "No suite 'chess' in data"),
    ([*COMPARE, "--mtp", "1", "--output", "file"], 2, "'file' is a file"),
    ([*COMPARE, "--mtp", "1", "--output", "file/out"], 1, "file is a file"),
    (SWEEP, 1, "No method is given"),
    ([*SWEEP, "--drafter", DRAFTER, "--num-draft-tokens", "0"], 2, "Invalid value for '--num-draft-tokens'"),
    ([*SWEEP, "--drafter", DRAFTER, "--num-draft-tokens", "9"], 1, "cannot draft 9 tokens"),
    ([*SWEEP, "--drafter", f"X (a)={DRAFTER}"], 1, NAMED),
    ([*SWEEP, "--drafter", f"X (99)={DRAFTER}"], 1, "cannot draft 99 tokens"),
    *(([*TRAIN, "--target", name], 1, NO_TARGET[name])
      for name in ("no/where/at", "mtp", "wordy", "wide", "wordless")),
    ([*TRAIN, "--target", TARGET, "--drafter", TARGET], 1, "an EAGLE-3 drafter or a DSpark drafter, saved by this"),
    ([*TRAIN, "--target", TARGET, "--drafter", "zlab"], 1, "The folder zlab has no weights"),
    ([*TRAIN, "--target", TARGET, "--drafter_type", "eagle3", "--block_size", "4"], 1,
     "`--block_size` is not for a drafter of type eagle3"),
    ([*TRAIN, "--target", TARGET, "--drafter_type", "specblock", "--sequential_head", "state"], 1,
     "`--sequential_head` is not for a drafter of type specblock"),
    ([*TRAIN, "--target", TARGET, "--no_shift"], 1, "`--shift` is not for a drafter of type hyperdflash"),
    ([*TRAIN, "--target", TARGET, "--drafter_type", "specblock", "--max_blocks", "0"], 1, "expected at least 1"),
    ([*TRAIN, "--target", TARGET, "--drafter_type", "medusa"], 1, "medusa"),
    ([*TRAIN, "--target", TARGET, "--drafter", "adapter"], 1, NO_DRAFTER["adapter"]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    MISTAKES,
    ids=[" ".join(arguments[:1] + arguments[-2:]) for arguments, *_ in MISTAKES],
)
def test_a_mistake_ends_in_one_line(monkeypatch, capsys, caplog, wrong, arguments, status, message):
    monkeypatch.chdir(wrong)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    there = sorted(wrong.rglob("*"))
    code, lines = ended(monkeypatch, capsys, *arguments)
    errors = [line for line in lines if line.startswith("Error: ")]
    assert (code, len(errors)) == (status, 1) and message in errors[0], lines
    assert (
        status == 1 or f"See `hf-hyperdflash{f' {arguments[0]}' * (arguments != ['generalize'])} --help`." in errors[0]
    )
    assert lines[-1] == errors[0] and not any("Traceback" in line or "[Errno" in line for line in lines)
    assert sorted(wrong.rglob("*")) == there  # refused before anything was written


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write and read everything")
def test_permissions_are_looked_at_first(monkeypatch, capsys, wrong):
    monkeypatch.chdir(wrong)
    (wrong / "closed").mkdir(mode=0o500)
    code, lines = ended(monkeypatch, capsys, *COMPARE, "--mtp", 1, "--output", "closed/out")
    assert code == 1 and "closed cannot be written to" in lines[-1]


def test_the_system_is_quoted_without_its_numbers(monkeypatch, capsys, tmp_path):
    """A folder stands where the card's training record should."""
    shutil.copytree(DRAFTER, tmp_path / "drafter")
    (tmp_path / "drafter" / "README.md").mkdir()
    code, lines = ended(monkeypatch, capsys, "card", tmp_path / "drafter")
    assert code == 1 and lines == [f"Error: {tmp_path / 'drafter' / 'README.md'}: Is a directory."]


@pytest.mark.nightly  # a process that imports everything
def test_a_missing_library_is_told_with_its_extra(tmp_path):
    """In a process that cannot import `datasets`."""
    (tmp_path / "chats.jsonl").write_text('{"messages": [{"role": "user", "content": "hi"}]}\n')
    arguments = [
        "train",
        "--target",
        TARGET,
        "--dataset",
        str(tmp_path / "chats.jsonl"),
        "--output_dir",
        str(tmp_path / "out"),
    ]
    code = f"""
import sys
sys.modules["datasets"] = None
from hf_hyperdflash.cli.app import run
sys.argv = ["hf-hyperdflash", *{arguments!r}]
run()
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 1 and "Traceback" not in result.stderr
    assert 'pip install "hf-hyperdflash[train]".' in result.stderr.splitlines()[-1], result.stderr


@pytest.mark.nightly  # a process that imports everything
def test_what_is_loaded_is_said_before_anything_heavy_is_imported():
    code = """
import sys
from hf_hyperdflash.cli.app import run
sys.argv = ["hf-hyperdflash", "generate", "--target", "no/where/at", "--drafter", "x", "hi"]
write = sys.stderr.write
def watched(text):
    write(f"{'torch' in sys.modules} {text}" if text.strip() else text)
sys.stderr.write = watched
run()
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    first, *_, last = result.stderr.splitlines()
    assert first == "False Loading the target no/where/at ..." and result.returncode == 1
    assert "Error: The folder no/where/at does not exist" in last and "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("benchmark", "The same command goes on"),
        ("sweep", "The same command goes on"),
        ("train", "--resume_from_checkpoint"),
    ],
)
def test_ctrl_c_says_how_to_go_on(command, said):
    """A real process, stopped as a terminal does while it loads."""
    given = ["--target", TARGET, "--drafter", TARGET, "--output", "unwritten"]
    arguments = [command, *(given if command != "train" else ())]
    code = f"""
import os, signal, sys
from hf_hyperdflash.cli.app import run
signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background jobs ignore
write = sys.stderr.write
def watched(text):
    write(text)
    if text.startswith("Loading "):
        os.kill(os.getpid(), signal.SIGINT)
sys.stderr.write = watched
sys.argv = ["hf-hyperdflash", *{arguments!r}]
run()
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 130 and "Traceback" not in result.stderr
    assert result.stderr.strip().splitlines()[-1].startswith("Stopped. ") and said in result.stderr


@pytest.mark.parametrize(("rank", "where"), [("0", ""), ("1", " in process 1")])
def test_of_several_processes_each_tells_which_it_is(monkeypatch, capsys, rank, where):
    monkeypatch.setenv("RANK", rank)
    code, (line,) = ended(monkeypatch, capsys, "train", "--target", "a", "--output_dir", "b", "--bogus")
    assert code == 1 and line.startswith(f"Error{where}: `train` knows no '--bogus'")


def test_a_slip_in_a_commands_name(monkeypatch, capsys):
    code, lines = ended(monkeypatch, capsys, "genrate")
    assert code == 2 and lines == [
        "Error: No such command 'genrate'. Did you mean 'generate'? See `hf-hyperdflash --help`."
    ]


def test_the_short_help_is_the_long_one():
    for command in ([], ["generate"], ["train"]):
        assert run(*command, "-h") == run(*command, "--help")


def test_an_answer_that_was_cut_off_says_so():
    asked = ["generate", *PAIR, "--num-draft-tokens", "AUTO", "What is 3 plus 4?"]
    assert run(*asked, "--max-new-tokens", 3).endswith("%: 100. Stopped at --max-new-tokens 3.\n")
    assert "Stopped at" not in run(*asked, "--max-new-tokens", 400)


def test_how_many_drafts_is_looked_at_before_the_target_is_loaded(monkeypatch, capsys):
    monkeypatch.setattr("hf_hyperdflash.hub.loading.load_target", lambda *a, **k: pytest.fail("the target was loaded"))
    code, lines = ended(monkeypatch, capsys, *ASK, "--num-draft-tokens", "99")
    assert code == 1 and "cannot draft 99 tokens a round: expected a whole number from 1 to 8" in lines[-1]


def test_the_most_nodes_are_the_runtimes():
    assert options.MOST_NODES == MOST_NODES


@pytest.mark.parametrize(
    ("is_terminal", "given", "hidden"), [(True, None, None), (False, None, "1"), (False, "0", "0")]
)
def test_libraries_draw_bars_for_somebody_who_watches(monkeypatch, is_terminal, given, hidden):
    names = ["HF_HUB_DISABLE_PROGRESS_BARS", "HF_DATASETS_DISABLE_PROGRESS_BARS"]
    monkeypatch.setattr("os.environ", {} if given is None else dict.fromkeys(names, given))
    monkeypatch.setattr("sys.stderr.isatty", lambda: is_terminal)
    monkeypatch.setattr("sys.argv", ["hf-hyperdflash", "--version"])
    with pytest.raises(SystemExit):
        entry_point()
    assert [os.environ.get(name) for name in names] == [hidden, hidden]


def test_the_version(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["hf-hyperdflash", "--version"])
    with pytest.raises(SystemExit) as stopped:
        entry_point()
    assert not stopped.value.code and capsys.readouterr().out == f"hf-hyperdflash {hf_hyperdflash.__version__}\n"


@pytest.mark.parametrize(("family", "flags"), [(deepseek_v4_remote_code, ["--trust-remote-code"]), (glm5_next, [])])
def test_other_families_are_loaded_by_name(tmp_path, family, flags):
    """Remote code, and a family that has only a multimodal class."""
    target = family()
    target.save_pretrained(tmp_path / "target")
    characters().save_pretrained(tmp_path / "target")
    tiny_drafter(target).save_pretrained(tmp_path / "drafter")
    pair = ["--target", tmp_path / "target", "--drafter", tmp_path / "drafter", "--max-new-tokens", 8, *flags]
    assert "verification rounds" in run("generate", *pair, "--tree-budget", 12, "what is 2?")
    shown = run("generate", *pair, "--show", "what is 2?")
    assert "verification rounds" in shown and "draft 1" not in shown  # piped: without colours, and their names
    rows = [
        {"messages": [{"role": "user", "content": f"what is {i}?"}, {"role": "assistant", "content": f"it is {i}."}]}
        for i in range(12)
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    arguments = [
        "--target", pair[1], "--dataset", tmp_path / "rows.jsonl", "--output_dir", tmp_path / "trained", "--layers", 1,
        "--intermediate_size", 24, "--max_steps", 2, "--eval_rows", 2, "--eval_prompts", 1,
        "--eval_max_new_tokens", 4, "--report_to", "none", "--use_cpu", *(["--trust_remote_code"] if flags else []),
    ]  # fmt: skip
    train_main(list(map(str, arguments)))
    config = HyperDFlashDrafter.from_pretrained(tmp_path / "trained").config
    assert config.intermediate_size == 24 and changed_parts(config.target_fingerprint, target) == []
    if flags:
        refused = CliRunner().invoke(app, [str(x) for x in ["generate", *pair[:-1], "what is 2?"]])
        assert refused.exit_code != 0 and "trust_remote_code" in str(refused.exception)


@pytest.mark.nightly  # every command runs whole
def test_prompt_lookup_is_a_drafter_of_every_command(data, tmp_path):
    printed = run("generate", "--target", TARGET, "--drafter", "prompt-lookup", "--num-draft-tokens", 3,
                  "--max-new-tokens", 8, "What is 3 plus 4?")  # fmt: skip
    assert "verification round" in printed and "tau" in printed
    diagnosed = run("doctor", "--target", TARGET, "--drafter", "prompt-lookup", "--quick", "--max-new-tokens", 8)
    assert "drafter: PromptLookupDrafter, which has no weights" in diagnosed and "Problems found." not in diagnosed
    assert "4 of 4 greedy texts are the target's own" in diagnosed
    measured = ["--target", TARGET, "--suite", "gsm8k", "--data", data, "--limit", 1, "--max-new-tokens", 8]
    run("benchmark", *measured, "--drafter", "prompt-lookup", "--drafter", "Mine (4, 8 nodes)=prompt-lookup",
        "--output", tmp_path / "out")  # fmt: skip
    lines = [json.loads(line) for line in (tmp_path / "out" / "results.jsonl").read_text().splitlines()]
    assert list(lines[0]["run"]["methods"]) == ["Target only", "Prompt lookup (10)", "Mine (4, 8 nodes)"]
    assert all(line["identical"] in (None, True) for line in lines[1:])
    refused = CliRunner().invoke(app, list(map(str, ["benchmark", *measured, "--output", tmp_path / "b", "--drafter",
                                                     "A (4, adaptive)=prompt-lookup"])))  # fmt: skip
    assert "prompt lookup has no weights that could learn" in str(refused.exception)


UNREACHABLE = "http://127.0.0.1:9"  # a port where nobody listens


# Takes seconds: a command in a process of its own.
@pytest.mark.parametrize(
    ("command", "missing"),
    mostly_nightly(
        [
            (
                ["generate", "--target", "org/name", "--drafter", "prompt-lookup", "hi"],
                "The folder org/name does not exist",
            ),
            (["doctor", "--target", TARGET, "--drafter", "org/name"], "The folder org/name does not exist"),
            (
                ["benchmark", "--target", TARGET, "--drafter", DRAFTER, "--suite", "gsm8k", "--output", "out"],
                "'gsm8k'",
            ),
            (["train", "--target", TARGET, "--output_dir", "out", "--layers", "1"], "zhaode/EagleChat"),
        ]
    ),
)
def test_without_a_network_the_hub_is_asked_once(tmp_path, command, missing):
    environment = {**os.environ, "HF_ENDPOINT": UNREACHABLE, "HF_HOME": str(tmp_path), "PYTHONPATH": os.getcwd()}
    environment.pop("HF_HUB_OFFLINE", None)
    code = f"import sys; sys.argv = ['hf-hyperdflash', *{command!r}]; from hf_hyperdflash.cli.app import run; run()"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment, cwd=tmp_path
    )
    told = [line for line in result.stderr.splitlines() if line.startswith(f"{UNREACHABLE} cannot be reached (")]
    assert len(told) == 1 and "only what is in its cache is used" in told[0], result.stderr
    assert result.returncode == 1 and missing in result.stderr.splitlines()[-1], result.stderr
    assert "Retry" not in result.stderr and "Traceback" not in result.stderr


def test_the_command_is_a_module_too():
    """As `accelerate launch -m` runs it, which `train --help` names: an installed package has no `examples/`."""
    told = subprocess.run(
        [sys.executable, "-m", "hf_hyperdflash.cli.app", "--version"], capture_output=True, text=True, check=True
    )
    assert told.stdout == f"hf-hyperdflash {hf_hyperdflash.__version__}\n"
    package = Path(hf_hyperdflash.__file__).parent
    assert "-m hf_hyperdflash.cli.app train" in (package / "training" / "flags.py").read_text()
    assert [path.name for path in package.rglob("*.py") if "examples/" in path.read_text()] == []
