"""What training refuses: rows, templates, arguments, flags, targets, caches, checkpoints. What must be so beside the
message (nothing was written, what is there stays) is asserted here, too."""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
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

from hf_hyperdflash import HyperDFlashTrainer, HyperDFlashTrainingArguments, PromptLookupDrafter
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
from ..helpers.chats import CALL, LINES, WORDY, chat, templated
from ..helpers.medusa import medusa
from ..helpers.refusals import Refusal
from ..helpers.tokenizers import JoiningPieces
from ..helpers.training import packed_rows, rows, trainer_for
from ..training.test_messages import CONVERSATIONS, EXCHANGES, FORMS, GPT, HUMAN, OFF, A, Q

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


# Chat templates, tokenizers and data

OPENS_REASONING = (  # as DeepSeek-R1's: the generation prompt opens reasoning that the rendered answer does not have
    "{% for m in messages %}{{ m.role + ':' + m.content + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:<think>\n' }}{% endif %}"
)
TAGGED = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
CALLING = "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}{% endfor %}"
ASKING = "{% for m in messages %}{{ raise_exception(m.content) if m.role == 'user' }}{{ m.content }}{% endfor %}"
RAISING = {
    "raise_exception('Roles must\n alternate')": "Roles must alternate", "messages[0].absent.more": "absent",
    "messages[0].content + 1": "TypeError", "1 / 0": "ZeroDivisionError", "strftime_now(3)": "TypeError",
}  # fmt: skip
PLACED, JUDGE = {**GOOD, "_place": "rows.jsonl:7"}, {"messages": [{"role": "judge", "content": "q"}]}
TOKENS = Dataset.from_list([{"input_ids": [1, 2, 3, 4], "loss_mask": [0, 1, 1, 0]}])
PACKED = Dataset.from_list([{"input_ids": [1] * 4, "loss_mask": [0, 1, 1, 0], "position_ids": [0, 1, 0, 1]}])
LETTERS = [*({"messages": chat(letter, "a")} for letter in "abcdefghijk"), {"messages": [A]}]


def encoded(words, template, *turns):
    tokenizer = JoiningPieces() if template is WORDY else "bytes"
    return Refusal(lambda: encode_chat(templated(template, tokenizer), chat(*(turns or ("hi", "so")))), words)


def prompted(words, template, *rows, **options):
    return Refusal(lambda: encode_prompts(templated(template), list(rows), **options), words)


def prepared(words, data, template=None, tokenized=True, **options):
    tokenizer = None if template is None and tokenized else templated(template)
    return Refusal(lambda: prepare_dataset(data, tokenizer, **{"max_length": 20, **options}), words)


def raising(expression, why):
    """Whatever a template raises is a line with its row, by each of the calls that render."""
    for tags in (0, 1):
        text = "{{ " + expression + " }}" + "{% generation %}{% endgeneration %}" * tags
        yield f"{expression}, encoded, {tags}", encoded((why, "chat template"), text)
        yield f"{expression}, prompted, {tags}", prompted((why, "rows.jsonl:7"), text, PLACED)
        yield f"{expression}, prepared, {tags}", prepared((why, "rows.jsonl:7"), [PLACED], text)


def called(arguments):
    return {**CALL, "tool_calls": [{"function": {"name": "add", "arguments": arguments}}]}


DATA = {
    "a prompt that opens reasoning": encoded(("<think>", "{% generation %}"), OPENS_REASONING),
    "no template": encoded(("no chat template", "--chat-template"), None),
    "tags without answers": encoded(("2 answers", "8 blocks"), TAGGED * 2, "q", {**A, "train": False}, "q", "a"),
    "tokens that join words": encoded(("JoiningPieces", "assistant: ", "so"), WORDY),
    **{f"arguments {text}": encoded((text, "expected", "dictionary"), CALLING, "q", called(text))
       for text in ("{", "add", "[1]", '"{}"', "3")},
    **{name: refusal for expression, why in RAISING.items() for name, refusal in raising(expression, why)},
    "prompts of texts": prompted(("Row 0", "'hello'", "expected"), LINES, "hello"),
    "a prompt that asks nothing": prompted(("Row 0", "asks nothing"), LINES, {"messages": [A]}),
    "none of some prompts": prompted(("Row 0", "asks nothing"), LINES, {"messages": [A]}, {"messages": [A]},
        at_most=1),
    "prompts without a template": prompted(("--chat-template",), None, GOOD),
    "half a character": prompted(("Row 0", "\\ud83d"), LINES, {"turns": ["\ud83d"]}),
    "rows without a template": prepared(("The tokenizer", "no chat template"), [GOOD], tokenized=False),
    "room for no block": prepared(("max_length=1", "2"), [GOOD], LINES, max_length=1),
    "several datasets": prepared(("train", "Choose"), DatasetDict({"train": TOKENS})),
    "no tokenizer": prepared(("messages", "tokenizer"), [GOOD]),
    **{f"a dataset {what}": prepared((what,), data, LINES)
       for data, what in ((5, "int"), ([5], "list"), ([], "empty"), (TOKENS.select([]), "empty"))},
    "another mask": prepared(("2 input_ids", "1"), [{"input_ids": [1, 2], "loss_mask": [1]}]),
    "neighbours of two documents": prepared(("1 of 1", "row 0"), PACKED),
    "a packed row that is too long": prepared(("4 tokens", "max_length=3"), PACKED, max_length=3),
    **{f"ids {ids}": prepared(("Row 0", *words), [{"input_ids": ids, "loss_mask": [1, 1]}], vocab_size=64)
       for ids, words in (([1, 64], ("64", "below 64")), ([1, -2], ("-2", "below 64")),
           ([1, None], ("nothing at 1",)))},
    "nobody answers": prepared(("2 rows", "turns", "answers`"), [{"turns": ["a"]}, {"turns": ["b"]}], LINES),
    "nobody answers a stream": prepared(
        ("1,000", "turns"), Dataset.from_list([{"turns": ["a"]}]).to_iterable_dataset(), LINES),
    "nothing left to train on": prepared(
        ("2 rows", "2 answers", "`train`"), [{"messages": [A, Q, OFF]}, {"messages": [Q, OFF]}], LINES),
    "the most frequent reason": prepared(("2 of 3", "row 0", "judge"), [JUDGE, JUDGE, GOOD | {"images": ["a"]}],
        LINES),
    "a few reasons of many": prepared(("3 of 12", "(i)"), LETTERS, ASKING),
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
    "a damaged document": (b'{\n"question": "q"}\n\n{\n"answer":}\n', (":5", "column 10")),
    "a document in latin-1": ('[{"question": "q"},\n{"question": "é"}]'.encode("latin-1"), (":2", "UTF-8")),
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
    monkeypatch.setattr("hf_hyperdflash.hub.loading.load_target", lambda *_, **__: pytest.fail("it was loaded"))
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
ON = f"--drafter {MODELS / 'tiny-deepseek-v4-hyperdflash'}"
FLAGS = {
    "--stage 2": ("drafter",),
    "--lora_rank 8": ("lora_rank", "8", "--drafter"),
    f"--lora_rank 0 {ON}": ("lora_rank", "0", "at least 1"),
    f"--lora_rank 8 {ON} --num_draft_tokens 3": ("num_draft_tokens", "lora_rank"),
    "--stage 3": ("stage", "3"),
    "--stage x": ("stage", "'x'"),
    "--kl_weight x": ("kl_weight", "'x'"),
    "--output_dir": ("output_dir", "expected", "train --help"),
    "--learning_rat 1": ("'--learning_rat'", "--learning_rate"),
    "--target_dtype float7": ("target_dtype", "'float7'", "expected"),
    "--target_dtype int8": ("target_dtype", "'int8'", "expected"),
    "--save_dtype nn": ("save_dtype", "'nn'", "expected"),
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
    "--rows 0": ("rows", "0", "at least 1"),
    "--confidence_weight 0.5": ("confidence_weight", "confidence_head"),
    "--blind_weight 0.5": ("blind_weight", "sequential_head"),
    "--block_first 0.5": ("block_first", "0.5", "sequential_head"),
    "--block_first -1": ("block_first", "-1", "at least 0"),
    "--causal_layers some": ("causal_layers", "'some'", "none", "all"),
    "--dataset nowhere.jsonl": ("nowhere.jsonl",),
    f"{ON} --draft_vocab_size 0": ("--draft_vocab_size 0", "--drafter"),
    f"{ON} --layers 2": ("layers",),
    "--reducer foo": ("reducer", "'foo'", "hc_gate", "stream_mean"),
    "--sequential_head foo": ("sequential_head", "'foo'", "none", "markov"),
    "--chat_template nowhere.jinja": ("'nowhere.jinja'", "no such file"),
    "--max_length 6": ("max_length", "6", "num_draft_tokens"),
    "--max_length 8 --num_draft_tokens 8": ("max_length", "8", "num_draft_tokens"),
    "--resume_from_checkpoint true": ("No checkpoint", "out"),
    "--overwrite_output_dir true --resume_from_checkpoint true": ("overwrite_output_dir", "resume_from_checkpoint"),
}


TOKENIZED = [{"input_ids": [1, 2, 3, 4], "loss_mask": [1] * 4}] * 5
OTHERS = [*TOKENIZED, {"input_ids": [1, 2048], "loss_mask": [1, 1]}]
SAID = [{"question": f"{n}: what?", "answer": "it is this, my friend."} for n in range(6)]
ASKED = [{"turns": ["What?"]}] * 6
COMMANDS = {  # what is written into files, flags that name them, and words
    **{given: ({}, given, words) for given, words in FLAGS.items()},
    "a template with a fault": ({"bad": b"a\n{% if %}"}, "--chat_template bad", ("--chat_template", "bad", "line 2")),
    "a template with a tag alone": ({"bad": b"{% generation %}"}, "--chat_template bad", ("bad", "Jinja")),
    "a template in Latin-1": ({"bad": b"\xe9"}, "--chat_template bad", ("bad", "UTF-8")),
    "too few rows": ({"rows.jsonl": SAID}, "--eval_rows 64", ("rows.jsonl", "6 rows", "64")),
    "prompts of tokens": ({"rows.jsonl": TOKENIZED}, "", ("tokenized", "eval_prompts")),
    "tokens of another tokenizer": (
        {"rows.jsonl": OTHERS, "good.jsonl": TOKENIZED}, "--eval_prompts 0 --eval_dataset good.jsonl",
        ("rows.jsonl:6", "2048"),
    ),
    "longer than the target": ({"rows.jsonl": SAID}, "--max_length 4096", ("max_length", "4096", "2048")),
    "rows that ask": ({"rows.jsonl": ASKED}, "", ("4 rows", "rows.jsonl:", "['turns']")),
    "heads for a drafter that has some": ({"rows.jsonl": SAID}, f"{ON} --sequential_head state", ("has one already",)),
    "another vocabulary for all": ({"rows.jsonl": SAID}, f"{ON} --draft_vocab_size 40", ("LM head", "expected")),
}  # fmt: skip


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_is_refused_in_one_line_and_leaves_nothing(name, tmp_path, monkeypatch):
    for device in ("cuda", "accelerator"):
        monkeypatch.setattr(f"torch.{device}.is_available", lambda: False)
    monkeypatch.chdir(tmp_path)
    files, given, words = COMMANDS[name]
    for file, lines in files.items():
        content = lines if isinstance(lines, bytes) else "\n".join(map(json.dumps, lines)).encode()
        (tmp_path / file).write_bytes(content)
    Refusal(lambda: train([*flags(tmp_path, "rows.jsonl", eval_rows=2), *given.split()]), words).check()
    out = tmp_path / "out"
    assert not out.exists() or (files and not list(out.iterdir()))


def test_a_folder_that_cannot_be_written_and_flags_that_are_missing_or_unknown_are_told(tmp_path, monkeypatch):
    for missing in ("target", "output_dir"):
        Refusal(lambda missing=missing: train(flags(tmp_path, **{missing: None})), (f"--{missing}",)).check()
    monkeypatch.setattr("os.access", lambda path, mode: str(path) != str(tmp_path))  # root may write everywhere
    Refusal(lambda: train(flags(tmp_path)), ("output_dir", "out", "cannot be written to")).check()
    done = CliRunner().invoke(app, ["train", "--target", "x", "--output_dir", "y", "--learning-rat=1", "1"])
    assert "--learning-rat=1" in str(done.exception) and "--learning-rate" in str(done.exception).replace("_", "-")


# The trainer, acceptance by hand, and learning while serving: what is given, where functions are of `at`, and words


def broken(model, name, value):
    model.get_parameter(name).data.view(-1)[3] = value
    return model


def without_layers(at):
    at.target.save_pretrained(at.folder / "saved")
    return AutoModelForCausalLM.from_pretrained(at.folder / "saved", num_hidden_layers=0, dtype=torch.float32)


def tiny(**fields):
    return lambda at: tiny_drafter(at.target, **fields)


CHOOSES = dict(draft_vocab_size=8, sequential_head="markov", head_rank=4, head_candidates=4)
SAVES = dict(eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=1, load_best_model_at_end=True)
SAVES |= dict(held_out=rows(2))
SILENT = Dataset.from_list([{"input_ids": [3, 4, 5], "loss_mask": [0] * 3}] * 3)
STREAMED = rows(2).to_iterable_dataset()
TRAINER = {
    "no drafter": (dict(drafter=lambda at: at.target), ("DeepseekV4", "expected", "HyperDFlashDrafter")),
    "another target": (dict(target=lambda at: tiny_target(vocab_size=32), drafter=tiny()), ("vocab_size", "64", "32")),
    "more positions than a block": (dict(kl_positions=7), ("kl_positions", "7")),
    "no confidence head": (dict(confidence_weight=1.0), ("confidence_weight", "1.0", "confidence_head")),
    "no head to go over to": (dict(block_first=0.5), ("block_first", "0.5", "sequential_head")),
    "no candidates": (dict(blind_weight=1.0), ("blind_weight", "1.0", "head_candidates")),
    "candidates of some": (dict(drafter=tiny(**CHOOSES)), ("draft_vocab_size", "8", "head_candidates", "4")),
    "a stream to cache": (dict(data=STREAMED, feature_source="cached"), ("cached", "streaming")),
    "no evaluation rows": (dict(feature_source="cached", eval_strategy="steps"), ("eval_dataset",)),
    "nothing to train on": (dict(data=SILENT), ("3 of 3", "loss_mask")),
    "longer than the target": (dict(max_length=1025), ("max_length", "1025", "1024")),
    "a target without layers": (dict(target=without_layers, drafter=tiny()), ("no layers", "cached")),
    **{f"a drafter with {value}": (
        dict(drafter=lambda at, value=value: broken(tiny_drafter(at.target), "norm.weight", value)),
        ("drafter", "not finite", "norm.weight")) for value in (math.nan, math.inf, -math.inf)},
    "a broken target": (
        dict(target=lambda at: broken(at.target, "lm_head.weight", math.inf)), ("target", "not finite", "lm_head")),
    "no vocabulary to choose": (dict(then=["choose_vocabulary"]), ("draft_vocab_size", "0", "at least 1")),
    "a vocabulary of a stream": (
        dict(drafter=tiny(draft_vocab_size=4), data=STREAMED, then=["choose_vocabulary"]),
            ("Iterable", "known length")),
    "another metric": (dict(metric_for_best_model="nothing", then=["train"], **SAVES), ("'nothing'", "expected tau")),
    "a metric of nobody": (dict(metric_for_best_model="eval_tau", then=["train"], **SAVES), ("AcceptanceCallback",)),
    "no checkpoint": (dict(then=["train", True]), ("No checkpoint", "resume_from_checkpoint")),
    "no such checkpoint": (dict(then=["train", "nowhere"]), ("'nowhere'", "no such folder")),
}  # fmt: skip


@pytest.fixture
def at(tmp_path, target):
    return SimpleNamespace(folder=tmp_path, target=target, drafter=tiny_drafter(target))


@pytest.mark.parametrize("name", TRAINER)
def test_a_trainer_is_refused_in_one_line_before_any_work(name, at):
    given, words = TRAINER[name]
    given = {key: value(at) if callable(value) else value for key, value in given.items()}
    (then, *wanted), target = given.pop("then", [None]), given.pop("target", at.target)
    drafter, data = given.pop("drafter", None) or tiny_drafter(target), given.pop("data", rows(2))

    def call():
        trainer = trainer_for(at.folder, target, drafter, data, given.pop("held_out", None), **given)
        getattr(trainer, then)(*wanted)

    Refusal(call, words).check()
    assert not list(at.folder.rglob("features-*")) and not list(at.folder.glob("checkpoint-*"))


def measured(words, *prompts, **options):
    prompts = prompts and list(prompts)
    return Refusal(
        lambda at: measure_acceptance(at.target, at.drafter, prompts or options.pop("none"), **options), words
    )


def locally(words, **options):
    return Refusal(lambda at: Local(at.target, at.drafter, options), words)


def adapted(words, *options):
    return Refusal(lambda at: at.drafter.adapt(at.target, **dict(options)), words)


def plain(words, *args, **kwargs):
    return Refusal(lambda at: HyperDFlashTrainer(at.drafter, at.target, *args, **kwargs), words)


ARGS = HyperDFlashTrainingArguments("unused", use_cpu=True)
CALLS = {
    "another tokenizer": plain(("vocabulary 64",), ARGS, processing_class=AutoTokenizer.from_pretrained(TINY)),
    "a name of a tokenizer": plain(("processing_class", "str", "expected"), processing_class="x"),
    "other arguments": plain(("TrainingArguments", "HyperDFlashTrainingArguments"), TrainingArguments("unused")),
    "no prompts": measured(("prompts", "[]", "at least one"), none=[]),
    "None": measured(("prompts", "None", "at least one"), none=None),
    **{f"a prompt {type(each).__name__}": measured((type(each).__name__, "expected", "[1, seq]"), each)
       for each in ("hello", 4, BatchEncoding({"input_ids": prompt(3)}))},
    "two prompts in one": measured(("[2, 5]", "[1, seq]"), torch.ones(2, 5, dtype=torch.long)),
    "room for no round": measured(("max_new_tokens", "2", "at least 3"), prompt(5), max_new_tokens=2),
    "no prompts to call back": Refusal(lambda at: AcceptanceCallback(at, []), ("prompts", "[]")),
    "too few tokens": Refusal(lambda at: AcceptanceCallback(at, [prompt(9)], max_new_tokens=1),
        ("max_new_tokens", "1")),
    **{f"{count} drafts": locally((str(count),), num_assistant_tokens=count) for count in (0, 99)},
    "a tree of nothing": locally(("tree_budget", "0", "expected"), tree_budget=0),
    "heads that there are not": adapted(("heads", "no heads"), ("arms", "heads")),
    **{f"adapting with {name} {value}": adapted((f"`{name}`", expected), (name, value)) for name, value, expected in (
        ("policy", "sometimes", "bandit"), ("recipe", "none", "ours"), ("arms", (), "heads"),
            ("arms", "tail", "heads"),
        ("every", 0, "0"), ("steps", 1.5, "1.5"), ("rows", -1, "-1"), ("num_anchors", True, "True"),
            ("horizon", 0, "0"),
        ("max_bytes", 0, "0"), ("seed", "1", "1"), ("learning_rate", 0, "0"), ("learning_rate", math.inf, "inf"),
        ("arm", "all", "arms"))},
    "a drafter that cannot learn": Refusal(
        lambda at: medusa(width=32).adapt(at.target), ("MedusaDrafter", "cannot learn")),
    "one without weights": Refusal(lambda at: PromptLookupDrafter(at.target).adapt(at.target), ("PromptLookup",)),
    "one of another target": Refusal(
        lambda at: tiny_drafter(tiny_target(hidden_size=48)).adapt(at.target), ("hidden_size",)),
    "learning twice": Refusal(
        lambda at: (at.drafter.adapt(at.target), at.drafter.adapt(at.target)), ("learns already", "stop()")),
}  # fmt: skip


@refused(CALLS)
def test_a_call_is_refused_in_one_line(refusal, at):
    refusal.check(at)


# Feature caches

CACHED, GPT2 = [(4,), (9,), (5, 12)], GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=2)


def write(at, edit=lambda rows: None, target=None, **kwargs):
    rows = packed_rows(CACHED)
    edit(rows)
    return FeatureCache.write(at.folder, rows, target or at.target, **{"shard_size": 1, **kwargs})


def put(row, column, place, value):
    return lambda rows: rows[row][column].__setitem__(place, value)


def overflow(row):
    def edit(rows):
        for each in rows:
            each["input_ids"] = [token if token != 5 else 6 for token in each["input_ids"]]
        rows[row]["input_ids"][-1] = 5

    def call(at):
        at.target.model.embed_tokens.weight.data[5] = torch.inf
        write(at, edit)

    return call


MALFORMED = {
    "no mask": (lambda rows: rows[1].pop("loss_mask"), ("Row 1", "'loss_mask': [0]", "one length")),
    "a short mask": (lambda rows: rows[1]["loss_mask"].pop(), ("Row 1", "[8]", "one length")),
    "nothing": (lambda rows: [values.clear() for values in rows[1].values()], ("Row 1", "at least 1")),
    "an id too large": (put(1, "input_ids", 0, 64), ("Row 1", "to 64", "0 to 63")),
    "an id below 0": (put(1, "input_ids", 0, -100), ("Row 1", "-100")),
    "a mask of -100": (put(1, "loss_mask", 0, -100), ("Row 1", "loss_mask", "-100")),
    "a mask of 2": (put(1, "loss_mask", 0, 2), ("Row 1", "loss_mask", "to 2")),
    "a first position": (put(1, "position_ids", 0, 1), ("row 1", "position_ids")),
    "a position again": (put(1, "position_ids", 5, 4), ("row 1", "position_ids")),
    "a last position": (put(1, "position_ids", -1, 7), ("row 1", "position_ids")),
    "no rows": (list.clear, ("empty",)),
}
CACHES = {
    **{f"rows with {name}": Refusal(lambda at, edit=edit: write(at, edit), words)
       for name, (edit, words) in MALFORMED.items()},
    "a stream": Refusal(lambda at: FeatureCache.write(at.folder, STREAMED, at.target),
        ("IterableDataset", "streaming")),
    "another number format": Refusal(lambda at: write(at, dtype="int8"), ("'int8'", "'bfloat16'")),
    "infinities in one document": Refusal(overflow(1), ("row 1", "not finite")),
    "infinities in the last of several": Refusal(overflow(2), ("row 2", "not finite")),
    "another model": Refusal(lambda at: write(at, target=GPT2LMHeadModel(GPT2)), ("gpt2", "expected", "DeepSeek-V4")),
    "a digest of another model": Refusal(lambda at: target_fingerprint(GPT2LMHeadModel(GPT2)), ("gpt2", "expected")),
    "a digest without values": Refusal(lambda at: target_fingerprint(at.target.to("meta")), ("embed_tokens", "meta")),
    "no cache": Refusal(lambda at: FeatureCache(at.folder, at.target), ("No feature cache", "FeatureCache.write")),
    **{f"a target {wrong}": Refusal(lambda at, wrong=wrong: FeatureCache(at.folder, wrong),
        ("target", repr(wrong)[:4]))
       for wrong in ("org/name", None)},
}  # fmt: skip


@refused(CACHES)
def test_a_cache_is_refused_in_one_line_before_anything_is_written(refusal, at):
    refusal.check(at)
    assert not list(at.folder.iterdir()) or "not finite" in refusal.words


def renamed(at):
    other = tiny_target(1)
    other.config._name_or_path = "org/two"
    FeatureCache(at.folder, other)


def retrained(at):
    at.target.model.layers[1].mlp.experts.gate_up_proj.data.view(-1)[1001] += 1e-6
    write(at)


def another_head(at):
    other = tiny_target(1)
    other.model.layers = torch.nn.ModuleList()
    FeatureCache(at.folder, other)


def incomplete_without_layers(at):
    next(at.folder.glob("*.safetensors")).unlink()
    at.target.model.layers = torch.nn.ModuleList()
    write(at)


def after(pattern, spoil):
    """Open it after a file was spoiled."""

    def call(at):
        spoil(sorted(at.folder.glob(pattern))[-1])
        FeatureCache(at.folder, at.target)

    return call


def listing(text):
    return after("features-*.json", lambda path: path.write_bytes(text))


FIELDS = {"rope_theta": 20_000.0, "sliding_window": 9, "swiglu_limit": 8.0, "rms_norm_eps": 1e-5, "index_topk": 3,
          "hc_sinkhorn_iters": 5, "a_field_of_models_to_come": 1}  # fmt: skip
OTHER_ROWS = {
    "tokens": put(2, "input_ids", 5, 3), "number": list.pop,
    "packing": put(1, "position_ids", slice(4, 9), range(5)),
}  # fmt: skip
DAMAGED, UNFINISHED = ("damaged", "again"), ("unfinished", "1 of 3", "FeatureCache.write")
MIXED = {
    "another target": Refusal(renamed, ("another target", "org/two", "head weights", "body weights")),
    "one other value": Refusal(retrained, ("another target", "body weights")),
    "another head alone": Refusal(another_head, ("another target", "head weights")),
    **{f"another {field}": Refusal(
        lambda at, given={field: value}: write(at, target=tiny_target(**given)), ("another target", field, str(value)))
       for field, value in FIELDS.items()},
    "more layers": Refusal(lambda at: write(at, target_layer_ids=[1, -1]), ("[-1]", "[1, -1]")),
    "other layers": Refusal(lambda at: FeatureCache(at.folder, at.target).select_layers([0]), ("[-1]", "[0]")),
    "another number format": Refusal(lambda at: write(at, dtype="float8"), ("dtype", "bfloat16", "float8")),
    **{f"other {name}": Refusal(lambda at, edit=edit: write(at, edit), ("other data", "another directory"))
       for name, edit in OTHER_ROWS.items()},
    "damaged JSON": Refusal(listing(b'{"version": 4, "identi'), DAMAGED),
    "no text": Refusal(listing(b"\x93\xff\x00"), DAMAGED),
    "an earlier format": Refusal(listing(b'{"version": 3}'), ("version 3", "4")),
    "no list": Refusal(listing(b"[]"), DAMAGED),
    "a list without parts": Refusal(listing(b'{"version": 4}'), DAMAGED),
    "a list without its rows": Refusal(after("*.rows", os.unlink), (".rows", "put it into the folder")),
    "an earlier release": Refusal(
        after("*.json", lambda path: path.with_name("features.json").write_text('{"version": 2}')),
            ("features.json", "version 2", "4")),
    "a cut part": Refusal(after("*.safetensors", lambda path: os.truncate(path, 100)), UNFINISHED),
    "half a part": Refusal(after("*.safetensors", lambda path: os.truncate(path, 2000)), UNFINISHED),
    "no part": Refusal(after("*.safetensors", os.unlink), UNFINISHED),
    "no layers to run": Refusal(incomplete_without_layers, ("no layers", "num_hidden_layers=0")),
}  # fmt: skip


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cache")
    write(SimpleNamespace(folder=folder, target=tiny_target()))
    return folder


@refused(MIXED)
def test_a_cache_of_something_else_is_refused_and_left_as_it_is(refusal, at, cache):
    at.folder = shutil.copytree(cache, at.folder / "cache")
    before = {path.name: path.read_bytes() for path in cache.glob("*.safetensors")}
    refusal.check(at)
    left = {path.name: path.read_bytes() for path in at.folder.glob("*.safetensors")}
    assert left.items() <= before.items() or "unfinished" in refusal.words


def test_a_disk_without_room_for_features_is_told_before_writing(at, monkeypatch):
    usage = shutil.disk_usage(at.folder)._replace(free=64 * 2**20 + 2_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    Refusal(lambda: write(at), ("kB more", "67.1 MB", "float8", "online")).check()
    assert not list(at.folder.glob("*.safetensors")) and not list(at.folder.glob("*.json"))
    write(at, lambda rows: rows.__delitem__(slice(1, None)))  # fits
