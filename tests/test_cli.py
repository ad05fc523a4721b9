import json

import pytest
from typer.testing import CliRunner

from hf_hyperdflash import HyperDFlashDrafter
from hf_hyperdflash.cli import app
from hf_hyperdflash.cli import run as entry_point
from hf_hyperdflash.fingerprint import changed_parts
from hf_hyperdflash.train import main as train_main

from .conftest import MODELS, tiny_drafter
from .families import deepseek_v4_remote_code, glm5_next
from .test_doctor import characters

TARGET, DRAFTER = str(MODELS / "tiny-deepseek-v4"), str(MODELS / "tiny-deepseek-v4-hyperdflash")


@pytest.fixture
def data(tmp_path):
    (tmp_path / "gsm8k.jsonl").write_text('{"turns": ["What is 3 plus 4?"]}\n{"turns": ["What is 2 times 8?"]}\n')
    return tmp_path


def run(*args):
    result = CliRunner().invoke(app, list(map(str, args)))
    assert result.exit_code == 0, (result.output, result.exception)
    return result.output


def test_help_explains_every_option():
    for command in ("benchmark", "sweep"):
        text = run(command, "--help")
        assert "--drafter" in text and "--max-new-tokens" in text and "Traceback" not in text


def test_benchmark_writes_results_and_report(data, tmp_path):
    out = tmp_path / "out"
    printed = run(
        "benchmark", "--target", TARGET, "--drafter", DRAFTER, "--drafter", f"Mine (2)={DRAFTER}", "--mtp", 3, "--mtp", 1,
        "--prompt-lookup", 4, "--suite", "gsm8k", "--data", data, "--limit", 1, "--max-new-tokens", 10, "--output", out,
    )  # fmt: skip
    assert str(out / "report.md") in printed and "Non-think, temperature 0" in printed and "GSM8K" in printed
    lines = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    names = ["Target only", "MTP (3)", "MTP (1)", "Prompt lookup (4)", "HyperDFlash hybrid (6)", "Mine (2)"]
    assert list(lines[0]["run"]["methods"]) == names and {line["method"] for line in lines[1:]} == set(names)
    assert {line["identical"] for line in lines[1:]} == {None, True}
    drafted = {line["method"]: line["draft_positions"] for line in lines[1:]}
    assert drafted["Mine (2)"] == 2 and drafted["MTP (1)"] == 1
    report = (out / "report.md").read_text()
    assert "tiny-deepseek-v4" in report and all(name in report for name in names[1:])
    assert all((out / name).stat().st_size > 500 for name in ("summary.csv", "acceptance.png", "speedup_tau.png"))


def test_sweep_recommends_a_number_of_drafts(data, tmp_path):
    printed = run(
        "sweep", "--target", TARGET, "--drafter", DRAFTER, "--tokens", 2, "--tokens", 5, "--suite", "gsm8k", "--data", data,
        "--limit", 1, "--max-new-tokens", 12, "--output", tmp_path / "out",
    )  # fmt: skip
    assert "The fastest on each suite" in printed and "HyperDFlash hybrid (5)" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sweep", "--target", TARGET, "--drafter", DRAFTER, "--tokens", "7", "--data", "../suites", "--output", "x"], "cannot draft 7 tokens"),
        (["benchmark", "--target", "nowhere", "--drafter", "nowhere", "--data", "nowhere", "--output", "x"], "folder nowhere"),
        (["benchmark", "--target", "nowhere", "--output", "x"], "No method is given"),
        (["sweep", "--target", "nowhere", "--output", "x"], "No method is given"),
    ],
)  # fmt: skip
def test_what_the_user_can_mend_is_said_in_one_line(monkeypatch, capsys, tmp_path, arguments, message):
    monkeypatch.setattr("sys.argv", ["hf-hyperdflash", *arguments])
    for folder in ("suites", "here"):
        (tmp_path / folder).mkdir()
    (tmp_path / "suites" / "gsm8k.jsonl").write_text('{"turns": ["What is 3 plus 4?"]}\n')
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(SystemExit) as ended:
        entry_point()
    printed = capsys.readouterr().err
    assert ended.value.code == 1 and message in printed and "Traceback" not in printed
    assert not list((tmp_path / "here").iterdir())  # refused before anything was written


def test_suites_are_found_and_read_before_a_model_is_loaded(monkeypatch, capsys, tmp_path):
    """All of a folder where none is named; what is wrong with one is said before that the target does not exist."""
    monkeypatch.setattr("sys.argv", ["hf-hyperdflash", "benchmark", "--target", "nowhere", "--drafter", "nowhere",
                                     "--data", str(tmp_path), "--output", str(tmp_path / "out")])  # fmt: skip
    (tmp_path / "mbpp.jsonl").write_text('{"turns": ["Hello?"]}\n')
    (tmp_path / "mine.jsonl").write_text('{"turns": "Hello?"}\n')
    with pytest.raises(SystemExit):
        entry_point()
    assert "mine.jsonl, line 1: `turns` is 'Hello?'" in capsys.readouterr().err
    (tmp_path / "mine.jsonl").write_text('{"turns": ["Hello?"]}\n')
    with pytest.raises(SystemExit):
        entry_point()
    assert "mine.jsonl" not in capsys.readouterr().err and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("command", "option"), [("benchmark", "--mtp"), ("benchmark", "--prompt-lookup"), ("sweep", "--tokens")]
)
def test_no_drafts_are_refused(command, option):
    result = CliRunner().invoke(app, [command, "--target", "nowhere", option, "0", "--output", "x"])
    assert result.exit_code == 2 and option in result.output


@pytest.mark.parametrize(("family", "flags"), [(deepseek_v4_remote_code, ["--trust-remote-code"]), (glm5_next, [])])
def test_other_families_are_loaded_by_name(tmp_path, family, flags):
    """Remote code, and a family that has only a multimodal class."""
    target = family()
    target.save_pretrained(tmp_path / "target")
    characters().save_pretrained(tmp_path / "target")
    tiny_drafter(target).save_pretrained(tmp_path / "drafter")
    pair = ["--target", tmp_path / "target", "--drafter", tmp_path / "drafter", "--max-new-tokens", 8, *flags]
    assert "verification rounds" in run("generate", *pair, "what is 2?")
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
