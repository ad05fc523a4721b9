"""The kinds of drafters, an entry each: what it is called, what loads it, who else writes and serves it.

Every place that treats kinds differently asks here. A new kind is its file in `drafters/`, an entry in `KINDS` and a
test. Entries name classes and modules; these are imported when they are first asked for, so that this file costs
nothing to import.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any

from .descriptions import Description, Words, title_block

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_PACKAGE = __package__.rpartition(".")[0]


@dataclass(frozen=True)
class DrafterKind:
    """A kind of drafter."""

    name: str
    model_type: str  # in the config.json that this package saves
    drafter_path: str  # its class, from the package on
    drafts: str  # how many tokens, and in how many passes: a text of [`Words`], as the sentences
    sentences: tuple[str, ...]  # how it drafts, and what it reads
    config_path: str = ""  # of its configuration, unless that is transformers' own
    article: str = "a"  # before its name
    title: Callable[[Any], str] | None = None  # what tells it from others beside it, if its name does not
    reads: tuple[str, ...] = ()  # other programs' layouts; the first that fits a config.json counts
    known_as: tuple[str, ...] = ()  # the methods that these hold
    shares_all: bool = True  # whether, with the target's whole vocabulary, it has no LM head of its own
    files: tuple[str, ...] = ()  # where they have weights beside `model.safetensors`; of a pickle no code is run
    writes: Mapping[str, str] = field(default_factory=dict)  # other programs' layouts, by their names
    trains: bool = False  # whether the trainer takes it
    train_flags: tuple[str, ...] | None = None  # of `hf-hyperdflash train` for a new one alone; none if it makes none
    why_not_served: str = ""  # by our plugins for serving engines

    def __str__(self) -> str:
        return f"{self.article} {self.name} drafter"

    @property
    def drafter(self) -> Any:
        """Its class."""
        return named(self.drafter_path)

    @property
    def config(self) -> type[PreTrainedConfig]:
        """The class of its configuration."""
        return named(self.config_path) if self.config_path else self.drafter.config_class

    @property
    def class_name(self) -> str:
        return self.drafter_path.rpartition(".")[2]


_OF_GEMMA4 = (
    "It is Google's assistant of its target: {of.text_config.num_hidden_layers} layers without keys of their own "
    "attend over the target's, and each pass goes on from the state of the pass before it.",
    "transformers reads these files, too (`AutoModelForCausalLM`).",
)
KINDS = (
    DrafterKind(
        name="HyperDFlash",
        model_type="hyperdflash",
        drafter_path="drafters.blocks.modeling_hyperdflash.HyperDFlashDrafter",
        config_path="drafters.blocks.configuration_hyperdflash.HyperDFlashConfig",
        drafts="{of.max_draft_tokens} tokens in one pass",
        sentences=("{of.reducer}", "{of.head}", "{of.confidence}"),
        title=title_block,
        reads=(
            "hub.layouts.muse.LAYOUT", "hub.layouts.speculators.LAYOUT", "hub.layouts.zlab.DEEPSPEC",
            "hub.layouts.zlab.LAYOUT",
        ),
        known_as=("DFlash", "DFlash 2", "DSpark", "Domino", "JetSpec"),
        writes={
            "z-lab": "hub.layouts.zlab.LAYOUT",
            "speculators": "hub.layouts.speculators.LAYOUT",
            "deepspec": "hub.layouts.zlab.DEEPSPEC",
        },
        trains=True,
        train_flags=(
            "sliding_window", "mask_token_id", "num_draft_tokens", "sample_from_anchor", "causal_layers",
            "conv_kernel_size",
            "sequential_head", "head_rank", "head_candidates", "confidence_head",
        ),
    ),
    DrafterKind(
        name="SpecBlock",
        model_type="specblock",
        drafter_path="drafters.unrolled.modeling_specblock.SpecBlockDrafter",
        config_path="drafters.unrolled.configuration.SpecBlockConfig",
        drafts="up to {of.max_draft_tokens} tokens in {of.max_blocks} passes of {of.block_size}",
        sentences=(
            "It is a SpecBlock drafter: passes of {of.block_size} draft positions that know their "
            "path{of.mechanisms}.",
            "{of.reducer}",
        ),
        reads=("hub.layouts.specblock.LAYOUT",),
        known_as=("SpecBlock",),
        trains=True,
        train_flags=("block_size", "max_blocks", "shift", "broadcast", "rank_head"),
        why_not_served="drafts trees, and {engine} verifies chains",
    ),
    DrafterKind(
        name="P-EAGLE",
        model_type="peagle",
        drafter_path="drafters.unrolled.modeling_peagle.PEagleDrafter",
        config_path="drafters.unrolled.configuration.PEagleConfig",
        drafts="{of.max_draft_tokens} tokens in one pass",
        sentences=(
            "It is a P-EAGLE drafter: EAGLE-3's layers, with a mask in place of what is not known yet, so that no "
            "draft knows the other drafts.",
            "{of.reducer}",
        ),
        reads=("hub.layouts.eagle3.PEAGLE_FLAT", "hub.layouts.eagle3.PEAGLE_SPECULATORS"),
        known_as=("P-EAGLE",),
        trains=True,
        train_flags=("max_blocks", "mask_token_id"),
        why_not_served="is in this package's own P-EAGLE layout, which {engine} has another for",
    ),
    DrafterKind(
        name="EAGLE-3",
        article="an",
        model_type="eagle3",
        drafter_path="drafters.unrolled.modeling_eagle3.Eagle3Drafter",
        config_path="drafters.unrolled.configuration.Eagle3Config",
        drafts="up to {of.max_draft_tokens} tokens, a pass for each",
        sentences=(
            "It is an EAGLE-3 drafter: a pass drafts one token and goes on from its own state; its draft tree keeps "
            "{of.tree_width} nodes of each level.",
            "{of.reducer}",
        ),
        reads=("hub.layouts.eagle3.FLAT", "hub.layouts.eagle3.SPECULATORS"),
        known_as=("EAGLE-3",),
        files=("pytorch_model.bin",),  # which SafeAILab's drafters are released as
        trains=True,
        train_flags=("max_blocks",),
        why_not_served="is in this package's own EAGLE-3 layout, which {engine} has another for",
    ),
    DrafterKind(
        name="Medusa",
        model_type="medusa_heads",
        drafter_path="drafters.blocks.modeling_medusa.MedusaDrafter",
        config_path="drafters.blocks.modeling_medusa.MedusaConfig",
        drafts="{of.medusa_num_heads} tokens in one pass",
        sentences=(
            "It has Medusa heads on the target's last state, one for each draft, and none knows the other drafts.",
        ),
        shares_all=False,
        reads=("hub.layouts.medusa.LAYOUT",),
        known_as=("Medusa",),
        files=("medusa_lm_head.safetensors", "medusa_lm_head.pt"),
        why_not_served="is in its authors' layout, which {engine} has another for",
    ),
    DrafterKind(
        name="MTP",
        article="an",
        model_type="deepseek_v4_mtp",
        drafter_path="drafters.deepseek_v4.modeling_mtp.DeepseekV4MTPDrafter",
        config_path="drafters.deepseek_v4.configuration.DeepseekV4MTPConfig",
        drafts="as many tokens as are asked for (3 if not said), a pass for each",
        sentences=("It is DeepSeek-V4's own multi-token-prediction block, on the target's pre-collapse residual.",),
        trains=True,
        why_not_served="is read from its target's checkpoint, which {engine} drafts with by itself",
    ),
    DrafterKind(
        name="MTP head",
        article="an",
        model_type="mtp_heads",
        drafter_path="drafters.mtp.modeling_mtp.MTPDrafter",
        config_path="drafters.mtp.configuration.MTPConfig",
        drafts="up to {of.max_draft_tokens} tokens, a pass for each",
        sentences=(
            "It is the multi-token-prediction heads of its target's own checkpoint, {of.num_heads} in number, on the "
            "state after the target's final norm.",
        ),
        trains=True,
        why_not_served="is read from its target's checkpoint, which {engine} drafts with by itself",
    ),
    DrafterKind(
        name="DSpark",
        model_type="deepseek_v4_dspark",
        drafter_path="drafters.deepseek_v4.modeling_dspark.DeepseekV4DSparkDrafter",
        config_path="drafters.deepseek_v4.configuration.DeepseekV4DSparkConfig",
        drafts="{of.max_draft_tokens} tokens in one pass",
        sentences=(
            "It is DeepSeek-V4's DSpark drafter: {of.num_hidden_layers} V4 blocks over the mean of {of.layers}, each "
            "draft knowing the one before it through a Markov head of rank {of.head_rank}.",
            "{of.confidence}",
        ),
        trains=True,
        why_not_served="is read from its target's checkpoint, which {engine} drafts with by itself",
    ),
    DrafterKind(
        name="Gemma 4 assistant",
        model_type="gemma4_assistant",
        drafter_path="drafters.gemma4.Gemma4AssistantDrafter",
        drafts="as many tokens as are asked for, a pass for each",
        sentences=_OF_GEMMA4,
        shares_all=False,
        known_as=("Gemma 4 assistants",),
    ),
    DrafterKind(
        name="Gemma 4 Unified assistant",
        model_type="gemma4_unified_assistant",
        drafter_path="drafters.gemma4.Gemma4UnifiedAssistantDrafter",
        drafts="as many tokens as are asked for, a pass for each",
        sentences=_OF_GEMMA4,
        shares_all=False,
        known_as=(),
    ),
)  # fmt: skip
TRAINED = tuple(kind for kind in KINDS if kind.trains)


def kind_in(fields: Mapping[str, Any]) -> DrafterKind | None:
    """Return the kind of a drafter that this package saved, by its config.json; `None` if it is none. Its class counts
    as well as its `model_type`, which early MTP drafters have from their target."""
    said = (fields.get("model_type"), *(fields.get("architectures") or ()))
    return next((kind for kind in KINDS if kind.model_type in said or kind.class_name in said), None)


def kind_of(config: PreTrainedConfig) -> DrafterKind | None:
    """Return the kind of a drafter with this configuration, which may be the class that came with it; `None` for
    somebody's own kind."""
    return next((kind for kind in KINDS if kind.model_type == config.model_type), None)


def describe(config: PreTrainedConfig) -> Description:
    """Describe a drafter in words, by its configuration."""
    if kind := kind_of(config):
        words = Words(config)
        told = [sentence.format(of=words) for sentence in kind.sentences]
        has_own = getattr(config, "own_embedding", False) or getattr(config, "draft_vocab_size", 0)
        return Description(kind.drafts.format(of=words), list(filter(None, told)), kind.shares_all and not has_own)
    name = config.model_type
    article = "an" if name[:1] in tuple("aeiou") else "a"
    return Description(
        "as many tokens as it makes", [f"It is {article} {name} drafter, of which no more is known here."]
    )


def title(config: PreTrainedConfig) -> str:
    """Return what tells a drafter from others beside it, where the user gives it no name."""
    kind = kind_of(config)
    if kind is None:
        return str(config.model_type)
    return kind.name if kind.title is None else kind.title(config)


def named(path: str) -> Any:
    """Return what an entry names."""
    module, _, name = path.rpartition(".")
    return getattr(import_module(f"{_PACKAGE}.{module}"), name)
