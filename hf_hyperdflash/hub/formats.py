"""Drafters written in other programs' layouts, for engines: z-lab's, speculators' and DeepSpec's.

All three are for targets with one residual stream. What they share with a [`HyperDFlashDrafter`] with
`reducer="fc"` is all of it but names in the configuration, how layers are counted, and what they call the tokens
they may draft.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from transformers import PreTrainedConfig, PreTrainedModel

from ..drafters.blocks.configuration_hyperdflash import HyperDFlashConfig
from ..drafters.blocks.modeling_hyperdflash import HyperDFlashDrafter
from ..drafters.parts.block_attention import SLIDING
from ..targets.registry import target_of
from .found import find
from .kinds import KINDS, named
from .layouts.table import Layout

_WRITTEN = {name: path for kind in KINDS for name, path in kind.writes.items()}
FORMATS = tuple(_WRITTEN)
# Fields that change what is drafted, by themselves.
_ALWAYS = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "intermediate_size", "hidden_act", "rms_norm_eps", "attention_bias", "target_layer_ids", "block_size",
    "mask_token_id", "sample_from_anchor", "draft_vocab_size", "final_logit_softcapping", "sequential_head",
    "conv_kernel_size", "confidence_head",
)  # fmt: skip
# How a drafter is loaded that needs no word for a field.
_NO_WINDOW = (
    ": load it with `from_pretrained(..., sliding_window=None)`, whose drafts are the same up to that many tokens"
)
_WITHOUT = {
    "sliding_window": _NO_WINDOW, "window_from": _NO_WINDOW,
    "confidence_temperatures": ": load it with `from_pretrained(..., confidence_temperatures=None)`",
}  # fmt: skip


def changed_fields(config: HyperDFlashConfig, layout: Layout) -> list[str]:
    """Return what a drafter would be read as that is written in a layout, where that is another."""
    try:
        again = layout.read(layout.write(config), "what would be written")
    except ValueError as error:
        return [str(error)]
    ours, theirs = _meaning(config), _meaning(cast(HyperDFlashConfig, again))
    return [
        f"`{name}` is {value!r}, and there it would be {theirs[name]!r}{_WITHOUT.get(name, '')}"
        for name, value in ours.items()
        if theirs.get(name, value) != value
    ]


def _meaning(config: HyperDFlashConfig) -> dict[str, Any]:
    """Return the fields of a configuration that change what is drafted, without those that change nothing beside
    others."""
    rope = config.rope_parameters or {}
    if rope.get("rope_type") == "default":
        rope = {name: rope[name] for name in ("rope_theta", "partial_rotary_factor") if name in rope}
    slides, has_head = SLIDING in config.kinds, config.sequential_head != "none"
    is_causal = slides or config.causal_layers == "all"
    told = {
        **{name: getattr(config, name) for name in _ALWAYS},
        "rope_parameters": rope,
        "sliding_window": config.sliding_window if slides else None,
        "causal_layers": config.causal_layers if is_causal else "none",
    }
    told |= {"layer_types": config.kinds, "window_from": config.window_from} if slides else {}
    candidates = config.head_candidates or config.draft_vocab_size or config.vocab_size
    told |= {"head_rank": config.head_rank, "head_candidates": candidates} if has_head else {}
    if config.sequential_head == "gru":
        told |= {"head_state_size": config.head_state_size, "head_start": config.head_start}
    told |= {"conv_group_size": config.conv_group_size} if config.conv_kernel_size else {}
    told |= {"confidence_temperatures": config.confidence_temperatures} if config.confidence_head else {}
    reads_token = config.confidence_head and has_head
    return told | ({"confidence_reads_token": config.confidence_reads_token} if reads_token else {})


def check_expressible(config: HyperDFlashConfig, format: str, has_target: bool) -> None:
    """Raise a `ValueError` if there is no such layout, it has no words for a drafter, saying for which part, or it
    holds a part of the target, which is not given."""
    if format not in FORMATS:
        raise ValueError(f"`format` is {format!r}, expected one of {FORMATS}.")
    is_mean, layout = config.reducer == "stream_mean", named(_WRITTEN[format])
    obstacles = {
        f"its reducer is {config.reducer!r}, and the layout knows only a dense projection, `fc`, of one stream or of "
        "the mean of several": config.reducer != "fc" and not is_mean,
        f"its target has {config.target_hc_mult} residual streams, and the layout only one": config.target_hc_mult != 1
        and not is_mean,
        "it reads the last layer's residual, which engines do not hand to a drafter": -1
        in (config.target_layer_ids or ()),
        "it has a mask vector of its own, and the layout a token of the target's": config.mask_token_id is None,
        "its width differs from the target's": config.hidden_size != config.target_hidden_size,
    }
    reasons = [reason for reason, holds in obstacles.items() if holds] or changed_fields(config, layout)
    if reasons:
        raise ValueError(
            f"This drafter cannot be written in the {format} layout: {'; '.join(reasons)}. Serve it with "
            "transformers, or train a `reducer='fc'` drafter over intermediate layers of a target with one residual "
            "stream."
        )
    if layout.copies_target and not has_target:
        raise ValueError(
            f"The {format} layout holds copies of the target's embedding and LM head: give the target (`target=`, or "
            "`--target` on the command line)."
        )


def check_replaceable(folder: str | Path) -> None:
    """Raise a `ValueError` if a folder has a model that an export would replace and that is no export itself."""
    config = Path(folder, "config.json")
    fields = PreTrainedConfig.get_config_dict(folder)[0] if config.is_file() else {}
    found = find(fields, folder)
    is_export = found is not None and found.layout is not None
    if not is_export and (fields or any(Path(folder).glob("*.safetensors"))):
        raise ValueError(
            f"{folder} has a model that is no export ({fields.get('model_type', 'no config.json')}), expected a "
            "folder that may be written over: name another one."
        )


def export_dflash(
    drafter: HyperDFlashDrafter, folder: str | Path, format: str = "z-lab", target: PreTrainedModel | None = None
) -> str:
    """Write a drafter in another layout, and return how engines are told to serve it.

    `"z-lab"` has DFlash and DFlash 2, `"deepspec"` DSpark, `"speculators"` all three. DeepSpec's holds copies of the
    target's embedding and LM head; the others do without a target. Where a layout has no words for the drafter, a
    `ValueError` says for which part, and nothing is written.
    """
    config, folder = drafter.config, Path(folder)
    check_replaceable(folder)
    check_expressible(config, format, target is not None)
    if target is not None:
        drafter.check_target(seen := target_of(target))
        config = copy.copy(config)
        config.target_num_layers = config.target_num_layers or seen.config.num_hidden_layers
    layout: Layout = named(_WRITTEN[format])
    tensors = {name: value.detach().cpu().contiguous() for name, value in drafter.state_dict().items()}
    if "draft_ids" in tensors:
        ids = tensors.pop("draft_ids")
        tensors["d2t"] = ids - torch.arange(len(ids))
        tensors["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
    if target is not None and layout.copies_target:
        modules = {"embed_tokens": target.get_input_embeddings(), "lm_head": target.get_output_embeddings()}
        for name, module in modules.items():
            weight = cast(torch.Tensor, module.weight)
            if weight.is_meta:
                raise ValueError(
                    "The target's embedding or LM head is not in memory. Load it on one device to copy them."
                )
            tensors[f"{name}.weight"] = weight[: config.vocab_size].detach().cpu().clone()
    fields = {**layout.write(config), "dtype": str(drafter.dtype).removeprefix("torch.")}
    tensors = {layout.tensor_name(name): tensor for name, tensor in tensors.items()}
    folder.mkdir(parents=True, exist_ok=True)
    try:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(
            f"The weights cannot be written to {folder} ({error}). Make room there, or choose another folder."
        ) from error
    (folder / "config.json").write_text(json.dumps(fields, indent=2) + "\n")
    return layout.served(config, folder)
