"""What can be said of a pair before it generates: memory, weights, precision, tokenizer."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import cast

import torch
from transformers import DeepseekV4Config, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import CONFIG_NAME

from ...drafters.base import Drafter
from ...drafters.saved import SavedDrafter
from ...drafters.weights import untrained
from ...hub.cards import TRAINING_RECORD
from ...hub.found import about_unknown
from ...hub.kinds import describe
from ...targets.caches.name import CACHE, cache_of
from ...targets.registry import target_of
from ...training.features.fingerprint import changed_parts
from .diagnosis import Diagnosis

_TOKENS = 8  # of the forwards that are compared


def check_fit(found: Diagnosis, target: PreTrainedModel, drafter: Drafter, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Report what is known without generating, and return whether generation is possible."""
    if hasattr(drafter, "get_memory_footprint"):
        _report_memory(found, target, cast(SavedDrafter, drafter))
        _compare_fingerprints(found, target, cast(SavedDrafter, drafter))
        if unknown := getattr(drafter, "unknown_fields", None):
            found.remarks.append(f"Of the drafter {about_unknown(unknown)}")
        if said := untrained(cast(SavedDrafter, drafter).state_dict()):
            found.problems["untrained weights"] = (
                f"Of the drafter {'; '.join(said)}. Load a complete checkpoint, or train it."
            )
    else:
        found.facts["drafter"] = f"{type(drafter).__name__}, which has no weights"
    return _check_tokenizer(found, target, drafter.config, tokenizer)


def _report_memory(found: Diagnosis, target: PreTrainedModel, drafter: SavedDrafter) -> None:
    described = describe(drafter.config)
    found.facts["drafter"] = (
        f"{described.drafts}; {drafter.num_parameters():,} parameters. {' '.join(described.sentences)}"
    )
    found.facts["memory"] = (
        f"target {_size(target.get_memory_footprint())}, drafter "
        f"{_size(drafter.get_memory_footprint(return_buffers=False))}{_context_memory(drafter)}"
    )


def _context_memory(drafter: SavedDrafter) -> str:
    """Describe the memory of a drafter's context; empty if its configuration does not give its keys and values."""
    config = drafter.config
    window = getattr(drafter.new_context(), "window", None) or getattr(config, "sliding_window", None)
    visible = window or getattr(config, "max_position_embeddings", None)
    sizes = [getattr(config, name, None) for name in ("num_hidden_layers", "num_key_value_heads", "head_dim")]
    if not visible or None in sizes:
        return ""
    each = 1 if isinstance(config, DeepseekV4Config) else 2  # whose values are its keys
    token = each * math.prod(cast(list[int], sizes)) * drafter.dtype.itemsize
    sees, most = _size(visible * token), _size(2 * visible * token)
    return (
        f" and {_size(token)} for each token of its context, of which it sees {visible:,}: {sees}, and up to {most} "
        "while its buffer has room for as many again"
    )


def _size(count: float) -> str:
    units = ["B", "kB", "MB", "GB", "TB"]
    while count >= 1000 and len(units) > 1:
        count, units = count / 1000, units[1:]
    return f"{count:.3g} {units[0]}"


def _compare_fingerprints(found: Diagnosis, target: PreTrainedModel, drafter: SavedDrafter) -> None:
    recorded = getattr(drafter.config, "target_fingerprint", "")
    changed = changed_parts(recorded, target) if recorded else []
    if not recorded:
        found.remarks.append("The drafter does not say which weights it was trained for; that cannot be compared.")
    elif changed is None:
        found.remarks.append(
            "An earlier release recorded which weights the drafter was trained for, in a way that cannot be compared "
            "any more."
        )
    elif changed == ["config"]:
        found.remarks.append(
            "The target's weights are those that the drafter was trained for, its configuration is not: a field was "
            "changed, or another version of transformers has other fields."
        )
    elif changed:
        _report_other_weights(found, target, drafter, " and ".join(part for part in changed if part != "config"))


def _report_other_weights(found: Diagnosis, target: PreTrainedModel, drafter: SavedDrafter, parts: str) -> None:
    """Name why the target's weights are not those that the drafter was trained for."""
    kind, stored, own = quantization(target), _stored_dtype(target), target.dtype
    recorded, rounded = drafter.config.target_fingerprint, torch.bfloat16
    is_rounded = own.itemsize > rounded.itemsize and "body" not in (changed_parts(recorded, target, rounded) or [])
    if kind:
        found.problems["quantization"] = (
            f"The target is quantized ({kind}), the drafter was trained for its weights before that. The text is the "
            "quantized target's own, but fewer drafts may be accepted: train the drafter on for this target "
            "(`hf-hyperdflash train --drafter`), or load the target as it was."
        )
    elif is_rounded or (stored is not None and stored.itemsize > own.itemsize):
        trained, loaded = (rounded, own) if is_rounded else (stored, own)
        found.remarks.append(
            f"The target's weights are in {_name(loaded)}, and were in {_name(trained)} when the drafter was trained "
            "or when they were saved: rounding makes them others, which costs little."
        )
    else:
        before = _recorded_tau(drafter)
        had = f" At the end of its training it had {before:.2f} tokens a round, on other prompts." if before else ""
        found.problems["other weights"] = (
            f"The target's weights ({parts}) are not those that the drafter was trained for: the target was "
            "fine-tuned since, or is another checkpoint or revision. The text stays right, but fewer drafts are "
            f"accepted.{had} Load the target that it was trained for, train the drafter on for this one "
            "(`hf-hyperdflash train --drafter`), or let it learn while it serves (`drafter.adapt(target)`)."
        )


def _name(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")


def quantization(target: PreTrainedModel) -> str:
    """Return how a target is quantized, in a word or two; empty if it is not."""
    config = getattr(target.config, "quantization_config", None)
    if config is not None:
        method = config.get("quant_method") if isinstance(config, dict) else getattr(config, "quant_method", None)
        return str(getattr(method, "value", method))
    kinds = {type(weight) for weight in target.parameters() if hasattr(weight, "__tensor_flatten__")}
    return ", ".join(sorted(kind.__name__ for kind in kinds))


def _stored_dtype(model: PreTrainedModel) -> torch.dtype | None:
    """Return the dtype of a model's checkpoint, if that is in a folder on this machine."""
    file = Path(model.config._name_or_path) / CONFIG_NAME
    if not file.is_file():
        return None
    fields = json.loads(file.read_text(encoding="utf-8"))
    return getattr(torch, str(fields.get("dtype") or fields.get("torch_dtype")), None)


def _recorded_tau(drafter: SavedDrafter) -> float | None:
    """Return the tokens a round at the end of a drafter's training, if its folder has the record."""
    record = Path(drafter.config._name_or_path) / TRAINING_RECORD
    metrics = json.loads(record.read_text(encoding="utf-8")).get("metrics", {}) if record.is_file() else {}
    return metrics.get("eval_tau")


def check_widths(found: Diagnosis, target: PreTrainedModel, text: torch.Tensor) -> float:
    """Report by how much the target's logits differ between one forward over some tokens, as verification runs it,
    and a forward for each, as plain decoding does. Return that in parts of their spread."""
    ids = text.to(target.device)
    before, last = ids[:, :-_TOKENS], ids[:, -_TOKENS:]
    with torch.no_grad():
        together = target(last, **{CACHE: cache_of(target(before, use_cache=True))}).logits.float()
        outputs = target(before, use_cache=True)
        alone = []
        for token in last.split(1, dim=1):
            outputs = target(token, use_cache=True, **{CACHE: cache_of(outputs)})
            alone.append(outputs.logits.float())
    single = torch.cat(alone, dim=1)
    gap, spread = (together - single).abs().max().item(), single.std().item()
    best = (single.argmax(-1) != together.argmax(-1)).sum().item()
    found.facts["forwards of other widths"] = (
        f"logits over {_TOKENS} tokens at once and one by one differ by up to {gap:.2g}, where they spread by "
        f"{spread:.2g}; of the {_TOKENS} best tokens {best} change"
    )
    kind = quantization(target)
    if kind and gap > 1e-3 * spread:
        found.problems["quantization"] = (
            f"The target is quantized ({kind}), and its logits depend on how many tokens a forward takes (by up to "
            f"{gap:.2g}): greedy texts with drafts can differ from those without. That is the kernels', not the "
            "drafter's. Load the target unquantized, or with kernels that do not, where texts must be equal; train "
            "the drafter on for this target if fewer drafts are accepted."
        )
    return gap / spread


def _check_tokenizer(
    found: Diagnosis, target: PreTrainedModel, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase
) -> bool:
    """Report problems of the tokenizer, and return whether generation is possible with it."""
    vocabulary = target_of(target).config.vocab_size
    if len(tokenizer) > vocabulary:
        found.problems["tokenizer"] = (
            f"The tokenizer has {len(tokenizer)} tokens, the target's vocabulary {vocabulary}: it "
            "belongs to another model. Load the target's own."
        )
        return False
    if hasattr(config, "mask_token_id"):
        _check_mask_token(found, config.mask_token_id, tokenizer)
    ends = target.generation_config.eos_token_id if target.generation_config else None
    ends = ends if isinstance(ends, list) else [ends]
    if tokenizer.eos_token_id is not None and None not in ends and tokenizer.eos_token_id not in ends:
        found.problems["tokenizer"] = (
            f"The tokenizer ends text with token {tokenizer.eos_token_id}, the target with {ends}: one of the two "
            "belongs to another model."
        )
    if not tokenizer.chat_template:
        found.problems["template"] = (
            "The tokenizer has no chat template, so chat cannot be asked as in training; plain text was asked. Take "
            "the chat model's tokenizer, or set `tokenizer.chat_template` to that which the drafter was trained with."
        )
    return True


def _check_mask_token(found: Diagnosis, token: int | None, tokenizer: PreTrainedTokenizerBase) -> None:
    if token is None:
        found.facts["mask token"] = "none, but a vector of the drafter's own"
        return
    mask = tokenizer.convert_ids_to_tokens(token)
    special = {*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()}
    if mask is not None and token not in special:
        found.remarks.append(
            f"The drafter's mask token {token} is {mask!r}, an ordinary token: it should be one that never occurs in "
            "text."
        )
    found.facts["mask token"] = f"{token}, {repr(mask) if mask else 'which the tokenizer does not use'}"


def check_target_loss(found: Diagnosis, target: PreTrainedModel, prompts: list[torch.Tensor]) -> None:
    """Report whether the target finds text in the tokenizer's tokens more likely than noise."""
    with torch.no_grad():
        losses = [target(ids.to(target.device), labels=ids.to(target.device)).loss.item() for ids in prompts]
    mean, noise = sum(losses) / len(losses), math.log(target_of(target).config.vocab_size)
    found.facts["target"] = f"{mean:.2f} nats a token on the prompts, where noise has {noise:.2f}"
    if mean > 0.8 * noise:
        found.problems["tokenizer"] = (
            f"To the target, plain questions look like noise ({mean:.2f} nats a token of {noise:.2f}): the tokenizer "
            "belongs to another model, or the target is untrained."
        )
