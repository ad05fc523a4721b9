"""Configuration of a HyperDFlash drafter."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import fields
from difflib import get_close_matches
from typing import Any

from transformers import PreTrainedConfig
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, RopeParameters

from .heads import HEADS
from .reach import CAUSAL_LAYERS, FULL, LAYER_KINDS, SLIDING, WINDOW_FROM, Reach
from .reducers import REDUCERS
from .version import __version__, series

logger = logging.getLogger(__name__)

# Lowest and highest values: beyond any model, within what can be tried without filling a machine's memory.
_BOUNDS = {
    "vocab_size": (1, 2**24), "draft_vocab_size": (0, 2**24), "hidden_size": (1, 2**17), "target_hidden_size": (0,
    2**17),
    "intermediate_size": (1, 2**20), "num_hidden_layers": (1, 2**10), "num_attention_heads": (1, 2**12),
    "num_key_value_heads": (1, 2**12), "head_dim": (1, 2**13), "target_hc_mult": (1, 2**8), "block_size": (2, 2**12),
    "max_position_embeddings": (1, 2**40), "sliding_window": (1, 2**40), "head_rank": (1, 2**14),
    "head_candidates": (0, 2**24), "conv_kernel_size": (0, 2**6), "conv_group_size": (1, 2**17),
    "target_num_layers": (0, 2**16),
}  # fmt: skip
_WHY = {
    "block_size": ": the anchor and at least one draft position",
    "sliding_window": ", or None for no window",
    "head_candidates": ", 0 for the whole vocabulary",
    "conv_kernel_size": ", 0 for no convolution",
}
# By transformers, in any model's config.json.
_WRITTEN_BESIDE = ("auto_map", "torch_dtype", "quantization_config", "use_cache")
_TYPES: dict[str, tuple[Any, str]] = {
    "int": (int, "an integer"),
    "float": ((int, float), "a number"),
    "bool": (bool, "True or False"),
    "str": (str, "a string"),
}


def _check_type(name: str, value: Any) -> None:
    kind, *others = HyperDFlashConfig.__annotations__.get(name, "Any").split(" | ")
    if kind in _TYPES and not (value is None and others):
        of_type, expected = _TYPES[kind]
        if not isinstance(value, of_type) or (isinstance(value, bool) and kind != "bool"):
            raise ValueError(f"`{name}` is {value!r}, expected {expected}{' or None' if others else ''}.")
        if kind == "float" and not 0 <= value < math.inf:
            raise ValueError(f"`{name}` is {value}, expected a finite number of at least 0.")
    if name == "rope_parameters" and not isinstance(value, (dict, type(None))):
        raise ValueError(f"`rope_parameters` is {value!r}, expected a dictionary with `rope_theta`.")


def check_layer_ids(ids: Any) -> None:
    """Raise a `ValueError` if `ids` are not layers that a drafter can read."""
    if not isinstance(ids, list) or not all(type(i) is int for i in ids):
        raise ValueError(
            f"`target_layer_ids` is {ids!r}, expected a list of layer numbers: [-1] or [2, -1], for example."
        )
    order = [math.inf if i == -1 else i for i in ids]  # the last layer comes last
    if not ids or min(ids) < -1 or order != sorted(set(order)):
        raise ValueError(
            f"`target_layer_ids` is {ids}, expected ascending layer numbers from 0, each once, and -1, the "
            "pre-collapse residual, at the end: [-1], [2] or [2, -1] for example."
        )


def check_temperatures(temperatures: Any, drafts: int) -> None:
    """Raise a `ValueError` if `temperatures` are not those of so many draft positions, or `None`."""
    if temperatures is not None and not (
        isinstance(temperatures, list)
        and len(temperatures) == drafts
        and all(type(t) in (int, float) and 0 < t < math.inf for t in temperatures)
    ):
        raise ValueError(
            f"`confidence_temperatures` is {temperatures!r}, expected None or {drafts} positive numbers, one per "
            "draft position, as `hf-hyperdflash calibrate` writes them."
        )


class HyperDFlashConfig(PreTrainedConfig):
    r"""Shape of a drafter and of the target it reads.

    Args:
        vocab_size: Vocabulary of the target, whose embedding and LM head the drafter shares.
        hidden_size: Width of the drafter's layers.
        num_hidden_layers: Number of drafter layers. The context is injected in each.
        num_attention_heads: Query heads.
        num_key_value_heads: Key and value heads, a divisor of `num_attention_heads`.
        head_dim: Width of a head.
        intermediate_size: Width of the MLP.
        hidden_act: Activation of the MLP.
        rms_norm_eps: Epsilon of every RMSNorm, the reducer's included.
        rope_parameters: RoPE of the drafter; positions are the target's true positions.
        max_position_embeddings: Longest position RoPE is made for.
        sliding_window: How many context positions before the anchor a block sees; `None` for all.
        layer_types: `"full_attention"` or `"sliding_attention"` for each layer, where only the latter have the window;
            `None` if all are alike. Mixed ones, and the next two, are DFlash drafters' of other formats.
        causal_layers: In which layers a slot sees only those before it of its block: `"none"`, `"sliding"` or `"all"`.
        window_from: Where the window begins: `"anchor"`, or each `"slot"`, which is then counted in (see [`Reach`]).
        block_size: Anchor plus draft positions: 7 is the paper's six drafted steps (section 3.3).
        draft_vocab_size: How many tokens it can draft, with an LM head of its own for them; 0 for all, with the
            target's. Only for drafters of other formats.
        sample_from_anchor: Whether the anchor's slot drafts as well, so that slot k drafts the token k + 1 after the
            anchor and 7 inputs give 7 drafts (DSpark). The paper's does not: slot k drafts the token k after it.
        mask_token_id: The token that stands at every draft position of a block's input.
        target_layer_ids: Whose residual paths the drafter reads, ascending: -1 is the last layer's output, the
            pre-collapse residual, which is the paper's source and the default; other numbers are intermediate layers,
            counted from 0.
        reducer: How the paths become the conditioning feature. `"hc_gate"`: the paper's, gates inherited from the
            target's `hc_head` (Eq. 1), per layer read. `"fc"`: vanilla DFlash's dense projection of all paths read.
            `"hybrid"`: ours, the gate of the last layer read plus a normed dense projection of the others (of the
            same, where only one is read), which counts for nothing at first. `"stream_mean"`: the mean over the paths
            of each layer, then a projection.
        path_norm: Whether a gate normalizes each path before summing (section 2.2, "per-path RMSNorm").
        hc_eps: The target's offset on each gate.
        target_hidden_size: Width of the target; 0 for the drafter's. If it differs from `hidden_size`, the reducer
            cannot have a gate.
        target_hc_mult: Number of residual paths of the target.
        target_num_layers: Number of the target's layers, 0 if not known; other programs' layouts say it.
        target_model_type: `config.model_type` of the target.
        target_name_or_path: The target the drafter was made for; binding to another name warns.
        target_revision: Its commit on the Hub, if it came from there.
        target_fingerprint: Digests of its head, its other weights and its configuration, see
            [`~training.fingerprint.as_words`], `-` for what was not loaded.
        sequential_head: What lets each draft know the one before it, `"none"` or one of [`~heads.HEADS`]: `"markov"`,
            `"gated_markov"`, `"recurrent"` (DSpark's), `"selector"` (DFlash 2's), `"state"` (ours).
        head_rank: Width of the head: rank of its tables, or of the state head's correction.
        head_candidates: Among how many of the block's own best tokens a draft is chosen where there is a head; 0 for
            all. By default 16 for `"selector"` (or the vocabulary), 1,024 for `"state"` with more than 8,192 tokens,
            and all for the others.
        conv_kernel_size: Taps of the causal convolutions around attention and MLP of every layer (DFlash 2: 2); 0 for
            none.
        conv_group_size: Channels that share a convolution's dynamic kernel, a divisor of `hidden_size`.
        confidence_head: Whether the drafter says how probable the acceptance of each draft is (DSpark).
        confidence_reads_token: Whether that depends on the token before, too, where there is a sequential head.
        confidence_temperatures: One per draft position, which the confidence's logits are divided by, as
            `hf-hyperdflash calibrate` fits them; `None` for 1.
        attention_bias: Whether the attention projections have biases.
        initializer_range: Standard deviation of fresh weights.
        bos_token_id, eos_token_id, pad_token_id: The target's, by which transformers' pipelines tell that the two
            share a tokenizer.
        hyperdflash_version: Of the package that saved the drafter.

    Raises:
        ValueError: If a field, or a pair of them, makes no drafter.
    """

    model_type = "hyperdflash"

    vocab_size: int = 129280
    hidden_size: int = 4096
    num_hidden_layers: int = 5
    num_attention_heads: int = 32
    num_key_value_heads: int = 8
    head_dim: int = 128
    intermediate_size: int = 12288
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    rope_parameters: RopeParameters | dict | None = None
    max_position_embeddings: int = 1048576
    sliding_window: int | None = None
    layer_types: list[str] | None = None
    causal_layers: str = "none"
    window_from: str = "anchor"
    block_size: int = 7
    draft_vocab_size: int = 0
    sample_from_anchor: bool = False
    mask_token_id: int = 128799
    target_layer_ids: list[int] | None = None
    reducer: str = "hc_gate"
    path_norm: bool = True
    hc_eps: float = 1e-6
    target_hidden_size: int = 0
    target_hc_mult: int = 4
    target_num_layers: int = 0
    target_model_type: str = "deepseek_v4"
    target_name_or_path: str = ""
    target_revision: str = ""
    target_fingerprint: str = ""
    sequential_head: str = "none"
    head_rank: int = 256
    head_candidates: int | None = None
    conv_kernel_size: int = 0
    conv_group_size: int = 16
    confidence_head: bool = False
    confidence_reads_token: bool = True
    confidence_temperatures: list[float] | None = None
    attention_bias: bool = False
    initializer_range: float = 0.02
    bos_token_id: int | None = None
    eos_token_id: list[int] | int | None = None
    pad_token_id: int | None = None
    hyperdflash_version: str = ""

    def __post_init__(self, **kwargs: Any) -> None:
        self.check_fields({name: getattr(self, name) for name in HyperDFlashConfig.__annotations__})
        self.check_fields({name: kwargs[name] for name in self._unknown(kwargs)})
        super().__post_init__(**kwargs)
        if self.target_hidden_size == 0:
            self.target_hidden_size = self.hidden_size
        if self.target_layer_ids is None:
            self.target_layer_ids = [-1]
        if self.head_candidates is None and self.sequential_head in HEADS:
            drafted = self.draft_vocab_size or self.vocab_size
            self.head_candidates = HEADS[self.sequential_head].candidates_of(drafted)
        self.check()

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """As of any configuration, but only from a drafter's: another model's fields would make a drafter of defaults.

        Raises:
            ValueError: If it is another model's, or a field makes no drafter.
        """
        kind = config_dict.get("model_type", cls.model_type)
        if kind != cls.model_type:
            raise ValueError(
                f"The configuration is of a {kind!r} model, expected {cls.model_type!r}. Pass the path or Hub id of a "
                "HyperDFlash drafter, not of its target or of another model; DFlash drafters of others are read by "
                "`hf_hyperdflash.load_drafter`."
            )
        unknown = cls._unknown(config_dict)
        cls._compare_versions(config_dict, unknown)
        known = {name: value for name, value in config_dict.items() if name not in unknown}
        loaded = super().from_dict(known, **kwargs)
        (loaded[0] if isinstance(loaded, tuple) else loaded).check()  # what `kwargs` changed too
        return loaded

    @classmethod
    def _unknown(cls, given: Iterable[str]) -> list[str]:
        """Those names that are no field of ours, and none that transformers has or writes in every configuration."""
        names = [name for name in given if name not in _WRITTEN_BESIDE]
        plain = cls() if names else None
        return [name for name in names if not hasattr(plain, name)]

    @classmethod
    def _compare_versions(cls, config_dict: dict[str, Any], unknown: list[str]) -> None:
        """Warn where the file may say what this version does not understand."""
        saved = str(config_dict.get("hyperdflash_version") or "")
        if unknown or series(saved) > series(__version__):
            logger.warning(
                "The drafter was saved by hf_hyperdflash %s, and this is %s%s. Install that version, or let the "
                "drafter bring its own code: `AutoModel.from_pretrained(..., trust_remote_code=True)`.",
                saved or "of an unknown version",
                __version__,
                f", which ignores its {', '.join(unknown)}" if unknown else "",
            )

    @classmethod
    def check_fields(cls, given: Mapping[str, Any]) -> None:
        """Check fields by themselves, before anything is made of them.

        Raises:
            ValueError: If a name in `given` is no field (the nearest is told), or its value is not what it takes.
        """
        known = [field.name for field in fields(cls)]
        for name, value in given.items():
            if name not in known:
                near = get_close_matches(name, known, 1)
                raise ValueError(
                    f"`{name}` is no field of `{cls.__name__}`{f': did you mean `{near[0]}`?' if near else '.'}"
                )
            _check_type(name, value)
            lowest, highest = _BOUNDS.get(name, (-math.inf, math.inf))
            if name in _BOUNDS and value is not None and not lowest <= value <= highest:
                raise ValueError(
                    f"`{name}` is {value}, expected at least {lowest} and at most {highest}{_WHY.get(name, '')}."
                )

    def check(self) -> None:
        """Raise a `ValueError` if a field, or a pair of them, makes no drafter."""
        self.check_fields({name: getattr(self, name) for name in HyperDFlashConfig.__annotations__})
        self._check_sizes()
        self._check_attention()
        self._check_functions()
        self._check_reducer()
        self._check_heads()

    def _check_sizes(self) -> None:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"`num_attention_heads` is {self.num_attention_heads}, expected a multiple of `num_key_value_heads` "
                f"({self.num_key_value_heads})."
            )
        if self.head_dim % 2:
            raise ValueError(f"`head_dim` is {self.head_dim}, expected an even number: RoPE rotates pairs.")
        if self.draft_vocab_size > self.vocab_size:
            raise ValueError(
                f"`draft_vocab_size` is {self.draft_vocab_size}, expected at most the `vocab_size` of "
                f"{self.vocab_size}."
            )
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(
                f"`mask_token_id` is {self.mask_token_id}, outside the vocabulary of {self.vocab_size} tokens. "
                "Pass the id of a token that never occurs in text."
            )

    def _check_attention(self) -> None:
        kinds = self.layer_types
        if kinds is not None and not (
            isinstance(kinds, list) and len(kinds) == self.num_hidden_layers and set(kinds) <= set(LAYER_KINDS)
        ):
            raise ValueError(
                f"`layer_types` is {kinds!r}, expected None or {self.num_hidden_layers} of {LAYER_KINDS}, one per "
                "layer."
            )
        for name, allowed in (("causal_layers", CAUSAL_LAYERS), ("window_from", WINDOW_FROM)):
            if (value := getattr(self, name)) not in allowed:
                raise ValueError(f"`{name}` is {value!r}, expected one of {allowed}.")
        if SLIDING in (kinds or ()) and self.sliding_window is None:
            raise ValueError(
                "`sliding_window` is None, but `layer_types` has sliding attention: expected its window, in tokens."
            )

    def _check_functions(self) -> None:
        if self.hidden_act not in ACT2FN:
            raise ValueError(f"`hidden_act` is {self.hidden_act!r}, expected one of {', '.join(sorted(ACT2FN))}.")
        rope = self.rope_parameters or {}
        kind, theta = rope.get("rope_type"), rope.get("rope_theta")
        if kind not in ("default", *ROPE_INIT_FUNCTIONS):
            raise ValueError(
                f"`rope_parameters` has the `rope_type` {kind!r}, expected default, {', '.join(ROPE_INIT_FUNCTIONS)}."
            )
        if isinstance(theta, bool) or not isinstance(theta, (int, float)) or not 0 < theta < math.inf:
            raise ValueError(f"`rope_parameters` has the `rope_theta` {theta!r}, expected a positive number.")

    def _check_reducer(self) -> None:
        if self.reducer not in REDUCERS:
            raise ValueError(f"`reducer` is {self.reducer!r}, expected one of {tuple(REDUCERS)}.")
        check_layer_ids(self.target_layer_ids)
        if self.has_gate and self.hidden_size != self.target_hidden_size:
            raise ValueError(
                f"`reducer={self.reducer!r}` needs equal widths, but the drafter's `hidden_size` is "
                f"{self.hidden_size} and "
                f"the target's {self.target_hidden_size}. Use `reducer='fc'` or the target's width."
            )

    def _check_heads(self) -> None:
        if self.sequential_head not in ("none", *HEADS):
            raise ValueError(f"`sequential_head` is {self.sequential_head!r}, expected one of {('none', *HEADS)}.")
        vocabulary = self.draft_vocab_size or self.vocab_size
        if (self.head_candidates or 0) > vocabulary:
            raise ValueError(
                f"`head_candidates` is {self.head_candidates}, expected at most the {vocabulary} tokens that can be "
                "drafted."
            )
        if self.conv_kernel_size and not 2 <= self.conv_kernel_size <= self.block_size:
            raise ValueError(
                f"`conv_kernel_size` is {self.conv_kernel_size}, expected 0, or 2 to the `block_size` of "
                f"{self.block_size}."
            )
        if self.conv_kernel_size and self.hidden_size % self.conv_group_size:
            raise ValueError(
                f"`conv_group_size` is {self.conv_group_size}, expected a divisor of the `hidden_size` of "
                f"{self.hidden_size}."
            )
        check_temperatures(self.confidence_temperatures, self.max_draft_tokens)

    @property
    def kinds(self) -> list[str]:
        """The kind of every layer."""
        alike = FULL if self.sliding_window is None else SLIDING
        return self.layer_types or [alike] * self.num_hidden_layers

    def reach(self, kind: str) -> Reach:
        """What slots see in layers of a kind."""
        is_causal = self.causal_layers == "all" or (self.causal_layers == "sliding" and kind == SLIDING)
        return Reach(self.sliding_window if kind == SLIDING else None, self.window_from == "slot", is_causal)

    @property
    def has_gate(self) -> bool:
        """Whether the reducer has a gate to inherit."""
        return REDUCERS[self.reducer].has_gate

    @property
    def num_paths(self) -> int:
        """Residual paths that the drafter reads: `target_hc_mult` of each layer in `target_layer_ids`."""
        return len(self.target_layer_ids or ()) * self.target_hc_mult

    @property
    def max_draft_tokens(self) -> int:
        """The most tokens one round can draft: every slot of the block, but the anchor's only where that drafts."""
        return self.block_size - self.first_slot

    @property
    def first_slot(self) -> int:
        """The slot of a block that drafts the token after the anchor."""
        return 0 if self.sample_from_anchor else 1
