"""The families of targets that carry multi-token-prediction (MTP) heads: how each of them stores and computes them."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import nn
from transformers import AutoModel, PreTrainedConfig
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightRenaming


def heads_of(config: PreTrainedConfig) -> int:
    """Return the number of heads by the field that DeepSeek-V3 gave its name; 0 for none."""
    names = ("num_mtp_layers", "num_nextn_predict_layers")
    return next((int(getattr(config, name)) for name in names if getattr(config, name, None)), 0)


def text_config_of(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return a target's text configuration. EXAONE 4.5 says beside it how many heads there are."""
    own = config.get_text_config(decoder=True)
    if not heads_of(own) and (count := heads_of(config)):
        own = copy.deepcopy(own)
        own.num_nextn_predict_layers = count
    return own


def layers_by_transformers(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the configuration of the heads' layers where transformers runs them itself: what a configuration says of
    single layers it says of these (`mtp_layer_types`, ...), and none is one of the first, dense ones."""
    return config.get_mtp_config()


def head_of_qwen(config: PreTrainedConfig) -> int:
    """Return the number of heads of a Qwen3-Next, whose configuration does not say that it has one, or a Qwen3.5.

    Raises:
        ValueError: If the head is said to embed tokens itself, which none released does.
    """
    if getattr(config, "mtp_use_dedicated_embeddings", False):
        raise ValueError(
            "`mtp_use_dedicated_embeddings` is True in the target's config.json, expected False: the layout of an MTP "
            "head that embeds tokens itself is not published."
        )
    return int(getattr(config, "mtp_num_hidden_layers", 1))


def heads_of_nemotron(config: PreTrainedConfig) -> int:
    """Return the number of heads of a Nemotron-H, each of attention and experts.

    Raises:
        ValueError: If they consist of other layers.
    """
    heads, kinds = heads_of(config), getattr(config, "mtp_layers_block_type", None)
    if heads and kinds != ["full_attention", "moe"]:
        raise ValueError(
            f"`mtp_layers_block_type` is {kinds!r} in the target's config.json, expected ['full_attention', 'moe'], "
            "the layers of every released MTP head of a Nemotron-H."
        )
    return heads


def of_one_kind(**kinds: str) -> Callable[[PreTrainedConfig], PreTrainedConfig]:
    """Return a function that gives a target's configuration a layer for each head, all of these kinds."""

    def changed(config: PreTrainedConfig) -> PreTrainedConfig:
        config.num_hidden_layers = heads_of(config)
        for name, kind in kinds.items():
            setattr(config, name, [kind] * config.num_hidden_layers)
        return config

    return changed


def layer_of_exaone(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the configuration of the layer of an EXAONE's head: without experts, and with the attention of the
    target's first layer where nothing else is said. Unlike the target's it has positions where it sees all."""
    kinds = (getattr(config, "mtp_layer_types", None) or config.layer_types)[:1]
    config.num_hidden_layers, config.layer_types, config.mlp_layer_types = 1, kinds, ["dense"]
    if kinds == ["full_attention"]:
        config.sliding_window = None
    return config


def with_layers(**fields: Any) -> Callable[[PreTrainedConfig], PreTrainedConfig]:
    """Return a function that gives a target's configuration these fields, which say what the heads' layers are where
    they are not as the target's last one; of a name the field of that name."""

    def changed(config: PreTrainedConfig) -> PreTrainedConfig:
        for name, value in fields.items():
            setattr(config, name, getattr(config, value) if isinstance(value, str) else value)
        return config

    return changed


class HalfLongcatLayer(nn.Module):
    """The decoder layer of LongCat-Flash's head: what one of the target's begins with, an attention and an MLP,
    without the experts beside these and what follows."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.self_attn, self.mlp = layer.self_attn[0], layer.mlps[0]
        self.input_layernorm, self.post_attention_layernorm = (
            layer.input_layernorm[0],
            layer.post_attention_layernorm[0],
        )

    def forward(self, hidden: torch.Tensor, **inputs: Any) -> torch.Tensor:
        """Return `[batch, tokens, config.hidden_size]` from the same; `inputs` are of the attention."""
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), **inputs)[0]
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


def behind_the_last(norm: str) -> dict[str, str]:
    """Return DeepSeek-V3's names: the heads are layers behind the target's last one. `norm` is that before the LM
    head."""
    return {
        "layers.{layer}.enorm.": "enorm.",
        "layers.{layer}.hnorm.": "hnorm.",
        "layers.{layer}.eh_proj.": "eh_proj.",
        f"layers.{{layer}}.{norm}.": "norm.",
        "layers.{layer}.": "layers.0.",
    }


_DEEPSEEK, _LING = behind_the_last("shared_head.norm"), behind_the_last("final_layernorm")
# Names of Qwen3-Next and others: one head, part by part.
_APART = {
    "mtp.pre_fc_norm_embedding.": "enorm.",
    "mtp.pre_fc_norm_hidden.": "hnorm.",
    "mtp.fc.": "eh_proj.",
    "mtp.norm.": "norm.",
    "mtp.layers.0.": "layers.0.",
}
# Names of ERNIE 4.5: each part of the head in a list of its own. Its norm is the target's final one, and a drafter has
# a copy of that.
_ERNIE = {
    "mtp_emb_norm.0.": "enorm.",
    "mtp_hidden_norm.0.": "hnorm.",
    "mtp_linear_proj.0.": "eh_proj.",
    "mtp_block.0.": "layers.0.",
    "norm.": "norm.",
}
_LONGCAT = {
    "mtp.layers.0.enorm.m.": "enorm.",
    "mtp.layers.0.hnorm.m.": "hnorm.",
    "mtp.layers.0.eh_proj.": "eh_proj.",
    "mtp.layers.0.input_layernorm.": "layers.0.input_layernorm.",
    "mtp.layers.0.self_attn.": "layers.0.self_attn.",
    "mtp.layers.0.post_attention_layernorm.": "layers.0.post_attention_layernorm.",
    "mtp.layers.0.transformer_layer.mlp.": "layers.0.mlp.",
    "mtp.norm.": "norm.",
}
# Names of Nemotron-H: what makes its two layers a head is in the first and in the last.
_NEMOTRON = {
    "mtp.layers.0.enorm.": "enorm.",
    "mtp.layers.0.hnorm.": "hnorm.",
    "mtp.layers.0.eh_proj.": "eh_proj.",
    "mtp.layers.0.": "layers.0.",
    "mtp.layers.1.final_layernorm.": "norm.",
    "mtp.layers.1.": "layers.1.",
}


@dataclass(frozen=True)
class MTPFamily:
    """How the heads of a family are stored, and what they consist of.

    Head k of K reads the embedding of a token and a state: the first head the target's state, after its final norm,
    of the token before; any other the state of head k - 1 of the token before. It computes
    `norm(layers(eh_proj([enorm(embedding), hnorm(state)])))`, and the target's LM head drafts from that. A single head
    is repeated: from the second draft on it reads its own state.

    Args:
        names: What the checkpoint calls the parts of a head, and what [`~drafters.mtp.modeling_mtp.MTPHead`] calls
            them; the first that matches counts. `{head}` stands for k, and `{layer}` for the number of the target's
            layers plus k. What is stored before such a name, `model.` or `model.language_model.`, does not matter; a
            saved drafter has `prefix` there.
        prefix: See `names`.
        not_own: The parts that are copies of the target's own embedding and LM head, which are not read.
        conversions: The name of transformers' rules by which weights inside a decoder layer are renamed, merged or
            split; that of the text configuration's `model_type` if left out.
        heads: Returns K for a target's text configuration, 0 if it has none.
        layer_config: Returns the configuration of the family's own text model whose layers are those of the heads, one
            after the other, from a target's text configuration.
        model: The class of the family's text model, from `transformers.models` on, where `AutoModel` does not have it.
        layers: The number of decoder layers of a head.
        layers_of: Returns these layers, of all heads, from a text model with that configuration.
    """

    names: Mapping[str, str]
    prefix: str = "model."
    not_own: tuple[str, ...] = ("embed_tokens.", "shared_head.head.", "shared_head.weight")
    conversions: str = ""
    heads: Callable[[PreTrainedConfig], int] = heads_of
    layer_config: Callable[[PreTrainedConfig], PreTrainedConfig] = layers_by_transformers
    model: str = ""
    layers: int = 1
    layers_of: Callable[[Any], Sequence[nn.Module]] = lambda trunk: trunk.layers

    @property
    def can_be_several(self) -> bool:
        """Whether the names say which head a part belongs to."""
        return any("{" in name for name in self.names)

    def text_model(self, config: PreTrainedConfig) -> Any:
        """Build the family's text model of a configuration of [`layer_config`]."""
        if not self.model:
            return AutoModel.from_config(config)
        module, _, name = self.model.rpartition(".")
        return getattr(import_module(f"transformers.models.{module}"), name)(config)

    def parts(self, config: PreTrainedConfig) -> dict[str, str]:
        """Return the checkpoint's names of all heads' parts, without a prefix, and ours."""
        last = config.num_hidden_layers
        return {
            theirs.format(head=head, layer=last + head): f"heads.{head}.{ours}"
            for head in range(self.heads(config))
            for theirs, ours in self.names.items()
        }

    def own_name(self, config: PreTrainedConfig) -> Callable[[str], str]:
        """Return a function that finds tensors of the heads: it returns the name that a saved drafter has for a tensor
        of a checkpoint, and an empty string for one that belongs to no head."""
        found = re.compile(f"(?:^|\\.)((?:{'|'.join(map(re.escape, self.parts(config)))}).*)")

        def name(stored: str) -> str:
            match = found.search(stored)
            if match is None or any(f".{part}" in stored for part in self.not_own):
                return ""
            return self.prefix + match[1]

        return name

    def rules(self, config: PreTrainedConfig) -> list[Any]:
        """Return transformers' rules that make a saved drafter's tensors ours."""
        parts = self.parts(config).items()
        own = [WeightRenaming("^" + re.escape(self.prefix + theirs), ours) for theirs, ours in parts]
        return own + (get_checkpoint_conversion_mapping(self.conversions or config.model_type) or [])


# Its layer has full attention, whatever the target's last one has.
_QWEN = MTPFamily(
    _APART,
    prefix="",
    heads=head_of_qwen,
    layer_config=with_layers(
        num_hidden_layers=1, layer_types=["full_attention"], mlp_only_layers=[], decoder_sparse_step=1
    ),
)
# A row per family, by the `model_type` of the target's text configuration. To add one: what its checkpoints call the
# parts of a head (`names`), a `layer_config` where transformers' `get_mtp_config` does not have it, and what else
# differs; and a tiny target in `tests/helpers/mtp_targets.py`, whose tests compare the drafts with transformers' own
# heads, or with the publisher's forward where it has none. A target whose checkpoint has no such tensors is refused by
# name before weights are read.
FAMILIES: dict[str, MTPFamily] = {
    "bailing_hybrid": MTPFamily(  # Ling 3
        _LING, layer_config=of_one_kind(layer_types="full_attention", mlp_layer_types="sparse")
    ),
    "deepseek_v3": MTPFamily(_DEEPSEEK),  # Kimi-K2 and the text part of Kimi-K2.5, too
    "ernie4_5_moe": MTPFamily(
        _ERNIE, layer_config=with_layers(num_hidden_layers=1, moe_layer_start_index=1, moe_layer_end_index=1)
    ),
    "exaone4": MTPFamily(_APART, prefix="", layer_config=layer_of_exaone),  # the text part of EXAONE 4.5
    "exaone_moe": MTPFamily(_APART, prefix="", layer_config=layer_of_exaone),
    "glm4_moe": MTPFamily(_DEEPSEEK),
    "glm4_moe_lite": MTPFamily(_DEEPSEEK, layer_config=of_one_kind(mlp_layer_types="sparse")),
    "glm_ocr_text": MTPFamily(_DEEPSEEK, prefix="model.language_model.", layer_config=of_one_kind()),
    "hy_v3": MTPFamily(_LING, layer_config=of_one_kind(mlp_layer_types="sparse")),
    "longcat_flash": MTPFamily(
        _LONGCAT,
        heads=lambda config: 1,
        layer_config=with_layers(num_layers=1, n_routed_experts=1, zero_expert_num=0),
        layers_of=lambda trunk: [HalfLongcatLayer(layer) for layer in trunk.layers],
    ),
    "mellum": MTPFamily(_APART, prefix=""),
    "nemotron_h": MTPFamily(
        _NEMOTRON,
        prefix="",
        heads=heads_of_nemotron,
        layer_config=with_layers(layers_block_type="mtp_layers_block_type"),
        layers=2,
    ),
    "qwen3_5_moe_text": _QWEN,
    "qwen3_5_text": _QWEN,
    "qwen3_next": _QWEN,
    "sarvam_mla": MTPFamily(_DEEPSEEK),
    "sarvam_moe": MTPFamily(_DEEPSEEK),
    "step3p5": MTPFamily(  # Step 3.7, too
        _DEEPSEEK, conversions="step3p7", model="step3p7.modeling_step3p7.Step3p7TextModel"
    ),
}
# Families whose checkpoints have such tensors, too, but whose drafts would not be their publishers', and why.
_INDEXED = "its attention sees tokens that an indexer chooses, and only full and sliding attention drafts here"
REFUSED = {
    **dict.fromkeys(
        ("deepseek_v32", "glm5_next_text", "glm_moe_dsa", "hy_v4", "hy_v4_vl_text", "minimax_m3_vl_text"), _INDEXED
    ),
    "dots3_note_text": "it embeds tokens by a table of its own, and with the target's is drafted here",
    "granite_docling_text": "how it computes is not published",
    "inkling_text": "its layers have convolutions over the tokens before, of which only keys and values are kept here",
    "mimo_v2_flash": "SGLang gives its heads the target's states before the final norm and vLLM those after it, and "
    "which of them they were trained with is not published",
    "mistral_large4_text": "it is a DSpark drafter (`mtp_dspark`) whose layout is not published",
    "qwen4_exp_text": "it reads and hands on several residual streams, and heads of one are drafted with here",
}
# Multimodal models whose text configuration has another `model_type`, or none, in a checkpoint's config.json.
AROUND = frozenset({"exaone4_5", "inkling_mm_model", "kimi_k25"})
