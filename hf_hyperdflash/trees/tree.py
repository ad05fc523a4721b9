"""Draft trees: drafted tokens, each with the token that it follows. Drafters make them and verification reads them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property

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
        passes: The number of the drafter's pass that made each node, from 1; `None` for all in one.
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
