"""What drafters are, in words for a reader, by their configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # so that words cost nothing to import
    from transformers import PreTrainedConfig

    from ..drafters.blocks.configuration_hyperdflash import HyperDFlashConfig
    from ..drafters.deepseek_v4.configuration_dspark import DeepseekV4DSparkConfig
    from ..drafters.deepseek_v4.configuration_mtp import DeepseekV4MTPConfig
    from ..drafters.unrolled.configuration import UnrolledConfig
    from ..drafters.unrolled.configuration_eagle3 import Eagle3Config
    from ..drafters.unrolled.configuration_specblock import SpecBlockConfig

_REDUCERS = {
    "hc_gate": "Its reducer is HyperDFlash's gate, {origin}, over {layers}.",
    "fc": "Its reducer is `fc`, the dense projection of DFlash, over {layers}.",
    "hybrid": "Its reducer is `hybrid`, an extension of HyperDFlash: the paper's gate, {origin}, "
    "on the last layer read, plus a normed dense projection of the others; it reads {layers}.",
    "stream_mean": "Its reducer is the mean over the residual streams and a projection, over {layers}.",
}


class Description(NamedTuple):
    """A kind of drafter in words."""

    drafts: str  # how many tokens, and in how many passes
    sentences: list[str]  # how it drafts, and what it reads
    shares_all: bool = True  # whether embedding and LM head are the target's, so that the drafter stores neither


def describe_block(config: HyperDFlashConfig) -> Description:
    told = [_reducer(config)]
    if config.sequential_head != "none":
        of = f", which chooses among the block's {count} best tokens" if (count := config.head_candidates) else ""
        told.append(
            f"Each draft knows the one before it through a `{config.sequential_head}` head of width "
            f"{config.head_rank}{of}."
        )
    return Description(
        f"{config.max_draft_tokens} tokens in one pass", told + _confidence(config), _shares_all(config)
    )


def describe_specblock(config: SpecBlockConfig) -> Description:
    mechanisms = {
        "slots that take in the one before them": config.shift,
        "conditions that all slots are told": config.broadcast,
        "a rank head that says how many tokens to try at each": config.rank_head,
    }
    has = [name for name, there in mechanisms.items() if there]
    told = f"It is a SpecBlock drafter: passes of {config.block_size} draft positions that know their path"
    return Description(
        f"up to {config.max_draft_tokens} tokens in {config.max_blocks} passes of {config.block_size}",
        [f"{told}{', with ' if has else ''}{_listed(has)}.", _reducer(config)],
        _shares_all(config),
    )


def describe_eagle3(config: Eagle3Config) -> Description:
    told = (
        f"It is an EAGLE-3 drafter: a pass drafts one token and goes on from its own state; its draft tree keeps "
        f"{config.tree_width} nodes of each level."
    )
    drafts = f"up to {config.max_draft_tokens} tokens, a pass for each"
    return Description(drafts, [told, _reducer(config)], _shares_all(config))


def describe_mtp(config: DeepseekV4MTPConfig) -> Description:
    told = "It is DeepSeek-V4's own multi-token-prediction block, on the target's pre-collapse residual."
    return Description("as many tokens as are asked for (3 if not said), a pass for each", [told])


def describe_dspark(config: DeepseekV4DSparkConfig) -> Description:
    told = (
        f"It is DeepSeek-V4's DSpark drafter: {config.num_hidden_layers} V4 blocks over the mean of "
        f"{_layers(config)}, each draft knowing the one before it through a Markov head of rank {config.head_rank}."
    )
    return Description(f"{config.max_draft_tokens} tokens in one pass", [told, *_confidence(config)])


def title_block(config: HyperDFlashConfig) -> str:
    """Return what tells a drafter of blocks from others: its reducer, layers and head."""
    head = "" if config.sequential_head == "none" else f", {config.sequential_head} head"
    if config.reducer == "hybrid":
        return f"HyperDFlash hybrid{head}"
    if config.reducer != "hc_gate":
        return f"Vanilla DFlash{head}"
    layers = config.target_layer_ids
    read = "" if layers == [-1] else f" on {', '.join(map(str, layers or ()))}"
    return f"HyperDFlash{read}{head}"


def _shares_all(config: HyperDFlashConfig | UnrolledConfig) -> bool:
    return not getattr(config, "own_embedding", False) and not config.draft_vocab_size


def _reducer(config: PreTrainedConfig) -> str:
    has_gate = config.target_hc_mult > 1
    reducer = (
        "fc" if getattr(config, "any_streams", False) and not has_gate else config.reducer
    )  # the mean over one is itself
    origin = "inherited from the target's `hc_head`" if has_gate else "learned from nothing, as the target has none"
    return _REDUCERS[reducer].format(layers=_layers(config), origin=origin)


def _layers(config: PreTrainedConfig) -> str:
    if getattr(config, "usual_layers", False):
        return "the residual streams after layer 1, one in the middle and the fourth from the end"
    ids = config.target_layer_ids or []
    before = [str(layer) for layer in ids if layer >= 0]
    parts = ["the embeddings"] if min(ids, default=0) < -1 else []
    if before:
        parts.append(f"the residual streams after layer{'s' if len(before) > 1 else ''} {_listed(before)}")
    return " and ".join([*parts, *(["the pre-collapse residual"] if -1 in ids else [])])


def _listed(names: list[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))


def _confidence(config: PreTrainedConfig) -> list[str]:
    if not config.confidence_head:
        return []
    calibrated = ", calibrated on held-out prompts" if config.confidence_temperatures else ""
    return [f"It says how probable each draft's acceptance is{calibrated} (`DraftTree.confidence`)."]
