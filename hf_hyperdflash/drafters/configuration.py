"""The configuration of drafters that compute states of their own from the target's residual streams."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import field, fields
from difflib import get_close_matches
from typing import Any

from transformers import PreTrainedConfig
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, RopeParameters

from ..targets.hooks import EMBEDDINGS
from ..version import __version__, series
from .parts.reducers import REDUCERS

logger = logging.getLogger(__name__)

SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
# Fields that transformers writes into any model's config.json.
_WRITTEN_BESIDE = ("auto_map", "torch_dtype", "quantization_config", "use_cache")
_THEIRS = {each.name for each in fields(PreTrainedConfig)}
_TYPES: dict[str, tuple[Any, str]] = {
    "int": (int, "an integer"),
    "float": ((int, float), "a number"),
    "bool": (bool, "True or False"),
    "str": (str, "a string"),
    "RopeParameters": (dict, "a dictionary with `rope_theta`"),
}


def within(default: Any, lowest: float, highest: float, why: str = "") -> Any:
    """Return a field of a drafter's configuration with a range: wider than any model's, but small enough to be tried
    in a machine's memory. `why` ends the message about a value outside of it."""
    return field(default=default, metadata={"range": (lowest, highest), "why": why})


def check_layer_ids(ids: list[int] | None) -> None:
    """Raise a `ValueError` if `ids` are not layers that a drafter can read."""
    if not isinstance(ids, list) or not all(type(i) is int for i in ids):
        raise ValueError(
            f"`target_layer_ids` is {ids!r}, expected a list of layer numbers: [-1] or [2, -1], for example."
        )
    order = [math.inf if i == -1 else i for i in ids]  # the last layer comes last
    if not ids or order != sorted(set(order)) or any(i < -1 and i != EMBEDDINGS for i in ids):
        raise ValueError(
            f"`target_layer_ids` is {ids}, expected ascending layer numbers from 0, each once, and -1, the "
            f"pre-collapse residual, at the end: [-1], [2] or [2, -1] for example; {EMBEDDINGS} is the embeddings."
        )


def rope_of_text(rope: Mapping[str, object] | None) -> dict[str, object] | None:
    """Return RoPE parameters for text, a dictionary of their own. M-RoPE is plain RoPE there: a text's position is the
    same on all three axes."""
    if rope is None:
        return None
    plain = {key: value for key, value in rope.items() if not key.startswith("mrope_")}
    if plain.get("partial_rotary_factor") in (None, 1):
        plain.pop("partial_rotary_factor", None)
    return {**plain, "rope_type": "default"} if plain.get("rope_type") == "mrope" else plain


class WithCode:
    """A drafter or its configuration, whose code [`~drafters.saved.SavedDrafter.save_pretrained`] writes."""

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = None) -> None:
        """Do nothing. Transformers registers a class that it has loaded with a drafter's code, and would then write
        code itself, from files beside the class's own."""


class DrafterConfig(WithCode, PreTrainedConfig):
    r"""Shape of a drafter's layers and of the target that it reads.

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
        rope_parameters: RoPE of the drafter; positions are the target's true positions. With a
            `partial_rotary_factor` below 1 it rotates that part of each head, the first channels.
        max_position_embeddings: The longest position that RoPE is made for.
        draft_vocab_size: How many tokens it can draft, with an LM head of its own for them; 0 for all, with the
            target's LM head. Only for drafters of other formats.
        target_layer_ids: The layers whose residual streams the drafter reads, ascending: -1 is the last layer's
            output, the pre-collapse residual, which is the paper's source and the default; other numbers are
            intermediate layers, counted from 0, and -1,000,000 is what enters the first one, the embeddings.
        reducer: How the streams become the conditioning feature. `"hc_gate"`: the paper's, gates inherited from the
            target's `hc_head` (Eq. 1), per layer read. `"fc"`: vanilla DFlash's dense projection of all streams read.
            `"hybrid"`: ours, the gate of the last layer read plus a normed dense projection of the others (of the
            same, where only one is read), which adds nothing at first. `"stream_mean"`: the mean over the streams of
            each layer, then a projection.
        path_norm: Whether a gate normalizes each stream before summing (section 2.2, "per-path RMSNorm").
        hc_eps: The target's offset on each gate.
        target_hidden_size: Width of the target; 0 for the drafter's. If it differs from `hidden_size`, the reducer
            cannot have a gate.
        target_hc_mult: Number of residual streams of the target.
        final_logit_softcapping: The cap of its logits, c tanh(logits / c): of its own LM head's with a
            `draft_vocab_size`, and otherwise the target's, which has to have the same; `None` for none of its own.
        any_streams: Whether it reads the mean over a target's streams, however many these are: other programs'
            checkpoints do not have the number, and `target_hc_mult` does not count.
        target_num_layers: Number of the target's layers, 0 if not known; other programs' layouts have it.
        target_model_type: `config.model_type` of the target.
        target_name_or_path: The target the drafter was made for; binding to another name warns.
        target_revision: Its commit on the Hub, if it came from there.
        target_fingerprint: Digests of its head, its other weights and its configuration, see
            [`~training.features.fingerprint.short_fingerprint`], `-` for what was not loaded.
        attention_bias: Whether the attention projections have biases.
        initializer_range: Standard deviation of fresh weights.
        bos_token_id, eos_token_id, pad_token_id: The target's. Transformers' pipelines compare them to see that the
            two share a tokenizer.
        hyperdflash_version: The version of the package that saved the drafter.

    Raises:
        ValueError: If a field, or two together, have values that no drafter can have.
    """

    vocab_size: int = within(129280, 1, 2**24)
    hidden_size: int = within(4096, 1, 2**17)
    num_hidden_layers: int = within(5, 1, 2**10)
    num_attention_heads: int = within(32, 1, 2**12)
    num_key_value_heads: int = within(8, 1, 2**12)
    head_dim: int = within(128, 1, 2**13)
    intermediate_size: int = within(12288, 1, 2**20)
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    rope_parameters: RopeParameters | dict | None = None
    max_position_embeddings: int = within(1048576, 1, 2**40)
    draft_vocab_size: int = within(0, 0, 2**24)
    final_logit_softcapping: float | None = within(None, 1e-3, 2**40)
    target_layer_ids: list[int] | None = None
    reducer: str = "hc_gate"
    path_norm: bool = True
    hc_eps: float = 1e-6
    target_hidden_size: int = within(0, 0, 2**17)
    target_hc_mult: int = within(4, 1, 2**8)
    any_streams: bool = False
    target_num_layers: int = within(0, 0, 2**16)
    target_model_type: str = "deepseek_v4"
    target_name_or_path: str = ""
    target_revision: str = ""
    target_fingerprint: str = ""
    attention_bias: bool = False
    initializer_range: float = 0.02
    bos_token_id: int | None = None
    eos_token_id: list[int] | int | None = None
    pad_token_id: int | None = None
    hyperdflash_version: str = ""

    # Transformers looks for other names of a field and for values of single layers, which a drafter has none of, each
    # time that a field is read: 4 us, some forty times a round.
    __getattribute__ = object.__getattribute__

    def __post_init__(self, **kwargs: Any) -> None:
        self._check_each_field()
        self.check_fields({name: kwargs[name] for name in self._unknown(kwargs)})
        self.rope_parameters = rope_of_text(self.rope_parameters)  # transformers writes into what it is given
        super().__post_init__(**kwargs)
        if self.target_hidden_size == 0:
            self.target_hidden_size = self.hidden_size
        if self.target_layer_ids is None:
            self.target_layer_ids = [-1]
        self._complete()
        self.check()

    def _complete(self) -> None:
        """Set the fields that depend on others."""

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Build the configuration as any other, but only from a drafter's fields: another model's would give a drafter
        of defaults."""
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
        (loaded[0] if isinstance(loaded, tuple) else loaded).check()  # with the changes by `kwargs`
        return loaded

    @classmethod
    def _unknown(cls, given: Iterable[str]) -> list[str]:
        """Return the names that are no field of ours, and none that transformers has or writes in any
        configuration."""
        names = [name for name in given if name not in _WRITTEN_BESIDE]
        plain = cls() if names else None
        return [name for name in names if not hasattr(plain, name)]

    @classmethod
    def _compare_versions(cls, config_dict: dict[str, Any], unknown: list[str]) -> None:
        """Warn if the file may have fields that this version does not know."""
        saved = str(config_dict.get("hyperdflash_version") or "")
        if unknown or series(saved) > series(__version__):
            logger.warning(
                "The drafter was saved by hf_hyperdflash %s, and this is %s%s. Install that version or a later one: "
                "`pip install -U hf-hyperdflash`.",
                saved or "of an unknown version",
                __version__,
                f", which ignores its {', '.join(unknown)}" if unknown else "",
            )

    @classmethod
    def check_fields(cls, given: Mapping[str, Any]) -> None:
        """Raise a `ValueError` if a name in `given` is no field (the message has the nearest one), or its value is
        wrong by itself. No configuration has to be built for that."""
        known = {each.name: each for each in fields(cls)}
        for name, value in given.items():
            if name not in known:
                near = get_close_matches(name, known, 1)
                raise ValueError(
                    f"`{name}` is no field of `{cls.__name__}`{f': did you mean `{near[0]}`?' if near else '.'}"
                )
            kind, *others = str(known[name].type).split(" | ")
            if name in _THEIRS or (value is None and others):
                continue
            types, expected = _TYPES.get(kind, (object, ""))
            if not isinstance(value, types) or (isinstance(value, bool) and kind in ("int", "float")):
                raise ValueError(f"`{name}` is {value!r}, expected {expected}{' or None' if others else ''}.")
            if kind == "float" and not 0 <= value < math.inf:
                raise ValueError(f"`{name}` is {value}, expected a finite number of at least 0.")
            if limits := known[name].metadata.get("range"):
                lowest, highest = limits
                if not lowest <= value <= highest:
                    why = known[name].metadata["why"]
                    raise ValueError(f"`{name}` is {value}, expected at least {lowest} and at most {highest}{why}.")

    def _check_each_field(self) -> None:
        self.check_fields({each.name: getattr(self, each.name) for each in fields(self)})

    def check(self) -> None:
        """Raise a `ValueError` if a field, or two together, have values that no drafter can have."""
        self._check_each_field()
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
        if self.hidden_act not in ACT2FN:
            raise ValueError(f"`hidden_act` is {self.hidden_act!r}, expected one of {', '.join(sorted(ACT2FN))}.")
        self._check_rope()
        if self.reducer not in REDUCERS:
            raise ValueError(f"`reducer` is {self.reducer!r}, expected one of {tuple(REDUCERS)}.")
        if self.any_streams and self.reducer != "stream_mean":
            raise ValueError(f"`reducer` is {self.reducer!r}, expected 'stream_mean' with `any_streams`.")
        check_layer_ids(self.target_layer_ids)
        if self.has_gate and self.hidden_size != self.target_hidden_size:
            raise ValueError(
                f"`reducer={self.reducer!r}` needs equal widths, but the drafter's `hidden_size` is "
                f"{self.hidden_size} and the target's {self.target_hidden_size}. Use `reducer='fc'` or the target's "
                "width."
            )

    def _check_rope(self) -> None:
        rope = self.rope_parameters or {}
        kind, theta = rope.get("rope_type"), rope.get("rope_theta")
        if kind not in ("default", *ROPE_INIT_FUNCTIONS):
            raise ValueError(
                f"`rope_parameters` has the `rope_type` {kind!r}, expected default, {', '.join(ROPE_INIT_FUNCTIONS)}."
            )
        if isinstance(theta, bool) or not isinstance(theta, (int, float)) or not 0 < theta < math.inf:
            raise ValueError(f"`rope_parameters` has the `rope_theta` {theta!r}, expected a positive number.")
        factor: Any = rope.get("partial_rotary_factor", 1)
        is_part = isinstance(factor, (int, float)) and not isinstance(factor, bool) and 0 < factor <= 1
        if not is_part or int(self.head_dim * factor) % 2 or int(self.head_dim * factor) == 0:
            raise ValueError(
                f"`rope_parameters` has the `partial_rotary_factor` {factor!r}, expected a part of 1 that is an even "
                f"number of a head's {self.head_dim} channels."
            )
        try:
            if kind != "default":
                ROPE_INIT_FUNCTIONS[kind](self)
        except (KeyError, RuntimeError, TypeError) as error:
            raise ValueError(
                f"`rope_parameters` is {rope}, expected what a `rope_type` of {kind!r} needs for heads of "
                f"{self.head_dim} ({error!r})."
            ) from error

    @property
    def has_gate(self) -> bool:
        """Whether the reducer has a gate, which is inherited from the target."""
        return REDUCERS[self.reducer].has_gate

    @property
    def num_streams(self) -> int:
        """The number of residual streams that it reads, without `any_streams`: `target_hc_mult` of each layer in
        `target_layer_ids`."""
        return len(self.target_layer_ids or ()) * self.target_hc_mult

    @property
    def max_draft_tokens(self) -> int:
        """The most tokens one round can draft."""
        raise NotImplementedError(f"A {type(self).__name__} has no `max_draft_tokens`.")
