"""vLLM as a producer of features: a connector that writes the residual of a prompt as a part of a feature folder.

vLLM's method `extract_hidden_states` keeps the states of some layers in blocks of the KV cache. When a request has
ended, its scheduler calls [`FeatureConnector.request_finished`], which answers the client. The next step of a worker
then copies the states out of the blocks, and a thread writes the file. Every path is made here, from the token ids
that vLLM has run; nothing of what a client sends becomes a part of one.
"""

from __future__ import annotations

import json
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
    extract_from_kv_cache,
)
from vllm.logger import init_logger
from vllm.model_executor.model_loader.utils import get_model_architecture
from vllm.v1.request import RequestStatus

from ...training.features.checkpoint import checkpoint_source
from ...training.features.engine_protocol import (
    CONNECTOR,
    ERROR_SUFFIX,
    FIELD,
    VERSION,
    RowRequest,
    state_columns,
    token_path,
)
from ...training.features.part_file import encode, row_digest, save_part
from .plugin import STREAMS_VARIABLE

logger = init_logger(__name__)
_WRITTEN = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)  # not one that a client gave up


class RowJob(NamedTuple):
    """A row whose states a worker has to write."""

    request_id: str
    wanted: RowRequest
    columns: list[int]  # which of the states that vLLM keeps of a token, in the order of the file
    token_ids: list[int]
    block_ids: list[int]


@dataclass
class RowJobs(KVConnectorMetadata):
    """What the scheduler tells the workers in a step."""

    jobs: list[RowJob]


class FeatureConnector(ExampleHiddenStatesConnector):
    """vLLM's connector for hidden states, with our requests, our files, and no need of CUDA."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        speculative, text = vllm_config.speculative_config, vllm_config.model_config.hf_text_config
        self._streams = max(getattr(text, name, None) or 1 for name in ("hc_mult", "hc_count"))
        self._num_layers: int = text.num_hidden_layers
        self._engine_ids = _engine_ids(speculative)
        check_started(vllm_config, self._engine_ids, self._num_layers, self._streams)
        super().__init__(vllm_config, role, kv_cache_config)
        self._directory = Path(self._storage_path)
        self._directory.mkdir(parents=True, exist_ok=True)
        self._finished: list[RowJob] = []
        if role == KVConnectorRole.SCHEDULER:
            self._description = self._describe(vllm_config.model_config, text)

    def _describe(self, model: Any, text: Any) -> dict[str, Any]:
        """Return what a client compares before it sends rows."""
        config = model.hf_config
        return {
            "version": VERSION,
            "model": model.model,
            "source": checkpoint_source(model.model, getattr(config, "_commit_hash", None) or model.revision),
            "config": json.loads(json.dumps(config.to_dict(), default=str)),
            "quantization": model.quantization,
            "hidden_size": model.get_hidden_size(),
            "hc_mult": self._streams,
            "num_layers": self._num_layers,
            "engine_layer_ids": self._engine_ids,
            "max_tokens": model.max_model_len - 1,
            "directory": str(self._directory.absolute()),
        }

    # In the scheduler

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Answer the client, and keep the blocks of a row that is to be written."""
        fields = (request.kv_transfer_params or {}).get(FIELD)
        if not isinstance(fields, dict) or request.status not in _WRITTEN:
            return False, None
        try:
            if "token" in fields:
                sees = token_path(self._directory, fields["token"]).exists()
                return False, {FIELD: {**self._description, "sees_token": sees}}
            job = self._job(request, RowRequest.read(fields), block_ids)
        except ValueError as error:
            return False, {FIELD: {"error": str(error)}}
        self._finished.append(job)
        return True, {FIELD: {"file": job.wanted.path(self._directory).name}}

    def _job(self, request: Any, wanted: RowRequest, block_ids: list[int]) -> RowJob:
        token_ids = list(request.prompt_token_ids or ())
        ids = torch.tensor(token_ids, dtype=torch.long)
        digest = row_digest(ids, torch.arange(len(ids)))
        if digest != wanted.digest:
            raise ValueError(
                f"Row {wanted.row} came as {len(ids)} tokens with the digest {digest}, expected {wanted.digest}: send "
                "its token ids as the prompt, whole."
            )
        columns = state_columns(wanted.layers, self._engine_ids, self._num_layers, self._streams)
        return RowJob(request.request_id, wanted, columns, token_ids, list(block_ids))

    def build_connector_meta(self, scheduler_output: Any) -> RowJobs:
        jobs, self._finished = self._finished, []
        return RowJobs(jobs)

    # In a worker

    def wait_for_save(self) -> None:
        """Do nothing: a client waits for the file, not for a lock."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Copy the states of finished rows out of their blocks, which are free then."""
        jobs = self._get_connector_metadata().jobs if self.has_connector_metadata() else []
        if not self._is_tp_rank_zero:
            return None, None
        for job in jobs:
            self._copy(job)
        return {job.request_id for job in jobs} or None, None

    def _copy(self, job: RowJob) -> None:
        device, size = self._kv_cache.device, self._block_size
        slots = (torch.tensor(job.block_ids)[:, None] * size + torch.arange(size)).flatten()
        states = extract_from_kv_cache(self._kv_cache, slots.to(device), len(job.token_ids))[:, job.columns]
        stored, is_finite, ready = encode(states, job.wanted.dtype), states.isfinite().all(), None
        if device.type != "cpu":  # the thread has a stream of its own there, which does not wait for this one
            ready = torch.Event(device.type)
            ready.record()
        path = job.wanted.path(self._directory)
        writing = self._executor.submit(_write, path, job, stored, is_finite, ready)
        writing.add_done_callback(partial(_report, path, job))


def _write(path: Path, job: RowJob, stored: dict[str, torch.Tensor], is_finite: torch.Tensor, ready: Any) -> None:
    if ready is not None:
        ready.synchronize()
    if not is_finite:
        raise ValueError(
            f"The target's residual of row {job.wanted.row} is not finite: it would make the loss NaN. Serve the "
            "target in bfloat16 or float32, or leave that row out."
        )
    ids = torch.tensor(job.token_ids)
    row = {"input_ids": ids, "position_ids": torch.arange(len(ids))}
    save_part(path, job.wanted.cache, [row], {name: values.cpu() for name, values in stored.items()})


def _report(path: Path, job: RowJob, writing: Future[None]) -> None:
    error = writing.exception()
    if error is not None:  # for the client, which waits for the file
        logger.error("Row %d was not written: %s", job.wanted.row, error)
        path.with_suffix(ERROR_SUFFIX).write_text(str(error), encoding="utf-8")


def _engine_ids(speculative: Any) -> list[int]:
    config = getattr(getattr(speculative, "draft_model_config", None), "hf_config", None)
    return list(getattr(config, "eagle_aux_hidden_state_layer_ids", None) or ())


def check_started(vllm_config: Any, ids: list[int], num_layers: int, streams: int) -> None:
    """Raise a `ValueError` if the options of the server do not let it write features."""
    fix = "start it with the command that `hf-hyperdflash features --endpoint` prints."
    speculative, transfer = vllm_config.speculative_config, vllm_config.kv_transfer_config
    method = getattr(speculative, "method", None)
    if method != "extract_hidden_states":
        raise ValueError(f"The speculative method is {method!r}, but {CONNECTOR} needs 'extract_hidden_states': {fix}")
    if not transfer.get_from_extra_config("shared_storage_path", None):
        raise ValueError(f"{CONNECTOR} has no `shared_storage_path`, expected the folder for features: {fix}")
    if vllm_config.parallel_config.pipeline_parallel_size > 1:
        raise ValueError(
            "`--pipeline-parallel-size` is more than 1, where vLLM keeps the states of the last stage's worker alone: "
            "use `--tensor-parallel-size`."
        )
    expected = [num_layers] * streams if streams > 1 else sorted({i for i in ids if 0 <= i <= num_layers})
    if ids != expected:
        raise ValueError(
            f"`eagle_aux_hidden_state_layer_ids` is {ids}, expected "
            + (f"{expected}, one for each stream" if streams > 1 else f"rising numbers from 0 to {num_layers}")
            + f": {fix}"
        )
    kind = get_model_architecture(vllm_config.model_config)[0] if streams > 1 else None
    if kind is not None and not hasattr(kind, "hands_out_streams"):
        raise ValueError(
            f"vLLM's {kind.__name__} hands out the mean of its {streams} residual streams, but features have each: "
            f"start vLLM with the environment variable {STREAMS_VARIABLE}=1."
        )
