"""What a client and our connector in vLLM agree upon: layer ids, the request of a row, the command of such a server.

A client sends a request in `kv_transfer_params["features"]` of a completion of one token, and the answer comes back
there. Engines import this file, so that it needs nothing that trains.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .part_file import FEATURE_DTYPES, part_name, part_path

CONNECTOR, FIELD = "HyperDFlashFeatures", "features"
VERSION = 1  # of requests and answers
# An environment variable of the server: 1 makes DeepSeek-V4 return its residual streams, to drafters and for features.
STREAMS_VARIABLE = "HYPERDFLASH_DEEPSEEK_V4_PATHS"
# Other files in the folder: a part of a part, why the server could not write a file, and a file of the client, which
# shows that the server has the same folder.
PIECE_SUFFIX, ERROR_SUFFIX, TOKEN_SUFFIX = ".piece", ".error", ".token"
_KEY, _NAME = re.compile("[0-9a-f]{64}"), re.compile("[0-9a-f]{32}")


def engine_layer_ids(target_layer_ids: Sequence[int], num_layers: int, streams: int = 1) -> list[int]:
    """Return vLLM's ids of the states that layers hand on. vLLM counts the layers before a state:

    | state | our id | vLLM's id |
    |---|---|---|
    | what enters the first layer | -1,000,000 | 0 |
    | the output of layer k, counted from 0 | k | k + 1 |
    | the output of the last layer, before the final norm | -1 | `num_layers` |

    Of a target with several residual streams vLLM gives those of the last layer alone, each as a state of its own.
    """
    ids = [num_layers if i == -1 else max(i, -1) + 1 for i in target_layer_ids]
    if missing := [i for i, own in zip(target_layer_ids, ids) if own > num_layers]:
        raise ValueError(
            f"Layer {missing[0]} is needed, but the target has {num_layers} layers: expected 0 to {num_layers - 1}, "
            "or -1 for the last one."
        )
    if streams > 1 and set(ids) != {num_layers}:
        raise ValueError(
            f"vLLM gives the {streams} residual streams of the last layer alone, but layers {list(target_layer_ids)} "
            "are needed: use [-1], or compute the features with `--target`."
        )
    return [num_layers] * streams if streams > 1 else ids


def state_columns(
    target_layer_ids: Sequence[int], engine_ids: Sequence[int], num_layers: int, streams: int = 1
) -> list[int]:
    """Return which of the states that a server keeps of a token are those of our layers, in their order. Raise a
    `ValueError` if it does not keep one."""
    needed = engine_layer_ids(target_layer_ids, num_layers, streams)
    if streams > 1:
        return list(range(streams))
    if missing := sorted(set(needed) - set(engine_ids)):
        raise ValueError(
            f"The server keeps the states {list(engine_ids)}, as vLLM counts them, but layers "
            f"{list(target_layer_ids)} need {missing}, too."
        )
    return [list(engine_ids).index(i) for i in needed]


def serve_command(
    target: str,
    target_layer_ids: Sequence[int],
    num_layers: int,
    streams: int,
    directory: str,
    revision: str | None = None,
) -> str:
    """Return the command that starts vLLM with our connector."""
    ids = engine_layer_ids(target_layer_ids, num_layers, streams)
    kept = ids if streams > 1 else sorted(set(ids))
    speculative = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": kept}},
    }
    transfer = {
        "kv_connector": CONNECTOR,
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": directory},
    }
    words = ["vllm", "serve", target, *(["--revision", revision] if revision else [])]
    words += ["--speculative-config", json.dumps(speculative), "--kv-transfer-config", json.dumps(transfer)]
    return (f"{STREAMS_VARIABLE}=1 " if streams > 1 else "") + shlex.join(words)


@dataclass(frozen=True)
class RowRequest:
    """What a client wants of one prompt.

    Attributes:
        cache: The key of the cache's identity, which the file's header gets.
        row: The row's number in the dataset, for messages.
        digest: The digest of its token ids and positions; the server computes it, too, and names the file by it.
        layers: Our `target_layer_ids`.
        dtype: How the states are stored.
        piece_of: The name of the part that the client joins from this and others, if the row is not a part itself.
    """

    cache: str
    row: int
    digest: str
    layers: list[int]
    dtype: str
    piece_of: str | None = None

    @classmethod
    def read(cls, fields: dict[str, Any]) -> RowRequest:
        """Check what came over the network. A `ValueError` says what no client of ours sends."""
        try:
            request = cls(**fields)
        except TypeError:
            raise ValueError(
                f"The request has the fields {sorted(fields)}, expected {sorted(cls.__dataclass_fields__)}: install "
                "the same release of hf-hyperdflash for client and server."
            ) from None
        are_layers = isinstance(request.layers, list) and all(type(i) is int for i in request.layers)
        for name, is_good, expected in (
            ("cache", _is_hex(request.cache, _KEY), "64 hexadecimal digits"),
            ("row", type(request.row) is int, "a number"),
            ("digest", _is_hex(request.digest, _NAME), "32 hexadecimal digits"),
            ("layers", are_layers and bool(request.layers), "a list of numbers"),
            ("dtype", request.dtype in list(FEATURE_DTYPES), f"one of {sorted(FEATURE_DTYPES)}"),
            ("piece_of", request.piece_of is None or _is_hex(request.piece_of, _NAME), "32 hexadecimal digits"),
        ):
            if not is_good:
                found = repr(getattr(request, name))[:80]
                raise ValueError(f"The request's `{name}` is {found}, expected {expected}.")
        return request

    def params(self) -> dict[str, dict[str, Any]]:
        """Return the `kv_transfer_params`."""
        return {FIELD: asdict(self)}

    def path(self, directory: Path) -> Path:
        """Return the path of the file: it is in the folder, whatever a client sends, once the request is checked."""
        name = part_name([self.digest])
        return (
            part_path(directory, name)
            if self.piece_of is None
            else directory / f"{self.piece_of}-{name}{PIECE_SUFFIX}"
        )


def token_path(directory: Path, token: object) -> Path:
    """Return the path of a client's file, by which it knows the folder; a `ValueError` for what no client sends."""
    if not _is_hex(token, _NAME):
        raise ValueError(f"The request's `token` is {repr(token)[:80]}, expected 32 hexadecimal digits.")
    return directory / f"{token}{TOKEN_SUFFIX}"


def _is_hex(value: object, digits: re.Pattern[str]) -> bool:
    return isinstance(value, str) and digits.fullmatch(value) is not None
