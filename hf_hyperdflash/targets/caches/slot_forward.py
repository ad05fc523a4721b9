"""Forwards of the target over the sequences of a round, compiled where that is asked for."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache
from transformers.generation.configuration_utils import GenerationConfig
from transformers.generation.utils import GenerationMixin

from ..attention_masks import AttentionMask, CausalMasks, attention_mask_for
from ..fused import with_own_code
from ..hooks import ResidualCapture
from ..target import Target, TargetOutput
from .name import CACHE
from .static import SlotCache

LEAST_VIEW = 2048  # slots that a compiled round reads; for a longer text twice as many, and so on
_SLOW_CALLS = 3  # of a compiled function: CUDA graphs warm up in the first one and are recorded in the next
Result = TypeVar("Result")

# Arguments that are another in each round.
_OWN = (CACHE, "input_ids", "inputs_embeds", "attention_mask", "position_ids", "logits_to_keep")


def view_for(tokens: int) -> int:
    """Return how many slots a compiled round reads that needs so many: one of a few numbers."""
    count = LEAST_VIEW
    while count < tokens:
        count *= 2
    return count


def needs_preparation(model: PreTrainedModel, kwargs: Mapping[str, object]) -> bool:
    """Return whether the model makes something of its arguments for each forward, beside those of each round."""
    prepare = getattr(model.prepare_inputs_for_generation, "__func__", None)
    is_stock = prepare is GenerationMixin.prepare_inputs_for_generation
    return not is_stock or not kwargs.keys() <= {CACHE, "use_cache", "logits_to_keep"}


class SlotForward:
    """Runs a target over the anchors and drafts of sequences in a dynamic or static cache.

    Args:
        target: The target.
        cache: transformers' cache after the prompts, several padded on the left.
        lengths: Tokens of each sequence's prompt.
        longest: The most tokens of a sequence that will be in the cache.
        masks: Which of them are no padding, `[1, tokens]` each; `None` if all are.
        most: The most verification positions of a round.
        is_fixed: Whether almost all rounds have so many.
        compiled: Runs compiled forwards; `None` for eager ones.
        capture: Of the residual streams.

    Attributes:
        room: The most tokens of a sequence that the cache has slots for.
        rows: Of each sequence, its place in the cache. Compiled, those that have ended keep theirs: the shapes stay.
    """

    def __init__(
        self,
        target: Target,
        cache: Cache,
        lengths: Sequence[int],
        longest: int,
        masks: Sequence[torch.Tensor | None],
        most: int,
        is_fixed: bool,
        compiled: CompiledForwards | None,
        capture: ResidualCapture,
    ) -> None:
        self.target, self.compiled, self.capture = target, compiled, capture
        self.most, self.is_fixed = most, is_fixed
        # A text that fits in fewer static columns than the window never leaves it. A longer text slides through
        # these columns, as in plain decoding.
        columns = [getattr(layer, "max_cache_len", sys.maxsize) for layer in cache.layers]
        windows = [
            None if window is None or longest <= count < window else min(window, count)
            for window, count in zip(target.windows, columns)
        ]
        self.cache = SlotCache(cache, windows, lengths, most)
        self.room = sys.maxsize if self.cache.capacity is None else self.cache.capacity
        self.rows = list(range(len(lengths)))
        self._chains: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self._causal = CausalMasks(self.cache.starts.device)
        self._moving_widths: set[int] = set()  # of rounds whose tokens were moved
        self.real: torch.Tensor | None = None
        if any(mask is not None for mask in masks):
            shape = len(lengths), self.cache.capacity or max(lengths)
            self.real = torch.ones(shape, dtype=torch.bool, device=self.cache.starts.device)
            for row, mask in zip(self.real, masks):
                if mask is not None:
                    row[: mask.shape[1]] = mask[0].bool()

    @property
    def size(self) -> int:
        """The number of rows."""
        return len(self.cache.starts)

    @property
    def index(self) -> torch.Tensor:
        """`rows` as a tensor."""
        return torch.tensor(self.rows, device=self.cache.starts.device)

    def width_for(self, positions: int, longest: int) -> int:
        """Return the verification positions of a round that needs `positions` of them: compiled, one of a few widths.

        Args:
            positions: Those that are needed.
            longest: Tokens of the longest sequence before its anchor.
        """
        if self.compiled is None:
            return positions
        width = self.most if self.is_fixed else min(1 << (positions - 1).bit_length(), self.most)
        return width if longest + width <= self.room else positions

    def chains(self, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the distance of each position from the anchor, `[batch, width]`, and which positions it sees, boolean
        `[batch, width, width]`, of chains: the same in all rounds."""
        key = self.size, width
        if key not in self._chains:
            device = self.cache.starts.device
            visible = torch.ones(width, width, dtype=torch.bool, device=device).tril()
            self._chains[key] = (
                torch.arange(width, device=device).repeat(self.size, 1),
                visible.repeat(self.size, 1, 1),
            )
        return self._chains[key]

    def __call__(
        self,
        ids: torch.Tensor,
        anchors: torch.Tensor,
        depths: torch.Tensor,
        visible: torch.Tensor,
        longest: int,
        is_chain: bool,
        kwargs: dict[str, object],
    ) -> tuple[TargetOutput, torch.Tensor | None]:
        """Run the target.

        Args:
            ids: Anchors and drafts, `[batch, positions]`.
            anchors: The anchors' true positions, `[..., batch, 1]`.
            depths: Their distance from the anchor in tokens, `[batch, positions]`.
            visible: Which of them each sees, boolean `[batch, positions, positions]`.
            longest: Tokens of the longest sequence before its anchor.
            is_chain: Whether each position sees all that are before it.
            kwargs: The arguments that are the same in every round.

        Returns:
            The target's outputs. Compiled, also `ids` and behind them its most probable token after each,
            `[batch, 2 * positions]`.
        """
        count = ids.shape[1]
        if needs_preparation(self.target.model, kwargs):  # pictures that were in the prompt are left out, for example
            prepare = cast(Any, self.target.model).prepare_inputs_for_generation
            own = {CACHE: self.cache, "position_ids": anchors + depths}
            kwargs = prepare(ids, next_sequence_length=count, is_first_iteration=False, **{**kwargs, **own})
        kwargs = {name: value for name, value in kwargs.items() if name not in _OWN}
        if self.compiled is not None:
            self.cache.begin(longest, count, view_for(longest + count))
            self.cache.capture = self.capture
            inputs = self.cache, self.target, ids, anchors, depths, visible, self.real, kwargs
            return self.compiled(choose_over_slots, *inputs)
        self.cache.begin(longest, count)
        masks = self._masks(depths, visible, longest, is_chain)
        return run_over_slots(self.cache, self.target, ids, anchors + depths, masks, kwargs), None

    def _masks(
        self, depths: torch.Tensor, visible: torch.Tensor, longest: int, is_chain: bool
    ) -> dict[int | None, torch.Tensor]:
        """Return which slots each position of an eager round sees, by the window of the layers."""
        end = longest + depths.shape[1]
        windows = {layer.window for layer in self.cache.layers}
        # A chain whose text has left no window yet sees all that is before: a view of a mask that is made once.
        if self.size > 1 or not is_chain or self.real is not None or any(end > window for window in windows if window):
            return self.cache.masks(visible, depths, self.real)
        mask = self._causal(longest, depths.shape[1])
        return {window: mask for window in windows}

    def accept(self, kept: list[list[int]], width: int, has_trees: bool) -> None:
        """Keep the positions `kept` of each sequence, a path from the anchor on, and no others.

        Args:
            kept: Of each sequence.
            width: Verification positions of the round.
            has_trees: Whether there are several paths.
        """
        starts, counts = self.cache.starts, [0] * self.size
        for row, path in zip(self.rows, kept):
            counts[row] = len(path)
        is_first = has_trees and self.compiled is not None and width not in self._moving_widths
        # The first trees of a width in any case: what moves tokens is compiled then, and not some texts later.
        if is_first or any(path != list(range(len(path))) for path in kept):
            self._moving_widths.add(width)
            places, _ = self.chains(width)
            old = places.cpu().clone()
            for row, path in zip(self.rows, kept):
                old[row, : len(path)] = torch.tensor(path)
            moves = self.cache, old.to(starts.device), places
            if self.compiled is None:
                move_in_slots(*moves)
            else:
                self.compiled(move_in_slots, *moves)
        starts += counts[0] if self.size == 1 else torch.tensor(counts, device=starts.device)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Go on with the sequences `indices` alone."""
        self.rows = [self.rows[index] for index in indices.tolist()]
        if self.compiled is None:
            self.cache.batch_select_indices(self.index)
            self.real = None if self.real is None else self.real[self.index]
            self.rows = list(range(len(self.rows)))


def run_over_slots(
    cache: SlotCache,
    target: Target,
    ids: torch.Tensor,
    position_ids: torch.Tensor,
    visible: dict[int | None, torch.Tensor],
    kwargs: dict[str, object],
) -> TargetOutput:
    """Run the target's forward.

    Args:
        cache: The sequences'.
        target: The target.
        ids: Anchors and drafts, `[batch, positions]`.
        position_ids: True positions, `[..., batch, positions]`.
        visible: Which slots each position sees, by the window of the layers.
        kwargs: Other arguments of the target.
    """
    implementation = target.config._attn_implementation
    masks = {window: attention_mask_for(implementation, mask, target.dtype) for window, mask in visible.items()}
    by_kind: dict[str, AttentionMask] = {layer.kind: masks[layer.window] for layer in cache.layers}
    attention_mask = by_kind if len(by_kind) > 1 else next(iter(by_kind.values()))
    inputs = {**kwargs, CACHE: cache, "attention_mask": attention_mask, "position_ids": position_ids}
    return target.model(input_ids=ids, return_dict=True, **inputs)


def choose_over_slots(
    cache: SlotCache,
    target: Target,
    ids: torch.Tensor,
    anchors: torch.Tensor,
    depths: torch.Tensor,
    visible: torch.Tensor,
    real: torch.Tensor | None,
    kwargs: dict[str, object],
) -> tuple[TargetOutput, torch.Tensor]:
    """Do the same, with the masks and the choices of greedy rounds in the same graph; see [`SlotForward.__call__`]."""
    outputs = run_over_slots(cache, target, ids, anchors + depths, cache.masks(visible, depths, real), kwargs)
    choices = outputs.logits.to(ids.device, torch.float32).argmax(-1)
    return outputs, torch.cat([ids, choices], dim=-1)


def move_in_slots(cache: SlotCache, old: torch.Tensor, new: torch.Tensor) -> None:
    """Move tokens of a round in all layers; see [`~targets.caches.static.SlotLayer.move`]."""
    for layer in cache.layers:
        layer.move(old, new)


class CompiledGraph:
    """A function that was compiled for arguments of one shape.

    Args:
        function: The function.
        options: Of `torch.compile`.

    Attributes:
        calls: How often it was called.
    """

    def __init__(self, function: Callable[..., Any], options: dict[str, Any]) -> None:
        self._function, self.calls = with_own_code(function), 0
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
