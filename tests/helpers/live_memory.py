"""How much memory tensors hold at once, counted by what operations return: the same on every machine."""

from __future__ import annotations

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveMemory(TorchDispatchMode):
    """While it is active, `peak` is the most bytes that storages made in it held at once."""

    def __init__(self):
        super().__init__()
        self.live = self.peak = 0
        self.sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {leaf.untyped_storage().data_ptr() for leaf in tree_leaves((args, kwargs)) if torch.is_tensor(leaf)}
        result = func(*args, **(kwargs or {}))
        for leaf in filter(torch.is_tensor, tree_leaves(result)):
            storage = leaf.untyped_storage()
            place = storage.data_ptr()
            if place and place not in given and place not in self.sizes:
                self.sizes[place] = storage.nbytes()
                self.live += storage.nbytes()
                self.peak = max(self.peak, self.live)
                weakref.finalize(storage, self._forget, place)
        return result

    def _forget(self, place):
        self.live -= self.sizes.pop(place)
