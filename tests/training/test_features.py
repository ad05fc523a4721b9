"""What is read of a target, its cache on disk, and the digests that tell targets apart.

A cache is the same bytes after any interruption, and its parts are joined by putting them into one folder. What it
refuses: tests/refusals/test_training.py."""

import errno
import hashlib
import multiprocessing
import os
import re
import shutil
import signal
import time
from contextlib import nullcontext, suppress

import pytest
import torch
from accelerate import cpu_offload
from datasets import Dataset
from huggingface_hub import constants
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from hf_hyperdflash.drafters.blocks.configuration_hyperdflash import HyperDFlashConfig
from hf_hyperdflash.hub.loading import load_target, unloaded_target
from hf_hyperdflash.targets.registry import target_of
from hf_hyperdflash.training.feature_script import check_rows
from hf_hyperdflash.training.features import checkpoint as checkpoint_module
from hf_hyperdflash.training.features import writing
from hf_hyperdflash.training.features.fingerprint import (
    changed_parts,
    module_fingerprint,
    short_fingerprint,
    target_fingerprint,
    tensor_digest,
)
from hf_hyperdflash.training.features.identity import (
    checkpoint_source,
    describe_target,
    feature_identity,
    identity_key,
)
from hf_hyperdflash.training.features.store import FeatureCache
from hf_hyperdflash.training.features.writing import FeatureWriter, TargetProducer
from hf_hyperdflash.training.losses.objective import compute_residual, teacher_states

from ..conftest import MODELS, tiny_drafter, tiny_target
from ..helpers import families
from ..helpers.refusals import Refusal
from ..helpers.training import packed_rows, run_alone

TINY = MODELS / "tiny-deepseek-v4"
PACKED = [(9,), (5, 12), (21,), (1, 3, 14), (17,), (30,), (2,), (11, 4)]  # lengths of the documents of each row
PER_TOKEN = 4 * 32 * 2  # bytes of a tiny target's residual in bfloat16
SHARD = 40 * PER_TOKEN  # a few of these rows


def write(directory, target, rows=None, **kwargs):
    return FeatureCache.write(directory, rows or packed_rows(PACKED), target, **{"shard_size": SHARD, **kwargs})


def shards_of(directory):
    return {path.name: path.read_bytes() for path in sorted(directory.glob("*.safetensors"))}


def ids_of(cache):
    return [item["input_ids"].tolist() for item in cache]


def count_forwards(target):
    forwards = []
    target.model.register_forward_pre_hook(lambda module, args: forwards.append(module))
    return forwards


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A finished cache of `packed_rows(PACKED)` by `tiny_target()`."""
    torch.set_num_threads(1)
    directory = tmp_path_factory.mktemp("written")
    write(directory, tiny_target())
    return directory


@pytest.fixture
def directory(written, tmp_path):
    """The same, to spoil."""
    return shutil.copytree(written, tmp_path / "cache")


# What is read of the target


def test_packed_and_padded_rows_are_read_document_by_document(target):
    rows = packed_rows([(9,), (5, 12), (1, 3, 13), (17,)])
    for chosen in (rows, [rows[0], rows[3]]):  # packed and not
        ids = torch.tensor([row["input_ids"] + [0] * (17 - len(row["input_ids"])) for row in chosen])
        positions = torch.tensor([(row["position_ids"] + list(range(9, 17)))[:17] for row in chosen])
        for states, row in zip(compute_residual(target, ids, positions), chosen):
            alone = run_alone(target, row)
            torch.testing.assert_close(states[: len(alone)], alone, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(("dtype", "batch_size"), [("float32", 1), ("bfloat16", 1), ("float32", 5), ("float8", 1)])
def test_items_are_the_rows_with_the_targets_own_residual(target, tmp_path, dtype, batch_size):
    rows = packed_rows(PACKED)
    cache = write(tmp_path, target, dtype=dtype, batch_size=batch_size)
    assert len(cache) == len(list(cache)) == len(rows) and len(cache.parts) > 1
    for item, row in zip(cache, rows):
        exact = run_alone(target, row)
        if dtype == "float8":  # half a step, 2^-4 of a normal number, 2^-10 of the scale below; bfloat16 rounds again
            error = (item["residual"].float() - exact).abs()
            smallest = exact.abs().amax(-1, keepdim=True) / 448 * 2**-10
            assert (error <= (exact.abs() * 2**-4).clamp(min=smallest) + exact.abs() * 2**-8).all() and error.any()
            assert item["residual"].dtype == torch.bfloat16
        else:  # batches change only the rounding
            kind, tolerance = getattr(torch, dtype), 0 if batch_size == 1 else 1e-4
            torch.testing.assert_close(item["residual"], exact.to(kind), atol=tolerance / 10, rtol=tolerance)
        assert item["residual"].shape == (len(row["input_ids"]), 4, 32)
        assert item["input_ids"].tolist() == row["input_ids"] and item["input_ids"].dtype == torch.long
        assert item["loss_mask"].int().tolist() == row["loss_mask"] and item["loss_mask"].dtype == torch.bool
        assert item["position_ids"].tolist() == row["position_ids"] and item["position_ids"].dtype == torch.long
        for value in item.values():  # what a data loader worker sends is the row, not the mapped file
            assert value.untyped_storage().nbytes() == value.nbytes
    assert torch.equal(cache[-1]["input_ids"], cache[len(rows) - 1]["input_ids"])
    for wrong in (8, -9):
        with pytest.raises(IndexError):
            cache[wrong]
    if (dtype, batch_size) == ("float32", 1):  # the teacher's logits follow from it
        with torch.no_grad():
            logits = target(torch.tensor([rows[2]["input_ids"]])).logits
            states = teacher_states(target_of(target), cache[2]["residual"].unsqueeze(0))
            assert torch.equal(target.lm_head(states), logits)


@pytest.mark.parametrize("size", [0.0, 1e-44, 1e-39, 3e38])
def test_float8_survives_streams_of_any_size(target, tmp_path, size):
    hook = target.model.layers[-1].register_forward_hook(  # before the feature is read
        lambda module, args, output: output.clone().index_fill_(2, torch.tensor([1]), size)
    )
    cache = write(tmp_path, target, packed_rows([(9,)]), dtype="float8")
    hook.remove()
    stream = cache[0]["residual"][:, 1].float()
    assert stream.isfinite().all()
    torch.testing.assert_close(stream, torch.full_like(stream, size), rtol=2**-4, atol=2e-41)


def test_a_cache_of_several_layers_serves_drafters_that_read_some(target, tmp_path):
    rows = packed_rows(PACKED)
    whole = write(tmp_path, target, rows, target_layer_ids=[0, 1, -1], dtype="float8")
    assert whole[3]["residual"].shape == (len(rows[3]["input_ids"]), 12, 32)
    last = write(tmp_path / "last", target, rows, dtype="float8")
    # Opened again for less, by the same call or another: nothing is written.
    for some in (write(tmp_path, target, rows, dtype="float8"), whole.select_layers([-1])):
        assert torch.equal(some[3]["residual"], last[3]["residual"])
    both = whole.select_layers([0, -1])[3]["residual"]
    assert torch.equal(both, whole[3]["residual"][:, [0, 1, 2, 3, 8, 9, 10, 11]])
    assert list(whole.target_layer_ids) == [0, 1, -1]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8"])
def test_the_size_printed_is_the_size_on_disk(target, tmp_path, capsys, dtype):
    write(tmp_path, target, packed_rows([(200, 100), (300,), (50,), (250,)]), dtype=dtype, shard_size=2**20)
    printed = capsys.readouterr().out
    assert f"{tmp_path}: 4 rows, 900 tokens" in printed and "free on the disk" in printed
    number, unit = re.search(r"To be written: ([\d.]+) (kB|MB),", printed).groups()
    announced = float(number) * {"kB": 1e3, "MB": 1e6}[unit]
    assert announced == pytest.approx(sum(map(len, shards_of(tmp_path).values())), rel=0.02)
    per_token = {"float32": 4 * 128, "bfloat16": 2 * 128, "float8": 128 + 4 * 4}[dtype]
    assert announced == pytest.approx(900 * (per_token + 4 + 4) + 4 * 8, abs=51)  # as it is rounded to print


def test_shards_hold_whole_rows_in_order_up_to_a_size(target, tmp_path):
    rows = packed_rows([(100,), (10,), (10,), (10,), (100,), (10,), (10,)])
    cache = write(tmp_path, target, rows, shard_size=2 * (10 * (PER_TOKEN + 8) + 8))
    assert [part.rows for part in cache.parts] == [1, 2, 1, 1, 2]
    assert ids_of(cache) == [row["input_ids"] for row in rows]


# Interrupted: any write leaves a shard whole or absent, and the same call ends in the same bytes


class Stop(Exception):
    """Ctrl-C, in the same process."""


def interrupted_at(event, count):
    """A step of writing after which the process stops: a forward, a file's first byte, or the moment before it has its
    name."""

    def call(directory, target, monkeypatch, stop):
        calls = []

        def watched(real):
            def function(*args, **kwargs):
                calls.append(None)
                if len(calls) == count:
                    stop()
                return real(*args, **kwargs)

            return function

        if event == "forward":
            target.model.hc_head.register_forward_pre_hook(watched(lambda module, args: None))
        else:
            monkeypatch.setattr(os, event, watched(getattr(os, event)))
        write(directory, target)

    return call


def stop():
    raise Stop


STEPS = [("forward", n) for n in (1, 4)] + [(event, n) for event in ("fsync", "replace") for n in (1, 2, 3, 5)]


@pytest.mark.parametrize(("event", "count"), STEPS)
def test_an_interrupted_write_leaves_whole_shards_and_is_completed_to_the_same_bytes(
    target, tmp_path, written, event, count, monkeypatch
):
    with pytest.raises(Stop), monkeypatch.context() as patched:
        interrupted_at(event, count)(tmp_path, target, patched, stop)
    left, expected = shards_of(tmp_path), shards_of(written)
    assert left.items() <= expected.items() and len(expected) > 4
    assert len(left) == (count - 1 if event == "forward" else max(0, count - 3))  # the list is written first
    Refusal(lambda: FeatureCache(tmp_path, target), ("FeatureCache.write",)).check()
    target = tiny_target()
    forwards = count_forwards(target)
    assert write(tmp_path, target).parts == FeatureCache(written, target).parts
    assert shards_of(tmp_path) == expected and len(forwards) == len(expected) - len(left)
    assert not list(tmp_path.glob("*.tmp"))


def test_a_killed_process_leaves_what_is_complete(target, tmp_path, written):
    kill = lambda: os.kill(os.getpid(), signal.SIGKILL)  # noqa: E731
    with pytest.MonkeyPatch.context() as patched:
        given = tmp_path, target, patched, kill
        child = multiprocessing.get_context("fork").Process(target=interrupted_at("replace", 5), args=given)
        child.start()
        child.join(60)
    assert child.exitcode == -signal.SIGKILL and len(shards_of(tmp_path)) == 2
    write(tmp_path, target)
    assert shards_of(tmp_path) == shards_of(written)


def test_a_full_disk_leaves_what_is_complete(target, tmp_path, written):
    def fill():
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    parts = FeatureCache(written, target).parts
    with pytest.MonkeyPatch.context() as patched:
        call = lambda: interrupted_at("fsync", 4)(tmp_path, target, patched, fill)  # noqa: E731
        Refusal(call, (parts[1].name, os.strerror(errno.ENOSPC), "float8", "online"), OSError).check()
    assert list(shards_of(tmp_path)) == [f"{parts[0].name}.safetensors"] and not list(tmp_path.glob("*.tmp"))
    write(tmp_path, target)
    assert shards_of(tmp_path) == shards_of(written)


@pytest.mark.parametrize("damage", [lambda path: os.truncate(path, 2000), os.unlink])
def test_only_what_is_missing_is_computed(target, directory, written, damage, capsys):
    forwards = count_forwards(target)
    cache = write(directory, target)
    assert len(cache) == 8 and not forwards and not capsys.readouterr().out
    damage(directory / f"{cache.parts[1].name}.safetensors")
    write(directory, target, shard_size=1)  # the existing cache keeps its own parts
    assert shards_of(directory) == shards_of(written) and len(forwards) == 1
    number = float(re.search(r"To be written: ([\d.]+) kB", capsys.readouterr().out).group(1))
    assert number == pytest.approx(cache.parts[1].tokens * (PER_TOKEN + 8) / 1000, rel=0.05)


# Joined


# Takes seconds: several caches are written and joined in each example.
@settings(deadline=None, max_examples=8)
@given(st.lists(st.tuples(st.integers(0, 7), st.integers(1, 8)), min_size=1, max_size=4))
def test_caches_of_some_rows_are_joined_by_putting_them_into_one_folder(tmp_path_factory, slices):
    """As several machines write them, and with what both have: every row is there once, and a call for all rows
    computes the rest."""
    rows, target, folder = packed_rows(PACKED), tiny_target(), tmp_path_factory.mktemp("joined")
    wanted = set()
    for number, (start, count) in enumerate(slices):
        some = rows[start : start + count]
        part = tmp_path_factory.mktemp(str(number))
        write(part, target, some, shard_size=1)  # a row a part: what two have is the same part
        shutil.copytree(part, folder, dirs_exist_ok=True)
        wanted |= {tuple(row["input_ids"]) for row in some}
    found = ids_of(FeatureCache(folder, target))
    assert len(found) == len(wanted) and set(map(tuple, found)) == wanted
    forwards = count_forwards(target)
    assert ids_of(write(folder, target, rows, shard_size=1)) == [row["input_ids"] for row in rows]
    assert len(forwards) == len(rows) - len(wanted)


def test_joined_parts_of_several_rows_stay_and_equal_rows_share_one(target, tmp_path, written):
    rows, folder = packed_rows(PACKED), tmp_path / "joined"
    for name, some in (("b", rows[3:6]), ("a", rows[:3]), ("overlap", rows[:3])):
        write(tmp_path / name, target, some)
        shutil.copytree(tmp_path / name, folder, dirs_exist_ok=True)
    before = shards_of(folder)
    assert len(FeatureCache(folder, target)) == 6
    assert ids_of(write(folder, target, rows)) == [row["input_ids"] for row in rows]
    assert before.items() <= shards_of(folder).items()
    equal = packed_rows([(9,)]) * 3 + packed_rows([(9,), (12,)])
    cache = write(tmp_path / "equal", target, equal, shard_size=1)
    assert len(cache) == 5 and len(shards_of(tmp_path / "equal")) == 2


# Takes seconds: several folders are written in each example.
@settings(deadline=None, max_examples=8)
@given(st.integers(1, 4), st.permutations(range(4)), st.lists(st.integers(1, 9), max_size=4), st.booleans())
def test_shares_made_anywhere_in_any_order_and_after_crashes_are_one_cache(
    tmp_path_factory, written, shares, order, crashes, is_shared
):
    """Each share in a folder of its own, which are joined by copying, or all in one."""
    folder, target, rows = tmp_path_factory.mktemp("joined"), tiny_target(), packed_rows(PACKED)
    for share in (number for number in order if number < shares):
        place = folder if is_shared else tmp_path_factory.mktemp("share")

        def make(place=place, share=share):
            producer = TargetProducer(target, feature_identity(target))
            FeatureWriter(place, rows, producer, SHARD, (share + 1, shares)).complete()

        for count in crashes:
            with suppress(Stop), pytest.MonkeyPatch.context() as patched:
                patched.setattr(os, "fsync", stopping_at(count, os.fsync))
                make()
        make()
        if place != folder:
            shutil.copytree(place, folder, dirs_exist_ok=True)
    assert shards_of(folder) == shards_of(written) and not list(folder.glob("*.tmp"))
    assert ids_of(FeatureCache(folder, target)) == [row["input_ids"] for row in rows]


def stopping_at(count, real):
    calls = []

    def function(*args):
        calls.append(None)
        if len(calls) == count:
            raise Stop
        return real(*args)

    return function


def test_rows_in_other_groups_foreign_parts_and_missing_ones_are_named(target, directory, tmp_path, caplog, capsys):
    rows, other = packed_rows(PACKED), tmp_path / "other"
    write(other, target, rows[2:6], shard_size=1)
    stray = next(other.glob("*.safetensors"))
    shutil.copy(stray, directory)
    assert len(FeatureCache(directory, target)) == 8
    assert stray.stem in caplog.text and "1 parts of no list" in caplog.text
    shutil.copytree(other, directory, dirs_exist_ok=True)
    twice = (next(directory.glob("*.json")).name, "twice", "groups")
    Refusal(lambda: FeatureCache(directory, target), twice[1:]).check()
    producer = TargetProducer(target, feature_identity(target))
    writer = FeatureWriter(tmp_path / "third", rows, producer, SHARD, (2, 3))
    writer.complete()
    first = FeatureCache(write_to(tmp_path / "whole", target), target).parts[0]
    assert f"part 1, {first.name}" in writer.summary() and f"of {len(writer.parts)} parts" in writer.summary()


def write_to(directory, target):
    write(directory, target)
    return directory


def test_other_loss_masks_need_nothing_computed(target, directory):
    rows, forwards = packed_rows(PACKED), count_forwards(target)
    for row in rows:
        row["loss_mask"] = [1 - value for value in row["loss_mask"]]
    cache = write(directory, target, rows)
    assert not forwards and len(list(directory.glob("*.json"))) == 1
    assert [item["loss_mask"].int().tolist() for item in cache] == [row["loss_mask"] for row in rows]


def test_rows_are_checked_against_what_is_computed_here(target, directory):
    def check(count=3):
        producer = TargetProducer(target, feature_identity(target))
        return check_rows(FeatureWriter(directory, packed_rows(PACKED), producer), target, count)

    assert "3 rows computed again" in check() and "on average" in check()
    path = sorted(directory.glob("*.safetensors"))[0]
    with safe_open(path, "pt") as file:
        tensors, header = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()
    tensors["residual"] = tensors["residual"].flip(1).contiguous()  # streams in another order
    save_file(tensors, path, header)
    Refusal(lambda: check(8), ("8 rows computed again", "average", "bfloat16", "another folder")).check()


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"dtype": "float8"}, ("dtype", "bfloat16", "float8")), ({"target_layer_ids": [0, -1]}, ("[-1]", "[0, -1]")),
        ({"target": 1}, ("another target",)),
    ],
)  # fmt: skip
def test_caches_that_differ_are_not_joined(target, tmp_path, other, words):
    """Nor is a part of the one, which has the same name, taken for the other's."""
    options, rows, folder = dict(other), packed_rows(PACKED), tmp_path / "joined"
    another = tiny_target(options.pop("target")) if "target" in other else target
    for name, of, how in (("a", target, {}), ("b", another, options)):
        write(tmp_path / name, of, rows, shard_size=1, **how)
        shutil.copytree(tmp_path / name, folder, dirs_exist_ok=True)
    Refusal(lambda: FeatureCache(folder, target), words).check()
    (listed,) = {path.name for path in folder.glob("*.json")} - {path.name for path in (tmp_path / "a").glob("*.json")}
    (folder / listed).unlink()
    Refusal(lambda: FeatureCache(folder, target), ("unfinished", "8 of 8")).check()


def test_the_tokenizer_is_compared_where_both_are_known(target, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    write(tmp_path, target, tokenizer=tokenizer)
    assert len(write(tmp_path, target, tokenizer=tokenizer)) == len(write(tmp_path, target)) == 8
    tokenizer.chat_template = "another"
    Refusal(lambda: write(tmp_path, target, tokenizer=tokenizer), ("template", "tokenizer")).check()


# Several processes


def write_forever(directory, target, began):
    target.model.register_forward_pre_hook(lambda module, args: (began.send(None), signal.pause()))
    write(directory, target)


def test_a_second_writer_makes_what_the_first_does_not_and_then_what_a_dead_one_left(target, tmp_path, written, capfd):
    receiver, sender = multiprocessing.Pipe(duplex=False)
    context = multiprocessing.get_context("fork")
    first = context.Process(target=write_forever, args=(tmp_path, target, sender))
    second = context.Process(target=write, args=(tmp_path, tiny_target()))
    first.start()
    receiver.recv()
    second.start()
    while len(shards_of(tmp_path)) < len(shards_of(written)) - 1:
        assert second.exitcode is None
        time.sleep(0.01)
    second.join(1)
    assert second.exitcode is None  # it waits for the part that the first one has
    first.kill()
    first.join()
    second.join(60)
    assert second.exitcode == 0 and "Waiting for parts that other processes make" in capfd.readouterr().err
    assert shards_of(tmp_path) == shards_of(written) and not list(tmp_path.glob("*.safetensors.*"))


def test_two_calls_for_other_rows_do_not_share_a_folder(target, tmp_path, monkeypatch):
    """Also where the second has looked into it before the first began to write: here as it gets its turn."""
    first = []

    def after_another(path):
        if not first:
            first.append(None)
            write(tmp_path, target)
        return nullcontext()

    monkeypatch.setattr(writing, "one_at_a_time", after_another)
    Refusal(lambda: write(tmp_path, target, packed_rows([(7,), (19,)])), ("other data", "8 rows")).check()
    assert len(FeatureCache(tmp_path, target)) == 8


def test_a_complete_cache_is_opened_where_nothing_can_be_written(target, directory, monkeypatch):
    monkeypatch.setattr(writing, "one_at_a_time", None)
    assert len(write(directory, target)) == 8


def test_data_loader_workers_read_it(target, directory):
    cache = FeatureCache(directory, target)
    cache[0]  # the workers start from a cache in use
    items = list(torch.utils.data.DataLoader(cache, batch_size=None, num_workers=2))
    assert ids_of(items) == [row["input_ids"] for row in packed_rows(PACKED)]


# The same target


def test_a_dataset_gives_the_same_bytes_as_a_list_and_an_offloaded_target_as_a_whole_one(target, tmp_path, written):
    rows = Dataset.from_list([{**row, "text": "not needed"} for row in packed_rows(PACKED)])
    write(tmp_path / "dataset", target, rows)
    offloaded = cpu_offload(target)
    assert offloaded.device.type == "meta" and len(FeatureCache(written, offloaded)) == 8
    write(tmp_path / "offloaded", offloaded)
    assert shards_of(tmp_path / "dataset") == shards_of(tmp_path / "offloaded") == shards_of(written)


def test_another_load_of_the_same_target_is_recognised(tmp_path):
    exact = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    rounded = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.bfloat16)
    layerless = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32, num_hidden_layers=0)
    assert exact.lm_head.weight.dtype != rounded.lm_head.weight.dtype
    rows = packed_rows([(9,), (21,)])
    write(tmp_path, exact, rows, dtype="float32", batch_size=1)
    assert len(FeatureCache(tmp_path, rounded)) == len(write(tmp_path, layerless, rows, dtype="float32")) == 2
    residual = FeatureCache(tmp_path, layerless)[1]["residual"].unsqueeze(0)
    with torch.no_grad():  # without its layers the target still gives its logits
        logits = exact(torch.tensor([rows[1]["input_ids"]])).logits
        assert torch.equal(layerless.lm_head(teacher_states(target_of(layerless), residual)), logits)
    moved = shutil.copytree(TINY, tmp_path / "moved")
    exact.config.eos_token_id, exact.config.architectures, exact.config._name_or_path = 7, ["Another"], str(moved)
    assert len(FeatureCache(tmp_path, exact)) == 2  # its name alone is another
    prints = target_fingerprint(exact)
    assert target_fingerprint(rounded) == prints and target_fingerprint(layerless) == {**prints, "body": ""}
    assert target_fingerprint(cpu_offload(tiny_target())) == target_fingerprint(tiny_target())


# How a checkpoint is known


def in_the_hubs_cache(folder, name, commit):
    """A repository as the Hub's cache has it, with one commit more."""
    repository = folder / f"models--{name.replace('/', '--')}"
    shutil.copytree(TINY, repository / "snapshots" / commit)
    (repository / "refs").mkdir(exist_ok=True)
    (repository / "refs" / "main").write_text(commit)
    return repository / "snapshots" / commit


def test_a_repository_is_known_by_its_commit(tmp_path, monkeypatch):
    one, two = "1" * 40, "2" * 40
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    snapshot = in_the_hubs_cache(tmp_path, "org/tiny", one)
    assert checkpoint_source(str(snapshot)) == checkpoint_source("org/tiny") == {"revision": one}
    in_the_hubs_cache(tmp_path, "org/tiny", two)
    assert checkpoint_source("org/tiny") == {}  # of which of them a model is nobody knows
    assert checkpoint_source("org/tiny", two) == {"revision": two}
    where = dict(cache_dir=str(tmp_path), local_files_only=True)
    for target, commit in (
        (load_target("org/tiny", dtype=torch.float32, **where), two), (unloaded_target("org/tiny", **where), two),
        (load_target("org/tiny", revision=one, dtype=torch.float32, **where), one),
    ):  # fmt: skip
        identity = feature_identity(target)
        assert identity["target"]["revision"] == commit and "head" not in identity["target"]
    # A file, or a folder, of several in one repository.
    assert checkpoint_source("org/tiny/a.Q4.gguf", one) != checkpoint_source("org/tiny/a.Q8.gguf", one)
    for folder in ("a", "b"):
        shutil.copytree(TINY, snapshot / folder)
    assert len({checkpoint_source(str(each))["revision"] for each in (snapshot, snapshot / "a", snapshot / "b")}) == 3


def test_a_cache_of_another_revision_is_refused(tmp_path, monkeypatch):
    commits = "1" * 40, "2" * 40
    snapshots = [in_the_hubs_cache(tmp_path, "org/tiny", commit) for commit in commits]
    one, two = (load_target(str(snapshot), dtype=torch.float32) for snapshot in snapshots)
    write(tmp_path / "cache", one, packed_rows([(9,)]))
    Refusal(lambda: FeatureCache(tmp_path / "cache", two), ("revision", "111111", "222222")).check()


def test_a_folder_is_known_by_its_weight_files(tmp_path, monkeypatch):
    """However it is loaded, and wherever it is; without weights in memory, as a client of an engine has it."""
    moved = shutil.copytree(TINY, tmp_path / "moved")
    known = feature_identity(load_target(str(TINY), dtype=torch.float32))
    for same in (unloaded_target(str(TINY)), unloaded_target(str(moved)), load_target(str(moved), dtype="float32")):
        identity = feature_identity(same)
        assert identity_key(identity) == identity_key(known) and identity["target"].keys() == known["target"].keys()
    weights = moved / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-5] ^= 1
    weights.write_bytes(data)
    os.utime(weights, ns=(1, 1))
    changed = feature_identity(unloaded_target(str(moved)))
    assert changed["target"]["files"] != known["target"]["files"] and identity_key(changed) != identity_key(known)
    # Of a large file pieces are read.
    for name, value in (("_WHOLE", 1000), ("_STRETCH", 4096), ("_PIECE", 64)):
        monkeypatch.setattr(checkpoint_module, name, value)
    read, before = [], changed["target"]["files"]
    for at, is_seen in ((4096 * 3 + 5, True), (4096 * 3 + 100, False)):
        data[at] ^= 1
        weights.write_bytes(data)
        os.utime(weights, ns=(at, at))
        now = checkpoint_source(str(moved))["files"]
        read.append(now)
        assert (now != before) or not is_seen
        before = now
    assert read[0] == read[1]


def test_weights_that_were_changed_in_code_are_not_taken_for_the_files(tmp_path):
    """Merged, trained or drawn at random: such a target still has the name of the checkpoint."""
    families.llama().save_pretrained(tmp_path)
    target = load_target(str(tmp_path), dtype=torch.bfloat16)
    known = describe_target(target)
    assert "files" in known and "head" not in known
    target.model.layers[1].self_attn.q_proj.weight.data += 0.01
    changed = describe_target(target)
    assert "files" not in changed and changed["body"]
    drawn = describe_target(AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path)))
    assert drawn["repository"] == known["repository"] and drawn["head"] != changed["head"]


# Digests


def splitmix_sum(data: bytes) -> int:
    """Oracle, in Python's whole numbers: the words of 64 bits, each scrambled with its place, summed."""
    words = [int.from_bytes(data[i : i + 8], "little") for i in range(0, len(data), 8)]
    total = 0
    for place, word in enumerate(words):
        word ^= place * 0x9E3779B97F4A7C15 % 2**64
        word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        word = (word ^ word >> 27) * 0x94D049BB133111EB % 2**64
        total += word ^ word >> 31
    return (total + 2**63) % 2**64 - 2**63


@pytest.mark.parametrize(
    "value",
    [
        torch.randn(33, 5).bfloat16(), torch.randn(101), torch.randn(7, 3, dtype=torch.float64).exp(),
        torch.arange(19), torch.randn(9).half() / 1000, torch.randn(5, 8).to(torch.float8_e4m3fn),
        torch.randn(4, 6) > 0,
    ],
    ids=lambda value: str(value.dtype),
)  # fmt: skip
def test_a_tensor_s_digest_is_the_sum_it_says(monkeypatch, value):
    monkeypatch.setattr("hf_hyperdflash.training.features.fingerprint._CHUNK", 16)
    stored = value.float() if value.dtype == torch.float16 else value  # more bits of mantissa than bfloat16 has
    chunks = [chunk.view(torch.uint8).numpy().tobytes() for chunk in stored.flatten().split(16)]
    expected = [(str(stored.dtype), splitmix_sum(chunk)) for chunk in chunks]
    text = f"w {list(value.shape)} {expected}"
    assert tensor_digest("w", value) == hashlib.sha256(text.encode()).hexdigest()


def test_values_count_not_what_they_are_stored_as_nor_how():
    value = torch.randn(40, 3).bfloat16()
    for same in (value.float(), value.double(), value.t().contiguous().t(), torch.cat([value, value], 1)[:, :3]):
        assert tensor_digest("w", same) == tensor_digest("w", value)
    exact = torch.randn(40, 3)
    assert tensor_digest("w", exact) == tensor_digest("w", exact.double()) != tensor_digest("w", exact.bfloat16())


# Takes seconds: every weight is changed, and all are read again.
def test_every_weight_and_every_setting_counts(target):
    plain = target_fingerprint(target)
    recorded = short_fingerprint(plain)
    assert [len(word) for word in recorded.split()] == [32, 32, 32] and changed_parts(recorded, target) == []
    for name, weight in target.state_dict().items():
        if "inv_freq" in name:
            continue
        value = weight.view(-1)
        kept = value[len(value) // 3].clone()
        value[len(value) // 3] += 1
        in_head = name.startswith(("model.embed_tokens", "model.norm", "model.hc_head", "lm_head"))
        assert changed_parts(recorded, target) == ["head" if in_head else "body"], name
        value[len(value) // 3] = kept
    assert target_fingerprint(target) == plain
    target.config.rope_parameters["main"]["rope_theta"] = 3.0
    assert changed_parts(recorded, target) == ["config"]
    target.config.eos_token_id, target.config.architectures = 7, ["Another"]
    target.model.norm.weight.data[0] = 5
    assert changed_parts(recorded, target) == ["head", "config"]
    assert changed_parts("- " + recorded.partition(" ")[2], target) == ["config"]
    assert changed_parts("cf0c3509a12eaff048ee89dc2e54bb97 09f889361886db315b35bc78aca9af2c", target) is None


def test_drafters_differ_by_weights_and_configuration(target):
    """A field of a later release, at its default, is none of a drafter that was made before."""

    class Later(HyperDFlashConfig):
        invented_later: int = 3

    drafter = tiny_drafter(target)
    plain = module_fingerprint(drafter)
    drafter.config = Later(**drafter.config.to_dict())
    assert drafter.config.to_dict()["invented_later"] == 3 and module_fingerprint(drafter) == plain
    drafter.config.invented_later = 4
    another = module_fingerprint(drafter)
    drafter.norm.weight.data[3] += 0.5
    assert len({plain, another, module_fingerprint(drafter)}) == 3
