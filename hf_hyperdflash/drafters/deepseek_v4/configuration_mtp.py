"""Configuration of DeepSeek-V4's MTP block as a drafter."""

from __future__ import annotations

from typing import Any, TypeVar

from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config

from ..configuration import WithCode

Kind = TypeVar("Kind", bound=DeepseekV4Config)


def blocks_config(kind: type[Kind], config: DeepseekV4Config, blocks: int, **fields: Any) -> Kind:
    """Build the configuration of a drafter of V4 blocks: sliding-window attention and a mixture of experts with
    learned routing, whatever the target's layers are.

    Args:
        kind: The class of the drafter's configuration.
        config: The target's, which stays as it is.
        blocks: The number of blocks.
        **fields: Further fields of the drafter's.
    """
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
    made = kind(**own | {"num_hidden_layers": blocks} | shape | fields)
    made._name_or_path, made._experts_implementation = config._name_or_path, None
    return made


class BlocksConfig(WithCode, DeepseekV4Config):
    """The base of configurations that [`blocks_config`] builds."""

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

    @classmethod
    def from_target_config(cls, config: DeepseekV4Config) -> DeepseekV4MTPConfig:
        """Build the configuration of the block of a target with this configuration."""
        return blocks_config(cls, config, 1)

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
