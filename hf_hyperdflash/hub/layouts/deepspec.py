"""The layout of deepseek-ai/DeepSpec: DSpark, a flat Qwen3 configuration and copies of the target's embedding and LM
head. Every input of a block drafts, the anchor too. It counts layers as we do, and -1 is the embedding's output."""

from __future__ import annotations

from pathlib import Path

from ...drafters.blocks.configuration_hyperdflash import HyperDFlashConfig
from ...drafters.parts.block_attention import FULL
from .lines import DSPARK, ROPE, SOFT_CAP, TARGET_DEPTH, served_by_both, shape
from .table import Entry, Fields, Given, Layout, always, marked
from .zlab import (
    BLOCK_SIZE,
    CAUSAL,
    CHANGES_DRAFTS,
    HEADS,
    IGNORES,
    LAYERS_READ,
    MASK,
    MORE,
    PREFIX,
    PROJECTOR,
    SECTIONS,
    rename,
)

_ARCHITECTURE = "Qwen3DSparkModel"


def _check_architecture(given: Given) -> Fields:
    if _ARCHITECTURE not in given.architectures.split():
        raise ValueError(
            f"{given.name} is a {', '.join(given.top['architectures'])}, whose layers are not Qwen3's, which is not "
            f"supported: expected {_ARCHITECTURE}."
        )
    return {}


def served(config: HyperDFlashConfig, folder: Path) -> str:
    """Return the options with which engines serve it."""
    if config.sequential_head != "markov":
        return "vLLM and SGLang serve DSpark's 'markov' head alone."
    speculative = {"method": "dspark", "model": str(folder), "num_speculative_tokens": config.max_draft_tokens}
    sglang = f"--speculative-algorithm DSPARK --speculative-draft-model-path {folder}"
    return served_by_both(config, speculative, f"{sglang} --speculative-dspark-block-size {config.block_size}")


LAYOUT = Layout(
    fits=marked(_ARCHITECTURE, "Gemma4DSparkModel"),
    config=HyperDFlashConfig,
    table=(
        Entry((), _check_architecture, lambda config: {"architectures": [_ARCHITECTURE]}),
        PROJECTOR,
        shape(),
        # The program knows no window.
        always("layer_types", lambda config: [FULL] * config.num_hidden_layers),
        always("sliding_window", lambda config: None),
        always("use_sliding_window", lambda config: False),
        ROPE,
        TARGET_DEPTH,
        BLOCK_SIZE,
        MASK,
        LAYERS_READ,
        SOFT_CAP,
        always("num_anchors", lambda config: 512),  # of its training, without which it does not load
        HEADS._replace(write=DSPARK.write),
        Entry(CAUSAL.names, CAUSAL.read),
        *MORE,
    ),
    sections=SECTIONS,
    prefix=PREFIX,
    changes_drafts=CHANGES_DRAFTS,
    ignores=IGNORES,
    rename=rename,
    copies_target=True,
    served=served,
)
