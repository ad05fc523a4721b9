"""The families of targets that carry multi-token-prediction (MTP) heads: how each of them stores and computes them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from transformers import AutoModel, PreTrainedConfig
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightRenaming


def heads_of(config: PreTrainedConfig) -> int:
    """Return the number of heads by the field that DeepSeek-V3 gave its name; 0 for none."""
    names = ("num_mtp_layers", "num_nextn_predict_layers")
    return next((int(getattr(config, name)) for name in names if getattr(config, name, None)), 0)


def layers_by_transformers(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the configuration of the heads' layers where transformers runs them itself: what a configuration says of
    single layers it says of these (`mtp_layer_types`, ...), and none is one of the first, dense ones."""
    return config.get_mtp_config()


# Names of DeepSeek-V3: the heads are layers behind the target's last one.
_DEEPSEEK = {
    "layers.{layer}.enorm.": "enorm.",
    "layers.{layer}.hnorm.": "hnorm.",
    "layers.{layer}.eh_proj.": "eh_proj.",
    "layers.{layer}.shared_head.norm.": "norm.",
    "layers.{layer}.": "layers.0.",
}
# Names of Qwen3-Next and others: one head, part by part.
_APART = {
    "mtp.pre_fc_norm_embedding.": "enorm.",
    "mtp.pre_fc_norm_hidden.": "hnorm.",
    "mtp.fc.": "eh_proj.",
    "mtp.norm.": "norm.",
    "mtp.layers.0.": "layers.0.",
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
        state_first: Whether `eh_proj` reads the state before the embedding.
    """

    names: Mapping[str, str]
    prefix: str = "model."
    not_own: tuple[str, ...] = ("embed_tokens.", "shared_head.head.")
    conversions: str = ""
    heads: Callable[[PreTrainedConfig], int] = heads_of
    layer_config: Callable[[PreTrainedConfig], PreTrainedConfig] = layers_by_transformers
    model: str = ""
    layers: int = 1
    state_first: bool = False

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


# A row per family, by the `model_type` of the target's text configuration. To add one: what its checkpoints call the
# parts of a head (`names`), a `layer_config` where transformers' `get_mtp_config` does not have it, and what else
# differs; and a tiny target in `tests/helpers/mtp_targets.py`, whose tests compare the drafts with transformers' own
# heads, or with the publisher's forward where it has none. A target whose checkpoint has no such tensors is refused by
# name before weights are read.
FAMILIES: dict[str, MTPFamily] = {
    "deepseek_v3": MTPFamily(_DEEPSEEK),  # Kimi-K2 and the text part of Kimi-K2.5, too
    "glm4_moe": MTPFamily(_DEEPSEEK),
    "mellum": MTPFamily(_APART, prefix=""),
    "sarvam_mla": MTPFamily(_DEEPSEEK),
    "sarvam_moe": MTPFamily(_DEEPSEEK),
    "step3p5": MTPFamily(  # Step 3.7, too
        _DEEPSEEK, conversions="step3p7", model="step3p7.modeling_step3p7.Step3p7TextModel"
    ),
}
