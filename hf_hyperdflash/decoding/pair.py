"""What holds of a drafter with one target, and of neither alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from ..auto.policies import DraftingStats
from ..drafters.base import Drafter
from ..targets.target import Target


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
    """Those of a bound target. Pickled with it they are none: elsewhere there are no such drafters."""

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
        # A drafter's own, older code has no such method.
        layer_ids = drafter.layers_read(target) if hasattr(drafter, "layers_read") else drafter.target_layer_ids
        pair = Pair(tuple(layer_ids), target.config.vocab_size)
        if pairs is not None:
            pairs[drafter] = pair
    return pair
