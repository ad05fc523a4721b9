"""The feature cache on disk: what it holds, what a killed or full machine leaves, what it refuses."""

import multiprocessing
import os
import re
import resource
import shutil
import signal
import sys
from collections import namedtuple
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from accelerate import cpu_offload
from datasets import Dataset
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

from hf_hyperdflash.targets.registry import target_of
from hf_hyperdflash.training.features import store
from hf_hyperdflash.training.features.store import FeatureCache
from hf_hyperdflash.training.losses.objective import teacher_states

from ..conftest import MODELS, tiny_target
from ..helpers.training import packed_rows, run_alone

TINY = MODELS / "tiny-deepseek-v4"
PACKED = [(9,), (5, 12), (21,), (1, 3, 14), (17,), (30,), (2,), (11, 4)]  # lengths of the documents of each row
PER_TOKEN = 4 * 32 * 2  # bytes of a tiny target's residual in bfloat16
SHARD = 40 * PER_TOKEN  # a few of these rows


def shards_of(directory):
    return {path.name: path.read_bytes() for path in sorted(Path(directory).glob("*.safetensors"))}


def file_of(cache, number):
    return cache.directory / f"{cache.parts[number].name}.safetensors"


def size_of(directory):
    return sum(map(len, shards_of(directory).values()))


def write(directory, target, rows=None, **kwargs):
    return FeatureCache.write(directory, rows or packed_rows(PACKED), target, **{"shard_size": SHARD, **kwargs})


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    torch.set_num_threads(1)
    directory = tmp_path_factory.mktemp("written")
    write(directory, tiny_target())
    return directory


@pytest.fixture
def directory(written, tmp_path):
    """A finished cache of `packed_rows(PACKED)` by `tiny_target()`, to spoil."""
    return Path(shutil.copytree(written, tmp_path / "cache"))


def in_child(function, *args):
    """Run in a process of its own; its exit code and what it returned (or the error it raised)."""

    def body(sender):
        torch.set_num_threads(1)
        try:
            sender.send(function(*args))
        except Exception as error:
            sender.send(error)

    receiver, sender = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(target=body, args=(sender,))
    child.start()
    sender.close()
    try:
        answer = receiver.recv()
    except EOFError:
        answer = None
    child.join(60)
    return child.exitcode, answer


# --- what is stored


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_items_are_the_rows_with_the_targets_own_residual(target, tmp_path, dtype):
    rows = packed_rows(PACKED)
    cache = write(tmp_path, target, dtype=dtype, batch_size=1)
    assert len(cache) == len(list(cache)) == len(rows) and len(cache.parts) > 2
    for item, row in zip(cache, rows):
        assert torch.equal(item["residual"], run_alone(target, row).to(getattr(torch, dtype)))
        assert item["residual"].shape == (len(row["input_ids"]), 4, 32)
        assert item["input_ids"].tolist() == row["input_ids"] and item["input_ids"].dtype == torch.long
        assert item["loss_mask"].int().tolist() == row["loss_mask"] and item["loss_mask"].dtype == torch.bool
        assert item["position_ids"].tolist() == row["position_ids"] and item["position_ids"].dtype == torch.long
        for value in item.values():  # what a data loader worker sends is the row, not the mapped file
            assert value.untyped_storage().nbytes() == value.nbytes
    assert torch.equal(cache[-1]["input_ids"], cache[len(rows) - 1]["input_ids"])
    with pytest.raises(IndexError, match=r"Row 8 .* 8 rows"):
        cache[8]


def test_a_cache_of_several_layers_serves_drafters_that_read_some(target, tmp_path):
    rows, layers = packed_rows(PACKED), [0, 1, -1]
    whole = write(tmp_path, target, rows, target_layer_ids=layers, dtype="float8")
    assert whole[3]["residual"].shape == (len(rows[3]["input_ids"]), 12, 32)
    last = write(tmp_path / "last", target, rows, dtype="float8")
    assert size_of(tmp_path) > 2.5 * size_of(tmp_path / "last")
    # Opened again for less, by the same call or another: nothing is written.
    for some in (write(tmp_path, target, rows, dtype="float8"), whole.select_layers([-1])):
        assert torch.equal(some[3]["residual"], last[3]["residual"])
    assert torch.equal(
        whole.select_layers([0, -1])[3]["residual"], whole[3]["residual"][:, [0, 1, 2, 3, 8, 9, 10, 11]]
    )
    assert list(whole.target_layer_ids) == layers
    others = {"target_layer_ids": [1, -1], "dtype": "float8"}
    for refused in (lambda: last.select_layers([1, -1]), lambda: write(tmp_path / "last", target, rows, **others)):
        with pytest.raises(ValueError, match=r"holds layers \[-1\], but \[1, -1\] are needed"):
            refused()


def test_batches_change_only_the_rounding(target, tmp_path):
    for item, row in zip(write(tmp_path, target, dtype="float32", batch_size=5), packed_rows(PACKED)):
        torch.testing.assert_close(item["residual"], run_alone(target, row), atol=1e-5, rtol=1e-4)


def test_the_teachers_logits_follow_from_the_residual(target, tmp_path):
    rows = packed_rows([(9,), (21,)])
    for item, row in zip(write(tmp_path, target, rows, dtype="float32", batch_size=1), rows):
        with torch.no_grad():
            logits = target(torch.tensor([row["input_ids"]])).logits
            assert torch.equal(
                target.lm_head(teacher_states(target_of(target), item["residual"].unsqueeze(0))), logits
            )


def test_float8_is_as_close_as_its_three_mantissa_bits_allow(target, tmp_path):
    rows = packed_rows(PACKED)
    cache = write(tmp_path, target, dtype="float8", batch_size=1)
    for item, row in zip(cache, rows):
        exact = run_alone(target, row).float()
        amax = exact.abs().amax(-1, keepdim=True)
        error = (item["residual"].float() - exact).abs()
        # Half a step: 2^-4 of a normal number, 2^-10 of the scale below; then bfloat16 rounds once more.
        assert (error <= (exact.abs() * 2**-4).clamp(min=amax / 448 * 2**-10) + exact.abs() * 2**-8).all()
        assert error.max() > 0 and item["residual"].dtype == torch.bfloat16
    stored = load_file(file_of(cache, 0))
    assert stored["residual"].dtype == torch.float8_e4m3fn
    assert stored["scale"].dtype == torch.float32 and stored["scale"].shape == stored["residual"].shape[:2]


@pytest.mark.parametrize("size", [0.0, 1e-44, 7e-43, 1e-39, 3e38])
def test_float8_survives_streams_of_any_size(target, tmp_path, size):
    head_input = target.model.layers[-1].register_forward_hook(  # before the feature is read
        lambda module, args, output: output.clone().index_fill_(2, torch.tensor([1]), size)
    )
    cache = write(tmp_path, target, packed_rows([(9,)]), dtype="float8")
    head_input.remove()
    stream = cache[0]["residual"][:, 1].float()
    assert stream.isfinite().all()
    torch.testing.assert_close(stream, torch.full_like(stream, size), rtol=2**-4, atol=2e-41)


# --- size


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8"])
def test_the_size_printed_is_the_size_on_disk(target, tmp_path, capsys, dtype):
    rows = packed_rows([(200, 100), (300,), (50,), (250,)])
    write(tmp_path, target, rows, dtype=dtype, shard_size=2**20)
    on_disk = size_of(tmp_path)
    printed = capsys.readouterr().out
    assert f"{tmp_path}: 4 rows, 900 tokens" in printed and "free on the disk" in printed
    number, unit = re.search(r"To be written: ([\d.]+) (kB|MB),", printed).groups()
    announced = float(number) * {"kB": 1e3, "MB": 1e6}[unit]
    assert announced == pytest.approx(on_disk, rel=0.02)
    per_token = {"float32": 4 * 128, "bfloat16": 2 * 128, "float8": 128 + 4 * 4}[dtype]
    assert announced == pytest.approx(900 * (per_token + 4 + 4 + 1) + 4 * 8, abs=51)  # as it is rounded to print


def test_shards_hold_whole_rows_in_order(target, tmp_path):
    rows = packed_rows([(100,), (10,), (10,), (10,), (100,), (10,)])
    cache = write(tmp_path, target, rows, shard_size=25 * (PER_TOKEN + 9))
    assert [part.rows for part in cache.parts] == [1, 2, 1, 1, 1]
    assert [cache[i]["input_ids"].tolist() for i in range(6)] == [row["input_ids"] for row in rows]


def test_a_disk_that_is_too_small_is_refused_before_writing(target, tmp_path, monkeypatch, capsys):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9, 64 * 2**20 + 20_000))
    with pytest.raises(ValueError, match=r"needs 34.2 kB more in .* where 67.1 MB are free .*float8.*online"):
        write(tmp_path / "cache", target)
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["features.lock"]
    assert "To be written: 34.2 kB" in capsys.readouterr().out
    write(tmp_path / "cache", target, packed_rows([(9,)]))  # fits


# --- interrupted


def kill_at_forward(directory, target, count):
    calls = []

    def pre_hook(module, args):
        calls.append(None)
        if len(calls) == count:
            os.kill(os.getpid(), signal.SIGKILL)

    target.model.hc_head.register_forward_pre_hook(pre_hook)
    write(directory, target)


def kill_at_rename(directory, target, count):
    """Between a file's last byte and its name: `os.replace` is the audit event `os.rename`."""
    renames = []

    def audit(event, args):
        if event == "os.rename":
            renames.append(None)
            if len(renames) == count:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(audit)
    write(directory, target)


# The list is renamed first: 1 leaves nothing but a temporary file, 2 a list without parts.
@pytest.mark.parametrize(
    ("kill", "count", "whole"),
    [
        (kill_at_forward, 1, 0),
        (kill_at_forward, 4, 3),
        (kill_at_rename, 1, 0),
        (kill_at_rename, 2, 0),
        (kill_at_rename, 4, 2),
    ],
)
def test_after_a_kill_the_same_bytes_are_completed(target, tmp_path, written, kill, count, whole):
    exit_code, _ = in_child(kill, tmp_path, target, count)
    assert exit_code == -signal.SIGKILL and len(shards_of(tmp_path)) == whole
    with pytest.raises(ValueError, match=r"unfinished.*FeatureCache\.write|No feature cache.*FeatureCache\.write"):
        FeatureCache(tmp_path, target)
    forwards = []
    target.model.register_forward_pre_hook(lambda module, args: forwards.append(module))
    assert write(tmp_path, target).parts == FeatureCache(written, target).parts
    assert shards_of(tmp_path) == shards_of(written) and len(shards_of(written)) > 4
    assert len(forwards) == len(shards_of(written)) - whole
    assert not list(tmp_path.glob("*.tmp"))


def test_only_what_is_missing_is_computed(target, directory, written, capsys):
    forwards = []
    target.model.register_forward_pre_hook(lambda module, args: forwards.append(module))
    cache = write(directory, target)
    assert len(cache) == 8 and not forwards and not capsys.readouterr().out
    file_of(cache, 1).unlink()
    write(directory, target, shard_size=1)  # the existing cache keeps its own parts
    assert shards_of(directory) == shards_of(written) and len(forwards) == 1
    number = float(re.search(r"To be written: ([\d.]+) kB", capsys.readouterr().out).group(1))
    assert number == pytest.approx(cache.parts[1].tokens * (PER_TOKEN + 9) / 1000, rel=0.05)


# --- joined


def joined(folder, *caches):
    for cache in caches:
        shutil.copytree(cache, folder, dirs_exist_ok=True)
    return folder


def test_parts_of_some_rows_are_joined_by_putting_them_into_one_folder(target, tmp_path, written):
    """As several machines write them: every row is there once, and a call for all rows computes the rest."""
    rows = packed_rows(PACKED)
    for name, some in (("a", rows[:3]), ("b", rows[3:6]), ("overlap", rows[:3])):
        write(tmp_path / name, target, some)
    folder = joined(tmp_path / "joined", tmp_path / "b", tmp_path / "a", tmp_path / "overlap")
    cache = FeatureCache(folder, target)
    found = {tuple(item["input_ids"].tolist()): item["residual"] for item in cache}
    assert len(cache) == 6 and found.keys() == {tuple(row["input_ids"]) for row in rows[:6]}
    forwards = []
    target.model.register_forward_pre_hook(lambda module, args: forwards.append(module))
    whole = write(folder, target, rows)
    assert 0 < len(forwards) < len(whole.parts) and len(FeatureCache(folder, target)) == 8
    assert [item["input_ids"].tolist() for item in whole] == [row["input_ids"] for row in rows]
    for item, other in zip(whole, FeatureCache(written, target)):
        torch.testing.assert_close(item["residual"].float(), other["residual"].float(), atol=1e-2, rtol=1e-2)


def test_equal_rows_are_all_there(target, tmp_path):
    rows = packed_rows([(9,)]) * 3 + packed_rows([(9,), (12,)])
    cache = write(tmp_path, target, rows, shard_size=1)
    assert len(cache) == 5 and len(shards_of(tmp_path)) == 2
    assert [item["input_ids"].tolist() for item in FeatureCache(tmp_path, target)] == [
        row["input_ids"] for row in rows
    ]


@pytest.mark.parametrize(
    ("other", "differs"),
    [
        ({"dtype": "float8"}, "`dtype` (bfloat16|float8) there"),
        ({"target_layer_ids": [0, -1]}, r"holds layers \[-1\], but"),
        ({"target": 1}, "another target"),
    ],
)
def test_caches_that_differ_are_not_joined(target, tmp_path, other, differs):
    """Nor is a part of the one, which has the same name, taken for the other's."""
    options, rows = dict(other), packed_rows(PACKED)
    another = tiny_target(options.pop("target")) if "target" in other else target
    write(tmp_path / "a", target, rows, shard_size=1)
    write(tmp_path / "b", another, rows, shard_size=1, **options)
    folder = joined(tmp_path / "joined", tmp_path / "a", tmp_path / "b")
    with pytest.raises(ValueError, match=differs):
        FeatureCache(folder, target)
    (listed,) = {path.name for path in folder.glob("*.json")} - {path.name for path in (tmp_path / "a").glob("*.json")}
    (folder / listed).unlink()
    with pytest.raises(ValueError, match="unfinished: 8 of 8"):
        FeatureCache(folder, target)


def test_a_cache_of_another_tokenizer_is_refused(target, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    write(tmp_path, target, tokenizer=tokenizer)
    assert len(write(tmp_path, target, tokenizer=tokenizer)) == len(write(tmp_path, target)) == 8
    tokenizer.chat_template = "another"
    with pytest.raises(ValueError, match="another template of the tokenizer"):
        write(tmp_path, target, tokenizer=tokenizer)


def write_forever(directory, target, began):
    target.model.register_forward_pre_hook(lambda module, args: (began.send(None), signal.pause()))
    write(directory, target)


def test_a_second_writer_is_told_of_the_first_and_a_dead_one_is_forgotten(target, tmp_path, written):
    receiver, sender = multiprocessing.Pipe(duplex=False)
    first = multiprocessing.get_context("fork").Process(target=write_forever, args=(tmp_path, target, sender))
    first.start()
    receiver.recv()
    try:
        with pytest.raises(ValueError, match=r"features is being written by another process.*another folder"):
            write(tmp_path, target)
    finally:
        first.kill()
        first.join()
    write(tmp_path, target)
    assert shards_of(tmp_path) == shards_of(written)


def test_two_calls_for_other_rows_do_not_share_a_folder(target, tmp_path, monkeypatch):
    """Also where the second has looked into it before the first began to write."""
    complete = store._Writer.complete

    def after_another(writer):
        monkeypatch.setattr(store._Writer, "complete", complete)
        first.append(write(tmp_path, target))
        complete(writer)

    first = []
    monkeypatch.setattr(store, "only_writer", lambda path: nullcontext())
    monkeypatch.setattr(store._Writer, "complete", after_another)
    with pytest.raises(ValueError, match="has other data, 8 rows"):
        write(tmp_path, target, packed_rows([(7,), (19,)]))
    assert len(first[0]) == len(FeatureCache(tmp_path, target)) == 8


def test_a_complete_cache_is_opened_where_nothing_can_be_written(target, directory, monkeypatch):
    monkeypatch.setattr(store, "only_writer", None)
    assert len(write(directory, target)) == 8


def write_with_file_size_limit(directory, target, rows, limit):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    write(directory, target, rows)


def test_a_full_disk_leaves_what_is_complete(target, tmp_path):
    rows = packed_rows([(20,), (15,), (150,), (20,)])
    exit_code, error = in_child(write_with_file_size_limit, tmp_path, target, rows, 100 * PER_TOKEN)
    assert exit_code == 0 and isinstance(error, OSError)
    for part in ("File too large", "continues after them", "float8", "online"):
        assert part in str(error)
    first = shards_of(tmp_path)
    cache = write(tmp_path, target, rows)
    assert list(first) == [file_of(cache, 0).name] and file_of(cache, 1).name in str(error)
    assert first.items() <= shards_of(tmp_path).items() and len(cache) == 4


# --- damaged


@pytest.mark.parametrize(
    "damage", [lambda path: os.truncate(path, 100), lambda path: os.truncate(path, 2000), os.unlink]
)
def test_a_truncated_or_missing_part_is_named_and_written_again(target, directory, written, damage):
    name = list(shards_of(directory))[1]
    damage(directory / name)
    with pytest.raises(ValueError, match=rf"unfinished: 1 of .*{Path(name).stem}.*FeatureCache\.write"):
        FeatureCache(directory, target)
    write(directory, target)
    assert shards_of(directory) == shards_of(written)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda path: path.unlink(), r"No feature cache in .*FeatureCache\.write"),
        (lambda path: path.write_text(path.read_text()[:50]), "is damaged .* again"),
        (lambda path: path.write_bytes(b"\x93\xff\x00"), "is damaged .* again"),
        (lambda path: path.write_text('{"version": 1}'), "format version 1, this release reads 3"),
        (lambda path: path.write_text("[]"), "is damaged or no list of features"),
        (lambda path: path.write_text('{"weight_map": {}}'), "is damaged or no list of features"),
        (lambda path: path.write_text('{"version": 3}'), "is damaged or no list of features"),
        (lambda path: path.rename(path.with_name("features.json")), "is of an earlier release"),
    ],
)
def test_a_list_that_cannot_be_used_says_so(target, directory, edit, message):
    edit(next(directory.glob("features-*.json")))
    with pytest.raises(ValueError, match=message):
        FeatureCache(directory, target)


# --- of something else


def test_the_cache_of_another_target_is_refused(target, tmp_path):
    target.config._name_or_path, other = "org/one", tiny_target(1)
    other.config._name_or_path = "org/two"
    write(tmp_path, target, packed_rows([(9,)]))
    for touch in (FeatureCache, write):
        with pytest.raises(ValueError, match=r"org/one.*org/two.*head weights: .*body weights: "):
            touch(tmp_path, other)
    retrained = tiny_target()
    with torch.no_grad():
        for parameter in retrained.model.layers[1].parameters():
            parameter.mul_(1.1)
    with pytest.raises(ValueError, match=r"another target.*\(body weights: \w+ there, \w+ here\)"):
        FeatureCache(tmp_path, retrained)
    FeatureCache(tmp_path, tiny_target())


@pytest.mark.parametrize(
    "changed",
    [
        {"rope_theta": 20_000.0}, {"sliding_window": 9}, {"routed_scaling_factor": 1.25}, {"swiglu_limit": 8.0},
        {"rms_norm_eps": 1e-5}, {"hc_eps": 1e-5}, {"index_topk": 3}, {"hc_sinkhorn_iters": 5},
        {"a_field_of_models_to_come": 1},
    ],
    ids=lambda changed: next(iter(changed)),
)  # fmt: skip
def test_the_same_weights_under_another_configuration_are_refused(directory, changed):
    other = tiny_target(**changed)
    (field,) = changed
    for touch in (FeatureCache, write):
        with pytest.raises(
            ValueError, match=rf"another target.*config\.[\w.]*{field}: \S+ there, {changed[field]} here"
        ):
            touch(directory, other)


def test_a_target_whose_name_alone_is_another_is_recognised(target, directory, tmp_path):
    target.save_pretrained(tmp_path / "moved")
    moved = AutoModelForCausalLM.from_pretrained(tmp_path / "moved").eval()
    moved.config.eos_token_id, moved.config.architectures = 7, ["Another"]
    assert len(FeatureCache(directory, moved)) == 8


def test_one_changed_value_of_one_weight_is_refused(target, directory):
    weight = target.model.layers[1].mlp.experts.gate_up_proj
    assert weight.numel() > 1000
    with torch.no_grad():
        weight.view(-1)[1001] += 1e-6
    with pytest.raises(ValueError, match=r"another target.*\(body weights: \w+ there, \w+ here\)"):
        write(directory, target)


def other_mask(rows):
    rows[3]["loss_mask"][0] ^= 1


def other_packing(rows):
    rows[0]["position_ids"][4:] = range(5)


@pytest.mark.parametrize(
    ("edit", "others"),
    [
        (lambda rows: rows[2]["input_ids"].__setitem__(5, 3), r"\d+"),
        (other_mask, r"\d+"),
        (other_packing, r"\d+"),
        (lambda rows: rows.pop(), r"\d+"),
        (lambda rows: rows.reverse(), r"\d+"),
    ],
)
def test_a_cache_of_other_rows_is_not_continued(target, directory, written, edit, others):
    rows = packed_rows(PACKED)
    edit(rows)
    with pytest.raises(ValueError, match=rf"other data, {others} rows .*these {len(rows)} .*another directory"):
        write(directory, target, rows)
    assert shards_of(directory) == shards_of(written)


def test_a_cache_of_another_dtype_is_not_continued(target, directory):
    with pytest.raises(ValueError, match=r"`dtype` bfloat16 there, float8 here"):
        write(directory, target, dtype="float8")


def test_another_load_of_the_same_target_is_recognised(tmp_path):
    exact = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    rounded = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.bfloat16)
    layerless = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32, num_hidden_layers=0)
    assert exact.lm_head.weight.dtype != rounded.lm_head.weight.dtype
    rows = packed_rows([(9,), (21,)])
    cache = write(tmp_path, exact, rows, dtype="float32", batch_size=1)
    assert len(FeatureCache(tmp_path, rounded)) == 2
    residual = FeatureCache(tmp_path, layerless)[1]["residual"].unsqueeze(0)
    with torch.no_grad():  # without its layers the target still gives its logits
        logits = exact(torch.tensor([rows[1]["input_ids"]])).logits
        assert torch.equal(layerless.lm_head(teacher_states(target_of(layerless), residual)), logits)
    assert len(write(tmp_path, layerless, rows, dtype="float32")) == 2
    file_of(cache, 0).unlink()
    with pytest.raises(ValueError, match=r"no layers to run.*num_hidden_layers=0"):
        write(tmp_path, layerless, rows, dtype="float32")


def test_without_layers_the_head_must_still_be_the_targets(directory):
    same, other = tiny_target(0), tiny_target(1)
    same.model.layers = other.model.layers = torch.nn.ModuleList()
    assert len(FeatureCache(directory, same)) == 8
    with pytest.raises(ValueError, match=r"another target.*head weights: \w+ there, \w+ here\)"):
        FeatureCache(directory, other)


def test_an_offloaded_target_is_recognised_and_run(target, directory, tmp_path, written):
    offloaded = cpu_offload(target)
    assert offloaded.device.type == "meta"
    assert len(FeatureCache(directory, offloaded)) == 8
    write(tmp_path / "offloaded", offloaded)
    assert shards_of(tmp_path / "offloaded") == shards_of(written)


# --- use


def test_data_loader_workers_read_it(target, directory):
    rows, cache = packed_rows(PACKED), FeatureCache(directory, target)
    cache[0]  # the workers start from a cache in use
    items = list(torch.utils.data.DataLoader(cache, batch_size=None, num_workers=2))
    assert [item["input_ids"].tolist() for item in items] == [row["input_ids"] for row in rows]
    for item, row in zip(items, rows):
        torch.testing.assert_close(item["residual"].float(), run_alone(target, row), atol=1e-2, rtol=1e-2)


def test_a_dataset_gives_the_same_bytes_as_a_list(target, tmp_path, written):
    rows = Dataset.from_list([{**row, "text": "not needed"} for row in packed_rows(PACKED)])
    write(tmp_path, target, rows)
    assert shards_of(tmp_path) == shards_of(written)
    with pytest.raises(ValueError, match=r"IterableDataset of unknown length.*streaming"):
        write(tmp_path / "streamed", target, rows.to_iterable_dataset())


# --- what cannot be cached


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda row: row.pop("loss_mask"), r"Row 1 has the columns .*\['loss_mask'\] are missing"),
        (lambda row: row["loss_mask"].pop(), r"Row 1 has columns of the shapes .*\[8\].*one length"),
        (lambda row: [column.clear() for column in row.values()], "Row 1 .* at least 1"),
        (lambda row: row["input_ids"].__setitem__(0, 64), "Row 1 has token ids from .* to 64, .*vocabulary of 64"),
        (lambda row: row["input_ids"].__setitem__(0, -100), "Row 1 has token ids from -100"),
        (lambda row: row["loss_mask"].__setitem__(0, -100), "Row 1 has a `loss_mask` with values from -100"),
        (lambda row: row["position_ids"].__setitem__(0, 1), "`position_ids` of row 1"),
        (lambda row: row["position_ids"].__setitem__(5, 4), "`position_ids` of row 1"),
        (lambda row: row["position_ids"].__setitem__(-1, 7), "`position_ids` of row 1"),  # the one before it again
    ],
)
def test_malformed_rows_are_named_before_anything_is_written(target, tmp_path, edit, message):
    rows = packed_rows([(4,), (9,)])
    edit(rows[1])
    with pytest.raises(ValueError, match=message):
        write(tmp_path / "cache", target, rows)
    assert not (tmp_path / "cache").exists()


def test_no_rows_and_unknown_dtypes_are_refused(target, tmp_path):
    with pytest.raises(ValueError, match="rows are empty"):
        FeatureCache.write(tmp_path, [], target)
    with pytest.raises(ValueError, match=r"`dtype` is 'int8', expected one of .*'bfloat16'"):
        write(tmp_path, target, dtype="int8")


@pytest.mark.parametrize("bad", [3, 4])  # of several documents and of one
def test_a_residual_that_is_not_finite_is_not_stored(target, tmp_path, bad):
    with torch.no_grad():
        target.model.embed_tokens.weight[5] = torch.inf
    rows = packed_rows(PACKED)
    for row in rows:
        row["input_ids"] = [token if token != 5 else 6 for token in row["input_ids"]]
    rows[bad]["input_ids"][-1] = 5
    with pytest.raises(ValueError, match=f"residual of row {bad} is not finite"):
        write(tmp_path, target, rows)
    assert shards_of(tmp_path)  # those before it


def test_a_model_of_another_layout_is_refused(tmp_path):
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=2))
    with pytest.raises(ValueError, match="gpt2 model: expected one of DeepSeek-V4"):
        write(tmp_path, gpt2)


def test_names_and_none_are_refused(target, tmp_path):
    for wrong in ("org/name", None):
        with pytest.raises(ValueError, match="The target is "):
            FeatureCache(tmp_path, wrong)
    for call in (FeatureCache, lambda directory, target: write(directory, target)):
        with pytest.raises(ValueError, match="`directory` is None, expected the path of a feature cache"):
            call(None, target)
