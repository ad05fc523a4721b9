"""Reads the drafter in a DeepSeek-V4's checkpoint, its `mtp.*` tensors, in any of their number formats.

The releases of April have the MTP block there; those of July and the `-DSpark` repositories have a DSpark drafter.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import safe_open
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file

from ..weights import HubOptions, check_finite, check_names, indexed

# V4-Flash-Base repeats the target's embedding and LM head in its block.
_OWN = re.compile(r"mtp\.(\d+)\.(?!emb\.|head\.)")
_SCALES = (".scale", ".weight_scale_inv")

# FP4 is E2M1: sign, two bits of exponent, one of mantissa.
_FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
FP4_DTYPES = (torch.int8, getattr(torch, "float4_e2m1fn_x2", torch.int8))
_FP4_BLOCK = (1, 32)


class CheckpointTensors:
    """Some tensors of a checkpoint in safetensors, those of a target's own drafter.

    Files are fetched when tensors are read, and only those with such tensors in them. A subclass has [`own_name`] and
    [`none_found`].

    Args:
        name: Path or Hub id.
        config: The checkpoint's.
        hub_kwargs: Arguments of `cached_file`.

    Raises:
        ValueError: If there are no such tensors, or no checkpoint.

    Attributes:
        weights: The name that the checkpoint has for each tensor, by the drafter's name for it.
        drafter: The name of the drafter class that reads them.
    """

    drafter: str

    def __init__(self, name: str, config: Any, hub_kwargs: HubOptions) -> None:
        if not name:
            raise ValueError(
                "The target was not loaded from a checkpoint (`config._name_or_path` is empty), so there is none to "
                "read the tensors of its own drafter from. Pass a path or Hub id."
            )
        self.name, self.config, self.hub_kwargs = name, config, hub_kwargs
        files = self._files()
        self._all = {own: stored for stored in files if (own := self.own_name(stored))}
        if not self._all:
            raise ValueError(self.none_found())
        self._file_of = {own: files[stored] for own, stored in self._all.items()}
        self.scales = {own: stored for own, stored in self._all.items() if own.endswith(_SCALES)}
        self.weights = {own: stored for own, stored in self._all.items() if own not in self.scales}

    def own_name(self, stored: str) -> str:
        """Return the drafter's name of a stored tensor, and an empty string for one that is not the drafter's."""
        raise NotImplementedError

    def none_found(self) -> str:
        """Return the message about a checkpoint without such tensors."""
        raise NotImplementedError

    def _files(self) -> dict[str, str]:
        """Return the file that holds each tensor."""
        index = self._file(SAFE_WEIGHTS_INDEX_NAME)
        if index is not None:
            return indexed(Path(index))
        path = cast(str, self._file(SAFE_WEIGHTS_NAME, required=True))
        with safe_open(path, "pt") as file:
            return dict.fromkeys(file.keys(), SAFE_WEIGHTS_NAME)

    def _file(self, file: str, required: bool = False) -> str | None:
        path = cached_file(self.name, file, _raise_exceptions_for_missing_entries=False, **self.hub_kwargs)
        if path is None and required:
            raise ValueError(
                f"{self.name} has no {file}, expected a checkpoint in safetensors. Pass the path or Hub id of one."
            )
        return path

    def check_names(self, expected: Iterable[str]) -> None:
        """Raise a `ValueError` that names some tensors if the checkpoint does not hold exactly those `expected`."""
        expected = set(expected)
        stray = [name for name in self.scales if f"{_stem(name)}.weight" not in self.weights]
        check_names(
            self.name,
            missing=[name for name in expected if name not in self.weights],
            unexpected=[name for name in [*self.weights, *stray] if name not in expected],
        )

    def tensors(self, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield names and dequantized tensors, one at a time: V4-Flash's are 13 GB a block in bfloat16."""
        read = self.readers(device)
        for name in sorted(read, key=self._file_of.__getitem__):
            yield name, read[name]()

    def readers(self, device: torch.device) -> dict[str, Callable[[], torch.Tensor]]:
        """Return for each name a function that reads its tensor, dequantized. All files are there then."""
        paths = {file: cast(str, self._file(file, required=True)) for file in {*self._file_of.values()}}
        quantization = getattr(self.config, "quantization_config", None) or {}
        if not isinstance(quantization, dict):  # an object in a loaded target
            quantization = quantization.to_dict()
        rows, columns = quantization.get("weight_block_size") or (128, 128)  # that share a scale
        scales, opened = {_stem(own): own for own in self.scales}, cache(partial(safe_open, framework="pt"))

        def stored(own: str) -> torch.Tensor:
            file = opened(paths[self._file_of[own]], device=str(device))
            return cast(torch.Tensor, file.get_tensor(self._all[own]))

        def read(own: str) -> torch.Tensor:
            scale = scales.get(_stem(own))
            return dequantize(stored(own), None if scale is None else stored(scale), (int(rows), int(columns)), own)

        return {own: partial(read, own) for own in self.weights}

    def copy(self, tensors: Iterable[tuple[str, torch.Tensor]], own: Mapping[str, torch.Tensor]) -> None:
        """Copy tensors, one at a time, into those of a drafter. Raise a `ValueError` that names one with another
        shape, or that is not finite."""
        for name, tensor in tensors:
            if tensor.shape != own[name].shape:
                raise ValueError(
                    f"`{name}`, read from {self.name}, has shape {list(tensor.shape)}, expected "
                    f"{list(own[name].shape)} by its config.json: use the one that belongs to the checkpoint."
                )
            check_finite({name: tensor}, self.name)
            own[name].copy_(tensor)


class MTPCheckpoint(CheckpointTensors):
    """The `mtp.*` tensors of a DeepSeek-V4's checkpoint, by DeepSeek's names, as of [`CheckpointTensors`]."""

    def own_name(self, stored: str) -> str:
        return stored if _OWN.match(stored) else ""

    def none_found(self) -> str:
        return (
            f"{self.name} has no `mtp.*` tensors, expected those of DeepSeek-V4's own drafter. transformers' "
            "`save_pretrained` drops them: pass the path or Hub id of the original checkpoint."
        )

    @property
    def blocks(self) -> int:
        """The number of V4 blocks."""
        return len({cast(re.Match, _OWN.match(name))[1] for name in self.weights})

    @property
    def drafter(self) -> str:  # type: ignore[override]
        return "DeepseekV4DSparkDrafter" if "mtp.0.main_proj.weight" in self.weights else "DeepseekV4MTPDrafter"

    def check_drafter(self, name: str) -> None:
        """Check that the checkpoint is one for the drafter of that name.

        Raises:
            ValueError: If it is for another one.
        """
        if self.drafter != name:
            raise ValueError(
                f"{self.name} carries no {name}, but another drafter: call `{self.drafter}.from_target(...)`, or "
                "`load_drafter(...)` for whichever a checkpoint has."
            )


def _stem(name: str) -> str:
    return name.rpartition(".")[0]


def dequantize(
    weight: torch.Tensor,
    scale: torch.Tensor | None,
    block_size: tuple[int, int],
    name: str = "weight",
    fp4_block: tuple[int, int] = _FP4_BLOCK,
) -> torch.Tensor:
    """Multiply every block of a quantized weight with its scale; a weight that is not quantized stays as it is.

    Args:
        weight: FP8, `[out, in]`, or FP4, two values to a byte, `[out, in / 2]`.
        scale: Per block `[ceil(out / rows), ceil(in / columns)]`, E8M0 (as such or as bytes) or another float.
        block_size: Rows and columns of an FP8 block.
        name: For the message.
        fp4_block: Rows and columns of an FP4 block.

    Returns:
        `[out, in]`, float32 if it was quantized.

    Raises:
        ValueError: If weight and scale do not belong together.
    """
    is_fp4 = weight.dtype in FP4_DTYPES
    is_quantized = is_fp4 or weight.dtype == torch.float8_e4m3fn
    if not is_quantized and scale is None:
        return weight
    if is_fp4:
        packed = weight.contiguous().view(torch.uint8)
        codes = torch.stack([packed & 0xF, packed >> 4], dim=-1).flatten(-2)  # the low half first, as in transformers
        weight, block_size = torch.tensor(_FP4_VALUES, device=packed.device)[codes.long()], fp4_block
    grid = [-(-size // block) for size, block in zip(weight.shape, block_size)]
    if not is_quantized or scale is None or list(scale.shape) != grid:
        raise ValueError(
            f"`{name}`, {weight.dtype} of shape {list(weight.shape)}, has "
            f"{'no scale' if scale is None else f'a scale of shape {list(scale.shape)}'}, expected "
            f"{f'one of shape {grid}: blocks of {list(block_size)}' if is_quantized else 'none'}. Check "
            "`quantization_config` in the checkpoint's config."
        )
    # E8M0 is the biased exponent of a power of two; some writers store the bare byte.
    scale = (scale.float() - 127).exp2() if scale.dtype == torch.uint8 else scale.float()
    for dim, block in enumerate(block_size):
        scale = scale.repeat_interleave(block, dim).narrow(dim, 0, weight.shape[dim])
    return weight.float() * scale
