"""Several processes under `accelerate launch` train as one does, and go on from each other's checkpoints."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from hf_hyperdflash import load_drafter

from ..conftest import MODELS
from .test_script import chats, write

pytestmark = pytest.mark.nightly  # each process imports transformers anew
ROOT = Path(__file__).parents[2]
KINDS = {
    "hyperdflash": ["--sequential_head", "state", "--head_rank", "8", "--confidence_head"],
    "eagle3": ["--drafter_type", "eagle3", "--recipe", "eagle3", "--target_layer_ids", "0", "1", "2"],
    "peagle": ["--drafter_type", "peagle", "--layers", "2", "--recipe", "eagle3", "--target_layer_ids", "0", "1", "2"],
    "specblock": ["--drafter_type", "specblock", "--recipe", "specblock", "--target_layer_ids", "0", "1", "2"],
}
GLOBAL_BATCH = 4


def command(folder: Path, kind: str, processes: int, how: str = "", **flags) -> list[str]:
    """Of `processes` processes, by the way `how`, one of the files of examples/accelerate."""
    rows = folder.parent / "rows.jsonl"
    if not rows.exists():
        write(rows, [chat for i in range(1, 10) for chat in chats(2, " it is" * i)])
    values = dict(
        target=MODELS / "tiny-deepseek-v4", dataset=rows, output_dir=folder, report_to="none", layers=1, max_steps=4,
        eval_rows=2, eval_prompts=1, eval_max_new_tokens=4, num_anchors=4, logging_steps=1, save_steps=2,
        per_device_train_batch_size=GLOBAL_BATCH // processes, save_dtype="float32", learning_rate=1e-3,
    ) | flags  # fmt: skip
    given = [part for name, value in values.items() for part in (f"--{name}", str(value))]
    train = ["train", *given, "--use_cpu", *KINDS[kind]]
    if not how:
        return [sys.executable, "-m", "hf_hyperdflash.cli.app", *train]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launch = ["-m", "accelerate.commands.launch", "--config_file", ROOT / "examples" / "accelerate" / f"{how}.yaml"]
    several = ["--num_processes", processes, "--mixed_precision", "no", "--main_process_port", port]
    return [sys.executable, *map(str, [*launch, *several, "--module", "tests.helpers.on_several_cpus"]), *train]


ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


def train(folder: Path, *args, **flags) -> Path:
    done = subprocess.run(command(folder, *args, **flags), env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def curve(folder: Path) -> list[dict[str, float]]:
    """What was logged of each step and of the evaluation, without times."""
    history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    timed = ("runtime", "per_second", "flos", "epoch", "train_loss")  # the last is of this call's steps
    return [
        {name: value for name, value in line.items() if not any(part in name for part in timed)} for line in history
    ]


def assert_same_run(found: Path, wanted: Path):
    for ours, theirs in zip(curve(found), curve(wanted), strict=True):
        # The mean over a process's batches is no figure of ours: batches of another number of rows have another.
        ours, theirs = ({k: v for k, v in line.items() if k != "eval_loss"} for line in (ours, theirs))
        assert ours == pytest.approx(theirs, rel=2e-4, abs=1e-6)
    states = [load_drafter(folder, dtype=torch.float32).state_dict() for folder in (found, wanted)]
    for name, value in states[1].items():
        torch.testing.assert_close(states[0][name], value, atol=2e-5, rtol=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_several_processes_train_as_one(tmp_path, kind):
    one = train(tmp_path / "one", kind, 1)
    for how, processes in (("ddp", 2), ("fsdp2", 2), ("ddp", 4), ("fsdp2", 4)):
        assert_same_run(train(tmp_path / f"{how}-{processes}", kind, processes, how), one)


@pytest.mark.parametrize("kind", KINDS)
def test_zero3_trains_as_one(tmp_path, kind):
    """DeepSpeed compiles what its processes exchange with, the first time."""
    pytest.importorskip("deepspeed")
    assert_same_run(train(tmp_path / "two", kind, 2, "zero3"), train(tmp_path / "one", kind, 1))


def as_if_stopped(folder: Path, step: int) -> Path:
    """A copy of a run as it was at a step."""
    copy = folder.with_name(f"{folder.name}-stopped")
    shutil.copytree(folder / f"checkpoint-{step}", copy / f"checkpoint-{step}")
    return copy


def test_another_number_of_processes_goes_on_from_a_checkpoint(tmp_path):
    on = dict(resume_from_checkpoint="true")
    one = train(tmp_path / "one", "hyperdflash", 1)
    assert_same_run(train(as_if_stopped(one, 2), "hyperdflash", 4, "ddp", **on), one)
    for how, number in (("ddp", 1), ("fsdp2", 4)):
        two = as_if_stopped(train(tmp_path / how, "hyperdflash", 2, how), 2)
        assert_same_run(train(two, "hyperdflash", number, how if number > 1 else "", **on), one)


def test_a_checkpoint_of_fsdp_goes_on_with_fsdp_alone(tmp_path):
    """Which is said before any work, with what can be done."""
    for how, other, number in (("fsdp2", "", 1), ("ddp", "fsdp2", 2)):
        folder = as_if_stopped(train(tmp_path / how, "hyperdflash", 2, how), 2)
        refused = command(folder, "hyperdflash", number, other, resume_from_checkpoint="true")
        done = subprocess.run(refused, env=ENVIRONMENT, capture_output=True, text=True)
        (told,) = [line for line in done.stderr.splitlines() if line.startswith("Error: ")]
        assert done.returncode and "FSDP" in told and f"--drafter {folder}/checkpoint-2" in told


@pytest.mark.parametrize(("how", "rank"), [("ddp", 0), ("ddp", 1), ("fsdp2", 1)])
def test_a_process_that_dies_ends_the_run_in_a_line_and_a_checkpoint_stays(tmp_path, how, rank):
    folder = tmp_path / "out"
    with subprocess.Popen(
        command(folder, "hyperdflash", 2, how, max_steps=10_000), env=ENVIRONMENT, stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL, text=True,
    ) as launched:  # fmt: skip
        while not (folder / "checkpoint-4" / "trainer_state.json").exists():
            assert launched.poll() is None, launched.stderr.read()[-3000:]
            time.sleep(0.1)
        workers = [each for each in psutil.Process(launched.pid).children(recursive=True) if "RANK" in each.environ()]
        (chosen,) = [each for each in workers if each.environ()["RANK"] == str(rank)]
        os.kill(chosen.pid, signal.SIGKILL)
        told = launched.communicate(timeout=60)[1]
    assert launched.returncode
    others = [line for line in told.splitlines() if line.startswith(("Error", "Stopped"))]
    last = max(folder.glob("checkpoint-*/trainer_state.json"), key=lambda path: int(path.parent.name[11:])).parent
    assert len(others) <= 1 and all("resume_from_checkpoint" in line and last.name in line for line in others), others
    if how == "ddp":  # from FSDP's checkpoint only FSDP goes on
        on = dict(max_steps=int(last.name[11:]) + 1, resume_from_checkpoint="true")
        assert curve(train(folder, "hyperdflash", 1, **on))
