"""Whether a drafter was trained with another configuration than it has: compares the drafts of both."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
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
from ...training.losses.loss import IGNORE_INDEX, indices_among
from ...training.losses.objective import compute_residual
from ...training.runs.progress import progress_bar
from ..intervals import Interval, drawn_ratios, interval
from .diagnosis import LEAST_PROMPTS, LEAST_TAU, REMARK, Examination, Finding

_FALSE_ALARMS = 0.03
# The least differences that are reported: nats a draft, and the ratio of tokens a round.
_LEAST_NATS_AHEAD, _LEAST_TAU_RATIO = 0.1, 1.05
_BLOCKS = 32  # of one forward of the drafter
CAUSES = {"layer": "layers", "anchor": "anchor", "rope": "RoPE"}  # by a word of a setting's name
_ROPE_BASES = 1e4, 1e6  # that of who does not read it, and Qwen's


class Variant(NamedTuple):
    """A configuration with one setting that is easily confused with the drafter's own."""

    name: str  # the difference, in words
    tau: float  # mean tokens of its rounds
    ahead: Interval  # log-likelihood of the target's text minus that with the configuration's setting, nats a draft

    def matters(self, tau: float) -> bool:
        """Return whether it drafts much better than the configuration's setting, which has `tau` tokens a round.

        To be certainly better is not enough: a neighbouring layer's residual is nearly the same, and a drafter may
        find the text a little likelier with a layer that it was not trained with.
        """
        return self.ahead.value >= _LEAST_NATS_AHEAD and self.tau >= _LEAST_TAU_RATIO * tau


def try_variants(examined: Examination) -> Iterator[Finding]:
    """Check whether the drafter was trained with another configuration than it has. Small differences are normal:
    neighbouring layers are nearly the same."""
    drafter = cast(HyperDFlashDrafter, examined.drafter)
    if not examined.is_thorough or drafter.config.model_type != HyperDFlashConfig.model_type:
        return
    examined.say("trying other layers, the other anchor convention, other bases of RoPE ...")
    texts = examined.texts if len(examined.texts) <= LEAST_PROMPTS else examined.texts[: LEAST_PROMPTS + 2]
    starts = [ids.shape[1] for ids in examined.prompts[: len(texts)]]
    rounds, tau, others = compare_variants(examined.target, drafter, texts, starts, disable_tqdm=examined.disable_tqdm)
    tried = f"{rounds:,} rounds over {len(texts)} prompts"
    # Of an untrained drafter some setting is the least bad.
    ahead = [variant for variant in others if variant.matters(tau) and variant.tau >= LEAST_TAU]
    better = [variant for variant in ahead if variant.ahead.low > 0]
    worse = sum(variant.ahead.high < 0 for variant in others)
    examined.found.facts["other configurations"] = (
        f"{len(others)} tried in {tried}, neighbouring layers, the other anchor convention, other bases of RoPE: "
        f"{worse} certainly worse, {len(better)} clearly better, of the others none makes a clear difference"
    )
    if not ahead:
        return
    best = max(better or ahead, key=lambda variant: variant.ahead.value)
    value, low, high = best.ahead
    described = (
        f"{value:+.2f} nats a draft, between {low:+.2f} and {high:+.2f}; {best.tau:.2f} tokens a round instead of "
        f"{tau:.2f} in {tried}"
    )
    if better:
        yield cause_of(best.name), (
            f"With {best.name} the drafter finds the target's text likelier ({described}): the configuration does not "
            "say how the drafter was trained. Correct it in `config.json`."
        )  # fmt: skip
    else:
        yield REMARK, (
            f"The drafter may have been trained with {best.name} ({described}): longer texts may tell, from a larger "
            "`--max-new-tokens` (in Python `max_new_tokens`)."
        )  # fmt: skip


def compare_variants(
    target: PreTrainedModel,
    drafter: HyperDFlashDrafter,
    texts: Sequence[torch.Tensor],
    starts: Sequence[int],
    *,
    disable_tqdm: bool | None = True,
) -> tuple[int, float, list[Variant]]:
    """Compare drafts with the drafter's configuration to drafts with each of [`variants`]. Return the number of
    rounds, which begin after every token of the texts, their mean number of tokens, and the comparisons."""
    # A round reads only accepted tokens, which are known for a text that the target wrote. So one forward of the
    # target over a text serves all rounds of all configurations, and all have the same rounds. They are compared by
    # the likelihood of the text, which training maximizes: accepted lengths would need several times as many rounds.
    others = variants(drafter.config, target)
    tried = [drafter.config, *others.values()]
    progress = progress_bar(texts, desc="trying other layers", unit="prompt", leave=False, disable=disable_tqdm)
    found = [draft_every_round(target, drafter, text, start, tried) for text, start in zip(progress, starts)]
    taus = np.concatenate([emitted for emitted, _ in found], axis=1).mean(1).tolist()
    sums, rounds = np.stack([nats.sum(1) for _, nats in found]), np.array([nats.shape[1] for _, nats in found])
    compared = [Variant(*parts) for parts in zip(others, taus[1:], leads_over_first(sums, rounds))]
    return int(rounds.sum()), taus[0], compared


def leads_over_first(sums: np.ndarray, rounds: np.ndarray) -> list[Interval]:
    """Return by how much each configuration's mean over rounds exceeds the first one's, with bootstrap intervals, from
    sums over each prompt's rounds `[prompts, configurations]` and their numbers `[prompts]`."""
    # The intervals are corrected for their number: if none differs from the first, one of six or more lies above 0 in
    # 2 % of examinations with 24 prompts, and in 7 % of those with 8, which are few for a bootstrap.
    means = drawn_ratios(sums, rounds[:, None])
    leads = (means[:, 1:] - means[:, :1]).T
    return [interval(lead, _FALSE_ALARMS / len(leads)) for lead in leads]


def variants(config: HyperDFlashConfig, target: PreTrainedModel) -> dict[str, HyperDFlashConfig]:
    """Return configurations that are easily confused with a drafter's, by their difference in words.

    These have each layer one lower and one higher, all layers at once, the other anchor convention, the bases of RoPE
    that others have, and RoPE on all of a head where it is on a part. [`cause_of`] has the cause of a name.
    """
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
    configs: Sequence[HyperDFlashConfig],
    shift: int = 0,
) -> tuple[np.ndarray, np.ndarray]:
    """Draft after each token of `text` `[1, seq]` from `start` on, except the last, with each of some configurations.

    These may differ from the drafter's own in its layers, its anchor convention and RoPE. `shift` is by how many
    positions the block is too late. Return the tokens that each round emits, and the mean log-probability of the
    text's next tokens, at least that of a uniform distribution: `[configurations, rounds]` each.
    """
    count = target_of(target).config.num_hidden_layers
    read = [_read(config.target_layer_ids or [], count) for config in configs]
    layers = sorted({layer for ids in read for layer in ids})
    positions = torch.arange(text.shape[1], device=text.device)[None]
    parts = dict(zip(layers, compute_residual(target, text, positions, layers).chunk(len(layers), dim=2)))
    found, usual = [], drafter.rotary_emb
    try:
        for config, ids in zip(configs, read):
            is_usual = config.rope_parameters == drafter.config.rope_parameters
            drafter.rotary_emb = (
                usual if is_usual else HyperDFlashRotaryEmbedding(cast(Any, config)).to(drafter.device)
            )
            residual = torch.cat([parts[i] for i in ids], dim=2)
            found.append(_rounds(target, drafter, config, text, start, residual, shift))
    finally:
        drafter.rotary_emb = usual
    emitted, nats = zip(*found)
    return np.stack(emitted), np.stack(nats)


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
