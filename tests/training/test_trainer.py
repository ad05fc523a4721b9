"""The trainer against generation, against itself in other layouts, and against bad input."""

import json
import math
import os
import shutil
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback, TrainingArguments

from hf_hyperdflash import (
    AcceptanceCallback,
    HyperDFlashDrafter,
    HyperDFlashTrainer,
    HyperDFlashTrainingArguments,
    capture_residual,
    load_drafter,
    load_target,
)
from hf_hyperdflash.drafters.parts.heads import HEADS
from hf_hyperdflash.hub.cards import drafter_card
from hf_hyperdflash.targets.registry import target_of
from hf_hyperdflash.training.arguments import RECIPES
from hf_hyperdflash.training.data.encoding import encode_prompts
from hf_hyperdflash.training.features.fingerprint import changed_parts
from hf_hyperdflash.training.features.store import FeatureCache
from hf_hyperdflash.training.losses.objective import BlockObjective, collate
from hf_hyperdflash.training.runs.checkpoints import newest_complete

from ..conftest import MODELS, mostly_nightly, prompt, tiny_target
from ..helpers import families
from ..helpers.headed_drafters import headless
from ..helpers.processes import python
from ..helpers.quantization import as_int8
from ..helpers.training import (
    headed_drafter,
    losses,
    naive_cross_entropy,
    naive_kl,
    rows,
    softmax,
    tiny_drafter,
    trainer_for,
    weights,
    with_head,
)

# One feature path

FIELDS = [
    {}, {"sliding_window": 6}, {"reducer": "fc"}, {"hidden_size": 48, "head_dim": 16},
    {"reducer": "fc", "target_layer_ids": [0, 1]}, {"reducer": "hybrid", "target_layer_ids": [1, -1]},
    {"sample_from_anchor": True, "conv_kernel_size": 2},
    {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"], "num_hidden_layers": 2,
     "causal_layers": "sliding", "window_from": "slot"},
]  # fmt: skip


@pytest.mark.parametrize("fields", FIELDS)
def test_training_reproduces_the_draft_logits_of_every_round(target, fields):
    drafter = tiny_drafter(target, **fields)
    drafter.bind(target)
    rounds = []

    def record(module, args, output):
        rounds.append((int(args[1][0, 0]), target.lm_head(output[:, drafter.config.first_slot :])))

    handle = drafter.register_forward_hook(record)
    text = target.generate(prompt(11), do_sample=False, max_new_tokens=24, assistant_model=drafter)
    handle.remove()
    assert len(rounds) > 5
    args = SimpleNamespace(**RECIPES["hyperdflash"], kl_teacher="hc_head", kl_temperature=1.0, loss_chunk_size=256)
    objective = BlockObjective(drafter, target_of(target), args)
    batch = {"input_ids": text, "position_ids": torch.arange(text.shape[1])[None]}
    batch["anchors"] = torch.tensor([[anchor for anchor, _ in rounds]])
    with torch.no_grad(), capture_residual(target, objective.layer_ids) as captured:
        target(text, use_cache=False)
        batch["residual"] = captured[0]
        logits = target.lm_head(objective.run_drafter(drafter, batch).states)
    torch.testing.assert_close(logits[0], torch.cat([drafted for _, drafted in rounds]), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("head", "candidates"), [("state", 0), ("state", 9), ("recurrent", 0), ("none", 0)])
def test_the_teacher_forced_estimate_walks_generations_own_rounds(tmp_path, head, candidates):
    """On the target's own text the cheap estimate is not an estimate: it finds the rounds that generate ran. A head
    that was not trained with the drafter spoils some drafts, and so does a choice among few candidates."""
    target = AutoModelForCausalLM.from_pretrained(MODELS / "tiny-deepseek-v4", dtype=torch.float32)
    drafter = HyperDFlashDrafter.from_pretrained(MODELS / "tiny-deepseek-v4-hyperdflash", dtype=torch.float32)
    if head != drafter.config.sequential_head:
        drafter = with_head(headless(drafter), head)
    drafter.config.head_candidates = candidates
    tokenizer = AutoTokenizer.from_pretrained(MODELS / "tiny-deepseek-v4")
    questions = [{"turns": ["Write a Python function that adds two numbers."]}, {"turns": ["What is 3 plus 4?"]}]
    drafter.bind(target)
    texts, emitted, accepted = [], [], []
    for ids in encode_prompts(tokenizer, questions):
        out = target.generate(ids, do_sample=False, max_new_tokens=40, assistant_model=drafter)[0].tolist()
        texts.append({"input_ids": out, "loss_mask": [int(i >= ids.shape[1]) for i in range(len(out))]})
        emitted.append(drafter.last_stats.emitted)
        accepted.append(drafter.last_stats.accepted)
    trainer = trainer_for(tmp_path, target, drafter, held_out=Dataset.from_list(texts), max_length=256, num_anchors=16)
    metrics = trainer.evaluate()
    _, (walked, expected), matched = trainer.prediction_step(drafter, collate(trainer.eval_dataset.to_list()), False)
    walked, matched = ([[n for n in row if n != -100] for row in part.tolist()] for part in (walked, matched))
    every = [n for row in walked for n in row]
    assert metrics["eval_teacher_forced_tau"] == pytest.approx(sum(every) / len(every))
    # Drafts are accepted by chance at temperature 1; were none ever, there would be a round for each token.
    assert metrics["eval_expected_tau"] == pytest.approx(sum(every) / expected.sum().item())
    assert metrics["eval_expected_tau"] > 1.2
    for row in range(2):
        # Towards a token limit generate drafts fewer tokens, for the last one none.
        rounds = len(emitted[row])
        assert walked[row][:rounds] == emitted[row] and matched[row][: rounds - 1] == accepted[row][:-1]
        assert len(walked[row]) - rounds <= 1
    assert sum(map(len, accepted)) > 8 and max(map(max, accepted)) > 2


# The loss is the paper's


def naive_loss(target, drafter, documents, teacher, positions, temperature, decay, kl_weight):
    """Eq. 3 with every block drafted alone, as in generation, and the target run on each document alone."""
    drafted, labels, taught = [], [], []
    drafts, size = drafter.config.max_draft_tokens, drafter.config.block_size
    for document in documents:
        ids, mask = torch.tensor([document["input_ids"]]), [*document["loss_mask"], 0]
        with capture_residual(target, drafter.config.target_layer_ids) as captured:
            logits = target(ids, use_cache=False).logits[0]
        if teacher == "mean_pool":
            with capture_residual(target, [-1]) as last:
                target(ids, use_cache=False)
            logits = target.lm_head(target.model.norm(last[0].mean(dim=2)))[0]
        for a in (i for i in range(ids.shape[1]) if mask[i] and mask[i + 1]):
            block = torch.tensor([[document["input_ids"][a], *[drafter.config.mask_token_id] * (size - 1)]])
            window = None if drafter.config.layer_types else drafter.config.sliding_window
            first = max(0, a - (window or a))
            context = dict(residual=captured[0][:, first:a], residual_position_ids=torch.arange(first, a)[None])
            states = drafter(target.model.embed_tokens(block), torch.arange(a, a + size)[None], **context)
            drafted.append(target.lm_head(states[0, size - drafts :]))
            unsupervised = next(j for j in range(a + 1, len(mask)) if not mask[j])
            row = document["input_ids"][a + 1 : min(a + 1 + drafts, unsupervised)]
            labels.append(row + [-100] * (drafts - len(row)))
            # The logits at a+k-1 are the target's for the token at a+k. None are wanted where there is no label.
            taught.append(torch.stack([logits[min(a + k - 1, len(logits) - 1)] for k in range(1, positions + 1)]))
    drafted, labels, taught = torch.stack(drafted), torch.tensor(labels), torch.stack(taught)
    weights = [math.exp(-k / decay) for k in range(drafts)]
    cross_entropy = naive_cross_entropy(drafted, labels, weights)
    return cross_entropy + kl_weight * naive_kl(drafted, taught, labels, temperature)


@pytest.mark.parametrize(("teacher", "packing"), [("hc_head", False), ("mean_pool", True)])
@pytest.mark.parametrize("fields", FIELDS)
def test_the_loss_is_eq_3_of_the_targets_own_logits(tmp_path, target, fields, teacher, packing):
    drafter, data = tiny_drafter(target, **fields), rows(3)
    # The first document is supervised from its first token, the second in two stretches.
    documents = data.to_list()
    documents[0]["loss_mask"] = [1] * len(documents[0]["loss_mask"])
    documents[1]["loss_mask"][2:5] = [1, 1, 1]
    settings = dict(kl_teacher=teacher, kl_positions=3, kl_temperature=1.7, loss_decay=3.0, kl_weight=5.0)
    trainer = trainer_for(
        tmp_path, target, drafter, Dataset.from_list(documents), num_anchors=64, packing=packing, **settings
    )
    with torch.no_grad():
        loss = trainer.compute_loss(drafter, collate(trainer.train_dataset.to_list()))
        expected = naive_loss(target, drafter, documents, teacher, 3, 1.7, 3.0, 5.0)
    assert loss.item() == pytest.approx(expected, rel=1e-5)


def min_sum(q, p):
    """What speculative sampling accepts of a draft from q, where the target draws from p."""
    return sum(map(min, q, p))


@pytest.mark.parametrize(
    ("kind", "recipe", "candidates"),
    [
        ("markov", "dspark", 0), ("gated_markov", "hyperdflash", 0), ("recurrent", "dspark", 0),
        ("selector", "dspark", 5), ("state", "dspark", 0), ("state", "hyperdflash", 0), ("state", "dspark", 5),
    ],
)  # fmt: skip
def test_the_loss_of_heads_is_what_drafting_token_by_token_would_have_said(tmp_path, target, kind, recipe, candidates):
    """Every block alone, every draft from its head's own step after the text's token, acceptance token by token."""
    drafter, documents = headed_drafter(target, kind, head_candidates=candidates), rows(2).to_list()
    trainer = trainer_for(
        tmp_path, target, drafter, Dataset.from_list(documents), num_anchors=64, recipe=recipe, kl_weight=0.7
    )
    with torch.no_grad():
        loss = trainer.compute_loss(drafter, collate(trainer.train_dataset.to_list())).item()
    logits, own, labels, taught, foretold = [], [], [], [], []
    for ids in (document["input_ids"] for document in documents):
        with torch.no_grad(), capture_residual(target, [-1]) as captured:
            following = target(torch.tensor([ids]), use_cache=False).logits[0]
        for a in range(len(ids) // 2, len(ids) - 1):
            block = torch.tensor([[ids[a], *[drafter.config.mask_token_id] * 6]])
            context = dict(residual=captured[0][:, :a], residual_position_ids=torch.arange(a)[None])
            with torch.no_grad():
                states = drafter(target.model.embed_tokens(block), torch.arange(a, a + 7)[None], **context)[0, 1:]
                carried = None
                for k, state in enumerate(states[: len(ids) - 1 - a]):
                    before = torch.tensor([ids[a + k]])
                    step = drafter.head(state[None], before, target.model.embed_tokens(before), carried)
                    carried = step.carried
                    scores = target.lm_head(step.states)
                    if step.vectors is not None:
                        scores = scores + step.vectors @ drafter.head_table.T
                    logits.append(scores[0])
                    own.append(target.lm_head(state))
                    foretold.append((k, drafter.confidence_head(state[None], step.memory).sigmoid().item()))
                    labels.append(ids[a + k + 1])
                    taught.append(following[a + k])
    weights = [math.exp(-k / 4) if recipe == "dspark" else 1.0 for k, _ in foretold]
    chosen = [each.topk(drafter.config.head_candidates or each.shape[-1]).indices for each in own]
    drawn = [torch.full_like(q, -math.inf).scatter(0, i, q[i]) for q, i in zip(logits, chosen)]
    accepted = [min_sum(softmax(q.tolist()), softmax(p.tolist())) for q, p in zip(drawn, taught)]
    surprise = [-a * math.log(c) - (1 - a) * math.log(1 - c) for a, (_, c) in zip(accepted, foretold)]
    surprise = sum(w * s for w, s in zip(weights, surprise)) / sum(weights)
    overlap = [min_sum(softmax(q.tolist()), softmax(p.tolist())) for q, p in zip(logits, taught)]
    rejected = sum(w * (1 - a) for w, a in zip(weights, overlap)) / sum(weights)
    blind = -sum(w * math.log(softmax(q.tolist())[y]) for w, q, y in zip(weights, own, labels)) / sum(weights)
    cross_entropy = -sum(w * math.log(softmax(q.tolist())[y]) for w, q, y in zip(weights, logits, labels))
    cross_entropy /= sum(weights)
    kl = 0.0
    for position in range(2):
        at = [i for i, (k, _) in enumerate(foretold) if k == position]
        pairs = [(softmax(taught[i].tolist()), softmax(logits[i].tolist())) for i in at]
        kl += sum(p * math.log(p / q) for ps, qs in pairs for p, q in zip(ps, qs)) / len(at) / 2
    ce_weight, tv_weight = (0.1, 1.8) if recipe == "dspark" else (1.0, 0.0)
    blind_weight = 0.1 if drafter.config.head_candidates else 0.0
    expected = ce_weight * cross_entropy + tv_weight * rejected + 0.7 * kl + surprise + blind_weight * blind
    assert loss == pytest.approx(expected, rel=1e-4)


# The loss is the same however the batch is laid out


@pytest.mark.parametrize("head", ["none", "recurrent"])
def test_accumulated_micro_batches_equal_one_batch(tmp_path, target, head):
    data, runs = rows(8), []
    settings = dict(max_steps=2, optim="sgd", loss_decay=3.0, recipe="hyperdflash" if head == "none" else "ours")
    for layout in (
        {"per_device_train_batch_size": 4},
        {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4},
    ):
        drafter = tiny_drafter(target) if head == "none" else headed_drafter(target, head)
        trainer = trainer_for(tmp_path, target, drafter, data, **settings, **layout)
        trainer.train()
        runs.append((losses(trainer), weights(drafter)))
    assert runs[0][0] == pytest.approx(runs[1][0], rel=1e-5)
    torch.testing.assert_close(runs[0][1], runs[1][1], atol=1e-6, rtol=1e-5)


def test_packing_changes_neither_features_nor_loss(tmp_path, target):
    data = rows(6)
    drafter = tiny_drafter(target)
    plain = trainer_for(tmp_path, target, drafter, data, num_anchors=64)
    packed = trainer_for(tmp_path, target, drafter, data, num_anchors=64, packing=True)
    assert len(packed.train_dataset) < len(plain.train_dataset) == 6
    results = []
    for trainer in (plain, packed):
        drafter.zero_grad()
        loss = trainer.compute_loss(drafter, collate(trainer.train_dataset.to_list()))
        loss.backward()
        results.append((loss.item(), torch.cat([p.grad.flatten() for p in drafter.parameters()])))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-6)
    torch.testing.assert_close(results[0][1], results[1][1], atol=1e-6, rtol=1e-4)


def test_cached_features_train_like_online_ones(tmp_path, target):
    data, runs = rows(6), []
    for source in ("online", "cached", "cached"):  # the second time from the finished cache
        drafter = tiny_drafter(target)
        trainer = trainer_for(tmp_path, target, drafter, data, feature_source=source, feature_dtype="float32")
        assert isinstance(trainer.train_dataset, FeatureCache) == (source == "cached")
        trainer.train()
        runs.append(losses(trainer))
    assert runs[0] == pytest.approx(runs[1], rel=1e-5) and runs[1] == runs[2]
    target.save_pretrained(tmp_path / "saved")
    head = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", num_hidden_layers=0, dtype=torch.float32)
    with pytest.raises(ValueError, match="the target has no layers to run: set it to 'cached', or load the target"):
        trainer_for(tmp_path, head, tiny_drafter(target), rows(4))
    drafter = tiny_drafter(target)
    trainer = trainer_for(tmp_path, head, drafter, data, feature_source="cached", feature_dtype="float32")
    trainer.train()
    assert len(head.model.layers) == 0 and losses(trainer) == runs[1]
    with pytest.raises(ValueError, match="target"):
        other = tiny_target(seed=1)
        trainer_for(tmp_path, other, tiny_drafter(other), data, feature_source="cached", feature_dtype="float32")


@pytest.mark.parametrize(
    "setting",
    [
        {"gradient_checkpointing": True},
        pytest.param({"torch_compile": True, "torch_compile_backend": "aot_eager"}, marks=pytest.mark.nightly),
        {"dataloader_num_workers": 1},
        {"loss_chunk_size": 3},
    ],
    ids=lambda setting: next(iter(setting)),
)
def test_trainers_switches_change_no_loss(tmp_path, target, setting):
    plain, switched = (trainer_for(tmp_path, target, tiny_drafter(target), rows(6), **s) for s in ({}, setting))
    plain.train()
    switched.train()
    assert losses(plain) == pytest.approx(losses(switched), rel=1e-4)


@pytest.mark.nightly  # forward and backward are compiled
def test_a_compiled_drafter_with_heads_has_the_same_losses(tmp_path, target):
    """Under the oldest torch that is declared, too."""
    heads = dict(sequential_head="state", head_rank=8, confidence_head=True)
    compiled = {"torch_compile": True, "torch_compile_backend": "aot_eager"}
    runs = []
    for setting in ({}, compiled):
        drafter = tiny_drafter(target, **heads)
        trainer = trainer_for(tmp_path, target, drafter, rows(6), recipe="ours", max_steps=3, **setting)
        trainer.train()
        runs.append(losses(trainer))
    assert runs[0] == pytest.approx(runs[1], rel=1e-4)


def test_bf16_and_streaming_train(tmp_path, target):
    drafter = tiny_drafter(target)
    trainer = trainer_for(tmp_path, target, drafter, rows(6).to_iterable_dataset(), bf16=True, max_steps=12)
    trainer.train()
    assert losses(trainer)[-1] < losses(trainer)[0] and drafter.hc_gate.hc_fn.dtype == torch.float32


@pytest.mark.parametrize("kind", HEADS)
def test_every_head_learns_with_every_part_of_it(tmp_path, target, kind):
    drafter = tiny_drafter(target, sequential_head=kind, head_rank=8, confidence_head=True)
    before = {name: value.clone() for name, value in drafter.state_dict().items()}
    trainer = trainer_for(tmp_path, target, drafter, rows(6), bf16=True, max_steps=12, recipe="ours")
    trainer.train()
    first, *_, last = (line for line in trainer.state.log_history if "loss" in line)
    assert all(last[name] < first[name] for name in ("loss", "cross_entropy", "confidence")) and 0 < last["tv"] < 1
    assert not [name for name, value in drafter.state_dict().items() if torch.equal(value, before[name])]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", mostly_nightly(["markov", "state"]))
def test_a_recipe_s_terms_are_logged_where_they_are_in_use(tmp_path, target, recipe, kind):
    for confidence_head in (False, True):
        fields = dict(sequential_head=kind, head_rank=4, head_candidates=9 if kind == "state" else 0)
        drafter = tiny_drafter(target, confidence_head=confidence_head, **fields)
        trainer = trainer_for(tmp_path, target, drafter, rows(4), max_steps=1, recipe=recipe)
        trainer.train()
        line, weight = trainer.state.log_history[0], RECIPES[recipe]
        expected = weight["ce_weight"] * line["cross_entropy"] + weight["kl_weight"] * line["kl"]
        assert ("tv" in line) == (bool(weight["tv_weight"]) or confidence_head)
        assert ("confidence" in line) == confidence_head and ("blind" in line) == (kind == "state")
        expected += sum(weight[f"{name}_weight"] * line.get(name, 0) for name in ("tv", "confidence", "blind"))
        assert line["loss"] == pytest.approx(expected, rel=1e-4)
        assert trainer.objective.terms.confidence_weight == float(confidence_head)


def test_a_recipe_sets_what_the_user_did_not(tmp_path):
    def made(**given):
        arguments = HyperDFlashTrainingArguments(str(tmp_path), use_cpu=True, report_to="none", **given)
        return {name: getattr(arguments, name) for name in RECIPES["ours"]}

    paper = made()
    assert paper["ce_weight"] == 1.0 and paper["kl_weight"] == 0.15 and paper["kl_positions"] == 2
    assert paper["tv_weight"] == 0.0 and paper["loss_decay"] is None
    dspark = made(recipe="dspark")
    assert (dspark["ce_weight"], dspark["tv_weight"] / 2, dspark["confidence_weight"]) == (0.1, 0.9, 1.0)
    assert dspark["loss_decay"] == 4.0 and dspark["kl_weight"] == 0.0
    given = {"ce_weight": 0.0, "kl_weight": 0.3, "kl_positions": 3, "tv_weight": 0.0, "loss_decay": 7.0}
    for recipe, own in RECIPES.items():
        theirs = {name: own[name] for name in ("confidence_weight", "blind_weight", "rank_weight", "valid_prefix")}
        assert made(recipe=recipe, **given) == {**given, **theirs}
    assert made(recipe="dspark", loss_decay=math.inf)["loss_decay"] is None
    with pytest.raises(ValueError, match=r"`recipe` is 'mine', expected one of \('hyperdflash', 'dspark', 'ours', "):
        made(recipe="mine")
    with pytest.raises(ValueError, match="are all 0: expected one to train with"):
        made(ce_weight=0, kl_weight=0)


def test_what_a_recipe_distills(tmp_path, target):
    """`ours` every draft position of the drafter, whatever its block; nothing without a weight."""
    drafter, data = tiny_drafter(target, num_draft_tokens=3), rows(2)
    for settings, positions in (
        ({}, 2), ({"recipe": "ours"}, 3), ({"recipe": "ours", "kl_positions": 1}, 1), ({"recipe": "dspark"}, 0),
    ):  # fmt: skip
        trainer = trainer_for(tmp_path, target, drafter, data, **settings)
        assert trainer.objective.kl_positions == positions
        batch = collate([trainer.train_dataset[i] for i in range(2)])
        trainer.objective.add_anchors(batch, 0)
        assert len(trainer.objective.counts([batch])) == 1 + positions


def test_mean_pooled_teacher_and_no_kl(tmp_path, target):
    data = rows(4)
    seen = []
    for setting in ({}, {"kl_teacher": "mean_pool"}, {"kl_weight": 0.0}):
        trainer = trainer_for(tmp_path, target, tiny_drafter(target), data, max_steps=1, **setting)
        trainer.train()
        seen.append(trainer.state.log_history[0])
    assert seen[0]["cross_entropy"] == pytest.approx(seen[1]["cross_entropy"], rel=1e-5)
    assert seen[0]["kl"] != pytest.approx(seen[1]["kl"]) and seen[2]["kl"] == 0
    for line, weight in zip(seen, (0.15, 0.15, 0.0)):
        assert line["loss"] == pytest.approx(line["cross_entropy"] + weight * line["kl"], rel=1e-4)


def test_every_step_draws_other_anchors(tmp_path, target):
    trainer = trainer_for(tmp_path, target, tiny_drafter(target), rows(4), num_anchors=2)
    drawn = []
    for trainer.state.global_step in (0, 1, 0):
        batch = collate(trainer.train_dataset.to_list())
        trainer.get_batch_samples(iter([batch]), 1, torch.device("cpu"))
        drawn.append(batch["anchors"].tolist())
    assert drawn[0] == drawn[2] != drawn[1]


def test_logged_terms_are_means_over_the_steps_since_the_last_log(tmp_path, target):
    logged = []
    for every in (1, 3):
        trainer = trainer_for(tmp_path, target, tiny_drafter(target), rows(6), max_steps=6, logging_steps=every)
        trainer.train()
        logged.append([[line[name] for name in ("cross_entropy", "kl")] for line in trainer.state.log_history[:-1]])
    each, means = map(torch.tensor, logged)
    torch.testing.assert_close(each.view(2, 3, 2).mean(1), means)
    accumulated = trainer_for(
        tmp_path, target, tiny_drafter(target), rows(6), max_steps=1, per_device_train_batch_size=1,
        gradient_accumulation_steps=2,
    )  # fmt: skip
    accumulated.train()
    line = accumulated.state.log_history[0]
    torch.testing.assert_close(torch.tensor([line["cross_entropy"], line["kl"]]), each[0])


# Stopping and going on


def test_a_resumed_run_repeats_the_uninterrupted_one(tmp_path, target):
    data = rows(10)
    settings = dict(max_steps=7, save_strategy="steps", save_steps=4, gradient_accumulation_steps=2, recipe="ours")
    whole = trainer_for(tmp_path / "whole", target, headed_drafter(target, "recurrent"), data, **settings)
    whole.train()
    resumed = trainer_for(tmp_path / "whole", target, headed_drafter(target, "recurrent", seed=1), data, **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-4"))
    assert losses(resumed) == losses(whole) and len(losses(whole)) == 7
    assert torch.equal(weights(whole.model), weights(resumed.model))
    for name in ("cross_entropy", "kl", "tv", "confidence"):
        first, second = (t.state.log_history[-2][name] for t in (whole, resumed))
        assert first == second > 0


def test_the_best_checkpoint_by_real_acceptance_is_loaded(tmp_path, target):
    drafter = tiny_drafter(target)
    trainer = trainer_for(
        tmp_path, target, drafter, rows(6), rows(3, seed=1), max_steps=4, eval_strategy="steps", eval_steps=2,
        save_strategy="steps", save_steps=2, load_best_model_at_end=True, metric_for_best_model="tau",
    )  # fmt: skip
    trainer.add_callback(AcceptanceCallback(trainer, [prompt(9), prompt(12, seed=1)], max_new_tokens=12))
    trainer.train()
    logged = [line for line in trainer.state.log_history if "eval_tau" in line]
    assert len(logged) == 2 and all("eval_teacher_forced_tau" in line for line in logged)
    assert trainer.state.best_metric == max(line["eval_tau"] for line in logged)
    assert trainer.state.best_model_checkpoint


def test_a_metric_that_there_is_not_is_refused(tmp_path, target):
    settings = dict(
        eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=1, load_best_model_at_end=True
    )
    for metric, message in (("nothing", "'nothing', expected tau"), ("eval_tau", "add an `AcceptanceCallback`")):
        trainer = trainer_for(
            tmp_path, target, tiny_drafter(target), rows(4), rows(2), metric_for_best_model=metric, **settings
        )
        with pytest.raises(ValueError, match=message):
            trainer.train()
        assert not trainer.state.log_history  # nothing was trained


@pytest.mark.parametrize("metric", ["nothing", "eval_tau"])
def test_a_metric_that_only_an_evaluation_can_refuse_costs_no_work(metric, tmp_path, target):
    settings = dict(
        max_steps=2, eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=2,
        load_best_model_at_end=True,
    )  # fmt: skip
    first = trainer_for(
        tmp_path, target, tiny_drafter(target), rows(4), rows(2), metric_for_best_model=metric, **settings
    )
    first.add_callback(type("AddsMetrics", (TrainerCallback,), {}))  # which may add this one
    with pytest.raises(ValueError, match=f"{metric}.*expected one of eval_loss.*checkpoint-1, which has the work so"):
        first.train()
    again = trainer_for(tmp_path, target, tiny_drafter(target), rows(4), rows(2), **settings)
    again.train(resume_from_checkpoint=True)
    assert [line["step"] for line in again.state.log_history if "eval_loss" in line] == [1, 2]


def test_only_the_drafter_is_trained_and_saved(tmp_path, target):
    before = {name: value.clone() for name, value in target.state_dict().items()}
    drafter = tiny_drafter(target)
    start = weights(drafter).clone()
    trainer = trainer_for(tmp_path, target, drafter, rows(4), save_strategy="steps", save_steps=3)
    trainer.train()
    assert all(torch.equal(value, before[name]) for name, value in target.state_dict().items())
    assert not target.training and all(p.grad is None and not p.requires_grad for p in target.parameters())
    assert not torch.equal(start, weights(drafter))
    saved = HyperDFlashDrafter.from_pretrained(tmp_path / "checkpoint-3")
    assert torch.equal(weights(saved), weights(drafter))
    assert not list((tmp_path / "checkpoint-3").glob("tokenizer*"))


# Several processes

TWO_PROCESSES = """
import json, psutil, sys, torch
from tests.conftest import tiny_target
from tests.helpers.training import headed_drafter, losses, rows, trainer_for, weights
torch.set_num_threads(1)
batch, folder = int(sys.argv[1]), sys.argv[2]
target = tiny_target()
drafter = headed_drafter(target, "gated_markov")
settings = dict(max_steps=3, learning_rate=1e-2, optim="sgd", seed=3, recipe="ours")
settings |= dict(per_device_train_batch_size=batch, per_device_eval_batch_size=batch)
trainer = trainer_for(folder, target, drafter, rows(8), rows(5, seed=1), **settings)
trainer.train()
metrics = trainer.evaluate()
if trainer.is_world_process_zero():
    taus = [metrics["eval_teacher_forced_tau"], metrics["eval_expected_tau"]]
    found = [losses(trainer), weights(drafter).tolist(), taus, trainer.args.world_size]
threads = psutil.Process().num_threads()
trainer.leave_group()
if trainer.is_world_process_zero():
    print(json.dumps([*found, threads - psutil.Process().num_threads()]))
"""


@pytest.mark.nightly  # two processes import transformers, twice
def test_two_processes_train_like_one(tmp_path):
    script = tmp_path / "run.py"
    script.write_text(TWO_PROCESSES)
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}

    def run(*command: object) -> list:
        done = python(*command, env=environment)
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(next(line for line in done.stdout.splitlines() if line.startswith("[[")))

    one = run(script, 4, tmp_path / "one")
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", 2)
    two = run(*launcher, script, 2, tmp_path / "two")
    assert (one[3], two[3]) == (1, 2)
    assert two[4] >= 2, "the group's threads, which may abort a process that ends among them"
    assert one[0] == pytest.approx(two[0], rel=1e-5) and one[2] == pytest.approx(two[2])
    torch.testing.assert_close(torch.tensor(one[1]), torch.tensor(two[1]), atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("vocabulary", [0, 40])
def test_a_table_that_fsdp2_shards_gets_its_gradient(tmp_path, target, vocabulary):
    """On a mesh of one process it is a sharded tensor all the same, which the loss reads outside the forward."""
    data, gradients = rows(4), []
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1
    )
    try:
        for is_sharded in (False, True):
            drafter = headed_drafter(target, "markov", reducer="fc", draft_vocab_size=vocabulary)
            assert drafter.get_input_embeddings() is None  # accelerate asks before it shards
            trainer = trainer_for(tmp_path, target, drafter, data, recipe="ours")
            if is_sharded:
                fully_shard(drafter, mesh=init_device_mesh("cpu", (1,)), reshard_after_forward=True)
            trainer.compute_loss(drafter, collate(trainer.train_dataset.to_list())).backward()
            tables = [drafter.head_table, *([drafter.lm_head.weight] if vocabulary else [])]
            gradients.append([table.grad for table in tables])
        assert all(isinstance(table, DTensor) for table in tables)
        for sharded, whole in zip(gradients[1], gradients[0]):
            torch.testing.assert_close(sharded.full_tensor(), whole)
    finally:
        torch.distributed.destroy_process_group()


# A vocabulary of the drafter's own


def test_the_vocabulary_is_what_answers_have_most_often(tmp_path, target):
    """Questions do not count, and the first of equally frequent tokens is taken."""
    data = [
        {"input_ids": [9, 9, 9, 9, 7, 7, 30, 5, 5], "loss_mask": [0, 0, 0, 0, 1, 1, 1, 1, 1]},
        {"input_ids": [9, 9, 40, 7, 60, 60], "loss_mask": [0, 0, 1, 1, 1, 1]},
    ]
    drafter = tiny_drafter(target, draft_vocab_size=4)
    trainer = trainer_for(tmp_path, target, drafter, Dataset.from_list(data))
    assert drafter.draft_ids.tolist() == [0, 1, 2, 3]
    trainer.choose_vocabulary()
    assert drafter.draft_ids.tolist() == [5, 7, 30, 60]
    torch.testing.assert_close(drafter.lm_head.weight, target.lm_head.weight[[5, 7, 30, 60]])
    assert trainer.objective.draft_head().indices(torch.tensor([30, 9])).tolist() == [2, -1]
    with pytest.raises(ValueError, match="`draft_vocab_size` is 0"):
        trainer_for(tmp_path, target, tiny_drafter(target), Dataset.from_list(data)).choose_vocabulary()
    stream = trainer_for(tmp_path, target, drafter, Dataset.from_list(data).to_iterable_dataset())
    with pytest.raises(ValueError, match="a dataset of known length"):
        stream.choose_vocabulary()


@pytest.mark.parametrize("head", ["none", "markov", "state"])
def test_a_drafter_of_all_tokens_learns_alike_by_an_lm_head_of_its_own(tmp_path, target, head):
    """Where what it has is all that there is, in another order, nothing is different but that its LM head learns."""
    made = tiny_drafter if head == "none" else partial(headed_drafter, kind=head)
    plain, own, order, steps = made(target), made(target, draft_vocab_size=64), torch.arange(64).flip(0), []
    own.load_state_dict(plain.state_dict(), strict=False)
    own.draft_only(target_of(target), order)
    if head == "markov":
        with torch.no_grad():
            own.head_table.copy_(plain.head_table[order])
    for drafter in (plain, own):
        trainer = trainer_for(tmp_path, target, drafter, rows(4), rows(3, seed=1), recipe="ours")
        trainer.compute_loss(drafter, collate(trainer.train_dataset.to_list())).backward()
        steps.append(({name: p.grad for name, p in drafter.named_parameters()}, trainer.evaluate()))
    (of_plain, told), (of_own, told_of_own) = steps
    assert of_own.pop("lm_head.weight").any()
    if head == "markov":
        of_own["markov_head.markov_w2.weight"] = of_own["markov_head.markov_w2.weight"][order]
    for name, gradient in of_plain.items():
        torch.testing.assert_close(of_own[name], gradient, atol=1e-5, rtol=1e-4)
    for name in ("eval_loss", "eval_teacher_forced_tau", "eval_expected_tau"):
        assert told_of_own[name] == pytest.approx(told[name], rel=1e-5)


# LoRA


def test_a_lora_adapter_trains_saves_loads_merges_and_drafts(tmp_path, target):
    peft = pytest.importorskip("peft")
    drafter = tiny_drafter(target)
    start = weights(drafter).clone()
    config = peft.LoraConfig(
        r=4, target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "gate_proj", "down_proj"]
    )
    wrapped = peft.get_peft_model(drafter, config)
    trainer = trainer_for(tmp_path, target, wrapped, rows(6), save_strategy="steps", save_steps=3)
    trainer.add_callback(AcceptanceCallback(trainer, [prompt(9)], max_new_tokens=8))
    trainer.train()
    base = wrapped.get_base_model()
    assert torch.equal(
        start, torch.cat([p.detach().flatten() for n, p in base.named_parameters() if "lora_" not in n])
    )

    expected = target.generate(prompt(10), do_sample=False, max_new_tokens=20)
    wrapped.bind(target)
    wrapped.eval()
    assert torch.equal(
        target.generate(prompt(10), do_sample=False, max_new_tokens=20, assistant_model=wrapped), expected
    )
    assert wrapped.last_stats.rounds > 0
    residual, places = torch.randn(1, 8, 4, 32), torch.arange(8)[None]
    call = dict(residual=residual, residual_position_ids=places)
    embeds, positions = torch.randn(1, 7, 32), torch.arange(8, 15)[None]
    adapted = wrapped(embeds, positions, **call)
    loaded = peft.PeftModel.from_pretrained(tiny_drafter(target), tmp_path / "checkpoint-3").eval()
    torch.testing.assert_close(loaded(embeds, positions, **call), adapted)
    torch.testing.assert_close(loaded.merge_and_unload()(embeds, positions, **call), adapted, atol=1e-5, rtol=1e-4)
    assert not torch.allclose(tiny_drafter(target)(embeds, positions, **call), adapted, atol=1e-4)
    trainer.save_model()
    assert json.loads((tmp_path / "training.json").read_text())["settings"]["steps"] == 3
    with pytest.raises(OSError, match=r"has a PEFT adapter, expected a whole drafter: .*merge_and_unload\(\)"):
        load_drafter(tmp_path)
    with pytest.raises(OSError, match="has a PEFT adapter, expected a whole target"):
        load_target(str(tmp_path))


@pytest.mark.parametrize("kind", ["gated_markov", "state"])
def test_a_lora_adapter_has_heads_whole(tmp_path, target, kind):
    """Modules of heads are called as parts of layers are; those that are saved whole get no adapter."""
    peft = pytest.importorskip("peft")
    drafter = headed_drafter(target, kind)
    head, start = drafter.head, [p.clone() for p in drafter.head.parameters()]
    config = peft.LoraConfig(
        r=4, target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "gate_proj", "down_proj"],
        modules_to_save=[head.key, "confidence_head"],
    )  # fmt: skip
    wrapped = peft.get_peft_model(drafter, config)
    settings = dict(save_strategy="steps", save_steps=3, recipe="dspark")
    trainer = trainer_for(tmp_path, target, wrapped, rows(6), rows(2), **settings)
    trainer.train()
    metrics = trainer.evaluate()
    saved = load_file(tmp_path / "checkpoint-3" / "adapter_model.safetensors")
    whole = {name for name in saved if head.key in name or "confidence_head" in name}
    assert not [name for name in whole if "lora" in name] and len(whole) == len(start) + 2
    loaded = peft.PeftModel.from_pretrained(headed_drafter(target, kind, seed=1), tmp_path / "checkpoint-3").eval()
    again = trainer_for(tmp_path, target, loaded, rows(6), rows(2), **settings).evaluate()
    merged = trainer_for(tmp_path, target, loaded.merge_and_unload(), rows(6), rows(2), **settings).evaluate()
    for name in ("eval_loss", "eval_expected_tau"):
        assert metrics[name] == pytest.approx(again[name]) == pytest.approx(merged[name], rel=1e-4)
    for name, before in zip(dict(head.named_parameters()), start):
        assert not torch.equal(saved[next(key for key in whole if key.endswith(name))], before)


# What is read


def test_each_layer_is_read_once_and_padding_belongs_to_the_last_document(tmp_path, target):
    layers = {(0, -1): [0, -1], (0, 1): [0, 1, -1], (-1,): [-1]}
    for ids, expected in layers.items():
        drafter = tiny_drafter(target, reducer="fc", target_layer_ids=list(ids))
        assert trainer_for(tmp_path, target, drafter).objective.layer_ids == expected
    packed = {"input_ids": [5, 6, 7], "loss_mask": [1, 1, 1], "position_ids": [0, 1, 0]}
    batch = collate([packed, {"input_ids": [5] * 6, "loss_mask": [1] * 6, "position_ids": list(range(6))}])
    assert batch["position_ids"][0].tolist() == [0, 1, 0, 1, 2, 3]  # a document more would be run through the target
    assert batch["input_ids"][0].tolist() == [5, 6, 7, 0, 0, 0] and batch["loss_mask"][0].sum() == 3


# Bad input


def test_wrong_models_and_arguments_are_refused(tmp_path, target):
    drafter = tiny_drafter(target)
    with pytest.raises(ValueError, match="expected a HyperDFlashDrafter"):
        trainer_for(tmp_path, target, target, rows(2))
    with pytest.raises(ValueError, match="vocab_size"):
        trainer_for(tmp_path, tiny_target(vocab_size=32), drafter, rows(2))
    with pytest.raises(ValueError, match="kl_positions"):
        trainer_for(tmp_path, target, drafter, rows(2), kl_positions=7)
    with pytest.raises(ValueError, match=r"`confidence_weight` is 1\.0, but the drafter has no confidence head"):
        trainer_for(tmp_path, target, drafter, rows(2), confidence_weight=1.0)
    with pytest.raises(ValueError, match=r"`blind_weight` is 1\.0, but the drafter has no head that chooses among"):
        trainer_for(tmp_path, target, drafter, rows(2), blind_weight=1.0)
    trainer_for(tmp_path, target, drafter, confidence_weight=0.0, blind_weight=0.0)
    with pytest.raises(ValueError, match=r"`draft_vocab_size` is 8 and its `head_candidates` 4"):
        chooses = tiny_drafter(target, draft_vocab_size=8, sequential_head="markov", head_rank=4, head_candidates=4)
        trainer_for(tmp_path, target, chooses, rows(2))
    with pytest.raises(ValueError, match="kl_teacher"):
        trainer_for(tmp_path, target, drafter, rows(2), kl_teacher="argmax")
    with pytest.raises(ValueError, match="streaming"):
        trainer_for(tmp_path, target, drafter, rows(2).to_iterable_dataset(), feature_source="cached")
    with pytest.raises(ValueError, match=r"vocabulary 64"):
        tokenizer = AutoTokenizer.from_pretrained(MODELS / "tiny-deepseek-v4")
        HyperDFlashTrainer(drafter, target, HyperDFlashTrainingArguments(str(tmp_path)), processing_class=tokenizer)
    with pytest.raises(ValueError, match="`processing_class` is a str, expected the target's tokenizer"):
        HyperDFlashTrainer(drafter, target, processing_class="x")
    with pytest.raises(ValueError, match=r"`args` is a TrainingArguments: pass HyperDFlashTrainingArguments"):
        HyperDFlashTrainer(drafter, target, TrainingArguments(str(tmp_path)))


def test_no_features_are_written_for_arguments_that_do_not_fit(tmp_path, target):
    with pytest.raises(ValueError, match="eval_dataset"):
        trainer_for(tmp_path, target, tiny_drafter(target), rows(4), feature_source="cached", eval_strategy="steps")
    assert not list(tmp_path.rglob("features-*"))


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("kl_weight", "x", "a number of at least 0"), ("kl_weight", -1, "a number of at least 0"),
        ("kl_weight", math.nan, "a number of at least 0"), ("learning_rate", -1.0, "a number of at least 0"),
        ("kl_temperature", 0, "a number of more than 0"), ("loss_decay", "4", "a number of more than 0"),
        ("kl_temperature", None, "a number of more than 0"), ("loss_decay", 0.0, "a number of more than 0"),
        ("tv_weight", -0.1, "a number of at least 0"), ("confidence_weight", math.inf, "a number of at least 0"),
        ("ce_weight", "1", "a number of at least 0"), ("kl_positions", 1.5, "a whole number of at least 1"),
        ("max_length", 1, "a whole number of at least 2"), ("num_anchors", 1.5, "a whole number of at least 1"),
        ("per_device_train_batch_size", 0, "a whole number"), ("gradient_accumulation_steps", 0, "a whole number"),
        ("max_steps", -5, "a whole number of at least 1"), ("max_steps", 0, "a whole number of at least 1"),
        ("num_train_epochs", 0, "a number of more than 0"), ("num_train_epochs", -1.0, "a number of more than 0"),
        ("weight_decay", -1.0, "a number of at least 0"), ("save_steps", 0, "a number of more than 0"),
        ("seed", -1, "a whole number of at least 0"), ("seed", 2**32, "a whole number below"),
        ("adam_beta2", 1.5, "a number from 0 to below 1"), ("adam_beta1", "x", "a number from 0 to below 1"),
        ("dataloader_num_workers", -1, "a whole number of at least 0"),
    ],
)  # fmt: skip
def test_arguments_out_of_range_are_told_with_what_is_expected(tmp_path, name, value, expected):
    with pytest.raises(ValueError, match=rf"`{name}` is {value!r}, expected {expected}"):
        HyperDFlashTrainingArguments(str(tmp_path), **{name: value})


def test_a_target_of_torchaos_weights_trains_a_drafter_that_knows_it(tmp_path):
    """Its weights know no operation but a linear layer's: they are looked at by what they are made of."""
    target = as_int8(families.llama().eval())
    drafter = tiny_drafter(target, target_layer_ids=[1])
    trainer = trainer_for(tmp_path, target, drafter, rows(6))
    trainer.train()
    trainer.save_model()
    recorded = load_drafter(tmp_path).config.target_fingerprint
    assert changed_parts(recorded, target) == []
    layer = target.model.layers[0].mlp.up_proj
    layer.weight.data_[0, 0] += 1
    assert changed_parts(recorded, target) == ["body"]
    layer.weight.scale[3] = math.nan
    with pytest.raises(ValueError, match=r"not finite.*up_proj"):
        trainer_for(tmp_path, target, drafter, rows(6))


def test_a_mask_token_that_the_tokenizer_does_not_use_will_do(tmp_path):
    """Rows of the embedding past the tokenizer's last are what `find_mask_token` prefers; text never has them."""
    tokenizer = AutoTokenizer.from_pretrained(MODELS / "tiny-deepseek-v4")
    target = tiny_target(vocab_size=len(tokenizer) + 8)
    drafter = tiny_drafter(target, mask_token_id=len(tokenizer) + 3)
    turns = [{"role": "user", "content": "What is 2 plus 3?"}, {"role": "assistant", "content": "2 plus 3 is 5."}]
    chats = Dataset.from_list([{"messages": turns}] * 2)
    settings = dict(max_steps=1, per_device_train_batch_size=2, report_to="none", save_strategy="no", num_anchors=2)
    arguments = HyperDFlashTrainingArguments(str(tmp_path), use_cpu=True, **settings)
    trainer = HyperDFlashTrainer(drafter, target, arguments, train_dataset=chats, processing_class=tokenizer)
    trainer.train()
    assert math.isfinite(trainer.state.log_history[-1]["train_loss"])


def test_what_python_trains_is_recorded_as_the_commands_is(tmp_path, target):
    """The card tells of it, and the drafter of its target. Metrics are those of the weights that are saved."""
    settings = dict(eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=1, max_steps=3)
    settings |= dict(load_best_model_at_end=True, metric_for_best_model="teacher_forced_tau", recipe="ours")
    drafter = tiny_drafter(target)
    trainer = trainer_for(tmp_path, target, drafter, rows(6), rows(3, seed=9), **settings)
    trainer.save_model()
    assert not (tmp_path / "training.json").exists()  # nothing was trained
    trainer.train()
    trainer.save_model()
    record = json.loads((tmp_path / "training.json").read_text())
    expected = {"recipe": "ours", "steps": 3, "train_rows": 6, "held_out_rows": 3, "learning_rate": 1e-2}
    assert {name: record["settings"][name] for name in expected} == expected
    best = [line for line in trainer.state.log_history if line["step"] == trainer.state.best_global_step]
    (tau,) = (line["eval_teacher_forced_tau"] for line in best if "eval_teacher_forced_tau" in line)
    assert record["metrics"]["eval_teacher_forced_tau"] == tau
    assert changed_parts(HyperDFlashDrafter.from_pretrained(tmp_path).config.target_fingerprint, target) == []
    assert "| loss | ours |" in str(drafter_card(tmp_path))
    assert not (tmp_path / "checkpoint-3" / "training.json").exists()


def test_rows_are_not_longer_than_the_target_has_positions(tmp_path, target, caplog):
    long = Dataset.from_list([{"input_ids": [5] * 1100, "loss_mask": [1] * 1100}])
    trainer = trainer_for(tmp_path, target, tiny_drafter(target), long, max_length=None)
    assert (
        trainer.max_length
        == target.config.max_position_embeddings
        == 1024
        == len(trainer.train_dataset[0]["input_ids"])
    )
    assert "Cut 1 of 1 sequences to 1024 tokens, all the positions that the target has." in caplog.messages
    with pytest.raises(
        ValueError, match=r"`max_length` is 1025, expected at most 1024, the positions that the target"
    ):
        trainer_for(tmp_path, target, tiny_drafter(target), long, max_length=1025)


def test_data_without_assistant_text_is_refused(tmp_path, target):
    silent = Dataset.from_list([{"input_ids": [3, 4, 5], "loss_mask": [0, 0, 0]}] * 3)
    with pytest.raises(ValueError, match=r"3 of 3 rows .*`loss_mask`"):
        trainer_for(tmp_path, target, tiny_drafter(target), silent)


def test_a_loss_that_is_not_finite_ends_the_run_and_names_the_cause(tmp_path, target):
    settings = dict(max_steps=40, learning_rate=1e18, max_grad_norm=0.0, optim="sgd", kl_weight=0.0)
    trainer = trainer_for(tmp_path, target, tiny_drafter(target), rows(6), **settings)
    with pytest.raises(ValueError, match="Lower `learning_rate`, now 1e\\+18, or warm up longer and begin again"):
        trainer.train()
    settings |= dict(save_strategy="steps", save_steps=1)
    trainer = trainer_for(tmp_path, target, tiny_drafter(target), rows(6), **settings)
    with pytest.raises(ValueError, match=r"or warm up longer, then go on from .*checkpoint-\d+ with `resume_from"):
        trainer.train()
    written = HyperDFlashDrafter.from_pretrained(newest_complete(tmp_path)[0])
    assert torch.isfinite(weights(written)).all()
    overflowing = tiny_target()
    overflowing.model.embed_tokens.weight.data.fill_(3e38)  # finite, but not its square
    with pytest.raises(ValueError, match="residual is not finite"):
        trainer_for(tmp_path, overflowing, tiny_drafter(overflowing), rows(4)).train()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_weights_that_are_not_finite_are_not_blamed_on_the_learning_rate(tmp_path, target, value):
    drafter = tiny_drafter(target)
    drafter.norm.weight.data[3] = value
    with pytest.raises(ValueError, match=r"The drafter has weights that are not finite, in 1 tensors: norm\.weight"):
        trainer_for(tmp_path, target, drafter, rows(4))
    target.lm_head.weight.data[5, 2] = value
    with pytest.raises(ValueError, match=r"The target has weights that are not finite, in 1 tensors: lm_head\.weight"):
        trainer_for(tmp_path, target, tiny_drafter(target), rows(4))


FULL_DISK = """
import resource, sys, torch
from tests.conftest import tiny_target
from tests.helpers.training import rows, tiny_drafter, trainer_for
target = tiny_target()
settings = dict(max_steps=4, save_strategy="steps", save_steps=2)
trainer = trainer_for(sys.argv[1], target, tiny_drafter(target), rows(6), **settings)
real = trainer._save_optimizer_and_scheduler
def fill(folder):  # from the second checkpoint on, no file can grow past 64 KB: what a full disk does to a writer
    if trainer.state.global_step == 4:
        resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))
    real(folder)
trainer._save_optimizer_and_scheduler = fill
trainer.train()
"""


def test_a_full_disk_leaves_earlier_checkpoints_whole(tmp_path, target):
    script = tmp_path / "run.py"
    script.write_text(FULL_DISK)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = python(script, tmp_path / "out", env=environment)
    assert done.returncode == 1 and "OSError: Checkpoint " in done.stderr, done.stderr[-2000:]
    assert f"then go on from {tmp_path / 'out' / 'checkpoint-2'}" in done.stderr
    assert [path.name for path in (tmp_path / "out").glob("checkpoint-*")] == ["checkpoint-2"]
    again = trainer_for(tmp_path / "out", target, tiny_drafter(target), rows(6), max_steps=4)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 4
    shutil.rmtree(tmp_path / "out")


def test_a_target_spread_with_device_map_stays_where_it_is(tmp_path, target):
    target.save_pretrained(tmp_path / "saved")
    places = {f"model.{name}": "cpu" for name, _ in target.model.named_children() if name != "layers"}
    places |= {"lm_head": "cpu", **{f"model.layers.{i}": "disk" for i in range(3)}}
    spread = AutoModelForCausalLM.from_pretrained(
        tmp_path / "saved", device_map=places, offload_folder=tmp_path / "offload", dtype=torch.float32
    )
    assert any(p.device.type == "meta" for p in spread.parameters())
    runs = []
    for model in (target, spread):
        trainer = trainer_for(tmp_path, model, tiny_drafter(target), rows(4))
        trainer.train()
        runs.append(losses(trainer))
    assert runs[0] == pytest.approx(runs[1], rel=1e-5)
    assert any(p.device.type == "meta" for p in spread.parameters())


def test_a_disk_without_room_for_a_checkpoint_is_refused_before_training(tmp_path, target, monkeypatch):
    drafter = tiny_drafter(target)
    size = 4 * sum(p.numel() for p in drafter.parameters())
    for saving, optim, needed in (
        ("steps", "adamw_torch", 3 * size),
        ("steps", "sgd", size),
        ("no", "adamw_torch", size),
    ):
        trainer = trainer_for(tmp_path, target, drafter, rows(4), max_steps=1, save_strategy=saving, optim=optim)
        monkeypatch.setattr(shutil, "disk_usage", lambda path, free=needed - 1: SimpleNamespace(free=free))
        with pytest.raises(ValueError, match=r"`output_dir` is .* MiB are free, expected at least .* make room"):
            trainer.train()
        assert trainer.state.global_step == 0
        monkeypatch.setattr(shutil, "disk_usage", lambda path, free=needed: SimpleNamespace(free=free))
        trainer.train()
