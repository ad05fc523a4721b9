"""EAGLE-3's layouts: the flat ones of SafeAILab, SpecForge, AngelSlim, NVIDIA and DeepSpec, and speculators'.

P-EAGLE's are the same with a mask token and a learned state: Amazon's and NeMo AutoModel's flat ones, speculators'.

A flat config.json describes layers of Llama's kind; DeepSpec's describes Qwen3's. It has a `draft_vocab_size`, an
architecture with EAGLE-3's name, or both. Most do not say which layers of the target the drafter reads. SafeAILab's
drafter has one layer, called `midlayer`. Its `num_hidden_layers` may be a copy of the target's, so the tensors decide.

NVIDIA and SpecForge (`eagle_config`) and DeepSpec (`target_layer_ids`) count layers as we do. speculators and vLLM
write `eagle_aux_hidden_state_layer_ids` at the top level. There id i means the input of layer i, 0 the embeddings:
each id is one more than ours.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from ...drafters.unrolled.configuration import Eagle3Config, PEagleConfig
from .lines import EAGLE_IDS, NO_WINDOWS, ROPE, SOFT_CAP, eagle_config_ids, layer_ids, shape
from .speculators import LAYERS, TARGET
from .table import Entry, Fields, Given, Layout, same, section

# Words in names of architectures whose layers are Llama's or Qwen3's.
_LLAMAS = ("llama", "qwen", "phi", "eagle3draftmodel", "eagle3speculator")
# Only an EAGLE-3 drafter has these fields.
_MARKS = ("eagle_config", EAGLE_IDS, "draft_vocab_size", "ttt_length")
# AngelSlim copies these fields from Hunyuan and reads none of them.
_HUNYUAN_FIELDS = (
    "attention_head_dim", "cla_share_factor", "dense_list", "eod_token_id", "im_end_id", "im_newline_id",
    "im_start_id", "mask_init_id", "org_vocab_size", "pad_id", "pool_type", "text_end_id", "text_start_id",
    "use_qk_norm",
)  # fmt: skip


def _is_deepspec(fields: Fields) -> bool:
    return "ttt_length" in fields or "Qwen3Eagle3Model" in (fields.get("architectures") or ())


def _architecture(fields: Fields) -> str:
    return " ".join(map(str, fields.get("architectures") or ())).lower()


def _check_architecture(given: Given) -> Fields:
    name = _architecture(given.top)
    if "eagle3" in name and ("llama4" in name or not any(one in name for one in _LLAMAS)):
        raise ValueError(
            f"{given.name} is a {', '.join(given.top['architectures'])}, whose layers are neither Llama's nor "
            "Qwen3's, which is not supported."
        )
    return {}


def _as_llama(given: Given) -> Fields:
    """Return what programs compute if a config.json lacks it; of a flat one the tensors count the layers later."""
    heads = given("num_attention_heads")
    width = {"head_dim": given("head_dim") or (given("hidden_size") or 0) // (heads or 1)}
    if "speculators_model_type" in given.top or _is_deepspec(given.top):
        return width
    return {**width, "num_hidden_layers": 1, "num_key_value_heads": given("num_key_value_heads") or heads}


def target_layers(ids_in: Callable[[Given], list[int] | None]) -> Entry:
    """Return the line of what is read of the target: the mean over the streams of some layers, which most files do not
    name, and states of a width of their own or the drafter's."""

    def read(given: Given) -> Fields:
        ids, width = ids_in(given), given("target_hidden_size") or 0
        return {
            "target_layer_ids": ids or [1, 2, 3],
            "usual_layers": not ids,
            "target_hidden_size": width,
            "own_embedding": width not in (0, given("hidden_size")),
            "target_hc_mult": 1,
            "reducer": "stream_mean",
            "any_streams": True,
        }

    return Entry(("target_hidden_size",), read)


def _ids(given: Given) -> list[int] | None:
    at_top = (EAGLE_IDS, given.top.get(EAGLE_IDS), 1)
    ids = layer_ids(given, eagle_config_ids(given), ("target_layer_ids", given("target_layer_ids"), 0), at_top)
    reads, count = len(ids) if ids else 3, given("num_aux_hidden_states")
    if count not in (None, reads):
        raise ValueError(f"`num_aux_hidden_states` of {given.name} is {count!r}, but it reads {reads} layers.")
    return ids


def _rename(name: str) -> str | None:
    """Our name of a tensor; the target's, and RoPE's tables, are not the drafter's."""
    name = name.removeprefix("model.").replace("midlayer.", "layers.0.")
    if name.startswith(("verifier_", "hc_head_")) or "rotary_emb" in name:
        return None
    if name == "mask_hidden":
        return f"{name}.weight"
    return f"fc_norms.{name.removeprefix('fc_norm.')}" if name.startswith("fc_norm.") else name


def _complete(config: Eagle3Config, tensors: dict[str, torch.Tensor], fields: Fields) -> None:
    """Set the fields that a flat config.json lacks, from the tensors under our names."""
    if fields.get("tie_word_embeddings") and "lm_head.weight" not in tensors and "embed_tokens.weight" in tensors:
        tensors["lm_head.weight"] = tensors["embed_tokens.weight"].clone()
    if "speculators_model_type" in fields or _is_deepspec(fields):
        return
    layers = {int(key.split(".")[1]) for key in tensors if key.startswith("layers.")}
    config.num_hidden_layers = max(layers, default=0) + 1
    config.qk_norm = "layers.0.self_attn.q_norm.weight" in tensors
    config.attention_bias = "layers.0.self_attn.q_proj.bias" in tensors


def _flag(name: str) -> Entry:
    return Entry((name,), lambda given: {name: bool(given(name))})  # some write 0 and 1


_SHARED = (
    shape(_as_llama),
    ROPE,
    NO_WINDOWS,
    SOFT_CAP,
    target_layers(_ids),
    Entry(("draft_vocab_size",), lambda given: {"draft_vocab_size": given("draft_vocab_size") or given("vocab_size")}),
    Entry((EAGLE_IDS,)),
    _flag("norm_before_residual"),
    _flag("fc_norm"),
)
FLAT = Layout(
    fits=lambda fields: (
        "speculators_model_type" not in fields
        and ("eagle3" in _architecture(fields) or any(fields.get(mark) for mark in _MARKS))
    ),
    config=Eagle3Config,
    table=(
        Entry((), _check_architecture),
        *_SHARED,
        # Beside vLLM's number of layers this is EAGLE-3.1, whose later steps read the normed state. SpecForge's says
        # whether the LM head reads normed states, which here it always does.
        Entry(
            ("num_aux_hidden_states",),
            lambda given: {
                "norm_output": bool(given.top.get("norm_output")) and given("num_aux_hidden_states") is not None
            },
        ),
        Entry((), lambda given: {"qk_norm": _is_deepspec(given.top)}),
        same("target_name_or_path", "target_model_name_or_path", missing=""),
        same("target_model_type", "target_model_type", missing=""),
        same("target_num_layers", "num_target_layers", missing=0),
        Entry(("target_layer_ids",)),
    ),
    sections={"eagle_config": (EAGLE_IDS, "parallel_draft_heads_num_layers")},
    ignores=("ttt_length", "draft_num_hidden_layers", *_HUNYUAN_FIELDS),
    changes_drafts={
        "norm_output": (True,), "norm_before_fc": (False,), "is_causal": (True,), "causal": (True,),
          "use_rotary_pos_emb": (True,), "use_aux_hidden_state": (True,),
        "use_last_layernorm": (True,), "use_mtp_layernorm": (False,), "use_input_layernorm_in_first_layer": (True,),
        "next_layer_regular": (True,), "parallel_draft_step": (0, 1),
    },
    rename=_rename,
    complete=_complete,
)  # fmt: skip
SPECULATORS = Layout(
    fits=lambda fields: fields.get("speculators_model_type") == "eagle3",
    config=Eagle3Config,
    table=(
        Entry(("speculators_model_type",)),
        *_SHARED,
        _flag("norm_before_fc"),
        _flag("norm_output"),
        Entry((), lambda given: {"qk_norm": given.layers.get("model_type") == "qwen3"}),
        TARGET,
        Entry(("final_logit_softcapping",), is_of_layers=True),  # or there
    ),
    layers_in=LAYERS,
    changes_drafts={"causal": (True,), "is_causal": (True,)},
    rename=_rename,
    complete=_complete,
)


# P-EAGLE

_MASKS = ("mask_token_id", "pard_token", "ptd_token_id")  # as vLLM looks for them, the first one first


def _is_peagle(fields: Fields) -> bool:
    names = f"{_architecture(fields)} {fields.get('model_type')}".replace("_", "")
    return "peagle" in names or any(fields.get(mark) for mark in ("parallel_drafting", *_MASKS[1:]))


def _read_depth(given: Given) -> Fields:
    """Return how many drafts it is made for, if that is said."""
    methods = section(given.top, "speculators_config", given.name).get("proposal_methods")
    depths = [method.get("speculative_tokens") for method in methods or () if isinstance(method, dict)]
    return {"max_blocks": depths[0]} if depths and depths[0] is not None else {}


def _complete_mask(config: PEagleConfig, tensors: dict[str, torch.Tensor], fields: Fields) -> None:
    """Give the learned state the form of the target's: some write it as one row, others with one batch around that."""
    _complete(config, tensors, fields)
    mask, width = tensors.get("mask_hidden.weight"), config.target_hidden_size
    if mask is not None and mask.numel() % width == 0:
        tensors["mask_hidden.weight"] = mask.reshape(-1, width)


PEAGLE_FLAT = replace(
    FLAT,
    fits=lambda fields: "speculators_model_type" not in fields and _is_peagle(fields),
    config=PEagleConfig,
    table=(
        *FLAT.table,
        same("mask_token_id", *_MASKS, is_needed=True),
        Entry(("parallel_drafting",)),
        Entry(("num_depths",), lambda given: {"max_blocks": given("num_depths")} if given("num_depths") else {}),
    ),
    ignores=(*FLAT.ignores, "down_sample_ratio", "down_sample_ratio_min"),
    complete=_complete_mask,
)
PEAGLE_SPECULATORS = replace(
    SPECULATORS,
    fits=lambda fields: fields.get("speculators_model_type") == "peagle",
    config=PEagleConfig,
    table=(
        *SPECULATORS.table,
        same("mask_token_id", "mask_token_id", is_needed=True),
        Entry((), _read_depth),
    ),
    complete=_complete_mask,
)
