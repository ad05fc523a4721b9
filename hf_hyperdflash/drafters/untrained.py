"""Finds weights of a drafter that cannot have been trained: exports of others have left embeddings at their initial
noise, for example, with which a good drafter drafts badly in some engines and well in others."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from pathlib import Path

import torch

logger = logging.getLogger(__name__)

_ROWS = 4096  # of a table, by which noise is told from what was learned
_FEWEST = 32  # rows and columns, with which it can be
# What becomes of each kind of tensor. Read in vLLM (`_should_share` of its EAGLE utilities: the target's embedding if
# a drafter has none, or an equal one) and in SGLang (`init_lm_head` of its EAGLE worker: always the target's).
_KINDS = {
    r"(^|\.)embed_tokens\.weight$": "SGLang takes the target's instead, as hf_hyperdflash does for blocks; "
    "vLLM uses this one, as hf_hyperdflash does for EAGLE-3 and SpecBlock",
    r"(^|\.)lm_head\.weight$|^\d+\.\d+\.weight$": "SGLang, vLLM and hf_hyperdflash draft with it all the same",
    # But for a reducer's `fc_norm`, which is zero at first, and adds nothing to the gate then.
    r"^(?!fc_norm\.weight$).*norms?(\.\d+)?\.weight$": "SGLang, vLLM and hf_hyperdflash multiply with it all the same",
}


def warn_of_untrained(tensors: Mapping[str, torch.Tensor], name: str | Path) -> None:
    """Warn of each tensor of a checkpoint that cannot have been trained."""
    for found in untrained(tensors):
        logger.warning("%s: %s. Ask for a complete checkpoint, or train it.", name, found)


def untrained(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Return a sentence for each tensor that cannot have been trained: its name, why, and what engines do with it."""
    said = []
    for name, tensor in tensors.items():
        engines = next((engines for kind, engines in _KINDS.items() if re.search(kind, name)), "")
        if engines and (why := _why_untrained(tensor.detach())):
            said.append(f"`{name}` {why}, so it cannot have been trained: {engines}")
    return said


def _why_untrained(tensor: torch.Tensor) -> str:
    is_read = not tensor.is_meta and tensor.is_floating_point() and tensor.dtype.itemsize > 1
    if not is_read or hasattr(tensor, "__tensor_flatten__") or tensor.numel() < 2:
        return ""
    some = tensor[:: -(-len(tensor) // _ROWS)]
    if not (some.any() or tensor.any()):
        return "is all zeros"
    if tensor.ndim != 2:
        return ""
    if (some == tensor[0]).all() and (tensor == tensor[0]).all():
        return "has the same row for every token"
    return "is noise, as it was made" if min(tensor.shape) >= _FEWEST and _is_noise(some.float()) else ""


def _is_noise(rows: torch.Tensor) -> bool:
    """Return whether the numbers are independent of each other: rows and columns differ in size just as much as chance
    makes them differ, and the mean row is as near to 0 as chance leaves it. Training changes one of these many times
    over."""
    count, width = rows.shape
    squares = rows.square() / rows.square().mean()
    of_one = squares.var()  # of the mean of n numbers it is n times smaller
    by_columns, by_rows = squares.mean(0).var() * count / of_one, squares.mean(1).var() * width / of_one
    centre = rows.mean(0).square().mean() / rows.square().mean() * count
    return all(0.5 < float(ratio) < 2 for ratio in (by_columns, by_rows, centre))
