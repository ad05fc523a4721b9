"""DeepSeek-V4's indexer in a forward of several tokens: the entries that it would choose for one token at a time.

An indexer's scores are sums over heads of ReLU terms, so many entries can have a score of exactly 0. Which of them `topk`
takes depends on how many entries there are, and a verification round has those that its drafts close besides. A
target's text would then depend on how it was cut into forwards; stock DeepSeek-V4's does.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Indexer

_PARAMETERS = ("hidden_states", "q_residual", "position_ids", "past_key_values", "layer_idx")  # of its forward


@contextmanager
def one_token_choice(target: nn.Module) -> Iterator[None]:
    """Let the indexers of a target choose as for one token at a time, in this thread's forwards.

    Forwards of a prompt choose as they always do: only those with a cache that records what a `crop` may undo change.

    Args:
        target: The target; nothing happens if it has no DeepSeek-V4 indexer, or no more entries than its indexer takes.
    """
    thread, handles, scores = threading.get_ident(), [], {}

    def scored(indexer: nn.Module) -> Any:
        @torch.compiler.disable  # as the hooks that capture the residual
        def hook(module: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> None:
            if threading.get_ident() == thread:  # another thread may be generating on the same target
                scores[indexer] = output

        return hook

    @torch.compiler.disable
    def chosen(indexer: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: torch.Tensor) -> Any:
        found = scores.pop(indexer, None) if threading.get_ident() == thread else None
        call = dict(zip(_PARAMETERS, args)) | kwargs
        cache = call["past_key_values"]
        if found is None or found.shape[1] == 1 or found.shape[2] <= indexer.index_topk:
            return output  # nothing to choose, or chosen as for one token
        if cache is None or not cache.layers[call["layer_idx"]].record_past:
            return output  # a prompt's
        return choose(found, call["position_ids"], indexer.compress_rate, indexer.index_topk)

    for indexer in target.modules():
        if isinstance(indexer, DeepseekV4Indexer):
            handles.append(indexer.scorer.register_forward_hook(scored(indexer)))
            handles.append(indexer.register_forward_hook(chosen, with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def choose(scores: torch.Tensor, position_ids: torch.Tensor, compress_rate: int, top_k: int) -> torch.Tensor:
    """The entries with the highest scores of each position, among those that were there when it was the last one.

    Args:
        scores: `[batch, seq, entries]` of the indexer's scorer, all entries there are after the last position.
        position_ids: `[batch or 1, seq]`, consecutive.
        compress_rate: Tokens an entry.
        top_k: `config.index_topk`.

    Returns:
        `[batch, seq, top_k]`, -1 where there were fewer entries.
    """
    seq, entries = scores.shape[1:]
    there = ((position_ids + 1) // compress_rate).unsqueeze(-1)
    chosen = torch.full((*scores.shape[:2], top_k), -1, device=scores.device)
    closed = -(-(seq - 1) // compress_rate)  # at most so many by the forward itself; a count is no wait for the device
    for count in range(max(entries - closed, 1), entries + 1):
        found = scores[..., :count].topk(min(top_k, count), dim=-1).indices
        chosen = torch.where(there == count, F.pad(found, (0, top_k - found.shape[-1]), value=-1), chosen)
    return chosen
