"""A look at a checkpoint before it is loaded: its config.json is read once, and what it says is passed on."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import DeepseekV4Config, PreTrainedConfig

from ..drafters.deepseek_v4.drafter import own_checkpoint
from ..drafters.mtp.checkpoint import carries_heads, heads_in
from ..drafters.weights import HubOptions, check_source, tensor_names, weight_files
from .descriptions import in_words
from .kinds import KINDS, DrafterKind, kind_in, named
from .layouts.table import Layout

if TYPE_CHECKING:
    from typing_extensions import Unpack

logger = logging.getLogger(__name__)

# Drafters that are not read, by a part of what their config.json calls them.
_NOT_READ = {
    "medusamodel": "Medusa as a whole model or for vLLM", "hydra": "Hydra", "mlpspeculator": "MLP speculator",
    "mlp_speculator": "MLP speculator", "eagle": "EAGLE-1 or EAGLE-2",
}  # fmt: skip
_QUANTIZED = ("quantization_config", "compression_config", "quantization")  # in config.json; the last is MLX's


@dataclass(frozen=True)
class Found:
    """A drafter that was looked at, and is not loaded yet."""

    name: str | Path  # a folder or a Hub id
    kind: DrafterKind
    fields: dict[str, Any]  # its config.json, or that of its target
    layout: Layout | None = None  # how that is read, if another program wrote it
    is_targets_own: bool = False  # whether it is in the checkpoint of its target
    hub_kwargs: HubOptions = field(default_factory=HubOptions)  # where on the Hub it is

    def __str__(self) -> str:
        if self.is_targets_own:
            return "a target with a drafter of its own"
        return "a drafter in another program's layout" if self.layout else str(self.kind)

    @cached_property
    def config(self) -> PreTrainedConfig | None:
        """Its configuration; `None` for the one in a target's checkpoint."""
        if self.is_targets_own:
            return None
        with readable(self.name):
            if self.layout:
                return self.layout.read(self.fields, str(self.name))
            return cast(PreTrainedConfig, self.kind.config.from_dict(self.fields))

    @cached_property
    def unknown_fields(self) -> dict[str, Any]:
        """The numbers and texts of another program's config.json of which nothing is known, and which may change what
        is drafted: `load_drafter` warns of them, and the doctor reports them."""
        return self.layout.unknown(self.fields, str(self.name)) if self.layout else {}


def about_unknown(fields: Mapping[str, Any]) -> str:
    """Return a sentence about the fields of another program's config.json of which nothing is known."""
    told = ", ".join(f"`{name}` ({value!r})" for name, value in sorted(fields.items()))
    return (
        f"nothing is known here of {told} in its config.json, which may change what is drafted. The text stays the "
        "target's own; if few drafts are accepted, this may be why."
    )


def find(fields: dict[str, Any], name: str | Path, hub_kwargs: HubOptions | None = None) -> Found | None:
    """Return the drafter that a config.json is of; `None` if it is of none that is read."""
    hub_kwargs = hub_kwargs or HubOptions()
    if kind := kind_in(fields):
        return Found(name, kind, fields, hub_kwargs=hub_kwargs)
    if "hyperdflash_version" in fields or _kind_not_read(fields):
        return None
    layouts = ((kind, named(path)) for kind in KINDS for path in kind.reads)
    read_as = next(((kind, layout) for kind, layout in layouts if layout.fits(fields)), None)
    return Found(name, read_as[0], fields, read_as[1], hub_kwargs=hub_kwargs) if read_as else None


def _kind_not_read(fields: dict[str, Any]) -> str:
    told = [*(fields.get("architectures") or ()), fields.get("model_type"), fields.get("speculators_model_type")]
    words = " ".join(map(str, told)).lower()
    for known in ("eagle3", "eagle-3", "peagle", "p_eagle"):
        words = words.replace(known, "")
    return next((kind for part, kind in _NOT_READ.items() if part in words), "")


def unsupported_kind(fields: dict[str, Any], name: str | Path) -> str:
    """Return the name of a kind of drafter that is not read, by a config.json or, in a folder, by the tensors; or an
    empty string."""
    kind = _kind_not_read(fields)
    if kind or not Path(name).is_dir():
        return kind
    tensors = {tensor.removeprefix("model.") for tensor in tensor_names(Path(name))}
    if "fc.weight" not in tensors:
        return ""
    if any(tensor.startswith(("midlayer.", "layers.0.hidden_norm.")) for tensor in tensors):
        raise ValueError(
            f'{name} is an EAGLE-3 drafter by its tensors, but its config.json does not say so: add `"architectures": '
            '["LlamaForCausalLMEagle3"]` there.'
        )
    return "EAGLE-1 or EAGLE-2"


def check_drafter(
    name: str | Path,
    *,
    kinds: Collection[DrafterKind] = (),
    needs_weights: bool = True,
    or_others: bool = False,
    **hub_kwargs: Unpack[HubOptions],
) -> Found:
    """Look at a drafter before it is loaded: one of `kinds` that this package saved, if some are given, or with
    `or_others` in another program's layout or in a target's checkpoint. Without `needs_weights` a configuration is
    enough."""
    fields = read_fields(name, "drafter", **hub_kwargs)
    found = find(fields, name, hub_kwargs)
    is_v4 = fields.get("model_type") == DeepseekV4Config.model_type
    if found is None and (is_v4 or carries_heads(fields)):
        with readable(name):  # both say what is not there
            own = own_checkpoint(name, **hub_kwargs) if is_v4 else heads_in(name, **hub_kwargs)[1]
        kind = next(kind for kind in KINDS if kind.class_name == own.drafter)
        found = Found(name, kind, fields, is_targets_own=True, hub_kwargs=hub_kwargs)
    if found is None:
        raise ValueError(f"{name} is {_no_drafter(fields, name)}")
    if found.layout:
        check_not_quantized(fields, str(name), name)
    is_known = found.kind in kinds
    is_ours = not found.is_targets_own and found.layout is None
    if kinds and not (is_known and (or_others or is_ours)):
        listed = in_words([str(kind) for kind in KINDS if kind in kinds], "or")
        step = f": save it first, `load_drafter({str(name)!r}).save_pretrained(FOLDER)`" if is_known else ""
        by_us = "" if or_others else ", saved by this package"
        raise ValueError(f"{name} is {found}, expected {listed}{by_us}{step}.")
    if needs_weights and not found.is_targets_own:  # which may be without the parts that have the target alone
        check_weights(name, "*.safetensors", *(found.kind.files if found.layout else ()))
    return found


def _no_drafter(fields: dict[str, Any], name: str | Path) -> str:
    if kind := unsupported_kind(fields, name):
        known = in_words([method for one in KINDS for method in one.known_as], "or")
        return (
            f"a drafter of a kind that is not read ({kind}): expected {known}. Take one of these for its target, or "
            "train one."
        )
    model = f"a model of type {fields.get('model_type')!r}"
    if fields.get("num_hidden_layers") == 1 and not Path(name).is_dir():  # where its tensors would tell
        return (
            f"{model} of one layer, or an EAGLE-1 drafter, whose config.json says no more: expected a drafter of a "
            "kind that is read."
        )
    return (
        f"{model}, expected a drafter. `hf-hyperdflash drafters {name}` lists those for it, and what it takes to "
        "make one."
    )


def check_not_quantized(fields: dict[str, Any], name: str, folder: str | Path) -> None:
    """Raise a `ValueError` that names what quantized another program's drafter, if something did: its config.json or,
    of ModelOpt, a file beside that in `folder` says so."""
    layers = fields.get("transformer_layer_config")
    sections = [fields, layers] if isinstance(layers, dict) else [fields]
    given = [part[field] for part in sections for field in _QUANTIZED if part.get(field)]
    of_modelopt = Path(folder, "hf_quant_config.json")
    if of_modelopt.is_file():
        given.append(
            {"quant_method": "modelopt", **json.loads(of_modelopt.read_text("utf-8")).get("quantization", {})}
        )
    if not given:
        return
    said = given[0] if isinstance(given[0], dict) else {}
    is_mlx = "quant_method" not in said and "group_size" in said
    method = "MLX" if is_mlx else said.get("quant_method", "a program that it does not name")
    kind = said.get("quant_algo") or said.get("format") or (f"{said['bits']} bits" if "bits" in said else "")
    raise ValueError(
        f"{name} is quantized by {method}{f' ({kind})' if kind else ''}, expected a drafter's weights as they were "
        "trained: take the original that it was made of."
    )


def check_weights(name: str | Path, *patterns: str) -> None:
    path = Path(name)
    if path.is_dir() and not weight_files(path) and not any(any(path.glob(pattern)) for pattern in patterns):
        pickle = next(path.glob("*.bin"), None)
        but = f": {pickle.name} is a pickle, which can run code, and is not read" if pickle else ""
        raise OSError(
            f"The folder {name} has no weights, expected model.safetensors{but}. Save or download them there."
        )


def read_fields(name: str | Path, what: str, **hub_kwargs: Unpack[HubOptions]) -> dict[str, Any]:
    check_source(name, what)
    if not Path(name).is_dir():
        cause: OSError | None = None
        try:
            if fields := PreTrainedConfig.get_config_dict(name, **hub_kwargs)[0]:
                return fields  # of a repository without a config.json there are none
        except OSError as error:
            cause = error
        asked = [
            f"`{option}` {hub_kwargs[option]!r}" for option in ("revision", "subfolder") if hub_kwargs.get(option)
        ]
        told = f" ({', '.join(asked)})" if asked else ""
        raise OSError(
            f"The folder {name} does not exist, and as a Hub id it has no configuration that can be loaded from "
            f"here{told}: no {what}. Check the name, the network, HF_HUB_OFFLINE and, for a private "
            "one, HF_TOKEN."
        ) from cause
    path = Path(name, "config.json")
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        why = f"is no JSON ({error.msg}, line {error.lineno}, column {error.colno})"
    except UnicodeDecodeError:
        why = "is no text in UTF-8"
    except OSError as error:
        why = f"cannot be read ({error.strerror})"
    else:
        if isinstance(fields, dict):
            return fields
        raise ValueError(f"The config.json of {name} holds a {type(fields).__name__}, expected an object.")
    raise OSError(f"{path} {why}. Copy or download it again.")


@contextmanager
def readable(name: str | Path) -> Iterator[None]:
    """Say in one line what is wrong with a checkpoint's files where transformers does not."""
    try:
        yield
    except SafetensorError as error:
        raise OSError(
            f"The weights of {name} are damaged ({error}): a file is cut off, or no safetensors. Copy or download it "
            "again."
        ) from error
    except StrictDataclassError as error:
        raise ValueError(f"The config.json of {name} has a wrong value: {error}") from error
    except TypeError as error:
        if "unexpected keyword argument" not in str(error):
            raise
        option = str(error).rpartition(" ")[2]
        raise ValueError(
            f"{option} is no option of loading {name}, expected those of `from_pretrained`: correct its name, or "
            "leave it out."
        ) from error
    except RuntimeError as error:
        if "ignore_mismatched_sizes" not in str(error):
            raise
        raise ValueError(
            f"The weights of {name} have other shapes than its config.json says: the two are of different models. "
            "Copy or download both again."
        ) from error
