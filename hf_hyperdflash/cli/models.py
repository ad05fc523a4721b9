"""Checks and loads the models of the commands, and checks folders to write to, before it takes minutes."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from .options import PROMPT_LOOKUP

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ..drafters.base import Drafter


_OFFLINE, _PATIENCE = "HF_HUB_OFFLINE", 10  # seconds


def use_cache_if_offline(*names: str | Path | None) -> None:
    """Let the libraries look in the Hub's cache alone, and say so, where something is named that is not on this
    machine and the Hub cannot be reached. They would ask for each file six times. Call it before they are imported.

    Args:
        *names: Of models and datasets, as the command got them.
    """
    remote = [name for name in names if name not in (None, PROMPT_LOOKUP) and not Path(str(name)).exists()]
    if not remote or os.environ.get(_OFFLINE):
        return
    if why := why_unreachable():
        os.environ[_OFFLINE] = "1"
        print(f"{why}: only what is in its cache is used.", file=sys.stderr)


def why_unreachable() -> str:
    """Ask the Hub for its first page, once. Return why it cannot be reached; an empty text if it can."""
    if os.environ.get(_OFFLINE, "").upper() in ("1", "ON", "YES", "TRUE"):
        return f"The Hub is not asked, as {_OFFLINE} says"
    from ssl import SSLError
    from urllib.error import HTTPError
    from urllib.request import Request, urlopen

    endpoint = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    try:
        urlopen(Request(endpoint, method="HEAD"), timeout=_PATIENCE).close()
    except HTTPError:  # an answer
        return ""
    except OSError as error:
        reason = getattr(error, "reason", error)
        if not isinstance(reason, SSLError):  # the libraries have certificates of their own
            return f"{endpoint} cannot be reached ({reason})"
    return ""


def announce(kind: str, name: str | Path) -> None:
    """Print what is going to be loaded, because it takes a while."""
    print(f"Loading the {kind} {name} ...", file=sys.stderr)


def check_text(text: str, what: str) -> None:
    """Raise a `ValueError` if a text of the command line was in another encoding than the terminal's."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{what} has {text[error.start : error.end]!r}, which is no text in {sys.getfilesystemencoding()}: "
            "write it in the terminal's encoding."
        ) from error


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
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, dict[str, Drafter]]:
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
        if drafter != PROMPT_LOOKUP:
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
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, dict[str, Drafter]]:
    """Load models that have passed [`check_loadable`], as [`load`] does."""
    import torch

    from ..decoding.bind import bind
    from ..drafters.without_weights.prompt_lookup import PromptLookupDrafter
    from ..hub import loading

    if threads:
        torch.set_num_threads(threads)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = loading.load_tokenizer(target, trust_remote_code)
    dtype = dtype or loading.default_dtype(target)
    model = bind(
        loading.load_target(target, dtype=dtype, device_map=device_map or device, trust_remote_code=trust_remote_code)
    )
    loaded: dict[str, Drafter] = {}
    for name in dict.fromkeys(drafters):
        is_saved = name != PROMPT_LOOKUP
        loaded[name] = loading.load_drafter(name, target=model) if is_saved else PromptLookupDrafter(model)
    return model, tokenizer, loaded
