"""What the commands load and where they write, looked at before it takes minutes."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

import typer


def announce(kind: str, name: Any) -> None:
    """Say what is going to be loaded: from here on it takes a while."""
    typer.echo(f"Loading the {kind} {name} ...", err=True)


def check_writable(folder: Path) -> None:
    """Raise an `OSError` if `folder` cannot be written to, or made."""
    there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not there.is_dir():
        raise OSError(f"{folder} cannot be made, because {there} is a file. Choose another folder.")
    if not os.access(there, os.W_OK | os.X_OK):
        raise OSError(f"{there} cannot be written to. Choose another folder, or change its permissions.")


def load(
    target: str,
    drafters: Collection[str],
    dtype: str | None,
    device_map: str | None,
    threads: int | None,
    trust_remote_code: bool,
    num_draft_tokens: int | str | None = None,
) -> tuple[Any, Any, dict[str, Any]]:
    """The target, bound, its tokenizer, and its drafters by their names, all of it looked at before one is loaded."""
    check_loadable(target, [(drafter, num_draft_tokens) for drafter in drafters], device_map)
    return load_checked(target, drafters, dtype, device_map, threads, trust_remote_code)


def check_loadable(
    target: str, drafters: Collection[tuple[str, int | str | None]], device_map: str | None = None
) -> None:
    """Raise an error if target or drafters are not there, are not for each other, cannot draft as many tokens as each
    is asked for, or have no place to be loaded to. Reads no weights."""
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
) -> tuple[Any, Any, dict[str, Any]]:
    """What [`load`] loads, of what has passed [`check_loadable`]."""
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
