"""Configuration of a HyperDFlash drafter."""

from __future__ import annotations

import math
from typing import Any

from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import RopeParameters

REDUCERS = ("hc_gate", "fc", "hybrid", "stream_mean")


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
        block_size: Anchor plus draft positions: 7 is the paper's six drafted steps (section 3.3).
        draft_vocab_size: How many tokens it can draft, with an LM head of its own for them; 0 for all, with the target's. Only
            for drafters of other formats.
        sample_from_anchor: Whether the anchor's slot drafts as well, so that slot k drafts the token k + 1 after the anchor.
            The paper's does not: slot k drafts the token k after it. Only for drafters of other formats.
        mask_token_id: The token that stands at every draft position of a block's input.
        target_layer_ids: Whose residual paths the drafter reads, ascending: -1 is the last layer's output, the
            pre-collapse residual, which is the paper's source and the default; other numbers are intermediate layers,
            counted from 0.
        reducer: How the paths become the conditioning feature. `"hc_gate"`: the paper's, gates inherited from the
            target's `hc_head` (Eq. 1), per layer read. `"fc"`: vanilla DFlash's dense projection of all paths read.
            `"hybrid"`: ours, the gate of the last layer read plus a normed dense projection of the others (of the same,
            where only one is read), which counts for nothing at first. `"stream_mean"`: the mean over the paths of each layer, then a projection.
        path_norm: Whether a gate normalizes each path before summing (section 2.2, "per-path RMSNorm").
        hc_eps: The target's offset on each gate.
        target_hidden_size: Width of the target; 0 for the drafter's. If it differs from `hidden_size`, the reducer cannot have a gate.
        target_hc_mult: Number of residual paths of the target.
        target_model_type: `config.model_type` of the target.
        target_name_or_path: The target the drafter was made for; binding to another name warns.
        target_revision: Its commit on the Hub, if it came from there.
        target_fingerprint: Digests of its head, its other weights and its configuration, see
            [`~fingerprint.as_words`], `-` for what was not loaded.
        attention_bias: Whether the attention projections have biases.
        initializer_range: Standard deviation of fresh weights.

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
    target_model_type: str = "deepseek_v4"
    target_name_or_path: str = ""
    target_revision: str = ""
    target_fingerprint: str = ""
    attention_bias: bool = False
    initializer_range: float = 0.02

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        if self.target_hidden_size == 0:
            self.target_hidden_size = self.hidden_size
        if self.target_layer_ids is None:
            self.target_layer_ids = [-1]
        self._check_sizes()
        self._check_reducer()

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """As of any configuration, but only from a drafter's: another model's fields would make a drafter of defaults."""
        kind = config_dict.get("model_type", cls.model_type)
        if kind != cls.model_type:
            raise ValueError(
                f"The configuration is of a {kind!r} model, expected {cls.model_type!r}. Pass the path or Hub id of a "
                "HyperDFlash drafter, not of its target or of another model; DFlash drafters of others are read by "
                "`hf_hyperdflash.load_dflash`."
            )
        return super().from_dict(config_dict, **kwargs)

    def _check_sizes(self) -> None:
        for field in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
                      "head_dim", "intermediate_size", "target_hidden_size", "target_hc_mult"):  # fmt: skip
            if getattr(self, field) < 1:
                raise ValueError(f"`{field}` is {getattr(self, field)}, expected at least 1.")
        if self.block_size < 2:
            raise ValueError(
                f"`block_size` is {self.block_size}, expected at least 2: the anchor and one draft position."
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"`num_attention_heads` is {self.num_attention_heads}, expected a multiple of `num_key_value_heads` "
                f"({self.num_key_value_heads})."
            )
        if self.head_dim % 2:
            raise ValueError(f"`head_dim` is {self.head_dim}, expected an even number: RoPE rotates pairs.")
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ValueError(f"`sliding_window` is {self.sliding_window}, expected at least 1, or None for no window.")
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(
                f"`mask_token_id` is {self.mask_token_id}, outside the vocabulary of {self.vocab_size} tokens. "
                "Pass the id of a token that never occurs in text."
            )

    def _check_reducer(self) -> None:
        if self.reducer not in REDUCERS:
            raise ValueError(f"`reducer` is {self.reducer!r}, expected one of {REDUCERS}.")
        ids = self.target_layer_ids
        order = [math.inf if i == -1 else i for i in ids or []]  # the last layer comes last
        if not ids or min(ids) < -1 or order != sorted(set(order)):
            raise ValueError(
                f"`target_layer_ids` is {ids}, expected ascending layer numbers from 0, each once, and -1, the "
                "pre-collapse residual, at the end: [-1], [2] or [2, -1] for example."
            )
        if self.has_gate and self.hidden_size != self.target_hidden_size:
            raise ValueError(
                f"`reducer={self.reducer!r}` needs equal widths, but the drafter's `hidden_size` is {self.hidden_size} and "
                f"the target's {self.target_hidden_size}. Use `reducer='fc'` or the target's width."
            )

    @property
    def has_gate(self) -> bool:
        """Whether the reducer has a gate to inherit."""
        return self.reducer in ("hc_gate", "hybrid")

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
