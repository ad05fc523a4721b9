"""Tiny targets whose checkpoints carry MTP heads, in their publishers' names, and transformers' own model of these."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from hf_hyperdflash import load_target

from . import families
from .dropped_mtp import KIMI, PUBLISHED

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Carrier:
    """A family of targets with heads: its tiny model, and what it stores of them beside that.

    Args:
        target: Makes the model.
        heads: From the model's stored tensors the heads', by their publisher's names; of those that transformers drops
            the shapes are in `dropped_mtp`.
        count: How many heads there are.
    """

    target: Callable[[], PreTrainedModel]
    heads: Callable[[Tensors, int, int], Tensors] | None = None
    count: int = 1


def behind_the_last(stored: Tensors, last: int, count: int) -> Tensors:
    """DeepSeek-V3's: layers after the last one, each as that one is and with what makes it a head, beside copies of
    the target's embedding and LM head."""
    prefix = next(name for name in stored if f"layers.{last}." in name).partition("layers.")[0]
    width = stored[f"{prefix}layers.{last}.input_layernorm.weight"].shape[0]
    made: Tensors = {}
    for layer in range(last + 1, last + 1 + count):
        at = f"{prefix}layers.{layer}."
        own = {re.sub(r"layers\.\d+\.", f"layers.{layer}.", name): value for name, value in of_layer(stored, last)}
        own |= {f"{at}{name}.weight": torch.ones(width) for name in ("enorm", "hnorm", "shared_head.norm")}
        own[f"{at}eh_proj.weight"] = torch.ones(width, 2 * width)
        made |= own | {f"{at}{name}.weight": torch.ones(3, 3) for name in ("embed_tokens", "shared_head.head")}
    return made


def of_layer(stored: Tensors, layer: int) -> list[tuple[str, torch.Tensor]]:
    return [(name, value) for name, value in stored.items() if f"layers.{layer}." in name]


def apart(stored: Tensors, last: int, count: int) -> Tensors:
    """Qwen3-Next's names of one head."""
    own = {name.replace(f"model.layers.{last}.", "mtp.layers.0."): value for name, value in of_layer(stored, last)}
    width = own["mtp.layers.0.input_layernorm.weight"].shape[0]
    norms = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    own |= {f"mtp.{name}.weight": torch.ones(width) for name in norms}
    return own | {"mtp.fc.weight": torch.ones(width, 2 * width)}


def qwen3_5() -> PreTrainedModel:
    """With an encoder of images, as all that are released."""
    config = transformers.Qwen3_5Config(text_config=families.qwen3_5().config, vision_config=families.VISION)
    return transformers.Qwen3_5ForConditionalGeneration(config)


def nemotron_h() -> PreTrainedModel:
    """Whose experts work on a narrow latent, as those of Nemotron 3 Super."""
    target = families.nemotron_h()
    fields = target.config.to_dict() | {"num_nextn_predict_layers": 1, "moe_latent_size": 24}
    return type(target)(type(target.config).from_dict(fields))


# A row for each row of `drafters.mtp.families.FAMILIES`, and one of a name that has none.
CARRIERS: dict[str, Carrier] = {
    "deepseek_v3": Carrier(families.deepseek_v3, behind_the_last),
    "glm4_moe": Carrier(families.glm4_moe, behind_the_last),
    KIMI: Carrier(families.kimi_k25),
    "mellum": Carrier(families.mellum, apart),
    "sarvam_mla": Carrier(families.sarvam_mla, behind_the_last),
    "sarvam_moe": Carrier(families.sarvam_moe, behind_the_last),
    "step3p5": Carrier(families.step3p7, behind_the_last, 3),
    "bailing_hybrid": Carrier(families.bailing_hybrid),
    "ernie4_5_moe": Carrier(families.ernie4_5_moe),
    "exaone4": Carrier(families.exaone4_5),
    "exaone_moe": Carrier(families.exaone_moe),
    "glm4_moe_lite": Carrier(families.glm4_moe_lite),
    "glm_ocr_text": Carrier(families.glm_ocr),
    "hy_v3": Carrier(families.hy_v3),
    "longcat_flash": Carrier(families.longcat_flash),
    "nemotron_h": Carrier(nemotron_h),
    "qwen3_5_moe_text": Carrier(families.qwen3_5_moe),
    "qwen3_5_text": Carrier(qwen3_5),
    "qwen3_next": Carrier(families.qwen3_next),
}


def at_random(tensors: Tensors, seed: int = 0) -> Tensors:
    """Values large enough that a term left out is seen."""
    generator, made = torch.Generator().manual_seed(seed), {}
    for name, tensor in tensors.items():
        values = torch.randn(tensor.shape, generator=generator)
        if "norm" in name:
            values = 1 + 0.3 * values
        elif tensor.ndim < 2:
            values = 0.2 * values
        else:
            values = 1.5 * values / math.sqrt(tensor.shape[-1])
        made[name] = values.to(tensor.dtype)
    return made


def write(family: str, folder: Path) -> Path:
    """Write a target of a family with its heads: these are in two of three shards, one of which is otherwise the
    target's."""
    carrier = CARRIERS[family]
    torch.manual_seed(0)
    target = carrier.target().eval()
    own = target.get_decoder()
    with torch.no_grad():  # a norm of ones before that of a head would change nothing
        (own.norm if hasattr(own, "norm") else own.norm_f).weight.add_(0.3 * torch.randn(64))
    target.save_pretrained(folder)
    stored = load_file(folder / "model.safetensors")
    # transformers saves a Kimi's layers by another name than it is released with.
    stored = {name.replace("language_model.model.blocks.", "language_model.model.layers."): value
              for name, value in stored.items()}  # fmt: skip
    (folder / "model.safetensors").unlink()
    config = target.config.get_text_config()
    if carrier.heads is None:
        heads = at_random({name: torch.ones(shape) for name, shape in PUBLISHED[family][0](config).items()})
    else:
        heads = at_random(carrier.heads(stored, config.num_hidden_layers - 1, carrier.count))
        fields = json.loads((folder / "config.json").read_text())
        text = fields.get("text_config", fields)
        assert carrier.count in (text.get("num_nextn_predict_layers"), text.get("num_mtp_layers")), fields
    names, own = sorted(stored), sorted(heads)
    half = len(own) // 2
    shards = [names[::2], [*names[1::2], *own[:half]], own[half:]]
    index = {name: f"model-{i + 1:05}-of-00003.safetensors" for i, shard in enumerate(shards) for name in shard}
    for shard in set(index.values()):
        save_file(
            {name: (stored | heads)[name] for name in index if index[name] == shard}, folder / shard,
            metadata={"format": "pt"},
        )  # fmt: skip
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return folder


def loaded(family: str, folder: Path) -> Any:
    """Write and load a target. What it ignores of its checkpoint are the heads' layers, whose number transformers
    knows of released models alone."""
    target = load_target(str(write(family, folder)), dtype=torch.float32)
    last = target.config.get_text_config().num_hidden_layers
    ignored = [
        rf"(^|\.)layers\.{last + head}\." if re.search(r"\d", pattern) else pattern
        for pattern in target._keys_to_ignore_on_load_unexpected or ()
        for head in range(CARRIERS[family].count)
    ]
    target._keys_to_ignore_on_load_unexpected = ignored
    return target
