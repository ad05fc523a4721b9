"""The keys and values of accepted texts in a target's cache, for drafters that attend over them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
from transformers.cache_utils import Cache, DynamicLayer

from ..target import Target
from .round_cache import RoundLayer


class CachedText(NamedTuple):
    """Where a text is in its target's cache, which holds all of it but the anchor.

    Attributes:
        cache: transformers' cache of this text alone, or a [`~targets.caches.round_cache.RoundCache`] of its batch.
        row: The text's own row there.
        real: Which of its first tokens are no padding, `[1, tokens]`; `None` if all are.
    """

    cache: Cache
    row: int = 0
    real: torch.Tensor | None = None


class SeenKeys(NamedTuple):
    """What the anchors of texts see of one layer, their own keys apart.

    Attributes:
        keys: `[texts, kv_heads, columns, head_dim]`, a view of the cache where all of its texts are read.
        values: Likewise.
        mask: Which columns each text sees, boolean `[texts, 1, 1, columns]`; `None` if all.
    """

    keys: torch.Tensor
    values: torch.Tensor
    mask: torch.Tensor | None


def seen_keys(target: Target, layer: int, texts: Sequence[CachedText], lengths: Sequence[int]) -> SeenKeys:
    """Return what the anchors of texts see of a target's layer: of a window's tokens all but the anchor.

    Args:
        target: The target.
        layer: The layer, one with keys of its own.
        texts: The texts, all of one cache. Only a `RoundCache` has several.
        lengths: Tokens of each before its anchor, padding that the target got included.
    """
    own, window = cast("RoundLayer | DynamicLayer", texts[0].cache.layers[layer]), target.windows[layer]
    keys, values = cast(torch.Tensor, own.keys), cast(torch.Tensor, own.values)
    if isinstance(own, RoundLayer):
        # Drafts that were rejected lie in columns of tokens that no window reaches any more, or behind the text.
        count, window = min(max(lengths), own.capacity), own.window
        rows = [text.row for text in texts]
        keys, values = keys[:, :, :count], values[:, :, :count]
        if rows != list(range(len(keys))):
            keys, values = keys[rows], values[rows]
        ends = torch.tensor(lengths, device=keys.device)[:, None]
        tokens = ends - 1 - (ends - 1 - torch.arange(count, device=keys.device)) % own.capacity  # in each column
        sees_all = len(texts) == 1 and count == lengths[0] and (window is None or count < window)
        seen = tokens >= 0 if window is None else (tokens >= 0) & (ends - tokens < window)
    else:
        # A static layer has columns behind the text, and a window of it or of a recording layer one key too many.
        held = min(lengths[0], keys.shape[2])
        part = slice(0 if window is None else max(0, held - window + 1), held)
        keys, values = keys[:, :, part], values[:, :, part]
        tokens = torch.arange(part.start, held, device=keys.device)[None] + lengths[0] - held
        sees_all, seen = True, torch.ones_like(tokens, dtype=torch.bool)
    for row, text in enumerate(texts):
        if text.real is not None:
            sees_all, real = False, text.real[0].to(keys.device, torch.bool)
            own_tokens, known = tokens[row], len(real)
            seen[row] &= (own_tokens >= known) | real[own_tokens.clamp(0, known - 1)]
    return SeenKeys(keys, values, None if sees_all else seen[:, None, None])
