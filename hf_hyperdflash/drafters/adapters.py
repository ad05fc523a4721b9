"""LoRA adapters of a drafter: small changes of its linear layers, one for each kind of text, chosen by request.

They are PEFT's, in its layout. A text keeps its adapter, as the keys in its context are made with it. All threads
share a drafter, so an adapter is chosen for this thread's forwards ([`using`]) and not by a state of the modules.
Texts of a batch with different adapters draft in one pass where its rows are the texts, else in one for each adapter.
"""

from __future__ import annotations

import copy
import json
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from importlib import import_module
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.utils import cached_file

from .parts.heads import HEADS
from .weights import check_finite, check_names, named_dtype, resolve_subfolder

if TYPE_CHECKING:
    from peft import LoraConfig
    from typing_extensions import Unpack

    from .weights import HubOptions

logger = logging.getLogger(__name__)

BASE = "__base__"  # PEFT's name for no adapter
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."  # of names in PEFT's files
# Modules of which others read the weight or an attribute, where an adapter of the module would not be seen.
_READ_WHOLE = (*(head.key for head in HEADS.values()), "confidence_head", "rank_head", "lm_head")
# Fields of a LoRA configuration that change more than what is added to a linear layer: what they have to be.
_PLAIN = {
    "bias": "none", "use_dora": False, "modules_to_save": None, "target_parameters": None,
    "trainable_token_indices": None, "layer_replication": None,
}  # fmt: skip
_STARTS = (True, False, "gaussian", "orthogonal")  # `init_lora_weights` by which the drafter's own weights stay

_chosen: ContextVar[str | tuple[str, ...] | None] = ContextVar("_chosen", default=None)


@contextmanager
def using(adapter: str | tuple[str, ...] | None) -> Iterator[None]:
    """Run this thread's forwards of drafters with an adapter inside the `with`, or with one for each of their rows;
    [`BASE`] for none; `None` for the one that is set ([`WithAdapters.set_adapter`])."""
    token = _chosen.set(adapter)
    try:
        yield
    finally:
        _chosen.reset(token)


def chosen_adapter() -> str | tuple[str, ...] | None:
    """Return the adapter that this thread's forwards run with, as in [`using`]."""
    return _chosen.get()


def linear_layers(drafter: nn.Module) -> list[str]:
    """Return the names of the layers that an adapter may change: linear ones that are called, outside of heads."""
    named = [name for name, module in drafter.named_modules() if type(module) is nn.Linear and ".lora_" not in name]
    return [name.removesuffix(".base_layer") for name in named if not name.startswith(_READ_WHOLE)]


def lora_config(drafter: nn.Module, rank: int) -> LoraConfig:
    """Return the configuration of an adapter of all layers that may have one."""
    config: LoraConfig = import_module("peft").LoraConfig(
        r=rank, lora_alpha=2 * rank, target_modules=linear_layers(drafter)
    )
    return config


def check_adapter(drafter: object, name: object) -> str:
    """Return `name`, or raise a `ValueError` if it is not the name of one of the drafter's adapters."""
    names: tuple[str, ...] = getattr(drafter, "adapters", ())
    if name in names:
        return cast(str, name)
    known = ", ".join(map(repr, names))
    raise ValueError(
        f"`adapter` is {name!r}, expected "
        + (f"one of {known}, or None for no adapter" if known else "None: the drafter has no adapters")
        + ". `drafter.load_adapter(FOLDER, NAME)` loads one."
    )


class WithAdapters:
    """A drafter's LoRA adapters, under the names of transformers' methods, whose own ask for a PEFT that may not be
    there yet.

    Attributes:
        rows_are_texts: Whether all passes of `draft` have a row for each text, in the order of the requests. Then
            texts with different adapters draft in one pass.
    """

    rows_are_texts = False
    _has_adapters = False
    _hf_peft_config_loaded = False
    _set_adapter: str | None = None

    @property
    def adapters(self) -> tuple[str, ...]:
        """The names of its adapters."""
        return tuple(cast(Any, self).peft_config) if self._has_adapters else ()

    def active_adapters(self) -> list[str]:
        """Return the adapter that is set, in a list; an empty one for none."""
        return [] if self._set_adapter is None else [self._set_adapter]

    def set_adapter(self, adapter_name: str | list[str] | None) -> None:
        """Set the adapter of calls that name none. Texts that are being written keep theirs.

        Args:
            adapter_name: One of [`adapters`]; `None` for none, as [`disable_adapters`] does.

        Raises:
            ValueError: If there is no such adapter.
        """
        (name,) = adapter_name if isinstance(adapter_name, list) and len(adapter_name) == 1 else (adapter_name,)
        self._set(None if name is None else check_adapter(self, name))

    def disable_adapters(self) -> None:
        """Let calls that name no adapter draft without one, and [`save_pretrained`] save the drafter itself."""
        self._set(None)

    def add_adapter(self, adapter_config: LoraConfig, adapter_name: str | None = None) -> None:
        """Add a new LoRA adapter, which changes nothing yet, and set it. `drafter.adapt(target, adapter=NAME)` trains
        it while serving, `hf-hyperdflash train --drafter FOLDER --lora_rank N` makes one from rows.

        Args:
            adapter_config: PEFT's. Without `target_modules` it changes all linear layers that it may.
            adapter_name: By which requests choose it; `"default"` if left out.

        Raises:
            ValueError: If the configuration is not of a LoRA adapter of this drafter's linear layers, or the name is
                not free.
        """
        config = copy.copy(adapter_config)
        config.base_model_name_or_path = getattr(self, "name_or_path", None)
        name = adapter_name or "default"
        self._inject(config, name, f"The adapter {name!r}")
        self._set(name)

    def load_adapter(
        self,
        peft_model_id: str | Path | None = None,
        adapter_name: str | None = None,
        *others: Any,
        **hub_kwargs: Any,
    ) -> Any:
        """Load a LoRA adapter in PEFT's layout, and set it.

        Args:
            peft_model_id: Folder or Hub id.
            adapter_name: By which requests choose it; `"default"` if left out.
            *others: Of transformers' own method alone.
            **hub_kwargs: Where it is, as of [`~hub.loading.load_drafter`].

        Raises:
            ValueError: If it is not an adapter of this drafter's linear layers, it is damaged, or the name is not
                free.
            OSError: If it cannot be found, or is not in safetensors.
        """
        name, what = adapter_name or "default", str(peft_model_id)
        if peft_model_id is None or others or "load_config" in hub_kwargs:  # `from_pretrained` of an adapter
            info = cast(Any, super()).load_adapter(peft_model_id, adapter_name, *others, **hub_kwargs)
            with suppress(ValueError):  # else it is PEFT's alone
                self._check_config(copy.copy(cast(Any, self).peft_config[name]), what)
                self._hf_peft_config_loaded = False  # by which transformers would save adapters itself
                self._manage(name)
                self._set(name)
            return info
        config, weights = read_adapter(peft_model_id, **hub_kwargs)
        self._inject(config, name, what)
        own = self._lora_tensors(name)
        given = {key.removeprefix(_PREFIX): tensor for key, tensor in weights.items()}
        shapes = [
            f"{key}, {list(given[key].shape)} for {list(tensor.shape)}"
            for key, tensor in own.items()
            if key in given and given[key].shape != tensor.shape
        ]
        try:
            check_names(what, missing=own.keys() - given.keys(), unexpected=given.keys() - own.keys(),
                        of_another_shape=shapes)  # fmt: skip
        except ValueError:
            self._delete(name)
            raise
        for key, tensor in own.items():
            tensor.data.copy_(given[key])
        made_for, is_of = (PurePath(path or "").name for path in (config.base_model_name_or_path, self._name()))
        if made_for and is_of and made_for.lower() != is_of.lower():
            logger.warning(
                "The adapter %s was trained for %r and is used with %r: the text stays the target's own, but fewer "
                "drafts may be accepted.",
                what,
                config.base_model_name_or_path,
                self._name(),
            )
        self._set(name)
        return None

    def delete_adapter(self, adapter_names: list[str] | str) -> None:
        """Delete adapters. Without any the drafter is as it was before the first.

        Args:
            adapter_names: Some of [`adapters`].

        Raises:
            ValueError: If there is no such adapter.
        """
        names = [adapter_names] if isinstance(adapter_names, str) else list(adapter_names)
        for name in [check_adapter(self, each) for each in names]:
            self._check_unobserved()
            self._delete(name)

    def merge_adapter(self, peft_model_id: str | Path, **hub_kwargs: Any) -> None:
        """Load a LoRA adapter into the drafter's own weights, as what knows no adapters needs it.

        Args:
            peft_model_id: Folder or Hub id.
            **hub_kwargs: Where it is, as of [`load_adapter`], which also says what is raised.
        """
        before, name = self._set_adapter, "merged"
        self.load_adapter(peft_model_id, name, **hub_kwargs)
        for _, layer in _lora_layers(cast(nn.Module, self)):
            layer.merge(adapter_names=[name])
            layer.merged_adapters.clear()  # which are a part of it now
        self._delete(name)
        self._set(before)

    # Inside

    def _name(self) -> str:
        return getattr(self, "name_or_path", None) or ""

    def _set(self, name: str | None) -> None:
        self._set_adapter = name
        # For forwards that nobody has chosen an adapter for: those of a trainer or a caller's own.
        for _, layer in _lora_layers(cast(nn.Module, self)):
            layer.set_adapter([] if name is None else [name])

    def _delete(self, name: str) -> None:
        own = cast(Any, self)
        self._set(None if name == self._set_adapter else self._set_adapter)  # else PEFT would choose another
        import_module("peft.functional").delete_adapter(self, name, "lora_")
        del own.peft_config[name]
        if own.peft_config:
            return
        for path, layer in _lora_layers(own):
            parent, _, last = path.rpartition(".")
            setattr(own.get_submodule(parent), last, layer.base_layer)
        own.requires_grad_(True)  # PEFT had frozen it
        del own.peft_config
        self._has_adapters = False

    def _check_unobserved(self) -> None:
        if getattr(self, "observer", None) is not None:
            raise ValueError(
                "The drafter learns while it serves, expected that after its adapters: `stop()` it first."
            )

    def _inject(self, config: LoraConfig, name: str, what: str) -> None:
        """Add an adapter with fresh weights."""
        own, known = cast(Any, self), self.adapters
        if hasattr(self, "peft_config") and not known:
            raise ValueError(
                f"The drafter, a {type(self).__name__}, is wrapped by PEFT: expected one that is not, load it anew."
            )
        if not known:
            self._check_unobserved()
        parts = {part for path, _ in own.named_modules() for part in path.split(".")}
        if not name or "." in name or name == BASE or name in parts:
            raise ValueError(
                f"`adapter_name` is {name!r}, expected a new name without a dot"
                f"{', other than ' * bool(known) + ', '.join(map(repr, known))}: choose another."
            )
        self._check_config(config, what)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of several adapters
            import_module("peft").inject_adapter_in_model(config, self, name)
        self._manage(name)

    def _manage(self, name: str) -> None:
        """Let requests choose an adapter that the drafter's layers have."""
        own, self._has_adapters = cast(Any, self), True
        for _, layer in _lora_layers(own):
            if _choose not in layer._forward_pre_hooks.values():
                layer.register_forward_pre_hook(_choose, with_kwargs=True)
        for weight in self._lora_tensors(name).values():
            weight.data = weight.data.to(own.dtype)

    def _check_config(self, config: LoraConfig, what: str) -> None:
        """Raise a `ValueError` unless an adapter only adds to linear layers of this drafter."""
        kind = import_module("peft").LoraConfig
        merge = "Merge it: `PeftModel.from_pretrained(drafter, FOLDER).merge_and_unload()`."
        if not isinstance(config, kind):
            raise ValueError(
                f"{what} is a {type(config).__name__}, expected a LoraConfig of PEFT: requests choose among LoRA "
                f"adapters. {merge}"
            )
        for field, expected in _PLAIN.items():
            if (value := getattr(config, field, expected)) and value != expected:
                raise ValueError(
                    f"{what} has `{field}` {value!r}, expected {expected!r}: requests choose among adapters that add "
                    f"to linear layers, and to nothing else. {merge}"
                )
        if config.init_lora_weights not in _STARTS:
            raise ValueError(
                f"{what} has `init_lora_weights` {config.init_lora_weights!r}, which changes the drafter's own "
                f"weights, expected one of {', '.join(map(repr, _STARTS))}. {merge}"
            )
        may = linear_layers(cast(nn.Module, self))
        if config.target_modules in (None, "all-linear"):
            config.target_modules = set(may)
        matches = import_module("peft.tuners.tuners_utils").check_target_module_exists
        paths = [path for path, _ in cast(nn.Module, self).named_modules() if path]
        found = [path for path in paths if ".lora_" not in path and ".base_layer" not in path]
        found = [path for path in found if matches(config, path)]
        if others := [path for path in found if path not in may]:
            raise ValueError(
                f"{what} changes `{others[0]}` of a {type(self).__name__}, expected linear layers outside of its "
                f"heads. {merge}"
            )
        if not found:
            names = config.target_modules
            listed = names if isinstance(names, str) else ", ".join(sorted(names)[:4])
            raise ValueError(
                f"{what} changes {listed}, which a {type(self).__name__} does not have: expected an adapter of this "
                "drafter. Load the drafter that it was trained for."
            )

    def _lora_tensors(self, name: str) -> dict[str, nn.Parameter]:
        """Return an adapter's weights by the names that they have in files, without their prefix."""
        return {
            path.replace(f".{name}.", "."): weight
            for path, weight in cast(nn.Module, self).named_parameters()
            if ".lora_" in path and f".{name}." in path
        }

    def _own_tensors(self) -> dict[str, torch.Tensor]:
        """Return the drafter's tensors without its adapters', by the names that they have without these."""
        state = cast(nn.Module, self).state_dict()
        return {path.replace(".base_layer.", "."): own for path, own in state.items() if ".lora_" not in path}

    def _save_adapter(self, folder: Path, name: str) -> None:
        """Write an adapter in PEFT's layout."""
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {_PREFIX + key: part.detach().cpu().contiguous() for key, part in self._lora_tensors(name).items()}
        save_file(tensors, folder / ADAPTER_WEIGHTS, {"format": "pt"})
        cast(Any, self).peft_config[name].save_pretrained(folder)


def read_adapter(name: str | Path, **hub_kwargs: Unpack[HubOptions]) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return the configuration of an adapter, and its weights by the names in its file.

    Raises:
        ValueError: If it is none, or its weights are not finite.
        OSError: If it cannot be found, is not in safetensors, or is damaged.
    """
    peft, where = import_module("peft"), ""
    name, hub_kwargs = resolve_subfolder(name, hub_kwargs)
    try:
        files = [
            cast(str, cached_file(name, where := file, **hub_kwargs)) for file in (ADAPTER_CONFIG, ADAPTER_WEIGHTS)
        ]
    except OSError as error:
        raise OSError(
            f"{name} has no {where} that can be read, expected a LoRA adapter in PEFT's layout with its weights in "
            "safetensors: save it with `save_pretrained`, or check the name and the network."
        ) from error
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of fields that a later PEFT has
            config, weights = peft.PeftConfig.from_pretrained(Path(files[0]).parent), load_file(files[1])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"The {ADAPTER_CONFIG} of {name} cannot be read ({type(error).__name__}: {error}). Copy or download the "
            "adapter again."
        ) from error
    except SafetensorError as error:
        raise OSError(f"The weights of {name} are damaged ({error}). Copy or download them again.") from error
    check_finite(weights, name)
    return config, weights


def finish_adapter(folder: Path, dtype: torch.dtype | str, base: str) -> None:
    """Store the weights of a saved adapter in another dtype, and the name of the drafter that it is of."""
    tensors, wanted = load_file(folder / ADAPTER_WEIGHTS), named_dtype(dtype)
    save_file({key: tensor.to(wanted) for key, tensor in tensors.items()}, folder / ADAPTER_WEIGHTS, {"format": "pt"})
    fields = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    text = json.dumps({**fields, "base_model_name_or_path": base}, indent=2, sort_keys=True)
    (folder / ADAPTER_CONFIG).write_text(text, encoding="utf-8")


def _lora_layers(drafter: nn.Module) -> list[tuple[str, Any]]:
    return [(path, module) for path, module in drafter.named_modules() if hasattr(module, "lora_A")]


def _choose(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Tell a layer of PEFT the adapter that is [`using`]; with `None` it takes the one that is set."""
    adapter = _chosen.get()
    if adapter is None:
        return None
    names = list(adapter) if isinstance(adapter, tuple) else [adapter] * len(args[0])
    return args, {**kwargs, "adapter_names": names}
