"""What is asked of `generate` with a drafter: how many drafts, of which sequences, whether that can be done, and who
gets hold of what rounds compute."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Literal, cast

import torch
from torch import distributed, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, StaticLayer, StaticSlidingWindowLayer
from transformers.generation.configuration_utils import GenerationConfig

from ..auto.policies import MOST_NODES as MOST_NODES_OF_AUTO
from ..drafters.base import AUTO, Drafter, Observer
from ..targets.caches.name import CACHE
from ..targets.caches.protocols import OPEN_FORWARDS, RewindableCache
from ..targets.registry import is_bound, target_of
from ..targets.target import Target

# Ways to write that are not ours, by the argument that asks for each.
_WAYS = (
    "num_beams",
    "penalty_alpha",
    "custom_generate",
    "prompt_lookup_num_tokens",
    "use_mtp",
    "assistant_early_exit",
    "is_assistant",
)
_BESIDE = ("prompt_lookup_num_tokens", "use_mtp", "dola_layers")  # with a drafter they would be left out in silence
_SHOWN = ("output_hidden_states", "output_attentions")  # of which each sequence would have another length
_CACHE_STEP = 256  # of static caches' lengths: rounds are compiled anew for each length
_MEDIA = ("pixel_values", "mm_encoder_outputs", "input_features")  # prefixes of `generate`'s arguments
_HARMLESS = "transformers.", __package__.split(".")[0] + "."  # whose hooks keep nothing
MOST_NODES = 1024  # of a draft tree: the masks and scores of many more fill any memory


def drafts_asked(config: GenerationConfig | None) -> int | str | None:
    """Return `num_assistant_tokens`, but not where transformers filled in its own default of 20 with all its others,
    as pipelines let it do: later, a 20 of the caller's looks the same."""
    if config is None:
        return None
    defaults = {name: value for name, value in config._get_default_generation_params().items() if value is not None}
    is_filled = all(getattr(config, name, None) is not None for name in defaults)
    asked = config.num_assistant_tokens
    return None if is_filled and asked == defaults.get("num_assistant_tokens") else asked


class GenerateCall:
    """A call of a bound target's `generate`: its arguments by name, and the target's own settings behind them.

    Args:
        target: The bound target.
        arguments: As `inspect.signature` binds them, with a `kwargs` around some.

    Attributes:
        rows: How many texts are asked for, once that is checked.
    """

    rows = 1

    def __init__(self, target: PreTrainedModel, arguments: dict[str, Any]) -> None:
        self.target = target
        named = {name: value for name, value in arguments.items() if name != "kwargs"}
        self.arguments = {**named, **arguments.get("kwargs", {})}

    def setting(self, name: str) -> Any:
        """Return what an argument or else a generation configuration says."""
        given = self.arguments.get("generation_config"), self.target.generation_config
        configs = [config for config in given if config is not None]
        said = [self.arguments.get(name), *(getattr(config, name, None) for config in configs)]
        return next((value for value in said if value is not None), None)

    @property
    def ids(self) -> torch.Tensor | None:
        """The prompts `[rows, seq]`; `None` if there are none such."""
        ids = self.arguments.get("inputs")
        ids = self.arguments.get("input_ids") if ids is None else ids
        return ids if isinstance(ids, torch.Tensor) and ids.ndim == 2 else None

    @property
    def way(self) -> str | None:
        """The argument that asks for another way to write than one token after the other, if one does."""
        said = {name: self.setting(name) for name in _WAYS}
        said["num_beams"] = (said["num_beams"] or 1) > 1
        return next((name for name, value in said.items() if value), None)

    def check_shapes(self) -> None:
        """Raise a `ValueError` if mask or positions are not those of the tokens: transformers takes some that are
        not."""
        ids = self.ids
        if ids is None:
            return
        (rows, length), cache = ids.shape, self.arguments.get(CACHE)
        mask, positions = self.arguments.get("attention_mask"), self.arguments.get("position_ids")
        cached = 0 if cache is None else int(cache.get_seq_length())
        if isinstance(mask, torch.Tensor) and mask.ndim == 2:
            is_of_new_ids = cached and mask.shape[1] > length  # which `_check_continuation` has words for
            if mask.shape[0] != rows or (mask.shape[1] != length and not is_of_new_ids):
                raise ValueError(
                    f"`attention_mask` has the shape {list(mask.shape)} and `input_ids` {list(ids.shape)}, expected a "
                    "column for each token, what is in the cache included: pass the tokenizer's own mask, or leave it "
                    "out."
                )
        new = length - cached
        if isinstance(positions, torch.Tensor) and not new <= positions.shape[-1] <= length:
            raise ValueError(
                f"`position_ids` has the shape {list(positions.shape)}, expected one for each of the {new} tokens "
                "that are not in the cache: pass so many, or leave it out."
            )

    def check_rows(self) -> None:
        """Raise a `ValueError` if what is asked for cannot be done for so many texts."""
        count = self.setting("num_return_sequences")
        count = 1 if count is None else count
        if type(count) is not int or count < 1:
            raise ValueError(f"`num_return_sequences` is {count!r}, expected a whole number of texts, at least 1.")
        # Without a prompt, transformers starts one with the target's first token.
        self.rows = count * (1 if self.ids is None else len(self.ids))
        if self.rows == 1 or self.way in ("num_beams", "penalty_alpha", "custom_generate"):
            return
        texts = f"{self.rows} texts"
        if count > 1 and not self.setting("do_sample"):
            raise ValueError(
                f"`num_return_sequences` is {count} and `do_sample` False: greedy texts of one prompt are all the "
                "same. Set `do_sample=True`, or leave `num_return_sequences` out."
            )
        if self.arguments.get(CACHE) is not None:
            raise ValueError(
                f"`{CACHE}` was passed for {texts}, which differ in length after drafts: pass the whole texts "
                "without it, or continue one text at a time."
            )
        if self.arguments.get("streamer") is not None:
            raise ValueError(
                f"`streamer` was passed for {texts}, and it streams one: leave it out, or pass one prompt."
            )
        if shown := [name for name in _SHOWN if self.setting(name)]:
            raise ValueError(
                f"`{shown[0]}` was asked for of {texts}, each in rounds of its own: pass one prompt for it."
            )
        mask = self.arguments.get("attention_mask")
        if mask is not None and not bool(mask[:, -1].all()):
            row = int(mask[:, -1].long().argmin())
            raise ValueError(
                f"`attention_mask` ends in padding in row {row}, expected it on the left: set "
                "`tokenizer.padding_side` to 'left'."
            )


def tree_budget_asked(config: GenerationConfig) -> int | Literal["auto"] | None:
    """Return `tree_budget`: the most nodes of a draft tree, or `"auto"`; `None` for chains.

    Raises:
        ValueError: If it is no number of nodes.
    """
    return check_tree_budget(getattr(config, "tree_budget", None))


def check_tree_budget(budget: object) -> int | Literal["auto"] | None:
    """Return `budget` if a draft tree can have so many nodes, or if it is `"auto"` or `None`.

    Raises:
        ValueError: If not.
    """
    if budget not in (None, AUTO) and (type(budget) is not int or not 1 <= budget <= MOST_NODES):
        raise ValueError(
            f"`tree_budget` is {budget!r}, expected the most nodes of a draft tree, a whole number from 1 to "
            f"{MOST_NODES}, 'auto' for what pays, or None for one chain of drafts."
        )
    return cast("int | Literal['auto'] | None", budget)


def static_cache_length(config: GenerationConfig, length: int) -> int:
    """Return how long a request's static cache is to be: the last round of a text needs room, too.

    Args:
        config: The request's.
        length: How long plain decoding needs it.
    """
    length = max(length, getattr(config, "max_cache_len", None) or 0)
    asked = config.num_assistant_tokens, tree_budget_asked(config)
    positions = 1 + max([MOST_NODES_OF_AUTO, *(count for count in asked if isinstance(count, int))])
    return math.ceil((length + positions) / _CACHE_STEP) * _CACHE_STEP


def check_request(
    input_ids: torch.Tensor,
    rows: int,
    generation_config: GenerationConfig,
    synced_gpus: bool,
    model_kwargs: dict[str, Any],
) -> None:
    """Raise a `ValueError` if our loop cannot do what is asked for, of so many rows."""
    if model_kwargs.get(CACHE) is None:
        raise ValueError("Assisted generation needs a cache: leave `use_cache` at True.")
    check_cache(model_kwargs[CACHE])
    if model_kwargs.get("inputs_embeds") is not None:
        raise ValueError("HyperDFlash drafts from token ids: pass `input_ids`, not `inputs_embeds`.")
    if input_ids.shape[1] == 0:
        raise ValueError(
            f"The prompt is empty: `input_ids` has the shape {list(input_ids.shape)}, expected at least one token in "
            "it. Pass a text, or the tokenizer's first token."
        )
    if input_ids.shape[0] != rows:
        raise ValueError(
            f"Our loop was given {input_ids.shape[0]} texts, expected {rows}: call `target.generate`, with a row of "
            "`input_ids` for each prompt."
        )
    media = [
        name
        for name, value in model_kwargs.items()
        if name.startswith(_MEDIA) and (isinstance(value, torch.Tensor) or value)
    ]
    if media:
        raise ValueError(f"HyperDFlash drafts text only: leave {media} out, or pass `assistant_model=None`.")
    _check_texts(model_kwargs[CACHE])
    _check_continuation(input_ids.shape[1], generation_config, model_kwargs)
    chunk = generation_config.prefill_chunk_size
    if chunk is not None and (type(chunk) is not int or chunk < 1):
        raise ValueError(
            f"`prefill_chunk_size` is {chunk!r}, expected a whole number of tokens, at least 1, or None for the "
            "prompt in one piece."
        )
    for name in _BESIDE:
        if value := getattr(generation_config, name, None):
            raise ValueError(
                f"`{name}` is {value!r} beside a drafter, expected one of the two: leave it or `assistant_model` out."
            )
    if synced_gpus:
        raise ValueError(
            "`synced_gpus=True` is not supported with a HyperDFlash drafter: ranks that finish early would wait for "
            "forwards that never come. Gather the target's parameters (or use tensor parallelism) for generation."
        )
    if generation_config.assistant_ensemble_weight is not None:
        raise ValueError(
            f"`assistant_ensemble_weight` is {generation_config.assistant_ensemble_weight}, expected None: "
            "HyperDFlash is lossless, it does not mix the drafter's distribution into the target's."
        )


def _check_texts(cache: Cache) -> None:
    held = {layer.keys.shape[0] for layer in getattr(cache, "layers", ()) if getattr(layer, "keys", None) is not None}
    if any(count > 1 for count in held):
        raise ValueError(
            f"`{CACHE}` holds {max(held)} texts and `input_ids` one: expected the cache of that text alone. Keep it "
            f"with `{CACHE}.batch_select_indices`."
        )


def _check_continuation(length: int, generation_config: GenerationConfig, model_kwargs: dict[str, Any]) -> None:
    cached = int(model_kwargs[CACHE].get_seq_length())
    mask = model_kwargs.get("attention_mask")
    whole = getattr(generation_config, "_mask_length", length) if mask is None else mask.shape[1]
    if cached and (whole != length or length <= cached):
        raise ValueError(
            f"`{CACHE}` holds {cached} tokens and `input_ids` {length}: expected the whole sequence, what is "
            "in the cache and at least one new token. Concatenate the earlier output and the new turn."
        )


def check_stock_assistance(assistant_model: PreTrainedModel | None, model_kwargs: dict[str, Any]) -> None:
    """Raise a `ValueError` if transformers' loop would go wrong with this assistant."""
    if getattr(assistant_model, "_is_stateful", False):
        raise ValueError(
            f"The assistant, a {type(assistant_model).__name__}, cannot rewind its cache. Call "
            "`hf_hyperdflash.bind(assistant_model)` first."
        )
    if assistant_model is not None and is_bound(assistant_model) and target_of(assistant_model).has_running_state:
        raise ValueError(
            f"The assistant, a {type(assistant_model).__name__}, has linear attention, which can take back the last "
            "forward only, and an assistant runs several. Use a HyperDFlash drafter, or an assistant without linear "
            "attention."
        )
    cache = model_kwargs.get(CACHE)
    if cache is not None and cache.get_seq_length() > 0:
        raise ValueError(
            f"transformers' own assisted decoding would feed the prompt again on top of the {cache.get_seq_length()} "
            f"tokens in `{CACHE}`. Leave `{CACHE}` out, or use a HyperDFlash drafter, which continues "
            "correctly."
        )


def can_hold_rounds(cache: object) -> bool:
    """Return whether a cache is one of transformers' static ones whose layers are all of attention."""
    known = StaticLayer, StaticSlidingWindowLayer
    return bool(getattr(cache, "layers", ())) and all(type(layer) in known for layer in cast(Cache, cache).layers)


def check_cache(cache: object) -> RewindableCache:
    """Return a cache that drafts can be taken back from.

    Raises:
        ValueError: If it cannot.
    """
    if not (can_hold_rounds(cache) or getattr(cache, "is_croppable", False)):
        raise ValueError(
            f"Assisted generation cannot rewind a {type(cache).__name__}: leave `cache_implementation` out. A cache "
            "of remote code needs `is_croppable = True` and a `crop(-n)` that takes back the last n tokens."
        )
    return cast(RewindableCache, cache)


def check_cache_implementation(target: Target, name: str | None) -> None:
    """Raise a `ValueError` if drafts could not be taken back from a cache of this kind."""
    fitting = ["dynamic", "offloaded", *(["static"] if target.takes_static_caches else [])]
    if name is not None and name not in fitting:
        raise ValueError(
            f"`cache_implementation` is {name!r}, but assisted generation has to rewind its cache, that of a "
            f"{target.config.model_type} target: leave it out, or use one of {fitting}."
        )


def check_static_cache(target: Target, cache: Cache, config: GenerationConfig) -> None:
    """Raise a `ValueError` if rounds of a request cannot run on its static cache."""
    if not target.takes_static_caches:
        raise ValueError(
            f"`{CACHE}` is a {type(cache).__name__}, in which drafts of a {target.config.model_type} target are not "
            "verified: leave it out, or pass a `DynamicCache(config=model.config)`."
        )
    if config.output_attentions:
        raise ValueError(
            "`output_attentions` was asked for over a static cache, in whose order of keys nobody could read them: "
            "leave `cache_implementation` out."
        )
    rooms = (layer.max_cache_len for layer in cache.layers if type(layer) is StaticLayer)
    room = min(rooms, default=config.max_length)
    if room < config.max_length - 1:
        raise ValueError(
            f"`{CACHE}` has room for {room} tokens, and the text may have {config.max_length}: expected at least "
            f"{config.max_length - 1}. Pass `max_cache_len={config.max_length - 1}`, or a smaller `max_new_tokens`."
        )


def check_whole(family: Target, cache: Cache | None) -> None:
    """Raise a `ValueError` if the layers of a target's cache, the caller's, hold different tokens: going on with it
    would write other text."""
    lengths = set() if cache is None else family.cached_lengths(cache)
    if len(lengths) > 1 or getattr(cache, OPEN_FORWARDS, False):
        raise ValueError(
            f"`{CACHE}` was interrupted inside a forward or while drafts were taken back: its layers hold "
            f"different tokens (of lengths {sorted(lengths)}), expected the same text in all. Start from a new cache."
        )
    for index, layer in enumerate(getattr(cache, "layers", ())):
        window, keys = getattr(layer, "sliding_window", None), getattr(layer, "keys", None)
        if window is None or keys is None:
            continue
        held, needed = keys.shape[-2] if keys.ndim == 4 else 0, min(int(layer.get_seq_length()), window - 1)
        if held < needed:
            raise ValueError(
                f"`{CACHE}` holds {held} keys of its layer {index}, expected the last {needed}: a `crop` of "
                "tokens that were not recorded lost the others. Start from a new cache."
            )


def leaves_nothing(
    target: nn.Module,
    drafter: Drafter,
    observer: Observer | None,
    config: GenerationConfig,
    asked: Iterable[object] = (),
) -> bool:
    """Return whether nobody gets hold of what a request's rounds compute, so that they run in torch's inference mode.

    Every operation is cheaper in it than in `no_grad`: a round of a small target takes some 7 % less. But what it
    computes takes no part in training afterwards. A caller gets hold of that who asks for scores, or passes the cache,
    or a processor or criterion that may keep what it is asked about. So does an observer; remote code, which may keep
    what it once computed; hooks of others; and what spreads weights over processes, or has tensors of its own for
    them.
    """
    return not (
        config.return_dict_in_generate
        or getattr(config, "_has_callers_cache", True)
        or (observer is not None and observer.hears_rounds)
        or not type(target).__module__.startswith("transformers.")
        or not all(type(each).__module__.startswith(_HARMLESS) for each in asked)
        or (distributed.is_available() and distributed.is_initialized())
        or not all(map(_is_plain, target.modules()))
        or (isinstance(drafter, nn.Module) and not all(map(_is_plain, drafter.modules())))
    )


def _is_plain(module: nn.Module) -> bool:
    """Return whether a module's own weights are torch's, and its hooks not of others."""
    hooks = *module._forward_hooks.values(), *module._forward_pre_hooks.values()
    weights = module._parameters.values()
    return all(_origin(hook).startswith(_HARMLESS) for hook in hooks) and all(
        weight is None or type(weight) is nn.Parameter for weight in weights
    )


def _origin(hook: object) -> str:
    return getattr(getattr(hook, "func", hook), "__module__", None) or ""  # of a partial, the function's
