"""Computes the conditioning feature: the target's pre-collapse residual of whole documents."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from ...targets.registry import capture_residual


def compute_residual(
    target: PreTrainedModel,
    input_ids: torch.Tensor,
    position_ids: torch.Tensor,
    target_layer_ids: Sequence[int] = (-1,),
) -> torch.Tensor:
    """Compute the residual streams of right-padded or packed rows, by default the pre-collapse ones, `[batch, seq,
    len(target_layer_ids) * config.hc_mult, config.hidden_size]` on the device of `input_ids`.

    The target runs over each document alone, whose `position_ids` count from 0, so that none sees another: V4's
    compressors have no mask for that. Padding on the right changes nothing, because every part of V4 is causal."""
    if not (position_ids != torch.arange(input_ids.shape[1], device=position_ids.device)).any():  # not packed
        return _forward(target, input_ids, target_layer_ids).to(input_ids.device)
    documents = split_documents(input_ids.flatten(), position_ids.flatten())
    residual = compute_document_residuals(target, documents, target_layer_ids)
    return torch.cat(residual).to(input_ids.device).unflatten(0, input_ids.shape)


def split_documents(input_ids: torch.Tensor, position_ids: torch.Tensor) -> Sequence[torch.Tensor]:
    """Split rows that are laid end to end into the ids of each document."""
    return input_ids.tensor_split((position_ids == 0).nonzero().flatten().tolist()[1:])


def compute_document_residuals(
    target: PreTrainedModel, documents: Sequence[torch.Tensor], target_layer_ids: Sequence[int]
) -> list[torch.Tensor]:
    """Compute each document's residual streams, `[seq, streams, config.hidden_size]`, in one forward over all."""
    residual = _forward(target, pad_sequence(list(documents), batch_first=True), target_layer_ids)
    return [states[: len(ids)] for states, ids in zip(residual, documents)]


@torch.no_grad()
def _forward(target: PreTrainedModel, input_ids: torch.Tensor, target_layer_ids: Sequence[int]) -> torch.Tensor:
    if target.device.type != "meta":  # an offloaded target's ids are moved by accelerate's hooks
        input_ids = input_ids.to(target.device)
    with capture_residual(target, target_layer_ids) as captured:
        target.base_model(input_ids=input_ids, use_cache=False)
    return captured[0]
