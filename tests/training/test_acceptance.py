"""Acceptance metrics against loops, and acceptance measured by generating while training."""

import importlib.util
import socket
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import EarlyStoppingCallback, TrainerCallback

from hf_hyperdflash import bind
from hf_hyperdflash.decoding.bind import BoundTarget

from ..conftest import CSA, SLIDING, prompt, tiny_drafter, tiny_target
from ..helpers.refusals import Refusal
from ..helpers.training import trainer_for as any_trainer

if not importlib.util.find_spec("evaluate"):
    pytest.skip("needs evaluate (the train extra)", allow_module_level=True)

import evaluate
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState
from datasets import Dataset

from hf_hyperdflash.benchmark.metrics.acceptance_length import AcceptanceLength
from hf_hyperdflash.benchmark.metrics.per_position_acceptance import PerPositionAcceptance
from hf_hyperdflash.training.acceptance import AcceptanceCallback, gathered, measure_acceptance

METRICS = Path(importlib.util.find_spec("hf_hyperdflash").origin).parent / "benchmark" / "metrics"
PROMPTS = [prompt(9, vocab_size=6), prompt(14, seed=1, vocab_size=6), prompt(5, seed=2, vocab_size=6)]


def pair():
    """So few tokens that an untrained drafter is right now and then."""
    target = tiny_target(2, vocab_size=6, layer_types=[SLIDING, CSA])
    return target, tiny_drafter(target, num_hidden_layers=1)


# Metrics


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=12), st.sampled_from([None, 6, 8]), st.booleans())
def test_metrics_equal_a_count_round_by_round(rounds, asked, as_tensor):
    length, positions = AcceptanceLength(keep_in_memory=True), PerPositionAcceptance(keep_in_memory=True)
    emitted = [drafts + 1 for drafts in rounds]
    for part in (emitted[:2], emitted[2:]):
        if part:
            length.add_batch(predictions=torch.tensor(part) if as_tensor else part)
    assert length.compute() == {"acceptance_length": sum(emitted) / len(emitted), "rounds": len(emitted)}
    options = {} if asked is None else {"num_drafts": asked}
    got = positions.compute(predictions=torch.tensor(rounds) if as_tensor else rounds, **options)
    seen = max(rounds) if asked is None else asked
    for k in range(1, seen + 1):
        accepted, reached = (sum(drafts >= least for drafts in rounds) for least in (k, k - 1))
        assert got["acceptance"][k - 1] == pytest.approx(accepted / len(rounds))
        assert got["conditional_acceptance"][k - 1] == pytest.approx(accepted / reached if reached else 0.0)
    assert len(got["acceptance"]) == len(got["conditional_acceptance"]) == seen


@pytest.mark.parametrize(
    ("metric", "rounds", "words"),
    [
        (AcceptanceLength, [], ("predictions", "empty")), (PerPositionAcceptance, [], ("predictions", "empty")),
        (AcceptanceLength, [3, 0], ("0", "at least")), (PerPositionAcceptance, [1, 7], ("1 to 7", "0 to 6")),
        (PerPositionAcceptance, [-1, 2], ("-1 to 2",)),
    ],
)  # fmt: skip
def test_metrics_refuse_what_cannot_be(metric, rounds, words):
    options = {"num_drafts": 6} if metric is PerPositionAcceptance and rounds else {}
    Refusal(lambda: metric(keep_in_memory=True).compute(predictions=rounds, **options), words).check()


def test_metrics_load_by_path_offline(tmp_path, monkeypatch):
    def no_network(*args):
        raise OSError("the network was asked for")

    monkeypatch.setattr(socket, "socket", no_network)
    monkeypatch.setattr(evaluate.config, "HF_MODULES_CACHE", tmp_path / "modules")
    monkeypatch.setattr(sys, "path", [*sys.path])  # `evaluate` adds its cache of modules
    cache = {"cache_dir": str(tmp_path / "metrics")}
    length = evaluate.load(str(METRICS / "acceptance_length.py"), **cache)
    positions = evaluate.load(str(METRICS / "per_position_acceptance.py"), keep_in_memory=True, **cache)
    assert length.compute(predictions=[4, 1, 7]) == {"acceptance_length": 4.0, "rounds": 3}
    assert positions.compute(predictions=[2, 0, 1, 1], num_drafts=3) == {
        "acceptance": [0.75, 0.25, 0.0],
        "conditional_acceptance": [0.75, 1 / 3, 0.0],
    }
    assert not list(tmp_path.rglob("*.arrow"))


# Measuring


def measurable(measured):
    return {name: value for name, value in measured.items() if name != "tokens_per_second"}


@pytest.mark.parametrize("num_drafts", [None, 2])
def test_measure_acceptance_equals_generating_by_hand(num_drafts):
    target, drafter = pair()
    options = {} if num_drafts is None else {"num_assistant_tokens": num_drafts}
    measured = measure_acceptance(target, drafter, PROMPTS, max_new_tokens=16, **options)
    bind(target)
    emitted, accepted, tokens = [], [], 0
    for ids in PROMPTS:
        out = target.generate(ids, assistant_model=drafter, do_sample=False, max_new_tokens=16, **options)
        emitted += drafter.last_stats.emitted
        accepted += drafter.last_stats.accepted
        tokens += out.shape[1] - ids.shape[1]
    assert any(accepted)  # or the following would not say much
    assert measured["rounds"] == len(emitted) and measured["tokens"] == tokens
    assert measured["tau"] == sum(emitted) / len(emitted)
    assert measured["mean_accepted_drafts"] == sum(accepted) / len(accepted)
    rates = [sum(n >= k for n in accepted) / len(accepted) for k in range(1 + (num_drafts or 6))]
    assert measured["acceptance"] == rates[1:]
    assert measured["conditional_acceptance"] == pytest.approx(
        [now / before if before else 0.0 for before, now in pairwise(rates)]
    )
    shortest = measure_acceptance(target, drafter, PROMPTS[:1], max_new_tokens=3)  # enough for a round
    assert shortest["tokens"] == 3 and shortest["rounds"] == 1


def test_tokens_per_second_are_over_the_whole_of_generate(monkeypatch):
    """By a clock that counts the target's forwards, of which all are in it."""
    target, drafter = pair()
    forwards = [0]
    target.model.register_forward_hook(lambda *_: forwards.__setitem__(0, forwards[0] + 1))
    monkeypatch.setattr(time, "perf_counter", lambda: float(forwards[0]))
    measured = measure_acceptance(target, drafter, PROMPTS, max_new_tokens=16)
    assert measured["tokens_per_second"] == measured["tokens"] / forwards[0]


def test_measuring_drafts_in_eval_mode_and_leaves_the_models_as_they_were(capsys):
    target, drafter = pair()
    own_class, modes = type(target), []
    drafter.train()
    drafter.layers[0].mlp.eval()
    drafter.layers[0].self_attn.register_forward_hook(lambda module, *_: modes.append(module.training))
    before = [module.training for module in [*drafter.modules(), *target.modules()]]
    random_state = torch.get_rng_state()
    measure_acceptance(target, drafter, PROMPTS[:1], max_new_tokens=4)
    assert modes and not any(modes) and not capsys.readouterr().err  # a library is quiet
    Refusal(lambda: measure_acceptance(target, drafter, PROMPTS, num_assistant_tokens=99), ("99",)).check()
    assert [module.training for module in [*drafter.modules(), *target.modules()]] == before
    assert type(target) is own_class
    assert torch.equal(torch.get_rng_state(), random_state)  # or evaluating would change the training after it
    measure_acceptance(bind(target), drafter, PROMPTS[:1], max_new_tokens=4, disable_tqdm=False)
    assert isinstance(target, BoundTarget) and "acceptance: " in capsys.readouterr().err


def test_a_prompt_s_tokens_are_no_padding_and_an_answer_needs_a_round():
    """Of a float32 drafter with a bfloat16 target."""
    target, drafter = pair()
    target.to(torch.bfloat16)
    plain = measure_acceptance(target, drafter, PROMPTS, max_new_tokens=8)
    target.generation_config.pad_token_id = int(PROMPTS[0][0, 0])
    assert measurable(measure_acceptance(target, drafter, PROMPTS, max_new_tokens=8)) == measurable(plain)
    target.generation_config.eos_token_id = list(range(6))
    Refusal(lambda: measure_acceptance(target, drafter, PROMPTS), ("3 prompts", "round")).check()


# While training


def rows(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, 6, (count, 16), generator=generator).tolist()
    return Dataset.from_list([{"input_ids": row, "loss_mask": [0] * 4 + [1] * 12} for row in ids])


def trainer_for(tmp_path, eval_dataset=None, **fields):
    target, drafter = pair()
    given = dict(num_anchors=8, learning_rate=0.02, eval_strategy="steps", eval_steps=1) | fields
    held_out = rows(2, seed=1) if eval_dataset is None else eval_dataset
    trainer = any_trainer(tmp_path, target, drafter, rows(6), held_out, **given)
    trainer.add_callback(AcceptanceCallback(trainer, PROMPTS, max_new_tokens=10))
    return trainer


def logged(trainer):
    return [line for line in trainer.state.log_history if "eval_tau" in line]


def by_hand(trainer):
    """The acceptance of the drafter as it is now, under the names of the trainer's metrics."""
    measured = measure_acceptance(trainer.target, trainer.model, PROMPTS, max_new_tokens=10)
    names = {f"eval_{name}": measured[name] for name in ("tau", "mean_accepted_drafts")}
    for k in range(6):
        names[f"eval_acceptance_{k + 1}"] = measured["acceptance"][k]
        names[f"eval_conditional_acceptance_{k + 1}"] = measured["conditional_acceptance"][k]
    return names


class Spoil(TrainerCallback):
    """Ruins the drafter in the third step, and measures by hand at every evaluation."""

    def __init__(self, trainer):
        self.trainer, self.by_hand = trainer, []

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 3:
            self.trainer.model.norm.weight.data.zero_()  # all logits are equal then

    def on_evaluate(self, args, state, control, metrics, **kwargs):
        self.by_hand.append(by_hand(self.trainer))
        assert self.by_hand[-1].items() <= metrics.items() and "eval_tokens_per_second" in metrics


def test_callback_measures_the_current_drafter_and_selects_the_best(tmp_path):
    trainer = trainer_for(
        tmp_path, learning_rate=1e-6, metric_for_best_model="tau", load_best_model_at_end=True, save_strategy="steps",
        save_steps=1,
    )  # fmt: skip
    spoil = Spoil(trainer)
    trainer.add_callback(spoil)
    trainer.train()
    lines = logged(trainer)
    assert [line["step"] for line in lines] == [1, 2, 3]
    for line, expected in zip(lines, spoil.by_hand):
        assert expected.items() <= line.items()
        assert "eval_tokens_per_second" in line
    estimates = [line["eval_teacher_forced_tau"] for line in lines]
    assert estimates[0] > estimates[2] == 1  # of equal logits the first wins, a token that no text here has
    taus = [line["eval_tau"] for line in lines]
    assert trainer.state.best_metric == taus[0] > taus[2] and trainer.state.best_global_step == 1
    # The best weights are in place now: nothing of the measurement of the last step may come back.
    trainer.remove_callback(spoil)
    assert trainer.evaluate(metric_key_prefix="eval_best")["eval_tau"] == taus[0]


@pytest.mark.parametrize(("is_terminal", "disable_tqdm"), [(True, False), (True, True), (False, False)])
def test_callback_shows_its_progress_on_a_terminal(tmp_path, capsys, monkeypatch, is_terminal, disable_tqdm):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    trainer_for(tmp_path, disable_tqdm=disable_tqdm).evaluate()
    assert ("acceptance: " in capsys.readouterr().err) == (is_terminal and not disable_tqdm)


def test_callback_generates_once_for_several_datasets_and_again_for_changed_weights(tmp_path):
    trainer = trainer_for(tmp_path, {"code": rows(2, seed=1), "math": rows(2, seed=2)}, max_steps=1, bf16=True)
    assert not any("eval_tau" in name for name in trainer.evaluate(metric_key_prefix="test")) and not logged(trainer)
    trainer.train()
    assert len(logged(trainer)) == 1 and "eval_code_teacher_forced_tau" in logged(trainer)[0]
    before = trainer.evaluate()
    assert by_hand(trainer).items() <= before.items()
    assert {"eval_code_teacher_forced_tau", "eval_math_teacher_forced_tau"} <= before.keys()
    with torch.no_grad():
        for parameter in trainer.model.layers.parameters():
            parameter.normal_()
    after = trainer.evaluate()
    assert len(logged(trainer)) == 3
    assert by_hand(trainer).items() <= after.items() and after["eval_acceptance_1"] != before["eval_acceptance_1"]


def test_early_stopping_sees_what_the_callback_measured(tmp_path):
    trainer = trainer_for(tmp_path, metric_for_best_model="tau", learning_rate=0.0, max_steps=9, save_strategy="best")
    trainer.add_callback(EarlyStoppingCallback(early_stopping_patience=2))
    trainer.train()
    assert trainer.state.global_step == 3 and trainer.state.best_global_step == 1


# Sharded


def test_gathered_is_a_drafter_that_fsdp2_shards(tmp_path):
    """On a mesh of one process parameters are sharded tensors all the same, which only `gathered` makes usable."""
    target, drafter = pair()
    expected = measurable(measure_acceptance(target, drafter, PROMPTS, max_new_tokens=8))
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1
    )
    try:
        mesh = init_device_mesh("cpu", (1,))
        for layer in drafter.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(drafter, mesh=mesh)
        accelerator = Accelerator(cpu=True)
        accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
        with gathered(accelerator, drafter) as whole:
            assert not any(isinstance(parameter, DTensor) for parameter in whole.parameters())
            assert measurable(measure_acceptance(target, whole, PROMPTS, max_new_tokens=8)) == expected
        assert all(isinstance(parameter, DTensor) for parameter in drafter.parameters())
        with pytest.raises(RuntimeError, match="DTensor"):
            measure_acceptance(target, drafter, PROMPTS, max_new_tokens=8)
        width, at = drafter.config.hidden_size, torch.arange(16)[None]
        residual = torch.ones(1, 9, drafter.config.target_hc_mult, width)
        given = {"position_ids": at[:, 9:], "residual": residual, "residual_position_ids": at[:, :9]}
        assert drafter(torch.ones(1, 7, width), **given).requires_grad
        assert all(isinstance(parameter, DTensor) for parameter in drafter.layers.parameters())
    finally:
        torch.distributed.destroy_process_group()
        AcceleratorState._reset_state(reset_partial_state=True)
