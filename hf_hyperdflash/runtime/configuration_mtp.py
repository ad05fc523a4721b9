"""Configuration of DeepSeek-V4's MTP block as a drafter."""

from __future__ import annotations

from typing import Any

from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config

# Sliding-window attention and a mixture of experts with learned routing, whatever the target's layers are.
_ONE_BLOCK = {"num_hidden_layers": 1, "layer_types": ["sliding_attention"], "mlp_layer_types": ["moe"]}


class DeepseekV4MTPConfig(DeepseekV4Config):
    """A DeepSeek-V4's configuration, for its MTP block alone.

    Args:
        hyperdflash_version: Of the package that saved the drafter.
    """

    model_type = "deepseek_v4_mtp"

    hyperdflash_version: str = ""

    @classmethod
    def of_target(cls, config: DeepseekV4Config) -> DeepseekV4MTPConfig:
        """The block of a target with this configuration, which stays as it is."""
        fields = config.to_dict()
        # Our weights are dequantized, and the target's way to run experts may be for quantized ones only.
        for name in ("model_type", "architectures", "quantization_config", "auto_map", "transformers_version"):
            fields.pop(name, None)
        made = cls(**fields | _ONE_BLOCK)
        made._name_or_path, made._experts_implementation = config._name_or_path, None
        return made

    @classmethod
    def get_config_dict(
        cls, pretrained_model_name_or_path: Any, **kwargs: Any
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """As of any configuration; drafters that were saved before the block had a type of its own have it too."""
        fields, rest = super().get_config_dict(pretrained_model_name_or_path, **kwargs)
        if "DeepseekV4MTPDrafter" in (fields.get("architectures") or ()):
            fields["model_type"] = cls.model_type
        return fields, rest
