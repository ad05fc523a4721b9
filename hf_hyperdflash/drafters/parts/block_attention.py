"""What the slots of a block see in a layer: how far back into the context, and of each other. Torch alone."""

from __future__ import annotations

from typing import NamedTuple

import torch

FULL, SLIDING = "full_attention", "sliding_attention"  # kinds of layers, as transformers calls them
LAYER_KINDS = (FULL, SLIDING)
CAUSAL_LAYERS = ("none", "sliding", "all")
WINDOW_FROM = ("anchor", "slot")


class Reach(NamedTuple):
    """The reach of every slot in one kind of layer.

    Attributes:
        window: How many positions are seen; `None` for all.
        from_slot: Whether the window counts from each slot and takes it in, so that later slots see less of the
            context, and no slot sees one as far off in its block (z-lab); otherwise it counts from the anchor, whose
            own place is not in it, and all slots see the same context (the paper's, speculators').
        causal: Whether a slot sees only itself and those before it of its block; otherwise all.
    """

    window: int | None = None
    from_slot: bool = False
    causal: bool = False

    @property
    def context(self) -> int | None:
        """How many tokens before the anchor any slot sees; `None` for all."""
        return self.window if self.window is None or not self.from_slot else self.window - 1

    def seen(self, slots: torch.Tensor, back: torch.Tensor) -> torch.Tensor:
        """Of context tokens `back` positions before the anchor (1 for the one before it) and of slots counted from it
        (0 for its own), by which slots they are seen; any shapes that broadcast. Where all slots see the same,
        the answer has the shape of `back`: in training it is large."""
        if self.window is None:
            return torch.ones_like(back, dtype=torch.bool)
        return back < (self.window - slots if self.from_slot else self.window + 1)

    def seen_slots(self, block_size: int, device: torch.device) -> torch.Tensor:
        """Boolean `[block_size, block_size]`, `True` where a slot (row) sees another (column)."""
        slots = torch.arange(block_size, device=device)
        ahead = slots - slots.unsqueeze(-1)
        seen = ahead <= 0 if self.causal else torch.ones_like(ahead, dtype=torch.bool)
        return seen & (ahead.abs() < self.window) if self.window is not None and self.from_slot else seen

    def mask(self, block_size: int, context: int, device: torch.device) -> torch.Tensor | None:
        """Boolean `[1, 1, block_size, context + block_size]` of one block after `context` tokens; `None` where its
        slots see all of them and each other."""
        within = self.context is None or context <= self.context
        if within and not self.causal and not (self.window is not None and self.from_slot):
            return None
        slots = torch.arange(block_size, device=device).unsqueeze(-1)
        back = torch.arange(context, 0, -1, device=device)
        seen = self.seen(slots, back).expand(block_size, -1)
        return torch.cat([seen, self.seen_slots(block_size, device)], dim=-1)[None, None]
