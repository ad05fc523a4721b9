"""Targets and drafters by name: what is named is looked at first, minutes may lie before it is loaded."""

from __future__ import annotations

import copy
import json
import logging
import textwrap
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import psutil
import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from jinja2 import TemplateSyntaxError
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    DeepseekV4Config,
    GenerationConfig,
    GgufConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.integrations import deepspeed
from transformers.utils import cached_file
from transformers.utils.chat_template_utils import render_jinja_template
from transformers.utils.hub import extract_commit_hash

from ..decoding.request import Pair
from ..drafters.blocks.configuration_hyperdflash import HyperDFlashConfig
from ..drafters.parts.block_attention import FULL
from ..drafters.saved import SavedDrafter
from ..drafters.weights import (
    HubOptions,
    check_finite,
    check_names,
    check_source,
    named_dtype,
    resolve_subfolder,
    warn_of_float16,
)
from ..targets.deepseek_v4 import check_computes
from ..targets.registry import target_of
from .foreign import load_foreign
from .found import Found, check_drafter, check_weights, find, read_fields, readable, unsupported_kind
from .gguf import (
    cached,
    check_gguf,
    gguf_path,
    name_in_gguf,
    names_made_once,
    read_gguf_config,
    read_gguf_tokenizer,
    settle_target,
)
from .partial import NotApart, checkpoint_bytes, read_without_layers, remove_layers

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


@contextmanager
def _outside_zero3() -> Iterator[None]:
    """Load models whole on each process: transformers would shard them once DeepSpeed's ZeRO-3 is asked for, which is
    for the drafter that is trained, and from the time when it is."""
    given = deepspeed._hf_deepspeed_config_weak_ref
    deepspeed._hf_deepspeed_config_weak_ref = None
    try:
        yield
    finally:
        deepspeed._hf_deepspeed_config_weak_ref = given


def load_target(
    name: str, *, trust_remote_code: bool = False, without_layers: bool = False, **kwargs: Any
) -> PreTrainedModel:
    """Load a target of any family, in eval mode: a causal LM, or the multimodal class where a family has no other.
    `hf-hyperdflash drafters NAME` lists the drafters that are published for it.

    Args:
        name: Folder or Hub id, or a GGUF file in one: `folder/model.gguf`, `org/name/model.gguf`. Its weights are
            dequantized to `dtype`, float32 by default.
        trust_remote_code: Run the code that the target brings along.
        without_layers: Whether to load embedding, final norm, LM head and collapse alone, on the CPU, from the files
            that have them: what training reads beside a feature cache. FP8 and FP4 weights are dequantized. Where
            parts of the cache are missing, the target is loaded whole for the time that they are made.
        **kwargs: As of `from_pretrained`: `token`, `revision`, `subfolder`, `gguf_file` and others.

    Raises:
        ValueError: If it is a drafter, `dtype` is none, weights are missing or not finite, which transformers goes on
            with, or it is in GGUF and of an architecture that transformers does not read from there.
        OSError: If it cannot be found, or is damaged.
    """
    whole = cache(partial(_load_whole, name, trust_remote_code=trust_remote_code, **kwargs))
    name, kwargs = name_in_gguf(*resolve_subfolder(name, kwargs))
    where = {option: kwargs[option] for option in _WHERE if kwargs.get(option) is not None}
    check_target(name, **where)
    with readable(name), _outside_zero3():
        if "gguf_file" in where:
            target = _load_from_gguf(name, where, kwargs)
            target = remove_layers(target) if without_layers else target
        else:
            config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code, **where)
            # One for each part of a target may be given.
            if not isinstance(chosen := kwargs.get("dtype", kwargs.get("torch_dtype")), dict):
                saved_in = config.get_text_config(decoder=True).dtype or config.dtype
                warn_of_float16(name, saved_in, named_dtype(chosen))
            options = {**kwargs, "trust_remote_code": trust_remote_code}
            load = _load_without_layers if without_layers else _load_with
            target = load(config, name, options)
    _note_commit(target.config, name, where)
    logger.info("`hf-hyperdflash drafters %s` lists the drafters that are published for it.", name)
    if without_layers:
        vars(target)["load_whole"] = whole
    return target.eval()


def _load_whole(name: str, **kwargs: Any) -> PreTrainedModel:
    """Load a target for the features that are missing, or raise a `ValueError` where it cannot be here."""
    if (size := checkpoint_size(name)) > (memory := memory_here()):
        raise ValueError(
            f"The feature cache is not complete, and the weights of {name} take {size / 1e9:,.0f} GB, more than this "
            f"machine's memory, {memory / 1e9:,.0f} GB: make it elsewhere first, with the same rows."
        )
    return load_target(name, **kwargs)


def unloaded_target(name: str, *, trust_remote_code: bool = False, **where: Any) -> PreTrainedModel:
    """Return a target on the meta device: its configuration, sizes and names without weights, and the tokens that end
    its texts."""
    name, where = name_in_gguf(*resolve_subfolder(name, where))
    with readable(name):
        if "gguf_file" in where:
            config = read_gguf_config(name, where)
        else:
            config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code, **where)
        with torch.device("meta"):
            target: PreTrainedModel = _class_of(config).from_config(config, trust_remote_code=trust_remote_code)
        if "gguf_file" in where:
            settle_target(target, name, where)
        else:
            with suppress(OSError):  # a checkpoint may have none
                target.generation_config = GenerationConfig.from_pretrained(name, **where)
    target.config._name_or_path = str(Path(name, where["gguf_file"])) if "gguf_file" in where else name
    _note_commit(target.config, name, where)
    return target.eval()


def _note_commit(config: PreTrainedConfig, name: str, where: dict[str, Any]) -> None:
    """Note the commit of a repository on the Hub, which transformers 5.20 and later do not."""
    if not Path(name).exists() and getattr(config, "_commit_hash", None) is None:
        file = where.get("gguf_file") or "config.json"
        rest = {option: value for option, value in where.items() if option not in ("gguf_file", "code_revision")}
        with suppress(OSError):
            config._commit_hash = extract_commit_hash(cached_file(name, file, **rest), None)


def _load_with(config: PreTrainedConfig, name: str | Path, options: dict[str, Any]) -> PreTrainedModel:
    """Load a target by its configuration, with every tensor that this asks for, all finite."""
    _check_computes(config, options)
    target, info = _class_of(config).from_pretrained(name, output_loading_info=True, **options)
    check_names(name, missing=info["missing_keys"])
    check_finite(target.state_dict(), name)
    return cast(PreTrainedModel, target)


def checkpoint_size(name: str) -> int:
    """Return the bytes of a target's weights as they are stored, 0 where that is not known without loading them."""
    name, where = name_in_gguf(name, {})
    return Path(name, where["gguf_file"]).stat().st_size if where and Path(name).is_dir() else checkpoint_bytes(name)


def memory_here() -> int:
    """Return the bytes of this machine's memory and of its accelerators'."""
    devices = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    of_devices = sum(torch.cuda.get_device_properties(device).total_memory for device in devices)
    return psutil.virtual_memory().total + of_devices


def _load_without_layers(config: PreTrainedConfig, name: str, options: dict[str, Any]) -> PreTrainedModel:
    """Load a target without its decoder layers, whole before that where its files can only be read so."""
    _check_computes(config, options)
    where = {option: options[option] for option in _WHERE if options.get(option) is not None}
    chosen = named_dtype(options.get("dtype", options.get("torch_dtype")))
    dtype = chosen or named_dtype(config.get_text_config(decoder=True).dtype or config.dtype)
    try:
        with torch.device("meta"):
            code = {"trust_remote_code": options["trust_remote_code"]}
            empty = _class_of(config).from_config(config, **code)
        empty.config.name_or_path = name  # of a part of a configuration, too
        return read_without_layers(empty, name, where, dtype)
    except NotApart as error:
        logger.warning("The target is loaded whole, and its layers are dropped: %s.", error)
        return remove_layers(_load_with(config, name, options))


def _load_from_gguf(name: str, where: dict[str, Any], options: dict[str, Any]) -> PreTrainedModel:
    """Load a target from a GGUF file, or from the folder that it was kept in when it was read before."""
    asked = options.get("dtype", options.get("torch_dtype"))
    dtype = asked if isinstance(asked, dict) else named_dtype(asked) or torch.float32
    options = {**{option: options[option] for option in options.keys() - {"torch_dtype"}}, "dtype": dtype}

    def read() -> PreTrainedModel:
        config = read_gguf_config(name, where)
        # All weights become tensors of one dtype, as a drafter's embedding and LM head are.
        wanted = {**options, "quantization_config": GgufConfig(dequantize=True)}
        if not any(hasattr(config, option) for option in options.keys() - {"dtype"}):
            wanted["config"] = config  # else transformers has to read it again, with these options in it
        with names_made_once():
            target = _load_with(config, name, wanted)
        settle_target(target, name, where)
        return target

    def load(folder: Path) -> PreTrainedModel:
        others = {option: options[option] for option in options.keys() - {*_WHERE, "quantization_config"}}
        target = _load_with(AutoConfig.from_pretrained(folder), folder, others)
        # On a CPU safetensors leaves weights in the file's pages, where a forward is 4 % slower than in memory.
        for tensor in (*target.parameters(), *target.buffers()):
            tensor.data = tensor.data.clone() if tensor.device.type == "cpu" else tensor.data
        return target

    if isinstance(dtype, dict):
        target = read()
    else:
        is_as_read = options.keys() <= {*_WHERE, *_NOT_SAVED}
        target = cached(gguf_path(name, where), str(dtype).removeprefix("torch."), read, load, is_as_read)
    target.config._name_or_path = str(Path(name, where["gguf_file"]))
    return target


def default_dtype(name: str, is_exact: bool = True) -> str:
    """Return the dtype that commands load a target in where none is asked for: float32 on a CPU, where drafted text is
    then the target's own token for token, and the checkpoint's elsewhere, or bfloat16 where that is in GGUF. Where the
    text need not be float32's, a CPU that multiplies bfloat16 in hardware (AMX or AVX512-BF16) keeps that, too."""
    is_accelerated = torch.cuda.is_available()
    probes = ("_is_amx_tile_supported", "_is_avx512_bf16_supported")
    multiplies_bfloat16 = any(getattr(torch.cpu, probe, bool)() for probe in probes)
    if not is_accelerated and (is_exact or not multiplies_bfloat16):
        return "float32"
    name, options = name_in_gguf(name, {})
    if options:
        return "bfloat16"
    if is_accelerated:
        return "auto"
    with readable(name):
        config = AutoConfig.from_pretrained(name) if "auto_map" not in read_fields(name, "target") else None
    kept = config and named_dtype(config.get_text_config(decoder=True).dtype or config.dtype)
    with suppress(ValueError):  # of a DeepSeek-V4 before transformers 5.20
        if config and kept == torch.bfloat16:
            _check_computes(config, {"dtype": kept})
            return "bfloat16"
    return "float32"


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
    name_or_path: str | Path | Found,
    *,
    target: PreTrainedModel | None = None,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    sliding_window: int | None = None,
    **hub_kwargs: Unpack[HubOptions],
) -> SavedDrafter:
    """Load a drafter of any kind, in eval mode: ours, the one that a DeepSeek-V4 carries, or one in z-lab's,
    speculators' or DeepSpec's layout.

    Args:
        name_or_path: Folder or Hub id, or what [`~hub.found.check_drafter`] found there. Which kind it is is read from
            its config.json, and of a DeepSeek-V4, whose MTP block or DSpark drafter it is then, from the names of its
            tensors.
        target: Its target, if it is loaded: the drafter has to fit it, `drafter.bind(target)` comes next.
        dtype: Of the weights, or its name; by default the target's, or the checkpoint's.
        device: By default that of the target's LM head, or the CPU.
        sliding_window: How many tokens before the anchor a drafter of blocks is to see, for texts much longer than
            those that it was trained on; by default what its configuration says.
        **hub_kwargs: Where it is: `subfolder`, and for the Hub `revision`, `token`, `cache_dir`, `local_files_only`,
            ... Of a repository with several drafters, each in a folder, only the one in `subfolder` is downloaded.

    Raises:
        ValueError: If it is no drafter, its tensors are not those of its configuration, naming them, or it does not
            fit the target or can have no such window.
        OSError: If it cannot be found, is not in safetensors, or is damaged.
    """
    if target is not None:
        target_of(target)  # says what is no target
    if isinstance(device, str) and device != "meta":
        check_device(device, "device", ())
    dtype = named_dtype(dtype)
    if isinstance(name_or_path, Found):
        found = name_or_path
    else:
        name, hub_kwargs = resolve_subfolder(name_or_path, hub_kwargs)
        found = check_drafter(name, **hub_kwargs)
    if sliding_window is not None:
        set_window(copy.deepcopy(found.config), sliding_window, found.name)  # before weights are loaded
    if target is not None:
        head = cast(torch.Tensor, target.get_output_embeddings().weight)
        dtype, device = dtype or target.dtype, device or (None if head.is_meta else head.device)
    drafter: Any
    with readable(found.name), _outside_zero3():
        if found.layout:
            drafter = load_foreign(found, target, dtype)
        elif found.is_targets_own:
            drafter = found.kind.drafter.from_target(found.name, dtype=dtype, device=device, **found.hub_kwargs)
        else:
            drafter = found.kind.drafter.from_pretrained(
                found.name, dtype=dtype or "auto", device_map={"": device or "cpu"}, **found.hub_kwargs
            )
    if sliding_window is not None:
        set_window(drafter.config, sliding_window, found.name)
    if target is not None:
        Pair.checked(target_of(target), drafter)
    return cast(SavedDrafter, drafter.to(device or "cpu"))


def set_window(config: PreTrainedConfig | None, window: int, name: str | Path) -> None:
    """Let all layers of a drafter see the last tokens alone, or raise a `ValueError` where they cannot."""
    kinds = {*config.kinds} if isinstance(config, HyperDFlashConfig) else set()
    if not isinstance(config, HyperDFlashConfig) or len(kinds) != 1:
        seen = "layers that were trained with a window and without" if kinds else "no layers that can have a window"
        raise ValueError(
            f"`sliding_window` is {window!r}, but {name} has {seen}: leave it out, or load a drafter of blocks "
            "whose layers are all alike."
        )
    if FULL in kinds and config.causal_layers == "sliding":
        config.causal_layers = "none"  # as these were
    config.layer_types, config.sliding_window = None, window
    config.check()


def check_device(device_map: str, option: str = "--device-map", spread: Collection[str] = _SPREAD) -> None:
    """Raise a `ValueError` if a model cannot be put there."""
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
    """Raise a `ValueError` or an `OSError` if `name` is not a model to draft for."""
    name, hub_kwargs = name_in_gguf(name, hub_kwargs)
    if hub_kwargs.get("gguf_file") is not None:
        if not Path(name).is_dir():
            check_source(name, "target")
        check_gguf(name, hub_kwargs["gguf_file"])
        return
    fields = read_fields(name, "target", **hub_kwargs)
    if found := find(fields, name):
        raise ValueError(f"{name} is {found}, expected the target that it drafts for: give it as the drafter.")
    if unread := unsupported_kind(fields, name):
        raise ValueError(
            f"{name} is a drafter of a kind that is not read ({unread}), expected the target that it drafts for."
        )
    kind = fields.get("model_type")
    if kind not in CONFIG_MAPPING and "auto_map" not in fields:
        raise ValueError(
            f"The config.json of {name} has `model_type` {kind!r}, expected one that transformers "
            f"{transformers.__version__} knows. Update transformers, or correct it."
        )
    check_weights(name, "*.safetensors", "*.bin")


def check_made_for(target: str, drafter: str | Found, num_draft_tokens: int | str | None = None) -> None:
    """Raise the `ValueError` of binding if a drafter is not for a target, or that of drafting if it cannot draft so
    many tokens, by their configurations, before weights are loaded. The target has passed `check_target`."""
    found = drafter if isinstance(drafter, Found) else check_drafter(drafter)
    target, options = name_in_gguf(target, {})
    # Left for later: drafters whose sizes only weights tell, and targets whose own code may not be built without them.
    is_sized_later = found.is_targets_own or (found.layout is not None and found.layout.is_sized_by_tensors)
    if is_sized_later or (not options and "auto_map" in read_fields(target, "target")):
        return
    with readable(target):
        config = read_gguf_config(target, options) if options else AutoConfig.from_pretrained(target)
    with torch.device("meta"), readable(found.name):
        own = copy.deepcopy(found.config)
        if found.layout:
            found.layout.complete_from_target(cast(PreTrainedConfig, own), found.fields, config)
        unloaded = found.kind.drafter(own)
        model = _class_of(config).from_config(config)
        model.config._name_or_path = ""  # only a name that differs is warned of once it is loaded
        unloaded.check_target(target_of(model))
    if num_draft_tokens is not None:
        unloaded.check_num_draft_tokens(num_draft_tokens)


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
    with readable(name):
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
