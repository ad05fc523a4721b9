"""The identity of a run: data, target, drafter and recipe. A run resumes only from its own checkpoints."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, TypeAlias

from ..arguments import RECIPES
from ..features.fingerprint import PARTS, config_fields
from ..features.store import FeatureCache

Identity: TypeAlias = dict[str, Any]
RUN_RECORD = "run.json"  # of a checkpoint
# Length, logging, saving, evaluation, batches and learning rate are not here: they may change within a run.
_SETTINGS = ("recipe", *next(iter(RECIPES.values())), "kl_temperature", "kl_teacher", "packing", "optim")


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
