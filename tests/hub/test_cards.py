"""Model cards: facts only, readable by the Hub, with a snippet that runs."""

import csv
import json
import os
import re
from pathlib import Path

import pytest
from huggingface_hub import ModelCard
from typer.testing import CliRunner

from hf_hyperdflash import DeepseekV4DSparkDrafter, DeepseekV4MTPDrafter, HyperDFlashDrafter, load_drafter
from hf_hyperdflash.benchmark.report import measured
from hf_hyperdflash.cli.app import app
from hf_hyperdflash.drafters.deepseek_v4.configuration_dspark import DeepseekV4DSparkConfig
from hf_hyperdflash.hub.cards import Measured, drafter_card

from ..conftest import MODELS, tiny_config, tiny_drafter
from ..helpers.deepseek_checkpoints import dspark_fields
from ..helpers.processes import python
from ..helpers.unrolled import unrolled

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "experiments" / "results" / "tiny-deepseek-v4" / "heads"
METHOD = "State head (8)"
SMOLLM2 = ROOT / "experiments" / "results" / "smollm2-135m" / "drafter"


@pytest.fixture
def saved(target, tmp_path):
    tiny_drafter(target, target_name_or_path="org/target", target_revision="abc123").save_pretrained(tmp_path)
    return tmp_path


def test_what_is_not_known_is_left_out(saved):
    card = drafter_card(saved)
    assert card.data.base_model == "org/target" and "abc123" in card.text
    assert card.data.license is None and card.data.datasets is None and card.data.eval_results is None
    assert "## Training" not in card.text and "## Measured" not in card.text and "None" not in card.content
    assert "model-index" not in card.content
    config = json.loads((saved / "config.json").read_text())
    config["target_name_or_path"] = config["target_revision"] = ""
    (saved / "config.json").write_text(json.dumps(config))
    card = drafter_card(saved)
    assert card.data.base_model is None and "revision" not in card.text


@pytest.mark.parametrize(
    "folder", ["/home/me/tiny-target", "./models/tiny-target", "../tiny-target", "models/tiny-target"]
)
def test_a_folder_is_no_name_on_the_hub(target, tmp_path, monkeypatch, folder):
    """Its address leads nowhere, and it is no `base_model`; of data, too."""
    (tmp_path / "models" / "tiny-target").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    tiny_drafter(target, target_name_or_path=folder).save_pretrained("saved")
    Path("saved", "training.json").write_text(json.dumps({"settings": {"dataset": [folder, "org/chats:main"]}}))
    card = drafter_card("saved")
    assert card.data.base_model is None and card.data.datasets == ["org/chats"]
    assert "A drafter for tiny-target: it drafts" in card.text and "huggingface.co" not in card.text


def test_heads_are_told(target, tmp_path):
    plain = tiny_drafter(target)
    for fields, temperatures, told, untold in (
        ({}, None, [], ["knows the one before", "how probable"]),
        ({"sequential_head": "markov", "head_rank": 3}, None, ["through a `markov` head of width 3."], ["chooses"]),
        (
            {"sequential_head": "selector", "head_rank": 3, "confidence_head": True}, None,
            ["`selector` head of width 3, which chooses among the block's 16 best", "acceptance is (`Draft"], [],
        ),
        ({"confidence_head": True}, [1.5] * 6, ["acceptance is, calibrated on held-out prompts"], ["before it"]),
    ):  # fmt: skip
        drafter = plain.with_heads(**fields)
        drafter.config.confidence_temperatures = temperatures
        drafter.save_pretrained(tmp_path)
        card = drafter_card(tmp_path)
        assert all(part in card.text for part in told) and not any(part in card.text for part in untold), fields
        assert "\n\n\n" not in card.text


@pytest.mark.parametrize(
    ("made", "told"),
    [
        (
            lambda target: unrolled("specblock", target),
            ["8 tokens in 2 passes of 4", "a SpecBlock", "and a rank head"],
        ),
        (
            lambda target: unrolled("specblock", target, rank_head=False, shift=False, broadcast=False, max_blocks=3),
            ["12 tokens in 3 passes of 4, the", "that know their path.\n"],
        ),
        (lambda target: unrolled("eagle3", target), ["up to 7 tokens, a pass for each", "10 nodes of each level"]),
        (lambda target: DeepseekV4MTPDrafter(target.config), ["DeepSeek-V4's own multi-token-prediction block"]),
        (
            lambda target: DeepseekV4DSparkDrafter(
                DeepseekV4DSparkConfig.from_target_config(tiny_config(**dspark_fields()))
            ),
            ["5 tokens in one pass", "rank 6", "layers 0 and 1 and the pre-collapse residual", "acceptance is (`Dr"],
        ),
    ],
    ids=["specblock", "bare specblock", "eagle3", "mtp", "dspark"],
)
def test_every_kind_of_drafter_has_a_card_whose_snippet_runs(target, tmp_path, made, told):
    drafter = made(target)
    drafter.save_pretrained(tmp_path)
    card = drafter_card(tmp_path, target="TARGET")
    assert all(part in card.text for part in told), card.text
    assert "not stored here" in card.text and "\n\n\n" not in card.text and "None" not in card.text
    snippet = re.findall(r"```python\n(.*?)```", card.text, re.DOTALL)[0]
    line = next(line for line in snippet.splitlines() if line.startswith("drafter = "))
    scope = {"load_drafter": load_drafter, "target": target}
    exec(line, scope)
    assert type(scope["drafter"]) is type(drafter)


def test_a_vocabulary_of_its_own_is_told(target, tmp_path):
    unrolled("eagle3", target, draft_vocab_size=32).save_pretrained(tmp_path)
    card = drafter_card(tmp_path)
    assert "parameters.\n" in card.text and "not stored here" not in card.text


def test_the_training_record_fills_a_table(saved):
    settings = {"dataset": ["zhaode/EagleChat:part", "mine.jsonl"], "learning_rate": 8e-4, "max_steps": -1,
                "num_train_epochs": 5, "kl_weight": None}  # fmt: skip
    (saved / "training.json").write_text(json.dumps({"settings": settings, "metrics": {"eval_tau": 2.345}}))
    card = drafter_card(saved, license="mit", tags=["more"], notes="On a *laptop*.", limits="None known.")
    assert card.data.datasets == ["zhaode/EagleChat"] and card.data.license == "mit" and "more" in card.data.tags
    for part in ("| epochs | 5 |", "| peak learning rate | 0.0008 |", "2.35 by real generation", "On a *laptop*.",
                 "None known."):  # fmt: skip
        assert part in card.text, part
    assert "| steps |" not in card.text and "KL weight" not in card.text and "teacher-forced" not in card.text


def test_a_benchmark_fills_tables_and_the_model_index(saved, tmp_path):
    figures = measured(RESULTS / "results.jsonl", METHOD)
    card = drafter_card(saved, repo_id="org/name", measured=figures, figure="acceptance.png")
    card.save(tmp_path / "card.md")
    read = ModelCard.load(tmp_path / "card.md")  # as the Hub reads it
    by_name = {(r.dataset_name, r.metric_name): r.metric_value for r in read.data.eval_results}
    with (RESULTS / "summary.csv").open() as file:
        rows = list(csv.DictReader(file))
    row = next(r for r in rows if (r["suite"], r["method"], r["temperature"]) == ("gsm8k", METHOD, "0.0"))
    assert by_name["GSM8K", "tau, non-think, temperature 0"] == round(float(row["tau"]), 3)
    assert by_name["GSM8K", "speedup, non-think, temperature 0"] == round(float(row["speedup"]), 3)
    assert f"{float(row['speedup']):.2f}× / {float(row['tau']):.2f}" in read.text
    assert "![Acceptance per draft position](acceptance.png)" in read.text and "2026-" in read.text


@pytest.mark.parametrize(
    ("speedups", "told"),
    [
        (None, "the target's own.\n"),
        ([], "the target's own.\n"),
        ([0.996], "the target's own; in the benchmark below it came 1.00 times as fast as from the target alone.\n"),
        ([1.2, 0.74], "it came 0.74 to 1.20 times as fast"),
    ],
)
def test_a_card_promises_the_speed_that_was_measured(saved, speedups, told):
    card = drafter_card(saved, measured=None if speedups is None else Measured("Settings.", "Tables.", [], speedups))
    assert told in card.text and "sooner" not in card.text


@pytest.mark.parametrize("limits", [None, "None known.", "None known.\n\n"])
def test_a_card_ends_with_one_newline(saved, limits):
    drafter_card(saved, limits=limits).save(saved / "README.md")
    assert re.search(r"[^\n]\n\Z", (saved / "README.md").read_text())


def shipped_card(drafter: str, more: list[str], output: Path) -> str:
    """The committed card's command (CONTRIBUTING.md)."""
    name, parts = f"examples/models/{drafter}", ROOT / "model_cards" / "parts"
    arguments = [
        "card", str(ROOT / name), "--repo-id", name, "--license", "apache-2.0", "--notes",
        str(parts / f"{drafter}-training.md"), "--limits", str(parts / f"{drafter}-limits.md"), "--output",
        str(output), *more,
    ]  # fmt: skip
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    return output.read_text()


def figures(results: Path, method: str) -> list[str]:
    figure = results.relative_to(ROOT) / "acceptance.png"
    return ["--results", str(results), "--method", method, "--figure", f"../{figure}"]


CARDS = {  # drafters, and what their cards say of target and figures
    "tiny-deepseek-v4-hyperdflash": [
        "--target", "examples/models/tiny-deepseek-v4", "--dtype", "float32", *figures(RESULTS, METHOD)
    ],
    "smollm2-135m-hyperdflash": [
        "--target", "HuggingFaceTB/SmolLM2-135M-Instruct", *figures(SMOLLM2, "HyperDFlash (7)")
    ],
}  # fmt: skip


@pytest.mark.parametrize("drafter", CARDS)
def test_a_shipped_card_is_what_the_command_writes(tmp_path, drafter):
    written = shipped_card(drafter, CARDS[drafter], tmp_path / "card.md")
    assert written == (ROOT / "model_cards" / f"{drafter}.md").read_text()
    assert ("inherited from the target's `hc_head`" in written) == ("deepseek" in drafter)


def test_a_card_and_its_figure_go_into_a_new_folder(tmp_path):
    arguments = ["card", str(MODELS / "tiny-deepseek-v4-hyperdflash"), "--results", str(RESULTS), "--method", METHOD]
    result = CliRunner().invoke(app, [*arguments, "--output", str(tmp_path / "new" / "cards" / "README.md")])
    assert result.exit_code == 0, result.output
    assert "(acceptance.png)" in (tmp_path / "new" / "cards" / "README.md").read_text()
    copied = tmp_path / "new" / "cards" / "acceptance.png"
    assert copied.read_bytes() == (RESULTS / "acceptance.png").read_bytes()


def test_a_shipped_cards_snippets_run(tmp_path):
    """Of the pair whose target is here."""
    target, drafter = "tiny-deepseek-v4", "tiny-deepseek-v4-hyperdflash"
    text = (ROOT / "model_cards" / f"{drafter}.md").read_text()
    with_package, without = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    models = tmp_path / "examples" / "models"
    models.mkdir(parents=True)
    (models / target).symlink_to(MODELS / target)
    # As it would be pushed: the repository keeps no copy of the code.
    HyperDFlashDrafter.from_pretrained(MODELS / drafter, dtype="auto").save_pretrained(models / drafter)
    code = f"{with_package}drafter.unbind(target)\nfirst = out\nout = {without}assert (out == first).all()\n"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = python("-c", code.replace("max_new_tokens=100", "max_new_tokens=20"), cwd=tmp_path, env=environment)
    assert run.returncode == 0, run.stderr[-2000:]


def test_a_shipped_targets_card_is_what_the_script_writes(tmp_path):
    name = "tiny-deepseek-v4"
    parts = ROOT / "model_cards" / "parts" / f"{name}.md"
    command = [ROOT / "tools" / "target_card.py", MODELS / name, "--template", parts]
    run = python(*command, "--output", tmp_path / "card.md", env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert run.returncode == 0, run.stderr[-2000:]
    assert (tmp_path / "card.md").read_text() == (ROOT / "model_cards" / f"{name}.md").read_text()
