"""DFlash checkpoints of others: read z-lab's and speculators' layouts as drafters, write ours in them for engines.

Both layouts are for targets with one residual stream. What they share with a [`HyperDFlashDrafter`] with
`reducer="fc"` is all of it but names in the configuration, how layers are counted, and what they call the tokens they
may draft.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub import snapshot_download
from safetensors.torch import load_file, save_file
from transformers import PreTrainedConfig, PreTrainedModel

from ..runtime.configuration_hyperdflash import HyperDFlashConfig
from ..runtime.modeling_hyperdflash import HyperDFlashDrafter
from ..runtime.weights import check_draft_ids, check_finite, check_names, check_source, named_dtype, weight_files

FORMATS = ("z-lab", "speculators")
# Fields with one name everywhere.
_SHAPE = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "intermediate_size", "hidden_act", "rms_norm_eps", "max_position_embeddings", "attention_bias",
)  # fmt: skip
_NEEDED = _SHAPE[:7]  # without which other programs do not agree on a default


def load_dflash(
    path_or_id: str | Path,
    *,
    target: PreTrainedModel | None = None,
    dtype: torch.dtype | str | None = None,
    **hub_kwargs: Any,
) -> HyperDFlashDrafter:
    """Read a DFlash drafter in z-lab's or speculators' layout.

    z-lab counts layers from 0 by their output, as we do; speculators' id i is what enters layer i, so its ids are one
    more. A truncated vocabulary (speculators' `t2d` and `d2t`) keeps its own LM head; otherwise embedding and LM head
    are the target's, of which such a checkpoint may hold copies.

    Args:
        path_or_id: Folder or Hub id.
        target: Its target, if copies of its embedding and head in the checkpoint are to be compared with it.
        dtype: Of the weights, or its name; the checkpoint's by default.
        **hub_kwargs: For the Hub: `revision`, `token`, `cache_dir`, `local_files_only`, ...

    Raises:
        ValueError: If it is neither layout, or has parts that cannot be reproduced here, naming them.
        OSError: If it cannot be found, or is not in safetensors.
    """
    check_source(path_or_id)
    dtype = named_dtype(dtype)
    folder, name = Path(path_or_id), str(path_or_id)
    if not folder.is_dir():
        folder = Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors"], **hub_kwargs))
    fields, _ = PreTrainedConfig.get_config_dict(folder)
    config = _from_speculators(fields, name) if "speculators_model_type" in fields else _from_zlab(fields, name)
    tensors: dict[str, torch.Tensor] = {}
    for shard in weight_files(folder):
        tensors |= load_file(folder / shard)
    if not tensors:
        raise OSError(f"{name} has no model.safetensors: drafters are read from safetensors only, not from pickles.")
    check_finite(tensors, name)
    if config.draft_vocab_size:
        tensors["draft_ids"] = _draft_ids(tensors, config, name)
    if target is not None:
        _check_copies(tensors, target, name)
    for copied in ("embed_tokens.weight", "t2d", "d2t", *(() if config.draft_vocab_size else ("lm_head.weight",))):
        tensors.pop(copied, None)
    drafter = HyperDFlashDrafter(config)
    wanted = drafter.state_dict()
    check_names(
        name,
        missing=wanted.keys() - tensors.keys(),
        unexpected=tensors.keys() - wanted.keys(),
        of_another_shape=[key for key in wanted.keys() & tensors.keys() if wanted[key].shape != tensors[key].shape],
    )
    drafter.load_state_dict(tensors)
    drafter.config._name_or_path = name
    return cast(HyperDFlashDrafter, cast(Any, drafter).to(dtype or tensors["norm.weight"].dtype).eval())


def _draft_ids(tensors: dict[str, torch.Tensor], config: HyperDFlashConfig, name: str) -> torch.Tensor:
    """The tokens of the target's vocabulary that a truncated one has, from `d2t`, what to add to each of its ids."""
    count, offsets, kept = config.draft_vocab_size, tensors.get("d2t"), tensors.get("t2d")
    if offsets is None:
        raise ValueError(f"{name} drafts {count} of {config.vocab_size} tokens but has no `d2t`.")
    check_draft_ids(offsets + torch.arange(len(offsets)).to(offsets.dtype), count, config.vocab_size, name)
    ids = offsets.long() + torch.arange(count)
    if kept is not None and (kept.shape != (config.vocab_size,) or not torch.equal(kept.nonzero().flatten(), ids)):
        raise ValueError(f"`t2d` and `d2t` of {name} name different tokens: the checkpoint is damaged.")
    return ids


def _check_copies(tensors: dict[str, torch.Tensor], target: PreTrainedModel, name: str) -> None:
    embedding = cast(torch.Tensor, target.get_input_embeddings().weight)
    head = cast(torch.Tensor, target.get_output_embeddings().weight)
    if "draft_ids" in tensors:
        head = head[tensors["draft_ids"].to(head.device)]
    for key, own in (("embed_tokens.weight", embedding), ("lm_head.weight", head)):
        if key in tensors and not own.is_meta and not torch.equal(tensors[key].to(own), own):
            raise ValueError(
                f"`{key}` of {name} is not a copy of the target's: the drafter was made for another target, or has "
                "one of its own, which is not supported."
            )


def _from_zlab(fields: dict[str, Any], name: str) -> HyperDFlashConfig:
    inner = fields.get("dflash_config")
    if not isinstance(inner, dict):
        raise ValueError(
            f"{name} is no DFlash drafter: expected a `dflash_config` (z-lab) or a `speculators_config` in its "
            f"config.json, which is of a {fields.get('model_type')!r} model."
        )
    value = {**fields, **inner}.get
    for option in ("input_embedding_scale", "output_multiplier", "final_logit_softcapping"):
        if value(option) not in (None, 1, 1.0):
            raise ValueError(f"`{option}` of {name} is {value(option)}, which is not supported: expected none.")
    if "sliding_attention" in (fields.get("layer_types") or ()):
        raise ValueError(
            f"{name} has sliding attention layers, counted from each query: only full attention is supported."
        )
    return _config(
        fields,
        value("target_layer_ids"),
        value("block_size"),
        value("mask_token_id"),
        fields.get("num_target_layers"),
        name,
    )


def _from_speculators(fields: dict[str, Any], name: str) -> HyperDFlashConfig:
    if fields["speculators_model_type"] != "dflash":
        raise ValueError(f"{name} is a {fields['speculators_model_type']!r} speculator, expected 'dflash'.")
    layer, method = (_section(fields, key, name) for key in ("transformer_layer_config", "speculators_config"))
    kinds = set(layer.get("layer_types") or ())
    window = layer.get("sliding_window") if kinds == {"sliding_attention"} else None
    if "sliding_attention" in kinds and not (window and fields.get("sliding_window_non_causal")):
        raise ValueError(
            f"{name} has sliding attention layers that are causal within the block or mixed with full ones: expected "
            "one kind, and `sliding_window_non_causal`."
        )
    ids = [i - 1 if isinstance(i, int) else i for i in fields.get("aux_hidden_state_layer_ids") or ()]
    verifier = method.get("verifier") or {}
    size = fields.get("draft_vocab_size") or layer.get("vocab_size")
    return _config(
        layer, ids, fields.get("block_size"), fields.get("mask_token_id"), None, name,
        sliding_window=window,
        sample_from_anchor=bool(fields.get("sample_from_anchor", False)),
        target_name_or_path=verifier.get("name_or_path") or "",
        draft_vocab_size=0 if size == layer.get("vocab_size") else size,
    )  # fmt: skip


def _section(fields: dict[str, Any], key: str, name: str) -> dict[str, Any]:
    if not isinstance(fields.get(key), dict):
        raise ValueError(f"`{key}` in the config.json of {name} is {fields.get(key)!r}, expected a dictionary.")
    return cast("dict[str, Any]", fields[key])


def _config(
    shape: dict[str, Any],
    ids: list[int] | None,
    block: int | None,
    mask: int | None,
    layers: int | None,
    name: str,
    **more: Any,
) -> HyperDFlashConfig:
    if not ids or block is None or mask is None:
        raise ValueError(
            f"config.json of {name} lacks `target_layer_ids` ({ids}), `block_size` ({block}) or `mask_token_id` "
            f"({mask})."
        )
    missing = [field for field in _NEEDED if shape.get(field) is None]
    if missing:
        raise ValueError(f"config.json of {name} lacks {', '.join(missing)}.")
    if not all(type(i) is int for i in ids):
        raise ValueError(f"{name} reads layers {ids}, expected integers.")
    if min(ids) < 0 or (layers and max(ids) >= layers - 1):
        raise ValueError(
            f"{name} reads layers {ids} of its target's {layers or '?'}: the embeddings and the last layer's output, "
            "which is normed in some programs and not in others, are not supported."
        )
    if ids != sorted(set(ids)):
        raise ValueError(f"{name} reads layers {ids}, expected ascending ones, each once.")
    scaling = shape.get("rope_scaling") or {}
    if not isinstance(scaling, dict):
        raise ValueError(f"`rope_scaling` in the config.json of {name} is {scaling!r}, expected a dictionary.")
    rope = shape.get("rope_parameters") or {
        "rope_type": "default", **scaling, "rope_theta": shape.get("rope_theta", 10000.0),
    }  # fmt: skip
    try:
        return HyperDFlashConfig(
            **{field: shape[field] for field in _SHAPE if shape.get(field) is not None},
            rope_parameters=rope,
            reducer="fc",
            target_hc_mult=1,
            target_layer_ids=ids,
            block_size=block,
            mask_token_id=mask,
            target_model_type=shape.get("model_type") or "",
            **more,
        )
    except ValueError as error:
        raise ValueError(f"config.json of {name}: {error}") from error


def export_dflash(drafter: HyperDFlashDrafter, folder: str | Path, format: str = "z-lab") -> str:
    """Write a drafter in another layout, where it is expressible there.

    Args:
        drafter: With `reducer="fc"` over intermediate layers of a target with one residual stream.
        folder: Created if missing.
        format: `"z-lab"` (vLLM and SGLang load it) or `"speculators"` (vLLM).

    Returns:
        How engines are told to serve it.

    Raises:
        ValueError: If the layout has no words for the drafter, saying which part. Nothing is written then.
    """
    if format not in FORMATS:
        raise ValueError(f"`format` is {format!r}, expected one of {FORMATS}.")
    config, folder = drafter.config, Path(folder)
    _check_expressible(config, format)
    fields = _zlab_fields(config) if format == "z-lab" else _speculators_fields(config)
    tensors = {name: value.detach().cpu().contiguous() for name, value in drafter.state_dict().items()}
    if "draft_ids" in tensors:
        ids = tensors.pop("draft_ids")
        tensors["d2t"] = ids - torch.arange(len(ids))
        tensors["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    fields["dtype"] = str(drafter.dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(fields, indent=2) + "\n")
    speculative = {"method": "dflash", "model": str(folder), "num_speculative_tokens": config.max_draft_tokens}
    told = f"vLLM: --speculative-config '{json.dumps(speculative)}'"
    if format == "z-lab":
        told += (
            f"\nSGLang: --speculative-algorithm DFLASH --speculative-draft-model-path {folder} "
            f"--speculative-num-draft-tokens {config.block_size}"
        )
    return told


def _check_expressible(config: HyperDFlashConfig, format: str) -> None:
    obstacles = {
        f"its reducer is {config.reducer!r}, and the layout knows only the dense projection `fc`": config.reducer
        != "fc",
        f"its target has {config.target_hc_mult} residual paths, and the layout only one": config.target_hc_mult != 1,
        "it reads the last layer's residual, which engines do not hand to a DFlash drafter": -1
        in (config.target_layer_ids or ()),
        "its width differs from the target's": config.hidden_size != config.target_hidden_size,
        "z-lab's layout has no truncated vocabulary": format == "z-lab" and bool(config.draft_vocab_size),
        "in z-lab's layout every slot drafts but the anchor's": format == "z-lab" and config.sample_from_anchor,
        "a window that all slots share (`sliding_window`) cannot be said in z-lab's layout: load it with "
        "`from_pretrained(..., sliding_window=None)`, whose drafts are the same up to that many tokens": format
        == "z-lab"
        and config.sliding_window is not None,
    }
    reasons = [reason for reason, holds in obstacles.items() if holds]
    if reasons:
        raise ValueError(
            f"This drafter cannot be written in the {format} layout: {'; '.join(reasons)}. Serve it with "
            "transformers, or train a `reducer='fc'` drafter over intermediate layers of a target with one residual "
            "stream."
        )


def _layer_fields(config: HyperDFlashConfig) -> dict[str, Any]:
    kind = "full_attention" if config.sliding_window is None else "sliding_attention"
    return {
        "model_type": "qwen3",
        **{name: getattr(config, name) for name in _SHAPE},
        "layer_types": [kind] * config.num_hidden_layers,
        "sliding_window": config.sliding_window,
        "use_sliding_window": config.sliding_window is not None,
        "tie_word_embeddings": False,
        "attention_dropout": 0.0,
        "initializer_range": config.initializer_range,
    }


def _rope(config: HyperDFlashConfig) -> dict[str, Any]:
    return dict(config.rope_parameters or {})


def _zlab_fields(config: HyperDFlashConfig) -> dict[str, Any]:
    rope = _rope(config)
    scaling = {name: value for name, value in rope.items() if name != "rope_theta"}
    return {
        "architectures": ["DFlashDraftModel"],
        **_layer_fields(config),
        "rope_theta": rope["rope_theta"],
        "rope_scaling": None if scaling.get("rope_type", "default") == "default" else scaling,
        "block_size": config.block_size,
        "dflash_config": {"mask_token_id": config.mask_token_id, "target_layer_ids": config.target_layer_ids},
    }


def _speculators_fields(config: HyperDFlashConfig) -> dict[str, Any]:
    method = {
        "proposal_type": "greedy", "speculative_tokens": config.max_draft_tokens, "accept_tolerance": 0.0,
        "verifier_accept_k": 1,
    }  # fmt: skip
    return {
        "architectures": ["DFlashDraftModel"],
        "speculators_model_type": "dflash",
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [method],
            "verifier": {"name_or_path": config.target_name_or_path or None, "architectures": []},
        },
        "transformer_layer_config": {**_layer_fields(config), "rope_parameters": _rope(config)},
        "draft_vocab_size": config.draft_vocab_size or config.vocab_size,
        "aux_hidden_state_layer_ids": [layer + 1 for layer in config.target_layer_ids or ()],
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "sample_from_anchor": config.sample_from_anchor,
        # vLLM makes every layer causal where this is false.
        "sliding_window_non_causal": True,
    }
