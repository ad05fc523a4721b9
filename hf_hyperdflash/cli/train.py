"""`hf-hyperdflash train`. Its help loads no heavy library."""

from __future__ import annotations

import os

import typer

from ..training.flags import help_text


def train(context: typer.Context) -> None:
    """Train a drafter for a target. All flags of transformers' TrainingArguments and more: `train --help` lists
    them."""
    if {"-h", "--help"} & set(context.args):
        typer.echo(help_text(context.command_path))
        return
    if os.environ.get("RANK", "0") == "0":  # of several processes, the first
        typer.echo("Loading PyTorch and transformers ...", err=True)
    from ..training.script import main

    main(context.args, context.command_path)
