"""The command line, run in this process."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from hf_hyperdflash.cli.app import app
from hf_hyperdflash.cli.app import run as entry_point


def run(*arguments: object) -> str:
    """What a command says that ends well."""
    result = CliRunner().invoke(app, list(map(str, arguments)))
    assert result.exit_code == 0, (result.output, result.exception)
    return result.output


def ended(monkeypatch, capsys, *arguments: object) -> tuple[int, list[str]]:
    """The exit status of the command, and what it wrote to stderr beside what it loads."""
    monkeypatch.setattr("sys.argv", ["hf-hyperdflash", *map(str, arguments)])
    with pytest.raises(SystemExit) as stopped:
        entry_point()
    lines = capsys.readouterr().err.splitlines()
    return stopped.value.code or 0, [line for line in lines if line.strip() and not line.startswith("Loading ")]
