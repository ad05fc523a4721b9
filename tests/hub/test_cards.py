"""Model cards: facts only, readable by the Hub, with a snippet that runs."""

import csv
import json
import os
import re
from functools import partial
from pathlib import Path

import pytest
from huggingface_hub import ModelCard
from transformers import PreTrainedConfig

from hf_hyperdflash import DeepseekV4DSparkDrafter, DeepseekV4MTPDrafter, HyperDFlashDrafter, load_drafter
from hf_hyperdflash.benchmark.report import measured
from hf_hyperdflash.drafters.deepseek_v4.configuration import DeepseekV4DSparkConfig
from hf_hyperdflash.hub.cards import Measured, drafter_card
from hf_hyperdflash.hub.kinds import KINDS, describe, kind_in, kind_of, title

from ..conftest import MODELS, tiny_config, tiny_drafter
from ..helpers.commands import run
from ..helpers.deepseek_checkpoints import dspark_fields
from ..helpers.families import qwen3
from ..helpers.medusa import medusa
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
    card = drafter_card(saved, limits="None known.\n\n")
    assert card.data.base_model is None and "revision" not in card.text and card.content.endswith("known.\n")


@pytest.mark.parametrize("folder", ["/home/me/tiny-target", "../tiny-target", "models/tiny-target"])
def test_a_folder_is_no_name_on_the_hub(target, tmp_path, monkeypatch, folder):
    """Its address leads nowhere, and it is no `base_model`; of data, too."""
    (tmp_path / "models" / "tiny-target").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    tiny_drafter(target, target_name_or_path=folder).save_pretrained("saved")
    Path("saved", "training.json").write_text(json.dumps({"settings": {"dataset": [folder, "org/chats:main"]}}))
    card = drafter_card("saved")
    assert card.data.base_model is None and card.data.datasets == ["org/chats"]
    assert "A drafter for tiny-target: it drafts" in card.text and "huggingface.co" not in card.text


def headed(temperatures=None, **fields):
    def made(target):
        drafter = tiny_drafter(target).with_heads(**fields)
        drafter.config.confidence_temperatures = temperatures
        return drafter

    return made


def of_v4_dspark(target):
    return DeepseekV4DSparkDrafter(DeepseekV4DSparkConfig.from_target_config(tiny_config(**dspark_fields())))


SHARED = "not stored here"
MADE = {  # a drafter, what its card says, and what it does not
    "plain": (headed(), [SHARED], ["knows the one before", "how probable"]),
    "markov": (headed(sequential_head="markov", head_rank=3), ["`markov` head of width 3."], ["chooses"]),
    "selector": (
        headed(sequential_head="selector", head_rank=3, confidence_head=True),
        ["`selector` head of width 3, which chooses among the block's 16 best", "acceptance is (`Draft"], [],
    ),
    "calibrated": (headed([1.5] * 6, confidence_head=True), ["is, calibrated on held-out prompts"], ["before it"]),
    "specblock": (
        partial(unrolled, "specblock"), ["8 tokens in 2 passes of 4", "a SpecBlock", "and a rank head", SHARED], [],
    ),
    "bare specblock": (
        partial(unrolled, "specblock", rank_head=False, shift=False, broadcast=False, max_blocks=3),
        ["12 tokens in 3 passes of 4, the", "that know their path.\n"], ["with"],
    ),
    "eagle3": (partial(unrolled, "eagle3"), ["up to 7 tokens, a pass for each", "10 nodes of each level"], []),
    "any streams": (
        lambda _: tiny_drafter(qwen3(), reducer="stream_mean", any_streams=True),
        ["Its reducer is `fc`, the dense projection"], [],
    ),
    "own vocabulary": (partial(unrolled, "eagle3", draft_vocab_size=32), ["parameters.\n"], [SHARED]),
    "medusa": (lambda target: medusa(), ["3 tokens in one pass", "Medusa heads"], [SHARED]),
    "mtp": (
        lambda target: DeepseekV4MTPDrafter(target.config), ["own multi-token-prediction block", SHARED], [],
    ),
    "dspark": (
        of_v4_dspark,
        ["5 tokens in one pass", "rank 6", "layers 0 and 1 and the pre-collapse residual", "acceptance is (`Dr"], [],
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", MADE)
def test_a_card_says_how_it_drafts_and_its_snippet_runs(target, tmp_path, kind):
    made, told, untold = MADE[kind]
    drafter = made(target)
    drafter.save_pretrained(tmp_path)
    text = drafter_card(tmp_path, target="TARGET").text
    about = text.partition("## Use")[0]
    assert all(part in about for part in told) and not any(part in about for part in untold), about
    assert "\n\n\n" not in text and "None" not in text
    snippet = re.findall(r"```python\n(.*?)```", text, re.DOTALL)[0]
    line = next(line for line in snippet.splitlines() if line.startswith("drafter = "))
    scope = {"load_drafter": partial(load_drafter, target=None), "target": None}
    exec(line, scope)
    assert type(scope["drafter"]) is type(drafter)


def test_the_training_record_fills_a_table(saved):
    settings = {"dataset": ["zhaode/EagleChat:part", "mine.jsonl"], "learning_rate": 8e-4, "max_steps": 0,
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
    kept = [
        line
        for line in map(json.loads, (RESULTS / "results.jsonl").open())
        if line.get("method") in (None, "Target only", METHOD)
    ]
    (tmp_path / "r").write_text("".join(json.dumps(line) + "\n" for line in kept))
    assert measured(tmp_path / "r").speedups == figures.speedups, "of one method nobody has to say which"


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
    """CONTRIBUTING.md names this one."""
    name, part = f"examples/models/{drafter}", f"{ROOT / 'model_cards' / 'parts' / drafter}-{{}}.md".format
    run("card", ROOT / name, "--repo-id", name, "--license", "apache-2.0", "--notes", part("training"), "--limits",
        part("limits"), "--output", tmp_path / "card.md", *CARDS[drafter])  # fmt: skip
    written = (tmp_path / "card.md").read_text()
    assert written == (ROOT / "model_cards" / f"{drafter}.md").read_text()
    assert ("inherited from the target's `hc_head`" in written) == ("deepseek" in drafter)


def test_a_card_and_its_figure_go_into_a_new_folder(tmp_path):
    folder = tmp_path / "new" / "cards"
    arguments = ["card", MODELS / "tiny-deepseek-v4-hyperdflash", "--results", RESULTS, "--method", METHOD]
    run(*arguments, "--output", folder / "README.md")
    assert "(acceptance.png)" in (folder / "README.md").read_text()
    assert (folder / "acceptance.png").read_bytes() == (RESULTS / "acceptance.png").read_bytes()


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
    ran = python("-c", code.replace("max_new_tokens=100", "max_new_tokens=20"), cwd=tmp_path, env=environment)
    assert ran.returncode == 0, ran.stderr[-2000:]


def test_a_shipped_targets_card_is_what_the_script_writes(tmp_path):
    name = "tiny-deepseek-v4"
    parts = ROOT / "model_cards" / "parts" / f"{name}.md"
    command = [ROOT / "tools" / "target_card.py", MODELS / name, "--template", parts]
    ran = python(*command, "--output", tmp_path / "card.md", env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert (tmp_path / "card.md").read_text() == (ROOT / "model_cards" / f"{name}.md").read_text()


# Which kind it is of, and what tells it from others


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_config_json_names_its_kind_by_type_or_class(kind):
    assert kind_in({"model_type": kind.model_type}) is kind
    assert kind_in({"model_type": "deepseek_v4", "architectures": ["Other", kind.class_name]}) is kind
    assert kind_in({"model_type": "deepseek_v4", "architectures": None}) is None
    assert kind.title is not None or title(kind.config) == kind.name  # some have no default sizes


TITLES = [
    ({"target_layer_ids": [0, 1]}, "HyperDFlash on 0, 1"), ({"target_layer_ids": [-1]}, "HyperDFlash"),
    ({"reducer": "fc", "sequential_head": "markov"}, "Vanilla DFlash, markov head"),
    ({"reducer": "hybrid", "target_layer_ids": [0, -1]}, "HyperDFlash hybrid"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "named"), TITLES)
def test_a_title_tells_a_drafter_from_others_of_its_kind(target, fields, named):
    assert title(tiny_drafter(target, **fields).config) == named


@pytest.mark.parametrize(("name", "words"), [("owl", "an owl drafter"), ("wren", "a wren drafter")])
def test_of_somebodys_own_kind_little_is_said(name, words):
    config = PreTrainedConfig()
    config.model_type = name
    assert kind_of(config) is None and title(config) == name
    assert words in str(describe(config))
