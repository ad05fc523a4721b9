"""The weights of other programs' drafters, as ours."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, cast

import torch
from huggingface_hub import snapshot_download
from safetensors.torch import load_file
from transformers import PreTrainedModel

from ..drafters.configuration import DrafterConfig
from ..drafters.saved import SavedDrafter
from ..drafters.weights import (
    check_draft_ids,
    check_finite,
    check_names,
    warn_of_float16,
    warn_of_untrained,
    weight_files,
)
from .found import Found, about_unknown, check_not_quantized
from .layouts.table import Layout

logger = logging.getLogger(__name__)

_ROWS_COMPARED, _SAME_WAY = 256, 0.9  # of a copy and a fine-tuned target, and the mean cosine of their angles


def load_foreign(found: Found, target: PreTrainedModel | None, dtype: torch.dtype | None) -> SavedDrafter:
    """Load a drafter of another program that was looked at.

    A truncated vocabulary (`t2d` and `d2t`) keeps its own LM head, as EAGLE-3 and SpecBlock always do; otherwise
    embedding and LM head are the target's, of which such a checkpoint may hold copies. An EAGLE-3 drafter's embedding
    that is no copy of the target's, or cannot be compared with it, is kept.
    """
    layout, name = cast(Layout, found.layout), str(found.name)
    if found.unknown_fields:
        logger.warning("%s: %s", name, about_unknown(found.unknown_fields))
    config: Any = copy.deepcopy(found.config)
    if target is not None:
        layout.complete_from_target(config, found.fields, target.config)
    folder = Path(name)
    if not folder.is_dir():
        # Of a repository with several drafters those files alone that are in the folder of this one.
        options = found.hub_kwargs.copy()
        subfolder = options.pop("subfolder", "")
        inside = f"{subfolder.strip('/')}/" if subfolder else ""
        wanted = [f"{inside}{file}" for file in ("*.json", "*.safetensors", *found.kind.files)]
        others = [f"{inside}*/*"]
        downloaded = snapshot_download(name, allow_patterns=wanted, ignore_patterns=others, **cast(Any, options))
        folder = Path(downloaded, subfolder)
        check_not_quantized(found.fields, name, folder)
    tensors = {
        ours: tensor
        for key, tensor in _tensors(folder, found.kind.files, name).items()
        if (ours := layout.rename(key)) is not None
    }
    warn_of_untrained(tensors, name)
    layout.complete(config, tensors, found.fields)
    keeps_embedding = hasattr(config, "own_embedding")
    if keeps_embedding:
        config.own_embedding |= _has_own("embed_tokens", tensors, target)
        if config.draft_vocab_size == config.vocab_size and not _has_own("lm_head", tensors, target):
            config.draft_vocab_size = 0
    has_own_head = bool(getattr(config, "draft_vocab_size", 0))
    if has_own_head:
        tensors["draft_ids"] = _draft_ids(tensors, config, name)
    if target is not None and not keeps_embedding:
        _check_copies(tensors, target, name)
    copies = {"t2d", "d2t"}
    copies |= set() if keeps_embedding and config.own_embedding else {"embed_tokens.weight"}
    copies |= set() if has_own_head else {"lm_head.weight"}
    tensors = {key: tensor for key, tensor in tensors.items() if key not in copies}
    drafter: Any = found.kind.drafter(config)
    wanted = drafter.state_dict()
    check_names(
        name,
        missing=wanted.keys() - tensors.keys(),
        unexpected=tensors.keys() - wanted.keys(),
        of_another_shape=[key for key in wanted.keys() & tensors.keys() if wanted[key].shape != tensors[key].shape],
    )
    drafter.load_state_dict(tensors)
    drafter.config._name_or_path = name
    drafter.unknown_fields = found.unknown_fields  # for the doctor
    kept = tensors.get("norm.weight", next(iter(tensors.values()))).dtype
    warn_of_float16(name, kept, dtype)
    return cast(SavedDrafter, drafter.to(dtype or kept).eval())


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
