"""What a generation with a drafter did, and how its times are taken."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import pairwise

import torch

from ..trees.tree import DraftTree, are_trees_kept, keep_trees

__all__ = ["SpeculationStats", "VerifiedTree", "are_trees_kept", "clock", "exact_timing", "keep_trees"]

_SHOWN = 16  # draft positions

_is_exact: ContextVar[bool] = ContextVar("hf_hyperdflash_exact_timing", default=False)


@contextmanager
def exact_timing() -> Iterator[None]:
    """Let the generations of this thread wait for the accelerator where times are taken. Slower, but each second
    counts where it was spent."""
    token = _is_exact.set(True)
    try:
        yield
    finally:
        _is_exact.reset(token)


def clock(device: torch.device) -> Callable[[], float]:
    """Return what tells the seconds; what was launched on `device` is waited for if this is called under
    [`exact_timing`]."""
    if device.type == "cpu" or not _is_exact.get():
        return time.perf_counter

    def waiting() -> float:
        torch.accelerator.synchronize(device)
        return time.perf_counter()

    return waiting


@dataclass(frozen=True)
class VerifiedTree:
    """What a verification round drafted, and what came of it.

    Attributes:
        anchor: The token that it follows.
        drafts: The draft tree, on the CPU, without what it was drawn from; a chain of drafts is a tree with one path.
        accepted: Those of its nodes that the target accepted, from the anchor on.
        own: The target's own token, which follows them; `None` where the text ended with a draft.
        first: Which of the new tokens this round's first is, from 0; it wrote `len(accepted)`, and `own`.
    """

    anchor: int
    drafts: DraftTree
    accepted: list[int]
    own: int | None
    first: int

    @property
    def tokens(self) -> range:
        """Which of the new tokens the round wrote, from 0."""
        return range(self.first, self.first + len(self.accepted) + (self.own is not None))


@dataclass
class SpeculationStats:
    """What one `generate` call with a drafter did.

    Attributes:
        rounds: Verification rounds: target forwards after the prefill for which drafts were asked. A drafter may have
            had none (prompt lookup); with no room for a draft before the end of the text it is no round.
        tokens: New tokens, the prefill's first one included.
        nodes: Drafts of all rounds, those of several paths through a tree included.
        known_nodes: Of these, drafts that were known without the drafter: copies of what `lookup` found, and tokens to
            which a grammar leaves no alternative.
        known_accepted: How many of these the target accepted.
        draft_positions: Most drafts, one after the other, that a round verified.
        emitted: Tokens that each round emitted, accepted drafts and the target's own token.
        accepted: Accepted drafts of each round.
        written: Of each new token the draft position that wrote it, from 1; 0 where the target did.
        by_head: Of each new token whether it is a draft that a sequential head chose, where the block alone held
            another token more probable; told under [`keep_trees`] alone, and of rows that share a forward not at all.
        trees: Of each round what was drafted and accepted, if it was generated under [`keep_trees`]; else none.
        draft_seconds: Wall-clock seconds in the drafter: drafting and taking in what was accepted, prompt excluded. On
            an accelerator launches count, not their completion, except under [`exact_timing`].
        verify_seconds: Wall-clock seconds in the target's forwards, prefill excluded.
        loop_seconds: Wall-clock seconds of everything after the prefill; what is not in the other two is our overhead.
        of_batch: Of a batch of several texts, each row's own. Seconds that several rows share count in equal parts.
    """

    rounds: int = 0
    tokens: int = 0
    nodes: int = 0
    known_nodes: int = 0
    known_accepted: int = 0
    draft_positions: int = 0
    emitted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    written: list[int] = field(default_factory=list)
    by_head: list[bool] = field(default_factory=list)
    trees: list[VerifiedTree] = field(default_factory=list)
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    loop_seconds: float = 0.0
    of_batch: list[SpeculationStats] = field(default_factory=list)

    def __str__(self) -> str:
        """Describe it in a line; its lists are as long as the text, `repr` has them."""
        rates = percentages(self.acceptance) or "none"
        rows = f" of {len(self.of_batch)} rows" if self.of_batch else ""
        return (
            f"{self.tokens} tokens{rows} in {self.rounds} verification round{'s' * (self.rounds != 1)}: "
            f"tau {self.tau:.2f}, drafts accepted at each position, %: {rates}"
            + f"; copied or forced: {self.known_accepted} of {self.known_nodes}"
            * bool(self.known_nodes)
        )

    def __iadd__(self, other: SpeculationStats) -> SpeculationStats:
        """Add another call's."""
        self.draft_positions = max(self.draft_positions, other.draft_positions)
        for name in (
            "rounds", "tokens", "nodes", "known_nodes", "known_accepted", "emitted", "accepted", "written", "by_head",
            "trees", "draft_seconds", "verify_seconds", "loop_seconds", "of_batch",
        ):  # fmt: skip
            setattr(self, name, getattr(self, name) + getattr(other, name))
        return self

    def add_token(self, tree: DraftTree, node: int | None) -> None:
        """Count who wrote a new token: a node of the round's tree, or the target (`None`)."""
        self.written.append(0 if node is None else tree.depths[node])
        self.by_head.append(node is not None and tree.by_head is not None and tree.by_head[node])

    def add_round(self, tree: DraftTree | None, accepted: list[int], text: torch.Tensor) -> None:
        """Count a target forward after the prefill, and keep its draft tree if that is asked for.

        Args:
            tree: The round's; `None` where there was no room for a draft.
            accepted: Its nodes that the target accepted.
            text: The anchor and the tokens that the round wrote, `[new + 1]`.
        """
        emitted = len(text) - 1
        if tree is not None:
            if are_trees_kept():
                anchor, *written = text.tolist()
                drafts = DraftTree(tree.tokens.cpu(), tree.parents, passes=tree.passes, by_head=tree.by_head)
                own = written[-1] if emitted > len(accepted) else None
                self.trees.append(VerifiedTree(anchor, drafts, accepted, own, self.tokens))
            self.rounds += 1
            self.nodes += len(tree)
            self.draft_positions = max([self.draft_positions, *tree.depths])
            self.emitted.append(emitted)
            self.accepted.append(len(accepted))
        self.tokens += emitted

    @property
    def rows(self) -> list[SpeculationStats]:
        """Each row's own; of one text these."""
        return self.of_batch or [self]

    @property
    def tau(self) -> float:
        """Mean tokens per verification round, accepted drafts plus the target's own (the paper's accepted length)."""
        return sum(self.emitted) / self.rounds if self.rounds else 0.0

    @property
    def mean_accepted_drafts(self) -> float:
        """Mean accepted drafts per round."""
        return sum(self.accepted) / self.rounds if self.rounds else 0.0

    @property
    def acceptance(self) -> list[float]:
        """Per draft position k = 1, 2, ..: the fraction of rounds in which it was accepted (Figure 1)."""
        return [sum(n >= k for n in self.accepted) / self.rounds for k in range(1, self.draft_positions + 1)]

    @property
    def conditional_acceptance(self) -> list[float]:
        """Per draft position k: the fraction accepted of the rounds in which position k - 1 was (0 where none was)."""
        prefix = [1.0, *self.acceptance]
        return [now / before if before else 0.0 for before, now in pairwise(prefix)]


def percentages(rates: Sequence[float]) -> str:
    """Return rates in words: the first ones, as a copy may be several times as long as a drafter's block."""
    return ", ".join([*(f"{100 * rate:.0f}" for rate in rates[:_SHOWN]), *["…"] * (len(rates) > _SHOWN)])


def merged_stats(each: Sequence[SpeculationStats]) -> SpeculationStats:
    """Return what the sequences of a batch did together."""
    together = SpeculationStats()
    for stats in each:
        together += stats
    together.of_batch = list(each)
    return together
