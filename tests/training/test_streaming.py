"""Training beside the producers of a feature folder: processes are killed at any moment, and every row is trained on
as often as it is to be."""

import json
import multiprocessing
import os
import random
import shutil
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from accelerate.data_loader import BatchSamplerShard
from torch.utils.data import BatchSampler
from transformers import AutoTokenizer, TrainingArguments

from hf_hyperdflash import HyperDFlashTrainingArguments
from hf_hyperdflash.training.features.identity import feature_identity
from hf_hyperdflash.training.features.locking import hold
from hf_hyperdflash.training.features.parts import read_lists, read_reader
from hf_hyperdflash.training.features.streaming import FolderOrder, StreamedFeatures
from hf_hyperdflash.training.features.writing import FeatureWriter, TargetProducer

from ..conftest import MODELS, tiny_target
from ..helpers.processes import python
from ..helpers.refusals import Refusal
from ..helpers.training import rows, tiny_drafter, trainer_for

# Not a fork of this process: threads of other libraries, which die in it, may hold locks.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload([__name__])
LAYERS, DTYPE = [-1], "float32"
SHARD = 60 * 4 * 32 * 4  # some rows


def tokenized(count, seed=0):
    made = rows(count, seed)
    return made.add_column("position_ids", [list(range(len(ids))) for ids in made["input_ids"]])


def produce(folder, data, delay=0.0, **options):
    torch.set_num_threads(1)
    target = tiny_target()
    if delay:
        target.model.register_forward_pre_hook(lambda module, args: time.sleep(delay))
    producer = TargetProducer(target, feature_identity(target, dtype=DTYPE, target_layer_ids=LAYERS))
    FeatureWriter(folder, data, producer, **{"shard_size": SHARD, **options}).complete()


def train(folder, output, data, held_out=None, log=None, delay=0.0, **args):
    """Train, and log the rows of each step: of a step that is done again the last line counts."""
    torch.set_num_threads(1)
    target = tiny_target()
    resume = any(output.glob("checkpoint-*/trainer_state.json"))
    how = dict(feature_source="cached", feature_cache_dir=str(folder), feature_dtype=DTYPE, max_steps=-1)
    trainer = trainer_for(output, target, tiny_drafter(target), data, held_out, **{**how, **args})
    compute = trainer.compute_loss

    def compute_loss(model, inputs, *rest, **options):
        if log is not None:
            time.sleep(delay)
            with open(log, "a") as file:
                trained = [
                    ids[mask.cumsum(0) > -1].tolist() for ids, mask in zip(inputs["input_ids"], inputs["loss_mask"])
                ]
                file.write(
                    json.dumps([trainer.state.global_step, trained, len(list(folder.glob("*.safetensors")))]) + "\n"
                )
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


def start(what, *args, **options):
    process = PROCESSES.Process(target=what, args=args, kwargs=options)
    process.start()
    return process


def run_and_kill(tmp_path, seed, data, held_out, limit, kills, delay):
    """Two producers and a trainer at once, each killed with SIGKILL soon after random steps of the training, and
    started again. Return the most bytes that the folder had."""
    choose, folder, log = random.Random(seed), tmp_path / "folder", tmp_path / "rows.log"
    both = tokenized(len(held_out) + len(data))
    how = dict(
        feature_retention="delete", feature_gigabytes=limit, num_train_epochs=1, save_strategy="no", log=log,
        delay=delay,
    )  # fmt: skip
    starts = [
        *(lambda: start(produce, folder, both, delay, gigabytes=limit),) * 2,
        lambda: start(train, folder, tmp_path / "out", data, held_out, **how),
    ]
    running, most = [begin() for begin in starts], 0
    at = sorted(choose.sample(range(len(data) // 2 - 3), kills), reverse=True)  # steps of two rows; the last is next
    began = time.monotonic()
    while running[2].exitcode != 0:
        assert time.monotonic() - began < 600, "it stands still"
        time.sleep(0.005)
        most = max(most, bytes_in(folder) if folder.exists() else 0)
        if at and log.exists() and log.read_text().count("\n") > at[-1]:
            time.sleep(choose.uniform(0, delay))
            which = len(at) % 3  # each in turn
            running[which].kill()
            running[which].join()
            running[which] = starts[which]()
            at.pop()
        for process in running:
            assert process.exitcode in (None, 0), "it ended by itself"
    for process in running[:2]:
        process.join(60)
        assert process.exitcode == 0
    assert not at
    return most


# Takes seconds: every process imports and trains anew after each kill.
@pytest.mark.parametrize(
    ("seed", "count", "kills"),
    [(0, 40, 4), *(pytest.param(n, 150, 15, marks=pytest.mark.nightly) for n in range(1, 6))],
)
def test_killed_producers_and_a_killed_trainer_train_on_every_row_once(tmp_path, seed, count, kills):
    everything = tokenized(count)
    held_out, data = everything.select(range(4)), everything.select(range(4, count))
    limit = limit_for(everything, 8)
    most = run_and_kill(tmp_path, seed, data, held_out, limit, kills, delay=0.1)
    assert count_rows(tmp_path / "rows.log", data) == Counter(range(len(data)))
    headers = 1000 * 8  # of as many parts, beside their contents
    assert 0 < most <= limit * 1e9 + headers
    # The same weights as without kills, where nothing is deleted.
    produce(tmp_path / "kept", everything)
    train(tmp_path / "kept", tmp_path / "plain", data, num_train_epochs=1)
    killed, plain = (torch.load(tmp_path / name / "weights.pt") for name in ("out", "plain"))
    assert all(torch.equal(killed[name], plain[name]) for name in plain)


def produce_after(folder, data, log):
    """Make two parts; make the others once a row has been trained on."""
    target = tiny_target()

    def wait(module, args):
        began = time.monotonic()
        while len(list(folder.glob("*.safetensors"))) >= 2 and not log.exists():
            assert time.monotonic() - began < 100, "nothing is trained on"
            time.sleep(0.01)

    target.model.register_forward_pre_hook(wait)
    producer = TargetProducer(target, feature_identity(target, dtype=DTYPE, target_layer_ids=LAYERS))
    FeatureWriter(folder, data, producer, SHARD).complete()


def test_training_begins_with_the_first_parts_even_before_there_is_a_list(tmp_path, capfd):
    data, log = tokenized(20), tmp_path / "rows.log"
    trainer = start(
        train, tmp_path / "folder", tmp_path / "out", data, log=log, feature_retention="keep", num_train_epochs=1
    )
    while not (tmp_path / "out").exists():  # which a trainer makes first
        time.sleep(0.05)
    produce_after(tmp_path / "folder", data, log)
    trainer.join(100)
    assert trainer.exitcode == 0 and count_rows(log, data) == Counter(range(20))
    assert json.loads(log.read_text().splitlines()[0])[2] <= 2 < len(list((tmp_path / "folder").glob("*.safetensors")))


def test_a_row_whose_part_is_not_there_is_waited_for_with_a_line(made, tmp_path, capfd):
    folder = shutil.copytree(made, tmp_path / "folder")
    rows, (listed,) = open_rows(folder, tokenized(20)), read_lists(folder)
    path, away = listed.parts[1].path(folder), tmp_path / "away"
    expected = rows[listed.first_rows[1]]
    path.rename(away)
    threading.Timer(0.5, away.rename, [path]).start()
    found = rows[listed.first_rows[1]]
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert f"Waiting for part 2 of {len(listed.parts)} in {folder}" in capfd.readouterr().err
    empty = tmp_path / "empty"
    empty.mkdir()
    threading.Timer(0.5, lambda: shutil.copytree(folder, empty, dirs_exist_ok=True)).start()
    assert len(open_rows(empty, tokenized(20))) == 20
    assert f"Waiting for a list of features in {empty}" in capfd.readouterr().err


def test_processes_may_wait_longer_for_features_than_for_each_other(tmp_path):
    def timeout(**given):
        return HyperDFlashTrainingArguments(str(tmp_path), use_cpu=True, report_to="none", **given).ddp_timeout

    assert timeout(feature_source="cached") >= 24 * 3600 and timeout() == TrainingArguments.ddp_timeout
    assert timeout(feature_source="cached", ddp_timeout=60) == 60


def test_kept_features_serve_several_epochs_later_ones_in_another_order_and_resumed_ones(tmp_path):
    data, log = tokenized(14), tmp_path / "rows.log"
    produce(tmp_path / "folder", data)
    how = dict(max_steps=14, save_strategy="steps", save_steps=9, per_device_train_batch_size=2)
    whole = train(tmp_path / "folder", tmp_path / "one", data, log=log, **how)
    assert count_rows(log, data) == Counter(dict.fromkeys(range(14), 2))
    orders = [[ids for step in range(first, first + 7) for ids in steps_of(log)[step]] for first in (0, 7)]
    assert orders[0] != orders[1]
    for folder in (tmp_path / "one").glob("checkpoint-14"):
        shutil.rmtree(folder)
    resumed = train(tmp_path / "folder", tmp_path / "one", data, log=log, **how)
    assert count_rows(log, data) == Counter(dict.fromkeys(range(14), 2))
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, resumed.model.state_dict()[name]), name


def test_a_run_from_an_earlier_checkpoint_has_parts_made_again(tmp_path):
    data = tokenized(20)
    how = dict(feature_retention="delete", num_train_epochs=1, save_strategy="steps", save_steps=3)
    produce(tmp_path / "folder", data)
    train(tmp_path / "folder", tmp_path / "out", data, **how)
    for number in (9, 10):
        shutil.rmtree(tmp_path / "out" / f"checkpoint-{number}")
    again = start(train, tmp_path / "folder", tmp_path / "out", data, log=tmp_path / "rows.log", **how)
    (listed,) = read_lists(tmp_path / "folder")
    while read_reader(tmp_path / "folder", listed.path).is_over:
        time.sleep(0.05)
    produce(tmp_path / "folder", data)
    again.join(60)
    assert again.exitcode == 0 and count_rows(tmp_path / "rows.log", data) == Counter(range(12, 20))


@pytest.mark.parametrize(("count", "processes", "batch"), [(20, 2, 2), (21, 2, 2), (3, 4, 2), (23, 3, 1)])
def test_each_process_reads_its_own_rows_and_all_of_them_equally_many_batches(count, processes, batch):
    """As accelerate deals them out. The last ones are filled up with rows that are still there."""
    order = FolderOrder(count, processes * batch, 0, lambda: 0)
    batches = BatchSampler(order, batch, drop_last=False)
    each = [list(BatchSamplerShard(batches, processes, number)) for number in range(processes)]
    assert len({len(mine) for mine in each}) == 1
    read = [row for rows in zip(*each) for mine in rows for row in mine]
    assert read[:count] == list(range(count)) and len(read) < count + processes * batch
    assert all(row >= count - processes * batch for row in read[count:])


def open_rows(folder, data, target=None, dtype=DTYPE, layers=(-1,), tokenizer=None):
    return StreamedFeatures(folder, data, target or tiny_target(), dtype, layers, tokenizer)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made")
    produce(folder, tokenized(20))
    return folder


def beside(folder, count=20, held_out=None, **args):
    output = folder.with_name("out")
    return trainer_for(
        output, tiny_target(), tiny_drafter(tiny_target()), tokenized(count), held_out,
        **dict(feature_source="cached", feature_cache_dir=str(folder), feature_dtype=DTYPE, max_steps=-1,
               num_train_epochs=1, save_strategy="steps") | args,
    )  # fmt: skip


def damaged(folder):
    os.truncate(sorted(folder.glob("*.safetensors"))[0], 1000)
    return list(open_rows(folder, tokenized(20)))


def of_another(folder):
    other = folder.with_name("other")
    produce(other, tokenized(3, seed=7), shard_size=1)
    shutil.copy(next(other.glob("*.safetensors")), sorted(folder.glob("*.safetensors"))[0])
    return list(open_rows(folder, tokenized(20)))


def of_another_tokenizer(folder):
    target, tokenizer = tiny_target(), AutoTokenizer.from_pretrained(MODELS / "tiny-deepseek-v4")
    identity = feature_identity(target, dtype=DTYPE, target_layer_ids=LAYERS, tokenizer=tokenizer)
    FeatureWriter(folder.with_name("known"), tokenized(3), TargetProducer(target, identity)).complete()
    assert len(open_rows(folder.with_name("known"), tokenized(3), tokenizer=tokenizer)) == 3
    tokenizer.add_tokens("another")
    open_rows(folder.with_name("known"), tokenized(3), tokenizer=tokenizer)


DELETE = {"feature_retention": "delete"}
REFUSED = {
    "other rows": Refusal(lambda at: open_rows(at, tokenized(20, seed=1)), ("20 of 20 rows", "row 0", "--max_length")),
    "another target": Refusal(lambda at: open_rows(at, tokenized(20), tiny_target(1)), ("another target", "weights")),
    "other layers": Refusal(lambda at: open_rows(at, tokenized(20), layers=[0, -1]), ("[-1]", "[0, -1]")),
    "another format": Refusal(lambda at: open_rows(at, tokenized(20), dtype="float8"), ("float32", "float8")),
    "another tokenizer": Refusal(of_another_tokenizer, ("another vocabulary of the tokenizer",)),
    "half a part": Refusal(damaged, ("damaged", "delete it")),
    "a part of other rows": Refusal(of_another, ("other tokens", "delete it"), (ValueError, IndexError)),
    "several epochs": Refusal(lambda at: beside(at, num_train_epochs=2, **DELETE), ("num_train_epochs", "2", "keep")),
    "more steps than rows": Refusal(lambda at: beside(at, max_steps=11, **DELETE), ("max_steps", "11", "20 rows")),
    "weights alone": Refusal(lambda at: beside(at, save_only_model=True, **DELETE), ("save_only_model", "delete")),
    "no skipping": Refusal(lambda at: beside(at, ignore_data_skip=True, **DELETE), ("ignore_data_skip", "delete")),
    "too small a folder": Refusal(
        lambda at: beside(at, feature_gigabytes=0.00005, **DELETE), ("feature_gigabytes", "5e-05", "at least")),
    "a limit without deleting": Refusal(lambda at: beside(at, feature_gigabytes=1.0), ("feature_gigabytes", "delete")),
    "nothing stored": Refusal(
        lambda at: beside(at, feature_source="online", **DELETE), ("feature_retention", "online", "cached")),
    "held-out rows in between": Refusal(
        lambda at: beside(at, held_out=tokenized(20).select([15]), **DELETE), ("Held-out", "--eval_rows", "--seed")),
    "a small limit of producers": Refusal(
        lambda at: produce(at.with_name("new"), tokenized(20), gigabytes=1e-6), ("feature_gigabytes", "1e-06")),
}  # fmt: skip


@pytest.mark.parametrize("refusal", REFUSED.values(), ids=REFUSED.keys())
def test_what_does_not_fit_the_folder_is_refused_in_one_line(refusal, made, tmp_path):
    refusal.check(shutil.copytree(made, tmp_path / "folder"))


def test_two_trainings_do_not_delete_from_one_folder(made, tmp_path):
    folder = shutil.copytree(made, tmp_path / "folder")
    lock = hold(folder / "reader")
    Refusal(beside(folder, **DELETE).train, ("reader", "another process", "another folder")).check()
    lock.release()


TWO_PROCESSES = """
import os, sys
from pathlib import Path
from tests.training.test_streaming import tokenized, train
folder = Path(sys.argv[1])
everything = tokenized(25)
trainer = train(
    folder / "features", folder / "out", everything.select(range(4, 25)), everything.select(range(4)),
    log=folder / f"{os.environ['RANK']}.log", feature_retention="delete", feature_gigabytes=float(sys.argv[2]),
    num_train_epochs=1, save_strategy="no",
)
trainer.evaluate()
trainer.leave_group()
"""


@pytest.mark.nightly  # two processes import transformers
def test_two_processes_read_their_own_rows_and_delete_them_once(tmp_path):
    """21 rows in steps of four: the last step is filled up with rows that are still there."""
    data, limit = tokenized(25), limit_for(tokenized(25), 12)
    producer = start(produce, tmp_path / "features", data, gigabytes=limit)
    (tmp_path / "run.py").write_text(TWO_PROCESSES)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", 2)
    done = python(*launcher, tmp_path / "run.py", tmp_path, limit, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    producer.join(60)
    assert producer.exitcode == 0
    each = [count_rows(tmp_path / f"{rank}.log", data.select(range(4, 25))) for rank in range(2)]
    assert each[0].total() == each[1].total() == 12 and set(each[0]) | set(each[1]) == set(range(21))
    assert sorted((each[0] + each[1]).items())[:18] == [(row, 1) for row in range(18)]
    (listed,) = read_lists(tmp_path / "features")
    assert read_reader(tmp_path / "features", listed.path).is_over
