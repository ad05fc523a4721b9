"""`hf-hyperdflash features`. Its help loads no heavy library."""

from __future__ import annotations

import sys

import typer

from ..training.flags import features_help
from .session import use_cache_if_offline
from .train import named_sources


def features(context: typer.Context) -> None:
    """Write what a drafter is trained on of a dataset's rows, the target's states, into a folder: before `train`, or
    beside it."""
    if {"-h", "--help"} & set(context.args):
        print(features_help(context.command_path))
        return
    print("Loading PyTorch and transformers ...", file=sys.stderr)
    use_cache_if_offline(*named_sources(context.args))
    from ..training.feature_script import main

    main(context.args, context.command_path)
