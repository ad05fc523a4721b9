"""A drafter with one target: what holds of the two, and the drafts of the one for the other, which are checked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import LogitsProcessorList

from ..auto.policies import DraftingStats
from ..drafters.base import Drafter
from ..drafters.sampling import DraftRequest, DraftSampler
from ..targets.target import Target
from ..trees.tree import DraftTree


@dataclass(frozen=True)
class Pair:
    """What holds of a drafter with one target. It is kept with the target's binding and written into neither's
    configuration: the same drafter may be bound to other targets.

    Attributes:
        layer_ids: The layers of the target whose residual streams the drafter reads.
        vocab_size: The target's when the two were checked. Rows may be added to a bound target's embedding.
        stats: What "auto" knows of their rounds, by `do_sample`.
    """

    layer_ids: tuple[int, ...]
    vocab_size: int
    stats: dict[bool, DraftingStats] = field(default_factory=dict)


class Pairs(WeakKeyDictionary[Drafter, Pair]):
    """Those of a bound target. A copy of the target has none: elsewhere there are no such drafters."""

    def __deepcopy__(self, memo: dict[int, object]) -> Pairs:
        return Pairs()

    def __reduce__(self) -> tuple[type[Pairs], tuple[()]]:
        return Pairs, ()


def checked_pair(target: Target, drafter: Drafter) -> Pair:
    """Return what holds of a drafter with a target.

    Raises:
        ValueError: If they do not fit ([`~drafters.base.Drafter.check_target`]). A bound target that is still as it
            was is not checked again.
    """
    pairs: Pairs | None = getattr(target.hyperdflash_binding, "pairs", None)
    pair = None if pairs is None else pairs.get(drafter)
    if pair is None or pair.vocab_size != target.config.vocab_size:
        drafter.check_target(target)
        pair = Pair(tuple(drafter.layers_read(target)), target.config.vocab_size)
        if pairs is not None:
            pairs[drafter] = pair
    return pair


def propose(drafter: Drafter, target: Target, requests: Sequence[DraftRequest]) -> list[DraftTree]:
    """Ask a drafter for the drafts of each sequence, and check what it returns.

    Raises:
        ValueError: If that is not a draft tree for each, as [`check_proposed`] says.
    """
    proposed = drafter.draft(target, requests) if requests else []
    if not isinstance(proposed, (list, tuple)) or len(proposed) != len(requests):
        given = f"{len(proposed)} of them" if isinstance(proposed, (list, tuple)) else f"a {type(proposed).__name__}"
        raise ValueError(
            f"`draft` of the drafter, a {type(drafter).__name__}, returned {given}: expected a list of "
            f"{len(requests)} `DraftTree`s, one for each text that it was asked for."
        )
    for request, tree in zip(requests, proposed):
        check_proposed(drafter, tree, target.config.vocab_size, request.num_drafts)
    return list(proposed)


def scores_are_finite(drafter: Drafter, target: Target, request: DraftRequest) -> bool:
    """Return whether a drafter's scores of the next draft are finite. It is asked for one draft, and none is drawn."""
    asked = _AdmitsNone()
    sampler = DraftSampler(LogitsProcessorList(), do_sample=False, chain_admission=asked)
    drafter.draft(target, [request._replace(sampler=sampler)])
    return asked.are_finite


class _AdmitsNone:
    """Admits no draft, and remembers whether what the drafter says of it is finite."""

    are_finite = True

    def is_open(self) -> bool:
        return True

    def admits(self, signal: float) -> bool:
        self.are_finite &= math.isfinite(signal)
        return False


def check_proposed(drafter: Drafter, tree: Any, vocab_size: int, count: int) -> None:
    """Check what a drafter's [`~drafters.base.Drafter.draft`] returned, without a wait for the device: ids are read
    where they are on the host.

    Raises:
        ValueError: If it is no draft tree of the target's vocabulary, naming the drafter's class.
    """
    if wrong := _wrong_with(tree, vocab_size):
        raise ValueError(
            f"The drafter, a {type(drafter).__name__}, drafted {wrong}: expected a `DraftTree` of token "
            f"ids from 0 to {vocab_size - 1}, each with the distribution `[{vocab_size}]` that it was drawn from, or "
            "None."
        )
    if max(tree.depths, default=0) > count:
        raise ValueError(
            f"The drafter made {max(tree.depths)} drafts, one after the other, expected at most {count}, as it was "
            "asked for."
        )


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
