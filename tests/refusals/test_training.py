"""What training refuses: rows, templates, arguments, flags, targets, caches, checkpoints. What must be so beside the
message (nothing was written, what is there stays) is asserted here, too."""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
from collections import namedtuple
from types import SimpleNamespace

import datasets
import pytest
import torch
from datasets import Dataset, DatasetDict
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BatchEncoding,
    GPT2Config,
    GPT2LMHeadModel,
    TrainingArguments,
)
from typer.testing import CliRunner

from hf_hyperdflash import DeepseekV4MTPDrafter, HyperDFlashTrainer, HyperDFlashTrainingArguments, PromptLookupDrafter
from hf_hyperdflash.cli.app import app
from hf_hyperdflash.training.acceptance import AcceptanceCallback, measure_acceptance
from hf_hyperdflash.training.data.encoding import encode_chat, encode_prompts
from hf_hyperdflash.training.data.messages import read_tools, to_messages
from hf_hyperdflash.training.data.rows import load_rows, prepare_dataset
from hf_hyperdflash.training.features.fingerprint import target_fingerprint
from hf_hyperdflash.training.features.store import FeatureCache
from hf_hyperdflash.training.script import main as train
from hf_hyperdflash.training.trials import Local

from ..conftest import MODELS, prompt, tiny_drafter, tiny_target
from ..helpers.chats import CALL, CHANNELS, LINES, chat, templated
from ..helpers.refusals import Refusal
from ..helpers.tokenizers import JoiningPieces
from ..helpers.training import packed_rows, rows, trainer_for
from ..training.test_messages import CONVERSATIONS, EXCHANGES, FORMS, GPT, HUMAN, A, Q

TINY = MODELS / "tiny-deepseek-v4"
GOOD = {"messages": [Q, {**A, "content": "It is three."}]}


def refused(table):
    return pytest.mark.parametrize("refusal", table.values(), ids=table)


# Rows

LATER = [Q, {**A, "content": "b"}]
MESSAGE_FIELDS = {
    "images": ["a.png"], "function_call": {"name": "f"}, "train_detail": [{"begin_offset": 0}], "loss_scale": 0.5,
    "recipient": "functions.add", "weight": 0.5, "train": "yes", "channel": "analysis", "tool_calls": "add",
}  # fmt: skip
ROW_FIELDS = {
    "images": ["a.png"], "image": "a.png", "videos": ["a.mp4"], "audios": ["a.wav"], "documents": [{"text": "x"}],
    "functions": [{"name": "f"}], "chat_template_kwargs": {"enable_thinking": False},
}  # fmt: skip


def row(words, **columns):
    return Refusal(lambda: to_messages(columns), words)


ROWS = {
    "another speaker": row(("usr", "user", "developer"), messages=[{"role": "usr", "content": "q"}]),
    "no speaker": row(("None", "expected", "developer"), messages=[{"role": None, "content": "q"}]),
    "several speakers": row(("['user']", "expected"), messages=[{"role": ["user"], "content": "q"}]),
    "another speaker of ShareGPT's": row(("narrator",), conversations=[{"from": "narrator", "value": "q"}]),
    "other columns": row(("text", "expected", "messages"), text="x"),
    "a column of nothing": row(("nothing", "messages"), messages=None),
    "no list": row(("'hello'", "expected", "list"), messages="hello"),
    "texts": row(("hello", "expected", "list"), messages=["hello"]),
    "two system messages": row(("'s'", "'s2'", "expected one"), messages=[Q, A], system="s", system_prompt="s2"),
    "another one than is there": row(
        ("'other'", "'s'"), messages=[{"role": "developer", "content": "s"}, Q, A], system="other"
    ),
    "no text as system message": row(("True", "expected one"), messages=[Q, A], system=True),
    "two reasonings": row(("reasonings", "expected one"), messages=[Q, {**A, "reasoning": "r", "thinking": "s"}]),
    "two reasonings, one beside": row(
        ("reasonings", "expected one"), prompt="q", completion=[{**A, "reasoning": "s"}], reasoning_content="r"
    ),
    "an image": row(("image", "a.png", "expected text"),
        messages=[Q, {**A, "content": [{"type": "image", "url": "a.png"}]}]),
    "a part that is no text": row(("thinking", "expected text"), messages=[Q, {**A, "content": [{"thinking": "r"}]}]),
    "a number": row(("3", "expected text"), messages=[Q, {**A, "content": 3}]),
    "nothing said": row(("None", "expected text"), messages=[{**Q, "content": None}]),
    "nothing said in ShareGPT": row(("None", "expected text"), conversations=[{"from": "human", "value": None}]),
    "a call that is none": row(("add(1)", "expected"),
        conversations=[HUMAN, {"from": "function_call", "value": "add(1)"}]),
    "a call without a name": row(("'id'", "expected"), messages=[Q, {**A, "tool_calls": [{"id": "1"}]}]),
    **{
        f"{name} of a message": row((name, str(value)), messages=[Q, {"role": "gpt", "content": "a", name: value}])
        if name != "tool_calls" else row(("'add'", "expected"), messages=[Q, {**A, name: value}])
        for name, value in MESSAGE_FIELDS.items()
    },
    "images of a turn of ShareGPT": row(("images", "a.png"), conversations=[HUMAN, {**GPT, "images": ["a.png"]}]),
    **{f"{name} beside {form}": row((f"`{name}`", str(value)), **FORMS[form], **{name: value})
       for name, value in ROW_FIELDS.items() for form in (*CONVERSATIONS, "alpaca", "qa")},
    **{f"{name} beside {form}": row((f"`{name}`", str(value)), **FORMS[form], **{name: value})
       for name, value in (("history", [["q0", "a0"]]), ("reasoning", "r"), ("thinking", "r"))
           for form in CONVERSATIONS},
    **{f"{name} beside {form}": row((f"`{name}`", "c"), **EXCHANGES[form], **{name: "c"})
       for name in ("input", "context") for form in ("trl texts", "qa")},
    **{f"a history of {value}": row((str(value)[:9], "expected"), question="q", answer="a", history=value)
       for value in ("q0", [["q0"]], ["q0", "a0"])},
    "a history of numbers": row(("3", "expected"), question="q", answer="a", history=[["q0", 3]]),
    **{f"tools: {tools}": Refusal(lambda tools=tools: read_tools({"tools": tools}), ("tools", str(tools), "JSON"))
       for tools in ("{", "add", ["add"], {"name": "add"}, 3)},
}  # fmt: skip


@refused(ROWS)
def test_a_row_is_refused_in_one_line(refusal):
    refusal.check()


# Chat templates and tokenizers

OPENS_REASONING = (  # as DeepSeek-R1's: the generation prompt opens reasoning that the rendered answer does not have
    "{% for m in messages %}{{ m.role + ':' + m.content + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:<think>\n' }}{% endif %}"
)
PROMPT = "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
WORDY = "{% for m in messages %}{{ m.role + ': ' + m.content }}{% endfor %}" + PROMPT
TAGGED = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
CALLING = (
    "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}"
    "{% endfor %}"
)
RAISING = {
    "raise_exception('Roles must\n alternate')": "Roles must alternate", "messages[0].absent.more": "absent",
    "messages[0].content + 1": "TypeError", "1 / 0": "ZeroDivisionError", "strftime_now(3)": "TypeError",
}  # fmt: skip


def template(words, text, *turns, **options):
    return Refusal(lambda: encode_chat(templated(text), chat(*(turns or ("q", "a"))), **options), words)


def prepared(words, data, tokenizer=None, **options):
    return Refusal(
        lambda: prepare_dataset(data, tokenizer and templated(tokenizer), **{"max_length": 20, **options}), words
    )


def with_arguments(arguments):
    return {**CALL, "tool_calls": [{"function": {"name": "add", "arguments": arguments}}]}


TOKENS = Dataset.from_list([{"input_ids": [1, 2, 3, 4], "loss_mask": [0, 1, 1, 0]}])
PACKED = Dataset.from_list([{"input_ids": [1] * 4, "loss_mask": [0, 1, 1, 0], "position_ids": [0, 1, 0, 1]}])
PLACED = {**GOOD, "_place": "rows.jsonl:7"}
JUDGE = {"messages": [{"role": "judge", "content": "q"}]}
DATA = {
    "a prompt that opens reasoning": template(("<think>", "{% generation %}"), OPENS_REASONING),
    "no template": template(("no chat template", "--chat-template"), None),
    "tags without answers": template(("2 answers", "8 blocks"), TAGGED + TAGGED, "q", {**A, "train": False}, "q", "a"),
    "tokens that join words": Refusal(
        lambda: encode_chat(templated(WORDY, JoiningPieces()), chat("hi", "so")),
            ("JoiningPieces", "assistant: ", "so")
    ),
    **{f"arguments {text}": template((text, "expected", "dictionary"), CALLING, "q", with_arguments(text))
       for text in ("{", "add", "[1]", '"{}"', "3")},
    **{f"{expression}, tags {tags}": Refusal(
        lambda text="{{ " + expression + " }}" + "{% generation %}{% endgeneration %}" * tags,
            call=call: call(templated(text)),
        (why, "chat template", *place),
    ) for expression, why in RAISING.items() for tags in (0, 1) for place, call in (
        ((), lambda tokenizer: encode_chat(tokenizer, GOOD["messages"])),
        (("rows.jsonl:7",), lambda tokenizer: encode_prompts(tokenizer, [PLACED])),
        (("rows.jsonl:7",), lambda tokenizer: prepare_dataset([PLACED], tokenizer, max_length=20)),
    )},
    "prompts of texts": Refusal(lambda: encode_prompts(templated(LINES), ["hello"]), ("Row 0", "'hello'", "expected")),
    "a prompt that asks nothing": Refusal(lambda: encode_prompts(templated(LINES), [{"messages": [A]}]),
        ("Row 0", "asks nothing")),
    "none of some prompts": Refusal(
        lambda: encode_prompts(templated(LINES), [{"messages": [A]}] * 2, at_most=1), ("Row 0", "asks nothing")
    ),
    "prompts without a template": Refusal(lambda: encode_prompts(templated(None), [GOOD]), ("--chat-template",)),
    "half a character": Refusal(lambda: encode_prompts(templated(LINES), [{"turns": ["\ud83d"]}]),
        ("Row 0", "\\ud83d")),
    "rows without a template": Refusal(
        lambda: prepare_dataset([GOOD], templated(None), max_length=20), ("The tokenizer", "no chat template")
    ),
    "room for no block": prepared(("max_length=1", "2"), [GOOD], LINES, max_length=1),
    "several datasets": prepared(("train", "Choose"), DatasetDict({"train": TOKENS})),
    "no tokenizer": prepared(("messages", "tokenizer"), [GOOD]),
    **{f"a dataset {what}": prepared((str(what),), data, LINES)
       for data, what in ((5, "int"), ([5], "list"), ([], "empty"), (TOKENS.select([]), "empty"))},
    "another mask": prepared(("2 input_ids", "1"), [{"input_ids": [1, 2], "loss_mask": [1]}]),
    "neighbours of two documents": prepared(("1 of 1", "row 0"), PACKED),
    "a packed row that is too long": prepared(("4 tokens", "max_length=3"), PACKED, max_length=3),
    **{f"ids {ids}": prepared(("Row 0", *words), [{"input_ids": ids, "loss_mask": [1] * 3}], vocab_size=64)
       for ids, words in (([1, 2, 64], ("64", "below 64")), ([1, -2, 8], ("-2", "below 64")),
           ([1, None, 8], ("nothing at 1",)))},
    "nobody answers": prepared(("2 rows", "turns", "hf-hyperdflash answers"), [{"turns": ["a"]}, {"turns": ["b"]}],
        LINES),
    "nobody answers a stream": prepared(("1,000", "turns"),
        Dataset.from_list([{"turns": ["a"]}]).to_iterable_dataset(), LINES),
    "every row is refused": prepared(
        ("2 of 3", "row 0", "judge"), [JUDGE, JUDGE, GOOD | {"images": ["a"]}], LINES
    ),
    "letters of a template": prepared(
        ("3 of 12", "(i)"), [{"messages": chat(letter, "a")} for letter in "abcdefghijk"] + [{"messages": [A]}],
        "{% for m in messages %}{{ raise_exception(m.content) if m.role == 'user' }}{{ m.content }}{% endfor %}",
    ),
    "a template of two minds": prepared(
        ("row 0", "one was expected"), [{"messages": [Q, {**CALL, "content": "I", "thinking": "so"}]}], CHANNELS,
    ),
}  # fmt: skip


@refused(DATA)
def test_data_is_refused_in_one_line(refusal):
    refusal.check()


# Files

LINE = '{"question": "q", "answer": "a"}\n'
FAR = "".join(LINE for _ in range(1200)).encode() + '{"question": "é", "answer": "a"}'.encode("latin-1")
BAD = {  # bytes, and words of the one line
    "empty": (b"", ("is empty",)),
    "binary": (b"\xff\xfe\x00\x01", (":1", "UTF-8")),
    "malformed": ((LINE + '\n{"question": \n').encode(), (":3", "column 13")),
    "no object": ((LINE + "[1, 2]\n").encode(), (":2", "list")),
    "latin-1": ((LINE + '{"question": "é", "answer": "a"}\n').encode("latin-1"), (":2", "UTF-8")),
    "utf-16": (LINE.encode("utf-16"), (":1", "UTF-8")),
    "far down": (FAR, (":1201", "UTF-8")),
    "a document": (b'[{"question": "q"}, 3]', ("row 1", "int")),
    "an empty document": (b"[]", ("no rows",)),
}


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("name", BAD)
def test_a_file_that_cannot_be_read_is_told_by_its_line_before_the_target_is_loaded(
    tmp_path, name, streaming, monkeypatch
):
    written, words = BAD[name]
    path = tmp_path / ("rows.json" if "document" in name else "rows.jsonl")
    path.write_bytes(written)
    logged = []
    reader = logging.getLogger("datasets.packaged_modules.json.json")
    monkeypatch.setattr(reader, "callHandlers", lambda record: logged.append(record.getMessage()))
    monkeypatch.setattr("hf_hyperdflash.training.script.load_target", lambda *_, **__: pytest.fail("it was loaded"))
    given = flags(tmp_path, path, eval_rows=64, eval_dataset="other.jsonl" if streaming else None)
    Refusal(lambda: train([*given, *["--streaming"] * streaming]), (path.name, *words)).check()
    assert [each.name for each in tmp_path.iterdir()] == [path.name] and not logged  # told once
    (tmp_path / "parts").mkdir()
    path.rename(tmp_path / "parts" / path.name)
    if path.suffix == ".jsonl":
        Refusal(lambda: load_rows(str(tmp_path / "parts"), streaming=streaming), (path.name, *words)).check()


def saved_splits(folder):
    DatasetDict({"train": TOKENS}).save_to_disk(folder / "splits")
    return str(folder / "splits")


SOURCES = {
    "no file": Refusal(lambda at: load_rows(str(at / "absent.jsonl")), ("absent.jsonl", "expected")),
    "an empty folder": Refusal(lambda at: load_rows(str(at)), ("no dataset", ".json, .jsonl or .parquet")),
    "another split": Refusal(lambda at: load_rows(saved_splits(at), "test"), ("'test'", "'train'")),
    "nowhere": Refusal(lambda at: load_rows("nobody/nothing:main"), ("nobody/nothing:main", "network")),
    "nowhere, streamed": Refusal(
        lambda at: load_rows("nobody/nothing:main", streaming=True), ("nobody/nothing:main",)
    ),
}


@refused(SOURCES)
def test_a_source_of_rows_is_refused_in_one_line(refusal, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    refusal.check(tmp_path)


# Arguments and flags

NUMBERS = {
    "a number of at least 0": [("kl_weight", "x"), ("kl_weight", -1), ("kl_weight", math.nan), ("learning_rate", -1.0),
                               ("tv_weight", -0.1), ("confidence_weight", math.inf), ("ce_weight", "1"),
                               ("weight_decay", -1.0)],
    "a number of more than 0": [("kl_temperature", 0), ("loss_decay", "4"), ("kl_temperature", None),
        ("loss_decay", 0.0),
                                ("num_train_epochs", 0), ("num_train_epochs", -1.0), ("save_steps", 0)],
    "a whole number of at least 0": [("seed", -1), ("dataloader_num_workers", -1)],
    "a whole number of at least 1": [("kl_positions", 1.5), ("num_anchors", 1.5), ("per_device_train_batch_size", 0),
                                     ("gradient_accumulation_steps", 0), ("max_steps", -5), ("max_steps", 0),
                                     ("loss_chunk_size", 0), ("per_device_eval_batch_size", 0)],
    "a whole number of at least 2": [("max_length", 1)],
    "below 2**32": [("seed", 2**32)],
    "from 0 to below 1": [("adam_beta2", 1.5), ("adam_beta2", 1.0), ("adam_beta1", "x")],
    "hyperdflash": [("recipe", "mine")], "hc_head": [("kl_teacher", "argmax")], "online": [("feature_source", "x")],
    "bfloat16": [("feature_dtype", "int8")], "False": [("remove_unused_columns", True)], "GPU": [("fp16", True)],
    "none": [("report_to", ["wandbee"])],
}  # fmt: skip
ARGUMENTS = {
    f"{name} {value}": Refusal(
        lambda at, given={name: value}: HyperDFlashTrainingArguments(str(at), **{"use_cpu": True, **given}),
        (f"`{name}`", str(value[0] if isinstance(value, list) else value), expected),
    )
    for expected, given in NUMBERS.items()
    for name, value in given
} | {
    "nothing to learn from": Refusal(
        lambda at: HyperDFlashTrainingArguments(str(at), ce_weight=0, kl_weight=0), ("ce_weight", "expected one")
    )
}


@refused(ARGUMENTS)
def test_arguments_are_refused_in_one_line(refusal, tmp_path):
    refusal.check(tmp_path)


def flags(folder, dataset="nowhere.jsonl", **others):
    values = dict(target=TINY, dataset=dataset, output_dir=folder / "out", report_to="none", max_steps=2) | others
    given = [part for name, value in values.items() if value is not None for part in (f"--{name}", str(value))]
    return [*given, "--use_cpu"]


STREAM = ["--streaming", "--eval_dataset", "x"]
EVALUATES = ["--eval_strategy", "steps", "--metric_for_best_model"]
FLAGS = {
    "--stage 2": ("drafter",),
    "--stage 3": ("stage", "3"),
    "--stage x": ("stage", "'x'"),
    "--kl_weight x": ("kl_weight", "'x'"),
    "--output_dir": ("output_dir", "expected", "train --help"),
    "--learning_rat 1": ("'--learning_rat'", "--learning_rate"),
    "--target_dtype float7": ("target_dtype", "'float7'", "expected"),
    "--target_dtype int8": ("target_dtype", "'int8'", "expected"),
    "--save_dtype nn": ("save_dtype", "'nn'", "expected"),
    "--max_steps -5": ("max_steps", "-5", "at least 1"),
    "--learning_rate -1e-3": ("learning_rate", "-0.001", "at least 0"),
    "--sliding_window some": ("sliding_window", "'some'", "none"),
    "--drafter x --sliding_window 5": ("sliding_window", "new drafter"),
    "--streaming": ("streaming", "eval_dataset"),
    " ".join([*STREAM, "--max_steps", "-1"]): ("streaming", "max_steps"),
    " ".join([*STREAM, "--draft_vocab_size", "9"]): ("draft_vocab_size", "stream"),
    "--draft_vocab_size -1": ("draft_vocab_size", "-1", "at least 0"),
    f"--output_dir {__file__}": ("test_training.py", "expected a folder"),
    f"--output_dir {__file__}/x": ("output_dir", "/x", ".py is a file"),
    " ".join([*EVALUATES, "tau", "--eval_prompts", "0"]): ("metric_for_best_model", "'tau'", "eval_prompts"),
    " ".join([*EVALUATES, "taus"]): ("'taus'", "expected tau", "teacher_forced_tau"),
    "--device_map cuda:7": ("device_map", "'cuda:7'", "cpu"),
    "--device_map gpu": ("device_map", "'gpu'", "auto"),
    "--eval_rows 0": ("eval_rows", "0"),
    "--rows 0": ("rows", "0", "at least 1"),
    "--layers 0": ("layers", "0", "at least 1"),
    "--confidence_weight 0.5": ("confidence_weight", "confidence_head"),
    "--blind_weight 0.5": ("blind_weight", "sequential_head"),
    "--reducer foo": ("reducer", "'foo'", "hc_gate", "stream_mean"),
    "--sequential_head foo": ("sequential_head", "'foo'", "none", "markov"),
    "--recipe best": ("recipe", "'best'"),
    "--chat_template nowhere.jinja": ("'nowhere.jinja'", "no such file"),
    "--report_to wandbee": ("report_to", "'wandbee'"),
    "--max_length 6": ("max_length", "6", "num_draft_tokens"),
    "--max_length 8 --num_draft_tokens 8": ("max_length", "8", "num_draft_tokens"),
    "--resume_from_checkpoint true": ("No checkpoint", "out"),
    "--overwrite_output_dir true --resume_from_checkpoint true": ("overwrite_output_dir", "resume_from_checkpoint"),
}


@pytest.mark.parametrize("given", FLAGS)
def test_flags_are_refused_before_any_work(tmp_path, monkeypatch, given):
    for name in ("cuda", "accelerator"):
        monkeypatch.setattr(f"torch.{name}.is_available", lambda: False)
    Refusal(lambda: train([*flags(tmp_path), *given.split()]), FLAGS[given]).check()
    assert not list(tmp_path.iterdir())


def run_command(*arguments):
    done = CliRunner().invoke(app, ["train", *arguments])
    raise done.exception


def bad_template(folder, written):
    (folder / "bad.jinja").write_bytes(written)
    train(flags(folder, chat_template=folder / "bad.jinja"))


def rows_of(folder, rows, name="rows.jsonl"):
    (folder / name).write_text("\n".join(map(json.dumps, rows)) + "\n")
    return folder / name


def earlier(at, **others):
    """On from the shipped drafter, with a layer count of its own."""
    train(flags(at, drafter=MODELS / "tiny-deepseek-v4-hyperdflash", **others))


TOKENIZED = [{"input_ids": [1, 2, 3, 4], "loss_mask": [1] * 4}] * 5
SAID = [{"question": f"{n}: what?", "answer": "it is this, my friend."} for n in range(6)]
COMMANDS = {
    "a flag that there is not": Refusal(
        lambda at: run_command("--target", "x", "--output_dir", "y", "--learning-rat=1", "1"),
            ("--learning-rat=1", "--learning")
    ),
    "no target": Refusal(lambda at: train(flags(at, target=None)), ("--target",)),
    "no folder": Refusal(lambda at: train(flags(at, output_dir=None)), ("--output_dir",)),
    "a template with a fault": Refusal(lambda at: bad_template(at, b"a\n{% if %}"),
        ("--chat_template", "bad.jinja", "line 2")),
    "a template with a tag alone": Refusal(lambda at: bad_template(at, b"{% generation %}"), ("bad.jinja", "Jinja")),
    "a template in Latin-1": Refusal(lambda at: bad_template(at, b"\xe9"), ("bad.jinja", "UTF-8")),
    "a template in UTF-16": Refusal(lambda at: bad_template(at, "é".encode("utf-16")), ("bad.jinja", "UTF-8")),
    "no file of rows": Refusal(lambda at: train(flags(at)), ("nowhere.jsonl",)),
    "too few rows": Refusal(lambda at: train(flags(at, rows_of(at, SAID), eval_rows=64)),
        ("rows.jsonl", "6 rows", "64")),
    "prompts of tokens": Refusal(lambda at: train(flags(at, rows_of(at, TOKENIZED), eval_rows=2)),
        ("tokenized", "eval_prompts")),
    "tokens of another tokenizer": Refusal(
        lambda at: train(flags(at, rows_of(at, [*TOKENIZED, {"input_ids": [1, 2048], "loss_mask": [1, 1]}]),
            eval_prompts=0,
                               eval_dataset=rows_of(at, TOKENIZED, "good.jsonl"))), ("rows.jsonl:6", "2048")
    ),
    "longer than the target": Refusal(
        lambda at: train(flags(at, rows_of(at, SAID), max_length=4096, eval_rows=2)), ("max_length", "4096", "2048")
    ),
    "rows that ask": Refusal(
        lambda at: train(flags(at, rows_of(at, [{"turns": ["What?"]}] * 6), eval_rows=2)),
            ("4 rows", "rows.jsonl:", "['turns']")
    ),
    "heads for a drafter that has some": Refusal(
        lambda at: earlier(at, sequential_head="state"), ("has one already",)
    ),
    "another vocabulary for one that drafts all": Refusal(
        lambda at: earlier(at, draft_vocab_size=40), ("LM head", "expected")
    ),
    "no vocabulary": Refusal(lambda at: earlier(at, draft_vocab_size=0), ("--draft_vocab_size 0", "--drafter")),
    "layers for a drafter that has some": Refusal(lambda at: earlier(at, layers=2), ("layers",)),
}  # fmt: skip


@refused(COMMANDS)
def test_a_command_is_refused_in_one_line(refusal, tmp_path):
    refusal.check(tmp_path)
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())


def test_a_folder_that_cannot_be_written_is_told_before_any_work(tmp_path, monkeypatch):
    monkeypatch.setattr("os.access", lambda path, mode: str(path) != str(tmp_path))  # root may write everywhere
    Refusal(lambda: train(flags(tmp_path)), ("output_dir", "out", "cannot be written to")).check()


# The trainer


def broken(model, name, value=math.nan):
    model.get_parameter(name).data.view(-1)[3] = value
    return model


def trainer(at, target=None, drafter=None, data=None, held_out=None, **args):
    """What is not given is good."""
    target = target or at.target
    return trainer_for(
        at.folder, target, drafter or tiny_drafter(target), rows(2) if data is None else data, held_out, **args
    )


def plain_trainer(at, *args, **kwargs):
    return HyperDFlashTrainer(at.drafter, at.target, *args, **kwargs)


def without_layers(at):
    at.target.save_pretrained(at.folder / "saved")
    return AutoModelForCausalLM.from_pretrained(at.folder / "saved", num_hidden_layers=0, dtype=torch.float32)


def spread_over(free):
    return lambda path: SimpleNamespace(free=free)


CHOOSES = dict(draft_vocab_size=8, sequential_head="markov", head_rank=4, head_candidates=4)
SAVES = dict(eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=1, load_best_model_at_end=True)
TRAINER = {
    "no drafter": Refusal(lambda at: trainer(at, drafter=at.target), ("DeepseekV4", "expected", "HyperDFlashDrafter")),
    "a drafter of another target": Refusal(
        lambda at: trainer(at, tiny_target(vocab_size=32), tiny_drafter(at.target)), ("vocab_size", "64", "32")
    ),
    "more positions than a block": Refusal(lambda at: trainer(at, kl_positions=7), ("kl_positions", "7")),
    "no confidence head": Refusal(lambda at: trainer(at, confidence_weight=1.0),
        ("confidence_weight", "1.0", "confidence_head")),
    "no candidates": Refusal(lambda at: trainer(at, blind_weight=1.0), ("blind_weight", "1.0", "head_candidates")),
    "candidates of some tokens": Refusal(
        lambda at: trainer(at, drafter=tiny_drafter(at.target, **CHOOSES)),
            ("draft_vocab_size", "8", "head_candidates", "4")
    ),
    "a stream to cache": Refusal(
        lambda at: trainer(at, data=rows(2).to_iterable_dataset(), feature_source="cached"), ("cached", "streaming")
    ),
    "no evaluation rows": Refusal(
        lambda at: trainer(at, feature_source="cached", eval_strategy="steps"), ("eval_dataset",)
    ),
    "another tokenizer": Refusal(
        lambda at: plain_trainer(at, HyperDFlashTrainingArguments(str(at.folder)),
            processing_class=AutoTokenizer.from_pretrained(TINY)),
        ("vocabulary 64",),
    ),
    "a name of a tokenizer": Refusal(lambda at: plain_trainer(at, processing_class="x"),
        ("processing_class", "str", "expected")),
    "other arguments": Refusal(
        lambda at: plain_trainer(at, TrainingArguments(str(at.folder))),
            ("TrainingArguments", "HyperDFlashTrainingArguments")
    ),
    "nothing to train on": Refusal(
        lambda at: trainer(at, data=Dataset.from_list([{"input_ids": [3, 4, 5], "loss_mask": [0] * 3}] * 3)),
            ("3 of 3", "loss_mask")
    ),
    "longer than the target": Refusal(lambda at: trainer(at, max_length=1025), ("max_length", "1025", "1024")),
    "a target without layers": Refusal(lambda at: trainer(at, without_layers(at)), ("no layers", "cached")),
    **{f"a drafter with {value}": Refusal(
        lambda at, value=value: trainer(at, drafter=broken(tiny_drafter(at.target), "norm.weight", value)),
        ("drafter", "not finite", "norm.weight")) for value in (math.nan, math.inf, -math.inf)},
    "a target with infinities": Refusal(
        lambda at: trainer(at, broken(tiny_target(), "lm_head.weight", math.inf)),
            ("target", "not finite", "lm_head.weight")
    ),
    "no vocabulary to choose": Refusal(lambda at: trainer(at).choose_vocabulary(),
        ("draft_vocab_size", "0", "at least 1")),
    "a vocabulary of a stream": Refusal(
        lambda at: trainer(at, drafter=tiny_drafter(at.target, draft_vocab_size=4),
                           data=rows(2).to_iterable_dataset()).choose_vocabulary(), ("IterableDataset", "known length")
    ),
    "a metric that there is not": Refusal(
        lambda at: trainer(at, held_out=rows(2), metric_for_best_model="nothing", **SAVES).train(),
            ("'nothing'", "expected tau")
    ),
    "a metric of nobody": Refusal(
        lambda at: trainer(at, held_out=rows(2), metric_for_best_model="eval_tau", **SAVES).train(),
            ("AcceptanceCallback",)
    ),
    "no checkpoint": Refusal(
        lambda at: trainer(at).train(resume_from_checkpoint=True), ("No checkpoint", "resume_from_checkpoint")
    ),
    "no such checkpoint": Refusal(lambda at: trainer(at).train(resume_from_checkpoint="nowhere"),
        ("'nowhere'", "no such folder")),
    "no prompts": Refusal(lambda at: AcceptanceCallback(trainer(at), []), ("prompts", "[]")),
    "too few tokens": Refusal(lambda at: AcceptanceCallback(trainer(at), [prompt(9)], max_new_tokens=1),
        ("max_new_tokens", "1")),
    # Acceptance by hand
    **{f"prompts {none}": Refusal(
        lambda at, none=none: measure_acceptance(at.target, at.drafter, none), ("prompts", str(none), "at least one")
    ) for none in ([], None)},
    **{f"a prompt {type(each).__name__}": Refusal(
        lambda at, each=each: measure_acceptance(at.target, at.drafter, [each]),
            (type(each).__name__, "expected", "[1, seq]")
    ) for each in ("hello", 4, BatchEncoding({"input_ids": prompt(3)}))},
    "two prompts in one": Refusal(
        lambda at: measure_acceptance(at.target, at.drafter, [torch.ones(2, 5, dtype=torch.long)]),
            ("[2, 5]", "[1, seq]")
    ),
    "room for no round": Refusal(
        lambda at: measure_acceptance(at.target, at.drafter, [prompt(5)], max_new_tokens=2),
            ("max_new_tokens", "2", "at least 3")
    ),
    "more drafts than there are": Refusal(
        lambda at: measure_acceptance(at.target, at.drafter, [prompt(5)], num_assistant_tokens=99), ("99",)
    ),
    **{f"{count} drafts": Refusal(lambda at,
        count=count: Local(at.target, at.drafter, {"num_assistant_tokens": count}), (str(count),))
       for count in (0, 99)},
    "a tree of nothing": Refusal(lambda at: Local(at.target, at.drafter, {"tree_budget": 0}),
        ("tree_budget", "0", "expected")),
    # Learning while serving
    "a drafter that cannot learn": Refusal(
        lambda at: DeepseekV4MTPDrafter(at.target.config).adapt(at.target), ("DeepseekV4MTPDrafter", "cannot learn")
    ),
    "one without weights": Refusal(lambda at: PromptLookupDrafter(at.target).adapt(at.target),
        ("PromptLookupDrafter", "cannot learn")),
    "one of another target": Refusal(lambda at: tiny_drafter(tiny_target(hidden_size=48)).adapt(at.target),
        ("hidden_size",)),
    "heads that there are not": Refusal(lambda at: at.drafter.adapt(at.target, arms="heads"), ("heads", "no heads")),
    "learning twice": Refusal(
        lambda at: (at.drafter.adapt(at.target), at.drafter.adapt(at.target)), ("learns already", "stop()")
    ),
    **{f"adapting with {name} {value}": Refusal(
        lambda at, given={name: value}: at.drafter.adapt(at.target, **given), (f"`{name}`", expected))
       for name, value, expected in (
        ("policy", "sometimes", "bandit"), ("recipe", "none", "ours"), ("arms", (), "heads"),
            ("arms", ("tail",), "heads"),
        ("every", 0, "0"), ("steps", 1.5, "1.5"), ("rows", -1, "-1"), ("num_anchors", True, "True"),
            ("horizon", 0, "0"),
        ("most_bytes", 0, "0"), ("seed", "1", "1"), ("learning_rate", 0, "0"), ("learning_rate", math.inf, "inf"),
        ("arm", "all", "arms"))},
}  # fmt: skip


@pytest.fixture
def at(tmp_path, target):
    return SimpleNamespace(folder=tmp_path, target=target, drafter=tiny_drafter(target))


@refused(TRAINER)
def test_training_is_refused_in_one_line(refusal, at):
    refusal.check(at)
    assert not list(at.folder.rglob("*.safetensors")) or (at.folder / "saved").exists()


# Feature caches

CACHED = [(4,), (9,), (5, 12)]
usage = namedtuple("usage", "total used free")


def write(at, rows=None, target=None, **kwargs):
    return FeatureCache.write(at.folder, rows or packed_rows(CACHED), target or at.target, **kwargs)


def edited(edit):
    rows = packed_rows(CACHED)
    edit(rows)
    return rows


def column(name, place, value):
    return lambda row: row[name].__setitem__(place, value)


MALFORMED = {
    "no mask": (lambda row: row.pop("loss_mask"), ("Row 1", "loss_mask", "missing")),
    "a short mask": (lambda row: row["loss_mask"].pop(), ("Row 1", "[8]", "one length")),
    "nothing": (lambda row: [values.clear() for values in row.values()], ("Row 1", "at least 1")),
    "an id too large": (column("input_ids", 0, 64), ("Row 1", "64", "vocabulary of 64")),
    "an id below 0": (column("input_ids", 0, -100), ("Row 1", "-100")),
    "a mask of -100": (column("loss_mask", 0, -100), ("Row 1", "loss_mask", "-100")),
    "a mask of 2": (column("loss_mask", 0, 2), ("Row 1", "loss_mask", "to 2")),
    "a first position": (column("position_ids", 0, 1), ("row 1", "position_ids")),
    "a position again": (column("position_ids", 5, 4), ("row 1", "position_ids")),
    "a last position": (column("position_ids", -1, 7), ("row 1", "position_ids")),
}
OVERFLOWS = {"of one document": 1, "of several": 2}


def overflowing(at, place):
    at.target.model.embed_tokens.weight.data[5] = torch.inf
    data = packed_rows(CACHED)
    for row in data:
        row["input_ids"] = [token if token != 5 else 6 for token in row["input_ids"]]
    data[place]["input_ids"][-1] = 5
    write(at, data, shard_size=1)


GPT2 = GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=2)
CACHES = {
    **{f"rows with {name}": Refusal(lambda at, edit=edit: write(at, edited(lambda rows: edit(rows[1]))), words)
       for name, (edit, words) in MALFORMED.items()},
    "no rows": Refusal(lambda at: FeatureCache.write(at.folder, [], at.target), ("empty",)),
    "a stream": Refusal(
        lambda at: write(at, Dataset.from_list(packed_rows(CACHED)).to_iterable_dataset()),
            ("IterableDataset", "streaming")
    ),
    "another number format": Refusal(lambda at: write(at, dtype="int8"), ("'int8'", "'bfloat16'")),
    **{f"infinities {name}": Refusal(lambda at, place=place: overflowing(at, place), (f"row {place}", "not finite"))
       for name, place in OVERFLOWS.items()},
    "another model": Refusal(lambda at: write(at, target=GPT2LMHeadModel(GPT2)), ("gpt2", "expected", "DeepSeek-V4")),
    "a digest of another model": Refusal(lambda at: target_fingerprint(GPT2LMHeadModel(GPT2)), ("gpt2", "expected")),
    "a digest without values": Refusal(lambda at: target_fingerprint(at.target.to("meta")), ("embed_tokens", "meta")),
    "nothing in the folder": Refusal(lambda at: FeatureCache(at.folder, at.target),
        ("No feature cache", "FeatureCache.write")),
    **{f"a target {wrong}": Refusal(lambda at, wrong=wrong: FeatureCache(at.folder, wrong),
        ("target", repr(wrong)[:4]))
       for wrong in ("org/name", None)},
    "no folder": Refusal(lambda at: FeatureCache(None, at.target), ("directory", "None", "expected")),
    "no folder to write": Refusal(lambda at: FeatureCache.write(None, packed_rows(CACHED), at.target),
        ("directory", "None")),
}  # fmt: skip


@refused(CACHES)
def test_a_cache_is_refused_in_one_line_before_anything_is_written(refusal, at):
    refusal.check(at)
    assert not list(at.folder.iterdir()) or "not finite" in refusal.words


def other_target(**fields):
    return lambda at: write(at, target=tiny_target(**fields))


def renamed(at):
    other = tiny_target(1)
    other.config._name_or_path = "org/two"
    FeatureCache(at.folder, other)


def retrained(at):
    at.target.model.layers[1].mlp.experts.gate_up_proj.data.view(-1)[1001] += 1e-6
    write(at)


def without_its_layers(at):
    other = tiny_target(1)
    other.model.layers = torch.nn.ModuleList()
    FeatureCache(at.folder, other)


def list_of(at):
    return next(at.folder.glob("features-*.json"))


def spoiled(written):
    def call(at):
        list_of(at).write_bytes(written)
        FeatureCache(at.folder, at.target)

    return call


def damaged(damage):
    def call(at):
        damage(sorted(at.folder.glob("*.safetensors"))[1])
        FeatureCache(at.folder, at.target)

    return call


def incomplete_without_layers(at):
    sorted(at.folder.glob("*.safetensors"))[0].unlink()
    at.target.model.layers = torch.nn.ModuleList()
    write(at)


DAMAGED = ("damaged", "again")
MIXED = {
    "another target": Refusal(renamed, ("another target", "org/two", "head weights", "body weights")),
    "one other value": Refusal(retrained, ("another target", "body weights")),
    "another head alone": Refusal(without_its_layers, ("another target", "head weights")),
    **{f"another {field}": Refusal(other_target(**{field: value}), ("another target", field, str(value))) for field,
        value in (
        ("rope_theta", 20_000.0), ("sliding_window", 9), ("swiglu_limit", 8.0), ("rms_norm_eps", 1e-5),
            ("index_topk", 3),
        ("hc_sinkhorn_iters", 5), ("a_field_of_models_to_come", 1))},
    "more layers": Refusal(lambda at: write(at, target_layer_ids=[1, -1]), ("[-1]", "[1, -1]")),
    "more layers, opened": Refusal(lambda at: FeatureCache(at.folder, at.target).select_layers([0]), ("[-1]", "[0]")),
    "another number format": Refusal(lambda at: write(at, dtype="float8"), ("dtype", "bfloat16", "float8")),
    **{f"other {name}": Refusal(lambda at, edit=edit: write(at, edited(edit), shard_size=1),
        ("other data", "another directory"))
       for name, edit in (
        ("tokens", lambda rows: column("input_ids", 5, 3)(rows[2])),
            ("masks", lambda rows: column("loss_mask", 0, 1)(rows[0])),
        ("packing", lambda rows: rows[1]["position_ids"].__setitem__(slice(4, 9), range(5))), ("number", list.pop))},
    "damaged JSON": Refusal(spoiled(b'{"version": 3, "identi'), DAMAGED),
    "no text": Refusal(spoiled(b"\x93\xff\x00"), DAMAGED),
    "an earlier format": Refusal(spoiled(b'{"version": 1}'), ("version 1", "3")),
    "no list": Refusal(spoiled(b"[]"), DAMAGED),
    "another list": Refusal(spoiled(b'{"weight_map": {}}'), DAMAGED),
    "a list without parts": Refusal(spoiled(b'{"version": 3}'), DAMAGED),
    "an earlier release": Refusal(
        lambda at: (list_of(at).rename(at.folder / "features.json"), FeatureCache(at.folder, at.target)),
            ("features.json", "earlier release")
    ),
    **{f"{name} part": Refusal(damaged(damage), ("unfinished", "1 of 3", "FeatureCache.write")) for name, damage in (
        ("a cut", lambda path: os.truncate(path, 100)), ("half a", lambda path: os.truncate(path, 2000)),
            ("no", os.unlink))},
    "no layers to run": Refusal(incomplete_without_layers, ("no layers", "num_hidden_layers=0")),
}  # fmt: skip


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cache")
    FeatureCache.write(folder, packed_rows(CACHED), tiny_target(), shard_size=1)
    return folder


@refused(MIXED)
def test_a_cache_of_something_else_is_refused_and_left_as_it_is(refusal, at, cache):
    at.folder = shutil.copytree(cache, at.folder / "cache")
    before = {path.name: path.read_bytes() for path in cache.glob("*.safetensors")}
    refusal.check(at)
    for path in at.folder.glob("*.safetensors"):
        assert path.read_bytes() == before[path.name] or "unfinished" in refusal.words


def test_a_disk_without_room_for_features_is_told_before_writing(at, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9, 64 * 2**20 + 2_000))
    Refusal(lambda: write(at), ("kB more", "67.1 MB", "float8", "online")).check()
    assert not list(at.folder.glob("*.safetensors")) and not list(at.folder.glob("*.json"))
    write(at, packed_rows([(4,)]))  # fits
