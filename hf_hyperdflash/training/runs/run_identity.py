"""The identity of a run: data, target, drafter and recipe. A run resumes only from its own checkpoints."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypedDict

import torch
from transformers import PreTrainedConfig

from ..arguments import RECIPES, HyperDFlashTrainingArguments
from ..data.messages import Json
from ..features.fingerprint import config_fields
from ..features.store import FeatureCache

RUN_RECORD = "run.json"  # of a checkpoint
# Length, logging, saving, evaluation, batches and learning rate are not here: they may change within a run.
_SETTINGS = ("recipe", *next(iter(RECIPES.values())), "kl_temperature", "kl_teacher", "packing", "optim")


class DataDigest(TypedDict):
    """How many rows there are, and a digest of all of them; `of` says of what: rows or features."""

    rows: int
    sha256: str
    of: str


class DrafterIdentity(TypedDict):
    """What a checkpoint records of its run, without the data."""

    kind: str
    target: str
    target_dtype: str
    drafter: dict[str, Json]
    settings: dict[str, Json]


class RunIdentity(DrafterIdentity):
    """What a checkpoint records of its run; no data of a stream."""

    data: DataDigest | None


def run_identity(
    args: HyperDFlashTrainingArguments,
    config: PreTrainedConfig,
    drafter: str,
    target: str,
    target_dtype: torch.dtype | str,
) -> DrafterIdentity:
    """Return what a checkpoint records of its run, without the data.

    Args:
        args: The run's arguments.
        config: The drafter's configuration.
        drafter: The name of its class.
        target: The fingerprint, as [`~fingerprint.short_fingerprint`] has it.
        target_dtype: The number format that it is loaded in, which may round its weights.
    """
    shape = {**config_fields(config), "num_hidden_layers": getattr(config, "num_hidden_layers", None)}
    settings = {name: getattr(args, name) for name in _SETTINGS}
    facts = {"kind": drafter, "target": target, "target_dtype": str(target_dtype), "drafter": shape}
    return json.loads(json.dumps({**facts, "settings": settings}, default=str))


def data_digest(rows: Any) -> DataDigest | None:
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


def check_same_run(checkpoint: Path, now: RunIdentity) -> bool:
    """Refuse a checkpoint of another run.

    Returns:
        Whether the checkpoint records its run; those of earlier releases do not.

    Raises:
        ValueError: Naming what differs.
    """
    if not (path := checkpoint / RUN_RECORD).is_file():
        return False
    if differs := list(_differences(json.loads(path.read_text(encoding="utf-8")), now)):
        raise ValueError(
            f"{checkpoint} is of another run: {'; '.join(differs)}. Go on with what that run had, or train in another "
            "`output_dir`."
        )
    return True


def _differences(then: RunIdentity, now: RunIdentity) -> Iterator[str]:
    old, new = then["data"], now["data"]
    if old and new and old["of"] == new["of"] and old != new:
        rows = f"{old['rows']} rows then, {new['rows']} now" if old["rows"] != new["rows"] else "as many, other rows"
        yield f"the data differs ({rows})"
    if parts := _changed_target(then, now):
        yield f"the target differs ({', '.join(parts)})"
    if then["kind"] != now["kind"]:
        yield f"its drafter is a {then['kind']}, this one a {now['kind']}"
        return
    for was, is_now in ((then["drafter"], now["drafter"]), (then["settings"], now["settings"])):
        for name in was.keys() & is_now.keys():  # a field of another release is in one of them
            if was[name] != is_now[name]:
                yield f"`{name}` was {was[name]!r} and is {is_now[name]!r}"


def _changed_target(then: RunIdentity, now: RunIdentity) -> list[str]:
    """Return the parts that differ. With another number format only the configuration is compared: weights may be
    rounded."""
    changed = {
        part
        for part, old, new in zip(("head", "body", "config"), then["target"].split(), now["target"].split())
        if "-" not in (old, new) and old != new
    }
    facts = {"its configuration"} if "config" in changed else set()
    if then["target_dtype"] == now["target_dtype"] and changed & {"head", "body"}:
        facts.add("its weights")
    return sorted(facts)
