"""Lines that tables of several layouts share: layers, what is read of the target, vocabulary, and heads."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from ...drafters.blocks.configuration_hyperdflash import HyperDFlashConfig
from ...drafters.configuration import SPECIAL_TOKENS
from ...drafters.parts.block_attention import FULL, SLIDING
from ...targets.hooks import EMBEDDINGS
from .table import Entry, Fields, Given, same, written_if

EAGLE_IDS = "eagle_aux_hidden_state_layer_ids"
# Fields that have the same name in all layouts.
_SHAPE = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "intermediate_size", "hidden_act", "rms_norm_eps", "max_position_embeddings", "attention_bias",
)  # fmt: skip
_NEEDED = _SHAPE[:7]  # the defaults of other programs differ
_ROPE = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor")
_WINDOWS = ("layer_types", "sliding_window", "use_sliding_window", "max_window_layers")
_MARKOV_HEADS = {"vanilla": "markov", "gated": "gated_markov", "rnn": "recurrent"}
_SELECTOR = {
    "head_rank": "selector_rank", "head_candidates": "selector_top_k", "conv_kernel_size": "conv_kernel_size",
    "conv_group_size": "conv_group_size",
}  # fmt: skip
SELECTOR_FIELDS = tuple(_SELECTOR.values())
_DOMINO = {"head_rank": "emb_dim", "head_state_size": "gru_hidden_dim"}


# Layers


def shape(more: Callable[[Given], Fields] = lambda given: {}) -> Entry:
    """Return the line of the layers' shape, with the target's special tokens, which stand beside it. `more` returns
    fields that a program computes otherwise, by those that are given."""

    def read(given: Given) -> Fields:
        layers = {**given.layers, **more(given)}
        missing = [field for field in _NEEDED if layers.get(field) is None]
        if missing:
            raise ValueError(f"config.json of {given.name} lacks {', '.join(missing)}.")
        shapes = {field: layers[field] for field in _SHAPE if layers.get(field) is not None}
        tokens = {key: layers.get(key) for key in SPECIAL_TOKENS}
        return {**shapes, **tokens, "target_model_type": ""}  # the type of a drafter's layers is not the target's

    def write(config: Any) -> Fields:
        return {
            "model_type": "qwen3",
            **{name: getattr(config, name) for name in _SHAPE},
            "layer_types": config.kinds,
            "sliding_window": config.sliding_window,
            "use_sliding_window": config.sliding_window is not None,
            "tie_word_embeddings": False,
            "attention_dropout": 0.0,
            "initializer_range": config.initializer_range,
        }

    return Entry(_SHAPE, read, write, is_of_layers=True)


def _read_rope(given: Given) -> Fields:
    scaling = given.layers.get("rope_scaling") or {}
    if not isinstance(scaling, dict):
        raise ValueError(f"`rope_scaling` in the config.json of {given.name} is {scaling!r}, expected a dictionary.")
    scaling = {("rope_type" if key == "type" else key): value for key, value in scaling.items()}
    rope = given.layers.get("rope_parameters") or {
        "rope_type": "default", **scaling, "rope_theta": given.layers.get("rope_theta", 10000.0),
    }  # fmt: skip
    if isinstance(rope, dict) and rope.get("partial_rotary_factor") is None:
        rope = {**rope, "partial_rotary_factor": given("partial_rotary_factor")}
    return {"rope_parameters": rope}


ROPE = Entry(_ROPE, _read_rope, lambda config: {"rope_parameters": dict(config.rope_parameters or {})}, True)


def read_windows(given: Given) -> Fields:
    """Return our fields for the kinds of a drafter's layers and their window.

    A window is given by `layer_types`, by Qwen3's `use_sliding_window`, for layers from `max_window_layers` on, or by
    `use_swa` of a `dflash_config`, for all layers (MiMo's and NVIDIA's; vLLM's `_resolve_layer_attention`).
    """
    fields, inner = given.layers, given.inner
    kinds, used, layers = fields.get("layer_types"), fields.get("use_sliding_window"), fields["num_hidden_layers"]
    window = inner.get("swa_window_size") or fields.get("sliding_window")
    if kinds is None and used and window and type(layers) is int:
        first = fields.get("max_window_layers", 28)
        kinds = [SLIDING if i >= first else FULL for i in range(layers)]
    is_windowed = isinstance(kinds, list) and SLIDING in kinds
    if inner.get("use_swa") and not is_windowed:
        kinds, is_windowed = [SLIDING] * layers, True
    if not is_windowed:
        return {} if kinds is None or all(kind == FULL for kind in kinds) else {"layer_types": kinds}
    if window is None or (used is False and not inner.get("swa_window_size")):
        raise ValueError(
            f"{given.name} has sliding attention layers, but its `sliding_window` is {window} and "
            f"`use_sliding_window` {used}: expected a number of tokens, in use."
        )
    return {"layer_types": kinds, "sliding_window": window}


WINDOWS = Entry(_WINDOWS, read_windows, is_of_layers=True)  # written with the shape


def _refuse_windows(given: Given) -> Fields:
    kinds = given("layer_types") or ()
    slides = given("use_sliding_window") and given("sliding_window") and not kinds
    if slides or SLIDING in kinds:
        raise ValueError(f"{given.name} has sliding attention layers, which is not supported in an EAGLE-3 drafter.")
    return {}


NO_WINDOWS = WINDOWS._replace(read=_refuse_windows)


# What is read of the target


def layer_ids(given: Given, *places: tuple[str, object, int]) -> list[int] | None:
    """Return the layers that a drafter reads, by ours: `places` are what fields of its config.json say, which must all
    be the same, and by how much they count more than the layer whose output is meant. `None` if none says anything;
    our configuration checks what they say."""
    stated = []
    for name, ids, offset in places:
        layers = ids
        if isinstance(ids, list):
            counted = [i - offset if type(i) is int else i for i in ids]
            layers = [EMBEDDINGS if i == -1 else i for i in counted]
        if layers:
            stated.append((name, ids, layers))
    if any(layers != stated[0][2] for _, _, layers in stated):
        told = ", ".join(f"`{name}` {ids}" for name, ids, _ in stated)
        raise ValueError(
            f"{given.name} says several times which layers it reads, and not the same: {told}, where `{EAGLE_IDS}` at "
            "the top level is one more."
        )
    return cast("list[int]", stated[0][2]) if stated else None


def eagle_config_ids(given: Given) -> tuple[str, object, int]:
    """Return the layers that an `eagle_config` names, a place of [`layer_ids`]."""
    ids = given.inner.get(EAGLE_IDS)
    if any(type(i) is int and i < 0 for i in ids or ()):
        raise ValueError(
            f"The `eagle_config` of {given.name} names layers {ids}, expected numbers from 0: below 0 is the last "
            f"layer to some programs and the embeddings to others. `{EAGLE_IDS}` at the top level calls the "
            "embeddings 0."
        )
    return "eagle_config", ids, 0


def layers_read(name: str, offset: int) -> Entry:
    """Return the line of the layers that a drafter of blocks reads: their numbers in field `name` are `offset` more
    than that of the layer whose output is meant, and -1 is the embeddings'. NVIDIA and vLLM may name the layers that
    the outputs enter instead."""

    def read(given: Given) -> Fields:
        named, entering = given(name), given(EAGLE_IDS)
        at_top = [(EAGLE_IDS, entering, 1)] if isinstance(entering, list) else []
        ids = layer_ids(given, (name, named, offset), *at_top)
        if not ids or [] in (named, entering):  # an empty list is not the same as the other
            raise ValueError(f"config.json of {given.name} lacks `{name}`, expected the layers that it reads.")
        count = given("num_target_layers")
        numbers = [i for i in ids if type(i) is int] if isinstance(ids, list) else []
        if type(count) is int and 0 < count <= max(numbers, default=-1) + 1:
            raise ValueError(
                f"{given.name} reads layers {ids} of its target's {count}: the last layer's output, which is normed "
                "in some programs and not in others, is not supported."
            )
        return {"target_layer_ids": ids}

    def write(config: Any) -> Fields:
        return {name: [(-1 if i == EMBEDDINGS else i) + offset for i in config.target_layer_ids or ()]}

    return Entry((name, EAGLE_IDS), read, write)


# Drafters made before 0.2 do not know it.
TARGET_DEPTH = written_if(
    lambda config: config.target_num_layers > 0, same("target_num_layers", "num_target_layers", missing=0)
)


def _read_streams(given: Given) -> Fields:
    # The input is the mean over the target's streams, as engines give it to a drafter, whatever their number; or all
    # of them side by side, if the drafter's layers have their number (speculators' drafters for DeepSeek-V4).
    width, own = given("target_hidden_size"), given.layers["hidden_size"]
    streams = given.layers.get("hc_mult") or 1
    is_dense = streams != 1 and width != own
    if type(streams) is not int or width not in (None, streams * own if is_dense else own):
        raise ValueError(
            f"`target_hidden_size` of {given.name} is {width!r} and `hc_mult` {streams!r}, which is not supported: "
            f"expected its own width, {own}, or that of so many streams."
        )
    if is_dense:
        return {"reducer": "fc", "target_hc_mult": streams}
    return {"reducer": "stream_mean", "target_hc_mult": 1, "any_streams": True}


STREAMS = Entry(("target_hidden_size", "hc_mult"), _read_streams)


# Vocabulary


DRAFT_VOCABULARY = Entry(
    ("draft_vocab_size",),
    lambda given: {
        "draft_vocab_size": 0
        if given("draft_vocab_size") in (None, given("vocab_size"))
        else given("draft_vocab_size")
    },
)
SOFT_CAP = written_if(
    lambda config: config.final_logit_softcapping is not None,
    same("final_logit_softcapping", "final_logit_softcapping"),
)


# Heads


def _read_dspark(given: Given) -> Fields:
    rank, kind = given("markov_rank"), str(given("markov_head_type")).lower()
    if rank and kind not in _MARKOV_HEADS:
        raise ValueError(
            f"`markov_head_type` of {given.name} is {kind!r}, expected one of {', '.join(_MARKOV_HEADS)}."
        )
    heads: Fields = {"sequential_head": _MARKOV_HEADS[kind], "head_rank": rank} if rank else {}
    confidence = given("enable_confidence_head")
    heads["confidence_head"] = bool(given("confidence_head_alpha")) if confidence is None else confidence
    if heads["confidence_head"]:
        heads["confidence_reads_token"] = bool(given("confidence_head_with_markov"))
    return heads


def _write_dspark(config: Any) -> Fields:
    kind = next((kind for kind, head in _MARKOV_HEADS.items() if head == config.sequential_head), None)
    return {
        "markov_rank": config.head_rank if kind else 0,
        "markov_head_type": kind or "vanilla",
        "enable_confidence_head": config.confidence_head,
        "confidence_head_with_markov": bool(kind) and config.confidence_reads_token,
    }


DSPARK = Entry(
    (
        "markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_alpha",
        "confidence_head_with_markov",
    ),
    _read_dspark,
    _write_dspark,
)  # fmt: skip


def _read_dflash2(given: Given) -> Fields:
    missing = [field for field in SELECTOR_FIELDS if not given(field)]
    if missing:
        raise ValueError(f"config.json of {given.name} lacks {', '.join(missing)}.")
    return {"sequential_head": "selector", **{ours: given(theirs) for ours, theirs in _SELECTOR.items()}}


DFLASH2 = Entry(
    SELECTOR_FIELDS,
    _read_dflash2,
    lambda config: {
        **{theirs: getattr(config, ours) for ours, theirs in _SELECTOR.items()},
        "selector_top_k": config.head_candidates or config.vocab_size,
    },
)


def _read_domino(given: Given) -> Fields:
    missing = [field for field in _DOMINO.values() if not given(field)]
    if missing:
        raise ValueError(f"config.json of {given.name} lacks {', '.join(missing)}.")
    start = {"head_start": given("pure_draft_prefix_len") or 0}
    return {"sequential_head": "gru", **{ours: given(theirs) for ours, theirs in _DOMINO.items()}, **start}


DOMINO = Entry(
    (*_DOMINO.values(), "pure_draft_prefix_len", "shift_label"),
    _read_domino,
    lambda config: {
        "projector_type": "domino",
        **{theirs: getattr(config, ours) for ours, theirs in _DOMINO.items()},
        "pure_draft_prefix_len": config.head_start,
        "shift_label": config.sample_from_anchor,
    },
)


def is_domino(config: HyperDFlashConfig) -> bool:
    """Return whether a drafter has Domino's head."""
    return config.sequential_head == "gru"


def is_dflash2(config: HyperDFlashConfig) -> bool:
    """Return whether a drafter has both parts that only DFlash 2 has."""
    return config.sequential_head == "selector" and bool(config.conv_kernel_size)


def vllm(config: HyperDFlashConfig, folder: Path, method: str) -> str:
    """Return the option with which vLLM serves what is in a folder."""
    speculative = {"method": method, "model": str(folder), "num_speculative_tokens": config.max_draft_tokens}
    return f"vLLM: --speculative-config '{json.dumps(speculative)}'"


def sglang(config: HyperDFlashConfig, folder: Path, method: str, more: str) -> str:
    """Return the options with which SGLang does, or why it does not."""
    if "partial_rotary_factor" in (config.rope_parameters or {}):
        turned = "rotates all of a drafter's heads, whatever `partial_rotary_factor` says"
        return f"SGLang: {turned}: it would draft otherwise."
    return f"SGLang: --speculative-algorithm {method} --speculative-draft-model-path {folder} {more}"
