"""Drafters of others: read z-lab's, speculators' and DeepSpec's layouts as drafters, write ours in them for engines.

All three are for targets with one residual stream. What they share with a [`HyperDFlashDrafter`] with
`reducer="fc"` is all of it but names in the configuration, how layers are counted, and what they call the tokens
they may draft.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any, cast

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import PreTrainedConfig, PreTrainedModel

from ..drafters.blocks.configuration_hyperdflash import HyperDFlashConfig
from ..drafters.blocks.modeling_hyperdflash import HyperDFlashDrafter
from ..drafters.configuration import DrafterConfig
from ..drafters.parts.block_attention import SLIDING
from ..drafters.saved import SavedDrafter
from ..drafters.weights import (
    HubOptions,
    check_draft_ids,
    check_finite,
    check_names,
    check_source,
    named_dtype,
    resolve_subfolder,
    warn_of_float16,
    warn_of_untrained,
    weight_files,
)
from ..targets.registry import target_of
from .kinds import KINDS, DrafterKind, named
from .layouts.table import Layout

if TYPE_CHECKING:
    from typing_extensions import Unpack

_ROWS_COMPARED, _SAME_WAY = 256, 0.9  # of a copy and a fine-tuned target, and the mean cosine of their angles
# Layouts that can be written, too.
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
_QUANTIZED = ("quantization_config", "compression_config", "quantization")  # in config.json; the last is MLX's
# Drafters that are not read, by a part of what their config.json calls them.
_NOT_READ = {
    "peagle": "P-EAGLE", "p_eagle": "P-EAGLE", "medusamodel": "Medusa as a whole model or for vLLM", "hydra": "Hydra",
    "mlpspeculator": "MLP speculator", "mlp_speculator": "MLP speculator", "eagle": "EAGLE-1 or EAGLE-2",
}  # fmt: skip


def load_foreign(
    path_or_id: str | Path,
    *,
    target: PreTrainedModel | None = None,
    dtype: torch.dtype | str | None = None,
    **hub_kwargs: Unpack[HubOptions],
) -> SavedDrafter:
    """Read a drafter in another program's layout: DFlash, DFlash 2 and DSpark in z-lab's, speculators' or DeepSpec's,
    EAGLE-3 in SafeAILab's (SpecForge's) or speculators', SpecBlock in its authors'.

    A truncated vocabulary (`t2d` and `d2t`) keeps its own LM head, as EAGLE-3 and SpecBlock always do; otherwise
    embedding and LM head are the target's, of which such a checkpoint may hold copies. An EAGLE-3 drafter's embedding
    that is no copy of the target's, or cannot be compared with it, is kept.

    Args:
        path_or_id: Folder or Hub id.
        target: Its target, if copies of its embedding and head in the checkpoint are to be compared with it.
        dtype: Of the weights, or its name; the checkpoint's by default.
        **hub_kwargs: Where it is: `subfolder`, and for the Hub `revision`, `token`, `cache_dir`, `local_files_only`,
            ...

    Raises:
        ValueError: If it is in no such layout, or has parts that cannot be reproduced here, naming them.
        OSError: If it cannot be found, or is not in safetensors.
    """
    path_or_id, hub_kwargs = resolve_subfolder(path_or_id, hub_kwargs)
    check_source(path_or_id)
    dtype = named_dtype(dtype)
    folder, name = Path(path_or_id), str(path_or_id)
    if not folder.is_dir():
        folder = _downloaded(name, **hub_kwargs)
    fields = PreTrainedConfig.get_config_dict(folder)[0]
    kind, layout = _layout_of(fields, name)
    check_not_quantized(fields, name, folder)
    config: DrafterConfig = layout.read(fields, name)
    tensors = _tensors(folder, kind.files, name)
    tensors = {ours: tensor for key, tensor in tensors.items() if (ours := layout.rename(key)) is not None}
    warn_of_untrained(tensors, name)
    layout.complete(config, tensors, fields)
    if hasattr(config, "own_embedding"):
        config.own_embedding |= _has_own("embed_tokens", tensors, target)
        if config.draft_vocab_size == config.vocab_size and not _has_own("lm_head", tensors, target):
            config.draft_vocab_size = 0
    has_own_head = bool(getattr(config, "draft_vocab_size", 0))
    if has_own_head:
        tensors["draft_ids"] = _draft_ids(tensors, config, name)
    if target is not None and not hasattr(config, "own_embedding"):
        _check_copies(tensors, target, name)
    own = {"embed_tokens.weight"} if getattr(config, "own_embedding", False) else set()
    for copied in ("embed_tokens.weight", "t2d", "d2t", *(() if has_own_head else ("lm_head.weight",))):
        if copied not in own:
            tensors.pop(copied, None)
    drafter: Any = kind.drafter(config)
    wanted = drafter.state_dict()
    check_names(
        name,
        missing=wanted.keys() - tensors.keys(),
        unexpected=tensors.keys() - wanted.keys(),
        of_another_shape=[key for key in wanted.keys() & tensors.keys() if wanted[key].shape != tensors[key].shape],
    )
    drafter.load_state_dict(tensors)
    drafter.config._name_or_path = name
    like = tensors.get("norm.weight", next(iter(tensors.values())))
    warn_of_float16(name, like.dtype, dtype)
    return cast(SavedDrafter, drafter.to(dtype or like.dtype).eval())


def _tensors(folder: Path, files: tuple[str, ...], name: str) -> dict[str, torch.Tensor]:
    """Return what the files of a kind hold, else `model.safetensors`, else a pickle of the kind's."""
    there = [file for file in files if (folder / file).is_file()]
    tensors: dict[str, torch.Tensor] = {}
    for shard in [file for file in there if file.endswith(".safetensors")] or weight_files(folder):
        tensors |= load_file(folder / shard)
    for pickle in () if tensors else [file for file in there if not file.endswith(".safetensors")]:
        tensors = _unpickled(folder / pickle)
    if not tensors:
        raise OSError(f"{name} has no model.safetensors: drafters are read from safetensors only, not from pickles.")
    check_finite(tensors, name)
    return tensors


def _unpickled(path: Path) -> dict[str, torch.Tensor]:
    try:
        tensors = torch.load(path, map_location="cpu", weights_only=True)  # which runs no code
    except UnpicklingError as error:
        raise OSError(f"{path} holds more than tensors, expected a pickle of these alone, or is damaged.") from error
    except (RuntimeError, EOFError) as error:
        raise OSError(f"{path} is damaged: copy or download it again.") from error
    if not isinstance(tensors, dict) or not all(isinstance(tensor, torch.Tensor) for tensor in tensors.values()):
        raise OSError(f"{path} holds a {type(tensors).__name__}, expected tensors by their names.")
    return tensors


def _downloaded(name: str, subfolder: str = "", **hub_kwargs: Any) -> Path:
    """Return where a drafter's files are, those of its folder of the repository alone."""
    inside = f"{subfolder.strip('/')}/" if subfolder else ""
    files = [file for kind in KINDS for file in kind.files]
    wanted = [f"{inside}{file}" for file in ("*.json", "*.safetensors", *files)]
    return Path(
        snapshot_download(name, allow_patterns=wanted, ignore_patterns=[f"{inside}*/*"], **hub_kwargs), subfolder
    )


def foreign_without_weights(fields: dict[str, Any], name: str) -> SavedDrafter:
    """Return the drafter of which `fields` are the config.json, made as on the device that is set, with no weights
    read.

    Raises:
        ValueError: If it is in no such layout, or has parts that cannot be reproduced here, naming them.
    """
    kind, layout = _layout_of(fields, name)
    return cast(SavedDrafter, kind.drafter(layout.read(fields, name)))


def foreign_layout(fields: dict[str, Any]) -> tuple[DrafterKind, Layout] | None:
    """Return the kind that a drafter of another program is read as, and the layout of its config.json; `None` if that
    is in no layout that is read."""
    if "hyperdflash_version" in fields or kind_not_read(fields):
        return None
    layouts = ((kind, named(path)) for kind in KINDS for path in kind.reads)
    return next(((kind, layout) for kind, layout in layouts if layout.fits(fields)), None)


def kind_not_read(fields: dict[str, Any]) -> str:
    """Return what kind of drafter a config.json is of, if it is of one that is not read; `""` if not."""
    told = [*(fields.get("architectures") or ()), fields.get("model_type"), fields.get("speculators_model_type")]
    words = " ".join(map(str, told)).lower().replace("eagle3", "").replace("eagle-3", "")
    return next((kind for part, kind in _NOT_READ.items() if part in words), "")


def _layout_of(fields: dict[str, Any], name: str) -> tuple[DrafterKind, Layout]:
    found = foreign_layout(fields)
    if found is None:
        kind = kind_not_read(fields)
        what = f"a drafter of a kind that is not read ({kind})" if kind else "no drafter"
        known = [name for one in KINDS for name in one.writes or one.known_as]
        raise ValueError(
            f"{name} is {what}: expected a config.json in the layout of {', '.join(known[:-1])} or {known[-1]}, and "
            f"it is of a {fields.get('model_type')!r} model."
        )
    return found


def check_not_quantized(fields: dict[str, Any], name: str, folder: str | Path) -> None:
    """Raise a `ValueError` that names what quantized another program's drafter, if something did: its config.json or,
    of ModelOpt, a file beside that in `folder` says so."""
    layers = fields.get("transformer_layer_config")
    sections = [fields, layers] if isinstance(layers, dict) else [fields]
    given = [part[field] for part in sections for field in _QUANTIZED if part.get(field)]
    of_modelopt = Path(folder, "hf_quant_config.json")
    if of_modelopt.is_file():
        given.append(
            {"quant_method": "modelopt", **json.loads(of_modelopt.read_text("utf-8")).get("quantization", {})}
        )
    if not given:
        return
    said = given[0] if isinstance(given[0], dict) else {}
    is_mlx = "quant_method" not in said and "group_size" in said
    method = "MLX" if is_mlx else said.get("quant_method", "a program that it does not name")
    kind = said.get("quant_algo") or said.get("format") or (f"{said['bits']} bits" if "bits" in said else "")
    raise ValueError(
        f"{name} is quantized by {method}{f' ({kind})' if kind else ''}, expected a drafter's weights as they were "
        "trained: take the original that it was made of."
    )


def _has_own(part: str, tensors: dict[str, torch.Tensor], target: PreTrainedModel | None) -> bool:
    """Return whether there is an `embed_tokens` or `lm_head` that is not known to be a copy of the target's."""
    given = tensors.get(f"{part}.weight")
    if given is None or target is None:
        return given is not None
    module = target.get_input_embeddings() if part == "embed_tokens" else target.get_output_embeddings()
    own = cast(torch.Tensor, module.weight)[: len(given)]  # of a fine-tuned target, without rows that were added
    return own.is_meta or own.shape != given.shape or not torch.equal(given.to(own), own)


def _draft_ids(tensors: dict[str, torch.Tensor], config: DrafterConfig, name: str) -> torch.Tensor:
    """Return the tokens of the target's vocabulary that a truncated one has, from `d2t`, what to add to each of its
    ids."""
    count, offsets, kept = config.draft_vocab_size, tensors.get("d2t"), tensors.get("t2d")
    if count == config.vocab_size and (offsets is None or not offsets.any()):  # SafeAILab's `t2d` may be as empty
        return torch.arange(count)
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
        if key in tensors and not own.is_meta and not _are_rows_of(own, tensors[key]):
            raise ValueError(
                f"`{key}` of {name} is not a copy of the target's: the drafter was made for another target, or has "
                "one of its own, which is not supported."
            )


@torch.no_grad()
def _are_rows_of(own: torch.Tensor, copied: torch.Tensor) -> bool:
    """Return whether a copy has the first rows of a target's embedding or LM head, or those that it had before it was
    fine-tuned: a few rows are compared, which still point the same way."""
    if copied.shape[0] > own.shape[0] or copied.shape[1:] != own.shape[1:]:
        return False
    rows = torch.linspace(0, len(copied) - 1, _ROWS_COMPARED).long()
    theirs, ours = (each[rows.to(each.device)].float().cpu() for each in (copied, own))
    return float(torch.cosine_similarity(theirs, ours, dim=-1).mean()) > _SAME_WAY


def _changed(config: HyperDFlashConfig, layout: Layout) -> list[str]:
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
    reasons = [reason for reason, holds in obstacles.items() if holds] or _changed(config, layout)
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
    if foreign_layout(fields) is None and (fields or any(Path(folder).glob("*.safetensors"))):
        raise ValueError(
            f"{folder} has a model that is no export ({fields.get('model_type', 'no config.json')}), expected a "
            "folder that may be written over: name another one."
        )


def export_dflash(
    drafter: HyperDFlashDrafter, folder: str | Path, format: str = "z-lab", target: PreTrainedModel | None = None
) -> str:
    """Write a drafter in another layout, where it is expressible there.

    Args:
        drafter: With `reducer="fc"` over intermediate layers of a target with one residual stream. Without a head it
            is DFlash, with DSpark's heads DSpark, with a selector and convolutions DFlash 2.
        folder: Created if missing.
        format: `"z-lab"` (DFlash and DFlash 2), `"speculators"` (all three) or `"deepspec"` (DSpark).
        target: Its target, whose embedding and LM head DeepSpec's layout holds copies of; the others do without.

    Returns:
        How engines are told to serve it.

    Raises:
        ValueError: If the layout has no words for the drafter, saying which part, the target is missing or another,
            or the folder has a model that is no export. Nothing is written then.
        OSError: If it cannot be written, on a full disk for example.
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
        tensors |= {name: copied[: config.vocab_size] for name, copied in _copies(target).items()}
    fields = {**layout.write(config), "dtype": str(drafter.dtype).removeprefix("torch.")}
    folder.mkdir(parents=True, exist_ok=True)
    try:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(
            f"The weights cannot be written to {folder} ({error}). Make room there, or choose another folder."
        ) from error
    (folder / "config.json").write_text(json.dumps(fields, indent=2) + "\n")
    return layout.served(config, folder)


def _copies(target: PreTrainedModel) -> dict[str, torch.Tensor]:
    modules = {"embed_tokens": target.get_input_embeddings(), "lm_head": target.get_output_embeddings()}
    weights = {f"{name}.weight": cast(torch.Tensor, module.weight) for name, module in modules.items()}
    if any(weight.is_meta for weight in weights.values()):
        raise ValueError("The target's embedding or LM head is not in memory. Load it on one device to copy them.")
    return {name: weight.detach().cpu().clone() for name, weight in weights.items()}
