"""A drafter's model card, from facts alone: its configuration, its training record, a benchmark of it.

What is not known is left out. It knows nothing of how benchmarks are read ([`~benchmark.report.measured`] does).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from huggingface_hub import EvalResult, ModelCard, ModelCardData
from safetensors import safe_open

from ..runtime.configuration_hyperdflash import HyperDFlashConfig
from ..runtime.weights import weight_files

TRAINING_RECORD, PICTURE = "training.json", "acceptance.png"
# Only in the package: drafters that are pushed on by code from the Hub get no new card.
TEMPLATE = Path(__file__).parent / "templates" / "model_card.md"
_REDUCERS = {
    "hc_gate": "Its reducer is HyperDFlash's gate, inherited from the target's `hc_head`, over {layers}.",
    "fc": "Its reducer is `fc`, the dense projection of DFlash, over {layers}.",
    "hybrid": "Its reducer is `hybrid`, an extension of HyperDFlash: the paper's gate, inherited from the target's "
    "`hc_head`, on the last layer read, plus a normed dense projection of the others; it reads {layers}.",
    "stream_mean": "Its reducer is the mean over the residual paths and a projection, over {layers}.",
}
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
    """A benchmark as a card shows it.

    Attributes:
        settings: Method, prompts, hardware, versions and date, a paragraph.
        tables: Markdown.
        results: For the card's `model-index`.
    """

    settings: str
    tables: str
    results: list[EvalResult] = field(default_factory=list)


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
    """The card of the drafter saved in `folder`.

    Args:
        folder: With `config.json` and, if it is known how the drafter was trained, `training.json`.
        repo_id: Where users will load it from; the folder by default.
        target: Where users load the target from; the configuration's `target_name_or_path` by default.
        license: A Hub licence name.
        tags: Beside the card's own.
        dtype: Of the target in the usage snippet.
        measured: From [`~benchmark.report.measured`].
        figure: Path or address of the acceptance figure, as seen from the card.
        notes: How the drafter was trained, beside the training record.
        limits: Where it does not do well.

    Raises:
        ValueError: If the folder's configuration is no drafter's.
        OSError: If there is none.
    """
    folder = Path(folder)
    config = cast(HyperDFlashConfig, HyperDFlashConfig.from_dict(json.loads((folder / "config.json").read_text())))
    record = folder / TRAINING_RECORD
    training = json.loads(record.read_text()) if record.is_file() else {}
    repo_id = repo_id or str(folder)
    made_for = config.target_name_or_path
    data = ModelCardData(
        base_model=made_for if "/" in made_for else None,
        license=license,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["hyperdflash", "speculative-decoding", config.target_model_type, *(tags or ())],
        datasets=_hub_names(training.get("settings", {}).get("dataset")) or None,
        model_name=Path(repo_id).name,
        eval_results=(measured.results if measured else None) or None,
    )
    return ModelCard.from_template(
        data,
        template_path=str(TEMPLATE),
        name=Path(repo_id).name,
        repo_id=repo_id,
        target=target or made_for or "TARGET",
        target_link=f"[{made_for}](https://huggingface.co/{made_for})"
        if "/" in made_for
        else made_for or "its target",
        target_revision=config.target_revision,
        num_drafts=config.max_draft_tokens,
        reducer=_REDUCERS[config.reducer].format(layers=_layers(config)),
        heads=_heads(config),
        parameters=_parameters(folder),
        dtype=dtype,
        recipe=_recipe(training.get("settings", {})),
        outcome=_outcome(training.get("metrics", {})),
        measured=measured,
        figure=figure if measured else None,
        notes=notes,
        limits=limits
        or "Works with that target only, and drafts best for text like what it was trained on; the text stays the "
        "target's own either way.",
    )


def _layers(config: HyperDFlashConfig) -> str:
    ids = config.target_layer_ids or []
    before = [str(layer) for layer in ids if layer != -1]
    named = " and ".join(filter(None, [", ".join(before[:-1]), *before[-1:]]))
    parts = [f"the residual paths after layer{'s' if len(before) > 1 else ''} {named}"] if before else []
    return " and ".join([*parts, *(["the pre-collapse residual"] if -1 in ids else [])])


def _heads(config: HyperDFlashConfig) -> list[str]:
    told = []
    if config.sequential_head != "none":
        of = f", which chooses among the block's {count} best tokens" if (count := config.head_candidates) else ""
        told.append(
            f"Each draft knows the one before it through a `{config.sequential_head}` head of width "
            f"{config.head_rank}{of}."
        )
    if config.confidence_head:
        calibrated = ", calibrated on held-out prompts" if config.confidence_temperatures else ""
        told.append(f"It says how probable each draft's acceptance is{calibrated} (`DraftTree.confidence`).")
    return told


def _parameters(folder: Path) -> str | None:
    count = 0
    for shard in weight_files(folder):
        with safe_open(folder / shard, "pt") as file:
            for name in file.keys():
                size = 1
                for width in file.get_slice(name).get_shape():
                    size *= width
                count += size
    return f"{count:,}" if count else None


def _hub_names(sources: Sequence[str] | None) -> list[str]:
    return [source.partition(":")[0] for source in sources or () if "/" in source]


def _recipe(settings: dict[str, Any]) -> list[tuple[str, str]]:
    shown = dict(settings)
    if shown.get("max_steps", -1) > 0:  # epochs do not count then
        shown.pop("num_train_epochs", None)
    else:
        shown.pop("max_steps", None)
    return [(label, _text(shown[name])) for name, label in _SETTINGS.items() if shown.get(name) is not None]


def _text(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_text, value))
    return (
        f"{value:,}"
        if isinstance(value, int) and not isinstance(value, bool)
        else f"{value:g}"
        if isinstance(value, float)
        else str(value)
    )


def _outcome(metrics: dict[str, float]) -> str | None:
    told = [
        f"{metrics[name]:.2f} {how}"
        for name, how in (
            ("eval_tau", "by real generation"),
            ("eval_teacher_forced_tau", "by the teacher-forced walk"),
        )
        if name in metrics
    ]
    return f"Tau on the held-out prompts at the end of training: {', '.join(told)}." if told else None
