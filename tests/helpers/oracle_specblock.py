"""SpecBlock written once more in naive loops, as the reference its fast code is tested against.

Everything is computed slot by slot on single vectors: no batches, no masks, no caches. What a slot may
see is written as a list of (block, number of its first slots), so visibility can be read off, not decoded.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .oracle_layers import KeysValues, Tensors, layer, norm, silu

NO_LABEL = -100
RANK_CLASSES = 4


@dataclass(frozen=True)
class Shape:
    """The sizes that cannot be read off the tensors; ``slots`` is K, the number of slots of a block."""

    heads: int
    kv_heads: int
    head_dim: int
    layers: int
    slots: int
    eps: float = 1e-6
    rope_theta: float = 10000.0
    rotary: int = 0  # how many channels of a head turn; 0 for all


@dataclass(eq=False, repr=False)  # a repr would spell out every earlier block, over and over
class Block:
    """One block: ``hidden`` [K, H] before the final norm, ``made[layer][slot]``, keys (rotated) and values, and
    ``seen``, the earlier blocks it saw with how many of their first slots. Two blocks are equal only when they are the
    same object."""

    entry: int
    seen: list[tuple[Block, int]]
    hidden: Tensor
    made: list[list[KeysValues]]


def blocks(
    tensors: Tensors, shape: Shape, features: Tensor, embeds: Tensor, ablation: frozenset[str] = frozenset()
) -> list[Block]:
    """The level-0 block of every entry: entry i is made of ``features[i]`` [3 H_t] and ``embeds[i]`` [H], and each of
    its slots sees all slots of the entries before it and its own block up to itself."""
    known: list[Block] = []
    for entry in range(len(features)):
        condition = tensors["input_layer.condition_proj.weight"] @ features[entry]
        seen = [(earlier, shape.slots) for earlier in known]
        known.append(_block(tensors, shape, entry, seen, condition, embeds[entry], ablation))
    return known


def later_block(
    tensors: Tensors,
    shape: Shape,
    known: list[Block],
    entry: int,
    path: list[tuple[Block, int]],
    embed: Tensor,
    ablation: frozenset[str] = frozenset(),
) -> Block:
    """One more block of ``entry``. ``path`` names, from level 0 on, the block of each level and the slot (0-based) the
    next level goes on from; ``embed`` [H] is the embedding of the token chosen at the last of them."""
    seen = [(known[earlier], shape.slots) for earlier in range(entry)]
    seen += [(block, slot + 1) for block, slot in path]
    origin, slot = path[-1]
    if origin.entry != entry or origin.seen != seen[:-1] or not 0 <= slot < shape.slots:
        raise ValueError("the path does not lead to a slot of a block of this entry")
    return _block(tensors, shape, entry, seen, origin.hidden[slot], embed, ablation)


def logits(tensors: Tensors, shape: Shape, hidden: Tensor) -> Tensor:
    """The drafted logits [..., V_d] of final hidden states [..., H] (before the final norm)."""
    if hidden.dim() > 1:
        return torch.stack([logits(tensors, shape, row) for row in hidden])
    return tensors["lm_head.weight"] @ norm(tensors["norm.weight"], hidden, shape.eps)


def rank_logits(tensors: Tensors, shape: Shape, hidden: Tensor) -> Tensor:
    """The rank head's class logits [..., 4] of final hidden states [..., H]. Its inputs are detached: the rank loss
    trains the rank head alone."""
    if hidden.dim() > 1:
        return torch.stack([rank_logits(tensors, shape, row) for row in hidden])
    normed = norm(tensors["norm.weight"], hidden, shape.eps)
    inputs = torch.cat([normed, _rank_features(logits(tensors, shape, hidden))]).detach()
    return tensors["rank_head.2.weight"] @ silu(tensors["rank_head.0.weight"] @ inputs)


def rank_class(logits: Tensor, token: int) -> int:
    """The class of the true token's rank in one slot's logits [V_d]; of equal logits the true token is the best."""
    rank = 1 + sum(1 for other in logits.tolist() if other > logits[token].item())
    for label, last in enumerate((1, 4, 10)):
        if rank <= last:
            return label
    return 3


def rank_loss(class_logits: Tensor, classes: Tensor, budget: float = 10) -> Tensor:
    """The rank head's loss on ``class_logits`` [blocks, K, 4] and true ``classes`` [blocks, K] (-100: no label); zero
    where no slot counts."""
    counting = _counting_slots(class_logits, classes)
    total, weight_sum = class_logits.sum() * 0, 0.0
    for block, slot in counting:
        true = int(classes[block, slot])
        same = [b for b, k in counting if k == slot and int(classes[b, k]) == true]
        class_weight = min(1.0, budget / len(same))
        loss = _soft_cross_entropy(class_logits[block, slot], true)
        predicted = int(class_logits[block, slot].argmax())
        sample_weight = 1 + abs(true - predicted) + max(true - predicted, 0)
        total = total + class_weight * sample_weight * loss
        weight_sum += class_weight
    return total / weight_sum if counting else total


def valid_prefix(predictions: Tensor, labels: Tensor) -> Tensor:
    """Which slots count [blocks, K]: with a label, and all slots before them in the block have predicted theirs."""
    valid = torch.zeros(labels.shape, dtype=torch.bool)
    for block in range(labels.shape[0]):
        for slot in range(labels.shape[1]):
            right_so_far = all(int(predictions[block, k]) == int(labels[block, k]) for k in range(slot))
            valid[block, slot] = right_so_far and int(labels[block, slot]) != NO_LABEL
    return valid


def _block(
    tensors: Tensors,
    shape: Shape,
    entry: int,
    seen: list[tuple[Block, int]],
    condition: Tensor,
    embed: Tensor,
    ablation: frozenset[str],
) -> Block:
    """The block made of one condition and one token, run through all layers."""
    states = [_slot_input(tensors, shape, condition, embed, slot, ablation) for slot in range(shape.slots)]
    made: list[list[KeysValues]] = []
    for number in range(shape.layers):
        if number > 0 and "shift" not in ablation:
            states = _shifted(tensors[f"shift_proj.{number - 1}.weight"], states)
        known, after, of = (
            [kept for block, count in seen for kept in block.made[number][:count]],
            [],
            f"layers.{number}",
        )
        for slot, state in enumerate(states):
            normed = norm(tensors[f"{of}.input_layernorm.weight"], state, shape.eps)
            state, keys, values = layer(tensors, shape, of, state, normed, entry + 1 + slot, known)
            known.append((keys, values))
            after.append(state)
        states = after
        made.append(known[-shape.slots :])
    return Block(entry, seen, torch.stack(states), made)


def _slot_input(
    tensors: Tensors, shape: Shape, condition: Tensor, embed: Tensor, slot: int, ablation: frozenset[str]
) -> Tensor:
    """What a slot starts from; without the broadcast only slot 0 is told the condition and the token."""
    parts = [
        norm(tensors["input_layer.condition_norm.weight"], condition, shape.eps),
        norm(tensors["input_layer.token_norm.weight"], embed, shape.eps),
    ]
    if "broadcast" in ablation and slot > 0:
        parts = [torch.zeros_like(part) for part in parts]
    query = tensors["input_layer.position_queries.weight"][slot]
    parts.append(norm(tensors["input_layer.query_norm.weight"], query, shape.eps))
    return tensors["input_layer.fuse.weight"] @ torch.cat(parts)


def _shifted(weight: Tensor, states: list[Tensor]) -> list[Tensor]:
    """Every slot's state mixed with that of the slot before it; slot 0 has none before it and uses itself twice."""
    return [weight @ torch.cat([state, states[max(slot - 1, 0)]]) for slot, state in enumerate(states)]


def _rank_features(slot_logits: Tensor) -> Tensor:
    """The 15 numbers the rank head is told of one slot's logits: ten log-probabilities normalized over the top 20, the
    gaps of the largest to the 2nd, 3rd and 5th, the first probability, the entropy of the top 20."""
    top = slot_logits.sort(descending=True).values[:20]
    log_probs = top - torch.logsumexp(top, dim=0)
    gaps = torch.stack([top[0] - top[1], top[0] - top[2], top[0] - top[4]])
    entropy = -sum(log_prob.exp() * log_prob for log_prob in log_probs)
    return torch.cat([log_probs[:10], gaps, torch.stack([log_probs[0].exp(), entropy])])


def _counting_slots(class_logits: Tensor, classes: Tensor) -> list[tuple[int, int]]:
    """The (block, slot) pairs of the rank loss: each block up to and with the first slot whose class is not the one
    that the head holds to be most probable."""
    counting = []
    for block, row in enumerate(classes.tolist()):
        for slot, label in enumerate(row):
            if label == NO_LABEL:
                break
            counting.append((block, slot))
            if label != int(class_logits[block, slot].argmax()):
                break
    return counting


def _soft_cross_entropy(slot_logits: Tensor, true: int) -> Tensor:
    """Cross-entropy with targets smoothed by distance, twice as far on the side that takes the rank for better."""
    closeness = [1 / (1 + abs(c - true) + max(true - c, 0)) ** 2 for c in range(RANK_CLASSES)]
    log_probs = slot_logits - torch.logsumexp(slot_logits, dim=0)
    return -sum(share / sum(closeness) * log_probs[c] for c, share in enumerate(closeness))
