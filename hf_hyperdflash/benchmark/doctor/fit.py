"""Checks of a pair before it generates: memory, weights, precision, tokenizer."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import torch
from transformers import DeepseekV4Config, PreTrainedModel
from transformers.utils import CONFIG_NAME

from ...decoding.request import Pair
from ...drafters.saved import SavedDrafter
from ...drafters.weights import untrained
from ...hub.cards import TRAINING_RECORD
from ...hub.found import about_unknown
from ...hub.kinds import describe
from ...targets.caches.name import CACHE, cache_of
from ...targets.registry import target_of
from ...training.features.fingerprint import changed_parts
from .diagnosis import LEAST_PROMPTS, REMARK, Examination, Finding

_TOKENS = 8  # of the forwards that are compared


def check_pair(examined: Examination) -> Iterator[Finding]:
    """Check whether the drafter can draft for the target at all."""
    try:
        Pair.checked(target_of(examined.target), examined.drafter)
    except ValueError as error:
        yield "fit", str(error)


def check_memory(examined: Examination) -> None:
    """Say what the drafter is, and what memory both models take."""
    target, drafter = examined.target, cast(SavedDrafter, examined.drafter)
    if not examined.has_weights:
        examined.found.facts["drafter"] = f"{type(drafter).__name__}, which has no weights"
        return
    described, config = describe(drafter.config), drafter.config
    told = f"{described.drafts}; {drafter.num_parameters():,} parameters. {' '.join(described.sentences)}"
    examined.found.facts["drafter"] = told
    own = _size(drafter.get_memory_footprint(return_buffers=False))
    text = f"target {_size(target.get_memory_footprint())}, drafter {own}"
    window = getattr(drafter.new_context(), "window", None) or getattr(config, "sliding_window", None)
    visible = window or getattr(config, "max_position_embeddings", None)
    sizes = [getattr(config, name, None) for name in ("num_hidden_layers", "num_key_value_heads", "head_dim")]
    if visible and None not in sizes:
        each = 1 if isinstance(config, DeepseekV4Config) else 2  # whose values are its keys
        token = each * math.prod(cast(list[int], sizes)) * drafter.dtype.itemsize
        sees, most = _size(visible * token), _size(2 * visible * token)
        text += (
            f" and {_size(token)} for each token of its context, of which it sees {visible:,}: {sees}, and up to "
            f"{most} while its buffer has room for as many again"
        )
    examined.found.facts["memory"] = text


def _size(count: float) -> str:
    units = ["B", "kB", "MB", "GB", "TB"]
    while count >= 1000 and len(units) > 1:
        count, units = count / 1000, units[1:]
    return f"{count:.3g} {units[0]}"


def check_fingerprint(examined: Examination) -> Iterator[Finding]:
    """Check whether the target's weights are those that the drafter was trained for; if not, why."""
    target, drafter = examined.target, cast(SavedDrafter, examined.drafter)
    if not examined.has_weights:
        return
    recorded = getattr(drafter.config, "target_fingerprint", "")
    changed = changed_parts(recorded, target) if recorded else []
    if not recorded:
        text = "The drafter does not say which weights it was trained for; that cannot be compared."
        yield REMARK, text
    elif changed is None:
        yield REMARK, (
            "An earlier release recorded which weights the drafter was trained for, in a way that cannot be compared "
            "any more."
        )  # fmt: skip
    elif changed == ["config"]:
        yield REMARK, (
            "The target's weights are those that the drafter was trained for, its configuration is not: a field was "
            "changed, or another version of transformers has other fields."
        )  # fmt: skip
    elif changed:
        yield _other_weights(target, drafter, " and ".join(part for part in changed if part != "config"))


def _other_weights(target: PreTrainedModel, drafter: SavedDrafter, parts: str) -> Finding:
    kind, own, rounded = quantization(target), target.dtype, torch.bfloat16
    if kind:
        return "quantization", (
            f"The target is quantized ({kind}), the drafter was trained for its weights before that. The text is the "
            "quantized target's own, but fewer drafts may be accepted: train the drafter on for this target "
            "(`hf-hyperdflash train --drafter`), or load the target as it was."
        )
    # The dtype of the checkpoint, if that is in a folder on this machine.
    file, stored = Path(target.config._name_or_path) / CONFIG_NAME, None
    if file.is_file():
        fields = json.loads(file.read_text(encoding="utf-8"))
        stored = getattr(torch, str(fields.get("dtype") or fields.get("torch_dtype")), None)
    recorded = drafter.config.target_fingerprint
    is_rounded = own.itemsize > rounded.itemsize and "body" not in (changed_parts(recorded, target, rounded) or [])
    if is_rounded or (stored is not None and stored.itemsize > own.itemsize):
        names = [str(dtype).removeprefix("torch.") for dtype in ((own, rounded) if is_rounded else (own, stored))]
        return REMARK, (
            "The target's weights are in {}, and were in {} when the drafter was trained or when they were saved: "
            "rounding makes them others, which costs little.".format(*names)
        )
    # The tokens a round at the end of the drafter's training, if its folder has the record.
    record = Path(drafter.config._name_or_path) / TRAINING_RECORD
    metrics = json.loads(record.read_text(encoding="utf-8")).get("metrics", {}) if record.is_file() else {}
    before = metrics.get("eval_tau")
    had = f" At the end of its training it had {before:.2f} tokens a round, on other prompts." if before else ""
    return "other weights", (
        f"The target's weights ({parts}) are not those that the drafter was trained for: the target was fine-tuned "
        "since, or is another checkpoint or revision. The text stays right, but fewer drafts are accepted."
        f"{had} Load the target that it was trained for, train the drafter on for this one "
        "(`hf-hyperdflash train --drafter`), or let it learn while it serves (`drafter.adapt(target)`)."
    )


def quantization(target: PreTrainedModel) -> str:
    """Return how a target is quantized, in a word or two; empty if it is not."""
    config = getattr(target.config, "quantization_config", None)
    if config is not None:
        method = config.get("quant_method") if isinstance(config, dict) else getattr(config, "quant_method", None)
        return str(getattr(method, "value", method))
    kinds = {type(weight) for weight in target.parameters() if hasattr(weight, "__tensor_flatten__")}
    return ", ".join(sorted(kind.__name__ for kind in kinds))


def check_weights(examined: Examination) -> Iterator[Finding]:
    """Check whether weights of the drafter were never trained; name fields of its file that are not read."""
    drafter = cast(SavedDrafter, examined.drafter)
    if unknown := getattr(drafter, "unknown_fields", None):
        yield REMARK, f"Of the drafter {about_unknown(unknown)}"
    if examined.has_weights and (said := untrained(drafter.state_dict())):
        text = f"Of the drafter {'; '.join(said)}. Load a complete checkpoint, or train it."
        yield "untrained weights", text


def check_vocabulary(examined: Examination) -> Iterator[Finding]:
    """Check whether the target has all of the tokenizer's tokens."""
    tokens, vocabulary = len(examined.tokenizer), target_of(examined.target).config.vocab_size
    if tokens > vocabulary:
        yield "tokenizer", (
            f"The tokenizer has {tokens} tokens, the target's vocabulary {vocabulary}: it belongs to another model. "
            "Load the target's own."
        )  # fmt: skip


def check_mask_token(examined: Examination) -> Iterator[Finding]:
    """Check whether the drafter's mask token occurs in text."""
    tokenizer, config = examined.tokenizer, examined.drafter.config
    if not hasattr(config, "mask_token_id"):
        return
    if config.mask_token_id is None:
        examined.found.facts["mask token"] = "none, but a vector of the drafter's own"
        return
    mask = tokenizer.convert_ids_to_tokens(config.mask_token_id)
    special = {*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()}
    if mask is not None and config.mask_token_id not in special:
        yield REMARK, (
            f"The drafter's mask token {config.mask_token_id} is {mask!r}, an ordinary token: it should be one that "
            "never occurs in text."
        )  # fmt: skip
    told = f"{config.mask_token_id}, {repr(mask) if mask else 'which the tokenizer does not use'}"
    examined.found.facts["mask token"] = told


def check_tokenizer(examined: Examination) -> Iterator[Finding]:
    """Check whether the tokenizer ends text as the target does, and has a chat template."""
    target, tokenizer = examined.target, examined.tokenizer
    ends = target.generation_config.eos_token_id if target.generation_config else None
    ends = ends if isinstance(ends, list) else [ends]
    if tokenizer.eos_token_id is not None and None not in ends and tokenizer.eos_token_id not in ends:
        yield "tokenizer", (
            f"The tokenizer ends text with token {tokenizer.eos_token_id}, the target with {ends}: one of the two "
            "belongs to another model."
        )  # fmt: skip
    if not tokenizer.chat_template:
        yield "template", (
            "The tokenizer has no chat template, so chat cannot be asked as in training; plain text was asked. Take "
            "the chat model's tokenizer, or set `tokenizer.chat_template` to that which the drafter was trained with."
        )  # fmt: skip


def check_target_loss(examined: Examination) -> Iterator[Finding]:
    """Check whether the target finds text in the tokenizer's tokens more likely than noise."""
    target, losses = examined.target, []
    for prompt in examined.prompts[:LEAST_PROMPTS]:
        ids = prompt.to(target.device)
        with torch.no_grad():
            losses.append(target(ids, labels=ids).loss.item())
    mean, noise = sum(losses) / len(losses), math.log(target_of(target).config.vocab_size)
    examined.found.facts["target"] = f"{mean:.2f} nats a token on the prompts, where noise has {noise:.2f}"
    if mean > 0.8 * noise:
        yield "tokenizer", (
            f"To the target, plain questions look like noise ({mean:.2f} nats a token of {noise:.2f}): the tokenizer "
            "belongs to another model, or the target is untrained."
        )  # fmt: skip


def logit_gap(target: PreTrainedModel, text: torch.Tensor) -> tuple[float, float, int]:
    """Compare one forward over the last tokens of a text, as verification runs it, with a forward for each, as plain
    decoding does. Return the largest difference of logits, their spread, and how many best tokens change."""
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
    changed = (single.argmax(-1) != together.argmax(-1)).sum().item()
    return (together - single).abs().max().item(), single.std().item(), int(changed)


def check_widths(examined: Examination) -> Iterator[Finding]:
    """Check whether the target's logits depend on how many tokens a forward takes."""
    gap, spread, changed = logit_gap(examined.target, examined.texts[0])
    examined.found.facts["forwards of other widths"] = (
        f"logits over {_TOKENS} tokens at once and one by one differ by up to {gap:.2g}, where they spread by "
        f"{spread:.2g}; of the {_TOKENS} best tokens {changed} change"
    )
    kind = quantization(examined.target)
    if kind and gap > 1e-3 * spread:
        yield "quantization", (
            f"The target is quantized ({kind}), and its logits depend on how many tokens a forward takes (by up to "
            f"{gap:.2g}): greedy texts with drafts can differ from those without. That is the kernels', not the "
            "drafter's. Load the target unquantized, or with kernels that do not, where texts must be equal; train "
            "the drafter on for this target if fewer drafts are accepted."
        )  # fmt: skip
