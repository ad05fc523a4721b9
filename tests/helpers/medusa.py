"""Medusa heads of the tests' sizes, and their published files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from hf_hyperdflash import MedusaConfig, MedusaDrafter


def medusa(target: str = "", width: int = 64, **fields: Any) -> MedusaDrafter:
    fields = {"medusa_num_heads": 3, "hidden_size": width, "vocab_size": 64, **fields}
    return MedusaDrafter(MedusaConfig(target_name_or_path=target, **fields)).eval()


def published(folder: Path, tensors: Any, file: str = "medusa_lm_head.safetensors") -> Path:
    folder.mkdir(exist_ok=True)
    # As some are published, with fewer heads than there are.
    told = {"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": "org/its-target"}
    (folder / "config.json").write_text(json.dumps({**told, "transformers_version": "4.31.0"}))
    save_file(tensors, folder / file) if file.endswith(".safetensors") else torch.save(tensors, folder / file)
    return folder
