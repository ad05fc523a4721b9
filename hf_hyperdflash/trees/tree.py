"""Draft trees: drafted tokens, each with the token that it follows. Drafters make them and verification reads them, in
one forward over the anchor and the nodes, whose layout is here, too."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

ANCHOR = -1  # as a parent: the node follows the last accepted token
_keeps_trees: ContextVar[bool] = ContextVar("hf_hyperdflash_keep_trees", default=False)


@dataclass(frozen=True)
class DraftTree:
    """Drafted tokens of one sequence. A chain of drafts is a tree with one path.

    Attributes:
        tokens: `[nodes]`.
        parents: Of each node, the node that it follows, which comes before it; [`ANCHOR`] for the first of a path.
        q: The distribution that each token was drawn from, `[config.vocab_size]`; `None` for a token that was not
            drawn at random, or for all of them. Siblings that were drawn one after the other without replacement each
            have the distribution that remained for them.
        confidence: The drafter's probability that each node is accepted once its parent is, `[nodes]`; `None` if the
            drafter gives none.
        passes: The number of the drafter's pass that made each node, from 1, or 0 where no pass did; `None` for all in
            one.
        by_head: Whether a sequential head chose each node, although the block alone finds another token more
            probable; `None` if there is no head, or nobody asked ([`~decoding.stats.keep_trees`]).

    Raises:
        ValueError: If the parts differ in length, or a parent does not come before its node.
    """

    tokens: torch.Tensor
    parents: tuple[int, ...]
    q: tuple[torch.Tensor | None, ...] | None = None
    confidence: torch.Tensor | None = None
    passes: tuple[int, ...] | None = None
    by_head: tuple[bool, ...] | None = None

    def __post_init__(self) -> None:
        nodes = len(self.parents)
        if not isinstance(self.tokens, torch.Tensor):
            raise ValueError(
                f"A draft tree has tokens of type {type(self.tokens).__name__}, expected a tensor `[nodes]`."
            )
        shapes = [list(part.shape) for part in (self.tokens, self.confidence) if part is not None]
        drawn, made, chosen = (nodes if part is None else len(part) for part in (self.q, self.passes, self.by_head))
        if {drawn, made, chosen} != {nodes} or any(shape != [nodes] for shape in shapes):
            raise ValueError(
                f"A draft tree has {nodes} parents, tokens and confidence of shape {shapes}, {drawn} distributions, "
                f"{made} passes and {chosen} choices of the head: expected one of each per node."
            )
        if any(not ANCHOR <= parent < node for node, parent in enumerate(self.parents)):
            raise ValueError(
                f"A draft tree has the parents {self.parents}: expected each before its node, or {ANCHOR}."
            )

    @classmethod
    def chain(cls, tokens: torch.Tensor, q: Sequence[torch.Tensor | None] | None = None) -> DraftTree:
        """Make the tree with one path, `tokens` `[drafts]` one after the other."""
        return cls(tokens, tuple(range(ANCHOR, len(tokens) - 1)), tuple(q) if q else None)

    def __len__(self) -> int:
        """Return the number of nodes."""
        return len(self.parents)

    def first(self, count: int) -> DraftTree:
        """Return the tree of the first nodes alone."""
        q, confidence = self.q and self.q[:count], None if self.confidence is None else self.confidence[:count]
        passes, by_head = self.passes and self.passes[:count], self.by_head and self.by_head[:count]
        return DraftTree(self.tokens[:count], self.parents[:count], q, confidence, passes, by_head)

    def with_path(self, path: Sequence[int]) -> DraftTree:
        """Return the tree with a path from the anchor on, of tokens that were not drawn at random. Where a path of the
        tree begins with the same tokens, it shares their nodes.

        What is new comes behind all nodes, and so last among its siblings: whether it is there may depend on the
        tokens that were drawn for these.
        """
        drafts, at, shared = self.tokens.tolist(), ANCHOR, 0
        for token in path:
            child = next((node for node in self.children.get(at, ()) if drafts[node] == token), None)
            if child is None:
                break
            at, shared = child, shared + 1
        new, count = path[shared:], len(self)
        if not new:
            return self
        parents = (*self.parents, at, *range(count, count + len(new) - 1))
        tokens = torch.cat([self.tokens, torch.tensor(new, dtype=self.tokens.dtype, device=self.tokens.device)])
        q = None if self.q is None else (*self.q, *[None] * len(new))
        passes = None if self.passes is None else (*self.passes, *[0] * len(new))
        by_head = None if self.by_head is None else (*self.by_head, *[False] * len(new))
        return DraftTree(tokens, parents, q, None, passes, by_head)

    @cached_property
    def is_chain(self) -> bool:
        """Whether there is one path."""
        return self.parents == tuple(range(ANCHOR, len(self.parents) - 1))

    @cached_property
    def children(self) -> dict[int, list[int]]:
        """Nodes by what they follow, in their order; nothing for a leaf."""
        if self.is_chain:
            return {parent: [parent + 1] for parent in self.parents}
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(self.parents):
            children.setdefault(parent, []).append(node)
        return children

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """The distance of each node from the anchor in tokens: 1 for the anchor's children."""
        if self.is_chain:
            return tuple(range(1, len(self) + 1))
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent == ANCHOR else depths[parent] + 1)
        return tuple(depths)

    def path(self, node: int) -> list[int]:
        """Return the nodes from the anchor to `node`, which is the last; none for the anchor."""
        path: list[int] = []
        while node != ANCHOR:
            path.append(node)
            node = self.parents[node]
        return path[::-1]

    @property
    def paths(self) -> list[list[int]]:
        """The nodes of every path that ends in a leaf."""
        return [self.path(node) for node in range(len(self)) if node not in self.children]

    @property
    def mask(self) -> torch.Tensor:
        """The attention mask among the nodes, boolean `[nodes, nodes]`: a node sees its ancestors and itself."""
        mask = torch.eye(len(self), dtype=torch.bool)
        for node, parent in enumerate(self.parents):
            if parent != ANCHOR:
                mask[node] |= mask[parent]
        return mask


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


@contextmanager
def keep_trees() -> Iterator[None]:
    """Record the drafts of this thread's generations, round by round, in `trees` of their statistics, with the choices
    of a sequential head. Each round then waits for the accelerator once more."""
    token = _keeps_trees.set(True)
    try:
        yield
    finally:
        _keeps_trees.reset(token)


def are_trees_kept() -> bool:
    """Return whether this thread is inside [`keep_trees`]."""
    return _keeps_trees.get()
