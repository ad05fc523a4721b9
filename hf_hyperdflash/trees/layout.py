"""The layout of a target's forward over a draft tree: the anchor at position 0, then the nodes in their order."""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import torch

from .tree import ANCHOR, DraftTree


class ClosedWindow(NamedTuple):
    """A compressor's window that ends with a node.

    Attributes:
        node: The verification position of its last token.
        number: How many windows close on the path to that position, this one included.
        tokens: Indices of its tokens. They count first the tokens of the window that closed before the forward, then
            those of the open window, then the verification positions.
        before: Indices of the tokens of the window before it on the path, counted the same way.
    """

    node: int
    number: int
    tokens: list[int]
    before: list[int]


class TreeLayout:
    """Which verification positions of a forward see each other, for layers of any kind.

    Args:
        tree: The tree under verification.

    Attributes:
        paths: For each position, the positions from the anchor to it, itself included.
    """

    def __init__(self, tree: DraftTree) -> None:
        self.tree = tree
        self.paths: list[list[int]] = [[0]]
        for position, parent in enumerate(tree.parents, start=1):
            self.paths.append([*self.paths[parent - ANCHOR], position])
        self._windows: dict[tuple[int, int], list[ClosedWindow]] = {}
        self._indices: dict[tuple[tuple[int, ...], torch.device], torch.Tensor] = {}

    def __len__(self) -> int:
        """Return the number of verification positions: the anchor and the nodes."""
        return len(self.paths)

    @cached_property
    def depths(self) -> torch.Tensor:
        """The distance of each position from the anchor in tokens, `[positions]`."""
        return torch.tensor([len(path) - 1 for path in self.paths])

    @cached_property
    def ancestors(self) -> torch.Tensor:
        """Whether the second position is on the path to the first. Boolean `[positions, positions]`."""
        count = len(self)
        visible = torch.tensor([end * count + above for end, path in enumerate(self.paths) for above in path])
        return torch.zeros(count * count, dtype=torch.bool).index_fill_(0, visible, True).view(count, count)

    def mask(self, past: int, window: int | None, device: torch.device | str = "cpu") -> torch.Tensor:
        """Return the attention mask of the verification positions; a sliding window counts true positions.

        Args:
            past: How many keys there are of the tokens before the anchor, the last ones of the text.
            window: How many tokens a position sees, itself included; `None` for all.
            device: Of the mask, which is made there: it is as long as the text.

        Returns:
            Boolean `[positions, past + positions]`.
        """
        visible = torch.ones(len(self), past + len(self), dtype=torch.bool, device=device)
        visible[:, past:] = self.ancestors
        if window is not None:
            depths = self.depths.to(device)
            visible &= depths[:, None] - torch.cat([torch.arange(-past, 0, device=device), depths]) < window
        return visible

    def index(self, values: list[int], device: torch.device) -> torch.Tensor:
        """Return indices as a tensor on a device, cached for all layers: each one is a copy from the host."""
        key = tuple(values), device
        if key not in self._indices:
            self._indices[key] = torch.tensor(values, dtype=torch.long, device=device)
        return self._indices[key]

    def windows(self, rate: int, open_tokens: int) -> list[ClosedWindow]:
        """Return the windows that verification positions close, in the order of the positions.

        Args:
            rate: Tokens a window.
            open_tokens: Tokens of the window that is open before the forward.
        """
        key = rate, open_tokens
        if key not in self._windows:  # the same in many layers
            self._windows[key] = [
                self._window(position, rate, open_tokens)
                for position, path in enumerate(self.paths)
                if (open_tokens + len(path)) % rate == 0
            ]
        return self._windows[key]

    def _window(self, position: int, rate: int, open_tokens: int) -> ClosedWindow:
        path = self.paths[position]
        tokens = [*range(rate + open_tokens), *(rate + open_tokens + above for above in path)]
        return ClosedWindow(position, (open_tokens + len(path)) // rate, tokens[-rate:], tokens[-2 * rate : -rate])
