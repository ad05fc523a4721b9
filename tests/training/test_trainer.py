"""The trainer against generation, and its losses against the papers' equations. What holds for every kind of drafter:
tests/contracts/test_training.py; what is refused: tests/refusals/test_training.py."""

import json
import math
import os
from functools import partial
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, TrainerCallback

from hf_hyperdflash import (
    AcceptanceCallback,
    HyperDFlashDrafter,
    HyperDFlashTrainer,
    HyperDFlashTrainingArguments,
    capture_residual,
    load_drafter,
    load_target,
)
from hf_hyperdflash.targets.registry import target_of
from hf_hyperdflash.training.arguments import RECIPES
from hf_hyperdflash.training.features.fingerprint import changed_parts
from hf_hyperdflash.training.losses.objective import collate

from ..conftest import prompt, tiny_target
from ..helpers import families
from ..helpers.chats import LINES, chat, supervised, templated
from ..helpers.processes import python
from ..helpers.quantization import as_int8
from ..helpers.refusals import Refusal
from ..helpers.served_drafters import qwen3
from ..helpers.training import (
    headed_drafter,
    losses,
    rows,
    softmax,
    tiny_drafter,
    trainer_for,
)
from ..helpers.unrolled import unrolled

FIELDS = [
    {}, {"sliding_window": 6}, {"reducer": "fc"}, {"hidden_size": 48, "head_dim": 16},
    {"reducer": "fc", "target_layer_ids": [0, 1]}, {"reducer": "hybrid", "target_layer_ids": [1, -1]},
    {"sample_from_anchor": True, "conv_kernel_size": 2},
    {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"], "num_hidden_layers": 2,
     "causal_layers": "sliding", "window_from": "slot"},
]  # fmt: skip


# The loss is the paper's


@torch.no_grad()
def naive_loss(target, drafter, documents, args, positions, progress=1.0):
    """Eq. 3, DSpark's terms, Domino's two cross-entropies (SpecForge's `OnlineDominoModel`: 1 - lambda of its head's
    logits, lambda of the block's own) and JetSpec's mean over drafts (NVIDIA's `KDLoss`), position by position: every
    block drafted alone, every draft from its head's own step after the text's token, acceptance token by token, and
    the target run on each document alone."""
    found, config = [], drafter.config
    drafts, size = config.max_draft_tokens, config.block_size
    for document in documents:
        text, mask = document["input_ids"], [*document["loss_mask"], 0]
        ids = torch.tensor([text])
        with capture_residual(target, config.target_layer_ids) as captured:
            taught = target(ids, use_cache=False).logits[0]
        if args.kl_teacher == "mean_pool":
            with capture_residual(target, [-1]) as last:
                target(ids, use_cache=False)
            taught = target.lm_head(target.model.norm(last[0].mean(dim=2)))[0]
        for a in (i for i in range(len(text)) if mask[i] and mask[i + 1]):
            block = torch.tensor([[text[a], *[config.mask_token_id] * (size - 1)]])
            window = None if config.layer_types else config.sliding_window
            first, carried = max(0, a - (window or a)), None
            context = dict(residual=captured[0][:, first:a], residual_position_ids=torch.arange(first, a)[None])
            states = drafter(target.model.embed_tokens(block), torch.arange(a, a + size)[None], **context)[0]
            unsupervised = next(j for j in range(a + 1, len(mask)) if not mask[j])
            for k, label in enumerate(text[a + 1 : min(a + 1 + drafts, unsupervised)]):
                state = states[None, size - drafts + k]
                own = logits = target.lm_head(state)
                foretold = None
                if drafter.head is not None:
                    before = torch.tensor([text[a + k]])
                    step = drafter.head(state, before, target.model.embed_tokens(before), carried)
                    carried, logits = step.carried, target.lm_head(step.states)
                    if step.vectors is not None:
                        logits = logits + step.vectors @ drafter.head_table.T
                    foretold = drafter.confidence_head(state, step.memory).sigmoid().item()
                found.append((k, label, logits[0], own[0], taught[a + k], foretold))
    decay, temperature = args.loss_decay or math.inf, args.kl_temperature
    shares = [math.exp(-k / decay) for k, *_ in found]
    shares = [share / sum(shares) for share in shares]
    of_first = [sum(k == position for k, *_ in found) for position in range(positions)]
    loss, block = 0.0, max(0.0, 1 - progress / args.block_first) if args.block_first else 0.0
    for share, (k, label, logits, own, teacher, foretold) in zip(shares, found):
        q, p = softmax(logits.tolist()), softmax(teacher.tolist())
        loss -= args.ce_weight * share * (1 - block) * math.log(q[label])
        loss -= args.ce_weight * share * block * math.log(softmax(own.tolist())[label])
        loss += args.tv_weight * share * (1 - sum(map(min, q, p)))
        if k < positions:
            soft_q, soft_p = (softmax(each.tolist(), temperature) for each in (logits, teacher))
            divergence = sum(a * math.log(a / b) for a, b in zip(soft_p, soft_q))
            part = share if args.kl_by_token else 1 / positions / of_first[k]
            loss += args.kl_weight * temperature**2 * divergence * part
        if foretold is not None:
            chosen = own.topk(config.head_candidates or len(q)).indices
            drawn = softmax(torch.full_like(logits, -math.inf).scatter(0, chosen, logits[chosen]).tolist())
            accepted = sum(map(min, drawn, p))
            surprise = accepted * math.log(foretold) + (1 - accepted) * math.log(1 - foretold)
            loss -= args.confidence_weight * share * surprise
            if config.head_candidates:
                loss -= args.blind_weight * share * math.log(softmax(own.tolist())[label])
    return loss


EQUATION_3 = dict(kl_positions=3, kl_temperature=1.7, loss_decay=3.0, kl_weight=5.0)
MADE = [
    *((partial(tiny_drafter, **fields), {**EQUATION_3, "kl_teacher": teacher, "packing": teacher == "mean_pool"})
      for fields in FIELDS for teacher in ("hc_head", "mean_pool")),
    *((partial(headed_drafter, kind=kind, head_candidates=candidates), {"recipe": recipe, "kl_weight": 0.7})
      for kind, recipe, candidates in (
        ("markov", "dspark", 0), ("gated_markov", "hyperdflash", 0), ("recurrent", "dspark", 0),
        ("selector", "dspark", 5), ("state", "dspark", 0), ("state", "hyperdflash", 0), ("state", "dspark", 5))),
    (partial(headed_drafter, kind="gru", sample_from_anchor=True), {"recipe": "domino"}),
    (partial(headed_drafter, kind="state", head_candidates=5), {"recipe": "domino", "block_first": 0.5}),
    (partial(tiny_drafter, causal_layers="all"), {"recipe": "jetspec", "kl_temperature": 1.7}),
    (partial(tiny_drafter, causal_layers="all"), {"recipe": "jetspec", "loss_decay": 3.0}),
]  # fmt: skip


@pytest.mark.parametrize(("make", "settings"), MADE)
def test_the_loss_is_the_papers_of_blocks_drafted_alone(tmp_path, target, make, settings):
    """The first document is supervised from its first token, the second in two stretches."""
    documents = rows(3).to_list()
    documents[0]["loss_mask"] = [1] * len(documents[0]["loss_mask"])
    documents[1]["loss_mask"][2:5] = [1, 1, 1]
    drafter = make(target)
    trainer = trainer_for(tmp_path, target, drafter, Dataset.from_list(documents), num_anchors=64, **settings)
    for done in (1.0, 0.0, 0.2) if trainer.args.block_first else (1.0,):
        trainer.objective.progress = done
        loss = trainer.compute_loss(drafter, collate(trainer.train_dataset.to_list()))
        expected = naive_loss(target, drafter, documents, trainer.args, trainer.objective.kl_positions, done)
        assert loss.item() == pytest.approx(expected, rel=1e-4)
    with torch.no_grad():  # as it is judged
        loss = trainer.compute_loss(drafter, collate(trainer.train_dataset.to_list()))
    expected = naive_loss(target, drafter, documents, trainer.args, trainer.objective.kl_positions)
    assert loss.item() == pytest.approx(expected, rel=1e-4)


def test_training_goes_from_the_block_to_its_head(tmp_path, target):
    """Step by step, in the part of training that is asked for; what is judged is its end."""
    for part, expected in ((1.0, [1.0, 0.75, 0.5, 0.25]), (0.5, [1.0, 0.5, 0.0, 0.0])):
        drafter, seen = headed_drafter(target, "gru"), []
        trainer = trainer_for(
            tmp_path, target, drafter, rows(8), rows(3, seed=1), recipe="domino", block_first=part, max_steps=4
        )
        step, own = trainer.objective.step, trainer.objective.terms_now
        trainer.objective.step = lambda *args, step=step, own=own, seen=seen: [seen.append(own()), step(*args)][1]
        trainer.train()
        assert [terms.blind_weight for terms in seen] == expected
        assert [terms.ce_weight for terms in seen] == [1 - weight for weight in expected]
        with torch.no_grad():
            assert trainer.objective.terms_now() is trainer.objective.terms
        assert "blind" in trainer.state.log_history[0]


# What a recipe is


def test_a_recipe_sets_what_the_user_did_not(tmp_path, target):
    def made(**given):
        arguments = HyperDFlashTrainingArguments(str(tmp_path), use_cpu=True, report_to="none", **given)
        return {name: getattr(arguments, name) for name in RECIPES["ours"]}

    given = {"ce_weight": 0.0, "kl_weight": 0.3, "kl_positions": 3, "tv_weight": 0.0, "loss_decay": 7.0}
    for recipe, own in RECIPES.items():
        assert made(recipe=recipe) == own and made(recipe=recipe, **given) == {**own, **given}
    assert made() == RECIPES["hyperdflash"] and made(recipe="dspark", loss_decay=math.inf)["loss_decay"] is None
    # What papers say: Eq. 3's alpha and P; DSpark's weights, of which L1 is twice the total variation.
    paper, dspark = RECIPES["hyperdflash"], RECIPES["dspark"]
    assert (paper["ce_weight"], paper["kl_weight"], paper["kl_positions"], paper["tv_weight"]) == (1.0, 0.15, 2, 0.0)
    assert [dspark[name] for name in ("ce_weight", "confidence_weight", "loss_decay", "kl_weight")] == [0.1, 1, 4, 0]
    assert dspark["tv_weight"] == 1.8 and paper["loss_decay"] is None
    # SpecForge's, NeMo's and ModelOpt's Domino; JetSpec's Eq. 9.
    domino, jetspec = RECIPES["domino"], RECIPES["jetspec"]
    assert [domino[name] for name in ("ce_weight", "kl_weight", "block_first", "loss_decay")] == [1, 0, 1, 7]
    assert [jetspec[name] for name in ("ce_weight", "kl_weight", "kl_positions", "loss_decay")] == [0, 1, None, None]
    assert jetspec["kl_by_token"] and not domino["kl_by_token"]
    # What is distilled: of `ours` every draft position of the drafter, whatever its block; nothing without a weight.
    drafter = tiny_drafter(target, num_draft_tokens=3)
    for settings, positions in (
        ({"confidence_weight": 0.0, "blind_weight": 0.0}, 2), ({"recipe": "ours"}, 3),  # weights of heads it has not
        ({"recipe": "ours", "kl_positions": 1}, 1), ({"recipe": "dspark"}, 0),
    ):  # fmt: skip
        assert trainer_for(tmp_path, target, drafter, **settings).objective.kl_positions == positions


def test_every_step_draws_other_anchors(tmp_path, target):
    drafter, data, found = tiny_drafter(target), rows(6), []
    few = trainer_for(tmp_path, target, drafter, data, num_anchors=2)
    for few.state.global_step in (0, 1, 0):
        found.append(few.compute_loss(drafter, collate(few.train_dataset.to_list())).item())
    assert found[0] == found[2] != found[1]


def test_logged_terms_are_means_over_the_steps_since_the_last_log(tmp_path, target):
    logged = []
    for every in (1, 3):
        trainer = trainer_for(tmp_path, target, tiny_drafter(target), rows(6), max_steps=6, logging_steps=every)
        trainer.train()
        logged.append([[line[name] for name in ("cross_entropy", "kl")] for line in trainer.state.log_history[:-1]])
    each, means = map(torch.tensor, logged)
    torch.testing.assert_close(each.view(2, 3, 2).mean(1), means)


def test_each_layer_is_read_once_and_padding_belongs_to_the_last_document(tmp_path, target):
    for ids, expected in {(0, -1): [0, -1], (0, 1): [0, 1, -1], (-1,): [-1]}.items():
        drafter = tiny_drafter(target, reducer="fc", target_layer_ids=list(ids))
        assert trainer_for(tmp_path, target, drafter).objective.layer_ids == expected
    packed = {"input_ids": [5, 6, 7], "loss_mask": [1, 1, 1], "position_ids": [0, 1, 0]}
    batch = collate([packed, {"input_ids": [5] * 6, "loss_mask": [1] * 6, "position_ids": list(range(6))}])
    assert batch["position_ids"][0].tolist() == [0, 1, 0, 1, 2, 3]  # a document more would be run through the target
    assert batch["input_ids"][0].tolist() == [5, 6, 7, 0, 0, 0] and batch["loss_mask"][0].sum() == 3


# What is recorded


def test_what_python_trains_is_recorded_as_the_commands_is(tmp_path, target):
    """The card tells of it, and the drafter of its target. Metrics are those of the weights that are saved."""
    settings = dict(eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=1, max_steps=3)
    settings |= dict(load_best_model_at_end=True, metric_for_best_model="teacher_forced_tau", recipe="ours")
    trainer = trainer_for(tmp_path, target, tiny_drafter(target), rows(6), rows(3, seed=9), **settings)
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


@pytest.mark.parametrize("metric", ["nothing", "eval_tau"])
def test_a_metric_that_only_an_evaluation_can_refuse_costs_no_work(metric, tmp_path, target):
    settings = dict(max_steps=2, eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=2)
    settings |= dict(load_best_model_at_end=True)
    made = partial(trainer_for, tmp_path, target, tiny_drafter(target), rows(4), rows(2))
    first = made(metric_for_best_model=metric, **settings)
    first.add_callback(type("AddsMetrics", (TrainerCallback,), {}))  # which may add this one
    Refusal(first.train, (metric, "expected one of eval_loss", "checkpoint-1")).check()
    again = made(**settings)
    again.train(resume_from_checkpoint=True)
    assert [line["step"] for line in again.state.log_history if "eval_loss" in line] == [1, 2]


def test_rows_are_not_longer_than_the_target_has_positions(tmp_path, target, caplog):
    long = Dataset.from_list([{"input_ids": [5] * 1100, "loss_mask": [1] * 1100}])
    trainer = trainer_for(tmp_path, target, tiny_drafter(target), long, max_length=None)
    assert trainer.max_length == len(trainer.train_dataset[0]["input_ids"]) == 1024
    assert "1 of 1" in caplog.text and "1024" in caplog.text and "positions" in caplog.text


# Targets of all kinds


def test_cached_features_need_no_layers_of_the_target_and_no_other_target(tmp_path, target):
    data, cached = rows(6), dict(feature_source="cached", feature_dtype="float32")
    whole = trainer_for(tmp_path, target, tiny_drafter(target), data, **cached)
    target.save_pretrained(tmp_path / "saved")
    head = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", num_hidden_layers=0, dtype=torch.float32)
    trainer = trainer_for(tmp_path, head, tiny_drafter(target), data, **cached)
    whole.train()
    trainer.train()
    assert len(head.model.layers) == 0 and losses(trainer) == losses(whole)
    other = tiny_target(seed=1)
    Refusal(lambda: trainer_for(tmp_path, other, tiny_drafter(other), data, **cached), ("another target",)).check()


def test_a_target_spread_with_device_map_stays_where_it_is(tmp_path, target):
    target.save_pretrained(tmp_path / "saved")
    places = {f"model.{name}": "cpu" for name, _ in target.model.named_children() if name != "layers"}
    places |= {"lm_head": "cpu", **{f"model.layers.{i}": "disk" for i in range(3)}}
    spread = AutoModelForCausalLM.from_pretrained(
        tmp_path / "saved", device_map=places, offload_folder=tmp_path / "offload", dtype=torch.float32
    )
    runs = []
    for model in (target, spread):
        trainer = trainer_for(tmp_path, model, tiny_drafter(target), rows(4))
        trainer.train()
        runs.append(losses(trainer))
    assert runs[0] == pytest.approx(runs[1], rel=1e-5)
    assert any(p.device.type == "meta" for p in spread.parameters())


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
    Refusal(lambda: trainer_for(tmp_path, target, drafter, rows(6)), ("not finite", "up_proj")).check()


@pytest.mark.parametrize("ends", [["</s>", "<|user|>"], ["</s>"]])
def test_the_targets_end_tokens_are_trained_on_and_the_mask_token_may_be_none_of_the_tokenizers(tmp_path, ends):
    """Rows of the embedding past the tokenizer's last are what `find_mask_token` prefers; text never has them."""
    tokenizer = templated(LINES.replace(" + eos_token", ""))  # as GLM's: the next turn's marker ends an answer
    target = qwen3(vocab_size=len(tokenizer) + 8).eval()
    target.generation_config.eos_token_id = tokenizer.convert_tokens_to_ids(ends)
    drafter = tiny_drafter(target, mask_token_id=len(tokenizer) + 3)
    how = dict(use_cpu=True, max_steps=1, report_to="none", save_strategy="no", num_anchors=2)
    arguments, data = HyperDFlashTrainingArguments(str(tmp_path), **how), [{"messages": chat("hi", "It is three.")}]
    trainer = HyperDFlashTrainer(drafter, target, arguments, train_dataset=data, processing_class=tokenizer)
    end = "\n<|user|>" if len(ends) > 1 else "\n"
    assert supervised(tokenizer, trainer.train_dataset[0]) == ["It is three." + end]
    trainer.train()
    assert math.isfinite(trainer.state.log_history[-1]["train_loss"])


# Several processes

TWO_PROCESSES = """
import json, psutil, sys, torch
from tests.conftest import tiny_target
from tests.helpers.families import qwen3
from tests.helpers.training import headed_drafter, losses, rows, trainer_for, weights
from tests.helpers.unrolled import unrolled
torch.set_num_threads(1)
torch.manual_seed(0)
kind, size, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3]
if kind == "eagle3":
    target = qwen3().eval()
    drafter = unrolled("eagle3", target, max_blocks=3, draft_vocab_size=40, own_embedding=True)
else:
    target = tiny_target()
    drafter = headed_drafter(target, "gated_markov")
settings = dict(per_device_train_batch_size=size, per_device_eval_batch_size=size, max_steps=3, optim="sgd", seed=3)
settings |= dict(recipe="eagle3" if kind == "eagle3" else "ours", learning_rate=1e-2)
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


def test_the_anchors_of_another_process_change_no_evaluation(tmp_path, target, monkeypatch):
    """One that has more: all have to call the drafter as often."""
    trainer, found = trainer_for(tmp_path, target, tiny_drafter(target), held_out=rows(2)), []
    for more in (0, 5):

        def with_others(tensor, dim, pad_index, more=more):
            shape = list(tensor.shape)
            shape[dim] = more
            return torch.cat([tensor, tensor.new_full(shape, pad_index)], dim=dim)

        monkeypatch.setattr(trainer.accelerator, "pad_across_processes", with_others)
        found.append(trainer.prediction_step(trainer.model, collate(trainer.eval_dataset.to_list()), False))
    (loss, of_text, accepted), (padded_loss, padded_text, padded_accepted) = found
    torch.testing.assert_close(padded_loss, loss)
    for one, other in zip((*padded_text, padded_accepted), (*of_text, accepted), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.nightly  # two processes import transformers, twice
@pytest.mark.parametrize("kind", ["heads", "eagle3"])
def test_two_processes_train_like_one(tmp_path, kind):
    script = tmp_path / "run.py"
    script.write_text(TWO_PROCESSES)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}

    def run(*command: object) -> list:
        done = python(*command, env=environment)
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(next(line for line in done.stdout.splitlines() if line.startswith("[[")))

    one = run(script, kind, 4, tmp_path / "one")
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", 2)
    two = run(*launcher, script, kind, 2, tmp_path / "two")
    assert (one[3], two[3]) == (1, 2)
    assert two[4] >= 2, "the group's threads, which may abort a process that ends among them"
    assert one[0] == pytest.approx(two[0], rel=1e-5) and one[2] == pytest.approx(two[2])
    torch.testing.assert_close(torch.tensor(one[1]), torch.tensor(two[1]), atol=1e-6, rtol=1e-4)


def test_tables_that_fsdp2_shards_get_their_gradients(tmp_path, target):
    """On a mesh of one process they are sharded tensors all the same, which the loss reads outside the forward."""
    data, gradients = rows(4), []
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1
    )
    try:
        for is_sharded in (False, True):
            drafter = headed_drafter(target, "markov", reducer="fc", draft_vocab_size=40)
            assert drafter.get_input_embeddings() is None  # accelerate asks before it shards
            trainer = trainer_for(tmp_path, target, drafter, data, recipe="ours")
            if is_sharded:
                fully_shard(drafter, mesh=init_device_mesh("cpu", (1,)), reshard_after_forward=True)
            trainer.compute_loss(drafter, collate(trainer.train_dataset.to_list())).backward()
            tables = [drafter.head_table, drafter.lm_head.weight]
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


@pytest.mark.parametrize(
    ("head", "recipe"),
    [("none", "ours"), ("markov", "ours"), ("state", "ours"), ("markov", "domino"), ("state", "domino")],
)
def test_a_drafter_of_all_tokens_learns_alike_by_an_lm_head_of_its_own(tmp_path, target, head, recipe):
    """Where what it has is all that there is, in another order, nothing is different but that its LM head learns."""
    made = tiny_drafter if head == "none" else partial(headed_drafter, kind=head)
    plain, own, order, steps = made(target), made(target, draft_vocab_size=64), torch.arange(64).flip(0), []
    own.load_state_dict(plain.state_dict(), strict=False)
    own.draft_only(target_of(target), order)
    if head == "markov":
        with torch.no_grad():
            own.head_table.copy_(plain.head_table[order])
    for drafter in (plain, own):
        trainer = trainer_for(tmp_path, target, drafter, rows(4), rows(3, seed=1), recipe=recipe)
        trainer.objective.progress = 0.3
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


# Of a kind: how it is made, where heads depend on the number, and its heads.
LORA = {
    "none": (lambda target, seed: tiny_drafter(target), ()),
    "gated_markov": (partial(headed_drafter, kind="gated_markov"), ("markov_head", "confidence_head")),
    "specblock": (lambda target, seed: unrolled("specblock", target, block_size=3, max_blocks=2), ("rank_head",)),
}


@pytest.mark.parametrize("kind", LORA)
def test_a_lora_adapter_trains_saves_loads_merges_and_drafts(tmp_path, target, kind):
    """Heads are saved whole, and get no adapter."""
    peft = pytest.importorskip("peft")
    make, whole = LORA[kind]
    drafter, again = make(target, seed=0), make(target, seed=1)
    start = {name: value.clone() for name, value in drafter.state_dict().items()}
    config = peft.LoraConfig(
        r=4, target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "gate_proj", "down_proj"],
        modules_to_save=list(whole),
    )  # fmt: skip
    wrapped = peft.get_peft_model(drafter, config)
    settings = dict(save_strategy="steps", save_steps=3, recipe="dspark")
    trainer = trainer_for(tmp_path, target, wrapped, rows(6), rows(2), **settings)
    trainer.add_callback(AcceptanceCallback(trainer, [prompt(9)], max_new_tokens=8))
    trainer.train()
    metrics = trainer.evaluate()
    saved = load_file(tmp_path / "checkpoint-3" / "adapter_model.safetensors")
    for name, value in start.items():
        if name.startswith(whole):
            (kept,) = (tensor for key, tensor in saved.items() if key.endswith(name))
            assert not torch.equal(kept, value)
        else:
            base = wrapped.get_base_model().state_dict()
            assert torch.equal(base.get(name, base.get(name.replace(".weight", ".base_layer.weight"))), value)
    assert not [name for name in saved if "lora" in name and any(part in name for part in whole)]
    loaded = peft.PeftModel.from_pretrained(again, tmp_path / "checkpoint-3").eval()
    for one in (loaded, loaded.merge_and_unload()):
        found = trainer_for(tmp_path, target, one, rows(6), rows(2), **settings).evaluate()
        for name in ("eval_loss", "eval_expected_tau"):
            assert metrics[name] == pytest.approx(found[name], rel=1e-4)
    expected = target.generate(prompt(10), do_sample=False, max_new_tokens=20)
    wrapped.eval().bind(target)
    assert torch.equal(
        target.generate(prompt(10), do_sample=False, max_new_tokens=20, assistant_model=wrapped), expected
    )
    assert wrapped.last_stats.rounds > 0
    trainer.save_model()
    assert json.loads((tmp_path / "training.json").read_text())["settings"]["steps"] == 3
    Refusal(lambda: load_drafter(tmp_path), ("PEFT adapter", "merge_and_unload"), OSError).check()
    Refusal(lambda: load_target(str(tmp_path)), ("PEFT adapter", "expected"), OSError).check()
