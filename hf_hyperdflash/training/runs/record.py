"""Writes `training.json`, the record of a run for the model card, without this machine's folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ...hub.cards import TRAINING_RECORD
from ..arguments import LOSS_WEIGHTS

REPORTED = (
    "learning_rate", "lr_scheduler_type", "per_device_train_batch_size", "gradient_accumulation_steps", "world_size",
    "optim", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm", "bf16", "seed", "recipe",
    "kl_temperature", "kl_teacher", "num_anchors", "loss_decay", "rank_weight", "valid_prefix", "feature_source",
    "feature_dtype", "packing",
)  # fmt: skip


def write_record(trainer: Any, folder: Path) -> None:
    """Write the record of a [`HyperDFlashTrainer`] beside its drafter: settings, last metrics, and the course of
    tau."""
    args, state = trainer.args, trainer.state
    settings = {
        "target": public_name(trainer.target.config._name_or_path),
        **trainer.described,
        **{name: getattr(args, name) for name in REPORTED},
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
