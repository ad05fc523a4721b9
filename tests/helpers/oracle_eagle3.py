"""An independent oracle of the EAGLE-3 drafter: loops over positions, no batches, no masks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .oracle_layers import layer, norm

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


def _layer(tensors: dict[str, Tensor], shape: Shape, g: Tensor, e: Tensor, seen: list[Entry], position: int) -> Entry:
    """The layer for one entry of hidden g and embedding e that sees the entries `seen` and itself."""
    normed = norm(tensors["midlayer.hidden_norm.weight"], g, shape.eps)
    a = torch.cat([norm(tensors["midlayer.input_layernorm.weight"], e, shape.eps), normed])
    depth = 1 + max([int(name.split(".")[1]) for name in tensors if name.startswith("layers.")], default=0)
    entry, state = None, normed if shape.norm_before_residual else g
    for number in range(depth):
        of = f"layers.{number}" if number else "midlayer"
        if entry is not None:  # as any Llama's
            state, a = entry.out, norm(tensors[f"{of}.input_layernorm.weight"], entry.out, shape.eps)
        known = [_of_layer(earlier, depth - 1 - number) for earlier in seen]
        known = [(earlier.keys, earlier.values) for earlier in known]
        entry = Entry(position, *layer(tensors, shape, of, state, a, position, known), entry)
    return entry


def _of_layer(entry: Entry, back: int) -> Entry:
    """What the layer `back` layers before the last made of an entry."""
    for _ in range(back):
        assert entry.before is not None
        entry = entry.before
    return entry


def _fuse(tensors: dict[str, Tensor], shape: Shape, feature: Tensor) -> Tensor:
    """The hidden of a text entry from its token's three target states; `fc_norm` wins over `norm_before_fc`."""
    if shape.fc_norm:
        third = feature.numel() // 3
        parts = [feature[j * third : (j + 1) * third] for j in range(3)]
        feature = torch.cat([norm(tensors[f"fc_norm.{j}.weight"], part, shape.eps) for j, part in enumerate(parts)])
    elif shape.norm_before_fc:
        feature = norm(tensors["input_norm.weight"], feature, shape.eps)
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
    g = norm(tensors["norm.weight"], before.out, shape.eps) if shape.norm_output else before.out
    return _layer(tensors, shape, g, embed, known + path, before.position + 1)


def masked(tensors: dict[str, Tensor], shape: Shape, known: list[Entry], embed: Tensor, count: int) -> list[Entry]:
    """P-EAGLE's `count` entries behind all text entries: each of the learned state and the mask token's embedding."""
    path: list[Entry] = []
    for _ in range(count):
        g = _fuse(tensors, shape, tensors["mask_hidden"].flatten())
        path.append(_layer(tensors, shape, g, embed, known + path, (known + path)[-1].position + 1))
    return path


def logits(tensors: dict[str, Tensor], shape: Shape, out: Tensor) -> Tensor:
    """The logits over the draft vocabulary of an entry's `out`, which is always the one before the final norm."""
    scores = tensors["lm_head.weight"] @ norm(tensors["norm.weight"], out, shape.eps)
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
