"""Whether a drafter was trained with other settings than its configuration says: what each would have drafted."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from ..runtime.configuration_hyperdflash import HyperDFlashConfig
from ..runtime.layers import block_inputs
from ..runtime.modeling_hyperdflash import HyperDFlashDrafter
from ..runtime.targets import family_of
from ..training.blocks import block_labels, block_mask
from ..training.features import residual_of
from ..training.losses import IGNORE_INDEX
from .intervals import Interval, draw, interval

# Of fewer prompts all prefer a setting that is no better too often: 8 do once in 256 times.
LEAST_PROMPTS = 8
_FALSE_ALARMS = 0.03
_BLOCKS = 32  # that the drafter runs at once


@dataclass(frozen=True)
class Setting:
    """One that the configuration does not have.

    Attributes:
        name: What is other, in words.
        tau: Mean tokens of its rounds.
        ahead: How much likelier it finds what the target wrote than the configuration's setting does, nats a draft.
    """

    name: str
    tau: float
    ahead: Interval

    @property
    def is_better(self) -> bool:
        """Certainly."""
        return self.ahead.low > 0

    @property
    def is_worse(self) -> bool:
        """Certainly."""
        return self.ahead.high < 0


@dataclass(frozen=True)
class Comparison:
    """Rounds after every token of texts that the target wrote.

    Attributes:
        rounds: How many.
        tau: Their mean number of tokens with the configuration's setting.
        others: The other settings.
    """

    rounds: int
    tau: float
    others: list[Setting]


def compare_settings(
    target: PreTrainedModel,
    drafter: HyperDFlashDrafter,
    texts: Sequence[torch.Tensor],
    starts: Sequence[int],
    *,
    disable_tqdm: bool | None = True,
) -> Comparison:
    """Draft after every token of the texts with the drafter's settings and with those that others' formats invite to take
    them for: each layer one lower and one higher, all of them at once, and the other anchor convention.

    A round is given nothing but accepted tokens, which for a text that the target wrote are known: one forward of the target
    over a text serves all rounds of all settings, and all have the same rounds. Settings are told apart by how likely the
    drafter finds the text, which training made as likely as it could: accepted lengths need several times as many rounds.

    Args:
        target: The target.
        drafter: Its drafter, in the same state afterwards.
        texts: Prompts and what the target wrote after them, greedily, `[1, seq]` each; at least [`LEAST_PROMPTS`].
        starts: Where in each the prompt ends.
        disable_tqdm: `False` for a progress bar on stderr, `None` for one where that is a terminal.
    """
    settings = dict(_other_settings(target, drafter.config))
    progress = tqdm(texts, desc="other settings", unit="prompt", leave=False, disable=disable_tqdm)
    tried = [{}, *settings.values()]
    found = [draft_every_round(target, drafter, text, start, tried) for text, start in zip(progress, starts)]
    taus = np.concatenate([emitted for emitted, _ in found], axis=1).mean(1).tolist()
    sums, rounds = np.stack([nats.sum(1) for _, nats in found]), np.array([nats.shape[1] for _, nats in found])
    others = [Setting(*parts) for parts in zip(settings, taus[1:], leads_over_first(sums, rounds))]
    return Comparison(int(rounds.sum()), taus[0], others)


def leads_over_first(sums: np.ndarray, rounds: np.ndarray) -> list[Interval]:
    """How much each setting's mean over rounds is above the first one's, with prompts drawn again, the same for all.

    The intervals are wide enough for their number: where no setting differs from the first, one of six or more lie above 0 in
    2 % of examinations of 24 prompts, and in 7 % of those of 8, of which a bootstrap knows too little.

    Args:
        sums: Over each prompt's rounds, `[prompts, settings]`.
        rounds: How many rounds, `[prompts]`.
    """
    drawn = draw(len(rounds), np.random.default_rng(0))
    with np.errstate(invalid="ignore"):  # no round, no mean
        means = (drawn @ sums) / (drawn @ rounds)[:, None]
    others = means.shape[1] - 1
    return [interval(means[:, i] - means[:, 0], _FALSE_ALARMS / others) for i in range(1, others + 1)]


def _other_settings(target: PreTrainedModel, config: HyperDFlashConfig) -> Iterator[tuple[str, dict[str, Any]]]:
    ids, count = config.target_layer_ids or [], family_of(target).config.num_hidden_layers
    moves = [[layer if layer == -1 else layer + step for layer in ids] for step in (-1, 1)]
    moves += [[*ids[:i], ids[i] % count + step, *ids[i + 1 :]] for i in range(len(ids)) for step in (-1, 1)]
    seen = [[layer % count for layer in ids]]
    for moved in moves:
        read = [count - 1 if layer == -1 else layer for layer in moved]
        if read not in seen and set(read) <= set(range(count)) and len(set(read)) == len(read):
            seen.append(read)
            yield f"`target_layer_ids` {moved} instead of {ids}", {"target_layer_ids": moved}
    other = not config.sample_from_anchor
    yield f"`sample_from_anchor` {other}", {"sample_from_anchor": other}


@torch.no_grad()
def draft_every_round(
    target: PreTrainedModel,
    drafter: HyperDFlashDrafter,
    text: torch.Tensor,
    start: int,
    settings: Sequence[dict[str, Any]],
) -> tuple[np.ndarray, np.ndarray]:
    """Draft after each token of `text` from `start` on but the last.

    Args:
        target: The target.
        drafter: Its drafter.
        text: `[1, seq]`.
        start: Where in it the prompt ends.
        settings: Fields of the drafter's configuration, of which only what is given changes.

    Returns:
        `[settings, rounds]` each: the tokens that a round emits, and the mean log-probability of the text's next tokens,
        of which less likely than any token counts as any.
    """
    count = family_of(target).config.num_hidden_layers
    read = [[i % count for i in fields.get("target_layer_ids", drafter.target_layer_ids)] for fields in settings]
    layers = sorted({layer for ids in read for layer in ids})
    positions = torch.arange(text.shape[1], device=text.device)[None]
    parts = dict(zip(layers, residual_of(target, text, positions, layers).chunk(len(layers), dim=2)))
    found = []
    for fields, ids in zip(settings, read):
        with _changed(drafter.config, fields):
            found.append(_rounds(target, drafter, text, start, torch.cat([parts[i] for i in ids], dim=2)))
    emitted, nats = zip(*found)
    return np.stack(emitted), np.stack(nats)


def _rounds(
    target: PreTrainedModel, drafter: HyperDFlashDrafter, text: torch.Tensor, start: int, residual: torch.Tensor
) -> tuple[np.ndarray, np.ndarray]:
    config, text, residual = drafter.config, text.to(drafter.device), residual.to(drafter.device)
    positions, is_text = torch.arange(text.shape[1], device=text.device)[None], torch.ones_like(text, dtype=torch.bool)
    emitted, nats = [torch.zeros(0, dtype=torch.long)], [torch.zeros(0)]
    for anchors in positions[:, start:-1].split(_BLOCKS, dim=1):
        block, at = block_inputs(text[:, anchors[0]], anchors, config.block_size, config.mask_token_id)
        hidden = drafter(
            family_of(target).embed(block),
            at,
            attention_mask=block_mask(anchors, positions, config.block_size, config.sliding_window),
            residual=residual,
            residual_position_ids=positions,
        )
        drafts = hidden.unflatten(1, (-1, config.block_size))[0, :, config.first_slot :]
        logits = drafter.logits(target, drafts).to(text.device).float()
        labels = block_labels(text, is_text, positions, anchors, config.max_draft_tokens)[0]
        emitted.append(1 + (logits.argmax(-1) == labels).long().cumprod(-1).sum(-1).cpu())
        # The first `block_size - 1` positions, which both anchor conventions draft.
        logits, labels = logits[:, : config.block_size - 1], labels[:, : config.block_size - 1]
        losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
        drafted = labels != IGNORE_INDEX
        likely = -losses.clamp(max=math.log(config.vocab_size)) * drafted
        nats.append((likely.sum(-1) / drafted.sum(-1)).cpu())
    return torch.cat(emitted).numpy(), torch.cat(nats).numpy()


@contextmanager
def _changed(config: HyperDFlashConfig, fields: dict[str, Any]) -> Iterator[None]:
    before = {name: getattr(config, name) for name in fields}
    try:
        for name, value in fields.items():
            setattr(config, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(config, name, value)
