"""The state of a draft tree in one DeepSeek-V4 cache layer, from the forward over the tree until nodes are accepted.

A compressor's window closes at every node whose position ends one. The window consists of that node's own ancestors,
and its entry is for that node and its descendants. So the layer itself stays as it was before the forward: this state
stores the tree's keys, projections and entries, and the layer then appends those of the accepted path as if they had
come alone.
"""

from __future__ import annotations

import torch

from ...trees.tree import ClosedWindow, TreeLayout

Parts = tuple[torch.Tensor, torch.Tensor]  # a compressor's `kv` and `gate`


class TreeState:
    """What one layer computed of a draft tree. "Nodes" are the anchor and the nodes of the tree, in their order.

    Args:
        layout: The tree's.

    Attributes:
        keys: `[1, 1, nodes, config.head_dim]`, once the layer's attention has run.
        projections: By compressor, those of all nodes, `[1, nodes, features]`.
        windows: By compressor, those that nodes close.
        overlaps: By compressor, the overlap that each closed window leaves to the next one, as the compressor passes
            it on: `[1, windows, compress_rate, features]`.
        entries: By compressor, one per closed window, `[1, windows, features]`.
    """

    keys: torch.Tensor

    def __init__(self, layout: TreeLayout) -> None:
        self.layout = layout
        self.projections: dict[str, Parts] = {}
        self.windows: dict[str, list[ClosedWindow]] = {}
        self.overlaps: dict[str, Parts] = {}
        self.entries: dict[str, torch.Tensor] = {}
        self._closed: dict[str, slice] = {}  # which of the pooled windows are closed ones

    def close_windows(
        self,
        name: str,
        rate: int,
        entries: int,
        before: Parts | None,
        open_window: tuple[torch.Tensor | None, torch.Tensor | None],
        projections: Parts,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Store a compressor's projections of the nodes, and return the windows that it has to pool.

        Args:
            name: The compressor's.
            rate: Tokens a window.
            entries: Windows that closed before the forward.
            before: The last one of them, `[1, rate, features]`; `None` where windows do not overlap.
            open_window: `[1, tokens, features]`.
            projections: `[1, nodes, features]`.

        Returns:
            Two of `[1, windows * rate, features]`. Where windows overlap, each comes after the one before it on its
            path. And for each window the position of its first token, less the tokens of the windows before it in
            this list.
        """
        self.projections[name] = projections
        opened = [part[:, :0] if tokens is None else tokens for tokens, part in zip(open_window, projections)]
        self.windows[name] = windows = self.layout.windows(rate, opened[0].shape[1])
        self._closed[name] = slice(None) if before is None else slice(1, None, 2)
        indices = [
            index for window in windows for index in (*(() if before is None else window.before), *window.tokens)
        ]
        filler = projections[0].new_zeros(1, rate, projections[0].shape[2])
        first = (filler, filler) if before is None else before
        tokens = [torch.cat(parts, dim=1) for parts in zip(first, opened, projections)]
        each = 1 if before is None else 2
        windows_before = enumerate(window.number - 1 for window in windows for _ in range(each))
        firsts = [(entries + number - index) * rate for index, number in windows_before]
        kv, gate = (self.select(part, indices) for part in tokens)
        return kv, gate, self.layout.index(firsts, kv.device)

    def select(self, values: torch.Tensor, indices: list[int], dim: int = 1) -> torch.Tensor:
        """Return `values` at some indices of one dimension."""
        return values.index_select(dim, self.layout.index(indices, values.device))

    def store_overlaps(self, name: str, chunk_kv: torch.Tensor, chunk_gate: torch.Tensor) -> None:
        """Store the overlaps of the closed windows, of all pooled ones `[1, windows, compress_rate, features]`."""
        closed = self._closed[name]
        self.overlaps[name] = chunk_kv[:, closed], chunk_gate[:, closed]

    def store_entries(self, name: str, compressed: torch.Tensor) -> torch.Tensor:
        """Store and return the entries of the closed windows, of all pooled ones `[1, windows, features]`."""
        self.entries[name] = compressed[:, self._closed[name]]
        return self.entries[name]

    def visible_entries(self, name: str) -> torch.Tensor:
        """Return which closed windows' entries each node sees: those that its own path closed. Every node sees the
        entries from before the forward, too. Boolean `[nodes, windows]`."""
        return self.layout.ancestors[:, [window.node for window in self.windows[name]]]

    def windows_closed_by(self, name: str, nodes: list[int]) -> list[int]:
        """Return the indices of the windows that some nodes close."""
        return [index for index, window in enumerate(self.windows[name]) if window.node in nodes]


def best_visible(scores: torch.Tensor, visible: torch.Tensor, top_k: int) -> torch.Tensor:
    """Return each node's entries with the highest scores, chosen as if the entries that it sees were all there are.

    Args:
        scores: `[nodes, entries]` of an indexer's scorer.
        visible: Which of the last entries each node sees; it sees all entries before them. Boolean `[nodes, last]`,
            on the host.
        top_k: `config.index_topk`, or the number of entries if there are fewer.

    Returns:
        `[nodes, top_k]`, -1 where a node sees fewer.
    """
    best = torch.full((len(scores), top_k), -1, device=scores.device)
    before, own = scores.shape[1] - visible.shape[1], visible.sum(1)
    by_count = own.argsort()
    last = before + visible[by_count].byte().argsort(dim=1, descending=True, stable=True).to(scores.device)
    nodes, start = by_count.to(scores.device), 0
    sorted_scores = scores[nodes]
    # A node's own come first, where they are if there are no others: of equal scores topk then takes the same ones.
    sorted_scores[:, before:] = sorted_scores.gather(1, last)
    for count, alike in zip(*(part.tolist() for part in own.unique(return_counts=True))):
        group = slice(start, start := start + alike)
        chosen = sorted_scores[group, : before + count].topk(min(top_k, before + count), dim=-1).indices
        if count:
            own_entries = last[group].gather(1, (chosen - before).clamp(min=0))
            chosen = torch.where(chosen < before, chosen, own_entries)
        best[nodes[group], : chosen.shape[1]] = chosen
    return best
