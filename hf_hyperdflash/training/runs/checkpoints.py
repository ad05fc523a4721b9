"""Finds complete checkpoints, so that a run that was killed while it saved one can be resumed."""

from __future__ import annotations

import json
import re
import shutil
import stat
import zipfile
from pathlib import Path
from typing import Literal

from safetensors import SafetensorError, safe_open

from ...hub.cards import TRAINING_RECORD

# Each part has to have a file of one pattern: as one process, several, FSDP or DeepSpeed (`global_step*`) write it.
_PARTS = {
    "weights": ("*.safetensors", "*/adapter_model.safetensors", "pytorch_model_fsdp*", "global_step*"),
    "optimizer": ("optimizer*", "*-optimizer.pt", "global_step*"),
    "schedule": ("scheduler.pt", "global_step*"),
    "random state": ("rng_state*.pth",),
    "trainer state": ("trainer_state.json",),
}
CHECKPOINT = re.compile(r"checkpoint-\d+")  # the name of one


def defect(folder: Path) -> str | None:
    """Return why a run cannot resume from a checkpoint; `None` if it can.

    Args:
        folder: A checkpoint of transformers' `Trainer`, alone or with FSDP or DeepSpeed.
    """
    if not folder.is_dir():
        return "there is no such folder"
    missing = [part for part, patterns in _PARTS.items() if not any(any(folder.glob(name)) for name in patterns)]
    if missing == ["optimizer", "schedule", "random state"]:
        return "it has weights alone (`save_only_model`): begin a new run with them as its drafter"
    if missing:
        return f"it has no {', no '.join(missing)}"
    broken = [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if _is_truncated(path)]
    return f"{', '.join(broken)} cannot be read" if broken else None


def _is_truncated(path: Path) -> bool:
    """Return whether a file ends too early, because its process was killed. Its content is not read."""
    if path.suffix in (".pt", ".pth"):
        return not zipfile.is_zipfile(path)  # looks for the directory at the end, which `torch.save` writes last
    try:
        if path.suffix == ".safetensors":
            with safe_open(path, "pt"):  # compares the header with the file's length
                return False
        if path.suffix == ".json":
            json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, SafetensorError):
        return True
    return False


def newest_complete(output_dir: Path) -> tuple[Path | None, list[str]]:
    """Return the newest complete checkpoint, and a line for every newer one that is not complete."""
    skipped: list[str] = []
    for folder in _checkpoints(output_dir):
        reason = defect(folder)
        if reason is None:
            return folder, skipped
        skipped.append(f"{folder}: {reason}")
    return None, skipped


def checkpoint_to_resume(wanted: str | Literal[True], output_dir: Path) -> tuple[Path, list[str]]:
    """Return the checkpoint to resume from, and a line for every newer one that is skipped.

    Args:
        wanted: A checkpoint's folder, or `True` for the newest whole one.
        output_dir: The run's.

    Raises:
        ValueError: If there is none, or the wanted one is not complete.
    """
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


def _checkpoints(output_dir: Path) -> list[Path]:
    """Return all checkpoints, complete or not, the newest first."""
    named = [path for path in output_dir.glob("checkpoint-*") if CHECKPOINT.fullmatch(path.name)]
    return sorted(named, key=lambda path: int(path.name.partition("-")[2]), reverse=True)


def describe_earlier_run(output_dir: Path) -> str | None:
    """Describe what a folder has of an earlier run; `None` if it has nothing."""
    if named := _checkpoints(output_dir):
        return f"{len(named)} checkpoint{'s' * (len(named) > 1)} of an earlier run, up to {named[0].name}"
    if (output_dir / TRAINING_RECORD).exists() or any(output_dir.glob("*.safetensors")):
        return "a trained drafter"
    return None


def remove_checkpoints(output_dir: Path) -> None:
    """Remove the checkpoints of an earlier run. Its drafter stays until this run has one."""
    for folder in _checkpoints(output_dir):
        shutil.rmtree(folder)


def apply_umask(folder: Path) -> None:
    """Give the weights and code of `save_model` the file mode that the umask gives to the other files of a run.

    safetensors makes its files readable for their owner alone, and code has the mode of the installed package.
    """
    mode = stat.S_IMODE((folder / "training_args.bin").stat().st_mode)
    for pattern in ("*.safetensors", "*.py", "custom_generate/*.py"):
        for path in folder.glob(pattern):
            path.chmod(mode)
