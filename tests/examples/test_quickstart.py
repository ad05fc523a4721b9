"""The quickstart, with a limit and with wrong options."""

import os
import runpy
import subprocess
import sys

import pytest

from ..helpers.scripts import ROOT, run


def test_quickstart_limits_its_own_prompts_too(tmp_path):
    shown = run(
        "examples/quickstart.py",
        "--limit",
        1,
        "--max-new-tokens",
        3,
        "--quiet",
        "--picture",
        tmp_path / "acceptance.png",
    )
    assert "\n1 verification round, " in shown
    assert "all 1 " in shown and "A baker" not in shown and (tmp_path / "acceptance.png").is_file()


# Takes seconds: a process imports transformers, and the example writes.
def test_a_terminal_without_some_letters_gets_escapes(tmp_path):
    """Also the table's borders, and texts of a file whose lines are UTF-8 whatever the terminal has."""
    (tmp_path / "prompts.jsonl").write_bytes(b"\xef\xbb\xbf" + '{"turns": ["Ωhat…\u2028is 2 plus 2?"]}\n'.encode())
    ran = subprocess.run(
        [sys.executable, ROOT / "examples/quickstart.py", "--prompts", "prompts.jsonl", "--max-new-tokens", "3"],
        cwd=tmp_path, env={**os.environ, "PYTHONIOENCODING": "ascii"}, capture_output=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert "\\u03a9hat\\u2026" in ran.stdout.decode("ascii") and (tmp_path / "acceptance.png").is_file()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--limit", "0"], "'0' is not a whole number from 1 up"),
        (["--temperature", "nan"], "'nan' is not 0 or above"),
        (["--prompts", "nowhere.jsonl"], "There is no file nowhere.jsonl"),
        (["--prompts", "prompts.jsonl"], "prompts.jsonl, line 2 has no list of turns"),
        (["--prompts", "empty.jsonl"], "empty.jsonl has no prompts"),
    ],
)
def test_quickstart_says_what_is_wrong(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.jsonl").write_text('{"turns": ["What is 2 plus 2?"]}\n{"turns": "What?"}\n')
    (tmp_path / "empty.jsonl").write_text("")
    monkeypatch.setattr("sys.argv", ["examples/quickstart.py", *arguments])
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(str(ROOT / "examples/quickstart.py"), run_name="__main__")
    said = f"{stopped.value.code} {capsys.readouterr().err}"
    assert message in said and "Traceback" not in said
