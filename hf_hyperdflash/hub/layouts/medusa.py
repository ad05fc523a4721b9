"""The layout of Medusa's authors: a config.json that names heads and target, and heads whose tensors tell the rest."""

from __future__ import annotations

import torch

from ...drafters.blocks.modeling_medusa import MedusaConfig
from .table import Fields, Layout, same


def _complete(config: MedusaConfig, tensors: dict[str, torch.Tensor], fields: Fields) -> None:
    """Set the sizes by the tensors: no config.json names the widths, and some name too few heads."""
    config.medusa_num_heads = len({key.partition(".")[0] for key in tensors})
    config.medusa_num_layers = sum(key.startswith("0.") and key.endswith(".linear.weight") for key in tensors)
    last = tensors.get(f"0.{config.medusa_num_layers}.weight", torch.empty(1, 1))
    *_, config.vocab_size, config.hidden_size = (1, 1, *last.shape)


LAYOUT = Layout(
    fits=lambda fields: "medusa_num_heads" in fields,
    config=MedusaConfig,
    table=(same("target_name_or_path", "base_model_name_or_path", missing=""),),
    is_sized_by_tensors=True,
    complete=_complete,
)
