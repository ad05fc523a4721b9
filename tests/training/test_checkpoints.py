"""Checkpoints that a killed or full machine left behind, and what a run goes on from. That a resumed run repeats the
whole one to the bit: tests/contracts/test_training.py."""

import json
import math
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from transformers import TrainerCallback

from hf_hyperdflash import HyperDFlashConfig, HyperDFlashDrafter
from hf_hyperdflash.training.runs.checkpoints import newest_complete

from ..conftest import tiny_target
from ..helpers.processes import python
from ..helpers.refusals import Refusal
from ..helpers.training import rows, tiny_drafter, trainer_for, weights

SAVING = dict(max_steps=6, save_strategy="steps", save_steps=2)
ROOT = str(Path(__file__).parents[2])


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder, target = tmp_path_factory.mktemp("finished") / "run", tiny_target()
    trainer = trainer_for(folder, target, tiny_drafter(target), rows(8), **SAVING)
    trainer.train()
    return folder


@pytest.fixture
def run(tmp_path, finished):
    """A finished run with checkpoints at steps 2, 4 and 6."""
    return shutil.copytree(finished, tmp_path / "run")


@pytest.mark.parametrize("spoil", [Path.unlink, lambda path: os.truncate(path, 99)])
def test_a_checkpoint_that_is_not_whole_is_refused_with_the_newest_that_is(run, target, spoil):
    expected = weights(HyperDFlashDrafter.from_pretrained(run / "checkpoint-6"))
    spoil(run / "checkpoint-6" / "trainer_state.json")  # written last: the others are whole where it is
    assert newest_complete(run)[0] == run / "checkpoint-4"
    trainer = trainer_for(run, target, tiny_drafter(target), rows(8), **SAVING)
    wanted = str(run / "checkpoint-6")
    words = ("checkpoint-6", str(run / "checkpoint-4"))
    Refusal(lambda: trainer.train(resume_from_checkpoint=wanted), words).check()
    trainer.train(resume_from_checkpoint=str(run / "checkpoint-4"))
    assert torch.equal(weights(trainer.model), expected) and newest_complete(run)[0] == run / "checkpoint-6"


def test_weights_alone_are_no_checkpoint_and_several_processes_parts_are_one(run, target):
    for folder in run.glob("checkpoint-*"):
        (folder / "optimizer.pt").unlink()
    trainer = trainer_for(run, target, tiny_drafter(target), rows(8), **SAVING)
    words = ("checkpoint-6", "save_only_model")
    Refusal(lambda: trainer.train(resume_from_checkpoint=True), words).check()
    for other in ("optimizer_0", "global_step4"):  # FSDP's and DeepSpeed's
        (run / "checkpoint-4" / other).mkdir()
        assert newest_complete(run)[0] == run / "checkpoint-4"
        (run / "checkpoint-4" / other).rmdir()


def test_the_last_file_of_a_checkpoint_is_the_one_that_makes_it_whole(finished):
    written = sorted((finished / "checkpoint-2").iterdir(), key=lambda path: path.stat().st_mtime_ns)
    names = [path.name for path in written]
    assert {"model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "run.json"} <= set(names)
    assert names[-1] == "trainer_state.json" and "training.json" not in names


def test_what_a_run_ends_in_has_code_and_its_checkpoints_have_none(tmp_path, target):
    """Also where transformers has loaded a drafter's own code before, and registered its classes."""
    HyperDFlashDrafter.register_for_auto_class("AutoModel")
    HyperDFlashConfig.register_for_auto_class()
    trainer = trainer_for(tmp_path, target, tiny_drafter(target), rows(4), **{**SAVING, "max_steps": 2})
    trainer.train()
    trainer.save_model()
    code = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.py")}
    assert {"modeling_hyperdflash.py", "custom_generate/generate.py"} <= code
    assert not any(name.startswith("checkpoint-") for name in code)
    whole, checkpoint = (json.loads((at / "config.json").read_text()) for at in (tmp_path, tmp_path / "checkpoint-2"))
    assert whole.pop("auto_map") and whole == checkpoint


class Spoil(TrainerCallback):
    def on_step_end(self, args, state, control, model, **kwargs):
        if state.global_step == 4:
            model.norm.weight.data[0] = math.nan


def test_a_checkpoint_of_weights_that_are_not_finite_is_not_written(tmp_path, target):
    trainer = trainer_for(tmp_path, target, tiny_drafter(target), rows(8), **SAVING)
    trainer.add_callback(Spoil())
    Refusal(trainer.train, ("norm.weight", "step 4", "checkpoint-2")).check()
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-2"]


KILLED = """
import glob, os, random, signal, sys, threading, time
import torch
from tests.conftest import tiny_target
from tests.helpers.training import rows, tiny_drafter, trainer_for, weights
torch.set_num_threads(1)
folder, kills = sys.argv[1], 3
target, chance = tiny_target(), random.Random(0)

def train(name, saves, share):  # killed after so many saves and a share of the next
    settings = dict(max_steps=kills + 1, save_strategy="steps", save_steps=1, save_total_limit=2)
    trainer = trainer_for(f"{folder}/{name}", target, tiny_drafter(target), rows(4), **settings)
    real, took = trainer._save_checkpoint, []
    def save(model, trial):
        if len(took) == saves:
            threading.Timer(share * took[-1], os.kill, (os.getpid(), signal.SIGKILL)).start()
        begun = time.perf_counter()
        real(model, trial)
        took.append(time.perf_counter() - begun)
    trainer._save_checkpoint = save
    trainer.train(resume_from_checkpoint=any(glob.iglob(f"{folder}/{name}/checkpoint-*")))
    torch.save(weights(trainer.model), f"{folder}/{name}.pt")

def forked(*arguments):
    child = os.fork()
    if not child:
        train(*arguments)
        os._exit(0)
    return os.waitpid(child, 0)[1]

assert forked("whole", None, None) == 0
killed = 0
while (status := forked("killed", 1, chance.random())) == signal.SIGKILL:
    killed += 1
assert status == 0, status
assert torch.equal(torch.load(f"{folder}/whole.pt"), torch.load(f"{folder}/killed.pt"))
print("killed", killed)
"""


@pytest.mark.parametrize("error", [OSError(28, "No space left"), RuntimeError("torch's"), SafetensorError("theirs")])
def test_a_full_disk_leaves_earlier_checkpoints_whole(tmp_path, target, monkeypatch, error):
    trainer = trainer_for(tmp_path, target, tiny_drafter(target), rows(8), **SAVING)
    real = trainer._save_optimizer_and_scheduler

    def fill(folder):
        if trainer.state.global_step == 4:
            raise error
        real(folder)

    monkeypatch.setattr(trainer, "_save_optimizer_and_scheduler", fill)
    words = (str(tmp_path / "checkpoint-4"), str(error), str(tmp_path / "checkpoint-2"), "resume_from_checkpoint")
    Refusal(trainer.train, words, OSError).check()
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-2"]
    assert newest_complete(tmp_path)[0] == tmp_path / "checkpoint-2"


# Takes seconds: a process is killed again and again.
def test_a_run_killed_while_it_saves_ends_in_the_same_weights(tmp_path):
    """A real process and SIGKILL, at random moments of its saves: how many depends on how busy the machine is."""
    (tmp_path / "out").mkdir()
    (tmp_path / "run.py").write_text(KILLED)
    done = python(tmp_path / "run.py", tmp_path / "out", env={**os.environ, "PYTHONPATH": ROOT})
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout.split("killed")[1]) > 0


def test_a_disk_without_room_for_a_checkpoint_is_refused_before_training(tmp_path, target, monkeypatch):
    drafter = tiny_drafter(target)
    size = 4 * sum(p.numel() for p in drafter.parameters())
    for saving, optim, needed in (("steps", "adamw_torch", 3), ("steps", "sgd", 1), ("no", "adamw_torch", 1)):
        how = dict(max_steps=1, save_strategy=saving, optim=optim)
        trainer = trainer_for(tmp_path, target, drafter, rows(4), **how)
        usage = shutil.disk_usage(tmp_path)._replace(free=needed * size - 1)
        monkeypatch.setattr(shutil, "disk_usage", lambda path, usage=usage: usage)
        Refusal(trainer.train, ("output_dir", "MiB")).check()
        assert trainer.state.global_step == 0
        usage = usage._replace(free=needed * size)
        monkeypatch.setattr(shutil, "disk_usage", lambda path, usage=usage: usage)
        trainer.train()


def test_a_loss_that_is_not_finite_ends_the_run_and_names_the_cause(tmp_path, target):
    settings = dict(max_steps=40, learning_rate=1e18, max_grad_norm=0.0, optim="sgd", kl_weight=0.0)
    trainer = trainer_for(tmp_path, target, tiny_drafter(target), rows(6), **settings)
    Refusal(trainer.train, ("learning_rate", "1e+18", "begin again")).check()
    settings |= dict(save_strategy="steps", save_steps=1)
    trainer = trainer_for(tmp_path, target, tiny_drafter(target), rows(6), **settings)
    Refusal(trainer.train, ("learning_rate", "checkpoint-", "resume_from")).check()
    written = HyperDFlashDrafter.from_pretrained(newest_complete(tmp_path)[0])
    assert torch.isfinite(weights(written)).all()
    overflowing = tiny_target()
    overflowing.model.embed_tokens.weight.data.fill_(3e38)  # finite, but not its square
    trainer = trainer_for(tmp_path, overflowing, tiny_drafter(overflowing), rows(4))
    Refusal(trainer.train, ("residual is not finite", "bfloat16")).check()
