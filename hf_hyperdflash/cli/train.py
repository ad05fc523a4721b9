"""`hf-hyperdflash train`. Its help loads no heavy library."""

from __future__ import annotations

import os
import sys

import typer

from ..training.flags import help_text
from .session import use_cache_if_offline

_SOURCES = ("--target", "--drafter", "--dataset", "--eval_dataset")


def train(context: typer.Context) -> None:
    """Train a drafter for a target. All flags of transformers' TrainingArguments and more: `train --help` lists
    them."""
    if {"-h", "--help"} & set(context.args):
        print(help_text(context.command_path))
        return
    if os.environ.get("RANK", "0") == "0":  # of several processes, the first
        print("Loading PyTorch and transformers ...", file=sys.stderr)
    use_cache_if_offline(*_sources(context.args))
    from ..training.script import main

    main(context.args, context.command_path)


def _sources(arguments: list[str]) -> list[str]:
    """Return what a run reads, by its flags, the stage's dataset if none is named."""
    found, flag = [], ""
    for part in arguments:
        if part.startswith("--"):
            flag, _, part = part.partition("=")
        if part and flag in _SOURCES:
            found.append(part)
    return (
        found if any(part.partition("=")[0] == "--dataset" for part in arguments) else [*found, "the stage's dataset"]
    )
