"""Loads a drafter from safetensors, with every tensor that its configuration asks for and no other, all finite.

transformers would report missing tensors, fill them at random and continue; such a drafter drafts nonsense.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypedDict

import torch
from huggingface_hub.errors import HFValidationError, StrictDataclassError
from huggingface_hub.utils import validate_repo_id
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedConfig
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_NAME

logger = logging.getLogger(__name__)

_ROWS = 4096  # of a table, by which noise is told from what was learned
_FEWEST = 32  # rows and columns, with which it can be
# What becomes of each kind of tensor. Read in vLLM (`_should_share` of its EAGLE utilities: the target's embedding if
# a drafter has none, or an equal one) and in SGLang (`init_lm_head` of its EAGLE worker: always the target's).
_KINDS = {
    r"(^|\.)embed_tokens\.weight$": "SGLang takes the target's instead, as hf_hyperdflash does for blocks; "
    "vLLM uses this one, as hf_hyperdflash does for EAGLE-3 and SpecBlock",
    r"(^|\.)lm_head\.weight$|^\d+\.\d+\.weight$": "SGLang, vLLM and hf_hyperdflash draft with it all the same",
    # But for a reducer's `fc_norm`, which is zero at first, and adds nothing to the gate then.
    r"^(?!fc_norm\.weight$).*norms?(\.\d+)?\.weight$": "SGLang, vLLM and hf_hyperdflash multiply with it all the same",
}


class HubOptions(TypedDict, total=False):
    """Where a checkpoint is, beside its name: transformers' arguments of `from_pretrained`."""

    subfolder: str
    revision: str | None
    token: str | bool | None
    cache_dir: str | os.PathLike | None
    force_download: bool
    local_files_only: bool
    proxies: dict[str, str] | None
    user_agent: str | None
    gguf_file: str


def load_complete(
    load: Callable[..., Any], name: str | Path, *args: Any, output_loading_info: bool = False, **options: Any
) -> Any:
    """Load a drafter's checkpoint with `load`, a `from_pretrained`, and check it. A `ValueError` names tensors that
    are missing, unexpected, of another shape or not finite, an `OSError` what cannot be found or is damaged."""
    name, options = resolve_subfolder(name, options)
    if options.get("state_dict") is None:  # else there is nothing to read
        check_source(name, "drafter", "adapter_config.json")
    if options.get("use_safetensors") is False:
        raise ValueError("`use_safetensors` is False, expected True: drafters are read from safetensors only.")
    options |= {"use_safetensors": True, "ignore_mismatched_sizes": True}  # refused below, by name
    try:
        drafter, info = load(name, *args, output_loading_info=True, **options)
    except SafetensorError as error:
        raise OSError(
            f"The weights of {name} are damaged ({error}). Load them again with `force_download=True`; if that does "
            "not help, the upload was cut off: push the drafter again."
        ) from error
    except (StrictDataclassError, ValueError) as error:
        raise ValueError(f"{name} cannot be loaded: {' '.join(str(error).split())}") from error
    except OSError as error:
        if "model.safetensors" not in str(error):
            raise
        raise OSError(
            f"{name} has no model.safetensors. Drafters are read from safetensors only: a pickle (pytorch_model.bin) "
            "can run code. Save the drafter with `save_pretrained`."
        ) from error
    shapes = [f"{key}, {list(found)} for {list(wanted)}" for key, found, wanted in info["mismatched_keys"]]
    check_names(
        name, missing=info["missing_keys"], unexpected=info["unexpected_keys"], of_another_shape=shapes,
        version=getattr(drafter.config, "hyperdflash_version", ""),
    )  # fmt: skip
    check_finite(drafter.state_dict(), name)
    warn_of_untrained(drafter.state_dict(), name)
    if drafter.dtype == torch.float16 and options.get("state_dict") is None:
        where = {option: options[option] for option in HubOptions.__annotations__ if option in options}
        saved = PreTrainedConfig.get_config_dict(name, **where)[0]
        warn_of_float16(name, saved.get("dtype") or saved.get("torch_dtype"), drafter.dtype)
    if getattr(drafter, "draft_ids", None) is not None:
        check_draft_ids(drafter.draft_ids, drafter.config.draft_vocab_size, drafter.config.vocab_size, name)
    return (drafter, info) if output_loading_info else drafter


def uninitialized(kind: Callable[[Any], Any], config: Any, dtype: torch.dtype) -> Any:
    """Build a drafter on the meta device, in `dtype` but for what it keeps in float32."""
    with torch.device("meta"):  # to initialize weights that are read afterwards would take minutes and gigabytes
        drafter = kind(config)
    for name, tensor in drafter.state_dict(keep_vars=True).items():
        if not any(re.search(rf"(^|\.){part}(\.|$)", name) for part in drafter._keep_in_fp32_modules_strict or ()):
            tensor.data = tensor.data.to(dtype)
    return drafter


def resolve_subfolder(name: str | Path, options: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return a checkpoint and the options of loading it, with a folder's `subfolder` joined to the folder. For a
    repository on the Hub it stays an option."""
    subfolder = options.get("subfolder")
    if not subfolder or not isinstance(name, (str, Path)) or not Path(name).is_dir():
        return name, options
    return str(Path(name, subfolder)), {option: value for option, value in options.items() if option != "subfolder"}


def check_source(name: object, what: str = "drafter", *others: str) -> None:
    """Raise an `OSError` or a `ValueError` if `name` can neither be the folder nor the Hub id of a checkpoint, `what`
    in the message. A folder has a config.json, or one of the files `others`."""
    if not isinstance(name, (str, Path)) or not str(name).strip():
        given = "empty" if isinstance(name, str) else repr(name)
        raise ValueError(f"The name of the {what} is {given}, expected a folder or a Hub id (org/name).")
    if Path(name).is_file():
        raise OSError(f"The {what} {name} is a file, expected a folder with a config.json, or a Hub id.")
    if not Path(name).is_dir():
        try:
            validate_repo_id(str(name))
        except HFValidationError as error:
            where = "" if Path(name).is_absolute() else f"; a folder is looked for from the current one, {Path.cwd()}"
            raise OSError(
                f"The folder {name} does not exist, and it is no Hub id (org/name): no {what}. Check the name{where}."
            ) from error
    elif not any(Path(name, file).is_file() for file in ("config.json", *others)):
        adapter = Path(name, "adapter_config.json")
        if adapter.is_file() and "num_virtual_tokens" in adapter.read_text(encoding="utf-8"):
            raise OSError(
                f"The folder {name} has a PEFT adapter for prompt or prefix tuning, expected a whole {what}: its "
                f"virtual tokens cannot be merged into a {what}. Train a LoRA adapter, and merge that."
            )
        if adapter.is_file():
            raise OSError(
                f"The folder {name} has a PEFT adapter, expected a whole {what}: load the {what} that it was trained "
                f"from, then save `PeftModel.from_pretrained({what}, {str(name)!r}).merge_and_unload()` with "
                "`save_pretrained`."
            )
        raise OSError(f"The folder {name} has no config.json, expected a saved {what}.")


def weight_files(folder: Path) -> list[str]:
    """Return the names of a checkpoint's weight files: those in its index, or the one file that needs no index; none
    if there is neither. Raise an `OSError` if the index is missing or damaged, or one of its files is missing."""
    if not (folder / SAFE_WEIGHTS_INDEX_NAME).is_file():
        if (folder / SAFE_WEIGHTS_NAME).is_file():
            return [SAFE_WEIGHTS_NAME]
        shard = min(folder.glob("model-*-of-*.safetensors"), default=None)
        if shard is None:
            return []
        raise OSError(
            f"The folder {folder} has {shard.name}, a part of a checkpoint, but no {SAFE_WEIGHTS_INDEX_NAME}, which "
            "lists the parts. Copy or download that and all of them."
        )
    files = sorted(set(indexed(folder / SAFE_WEIGHTS_INDEX_NAME).values()))
    missing = [file for file in files if not (folder / file).is_file()]
    if missing:
        raise OSError(
            f"The folder {folder} lacks {len(missing)} of the {len(files)} files that its {SAFE_WEIGHTS_INDEX_NAME} "
            f"lists ({', '.join(missing[:4])}{', ...' if len(missing) > 4 else ''}). Copy or download them, too."
        )
    return files


def tensor_names(folder: Path) -> set[str]:
    """Return the names of a checkpoint's tensors, without reading those; none if they are in several pickles, or
    damaged."""
    files = weight_files(folder)
    if (folder / SAFE_WEIGHTS_INDEX_NAME).is_file():  # nothing is read of files that may be many and far away
        return set(indexed(folder / SAFE_WEIGHTS_INDEX_NAME))
    names: set[str] = set()
    for file in files:
        try:
            with safe_open(folder / file, "pt") as tensors:
                names.update(tensors.keys())
        except SafetensorError:  # loading it raises the error
            return set()
    if not names and (folder / WEIGHTS_NAME).is_file():
        with suppress(Exception):  # likewise
            names.update(torch.load(folder / WEIGHTS_NAME, map_location="meta", weights_only=True, mmap=True))
    return names


def indexed(index: Path) -> dict[str, str]:
    """Return the file of each tensor, by an index; raise an `OSError` if the file is none."""
    try:
        files = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        if files and all(isinstance(file, str) for file in files.values()):
            return files
        why = "has a `weight_map` that names no files"
    except ValueError as error:
        why = f"is no JSON in UTF-8 ({error})"
    except (KeyError, TypeError, AttributeError):
        why = "has no `weight_map`, expected the name of each tensor's file"
    raise OSError(f"{index} {why}. Copy or download it again.")


def check_names(name: str | Path, *, version: str = "", **found: Collection[str]) -> None:
    """Raise a `ValueError` if `found` has any name of a tensor, by what is wrong with it: `missing=[...]`, for
    example. `version` is that of the package that saved the checkpoint."""
    if any(found.values()):
        by = f" (saved by hf_hyperdflash {version})" if version else ""
        raise ValueError(
            f"The tensors of {name}{by} are not those that its configuration asks for: {listed(**found)}. Load a "
            "complete checkpoint with its own config.json."
        )


def listed(**found: Collection[str]) -> str:
    """Return a few names of each kind as text: `"2 missing (a, b) and 1 unexpected (c)"`."""
    return " and ".join(
        f"{len(names)} {kind.replace('_', ' ')} ({', '.join(sorted(names)[:4])}{', ...' if len(names) > 4 else ''})"
        for kind, names in found.items()
        if names
    )


def check_finite(tensors: Mapping[str, torch.Tensor], name: str | Path) -> None:
    """Raise a `ValueError` that names the tensors with NaN or infinity."""
    if broken := not_finite(tensors.items()):
        raise ValueError(
            f"The weights of {name} are not finite: {listed(with_NaN_or_infinity=broken)}. The training that made "
            "them diverged, or the file is damaged: take an earlier checkpoint."
        )


def not_finite(tensors: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
    """Return the names of the tensors with NaN or infinity. Integers, and tensors of other processes, are skipped."""
    return [name for name, tensor in tensors if not _is_finite(tensor)]


def warn_of_float16(name: str | Path, trained: torch.dtype | str | None, chosen: torch.dtype | None) -> None:
    """Warn if weights that were trained in bfloat16 are loaded in float16."""
    if chosen == torch.float16 and str(trained).removeprefix("torch.") == "bfloat16":
        logger.warning(
            "The weights of %s were saved in bfloat16 and are loaded in float16, which ends at 65504: states may be "
            "larger, and then no draft is accepted. Load target and drafter in bfloat16, or in float32.",
            name,
        )


def check_draft_ids(
    ids: torch.Tensor, count: int, vocab_size: int, name: str | Path, then: str = " The checkpoint is damaged."
) -> None:
    """Raise a `ValueError` if `ids` are not `count` different tokens of a vocabulary of `vocab_size`."""
    if ids.is_meta:
        return
    is_list = ids.shape == (count,) and not ids.is_floating_point() and ids.dtype != torch.bool
    if not is_list or bool(((ids < 0) | (ids >= vocab_size)).any()) or len(ids.unique()) < count:
        raise ValueError(
            f"The tokens that {name} can draft are {ids.dtype} of shape {list(ids.shape)}, the first "
            f"{ids.flatten()[:4].tolist()}: expected {count} different integers from 0 to "
            f"{vocab_size - 1}.{then}"
        )


def _is_finite(tensor: torch.Tensor) -> bool:
    values = tensor.detach()
    values = values.to_local() if hasattr(values, "to_local") else values  # FSDP's shard
    if hasattr(values, "__tensor_flatten__"):  # torchao's, which is made of others: integers and their scales
        return all(_is_finite(getattr(values, part)) for part in values.__tensor_flatten__()[0])
    if values.is_meta or not values.numel() or not values.is_floating_point() or values.dtype.itemsize == 1:
        return True
    lowest, highest = values.aminmax()  # one pass without a temporary; a NaN is both
    return bool((lowest > -torch.inf) & (highest < torch.inf))


def named_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """Return the dtype of that name, as `from_pretrained` takes it; `None` if it is left out or `"auto"`. Raise a
    `ValueError` if weights cannot have it."""
    if dtype is None or dtype == "auto":
        return None
    named = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(named, torch.dtype) or not named.is_floating_point:
        raise ValueError(
            f"`dtype` is {dtype!r}, expected a dtype of weights or its name: bfloat16, float16 or float32."
        )
    return named


# Weights that cannot have been trained: exports of others have left embeddings at their initial noise, for example.
# With them a good drafter drafts badly in some engines and well in others.


def warn_of_untrained(tensors: Mapping[str, torch.Tensor], name: str | Path) -> None:
    """Warn of each tensor of a checkpoint that cannot have been trained."""
    for found in untrained(tensors):
        logger.warning("%s: %s. Ask for a complete checkpoint, or train it.", name, found)


def untrained(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Return a sentence for each tensor that cannot have been trained: its name, why, and what engines do with it."""
    said = []
    for name, tensor in tensors.items():
        engines = next((engines for kind, engines in _KINDS.items() if re.search(kind, name)), "")
        if engines and (why := _why_untrained(tensor.detach())):
            said.append(f"`{name}` {why}, so it cannot have been trained: {engines}")
    return said


def _why_untrained(tensor: torch.Tensor) -> str:
    is_read = not tensor.is_meta and tensor.is_floating_point() and tensor.dtype.itemsize > 1
    if not is_read or hasattr(tensor, "__tensor_flatten__") or tensor.numel() < 2:
        return ""
    some = tensor[:: -(-len(tensor) // _ROWS)]
    if not (some.any() or tensor.any()):
        return "is all zeros"
    if tensor.ndim != 2:
        return ""
    if (some == tensor[0]).all() and (tensor == tensor[0]).all():
        return "has the same row for every token"
    if min(tensor.shape) < _FEWEST:
        return ""
    # Noise is numbers that are independent of each other: rows and columns differ in size just as much as chance makes
    # them differ, and the mean row is as near to 0 as chance leaves it. Training changes one of these many times over.
    rows = some.float()
    count, width = rows.shape
    squares = rows.square() / rows.square().mean()
    of_one = squares.var()  # of the mean of n numbers it is n times smaller
    by_columns, by_rows = squares.mean(0).var() * count / of_one, squares.mean(1).var() * width / of_one
    centre = rows.mean(0).square().mean() / rows.square().mean() * count
    is_noise = all(0.5 < float(ratio) < 2 for ratio in (by_columns, by_rows, centre))
    return "is noise, as it was made" if is_noise else ""
