"""What the package needs to know of a target: its facts, its pre-collapse residual, and how to bind it."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakKeyDictionary, WeakSet

import torch
from accelerate.utils import align_module_device
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.cache_utils import Cache
from transformers.generation.configuration_utils import GenerationConfig, GenerationMode
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HCACache

from .cache_deepseek_v4 import DEFAULT_MAX_REWIND, make_rewindable
from .cache_linear import make_linear_rewindable
from .configuration_hyperdflash import HyperDFlashConfig
from .decoding import check_cache, speculative_decoding
from .hooks import TargetHooks
from .residual import ResidualTap
from .version import __version__, series
from .weights import check_finite, check_names, check_source, drafter_kind

logger = logging.getLogger(__name__)

# Of `config.layer_types`: whose cache layers stock transformers or this package can rewind.
_REWINDABLE_KINDS = {
    "full_attention", "sliding_attention", "chunked_attention", "linear_attention", "indexed_attention",
    "deepseek_sparse_attention",  # what earlier transformers call it
    "compressed_sparse_attention", "heavily_compressed_attention",
}  # fmt: skip

# `bind` and `unbind` change a target as a whole, and each drafter is checked once for a target that is bound.
_BINDING = threading.Lock()
_fitting: WeakKeyDictionary[PreTrainedModel, WeakSet[Any]] = WeakKeyDictionary()

_MEDIA = ("pixel_values", "mm_encoder_outputs", "input_features")  # prefixes of `generate`'s arguments


if TYPE_CHECKING:
    _Mixed = PreTrainedModel  # what `bind` mixes `BoundTarget` into
else:
    _Mixed = object


@dataclass(frozen=True)
class Collapse:
    """Where a target's residual paths become one before its LM head: what differs from family to family.

    Attributes:
        paths: How many there are.
        layers: The decoder layers; the last one's output is the pre-collapse residual.
        states: From the pre-collapse residual `[batch, seq, paths, config.hidden_size]` to what the LM head reads,
            `[batch, seq, config.hidden_size]`.
        norm: The final norm, applied after the collapse; `None` where the collapse has its own.
        modules: What of the collapse and the norm has parameters.
        gate: Reads `hc_fn` `[paths, paths * config.hidden_size]`, `hc_base` `[paths]` and `hc_scale` `[1]` of a collapse
            with one gate per path; `None` if it has another form.
        why_ungated: Which.
    """

    paths: int
    layers: nn.ModuleList
    states: Callable[[torch.Tensor], torch.Tensor]
    norm: nn.Module | None
    modules: tuple[nn.Module, ...]
    gate: Callable[[], dict[str, torch.Tensor]] | None
    why_ungated: str = ""


def collapse_of(target: PreTrainedModel) -> Collapse:
    """How this target collapses its residual paths.

    Raises:
        ValueError: If the model is of no known family, or has residual paths of a kind that is not known.
    """
    trunk = _trunk(target)
    found = (family(target, trunk) for family in _FAMILIES) if trunk is not None else ()
    collapse = next((collapse for collapse in found if collapse is not None), None)
    if is_drafter(target):
        raise ValueError(f"The target is a {type(target).__name__}, a drafter: pass the model that it drafts for.")
    if not isinstance(target, PreTrainedModel):
        given = repr(target) if isinstance(target, (str, type)) else f"a {type(target).__name__}"
        raise ValueError(f"The target is {given}, expected a model: load it with `hf_hyperdflash.load_target` first.")
    if collapse is None:
        name = getattr(getattr(target, "config", None), "model_type", type(target).__name__)
        raise ValueError(
            f"The target is a {name} model: expected a DeepSeek-V4, Hunyuan V4, GLM-5 Next or Qwen4-Exp, or a causal LM "
            "with one residual stream (`model.layers` and `model.norm`). Load the target with "
            "`AutoModelForCausalLM.from_pretrained(...)`."
        )
    return collapse


# The families. A new one is a function here and its name in `_FAMILIES`.


def _with_head(target: PreTrainedModel, trunk: Any) -> Collapse | None:
    """DeepSeek-V4 and Hunyuan V4, whose `hc_head` has a gate, and GLM-5 Next, whose `hc_head` takes the mean."""
    head = getattr(trunk, "hc_head", None)
    if not isinstance(head, nn.Module):
        return None
    config, norm = _text_config(target), trunk.norm
    is_gated = hasattr(head, "hc_fn")
    return Collapse(
        config.hc_mult,
        trunk.layers,
        lambda residual: norm(head(residual)),
        norm,
        (head, norm),
        lambda: _read_gate(head, "hc_") if is_gated else _uniform_gate(config),
    )


def _with_bare_gate(target: PreTrainedModel, trunk: Any) -> Collapse | None:
    """DeepSeek-V4 in DeepSeek's own layout, as remote code has it: the gate's parameters belong to no module."""
    owner = next((place for place in (trunk, target) if hasattr(place, "hc_head_fn")), None)
    if owner is None:
        return None
    config, norm = _text_config(target), trunk.norm
    norm_eps, hc_eps = _norm_eps(config), getattr(config, "hc_eps", 1e-6)

    def states(residual: torch.Tensor) -> torch.Tensor:
        gates = path_gates(residual, **_read_gate(owner, "hc_head_"), norm_eps=norm_eps, hc_eps=hc_eps)
        return norm((gates.unsqueeze(-1) * residual).sum(dim=2).to(residual.dtype))

    paths = cast(torch.Tensor, owner.hc_head_fn).shape[0]
    return Collapse(paths, trunk.layers, states, norm, (norm,), lambda: _read_gate(owner, "hc_head_"))


def _with_mixer(target: PreTrainedModel, trunk: Any) -> Collapse | None:
    """Qwen4-Exp, whose residual is flat, `[batch, seq, config.hc_count * config.hidden_size]`."""
    mixer = getattr(trunk, "hyper_connection_mixer", None)
    if mixer is None:
        return None
    why = "its collapse weighs every channel of a path by itself, which one gate per path cannot express"
    paths = _text_config(target).hc_count
    return Collapse(paths, trunk.layers, lambda residual: mixer(residual.flatten(2)), None, (mixer,), None, why)


def _with_one_stream(target: PreTrainedModel, trunk: Any) -> Collapse | None:
    """Everything else that ends in a norm and an LM head."""
    config, norm = _text_config(target), getattr(trunk, "norm", None)
    if norm is None or any(hasattr(config, name) for name in ("hc_mult", "hc_count")):
        return None
    why = f"a {config.model_type} target has one residual stream, and no gate that collapses several"
    return Collapse(1, trunk.layers, lambda residual: norm(residual.squeeze(2)), norm, (norm,), None, why)


_FAMILIES = (_with_head, _with_bare_gate, _with_mixer, _with_one_stream)


def _read_gate(owner: nn.Module, prefix: str) -> dict[str, torch.Tensor]:
    with align_module_device(owner):  # an offloaded gate's values come to memory here
        return {f"hc_{part}": getattr(owner, prefix + part).detach().clone() for part in ("fn", "base", "scale")}


def _trunk(target: PreTrainedModel) -> nn.Module | None:
    """The module that runs the decoder layers."""
    if not isinstance(target, PreTrainedModel):
        return None
    places = (target.get_decoder(), target.base_model, target)
    return next((place for place in places if isinstance(getattr(place, "layers", None), nn.ModuleList)), None)


def _text_config(target: PreTrainedModel) -> Any:
    return target.config.get_text_config(decoder=True)


def _layer_kinds(target: PreTrainedModel) -> set[str]:
    return set(getattr(_text_config(target), "layer_types", None) or ["of no declared kind"])


def _norm_eps(config: Any) -> float:
    return cast(float, getattr(config, "rms_norm_eps", getattr(config, "norm_eps", 1e-6)))


def _uniform_gate(config: Any) -> dict[str, torch.Tensor]:
    """The gate whose collapse is the mean of the paths, whatever they hold."""
    paths = config.hc_mult
    return {
        "hc_fn": torch.zeros(paths, paths * config.hidden_size),
        "hc_base": torch.tensor(1 / paths - config.hc_eps).logit().repeat(paths),
        "hc_scale": torch.ones(1),
    }


def path_gates(
    paths: torch.Tensor,
    hc_fn: torch.Tensor,
    hc_base: torch.Tensor,
    hc_scale: torch.Tensor,
    norm_eps: float,
    hc_eps: float,
) -> torch.Tensor:
    """The weight of each residual path, float32 (the paper's Eq. 1).

    Args:
        paths: `[batch, seq, paths, config.hidden_size]`.
        hc_fn: `[paths, paths * config.hidden_size]`.
        hc_base: `[paths]`.
        hc_scale: `[1]`.

    Returns:
        `[batch, seq, paths]`.
    """
    flat = paths.flatten(2).float()
    normed = flat * torch.rsqrt(flat.square().mean(-1, keepdim=True) + norm_eps)
    mixes = torch.nn.functional.linear(normed, hc_fn.float()) * hc_scale.float()
    return torch.sigmoid(mixes + hc_base.float()) + hc_eps


@dataclass(frozen=True)
class TargetFacts:
    """A target as a drafter sees it. `gate` is that of its [`Collapse`], `dtype` its residual stream's."""

    model_type: str
    name_or_path: str
    revision: str
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    hc_mult: int
    head_dim: int
    rms_norm_eps: float
    hc_eps: float
    rope_theta: float
    max_position_embeddings: int
    dtype: torch.dtype
    gate: dict[str, torch.Tensor]
    why_ungated: str

    def gate_obstacle(self, drafter_hidden_size: int) -> str | None:
        """Why the gate cannot be inherited (the paper's conditions, section 2.2), or `None`."""
        if not self.gate:
            return self.why_ungated
        if drafter_hidden_size != self.hidden_size:
            return f"the drafter's hidden size {drafter_hidden_size} differs from the target's {self.hidden_size}"
        return None


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


def describe(target: PreTrainedModel) -> TargetFacts:
    """Read from a target what fits a drafter to it.

    Raises:
        ValueError: If it is no target (see [`collapse_of`]).
    """
    collapse = collapse_of(target)
    config = _text_config(target)
    rope = getattr(config, "rope_parameters", None) or {}
    of_layers = [rope[kind] for kind in ("main", "full_attention") if isinstance(rope.get(kind), dict)]
    return TargetFacts(
        model_type=config.model_type,
        name_or_path=target.config._name_or_path,
        revision=getattr(target.config, "_commit_hash", None) or "",
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_hidden_layers=config.num_hidden_layers,
        hc_mult=collapse.paths,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        rms_norm_eps=_norm_eps(config),
        hc_eps=getattr(config, "hc_eps", 1e-6),
        rope_theta=float((of_layers[0] if of_layers else rope).get("rope_theta", 10000.0)),
        max_position_embeddings=config.max_position_embeddings,
        dtype=_weight(target.get_input_embeddings()).dtype,
        gate=collapse.gate() if collapse.gate else {},
        why_ungated=collapse.why_ungated,
    )


def teacher_states(target: PreTrainedModel, residual: torch.Tensor, collapse: str = "hc_head") -> torch.Tensor:
    """What the target's LM head reads at each position, from the pre-collapse residual, without another forward.

    Args:
        target: The target.
        residual: `[batch, seq, config.hc_mult, config.hidden_size]`.
        collapse: `"hc_head"` for the target's own collapse, whose logits are the target's next-token logits;
            `"mean_pool"` for the mean of the paths, the paper's teacher (section 2.3).

    Returns:
        `[batch, seq, config.hidden_size]`.

    Raises:
        ValueError: If the mean is asked for and the target has no final norm to put after it.
    """
    own, head = collapse_of(target), _weight(target.get_output_embeddings())
    residual = _like(residual, head).to(_weight(target.get_input_embeddings()).dtype)  # that of the residual stream
    check_teacher(target, collapse)
    if collapse == "mean_pool":
        return _like(cast(nn.Module, own.norm)(residual.mean(dim=2)), head)
    return _like(own.states(residual), head)


def check_teacher(target: PreTrainedModel, collapse: str) -> None:
    """Raise a `ValueError` if `target` cannot be a teacher with this collapse (see [`teacher_states`])."""
    if collapse == "mean_pool" and collapse_of(target).norm is None:
        raise ValueError(
            f"`kl_teacher` is 'mean_pool', but a {_text_config(target).model_type} target has no norm after its collapse. "
            "Use 'hc_head'."
        )


def embed(target: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """The target's embeddings of `ids` `[batch, seq]`, `[batch, seq, config.hidden_size]`, on the device of `ids`."""
    embedding = target.get_input_embeddings()
    weight = _weight(embedding)
    return embedding(ids if weight.is_meta else ids.to(weight.device)).to(ids.device)


def logits_of(target: PreTrainedModel, states: torch.Tensor) -> torch.Tensor:
    """The target's LM head over `states` `[..., config.hidden_size]` of any dtype and device."""
    head = target.get_output_embeddings()
    return head(_like(states, _weight(head)))


def _weight(module: nn.Module) -> torch.Tensor:
    return cast(torch.Tensor, module.weight)


def _like(values: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`values` where `weight` is and in its dtype. An offloaded module fetches its inputs itself, and a quantized
    weight's dtype is not one to compute in."""
    dtype = weight.dtype if weight.dtype.is_floating_point and weight.dtype.itemsize > 1 else values.dtype
    return values.to(dtype=dtype, device=values.device if weight.is_meta else weight.device)


@contextmanager
def capture_residual(target: PreTrainedModel, target_layer_ids: Sequence[int] = (-1,)) -> Iterator[list[torch.Tensor]]:
    """Collect the residual paths of every forward that this thread runs inside the context.

    Args:
        target: The target. One that is not bound gets hooks for the time, which torch does not expect to go while
            another thread runs it: bind it where several threads do.
        target_layer_ids: After which layers: -1 is the last, whose paths are the pre-collapse residual. Empty
            for nothing.

    Yields:
        A list that grows by one tensor per forward, `[batch, seq, paths, config.hidden_size]` with `config.hc_mult`
        paths per layer, in the order of `target_layer_ids`.
    """
    if is_bound(target):
        with cast(BoundTarget, target).hyperdflash_hooks.residual.reading(target_layer_ids) as captured:
            yield captured
        return
    collapse = collapse_of(target)
    tap = ResidualTap(collapse.layers, collapse.paths)
    try:
        with tap.reading(target_layer_ids) as captured:
            yield captured
    finally:
        for handle in tap.handles:
            handle.remove()


def check_pair(config: HyperDFlashConfig, target: PreTrainedModel) -> None:
    """Check that a drafter's configuration fits a target; warn where only the target's name differs.

    Raises:
        ValueError: Naming both values, if they cannot work together.
    """
    facts = describe(target)
    for what, drafters, targets in (
        ("vocab_size", config.vocab_size, facts.vocab_size),
        ("hidden_size", config.target_hidden_size, facts.hidden_size),
        ("hc_mult", config.target_hc_mult, facts.hc_mult),
    ):
        if drafters != targets:
            raise ValueError(
                f"The drafter was made for a target with `{what}` {drafters}, but this target's is {targets}. Load the "
                "drafter's own target, or make one with `HyperDFlashDrafter.from_target(target)`."
            )
    deepest = max(config.target_layer_ids or [-1])
    if facts.num_hidden_layers and deepest >= facts.num_hidden_layers:  # loaded without layers: for its head alone
        raise ValueError(
            f"The drafter reads layers {config.target_layer_ids}, but this target's are 0 to "
            f"{facts.num_hidden_layers - 1} (-1 for the last)."
        )
    if config.mask_token_id >= facts.vocab_size:
        raise ValueError(
            f"The drafter's mask token {config.mask_token_id} is outside the target's vocabulary of {facts.vocab_size}."
        )
    made_for, given = PurePath(config.target_name_or_path).name, PurePath(facts.name_or_path).name
    if made_for and given and made_for.lower() != given.lower():
        logger.warning(
            "The drafter was made for %r and is used with %r: the text stays the target's own, but fewer drafts may be "
            "accepted.",
            config.target_name_or_path,
            facts.name_or_path,
        )


class BoundTarget(_Mixed):
    """Mixed into the class of one target instance by [`bind`]: rewindable caches and HyperDFlash drafting.

    Attributes:
        bound_by: Version of this code; [`is_bound`] looks for it.
        hyperdflash_hooks: On its modules, from [`bind`] to [`unbind`].
    """

    _is_stateful = False  # what stock transformers refuses assisted generation for: our caches can rewind
    bound_by = __version__
    hyperdflash_hooks: TargetHooks

    def _prepare_generation_config(
        self, generation_config: GenerationConfig | None, *args: Any, **kwargs: Any
    ) -> tuple[GenerationConfig, dict[str, Any]]:
        asked = [
            kwargs.get("num_assistant_tokens"),
            _drafts_asked(generation_config),
            _drafts_asked(self.generation_config),
        ]
        config, model_kwargs = super()._prepare_generation_config(  # type: ignore[misc]
            generation_config, *args, **kwargs
        )
        config._num_drafts_asked = next((count for count in asked if count is not None), None)
        return config, model_kwargs

    def _prepare_cache_for_generation(
        self,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        generation_mode: GenerationMode,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        is_rewound = generation_mode == GenerationMode.ASSISTED_GENERATION or generation_config.is_assistant
        if is_rewound and generation_config.cache_implementation not in (None, "dynamic", "offloaded"):
            raise ValueError(
                f"`cache_implementation` is {generation_config.cache_implementation!r}, but assisted generation has to "
                "rewind its cache: leave it out, or use 'dynamic' or 'offloaded'."
            )
        super()._prepare_cache_for_generation(  # type: ignore[misc]
            generation_config, model_kwargs, generation_mode, *args, **kwargs
        )
        cache = model_kwargs.get("past_key_values")
        if is_rewound and isinstance(cache, Cache):  # plain decoding keeps the stock layers
            most = generation_config.prompt_lookup_num_tokens, generation_config.num_assistant_tokens
            counts = [count for count in most if isinstance(count, int)]  # what else is asked for is refused later
            _make_rewindable(cast(PreTrainedModel, self), cache, max(counts, default=0))
            if generation_config.is_assistant:
                cache.activate_past_recording()

    def _assisted_decoding(
        self,
        input_ids: torch.LongTensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: GenerationConfig,
        synced_gpus: bool = False,
        streamer: Any = None,
        inputs_tensor: torch.Tensor | None = None,
        assistant_model: Any = None,
        assistant_tokenizer: Any = None,
        tokenizer: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        if is_drafter(assistant_model):
            target = cast(PreTrainedModel, self)
            _check_request(input_ids, generation_config, synced_gpus, model_kwargs)
            check_fit(target, assistant_model)
            asked, cache = getattr(generation_config, "_num_drafts_asked", None), model_kwargs["past_key_values"]
            num_drafts = (
                assistant_model.num_draft_tokens if asked is None else assistant_model.check_num_draft_tokens(asked)
            )
            _make_rewindable(target, cache, num_drafts)
            return speculative_decoding(
                target,
                assistant_model,
                input_ids,
                num_drafts,
                logits_processor=logits_processor,
                stopping_criteria=stopping_criteria,
                generation_config=generation_config,
                streamer=streamer,
                model_kwargs=model_kwargs,
                # V4's compressors pool padding with text: its text would depend on how much there is.
                skip_padding=_shares_keys(target, cache),
            )
        _check_stock_assistance(assistant_model, model_kwargs)
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

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # The bound class exists only in memory: copies and pickles are rebuilt from the class it was made of.
        state = cast("tuple[Any, ...]", super().__reduce_ex__(protocol))[2:]
        return _new_bound, (_unbound_class(type(self)),), *state


def bind(target: PreTrainedModel) -> PreTrainedModel:
    """Prepare one target instance for assisted generation: its class becomes a subclass that can rewind its cache.

    Its layers get hooks that are silent outside our own forwards. Nothing else about the target changes, and [`unbind`]
    undoes both. `drafter.bind(target)` does the same after checking the pair. Needed without a drafter for transformers'
    own assisted modes (prompt lookup, a second V4 as assistant: bind that one too).

    Raises:
        ValueError: If it is no target (see [`collapse_of`]), its cache cannot be rewound, or code of another version has
            bound it.
    """
    collapse, kinds = collapse_of(target), _layer_kinds(target)
    if getattr(target, "_is_stateful", False):
        if kinds - _REWINDABLE_KINDS:
            raise ValueError(
                f"A {type(target).__name__} has layers ({', '.join(sorted(kinds - _REWINDABLE_KINDS))}) with a running "
                "state that cannot be rewound, so drafts that the target rejects could not be taken back. Use a target "
                f"whose layers are of these kinds: {', '.join(sorted(_REWINDABLE_KINDS))}."
            )
    with _BINDING:
        bound_by = getattr(type(target), "bound_by", None)
        if bound_by is None:
            hooks = TargetHooks(target, collapse.layers, collapse.paths, "linear_attention" in kinds)
            target.hyperdflash_hooks = cast(Any, hooks)
            target.__class__ = _bound_class(cast(type, type(target)))
        elif series(bound_by) != series(__version__):
            raise ValueError(
                f"The target is bound by hf_hyperdflash {bound_by}, and this is {__version__}, which may not fit. `unbind` "
                "the target first."
            )
    return target


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
                    f"The class of this target was changed again after binding, to {type(target).__mro__[0]}. Undo that "
                    "first."
                )
            cast(BoundTarget, target).hyperdflash_hooks.remove()
            del target.hyperdflash_hooks
            target.__class__ = own
            _fitting.pop(target, None)
    return target


def check_fit(target: PreTrainedModel, drafter: Any) -> None:
    """Check that a drafter fits a target, once for as long as the target is bound.

    Raises:
        ValueError: Naming both values, if they do not fit.
    """
    collapse_of(target)  # what is no target has no place to remember it at
    fitting = _fitting.setdefault(target, WeakSet())
    if drafter not in fitting:
        drafter.check_target(target)
        fitting.add(drafter)


def is_bound(model: Any) -> bool:
    """Whether `model` is a bound target, by this code or by the copy of it that a drafter brought along."""
    return hasattr(type(model), "bound_by")


def is_drafter(model: Any) -> bool:
    """Whether `model` drafts through our loop (`generation.Drafter`): wrapped and remote-code drafters count too."""
    return all(callable(getattr(model, name, None)) for name in ("check_target", "extend", "draft"))


def is_hyperdflash(model: Any) -> bool:
    """Whether `model` is a HyperDFlash drafter, by its configuration."""
    return getattr(getattr(model, "config", None), "model_type", None) == HyperDFlashConfig.model_type


@functools.cache
def _bound_class(own: type) -> type:
    # The same name: `save_pretrained` writes it to the checkpoint as its architecture.
    names = {"__module__": own.__module__, "__qualname__": own.__qualname__, "__doc__": own.__doc__}
    return type(own.__name__, (BoundTarget, own), names)


def _unbound_class(bound: type) -> type:
    mro = bound.__mro__
    return next(after for mixed, after in pairwise(mro) if "bound_by" in vars(mixed))


def _new_bound(own: type) -> Any:
    return object.__new__(_bound_class(own))


def _shares_keys(target: PreTrainedModel, cache: Cache) -> bool:
    """Whether keys and values are one tensor, as in DeepSeek-V4, whose compressors have to be rewound too."""
    return _text_config(target).model_type == "deepseek_v4" or any(
        isinstance(layer, DeepseekV4HCACache) for layer in getattr(cache, "layers", ())
    )


def _drafts_asked(config: GenerationConfig | None) -> int | None:
    """`num_assistant_tokens`, but not where transformers filled in its own default of 20 with all its others, as pipelines
    let it do: later, a 20 of the caller's looks the same."""
    if config is None:
        return None
    defaults = {name: value for name, value in config._get_default_generation_params().items() if value is not None}
    is_filled = all(getattr(config, name, None) is not None for name in defaults)
    asked = config.num_assistant_tokens
    return None if is_filled and asked == defaults.get("num_assistant_tokens") else asked


def _make_rewindable(target: PreTrainedModel, cache: Cache, num_drafts: int) -> None:
    """Let a cache take back that many drafts and the anchor."""
    make_linear_rewindable(cache)
    if _shares_keys(target, cache):
        make_rewindable(cache, max(DEFAULT_MAX_REWIND, num_drafts + 1))


def _check_request(
    input_ids: torch.Tensor, generation_config: GenerationConfig, synced_gpus: bool, model_kwargs: dict[str, Any]
) -> None:
    if input_ids.shape[0] > 1:
        raise ValueError(
            f"Assisted generation works on one sequence at a time, got a batch of {input_ids.shape[0]}. Call `generate` "
            "once per prompt."
        )
    if model_kwargs.get("past_key_values") is None:
        raise ValueError("Assisted generation needs a cache: leave `use_cache` at True.")
    check_cache(model_kwargs["past_key_values"])
    if input_ids.shape[1] == 0 or model_kwargs.get("inputs_embeds") is not None:
        raise ValueError("HyperDFlash drafts from token ids: pass `input_ids`, not `inputs_embeds`.")
    media = [
        name
        for name, value in model_kwargs.items()
        if name.startswith(_MEDIA) and (isinstance(value, torch.Tensor) or value)
    ]
    if media:
        raise ValueError(f"HyperDFlash drafts text only: leave {media} out, or generate without `assistant_model`.")
    _check_continuation(input_ids.shape[1], generation_config, model_kwargs)
    if synced_gpus:
        raise ValueError(
            "`synced_gpus=True` is not supported with a HyperDFlash drafter: ranks that finish early would wait for "
            "forwards that never come. Gather the target's parameters (or use tensor parallelism) for generation."
        )
    if generation_config.assistant_ensemble_weight is not None:
        raise ValueError(
            f"`assistant_ensemble_weight` is {generation_config.assistant_ensemble_weight}, expected None: HyperDFlash "
            "is lossless, it does not mix the drafter's distribution into the target's."
        )


def _check_continuation(length: int, generation_config: GenerationConfig, model_kwargs: dict[str, Any]) -> None:
    cached = model_kwargs["past_key_values"].get_seq_length()
    mask = model_kwargs.get("attention_mask")
    whole = getattr(generation_config, "_mask_length", length) if mask is None else mask.shape[1]
    if cached and (whole != length or length <= cached):
        raise ValueError(
            f"`past_key_values` holds {cached} tokens and `input_ids` {length}: expected the whole sequence, what is in "
            "the cache and at least one new token. Concatenate the earlier output and the new turn."
        )


def _check_stock_assistance(assistant_model: Any, model_kwargs: dict[str, Any]) -> None:
    if getattr(assistant_model, "_is_stateful", False):
        raise ValueError(
            f"The assistant, a {type(assistant_model).__name__}, cannot rewind its cache. Call "
            "`hf_hyperdflash.bind(assistant_model)` first."
        )
    if is_bound(assistant_model) and "linear_attention" in _layer_kinds(assistant_model):
        raise ValueError(
            f"The assistant, a {type(assistant_model).__name__}, has linear attention, which can take back the last forward "
            "only, and an assistant runs several. Use a HyperDFlash drafter, or an assistant without linear attention."
        )
    cache = model_kwargs.get("past_key_values")
    if cache is not None and cache.get_seq_length() > 0:
        raise ValueError(
            f"transformers' own assisted decoding would feed the prompt again on top of the {cache.get_seq_length()} "
            "tokens in `past_key_values`. Leave `past_key_values` out, or use a HyperDFlash drafter, which continues "
            "correctly."
        )
