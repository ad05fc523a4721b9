"""Fingerprints of targets and drafters: digests of every weight and of every setting that computing uses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import torch
from accelerate.utils import align_module_device
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ...targets.registry import target_of
from .part_file import sha256

# No residual and no draft depends on these fields: a model's origin, its outputs, when it stops, calibration. All
# other fields count, those of future models, too. The number of layers shows in the weights' names.
_IGNORED_FIELDS = {
    "_name_or_path", "name_or_path", "transformers_version", "architectures", "auto_map", "dtype", "torch_dtype",
    "num_hidden_layers", "bos_token_id", "eos_token_id", "pad_token_id", "initializer_range", "use_cache",
    "return_dict", "output_hidden_states", "output_attentions", "output_router_logits", "tie_last_hidden_states",
    "problem_type", "id2label", "label2id", "hyperdflash_version", "target_name_or_path", "target_revision",
    "target_fingerprint", "confidence_temperatures",
}  # fmt: skip
_CHUNK = 2**21  # elements that are hashed at once: little memory, and enough work for an accelerator
_MIX_CONSTANTS = (-0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)  # splitmix64's, as signed numbers
PARTS = ("head", "body", "config")


def target_fingerprint(target: PreTrainedModel, rounded_to: torch.dtype | None = None) -> dict[str, str]:
    """Return digests of a target: `"head"` over what training reads beside the feature cache, `"body"` over the other
    weights (empty for a target loaded without layers), `"config"` over [`config_fields`]. Device and name do not
    matter.

    Weights count by value, `rounded_to` a precision if one is given: a bfloat16 checkpoint has the same digests when
    it is loaded as float32, a quantized one has others. Offloaded weights are fetched one module at a time, FSDP2's
    are gathered (all ranks must call). Nothing is cached between calls, because weights may change."""
    seen = target_of(target)
    roots = (*seen.collapse_modules, target.get_input_embeddings(), target.get_output_embeddings())
    heads = {id(module) for root in roots for module in root.modules()}
    parts: dict[str, list[str]] = {"head": [], "body": []}
    for module, digest in _digests(target, rounded_to):
        parts["head" if id(module) in heads else "body"].append(digest)
    if not len(seen.layers):
        parts["body"] = []  # where the collapse's parameters belong to no module they are here
    combined = {part: sha256(*sorted(digests)) if digests else "" for part, digests in parts.items()}
    return {**combined, "config": sha256(json.dumps(config_fields(target.config), sort_keys=True))}


def short_fingerprint(fingerprint: dict[str, str]) -> str:
    """Return the text that a drafter's configuration records of its target: the start of each digest, `-` if empty."""
    return " ".join(fingerprint[part][:32] or "-" for part in PARTS)


def changed_parts(recorded: str, target: PreTrainedModel, rounded_to: torch.dtype | None = None) -> list[str] | None:
    """Return those of `PARTS` in which a target, as it is or `rounded_to` a precision, differs from a record of
    [`short_fingerprint`]; `None` for a record that earlier releases wrote: two digests of a few values of each
    weight."""
    words = dict(zip(PARTS, recorded.split()))
    if len(words) < len(PARTS):
        return None
    now = target_fingerprint(target, rounded_to)
    return [part for part, word in words.items() if word != "-" and now[part] and not now[part].startswith(word)]


def config_fields(config: PreTrainedConfig | dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a configuration that computing may depend on, as JSON; nested fields have dotted names."""
    fields = config if isinstance(config, dict) else config.to_dict()
    return json.loads(json.dumps(dict(_flat(fields)), default=str, sort_keys=True))


def _flat(fields: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in fields.items():
        if isinstance(value, dict) and name not in _IGNORED_FIELDS:
            yield from _flat(value, f"{prefix}{name}.")
        elif name not in _IGNORED_FIELDS:
            yield f"{prefix}{name}", value


def module_fingerprint(module: nn.Module) -> str:
    """Return one digest over all parameters and saved buffers of a module and the non-default fields of its
    configuration, if it has one. So a new field of a later release changes no digest."""
    config, fields = getattr(module, "config", None), None
    if isinstance(config, PreTrainedConfig):
        usual = config_fields(type(config)())
        fields = {name: value for name, value in config_fields(config).items() if usual.get(name) != value}
    return sha256(json.dumps([sha256(*sorted(digest for _, digest in _digests(module))), fields], sort_keys=True))


@torch.no_grad()
def _digests(model: nn.Module, rounded_to: torch.dtype | None = None) -> Iterator[tuple[nn.Module, str]]:
    """Yield module and digest of each parameter and saved buffer, those of floating point `rounded_to` a precision."""
    saved = set(model.state_dict())
    for prefix, module in model.named_modules(remove_duplicate=False):
        with align_module_device(module):
            weights = *module.named_parameters(prefix, recurse=False), *module.named_buffers(prefix, recurse=False)
            for name, value in weights:
                if name in saved:
                    is_rounded = rounded_to is not None and value.is_floating_point()
                    yield module, tensor_digest(name, value.to(rounded_to) if is_rounded else value)


def tensor_digest(name: str, value: torch.Tensor) -> str:
    """Return the digest of one weight: of its name, its shape and every value."""
    if value.is_meta or not value.numel():
        raise ValueError(
            f"The values of the model's {name} are not in this process (device {value.device}, shape "
            f"{list(value.shape)}): it cannot be recognised. Open the feature cache before the target is sharded with "
            "ZeRO-3, or load the target outside of ZeRO-3."
        )
    value = value.full_tensor() if hasattr(value, "full_tensor") else value
    if hasattr(value, "__tensor_flatten__"):  # torchao's, which consists of other tensors
        parts = value.__tensor_flatten__()[0]
        return sha256(*sorted(tensor_digest(f"{name}.{part}", getattr(value, part)) for part in parts))
    chunks = [_shortest_exact(chunk) for chunk in value.flatten().split(_CHUNK)]
    sums = torch.stack([_mixed_sum(chunk) for chunk in chunks]).tolist()
    return sha256(f"{name} {list(value.shape)} {[(str(c.dtype), s) for c, s in zip(chunks, sums)]}")


def _shortest_exact(chunk: torch.Tensor) -> torch.Tensor:
    """Cast to the shortest format that represents every value exactly, so that the digest does not depend on dtype."""
    if chunk.dtype in (torch.float16, torch.float32, torch.float64):
        for dtype in (torch.bfloat16, torch.float32):
            if torch.equal(chunk.to(dtype).to(chunk.dtype), chunk):
                return chunk.to(dtype)
    return chunk


def _mixed_sum(chunk: torch.Tensor) -> torch.Tensor:
    """Sum 64-bit words, each scrambled with its index (splitmix64), modulo 2^64: in any order, on any device.

    Scrambling maps different words to different words, so that one changed word always changes the sum.
    """
    data = chunk.contiguous().view(torch.uint8)
    words = data.new_zeros((len(data) + 7) // 8 * 8)
    words[: len(data)] = data
    words = words.view(torch.int64)
    words ^= torch.arange(len(words), device=words.device) * _MIX_CONSTANTS[0]
    for shift, factor in ((30, _MIX_CONSTANTS[1]), (27, _MIX_CONSTANTS[2]), (31, 1)):
        words ^= (words >> shift) & (2 ** (64 - shift) - 1)  # a shift of signed numbers repeats the sign
        words *= factor
    return words.sum()
