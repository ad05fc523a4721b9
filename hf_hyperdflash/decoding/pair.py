"""A drafter with one target: what holds of the two, and the drafts of the one for the other, which are checked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast
from weakref import WeakKeyDictionary, WeakSet

import torch
from transformers import LogitsProcessorList

from ..auto.policies import DraftingStats
from ..drafters.base import Drafter
from ..drafters.sampling import DraftRequest, DraftSampler
from ..targets.target import Target
from ..trees.tree import DraftTree


class PairFacts(NamedTuple):
    """What holds of a drafter with one target. It is kept with the target's binding and written into neither's
    configuration: the same drafter may be bound to other targets.

    Attributes:
        layer_ids: The layers of the target whose residual streams the drafter reads.
        vocab_size: The target's when the two were checked. Rows may be added to a bound target's embedding.
        stats: What "auto" knows of their rounds, by `do_sample`.
    """

    layer_ids: tuple[int, ...]
    vocab_size: int
    stats: dict[bool, DraftingStats]


class CheckedPairs(WeakKeyDictionary[Drafter, PairFacts]):
    """Of a bound target, by drafter. A copy of the target has none: elsewhere there are no such drafters.

    Attributes:
        binders: The drafters that have bound the target and not unbound it: it stays bound while there are some.
    """

    def __init__(self) -> None:
        super().__init__()
        self.binders: WeakSet[Drafter] = WeakSet()

    def __deepcopy__(self, memo: dict[int, object]) -> CheckedPairs:
        return CheckedPairs()

    def __reduce__(self) -> tuple[type[CheckedPairs], tuple[()]]:
        return CheckedPairs, ()


@dataclass(frozen=True)
class Pair:
    """A drafter with one target, for one call: what is kept of the two are their facts, which hold neither."""

    target: Target
    drafter: Drafter
    facts: PairFacts

    @classmethod
    def checked(cls, target: Target, drafter: Drafter) -> Pair:
        """Return the pair of a target and a drafter.

        Raises:
            ValueError: If they do not fit ([`~drafters.base.Drafter.check_target`]). A bound target that is still as
                it was is not checked again.
        """
        known: CheckedPairs | None = getattr(target.hyperdflash_binding, "pairs", None)
        facts = None if known is None else known.get(drafter)
        if facts is None or facts.vocab_size != target.config.vocab_size:
            drafter.check_target(target)
            facts = PairFacts(tuple(drafter.layers_read(target)), target.config.vocab_size, {})
            if known is not None:
                known[drafter] = facts
        return cls(target, drafter, facts)

    def extend(
        self,
        context: Any,
        residual: torch.Tensor | None,
        position_ids: torch.Tensor,
        next_ids: torch.Tensor,
    ) -> None:
        """Add accepted tokens to the drafter's context ([`~drafters.base.Drafter.extend`]). Of `residual`, which may
        have more layers than it reads, it is handed its own, the first."""
        if residual is not None:
            residual = residual[:, :, : len(self.facts.layer_ids) * self.target.streams]
        self.drafter.extend(self.target, context, cast(torch.Tensor, residual), position_ids, next_ids)

    def draft(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        """Return the drafter's drafts for each text that asks for some.

        They are checked without a wait for the device: ids are read where they are on the host.

        Raises:
            ValueError: If they are not a draft tree of the target's vocabulary for each, naming the drafter's class.
        """
        if not requests:
            return []
        drafted, vocab_size = self.drafter.draft(self.target, requests), self.target.config.vocab_size
        if not isinstance(drafted, (list, tuple)) or len(drafted) != len(requests):
            given = f"{len(drafted)} of them" if isinstance(drafted, (list, tuple)) else f"a {type(drafted).__name__}"
            raise ValueError(
                f"`draft` of the drafter, a {type(self.drafter).__name__}, returned {given}: expected a list of "
                f"{len(requests)} `DraftTree`s, one for each text that it was asked for."
            )
        for request, tree in zip(requests, drafted):
            if wrong := _wrong_with(tree, vocab_size):
                raise ValueError(
                    f"The drafter, a {type(self.drafter).__name__}, drafted {wrong}: expected a `DraftTree` of token "
                    f"ids from 0 to {vocab_size - 1}, each with the distribution `[{vocab_size}]` that it was drawn "
                    "from, or None."
                )
            if (depth := max(tree.depths, default=0)) > request.num_drafts:
                raise ValueError(
                    f"The drafter made {depth} drafts, one after the other, expected at most {request.num_drafts}, as "
                    "it was asked for."
                )
        return list(drafted)

    def scores_are_finite(self, request: DraftRequest) -> bool:
        """Return whether the drafter's scores of the next draft are finite. It is asked for one draft, and none is
        drawn."""
        asked = _AdmitsNone()
        sampler = DraftSampler(LogitsProcessorList(), do_sample=False, chain_admission=asked)
        self.drafter.draft(self.target, [request._replace(sampler=sampler)])
        return asked.are_finite


class _AdmitsNone:
    """Admits no draft, and remembers whether what the drafter says of it is finite."""

    are_finite = True

    def is_open(self) -> bool:
        return True

    def admits(self, signal: float) -> bool:
        self.are_finite &= math.isfinite(signal)
        return False


def _wrong_with(tree: Any, vocab_size: int) -> str:
    """Return what of a tree cannot be verified, in words; empty if nothing."""
    # By its attributes: a copy of this code has a class of its own.
    names = "tokens", "parents", "q", "depths"
    if not (isinstance(tree, DraftTree) or all(hasattr(tree, name) for name in names)):
        return "None" if tree is None else f"a {type(tree).__name__}"
    tokens = tree.tokens
    if tokens.is_meta or tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool:
        return f"tokens of {tokens.dtype} on {tokens.device}"
    if tokens.device.type == "cpu":  # elsewhere to read them would be to wait
        outside = next((token for token in tokens.tolist() if not 0 <= token < vocab_size), None)
        if outside is not None:
            return f"the token {outside}"
    for q in tree.q or ():
        if q is not None and not (isinstance(q, torch.Tensor) and q.shape == (vocab_size,) and q.is_floating_point()):
            given = f"{q.dtype} {list(q.shape)}" if isinstance(q, torch.Tensor) else type(q).__name__
            return f"a distribution that is {given}"
    return ""
