"""What the slots of a block see in a layer: how far back into the context, and of each other. Torch alone."""

from __future__ import annotations

from typing import NamedTuple

import torch

FULL, SLIDING = "full_attention", "sliding_attention"  # kinds of layers, as transformers calls them
LAYER_KINDS = (FULL, SLIDING)
CAUSAL_LAYERS = ("none", "sliding", "all")
WINDOW_FROM = ("anchor", "slot")


class AttentionSpan(NamedTuple):
    """What every slot of a block sees in one kind of layer.

    Attributes:
        window: How many positions a slot sees; `None` for all.
        from_slot: Where the window begins. If `True`, it begins at each slot and includes it: later slots see less of
            the context, and no slot sees another one that is `window` or more positions away (z-lab). If `False`, it
            begins at the anchor and does not include the anchor's position: all slots see the same context (the
            paper's, speculators').
        causal: Whether a slot sees only itself and the slots before it of its block; otherwise it sees all of them.
    """

    window: int | None = None
    from_slot: bool = False
    causal: bool = False

    @property
    def context_window(self) -> int | None:
        """How many tokens before the anchor any slot sees; `None` for all."""
        return self.window if self.window is None or not self.from_slot else self.window - 1

    def sees_context(self, slots: torch.Tensor, back: torch.Tensor) -> torch.Tensor:
        """Return whether slots see tokens of the context, as booleans.

        Args:
            slots: Numbers of the slots, 0 for the anchor's.
            back: How many positions before the anchor the tokens are, 1 for the one before it. Its shape and that of
                `slots` must broadcast.

        Returns:
            The broadcast shape; where all slots see the same, the shape of `back` alone: in training it is large.
        """
        if self.window is None:
            return torch.ones_like(back, dtype=torch.bool)
        return back < (self.window - slots if self.from_slot else self.window + 1)

    def sees_slots(self, block_size: int, device: torch.device) -> torch.Tensor:
        """Return whether a slot (row) sees another (column), boolean `[block_size, block_size]`."""
        slots = torch.arange(block_size, device=device)
        ahead = slots - slots.unsqueeze(-1)
        visible = ahead <= 0 if self.causal else torch.ones_like(ahead, dtype=torch.bool)
        return visible & (ahead.abs() < self.window) if self.window is not None and self.from_slot else visible

    def mask(self, block_size: int, context: int, device: torch.device) -> torch.Tensor | None:
        """Return the mask of one block after `context` tokens, boolean `[1, 1, block_size, context + block_size]`;
        `None` where its slots see all of them and each other."""
        within = self.context_window is None or context <= self.context_window
        if within and not self.causal and not (self.window is not None and self.from_slot):
            return None
        slots = torch.arange(block_size, device=device).unsqueeze(-1)
        back = torch.arange(context, 0, -1, device=device)
        visible = self.sees_context(slots, back).expand(block_size, -1)
        return torch.cat([visible, self.sees_slots(block_size, device)], dim=-1)[None, None]
