"""The parts of a drafter's blocks: their input, and attention over an injected context."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3MLP,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    eager_attention_forward,
    rotate_half,
)

from ...targets.target import AttentionMask
from .reducers import HCGateReducer, RMSNorm

KeysValues = tuple[torch.Tensor, torch.Tensor]
Rotary = tuple[torch.Tensor, torch.Tensor]  # cosines and sines
ContextLayer = Callable[[torch.Tensor, torch.Tensor], KeysValues]  # adds a pass's keys and values to those before


class DrafterRMSNorm(Qwen3RMSNorm):
    """Qwen3's RMSNorm, bit for bit on a CPU, in one call, for which a GPU has one kernel: a small layer takes as long
    as its kernel launches."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        weight, eps = self.weight, self.variance_epsilon
        if hidden_states.dtype == weight.dtype == torch.float32:
            return nn.functional.rms_norm(hidden_states, weight.shape, weight, eps)
        return weight * nn.functional.rms_norm(hidden_states.float(), weight.shape, None, eps).to(hidden_states.dtype)


def block_inputs(
    tokens: torch.Tensor, positions: torch.Tensor, block_size: int, mask_token_id: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a drafter's input: each anchor followed by mask tokens, at consecutive positions (section 2.1).

    Args:
        tokens: The anchors' token ids, `[batch, anchors]`.
        positions: Their true positions, `[batch, anchors]`.
        block_size: Slots per block, the anchor's included.
        mask_token_id: The token at every draft position; `None` for a drafter that puts a vector of its own there and
            reads no token.

    Returns:
        Token ids and positions, `[batch, anchors * block_size]` each.
    """
    blocks = nn.functional.pad(tokens.unsqueeze(-1), (0, block_size - 1), value=mask_token_id or 0)
    steps = torch.arange(block_size, device=positions.device)
    return blocks.flatten(1), (positions.unsqueeze(-1) + steps).flatten(1)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate as many of the first channels of each head as there are angles for."""
    width = cos.shape[-1]
    if width == x.shape[-1]:
        return x * cos + rotate_half(x) * sin
    turned, rest = x[..., :width], x[..., width:]
    return torch.cat([turned * cos + rotate_half(turned) * sin, rest], dim=-1)


class HyperDFlashAttention(nn.Module):
    """Attention of a block over the injected context and, in both directions, over itself.

    It goes through transformers' attention interface: `config._attn_implementation` chooses.

    Args:
        config: The drafter's.
        input_width: Width of its input; the drafter's if left out.
    """

    is_causal = False

    def __init__(self, config: PreTrainedConfig, input_width: int | None = None) -> None:
        super().__init__()
        width, dim = input_width or config.hidden_size, config.head_dim
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.config, self.head_dim, self.scaling = config, dim, dim**-0.5
        self.num_key_value_groups = heads // kv_heads
        self.q_proj = nn.Linear(width, heads * dim, bias=config.attention_bias)
        self.k_proj = nn.Linear(width, kv_heads * dim, bias=config.attention_bias)
        self.v_proj = nn.Linear(width, kv_heads * dim, bias=config.attention_bias)
        self.o_proj = nn.Linear(heads * dim, config.hidden_size, bias=config.attention_bias)
        self.q_norm, self.k_norm = (
            DrafterRMSNorm(dim, eps=config.rms_norm_eps) if config.qk_norm else nn.Identity() for _ in range(2)
        )

    def keys_values(self, hidden: torch.Tensor, rotary: Rotary) -> KeysValues:
        """Return keys and values `[batch, config.num_key_value_heads, seq, config.head_dim]` of context or block
        states."""
        keys = self.k_norm(self._heads(self.k_proj(hidden))).transpose(1, 2)
        values = self._heads(self.v_proj(hidden)).transpose(1, 2)
        return _rotate(keys, *rotary), values

    def forward(
        self,
        hidden: torch.Tensor,
        feature: torch.Tensor | None,
        rotary: Rotary,
        context: ContextLayer | None,
        attention_mask: AttentionMask | None,
    ) -> torch.Tensor:
        length, cos, sin = hidden.shape[1], *rotary
        keys, values = self.keys_values(hidden if feature is None else torch.cat([feature, hidden], dim=1), rotary)
        if context is not None:
            keys, values = context(keys, values)
        queries = self.q_norm(self._heads(self.q_proj(hidden))).transpose(1, 2)
        queries = _rotate(queries, cos[..., -length:, :], sin[..., -length:, :])
        attend = getattr(attention_mask, "attend", None)  # of a mask in pieces
        if attend is None:
            attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        out, _ = attend(self, queries, keys, values, attention_mask, scaling=self.scaling, is_causal=False)
        return self.o_proj(out.flatten(2))

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(*x.shape[:-1], -1, self.head_dim)


class HyperDFlashRotaryEmbedding(Qwen3RotaryEmbedding):
    """RoPE whose frequencies stay float32 in a drafter of another dtype: rounded to bfloat16, they turn the queries
    and keys of position 1,000 by up to a radian too far.

    Its cosines and sines are for all heads, `[batch, 1, seq, channels]`, computed once for all layers. With a
    `partial_rotary_factor` the channels are that part of `config.head_dim`, the first ones (as GLM's and Qwen3.5's).
    """

    @staticmethod
    def compute_default_rope_parameters(
        config: PreTrainedConfig, *_: object, **__: object
    ) -> tuple[torch.Tensor, float]:
        # Qwen3's rotates all of a head, whatever the factor.
        rope = config.rope_parameters
        width = int(config.head_dim * rope.get("partial_rotary_factor", 1.0))
        return 1.0 / rope["rope_theta"] ** (torch.arange(0, width, 2, dtype=torch.float) / width), 1.0

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> Rotary:
        cos, sin = super().forward(x, position_ids)
        return cos.unsqueeze(1), sin.unsqueeze(1)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> HyperDFlashRotaryEmbedding:
        return super()._apply(lambda tensor: fn(tensor) if tensor.is_meta else tensor.to(fn(tensor).device), recurse)


def reset_reducer(module: nn.Module, std: float) -> None:
    """Reset a reducer's module: its gates to half open on every stream, near the mean of the streams, where `hc_head`
    starts too; its norm to zero, so that it adds nothing yet. Other modules stay as they are."""
    if isinstance(module, HCGateReducer):
        init.normal_(module.hc_fn, mean=0.0, std=std)
        init.zeros_(module.hc_base)
        init.ones_(module.hc_scale)
    elif isinstance(module, RMSNorm):
        init.zeros_(module.weight)


class CausalConvolution(nn.Module):
    """Convolves the slots of a block with a few taps, before and after a sublayer. Each channel has a kernel, and each
    group of channels a dynamic one, which is computed from the sublayer's input (DFlash 2)."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__()
        self.block_size, self.taps = config.block_size, config.conv_kernel_size
        self.groups = config.hidden_size // config.conv_group_size
        self.base_kernel = nn.Parameter(torch.empty(2, self.taps, config.hidden_size))
        self.kernel_projection = nn.Linear(config.hidden_size, 2 * self.taps * self.groups, bias=False)

    def forward(self, hidden: torch.Tensor, sublayer: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Run a sublayer between the two convolutions, over `[batch, blocks * config.block_size,
        config.hidden_size]`."""
        dynamic = self.kernel_projection(hidden).unflatten(-1, (2, self.taps, self.groups))
        out = sublayer(self._convolve(hidden, dynamic[..., 0, :, :], self.base_kernel[0]))
        return self._convolve(out, dynamic[..., 1, :, :], self.base_kernel[1])

    def _convolve(self, hidden: torch.Tensor, dynamic: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
        slots = hidden.unflatten(1, (-1, self.block_size)).unflatten(-1, (self.groups, -1))
        kernels = base.unflatten(-1, (self.groups, -1)) + dynamic.unflatten(1, (-1, self.block_size)).unsqueeze(-1)
        out = slots * kernels[..., 0, :, :]
        for tap in range(1, self.taps):
            before = nn.functional.pad(slots[:, :, :-tap], (0, 0, 0, 0, tap, 0))
            out = out + before * kernels[..., tap, :, :]
        return out.flatten(-2).flatten(1, 2)

    def reset(self) -> None:
        """Reset the weights, so that every slot stays as it is at first."""
        itself = torch.zeros_like(self.base_kernel)
        itself[:, 0] = 1.0
        init.copy_(self.base_kernel, itself)
        init.zeros_(self.kernel_projection.weight)


class HyperDFlashLayer(GradientCheckpointingLayer):
    """A Qwen3-style block: attention with QK-norm, gated MLP, pre-norm residuals.

    The conditioning feature brings what is new to the context, and every layer computes its own keys and values of it.
    What is in the context already is read from `context`. So wrappers that shard or checkpoint a layer see everything
    that it computes.
    """

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__()
        self.self_attn = HyperDFlashAttention(config)
        self.mlp = Qwen3MLP(config)
        self.input_layernorm = DrafterRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = DrafterRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.has_convolutions = config.conv_kernel_size > 0
        if self.has_convolutions:
            self.attention_conv, self.mlp_conv = CausalConvolution(config), CausalConvolution(config)

    def attention_input(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the input of the attention's keys and values."""
        return self.input_layernorm(hidden)

    def keys_values(self, feature: torch.Tensor, rotary: Rotary) -> KeysValues:
        """Return keys and values of the context alone, as [`HyperDFlashAttention.keys_values`]."""
        return self.self_attn.keys_values(feature, rotary)

    def forward(
        self,
        hidden: torch.Tensor,
        feature: torch.Tensor | None,
        rotary: Rotary,
        context: ContextLayer | None,
        attention_mask: AttentionMask | None,
    ) -> torch.Tensor:
        """Run the layer over `[batch, queries, config.hidden_size]`; `rotary` is for the feature's tokens, then the
        block's."""

        def attend(normed: torch.Tensor) -> torch.Tensor:
            return self.self_attn(normed, feature, rotary, context, attention_mask)

        normed = self.attention_input(hidden)
        hidden = hidden + (self.attention_conv(normed, attend) if self.has_convolutions else attend(normed))
        normed = self.post_attention_layernorm(hidden)
        return hidden + (self.mlp_conv(normed, self.mlp) if self.has_convolutions else self.mlp(normed))
