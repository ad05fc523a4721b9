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

import torch
import torch.nn.functional as F
import transformers
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers.cache_utils import Cache
from transformers.models.deepseek_v4.modeling_deepseek_v4 import (
    DeepseekV4HCACompressor,
    DeepseekV4Indexer,
    DeepseekV4RMSNorm,
)

from .caches.tree_state import TreeState, best_visible
from .hooks import PerThread


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


Rounds = PerThread[dict[nn.Module, torch.Tensor]]  # the scores of each indexer until it has chosen


# What transformers calls a compressor or an indexer with: hidden states, queries, positions, the cache, and the layer.
CompressorInputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, Cache | None, int]
Compressed = tuple[torch.Tensor, torch.Tensor | None]  # entries, and the bias of the attention to them


def hooks_of_rounds(model: nn.Module, rounds: Rounds) -> list[RemovableHandle]:
    """Register hooks on compressors and their indexers. In verification rounds they choose as for one token at a time,
    and each node of a draft tree chooses among the entries of its own path."""
    handles = []
    for module in model.modules():
        if isinstance(module, DeepseekV4Indexer):
            handles.append(module.scorer.register_forward_hook(partial(_in_rounds, _remember, rounds, module)))
            handles.append(module.register_forward_hook(partial(_in_rounds, _choose_again, rounds)))
        elif isinstance(module, DeepseekV4HCACompressor):
            handles.append(module.register_forward_hook(partial(_in_rounds, _see_own_path, rounds)))
    return handles


def _in_rounds(act: Callable[..., object], rounds: Rounds, *args: object) -> object:
    """Act on a module's output where a thread verifies drafts. Elsewhere a compiled module stays one graph."""
    return act(rounds, *args) if rounds else None


@torch.compiler.disable  # as the hooks that capture the residual
def _remember(
    rounds: Rounds, indexer: nn.Module, scorer: nn.Module, args: tuple[torch.Tensor, ...], scores: torch.Tensor
) -> None:
    for round_ in rounds.get(get_ident(), ())[-1:]:
        round_[indexer] = scores


@torch.compiler.disable
def _choose_again(
    rounds: Rounds, indexer: DeepseekV4Indexer, args: CompressorInputs, output: torch.Tensor
) -> torch.Tensor:
    for round_ in rounds.get(get_ident(), ())[-1:]:
        scores, position_ids = round_.pop(indexer, None), args[2]
        tree = _tree_state(args)
        if tree is not None and scores is not None:
            return best_visible(scores, tree.visible_entries("indexer"), min(indexer.index_topk, scores.shape[2]))
        # Otherwise there is nothing to choose, or the choice is that of one token.
        if scores is not None and scores.shape[1] > 1 and scores.shape[2] > indexer.index_topk:
            return one_token_entries(scores, position_ids, indexer.compress_rate, indexer.index_topk)
    return output


@torch.compiler.disable
def _see_own_path(rounds: Rounds, compressor: nn.Module, args: CompressorInputs, output: Compressed) -> Compressed:
    tree, (entries, bias) = _tree_state(args), output
    if tree is None or bias is None:
        return output
    visible = tree.visible_entries("compressor").to(bias.device)
    bias = torch.zeros_like(bias)
    bias[..., bias.shape[-1] - visible.shape[1] :].masked_fill_(~visible, -torch.inf)
    return entries, bias


def _tree_state(args: CompressorInputs) -> TreeState | None:
    """Return the draft tree in the cache layer that a compressor is called with, if there is one."""
    cache, layer = args[3:5]
    return None if cache is None else getattr(cache.layers[layer], "tree_state", None)


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
        chosen = torch.where(counts == count, F.pad(found, (0, top_k - found.shape[-1]), value=-1), chosen)
    return chosen
