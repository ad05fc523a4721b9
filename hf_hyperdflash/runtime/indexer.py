"""DeepSeek-V4's indexer in a forward of several tokens: the entries that it would choose for one token at a time.

An indexer's scores are sums over heads of ReLU terms, so many entries can have a score of exactly 0. Which of them `topk`
takes depends on how many entries there are, and a verification round has those that its drafts close besides. A
target's text would then depend on how it was cut into forwards; stock DeepSeek-V4's does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Indexer

from .per_thread import PerThread


class _Round(NamedTuple):
    """A verification round's forward in one thread: positions `[1, seq]`, and scores by indexer until it has chosen."""

    position_ids: torch.Tensor
    scores: dict[nn.Module, torch.Tensor]


class OneTokenChoice:
    """Hooks on a target's indexers that choose as for one token at a time, in verification rounds only.

    Args:
        target: The target; there are no hooks if it has no DeepSeek-V4 indexer.
    """

    def __init__(self, target: nn.Module) -> None:
        self._rounds: PerThread[_Round] = PerThread()
        self.handles: list[RemovableHandle] = []
        for indexer in target.modules():
            if isinstance(indexer, DeepseekV4Indexer):
                self.handles += [
                    indexer.scorer.register_forward_hook(partial(_scored, self._rounds, indexer)),
                    indexer.register_forward_hook(partial(_chosen, self._rounds)),
                ]

    @contextmanager
    def applied(self, position_ids: torch.Tensor) -> Iterator[None]:
        """Let the forward inside the context, in this thread, be a verification round's.

        Args:
            position_ids: `[1, seq]` of its tokens, consecutive.
        """
        with self._rounds.holding(_Round(position_ids, {})):
            yield


def _scored(rounds: PerThread[_Round], indexer: nn.Module, module: nn.Module, args: Any, output: torch.Tensor) -> None:
    if rounds:  # apart from what follows, so that a compiled indexer stays one graph where nothing is verified
        _remember(rounds, indexer, output)


def _chosen(rounds: PerThread[_Round], indexer: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
    return _choose_again(rounds, indexer, output) if rounds else output


@torch.compiler.disable  # as the hooks that hand out the residual
def _remember(rounds: PerThread[_Round], indexer: nn.Module, scores: torch.Tensor) -> None:
    for round_ in rounds.here[-1:]:
        round_.scores[indexer] = scores


@torch.compiler.disable
def _choose_again(rounds: PerThread[_Round], indexer: Any, output: torch.Tensor) -> torch.Tensor:
    for round_ in rounds.here[-1:]:
        scores = round_.scores.pop(indexer, None)
        # Else there is nothing to choose, or it is chosen as for one token.
        if scores is not None and scores.shape[1] > 1 and scores.shape[2] > indexer.index_topk:
            positions = round_.position_ids.to(scores.device)
            return choose(scores, positions, indexer.compress_rate, indexer.index_topk)
    return output


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
