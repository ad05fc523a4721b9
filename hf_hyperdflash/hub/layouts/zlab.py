"""z-lab's layout, as SpecForge, NVIDIA and JetSpec write it, too: DFlash, DFlash 2, DSpark, Domino and JetSpec in a
Qwen3 configuration with a `dflash_config`. It counts layers as we do. SpecForge's DSpark drafts as DeepSpec's does.
JetSpec is DFlash whose slots see no later ones.

deepseek-ai/DeepSpec's DSpark is the same flat, with copies of the target's embedding and LM head. Every input of a
block drafts, the anchor too, and layer -1 is the embedding's output."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from ...drafters.blocks.configuration_hyperdflash import HyperDFlashConfig
from ...drafters.parts.block_attention import FULL, SLIDING
from .lines import (
    DFLASH2,
    DOMINO,
    DRAFT_VOCABULARY,
    DSPARK,
    ROPE,
    SELECTOR_FIELDS,
    SOFT_CAP,
    STREAMS,
    TARGET_DEPTH,
    WINDOWS,
    is_dflash2,
    is_domino,
    layers_read,
    read_windows,
    sglang,
    shape,
    vllm,
)
from .table import Entry, Fields, Given, Layout, always, inside, marked, same, written_if

_DFLASH, _DFLASH2, _DOMINO = _ARCHITECTURES = ("DFlashDraftModel", "DFlash2DraftModel", "DominoDraftModel")
_CAUSAL = {None: "sliding", False: "none", True: "all"}  # what `is_causal` means
_IS_CAUSAL_NAMES = ("is_causal", "causal", "causal_head")  # z-lab's, vLLM's and JetSpec's
# With these values of `projector_type` the other fields describe the drafter completely.
_PROJECTORS = (None, "dflash", "dflash2", "dspark", "domino")
# Domino's tensors, and ours.
_DOMINO_TENSORS = {
    "prefix_gru.weight_ih_l0": "gru_head.input_proj.weight", "prefix_gru.weight_hh_l0": "gru_head.state_proj.weight",
    "embed_proj.0.weight": "gru_head.hidden_proj.weight", "embed_proj.2.weight": "gru_head.out_proj.weight",
}  # fmt: skip
_TENSOR_NAMES = {ours: theirs for theirs, ours in _DOMINO_TENSORS.items()}
_DEEPSPEC = "Qwen3DSparkModel"


def _check_projector(given: Given) -> Fields:
    if (projector := given("projector_type")) not in _PROJECTORS:
        raise ValueError(
            f"`projector_type` of {given.name} is {projector!r}, which is not supported: expected one of "
            f"{', '.join(map(str, _PROJECTORS[1:]))}."
        )
    if given("shift_label") and not _is_domino(given):
        raise ValueError(
            f"`shift_label` of {given.name} is {given('shift_label')!r}, which is not supported without Domino's "
            "head: expected False."
        )
    return {}


def _is_domino(given: Given) -> bool:
    return _DOMINO in given.architectures.split() or given("projector_type") == "domino"


def _is_dspark(given: Given) -> bool:
    """Return whether a drafter is DSpark's. Its heads do not tell, because it may have none."""
    is_named = "DSpark" in given.architectures or "dspark_config" in given.top
    return is_named or given("projector_type") == "dspark"


def _read_heads(given: Given) -> Fields:
    if _is_domino(given):
        return DOMINO.read(given)
    if any(given(field) for field in SELECTOR_FIELDS) or _DFLASH2 in given.architectures.split():
        return DFLASH2.read(given)
    return DSPARK.read(given) if _is_dspark(given) or given("markov_rank") else {}


def _write_heads(config: Any) -> Fields:
    return DOMINO.write(config) if is_domino(config) else DFLASH2.write(config) if is_dflash2(config) else {}


def _read_anchor(given: Given) -> Fields:
    drafts, is_bonus = given("sample_from_anchor"), given("bonus_anchor")
    for field, flag in (("sample_from_anchor", drafts), ("dspark_bonus_anchor", is_bonus)):
        if flag not in (None, False, True):
            raise ValueError(f"`{field}` of {given.name} is {flag!r}, expected true, false or none.")
    if drafts is not None and drafts == is_bonus:
        raise ValueError(
            f"`sample_from_anchor` and `dspark_bonus_anchor` of {given.name} are both {drafts}, expected one of them: "
            "the anchor's slot drafts, or it does not."
        )
    if _is_domino(given):
        drafts = given("shift_label")
    elif drafts is None:
        drafts = _is_dspark(given) if is_bonus is None else not is_bonus
    return {"sample_from_anchor": bool(drafts)}


def _read_causal(given: Given) -> Fields:
    stated = {name: given(name) for name in _IS_CAUSAL_NAMES if given(name) is not None}
    for name, value in stated.items():
        if value not in (False, True):
            raise ValueError(f"`{name}` of {given.name} is {value!r}, expected true, false or none.")
    if len({*stated.values()}) > 1:
        raise ValueError(f"{given.name} says several times whether it is causal, and not the same: {stated}.")
    is_causal = next(iter(stated.values()), None)
    windows = read_windows(given)
    slides_by_kind = SLIDING in (given("layer_types") or ())  # with `use_swa` alone no layer is causal
    return {
        "causal_layers": _CAUSAL[is_causal] if is_causal or (windows and slides_by_kind) else "none",
        "window_from": "slot" if windows else "anchor",
    }


def _write_causal(config: Any) -> Fields:
    is_causal = next(value for value, layers in _CAUSAL.items() if layers == config.causal_layers)
    is_written = is_causal or (is_causal is False and (is_dflash2(config) or SLIDING in config.kinds))
    # vLLM and JetSpec read theirs in the section.
    inner = {"dflash_config": {name: True for name in _IS_CAUSAL_NAMES[1:]}} if is_causal else {}
    return {"is_causal": is_causal, **inner} if is_written else {}


def _write_rope(config: Any) -> Fields:
    """Both forms: the files of DFlash 2 are of the newer one."""
    rope = dict(config.rope_parameters or {})
    if is_dflash2(config):
        return {"rope_parameters": rope}
    scaling = {name: value for name, value in rope.items() if name != "rope_theta"}
    return {
        "rope_theta": rope["rope_theta"],
        "rope_scaling": None if scaling.get("rope_type", "default") == "default" else scaling,
        **{name: rope[name] for name in ("partial_rotary_factor",) if name in rope},
    }


BLOCK_SIZE = same("block_size", "block_size", is_needed=True)
_MASK = same("mask_token_id", "mask_token_id", "noise_token_id", is_needed=True)
_LAYERS_READ = layers_read("target_layer_ids", 0)
_PROJECTOR = Entry(("projector_type",), _check_projector)
_HEADS = Entry((*DSPARK.names, *SELECTOR_FIELDS, *DOMINO.names), _read_heads, _write_heads)
_IS_CAUSAL = Entry(_IS_CAUSAL_NAMES, _read_causal, _write_causal)
# What else may stand in a flat layout; nobody writes it.
_MORE = (
    STREAMS,
    WINDOWS,
    Entry(("partial_rotary_factor",)),  # which may be in a section
    Entry(("use_swa", "swa_window_size")),
    DRAFT_VOCABULARY,
    Entry(("sample_from_anchor", "bonus_anchor"), _read_anchor),
)


def rename(name: str) -> str:
    """PyPI's dflash saves the selector's tables with an end that it and others read them without; early versions of
    SpecForge have heads in a module."""
    name = name.removeprefix("logit_head.").replace("_codebook.weight", "_codebook")
    return _DOMINO_TENSORS.get(name, name)


def served(config: HyperDFlashConfig, folder: Path) -> str:
    """Return the options with which engines serve it."""
    if is_domino(config):
        return "No released engine is known to serve Domino's head: SpecForge and NVIDIA's programs read this layout."
    served = [vllm(config, folder, "dflash")]
    if not is_dflash2(config):
        served.append(sglang(config, folder, "DFLASH", f"--speculative-num-draft-tokens {config.block_size}"))
    return "\n".join(served)


LAYOUT = Layout(
    fits=marked(
        "dflash_config", "dspark_config", "markov_rank", "DSparkDraftModel", *_ARCHITECTURES,
    ),
    config=HyperDFlashConfig,
    table=(
        always(
            "architectures",
            lambda config: [_DOMINO if is_domino(config) else _DFLASH2 if is_dflash2(config) else _DFLASH],
        ),
        _PROJECTOR,
        shape(),
        TARGET_DEPTH,
        *inside("dflash_config", _MASK, _LAYERS_READ, SOFT_CAP),
        *inside("dflash_config", written_if(is_dflash2, BLOCK_SIZE), _HEADS),
        _IS_CAUSAL,
        ROPE._replace(write=_write_rope),
        written_if(lambda config: not is_dflash2(config), BLOCK_SIZE),
        *_MORE,
    ),
    sections={"dflash_config": None, "dspark_config": None},
    prefix="dspark_",
    changes_drafts={
        "attention_sink_bias": (False,), "add_swa_attention_sink_bias": (False,),
        "is_neox_style": (True,), "rope_is_neox_style": (True,), "use_aux_hidden_state": (True,),
        "use_embed_proj": (True,), "fusion_mode": (None,),
    },
    ignores=(
        "architectures", "mask_token", "has_embed_tokens", "has_lm_head", "sliding_window", "projector_type",
    ),
    rename=rename,
    tensor_name=lambda name: _TENSOR_NAMES.get(name, name),
    served=served,
)  # fmt: skip


def _check_deepspec(given: Given) -> Fields:
    if _DEEPSPEC not in given.architectures.split():
        raise ValueError(
            f"{given.name} is a {', '.join(given.top['architectures'])}, whose layers are not Qwen3's, which is not "
            f"supported: expected {_DEEPSPEC}."
        )
    return {}


def _deepspec_served(config: HyperDFlashConfig, folder: Path) -> str:
    """Return the options with which engines serve it."""
    if config.sequential_head != "markov":
        return "vLLM and SGLang serve DSpark's 'markov' head alone."
    size = f"--speculative-dspark-block-size {config.block_size}"
    return f"{vllm(config, folder, 'dspark')}\n{sglang(config, folder, 'DSPARK', size)}"


DEEPSPEC = replace(
    LAYOUT,
    fits=marked(_DEEPSPEC, "Gemma4DSparkModel"),
    table=(
        Entry((), _check_deepspec, lambda config: {"architectures": [_DEEPSPEC]}),
        _PROJECTOR,
        shape(),
        # The program knows no window.
        always("layer_types", lambda config: [FULL] * config.num_hidden_layers),
        always("sliding_window", lambda config: None),
        always("use_sliding_window", lambda config: False),
        ROPE,
        TARGET_DEPTH,
        BLOCK_SIZE,
        _MASK,
        _LAYERS_READ,
        SOFT_CAP,
        always("num_anchors", lambda config: 512),  # of its training, without which it does not load
        _HEADS._replace(write=DSPARK.write),
        Entry(_IS_CAUSAL.names, _IS_CAUSAL.read),
        *_MORE,
    ),
    copies_target=True,
    served=_deepspec_served,
)
