"""A server that answers requests for features as vLLM with our connector does, and runs the target in this process."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from hf_hyperdflash.targets.registry import target_of
from hf_hyperdflash.training.features.engine_protocol import (
    ERROR_SUFFIX,
    FIELD,
    VERSION,
    RowRequest,
    engine_layer_ids,
    state_columns,
    token_path,
)
from hf_hyperdflash.training.features.identity import describe_target
from hf_hyperdflash.training.features.part_file import encode, row_digest, save_part
from hf_hyperdflash.training.losses.objective import compute_document_residuals

from .loopback import Server


class FeatureServer(Server):
    """Attributes may be changed while it serves: what it says of itself, and what goes wrong."""

    def __init__(self, target, directory, layers=(-1,), port=0):
        super().__init__(port=port, models=("served",))
        self.target, self.directory, self.layers = target, Path(directory), list(layers)
        family, described = target_of(target), describe_target(target)
        config = described.pop("config")
        self.said = {
            "version": VERSION, "model": described.pop("repository"), "source": described, "config": config,
            "quantization": None, "hidden_size": family.config.hidden_size, "hc_mult": family.streams,
            "num_layers": len(family.layers), "max_tokens": 100, "directory": str(directory),
            "engine_layer_ids": sorted(engine_layer_ids(layers, len(family.layers), family.streams)),
        }  # fmt: skip
        self.has_connector, self.fails, self.tokens = True, "", None

    def answer(self, path, body):
        if path == "/tokenize":
            return (200, json.dumps({"tokens": self.tokens(body["prompt"])})) if self.tokens else (404, None)
        with self.lock:  # a target in this process runs one row at a time
            self.asked.append(body)
            said = self._features(body) if self.has_connector else None
        return 200, json.dumps({"choices": [{"text": ""}], "kv_transfer_params": said and {FIELD: said}})

    def _features(self, body):
        fields, ids = body["kv_transfer_params"][FIELD], torch.tensor(body["prompt"])
        if "token" in fields:
            return {**self.said, "sees_token": token_path(self.directory, fields["token"]).exists()}
        wanted = RowRequest.read(fields)
        assert wanted.digest == row_digest(ids, torch.arange(len(ids)))
        state_columns(wanted.layers, self.said["engine_layer_ids"], self.said["num_layers"], self.said["hc_mult"])
        (residual,) = compute_document_residuals(self.target, [ids], wanted.layers)
        place = wanted.path(self.directory)
        if self.fails:
            place.with_suffix(ERROR_SUFFIX).write_text(self.fails)
        else:
            row = {"input_ids": ids, "position_ids": torch.arange(len(ids))}
            save_part(place, wanted.cache, [row], encode(residual, wanted.dtype))
        return {"file": place.name}
