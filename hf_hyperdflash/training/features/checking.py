"""Rows of a feature folder, computed again here and compared: an engine may number layers otherwise, or mix rows."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from ..losses.objective import compute_document_residuals, split_documents
from .parts import part_defect, read_row
from .writing import FeatureWriter

# How far a row may be from what is computed here, on average over its tokens: what the number format rounds to, and
# what two programs differ by that compute in bfloat16. Another layer's states differ by a third and more.
_TOLERANCE = {"float32": 0.03, "bfloat16": 0.03, "float8": 0.06}


def check_rows(writer: FeatureWriter, target: PreTrainedModel, count: int) -> str:
    """Compare `count` rows, spread over the parts that are there, with what a target computes here. Return a line with
    the largest and mean error, relative to each token's states; raise a `ValueError` if that is more than rounding."""
    there = [i for i, part in enumerate(writer.parts) if not part_defect(part.path(writer.directory), writer.key)]
    places = [(i, row) for i in there for row in range(writer.parts[i].rows)]
    chosen = places[:: max(1, len(places) // count)][:count]
    dtype, layers = writer.identity["dtype"], writer.identity["target_layer_ids"]
    errors, worst, worst_row = list[torch.Tensor](), -1.0, 0
    for i, row in chosen:
        stored = read_row(writer.parts[i].path(writer.directory), row, layers, layers)
        documents = split_documents(stored["input_ids"], stored["position_ids"])
        exact = torch.cat([compute_document_residuals(target, [each], layers)[0].cpu() for each in documents]).float()
        # A token's vector in each stream: attention sinks have values a thousand times the others'.
        error = (stored["residual"].float() - exact).norm(dim=-1) / exact.norm(dim=-1).clamp(min=1e-30)
        errors.append(error.flatten())
        if float(error.mean()) > worst:
            worst, worst_row = float(error.mean()), writer.first_rows[i] + row
    found = torch.cat(errors)
    said = (
        f"{len(chosen)} rows computed again: relative error {found.mean():.2%} on average, {found.max():.2%} at most"
    )
    if not worst <= _TOLERANCE[dtype]:
        raise ValueError(
            f"{said}. Row {worst_row} has {worst:.2%}, where {_TOLERANCE[dtype]:.0%} is rounding in {dtype}: "
            "these are no states of this target, its layers and these tokens. Write them again, in another folder."
        )
    return f"{said}, as rounding makes it."
