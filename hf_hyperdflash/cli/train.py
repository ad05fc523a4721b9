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
    use_cache_if_offline(*named_sources(context.args))
    from ..training.script import main

    main(context.args, context.command_path)


def named_sources(arguments: list[str]) -> list[str]:
    """Return what a run reads, by its flags; the stage's dataset if none is named."""
    sources, flag, flags = list[str](), "", set[str]()
    for part in arguments:
        if part.startswith("--"):
            flag, _, part = part.partition("=")
            flags.add(flag)
        if part and flag in _SOURCES:
            sources.append(part)
    return sources if "--dataset" in flags else [*sources, "the stage's dataset"]
