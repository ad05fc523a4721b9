"""What drafters are, in words for a reader, by their configuration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:  # so that words cost nothing to import
    from transformers import PreTrainedConfig

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


class Words:
    """What the sentences of a kind can name of a drafter as `{of.NAME}`: a field of its configuration, or one of the
    texts below, which is empty where the drafter has no such part."""

    def __init__(self, config: PreTrainedConfig) -> None:
        self.config = config

    def __getattr__(self, name: str) -> Any:
        return getattr(self.config, name)

    @property
    def reducer(self) -> str:
        has_gate = self.target_hc_mult > 1
        # The mean over one stream is itself.
        name = "fc" if getattr(self.config, "any_streams", False) and not has_gate else self.config.reducer
        origin = (
            "inherited from the target's `hc_head`" if has_gate else "learned from nothing, as the target has none"
        )
        return _REDUCERS[name].format(layers=self.layers, origin=origin)

    @property
    def layers(self) -> str:
        """What it reads of the target."""
        if getattr(self.config, "usual_layers", False):
            return "the residual streams after layer 1, one in the middle and the fourth from the end"
        ids = self.target_layer_ids or []
        before = [str(layer) for layer in ids if layer >= 0]
        parts = ["the embeddings"] if min(ids, default=0) < -1 else []
        if before:
            parts.append(f"the residual streams after layer{'s' if len(before) > 1 else ''} {in_words(before)}")
        return " and ".join([*parts, *(["the pre-collapse residual"] if -1 in ids else [])])

    @property
    def head(self) -> str:
        if self.sequential_head == "none":
            return ""
        of = f", which chooses among the block's {count} best tokens" if (count := self.head_candidates) else ""
        head = f"`{self.sequential_head}` head of width {self.head_rank}{of}"
        return f"Each draft knows the one before it through a {head}."

    @property
    def confidence(self) -> str:
        if not self.confidence_head:
            return ""
        calibrated = ", calibrated on held-out prompts" if self.confidence_temperatures else ""
        return f"It says how probable each draft's acceptance is{calibrated} (`DraftTree.confidence`)."

    @property
    def mechanisms(self) -> str:
        """SpecBlock's."""
        named = {
            "slots that take in the one before them": self.shift,
            "conditions that all slots are told": self.broadcast,
            "a rank head that says how many tokens to try at each": self.rank_head,
        }
        has = [name for name, there in named.items() if there]
        return f", with {in_words(has)}" if has else ""


def in_words(names: Sequence[str], last: str = "and") -> str:
    """Return names as a sentence has them: `"a, b and c"`, with the word `last` before the last one."""
    return f" {last} ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))


def title_block(config: PreTrainedConfig) -> str:
    """Return what tells a drafter of blocks from others, by its configuration: reducer, layers and head."""
    head = "" if config.sequential_head == "none" else f", {config.sequential_head} head"
    if config.reducer == "hybrid":
        return f"HyperDFlash hybrid{head}"
    if config.reducer != "hc_gate":
        return f"Vanilla DFlash{head}"
    layers = config.target_layer_ids
    read = "" if layers == [-1] else f" on {', '.join(map(str, layers or ()))}"
    return f"HyperDFlash{read}{head}"
