"""Parts that other programs' layouts of block drafters share: fields of a Qwen3 model, of DSpark and of DFlash 2."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from typing import Any, cast

from transformers import GenerationConfig, PreTrainedConfig

from ...drafters.blocks.configuration_hyperdflash import HyperDFlashConfig
from ...drafters.configuration import SPECIAL_TOKENS
from ...drafters.parts.block_attention import FULL, SLIDING
from ...targets.hooks import EMBEDDINGS

# Fields that have the same name in all layouts.
_SHAPE = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "intermediate_size", "hidden_act", "rms_norm_eps", "max_position_embeddings", "attention_bias",
)  # fmt: skip
_NEEDED = _SHAPE[:7]  # required: the defaults of other programs differ
# Fields that `read_shape` and `read_windows` read, for `check_known`.
SHAPE_FIELDS = (*_SHAPE, "rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor")
EAGLE_IDS = "eagle_aux_hidden_state_layer_ids"
WINDOW_FIELDS = ("layer_types", "sliding_window", "use_sliding_window", "max_window_layers")
# Fields of any layout that do not change a drafter's output.
_HARMLESS = {
    # Bookkeeping, and how text is generated.
    *PreTrainedConfig().to_dict(), *vars(GenerationConfig()),
    "auto_map", "torch_dtype", "name_or_path", "use_cache", "tie_word_embeddings", "pretraining_tp",
    "attn_implementation", "_attn_implementation", "attention_backend", "speculators_version", "modal_type",
    # Training.
    "attention_dropout", "initializer_range", "gradient_checkpointing", "num_anchors", "ttt_length",
    "step_loss_decay", "loss_decay_gamma", "max_sequence_length", "embed_requires_grad", "output_router_logits",
    "router_aux_loss_coef", "aux_loss_alpha", "seq_aux",
    # A window that `read_windows` found to be off; heads of the target that a draft layer does not have.
    "max_window_layers", "num_nextn_predict_layers",
    # Experts and latent attention, copied from a target: a layer with them would have other tensors.
    "decoder_sparse_step", "first_k_dense_replace", "kv_lora_rank", "mlp_only_layers", "moe_intermediate_size",
    "moe_layer_freq", "n_group", "n_routed_experts", "n_shared_experts", "norm_topk_prob", "num_experts",
    "num_experts_per_tok", "num_local_experts", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim",
    "routed_scaling_factor", "scoring_func", "shared_expert_intermediate_size", "topk_group", "topk_method",
    "v_head_dim",
}  # fmt: skip
_MARKOV_HEADS = {"vanilla": "markov", "gated": "gated_markov", "rnn": "recurrent"}
_SELECTOR = {
    "head_rank": "selector_rank", "head_candidates": "selector_top_k", "conv_kernel_size": "conv_kernel_size",
    "conv_group_size": "conv_group_size",
}  # fmt: skip
SELECTOR_FIELDS = tuple(_SELECTOR.values())

Value = Callable[[str], Any]  # from the name of a field to its value in a config.json, None if there is none


def drafter_config(
    shape: Mapping[str, Any],
    name: str,
    *,
    layer_ids: list[int] | None,
    block_size: int | None,
    mask_token_id: int | None,
    num_target_layers: int | None = None,
    target_hidden_size: int | None = None,
    **more: Any,
) -> HyperDFlashConfig:
    """Return the configuration of a drafter in another layout.

    Args:
        shape: The fields of its Qwen3 layers.
        name: The checkpoint's name, for errors.
        layer_ids: The layers of the target whose output it reads, counted from 0; -1 for the embeddings.
        block_size: Slots of a block, the anchor's included.
        mask_token_id: The token of every other slot.
        num_target_layers: The target's number of layers, if it is given.
        target_hidden_size: Width of the input from a layer, if it is given.
        **more: More fields of [`HyperDFlashConfig`].

    Raises:
        ValueError: If one is missing, or they are not valid.
    """
    ids = layer_ids
    if not ids or block_size is None or mask_token_id is None:
        raise ValueError(
            f"config.json of {name} lacks `target_layer_ids` ({ids}), `block_size` ({block_size}) or `mask_token_id` "
            f"({mask_token_id})."
        )
    layers = read_shape(shape, name)
    if not isinstance(ids, list) or not all(type(i) is int for i in ids):
        raise ValueError(f"{name} reads layers {ids}, expected integers.")
    if num_target_layers is not None and type(num_target_layers) is not int:
        raise ValueError(f"`num_target_layers` of {name} is {num_target_layers!r}, expected an integer.")
    if num_target_layers and max(ids) >= num_target_layers - 1:
        raise ValueError(
            f"{name} reads layers {ids} of its target's {num_target_layers}: the last layer's output, which is normed "
            "in some programs and not in others, is not supported."
        )
    if ids != sorted(set(ids)):
        raise ValueError(f"{name} reads layers {ids}, expected ascending ones, each once.")
    try:
        return HyperDFlashConfig(
            **layers,
            **read_streams(shape, target_hidden_size, name),
            target_layer_ids=from_outputs(ids, name),
            target_num_layers=num_target_layers or 0,
            block_size=block_size,
            mask_token_id=mask_token_id,
            target_model_type="",  # the type of a drafter's layers is not the target's
            **more,
        )
    except ValueError as error:
        raise ValueError(f"config.json of {name}: {error}") from error


def from_outputs(ids: list[int], name: str) -> list[int]:
    """Return our ids of layers from those that count outputs, in which -1 is the embeddings'.

    Raises:
        ValueError: If one is less.
    """
    if any(type(i) is int and i < -1 for i in ids):
        raise ValueError(f"{name} reads layers {ids}, expected numbers from 0, or -1 for the embeddings.")
    return [EMBEDDINGS if i == -1 else i for i in ids]


def eagle_config_ids(eagle: Mapping[str, Any], name: str) -> list[int]:
    """Return the layers that an `eagle_config` names, counted from 0.

    Raises:
        ValueError: If one is below 0, which programs read differently.
    """
    ids = eagle.get(EAGLE_IDS) or []
    if any(type(i) is int and i < 0 for i in ids):
        raise ValueError(
            f"The `eagle_config` of {name} names layers {ids}, expected numbers from 0: below 0 is the last layer to "
            f"some programs and the embeddings to others. `{EAGLE_IDS}` at the top level calls the embeddings 0."
        )
    return ids


def to_outputs(config: HyperDFlashConfig) -> list[int]:
    """Return the layers that a drafter reads as [`from_outputs`] takes them. None is the last, our -1."""
    return [-1 if i == EMBEDDINGS else i for i in config.target_layer_ids or ()]


def read_streams(shape: Mapping[str, Any], width: int | None, name: str) -> dict[str, Any]:
    """Return our fields for a drafter's input from the target's residual streams.

    The input is their mean, as engines give it to a drafter, whatever their number; or all of them side by side, if
    the drafter's layers have their number in `hc_mult` (speculators' drafters for DeepSeek-V4).

    Args:
        shape: The fields of its layers.
        width: Width of the input from a layer of the target, if it is given.
        name: The checkpoint's name.

    Raises:
        ValueError: If the input has another width.
    """
    drafter_width, streams = shape.get("hidden_size"), shape.get("hc_mult") or 1
    is_dense = streams != 1 and width != drafter_width
    if type(streams) is not int or width not in (None, streams * drafter_width if is_dense else drafter_width):  # type: ignore[operator]
        raise ValueError(
            f"`target_hidden_size` of {name} is {width!r} and `hc_mult` {streams!r}, which is not supported: expected "
            f"its own width, {drafter_width}, or that of so many streams."
        )
    if is_dense:
        return {"reducer": "fc", "target_hc_mult": streams}
    return {"reducer": "stream_mean", "target_hc_mult": 1, "any_streams": True}


def read_shape(shape: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return our fields for the shape of layers, their RoPE and the target's special tokens, which stand beside them.

    Raises:
        ValueError: If one is missing or not valid.
    """
    missing = [field for field in _NEEDED if shape.get(field) is None]
    if missing:
        raise ValueError(f"config.json of {name} lacks {', '.join(missing)}.")
    scaling = shape.get("rope_scaling") or {}
    if not isinstance(scaling, dict):
        raise ValueError(f"`rope_scaling` in the config.json of {name} is {scaling!r}, expected a dictionary.")
    scaling = {("rope_type" if key == "type" else key): value for key, value in scaling.items()}
    rope = shape.get("rope_parameters") or {
        "rope_type": "default", **scaling, "rope_theta": shape.get("rope_theta", 10000.0),
    }  # fmt: skip
    if isinstance(rope, dict) and rope.get("partial_rotary_factor") is None:
        rope = {**rope, "partial_rotary_factor": shape.get("partial_rotary_factor")}
    shapes = {field: shape[field] for field in _SHAPE if shape.get(field) is not None}
    return {**shapes, "rope_parameters": rope, **{key: shape.get(key) for key in SPECIAL_TOKENS}}


def layer_fields(config: HyperDFlashConfig) -> dict[str, Any]:
    """Return the fields of a drafter's layers without RoPE, as in transformers' Qwen3."""
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


def read_windows(fields: Mapping[str, Any], name: str, inner: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return our fields for the kinds of a drafter's layers and their window.

    A window is given by `layer_types`, by Qwen3's `use_sliding_window`, for layers from `max_window_layers` on, or by
    `use_swa`, for all layers.

    Args:
        fields: A config.json, or its section about layers.
        name: The checkpoint's name.
        inner: Its `dflash_config`, which MiMo's and NVIDIA's use (vLLM's `_resolve_layer_attention`).

    Raises:
        ValueError: If layers have a window, but its size is missing or off.
    """
    kinds, used, inner = fields.get("layer_types"), fields.get("use_sliding_window"), inner or {}
    window = inner.get("swa_window_size") or fields.get("sliding_window")
    layers = fields.get("num_hidden_layers") or 0
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
            f"{name} has sliding attention layers, but its `sliding_window` is {window} and `use_sliding_window` "
            f"{used}: expected a number of tokens, in use."
        )
    return {"layer_types": kinds, "sliding_window": window}


def num_target_layers_field(config: HyperDFlashConfig) -> dict[str, int]:
    """Return `num_target_layers` if it is known; drafters made before 0.2 do not have it."""
    return {"num_target_layers": config.target_num_layers} if config.target_num_layers else {}


def soft_cap_field(config: HyperDFlashConfig) -> dict[str, float]:
    """Return `final_logit_softcapping` if its logits are capped."""
    cap = config.final_logit_softcapping
    return {} if cap is None else {"final_logit_softcapping": cap}


def has_mark(fields: Mapping[str, Any], marks: Collection[str]) -> bool:
    """Return whether a config.json has one of these fields or architectures, which only one layout has."""
    return not set(marks).isdisjoint([*fields, *map(str, fields.get("architectures") or ())])


def check_known(
    fields: Mapping[str, Any],
    name: str,
    reads: Collection[str],
    neutral: Mapping[str, tuple[Any, ...]] | None = None,
) -> None:
    """Refuse a field that the layout does not read and that may change a drafter's output.

    A layout calls this once for each dictionary of its config.json, the nested ones too. Fields of bookkeeping,
    generation and training, special tokens, and comments (`_...`) are harmless in all of them. Of the others,

    * a field in `reads` may have any value: the layout reads it elsewhere;
    * a field in `neutral` has to be null or one of the values there, which do not change the output.
      `{"is_causal": (True,)}` refuses false;
    * any other field has to be off: null, false, 0 or empty.

    Args:
        fields: A config.json, or a section of it.
        name: The checkpoint's name.
        reads: `SHAPE_FIELDS` and `WINDOW_FIELDS` among them where `read_shape` and `read_windows` are called.
        neutral: Values, by field.

    Raises:
        ValueError: Naming the first such field.
    """
    neutral = neutral or {}
    for field, value in fields.items():
        if field in reads or field in _HARMLESS or value is None:
            continue
        if field in neutral:
            if value not in neutral[field]:
                expected = ", ".join(repr(one) for one in neutral[field])
                raise ValueError(f"`{field}` of {name} is {value!r}, which is not supported: expected {expected}.")
        elif value and not field.startswith("_") and (not field.endswith("_token_id") or _embedded(field)):
            raise ValueError(
                f"`{field}` in the config.json of {name} is {value!r}, and nothing is known here of that field: it "
                "may change what is drafted. Take it out if it does not."
            )


def _embedded(field: str) -> bool:
    """Return whether a special token is one that drafters embed at positions without a known token."""
    return any(word in field for word in ("mask", "noise", "ptd"))


# DSpark


def read_dspark(value: Value, name: str) -> dict[str, Any]:
    """Return our fields for DSpark's two heads.

    Raises:
        ValueError: If the kind of its Markov head is not known.
    """
    rank, kind = value("markov_rank"), str(value("markov_head_type")).lower()
    if rank and kind not in _MARKOV_HEADS:
        raise ValueError(f"`markov_head_type` of {name} is {kind!r}, expected one of {', '.join(_MARKOV_HEADS)}.")
    return {
        **({"sequential_head": _MARKOV_HEADS[kind], "head_rank": rank} if rank else {}),
        "confidence_head": (has_confidence := value("enable_confidence_head")),
        **({"confidence_reads_token": bool(value("confidence_head_with_markov"))} if has_confidence else {}),
    }


def write_dspark(config: HyperDFlashConfig) -> dict[str, Any]:
    """Return DSpark's fields for our two heads."""
    kind = next((kind for kind, head in _MARKOV_HEADS.items() if head == config.sequential_head), None)
    return {
        "markov_rank": config.head_rank if kind else 0,
        "markov_head_type": kind or "vanilla",
        "enable_confidence_head": config.confidence_head,
        "confidence_head_with_markov": bool(kind) and config.confidence_reads_token,
    }


def obstacles_to_dspark(config: HyperDFlashConfig) -> dict[str, bool]:
    """Return reasons why a drafter is not a DSpark drafter, each with whether it applies."""
    has_markov_head = config.sequential_head in _MARKOV_HEADS.values()
    return {
        f"DSpark has no {config.sequential_head!r} head": not has_markov_head and config.sequential_head != "none",
        "DSpark's layers have no convolutions": config.conv_kernel_size > 0,
        f"it drafts among the block's {config.head_candidates} best tokens, and DSpark among all": has_markov_head
        and bool(config.head_candidates),
        "its confidence is calibrated, which DSpark's layouts have no words for: load it with "
        "`from_pretrained(..., confidence_temperatures=None)`": config.confidence_temperatures is not None,
    }


# DFlash 2


def is_dflash2(config: HyperDFlashConfig) -> bool:
    """Return whether a drafter has a part that only DFlash 2 has."""
    return config.sequential_head == "selector" or config.conv_kernel_size > 0


def read_dflash2(value: Value, name: str) -> dict[str, Any]:
    """Return our fields for DFlash 2's selector and convolutions.

    Raises:
        ValueError: If one is missing.
    """
    missing = [field for field in _SELECTOR.values() if not value(field)]
    if missing:
        raise ValueError(f"config.json of {name} lacks {', '.join(missing)}.")
    return {"sequential_head": "selector", **{our_field: value(field) for our_field, field in _SELECTOR.items()}}


def write_dflash2(config: HyperDFlashConfig) -> dict[str, Any]:
    """Return DFlash 2's fields for our selector and convolutions."""
    fields = {field: getattr(config, our_field) for our_field, field in _SELECTOR.items()}
    return {**fields, "selector_top_k": config.head_candidates or config.vocab_size}


def obstacles_to_dflash2(config: HyperDFlashConfig) -> dict[str, bool]:
    """Return reasons why a drafter is not a DFlash 2 drafter, each with whether it applies."""
    return {
        f"DFlash 2 has the 'selector' head, and this drafter has {config.sequential_head!r}": config.sequential_head
        != "selector",
        "DFlash 2 has convolutions in its layers, and this drafter has none": config.conv_kernel_size == 0,
        "DFlash 2 has no confidence head": config.confidence_head,
        "DFlash 2 has no truncated vocabulary": bool(config.draft_vocab_size),
    }


def served_by_both(config: HyperDFlashConfig, speculative: dict[str, Any], sglang: str) -> str:
    """Return the options of vLLM and SGLang that serve a drafter, or why SGLang does not."""
    if "partial_rotary_factor" in (config.rope_parameters or {}):
        sglang = "rotates all of a drafter's heads, whatever `partial_rotary_factor` says: it would draft otherwise."
    return f"vLLM: --speculative-config '{json.dumps(speculative)}'\nSGLang: {sglang}"


def section(fields: Mapping[str, Any], key: str, name: str) -> dict[str, Any]:
    """Return a section of a config.json.

    Raises:
        ValueError: If it is no dictionary.
    """
    if not isinstance(fields.get(key), dict):
        raise ValueError(f"`{key}` in the config.json of {name} is {fields.get(key)!r}, expected a dictionary.")
    return cast("dict[str, Any]", fields[key])
