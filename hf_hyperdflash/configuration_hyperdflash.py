"""Configuration of a HyperDFlash drafter."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import RopeParameters

REDUCERS = ("hc_gate", "fc")


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
        mask_token_id: The token that stands at every draft position of a block's input.
        reducer: `"hc_gate"` (Eq. 1, inherited from the target's `hc_head`) or `"fc"` (a dense projection).
        path_norm: Whether `"hc_gate"` normalizes each path before summing (section 2.2, "per-path RMSNorm").
        hc_eps: The target's offset on each gate.
        target_hidden_size: Width of the target; 0 for the drafter's. If it differs from `hidden_size`, the reducer must be `"fc"`.
        target_hc_mult: Number of residual paths of the target.
        target_model_type: `config.model_type` of the target.
        target_name_or_path: The target the drafter was made for; binding to another name warns.
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
    mask_token_id: int = 128799
    reducer: str = "hc_gate"
    path_norm: bool = True
    hc_eps: float = 1e-6
    target_hidden_size: int = 0
    target_hc_mult: int = 4
    target_model_type: str = "deepseek_v4"
    target_name_or_path: str = ""
    attention_bias: bool = False
    initializer_range: float = 0.02

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        if self.target_hidden_size == 0:
            self.target_hidden_size = self.hidden_size
        self._check_sizes()
        self._check_reducer()

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
        if self.reducer == "hc_gate" and self.hidden_size != self.target_hidden_size:
            raise ValueError(
                f"`reducer='hc_gate'` needs equal widths, but the drafter's `hidden_size` is {self.hidden_size} and "
                f"the target's {self.target_hidden_size}. Use `reducer='fc'` or the target's width."
            )

    @property
    def max_draft_tokens(self) -> int:
        """The most tokens one round can draft: every slot of the block but the anchor's."""
        return self.block_size - 1
