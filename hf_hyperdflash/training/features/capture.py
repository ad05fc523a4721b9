"""The conditioning feature: the target's pre-collapse residual of whole documents."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from ...decoding.bind import capture_residual


def residual_of(
    target: PreTrainedModel,
    input_ids: torch.Tensor,
    position_ids: torch.Tensor,
    target_layer_ids: Sequence[int] = (-1,),
) -> torch.Tensor:
    """Residual paths, by default the pre-collapse ones, of right-padded or packed rows.

    Every document runs on its own, so that none sees another: V4's compressors have no mask for that. Padding on the
    right changes nothing, every part of V4 is causal.

    Args:
        target: The target, in eval mode.
        input_ids: `[batch, seq]`.
        position_ids: `[batch, seq]`, counting from 0 in every document of a row.
        target_layer_ids: As in [`capture_residual`].

    Returns:
        `[batch, seq, len(target_layer_ids) * config.hc_mult, config.hidden_size]` on the device of `input_ids`.
    """
    packed = bool((position_ids != torch.arange(input_ids.shape[1], device=position_ids.device)).any())
    if not packed:
        return _forward(target, input_ids, target_layer_ids).to(input_ids.device)
    documents = documents_of(input_ids.flatten(), position_ids.flatten())
    residual = residual_of_documents(target, documents, target_layer_ids)
    return torch.cat(residual).to(input_ids.device).unflatten(0, input_ids.shape)


def documents_of(input_ids: torch.Tensor, position_ids: torch.Tensor) -> Sequence[torch.Tensor]:
    """The ids of each document, of rows that were laid end to end."""
    return input_ids.tensor_split((position_ids == 0).nonzero().flatten().tolist()[1:])


def residual_of_documents(
    target: PreTrainedModel, documents: Sequence[torch.Tensor], target_layer_ids: Sequence[int]
) -> list[torch.Tensor]:
    """Each document's residual paths, `[seq, paths, config.hidden_size]`, of one forward over them all."""
    residual = _forward(target, pad_sequence(list(documents), batch_first=True), target_layer_ids)
    return [states[: len(ids)] for states, ids in zip(residual, documents)]


@torch.no_grad()
def _forward(target: PreTrainedModel, input_ids: torch.Tensor, target_layer_ids: Sequence[int]) -> torch.Tensor:
    if target.device.type != "meta":  # an offloaded target: accelerate's hooks bring the ids to where they run
        input_ids = input_ids.to(target.device)
    with capture_residual(target, target_layer_ids) as captured:
        target.base_model(input_ids=input_ids, use_cache=False)
    return captured[0]
