"""What a user names as target or drafter, looked at before anything is loaded: minutes may lie between the two."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from safetensors import SafetensorError
from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase

_OURS = "hyperdflash"


def check_target(name: str) -> None:
    """Raise a `ValueError` or an `OSError` if `name` is not a model to draft for."""
    fields = _configuration(name, "target")
    kind = _drafter_kind(fields)
    if kind:
        raise ValueError(f"{name} is {kind}, expected the target that it drafts for: give it as the drafter.")
    if "model_type" not in fields and "auto_map" not in fields:
        raise ValueError(f"The config.json of {name} has no `model_type`, expected that of a causal LM.")


def check_drafter(name: str, *, ours_only: bool = False) -> None:
    """Raise a `ValueError` or an `OSError` if `name` is no drafter.

    Args:
        name: Path or Hub id.
        ours_only: Whether only a HyperDFlash or vanilla DFlash drafter saved by this package will do.
    """
    fields = _configuration(name, "drafter")
    kind = _drafter_kind(fields)
    if kind is None:
        raise ValueError(
            f"{name} is a model of type {fields.get('model_type')!r}, expected a drafter. One for it is made by "
            f"`hf-hyperdflash train --target {name}`."
        )
    if ours_only and fields.get("model_type") != _OURS:
        raise ValueError(f"{name} is {kind}, expected a HyperDFlash or vanilla DFlash drafter saved by this package.")


def is_other_format(fields: dict[str, Any]) -> bool:
    """Whether a configuration is in z-lab's or speculators' layout."""
    return "dflash_config" in fields or "speculators_model_type" in fields


def _drafter_kind(fields: dict[str, Any]) -> str | None:
    """What kind of drafter a configuration is of, in words; `None` if it is of none."""
    if fields.get("model_type") == _OURS:
        return "a drafter"
    if is_other_format(fields):
        return "a DFlash drafter in another program's layout"
    return "an MTP drafter" if "DeepseekV4MTPDrafter" in (fields.get("architectures") or ()) else None


def _configuration(name: str, what: str) -> dict[str, Any]:
    path = Path(name)
    if path.is_file():
        raise OSError(f"The {what} {name} is a file, expected a folder with a config.json, or a Hub id.")
    if not path.is_dir():
        try:
            validate_repo_id(name)
        except HFValidationError as error:
            raise OSError(f"The folder {name} does not exist, and it is no Hub id (org/name): no {what}.") from error
    elif not (path / "config.json").is_file():
        raise OSError(f"The folder {name} has no config.json, expected a saved {what}.")
    try:
        fields, _ = PreTrainedConfig.get_config_dict(name)
    except OSError as error:
        if path.is_dir():
            raise OSError(
                f"{path / 'config.json'} cannot be read, or is no JSON. Copy or download it again."
            ) from error
        raise OSError(
            f"The folder {name} does not exist, and as a Hub id it has no configuration that can be loaded from here: no "
            f"{what}. Check the name, the network, HF_HUB_OFFLINE and, for a private one, HF_TOKEN."
        ) from error
    if not isinstance(fields, dict):
        raise ValueError(f"The config.json of {name} holds a {type(fields).__name__}, expected an object.")
    return fields


@contextmanager
def readable_weights(name: str) -> Iterator[None]:
    """Say of weights that are cut off or no weights which they are."""
    try:
        yield
    except SafetensorError as error:
        raise OSError(
            f"The weights of {name} are damaged ({error}): a file is cut off, or no safetensors. Copy or download it again."
        ) from error


def load_tokenizer(name: str, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    """A target's tokenizer.

    Raises:
        OSError: If there is none, or it cannot be read.
    """
    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        cause: Exception = error
    except Exception as error:
        if type(error) is not Exception:  # which `tokenizers` raises for a file that it cannot read
            raise
        cause = error
    raise OSError(
        f"{name} has no tokenizer that can be loaded ({' '.join(str(cause).split())[:200]}). Save the target's own there "
        "(tokenizer.json, tokenizer_config.json)."
    ) from cause
