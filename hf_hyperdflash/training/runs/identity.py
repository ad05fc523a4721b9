"""Which run a checkpoint is of, so that none goes on from another's: data, target, drafter and recipe."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from ..arguments import RECIPES, HyperDFlashTrainingArguments
from ..features.fingerprint import config_fields
from ..features.store import FeatureCache

RUN_RECORD = "run.json"  # of a checkpoint
# How long a run is, what it logs, saves and evaluates, its batches and its learning rate may change on the way.
_SETTINGS = ("recipe", *next(iter(RECIPES.values())), "kl_temperature", "kl_teacher", "packing", "optim")


def identity(
    args: HyperDFlashTrainingArguments, config: PreTrainedConfig, drafter: str, target: str, target_dtype: Any
) -> dict[str, Any]:
    """What a checkpoint records of its run, beside its data.

    Args:
        args: Of the run.
        config: The drafter's.
        drafter: Its kind.
        target: The fingerprint, as [`~fingerprint.as_words`] has it.
        target_dtype: The format it is loaded in, which may round its weights.
    """
    shape = {**config_fields(config), "num_hidden_layers": getattr(config, "num_hidden_layers", None)}
    settings = {name: getattr(args, name) for name in _SETTINGS}
    told = {"kind": drafter, "target": target, "target_dtype": str(target_dtype), "drafter": shape}
    return json.loads(json.dumps({**told, "settings": settings}, default=str))


def data_digest(rows: Any) -> dict[str, Any] | None:
    """How many rows there are and a digest of all of them; `None` for a stream."""
    if isinstance(rows, FeatureCache):
        return {"rows": len(rows), "sha256": rows.index["rows_sha256"], "of": "features"}
    if not hasattr(rows, "__len__"):
        return None
    digest = hashlib.sha256()
    for batch in rows.with_format("arrow").iter(batch_size=1000):
        for name in ("input_ids", "loss_mask"):
            for chunk in batch.column(name).chunks:
                digest.update(chunk.value_lengths().to_numpy(zero_copy_only=False).tobytes())
                digest.update(chunk.flatten().to_numpy(zero_copy_only=False).tobytes())
    return {"rows": len(rows), "sha256": digest.hexdigest(), "of": "rows"}


def check_same_run(checkpoint: Path, now: dict[str, Any]) -> bool:
    """Refuse a checkpoint of another run.

    Returns:
        Whether it says which run it is of: those of earlier releases do not.

    Raises:
        ValueError: Naming what differs.
    """
    if not (path := checkpoint / RUN_RECORD).is_file():
        return False
    if differs := list(_differences(json.loads(path.read_text()), now)):
        raise ValueError(
            f"{checkpoint} is of another run: {'; '.join(differs)}. Go on with what that run had, or train in another "
            "`output_dir`."
        )
    return True


def _differences(then: dict[str, Any], now: dict[str, Any]) -> Iterator[str]:
    old, new = then["data"], now["data"]
    if old and new and old["of"] == new["of"] and old != new:
        rows = f"{old['rows']} rows then, {new['rows']} now" if old["rows"] != new["rows"] else "as many, other rows"
        yield f"the data differs ({rows})"
    if parts := _changed_target(then, now):
        yield f"the target differs ({', '.join(parts)})"
    if then["kind"] != now["kind"]:
        yield f"its drafter is a {then['kind']}, this one a {now['kind']}"
        return
    for part in ("drafter", "settings"):
        for name in then[part].keys() & now[part].keys():  # a field of another release is in one of them
            if then[part][name] != now[part][name]:
                yield f"`{name}` was {then[part][name]!r} and is {now[part][name]!r}"


def _changed_target(then: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """In what it differs. Another number format may round the weights, so that only its configuration tells."""
    changed = {
        part
        for part, old, new in zip(("head", "body", "config"), then["target"].split(), now["target"].split())
        if "-" not in (old, new) and old != new
    }
    told = {"its configuration"} if "config" in changed else set()
    if then["target_dtype"] == now["target_dtype"] and changed & {"head", "body"}:
        told.add("its weights")
    return sorted(told)
