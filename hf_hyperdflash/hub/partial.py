"""A target without its decoder layers: what training reads beside a feature cache, from the files that have it.

The layers of a large target are nearly all of it. What is left, embedding, final norm, LM head and the collapse of
several streams, takes seconds and a few gigabytes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import safe_open
from torch import nn
from transformers import GenerationConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, rename_source_key
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file

from ..drafters.deepseek_v4.checkpoint import FP4_DTYPES, dequantize
from ..drafters.weights import check_finite, check_names, indexed, weight_files
from ..targets.registry import target_of

_OF_LAYERS = re.compile(r"(^|\.)(layers|mtp)\.\d+\.")  # nearly all names of a checkpoint
_SCALES = ("weight_scale_inv", "weight_scale", "scale")  # of blocks, by whoever wrote them
# Of a whole NVFP4 tensor: ModelOpt's is multiplied with, compressed-tensors' divided by.
_OF_ALL, _OF_ALL_INVERSE = "weight_scale_2", "weight_global_scale"
_PACKED = "_packed"  # compressed-tensors' ending of a name
_ELEMENTS = 2**24  # that are read at once
_BLOCK = (128, 128)  # of FP8, where a configuration does not say


class NotApart(Exception):
    """A checkpoint has no tensors that can be read one by one, or not under a name of their own."""


def remove_layers(model: PreTrainedModel) -> PreTrainedModel:
    """Remove from a target what training from a feature cache does not read, and return it."""
    seen = target_of(model)
    roots = (seen.input_embedding, seen.output_head, *seen.collapse_modules)
    kept = {id(part) for root in roots for part in root.modules()} | {id(model), id(seen.trunk)}
    holds_kept = {id(module) for module in model.modules() if any(id(part) in kept for part in module.modules())}
    for module in [module for module in model.modules() if id(module) in holds_kept]:
        for name, child in list(module.named_children()):
            if child is seen.layers:
                setattr(module, name, nn.ModuleList())
            elif id(child) not in holds_kept and any(True for _ in chain(child.parameters(), child.buffers())):
                setattr(module, name, nn.Identity())  # rotary frequencies, an encoder of images
    return model


def read_without_layers(
    model: PreTrainedModel, name: str, where: Mapping[str, Any], dtype: torch.dtype | None
) -> PreTrainedModel:
    """Read the weights of a target, which is on the meta device and is changed, without its layers, on the CPU.

    FP8 and FP4 weights are dequantized. Raise [`NotApart`] where only transformers can read it, a `ValueError` if
    tensors are missing or not finite.

    Args:
        model: The target.
        name: Folder or Hub id. Only the files that hold the tensors are downloaded.
        where: Where on the Hub it is.
        dtype: Of the weights, but for those that the target keeps in float32; `None` for the checkpoint's.
    """
    where = {option: value for option, value in where.items() if option != "code_revision"}
    files = _files(name, where)
    remove_layers(model)
    wanted: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    wanted |= {key: value for key, value in model.named_buffers() if key in model.state_dict()}
    seen = target_of(model)
    is_tied = seen.output_head.weight is seen.input_embedding.weight
    sources = _sources(model, wanted, files)
    quantization = getattr(model.config, "quantization_config", None) or {}
    block = quantization.get("weight_block_size") if isinstance(quantization, dict) else quantization.weight_block_size
    reader = _Reader(name, where, files, (int(block[0]), int(block[1])) if block else _BLOCK)
    # Buffers that no checkpoint has are computed by their model; parameters on the meta device stay as they are.
    owner: PreTrainedModel = model
    for module in model.modules():
        own = [key for key, value in module._buffers.items() if value is not None]
        for key in own:
            module._buffers[key] = torch.zeros_like(cast(torch.Tensor, module._buffers[key]), device="cpu")
        if isinstance(module, PreTrainedModel):
            owner = module
        elif own:
            owner._init_weights(module)
    for key, source in sources.items():
        path, _, attribute = key.rpartition(".")
        module = model.get_submodule(path)
        value = reader.read(source, wanted[key].shape, _dtype_of(model, key, dtype))
        if attribute in module._parameters:
            setattr(module, attribute, nn.Parameter(value, requires_grad=False))
        else:
            module._buffers[attribute] = value
    head, embedding = seen.output_head, seen.input_embedding
    if is_tied and (head.weight.is_meta or torch.equal(head.weight, embedding.weight)):
        head.weight = cast(nn.Parameter, embedding.weight)
    state = model.state_dict()
    check_names(name, missing=[key for key in wanted if key in state and state[key].is_meta])
    check_finite(state, name)
    try:
        model.generation_config = GenerationConfig.from_pretrained(name, **where)
    except OSError:
        pass  # as transformers has it: that of the model's configuration
    return model


def checkpoint_bytes(name: str) -> int:
    """Return the size of a checkpoint's weights in safetensors, by the index on the Hub; 0 where it is not known."""
    if Path(name).is_dir():
        return sum(Path(name, file).stat().st_size for file in weight_files(Path(name)))
    index = cached_file(name, SAFE_WEIGHTS_INDEX_NAME, _raise_exceptions_for_missing_entries=False)
    told = json.loads(Path(index).read_text("utf-8")).get("metadata", {}) if index else {}
    return int(told.get("total_size", 0))


def _files(name: str, where: Mapping[str, Any]) -> dict[str, str]:
    """Return the file of each tensor of a checkpoint."""

    def found(file: str) -> str | None:
        return cached_file(name, file, _raise_exceptions_for_missing_entries=False, **where)

    if (index := found(SAFE_WEIGHTS_INDEX_NAME)) is not None:
        return indexed(Path(index))
    if (path := found(SAFE_WEIGHTS_NAME)) is None:
        raise NotApart(f"{name} has no {SAFE_WEIGHTS_NAME}")
    with safe_open(path, "pt") as file:
        return dict.fromkeys(file.keys(), SAFE_WEIGHTS_NAME)


def _sources(model: PreTrainedModel, wanted: Mapping[str, Any], files: Mapping[str, str]) -> dict[str, str]:
    """Return the checkpoint's name of each tensor that is wanted, by transformers' own rules."""
    rules = get_model_conversion_mapping(model)
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    renamings = [rule for rule in rules if not isinstance(rule, WeightConverter)]
    found = {}
    for source in files:
        if _OF_LAYERS.search(source):
            continue
        plain = source.removesuffix(_PACKED)
        rules_of = cast(Any, renamings), converters, model.base_model_prefix, cast(Any, wanted)
        key, rule = rename_source_key(plain, *rules_of)
        if key not in wanted and plain in wanted:  # a rule is too wide, as one for norms of DeepSeek-V4's layers
            key, rule = plain, None
        if key in wanted:
            if rule is not None:
                raise NotApart(f"{key} is made of {source} by a rule of transformers")
            found[key] = source
    return found


def _dtype_of(model: PreTrainedModel, key: str, dtype: torch.dtype | None) -> torch.dtype | None:
    """Return the dtype of a weight in a target of that dtype, as transformers has it."""
    kept: set[str] = set()
    if dtype in (torch.float16, torch.bfloat16):
        kept |= set(model._keep_in_fp32_modules_strict or ())
    if dtype == torch.float16:
        kept |= set(model._keep_in_fp32_modules or ())
    return torch.float32 if kept & set(key.split(".")) else dtype


class _Reader:
    """Reads tensors of a checkpoint, dequantized, a part of their rows at a time."""

    def __init__(self, name: str, where: Mapping[str, Any], files: Mapping[str, str], block: tuple[int, int]) -> None:
        self.name, self.where, self.files, self.block = name, where, files, block

    def read(self, source: str, shape: torch.Size, dtype: torch.dtype | None) -> torch.Tensor:
        """Return a tensor of that shape; `dtype` is `None` for the one that it is stored in."""
        stem = source.removesuffix(_PACKED).removesuffix("weight")
        scale = next((self._whole(stem + kind) for kind in _SCALES if stem + kind in self.files), None)
        value: torch.Tensor | None = None
        for rows, part in self._parts(source, shape):
            if scale is not None:
                part = self._dequantized(source, stem, part, scale, rows, shape)
            if part.is_floating_point() and part.itemsize == 1:
                raise ValueError(f"`{source}` of {self.name} is in {part.dtype} without a scale: {_ADVICE}")
            if value is None:
                is_cast = dtype is not None and part.is_floating_point()
                value = torch.empty(shape, dtype=dtype if is_cast else part.dtype)
            if part.shape[1:] != shape[1:]:
                break
            value[rows] = part
        else:
            return cast(torch.Tensor, value)
        raise ValueError(
            f"`{source}` of {self.name} has rows of shape {list(part.shape[1:])}, expected {list(shape[1:])} by its "
            f"config.json: {_ADVICE}"
        )

    def _path(self, source: str) -> str:
        return cast(str, cached_file(self.name, self.files[source], **self.where))

    def _whole(self, source: str) -> torch.Tensor:
        with safe_open(self._path(source), "pt") as file:
            return file.get_tensor(source)

    def _parts(self, source: str, shape: torch.Size) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield rows of a tensor and what they hold."""
        path = self._path(source)
        if len(shape) < 2:
            yield slice(None), self._whole(source)
            return
        rows = max(1, _ELEMENTS // shape[1:].numel() // self.block[0]) * self.block[0]  # whole blocks
        for start in range(0, shape[0], rows):
            span = slice(start, min(start + rows, shape[0]))
            # Opened each time: pages of a mapped file count as this process's memory until it is closed.
            with safe_open(path, "pt") as file:
                yield span, file.get_slice(source)[span]

    def _dequantized(
        self, source: str, stem: str, part: torch.Tensor, scale: torch.Tensor, rows: slice, shape: torch.Size
    ) -> torch.Tensor:
        is_fp4 = part.dtype in (torch.uint8, *FP4_DTYPES)
        columns = part.shape[1] * (2 if is_fp4 else 1)
        if scale.ndim < 2:  # of all, or of each row
            scale = scale.reshape(-1, 1)
        if scale.shape[0] == shape[0]:  # of each row, or of a part of it
            block = (1, -(-columns // scale.shape[1]))
        else:
            block = self.block if scale.numel() > 1 else (shape[0], columns)
        own = scale[rows.start // block[0] : -(-rows.stop // block[0])]
        value = dequantize(part.view(torch.int8) if part.dtype == torch.uint8 else part, own, block, source, block)
        if stem + _OF_ALL in self.files:
            return value * self._whole(stem + _OF_ALL).float()
        if stem + _OF_ALL_INVERSE in self.files:
            return value / self._whole(stem + _OF_ALL_INVERSE).float()
        return value


_ADVICE = "check `quantization_config` in its config.json, or download both again."
