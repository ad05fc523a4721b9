"""One layer of Llama's kind for one vector at a time, in loops over heads and keys: no batches, no masks, no caches.

The oracles of EAGLE-3 and SpecBlock say what a vector sees. Everything is computed in the dtype of the tensors given
(use float64 in comparisons) and stays differentiable.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

Tensors = dict[str, Tensor]
KeysValues = tuple[list[Tensor], list[Tensor]]  # of one vector, one of each per key head


def norm(weight: Tensor, x: Tensor, eps: float) -> Tensor:
    """RMSNorm of one vector."""
    return weight * x / torch.sqrt((x * x).sum() / x.numel() + eps)


def silu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


def rotate(x: Tensor, position: int, theta: float, rotary: int = 0) -> Tensor:
    """RoPE of one head's vector: element i turns together with element i + dim/2, of the first `rotary` elements."""
    half = (rotary or x.numel()) // 2
    angles = position * theta ** (-torch.arange(half, dtype=torch.float64) / half)
    cos, sin, first, second = angles.cos().to(x), angles.sin().to(x), x[:half], x[half : 2 * half]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, x[2 * half :]])


def heads(tensors: Tensors, shape: Any, name: str, x: Tensor, position: int | None) -> list[Tensor]:
    """The vectors of `q_proj`, `k_proj` or `v_proj`, one per head; normed where the weight exists, rotated given a
    position."""
    flat, weight = tensors[f"{name}_proj.weight"] @ x, tensors.get(f"{name}_norm.weight")
    found = []
    for head in flat.reshape(-1, shape.head_dim):
        if weight is not None:
            head = norm(weight, head, shape.eps)
        found.append(head if position is None else rotate(head, position, shape.rope_theta, shape.rotary))
    return found


def attend(query: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """Attention of one head's query over the keys it sees."""
    scale = query.numel() ** -0.5
    weights = torch.softmax(torch.stack([(query * key).sum() * scale for key in keys]), dim=0)
    return sum(weight * value for weight, value in zip(weights, values, strict=True))


def layer(
    tensors: Tensors, shape: Any, of: str, state: Tensor, x: Tensor, position: int, seen: list[KeysValues]
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """What the layer `of` makes of a vector: its new state, keys and values.

    Args:
        tensors: All of a drafter.
        shape: With `heads`, `kv_heads`, `head_dim`, `eps`, `rope_theta` and `rotary`.
        of: The layer's prefix.
        state: What attention and MLP are added to.
        x: What attention reads, normed.
        position: Where the vector stands.
        seen: What it sees beside itself.
    """
    own = {name.removeprefix(f"{of}."): tensor for name, tensor in tensors.items() if name.startswith(f"{of}.")}
    queries, keys = (heads(own, shape, f"self_attn.{name}", x, position) for name in "qk")
    values, attended = heads(own, shape, "self_attn.v", x, None), []
    for number, query in enumerate(queries):
        group = number // (shape.heads // shape.kv_heads)
        every = [*seen, (keys, values)]
        attended.append(attend(query, [known[group] for known, _ in every], [known[group] for _, known in every]))
    state = state + own["self_attn.o_proj.weight"] @ torch.cat(attended)
    normed = norm(own["post_attention_layernorm.weight"], state, shape.eps)
    gated = silu(own["mlp.gate_proj.weight"] @ normed) * (own["mlp.up_proj.weight"] @ normed)
    return state + own["mlp.down_proj.weight"] @ gated, keys, values
