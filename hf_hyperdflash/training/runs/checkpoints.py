"""The folder of a training run: its checkpoints, which record what run they are of and of which a killed run goes on
from the newest whole one, and the record for the model card."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import stat
from pathlib import Path
from typing import Any, Literal, TypeAlias

from transformers.trainer import TRAINER_STATE_NAME, TRAINING_ARGS_NAME

from ...hub.cards import TRAINING_RECORD
from ..arguments import LOSS_WEIGHTS, RECIPES
from ..features.fingerprint import PARTS, config_fields
from ..features.store import FeatureCache

Identity: TypeAlias = dict[str, Any]

CHECKPOINT = re.compile(r"checkpoint-\d+")  # the name of one
# What has the optimizer's state: of one process, several, FSDP or DeepSpeed.
_OPTIMIZERS = ("optimizer*", "*-optimizer.pt", "global_step*")
RUN_RECORD = "run.json"  # of a checkpoint
# Length, logging, saving, evaluation, batches and learning rate are not here: they may change within a run.
_SETTINGS = ("recipe", *next(iter(RECIPES.values())), "kl_temperature", "kl_teacher", "packing", "optim")
_REPORTED = (
    "learning_rate", "lr_scheduler_type", "per_device_train_batch_size", "gradient_accumulation_steps", "world_size",
    "optim", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm", "bf16", "seed", "recipe",
    "kl_temperature", "kl_teacher", "num_anchors", "loss_decay", "rank_weight", "valid_prefix", "block_first",
    "kl_by_token", "feature_source", "feature_dtype", "packing",
)  # fmt: skip


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
    mode = stat.S_IMODE((folder / TRAINING_ARGS_NAME).stat().st_mode)
    for pattern in ("*.safetensors", "*.py", "custom_generate/*.py"):
        for path in folder.glob(pattern):
            path.chmod(mode)


def run_identity(trainer: Any) -> Identity:
    """Return what a checkpoint of a [`HyperDFlashTrainer`] records of its run. The number format may round the
    target's weights."""
    args, config = trainer.args, trainer.drafter_config
    identity = {
        "data": trainer.data_digest,
        "kind": trainer.drafter_kind,
        "target": trainer.target_fingerprint,
        "target_dtype": str(trainer.target.dtype),
        "drafter": {**config_fields(config), "num_hidden_layers": getattr(config, "num_hidden_layers", None)},
        "settings": {**{name: getattr(args, name) for name in _SETTINGS}, "max_length": trainer.max_length},
    }
    return json.loads(json.dumps(identity, default=str))


def data_digest(rows: Any) -> Identity | None:
    """Return the number of rows and a digest of all of them; `None` for a stream."""
    if isinstance(rows, FeatureCache):
        return {"rows": len(rows), "sha256": rows.digest, "of": "parts"}
    if not hasattr(rows, "__len__"):
        return None
    digest = hashlib.sha256()
    for batch in rows.with_format("arrow").iter(batch_size=1000):
        for name in ("input_ids", "loss_mask"):
            for chunk in batch.column(name).chunks:
                digest.update(chunk.value_lengths().to_numpy(zero_copy_only=False).tobytes())
                digest.update(chunk.flatten().to_numpy(zero_copy_only=False).tobytes())
    return {"rows": len(rows), "sha256": digest.hexdigest(), "of": "rows"}


def check_same_run(checkpoint: Path, now: Identity) -> bool:
    """Raise a `ValueError` that names what differs if a checkpoint is of another run. Return whether the checkpoint
    records its run; those of earlier releases do not."""
    if not (path := checkpoint / RUN_RECORD).is_file():
        return False
    then = json.loads(path.read_text(encoding="utf-8"))
    differs, old, new = [], then["data"], now["data"]
    if old and new and old["of"] == new["of"] and old != new:
        rows = f"{old['rows']} rows then, {new['rows']} now" if old["rows"] != new["rows"] else "as many, other rows"
        differs.append(f"the data differs ({rows})")
    parts = zip(PARTS, then["target"].split(), now["target"].split())
    changed = {part for part, was, is_now in parts if "-" not in (was, is_now) and was != is_now}
    if then["target_dtype"] != now["target_dtype"]:
        changed &= {"config"}  # weights may be rounded
    if changed:
        words = {"its configuration" if part == "config" else "its weights" for part in changed}
        differs.append(f"the target differs ({', '.join(sorted(words))})")
    if then["kind"] != now["kind"]:
        differs.append(f"its drafter is a {then['kind']}, this one a {now['kind']}")
    else:
        for group in ("drafter", "settings"):
            for name in then[group].keys() & now[group].keys():  # a field of another release is in one of them
                if then[group][name] != now[group][name]:
                    differs.append(f"`{name}` was {then[group][name]!r} and is {now[group][name]!r}")
    if differs:
        raise ValueError(
            f"{checkpoint} is of another run: {'; '.join(differs)}. Go on with what that run had, or train in another "
            "`output_dir`."
        )
    return True


def write_record(trainer: Any, folder: Path) -> None:
    """Write the record of a [`HyperDFlashTrainer`] beside its drafter: settings, last metrics, and the course of
    tau."""
    args, state = trainer.args, trainer.state
    settings = {
        "target": public_name(trainer.target.config._name_or_path),
        **trainer.described,
        **{name: getattr(args, name) for name in _REPORTED},
        **{name: getattr(trainer.objective.terms, name) for name in LOSS_WEIGHTS},
        "max_length": trainer.max_length,
        "kl_positions": trainer.objective.kl_positions or None,
        "num_draft_tokens": trainer.drafter_config.max_draft_tokens,
        "steps": state.global_step,
        "schedule_steps": state.max_steps,  # more if the run was stopped early
        "warmup_steps": args.get_warmup_steps(state.max_steps),
        "epochs": round(state.epoch or 0, 3),
        "train_rows": _row_count(trainer.train_dataset),
        "held_out_rows": _row_count(trainer.eval_dataset),
    }
    history = [line for line in state.log_history if "eval_tau" in line]
    facts = {"settings": settings, "metrics": trainer.measured, "history": history}
    (folder / TRAINING_RECORD).write_text(json.dumps(facts, indent=1, default=str))


def _row_count(rows: object) -> int | None:
    if isinstance(rows, dict):
        return sum(_row_count(part) or 0 for part in rows.values())
    return len(rows) if hasattr(rows, "__len__") else None


def public_name(source: str) -> str:
    """Return a Hub name unchanged, a path without its folders."""
    return Path(source).name if Path(source).exists() else source
