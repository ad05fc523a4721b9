"""Acceptance metrics against loops, and acceptance measured by generating while training."""

import importlib.util
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from hf_hyperdflash import bind
from hf_hyperdflash.target import BoundTarget

from .conftest import prompt, tiny_drafter, tiny_target

if not importlib.util.find_spec("evaluate"):
    pytest.skip("needs evaluate (the train extra)", allow_module_level=True)

from hf_hyperdflash.evaluation import AcceptanceCallback, measure_acceptance
from hf_hyperdflash.metrics.acceptance_length import AcceptanceLength
from hf_hyperdflash.metrics.per_position_acceptance import PerPositionAcceptance
from hf_hyperdflash.trainer import HyperDFlashTrainer
from hf_hyperdflash.training_args import HyperDFlashTrainingArguments

METRICS = Path(importlib.util.find_spec("hf_hyperdflash").origin).parent / "metrics"
PROMPTS = [prompt(9), prompt(14, seed=1), prompt(5, seed=2)]


@pytest.fixture
def length(tmp_path):
    return AcceptanceLength(keep_in_memory=True, cache_dir=str(tmp_path))


@pytest.fixture
def positions(tmp_path):
    return PerPositionAcceptance(keep_in_memory=True, cache_dir=str(tmp_path))


# Metrics


@pytest.mark.parametrize("seed", range(4))
def test_acceptance_length_is_the_mean(length, seed):
    rounds = [random.Random(seed).randint(1, 7) for _ in range(5 + seed)]
    total = 0
    for emitted in rounds:
        total += emitted
    assert length.compute(predictions=rounds) == {"acceptance_length": total / len(rounds), "rounds": len(rounds)}


@pytest.mark.parametrize("seed", range(4))
def test_per_position_acceptance_equals_a_count_round_by_round(positions, seed):
    rounds = [random.Random(seed).choice([0, 0, 1, 2, 4]) for _ in range(9)]
    got = positions.compute(predictions=rounds, num_drafts=6)
    for k in range(1, 7):
        accepted = reached = 0
        for drafts in rounds:
            if drafts >= k - 1:
                reached += 1
                if drafts >= k:
                    accepted += 1
        assert got["acceptance"][k - 1] == accepted / len(rounds)
        assert got["conditional_acceptance"][k - 1] == (accepted / reached if reached else 0.0)
    assert len(got["acceptance"]) == len(got["conditional_acceptance"]) == 6


def test_per_position_acceptance_reports_the_positions_seen(positions):
    assert positions.compute(predictions=[2, 0])["acceptance"] == [0.5, 0.5]
    assert positions.compute(predictions=[0, 0]) == {"acceptance": [], "conditional_acceptance": []}


def test_metrics_take_batches_and_tensors(length, positions):
    for part in ([3, 1], torch.tensor([5])):
        length.add_batch(predictions=part)
    assert length.compute() == {"acceptance_length": 3.0, "rounds": 3}
    assert positions.compute(predictions=torch.tensor([1, 0]), num_drafts=1)["acceptance"] == [0.5]


def test_metrics_refuse_what_cannot_be(length, positions):
    for metric in (length, positions):
        with pytest.raises(ValueError, match="`predictions` is empty"):
            metric.compute(predictions=[])
    with pytest.raises(ValueError, match="holds 0: a round emits at least"):
        length.compute(predictions=[3, 0])
    with pytest.raises(ValueError, match="runs from 1 to 7: expected 0 to 6"):
        positions.compute(predictions=[1, 7], num_drafts=6)
    with pytest.raises(ValueError, match="runs from -1 to 2"):
        positions.compute(predictions=[-1, 2])


def test_metrics_are_documented(length, positions):
    for metric in (length, positions):
        assert "HyperDFlash" in metric.citation and "per" in metric.description
        assert "predictions" in metric.inputs_description and "predictions" in metric.compute.__doc__


def test_metrics_load_by_path_offline_without_the_package(tmp_path):
    code = """
import sys, evaluate
length, positions = (evaluate.load(path, keep_in_memory=True) for path in sys.argv[1:])
print(length.compute(predictions=[4, 1, 7]))
print(positions.compute(predictions=[2, 0, 1, 1], num_drafts=3))
on_disk = evaluate.load(sys.argv[1])
print(on_disk.compute(predictions=[2]), "hf_hyperdflash" in sys.modules)
"""
    files = [str(METRICS / name) for name in ("acceptance_length.py", "per_position_acceptance.py")]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1", "HOME": str(tmp_path)}
    result = subprocess.run(
        [sys.executable, "-c", code, *files], env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == [
        "{'acceptance_length': 4.0, 'rounds': 3}",
        "{'acceptance': [0.75, 0.25, 0.0], 'conditional_acceptance': [0.75, 0.3333333333333333, 0.0]}",
        "{'acceptance_length': 2.0, 'rounds': 1} False",
    ]
    assert not list(tmp_path.rglob("*.arrow"))


# Measuring


def accepting_pair(seed=0, accepted=0.6):
    """A target and a drafter that agree in part: both read mostly the last token's embedding."""
    target = tiny_target(seed, num_hidden_layers=2, layer_types=["sliding_attention"] * 2)
    drafter = tiny_drafter(target)
    return target, drafter


def test_measure_acceptance_equals_generating_by_hand(target, drafter):
    measured = measure_acceptance(target, drafter, PROMPTS, max_new_tokens=24)
    bind(target)
    emitted, accepted, tokens = [], [], 0
    for ids in PROMPTS:
        out = target.generate(ids, assistant_model=drafter, do_sample=False, max_new_tokens=24)
        stats = drafter.last_stats
        emitted, accepted, tokens = emitted + stats.emitted, accepted + stats.accepted, tokens + out.shape[1] - ids.shape[1]
        if len(PROMPTS[0][0]) == ids.shape[1]:
            alone = measure_acceptance(target, drafter, [ids], max_new_tokens=24)
            assert alone["tau"] == stats.tau and alone["mean_accepted_drafts"] == stats.mean_accepted_drafts
            assert alone["acceptance"] == pytest.approx(stats.acceptance)
            assert alone["conditional_acceptance"] == pytest.approx(stats.conditional_acceptance)
    assert measured["rounds"] == len(emitted) and measured["tokens"] == tokens == 3 * 24
    assert measured["tau"] == sum(emitted) / len(emitted)
    assert measured["mean_accepted_drafts"] == sum(accepted) / len(accepted)
    assert measured["acceptance"] == [sum(n >= k for n in accepted) / len(accepted) for k in range(1, 7)]
    assert len(measured["conditional_acceptance"]) == 6 and measured["tokens_per_second"] > 0
