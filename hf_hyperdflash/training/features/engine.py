"""A vLLM server as a producer of features: it runs the target and writes the files, this process asks for them."""

from __future__ import annotations

import secrets
import shutil
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.filesize import decimal
from safetensors.torch import load_file
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...targets.registry import target_of
from ..data.endpoint import Endpoint, RequestRefused, Requests, ServerError, find_endpoint
from ..losses.objective import split_documents
from .engine_protocol import (
    CONNECTOR,
    ERROR_SUFFIX,
    FIELD,
    VERSION,
    RowRequest,
    serve_command,
    state_columns,
    token_path,
)
from .fingerprint import config_fields
from .identity import Identity
from .part_file import row_digest, save_part
from .parts import part_defect
from .writing import Job

_OPTION = "--served_model"
_TRIES, _FILE_SECONDS, _FIRST_POLL, _LONGEST_POLL = 4, 30.0, 0.005, 0.2
_SENTENCE = "Where 3 of 10 users stop: naïve “quotes”, 中文, \U0001f40d and\n\tdef f(x): return x**2"


def served_checkpoint(address: str, served_model: str | None = None) -> str:
    """Return the folder or Hub id of the model that a server has."""
    endpoint = find_endpoint(address, served_model, _OPTION)
    return str(endpoint.models()[endpoint.model].get("root") or endpoint.model)


def find_engine(
    address: str,
    directory: Path,
    target: PreTrainedModel,
    identity: Identity,
    *,
    served_model: str | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    concurrency: int = 64,
) -> EngineProducer:
    """Return the producer of a server, which has been asked whether it makes these features. A `ValueError` says why
    not, and has the command that starts one."""
    producer = EngineProducer(Endpoint(address, ""), directory, target, identity, tokenizer, concurrency)
    try:
        producer.use(find_endpoint(address, served_model, _OPTION))
    except ServerError as error:
        raise ValueError(f"{error} This starts one: {producer.command()}") from error
    directory.mkdir(parents=True, exist_ok=True)
    producer.check(1)
    return producer


class EngineProducer:
    """Has a vLLM server with our connector make the parts, which have one row each.

    The server writes into its own folder, which has to be `directory`; several servers may have the same.
    """

    rows_per_part: int | None = 1

    def __init__(
        self,
        endpoint: Endpoint,
        directory: Path,
        target: PreTrainedModel,
        identity: Identity,
        tokenizer: PreTrainedTokenizerBase | None = None,
        concurrency: int = 64,
    ) -> None:
        """Make the producer; of `target`, which needs no weights, it reads the sizes."""
        family = target_of(target)
        self.num_layers, self.vocab_size = len(family.layers), int(family.config.vocab_size)
        self.directory, self.identity, self.tokenizer, self.concurrency = directory, identity, tokenizer, concurrency
        self._joining = threading.Lock()
        self.use(endpoint)

    def use(self, endpoint: Endpoint) -> None:
        """Ask this server from now on."""
        self.endpoint, self.requests = endpoint, Requests(endpoint, self.concurrency)

    # Before any work

    def check(self, longest: int) -> None:
        """Raise a `ValueError` in one line if the server does not make these features, of rows of up to `longest`
        tokens, or not in this folder."""
        served = self._describe()
        fix = f"Start it so: {self.command()}"
        if served["version"] != VERSION:
            raise ValueError(
                f"The connector of {self.endpoint.root} speaks version {served['version']} of the requests for "
                f"features, expected {VERSION}: install the same release of hf-hyperdflash here and there."
            )
        if differing := self._other_target(served):
            raise ValueError(
                f"{self.endpoint.root} serves another target, {served['model']!r} there, "
                f"{self.identity['target']['repository']!r} here ({'; '.join(differing)}). {fix}"
            )
        try:
            state_columns(
                self.identity["target_layer_ids"],
                served["engine_layer_ids"],
                self.num_layers,
                self.identity["hc_mult"],
            )
        except ValueError as error:
            raise ValueError(f"{self.endpoint.root}: {error} {fix}") from None
        if not served["sees_token"]:
            raise ValueError(
                f"{self.endpoint.root} writes into its folder {served['directory']}, which is not {self.directory} "
                f"here: the file that was put there for it does not show. Use the server's folder as `--output`, on a "
                f"disk that both see. {fix}"
            )
        if longest > served["max_tokens"]:
            raise ValueError(
                f"The longest row has {longest} tokens, but {self.endpoint.root} takes up to {served['max_tokens']}: "
                f"start it with `--max-model-len {longest + 1}`, or cut the rows (`--max_length`)."
            )
        self._check_tokenizer()

    def command(self) -> str:
        """Return the command that starts a server of these features."""
        identity, directory = self.identity, str(self.directory.absolute())
        name, revision = identity["target"]["repository"], identity["target"].get("revision")
        of_hub = revision if not Path(name).exists() and revision and " " not in revision else None
        return serve_command(
            name, identity["target_layer_ids"], self.num_layers, identity["hc_mult"], directory, of_hub
        )

    def _describe(self) -> dict[str, Any]:
        """Return what the server says of itself, after it has looked for a file that is put into the folder."""
        token = secrets.token_hex(16)
        path = token_path(self.directory, token)
        path.touch()
        try:
            said = self._post([0], {FIELD: {"token": token}})
        except RequestRefused as error:
            raise ServerError(str(error)) from error
        finally:
            path.unlink(missing_ok=True)
        if "directory" not in said:
            raise ValueError(
                f"{self.endpoint.root} is no server that writes features: it has no connector {CONNECTOR}. Start it "
                f"so, where hf-hyperdflash is installed, too: {self.command()}"
            )
        return said

    def _other_target(self, served: dict[str, Any]) -> list[str]:
        """Return in what the server's target is another one."""
        ours = self.identity["target"]
        found = [
            f"{name} {_short(served['source'].get(name))} there, {_short(ours.get(name))} here"
            for name in ("revision", "files")
            if served["source"].get(name) != ours.get(name)
        ]
        if served["quantization"] and not any(name.startswith("quantization_config") for name in ours["config"]):
            found.append(f"quantized there: {served['quantization']}")
        for name in ("hidden_size", "hc_mult"):
            if served[name] != self.identity[name]:
                found.append(f"{name} {served[name]} there, {self.identity[name]} here")
        if served["num_layers"] != self.num_layers:
            found.append(f"{served['num_layers']} layers there, {self.num_layers} here")
        # Numbers alone: other releases of transformers write other words for the same.
        theirs = config_fields(served["config"])
        for name in sorted(theirs.keys() & ours["config"].keys()):
            pair = theirs[name], ours["config"][name]
            if all(isinstance(value, (int, float)) for value in pair) and pair[0] != pair[1]:
                found.append(f"config.{name} {pair[0]} there, {pair[1]} here")
        return found

    def _check_tokenizer(self) -> None:
        if self.tokenizer is None:
            return
        text = _SENTENCE
        if self.tokenizer.chat_template:
            text = str(self.tokenizer.apply_chat_template([{"role": "user", "content": text}], tokenize=False))
        ours: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        try:
            theirs = self.requests.post("/tokenize", {"prompt": text, "add_special_tokens": False})["tokens"]
        except (RequestRefused, ServerError, KeyError):  # a server without a tokenizer, which features do not need
            return
        if theirs != ours:
            at = next((i for i, (a, b) in enumerate(zip(theirs, ours)) if a != b), min(len(theirs), len(ours)))
            raise ValueError(
                f"The tokenizer of {self.endpoint.root} is another one than that of the rows: of one text it makes "
                f"{theirs[at : at + 3]} from token {at} on, here it is {ours[at : at + 3]}. Tokenize the rows with "
                "the served target's own tokenizer."
            )

    # Parts

    def make(self, job: Job) -> None:
        """Ask for each document of the part, and wait for the file. A part of several documents is joined here."""
        documents = [
            (job.first_row + i, ids)
            for i, row in enumerate(job.rows)
            for ids in split_documents(row["input_ids"], row["position_ids"])
        ]
        whole = len(documents) == 1
        layers, dtype, requests = job.identity["target_layer_ids"], job.identity["dtype"], []
        for row, ids in documents:
            digest = row_digest(ids, torch.arange(len(ids)))
            requests.append(RowRequest(job.key, row, digest, layers, dtype, None if whole else job.part.name))
            self._ask(requests[-1], ids)
            job.progress(len(ids))
        if whole:
            return
        paths = [request.path(self.directory) for request in requests]
        with self._joining:  # as much memory as one part needs
            pieces = [load_file(path) for path in paths]
            names = pieces[0].keys() & {"residual", "scale"}
            save_part(job.path, job.key, job.rows, {n: torch.cat([piece[n] for piece in pieces]) for n in names})
        for path in set(paths):
            path.unlink()

    def _ask(self, request: RowRequest, ids: torch.Tensor) -> None:
        """Have the server write a file, and wait for it."""
        path = request.path(self.directory)
        if not part_defect(path, request.cache):  # a piece that is there already
            return
        failed = path.with_suffix(ERROR_SUFFIX)
        failed.unlink(missing_ok=True)
        for _ in range(_TRIES):
            self._post(ids.tolist(), request.params())
            pause, until = _FIRST_POLL, time.monotonic() + _FILE_SECONDS
            while time.monotonic() < until:
                if not part_defect(path, request.cache):
                    return
                if failed.exists():
                    why = failed.read_text(encoding="utf-8")
                    failed.unlink(missing_ok=True)
                    raise OSError(f"{self.endpoint.root} could not write row {request.row}: {why}")
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_POLL)
            # A server that was killed after its answer, before the file: another one may be there now.
        free = decimal(shutil.disk_usage(self.directory).free)
        raise OSError(
            f"{self.endpoint.root} has run row {request.row} {_TRIES} times, but {path.name} is not in "
            f"{self.directory} {_FILE_SECONDS:g} seconds later ({free} are free there): look at the server's log. "
            "What is written stays, and the same command goes on after it."
        )

    def _post(self, token_ids: Sequence[int], params: dict[str, Any]) -> dict[str, Any]:
        """Send a prompt for one token, and return what the connector answers; nothing if there is none."""
        body = {"prompt": token_ids, "max_tokens": 1, "temperature": 0, "kv_transfer_params": params}
        said = (self.requests.post("/v1/completions", body).get("kv_transfer_params") or {}).get(FIELD) or {}
        if "error" in said:
            raise ValueError(f"{self.endpoint.root} refuses it: {said['error']}")
        return said


def _short(digest: str | None) -> str:
    return digest[:12] if digest else "unknown"
