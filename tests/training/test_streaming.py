"""Training beside the producers of a feature folder: processes are killed at any moment, and every row is trained on
as often as it is to be."""

import json
import multiprocessing
import os
import random
import shutil
import time
from collections import Counter
from pathlib import Path

import pytest
import torch

from hf_hyperdflash.training.features import streaming
from hf_hyperdflash.training.features.identity import feature_identity
from hf_hyperdflash.training.features.parts import part_bytes, read_lists, read_reader
from hf_hyperdflash.training.features.streaming import FolderOrder, StreamedFeatures
from hf_hyperdflash.training.features.writing import FeatureWriter, TargetProducer

from ..conftest import tiny_target
from ..helpers.refusals import Refusal
from ..helpers.training import rows, tiny_drafter, trainer_for

FORK = multiprocessing.get_context("fork")
LAYERS, DTYPE = [-1], "float32"
SHARD = 60 * 4 * 32 * 4  # some rows


def tokenized(count, seed=0):
    made = rows(count, seed)
    return made.add_column("position_ids", [list(range(len(ids))) for ids in made["input_ids"]])


def produce(folder, data, delay=0.0, **options):
    target = tiny_target()
    if delay:
        target.model.register_forward_pre_hook(lambda module, args: time.sleep(delay))
    producer = TargetProducer(target, feature_identity(target, dtype=DTYPE, target_layer_ids=LAYERS))
    FeatureWriter(folder, data, producer, **{"shard_size": SHARD, **options}).complete()


def train(folder, output, data, held_out=None, log=None, delay=0.0, **args):
    """Train, and log the rows of each step: of a step that is done again the last line counts."""
    target = tiny_target()
    resume = any(output.glob("checkpoint-*/trainer_state.json"))
    how = dict(feature_source="cached", feature_cache_dir=str(folder), feature_dtype=DTYPE, max_steps=-1)
    trainer = trainer_for(output, target, tiny_drafter(target), data, held_out, **{**how, **args})
    compute = trainer.compute_loss

    def compute_loss(model, inputs, *rest, **options):
        if log is not None:
            time.sleep(delay)
            with open(log, "a") as file:
                trained = [ids[mask.cumsum(0) > -1].tolist() for ids, mask in zip(inputs["input_ids"], inputs["loss_mask"])]
                file.write(json.dumps([trainer.state.global_step, trained, len(list(folder.glob("*.safetensors")))]) + "\n")
        return compute(model, inputs, *rest, **options)

    trainer.compute_loss = compute_loss
    trainer.train(resume_from_checkpoint=resume or None)
    torch.save(trainer.model.state_dict(), output / "weights.pt")
    return trainer


def steps_of(log):
    return {step: trained for step, trained, _ in map(json.loads, log.read_text().splitlines())}


def count_rows(log, data):
    """How often each row was trained on; rows of a batch are padded with zeros."""
    known = {tuple(ids): i for i, ids in enumerate(data["input_ids"])}
    counts = Counter()
    for batch in steps_of(log).values():
        for ids in batch:
            counts[next(known[tuple(ids[:n])] for n in range(len(ids), 0, -1) if tuple(ids[:n]) in known)] += 1
    return counts


def bytes_in(folder):
    found = 0
    for path in folder.iterdir():
        if ".safetensors" in path.name:
            try:
                found += path.stat().st_size
            except FileNotFoundError:
                pass
    return found


def limit_for(folder_rows, parts):
    """Gigabytes that hold so many parts of about `SHARD` bytes."""
    return parts * SHARD / 1e9


def test_training_reads_the_folder_in_its_order_and_deletes_what_a_checkpoint_is_past(tmp_path):
    data = tokenized(20)
    produce(tmp_path / "kept", data)
    kept = train(tmp_path / "kept", tmp_path / "one", data, log=tmp_path / "one.log", num_train_epochs=1)
    (listed,) = read_lists(tmp_path / "kept")
    in_order = [rows for _, rows in sorted(steps_of(tmp_path / "one.log").items())]
    flat = [ids for batch in in_order for ids in batch]
    assert all(ids[: len(row)] == row for ids, row in zip(flat, data["input_ids"])) and len(flat) == 20
    shutil.copytree(tmp_path / "kept", tmp_path / "deleted")
    how = dict(feature_retention="delete", num_train_epochs=1, save_strategy="steps", save_steps=4)
    deleted = train(tmp_path / "deleted", tmp_path / "two", data, log=tmp_path / "two.log", **how)
    assert in_order == [rows for _, rows in sorted(steps_of(tmp_path / "two.log").items())]
    for name, value in kept.model.state_dict().items():
        assert torch.equal(value, deleted.model.state_dict()[name]), name
    numbers = [json.loads(line)[2] for line in (tmp_path / "two.log").read_text().splitlines()]
    assert numbers == sorted(numbers, reverse=True) and numbers[0] == len(listed.parts) > 4
    assert not list((tmp_path / "deleted").glob("*.safetensors"))
    assert read_reader(tmp_path / "deleted", listed.path).is_over
