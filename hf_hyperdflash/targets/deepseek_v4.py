"""DeepSeek-V4's indexers and compressors in verification rounds.

An indexer's scores are sums over heads of ReLU terms, so many entries can have a score of exactly 0. Which of them
`topk` chooses depends on the number of entries, and a verification round also has entries of windows that its drafts
close. The text would then depend on how it was divided into forwards, as it does with stock DeepSeek-V4. Here a
round's indexers choose the entries that they would choose for one token at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from threading import get_ident
from typing import Any, cast

import torch
import transformers
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers.cache_utils import Cache
from transformers.models.deepseek_v4.modeling_deepseek_v4 import (
    DeepseekV4CSACompressor,
    DeepseekV4HCACompressor,
    DeepseekV4Indexer,
    DeepseekV4RMSNorm,
)

from .caches.tree_state import TreeState, best_visible
from .hooks import PerThread, Round


def check_computes(dtype: torch.dtype) -> None:
    """Raise a `ValueError` if the installed transformers cannot run a DeepSeek-V4 that it has loaded in `dtype`.

    It keeps the norms in float32, and for float16 some projections, too. Before transformers 5.20 the output of norms
    is float32 like their weights, which a projection in bfloat16 does not accept.
    """
    norm = DeepseekV4RMSNorm(1).float()
    fix = "install transformers 5.20 or later, or load it with dtype='float32'"
    if dtype == torch.float16:
        fix = "load it with dtype='bfloat16' (from transformers 5.20 on) or 'float32'"
    elif norm(torch.zeros(1, 1, dtype=dtype)).dtype == dtype:
        return
    raise ValueError(
        f"The target is a DeepSeek-V4 in {str(dtype).removeprefix('torch.')}, which transformers "
        f"{transformers.__version__} cannot run: {fix}."
    )


Rounds = PerThread[Round]
# Terms of scores that are computed at once, one of each head for each token: on a CPU as many as its cache holds.
_TERMS, _TERMS_ON_CPU = 1 << 26, 1 << 18

# What transformers calls a compressor or an indexer with: hidden states, queries, positions, the cache, and the layer.
CompressorInputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, Cache | None, int]
Compressed = tuple[torch.Tensor, torch.Tensor | None]  # entries, and the bias of the attention to them


def hooks_of_rounds(model: nn.Module, rounds: Rounds) -> list[RemovableHandle]:
    """Register hooks on compressors and their indexers. In verification rounds they choose as for one token at a time,
    each node of a draft tree chooses among the entries of its own path, and attention reads no entry that no token
    chose."""
    handles = []
    for module in model.modules():
        if isinstance(module, DeepseekV4Indexer):
            handles.append(module.register_forward_pre_hook(partial(_in_rounds, _hide_entries, rounds)))
            handles.append(module.scorer.register_forward_hook(partial(_in_rounds, _remember, rounds)))
            handles.append(module.register_forward_hook(partial(_in_rounds, _choose, rounds)))
        elif isinstance(module, DeepseekV4CSACompressor):
            handles.append(module.register_forward_hook(partial(_in_rounds, _leave_out, rounds)))
        elif isinstance(module, DeepseekV4HCACompressor):
            handles.append(module.register_forward_hook(partial(_in_rounds, _see_own_path, rounds)))
    return handles


def _in_rounds(act: Callable[..., object], rounds: Rounds, *args: object) -> object:
    """Act on a module's input or output where a thread verifies drafts. Else a compiled module stays one graph."""
    return act(rounds, *args) if rounds else None


class _Hidden:
    """A cache, and its layer at once, that hands an indexer none of its entries.

    Attributes:
        entries: Those of the indexer, `[batch, entries, config.index_head_dim]`.
    """

    def __init__(self, layer: Any, index: int) -> None:
        self.layers, self._layer = {index: self}, layer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)

    def update_compressor_states(self, name: str, compressed: torch.Tensor) -> torch.Tensor:
        self.entries = self._layer.update_compressor_states(name, compressed)
        return self.entries[:, :0]


def _current(rounds: Rounds) -> Round | None:
    """Return the round that this thread runs."""
    return next(iter(rounds.get(get_ident(), ())[-1:]), None)


@torch.compiler.disable  # as the hooks that capture the residual
def _hide_entries(rounds: Rounds, indexer: nn.Module, args: CompressorInputs) -> tuple[object, ...] | None:
    """Let an indexer score nothing: it would score all entries, each head and token at once, and choose otherwise than
    a round must."""
    *inputs, cache, index = args
    if cache is None or _current(rounds) is None:
        return None
    return (*inputs, _Hidden(cache.layers[index], index), index)


@torch.compiler.disable
def _remember(rounds: Rounds, scorer: nn.Module, args: tuple[torch.Tensor, ...], scores: torch.Tensor) -> None:
    if (round_ := _current(rounds)) is not None:
        round_[scorer] = args


@torch.compiler.disable
def _choose(
    rounds: Rounds, indexer: DeepseekV4Indexer, args: CompressorInputs, output: torch.Tensor
) -> torch.Tensor | None:
    layer, round_ = cast(Any, args[3]), _current(rounds)
    if round_ is None or not isinstance(layer, _Hidden):
        return None
    queries, _, states = round_.pop(indexer.scorer)
    (batch, count), (_, total, _) = queries.shape[:2], layer.entries.shape
    tree: TreeState | None = getattr(layer, "tree_state", None)
    held = count if tree is None else 0  # nodes of a tree come into the cache when they are accepted
    before = layer.get_seq_length() - held
    rate, top_k = indexer.compress_rate, min(indexer.index_topk, total)
    visible = visible_of_chain(before, count, rate) if tree is None else tree.visible_entries("indexer")
    scores = queries.new_zeros(batch * count, total)
    if total > top_k:  # else there is nothing to choose
        parts = zip(queries, layer.entries, states)
        scores = torch.cat([index_scores(indexer.scorer, *part) for part in parts])
    hidden = None
    if before != round_.position:
        # The cache has seen padding. Stock indexers choose among all entries, but count by positions which of them a
        # token may see.
        old, depths = total - visible.shape[1], torch.arange(count) if tree is None else tree.layout.depths
        numbers = torch.cat([torch.arange(old).expand(count, old), old + visible.cumsum(1) - 1], dim=1)  # on its path
        hidden = (numbers >= (round_.position + depths + 1)[:, None] // rate).repeat(batch, 1).to(scores.device)
        scores = scores.masked_fill(hidden, -torch.inf)
    chosen = best_visible(scores, visible.repeat(batch, 1), top_k)
    if hidden is not None:
        chosen = chosen.masked_fill(hidden.gather(1, chosen.clamp(min=0)), -1)
    if total > top_k:
        round_[indexer] = (chosen,)
    return chosen.view(batch, count, -1)


def visible_of_chain(start: int, count: int, compress_rate: int) -> torch.Tensor:
    """Return which entries each token of a chain sees, of those that the chain itself closes. Boolean `[count,
    entries]`, on the host.

    Args:
        start: Tokens before it.
        count: Its tokens.
        compress_rate: Tokens an entry.
    """
    closed = (torch.arange(start + 1, start + count + 1) // compress_rate) - start // compress_rate
    return torch.arange(int(closed[-1])) < closed[:, None]


def index_scores(scorer: Any, queries: torch.Tensor, entries: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
    """Return an indexer's scores of entries for each token, `[seq, entries]`: sums over its heads of weighted ReLU
    terms, of some entries at a time. These terms of all would be the most that a round holds.

    Args:
        scorer: The indexer's.
        queries: `[seq, config.index_n_heads, config.index_head_dim]`.
        entries: `[entries, config.index_head_dim]`.
        states: `[seq, config.hidden_size]`.
    """
    weights = scorer.weights_proj(states).float() * (scorer.weights_scaling * scorer.softmax_scale)
    (seq, heads), flat = queries.shape[:2], queries.flatten(0, 1).float()
    step = max(1, (_TERMS_ON_CPU if flat.device.type == "cpu" else _TERMS) // len(flat))
    scores = flat.new_empty(seq, len(entries))
    for part, own in zip(entries.split(step), scores.split(step, dim=1)):
        terms = (flat @ part.float().T).relu_()
        own.copy_((weights[:, None] @ terms.view(seq, heads, len(part)))[:, 0])
    return scores


@torch.compiler.disable
def _leave_out(rounds: Rounds, compressor: Any, args: CompressorInputs, output: Compressed) -> Compressed | None:
    """Hand the attention the entries that some token chose: it would read all of them for each head and token."""
    round_, (entries, bias) = _current(rounds), output
    chosen = () if round_ is None else round_.pop(compressor.indexer, ())
    if round_ is None or round_.shows_attention or bias is None or not chosen:
        return None
    is_chosen = torch.zeros(entries.shape[2] + 1, dtype=torch.bool, device=entries.device)
    is_chosen[chosen[0].flatten()] = True  # -1 is the one behind all of them
    places = is_chosen[:-1].nonzero()[:, 0]
    return entries[:, :, places], bias[..., places]


@torch.compiler.disable
def _see_own_path(rounds: Rounds, compressor: Any, args: CompressorInputs, output: Compressed) -> Compressed:
    round_, cache, (entries, bias) = _current(rounds), cast(Any, args[3]), output
    if round_ is None or cache is None or bias is None:
        return output
    layer, count = cache.layers[args[4]], bias.shape[2]
    tree: TreeState | None = getattr(layer, "tree_state", None)
    if tree is not None:
        visible = tree.visible_entries("compressor")
    elif (before := layer.get_seq_length() - count) != round_.position:
        # Unlike an indexer, stock compressors hide none from a single token.
        visible = visible_of_chain(before, count, compressor.compress_rate)
    else:
        return output
    bias = torch.zeros_like(bias)
    bias[..., bias.shape[-1] - visible.shape[1] :].masked_fill_(~visible.to(bias.device), -torch.inf)
    return entries, bias
