"""Configurations of DeepSeek-V4's own drafters: its MTP block, and DSpark."""

from __future__ import annotations

from typing import Any, TypeVar

from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config

from ..blocks.configuration_hyperdflash import HyperDFlashConfig, check_temperatures
from ..configuration import WithCode, check_layer_ids
from ..parts.block_attention import SLIDING, AttentionSpan

Kind = TypeVar("Kind", bound="BlocksConfig")
# DeepSeek's names of what we call the same in every drafter of blocks.
_DEEPSEEK_FIELDS = {
    "block_size": "dspark_block_size",
    "mask_token_id": "dspark_noise_token_id",
    "head_rank": "dspark_markov_rank",
    "target_layer_ids": "dspark_target_layer_ids",
}


class BlocksConfig(WithCode, DeepseekV4Config):
    """The base of configurations of drafters of V4 blocks: sliding-window attention and a mixture of experts with
    learned routing, whatever the target's layers are."""

    @classmethod
    def from_target_config(cls: type[Kind], config: DeepseekV4Config, blocks: int = 1, **fields: object) -> Kind:
        """Build the configuration of so many blocks from a target's, which stays as it is, and further fields."""
        # Our weights are dequantized, and the target's way to run experts may be for quantized ones only.
        not_ours = {
            "model_type",
            "architectures",
            "auto_map",
            "transformers_version",
            "quantization_config",
            "expert_dtype",
        }
        given = {name: value for name, value in config.to_dict().items() if not name.startswith("dspark_")}
        own = {name: value for name, value in given.items() if name not in not_ours}
        shape = {"layer_types": ["sliding_attention"] * blocks, "mlp_layer_types": ["moe"] * blocks}
        made = cls(**own | {"num_hidden_layers": blocks} | shape | fields)
        made._name_or_path, made._experts_implementation = config._name_or_path, None
        return made

    def to_dict(self) -> dict[str, Any]:
        """Return the fields, with the blocks' experts told by V4's older field."""
        fields = super().to_dict()
        # The stock Trainer reads a checkpoint's config.json as one of no model, where "moe" is refused.
        del fields["mlp_layer_types"]
        return fields | {"num_hash_layers": 0}


class DeepseekV4MTPConfig(BlocksConfig):
    """A DeepSeek-V4's configuration, for its MTP block alone.

    Args:
        hyperdflash_version: The version of the package that saved the drafter.
    """

    model_type = "deepseek_v4_mtp"

    hyperdflash_version: str = ""

    # What other drafters of entries have; it is trained for that many drafts one after the other.
    block_size, max_blocks = 1, 3
    draft_vocab_size = head_candidates = 0
    sequential_head, target_layer_ids = "none", [-1]
    own_embedding = confidence_head = False

    @property
    def max_draft_tokens(self) -> int:
        """How many tokens one round drafts one after the other in training; in generation any number."""
        return self.max_blocks

    @classmethod
    def get_config_dict(
        cls, pretrained_model_name_or_path: Any, **kwargs: Any
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Read the fields as of any configuration. A drafter that was saved before the block had its own type gets
        that type."""
        fields, rest = super().get_config_dict(pretrained_model_name_or_path, **kwargs)
        if "DeepseekV4MTPDrafter" in (fields.get("architectures") or ()):
            fields["model_type"] = cls.model_type
        return fields, rest


class DeepseekV4DSparkConfig(BlocksConfig):
    """A DeepSeek-V4's configuration, for its DSpark drafter alone. `num_hidden_layers` are the drafter's blocks, and
    `sliding_window` is how many tokens before the anchor a block sees.

    Args:
        block_size: Inputs of a block, the anchor and mask tokens; each drafts the token after it.
        mask_token_id: The token that stands after the anchor.
        head_rank: Of the Markov head.
        target_layer_ids: The target's layers whose residual streams it reads, ascending from 0; -1 for the last.
        confidence_temperatures: As of [`HyperDFlashConfig`].
        target_name_or_path, target_revision, target_fingerprint: As of [`HyperDFlashConfig`].
        hyperdflash_version: The version of the package that saved the drafter.

    Raises:
        ValueError: If a field has a value that no drafter can have.
    """

    model_type = "deepseek_v4_dspark"

    block_size: int = 5
    mask_token_id: int = 128799
    head_rank: int = 256
    target_layer_ids: list[int] | None = None
    confidence_temperatures: list[float] | None = None
    target_name_or_path: str = ""
    target_revision: str = ""
    target_fingerprint: str = ""
    hyperdflash_version: str = ""

    # The fields of [`HyperDFlashConfig`] that every drafter of this kind has.
    sample_from_anchor = confidence_head = True
    first_slot = head_candidates = draft_vocab_size = 0
    sequential_head = "markov"

    @property
    def kinds(self) -> list[str]:
        """The kind of every layer."""
        return [SLIDING] * self.num_hidden_layers

    def attention_span(self, kind: str) -> AttentionSpan:
        """Return what slots see in layers of a kind."""
        return AttentionSpan(self.sliding_window)

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        if self.target_layer_ids is None:
            self.target_layer_ids = [-1]
        check_layer_ids(self.target_layer_ids)
        HyperDFlashConfig.check_fields({name: getattr(self, name) for name in ("block_size", "head_rank")})
        check_temperatures(self.confidence_temperatures, self.max_draft_tokens)
        if type(self.mask_token_id) is not int or not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(
                f"`mask_token_id` is {self.mask_token_id!r}, outside the vocabulary of {self.vocab_size} tokens."
            )

    @classmethod
    def from_target_config(cls, config: DeepseekV4Config, blocks: int = 3, **fields: object) -> DeepseekV4DSparkConfig:
        """Build the configuration of the drafter in a target's checkpoint, from the target's, with its `dspark_*`
        fields.

        Raises:
            ValueError: If it lacks such a field, or one has a value that no drafter can have.
        """
        if missing := [name for name in _DEEPSEEK_FIELDS.values() if not hasattr(config, name)]:
            raise ValueError(
                f"The config.json of {config._name_or_path or 'the target'} has no `{missing[0]}`, expected the "
                "fields of its DSpark drafter: use the one that belongs to the checkpoint."
            )
        fields = {ours: getattr(config, theirs) for ours, theirs in _DEEPSEEK_FIELDS.items()} | fields
        ids, last = fields["target_layer_ids"], config.num_hidden_layers - 1
        if isinstance(ids, list) and last in ids:  # -1 is its name in training, which reads that layer anyway
            fields["target_layer_ids"] = [-1 if i == last else i for i in ids]
        return super().from_target_config(
            config,
            blocks,
            target_name_or_path=config._name_or_path,
            target_revision=getattr(config, "_commit_hash", None) or "",
            **fields,
        )

    @property
    def max_draft_tokens(self) -> int:
        """The most tokens one round can draft."""
        return self.block_size

    @property
    def num_streams(self) -> int:
        """The number of residual streams that it reads: `hc_mult` of each layer in `target_layer_ids`."""
        return len(self.target_layer_ids or ()) * self.hc_mult

    @property
    def target_hc_mult(self) -> int:
        """The number of the target's streams, which is that of the drafter's own blocks."""
        return self.hc_mult

    @property
    def target_hidden_size(self) -> int:
        """The width of the target, which is the drafter's."""
        return self.hidden_size
