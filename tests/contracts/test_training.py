"""Every kind of drafter that is trained against every promise of the trainer."""

from __future__ import annotations

import os

import pytest
import torch
from datasets import Dataset
from transformers import TrainerCallback

from hf_hyperdflash import load_drafter
from hf_hyperdflash.hub.cards import drafter_card
from hf_hyperdflash.training.arguments import RECIPES
from hf_hyperdflash.training.features.store import FeatureCache
from hf_hyperdflash.training.losses.objective import collate

from ..conftest import mostly_nightly, prompt, tiny_target
from ..helpers.headed_drafters import headed
from ..helpers.training import losses, rows, trainer_for, weights
from .test_drafters import KINDS, TRAINED

OWN = {"draft_vocab_size": 40, "confidence_head": True}
MADE = {name: KINDS[name] for name in TRAINED} | {
    "own vocabulary": lambda folder: ((target := tiny_target()), headed(target, "markov", **OWN)),
    "recurrent head": lambda folder: ((target := tiny_target()), headed(target, "recurrent", confidence_head=True)),
    "gated head": lambda folder: ((target := tiny_target()), headed(target, "gated_markov", head_candidates=9)),
}
EACH_CHANGE = ["own vocabulary", "eagle3"]
SOME = mostly_nightly([*EACH_CHANGE, *sorted(MADE.keys() - {*EACH_CHANGE})], kept=2)
SEVERAL_FORWARDS = ("eagle3", "peagle", "specblock", "mtp head", "v4 mtp")  # of the drafter in a step


@pytest.fixture
def made(tmp_path):
    """A trainer of a kind, the same every time; `MADE` gives its target and drafter."""

    def make(kind, data=None, held_out=None, folder="run", **settings):
        target, drafter = MADE[kind](tmp_path / "checkpoint")
        recipe = {"recipe": getattr(drafter, "recipe", "ours")}
        data = rows(6) if data is None else data
        return trainer_for(tmp_path / folder, target, drafter, data, held_out, **{**recipe, **settings})

    return make


@pytest.mark.parametrize("kind", MADE)
def test_it_learns_with_every_part_of_it_and_is_saved_whole(made, kind, tmp_path):
    trainer = made(kind, held_out=rows(3, seed=1), bf16=True, max_steps=12, save_strategy="steps", save_steps=12)
    before = {name: value.clone() for name, value in trainer.model.named_parameters() if value.requires_grad}
    target = {name: value.clone() for name, value in trainer.target.state_dict().items()}
    trainer.train()
    assert sum(losses(trainer)[-4:]) < sum(losses(trainer)[:4])  # one step's depends on its rows
    after = trainer.model.state_dict()
    assert not [name for name, value in before.items() if torch.equal(value, after[name])]
    assert all(value.dtype == torch.float32 for name, value in before.items())
    assert all(torch.equal(value, target[name]) for name, value in trainer.target.state_dict().items())
    assert not trainer.target.training and not any(p.requires_grad for p in trainer.target.parameters())
    metrics = trainer.evaluate()
    assert metrics["eval_expected_tau"] >= 1 <= metrics["eval_teacher_forced_tau"]
    trainer.save_model()
    run = tmp_path / "run"
    for folder in (run, run / "checkpoint-12"):
        saved = load_drafter(folder, dtype=torch.float32)
        assert type(saved).__name__ == type(trainer.model).__name__
        assert all(torch.equal(value, after[name]) for name, value in saved.state_dict().items())
        assert bool(list(folder.glob("*.py"))) == (folder == run and saved.carries_code)  # a checkpoint has none
    assert f"| loss | {trainer.args.recipe} |" in str(drafter_card(run)) and not list(run.rglob("tokenizer*"))


@pytest.mark.parametrize("kind", SOME)
def test_it_goes_on_from_the_newest_whole_checkpoint_to_the_bit(made, kind, tmp_path, caplog):
    settings = dict(max_steps=7, save_strategy="steps", save_steps=2, gradient_accumulation_steps=2)
    whole = made(kind, rows(10), **settings)
    whole.train()
    for step in (6, 7):
        os.truncate(tmp_path / "run" / f"checkpoint-{step}" / "trainer_state.json", 50)
    resumed, begun = made(kind, rows(10), **settings), []

    class Begin(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            begun.append(state.global_step)

    resumed.add_callback(Begin())
    resumed.train(resume_from_checkpoint=True)
    assert begun == [4, 5, 6] and losses(resumed) == losses(whole) and len(losses(whole)) == 7
    assert torch.equal(weights(whole.model), weights(resumed.model))
    first, second = (trainer.state.log_history[-2] for trainer in (whole, resumed))
    terms = {"cross_entropy", "kl", "tv", "confidence", "blind", "rank"} & first.keys()
    assert all(first[name] == second[name] for name in terms)
    assert "checkpoint-7" in caplog.text and str(tmp_path / "run" / "checkpoint-4") in caplog.text


@pytest.mark.parametrize("kind", SOME)
def test_micro_batches_sum_to_the_batch(made, kind):
    if kind == "specblock":
        pytest.skip("which drafts count, and so the divisor, follows from the drafts of a micro-batch")
    runs = []
    for size in (4, 1):
        layout = dict(per_device_train_batch_size=size, gradient_accumulation_steps=4 // size)
        trainer = made(kind, rows(8), folder=str(size), max_steps=2, optim="sgd", **layout)
        trainer.train()
        runs.append((trainer, weights(trainer.model)))
    (one, of_one), (other, of_other) = runs
    assert losses(one) == pytest.approx(losses(other), rel=1e-5)
    torch.testing.assert_close(of_one, of_other, atol=1e-5, rtol=1e-4)
    for name in {"cross_entropy", "kl", "tv", "confidence"} & one.state.log_history[0].keys():
        assert one.state.log_history[0][name] == pytest.approx(other.state.log_history[0][name], rel=1e-4, abs=1e-6)


SETTINGS = {
    "gradient checkpointing": {"gradient_checkpointing": True},
    "workers": {"dataloader_num_workers": 1},
    "chunks": {"loss_chunk_size": 3},
    "cached": {"feature_source": "cached", "feature_dtype": "float32"},
    "packed": {"packing": True, "per_device_train_batch_size": 6, "num_anchors": 64},
    "compiled": {"torch_compile": True, "torch_compile_backend": "aot_eager"},
}


@pytest.mark.parametrize("kind", SOME)
@pytest.mark.parametrize(
    "setting", [pytest.param(name, marks=pytest.mark.nightly if name == "compiled" else ()) for name in SETTINGS]
)
def test_how_it_is_computed_changes_no_loss(made, kind, setting):
    """Packed rows are fewer, so all of them are in a batch."""
    if setting in ("compiled", "gradient checkpointing") and kind in SEVERAL_FORWARDS:
        pytest.skip("the setting is of a drafter that is called once in a step")
    given = SETTINGS[setting]
    like = {name: given[name] for name in ("per_device_train_batch_size", "num_anchors") if name in given}
    plain, other = made(kind, folder="plain", **like), made(kind, folder="other", **given)
    if setting == "cached":
        assert isinstance(other.train_dataset, FeatureCache)
    if setting == "packed":
        assert len(other.train_dataset) < len(plain.train_dataset) == 6
    for trainer in (plain, other):
        trainer.train()
    assert losses(plain) == pytest.approx(losses(other), rel=1e-4)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", mostly_nightly(["gated head", "own vocabulary", "specblock", "hyperdflash"], kept=2))
def test_the_terms_in_use_are_logged_and_sum_to_the_loss(made, kind, recipe):
    trainer = made(kind, max_steps=1, recipe=recipe)
    trainer.train()
    line, weight, config = trainer.state.log_history[0], RECIPES[recipe], trainer.drafter_config
    assert ("tv" in line) == (bool(weight["tv_weight"]) or config.confidence_head)
    assert ("confidence" in line) == config.confidence_head
    has_candidates, goes_over = bool(getattr(config, "head_candidates", 0)), False
    if weight["block_first"] and config.sequential_head != "none":  # the first step is of the block alone
        own = weight["blind_weight"] * has_candidates + weight["ce_weight"]
        weight, goes_over = {**weight, "blind_weight": own, "ce_weight": 0.0}, True
    assert ("blind" in line) == (has_candidates or goes_over)
    assert ("rank" in line) == getattr(config, "rank_head", False)
    terms = {"ce": "cross_entropy", **{name: name for name in ("kl", "tv", "confidence", "blind", "rank")}}
    expected = sum(weight[f"{short}_weight"] * line.get(name, 0) for short, name in terms.items())
    assert line["loss"] == pytest.approx(expected, rel=1e-4)


# Takes seconds: a drafter learns some texts by heart.
@pytest.mark.parametrize("kind", mostly_nightly(["gated head", "eagle3", "specblock", *sorted(MADE)], kept=3))
def test_the_estimate_walks_generations_own_rounds(made, kind):
    """On the target's own text the cheap estimate is not an estimate: it finds the rounds that generate ran. A drafter
    that has learned the text by heart has long ones; drafts that only sampling accepts count at temperature 1."""
    target, start, count = made(kind).target, 11, 5
    ids = prompt(start).repeat(count, 1)
    ids[:, 0] = torch.arange(2, 2 + count)
    texts = target.generate(ids, max_new_tokens=30, do_sample=False, eos_token_id=None, pad_token_id=0).tolist()
    data = Dataset.from_list(
        [{"input_ids": text, "loss_mask": [int(i >= start) for i in range(41)]} for text in texts]
    )
    learns = dict(max_steps=40, learning_rate=3e-3, num_anchors=32, logging_steps=10, recipe="ours")
    trainer = made(kind, data, data, **learns)
    target, drafter = trainer.target, trainer.model
    trainer.train()
    metrics = trainer.evaluate()
    assert metrics["eval_teacher_forced_tau"] > 1.2
    _, (walked, expected), matched = trainer.prediction_step(drafter, collate(trainer.eval_dataset.to_list()), False)
    walked, matched = ([[n for n in row if n != -100] for row in part.tolist()] for part in (walked, matched))
    every = [n for row in walked for n in row]
    assert metrics["eval_teacher_forced_tau"] == pytest.approx(sum(every) / len(every))
    assert metrics["eval_expected_tau"] == pytest.approx(sum(every) / expected.sum().item())
    drafter.eval().bind(target)
    for text, emitted, accepted in zip(texts, walked, matched):
        how = dict(max_new_tokens=30, do_sample=False, eos_token_id=None, pad_token_id=0, assistant_model=drafter)
        assert target.generate(torch.tensor([text[:start]]), **how)[0].tolist() == text
        stats = drafter.last_stats
        # Towards a token limit generate drafts fewer tokens, for the last one none.
        rounds = len(stats.emitted)
        assert rounds > 3 and len(emitted) - rounds in (-1, 0, 1)
        assert emitted[: rounds - 2] == stats.emitted[:-2] and accepted[: rounds - 2] == stats.accepted[:-2]


@pytest.mark.parametrize("kind", SOME)
def test_files_have_the_umasks_mode(made, kind, tmp_path):
    old = os.umask(0o027)
    try:
        trainer = made(kind, max_steps=1, save_strategy="steps", save_steps=1)
        trainer.train()
        trainer.save_model()
    finally:
        os.umask(old)
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    code = {"generate.py"} if trainer.model.carries_code else set()
    assert {"optimizer.pt", "model.safetensors", "training.json"} | code <= {path.name for path in files}
    assert {path.stat().st_mode & 0o777 for path in files} == {0o640}
