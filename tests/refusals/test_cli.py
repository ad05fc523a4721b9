"""What a user of the command line gets wrong: the exit status, and one line with the value and what was expected."""

from __future__ import annotations

import json
import os
import shlex
import shutil
from pathlib import Path

import pytest

from hf_hyperdflash import HyperDFlashDrafter
from hf_hyperdflash.hub.kinds import KINDS

from ..conftest import MODELS, tiny_drafter, tiny_target
from ..helpers.commands import ended
from ..helpers.families import qwen3
from ..helpers.headed_drafters import headless
from ..helpers.unrolled import unrolled

TARGET, DRAFTER = MODELS / "tiny-deepseek-v4", MODELS / "tiny-deepseek-v4-hyperdflash"


def copied(source: Path, folder: Path, name: str, content: str | bytes | None = None) -> None:
    """A checkpoint one of whose files has another content, or is not there."""
    shutil.copytree(source, folder)
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)


@pytest.fixture(scope="module")
def wrong(tmp_path_factory):
    """A folder of things that are not what they are given as, beside a good target and its drafter."""
    folder = tmp_path_factory.mktemp("wrong")
    (folder / "target").symlink_to(TARGET)
    (folder / "drafter").symlink_to(DRAFTER)
    (folder / "file").write_text("x")
    for name in ("empty", "results", "adapter", "data", "mixed"):
        (folder / name).mkdir()
    (folder / "adapter" / "adapter_config.json").write_text("{}")
    for name, config in {
        "no-json": b"{", "a-list": b"[1]", "binary": b"\xff\xfe", "no-type": b"{}", "zlab": b'{"dflash_config": {}}',
        "unknown": b'{"model_type": "gpt99"}', "configured": b'{"model_type": "llama"}',
        "mtp": b'{"model_type": "deepseek_v4", "architectures": ["DeepseekV4MTPDrafter"]}',
        "wordy-mtp": b'{"architectures": ["DeepseekV4MTPDrafter"], "num_attention_heads": "four"}',
    }.items():  # fmt: skip
        (folder / name).mkdir()
        (folder / name / "config.json").write_bytes(config)
    weights, fields = "model.safetensors", json.loads((TARGET / "config.json").read_text())
    for name, source in {"target": TARGET, "drafter": DRAFTER}.items():
        copied(source, folder / f"cut-{name}", weights, (source / weights).read_bytes()[:5000])
        copied(source, folder / f"bare-{name}", weights)
    copied(TARGET, folder / "wide", "config.json", json.dumps(fields | {"hidden_size": 128}))
    copied(TARGET, folder / "wordy", "config.json", json.dumps(fields | {"num_attention_heads": "four"}))
    copied(TARGET, folder / "speechless", "tokenizer.json")
    (folder / "speechless" / "tokenizer_config.json").unlink()
    copied(TARGET, folder / "wordless", "tokenizer.json", "{}")
    copied(TARGET, folder / "untemplated", "chat_template.jinja", "{% for %}")
    (folder / "notes.md").write_bytes(b"\xff")
    (folder / "rows.jsonl").write_text('{"question": "What is 3 plus 4?", "answer": "7"}\n' * 3)
    (folder / "odd.jsonl").write_text('{"turns": ["What is 3 plus 4?"]}\n{"text": "Hi"}\n')
    (folder / "torn.jsonl").write_text('{"turns": ["What is 3 plus 4?"]}\n{"turns": ["Wh')
    (folder / "data" / "gsm8k.jsonl").write_text('{"turns": ["What is 3 plus 4?"]}\n')
    (folder / "mixed" / "mbpp.jsonl").write_text('{"turns": ["Hello?"]}\n')
    (folder / "mixed" / "mine.jsonl").write_text('{"turns": "Hello?"}\n')
    headless(HyperDFlashDrafter.from_pretrained(DRAFTER)).save_pretrained(folder / "blind")
    blind = json.loads((folder / "blind" / "config.json").read_text())
    copied(folder / "blind", folder / "confident", "config.json", json.dumps(blind | {"confidence_head": True}))
    unrolled("eagle3", tiny_target()).save_pretrained(folder / "eagle3")
    flat = tiny_drafter(qwen3(), reducer="fc", target_layer_ids=[0, 2], sliding_window=None, sample_from_anchor=True)
    flat.save_pretrained(folder / "flat")
    copied(folder / "flat", folder / "cut-flat", weights, (folder / "flat" / weights).read_bytes()[:5000])
    return folder


# What is said of a folder that is asked for, whichever command asks.
FOLDERS = {
    "no/where/at": ("no/where/at", "does not exist", "Hub id"),
    "no-org/no-model": ("no-org/no-model", "does not exist", "Hub id"),
    "'two words'": ("two words", "Hub id"),
    "' '": ("empty", "Hub id"),
    "file": ("file is a file", "a folder"),
    "empty": ("empty", "config.json"),
    "adapter": ("adapter", "PEFT", "whole"),
    "no-json": ("no-json/config.json", "JSON", "line 1, column 2"),
    "a-list": ("a-list", "list", "object"),
    "binary": ("binary/config.json", "UTF-8"),
}
TARGETS = {
    **FOLDERS,
    "no-type": ("no-type", "`model_type` None"),
    "unknown": ("unknown", "'gpt99'"),
    "configured": ("configured", "weights"),
    "drafter": ("drafter", "HyperDFlash drafter", "target"),
    "mtp": ("mtp", "MTP drafter", "target"),
    "zlab": ("zlab", "another program's layout", "target"),
    "cut-target": ("cut-target", "weights", "damaged"),
    "bare-target": ("bare-target", "weights"),
    "wordy": ("wordy", "'num_attention_heads'"),
    "speechless": ("speechless", "tokenizer"),
    "wordless": ("wordless", "tokenizer"),
    "untemplated": ("untemplated", "Jinja"),
}
DRAFTERS = {
    **FOLDERS,
    "no-type": ("no-type", "None", "a drafter"),
    "configured": ("configured", "'llama'", "a drafter"),
    "cut-target": ("cut-target", "damaged"),
    "bare-target": ("bare-target", "model.safetensors"),
    "cut-drafter": ("cut-drafter", "damaged"),
    "bare-drafter": ("bare-drafter", "weights"),
}
PAIR = "--target target --drafter drafter"
COMPARE = "benchmark --target target --suite gsm8k --data data --output out"
SWEEP = "sweep --target target --suite gsm8k --data data --output out"
TRAIN = "train --target target --dataset rows.jsonl --eval_rows 1 --output_dir out --use_cpu --report_to none"
ANSWERS = "answers --target target --output out.jsonl --data rows.jsonl"
CALIBRATE = "calibrate --target target --max-new-tokens 200 --data rows.jsonl --drafter"
NAMED = ("PATH", "NAME=PATH", '"NAME (4)=PATH"', "at least 1 draft")
SAVED_KINDS = (f"{KINDS[-2]} or {KINDS[-1]}",)

# The command, its exit status, and the words.
MISTAKES: list[tuple[str, int, tuple[str, ...]]] = [
    *((f"generate --target {name} --drafter drafter hi", 1, words) for name, words in TARGETS.items()),
    *((f"generate --target target --drafter {name} hi", 1, words) for name, words in DRAFTERS.items()),
    *((f"export {name} out", 1, words) for name, words in DRAFTERS.items() if name != "cut-drafter"),
    *((f"{command} --target wide", 1, ("`hidden_size` 256", "128"))
      for command in ("generate --drafter drafter hi", "doctor --drafter drafter", f"{TRAIN} --drafter drafter")),
    *((command, 1, FOLDERS["empty"])
      for command in ("card empty", "push empty org/name", f"{CALIBRATE} empty", f"{TRAIN} --drafter empty",
                      "doctor --target target --drafter empty", f"{COMPARE} --drafter X=empty")),
    *((f"{command} --target no/where/at", 1, FOLDERS["no/where/at"])
      for command in (TRAIN, ANSWERS, f"{CALIBRATE} confident", f"{COMPARE} --mtp 1")),
    *((f"{TRAIN} --target {name}", 1, TARGETS[name]) for name in ("mtp", "wordy", "wordless")),
    (f"{TRAIN} --target wide", 1, ("wide", "shapes")),
    # Kinds that a command is not for
    *((command, 1, SAVED_KINDS) for command in ("card zlab", "push target org/name")),
    *((f"export {name} out", 1, ("HyperDFlash",)) for name in ("mtp", "zlab", "target")),
    (f"{TRAIN} --drafter configured", 1, ("'llama'", "a drafter")),
    (f"{TRAIN} --drafter zlab", 1, ("zlab", "weights")),
    (f"{CALIBRATE} mtp", 1, ("mtp", "MTP", "HyperDFlash")),
    *((f"{CALIBRATE} {name}", 1, ("`confidence_head`", "False")) for name in ("blind", "eagle3")),
    ("card wordy-mtp --output out.md", 1, ("'num_attention_heads'",)),
    # What several commands ask
    *((f"generate {PAIR} hi {given}", 2, words) for given, words in {
        "--dtype float7": ("'float7'", "bfloat16"), "--threads -1": ("'--threads'", "'-1'"),
        "--threads two": ("'--threads'", "'two'", "integer"), "--temperature hot": ("'--temperature'", "'hot'"),
        "--temperature -1": ("-1.0", "0 (greedy)"), "--temperature nan": ("nan", "0 (greedy)"),
        "--temperature inf": ("inf", "0 (greedy)"), "--max-new-tokens 0": ("'--max-new-tokens'", "'0'"),
        "--seed -1": ("'--seed'", "'-1'"), "--tree-budget 1025": ("'1025'", "1024", "auto"),
        "--num-draft-tokens 0": ("'0'", "1 or above", "auto"), "--tree-budget many": ("'many'", "1 or above", "auto"),
        "--num-draft-tokens 2.5": ("'2.5'", "auto"), "there": ("extra argument",), "--colour red": ("--colour",),
    }.items()),
    *((f"generate {PAIR} hi {given}", 1, words) for given, words in {
        "--device-map cuda:77": ("`--device-map`", "'cuda:77'"), "--device-map toaster": ("'toaster'", "balanced"),
        "--num-draft-tokens 9": ("9 tokens", "from 1 to 8"),
    }.items()),
    # What one asks
    (f"generate {PAIR} ' '", 1, ("prompt", "empty")),
    (f"generate {PAIR} --adapter empty hi", 1, ("empty", "adapter_config.json")),
    *((f"{command} --adapter adapter", 1, ("--adapter", "prompt-lookup"))
      for command in ("generate --target target --drafter prompt-lookup hi",
                      "doctor --target target --drafter prompt-lookup", f"{COMPARE} --drafter prompt-lookup")),
    *((f"{command} --adapter empty", 1, ("empty", "adapter_config.json"))
      for command in (f"doctor {PAIR}", f"{COMPARE} --drafter drafter", "push drafter org/name", "export flat out")),
    *((f"{COMPARE} {given} --adapter adapter", 1, ("--adapter", "adaptive"))
      for given in ("--mtp 1", '--drafter "X (4, adaptive)=drafter"')),
    (f"doctor {PAIR} --endpoint http://a --adapter adapter", 1, ("`--adapter`", "`--endpoint`")),
    (f"{COMPARE} --endpoint http://a --adapter adapter", 1, ("`--adapter`", "`--endpoint`")),
    (f"generate {PAIR}", 2, ("'prompt'", "What to ask")),
    ("generate --target target hi", 2, ("'--drafter'", "prompt-lookup")),
    ("generalize", 2, ("'generalize'",)),
    ("genrate", 2, ("'genrate'", "'generate'?")),
    (f"doctor {PAIR} --max-new-tokens 2", 2, ("'--max-new-tokens'", "'2'")),
    (f"doctor {PAIR} --mode deep", 1, ("`--mode`", "'deep'", "non-think")),
    (f"doctor {PAIR} --served-model a", 1, ("`--served-model`", "'a'", "`--endpoint`")),
    ("answers --output out.jsonl --data rows.jsonl", 1, ("`--target`", "`--endpoint`")),
    *((f"{ANSWERS} {given}", 1, (f"`{given.split()[0]}`", "`--endpoint`"))
      for given in ("--model a", "--concurrency 2", "--timeout 9")),
    *((f"answers --output out.jsonl --data rows.jsonl --endpoint http://a {given}", 1,
       (f"`{given.split()[0]}`", given.split()[-1], "`--endpoint`"))
      for given in ("--target target", "--dtype float32", "--device-map cpu", "--threads 1", "--trust-remote-code",
                    "--batch-size 2", "--chat-template rows.jsonl")),
    ("answers --output out.jsonl --data rows.jsonl --endpoint a", 1, ("'a'", "http://")),
    ("answers --output out.jsonl --data rows.jsonl --endpoint http://127.0.0.1:1", 1, ("127.0.0.1:1", "start")),
    *((f"doctor {PAIR} --endpoint http://a {given}", 1, (f"`{given.split()[0]}`", "`--endpoint`"))
      for given in ("--context 9", "--batch-size 2", "--compile")),
    ("card nowhere", 2, ("'nowhere'", "does not exist")),
    ("card drafter --results nowhere", 2, ("'nowhere'", "does not exist")),
    ("card drafter --results results", 1, ("results", "results.jsonl", "benchmark")),
    ("card drafter --notes nowhere.md", 2, ("'nowhere.md'", "does not exist")),
    ("card drafter --notes notes.md --output out.md", 1, ("notes.md", "UTF-8")),
    ("card drafter --output file/card.md", 1, ("file is a file", "another folder")),
    ("card drafter --dtype float7", 2, ("'float7'", "bfloat16")),
    ("export cut-drafter out", 1, ("z-lab",)),
    ("export drafter out", 1, ("z-lab",)),
    ("export cut-flat out --format deepspec", 1, ("embedding", "`--target`")),
    ("export cut-flat out --format deepspec --target nowhere", 1, ("nowhere", "does not exist")),
    ("export cut-flat out --format deepspec --target target", 1, ("`vocab_size`",)),
    ("export drafter target", 1, ("target", "deepseek_v4", "a folder")),
    ("export drafter file", 2, ("'file' is a file",)),
    ("export drafter file/out", 1, ("file is a file", "another folder")),
    ("export drafter out --format tarball", 1, ("`format`", "'tarball'")),
    ("push nowhere org/name", 2, ("'nowhere'", "does not exist")),
    ("push drafter a/b/c", 1, ("'a/b/c'", "org/name")),
    *((f"{CALIBRATE} confident {given}", status, words) for given, status, words in (
        ("--data nowhere.jsonl", 1, ("'nowhere.jsonl'",)), ("--data torn.jsonl", 1, ("torn.jsonl:2", "JSON")),
        ("--data odd.jsonl", 1, ("odd.jsonl:2", "text")), ("--max-new-tokens 50", 1, ("49 rounds",)),
        ("--max-new-tokens 2", 2, ("'--max-new-tokens'", "'2'")), ("--limit 1", 2, ("'--limit'", "'1'")),
        ("--output file", 2, ("'file' is a file",)), ("--output file/out", 1, ("file is a file",)),
        ("", 1, ("missing",)),
    )),
    (f"{CALIBRATE} nowhere", 2, ("'nowhere'", "does not exist")),
    *((f"{ANSWERS} {given}", status, words) for given, status, words in (
        ("--data nowhere.jsonl", 1, ("'nowhere.jsonl'",)), ("--top-p 0", 2, ("0.0", "more than 0", "1")),
        ("--top-p 1.5", 2, ("1.5", "at most 1")), ("--limit 0", 2, ("'--limit'", "'0'")),
        ("--chat-template nowhere", 2, ("'nowhere'",)), ("--output file/out.jsonl", 1, ("file is a file",)),
    )),
    (COMPARE, 1, ("--drafter",)),
    (SWEEP, 1, ("--drafter",)),
    *((f'{COMPARE} --drafter "{name}=drafter"', 1, NAMED)
      for name in ("X (a)", "X (0)", "X (2", "", "X (4, 0 nodes)")),
    (f'{COMPARE} --drafter "X="', 1, NAMED),
    (f'{COMPARE} --drafter "X (4, 1025 nodes)=drafter"', 1, ("1025", "1024", "auto")),
    (f'{COMPARE} --drafter "X (4, adaptive)=prompt-lookup"', 1, ("prompt lookup", "weights")),
    *((f'{command} --drafter "X (99)=drafter"', 1, ("99 tokens", "from 1 to 8")) for command in (COMPARE, SWEEP)),
    (f'{SWEEP} --drafter "X (4, adaptive)=drafter"', 1, ("adaptive", "leave it out")),
    (f"{SWEEP} --drafter drafter --num-draft-tokens 0", 2, ("'--num-draft-tokens'", "'0'")),
    (f"{SWEEP} --drafter drafter --num-draft-tokens 9", 1, ("9 tokens", "from 1 to 8")),
    *((f"{COMPARE} --mtp 1 {given}", status, words) for given, status, words in (
        ("--mtp 0", 2, ("'--mtp'",)), ("--prompt-lookup 0", 2, ("'--prompt-lookup'",)),
        ("--limit 0", 2, ("'--limit'",)), ("--temperature nan", 2, ("nan", "0 (greedy)")),
        ("--mode deep", 1, ("'deep'",)), ("--data nowhere", 1, ("nowhere",)), ("--data file", 1, ("file",)),
        ("--suite chess", 1, ("'chess'", "data")), ("--output file", 2, ("'file' is a file",)),
        ("--output file/out", 1, ("file is a file",)), ("--concurrency 2", 1, ("`--concurrency`", "`--endpoint`")),
        ("--endpoint http://a", 1, ("`--mtp`", "`--endpoint`")),
    )),
    (f"{COMPARE} --endpoint http://localhost:9 --output file/out", 1, ("file is a file",)),
    *((f"{TRAIN} {given}", 1, words) for given, words in {
        "--drafter_type eagle3 --block_size 4": ("`--block_size`", "eagle3"),
        "--drafter_type specblock --sequential_head state": ("`--sequential_head`", "specblock"),
        "--no_shift": ("`--shift`", "hyperdflash"), "--drafter_type medusa": ("medusa",), "--bogus": ("'--bogus'",),
        "--drafter_type specblock --max_blocks 0": ("`--max_blocks`", "0", "at least 1"),
    }.items()),
    # What is quicker to look at comes first: folders, then suites, then weights
    *((f"{command} --data mixed --output out --target {given}", 1, words)
      for command in ("benchmark", "sweep") for given, words in {
        "nowhere --drafter drafter": ("nowhere", "does not exist"),
        "cut-target --drafter nowhere": ("nowhere", "does not exist"),
        'cut-target --drafter "X (9)=drafter"': ("9 tokens",),
        "cut-target --drafter drafter --device-map toaster": ("'toaster'",),
        "cut-target --drafter drafter": ("mine.jsonl", "line 1", "`turns`", "'Hello?'"),
        "cut-target --drafter drafter --suite mbpp": ("cut-target", "damaged"),
    }.items()),
]  # fmt: skip


@pytest.mark.parametrize(("command", "status", "words"), MISTAKES, ids=[command for command, *_ in MISTAKES])
def test_a_mistake_ends_in_one_line(monkeypatch, capsys, wrong, command, status, words):
    monkeypatch.chdir(wrong)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    there = sorted(wrong.rglob("*"))
    code, lines = ended(monkeypatch, capsys, *shlex.split(command))
    errors = [line for line in lines if line.startswith("Error: ")]
    assert code == status and lines[-1:] == errors, lines
    assert [word for word in words if word not in lines[-1]] == [], lines[-1]
    assert status == 1 or ("hf-hyperdflash" in lines[-1] and lines[-1].endswith("--help`."))
    assert not any("Traceback" in line or "[Errno" in line for line in lines)
    assert sorted(wrong.rglob("*")) == there  # refused before anything was written


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write and read everything")
def test_permissions_are_looked_at_first(monkeypatch, capsys, wrong):
    monkeypatch.chdir(wrong)
    (wrong / "closed").mkdir(mode=0o500)
    code, lines = ended(monkeypatch, capsys, *shlex.split(f"{COMPARE} --mtp 1 --output closed/out"))
    assert code == 1 and "closed" in lines[-1] and "written to" in lines[-1]


@pytest.mark.parametrize(("rank", "where"), [("0", ""), ("1", " in process 1")])
def test_of_several_processes_each_tells_which_it_is(monkeypatch, capsys, rank, where):
    monkeypatch.setenv("RANK", rank)
    code, (line,) = ended(monkeypatch, capsys, "train", "--target", "a", "--output_dir", "b", "--bogus")
    assert code == 1 and line.startswith(f"Error{where}: ") and "'--bogus'" in line
