"""What a DeepSeek-V4 cache layer holds of a draft tree under verification, until it is known which nodes stay.

A compressor's window closes at every node whose position ends one, and is made of that node's own ancestors; its entry
is for that node and its descendants. So the layer's state stays as it was before the forward: the tree's keys,
projections and entries are kept beside it, and those of the accepted path are then added as if they came alone.
"""

from __future__ import annotations

from typing import Any

import torch

from ...trees.layout import ClosedWindow, TreeRows

Parts = tuple[torch.Tensor, torch.Tensor]  # a compressor's `kv` and `gate`


class HeldTree:
    """A tree in one layer.

    Args:
        rows: The forward's.

    Attributes:
        keys: `[1, 1, rows, config.head_dim]`.
        projections: By compressor, those of all rows, `[1, rows, features]`.
        windows: By compressor, those that rows close.
        overlaps: By compressor, what each closed window hands to the next one, as the compressor passes it on:
            `[1, windows, compress_rate, features]`.
        entries: By compressor, one per closed window, `[1, windows, features]`.
    """

    def __init__(self, rows: TreeRows) -> None:
        self.rows = rows
        self.keys: Any = None
        self.projections: dict[str, Parts] = {}
        self.windows: dict[str, list[ClosedWindow]] = {}
        self.overlaps: dict[str, Parts] = {}
        self.entries: dict[str, torch.Tensor] = {}
        self._every: dict[str, slice] = {}  # where closed windows are among those that are pooled

    def close_windows(
        self,
        name: str,
        rate: int,
        entries: int,
        before: Parts | None,
        open_window: tuple[torch.Tensor | None, torch.Tensor | None],
        rows: Parts,
    ) -> tuple[torch.Tensor, torch.Tensor, Any]:
        """Hold what a compressor makes of the rows, and give it the windows to pool.

        Args:
            name: The compressor's.
            rate: Tokens a window.
            entries: Windows that closed before the forward.
            before: The last one of them, `[1, rate, features]`; `None` where windows do not overlap.
            open_window: `[1, tokens, features]`.
            rows: `[1, rows, features]`.

        Returns:
            Two of `[1, windows * rate, features]`, where windows overlap each behind the one before it on its path;
            and, for each of them, the position of its first token less what those before it in this list take.
        """
        self.projections[name] = rows
        opened = [part[:, :0] if tokens is None else tokens for tokens, part in zip(open_window, rows)]
        self.windows[name] = windows = self.rows.windows(rate, opened[0].shape[1])
        self._every[name] = slice(None) if before is None else slice(1, None, 2)
        places = [
            place for window in windows for place in (*(() if before is None else window.before), *window.tokens)
        ]
        filler = rows[0].new_zeros(1, rate, rows[0].shape[2])
        first = (filler, filler) if before is None else before
        closed = [torch.cat(parts, dim=1) for parts in zip(first, opened, rows)]
        each = 1 if before is None else 2
        windows_before = enumerate(window.number - 1 for window in windows for _ in range(each))
        firsts = [(entries + number - place) * rate for place, number in windows_before]
        kv, gate = (self.at(part, places) for part in closed)
        return kv, gate, self.rows.numbers(firsts, kv.device)

    def at(self, values: torch.Tensor, places: list[int], dim: int = 1) -> torch.Tensor:
        """What of `values` is at some places."""
        return values.index_select(dim, self.rows.numbers(places, values.device))

    def hold_overlaps(self, name: str, chunk_kv: torch.Tensor, chunk_gate: torch.Tensor) -> None:
        """What the pooled windows hand on, `[1, windows, compress_rate, features]`."""
        every = self._every[name]
        self.overlaps[name] = chunk_kv[:, every], chunk_gate[:, every]

    def hold_entries(self, name: str, compressed: torch.Tensor) -> torch.Tensor:
        """Of the pooled windows' entries, `[1, windows, features]`, those of closed windows."""
        self.entries[name] = compressed[:, self._every[name]]
        return self.entries[name]

    def seen(self, name: str) -> torch.Tensor:
        """Which of the closed windows' entries each row sees beside all from before the forward: those that its own
        path closed. Boolean `[rows, windows]`."""
        return self.rows.ancestors[:, [window.row for window in self.windows[name]]]

    def closed(self, name: str, kept: list[int]) -> list[int]:
        """The windows that the rows `kept` close."""
        return [index for index, window in enumerate(self.windows[name]) if window.row in kept]


def best_seen(scores: torch.Tensor, seen: torch.Tensor, top_k: int) -> torch.Tensor:
    """The entries with the highest scores of each row, chosen as if those that it sees were all there are.

    Args:
        scores: `[1, rows, entries]` of an indexer's scorer.
        seen: Which of the last entries each row sees beside all before them, boolean `[rows, last]`, on the host.
        top_k: `config.index_topk`.

    Returns:
        `[1, rows, top_k]`, -1 where there are fewer.
    """
    best = torch.full((1, scores.shape[1], top_k), -1, device=scores.device)
    before, own = scores.shape[2] - seen.shape[1], seen.sum(1)
    by_count = own.argsort()
    places = before + seen[by_count].byte().argsort(dim=1, descending=True, stable=True).to(scores.device)
    rows, start = by_count.to(scores.device), 0
    there = scores[0, rows]
    there[:, before:] = there.gather(1, places)  # its own first, as where there are no others: of equals the same one
    for count, alike in zip(*(part.tolist() for part in own.unique(return_counts=True))):
        among = slice(start, start := start + alike)
        chosen = there[among, : before + count].topk(min(top_k, before + count), dim=-1).indices
        if count:
            of_own = places[among].gather(1, (chosen - before).clamp(min=0))
            chosen = torch.where(chosen < before, chosen, of_own)
        best[0, rows[among], : chosen.shape[1]] = chosen
    return best
