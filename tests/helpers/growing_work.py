"""What in a round is more work after a longer text, counted by the sizes of tensors that operations touch."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import hf_hyperdflash
from hf_hyperdflash.decoding import loop

PACKAGE, STOCK = (str(Path(module.__file__).parent) for module in (hf_hyperdflash, transformers))
# Attention as the target computes it.
TARGETS = f"{STOCK}/models", f"{STOCK}/integrations", f"{PACKAGE}/targets/shared_heads.py"
# Of these the first tensor may be large, and they touch as much of it as of the others.
BY_INDEX = {
    "index",
    "index_select",
    "gather",
    "embedding",
    "index_copy_",
    "index_put_",
    "scatter_",
    "_index_put_impl_",
}


class Work(TorchDispatchMode):
    """Counts elements that operations touch by the place in the package, or in transformers' generation, that calls
    them; not what a target's own modules do, nor views."""

    def __init__(self) -> None:
        super().__init__()
        self.elements, self.is_on = Counter[str](), False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if not self.is_on:
            return result
        given, made = ([leaf for leaf in tree_leaves(of) if torch.is_tensor(leaf)] for of in ((args, kwargs), result))
        name, shares = func.overloadpacket.__name__, {each.untyped_storage().data_ptr() for each in given}
        is_view = not func._schema.is_mutable and made and all(
            each.untyped_storage().data_ptr() in shares for each in made
        )  # fmt: skip
        if is_view or name.startswith(("empty", "new_empty")):
            return result
        touched = [*given[1:], *(() if func._schema.is_mutable else made)] if name in BY_INDEX else [*given, *made]
        self.elements[place()] += max((each.numel() for each in touched), default=0)
        return result


def place() -> str:
    """Return where the running operation was called: the innermost function that is ours or of transformers."""
    frame = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(TARGETS):
            return ""
        if file.startswith((PACKAGE, STOCK)):
            return f"{Path(file).name} {frame.f_code.co_name}"
        frame = frame.f_back
    return ""


def work_of_rounds(monkeypatch, call, first: int = 10) -> Counter[str]:
    """Count the work of the rounds of a call but for the first ones, in which buffers are made; divided by their
    number."""
    work, rounds, run_round = Work(), Counter[str](), loop.run_round

    def counted(batch):
        rounds["all"] += 1
        work.is_on = rounds["all"] > first
        run_round(batch)
        work.is_on = False

    with monkeypatch.context() as patched:
        patched.setattr(loop, "run_round", counted)
        with work:
            call()
    counted_rounds = rounds["all"] - first
    assert counted_rounds > 4
    return Counter({where: count // counted_rounds for where, count in work.elements.items() if where})


def grown(short: Counter[str], long: Counter[str], tokens: int) -> set[str]:
    """Return the places whose work of a round grows by about an element for each of `tokens` more."""
    return {where for where in short | long if long[where] - short[where] > 0.9 * tokens}
