"""Writes a drafter's model card from facts: its configuration, its training record, and a benchmark of it.

What is not known is left out. [`~benchmark.report.measured`] reads a benchmark for it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from huggingface_hub import EvalResult, ModelCard, ModelCardData
from safetensors import safe_open
from transformers import PreTrainedConfig

from ..drafters.adapters import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from ..drafters.saved import about_code
from ..drafters.weights import weight_files
from .found import check_drafter
from .kinds import KINDS, describe

TRAINING_RECORD, PICTURE = "training.json", "acceptance.png"
# The template is only in the package: a drafter that is pushed by code from the Hub gets no new card.
TEMPLATE = Path(__file__).parent / "templates" / "model_card.md"
_SETTINGS = {
    "drafter": "goes on from",
    "dataset": "data",
    "rows": "most rows of each dataset",
    "train_rows": "rows trained on",
    "held_out_rows": "rows held out",
    "num_train_epochs": "epochs",
    "epochs": "epochs",
    "max_steps": "steps",
    "steps": "steps",
    "per_device_train_batch_size": "rows a step and device",
    "gradient_accumulation_steps": "accumulated steps",
    "world_size": "devices",
    "max_length": "tokens a row, at most",
    "num_anchors": "anchors a row",
    "optim": "optimizer",
    "learning_rate": "peak learning rate",
    "lr_scheduler_type": "schedule",
    "schedule_steps": "steps of the schedule",
    "warmup_steps": "warm-up steps",
    "weight_decay": "weight decay",
    "adam_beta1": "Adam's first beta",
    "adam_beta2": "Adam's second beta",
    "adam_epsilon": "Adam's epsilon",
    "max_grad_norm": "gradients clipped to norm",
    "recipe": "loss",
    "ce_weight": "cross-entropy weight",
    "tv_weight": "total variation weight",
    "confidence_weight": "confidence weight",
    "blind_weight": "weight of the block's own cross-entropy",
    "kl_weight": "KL weight",
    "kl_positions": "KL positions",
    "kl_teacher": "KL teacher",
    "loss_decay": "decay of position weights",
    "feature_dtype": "stored features",
    "seed": "seed",
}


@dataclass
class Measured:
    """A benchmark for a card."""

    settings: str  # a paragraph with method, prompts, hardware, versions and date
    tables: str  # in Markdown
    results: list[EvalResult] = field(default_factory=list)  # entries of the card's `model-index`
    speedups: list[float] = field(default_factory=list)  # the suites' average, for each mode and temperature


def drafter_card(
    folder: str | Path,
    *,
    repo_id: str | None = None,
    target: str | None = None,
    license: str | None = None,
    tags: Sequence[str] | None = None,
    dtype: str = "auto",
    measured: Measured | None = None,
    figure: str | None = None,
    notes: str | None = None,
    limits: str | None = None,
) -> ModelCard:
    """Return the card of the drafter saved in `folder`, with the record of its training if there is one.

    `repo_id` and `target` are the names that users load both by, `figure` is an address relative to the card, `notes`
    are more about the training than the record has, and `limits` say where the drafter does not do well.
    """
    folder = Path(folder)
    found = check_drafter(folder, kinds=KINDS, needs_weights=False)
    config = cast(PreTrainedConfig, found.config)
    record = folder / TRAINING_RECORD
    training = json.loads(record.read_text(encoding="utf-8")) if record.is_file() else {}
    repo_id = repo_id or str(folder)
    made_for = getattr(config, "target_name_or_path", "")
    drafts_for = getattr(config, "target_model_type", found.kind.drafter.target_model_type)
    described = describe(config)
    settings = dict(training.get("settings", {}))
    sources = [source.partition(":")[0] for source in settings.get("dataset") or ()]
    # Steps end a training, or epochs: only what did is told.
    settings.pop("num_train_epochs" if settings.get("max_steps", -1) > 0 else "max_steps", None)
    taus = {"by real generation": "eval_tau", "by the teacher-forced walk": "eval_teacher_forced_tau"}
    metrics = training.get("metrics", {})
    outcome = ", ".join(f"{metrics[name]:.2f} {how}" for how, name in taus.items() if name in metrics)
    data = ModelCardData(
        base_model=made_for if is_hub_name(made_for) else None,
        license=license,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["hyperdflash", "speculative-decoding", *filter(None, [drafts_for]), *(tags or ())],
        datasets=list(filter(is_hub_name, sources)) or None,
        model_name=Path(repo_id).name,
        eval_results=(measured.results if measured else None) or None,
    )
    return ModelCard.from_template(
        data,
        template_path=str(TEMPLATE),
        name=Path(repo_id).name,
        repo_id=repo_id,
        is_on_hub=is_hub_name(repo_id),
        target=target or made_for or "TARGET",
        target_link=f"[{made_for}](https://huggingface.co/{made_for})"
        if is_hub_name(made_for)
        else Path(made_for).name or "its target",
        target_revision=getattr(config, "target_revision", ""),
        drafts=described.drafts,
        sentences=described.sentences,
        shares_all=described.shares_all,
        parameters=_parameters(folder),
        dtype=dtype,
        recipe=[(label, _text(settings[name])) for name, label in _SETTINGS.items() if settings.get(name) is not None],
        outcome=f"Tau on the held-out prompts at the end of training: {outcome}." if outcome else None,
        measured=measured,
        figure=figure if measured else None,
        notes=notes,
        code=about_code(config.hyperdflash_version) if getattr(config, "auto_map", None) else "",
        limits=limits
        or "Works with that target only, and drafts best for text like what it was trained on; the text stays the "
        "target's own either way.",
    )


def adapter_card(
    folder: str | Path, *, repo_id: str | None = None, license: str | None = None, tags: Sequence[str] | None = None
) -> ModelCard:
    """Return the card of the adapter of a drafter that is saved in `folder`, which users load by `repo_id`."""
    folder = Path(folder)
    repo_id = repo_id or str(folder)
    fields = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    base = fields.get("base_model_name_or_path") or ""
    with safe_open(folder / ADAPTER_WEIGHTS, "pt") as file:
        count = sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())
    name = Path(repo_id).name
    data = ModelCardData(
        base_model=base if is_hub_name(base) else None,
        license=license,
        library_name="peft",
        tags=["hyperdflash", "speculative-decoding", "lora", *(tags or ())],
        model_name=name,
    )
    loads = base if is_hub_name(base) else "DRAFTER"
    return ModelCard(f"""---
{data.to_yaml()}
---

# {name}

A LoRA adapter of rank {fields["r"]}, {count:,} parameters, of {Path(base).name or "a drafter"}.
The target verifies each draft, so the text stays the target's own.

```python
from hf_hyperdflash import load_drafter

drafter = load_drafter("{loads}", target=target)
drafter.load_adapter("{repo_id}", "{name.replace(".", "-")}")
drafter.bind(target)
out = target.generate(**inputs, assistant_model=drafter, adapter="{name.replace(".", "-")}")
```

PEFT's own `PeftModel.from_pretrained(drafter, "{repo_id}").merge_and_unload()` makes it a part of the drafter.
""")


def has_whole_modules(folder: Path) -> bool:
    """Return whether an adapter in `folder` is PEFT's alone, with more than LoRA of linear layers."""
    fields = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    return fields.get("peft_type") != "LORA" or bool(fields.get("modules_to_save"))


def _parameters(folder: Path) -> str | None:
    count = 0
    for shard in weight_files(folder):
        with safe_open(folder / shard, "pt") as file:
            count += sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())
    return f"{count:,}" if count else None


def is_hub_name(name: str) -> bool:
    """Return whether a name is `org/name`, and not a file or folder of this machine."""
    return bool(re.fullmatch(r"\w[\w.-]*/[\w.-]+", name)) and not Path(name).exists()


def _text(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(map(_text, value))
    return (
        f"{value:,}"
        if isinstance(value, int) and not isinstance(value, bool)
        else f"{value:g}"
        if isinstance(value, float)
        else str(value)
    )
