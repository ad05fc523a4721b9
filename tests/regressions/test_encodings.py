"""Commands failed after their work was done where a file, the terminal or a pipe is not UTF-8: texts are right in any
encoding, or one line says so before models are loaded."""

import io
import os
import re
import subprocess
import sys

import pytest

from hf_hyperdflash import load_drafter
from hf_hyperdflash.benchmark.report import print_fastest, print_results
from hf_hyperdflash.benchmark.suites import load_suite
from hf_hyperdflash.cli import app
from hf_hyperdflash.hub import loading
from hf_hyperdflash.hub.publish import planned_push

from ..conftest import MODELS, tiny_drafter, tiny_target
from ..helpers.refusals import Refusal
from ..helpers.results_files import random_lines, written

DRAFTER = MODELS / "tiny-deepseek-v4-hyperdflash"
LACKING = ["ascii", "latin-1", "cp1252"]
OURS = {"×": "x", "τ": "tau", "–": "-", "…": "...", "‘": "'", "’": "'", "“": '"', "”": '"'}


def command(monkeypatch, encoding, *arguments, errors="strict"):
    """Run a command over streams of an encoding: its exit status, and what it printed to both."""
    out, err = (
        io.TextIOWrapper(io.BytesIO(), encoding, how, write_through=True) for how in (errors, "backslashreplace")
    )
    with monkeypatch.context() as patched:
        patched.setattr(sys, "argv", ["hf-hyperdflash", *map(str, arguments)])
        patched.setattr(sys, "stdout", out)
        patched.setattr(sys, "stderr", err)
        with pytest.raises(SystemExit) as stopped:
            app.run()
    return stopped.value.code, *(stream.buffer.getvalue().decode(encoding) for stream in (out, err))


def shown(text, encoding):
    """A text in an encoding, letter by letter."""
    letters = []
    for letter in text:
        try:
            letter.encode(encoding)
        except UnicodeEncodeError:
            letter = OURS.get(letter) or letter.encode("ascii", "backslashreplace").decode()
        letters.append(letter)
    return "".join(letters)


def test_generated_text_is_printed_whatever_the_stream_has(dense_pair, monkeypatch):
    target, drafter = dense_pair
    asked = ["generate", "--target", target, "--drafter", drafter, "--max-new-tokens", 40, "What is 3 plus 4?"]
    status, text, _ = command(monkeypatch, "utf-8", *asked)
    assert status == 0 and not text.isascii()
    for encoding in LACKING:
        assert command(monkeypatch, encoding, *asked)[:2] == (0, shown(text, encoding))
    assert command(monkeypatch, "ascii", *asked, errors="replace")[1] == text.encode("ascii", "replace").decode()
    status, coloured, _ = command(monkeypatch, "ascii", *asked, "--show")
    assert status == 0 and shown(text, "ascii").strip() in coloured
    status, compared, _ = command(monkeypatch, "ascii", *asked, "--compare")
    assert status == 0 and any(line.startswith("|") and "1.00x" in line for line in compared.splitlines()[-12:])


def test_what_a_stream_lacks_is_said_before_models_are_loaded(dense_pair, monkeypatch):
    monkeypatch.setattr(loading, "load_target", lambda *_, **__: sys.exit(7))
    asked = ["generate", "--target", dense_pair[0], "--drafter", dense_pair[1]]
    status, _, said = command(monkeypatch, "utf-8", *asked, "caf\udce9")  # of a terminal in Latin-1
    assert status == 1 and "\\udce9" in said and len(said.splitlines()) == 1
    for encoding in ("utf-8", *LACKING):
        status, _, said = command(monkeypatch, encoding, *asked, "café")
        assert status == 7 and ("PYTHONIOENCODING" in said.splitlines()[0]) == (encoding in LACKING)


@pytest.mark.parametrize("width", ["200", "100", "40"])
def test_tables_are_drawn_in_ascii(width, tmp_path, monkeypatch):
    """Columns begin where they do in UTF-8; nothing of the figures is lost in a narrow terminal."""
    path = written(tmp_path / "results.jsonl", random_lines(0))
    monkeypatch.setattr(app, "app", lambda *_, **__: print_results(path) or print_fastest(path))
    monkeypatch.setenv("COLUMNS", width)
    _, drawn, _ = command(monkeypatch, "utf-8")
    for encoding in ("ascii", "latin-1"):
        status, text, _ = command(monkeypatch, encoding)
        assert not status and "…" not in drawn and "\\" not in text and "x" in text
        assert encoding != "ascii" or text.isascii()
        figures = [shown(line, encoding).split() for line in drawn.splitlines() if line.strip("─ ")]
        lines = [re.split(r"[ |]+", line.strip("| ")) for line in text.splitlines() if line.strip("-+| ")]
        assert width != "200" or lines == figures  # where no cell is folded


@pytest.mark.parametrize("encoding", ["utf-8", *LACKING])
def test_commands_print_names_of_any_letters(encoding, tmp_path, monkeypatch):
    folder = tmp_path / "Entwürfe 草稿"
    status, printed, said = command(monkeypatch, encoding, "card", DRAFTER, "--output", folder / "README.md")
    assert status == 0 and shown(str(folder), encoding) in printed, said
    assert (folder / "README.md").read_text(encoding="utf-8")
    status, _, said = command(monkeypatch, encoding, "calibrate", "--target", folder / "no", "--drafter", DRAFTER,
                              "--data", folder / "no.jsonl")  # fmt: skip
    assert status == 1 and ("\\u8349" in said or encoding == "utf-8")
    for arguments in (["--help"], ["generate", "--help"], ["train", "--help"], ["drafters"], ["--version"]):
        status, printed, _ = command(monkeypatch, encoding, *arguments)
        assert not status and printed.strip(), arguments


def test_files_are_read_in_utf8_with_or_without_its_mark_and_refused_in_others(tmp_path, monkeypatch):
    """Notes of a card, and suites of prompts, whose line is told."""
    notes, suite, card = tmp_path / "notes.md", tmp_path / "mine.jsonl", tmp_path / "card.md"
    asked = ["card", DRAFTER, "--notes", notes, "--limits", notes, "--output", card]
    for encoding in ("utf-8", "utf-8-sig"):
        notes.write_text("Trained in Köln: 草稿.", encoding=encoding)
        suite.write_text('{"turns": ["café"]}\n{"turns": ["thé"]}', encoding=encoding)
        assert command(monkeypatch, "ascii", *asked)[0] == 0
        text = card.read_text(encoding="utf-8")
        assert text.count("Trained in Köln: 草稿.") == 2 and "\ufeff" not in text
        assert load_suite("mine", tmp_path) == [["café"], ["thé"]]
    for encoding in ("cp1252", "utf-16"):
        notes.write_text("Trained in Köln.", encoding=encoding)
        suite.write_text('{"turns": ["café"]}\n', encoding=encoding)
        status, _, said = command(monkeypatch, "utf-8", *asked)
        assert status == 1 and str(notes) in said and "UTF-8" in said
        Refusal(load_suite, ("mine.jsonl, line",)).check("mine", tmp_path)
    suite.write_text('{"turns": ["so"]}\n{"turns": ["\\ud83d"]}')  # half a character
    Refusal(load_suite, ("mine.jsonl, line 2",)).check("mine", tmp_path)


# Takes seconds: the encoding of a machine's files is settled when Python starts.
def test_a_machine_without_utf8_writes_and_reads_it(tmp_path):
    (tmp_path / "notes.md").write_text("Trained in Köln.", encoding="utf-8")
    script = (
        "import locale; from hf_hyperdflash.cli.app import run; "
        "assert locale.getpreferredencoding(False) in ('ANSI_X3.4-1968', 'US-ASCII'); run()"
    )
    environment = {**os.environ, "LC_ALL": "C", "LANG": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    arguments = ["card", DRAFTER, "--notes", "notes.md", "--output", "card.md"]
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments], cwd=tmp_path, env=environment, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr.decode()
    assert "Köln" in (tmp_path / "card.md").read_text(encoding="utf-8")


def test_a_drafter_with_a_card_in_another_encoding_is_saved_and_described(tmp_path):
    tiny_drafter(tiny_target()).save_pretrained(tmp_path)
    (tmp_path / "README.md").write_text("# Entwürfe", encoding="cp1252")
    assert "README.md" in planned_push(load_drafter(tmp_path), "org/name")
