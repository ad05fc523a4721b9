"""Finds complete checkpoints, so that a run that was killed while it saved one can be resumed."""

from __future__ import annotations

import json
import re
import shutil
import stat
from pathlib import Path
from typing import Literal

from transformers.trainer import TRAINER_STATE_NAME

from ...hub.cards import TRAINING_RECORD

CHECKPOINT = re.compile(r"checkpoint-\d+")  # the name of one
# What has the optimizer's state: of one process, several, FSDP or DeepSpeed.
_OPTIMIZERS = ("optimizer*", "*-optimizer.pt", "global_step*")


def defect(folder: Path) -> str | None:
    """Return why a run cannot resume from a checkpoint of transformers' `Trainer`; `None` if it can."""
    if not folder.is_dir():
        return "there is no such folder"
    try:  # all others are whole once this is: it is written last
        json.loads((folder / TRAINER_STATE_NAME).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return f"its {TRAINER_STATE_NAME}, which is written last, is not there or not whole"
    if not any(any(folder.glob(pattern)) for pattern in _OPTIMIZERS):
        return "it has weights alone (`save_only_model`): begin a new run with them as its drafter"
    return None


def newest_complete(output_dir: Path) -> tuple[Path | None, list[str]]:
    """Return the newest complete checkpoint, and a line for every newer one that is not complete."""
    skipped: list[str] = []
    for folder in checkpoints(output_dir):
        reason = defect(folder)
        if reason is None:
            return folder, skipped
        skipped.append(f"{folder}: {reason}")
    return None, skipped


def checkpoint_to_resume(wanted: str | Literal[True], output_dir: Path) -> tuple[Path, list[str]]:
    """Return the checkpoint to resume from, the `wanted` folder or the newest whole one (`True`), and a line for every
    newer one that is skipped. Raise a `ValueError` if there is none, or the wanted one is not whole."""
    last, skipped = newest_complete(output_dir)
    if wanted is not True:
        if (reason := defect(Path(wanted))) is None:
            return Path(wanted), []
        instead = f"The newest whole one is {last}." if last else f"There is no whole one in {output_dir}."
        raise ValueError(f"`resume_from_checkpoint` is {str(wanted)!r}, but {reason}. {instead}")
    if last is None:
        found = f": {'; '.join(skipped)}" if skipped else ""
        raise ValueError(
            f"No checkpoint in {output_dir} to go on from{found}. Leave `resume_from_checkpoint` out to begin anew."
        )
    return last, skipped


def checkpoints(output_dir: Path) -> list[Path]:
    """Return all checkpoints, complete or not, the newest first."""
    named = [path for path in output_dir.glob("checkpoint-*") if CHECKPOINT.fullmatch(path.name)]
    return sorted(named, key=lambda path: int(path.name.partition("-")[2]), reverse=True)


def describe_earlier_run(output_dir: Path) -> str | None:
    """Describe what a folder has of an earlier run; `None` if it has nothing."""
    if named := checkpoints(output_dir):
        return f"{len(named)} checkpoint{'s' * (len(named) > 1)} of an earlier run, up to {named[0].name}"
    if (output_dir / TRAINING_RECORD).exists() or any(output_dir.glob("*.safetensors")):
        return "a trained drafter"
    return None


def remove_checkpoint(folder: Path) -> None:
    """Remove a checkpoint, if it is there, first the file that makes it whole."""
    (folder / TRAINER_STATE_NAME).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def apply_umask(folder: Path) -> None:
    """Give the weights and code of `save_model` the file mode that the umask gives to the other files of a run:
    safetensors makes its files readable for their owner alone, and code has the mode of the installed package."""
    mode = stat.S_IMODE((folder / "training_args.bin").stat().st_mode)
    for pattern in ("*.safetensors", "*.py", "custom_generate/*.py"):
        for path in folder.glob(pattern):
            path.chmod(mode)
