"""Checks and loads the models of the commands, and checks folders to write to, before it takes minutes."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ..drafters.saved import SavedDrafter


def announce(kind: str, name: str | Path) -> None:
    """Print what is going to be loaded, because it takes a while."""
    typer.echo(f"Loading the {kind} {name} ...", err=True)


def check_writable(folder: Path) -> None:
    """Raise an `OSError` if `folder` cannot be written to, or made."""
    existing = next(candidate for candidate in (folder, *folder.absolute().parents) if candidate.exists())
    if not existing.is_dir():
        raise OSError(f"{folder} cannot be made, because {existing} is a file. Choose another folder.")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise OSError(f"{existing} cannot be written to. Choose another folder, or change its permissions.")


def load(
    target: str,
    drafters: Collection[str],
    dtype: str | None,
    device_map: str | None,
    threads: int | None,
    trust_remote_code: bool,
    num_draft_tokens: int | str | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, dict[str, SavedDrafter]]:
    """Load the target, bound, its tokenizer, and its drafters by name. All are checked before one is loaded."""
    check_loadable(target, [(drafter, num_draft_tokens) for drafter in drafters], device_map)
    return load_checked(target, drafters, dtype, device_map, threads, trust_remote_code)


def check_loadable(
    target: str, drafters: Collection[tuple[str, int | str | None]], device_map: str | None = None
) -> None:
    """Raise an error if target or drafters are missing, do not fit each other, cannot draft the number of tokens that
    is asked, or if there is no such device. Reads no weights."""
    from ..hub import loading

    loading.check_target(target)
    for drafter, num_draft_tokens in drafters:
        loading.check_drafter(drafter)
        loading.check_made_for(target, drafter, num_draft_tokens)
    if device_map:
        loading.check_device(device_map)


def load_checked(
    target: str,
    drafters: Collection[str],
    dtype: str | None,
    device_map: str | None,
    threads: int | None,
    trust_remote_code: bool,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, dict[str, SavedDrafter]]:
    """Load models that have passed [`check_loadable`], as [`load`] does."""
    import torch

    from ..decoding.bind import bind
    from ..hub import loading

    if threads:
        torch.set_num_threads(threads)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = loading.load_tokenizer(target, trust_remote_code)
    dtype = dtype or ("float32" if device == "cpu" else "auto")
    model = bind(
        loading.load_target(target, dtype=dtype, device_map=device_map or device, trust_remote_code=trust_remote_code)
    )
    return model, tokenizer, {name: loading.load_drafter(name, target=model) for name in dict.fromkeys(drafters)}
