"""What tells one target or drafter from another: every value of every weight, every setting that computing uses."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from accelerate.utils import align_module_device
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ...targets.registry import target_of

# Where a model comes from, what it returns and when it stops, how sure a drafter is of its drafts: no residual and no
# draft depends on these fields of a configuration. All others count, so that those of models to come do. How many
# layers there are, the weights' names tell.
_NOT_COMPUTING = {
    "_name_or_path", "name_or_path", "transformers_version", "architectures", "auto_map", "dtype", "torch_dtype",
    "num_hidden_layers", "bos_token_id", "eos_token_id", "pad_token_id", "initializer_range", "use_cache",
    "return_dict", "output_hidden_states", "output_attentions", "output_router_logits", "tie_last_hidden_states",
    "problem_type", "id2label", "label2id", "hyperdflash_version", "target_name_or_path", "target_revision",
    "target_fingerprint", "confidence_temperatures",
}  # fmt: skip
_CHUNK = 2**21  # elements hashed at once: memory stays small, and an accelerator has enough to do
_ODD = (-0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)  # splitmix64's, as signed numbers
PARTS = ("head", "body", "config")


def target_fingerprint(target: PreTrainedModel) -> dict[str, str]:
    """Digests of a target, one change anywhere gives another: on any device, under any name.

    Weights count by value: a bfloat16 checkpoint has the same digests when it is loaded as float32, a float32 one that
    is rounded to bfloat16 has not, nor has a quantized one. Offloaded weights are fetched one module at a time,
    FSDP2's are gathered (all ranks must call). Nothing is remembered between calls: weights may change in between.

    Returns:
        `"head"` over embedding, final norm, collapse and language model head, what training reads beside the feature
        cache, `"body"` over the other weights, an empty string for a target loaded without layers, and `"config"` over
        [`config_fields`].

    Raises:
        ValueError: If it is no target, or the values of a weight are not in this process.
    """
    roots = (*target_of(target).collapse_modules, target.get_input_embeddings(), target.get_output_embeddings())
    heads = {id(module) for root in roots for module in root.modules()}
    parts: dict[str, list[str]] = {"head": [], "body": []}
    for module, digest in _digests(target):
        parts["head" if id(module) in heads else "body"].append(digest)
    combined = {part: _combine(digests) if digests else "" for part, digests in parts.items()}
    return {**combined, "config": _sha256(json.dumps(config_fields(target.config), sort_keys=True))}


def as_words(fingerprint: dict[str, str]) -> str:
    """What a drafter's configuration records of its target: the beginnings of the digests, `-` for an empty one."""
    return " ".join(fingerprint[part][:32] or "-" for part in PARTS)


def changed_parts(recorded: str, target: PreTrainedModel) -> list[str] | None:
    """Those of `PARTS` in which a target is not the one of a record of [`as_words`].

    Returns:
        `None` for a record that earlier releases wrote: two digests of a few values of each weight.
    """
    words = dict(zip(PARTS, recorded.split()))
    if len(words) < len(PARTS):
        return None
    now = target_fingerprint(target)
    return [part for part, word in words.items() if word != "-" and now[part] and not now[part].startswith(word)]


def config_fields(config: PreTrainedConfig) -> dict[str, Any]:
    """The fields of a configuration that computing may depend on, nested ones under dotted names, as JSON has them."""
    return json.loads(json.dumps(dict(_flat(config.to_dict())), default=str, sort_keys=True))


def _flat(fields: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in fields.items():
        if isinstance(value, dict) and name not in _NOT_COMPUTING:
            yield from _flat(value, f"{prefix}{name}.")
        elif name not in _NOT_COMPUTING:
            yield f"{prefix}{name}", value


def module_fingerprint(module: nn.Module) -> str:
    """One digest over all parameters and saved buffers of a module, and of its configuration, if it has one, what
    differs from the defaults: a field of a later release is none of a drafter made before."""
    config, fields = getattr(module, "config", None), None
    if isinstance(config, PreTrainedConfig):
        usual = config_fields(type(config)())
        fields = {name: value for name, value in config_fields(config).items() if usual.get(name) != value}
    return _sha256(json.dumps([_combine(digest for _, digest in _digests(module)), fields], sort_keys=True))


@torch.no_grad()
def _digests(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Of each parameter and saved buffer: the module it belongs to and its digest."""
    saved = set(model.state_dict())
    for prefix, module in model.named_modules(remove_duplicate=False):
        with align_module_device(module):
            weights = *module.named_parameters(prefix, recurse=False), *module.named_buffers(prefix, recurse=False)
            yield from ((module, tensor_digest(name, value)) for name, value in weights if name in saved)


def _combine(digests: Iterable[str]) -> str:
    return _sha256(" ".join(sorted(digests)))


def tensor_digest(name: str, value: torch.Tensor) -> str:
    """The digest of one weight: its name, its shape and every value."""
    if value.is_meta or not value.numel():
        raise ValueError(
            f"The values of the model's {name} are not in this process (device {value.device}, shape "
            f"{list(value.shape)}): it cannot be recognised. Open the feature cache before the target is sharded with "
            "ZeRO-3, or load the target outside of ZeRO-3."
        )
    value = value.full_tensor() if hasattr(value, "full_tensor") else value
    if hasattr(value, "__tensor_flatten__"):  # torchao's, which is made of others
        parts = value.__tensor_flatten__()[0]
        return _combine(tensor_digest(f"{name}.{part}", getattr(value, part)) for part in parts)
    chunks = [_as_short_as_exact(chunk) for chunk in value.flatten().split(_CHUNK)]
    sums = torch.stack([_mixed_sum(chunk) for chunk in chunks]).tolist()
    return _sha256(f"{name} {list(value.shape)} {[(str(c.dtype), s) for c, s in zip(chunks, sums)]}")


def _as_short_as_exact(chunk: torch.Tensor) -> torch.Tensor:
    """In the shortest of these formats that holds every value: one digest, whatever the weights are loaded as."""
    if chunk.dtype in (torch.float16, torch.float32, torch.float64):
        for dtype in (torch.bfloat16, torch.float32):
            if torch.equal(chunk.to(dtype).to(chunk.dtype), chunk):
                return chunk.to(dtype)
    return chunk


def _mixed_sum(chunk: torch.Tensor) -> torch.Tensor:
    """A sum of 64-bit words, each scrambled with its place (splitmix64), modulo 2^64: in any order, on any device.

    Scrambling maps different words to different words, so that one changed word always shows.
    """
    data = chunk.contiguous().view(torch.uint8)
    words = data.new_zeros((len(data) + 7) // 8 * 8)
    words[: len(data)] = data
    words = words.view(torch.int64)
    words ^= torch.arange(len(words), device=words.device) * _ODD[0]
    for shift, odd in ((30, _ODD[1]), (27, _ODD[2]), (31, 1)):
        words ^= (words >> shift) & (2 ** (64 - shift) - 1)  # a shift of signed numbers repeats the sign
        words *= odd
    return words.sum()


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
