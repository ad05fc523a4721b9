"""What a client and the connector in vLLM agree upon, and the client, against a server that is no vLLM: it runs the
target in this process behind the same requests. `tests/serving/test_vllm_features.py` has vLLM's own."""

from __future__ import annotations

import json
import shlex
import threading
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from hf_hyperdflash import load_target
from hf_hyperdflash.targets.hooks import EMBEDDINGS
from hf_hyperdflash.training.data.endpoint import Endpoint
from hf_hyperdflash.training.feature_script import main
from hf_hyperdflash.training.features.engine import EngineProducer
from hf_hyperdflash.training.features.engine_protocol import (
    RowRequest,
    engine_layer_ids,
    serve_command,
    state_columns,
    token_path,
)
from hf_hyperdflash.training.features.identity import feature_identity
from hf_hyperdflash.training.features.store import FeatureCache
from hf_hyperdflash.training.features.writing import FeatureWriter, TargetProducer

from ..conftest import MODELS
from ..helpers.feature_server import FeatureServer
from ..helpers.loopback import serving
from ..helpers.refusals import Refusal
from ..helpers.served_drafters import qwen3

GOOD = {"cache": "ab" * 32, "row": 3, "digest": "0f" * 16, "layers": [1, -1], "dtype": "float8", "piece_of": None}


@pytest.mark.parametrize(
    ("ours", "engine"),
    [
        ([EMBEDDINGS], [0]),
        ([0], [1]),
        ([27], [28]),
        ([29], [30]),  # of 30 layers the last, by its number
        ([-1], [30]),  # and as the trainer names it
        ([28, -1, 1, EMBEDDINGS], [29, 30, 2, 0]),  # in our order
    ],
)
def test_our_layers_are_these_of_vllm(ours, engine):
    assert engine_layer_ids(ours, 30) == engine


def test_streams_are_states_of_the_last_layer():
    assert engine_layer_ids([-1], 43, streams=4) == engine_layer_ids([42], 43, streams=4) == [43] * 4
    assert state_columns([-1], [43] * 4, 43, streams=4) == [0, 1, 2, 3]


def test_states_come_in_the_order_of_our_layers():
    kept = [0, 2, 10, 30]  # as vLLM sorts them
    assert state_columns([9, -1, EMBEDDINGS, 29], kept, 30) == [2, 3, 0, 3]


@pytest.mark.parametrize(
    ("layers", "streams", "words"),
    [([30], 1, ("Layer 30", "30 layers", "0 to 29")), ([3, -1], 4, ("[3, -1]", "4 residual streams", "[-1]"))],
)
def test_layers_that_vllm_does_not_give_are_refused(layers, streams, words):
    with pytest.raises(ValueError) as error:
        engine_layer_ids(layers, 30, streams)
    assert all(word in str(error.value) for word in words)


def test_layers_that_a_server_does_not_keep_are_refused():
    with pytest.raises(ValueError, match=r"keeps the states \[2, 30\].* layers \[1, 9, -1\] need \[10\]"):
        state_columns([1, 9, -1], [2, 30], 30)


def test_the_command_has_the_layers_and_the_folder():
    words = shlex.split(serve_command("org/it's", [9, -1, 1, 29], 30, 1, "/data/my features"))
    assert words[:3] == ["vllm", "serve", "org/it's"]
    options = {name: json.loads(value) for name, value in zip(words[3::2], words[4::2])}
    speculative, transfer = options["--speculative-config"], options["--kv-transfer-config"]
    assert speculative["method"] == "extract_hidden_states"
    assert speculative["draft_model_config"]["hf_config"]["eagle_aux_hidden_state_layer_ids"] == [2, 10, 30]
    assert transfer["kv_connector_extra_config"] == {"shared_storage_path": "/data/my features"}
    of_v4 = shlex.split(serve_command("org/v4", [-1], 43, 4, "/data", "a1b2"))
    assert of_v4[:6] == ["HYPERDFLASH_DEEPSEEK_V4_PATHS=1", "vllm", "serve", "org/v4", "--revision", "a1b2"]
    assert '"eagle_aux_hidden_state_layer_ids": [43, 43, 43, 43]' in of_v4[7]


def test_a_request_arrives_as_it_was_sent():
    request = RowRequest.read(GOOD)
    assert RowRequest.read(json.loads(json.dumps(request.params()))["features"]) == request


@pytest.mark.parametrize(
    "wrong",
    [
        {"cache": "../../etc/passwd"},
        {"cache": "AB" * 32},
        {"cache": "ab" * 32 + "\n"},
        {"digest": "../" + "0f" * 16},
        {"digest": "0f" * 15},
        {"digest": 7},
        {"piece_of": "/tmp/" + "0f" * 16},
        {"piece_of": ["0f" * 16]},
        {"layers": []},
        {"layers": [True]},
        {"layers": "1"},
        {"dtype": "int8"},
        {"dtype": ["float8"]},
        {"row": "3"},
        {"hidden_states_path": "/etc/passwd"},
    ],
)
def test_what_no_client_sends_is_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        RowRequest.read({**GOOD, **wrong})


@pytest.mark.parametrize("piece_of", [None, "1e" * 16])
def test_files_are_in_the_folder(piece_of):
    path = RowRequest.read({**GOOD, "piece_of": piece_of}).path(Path("/data/features"))
    assert path.parent == Path("/data/features") and path.suffix == (".piece" if piece_of else ".safetensors")
    assert token_path(Path("/data"), "1e" * 16) == Path("/data") / f"{'1e' * 16}.token"
    for token in ("../x", "1e" * 15, None, 3, "1e" * 16 + "\n"):
        with pytest.raises(ValueError, match="32 hexadecimal digits"):
            token_path(Path("/data"), token)


# The client


LAYERS = [0, -1]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A target in a folder, which is known by its files."""
    folder = tmp_path_factory.mktemp("target")
    qwen3().save_pretrained(folder)
    return load_target(str(folder), dtype=torch.float32)


@pytest.fixture
def server(made, tmp_path):
    (tmp_path / "features").mkdir()
    with serving(FeatureServer(made, tmp_path / "features", LAYERS)) as server:
        yield server


def some_rows(*lengths, documents=1):
    rows = []
    for length in lengths:
        ids = torch.randint(2, 96, (length * documents,)).tolist()
        rows.append({"input_ids": ids, "loss_mask": [1] * len(ids), "position_ids": list(range(length)) * documents})
    return rows


def producer(server, target, dtype="bfloat16", layers=LAYERS, **options):
    identity = feature_identity(target, dtype=dtype, target_layer_ids=layers)
    return EngineProducer(
        Endpoint(server.root, "served"), server.directory, target, identity, concurrency=3, **options
    )


def write_by(server, target, rows, **options):
    FeatureWriter(server.directory, rows, producer(server, target, **options)).complete()


def items(folder, target):
    cache = FeatureCache(folder, target)
    return [{name: value.tolist() for name, value in cache[i].items()} for i in range(len(cache))]


@pytest.mark.parametrize(("dtype", "layers"), [("bfloat16", LAYERS), ("float8", [-1]), ("float32", [-1, 0])])
def test_a_server_writes_what_the_target_would(made, server, tmp_path, dtype, layers):
    rows = some_rows(5, 17, 1, 30, 8)
    write_by(server, made, rows, dtype=dtype, layers=layers)
    identity = feature_identity(made, dtype=dtype, target_layer_ids=layers)
    FeatureWriter(tmp_path / "own", rows, TargetProducer(made, identity, batch_size=1)).complete()
    assert items(server.directory, made) == items(tmp_path / "own", made)
    assert len(list(server.directory.glob("*.safetensors"))) == len(rows)  # a row each
    assert not {path.suffix for path in server.directory.iterdir()} & {".token", ".piece", ".error", ".tmp"}


def test_several_servers_write_into_one_folder(made, server, tmp_path):
    """Each has a share of the parts."""
    rows = some_rows(*range(3, 15))
    with serving(FeatureServer(made, server.directory, LAYERS)) as other:
        writers = [
            FeatureWriter(server.directory, rows, producer(each, made), share=(number, 2))
            for number, each in enumerate((server, other), 1)
        ]
        threads = [threading.Thread(target=writer.complete) for writer in writers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(server.asked) == len(other.asked) == 7  # the question who it is, and six rows
    assert [item["input_ids"] for item in items(server.directory, made)] == [row["input_ids"] for row in rows]


def test_parts_of_several_documents_are_joined(made, server, tmp_path):
    """Of rows that are packed, and of parts with several rows, as another producer began the list."""
    rows, options = some_rows(6, 9, documents=2) + some_rows(7) * 2, {"batch_size": 1}
    FeatureWriter(server.directory, rows, TargetProducer(made, producer(server, made).identity, **options)).complete()
    (part,) = server.directory.glob("*.safetensors")
    expected = items(server.directory, made)
    part.unlink()
    write_by(server, made, rows)
    assert items(server.directory, made) == expected and part.exists()
    assert len(server.asked) == 1 + 4 + 1  # the question who it is, the documents, and the one of two rows once
    assert not list(server.directory.glob("*.piece"))


def test_a_call_goes_on_after_what_a_killed_one_left(made, server):
    rows = some_rows(5, 17, 8)
    server.fails = "Writing it failed: No space left on device."
    with pytest.raises(OSError, match=r"could not write row \d: Writing it failed: No space left on device\."):
        write_by(server, made, rows)
    assert not list(server.directory.glob("*.error"))
    server.fails = ""
    write_by(server, made, rows[:2] + rows[2:])
    before = len(server.asked)
    write_by(server, made, rows)
    assert len(server.asked) == before and len(items(server.directory, made)) == 3


CHANGES = [
    ({"version": 2}, ("version 2", "expected 1", "same release")),
    ({"source": {"files": "0" * 64}}, ("another target", "files 000000000000 there")),
    ({"source": {"revision": "1" * 40}}, ("another target", "revision 111111111111 there", "unknown here")),
    ({"quantization": "fp8"}, ("quantized there: fp8",)),
    ({"hidden_size": 65}, ("hidden_size 65 there, 64 here",)),
    ({"hc_mult": 4}, ("hc_mult 4 there, 1 here",)),
    ({"num_layers": 5}, ("5 layers there, 4 here",)),
    ({"config": {"rope_parameters": {"rope_theta": 7.0}}}, ("config.rope_parameters.rope_theta 7.0 there",)),
    ({"engine_layer_ids": [2, 4]}, ("keeps the states [2, 4]", "[0, -1] need [1]", "vllm serve", "[1, 4]")),
    ({"max_tokens": 16}, ("17 tokens", "up to 16", "--max-model-len 18")),
]


@pytest.mark.parametrize(("changed", "words"), CHANGES)
def test_another_server_is_refused_before_work(made, server, changed, words):
    server.said |= changed
    Refusal(lambda: write_by(server, made, some_rows(5, 17)), words).check()
    assert len(server.asked) == 1 and [path.name for path in server.directory.iterdir()] == ["features.lock"]


def test_a_server_without_the_connector_is_told_how_to_start(made, server):
    server.has_connector = False
    words = ("no connector HyperDFlashFeatures", "vllm serve", str(server.directory), "[1, 4]")
    Refusal(lambda: write_by(server, made, some_rows(5)), words).check()


def test_a_server_with_another_folder_is_refused(made, server, tmp_path):
    server.directory, here = tmp_path / "elsewhere", server.directory
    server.directory.mkdir()
    making = producer(server, made)
    making.directory = here
    Refusal(lambda: FeatureWriter(here, some_rows(5), making).complete(), ("which is not", str(here))).check()
    assert not list(server.directory.iterdir())


def test_a_server_with_another_tokenizer_is_refused(made, server):
    tokenizer = AutoTokenizer.from_pretrained(MODELS / "tiny-deepseek-v4")
    server.tokens = lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]
    producer(server, made, tokenizer=tokenizer).check(5)
    server.tokens = lambda text: [*tokenizer(text, add_special_tokens=False)["input_ids"][:-1], 3]
    words = ("another one than that of the rows", "[3]", "Tokenize")
    Refusal(lambda: producer(server, made, tokenizer=tokenizer).check(5), words).check()


# The command, of DeepSeek-V4 with its streams

TINY = MODELS / "tiny-deepseek-v4"


@pytest.fixture(scope="module")
def tiny():
    return load_target(str(TINY), dtype=torch.float32)


def command(server, folder, **flags):
    """Run the command on some chats."""
    said = [[("user", f"{i}: what is it?"), ("assistant", "it is this.")] for i in range(6)]
    chats = [{"messages": [{"role": role, "content": text} for role, text in turns]} for turns in said]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, chats)))
    given = {"endpoint": server.root, "dataset": folder / "rows.jsonl", "output": server.directory, "eval_rows": 2}
    flags = {name: value for name, value in {**given, **flags}.items() if value is not None}
    main([part for name, value in flags.items() for part in (f"--{name}", str(value))])


@pytest.mark.parametrize("target", [None, str(TINY)])
def test_the_command_asks_a_server(tiny, tmp_path, capsys, target):
    """What it serves is the target if none is given."""
    (tmp_path / "features").mkdir()
    with serving(FeatureServer(tiny, tmp_path / "features")) as server:
        server.more = {"root": str(TINY)}
        command(server, tmp_path, target=target, check=2, target_dtype="float32")
    assert "6 rows" in capsys.readouterr().out
    cache = FeatureCache(tmp_path / "features", tiny)
    assert len(cache) == len(list((tmp_path / "features").glob("*.safetensors"))) == 6
    assert cache[0]["residual"].shape[1] == tiny.config.hc_mult == 4


def test_the_command_tells_how_a_server_is_started(tiny, tmp_path):
    (tmp_path / "features").mkdir()
    with serving(FeatureServer(tiny, tmp_path / "features")) as server:
        pass
    words = ("does not answer", f"vllm serve {TINY}", str(server.directory))
    Refusal(lambda: command(server, tmp_path, target=TINY), words).check()
    words = ("`--served_model`", "'tiny'", "add `--endpoint`")
    Refusal(lambda: command(server, tmp_path, target=TINY, endpoint=None, served_model="tiny"), words).check()
    Refusal(lambda: command(server, tmp_path, concurrency=0), ("`--concurrency`", "0")).check()
