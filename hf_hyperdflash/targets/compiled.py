"""Functions over tensors of few shapes, compiled once for each, and run without torch's guards from then on."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn
from transformers.generation.configuration_utils import GenerationConfig

from .fused import copy_function

MIN_ATTENDED = 2048  # columns that a compiled round reads; for a longer text twice as many, and so on
_SLOW_CALLS = 3  # of a compiled function: CUDA graphs warm up in the first one and are recorded in the next
Result = TypeVar("Result")


def attended_for(tokens: int) -> int:
    """Return how many columns a compiled round reads that needs so many: one of a few numbers."""
    count = MIN_ATTENDED
    while count < tokens:
        count *= 2
    return count


def keep_addresses(*states: torch.Tensor) -> None:
    """Let compiled forwards count on tensors that stay where they are, whatever is written into them: not guarded, as
    caches come and go. Not where weights are packed: torch would take what a graph only reads for a weight."""
    for each in states:
        if not torch._inductor.config.freezing:
            torch._dynamo.mark_static_address(each, guard=False)


class CompiledGraph:
    """A function that was compiled for arguments of one shape.

    Args:
        function: The function.
        options: Of `torch.compile`.

    Attributes:
        calls: How often it was called.
    """

    def __init__(self, function: Callable[..., Any], options: dict[str, Any]) -> None:
        self._function, self.calls = copy_function(function), 0
        self.guarded = torch.compile(self._function, **options)

    def without_guards(self) -> Callable[..., Any] | None:
        """Return what was compiled, without the guards by which torch finds out whether it still fits: of a small
        target these take a tenth of a round. `None` if it is not one graph."""
        entries = torch._dynamo.eval_frame._debug_get_cache_entry_list(self._function)
        if len(entries) != 1 or any(name.startswith("__resume_at") for name in entries[0].code.co_names):
            return None
        return types.FunctionType(entries[0].code, self._function.__globals__, self._function.__name__)


class CompiledGraphs(dict[tuple[object, ...], CompiledGraph]):
    """Those of a bound target with the same options, by function and shapes. A copy of it is empty: compiled code can
    be neither copied nor pickled."""

    def __reduce__(self) -> tuple[type[CompiledGraphs], tuple[()]]:
        return CompiledGraphs, ()


class CompiledForwards:
    """A bound target's functions over static caches, compiled: once for each shape of what they are given.

    Of one request. The first call with a shape lets torch check whether what it has compiled still fits the target and
    the drafter, which somebody may have changed; the next ones do without.

    Args:
        options: Of `torch.compile`.
        graphs: What was compiled for earlier requests.

    Attributes:
        slow_calls: How many calls compiled, or were among the first ones after that, in which a GPU's graph is made.
    """

    def __init__(self, options: dict[str, Any], graphs: CompiledGraphs) -> None:
        self.options = options if options.get("dynamic") is not None else {**options, "dynamic": False}
        self.slow_calls, self._graphs = 0, graphs
        self._checked: dict[tuple[object, ...], Callable[..., Any]] = {}

    def __call__(self, function: Callable[..., Result], *args: object) -> Result:
        """Call a function compiled for the shapes of its arguments."""
        key = function, *map(_shape_of, args)
        if key in self._checked:
            torch._dynamo.mutation_guard.GenerationTracker.generation += 1  # by which CUDA graphs know a new call
            return self._checked[key](*args)
        if key not in self._graphs:
            self._graphs[key] = CompiledGraph(function, self.options)
        graph = self._graphs[key]
        self.slow_calls += graph.calls < _SLOW_CALLS
        graph.calls += 1
        result = graph.guarded(*args)
        checked = graph.without_guards() if graph.calls >= _SLOW_CALLS else None
        if checked is not None:
            self._checked[key] = checked
        return result


def _shape_of(value: object) -> object:
    if isinstance(value, (list, tuple)):
        return tuple(map(_shape_of, value))
    if isinstance(value, (int, bool)):
        return value
    return id(value) if isinstance(value, nn.Module) else getattr(value, "shape", None)


def compile_options(model: Any, kwargs: dict[str, Any], config: GenerationConfig) -> dict[str, Any] | None:
    """Return the options with which a request's forwards are compiled; `None` if they are not: as transformers decides
    for its own loop, and not where the caller asked to see what is inside a forward."""
    is_shown = config.output_hidden_states or config.output_attentions
    if is_shown or not model._valid_auto_compile_criteria(kwargs, config):
        return None
    return (config.compile_config or model._default_compile_config()).to_dict()
