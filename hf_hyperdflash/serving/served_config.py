"""A drafter's configuration as vLLM reads it, and what of drafters vLLM cannot run: said before weights are loaded."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from ..runtime.configuration_hyperdflash import HyperDFlashConfig
from ..runtime.reach import FULL, SLIDING

# Other drafters of this package, by their model type, and why vLLM's block drafting is not for them.
OTHERS = {
    "specblock": "drafts trees, and vLLM verifies chains",
    "eagle3": "is in this package's own EAGLE-3 layout, which vLLM has another for",
    "deepseek_v4_mtp": "is read from its target's checkpoint, which vLLM drafts with by itself",
    "deepseek_v4_dspark": "is read from its target's checkpoint, which vLLM drafts with by itself",
}


# Those that vLLM computes as transformers does, by test.
_ROPE = ("default", "linear", "yarn", "llama3")


class ServedConfig(HyperDFlashConfig):
    """A [`HyperDFlashConfig`] that says in vLLM's words, too, what vLLM's DFlash drafting reads: `dflash_config`, and
    `n_predict`, from which it takes the number of drafts where a user names none.

    Raises:
        ValueError: If it is of a drafter that vLLM cannot run.
    """

    def _complete(self) -> None:
        super()._complete()
        if self.target_layer_ids is not None and isinstance(self.target_layer_ids, list):
            self.dflash_config = self._in_vllms_words()
            self.n_predict = self.block_size - 1

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        loaded = super().from_dict(config_dict, **kwargs)
        (loaded[0] if isinstance(loaded, tuple) else loaded).check_served()
        return loaded

    def check_served(self) -> None:
        """Raise a `ValueError` if vLLM cannot run such a drafter with any target."""
        for name, value, expected, fix in self._beyond_vllm():
            raise ValueError(f"The drafter's `{name}` is {value!r}, but vLLM serves {expected}: {fix}.")

    def _in_vllms_words(self) -> dict[str, Any]:
        # Our -1 is the last layer before the norm, which vLLM counts like the others.
        layers = [self.target_num_layers - 1 if i == -1 else i for i in self.target_layer_ids or ()]
        words: dict[str, Any] = {"mask_token_id": self.mask_token_id, "target_layer_ids": layers}
        if self.causal_layers != "sliding":
            words["causal"] = self.causal_layers == "all"
        if self.window_from == "slot" and SLIDING in self.kinds:
            words["swa_window_size"] = self.sliding_window
            words["use_swa"] = FULL not in self.kinds
        return words

    def _beyond_vllm(self) -> list[tuple[str, Any, str, str]]:
        """What cannot be served: the field, its value, what can be, and what to do."""
        train = "train a drafter with"
        found: list[tuple[bool, str, str, str]] = [
            (self.sample_from_anchor, "sample_from_anchor", "False", f"{train} `sample_from_anchor=False`"),
            (self.conv_kernel_size > 0, "conv_kernel_size", "0", f"{train} `conv_kernel_size=0`"),
            (self.hidden_act != "silu", "hidden_act", "'silu'", f"{train} `hidden_act='silu'`"),
            (self.hidden_size != self.target_hidden_size, "hidden_size",
             f"the target's, {self.target_hidden_size}", f"{train} `hidden_size={self.target_hidden_size}`"),
            (-1 in (self.target_layer_ids or ()) and not self.target_num_layers, "target_num_layers",
             "drafters that read the target's last layer and say which that is",
             "write the target's `num_hidden_layers` into the drafter's config.json"),
            (reads_paths(self) and self.target_layer_ids != [-1], "target_layer_ids",
             "the residual paths of the last layer alone, [-1]",
             f"{train} `target_layer_ids=[-1]`, or with `reducer='stream_mean'`"),
            (self.causal_layers == "sliding" and SLIDING not in self.kinds, "causal_layers", "'none' or 'all'",
             "write 'none', as no layer is a sliding one"),
            (self.window_from == "anchor" and FULL in self.kinds and SLIDING in self.kinds, "layer_types",
             "layers of one kind where a window counts from the anchor", f"{train} `layer_types=None`"),
        ]  # fmt: skip
        kind = (self.rope_parameters or {}).get("rope_type")
        served = "a `rope_type` of " + ", ".join(_ROPE)
        found.append((kind not in _ROPE, "rope_parameters", served, f"{train} the default one"))
        return [(name, getattr(self, name), expected, fix) for is_beyond, name, expected, fix in found if is_beyond]


def reads_paths(config: Any) -> bool:
    """Whether a drafter, by its configuration, reads more residual paths than one of a layer, each by itself."""
    return getattr(config, "target_hc_mult", 1) > 1 and config.reducer != "stream_mean"


def check_served_pair(config: Any, target: Any, drafts: int, longest: int) -> None:
    """Check that vLLM can run a drafter with a target as it was started.

    Args:
        config: The drafter's [`ServedConfig`], or one with its fields.
        target: The configuration of the target's text model.
        drafts: `num_speculative_tokens`.
        longest: `--max-model-len`.

    Raises:
        ValueError: If not: what it is, what was expected, and what to do.
    """
    for name, drafters, targets in (
        ("vocab_size", config.vocab_size, target.vocab_size),
        ("hidden_size", config.target_hidden_size, target.hidden_size),
        ("num_hidden_layers", config.target_num_layers or target.num_hidden_layers, target.num_hidden_layers),
    ):
        if drafters != targets:
            raise ValueError(
                f"The drafter was made for a target with `{name}` {drafters}, but this target's is {targets}: serve "
                f"the drafter's own target, {config.target_name_or_path or 'whose name it does not say'}."
            )
    deepest = max(config.dflash_config["target_layer_ids"])
    if deepest >= target.num_hidden_layers:
        raise ValueError(
            f"The drafter reads layers {config.target_layer_ids}, but this target's are 0 to "
            f"{target.num_hidden_layers - 1}: serve the drafter's own target."
        )
    paths = getattr(target, "hc_mult", 1)
    if config.target_hc_mult != paths:
        raise ValueError(
            f"The drafter reads {config.target_hc_mult} residual paths of each layer, but this target has {paths}: "
            "serve the drafter's own target."
        )
    trained = config.block_size - 1
    if drafts > trained or (drafts < trained and config.causal_layers != "all"):
        raise ValueError(
            f"`num_speculative_tokens` is {drafts}, but the drafter's block has {trained} draft positions that see "
            f"each other, and vLLM would run another block than was trained: give {trained}, or leave it out."
        )
    window = config.sliding_window
    if window is not None and config.window_from == "anchor" and longest > window:
        raise ValueError(
            f"The drafter's `sliding_window` of {window} counts from the anchor, vLLM's from each slot, and "
            f"`--max-model-len` is {longest}: serve at most {window}, train with `--sliding_window none`, or "
            f'write `"window_from": "slot", "sliding_window": {window + 1}` into its config.json, which hides the '
            f"farthest {config.block_size - 1} of {window} tokens from later slots."
        )


def refusing(model_type: str) -> type[PreTrainedConfig]:
    """A configuration that says why vLLM does not run drafters of a type."""

    def from_dict(cls: Any, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        raise ValueError(
            f"The drafter is a {model_type!r}, which {OTHERS[model_type]}: expected a 'hyperdflash' drafter. Train "
            "one with `hf-hyperdflash train`, or draft with this one in transformers' `generate`."
        )

    return type("RefusedConfig", (PreTrainedConfig,), {"model_type": model_type, "from_dict": classmethod(from_dict)})
