"""The target as drafting sees it: its layers, its embedding, its LM head, and a cache that gives tokens back."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from threading import get_ident
from typing import Any, cast

import torch
import transformers
from torch import nn
from torch.nn.functional import pad
from torch.utils.hooks import RemovableHandle
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.generation.utils import GenerationMixin
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Indexer

EMBEDDINGS = -1_000_000  # among the layers that a drafter reads: what enters the first one
MAMBA_HYBRIDS = ("bamba", "falcon_h1", "nemotron_h")


def cache_name(function: Any) -> str:
    """Return what a function calls its cache: `cache` from transformers 5.24 on, `past_key_values` before that, and
    remote code as it was written."""
    parameters = inspect.signature(function).parameters
    return next((name for name in CACHE_NAMES if name in parameters), "")


# How each message ends of what is not in this file.
INSTALL = "install hf-hyperdflash (`pip install -U hf-hyperdflash`)"
CACHE_NAMES = ("cache", "past_key_values", "cache_params")
CACHE_NAME = cache_name(GenerationMixin.prepare_inputs_for_generation)


# Of each thread that runs a round, what its modules remember of it.
Rounds = dict[int, "dict[nn.Module, torch.Tensor] | None"]


class Target:
    """A bound target.

    Args:
        model: The target.

    Attributes:
        layers: Its decoder layers.
        streams: How many residual streams leave each of them.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model, self.config = model, model.config.get_text_config(decoder=True)
        places: Any = (model.get_decoder(), model.base_model, model)
        trunk = next((place for place in places if isinstance(getattr(place, "layers", None), nn.ModuleList)), None)
        if trunk is None:
            raise ValueError(f"The target is a {type(model).__name__}, expected a causal LM with `layers`.")
        if not CACHE_NAME:
            raise ValueError(f"transformers {transformers.__version__} has another name for the cache: {INSTALL}.")
        self.trunk, self.layers = trunk, trunk.layers
        bare = getattr(trunk, "hc_head_fn", getattr(model, "hc_head_fn", None))  # DeepSeek's own code
        streams = getattr(self.config, "hc_mult", getattr(self.config, "hc_count", 1))
        self.streams = streams if bare is None else bare.shape[0]
        # What each thread reads at the moment, by layer. A hook belongs to the module, which threads may share.
        self._read: dict[int, dict[int, Any]] = {}
        self.handles = [layer.register_forward_hook(partial(self._keep, i)) for i, layer in enumerate(self.layers)]
        self.handles.append(self.layers[0].register_forward_pre_hook(self._keep_input, with_kwargs=True))
        self._rounds: Rounds = {}
        for prepare in PREPARATIONS.values():
            self.handles += prepare(model, self._rounds)

    # Reading layers

    @contextmanager
    def reading(self, layer_ids: Sequence[int]) -> Iterator[dict[int, torch.Tensor]]:
        """Collect the residual streams `[1, seq, streams, config.hidden_size]` that leave these layers in one forward
        of this thread; -1 is the last layer."""
        read: dict[int, Any] = {len(self.layers) - 1 if i == -1 else i: None for i in layer_ids}
        self._read[get_ident()] = read
        try:
            yield read
        finally:
            del self._read[get_ident()]

    def _keep(self, index: int, layer: nn.Module, args: Any, output: Any) -> None:
        read = self._read.get(get_ident(), {})
        if index in read:
            states = output[0] if isinstance(output, tuple) else output
            read[index] = states.unflatten(2, (self.streams, -1)) if states.ndim == 3 else states

    def _keep_input(self, layer: nn.Module, args: Any, kwargs: Any) -> None:
        self._keep(EMBEDDINGS, layer, args, args[0] if args else kwargs.get("hidden_states"))

    # Embedding and LM head, which the drafter shares

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the embeddings of `ids` `[batch, seq]` before any norm, `[batch, seq, config.hidden_size]`."""
        embedding = cast(nn.Embedding, self.model.get_input_embeddings())
        look_up = partial(nn.Embedding.forward, embedding) if hasattr(embedding, "embed_norm") else embedding
        embeds = look_up(ids if embedding.weight.is_meta else ids.to(embedding.weight.device))
        scales = self.config.model_type.startswith(("granite", *MAMBA_HYBRIDS))
        return embeds * getattr(self.config, "embedding_multiplier", 1.0) if scales else embeds

    def logits(self, states: torch.Tensor, ids: torch.Tensor | None = None) -> torch.Tensor:
        """Return logits from what the LM head reads, `[..., config.hidden_size]`, of all tokens; or from `[batch,
        config.hidden_size]` those of the tokens `ids` `[batch, tokens]` alone."""
        head = cast(nn.Linear, self.model.get_output_embeddings())
        weight = head.weight
        is_plain = not weight.is_meta and weight.dtype.is_floating_point and weight.dtype.itemsize > 1
        states = states.to(weight.device, weight.dtype) if is_plain else states
        if ids is None or not is_plain:
            logits = head(states)
            logits = logits if ids is None else logits.gather(-1, ids.to(logits.device))
        else:  # some rows of the LM head, instead of all of it
            ids = ids.to(weight.device)
            logits = torch.einsum("bd,bcd->bc", states, weight[ids])
            logits = logits if head.bias is None else logits + head.bias[ids]
        logits = logits * getattr(self.config, "output_multiplier", 1.0)
        cap = getattr(self.config, "final_logit_softcapping", None)
        logits = logits if cap is None else cap * torch.tanh(logits / cap)
        if self.config.model_type.startswith("granite"):
            return logits / getattr(self.config, "logits_scaling", 1.0)
        return logits * self.config.lm_head_multiplier if self.config.model_type == "falcon_h1" else logits

    # Forwards

    def forward(
        self,
        ids: torch.Tensor,
        count: int,
        positions: torch.Tensor,
        cache: DynamicCache,
        is_round: bool,
        **kwargs: Any,
    ) -> Any:
        """Run the last `count` of the tokens `ids` `[1, seq]`, whose positions are given; the others are in the cache.
        In a round they are tokens that plain decoding would run one by one."""
        prepare = cast(Any, self.model).prepare_inputs_for_generation
        known = {cache_name(prepare) or CACHE_NAME: cache, "position_ids": positions, **kwargs}
        inputs = prepare(ids, next_sequence_length=count, is_first_iteration=count == ids.shape[1], **known)
        given = {name: value for name, value in inputs.items() if name not in CACHE_NAMES}
        given[cache_name(self.model.forward) or CACHE_NAME] = cache
        if "logits_to_keep" in given:  # which only some models know, and some know better
            given["logits_to_keep"] = count if is_round else 1
        self._rounds[get_ident()] = {} if is_round else None
        try:
            return self.model(**given, return_dict=True)
        finally:
            del self._rounds[get_ident()]


def choose_one_by_one(model: nn.Module, rounds: Rounds) -> list[RemovableHandle]:
    """Let the indexers of a DeepSeek-V4 choose in rounds what they would choose for one token at a time.

    Their scores are sums of ReLU terms, so that many entries can have a score of exactly 0. Which of them `topk`
    chooses depends on how many entries there are, and a round also has those that its later tokens have closed.
    """

    def keep_scores(indexer: nn.Module, scorer: nn.Module, args: Any, scores: torch.Tensor) -> None:
        round_ = rounds.get(get_ident())
        if round_ is not None:
            round_[indexer] = scores

    def choose(indexer: DeepseekV4Indexer, args: Any, chosen: torch.Tensor) -> torch.Tensor:
        scores = (rounds.get(get_ident()) or {}).pop(indexer, None)
        if scores is None or scores.shape[1] == 1 or scores.shape[2] <= indexer.index_topk:
            return chosen
        return one_token_entries(scores, args[2], indexer.compress_rate, indexer.index_topk)

    handles = []
    for module in model.modules():
        if isinstance(module, DeepseekV4Indexer):
            handles.append(module.scorer.register_forward_hook(partial(keep_scores, module)))
            handles.append(module.register_forward_hook(choose))
    return handles


def one_token_entries(
    scores: torch.Tensor, position_ids: torch.Tensor, compress_rate: int, top_k: int
) -> torch.Tensor:
    """Return each position's entries with the highest scores, among those that existed when it was the last one.

    Args:
        scores: `[batch, seq, entries]` of the indexer's scorer, for all entries that exist after the last position.
        position_ids: `[batch or 1, seq]`, consecutive.
        compress_rate: Tokens an entry.
        top_k: `config.index_topk`.

    Returns:
        `[batch, seq, top_k]`, -1 where there were fewer entries.
    """
    seq, entries = scores.shape[1:]
    counts = ((position_ids + 1) // compress_rate).unsqueeze(-1)
    chosen = torch.full((*scores.shape[:2], top_k), -1, device=scores.device)
    # The most that the forward itself can close. To look up the true number would be to wait for the device.
    closed = -(-(seq - 1) // compress_rate)
    for count in range(max(entries - closed, 1), entries + 1):
        found = scores[..., :count].topk(min(top_k, count), dim=-1).indices
        chosen = torch.where(counts == count, pad(found, (0, top_k - found.shape[-1]), value=-1), chosen)
    return chosen


# What a bound target needs besides, by the kind of model.
PREPARATIONS: dict[str, Callable[[nn.Module, Rounds], list[RemovableHandle]]] = {"deepseek_v4": choose_one_by_one}


class Rewind:
    """Takes rejected tokens out of a cache again.

    Keys and values are cropped. A running state (linear attention, Mamba, the compressors of DeepSeek-V4) has nothing
    that could be cut off: it is copied before a forward, and the tokens that stay run again from the copy."""

    def __init__(self, cache: DynamicCache) -> None:
        self.cache, self._before = cache, [dict[str, Any]()]
        self.can_crop = all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in cache.layers)
        if self.can_crop:
            self.record(True)
            cache.crop(0)  # removes no token (a negative number removes some): windows let go of what has left them

    def record(self, is_on: bool) -> None:
        """Let sliding windows keep what leaves them, until the next crop."""
        for layer in self.cache.layers:
            if self.can_crop and hasattr(layer, "record_past"):
                layer.record_past = is_on

    def begin(self) -> None:
        """Prepare for a forward of which not all tokens may stay."""
        if not self.can_crop:
            self._before = [_copy(vars(layer)) for layer in self.cache.layers]

    def keep(self, kept: int, width: int) -> bool:
        """Take back all but the first `kept` tokens of the last forward, which had `width`. Return whether those that
        stay have to run again."""
        if self.can_crop:
            self.cache.crop(kept - width)
        elif kept < width:
            for layer, before in zip(self.cache.layers, self._before):
                vars(layer).clear()
                vars(layer).update(before)
        return kept < width and not self.can_crop


def _copy(state: dict[Any, Any]) -> dict[Any, Any]:
    """Copy what a cache layer holds. Keys and values stay as they are: caches put new ones behind them in a new
    tensor. Other states may be written in place."""
    copies = {}
    for name, value in state.items():
        if isinstance(value, torch.Tensor) and name not in ("keys", "values"):
            value = value.clone()
        copies[name] = _copy(value) if isinstance(value, dict) else value
    return copies
