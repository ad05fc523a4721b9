import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

import hf_hyperdflash
from hf_hyperdflash import HyperDFlashDrafter
from hf_hyperdflash.cli import options
from hf_hyperdflash.cli.app import app
from hf_hyperdflash.cli.app import run as entry_point
from hf_hyperdflash.cli.session import use_cache_if_offline, why_unreachable
from hf_hyperdflash.decoding.request import MOST_NODES
from hf_hyperdflash.training.features.fingerprint import changed_parts
from hf_hyperdflash.training.script import main as train_main

from ..conftest import MODELS, mostly_nightly, tiny_drafter, tiny_target
from ..helpers.commands import ended, run
from ..helpers.deepseek_checkpoints import dspark_fields, dspark_shapes, random_tensors
from ..helpers.families import deepseek_v4_remote_code, glm5_next
from ..helpers.tokenizers import characters
from ..helpers.unrolled import unrolled

COMMANDS = typer.main.get_command(app).commands
TARGET, DRAFTER = str(MODELS / "tiny-deepseek-v4"), str(MODELS / "tiny-deepseek-v4-hyperdflash")
NAME = "HyperDFlash hybrid, state head"  # by default


@pytest.fixture
def data(tmp_path):
    (tmp_path / "gsm8k.jsonl").write_text('{"turns": ["What is 3 plus 4?"]}\n{"turns": ["What is 2 times 8?"]}\n')
    return tmp_path


@pytest.mark.parametrize("command", [name for name in COMMANDS if name not in ("train", "features")])  # tests/training
def test_help_explains_every_option(monkeypatch, command):
    explains(monkeypatch, {part.opts[0]: part.help for part in COMMANDS[command].params}, command)


def test_without_a_command_every_command_is_explained(monkeypatch):
    explains(monkeypatch, {name: command.help for name, command in COMMANDS.items()})


def explains(monkeypatch, helps: dict[str, str], *command):
    monkeypatch.setenv("COLUMNS", "200")  # on which each has one line
    shown = [line.strip("│* ") for line in run(*command, *(["--help"] if command else [])).splitlines()]
    for name, help in helps.items():
        (line,) = (line for line in shown if line.startswith((f"{name} ", f"{name},")))
        assert help and help in line, name


@pytest.fixture
def measured(data, tmp_path):
    return ["--suite", "gsm8k", "--data", data, "--limit", 1, "--output", tmp_path / "out"]


def results_in(folder) -> tuple[list[str], list[dict]]:
    """The names of the methods that were compared, and the results."""
    first, *lines = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    assert {line["method"] for line in lines} == {*first["run"]["methods"]}
    assert all(line["identical"] in (None, True) for line in lines)
    return list(first["run"]["methods"]), lines


def test_benchmark_writes_results_and_report(monkeypatch, capsys, measured, tmp_path):
    out, target = tmp_path / "out", hf_hyperdflash.load_target(TARGET, dtype="float32")
    for kind in ("specblock", "eagle3"):  # which are called what they are
        unrolled(kind, target).save_pretrained(tmp_path / kind)
    drafters = [
        DRAFTER, f"Mine (2)={DRAFTER}", f"Tree (3, 9 nodes)={DRAFTER}", f"Mine (auto)={DRAFTER}",
        f"Tree (auto, auto nodes)={DRAFTER}", f"Copies (2, lookup)={DRAFTER}", f"Learns (2, adaptive)={DRAFTER}",
        tmp_path / "specblock", tmp_path / "eagle3", "prompt-lookup", "Mine (4, 8 nodes)=prompt-lookup",
    ]  # fmt: skip
    printed = run("benchmark", "--target", TARGET, "--mtp", 3, "--mtp", 1, "--prompt-lookup", 4, *measured,
                  "--max-new-tokens", 10, *(part for each in drafters for part in ("--drafter", each)))  # fmt: skip
    assert str(out / "report.md") in printed and "Non-think, temperature 0" in printed and "GSM8K" in printed
    names, lines = results_in(out)
    assert names == [
        "Target only", "MTP (3)", "MTP (1)", "Prompt lookup (4)", f"{NAME} (8)", "Mine (2)", "Tree (3, 9 nodes)",
        "Mine (auto)", "Tree (auto, auto nodes)", "Copies (2, lookup)", "Learns (2, adaptive)", "SpecBlock (8)",
        "EAGLE-3 (7)", "Prompt lookup (10)", "Mine (4, 8 nodes)",
    ]  # fmt: skip
    drafted = {line["method"]: line["draft_positions"] for line in lines}
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
    code, said = ended(monkeypatch, capsys, "card", tmp_path / "other", *of_results)
    assert code == 1 and f"{NAME} (8)" in said[-1] and "other weights" in said[-1]
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
    shutil.copytree(TARGET, folder)
    (folder / "model.safetensors").unlink()
    fields = json.loads((folder / "config.json").read_text()) | dspark_fields(target_layer_ids=[0, 4])
    (folder / "config.json").write_text(json.dumps(fields))
    tensors = load_file(Path(TARGET) / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith("mtp.")}
    drafter = random_tensors(dspark_shapes(AutoConfig.from_pretrained(folder), blocks=1))
    save_file({**kept, **drafter}, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_a_target_is_compared_with_whichever_drafter_it_carries(monkeypatch, capsys, measured, tmp_path):
    target = with_dspark(tmp_path / "july")
    command = ["benchmark", "--target", target, *measured, "--max-new-tokens", 8, "--mtp"]
    run(*command, 2)
    names, lines = results_in(tmp_path / "out")
    assert names == ["Target only", "DSpark (2)"] and lines[-1]["draft_positions"] == 2
    code, said = ended(monkeypatch, capsys, *command, 6)
    assert code == 1 and "6 tokens" in said[-1] and "from 1 to 5" in said[-1]
    printed = run("generate", "--target", target, "--drafter", target, "--max-new-tokens", 8, "What is 3 plus 4?")
    assert "tau" in printed


@pytest.mark.parametrize("counts", [[2, 5], []])
def test_sweep_recommends_a_number_of_drafts(measured, tmp_path, counts):
    asked = [part for count in counts for part in ("--num-draft-tokens", count)]
    printed = run("sweep", "--target", TARGET, "--drafter", DRAFTER, "--drafter", TARGET, *asked, *measured,
                  "--max-new-tokens", 12 if counts else 4)  # fmt: skip
    assert "The fastest on each suite" in printed and (f"{NAME} (5)" in printed or not counts)
    names, _ = results_in(tmp_path / "out")
    tried = {NAME: counts or range(1, 9), "MTP": counts or range(1, 7)}
    assert names == ["Target only", *(f"{name} ({count})" for name in tried for count in tried[name])]


def test_calibrate_writes_temperatures_and_a_report(monkeypatch, tmp_path):
    """The shipped drafter has a confidence head."""
    confident = shutil.copytree(DRAFTER, tmp_path / "confident")
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
    again, facts = (json.loads((tmp_path / name / "calibration.json").read_text()) for name in ("first", "out"))
    assert facts["temperatures"] == temperatures and facts["rounds"][1] == facts["through"][0]["after"]["total"]
    settings = {"data": "held_out.jsonl", "drafter": "confident", "prompts": 2, "max_new_tokens": 14,
                "temperature": 0.8, "seed": 3}  # fmt: skip
    assert settings.items() <= facts["settings"].items()
    assert all(again[name] == facts[name] for name in ("temperatures", "rounds", "through", "given"))
    assert all((tmp_path / "out" / name).stat().st_size > 500 for name in ("calibration.md", "reliability.png"))


@pytest.mark.nightly  # a process that imports everything
def test_what_is_loaded_is_said_before_anything_heavy_is_imported(tmp_path):
    code = """
import sys
write = sys.stderr.write
sys.stderr.write = lambda text: write(f"{'torch' in sys.modules} {text}" if text.strip() else text)
"""
    said = of_process(tmp_path, ["generate", "--target", "no/where/at", "--drafter", "x", "hi"], code)
    assert said[0] == "False Loading the target no/where/at ..." and "Error: The folder no/where/at" in said[-1]


FAILURES = [  # a command, what it ends in, the exit status, and what is said
    ("benchmark", KeyboardInterrupt(), 130, "Stopped. The same command goes on where it stopped."),
    ("train", KeyboardInterrupt(), 130, "Stopped. The same command with --resume_from_checkpoint True"),
    ("generate", KeyboardInterrupt(), 130, "Stopped."),
    ("train", ModuleNotFoundError("No datasets", name="datasets"), 1,
     'Error: No datasets: pip install "hf-hyperdflash[train]".'),
    ("train", ModuleNotFoundError("No owl", name="owl"), 1, "Error: No owl"),
    ("card", IsADirectoryError(21, "Is a directory", "README.md"), 1, "Error: README.md: Is a directory."),
    ("card", OSError("no\nnetwork"), 1, "Error: no network"), ("card", ImportError("torch"), 1, "Error: torch"),
]  # fmt: skip


@pytest.mark.parametrize(("command", "error", "status", "said"), FAILURES, ids=str)
def test_what_a_command_ends_in_is_one_line(monkeypatch, capsys, command, error, status, said):
    def ending(**_):
        raise error

    monkeypatch.setattr("hf_hyperdflash.cli.app.app", ending)
    code, (line,) = ended(monkeypatch, capsys, command)
    assert code == status and line.startswith(said) and (line == said or "goes on" in line)


def test_the_short_help_is_the_long_one():
    for command in ([], ["generate"], ["train"]):
        assert run(*command, "-h") == run(*command, "--help")


def test_an_answer_that_was_cut_off_says_so():
    asked = ["generate", "--target", TARGET, "--drafter", DRAFTER, "--num-draft-tokens", "AUTO", "What is 3 plus 4?"]
    assert run(*asked, "--max-new-tokens", 3).endswith("%: 100. Stopped at --max-new-tokens 3.\n")
    assert "Stopped at" not in run(*asked, "--max-new-tokens", 400)


def test_the_most_nodes_are_the_runtimes():
    assert options.MOST_NODES == MOST_NODES


@pytest.mark.parametrize(
    ("is_terminal", "given", "hidden"), [(True, None, None), (False, None, "1"), (False, "0", "0")]
)
def test_libraries_draw_bars_for_somebody_who_watches(monkeypatch, capsys, is_terminal, given, hidden):
    names = ["HF_HUB_DISABLE_PROGRESS_BARS", "HF_DATASETS_DISABLE_PROGRESS_BARS"]
    monkeypatch.setattr("os.environ", {} if given is None else dict.fromkeys(names, given))
    monkeypatch.setattr("sys.stderr.isatty", lambda: is_terminal)
    monkeypatch.setattr("sys.argv", ["hf-hyperdflash", "--version"])
    with pytest.raises(SystemExit):
        entry_point()
    assert capsys.readouterr().out == f"hf-hyperdflash {hf_hyperdflash.__version__}\n"
    assert [os.environ.get(name) for name in names] == [hidden, hidden]


@pytest.mark.parametrize(("family", "flags"), [(deepseek_v4_remote_code, ["--trust-remote-code"]), (glm5_next, [])])
def test_other_families_are_loaded_by_name(monkeypatch, capsys, tmp_path, family, flags):
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
        {"messages": [{"role": role, "content": f"it is {i}"} for role in ("user", "assistant")]} for i in range(9)
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    train_main([
        "--target", str(pair[1]), "--dataset", str(tmp_path / "rows.jsonl"), "--output_dir", str(tmp_path / "trained"),
        *"--layers 1 --intermediate_size 24 --max_steps 2 --eval_rows 2 --eval_prompts 1".split(),
        *"--eval_max_new_tokens 4 --report_to none --use_cpu".split(), *(["--trust_remote_code"] if flags else []),
    ])  # fmt: skip
    config = HyperDFlashDrafter.from_pretrained(tmp_path / "trained").config
    assert config.intermediate_size == 24 and changed_parts(config.target_fingerprint, target) == []
    if flags:
        code, said = ended(monkeypatch, capsys, "generate", *pair[:-1], "what is 2?")
        assert code == 1 and "trust_remote_code" in said[-1]


@pytest.mark.nightly  # whole commands
def test_prompt_lookup_is_a_drafter_of_every_command():
    pair = ["--target", TARGET, "--drafter", "prompt-lookup", "--max-new-tokens", 8]
    assert "verification round" in run("generate", *pair, "--num-draft-tokens", 3, "What is 3 plus 4?")
    diagnosed = run("doctor", *pair, "--quick")
    assert "drafter: PromptLookupDrafter, which has no weights" in diagnosed and "Problems found." not in diagnosed
    assert "4 of 4 greedy texts are the target's own" in diagnosed


# Takes seconds: a doctor beside three other commands.
def test_an_adapter_goes_with_its_drafter(monkeypatch, capsys, measured, tmp_path):
    """Measured beside the drafter without it, merged where nobody can choose it, uploaded alone."""
    drafter, adapter = hf_hyperdflash.load_drafter(DRAFTER), tmp_path / "code"
    drafter.add_adapter(LoraConfig(r=2))
    drafter.save_pretrained(adapter)
    pair = ["--target", TARGET, "--drafter", DRAFTER, "--adapter", adapter, "--max-new-tokens", 8]
    run("benchmark", *pair, *measured)
    names, _ = results_in(tmp_path / "out")
    assert names[1:] == [f"{NAME} (8)", f"{NAME} (8, code)"]
    diagnosed = run("doctor", *pair, "--quick")
    assert "4 of 4 greedy texts are the target's own" in diagnosed
    planned = run("push", DRAFTER, "org/code", "--adapter", adapter, "--dry-run")
    assert "adapter_model.safetensors" in planned and "config.json" not in planned.replace("adapter_config.json", "")


def of_process(home, command, setup="", **more) -> list[str]:
    """What a command says in a process of its own that ends badly."""
    environment = {**os.environ, "HF_HOME": str(home), "PYTHONPATH": os.getcwd(), **more}
    code = f"{setup}\nimport sys; sys.argv = ['hf-hyperdflash', *{command!r}]\n"
    code += "from hf_hyperdflash.cli.app import run; run()"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment, cwd=home
    )
    assert result.returncode == 1 and "Traceback" not in result.stderr
    return result.stderr.splitlines()


UNREACHABLE = "http://127.0.0.1:9"  # a port where nobody listens


def test_what_is_not_here_is_looked_for_in_the_cache_alone(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("HF_ENDPOINT", UNREACHABLE)
    monkeypatch.setenv("HF_HUB_OFFLINE", "")
    for names, is_offline in (((tmp_path, None, "prompt-lookup"), False), ((tmp_path, "org/name"), True)):
        use_cache_if_offline(*names)
        said = capsys.readouterr().err
        assert os.environ["HF_HUB_OFFLINE"] == "1" * is_offline and bool(said) == is_offline
    assert said.startswith(f"{UNREACHABLE} cannot be reached (") and why_unreachable() and "only" in said


ASKING = [
    (["generate", "--target", "org/name", "--drafter", "prompt-lookup", "hi"], "org/name"),
    (["doctor", "--target", TARGET, "--drafter", "org/name"], "org/name"),
    (["benchmark", "--target", TARGET, "--drafter", DRAFTER, "--suite", "gsm8k", "--output", "out"], "'gsm8k'"),
    (["train", "--target", TARGET, "--output_dir", "out", "--layers", "1"], "zhaode/EagleChat"),
]


# Takes seconds: a command in a process of its own.
@pytest.mark.parametrize(("command", "missing"), mostly_nightly(ASKING))
def test_without_a_network_the_hub_is_asked_once(tmp_path, command, missing):
    lines = of_process(tmp_path, command, HF_ENDPOINT=UNREACHABLE, HF_HUB_OFFLINE="")
    (told,) = [line for line in lines if line.startswith(f"{UNREACHABLE} cannot be reached (")]
    assert "only what is in its cache is used" in told and missing in lines[-1] and "Retry" not in "".join(lines)


def test_the_command_is_a_module_too():
    """As `accelerate launch -m` runs it, which `train --help` names: an installed package has no `examples/`."""
    told = subprocess.run(
        [sys.executable, "-m", "hf_hyperdflash.cli.app", "--version"], capture_output=True, text=True, check=True
    )
    assert told.stdout == f"hf-hyperdflash {hf_hyperdflash.__version__}\n"
    package = Path(hf_hyperdflash.__file__).parent
    assert "-m hf_hyperdflash.cli.app train" in (package / "training" / "flags.py").read_text()
    assert [path.name for path in package.rglob("*.py") if "examples/" in path.read_text()] == []
