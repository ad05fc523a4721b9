"""Binding: one target instance, made ready for assisted generation and given back as it was."""

from __future__ import annotations

import copy
import functools
import inspect
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakSet

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, StaticCache
from transformers.generation.configuration_utils import GenerationConfig, GenerationMode

from ..auto.policies import DraftingStats
from ..drafters.base import Drafter
from ..targets.caches.name import CACHE, own_cache_names, renamed_cache
from ..targets.compiled import CompiledForwards, CompiledGraphs
from ..targets.fused import Fusion
from ..targets.hooks import ResidualCapture, ResidualTap, Round, count_forwards
from ..targets.registry import is_bound, is_drafter, target_of
from ..targets.target import Target, stop_recording
from ..version import __version__
from .candidates import DraftCandidateGenerator
from .loop import speculative_decoding
from .request import CheckedPairs, Pair, Request, is_static_attention_cache
from .rows import Row, rows_of, with_grammars
from .sequence import Sequence

logger = logging.getLogger(__name__)

# `bind` and `unbind` change a target as a whole.
_BINDING = threading.Lock()
# This thread's call, on its way through transformers to the loop.
_request: ContextVar[Request | None] = ContextVar("_request", default=None)
_told: WeakSet[PreTrainedModel] = WeakSet()  # targets that a line was said of

if TYPE_CHECKING:
    from typing import SupportsIndex

    from transformers import LogitsProcessorList, PreTrainedTokenizerBase, StoppingCriteriaList
    from transformers.generation.candidate_generator import CandidateGenerator
    from transformers.generation.streamers import BaseStreamer
    from transformers.generation.utils import GenerateOutput

    Generated = GenerateOutput | torch.Tensor
    _Mixed = PreTrainedModel  # what `bind` mixes `BoundTarget` into
else:
    _Mixed = object


class Binding:
    """What hangs on a bound target, from [`bind`] to [`unbind`]. Plain forwards run as if it were not there.

    Args:
        target: The model, as drafters and the loop see it.

    Attributes:
        default: The drafter of calls that name none ([`~drafters.base.Drafter.bind`]).
        pairs: What holds of it with each drafter that was checked.
        static_length: Of the longest static cache so far: rounds over a shorter one would be compiled again.
    """

    default: Drafter | None = None
    static_length = 0

    def __init__(self, target: Target) -> None:
        self.target = target
        target.hyperdflash_binding = self
        self.residual = ResidualTap(target.layers, target.streams)
        self.pairs = CheckedPairs()
        self._graphs: dict[str, CompiledGraphs] = {}
        self.fusion = Fusion(target.kernels())
        hooks = [*self.residual.handles, *target.register_hooks(), *count_forwards(target.model)]
        self.handles = [*hooks, self.fusion]

    def compiled(self, options: dict[str, object]) -> CompiledForwards:
        """Return the target's compiled forwards for a request with these options of `torch.compile`."""
        # Added rows are new weights. Graphs that were compiled anew beside old ones would be called with guards.
        key = repr((self.target.config.vocab_size, sorted(options.items(), key=str)))
        return CompiledForwards(options, self._graphs.setdefault(key, CompiledGraphs()))

    @contextmanager
    def capturing_forward(self, capture: ResidualCapture, round_: Round | None = None) -> Iterator[None]:
        """Run one forward of ours inside: what others run on the target, logits processors for example, is not seen.

        Args:
            capture: Of `residual.new_capture`, to which the forward adds its residual streams.
            round_: It, if it verifies drafts, of consecutive positions; `None` if it runs a prompt.
        """
        ends = [self.residual.captures.add(capture)]
        if round_ is not None:
            ends.append(self.target.rounds.add(round_))
        try:
            yield
        finally:
            for end in ends:
                end()


class BoundTarget(_Mixed):
    """Mixed into the class of one target instance by [`bind`]: rewindable caches and HyperDFlash drafting.

    Attributes:
        bound_by: The mark of a bound target, for [`is_bound`].
        hyperdflash_binding: From [`bind`] to [`unbind`].
    """

    _is_stateful = False  # what stock transformers refuses assisted generation for: our caches can rewind
    bound_by = __version__
    hyperdflash_binding: Binding

    def generate(self, *args: object, **kwargs: object) -> Generated:
        """Generate as any model does, and with a drafter for several sequences, too."""
        kwargs = renamed_cache(kwargs)  # both names are taken, whatever the installed transformers calls it
        generate = super().generate  # type: ignore[misc]
        arguments = {**inspect.signature(generate).bind(*args, **kwargs).arguments, **kwargs}
        request = Request(self, arguments, self.hyperdflash_binding.default)
        if request.drafter is not None:
            request.drafter._remember(None)  # of an earlier call's, where this one turns out not to draft
        request.check()
        for name in ("tree_budget", "lookup", "adapter") if request.drafter is not None else ("tree_budget", "lookup"):
            kwargs.pop(name, None)  # which transformers does not know
        if "assistant_model" not in arguments and request.drafter is not None:
            kwargs["assistant_model"] = request.drafter  # the default
        token = _request.set(request)
        try:
            with self.hyperdflash_binding.fusion.pausing(bool(request.setting("disable_compile"))):
                return generate(*args, **kwargs)
        finally:
            _request.reset(token)

    def _validate_generation_mode(
        self, generation_mode: GenerationMode, generation_config: GenerationConfig, generation_mode_kwargs: Any
    ) -> None:
        # Of a drafter `check_target` says whether its token ids are the target's; transformers looks at their number.
        # It would refuse several texts of a prompt with any assistant.
        if is_drafter(generation_mode_kwargs.get("assistant_model")):
            generation_mode_kwargs = {**generation_mode_kwargs, "assistant_model": None}
            generation_config = copy.copy(generation_config)
            generation_config.num_return_sequences = 1
        super()._validate_generation_mode(  # type: ignore[misc]
            generation_mode, generation_config, generation_mode_kwargs
        )

    def _prepare_cache_for_generation(
        self,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        generation_mode: GenerationMode,
        batch_size: int,
        max_cache_length: int,
    ) -> None:
        config, binding, request = generation_config, self.hyperdflash_binding, _request.get()
        is_assisted = generation_mode == GenerationMode.ASSISTED_GENERATION
        is_static = config.cache_implementation == "static" and config.use_cache is not False
        if is_assisted and is_static and request is not None and model_kwargs.get(CACHE) is None:
            # transformers would remember this length for plain calls, and compile them again. With
            # `prefill_chunk_size` it would make room for one text, and know nothing of the batch's others.
            length = request.static_cache_length(config, max_cache_length)
            binding.static_length = max(length, binding.static_length)
            model_kwargs[CACHE] = StaticCache(config=binding.target.config, max_cache_len=binding.static_length)
        else:
            super()._prepare_cache_for_generation(  # type: ignore[misc]
                config, model_kwargs, generation_mode, batch_size, max_cache_length
            )
        cache = model_kwargs.get(CACHE)
        if not config.is_assistant:  # whose calls are rounds of one text, and taken back between them
            stop_recording(cache)  # which loops of others leave on
        # Plain decoding keeps the stock layers, and so do static caches. With a drafter, the request prepares its own.
        is_stocks = (is_assisted and (request is None or request.drafter is None)) or config.is_assistant
        if is_stocks and isinstance(cache, Cache) and not is_static_attention_cache(cache):
            counts = config.prompt_lookup_num_tokens, config.num_assistant_tokens
            binding.target.make_rewindable(
                cache, max([count for count in counts if isinstance(count, int)], default=0)
            )
            if config.is_assistant:
                cache.activate_past_recording()

    def _assisted_decoding(
        self,
        input_ids: torch.LongTensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        synced_gpus: bool = False,
        streamer: BaseStreamer | None = None,
        inputs_tensor: torch.Tensor | None = None,
        assistant_model: PreTrainedModel | Drafter | None = None,
        assistant_tokenizer: PreTrainedTokenizerBase | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        **model_kwargs: Any,
    ) -> Generated:
        if not is_drafter(assistant_model):
            try:
                return super()._assisted_decoding(  # type: ignore[misc]
                    input_ids,
                    logits_processor=logits_processor,
                    stopping_criteria=stopping_criteria,
                    generation_config=generation_config,
                    synced_gpus=synced_gpus,
                    streamer=streamer,
                    inputs_tensor=inputs_tensor,
                    assistant_model=assistant_model,
                    assistant_tokenizer=assistant_tokenizer,
                    tokenizer=tokenizer,
                    **model_kwargs,
                )
            finally:
                stop_recording(model_kwargs.get(CACHE))
        config, mode = generation_config, GenerationMode.ASSISTED_GENERATION
        request = self._request_with(cast(Drafter, assistant_model), config, model_kwargs)
        request.check_prepared(input_ids, synced_gpus)
        request.prepare_cache(model_kwargs[CACHE], config)
        rows = [Row(input_ids, model_kwargs, logits_processor, stopping_criteria)]
        if request.rows > 1:
            config.num_return_sequences = 1  # in each row
            rows = rows_of(self, request.arguments, rows[0], config, cast(torch.Tensor, inputs_tensor), tokenizer)
        size = request.target.config.vocab_size
        rows = [with_grammars(row, number, len(rows), size) for number, row in enumerate(rows)]
        # All are prepared before the first is written: an error of one comes before any work, and `max_time` is for
        # all.
        sequences = []
        for row, adapter in zip(rows, request.adapters):
            if len(rows) > 1 and not request.target.can_join_sequences:
                # A cache of its own, which goes when the text is written: transformers holds the prepared one to the
                # end.
                row = row._replace(arguments={**row.arguments, CACHE: None})
                self._prepare_cache_for_generation(config, row.arguments, mode, 1, config.max_length - 1)
                request.prepare_cache(row.arguments[CACHE], config)
            sequences.append(Sequence(request, row, config, adapter))
        return speculative_decoding(sequences)

    def _get_candidate_generator(
        self, *args: object, assistant_model: PreTrainedModel | Drafter | None = None, **kwargs: Any
    ) -> CandidateGenerator:
        """Return a [`~decoding.candidates.DraftCandidateGenerator`], for transformers' loop and loops of one's own."""
        if not is_drafter(assistant_model):
            return super()._get_candidate_generator(  # type: ignore[misc]
                *args, assistant_model=assistant_model, **kwargs
            )
        config, model_kwargs = kwargs["generation_config"], kwargs["model_kwargs"]
        request = self._request_with(cast(Drafter, assistant_model), config, model_kwargs)
        request.prepare_cache(model_kwargs[CACHE], config)
        pair = replace(request.pair, adapter=request.adapters[0])
        return DraftCandidateGenerator(pair, request.num_drafts, config, kwargs.get("logits_processor"))

    def _request_with(self, drafter: Drafter, config: GenerationConfig, model_kwargs: dict[str, Any]) -> Request:
        """Return this thread's request; in a loop of somebody's own, what it asks for with a `drafter` of its own."""
        request = _request.get()
        if request is not None and request.drafter is drafter:
            return request
        known = {"generation_config": config} if request is None else dict(request.arguments)
        known.pop("adapter", None)  # another drafter's
        own = {"inputs": None, "input_ids": None, "assistant_model": drafter, CACHE: model_kwargs.get(CACHE)}
        return Request(self, {**known, **own})

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[object, ...]:
        # The bound class exists only in memory: copies and pickles are rebuilt from the class it was made of.
        state = cast("tuple[object, ...]", super().__reduce_ex__(protocol))[2:]
        return _new_bound, (_unbound_class(type(self)),), *state


def learned_stats(target: PreTrainedModel, drafter: Drafter) -> DraftingStats | None:
    """Return what "auto" knows of a drafter's greedy rounds with a bound target; `None` before it was used."""
    facts = getattr(vars(target).get("hyperdflash_binding"), "pairs", {}).get(drafter)
    return None if facts is None else facts.stats.get(False)


def bind(target: PreTrainedModel, fuse: bool | None = None) -> PreTrainedModel:
    """Prepare one target instance for assisted generation: its class becomes a subclass that can rewind its cache.

    Its layers get hooks that are silent outside our own forwards. On an accelerator one kernel does the work of each
    hyper-connection with Sinkhorn iterations, and of each of DeepSeek-V4's norms, wherever no gradients are computed.
    Nothing else about the target changes, and [`unbind`] undoes all of it. `drafter.bind(target)` does the same after
    checking the pair. Needed without a drafter for transformers' own assisted modes (prompt lookup, a second V4 as
    assistant: bind that one too).

    Args:
        target: The target.
        fuse: `True` also compiles the hyper-connections of a target on a CPU, here and now; `False` runs every module
            operation by operation on an accelerator, too, as `disable_compile` does for one `generate`. A bound target
            is switched when it is bound again.

    Raises:
        ValueError: If it is no target (see [`~targets.registry.target_of`]), transformers cannot run it in its dtype,
            its cache cannot be rewound, or there is nothing to `fuse`.
    """
    seen, was_bound = target_of(target), is_bound(target)
    if not was_bound:
        _check_bindable(seen)
        _warn_int8_activations(target)
    with _BINDING:
        if not is_bound(target):
            vars(target)["hyperdflash_binding"] = Binding(seen)
            target.__class__ = _bound_class(cast(type, type(target)))
    if fuse is not None:
        binding = cast(BoundTarget, target).hyperdflash_binding
        try:
            binding.fusion.switch(fuse, binding.target.dtype)
        except ValueError:
            if not was_bound:
                unbind(target)
            raise
    return target


def _warn_int8_activations(target: PreTrainedModel) -> None:
    """Say once that a target's forwards depend on how many tokens they take, where its kernels are known for it."""
    by_bitsandbytes = getattr(getattr(target.config, "quantization_config", None), "load_in_8bit", False)
    by_torchao = any(getattr(weight, "act_quant_kwargs", None) is not None for weight in target.parameters())
    if (by_bitsandbytes or by_torchao) and target not in _told:
        _told.add(target)
        logger.warning(
            "The target's activations are quantized in 8 bits, so its logits depend on how many tokens a forward "
            "takes: greedy text with drafts, which are verified together, can differ from that without."
        )


def _check_bindable(target: Target) -> None:
    """Raise a `ValueError` if a target cannot run, if its layers cannot be read, or if its cache cannot be rewound."""
    target.check_computes()
    target.check_layers()
    if target.why_not_rewindable:
        raise ValueError(
            f"A {type(target.model).__name__} {target.why_not_rewindable}, so drafts that the target rejects could "
            "not be taken back. Use a target whose layers are of these kinds, in a cache of transformers: "
            f"{', '.join(sorted(target.rewindable_kinds))}."
        )


def unbind(target: PreTrainedModel) -> PreTrainedModel:
    """Give a bound target its own class back; a target that is not bound stays as it is.

    Raises:
        ValueError: If the instance's class was changed again after binding (by FSDP2, for example).
    """
    with _BINDING:
        if is_bound(target):
            own = _unbound_class(type(target))
            if type(target).__mro__[2] is not own:
                raise ValueError(
                    f"The class of this target was changed again after binding, to {type(target).__mro__[0]}. Undo "
                    "that first."
                )
            for handle in vars(target).pop("hyperdflash_binding").handles:
                handle.remove()
            target.__class__ = own
    return target


@contextmanager
def bound(target: PreTrainedModel) -> Iterator[None]:
    """Bind a target inside the `with`, if it is not bound."""
    was_bound = is_bound(target)
    bind(target)
    try:
        yield
    finally:
        if not was_bound:
            unbind(target)


def bind_with(target: PreTrainedModel, drafter: Drafter, as_default: bool) -> bool:
    """Do what [`~drafters.base.Drafter.bind`] promises."""
    pair = Pair.checked(target_of(target), drafter)  # before anything is changed
    binding = cast(BoundTarget, bind(target)).hyperdflash_binding
    binding.pairs[drafter] = pair.facts
    is_new = drafter not in binding.pairs.binders
    binding.pairs.binders.add(drafter)
    if as_default:
        binding.default = drafter
    return is_new


def unbind_from(target: PreTrainedModel, drafter: Drafter) -> None:
    """Do what [`~drafters.base.Drafter.unbind`] promises."""
    if not is_bound(target):
        return
    binding = cast(BoundTarget, target).hyperdflash_binding
    binding.pairs.binders.discard(drafter)
    if not binding.pairs.binders:
        unbind(target)
    elif binding.default is drafter:
        binding.default = None


@functools.cache
def _bound_class(own: type) -> type:
    # The same name: `save_pretrained` writes it to the checkpoint as its architecture.
    names = {"__module__": own.__module__, "__qualname__": own.__qualname__, "__doc__": own.__doc__}
    return type(own.__name__, (BoundTarget, own), {**names, **own_cache_names(own)})


def _unbound_class(bound: type) -> type:
    mro = bound.__mro__
    return next(after for mixed, after in pairwise(mro) if "bound_by" in vars(mixed))


def _new_bound(own: type) -> object:
    return object.__new__(_bound_class(own))
