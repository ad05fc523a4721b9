"""What blocks of a drafter are made of: their input, attention over an injected context, and that context's cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3MLP,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    eager_attention_forward,
    rotate_half,
)

KeysValues = tuple[torch.Tensor, torch.Tensor]
Rotary = tuple[torch.Tensor, torch.Tensor]  # cosines and sines


def block_inputs(
    tokens: torch.Tensor, positions: torch.Tensor, block_size: int, mask_token_id: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """A drafter's input: each anchor followed by mask tokens, at consecutive positions (section 2.1).

    Args:
        tokens: The anchors' token ids, `[batch, anchors]`.
        positions: Their true positions, `[batch, anchors]`.
        block_size: Slots per block, the anchor's included.
        mask_token_id: Stands at every draft position.

    Returns:
        Token ids and positions, `[batch, anchors * block_size]` each.
    """
    masks = tokens.new_full((*tokens.shape, block_size - 1), mask_token_id)
    steps = torch.arange(block_size, device=positions.device)
    return torch.cat([tokens.unsqueeze(-1), masks], dim=-1).flatten(1), (positions.unsqueeze(-1) + steps).flatten(1)


def attention_mask_for(implementation: str | None, mask: torch.Tensor | None, dtype: torch.dtype) -> Any:
    """A mask as an implementation of transformers' attention interface takes it.

    Args:
        implementation: `config._attn_implementation`.
        mask: Boolean `[batch, 1, queries, keys]`, `True` where a query may look; `None` if each sees all.
        dtype: Of the attention's logits.

    Raises:
        ValueError: If the implementation knows no masks of this kind.
    """
    if mask is None or implementation == "sdpa":
        return mask
    if implementation == "flex_attention":
        batch, _, queries, keys = mask.shape
        seen = mask[:, 0]
        return create_block_mask(
            lambda b, h, q, k: seen[b, q, k],
            batch,
            None,
            queries,
            keys,
            device=str(mask.device),  # type: ignore[arg-type]
        )
    if implementation == "eager":
        return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, torch.finfo(dtype).min)
    raise ValueError(
        f"`attn_implementation` is {implementation!r}, which cannot mask blocks of several anchors: train with 'sdpa' or "
        "'flex_attention'."
    )


def _rotate(x: torch.Tensor, rotary: Rotary) -> torch.Tensor:
    cos, sin = rotary[0].unsqueeze(1), rotary[1].unsqueeze(1)
    return x * cos + rotate_half(x) * sin


class HyperDFlashAttention(nn.Module):
    """Attention of a block over the injected context and, in both directions, over itself.

    It goes through transformers' attention interface: `config._attn_implementation` chooses.
    """

    is_causal = False

    def __init__(self, config: Any) -> None:
        super().__init__()
        width, dim = config.hidden_size, config.head_dim
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.config, self.head_dim, self.scaling = config, dim, dim**-0.5
        self.num_key_value_groups = heads // kv_heads
        self.q_proj = nn.Linear(width, heads * dim, bias=config.attention_bias)
        self.k_proj = nn.Linear(width, kv_heads * dim, bias=config.attention_bias)
        self.v_proj = nn.Linear(width, kv_heads * dim, bias=config.attention_bias)
        self.o_proj = nn.Linear(heads * dim, width, bias=config.attention_bias)
        self.q_norm = Qwen3RMSNorm(dim, eps=config.rms_norm_eps)
        self.k_norm = Qwen3RMSNorm(dim, eps=config.rms_norm_eps)

    def keys_values(self, hidden: torch.Tensor, rotary: Rotary) -> KeysValues:
        """Keys and values `[batch, config.num_key_value_heads, seq, config.head_dim]` of context or block states."""
        keys = self.k_norm(self._heads(self.k_proj(hidden))).transpose(1, 2)
        values = self._heads(self.v_proj(hidden)).transpose(1, 2)
        return _rotate(keys, rotary), values

    def forward(
        self,
        hidden: torch.Tensor,
        feature: torch.Tensor | None,
        rotary: Rotary,
        context: KeysValues,
        attention_mask: Any,
    ) -> torch.Tensor:
        if feature is not None:
            context = self.keys_values(feature, context)
        queries = _rotate(self.q_norm(self._heads(self.q_proj(hidden))).transpose(1, 2), rotary)
        block = self.keys_values(hidden, rotary)
        keys, values = (torch.cat(pair, dim=2) for pair in zip(context, block))
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        out, _ = attend(self, queries, keys, values, attention_mask, scaling=self.scaling, is_causal=False)
        return self.o_proj(out.flatten(2))

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (-1, self.head_dim))


class HyperDFlashRotaryEmbedding(Qwen3RotaryEmbedding):
    """RoPE whose frequencies stay float32 in a drafter of another dtype: rounded to bfloat16, they turn the queries and keys
    of position 1,000 by up to a radian too far."""

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        return super()._apply(lambda tensor: fn(tensor) if tensor.is_meta else tensor.to(fn(tensor).device), recurse)


class HyperDFlashLayer(GradientCheckpointingLayer):
    """A Qwen3-style block: attention with QK-norm, gated MLP, pre-norm residuals.

    The context comes as keys and values (`feature` is `None`) or as the conditioning feature with its RoPE. The second
    is for training: wrappers that shard or checkpoint a layer see everything the layer computes.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.self_attn = HyperDFlashAttention(config)
        self.mlp = Qwen3MLP(config)
        self.input_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(
        self,
        hidden: torch.Tensor,
        feature: torch.Tensor | None,
        rotary: Rotary,
        context: KeysValues,
        attention_mask: Any,
    ) -> torch.Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), feature, rotary, context, attention_mask)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class ContextCache:
    """Keys and values of the accepted tokens, computed once per token and layer.

    Only accepted tokens enter, so nothing is ever taken back. Buffers grow by doubling: adding a token does not copy
    the context.

    Args:
        window: Keep only the last `window` positions visible; `None` for all.
    """

    def __init__(self, window: int | None = None) -> None:
        self.window = window
        self.end = 0  # position after the last token seen, in tokens of the sequence
        self._layers: list[KeysValues] = []
        self._start = self._stop = 0  # the filled part of the buffers

    def append(self, layers: list[KeysValues]) -> None:
        """Add keys and values, `[batch, kv_heads, new, head_dim]` each, of every layer."""
        new = layers[0][0].shape[2]
        if not self._layers or self._stop + new > self._layers[0][0].shape[2]:
            self._grow(layers, new)
        for buffers, states in zip(self._layers, layers):
            for buffer, state in zip(buffers, states):
                buffer[:, :, self._stop : self._stop + new] = state
        self._stop += new
        if self.window is not None:
            self._start = max(self._start, self._stop - self.window)

    def _grow(self, layers: list[KeysValues], new: int) -> None:
        kept = self._stop - self._start
        capacity = 2 * (kept + new) + 64

        def moved(index: int, like: torch.Tensor, part: int) -> torch.Tensor:
            buffer = like.new_empty(*like.shape[:2], capacity, like.shape[3])
            if kept:
                buffer[:, :, :kept] = self._layers[index][part][:, :, self._start : self._stop]
            return buffer

        self._layers = [(moved(i, k, 0), moved(i, v, 1)) for i, (k, v) in enumerate(layers)]
        self._start, self._stop = 0, kept

    @property
    def layers(self) -> list[KeysValues]:
        """Visible keys and values of every layer, views of `[batch, kv_heads, visible, head_dim]`."""
        span = slice(self._start, self._stop)
        return [(keys[:, :, span], values[:, :, span]) for keys, values in self._layers]

    def __len__(self) -> int:
        return self._stop - self._start
