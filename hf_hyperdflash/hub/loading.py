"""Targets and drafters by name: what is named is looked at first, minutes may lie before it is loaded."""

from __future__ import annotations

import json
import logging
import textwrap
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from jinja2 import TemplateSyntaxError
from safetensors import SafetensorError
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    DeepseekV4Config,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import cached_file
from transformers.utils.chat_template_utils import render_jinja_template

from ..decoding.proposals import checked_pair
from ..drafters.deepseek_v4.drafter import DeepseekV4Drafter, own_checkpoint
from ..drafters.saved import SavedDrafter
from ..drafters.weights import (
    HubOptions,
    check_finite,
    check_names,
    check_source,
    named_dtype,
    resolve_subfolder,
    tensor_names,
    warn_of_float16,
    weight_files,
)
from ..targets.deepseek_v4 import check_computes
from ..targets.registry import target_of
from .formats import check_not_quantized, foreign_layout, foreign_without_weights, kind_not_read, load_foreign
from .gguf import (
    check_gguf,
    dequantized,
    gguf_path,
    name_in_gguf,
    names_made_once,
    read_gguf_config,
    read_gguf_tokenizer,
    settle_target,
)
from .gguf_cache import cached
from .kinds import KINDS, DrafterKind, kind_in
from .layouts.table import Layout

if TYPE_CHECKING:
    from typing_extensions import Unpack

logger = logging.getLogger(__name__)

_SPREAD = ("auto", "balanced", "balanced_low_0", "sequential")  # the ways to put a target on several devices
# Of `from_pretrained`'s options those that say where a target's files are: whatever is read of it is read there.
_WHERE = (
    "token", "revision", "code_revision", "subfolder", "cache_dir", "local_files_only", "force_download", "gguf_file",
)  # fmt: skip
# Those that change nothing that `save_pretrained` writes; the dtype is a part of where a GGUF file is kept.
_NOT_SAVED = ("dtype", "device_map", "attn_implementation", "quantization_config")


class FoundDrafter(NamedTuple):
    """A drafter that was looked at, and is not loaded yet.

    Attributes:
        kind: What it is.
        layout: How its config.json is read, if another program wrote it.
        is_targets_own: Whether it is in the checkpoint of its target, a DeepSeek-V4.
    """

    kind: DrafterKind
    layout: Layout | None = None
    is_targets_own: bool = False

    def __str__(self) -> str:
        if self.is_targets_own:
            return "a DeepSeek-V4 with a drafter of its own"
        return "a drafter in another program's layout" if self.layout else str(self.kind)

    def load(
        self,
        name: str | Path,
        target: PreTrainedModel | None,
        dtype: torch.dtype | str,
        device: torch.device | str | None,
        hub_kwargs: HubOptions,
    ) -> SavedDrafter:
        """Load it from where it was found, as [`load_drafter`] does."""
        if self.layout:
            return load_foreign(name, target=target, dtype=dtype, **hub_kwargs)
        if self.is_targets_own:
            return cast(SavedDrafter, self.kind.drafter.from_target(name, dtype=dtype, device=device, **hub_kwargs))
        drafter: SavedDrafter = self.kind.drafter.from_pretrained(
            name, dtype=dtype, device_map={"": device or "cpu"}, **hub_kwargs
        )
        return drafter

    def unloaded(self, name: str, fields: dict[str, Any]) -> SavedDrafter:
        """Return the same drafter with fresh weights, by its configuration `fields`."""
        if self.layout:
            return foreign_without_weights(fields, name)
        return cast(SavedDrafter, self.kind.drafter(self.kind.config.from_pretrained(name)))


def load_target(name: str, *, trust_remote_code: bool = False, **kwargs: Any) -> PreTrainedModel:
    """Load a target of any family, in eval mode: a causal LM, or the multimodal class where a family has no other.
    `hf-hyperdflash drafters NAME` lists the drafters that are published for it.

    Args:
        name: Folder or Hub id, or a GGUF file in one: `folder/model.gguf`, `org/name/model.gguf`. Its weights are
            dequantized to `dtype`, float32 by default.
        trust_remote_code: Run the code that the target brings along.
        **kwargs: As of `from_pretrained`: `token`, `revision`, `subfolder`, `gguf_file` and others.

    Raises:
        ValueError: If it is a drafter, `dtype` is none, weights are missing or not finite, which transformers goes on
            with, or it is in GGUF and of an architecture that transformers does not read from there.
        OSError: If it cannot be found, or is damaged.
    """
    name, kwargs = name_in_gguf(*resolve_subfolder(name, kwargs))
    where = {option: kwargs[option] for option in _WHERE if kwargs.get(option) is not None}
    check_target(name, **where)
    for dtype in (kwargs.get("dtype"), kwargs.get("torch_dtype")):
        if not isinstance(dtype, dict):  # one for each part of a target
            named_dtype(dtype)
    with _readable(name):
        if "gguf_file" in where:
            target = _load_from_gguf(name, where, kwargs)
        else:
            config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code, **where)
            if not isinstance(chosen := kwargs.get("dtype", kwargs.get("torch_dtype")), dict):
                saved_in = config.get_text_config(decoder=True).dtype or config.dtype
                warn_of_float16(name, saved_in, named_dtype(chosen))
            target = _load_with(config, name, {**kwargs, "trust_remote_code": trust_remote_code})
    logger.info("`hf-hyperdflash drafters %s` lists the drafters that are published for it.", name)
    return target.eval()


def _load_with(config: PreTrainedConfig, name: str | Path, options: dict[str, Any]) -> PreTrainedModel:
    """Load a target by its configuration, with every tensor that this asks for, all finite."""
    _check_computes(config, options)
    target, info = _class_of(config).from_pretrained(name, output_loading_info=True, **options)
    check_names(name, missing=info["missing_keys"])
    check_finite(target.state_dict(), name)
    return cast(PreTrainedModel, target)


def _load_from_gguf(name: str, where: dict[str, Any], options: dict[str, Any]) -> PreTrainedModel:
    """Load a target from a GGUF file, or from the folder that it was kept in when it was read before."""
    asked = options.get("dtype", options.get("torch_dtype"))
    dtype = asked if isinstance(asked, dict) else named_dtype(asked) or torch.float32
    options = {**{option: options[option] for option in options.keys() - {"torch_dtype"}}, "dtype": dtype}

    def read() -> PreTrainedModel:
        config = read_gguf_config(name, where)
        with names_made_once():
            target = _load_with(config, name, dequantized(options, config))
        settle_target(target, name, where)
        return target

    def load(folder: Path) -> PreTrainedModel:
        others = {option: options[option] for option in options.keys() - {*_WHERE, "quantization_config"}}
        return _load_with(AutoConfig.from_pretrained(folder), folder, others)

    def save(target: PreTrainedModel, folder: Path) -> None:
        target.save_pretrained(folder, max_shard_size="5GB")  # which a shard takes of the memory, too

    if isinstance(dtype, dict):
        target = read()
    else:
        is_as_read = options.keys() <= {*_WHERE, *_NOT_SAVED}
        target = cached(
            gguf_path(name, where), str(dtype).removeprefix("torch."), read, load, save if is_as_read else None,
            size=lambda target: target.get_memory_footprint(),
        )  # fmt: skip
    target.config._name_or_path = str(Path(name, where["gguf_file"]))
    return target


def default_dtype(name: str, is_exact: bool = True) -> str:
    """Return the dtype that commands load a target in where none is asked for: float32 on a CPU, where drafted text is
    then the target's own token for token, and the checkpoint's elsewhere, or bfloat16 where that is in GGUF.

    Args:
        name: As of [`load_target`].
        is_exact: Whether the text has to be float32's. If not, a CPU that multiplies bfloat16 in hardware (AMX or
            AVX512-BF16) keeps a checkpoint of bfloat16, and reads one in GGUF as bfloat16.
    """
    is_accelerated = torch.cuda.is_available()
    if not is_accelerated and (is_exact or not _multiplies_bfloat16()):
        return "float32"
    name, options = name_in_gguf(name, {})
    if options:
        return "bfloat16"
    if is_accelerated:
        return "auto"
    with _readable(name):
        config = AutoConfig.from_pretrained(name) if "auto_map" not in _configuration(name, "target") else None
    kept = config and named_dtype(config.get_text_config(decoder=True).dtype or config.dtype)
    with suppress(ValueError):  # of a DeepSeek-V4 before transformers 5.20
        if config and kept == torch.bfloat16:
            _check_computes(config, {"dtype": kept})
            return "bfloat16"
    return "float32"


def _multiplies_bfloat16() -> bool:
    probes = ("_is_amx_tile_supported", "_is_avx512_bf16_supported")
    return any(getattr(torch.cpu, probe, bool)() for probe in probes)


def _check_computes(config: PreTrainedConfig, asked: dict[str, Any]) -> None:
    """Raise a `ValueError` before weights are loaded that the installed transformers cannot compute with."""
    dtype = asked.get("dtype", asked.get("torch_dtype"))
    is_stock = type(config) is DeepseekV4Config and not getattr(config, "auto_map", None)
    if is_stock and not isinstance(dtype, dict) and (chosen := named_dtype(dtype) or named_dtype(config.dtype)):
        check_computes(chosen)


def _class_of(config: PreTrainedConfig) -> Any:
    kind: Any = AutoModelForCausalLM
    if type(config) in AutoModelForImageTextToText._model_mapping and type(config) not in kind._model_mapping:
        return AutoModelForImageTextToText
    return kind


def load_drafter(
    name_or_path: str | Path,
    *,
    target: PreTrainedModel | None = None,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    **hub_kwargs: Unpack[HubOptions],
) -> SavedDrafter:
    """Load a drafter of any kind, in eval mode: ours, the one that a DeepSeek-V4 carries, or one in z-lab's,
    speculators' or DeepSpec's layout.

    Args:
        name_or_path: Folder or Hub id. Which kind it is is read from its config.json, and of a DeepSeek-V4, whose MTP
            block or DSpark drafter it is then, from the names of its tensors.
        target: Its target, if it is loaded: the drafter has to fit it, `drafter.bind(target)` comes next.
        dtype: Of the weights, or its name; by default the target's, or the checkpoint's.
        device: By default that of the target's LM head, or the CPU.
        **hub_kwargs: Where it is: `subfolder`, and for the Hub `revision`, `token`, `cache_dir`, `local_files_only`,
            ... Of a repository with several drafters, each in a folder, only the one in `subfolder` is downloaded.

    Raises:
        ValueError: If it is no drafter, its tensors are not those of its configuration, naming them, or it does not
            fit the target.
        OSError: If it cannot be found, is not in safetensors, or is damaged.
    """
    if target is not None:
        target_of(target)  # says what is no target
    if isinstance(device, str) and device != "meta":
        check_device(device, "device", ())
    name_or_path, hub_kwargs = resolve_subfolder(name_or_path, hub_kwargs)
    found, dtype = check_drafter(name_or_path, **hub_kwargs), named_dtype(dtype)
    if target is not None:
        head = cast(torch.Tensor, target.get_output_embeddings().weight)
        dtype, device = dtype or target.dtype, device or (None if head.is_meta else head.device)
    with _readable(name_or_path):
        drafter = found.load(name_or_path, target, dtype or "auto", device, hub_kwargs)
    if target is not None:
        checked_pair(target_of(target), cast(SavedDrafter, drafter))
    return cast(SavedDrafter, cast(Any, drafter).to(device or "cpu"))


def load_own_drafter(
    target: PreTrainedModel | str | Path,
    *,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    **hub_kwargs: Unpack[HubOptions],
) -> DeepseekV4Drafter:
    """Load the drafter that a DeepSeek-V4's checkpoint carries: April's MTP block, July's DSpark drafter.

    Args:
        target: As of [`DeepseekV4Drafter.from_target`], as everything else.

    Raises:
        ValueError: If it is no DeepSeek-V4, or its checkpoint has no drafter.
    """
    kind = _own_kind(target, **hub_kwargs)
    return cast(DeepseekV4Drafter, kind.drafter.from_target(target, dtype=dtype, device=device, **hub_kwargs))


def _own_kind(target: PreTrainedModel | str | Path, **hub_kwargs: Unpack[HubOptions]) -> DrafterKind:
    name = own_checkpoint(target, **hub_kwargs).drafter
    return next(kind for kind in KINDS if kind.class_name == name)


def check_device(device_map: str, option: str = "--device-map", spread: Collection[str] = _SPREAD) -> None:
    """Raise a `ValueError` if a model cannot be put there.

    Args:
        device_map: A device, or one of `spread`.
        option: What it was given as.
        spread: The ways to put it on several devices.
    """
    if device_map in spread:
        return
    try:
        device = torch.device(device_map)
    except RuntimeError as error:
        raise ValueError(
            f"`{option}` is {device_map!r}, expected {', '.join([*spread, 'a device such as cpu or cuda:0'])}."
        ) from error
    here = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    count = torch.accelerator.device_count() if here else 0
    if device.type != "cpu" and (here is None or device.type != here.type or (device.index or 0) >= count):
        seen = f"{count} devices of type {here}" if here else "only a cpu"
        raise ValueError(
            f"`{option}` is {device_map!r}, but this torch sees {seen}. Leave it out, or install torch for your "
            "accelerator."
        )


def check_target(name: str, **hub_kwargs: Unpack[HubOptions]) -> None:
    """Raise a `ValueError` or an `OSError` if `name` is not a model to draft for.

    Args:
        name: As of [`load_target`].
        **hub_kwargs: For the Hub, and `gguf_file`.
    """
    name, hub_kwargs = name_in_gguf(name, hub_kwargs)
    if hub_kwargs.get("gguf_file") is not None:
        if not Path(name).is_dir():
            check_source(name, "target")
        check_gguf(name, hub_kwargs["gguf_file"])
        return
    fields = _configuration(name, "target", **hub_kwargs)
    if found := _found(fields):
        raise ValueError(f"{name} is {found}, expected the target that it drafts for: give it as the drafter.")
    if unread := _not_read(fields, name):
        raise ValueError(
            f"{name} is a drafter of a kind that is not read ({unread}), expected the target that it drafts for."
        )
    kind = fields.get("model_type")
    if kind not in CONFIG_MAPPING and "auto_map" not in fields:
        raise ValueError(
            f"The config.json of {name} has `model_type` {kind!r}, expected one that transformers "
            f"{transformers.__version__} knows. Update transformers, or correct it."
        )
    _check_weights(name, "*.safetensors", "*.bin")


def check_drafter(
    name: str | Path,
    *,
    kinds: Collection[DrafterKind] = (),
    needs_weights: bool = True,
    or_others: bool = False,
    **hub_kwargs: Unpack[HubOptions],
) -> FoundDrafter:
    """Look at a drafter before it is loaded.

    Args:
        name: Path or Hub id.
        kinds: Those of which it must be, saved by this package; any, in any layout, if empty.
        needs_weights: Whether its configuration is not enough.
        or_others: Whether one of `kinds` in another program's layout will do as well.
        **hub_kwargs: For the Hub.

    Raises:
        ValueError: If it is no drafter.
        OSError: If there is none, or it is not whole.
    """
    fields = _configuration(name, "drafter", **hub_kwargs)
    found = _found(fields)
    if not found and fields.get("model_type") == DeepseekV4Config.model_type:
        with _readable(name):
            found = FoundDrafter(_own_kind(name, **hub_kwargs), is_targets_own=True)  # says what it has not
    if not found and (kind := _not_read(fields, name)):
        known = [method for one in KINDS for method in one.known_as]
        raise ValueError(
            f"{name} is a drafter of a kind that is not read ({kind}): expected {', '.join(known[:-1])} or "
            f"{known[-1]}. Take one of these for its target, or train one."
        )
    if not found and fields.get("num_hidden_layers") == 1 and not Path(name).is_dir():  # where its tensors would tell
        raise ValueError(
            f"{name} is a model of type {fields.get('model_type')!r} of one layer, or an EAGLE-1 drafter, whose "
            "config.json says no more: expected a drafter of a kind that is read."
        )
    if not found:
        raise ValueError(
            f"{name} is a model of type {fields.get('model_type')!r}, expected a drafter. "
            f"`hf-hyperdflash drafters {name}` lists those for it, and what it takes to make one."
        )
    if found.layout:
        check_not_quantized(fields, str(name), name)
    is_saved_here = not found.layout and not found.is_targets_own
    is_theirs = bool(found.layout) and found.kind in kinds
    if kinds and not (is_saved_here and found.kind in kinds) and not (is_theirs and or_others):
        named = [str(kind) for kind in KINDS if kind in kinds]
        listed = ", ".join(named[:-1]) + " or " * (len(named) > 1) + named[-1]
        step = f": save it first, `load_drafter({str(name)!r}).save_pretrained(FOLDER)`" if is_theirs else ""
        raise ValueError(f"{name} is {found}, expected {listed}, saved by this package{step}.")
    if needs_weights and not found.is_targets_own:  # which may be without the parts that have the target alone
        _check_weights(name, "*.safetensors", *(found.kind.files if found.layout else ()))
    return found


def drafter_config(found: FoundDrafter, name: str) -> PreTrainedConfig | None:
    """Return the configuration of a drafter that was looked at; `None` for the one in a target's checkpoint.

    Raises:
        ValueError: If it has parts that cannot be reproduced here, naming them.
    """
    if found.is_targets_own:
        return None
    if found.layout:
        return cast(PreTrainedConfig, found.layout.read(_configuration(name, "drafter"), name))
    return cast(PreTrainedConfig, found.kind.config.from_pretrained(name))


def check_made_for(target: str, drafter: str, num_draft_tokens: int | str | None = None) -> None:
    """Raise the `ValueError` of binding if a drafter is not for a target, or that of drafting if it cannot draft so
    many tokens, by their configurations, before weights are loaded. Both have passed `check_target` and
    `check_drafter`.

    Left for later: targets with code of their own, which may not be built without weights, the drafter of another
    DeepSeek-V4's checkpoint, and drafters whose sizes only their weights tell.
    """
    found = check_drafter(drafter)
    is_sized_later = found.layout is not None and found.layout.is_sized_by_tensors
    target, options = name_in_gguf(target, {})
    if found.is_targets_own or is_sized_later or (not options and "auto_map" in _configuration(target, "target")):
        return
    with _readable(target):
        config = read_gguf_config(target, options) if options else AutoConfig.from_pretrained(target)
    with torch.device("meta"), _readable(drafter):
        unloaded = found.unloaded(drafter, _configuration(drafter, "drafter"))
        model = _class_of(config).from_config(config)
        model.config._name_or_path = ""  # only a name that differs is warned of once it is loaded
        unloaded.check_target(target_of(model))
    if num_draft_tokens is not None:
        unloaded.check_num_draft_tokens(num_draft_tokens)


def _not_read(fields: dict[str, Any], name: str | Path) -> str:
    """Return what kind of drafter it is, if of one that is not read, by its config.json or, in a folder, by its
    tensors."""
    kind = kind_not_read(fields)
    if kind or foreign_layout(fields) or not Path(name).is_dir():
        return kind
    names = {tensor.removeprefix("model.") for tensor in tensor_names(Path(name))}
    if "fc.weight" not in names:
        return ""
    if any(tensor.startswith(("midlayer.", "layers.0.hidden_norm.")) for tensor in names):
        raise ValueError(
            f'{name} is an EAGLE-3 drafter by its tensors, but its config.json does not say so: add `"architectures": '
            '["LlamaForCausalLMEagle3"]` there.'
        )
    return "EAGLE-1 or EAGLE-2"


def _found(fields: dict[str, Any]) -> FoundDrafter | None:
    """Return a drafter's kind by its config.json, ours first; `None` if it is none that is read."""
    if kind := kind_in(fields):
        return FoundDrafter(kind)
    found = foreign_layout(fields)
    return found and FoundDrafter(*found)


def read_config(folder: str | Path) -> PreTrainedConfig:
    """Return the configuration of the drafter saved in `folder`, of any kind that this package saves.

    Raises:
        ValueError: If it is none of these, or has a wrong value.
        OSError: If there is none.
    """
    if not Path(folder, "config.json").is_file():
        raise FileNotFoundError(f"The folder {folder} has no config.json, expected that of a drafter.")
    fields = PreTrainedConfig.get_config_dict(folder)[0]
    kind = kind_in(fields)
    if kind is None:
        known = ", ".join(repr(kind.model_type) for kind in KINDS)
        raise ValueError(
            f"The config.json in {folder} has `model_type` {fields.get('model_type')!r}, expected that of a drafter: "
            f"one of {known}."
        )
    with _readable(folder):
        return kind.config.from_pretrained(folder)


def _check_weights(name: str | Path, *patterns: str) -> None:
    path = Path(name)
    if (
        path.is_dir()
        and not weight_files(path)
        and not any(file for pattern in patterns for file in path.glob(pattern))
    ):
        pickle = next(path.glob("*.bin"), None)
        but = f": {pickle.name} is a pickle, which can run code, and is not read" if pickle else ""
        raise OSError(
            f"The folder {name} has no weights, expected model.safetensors{but}. Save or download them there."
        )


def _configuration(name: str | Path, what: str, **hub_kwargs: Unpack[HubOptions]) -> dict[str, Any]:
    check_source(name, what)
    if not Path(name).is_dir():
        cause: OSError | None = None
        try:
            if fields := PreTrainedConfig.get_config_dict(name, **hub_kwargs)[0]:
                return fields  # of a repository without a config.json there are none
        except OSError as error:
            cause = error
        raise OSError(
            f"The folder {name} does not exist, and as a Hub id it has no configuration that can be loaded from "
            f"here{_said(hub_kwargs)}: no {what}. Check the name, the network, HF_HUB_OFFLINE and, for a private "
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


def _said(hub_kwargs: HubOptions) -> str:
    """Say which part of a repository was asked for, in words."""
    asked = [f"`{option}` {hub_kwargs[option]!r}" for option in ("revision", "subfolder") if hub_kwargs.get(option)]
    return f" ({', '.join(asked)})" if asked else ""


@contextmanager
def _readable(name: str | Path) -> Iterator[None]:
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


def load_tokenizer(name: str, trust_remote_code: bool = False, **kwargs: Any) -> PreTrainedTokenizerBase:
    """Load a target's tokenizer. One from GGUF has the special tokens that its file says, whatever transformers reads.

    Args:
        name: As of [`load_target`].
        trust_remote_code: Run the code that it brings along.
        **kwargs: As of `from_pretrained`: `token`, `revision`, `subfolder`, `gguf_file` and others.

    Raises:
        OSError: If there is none, or it cannot be read.
        ValueError: If its chat template is none.
    """
    name, kwargs = name_in_gguf(*resolve_subfolder(name, kwargs))
    with _readable(name):
        try:
            if kwargs.get("gguf_file") is not None:
                where = {option: kwargs[option] for option in kwargs.keys() & {*_WHERE}}
                tokenizer = read_gguf_tokenizer(name, where, kwargs)
            else:
                tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code, **kwargs)
                if not tokenizer.chat_template:  # models with images keep it with the processor
                    where = {option: kwargs[option] for option in kwargs.keys() & {*_WHERE, "revision"}}
                    file = cached_file(
                        name, "chat_template.json", _raise_exceptions_for_missing_entries=False, **where
                    )
                    if file is not None:
                        tokenizer.chat_template = json.loads(Path(file).read_text("utf-8"))["chat_template"]
        except (StrictDataclassError, ImportError):  # which have their own words
            raise
        except Exception as error:
            raise OSError(
                f"{name} has no tokenizer that can be loaded ({type(error).__name__}: "
                f"{textwrap.shorten(str(error), 150)}). Save the target's own there (tokenizer.json, "
                "tokenizer_config.json)."
            ) from error
    templates = tokenizer.chat_template or {}
    try:
        for template in templates.values() if isinstance(templates, dict) else [templates]:
            render_jinja_template(conversations=[], chat_template=template)  # of none: a template may refuse a text
    except TemplateSyntaxError as error:
        raise ValueError(
            f"The chat template of {name} is no Jinja template: {error.message}, line {error.lineno}. Correct its "
            "chat_template.jinja."
        ) from error
    return tokenizer
