"""A vLLM server as a producer of features: what it writes into a feature folder is what the target computes here.

`.ci/vllm` makes an environment with vLLM and runs these; elsewhere they are skipped. A server takes a minute to start,
so that most of them share one.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoTokenizer

from hf_hyperdflash import load_target
from hf_hyperdflash.targets.hooks import EMBEDDINGS
from hf_hyperdflash.training.data.endpoint import Endpoint
from hf_hyperdflash.training.features.engine import EngineProducer
from hf_hyperdflash.training.features.identity import feature_identity
from hf_hyperdflash.training.features.part_file import row_digest
from hf_hyperdflash.training.features.store import FeatureCache
from hf_hyperdflash.training.features.writing import FeatureWriter, TargetProducer

from ..helpers.refusals import Refusal

vllm = pytest.importorskip("vllm", reason="vLLM is not installed: .ci/vllm makes an environment that has it")

LAYERS = [EMBEDDINGS, 2, -1]


class Served:
    """A target in vLLM, started by the command that a user is told. In chunks of 128 tokens, with its prefix cache."""

    def __init__(self, target: Path, folder: Path, *options: str) -> None:
        self.name, self.directory = target, folder / "features"
        self.directory.mkdir()
        self.target = load_target(str(target), dtype=torch.float32)
        self.tokenizer = AutoTokenizer.from_pretrained(target)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = str(free.getsockname()[1])
        self.log, self.options = folder / "log", options

    def start(self) -> None:
        words = shlex.split(self.producer().command())
        words[0] = str(Path(sys.executable).with_name(words[0]))
        words += [
            "--host",
            "127.0.0.1",
            "--port",
            self.port,
            "--dtype",
            "float32",
            "--enforce-eager",
            "--max-num-seqs",
            "4",
        ]
        words += ["--served-model-name", "served", "--max-model-len", "512", "--max-num-batched-tokens", "128"]
        words += self.options
        environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(words, stdout=log, stderr=log, start_new_session=True, env=environment)
        for _ in range(600):
            with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health"):
                return
            assert self.process.poll() is None, self.log.read_text()[-4000:]
            time.sleep(1)
        raise TimeoutError(f"no answer on port {self.port}")

    def kill(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def producer(self, dtype: str = "float32", layers: list[int] = LAYERS) -> EngineProducer:
        identity = feature_identity(self.target, dtype=dtype, target_layer_ids=layers)
        endpoint = Endpoint(f"http://127.0.0.1:{self.port}", "served")
        return EngineProducer(endpoint, self.directory, self.target, identity, self.tokenizer, concurrency=4)

    def write(self, rows: list[dict], **options) -> FeatureCache:
        FeatureWriter(self.directory, rows, self.producer(**options)).complete()
        return FeatureCache(self.directory, self.target)

    def post(self, **body) -> dict:
        """Ask it as somebody else may."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/completions",
            json.dumps({"model": "served", "max_tokens": 1, **body}).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)


@pytest.fixture(scope="module")
def started(dense_pair, tmp_path_factory):
    served = Served(dense_pair[0], tmp_path_factory.mktemp("served"))
    served.start()
    yield served
    served.kill()


@pytest.fixture
def served(started):
    for path in started.directory.iterdir():
        path.unlink()
    return started


def some_rows(*lengths: int, seed: int = 0) -> list[dict]:
    """The longer ones begin as the others do, which a prefix cache makes use of."""
    ids = torch.randint(3, 2048, (max(lengths),), generator=torch.Generator().manual_seed(seed)).tolist()
    return [{"input_ids": ids[:n], "loss_mask": [1] * n, "position_ids": list(range(n))} for n in lengths]


def check_equal(cache: FeatureCache, target: object, rows: list[dict], folder: Path, tolerance: float) -> None:
    """Compare with what the target computes here, in float32."""
    identity = feature_identity(target, dtype="float32", target_layer_ids=cache.target_layer_ids)
    FeatureWriter(folder, rows, TargetProducer(target, identity)).complete()
    assert len(cache) == len(rows)
    for ours, theirs, row in zip(FeatureCache(folder, target), cache, rows):
        assert theirs["input_ids"].tolist() == row["input_ids"]
        assert theirs["position_ids"].tolist() == row["position_ids"]
        expected, found = ours["residual"].float(), theirs["residual"].float()
        # By token and stream: the first token's states are far larger than the others'.
        error = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
        assert error.max() < tolerance, error.max()


@pytest.mark.parametrize(
    ("dtype", "layers", "tolerance"),
    [("float32", LAYERS, 1e-4), ("bfloat16", [-1, 2], 5e-3), ("float8", LAYERS, 4e-2), ("float32", [7], 1e-4)],
)
def test_states_are_the_targets(served, tmp_path, dtype, layers, tolerance):
    """In batches of rows of different lengths, some in several chunks, some with a prefix that is cached."""
    rows = some_rows(1, 5, 400, 130, 17, 128, 300) + some_rows(60, 33, 511, seed=1)
    check_equal(served.write(rows, dtype=dtype, layers=layers), served.target, rows, tmp_path, tolerance)
    assert len(list(served.directory.glob("*.safetensors"))) == len(rows)


def test_several_ask_at_once(served, tmp_path):
    """Two clients that share the parts, somebody who asks for texts, and one who hangs up."""
    rows = some_rows(*range(40, 120, 2))
    asked = threading.Event()

    def ask_for_texts() -> None:
        while not asked.is_set():
            assert served.post(prompt=[5, 6, 7], max_tokens=8)["usage"]["completion_tokens"] == 8

    others = threading.Thread(target=ask_for_texts)
    others.start()
    with socket.create_connection(("127.0.0.1", int(served.port))) as gone:
        wanted = {"model": "served", "prompt": [3] * 400, "max_tokens": 90, "kv_transfer_params": {"features": GOOD}}
        body = json.dumps(wanted).encode()
        head = ("POST /v1/completions HTTP/1.1", "Host: x", "Content-Type: application/json")
        gone.sendall("\r\n".join([*head, f"Content-Length: {len(body)}", "", ""]).encode() + body)
    try:
        writers = [FeatureWriter(served.directory, rows, served.producer()) for _ in range(2)]
        threads = [threading.Thread(target=writer.complete) for writer in writers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        asked.set()
        others.join()
    check_equal(FeatureCache(served.directory, served.target), served.target, rows, tmp_path, 1e-4)


def test_parts_of_several_rows_are_joined(served, tmp_path):
    """As a target here groups them, which began the list."""
    rows = some_rows(9, 70, 200)
    here = TargetProducer(served.target, served.producer().identity)
    FeatureWriter(served.directory, rows, here).complete()
    (part,) = served.directory.glob("*.safetensors")
    part.unlink()
    check_equal(served.write(rows), served.target, rows, tmp_path, 1e-4)
    assert part.exists() and not list(served.directory.glob("*.piece"))


IDS = torch.tensor([5, 6, 7])
GOOD = {"cache": "ab" * 32, "row": 0, "digest": row_digest(IDS, torch.arange(3)), "layers": [-1], "dtype": "float32"}


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"digest": "0f" * 16}, "came as 3 tokens with the digest"),
        ({"cache": "../../escaped"}, "`cache` is '../../escaped'"),
        ({"digest": "../escaped"}, "`digest` is '../escaped'"),
        ({"piece_of": "../escaped"}, "`piece_of` is '../escaped'"),
        ({"layers": [3]}, "keeps the states"),
        ({"shared_storage_path": "/tmp/escaped"}, "shared_storage_path"),
        ({"token": "../../escaped"}, "`token` is '../../escaped'"),
    ],
)
def test_what_no_client_sends_writes_nothing(served, wrong, words):
    before = sorted(served.directory.parent.rglob("*"))
    answer = served.post(prompt=IDS.tolist(), kv_transfer_params={"features": {**GOOD, **wrong}})
    assert words in answer["kv_transfer_params"]["features"]["error"]
    assert sorted(served.directory.parent.rglob("*")) == before


def test_other_servers_are_refused(served, tmp_path, dense_pair):
    with pytest.raises(ValueError, match=r"keeps the states \[0, 3, 8\].* need \[2\]"):
        served.producer(layers=[1, -1]).check(9)
    with pytest.raises(ValueError, match="`--max-model-len 513`"):
        served.producer().check(512)
    elsewhere = served.producer()
    elsewhere.directory = tmp_path
    Refusal(lambda: elsewhere.check(9), (str(served.directory), "which is not", str(tmp_path))).check()
    other, copied = load_target(str(dense_pair[0]), dtype=torch.float32), tmp_path / "other"
    with torch.no_grad():
        other.lm_head.weight.mul_(2)
    other.save_pretrained(copied)
    making = served.producer()
    making.identity = feature_identity(load_target(str(copied), dtype=torch.float32), target_layer_ids=LAYERS)
    Refusal(lambda: making.check(9), ("another target", "files", str(copied))).check()
    another = served.producer()
    another.tokenizer = AutoTokenizer.from_pretrained(dense_pair[0])
    another.tokenizer.add_tokens(["users"])
    Refusal(lambda: another.check(9), ("tokenizer", "another one")).check()


def test_a_write_that_fails_is_told(served):
    """Because the name of the unfinished file is taken."""
    rows = some_rows(21)
    writer = FeatureWriter(served.directory, rows, served.producer())
    taken = writer.parts[0].path(served.directory).with_suffix(".safetensors.tmp")
    taken.mkdir()
    with pytest.raises(OSError, match="could not write row 0: "):
        writer.complete()
    taken.rmdir()
    assert len(served.write(rows)) == 1


def test_a_call_goes_on_when_its_server_is_killed_and_started_again(served, tmp_path, monkeypatch):
    monkeypatch.setattr("hf_hyperdflash.training.features.engine._FILE_SECONDS", 5.0)
    rows = some_rows(*range(100, 300, 2))
    writer = FeatureWriter(served.directory, rows, served.producer())
    writing = threading.Thread(target=writer.complete)
    writing.start()
    while len(list(served.directory.glob("*.safetensors"))) < 5:
        time.sleep(0.01)
    served.kill()
    whole = len(list(served.directory.glob("*.safetensors")))
    assert 5 <= whole < len(rows)
    served.start()
    writing.join()
    check_equal(FeatureCache(served.directory, served.target), served.target, rows, tmp_path, 1e-4)


def test_one_process_of_a_group_writes(dense_pair, tmp_path, monkeypatch):
    """With tensor parallelism the states are in each process."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    served = Served(dense_pair[0], tmp_path, "--tensor-parallel-size", "2")
    served.start()
    try:
        rows = some_rows(5, 130, 70)
        check_equal(served.write(rows), served.target, rows, tmp_path / "own", 1e-4)
        for _ in range(3):  # no request waits for the process that writes nothing
            assert served.post(prompt=[5, 6, 7])["usage"]["completion_tokens"] == 1
    finally:
        served.kill()
    assert "Worker_TP1" in served.log.read_text()


# What is wrong with the options of a server, before it starts


@pytest.mark.parametrize(
    ("method", "ids", "folder", "stages", "streams", "words"),
    [
        ("dflash", [2, 8], "/x", 1, 1, ("'dflash'", "'extract_hidden_states'")),
        ("extract_hidden_states", [2, 8], None, 1, 1, ("shared_storage_path",)),
        ("extract_hidden_states", [2, 8], "/x", 2, 1, ("--pipeline-parallel-size", "--tensor-parallel-size")),
        ("extract_hidden_states", [8, 2], "/x", 1, 1, ("[8, 2]", "rising", "0 to 8")),
        ("extract_hidden_states", [2, 9], "/x", 1, 1, ("[2, 9]", "0 to 8")),
        ("extract_hidden_states", [8], "/x", 1, 4, ("[8]", "[8, 8, 8, 8]", "each stream")),
    ],
)
def test_options_that_write_no_features_are_refused(method, ids, folder, stages, streams, words):
    from hf_hyperdflash.serving.vllm.features import check_started

    config = SimpleNamespace(
        speculative_config=SimpleNamespace(method=method),
        kv_transfer_config=SimpleNamespace(get_from_extra_config=lambda name, default: folder),
        parallel_config=SimpleNamespace(pipeline_parallel_size=stages),
    )
    Refusal(lambda: check_started(config, ids, 8, streams), words).check()
