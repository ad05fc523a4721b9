"""The argument name of a text's cache. Nothing else in this package has the name.

transformers calls it `cache` from 5.24 on and `past_key_values` before that: in `generate`'s arguments, in outputs,
and in the forwards and mask functions of its models. Remote code keeps the name that it was written with.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import transformers
from transformers.generation.utils import GenerationMixin

from ...version import __version__

Value = TypeVar("Value")

_NAMES = ("cache", "past_key_values", "cache_params")


@functools.cache
def cache_argument(function: Callable[..., Any]) -> str:
    """Return the name of a function's cache argument, by its signature; [`CACHE`] if it has none of the names."""
    parameters = inspect.signature(function).parameters
    return next((name for name in _NAMES if name in parameters), CACHE)


_IN_TRANSFORMERS = inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
CACHE = next((name for name in _NAMES if name in _IN_TRANSFORMERS), "")
"""The name in the installed transformers."""
if not CACHE:
    raise ImportError(
        f"transformers {transformers.__version__} has a name for the cache that hf_hyperdflash {__version__} does not "
        "know: `pip install -U hf-hyperdflash` and load the drafter with `hf_hyperdflash.load_drafter`."
    )


def renamed_cache(arguments: dict[str, Value], name: str = CACHE) -> dict[str, Value]:
    """Return the same arguments with the cache under `name`. Two caches under two names stay: transformers refuses
    them."""
    given = [other for other in _NAMES if other in arguments]
    if len(given) != 1 or given == [name]:
        return arguments
    return {name if key == given[0] else key: value for key, value in arguments.items()}


def cache_of(outputs: object) -> object:
    """Return the cache in the outputs of a model, of transformers or of remote code; `None` if there is none."""
    return next((getattr(outputs, name) for name in (CACHE, *_NAMES) if hasattr(outputs, name)), None)


def own_cache_names(model: type) -> dict[str, Callable[..., dict[str, object]]]:
    """Return the methods by which a subclass of a model translates between its names of the cache and transformers'.

    Without them, a model whose `forward` has another name than the installed transformers would get the cache in an
    argument that it does not read, and would make a new cache in each step.

    Returns:
        Its `prepare_inputs_for_generation` by name, or nothing if both names are transformers'.
    """
    prepare: Any = getattr(model, "prepare_inputs_for_generation", None)
    if prepare is None:
        return {}
    into, out_of = cache_argument(prepare), cache_argument(model.forward)  # type: ignore[attr-defined]
    if into == out_of == CACHE:
        return {}

    @functools.wraps(prepare)
    def prepare_inputs_for_generation(self: object, *args: object, **kwargs: object) -> dict[str, object]:
        return renamed_cache(prepare(self, *args, **renamed_cache(kwargs, into)), out_of)

    signature = inspect.signature(prepare)  # by which `generate` knows the arguments that it may pass
    parameters = [
        each.replace(name=CACHE) if each.name == into and CACHE not in signature.parameters else each
        for each in signature.parameters.values()
    ]
    vars(prepare_inputs_for_generation)["__signature__"] = signature.replace(parameters=parameters)
    return {"prepare_inputs_for_generation": prepare_inputs_for_generation}
