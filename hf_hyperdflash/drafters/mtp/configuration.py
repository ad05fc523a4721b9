"""The configuration of a target's MTP heads: the target's own, as its checkpoint has it."""

from __future__ import annotations

import copy
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig

from ..configuration import SPECIAL_TOKENS, WithCode
from .families import FAMILIES, MTPFamily, text_config_of

_REPEATED = 4  # how often a single head is run in a round where nobody says it
_FROM_TARGET = ("architectures", "auto_map", "transformers_version", "quantization_config", "torch_dtype", "dtype")


class MTPConfig(WithCode, PreTrainedConfig):
    """The configuration of an [`MTPDrafter`]. Its config.json is the target's, with the drafter's class as
    architecture and the fields below.

    Args:
        target_config: The fields of the target's text configuration.
        max_blocks: How many tokens one round drafts one after the other: the number of heads, or, of a single head,
            any number, as that is repeated.
        target_name_or_path, target_revision, target_fingerprint: As of [`DrafterConfig`].
        hyperdflash_version: The version of the package that saved the drafter.

    Raises:
        ValueError: If the target's family has no MTP heads, or a field has a value that no drafter can have.
    """

    model_type = "mtp_heads"

    target_config: dict | None = None
    max_blocks: int = 0
    target_name_or_path: str = ""
    target_revision: str = ""
    target_fingerprint: str = ""
    hyperdflash_version: str = ""

    # What other drafters of entries have.
    block_size, target_hc_mult, draft_vocab_size = 1, 1, 0
    conv_kernel_size = head_candidates = 0
    sequential_head, reducer = "none", ""
    own_embedding = usual_layers = confidence_head = any_streams = False
    final_logit_softcapping = None

    __getattribute__ = object.__getattribute__  # as of [`DrafterConfig`]

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        if self.target_config is None:  # transformers builds configurations without fields to compare with
            self.target_config = {"model_type": "deepseek_v3"}
        kind = self.target_config.get("model_type")
        if kind not in FAMILIES:
            raise ValueError(
                f"The config.json of {self.target_name_or_path or 'the target'} is of a {kind} model, expected one "
                f"with MTP heads: {', '.join(FAMILIES)}."
            )
        own = self.of_target()
        heads = self.family.heads(own)
        if not heads:
            raise ValueError(
                f"The config.json of {self.target_name_or_path or 'the target'} says that it has no MTP head "
                "(`num_nextn_predict_layers`), expected at least one: use the one that belongs to the checkpoint."
            )
        if heads > 1 and not self.family.can_be_several:
            raise ValueError(
                f"The config.json of {self.target_name_or_path or 'the target'} says that it has {heads} MTP heads, "
                f"expected one: how a {kind} stores several is not published."
            )
        self.max_blocks = self.max_blocks or (heads if heads > 1 else _REPEATED)
        if type(self.max_blocks) is not int or not 1 <= self.max_blocks <= (heads if heads > 1 else 2**8):
            raise ValueError(
                f"`max_blocks` is {self.max_blocks!r}, expected a whole number from 1 to "
                f"{heads if heads > 1 else 2**8}: the target has {heads} MTP head{'s' * (heads > 1)}."
            )
        self.num_heads, self.num_hidden_layers = heads, heads * self.family.layers
        self.vocab_size, self.hidden_size = own.vocab_size, own.hidden_size
        self.target_hidden_size, self.target_num_layers = own.hidden_size, own.num_hidden_layers
        self.target_model_type, self.target_layer_ids = own.model_type, [-1]
        for name in SPECIAL_TOKENS:
            setattr(self, name, getattr(own, name, None))

    @property
    def family(self) -> MTPFamily:
        """The row of the target's family."""
        return FAMILIES[(self.target_config or {})["model_type"]]

    @property
    def max_draft_tokens(self) -> int:
        """The most tokens one after the other that one round can draft."""
        return self.max_blocks

    def of_target(self) -> PreTrainedConfig:
        """Return the target's text configuration, a new one each time."""
        fields = copy.deepcopy(self.target_config or {})
        return CONFIG_MAPPING[fields.pop("model_type")](**fields)

    def layer_config(self) -> PreTrainedConfig:
        """Return that of the family's text model whose layers are those of the heads. It has hardly an embedding,
        which is the target's."""
        made = self.family.layer_config(self.of_target())
        made.vocab_size, made.pad_token_id, made.dtype = 1, 0, None
        return made

    @classmethod
    def from_target_config(cls, config: PreTrainedConfig, **fields: Any) -> MTPConfig:
        """Build the configuration of the heads in a target's checkpoint from the target's."""
        own = text_config_of(config)
        told = {name: value for name, value in own.to_dict().items() if name not in _FROM_TARGET}
        names = {"target_name_or_path": config._name_or_path}
        names["target_revision"] = getattr(config, "_commit_hash", None) or ""
        return cls(target_config=told, **names | fields)

    # In the layout of its publisher: the target's fields beside ours

    def to_dict(self) -> dict[str, Any]:
        """Return the target's fields and ours, as config.json has them."""
        told = copy.deepcopy(self.target_config or {}) | {"architectures": self.architectures}
        if self.dtype is not None:
            told["dtype"] = str(self.dtype).removeprefix("torch.")
        return told | {name: getattr(self, name) for name in _OWN}

    to_diff_dict = to_dict

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Build the configuration from the fields of a config.json, of a saved drafter."""
        return super().from_dict(_apart(config_dict), **kwargs)

    @classmethod
    def get_config_dict(cls, pretrained_model_name_or_path: Any, **kwargs: Any) -> Any:
        fields, rest = super().get_config_dict(pretrained_model_name_or_path, **kwargs)
        return _apart(fields), rest


_OWN = ("max_blocks", "target_name_or_path", "target_revision", "target_fingerprint", "hyperdflash_version")


def _apart(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a config.json with those of the target apart."""
    if "target_config" in fields:
        return fields
    told = {name: value for name, value in fields.items() if name not in (*_OWN, *_FROM_TARGET)}
    kept = {name: fields[name] for name in (*_OWN, "architectures", "dtype") if name in fields}
    return {"model_type": MTPConfig.model_type, "target_config": told, **kept}
