"""An independent oracle of the EAGLE-3 drafter: naive loops over positions, heads and keys, no batches, no masks.

Everything is computed in the dtype of the tensors given (use float64 in comparisons) and stays differentiable.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Vectors = Sequence[Tensor] | Tensor


@dataclass(frozen=True)
class Shape:
    """What the tensors alone do not say: the heads, the constants, and which variant of the drafter it is."""

    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    rope_theta: float
    norm_before_residual: bool = False
    norm_output: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    rotary: int = 0  # how many channels of a head turn; 0 for all
    cap: float = 0.0  # of the logits, c tanh(logits / c); 0 for none


@dataclass(frozen=True)
class Entry:
    """One entry after a layer: RoPE position, `out` (before the final norm), one key and value per key head; `before`
    is what the layer before made of it, for NVIDIA's drafters of several layers."""

    position: int
    out: Tensor
    keys: list[Tensor]
    values: list[Tensor]
    before: Entry | None = None


def _rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of one vector."""
    return weight * x / torch.sqrt((x * x).sum() / x.numel() + eps)


def _rotate(x: Tensor, position: int, theta: float, rotary: int = 0) -> Tensor:
    """RoPE of one head's vector, pair by pair: element i turns together with element i + dim/2, of the first `rotary`
    elements."""
    dim = rotary or x.numel()
    half = dim // 2
    turned = list(x)
    for i in range(half):
        angle = position * theta ** (-2 * i / dim)
        cos, sin = math.cos(angle), math.sin(angle)
        turned[i] = x[i] * cos - x[i + half] * sin
        turned[i + half] = x[i + half] * cos + x[i] * sin
    return torch.stack(turned)


def _heads(
    tensors: dict[str, Tensor], shape: Shape, name: str, a: Tensor, position: int | None, of: str = "midlayer"
) -> list[Tensor]:
    """The q, k or v vectors of one entry, one per head; normed where the weight exists, rotated given a position."""
    flat = tensors[f"{of}.self_attn.{name}_proj.weight"] @ a
    norm = tensors.get(f"{of}.self_attn.{name}_norm.weight")
    heads = []
    for h in range(shape.kv_heads if name in ("k", "v") else shape.heads):
        x = flat[h * shape.head_dim : (h + 1) * shape.head_dim]
        if norm is not None:
            x = _rms(x, norm, shape.eps)
        heads.append(x if position is None else _rotate(x, position, shape.rope_theta, shape.rotary))
    return heads


def _attend(query: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """Attention of one head's query over the keys it sees."""
    scale = query.numel() ** -0.5
    weights = torch.softmax(torch.stack([(query * key).sum() * scale for key in keys]), dim=0)
    result = torch.zeros_like(values[0])
    for weight, value in zip(weights, values, strict=True):
        result = result + weight * value
    return result


def _mlp(tensors: dict[str, Tensor], x: Tensor, of: str = "midlayer") -> Tensor:
    """The gated MLP of one vector."""
    gate = tensors[f"{of}.mlp.gate_proj.weight"] @ x
    up = tensors[f"{of}.mlp.up_proj.weight"] @ x
    return tensors[f"{of}.mlp.down_proj.weight"] @ (gate * torch.sigmoid(gate) * up)


def _layer(tensors: dict[str, Tensor], shape: Shape, g: Tensor, e: Tensor, seen: list[Entry], position: int) -> Entry:
    """The layer for one entry of hidden g and embedding e that sees the entries `seen` and itself."""
    normed = _rms(g, tensors["midlayer.hidden_norm.weight"], shape.eps)
    a = torch.cat([_rms(e, tensors["midlayer.input_layernorm.weight"], shape.eps), normed])
    residual = normed if shape.norm_before_residual else g
    depth = 1 + max([int(name.split(".")[1]) for name in tensors if name.startswith("layers.")], default=0)
    first = [_of_layer(entry, depth - 1) for entry in seen]
    entry = _attended(tensors, shape, residual, a, first, position, "midlayer")
    for layer in range(1, depth):  # as any Llama's
        a = _rms(entry.out, tensors[f"layers.{layer}.input_layernorm.weight"], shape.eps)
        known = [_of_layer(entry, depth - 1 - layer) for entry in seen]
        entry = _attended(tensors, shape, entry.out, a, known, position, f"layers.{layer}", entry)
    return entry


def _of_layer(entry: Entry, back: int) -> Entry:
    """What the layer `back` layers before the last made of an entry."""
    for _ in range(back):
        assert entry.before is not None
        entry = entry.before
    return entry


def _attended(
    tensors: dict[str, Tensor],
    shape: Shape,
    residual: Tensor,
    a: Tensor,
    seen: list[Entry],
    position: int,
    of: str,
    before: Entry | None = None,
) -> Entry:
    """One layer's attention over what it made of `seen` and of `a`, added to `residual`, and its MLP."""
    queries = _heads(tensors, shape, "q", a, position, of)
    keys = _heads(tensors, shape, "k", a, position, of)
    values = _heads(tensors, shape, "v", a, None, of)
    attended = []
    for h, query in enumerate(queries):
        group = h // (shape.heads // shape.kv_heads)
        head_keys = [entry.keys[group] for entry in seen] + [keys[group]]
        head_values = [entry.values[group] for entry in seen] + [values[group]]
        attended.append(_attend(query, head_keys, head_values))
    r = residual + tensors[f"{of}.self_attn.o_proj.weight"] @ torch.cat(attended)
    out = r + _mlp(tensors, _rms(r, tensors[f"{of}.post_attention_layernorm.weight"], shape.eps), of)
    return Entry(position, out, keys, values, before)


def _fuse(tensors: dict[str, Tensor], shape: Shape, feature: Tensor) -> Tensor:
    """The hidden of a text entry from its token's three target states; `fc_norm` wins over `norm_before_fc`."""
    if shape.fc_norm:
        third = feature.numel() // 3
        parts = [feature[j * third : (j + 1) * third] for j in range(3)]
        feature = torch.cat([_rms(part, tensors[f"fc_norm.{j}.weight"], shape.eps) for j, part in enumerate(parts)])
    elif shape.norm_before_fc:
        feature = _rms(feature, tensors["input_norm.weight"], shape.eps)
    return tensors["fc.weight"] @ feature


def entries(tensors: dict[str, Tensor], shape: Shape, features: Vectors, embeds: Vectors) -> list[Entry]:
    """All text entries: entry i of features[i] and embeds[i] (the embedding of token i+1) sees the entries j <= i."""
    known: list[Entry] = []
    for i, (feature, embed) in enumerate(zip(features, embeds, strict=True)):
        known.append(_layer(tensors, shape, _fuse(tensors, shape, feature), embed, list(known), i))
    return known


def further(tensors: dict[str, Tensor], shape: Shape, known: list[Entry], path: list[Entry], embed: Tensor) -> Entry:
    """The entry after the last of `path` (after the last of `known` if it is empty), sees both and itself."""
    before = path[-1] if path else known[-1]
    g = _rms(before.out, tensors["norm.weight"], shape.eps) if shape.norm_output else before.out
    return _layer(tensors, shape, g, embed, known + path, before.position + 1)


def logits(tensors: dict[str, Tensor], shape: Shape, out: Tensor) -> Tensor:
    """The logits over the draft vocabulary of an entry's `out`, which is always the one before the final norm."""
    scores = tensors["lm_head.weight"] @ _rms(out, tensors["norm.weight"], shape.eps)
    return shape.cap * torch.tanh(scores / shape.cap) if shape.cap else scores


def target_logits(tensors: dict[str, Tensor], shape: Shape, out: Tensor, vocab_size: int) -> Tensor:
    """The logits over the target's vocabulary, -inf for the tokens that cannot be drafted."""
    draft = logits(tensors, shape, out)
    spread = [draft.new_tensor(-math.inf)] * vocab_size
    for i, offset in enumerate(tensors["d2t"].tolist()):
        spread[i + offset] = draft[i]
    return torch.stack(spread)


@dataclass(frozen=True)
class _Node:
    """A node of the draft tree: its tokens from the root, cumulative log-probability, and its ancestors' entries."""

    tokens: tuple[int, ...]
    value: float
    path: list[Entry]


def dynamic_tree(
    tensors: dict[str, Tensor],
    shape: Shape,
    known: list[Entry],
    embed_of: Callable[[int], Tensor],
    vocab_size: int,
    depth: int,
    width: int,
    budget: int,
) -> set[tuple[int, ...]]:
    """The dynamic draft tree at temperature 0, as the paths (target token ids) to its kept nodes."""

    def children(node: _Node, path: list[Entry]) -> list[_Node]:
        """The `width` best continuations of a node, given the entries up to its own (-inf adds nothing to softmax)."""
        out = (path[-1] if path else known[-1]).out
        scores = torch.log_softmax(target_logits(tensors, shape, out, vocab_size), dim=0).tolist()
        drafted = [(token, score) for token, score in enumerate(scores) if score > -math.inf]
        best = sorted(drafted, key=lambda pair: -pair[1])[:width]
        return [_Node((*node.tokens, token), node.value + score, path) for token, score in best]

    level = children(_Node((), 0.0, []), [])
    nodes = list(level)
    for _ in range(depth - 1):
        following: list[_Node] = []
        for node in sorted(level, key=lambda node: -node.value)[:width]:
            entry = further(tensors, shape, known, node.path, embed_of(node.tokens[-1]))
            following += children(node, [*node.path, entry])
        level = following
        nodes += level
    return {node.tokens for node in sorted(nodes, key=lambda node: -node.value)[:budget]}


def ttt_losses(
    tensors: dict[str, Tensor],
    shape: Shape,
    features: Vectors,
    embeds: Vectors,
    targets: Vectors,
    tokens_embeds: Vectors,
    steps: int,
    anchors: Sequence[int],
) -> Tensor:
    """Training-time test: [len(anchors), steps] soft cross-entropies of paths that go on with the text's tokens."""
    known = entries(tensors, shape, features, embeds)
    rows = []
    for a in anchors:
        path: list[Entry] = []
        row = []
        for s in range(steps):
            if s > 0:
                path.append(further(tensors, shape, known[: a + 1], path, tokens_embeds[a + 1 + s]))
            log_q = torch.log_softmax(logits(tensors, shape, (path[-1] if path else known[a]).out), dim=0)
            row.append(-(targets[a + 1 + s] * log_q).sum())
        rows.append(torch.stack(row))
    return torch.stack(rows)
