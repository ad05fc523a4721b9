"""Checkpoints that a killed or full machine left behind, and what a run goes on from."""

import json
import math
import os
import re
import shutil
import stat
from pathlib import Path

import pytest
import torch
from transformers import TrainerCallback

from hf_hyperdflash import HyperDFlashConfig, HyperDFlashDrafter
from hf_hyperdflash.training.runs.checkpoints import defect, newest_complete

from ..conftest import tiny_target
from ..helpers.processes import python
from ..helpers.training import rows, tiny_drafter, trainer_for, weights

SAVING = dict(max_steps=6, save_strategy="steps", save_steps=2)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder, target = tmp_path_factory.mktemp("finished") / "run", tiny_target()
    trainer = trainer_for(folder, target, tiny_drafter(target), rows(8), **SAVING)
    trainer.train()
    return folder, weights(trainer.model)


@pytest.fixture
def run(tmp_path, finished):
    """A finished run with checkpoints at steps 2, 4 and 6, and what it ended in."""
    folder, expected = finished
    return Path(shutil.copytree(folder, tmp_path / "run")), expected


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


@pytest.mark.parametrize("spoil", [Path.unlink, cut])
@pytest.mark.parametrize("part", ["trainer_state.json"])  # written last: the others are whole where it is
def test_a_run_goes_on_from_the_newest_whole_checkpoint(run, target, caplog, part, spoil):
    folder, expected = run
    spoil(folder / "checkpoint-6" / part)
    assert defect(folder / "checkpoint-4") is None and newest_complete(folder)[0] == folder / "checkpoint-4"
    trainer = trainer_for(folder, target, tiny_drafter(target), rows(8), **SAVING)
    begun = []
    trainer.compute_loss = lambda *a, real=trainer.compute_loss, **k: (
        begun.append(trainer.state.global_step) or real(*a, **k)
    )
    trainer.train(resume_from_checkpoint=True)
    assert begun == [4, 5] and torch.equal(weights(trainer.model), expected)
    told = "\n".join(caplog.messages)
    assert "checkpoint-6" in told and f"Going on from {folder / 'checkpoint-4'}" in told
    assert defect(folder / "checkpoint-6") is None  # written anew
    spoil(folder / "checkpoint-6" / part)
    with pytest.raises(ValueError, match=r"checkpoint-6.*newest whole one is .*checkpoint-4"):
        trainer.train(resume_from_checkpoint=str(folder / "checkpoint-6"))


def test_nothing_to_go_on_from_is_said(run, target):
    folder, _ = run
    trainer = trainer_for(folder, target, tiny_drafter(target), rows(8), **SAVING, save_only_model=True)
    trainer.train()
    assert sorted(path.name for path in folder.iterdir()) == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]
    with pytest.raises(
        ValueError, match=r"No checkpoint in .*checkpoint-6: it has weights alone \(`save_only_model`\)"
    ):
        trainer.train(resume_from_checkpoint=True)
    shutil.rmtree(folder)
    with pytest.raises(ValueError, match=re.escape(f"No checkpoint in {folder} to go on from. Leave")):
        trainer.train(resume_from_checkpoint=True)
    with pytest.raises(ValueError, match=r"'nowhere', but there is no such folder. There is no whole one in"):
        trainer.train(resume_from_checkpoint="nowhere")


def test_a_checkpoint_of_several_processes_or_shards_is_whole(run):
    folder = run[0] / "checkpoint-6"
    (folder / "optimizer.pt").unlink()
    assert "weights alone" in str(defect(folder))
    for other in ("optimizer_0", "global_step6"):  # FSDP's and DeepSpeed's
        (folder / other).mkdir()
        assert defect(folder) is None
        (folder / other).rmdir()


def test_the_last_file_of_a_checkpoint_is_the_one_that_makes_it_whole(tmp_path, target):
    trainer = trainer_for(tmp_path, target, tiny_drafter(target), rows(4), **{**SAVING, "max_steps": 2})
    trainer.train()
    written = sorted((tmp_path / "checkpoint-2").iterdir(), key=lambda path: path.stat().st_mtime_ns)
    assert {"model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "run.json"} <= {
        path.name for path in written[:-1]
    }
    assert written[-1].name == "trainer_state.json"


@pytest.mark.parametrize("registered", [False, True])
def test_what_a_run_ends_in_has_code_and_its_checkpoints_have_none(tmp_path, target, registered):
    if registered:  # as transformers does once it has loaded a drafter's own code
        HyperDFlashDrafter.register_for_auto_class("AutoModel")
        HyperDFlashConfig.register_for_auto_class()
    trainer = trainer_for(tmp_path, target, tiny_drafter(target), rows(4), **{**SAVING, "max_steps": 2})
    trainer.train()
    trainer.save_model()
    code = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.py")}
    assert {"modeling_hyperdflash.py", "custom_generate/generate.py"} <= code
    assert not any(name.startswith("checkpoint-") for name in code)
    finished, checkpoint = (
        json.loads((path / "config.json").read_text()) for path in (tmp_path, tmp_path / "checkpoint-2")
    )
    assert finished.pop("auto_map") and finished == checkpoint
    loaded = HyperDFlashDrafter.from_pretrained(tmp_path / "checkpoint-2")
    assert torch.equal(weights(loaded), weights(trainer.model))


class Spoil(TrainerCallback):
    def on_step_end(self, args, state, control, model, **kwargs):
        if state.global_step == 4:
            model.norm.weight.data[0] = math.nan


def test_a_checkpoint_of_weights_that_are_not_finite_is_not_written(tmp_path, target):
    trainer = trainer_for(tmp_path, target, tiny_drafter(target), rows(8), **SAVING)
    trainer.add_callback(Spoil())
    with pytest.raises(ValueError, match=r"norm\.weight is not finite at step 4: the drafter diverged.*checkpoint-2"):
        trainer.train()
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-2"]


def test_all_files_of_a_checkpoint_have_the_umasks_mode(tmp_path, target):
    old = os.umask(0o027)
    try:
        trainer = trainer_for(tmp_path / "run", target, tiny_drafter(target), rows(4), **{**SAVING, "max_steps": 2})
        trainer.train()
        trainer.save_model()
    finally:
        os.umask(old)
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    code = {"modeling_hyperdflash.py", "generate.py"}
    assert {*code, "optimizer.pt", "model.safetensors"} <= {path.name for path in files}
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o640}


KILLED = """
import glob, os, random, signal, sys, threading, time
import torch
from tests.conftest import tiny_target
from tests.helpers.training import rows, tiny_drafter, trainer_for, weights
torch.set_num_threads(1)
folder, seed, kills = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
target, chance = tiny_target(), random.Random(seed)

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


# Takes seconds: a process is killed again and again.
def test_a_run_killed_while_it_saves_ends_in_the_same_weights(tmp_path):
    """A real process and SIGKILL, at random moments of its saves: how many depends on how busy the machine is."""
    script = tmp_path / "run.py"
    script.write_text(KILLED)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = python(script, tmp_path, 0, 3, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout.split("killed")[1]) > 0
