"""How far a cache can be taken back between calls, and copies of what cannot be taken back.

Full attention keeps the keys of every token and can be cut anywhere. A sliding window has dropped the keys that left
it, linear attention and Mamba have one running state, and DeepSeek-V4's compressors keep projections of the last
tokens only. A snapshot holds copies of such layers, each no larger than a window or a state. Of the other layers, and
of DeepSeek-V4's compressed entries, the cache itself has what a snapshot needs as long as the text begins the same.
"""

from __future__ import annotations

import copy
from collections.abc import Collection
from typing import Any, NamedTuple, cast

import torch
from transformers.cache_utils import Cache, LinearAttentionCacheLayerMixin

from .growing import Buffers

_ENTRIES = "compressed_kv"  # of DeepSeek-V4's compressors, which are never changed


class Snapshot(NamedTuple):
    """A cache as it was after `length` tokens: by index, copies of the layers that forget."""

    length: int
    layers: dict[int, Any]


def forgets(layer: Any) -> bool:
    """Return whether a layer may be unable to go back to an earlier length."""
    return hasattr(layer, "sliding_window") or isinstance(layer, LinearAttentionCacheLayerMixin)


def can_crop(cache: Cache, count: int) -> bool:
    """Return whether each layer of a cache can remove its last `count` tokens now."""
    return count == 0 or all(_can_crop(layer, count) for layer in cache.layers if forgets(layer))


def _can_crop(layer: Any, count: int) -> bool:
    if isinstance(layer, LinearAttentionCacheLayerMixin) and not any(layer.has_previous_state.values()):
        return True  # an MLP's, in earlier transformers
    if hasattr(layer, "undoable_tokens"):  # one of ours
        return count <= layer.undoable_tokens
    return not isinstance(layer, LinearAttentionCacheLayerMixin) and layer.get_seq_length() < layer.sliding_window


def crop(cache: Cache, count: int, without: Collection[int] = ()) -> None:
    """Remove the last `count` tokens from each layer of a cache that [`can_crop`] them, but for some layers."""
    for index, layer in enumerate(cast("list[Any]", cache.layers) if count else ()):
        if index not in without and getattr(layer, "is_initialized", True):  # it may have keys of another layer
            layer.crop(-count)


def take_snapshot(cache: Cache) -> Snapshot:
    """Return a snapshot of a cache, with tensors of its own."""
    layers = {index: _copied(layer) for index, layer in enumerate(cache.layers) if forgets(layer)}
    return Snapshot(int(cache.get_seq_length()), layers)


def restore(cache: Cache, snapshot: Snapshot) -> None:
    """Take a cache back to a snapshot, which can be used again. The cache must still hold the snapshot's text, and may
    hold more."""
    crop(cache, int(cache.get_seq_length()) - snapshot.length, without=snapshot.layers)
    for index, kept in snapshot.layers.items():
        cache.layers[index] = _restored(kept, cache.layers[index], snapshot.length)


def _copied(layer: Any) -> Any:
    """Return a copy of a layer, without what only grows."""
    own, growing = copy.copy(layer), {"keys", "values"} if _has_all_keys(layer) else set()
    for name, value in vars(layer).items():
        if name in growing:
            setattr(own, name, None)
        else:
            setattr(own, name, dict.fromkeys(value) if name == _ENTRIES else _clone(value))
    return own


def _restored(kept: Any, layer: Any, length: int) -> Any:
    """Return a copy of a snapshot's layer, with what only grows from the layer as it is now."""
    own = _copied(kept)
    for name, entries in getattr(layer, "compressed_kv", {}).items():
        own.compressed_kv[name] = None if entries is None else entries[:, : own.entry_count[name]]
    if _has_all_keys(layer):
        own.keys, own.values = layer.keys[..., :length, :], layer.values[..., :length, :]
    return own


def _has_all_keys(layer: Any) -> bool:
    """Return whether a layer has full attention beside a running state."""
    return isinstance(getattr(layer, "keys", None), torch.Tensor) and not hasattr(layer, "sliding_window")


def _clone(value: Any) -> Any:
    """Return a value with tensors of its own. A clone of a view is no larger than the view."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, Buffers):
        return Buffers()
    return {name: _clone(part) for name, part in value.items()} if isinstance(value, dict) else value
