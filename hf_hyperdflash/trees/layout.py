"""The layout of a target's forward over a draft tree: one row for the anchor, then one for each node in order."""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import torch

from .tree import ANCHOR, DraftTree


class ClosedWindow(NamedTuple):
    """A compressor's window that ends with a row.

    Attributes:
        row: The last token's.
        number: How many windows close on the path to it, this one included.
        tokens: Where its tokens are among those of the window that closed before the forward, those of the open
            window, and the rows.
        before: Where those of the window before it on the path are.
    """

    row: int
    number: int
    tokens: list[int]
    before: list[int]


class TreeRows:
    """Which rows of a forward see each other, for layers of any kind.

    Args:
        tree: The tree under verification.

    Attributes:
        paths: For each row, the rows from the anchor to it, itself included.
    """

    def __init__(self, tree: DraftTree) -> None:
        self.tree = tree
        self.paths: list[list[int]] = [[0]]
        for row, parent in enumerate(tree.parents, start=1):
            self.paths.append([*self.paths[parent - ANCHOR], row])
        self._windows: dict[tuple[int, int], list[ClosedWindow]] = {}
        self._numbers: dict[tuple[tuple[int, ...], torch.device], torch.Tensor] = {}

    def __len__(self) -> int:
        """The anchor and the nodes."""
        return len(self.paths)

    @cached_property
    def depths(self) -> torch.Tensor:
        """The distance of each row from the anchor in tokens, `[rows]`."""
        return torch.tensor([len(path) - 1 for path in self.paths])

    @cached_property
    def ancestors(self) -> torch.Tensor:
        """Boolean `[rows, rows]`: whether the second is on the path to the first."""
        rows = len(self)
        seen = torch.tensor([row * rows + above for row, path in enumerate(self.paths) for above in path])
        return torch.zeros(rows * rows, dtype=torch.bool).index_fill_(0, seen, True).view(rows, rows)

    def mask(self, past: int, window: int | None, device: torch.device | str = "cpu") -> torch.Tensor:
        """Return the attention mask of the rows; a sliding window counts true positions.

        Args:
            past: Keys of the tokens before the anchor, the last ones of the text.
            window: Positions that a token sees, its own included; `None` for all.
            device: Of the mask, which is made there: it is as long as the text.

        Returns:
            Boolean `[rows, past + rows]`.
        """
        seen = torch.ones(len(self), past + len(self), dtype=torch.bool, device=device)
        seen[:, past:] = self.ancestors
        if window is not None:
            depths = self.depths.to(device)
            seen &= depths[:, None] - torch.cat([torch.arange(-past, 0, device=device), depths]) < window
        return seen

    def numbers(self, values: list[int], device: torch.device) -> torch.Tensor:
        """Return indices as a tensor on a device, cached for all layers: each one is a copy from the host."""
        key = tuple(values), device
        if key not in self._numbers:
            self._numbers[key] = torch.tensor(values, dtype=torch.long, device=device)
        return self._numbers[key]

    def windows(self, rate: int, open_tokens: int) -> list[ClosedWindow]:
        """Return the windows that rows close, in the order of the rows.

        Args:
            rate: Tokens a window.
            open_tokens: Tokens of the window that is open before the forward.
        """
        key = rate, open_tokens
        if key not in self._windows:  # the same in many layers
            self._windows[key] = [
                self._window(row, rate, open_tokens)
                for row, path in enumerate(self.paths)
                if (open_tokens + len(path)) % rate == 0
            ]
        return self._windows[key]

    def _window(self, row: int, rate: int, open_tokens: int) -> ClosedWindow:
        path = self.paths[row]
        places = [*range(rate + open_tokens), *(rate + open_tokens + above for above in path)]
        return ClosedWindow(row, (open_tokens + len(path)) // rate, places[-rate:], places[-2 * rate : -rate])
