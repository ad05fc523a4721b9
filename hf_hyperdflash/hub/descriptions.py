"""What each kind of drafter is called and what it is, in words: for whatever names one to a reader."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub.errors import StrictDataclassError

from ..drafters.blocks.configuration_hyperdflash import HyperDFlashConfig
from ..drafters.deepseek_v4.configuration_dspark import DeepseekV4DSparkConfig
from ..drafters.deepseek_v4.configuration_mtp import DeepseekV4MTPConfig
from ..drafters.unrolled.configuration_eagle3 import Eagle3Config
from ..drafters.unrolled.configuration_specblock import SpecBlockConfig

_REDUCERS = {
    "hc_gate": "Its reducer is HyperDFlash's gate, {origin}, over {layers}.",
    "fc": "Its reducer is `fc`, the dense projection of DFlash, over {layers}.",
    "hybrid": "Its reducer is `hybrid`, an extension of HyperDFlash: the paper's gate, {origin}, "
    "on the last layer read, plus a normed dense projection of the others; it reads {layers}.",
    "stream_mean": "Its reducer is the mean over the residual paths and a projection, over {layers}.",
}


class Kind(NamedTuple):
    """What all drafters of one configuration class have in common."""

    name: str
    article: str
    describe: Callable[[Any], Description]


class Description(NamedTuple):
    """A kind of drafter in words."""

    drafts: str  # how many tokens, and in how many passes
    sentences: list[str]  # how it drafts, and what it reads


def read_config(folder: str | Path) -> Any:
    """The configuration of the drafter saved in `folder`, of any kind that this package saves.

    Raises:
        ValueError: If it is none of these, or has a wrong value.
        OSError: If there is none.
    """
    if not Path(folder, "config.json").is_file():
        raise FileNotFoundError(f"The folder {folder} has no config.json, expected that of a drafter.")
    # MTP's class alone knows the drafters that were saved before they had a type of their own.
    told = DeepseekV4MTPConfig.get_config_dict(folder)[0].get("model_type")
    kind = next((kind for kind in _KINDS if kind.model_type == told), None)
    if kind is None:
        known = ", ".join(repr(kind.model_type) for kind in _KINDS)
        raise ValueError(
            f"The config.json in {folder} has `model_type` {told!r}, expected that of a drafter: one of {known}."
        )
    try:
        return kind.from_pretrained(folder)
    except StrictDataclassError as error:
        raise ValueError(f"The config.json of {folder} has a wrong value: {error}") from error


def describe(config: Any) -> Description:
    """A drafter by its configuration, which may be the class that came with it."""
    return _kind(config).describe(config)


def one_of(config: Any) -> str:
    """A drafter of the kind that a configuration, or its class, is of: "a HyperDFlash drafter"."""
    return f"{_kind(config).article} {_kind(config).name} drafter"


def title(config: Any) -> str:
    """What tells a drafter from others beside it, where the user gives it no name."""
    name = _kind(config).name
    if config.model_type != HyperDFlashConfig.model_type:
        return name
    head = "" if config.sequential_head == "none" else f", {config.sequential_head} head"
    if config.reducer == "hybrid":
        return f"{name} hybrid{head}"
    if config.reducer != "hc_gate":
        return f"Vanilla DFlash{head}"
    layers = config.target_layer_ids
    read = "" if layers == [-1] else f" on {', '.join(map(str, layers))}"
    return f"{name}{read}{head}"


def shares_all(config: Any) -> bool:
    """Whether embedding and LM head are the target's, so that the drafter stores neither."""
    return not getattr(config, "own_embedding", False) and not getattr(config, "draft_vocab_size", 0)


def _block(config: HyperDFlashConfig) -> Description:
    told = [_reducer(config)]
    if config.sequential_head != "none":
        of = f", which chooses among the block's {count} best tokens" if (count := config.head_candidates) else ""
        told.append(
            f"Each draft knows the one before it through a `{config.sequential_head}` head of width "
            f"{config.head_rank}{of}."
        )
    return Description(f"{config.max_draft_tokens} tokens in one pass", told + _confidence(config))


def _specblock(config: SpecBlockConfig) -> Description:
    mechanisms = {
        "slots that take in the one before them": config.shift,
        "conditions that all slots are told": config.broadcast,
        "a rank head that says how many tokens to try at each": config.rank_head,
    }
    has = [name for name, there in mechanisms.items() if there]
    told = f"It is {one_of(config)}: passes of {config.block_size} draft positions that know their path"
    return Description(
        f"up to {config.max_draft_tokens} tokens in {config.max_blocks} passes of {config.block_size}",
        [f"{told}{', with ' if has else ''}{_listed(has)}.", _reducer(config)],
    )


def _eagle3(config: Eagle3Config) -> Description:
    told = (
        f"It is {one_of(config)}: a pass drafts one token and goes on from its own state; its draft tree keeps "
        f"{config.tree_width} nodes of each level."
    )
    return Description(f"up to {config.max_draft_tokens} tokens, a pass for each", [told, _reducer(config)])


def _mtp(config: DeepseekV4MTPConfig) -> Description:
    told = "It is DeepSeek-V4's own multi-token-prediction block, on the target's pre-collapse residual."
    return Description("as many tokens as are asked for (3 if not said), a pass for each", [told])


def _dspark(config: DeepseekV4DSparkConfig) -> Description:
    told = (
        f"It is DeepSeek-V4's DSpark drafter: {config.num_hidden_layers} V4 blocks over the mean of "
        f"{_layers(config)}, each draft knowing the one before it through a Markov head of rank {config.head_rank}."
    )
    return Description(f"{config.max_draft_tokens} tokens in one pass", [told, *_confidence(config)])


def _somebodys_own(config: Any) -> Description:
    return Description("as many tokens as it makes", [f"It is {one_of(config)}, of which no more is known here."])


def _reducer(config: Any) -> str:
    has_gate = config.target_hc_mult > 1
    reducer = (
        "fc" if getattr(config, "any_streams", False) and not has_gate else config.reducer
    )  # the mean over one is itself
    origin = "inherited from the target's `hc_head`" if has_gate else "learned from nothing, as the target has none"
    return _REDUCERS[reducer].format(layers=_layers(config), origin=origin)


def _layers(config: Any) -> str:
    if getattr(config, "usual_layers", False) and not config.target_num_layers:  # of no target yet
        return "the residual paths after layer 1, one in the middle and the fourth from the end"
    ids = config.target_layer_ids or []
    before = [str(layer) for layer in ids if layer != -1]
    parts = [f"the residual paths after layer{'s' if len(before) > 1 else ''} {_listed(before)}"] if before else []
    return " and ".join([*parts, *(["the pre-collapse residual"] if -1 in ids else [])])


def _listed(names: list[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))


def _confidence(config: Any) -> list[str]:
    if not config.confidence_head:
        return []
    calibrated = ", calibrated on held-out prompts" if config.confidence_temperatures else ""
    return [f"It says how probable each draft's acceptance is{calibrated} (`DraftTree.confidence`)."]


_KINDS: dict[Any, Kind] = {
    HyperDFlashConfig: Kind("HyperDFlash", "a", _block),
    SpecBlockConfig: Kind("SpecBlock", "a", _specblock),
    Eagle3Config: Kind("EAGLE-3", "an", _eagle3),
    DeepseekV4MTPConfig: Kind("MTP", "an", _mtp),
    DeepseekV4DSparkConfig: Kind("DSpark", "a", _dspark),
}


def _kind(config: Any) -> Kind:
    told = config.model_type
    known = (kind for made_by, kind in _KINDS.items() if made_by.model_type == told)
    return next(known, Kind(told, "an" if told[:1] in tuple("aeiou") else "a", _somebodys_own))
