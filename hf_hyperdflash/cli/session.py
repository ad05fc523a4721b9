"""The session of a command: its target and drafters, checked before it takes minutes, and loaded."""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from . import options
from .options import PROMPT_LOOKUP

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ..drafters.base import Drafter
    from ..hub.found import Found


_OFFLINE, _PATIENCE = "HF_HUB_OFFLINE", 10  # seconds


def use_cache_if_offline(*names: str | Path | None) -> None:
    """Let the libraries look in the Hub's cache alone, and say so, where a model or dataset is named that is not on
    this machine and the Hub cannot be reached. They would ask for each file six times. Call it before they are
    imported."""
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


def check_adapter(adapter: str | None, drafter: str) -> None:
    """Raise an error if a drafter's adapter cannot be read, or the drafter can have none."""
    if adapter is None:
        return
    if drafter == PROMPT_LOOKUP:
        raise ValueError(f"`--adapter` is {adapter!r}, but {drafter} has no weights: leave one of the two out.")
    from ..drafters.adapters import read_adapter

    read_adapter(adapter)


def check_writable(folder: Path) -> None:
    """Raise an `OSError` if `folder` cannot be written to, or made."""
    existing = next(candidate for candidate in (folder, *folder.absolute().parents) if candidate.exists())
    if not existing.is_dir():
        raise OSError(f"{folder} cannot be made, because {existing} is a file. Choose another folder.")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise OSError(f"{existing} cannot be written to. Choose another folder, or change its permissions.")


@dataclass(frozen=True)
class Session:
    """What each command that loads a target asks: which one, and how. [`with_session`] makes options of its fields."""

    target: options.Target
    dtype: options.Dtype = None
    device_map: options.DeviceMap = None
    threads: options.Threads = None
    trust_remote_code: options.TrustRemoteCode = False
    found: dict[str, Found] = field(default_factory=dict, init=False)  # drafters that were looked at

    def check(self, drafters: Collection[tuple[str, int | str | None]] = ()) -> None:
        """Raise an error if something is missing, does not fit the other, or cannot draft as many tokens as are asked
        for (`None`: its own number). Reads no weights."""
        from ..hub import loading
        from ..hub.found import check_drafter

        loading.check_target(self.target)
        for drafter, num_draft_tokens in drafters:
            if drafter != PROMPT_LOOKUP:
                self.found[drafter] = check_drafter(drafter)
                loading.check_made_for(self.target, self.found[drafter], num_draft_tokens)
        if self.device_map:
            loading.check_device(self.device_map)

    def load(self, drafters: Collection[str]) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, dict[str, Drafter]]:
        """Load the target, bound, its tokenizer, and its drafters by name."""
        from ..decoding.bind import bind
        from ..drafters.without_weights.prompt_lookup import PromptLookupDrafter
        from ..hub import loading

        tokenizer = loading.load_tokenizer(self.target, self.trust_remote_code)
        model = bind(self.load_target())
        loaded: dict[str, Drafter] = {}
        for name in dict.fromkeys(drafters):
            is_saved = name != PROMPT_LOOKUP
            found = self.found.get(name, name)
            loaded[name] = loading.load_drafter(found, target=model) if is_saved else PromptLookupDrafter(model)
        return model, tokenizer, loaded

    def load_target(self, is_exact: bool = True) -> PreTrainedModel:
        """Load the target, as exact as float32 where the dtype is ours to choose, or as fast as the CPU can."""
        import torch

        from ..hub import loading

        if self.threads:
            torch.set_num_threads(self.threads)
        return loading.load_target(
            self.target,
            dtype=self.dtype or loading.default_dtype(self.target, is_exact=is_exact),
            device_map=self.device_map or ("cuda" if torch.cuda.is_available() else "cpu"),
            trust_remote_code=self.trust_remote_code,
        )


@dataclass(frozen=True)
class SessionOrServer(Session):
    """What a command asks whose work is a target's here, or a server's (`--endpoint`)."""

    target: options.TargetOrNone = ""

    def check_producer(
        self, endpoint: str | None, here: Mapping[str, object] | None = None, there: Mapping[str, object] | None = None
    ) -> None:
        """Raise a `ValueError` unless there is one of target and endpoint, or if an option is given that is for the
        other: those of `here` are for a target, besides this session's own, and those of `there` for a server."""
        if endpoint is None and not self.target:
            raise ValueError(
                "`--target` names what is loaded here, and `--endpoint` a server of it: give one of them."
            )
        ours = {**_given_options(self), **(here or {})} if endpoint else {}
        for option, value in ours.items():
            if value:
                raise ValueError(
                    f"`{option}` is {str(value)!r}, but a server at `--endpoint` has its own: leave one out."
                )
        for option, value in (there or {}).items() if endpoint is None else ():
            if value is not None:
                raise ValueError(f"`{option}` is {value!r}, but only servers are asked so: add `--endpoint`.")


def _given_options(session: Session) -> dict[str, object]:
    return {f"--{each.name.replace('_', '-')}": getattr(session, each.name) for each in fields(session) if each.init}


def with_session(command: Callable[..., None]) -> Callable[..., None]:
    """Make options of the fields of a command's parameters that are dataclasses, a [`Session`] before others: the
    target first, then the command's own options, the others' fields, and the rest of the session's."""
    own = inspect.signature(command, eval_str=True).parameters
    annotated = {name: each.annotation for name, each in own.items()}
    kinds = {name: kind for name, kind in annotated.items() if isinstance(kind, type) and is_dataclass(kind)}
    asked_by = [list(inspect.signature(kind, eval_str=True).parameters.values()) for kind in kinds.values()]

    @functools.wraps(command)
    def called(**given: object) -> None:
        made = [kind(*(given.pop(each.name) for each in parts)) for kind, parts in zip(kinds.values(), asked_by)]
        command(*made, **given)

    (target, *rest), *others = asked_by
    asked = [each for name, each in own.items() if name not in kinds]
    ordered = [target, *asked, *(each for parts in others for each in parts), *rest]
    parameters = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in ordered]
    called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # which typer reads
    called.__annotations__ = {each.name: each.annotation for each in parameters}
    return called
