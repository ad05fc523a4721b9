"""Whether a drafter was trained with other settings than its configuration says: compares their drafts."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from transformers import PreTrainedModel

from ...drafters.blocks.configuration_hyperdflash import HyperDFlashConfig
from ...drafters.blocks.modeling_hyperdflash import HyperDFlashDrafter, HyperDFlashRotaryEmbedding
from ...drafters.parts.heads import run_heads
from ...drafters.parts.layers import block_inputs
from ...targets.hooks import EMBEDDINGS
from ...targets.registry import target_of
from ...training.data.blocks import block_labels, block_masks, previous_tokens
from ...training.features.capture import compute_residual
from ...training.losses.loss import IGNORE_INDEX, indices_among
from ...training.runs.progress import progress_bar
from ..intervals import Interval, draw, interval

# With fewer prompts, all of them prefer a setting by chance too often. For 8 the probability is 1 in 256.
LEAST_PROMPTS = 8
_FALSE_ALARMS = 0.03
# The least differences that are reported: nats a draft, and the ratio of tokens a round.
_LEAST_NATS_AHEAD, _LEAST_TAU_RATIO = 0.1, 1.05
_BLOCKS = 32  # of one forward of the drafter
CAUSES = {"layer": "layers", "anchor": "anchor", "rope": "RoPE"}  # by a word of a setting's name
_ROPE_BASES = 1e4, 1e6  # that of who does not read it, and Qwen's


class Setting(NamedTuple):
    """A setting that the configuration does not have."""

    name: str  # the difference, in words
    tau: float  # mean tokens of its rounds
    ahead: Interval  # log-likelihood of the target's text minus that with the configuration's setting, nats a draft


def matters(setting: Setting, tau: float) -> bool:
    """Return whether it drafts much better than the configuration's setting, which has `tau` tokens a round.

    To be certainly better is not enough: a neighbouring layer's residual is nearly the same, and a drafter may find
    the text a little likelier with a layer that it was not trained with.
    """
    return setting.ahead.value >= _LEAST_NATS_AHEAD and setting.tau >= _LEAST_TAU_RATIO * tau


class Comparison(NamedTuple):
    """The comparison of settings over rounds after every token of texts that the target wrote."""

    rounds: int
    tau: float  # their mean number of tokens with the configuration's setting
    others: list[Setting]


def compare_settings(
    target: PreTrainedModel,
    drafter: HyperDFlashDrafter,
    texts: Sequence[torch.Tensor],
    starts: Sequence[int],
    *,
    disable_tqdm: bool | None = True,
) -> Comparison:
    """Compare drafts with the drafter's settings to drafts with settings that are easily confused with them.

    These are each layer one lower and one higher, all layers at once, the other anchor convention, the bases of RoPE
    that others have, and RoPE on all of a head where it is on a part. A round reads only accepted tokens, which are
    known for a text that the target wrote. So one forward of the target over a text serves all rounds of all settings,
    and all have the same rounds. Settings are compared by the likelihood of the text, which training maximizes:
    accepted lengths would need several times as many rounds.

    Args:
        target: The target.
        drafter: Its drafter.
        texts: Prompts and what the target wrote after them, greedily, `[1, seq]` each; at least [`LEAST_PROMPTS`].
        starts: Where in each the prompt ends.
        disable_tqdm: `False` for a progress bar on stderr, `None` for one on a terminal and lines elsewhere.
    """
    settings = other_settings(drafter.config, target)
    tried = [drafter.config, *settings.values()]
    progress = progress_bar(texts, desc="trying other layers", unit="prompt", leave=False, disable=disable_tqdm)
    found = [draft_every_round(target, drafter, text, start, tried) for text, start in zip(progress, starts)]
    taus = np.concatenate([emitted for emitted, _ in found], axis=1).mean(1).tolist()
    sums, rounds = np.stack([nats.sum(1) for _, nats in found]), np.array([nats.shape[1] for _, nats in found])
    others = [Setting(*parts) for parts in zip(settings, taus[1:], leads_over_first(sums, rounds))]
    return Comparison(int(rounds.sum()), taus[0], others)


def leads_over_first(sums: np.ndarray, rounds: np.ndarray) -> list[Interval]:
    """Return by how much each setting's mean over rounds exceeds the first one's, with bootstrap intervals.

    All settings share the redrawn prompts. The intervals are corrected for their number: if no setting differs from
    the first, one of six or more lies above 0 in 2 % of examinations with 24 prompts, and in 7 % of those with 8,
    which are few for a bootstrap.

    Args:
        sums: Over each prompt's rounds, `[prompts, settings]`.
        rounds: How many rounds, `[prompts]`.
    """
    drawn = draw(len(rounds), np.random.default_rng(0))
    with np.errstate(invalid="ignore"):  # no round, no mean
        means = (drawn @ sums) / (drawn @ rounds)[:, None]
    leads = (means[:, 1:] - means[:, :1]).T
    return [interval(lead, _FALSE_ALARMS / len(leads)) for lead in leads]


def other_settings(config: HyperDFlashConfig, target: PreTrainedModel) -> dict[str, HyperDFlashConfig]:
    """Return other configurations by their difference in words; [`cause_of`] has the cause."""
    seen = target_of(target)
    count, ids = seen.config.num_hidden_layers, config.target_layer_ids or []
    moves = [[layer if layer < 0 else layer + step for layer in ids] for step in (-1, 1)]
    numbered = [i for i, layer in enumerate(ids) if layer != EMBEDDINGS]
    moves += [[*ids[:i], ids[i] % count + step, *ids[i + 1 :]] for i in numbered for step in (-1, 1)]
    tried, found = [_read(ids, count)], {}
    for moved in moves:
        read = _read(moved, count)
        if read not in tried and set(read) <= {EMBEDDINGS, *range(count)} and len(set(read)) == len(read):
            tried.append(read)
            found[f"`target_layer_ids` {moved} instead of {ids}"] = _changed(config, target_layer_ids=moved)
    other = not config.sample_from_anchor
    found[f"`sample_from_anchor` {other}"] = _changed(config, sample_from_anchor=other)
    own = cast(dict[str, Any], config.rope_parameters)
    for base in dict.fromkeys([*_ROPE_BASES, float(seen.rope_theta)]):
        if base != own["rope_theta"]:
            name = f"`rope_theta` {base:,.0f} instead of {own['rope_theta']:,.0f}"
            found[name] = _changed(config, rope_parameters={**own, "rope_theta": base})
    part = own.get("partial_rotary_factor", 1)
    if part != 1 and own["rope_type"] != "longrope":  # some programs write it and train with all of a head
        name = f"`partial_rotary_factor` 1 instead of {part:g} in `rope_parameters`"
        found[name] = _changed(config, rope_parameters={**own, "partial_rotary_factor": 1})
    return found


def _read(ids: Sequence[int], count: int) -> list[int]:
    """Return layers without -1, of a target with `count`."""
    return [count - 1 if layer == -1 else layer for layer in ids]


def cause_of(name: str) -> str:
    """Return the cause in a word, of a setting's name."""
    return next(cause for word, cause in CAUSES.items() if word in name)


def _changed(config: HyperDFlashConfig, **fields: object) -> HyperDFlashConfig:
    changed = copy.deepcopy(config)
    changed.update(fields)
    return changed


@torch.no_grad()
def draft_every_round(
    target: PreTrainedModel,
    drafter: HyperDFlashDrafter,
    text: torch.Tensor,
    start: int,
    settings: Sequence[HyperDFlashConfig],
    shift: int = 0,
) -> tuple[np.ndarray, np.ndarray]:
    """Draft after each token of `text` from `start` on, except the last.

    Args:
        target: The target.
        drafter: Its drafter.
        text: `[1, seq]`.
        start: Where in it the prompt ends.
        settings: Configurations, which may differ from the drafter's own in its layers, its anchor convention and
            RoPE.
        shift: By how many positions the block is too late.

    Returns:
        `[settings, rounds]` each: the tokens that a round emits, and the mean log-probability of the text's next
        tokens, at least that of a uniform distribution.
    """
    count = target_of(target).config.num_hidden_layers
    read = [_read(config.target_layer_ids or [], count) for config in settings]
    layers = sorted({layer for ids in read for layer in ids})
    positions = torch.arange(text.shape[1], device=text.device)[None]
    parts = dict(zip(layers, compute_residual(target, text, positions, layers).chunk(len(layers), dim=2)))
    found = []
    for config, ids in zip(settings, read):
        with _rope_of(drafter, config):
            residual = torch.cat([parts[i] for i in ids], dim=2)
            found.append(_rounds(target, drafter, config, text, start, residual, shift))
    emitted, nats = zip(*found)
    return np.stack(emitted), np.stack(nats)


@contextmanager
def _rope_of(drafter: HyperDFlashDrafter, config: HyperDFlashConfig) -> Iterator[None]:
    """Give the drafter another configuration's rotary frequencies inside."""
    usual = drafter.rotary_emb
    if config.rope_parameters != drafter.config.rope_parameters:
        drafter.rotary_emb = HyperDFlashRotaryEmbedding(cast(Any, config)).to(drafter.device)
    try:
        yield
    finally:
        drafter.rotary_emb = usual


def _rounds(
    target: PreTrainedModel,
    drafter: HyperDFlashDrafter,
    config: HyperDFlashConfig,
    text: torch.Tensor,
    start: int,
    residual: torch.Tensor,
    shift: int,
) -> tuple[np.ndarray, np.ndarray]:
    text, residual = text.to(drafter.device), residual.to(drafter.device)
    positions, is_text = torch.arange(text.shape[1], device=text.device)[None], torch.ones_like(text, dtype=torch.bool)
    seen = target_of(target)
    emitted, nats = [torch.zeros(0, dtype=torch.long)], [torch.zeros(0)]
    for anchors in positions[:, start:-1].split(_BLOCKS, dim=1):
        block, at = block_inputs(text[:, anchors[0]], anchors, config.block_size, config.mask_token_id)
        hidden = drafter(
            seen.embed(block),
            at + shift,
            attention_mask=block_masks(config, anchors, positions),
            residual=residual,
            residual_position_ids=positions,
        )
        drafts = hidden.unflatten(1, (-1, config.block_size))[:, :, config.first_slot :]
        previous = previous_tokens(text, anchors, config.max_draft_tokens)
        embeds = seen.embed(previous.flatten(1)).view(*previous.shape, -1)
        known = previous.clamp(max=config.vocab_size - 1)  # a target may have got more tokens
        output = run_heads(drafts, known, embeds, drafter.head, None)
        logits = drafter.logits(seen, output.states, output.vectors)[0].to(text.device).float()
        tokens = block_labels(text, is_text, positions, anchors, config.max_draft_tokens)[0]
        vocabulary = drafter.draft_vocabulary(seen)
        labels = tokens if vocabulary is None else indices_among(tokens, vocabulary.ids)
        emitted.append(1 + (logits.argmax(-1) == labels).long().cumprod(-1).sum(-1).cpu())
        # The first `block_size - 1` positions, which both anchor conventions draft.
        logits, labels, tokens = (each[:, : config.block_size - 1] for each in (logits, labels, tokens))
        losses = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), labels.clamp(min=0).flatten(), reduction="none"
        ).view_as(labels)
        losses = losses.masked_fill(labels < 0, torch.inf).clamp(max=math.log(config.vocab_size))
        is_drafted = tokens != IGNORE_INDEX
        nats.append(((-losses * is_drafted).sum(-1) / is_drafted.sum(-1)).cpu())
    return torch.cat(emitted).numpy(), torch.cat(nats).numpy()
