import json

import pytest
from typer.testing import CliRunner

from hf_hyperdflash import HyperDFlashDrafter
from hf_hyperdflash.cli import app
from hf_hyperdflash.cli import run as entry_point
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
    assert str(out / "report.md") in printed
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
    assert "| Suite | Temperature | HyperDFlash hybrid (2) | HyperDFlash hybrid (5) | Fastest |" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sweep", "--target", TARGET, "--drafter", DRAFTER, "--tokens", "7", "--output", "x"], "cannot draft 7 tokens"),
        (["benchmark", "--target", TARGET, "--data", "nowhere", "--output", "x"], "No suite 'gsm8k' in nowhere"),
    ],
)  # fmt: skip
def test_what_the_user_can_mend_is_said_in_one_line(monkeypatch, capsys, tmp_path, arguments, message):
    monkeypatch.setattr("sys.argv", ["hf-hyperdflash", *arguments])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        entry_point()
    printed = capsys.readouterr().err
    assert ended.value.code == 1 and message in printed and "Traceback" not in printed
    assert not list(tmp_path.iterdir())  # refused before anything was written


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
    assert HyperDFlashDrafter.from_pretrained(tmp_path / "trained").config.intermediate_size == 24
    if flags:
        refused = CliRunner().invoke(app, [str(x) for x in ["generate", *pair[:-1], "what is 2?"]])
        assert refused.exit_code != 0 and "trust_remote_code" in str(refused.exception)
