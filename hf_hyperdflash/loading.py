"""What a user names as target or drafter, looked at before anything is loaded: minutes may lie between the two."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import transformers
from huggingface_hub.errors import HFValidationError, StrictDataclassError
from huggingface_hub.utils import validate_repo_id
from jinja2 import TemplateSyntaxError
from safetensors import SafetensorError
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from .runtime.configuration_hyperdflash import HyperDFlashConfig
from .runtime.weights import check_finite, check_names, check_source, drafter_kind


def check_target(name: str) -> None:
    """Raise a `ValueError` or an `OSError` if `name` is not a model to draft for."""
    fields = _configuration(name, "target")
    drafter = drafter_kind(fields)
    if drafter:
        raise ValueError(f"{name} is {drafter}, expected the target that it drafts for: give it as the drafter.")
    kind = fields.get("model_type")
    if kind not in CONFIG_MAPPING and "auto_map" not in fields:
        raise ValueError(
            f"The config.json of {name} has `model_type` {kind!r}, expected one that transformers {transformers.__version__} "
            "knows. Update transformers, or correct it."
        )
    _check_weights(name, "*.safetensors", "*.bin")


def check_drafter(name: str, *, is_ours: bool = False, needs_weights: bool = True) -> None:
    """Raise a `ValueError` or an `OSError` if `name` is no drafter.

    Args:
        name: Path or Hub id.
        is_ours: Whether it must be a HyperDFlash or vanilla DFlash drafter saved by this package.
        needs_weights: Whether its configuration is not enough.
    """
    fields = _configuration(name, "drafter")
    kind = drafter_kind(fields)
    if kind is None:
        raise ValueError(
            f"{name} is a model of type {fields.get('model_type')!r}, expected a drafter. One for it is made by "
            f"`hf-hyperdflash train --target {name}`."
        )
    if is_ours and fields.get("model_type") != HyperDFlashConfig.model_type:
        raise ValueError(f"{name} is {kind}, expected a HyperDFlash or vanilla DFlash drafter saved by this package.")
    if needs_weights:
        _check_weights(name, "*.safetensors")


def _check_weights(name: str, *patterns: str) -> None:
    path = Path(name)
    if path.is_dir() and not any(file for pattern in patterns for file in path.glob(pattern)):
        pickle = next(path.glob("*.bin"), None)
        but = f": {pickle.name} is a pickle, which can run code, and is not read" if pickle else ""
        raise OSError(
            f"The folder {name} has no weights, expected model.safetensors{but}. Save or download them there."
        )


def check_repo_id(name: str) -> None:
    """Raise a `ValueError` if `name` cannot be a repository on the Hub."""
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise ValueError(f"The repository is {name!r}, expected a name on the Hub: org/name.") from error


def _configuration(name: str, what: str) -> dict[str, Any]:
    path = Path(name)
    if not name.strip():
        raise ValueError(f"The name of the {what} is empty, expected a folder or a Hub id (org/name).")
    if path.is_file():
        raise OSError(f"The {what} {name} is a file, expected a folder with a config.json, or a Hub id.")
    if not path.is_dir():
        try:
            check_repo_id(name)
        except ValueError as error:
            raise OSError(f"The folder {name} does not exist, and it is no Hub id (org/name): no {what}.") from error
    elif not (path / "config.json").is_file():
        raise OSError(f"The folder {name} has no config.json, expected a saved {what}.")
    fields = _read_json(path / "config.json") if path.is_dir() else _read_from_hub(name, what)
    if not isinstance(fields, dict):
        raise ValueError(f"The config.json of {name} holds a {type(fields).__name__}, expected an object.")
    return fields


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        why = f"is no JSON ({error.msg}, line {error.lineno}, column {error.colno})"
    except UnicodeDecodeError:
        why = "is no text in UTF-8"
    except OSError as error:
        why = f"cannot be read ({error.strerror})"
    raise OSError(f"{path} {why}. Copy or download it again.")


def _read_from_hub(name: str, what: str) -> Any:
    try:
        return PreTrainedConfig.get_config_dict(name)[0]
    except OSError as error:
        raise OSError(
            f"The folder {name} does not exist, and as a Hub id it has no configuration that can be loaded from here: no "
            f"{what}. Check the name, the network, HF_HUB_OFFLINE and, for a private one, HF_TOKEN."
        ) from error


@contextmanager
def readable(name: str) -> Iterator[None]:
    """Say in one line what is wrong with a checkpoint's files where transformers does not."""
    try:
        yield
    except SafetensorError as error:
        raise OSError(
            f"The weights of {name} are damaged ({error}): a file is cut off, or no safetensors. Copy or download it again."
        ) from error
    except StrictDataclassError as error:
        raise ValueError(f"The config.json of {name} has a wrong value: {error}") from error
    except RuntimeError as error:
        if "ignore_mismatched_sizes" not in str(error):
            raise
        raise ValueError(
            f"The weights of {name} have other shapes than its config.json says: the two are of different models. Copy or "
            "download both again."
        ) from error


def load_tokenizer(name: str, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    """A target's tokenizer.

    Raises:
        OSError: If there is none, or it cannot be read.
        ValueError: If its chat template is none.
    """
    with _readable_tokenizer(name):
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
    if tokenizer.chat_template:
        try:
            tokenizer.apply_chat_template([{"role": "user", "content": "?"}], tokenize=False)
        except TemplateSyntaxError as error:
            raise ValueError(
                f"The chat template of {name} is no Jinja template: {error.message}, line {error.lineno}. Correct its "
                "chat_template.jinja."
            ) from error
    return tokenizer


@contextmanager
def _readable_tokenizer(name: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        cause: Exception = error
    except Exception as error:
        if type(error) is not Exception:  # which `tokenizers` raises for a file that it cannot read
            raise
        cause = error
    else:
        return
    raise OSError(
        f"{name} has no tokenizer that can be loaded ({type(cause).__name__}: {textwrap.shorten(str(cause), 150)}). Save the "
        "target's own there (tokenizer.json, tokenizer_config.json)."
    ) from cause


def load_target(name: str, *, trust_remote_code: bool = False, **kwargs: Any) -> PreTrainedModel:
    """Load a target of any family, in eval mode: a causal LM, or the multimodal class where a family has no other.

    Args:
        name: Path or Hub id.
        trust_remote_code: Run the code that the target brings along.
        **kwargs: As of `from_pretrained`.

    Raises:
        ValueError: If it is a drafter, or weights are missing or not finite, which transformers goes on with.
        OSError: If it cannot be found.
    """
    check_is_target(name)
    config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
    kind: Any = AutoModelForCausalLM
    if type(config) in AutoModelForImageTextToText._model_mapping and type(config) not in kind._model_mapping:
        kind = AutoModelForImageTextToText
    target, info = kind.from_pretrained(name, trust_remote_code=trust_remote_code, output_loading_info=True, **kwargs)
    check_names(name, missing=info["missing_keys"])
    check_finite(target.state_dict(), name)
    return cast(PreTrainedModel, target.eval())


def check_is_target(name: str) -> None:
    """Raise an `OSError` if there is nothing at this path or Hub id, a `ValueError` if it is a drafter."""
    check_source(name)
    fields, _ = PreTrainedConfig.get_config_dict(name)
    if kind := drafter_kind(fields):
        raise ValueError(
            f"{name} is {kind}, expected a target: pass {fields.get('target_name_or_path') or 'the model it drafts for'} as the "
            "target and this as the drafter."
        )
