"""A drafter's configuration as a serving engine reads it. It refuses drafters that no engine can run, before weights
are loaded."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from ..drafters.blocks.configuration_hyperdflash import HyperDFlashConfig
from ..drafters.parts.block_attention import FULL, SLIDING
from ..hub.kinds import KINDS

# Other drafters of this package, by their model type, and why engines' block drafting is not for them.
OTHERS = {kind.model_type: kind.why_not_served for kind in KINDS if kind.why_not_served}
# RoPE types that engines compute as transformers does; tests compare them.
_ROPE = ("default", "linear", "yarn", "llama3")
TRAIN = "train a drafter with"


class ServedConfig(HyperDFlashConfig):
    """A [`HyperDFlashConfig`] with the additional fields that an engine's DFlash drafting reads. It refuses a drafter
    that the engine cannot run."""

    engine = ""
    drafts_option = ""  # the engine's option for the tokens that are drafted a round
    counts_anchor = False  # whether that option counts the anchor, too
    longest_option = ""  # its option for the longest text

    def _complete(self) -> None:
        super()._complete()
        if self.target_layer_ids is not None and isinstance(self.target_layer_ids, list):
            self._add_engine_fields()

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        loaded = super().from_dict(config_dict, **kwargs)
        (loaded[0] if isinstance(loaded, tuple) else loaded).check_served()
        return loaded

    def check_served(self) -> None:
        """Raise a `ValueError` if the engine cannot run such a drafter with any target."""
        kind = (self.rope_parameters or {}).get("rope_type")
        for is_unsupported, name, expected, fix in [
            (self.sample_from_anchor, "sample_from_anchor", "False", f"{TRAIN} `sample_from_anchor=False`"),
            (self.mask_token_id is None, "mask_token_id", "drafters that read a token at draft positions",
             f"{TRAIN} `mask_token_id`, the id of one that no text has"),
            (self.hidden_act != "silu", "hidden_act", "'silu'", f"{TRAIN} `hidden_act='silu'`"),
            (self.hidden_size != self.target_hidden_size, "hidden_size",
             f"the target's, {self.target_hidden_size}", f"{TRAIN} `hidden_size={self.target_hidden_size}`"),
            (-1 in (self.target_layer_ids or ()) and not self.target_num_layers, "target_num_layers",
             "drafters that read the target's last layer and say which that is",
             "write the target's `num_hidden_layers` into the drafter's config.json"),
            (self.causal_layers == "sliding" and SLIDING not in self.kinds, "causal_layers", "'none' or 'all'",
             "write 'none', as no layer is a sliding one"),
            (self.window_from == "anchor" and FULL in self.kinds and SLIDING in self.kinds, "layer_types",
             "layers of one kind where a window counts from the anchor", f"{TRAIN} `layer_types=None`"),
            (kind not in _ROPE, "rope_parameters", "a `rope_type` of " + ", ".join(_ROPE), f"{TRAIN} the default one"),
            *self._unsupported_by_engine(),
        ]:  # fmt: skip
            if is_unsupported:
                raise ValueError(
                    f"The drafter's `{name}` is {getattr(self, name)!r}, but {self.engine} serves {expected}: {fix}."
                )

    def _add_engine_fields(self) -> None:
        raise NotImplementedError(f"A {type(self).__name__} has no `_add_engine_fields`.")

    def _unsupported_by_engine(self) -> list[tuple[bool, str, str, str]]:
        """Return this engine's limits: whether one is exceeded, the field, what can be served, and the fix."""
        raise NotImplementedError(f"A {type(self).__name__} has no `_unsupported_by_engine`.")


def layers_read(config: PreTrainedConfig) -> list[int]:
    """Return the layers as engines count them: our -1 is the last one, before the norm, and -1 the embeddings."""
    last = config.target_num_layers - 1
    return [last if i == -1 else max(i, -1) for i in config.target_layer_ids or ()]


def check_served_pair(
    kind: type[ServedConfig], config: PreTrainedConfig, target: PreTrainedConfig, drafts: int, longest: int
) -> None:
    """Raise a `ValueError` if an engine cannot run a drafter with a target as it was started, with the block and the
    window that the drafter was trained with, of `drafts` tokens a round, in texts of up to `longest` tokens."""
    layers, streams = target.num_hidden_layers, getattr(target, "hc_mult", 1)
    for name, drafters, targets in (
        ("vocab_size", config.vocab_size, target.vocab_size),
        ("hidden_size", config.target_hidden_size, target.hidden_size),
        ("num_hidden_layers", config.target_num_layers or layers, layers),
    ):
        if drafters != targets:
            raise ValueError(
                f"The drafter was made for a target with `{name}` {drafters}, but this target's is {targets}: serve "
                f"the drafter's own target, {config.target_name_or_path or 'whose name it does not say'}."
            )
    if max(layers_read(config)) >= layers:
        raise ValueError(
            f"The drafter reads layers {config.target_layer_ids}, but this target's are 0 to {layers - 1}: serve the "
            "drafter's own target."
        )
    if config.target_hc_mult != streams:
        raise ValueError(
            f"The drafter reads {config.target_hc_mult} residual streams of each layer, but this target has "
            f"{streams}: serve the drafter's own target."
        )
    trained, more = config.block_size - 1, int(kind.counts_anchor)
    if drafts > trained or (drafts < trained and config.causal_layers != "all"):
        raise ValueError(
            f"`{kind.drafts_option}` is {drafts + more}, but the drafter's block has {trained} draft positions that "
            f"see each other, and {kind.engine} would run another block than was trained: give {trained + more}, or "
            "leave it out."
        )
    window = config.sliding_window
    if window is not None and config.window_from == "anchor" and longest > window:
        raise ValueError(
            f"The drafter's `sliding_window` of {window} counts from the anchor, {kind.engine}'s from each slot, "
            f"and `{kind.longest_option}` is {longest}: serve at most {window}, train with "
            f'`--sliding_window none`, or write `"window_from": "slot", "sliding_window": {window + 1}` into its '
            f"config.json, which hides the farthest {trained} of {window} tokens from later slots."
        )


def refusing(model_type: str, engine: str) -> type[PreTrainedConfig]:
    """Return a configuration class that refuses drafters of a type with the reason."""

    def from_dict(cls: Any, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        raise ValueError(
            f"The drafter is a {model_type!r}, which {OTHERS[model_type].format(engine=engine)}: expected a "
            "'hyperdflash' drafter. Train one with `hf-hyperdflash train`, or draft with this one in transformers' "
            "`generate`."
        )

    return type("RefusedConfig", (PreTrainedConfig,), {"model_type": model_type, "from_dict": classmethod(from_dict)})
